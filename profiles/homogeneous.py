"""The homogeneous part of a profile: `node`, repeated `nodes` times and joined by `network`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.draft import Draft, rank_set
from taccl.profiles.forms import Values
from taccl.profiles.link_columns import LinkClass, crossing
from taccl.profiles.link_groups import link_groups, port_ids_of
from taccl.profiles.schema import MAX_LINKS, MAX_PORTS, MAX_RANKS
from taccl.profiles.topology import Nic
from taccl.profiles.yaml_reader import Node

_NO_PORTS: NDArray[np.int64] = np.empty(0, np.int64)


def build_homogeneous(draft: Draft, values: Values, nodes: int | None) -> None:
    """Add `nodes` (or as many as are written) copies of `node`, and the links between them.

    Ports, switches and NICs of node 3 are named "node3.<name>"; a switch's ports "node3.<switch>.rank25.out".
    """
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
    ports: dict[str, Values] = node.get("ports", {})
    switches = _readable(draft, [_node_switch(draft, entry, per_node) for entry in node.get("switches", ())])
    nics = _readable(draft, [_node_nic(draft, values, entry, per_node) for entry in node.get("nics", ())])
    inner = list(link_groups(draft, node, per_node, "a node"))
    network = _network(draft, values, per_node, nics)
    links = sum(len(group.pairs) for group in inner) + sum(
        len(s.ranks) * (len(s.ranks) - 1) for s in switches
    )
    links = count * links + (count * (count - 1) * network.links if network else 0)
    port_count = count * (len(ports) + sum(2 * len(switch.ranks) for switch in switches) + 2 * len(nics))
    if links > MAX_LINKS or port_count > MAX_PORTS:
        sizes = f"{links} links and {port_count} ports, at most {MAX_LINKS} and {MAX_PORTS} are read"
        values.node.error("P106", f"the cluster has {sizes}")
        draft.incomplete = True
        return
    draft.links.reserve(links, 2 if switches or nics else 0)
    for n in range(count):
        base = n * per_node
        prefix = f"node{n}."
        for name, port in ports.items():
            draft.add_port_entry(prefix + name, port)
        for group in inner:
            ids = port_ids_of(draft, group, prefix)
            src, dst = base + group.pairs.T
            draft.links.add(group.link_class, src, dst, ids)
        for switch in switches:
            _add_switch(draft, switch, prefix, base)
        for nic in nics:
            _add_nic(draft, nic, n, base)
    if network is not None and count > 1:
        _connect(draft, network, per_node)


_Part = TypeVar("_Part")


def _readable(draft: Draft, parts: list[_Part | None]) -> list[_Part]:
    """Those parts that could be read; the draft remembers when one could not."""
    draft.incomplete |= None in parts
    return [part for part in parts if part is not None]


@dataclass(frozen=True, slots=True)
class _NodeSwitch:
    name: str
    ranks: tuple[int, ...]
    link_class: LinkClass
    port_beta: Fraction
    at: Node


def _node_switch(draft: Draft, values: Values, per_node: int) -> _NodeSwitch | None:
    link_class = draft.link_class(values)
    ranks = rank_set(values, "ranks", per_node, "a node")
    if ranks is None or link_class is None or values.broken:
        return None
    if len(ranks) < 2:
        values.at("ranks").error("P102", "a switch connects at least two ranks")
        return None
    beta = values.get("port", link_class.beta_us_per_mb)
    return _NodeSwitch(values["name"], ranks, link_class, beta, values.node)


def _add_switch(draft: Draft, switch: _NodeSwitch, prefix: str, base: int) -> None:
    ranks = base + np.array(switch.ranks, np.int64)
    names = [f"{prefix}{switch.name}.rank{rank}" for rank in ranks.tolist()]
    ports = [
        [draft.add_port(f"{name}.{way}", switch.port_beta, "switch", switch.at) for way in ("out", "in")]
        for name in names
    ]
    draft.add_switch(prefix + switch.name, tuple(ranks.tolist()), switch.at)
    out, into = np.array(ports, np.int64).T
    for place, src in enumerate(ranks):
        others = ranks != src
        draft.links.add(switch.link_class, src, ranks[others], crossing(out[place], into[others]))


@dataclass(frozen=True, slots=True)
class _NodeNic:
    name: str
    ranks: tuple[int, ...]
    beta: Fraction
    at: Node


def _node_nic(draft: Draft, values: Values, nic: Values, per_node: int) -> _NodeNic | None:
    ranks = rank_set(nic, "ranks", per_node, "a node")
    network: Values | None = values.get("network")
    network_class = draft.link_class(network) if network is not None else None
    beta = nic.get("beta", network_class.beta_us_per_mb if network_class else None)
    if beta is None and not nic.broken and network is None:
        nic.node.error("P101", "the NIC needs a `beta`, for there is no `network` to take it from")
    if ranks is None or beta is None or nic.broken:
        return None
    return _NodeNic(nic["name"], ranks, beta, nic.node)


def _add_nic(draft: Draft, nic: _NodeNic, node: int, base: int) -> None:
    name = f"node{node}.{nic.name}"
    out, into = (draft.add_port(f"{name}.{way}", nic.beta, "nic", nic.at) for way in ("out", "in"))
    draft.add_nic(Nic(name, node, tuple(base + rank for rank in nic.ranks), out, into), nic.at)


@dataclass(frozen=True, slots=True)
class _Network:
    link_class: LinkClass
    near: dict[int, tuple[int, ...]]  # of each rank of a node that is joined its NICs; (-1,): none
    rails: bool  # each rank with its like only, and not with all

    @property
    def links(self) -> int:
        """From one node to another, counted without making them."""
        ranks_with = Counter(len(nics) for nics in self.near.values())
        if self.rails:
            return sum(nics * ranks for nics, ranks in ranks_with.items())
        pairs = product(ranks_with.items(), repeat=2)
        return sum(min(a, b) * many * others for (a, many), (b, others) in pairs)

    def joined(self) -> NDArray[np.int64]:
        """[links, 4]: ranks within their nodes, NICs of these nodes."""
        rows = [
            (src, dst, out, into)
            for src in self.near
            for dst in ([src] if self.rails else self.near)
            for out, into in zip(self.near[src], self.near[dst], strict=False)
        ]
        return np.array(rows, np.int64).reshape(-1, 4)


def _network(draft: Draft, values: Values, per_node: int, nics: Sequence[_NodeNic]) -> _Network | None:
    network: Values | None = values.get("network")
    if network is None:
        draft.incomplete |= "network" in values.nodes
        return None
    link_class = draft.link_class(network)
    if link_class is None:
        draft.incomplete = True
        return None
    near: dict[int, list[int]] = {}
    for number, nic in enumerate(nics):
        for rank in nic.ranks:
            near.setdefault(rank, []).append(number)
    ends = sorted(near) if "nics" in values["node"].nodes else range(per_node)
    ways = {rank: tuple(near.get(rank, (-1,))) for rank in ends}
    return _Network(link_class, ways, network.get("pairs", "all") == "rails")


def _connect(draft: Draft, network: _Network, per_node: int) -> None:
    """Links between nodes: each crosses the sender's near NIC out and the receiver's near NIC in.

    A rank near several NICs is linked once through each: its first to the receiver's first, and so on.
    """
    nodes = len(draft.nodes)
    ports = np.array([(nic.out_port, nic.in_port) for nic in draft.nics], np.int64)
    ports = ports.reshape(nodes, -1, 2)  # [node, NIC, way]
    src, dst, out, into = network.joined().T
    for a in range(nodes):
        others = np.delete(np.arange(nodes), a)
        targets = (others[:, None] * per_node + dst).ravel()
        crossed = _NO_PORTS
        if draft.nics:
            crossed = crossing(ports[a, out, 0], ports[others[:, None], into, 1]).reshape(-1, 2)
        draft.links.add(network.link_class, a * per_node + np.tile(src, len(others)), targets, crossed)
