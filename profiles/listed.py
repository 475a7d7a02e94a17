"""The link-by-link part of a profile: the ranks of each node, ports, switches, NICs and links by name."""

from __future__ import annotations

from taccl.profiles.draft import Draft, parse_rank_set, rank_set
from taccl.profiles.forms import Values
from taccl.profiles.link_groups import link_groups, port_ids_of
from taccl.profiles.schema import MAX_LINKS, MAX_LISTED_LINKS, MAX_RANKS
from taccl.profiles.topology import Nic


def build_nodes(draft: Draft, values: Values) -> None:
    """The ranks of each node, written out under `nodes`."""
    if "network" in values:
        values.at("network").error("P101", "`network` connects nodes described by `node`", "add `node`")
    written = values.get("nodes")
    at = values.at("nodes")
    if written is None:
        if "nodes" not in values.nodes:
            help = "write nodes: [0-7, 8-15] (the ranks of each node), or describe one under `node`"
            values.node.error("P101", "the profile says neither `nodes`, `node` nor `shape`", help)
        return
    if isinstance(written, int):
        help = "describe one node under `node`, or write the ranks of each: nodes: [0-7, 8-15]"
        at.error("P101", "a number of nodes needs a `node` to repeat", help)
        return
    nodes: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for value, node in zip(written, at.items, strict=True):
        ranks = parse_rank_set(value, node, MAX_RANKS, "a profile")
        if value == "all":
            node.error("P102", "here the ranks of the node have to be written out", "write 0-7")
        if ranks is None or value == "all":
            return
        for rank in ranks:
            if rank in seen:
                node.error("P102", f"rank {rank} is in two nodes")
                return
        seen.update(ranks)
        nodes.append(ranks)
    if seen != set(range(len(seen))):
        missing = next(rank for rank in range(len(seen)) if rank not in seen)
        at.error("P102", f"the ranks of all nodes must be 0 to n-1, but {missing} is missing")
        return
    draft.nodes = nodes


def build_listed(draft: Draft, values: Values) -> None:
    """The ports, switches, NICs and links of the whole cluster, which stand at the top level."""
    limit = sum(len(node) for node in draft.nodes)
    if "node" not in values and "shape" not in values:
        for name, port in values.get("ports", {}).items():
            draft.add_port_entry(name, port)
        draft.incomplete |= any(key in values.nodes and key not in values for key in ("ports", "nics"))
        _listed_switches(draft, values, limit)
    groups = list(link_groups(draft, values, limit, "the cluster"))
    listed = sum(len(group.pairs) for group in groups)
    total = len(draft.links) + listed
    for count, most in ((listed, MAX_LISTED_LINKS), (total, MAX_LINKS)):
        if count > most:
            values.at("links").error("P106", f"{count} links are more than the {most} that are read")
            return
    draft.links.reserve(total, 0)
    for group in groups:
        src, dst = group.pairs.T
        draft.links.add(group.link_class, src, dst, port_ids_of(draft, group, ""))


def _listed_switches(draft: Draft, values: Values, limit: int) -> None:
    for switch in values.get("switches", ()):
        ranks = rank_set(switch, "ranks", limit, "the cluster")
        if ranks is not None and not switch.broken:
            draft.add_switch(switch["name"], ranks, switch.at("name"))
    for nic in values.get("nics", ()):
        if nic.broken:
            draft.incomplete = True
            continue
        ranks = rank_set(nic, "ranks", limit, "the cluster") if nic["ranks"] != [] else ()
        ids = [draft.port(nic[key], nic.at(key)) for key in ("out", "in")]
        if nic["node"] >= len(draft.nodes):
            nic.at("node").error("P102", f"node {nic['node']} does not exist (there are {len(draft.nodes)})")
        elif ranks is not None and ids[0] is not None and ids[1] is not None:
            draft.add_nic(Nic(nic["name"], nic["node"], ranks, ids[0], ids[1]), nic.at("name"))
