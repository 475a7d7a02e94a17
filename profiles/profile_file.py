"""Profile files (`schema: taccl/profile/v1`): YAML text to `Topology`.

A cluster is written in one of three ways, each of which `links` and `changes` may extend:

- homogeneous: `node` (ranks, links, switches, NICs of one node), `nodes` (how many), `network`;
- link by link: `nodes` (the ranks of each), `ports`, `switches`, `nics`, `links`;
- a regular `shape`: ring, mesh, torus, hypercube, fat tree.

The tables of keys are in `taccl.profiles.schema`; docs/profiles.md shows examples. Findings: P101 keys that
exclude each other or lack another, P102 a rank, P103 a link class, P104 a port, NIC or name, P105 a link,
P106 a size, P107 a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from taccl.profiles.forms import Values, did_you_mean
from taccl.profiles.profile_writer import write_topology
from taccl.profiles.schema import MAX_LINKS, MAX_PORTS, MAX_RANKS, PROFILE
from taccl.profiles.shapes import grid_links, grid_pairs, hypercube_pairs
from taccl.profiles.topology import Link, Measurement, Nic, Port, Switch, Topology
from taccl.profiles.yaml_reader import Node, parse, shorten

__all__ = ["read_topology", "write_topology"]


def read_topology(
    text: str,
    file: str,
    *,
    nodes: int | None = None,
    size: Sequence[int] | None = None,
    name: str | None = None,
) -> Topology:
    """The topology that a profile describes. `file` names it in messages.

    `nodes` (of a homogeneous profile), `size` (of a shape) and `name` replace what the file says: the bundled
    library is read so. Raises InvalidInput with every error of the text at its line and column.
    """
    root = parse(text, file)
    values = PROFILE.read(root)
    if values is None:
        root.findings.raise_if_any()
        raise AssertionError("a profile that cannot be read has an error")
    draft = _Draft(values)
    _build(draft, values, nodes, size)
    root.findings.raise_if_any()
    topology = Topology(
        name=name if name is not None else values["name"],
        nodes=tuple(draft.nodes),
        links=tuple(draft.links),
        ports=tuple(draft.ports),
        switches=tuple(draft.switches),
        nics=tuple(draft.nics),
        reduce_alpha_us=_reduce(values, "alpha"),
        reduce_beta_us_per_mb=_reduce(values, "beta"),
        source=values.get("source", ""),
    )
    topology.check()
    return topology


def _reduce(values: Values, key: str) -> Fraction:
    reduce = values.get("reduce")
    return reduce.get(key, Fraction(0)) if reduce is not None else Fraction(0)


@dataclass(frozen=True, slots=True)
class _Class:
    """A link class, ready to make links of."""

    alpha_us: Fraction
    beta_us_per_mb: Fraction
    occupancy_us: Fraction
    kind: str
    measured: Measurement | None

    def link(self, src: int, dst: int, ports: tuple[int, ...]) -> Link:
        return Link(
            src, dst, self.alpha_us, self.beta_us_per_mb, self.occupancy_us, ports, self.kind, self.measured
        )


@dataclass(slots=True)
class _Draft:
    """The topology while it is being built."""

    values: Values
    nodes: list[tuple[int, ...]] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    ports: list[Port] = field(default_factory=list)
    port_ids: dict[str, int] = field(default_factory=dict)
    switches: list[Switch] = field(default_factory=list)
    nics: list[Nic] = field(default_factory=list)
    classes: dict[str, _Class | None] = field(default_factory=dict)  # None: noted as wrong already

    def add_port(self, name: str, beta: Fraction, kind: str, at: Node) -> int:
        if name in self.port_ids:
            at.error("P104", f"two ports have the name {shorten(name)!r}", "rename one of the two")
            return self.port_ids[name]
        self.port_ids[name] = len(self.ports)
        self.ports.append(Port(name, beta, kind))
        return self.port_ids[name]

    def port(self, name: str, at: Node, prefix: str = "") -> int | None:
        """The id of a port, or None after noting that there is none of this name."""
        found = self.port_ids.get(prefix + name)
        if found is None:
            known = [port.removeprefix(prefix) for port in self.port_ids if port.startswith(prefix)]
            at.error("P104", f"there is no port {shorten(name)!r}", did_you_mean(name, known))
        return found

    def link_class(self, values: Values, key: str = "class") -> _Class | None:
        """The class that `values[key]` names, or None after noting that there is none."""
        name = values.get(key)
        if name is None:
            return None
        if name not in self.classes:
            help = did_you_mean(name, self.classes) or f"known classes: {', '.join(self.classes) or 'none'}"
            values.at(key).error("P103", f"there is no link class {shorten(name)!r}", help)
            self.classes[name] = None
        return self.classes[name]


def _build(draft: _Draft, values: Values, nodes: int | None, size: Sequence[int] | None) -> None:
    _read_classes(draft, values)
    described = [key for key in ("node", "shape") if key in values]
    if len(described) == 2:
        values.at("shape").error("P101", "`node` and `shape` exclude each other", "keep one of the two")
        return
    if described == ["node"]:
        _build_homogeneous(draft, values, nodes)
    elif described == ["shape"]:
        _build_shape(draft, values, size)
    else:
        _build_nodes(draft, values)
    if not draft.nodes:
        return
    _build_listed(draft, values)
    _apply_changes(draft, values)


def _read_classes(draft: _Draft, values: Values) -> None:
    for name, entry in values.get("classes", {}).items():
        draft.classes[name] = _read_class(entry, name)
    for key, _ in values.at("classes").entries if "classes" in values else ():
        draft.classes.setdefault(key.text, None)  # unreadable ones exist all the same


def _read_class(entry: Values, name: str) -> _Class | None:
    if entry.broken:
        return None
    alpha: Fraction = entry["alpha"]
    occupancy: Fraction = entry.get("occupancy", alpha)
    if occupancy > alpha:
        entry.at("occupancy").error("P105", f"the occupancy ({occupancy} us) is above alpha ({alpha} us)")
        return None
    measured: Values | None = entry.get("measured")
    if measured is not None and measured.broken:
        return None
    return _Class(
        alpha, entry["beta"], occupancy, entry.get("kind", name), _measurement(measured) if measured else None
    )


def _measurement(values: Values) -> Measurement:
    return Measurement(
        values["samples"],
        float(values["residual"]),
        float(values.get("alpha_ci", 0)),
        float(values.get("beta_ci", 0)),
    )


# --- sets of ranks ------------------------------------------------------------------------------------


def _ranks(values: Values, key: str, limit: int, whole: str) -> tuple[int, ...] | None:
    """The ranks of a rank set, in the order written; None after noting what is wrong.

    `limit` ranks exist, in `whole` ("the cluster", "a node").
    """
    if key not in values:
        return None
    return _rank_set(values[key], values.at(key), limit, whole)


def _rank_set(value: Any, at: Node, limit: int, whole: str) -> tuple[int, ...] | None:
    if value == "all":
        return tuple(range(limit))
    spans: list[tuple[int, int]] = []
    if isinstance(value, int):
        spans.append((value, value))
    elif isinstance(value, list):
        spans.extend((rank, rank) for rank in value)
    else:
        for part in value.split(","):
            first, _, last = part.strip().partition("-")
            spans.append((int(first), int(last or first)))
    for first, last in spans:
        if max(first, last) >= limit:
            message = f"rank {max(first, last)} does not exist: {whole} has {limit} ranks (0-{limit - 1})"
            at.error("P102", message)
            return None
        if last < first:
            at.error("P102", f"the range {first}-{last} runs backwards", f"write {last}-{first}")
            return None
    ranks = tuple(rank for first, last in spans for rank in range(first, last + 1))
    if len(set(ranks)) != len(ranks):
        at.error("P102", "a rank stands twice in this set")
        return None
    return ranks


# --- homogeneous clusters -----------------------------------------------------------------------------


def _build_homogeneous(draft: _Draft, values: Values, nodes: int | None) -> None:
    node: Values = values["node"]
    for key in ("ports", "switches", "nics"):
        if key in values:
            values.at(key).error("P101", f"`{key}` of a homogeneous cluster stand under `node`")
    written = values.get("nodes", 1)
    if isinstance(written, list):
        values.at("nodes").error(
            "P101", "with `node`, `nodes` says how many such nodes there are", "write nodes: 2"
        )
        return
    if "ranks" not in node or ("nodes" in values.nodes and "nodes" not in values):
        return  # noted already; without sizes nothing else can be judged
    count = nodes if nodes is not None else written
    per_node: int = node["ranks"]
    if count * per_node > MAX_RANKS:
        at = values.at("nodes")
        at.error("P106", f"{count} nodes of {per_node} ranks are more than {MAX_RANKS} ranks")
        return
    draft.nodes = [tuple(range(n * per_node, (n + 1) * per_node)) for n in range(count)]
    switches = [_node_switch(draft, switch, per_node) for switch in node.get("switches", ())]
    nics = [_node_nic(draft, values, nic, per_node) for nic in node.get("nics", ())]
    inner = list(_link_groups(draft, node, per_node, "a node"))
    network = _network(draft, values, per_node, nics)
    links = count * (
        sum(len(group.pairs) for group in inner)
        + sum(len(s.ranks) * (len(s.ranks) - 1) for s in switches if s)
    )
    links += count * (count - 1) * len(network.pairs) if network else 0
    ports = count * (
        len(node.get("ports", ())) + sum(2 * len(s.ranks) for s in switches if s) + 2 * len(nics)
    )
    if links > MAX_LINKS or ports > MAX_PORTS:
        message = (
            f"the cluster has {links} links and {ports} ports, at most {MAX_LINKS} and {MAX_PORTS} are read"
        )
        values.node.error("P106", message)
        return
    if values.node.findings.errors:
        return
    for n in range(count):
        base = n * per_node
        prefix = f"node{n}."
        for name, port in node.get("ports", {}).items():
            draft.add_port(prefix + name, port["beta"], port.get("kind", "port"), node.at("ports"))
        for group in inner:
            ids = _port_ids(draft, group, prefix)
            draft.links.extend(group.link_class.link(base + s, base + d, ids) for s, d in group.pairs)
        for switch in switches:
            if switch is not None:
                _add_switch(draft, switch, prefix, base)
        for nic in nics:
            if nic is not None:
                out, into = (
                    draft.add_port(f"{prefix}{nic.name}.{way}", nic.beta, "nic", nic.at)
                    for way in ("out", "in")
                )
                near = tuple(base + rank for rank in nic.ranks)
                draft.nics.append(Nic(prefix + nic.name, n, near, out, into))
    if network is not None:
        _connect(draft, network, per_node)


@dataclass(frozen=True, slots=True)
class _NodeSwitch:
    name: str
    ranks: tuple[int, ...]
    link_class: _Class
    port_beta: Fraction
    at: Node


def _node_switch(draft: _Draft, values: Values, per_node: int) -> _NodeSwitch | None:
    link_class = draft.link_class(values)
    ranks = _ranks(values, "ranks", per_node, "a node")
    if ranks is None or link_class is None or values.broken:
        return None
    if len(ranks) < 2:
        values.at("ranks").error("P102", "a switch connects at least two ranks")
        return None
    beta = values.get("port", link_class.beta_us_per_mb)
    return _NodeSwitch(values["name"], ranks, link_class, beta, values.node)


def _add_switch(draft: _Draft, switch: _NodeSwitch, prefix: str, base: int) -> None:
    ports = {
        (rank, way): draft.add_port(
            f"{prefix}{switch.name}.rank{base + rank}.{way}", switch.port_beta, "switch", switch.at
        )
        for rank in switch.ranks
        for way in ("out", "in")
    }
    draft.switches.append(Switch(prefix + switch.name, tuple(base + rank for rank in switch.ranks)))
    draft.links.extend(
        switch.link_class.link(base + src, base + dst, (ports[src, "out"], ports[dst, "in"]))
        for src in switch.ranks
        for dst in switch.ranks
        if src != dst
    )


@dataclass(frozen=True, slots=True)
class _NodeNic:
    name: str
    ranks: tuple[int, ...]
    beta: Fraction
    at: Node


def _node_nic(draft: _Draft, values: Values, nic: Values, per_node: int) -> _NodeNic | None:
    ranks = _ranks(nic, "ranks", per_node, "a node")
    network: Values | None = values.get("network")
    network_class = draft.link_class(network) if network is not None else None
    beta = nic.get("beta", network_class.beta_us_per_mb if network_class else None)
    if beta is None and not nic.broken and network is None:
        nic.node.error("P101", "the NIC needs a `beta`, for there is no `network` to take it from")
    if ranks is None or beta is None or nic.broken:
        return None
    return _NodeNic(nic["name"], ranks, beta, nic.node)


@dataclass(frozen=True, slots=True)
class _Network:
    link_class: _Class
    pairs: tuple[tuple[int, int], ...]  # ranks within their nodes


def _network(
    draft: _Draft, values: Values, per_node: int, nics: Sequence[_NodeNic | None]
) -> _Network | None:
    network: Values | None = values.get("network")
    if network is None:
        return None
    link_class = draft.link_class(network)
    near = {rank for nic in nics if nic is not None for rank in nic.ranks}
    ends = sorted(near) if nics else list(range(per_node))
    pairs = [(s, d) for s in ends for d in ends if network.get("pairs", "all") == "all" or s == d]
    return _Network(link_class, tuple(pairs)) if link_class is not None else None


def _connect(draft: _Draft, network: _Network, per_node: int) -> None:
    """Links between nodes: each crosses the sender's near NIC out and the receiver's near NIC in.

    A rank near several NICs is linked once through each: its first to the receiver's first, and so on.
    """
    near: dict[int, list[Nic]] = {}
    for nic in draft.nics:
        for rank in nic.ranks:
            near.setdefault(rank, []).append(nic)
    for a in range(len(draft.nodes)):
        for b in range(len(draft.nodes)):
            if a == b:
                continue
            for s, d in network.pairs:
                src, dst = a * per_node + s, b * per_node + d
                if not draft.nics:
                    draft.links.append(network.link_class.link(src, dst, ()))
                for out, into in zip(near.get(src, ()), near.get(dst, ()), strict=False):
                    draft.links.append(network.link_class.link(src, dst, (out.out_port, into.in_port)))


# --- shapes -------------------------------------------------------------------------------------------


def _build_shape(draft: _Draft, values: Values, size: Sequence[int] | None) -> None:
    shape: Values = values["shape"]
    for key in ("nodes", "network", "ports", "switches", "nics"):
        if key in values:
            values.at(key).error("P101", f"`{key}` and `shape` exclude each other", "keep one of the two")
    link_class = draft.link_class(shape)
    if "kind" not in shape or "size" not in shape:
        return
    kind: str = shape["kind"]
    extents: Sequence[int] = size if size is not None else shape["size"]
    wanted = {"ring": 1, "hypercube": 1, "fat-tree": 2}.get(kind, len(extents))
    at = shape.at("size")
    if len(extents) != wanted:
        at.error("P106", f"a {kind} has a size of {wanted} number{'s' * (wanted > 1)}, found {len(extents)}")
        return
    ranks = 1
    for extent in extents:
        ranks *= extent
    if kind == "hypercube":
        ranks = 2 ** min(extents[0], 64)
    if not 2 <= ranks <= MAX_RANKS:
        at.error("P106", f"the {kind} has {ranks} ranks, from 2 to {MAX_RANKS} are read")
        return
    across = draft.link_class(shape, "across") if "across" in shape else link_class
    if kind != "fat-tree":
        for key in ("across", "oversubscription"):
            if key in shape:
                shape.at(key).error("P101", f"`{key}` belongs to a fat-tree, not to a {kind}")
    if link_class is None or across is None:
        draft.nodes = [tuple(range(ranks))]
        return
    if kind == "fat-tree":
        _build_fat_tree(draft, extents[0], extents[1], link_class, across, shape)
        return
    if kind == "hypercube":
        pairs = hypercube_pairs(extents[0])
    else:
        assert grid_links(extents, kind != "mesh") <= MAX_LINKS, "a grid of MAX_RANKS has fewer links"
        pairs = grid_pairs(extents, wrap=kind != "mesh")
    draft.nodes = [tuple(range(ranks))]
    draft.links.extend(link_class.link(src, dst, ()) for src, dst in pairs)


def _build_fat_tree(
    draft: _Draft, leaves: int, per_leaf: int, link_class: _Class, across: _Class, shape: Values
) -> None:
    """Two levels: each rank has a port each way to its leaf, each leaf an uplink each way to the spine.

    The ranks under a leaf are one node, the uplink is its NIC.
    """
    ranks = leaves * per_leaf
    if ranks * (ranks - 1) > MAX_LINKS:
        shape.at("size").error(
            "P106", f"{ranks * (ranks - 1)} links are more than the {MAX_LINKS} that are read"
        )
        return
    ratio: Fraction = shape.get("oversubscription", Fraction(1))
    at = shape.node
    draft.nodes = [tuple(range(leaf * per_leaf, (leaf + 1) * per_leaf)) for leaf in range(leaves)]
    beta = link_class.beta_us_per_mb
    ends = [
        (
            draft.add_port(f"rank{rank}.out", beta, "nic", at),
            draft.add_port(f"rank{rank}.in", beta, "nic", at),
        )
        for rank in range(ranks)
    ]
    for leaf, members in enumerate(draft.nodes):
        draft.switches.append(Switch(f"leaf{leaf}", members))
        uplink = beta * ratio / per_leaf
        out, into = (draft.add_port(f"leaf{leaf}.{way}", uplink, "switch", at) for way in ("up", "down"))
        if leaves > 1:
            draft.nics.append(Nic(f"leaf{leaf}", leaf, members, out, into))
    for src in range(ranks):
        for dst in range(ranks):
            a, b = src // per_leaf, dst // per_leaf
            ports = (ends[src][0], ends[dst][1])
            if src == dst:
                continue
            if a == b:
                draft.links.append(link_class.link(src, dst, ports))
            else:
                up, down = draft.port_ids[f"leaf{a}.up"], draft.port_ids[f"leaf{b}.down"]
                draft.links.append(across.link(src, dst, (ports[0], up, down, ports[1])))


# --- link by link -------------------------------------------------------------------------------------


def _build_nodes(draft: _Draft, values: Values) -> None:
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
        ranks = _rank_set(value, node, MAX_RANKS, "a profile")
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


def _build_listed(draft: _Draft, values: Values) -> None:
    """The ports, switches, NICs and links of the whole cluster, which stand at the top level."""
    limit = sum(len(node) for node in draft.nodes)
    if "node" not in values and "shape" not in values:
        for name, port in values.get("ports", {}).items():
            if not port.broken:
                draft.add_port(name, port["beta"], port.get("kind", "port"), values.at("ports"))
            else:
                draft.port_ids.setdefault(name, 0)  # it exists, though its rate is wrong
        _listed_switches(draft, values, limit)
    groups = list(_link_groups(draft, values, limit, "the cluster"))
    total = len(draft.links) + sum(len(group.pairs) for group in groups)
    if total > MAX_LINKS:
        values.at("links").error("P106", f"{total} links are more than the {MAX_LINKS} that are read")
        return
    for group in groups:
        ids = _port_ids(draft, group, "")
        draft.links.extend(group.link_class.link(src, dst, ids) for src, dst in group.pairs)


def _listed_switches(draft: _Draft, values: Values, limit: int) -> None:
    for switch in values.get("switches", ()):
        ranks = _ranks(switch, "ranks", limit, "the cluster")
        if ranks is not None and not switch.broken:
            draft.switches.append(Switch(switch["name"], ranks))
    for nic in values.get("nics", ()):
        if nic.broken:
            continue
        ranks = _ranks(nic, "ranks", limit, "the cluster") if nic["ranks"] != [] else ()
        ids = [draft.port(nic[key], nic.at(key)) for key in ("out", "in")]
        if nic["node"] >= len(draft.nodes):
            nic.at("node").error("P102", f"node {nic['node']} does not exist (there are {len(draft.nodes)})")
        elif ranks is not None and ids[0] is not None and ids[1] is not None:
            draft.nics.append(Nic(nic["name"], nic["node"], ranks, ids[0], ids[1]))


@dataclass(frozen=True, slots=True)
class _LinkGroup:
    """Links of one class that cross the same ports, in the order written."""

    link_class: _Class
    pairs: Sequence[tuple[int, int]]
    values: Values


def _link_groups(draft: _Draft, values: Values, limit: int, whole: str) -> Iterator[_LinkGroup]:
    for entry in values.get("links", ()):
        link_class = draft.link_class(entry)
        pairs = _row_pair(entry, limit, whole) if "src" in entry.nodes else _group_pairs(entry, limit, whole)
        if link_class is not None and pairs is not None and not entry.broken:
            yield _LinkGroup(link_class, pairs, entry)


def _port_ids(draft: _Draft, group: _LinkGroup, prefix: str) -> tuple[int, ...]:
    names: list[str] = group.values.get("ports", [])
    if not names:
        return ()
    ids = [
        draft.port(name, at, prefix) for name, at in zip(names, group.values.at("ports").items, strict=True)
    ]
    if len(set(names)) != len(names):
        group.values.at("ports").error("P104", "a port stands twice")
    return tuple(port for port in ids if port is not None)


def _row_pair(entry: Values, limit: int, whole: str) -> list[tuple[int, int]] | None:
    if entry.broken:
        return None
    pair = (entry["src"], entry["dst"])
    return [pair] if _pair_ok(pair, (entry.at("src"), entry.at("dst")), limit, whole) else None


def _pair_ok(pair: tuple[int, int], at: tuple[Node, Node], limit: int, whole: str) -> bool:
    for rank, node in zip(pair, at, strict=True):
        if rank >= limit:
            message = f"rank {rank} does not exist: {whole} has {limit} ranks (0-{limit - 1})"
            node.error("P102", message)
            return False
    if pair[0] == pair[1]:
        at[1].error("P105", f"a link must join two different ranks, found {pair[0]} twice")
        return False
    return True


def _group_pairs(entry: Values, limit: int, whole: str) -> list[tuple[int, int]] | None:
    given = [key for key in ("pairs", "from", "to") if key in entry.nodes]
    if given not in (["pairs"], ["from", "to"]):
        entry.node.error("P101", "links are given by `pairs`, or by `from` and `to`")
        return None
    if entry.broken:
        return None
    if given == ["pairs"]:
        pairs = [(pair[0], pair[1]) for pair in entry["pairs"]]
        nodes = entry.at("pairs").items
        checks = [
            _pair_ok(pair, (node.items[0], node.items[1]), limit, whole)
            for pair, node in zip(pairs, nodes, strict=True)
        ]
        if not all(checks):
            return None
    else:
        froms, tos = _ranks(entry, "from", limit, whole), _ranks(entry, "to", limit, whole)
        if froms is None or tos is None:
            return None
        if len(froms) * len(tos) > MAX_LINKS:
            entry.node.error(
                "P106", f"{len(froms) * len(tos)} links are more than the {MAX_LINKS} that are read"
            )
            return None
        pairs = [(src, dst) for src in froms for dst in tos if src != dst]
        if not pairs:
            entry.node.error("P105", "a link must join two different ranks")
            return None
    if entry.get("both_ways", False):
        there = set(pairs)
        pairs += [(dst, src) for src, dst in pairs if (dst, src) not in there]
    return pairs


# --- changes ------------------------------------------------------------------------------------------


def _apply_changes(draft: _Draft, values: Values) -> None:
    for change in values.get("changes", ()):
        subject = [key for key in ("from", "to", "nic", "port") if key in change.nodes]
        if subject not in (["from", "to"], ["nic"], ["port"]):
            change.node.error("P107", "a change is of links (`from` and `to`), of a `nic` or of a `port`")
        elif not change.broken and subject == ["from", "to"]:
            _change_links(draft, change)
        elif not change.broken:
            _change_ports(draft, change, subject[0])


def _change_ports(draft: _Draft, change: Values, subject: str) -> None:
    extra = sorted(set(change.fields) - {subject, "beta"})
    if extra or "beta" not in change:
        change.node.error("P107", f"a change of a {subject} sets its `beta`" + (" alone" if extra else ""))
        return
    name: str = change[subject]
    if subject == "nic":
        nics = {nic.name: nic for nic in draft.nics}
        if name not in nics:
            help = did_you_mean(name, nics) or f"NICs: {', '.join(list(nics)[:8]) or 'none'}"
            change.at("nic").error("P104", f"there is no NIC {shorten(name)!r}", help)
            return
        ids = [nics[name].out_port, nics[name].in_port]
    else:
        found = draft.port(name, change.at("port"))
        ids = [found] if found is not None else []
    for port in ids:
        if port < len(draft.ports):
            draft.ports[port] = replace(draft.ports[port], beta_us_per_mb=change["beta"])


def _change_links(draft: _Draft, change: Values) -> None:
    limit = sum(len(node) for node in draft.nodes)
    froms, tos = (_ranks(change, key, limit, "the cluster") for key in ("from", "to"))
    link_class = draft.link_class(change)
    if froms is None or tos is None or ("class" in change and link_class is None):
        return
    settings = [key for key in ("class", "alpha", "beta", "occupancy") if key in change]
    remove: bool = change.get("remove", False)
    if remove == bool(settings):
        settable = "`class`, `alpha`, `beta` or `occupancy`"
        change.node.error("P107", f"a change of links removes them (`remove: true`) or sets their {settable}")
        return
    sources, targets = frozenset(froms), frozenset(tos)
    both = change.get("both_ways", False)
    kept: list[Link] = []
    matched = 0
    for link in draft.links:
        hit = (link.src in sources and link.dst in targets) or (
            both and link.dst in sources and link.src in targets
        )
        matched += hit
        if not hit:
            kept.append(link)
        elif not remove:
            changed = _changed(link, change, link_class)
            if changed is None:
                return
            kept.append(changed)
    if not matched and not values_have_errors(change):
        change.node.error("P107", "there is no link between these ranks")
    draft.links = kept


def values_have_errors(values: Values) -> bool:
    """Whether anything in the file is wrong already, so that missing things may only follow from that."""
    return bool(values.node.findings.errors)


def _changed(link: Link, change: Values, link_class: _Class | None) -> Link | None:
    if link_class is not None:
        link = link_class.link(link.src, link.dst, link.ports)
    alpha = change.get("alpha", link.alpha_us)
    whole = link.occupancy_us == link.alpha_us  # occupancy was all of alpha, and stays so
    occupancy = change.get("occupancy", alpha if whole else min(link.occupancy_us, alpha))
    if occupancy > alpha:
        change.node.error("P105", f"the occupancy ({occupancy} us) is above alpha ({alpha} us)")
        return None
    beta = change.get("beta", link.beta_us_per_mb)
    measured = link.measured if (alpha, beta) == (link.alpha_us, link.beta_us_per_mb) else None
    return replace(link, alpha_us=alpha, beta_us_per_mb=beta, occupancy_us=occupancy, measured=measured)
