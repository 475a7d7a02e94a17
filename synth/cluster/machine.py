"""A cluster as columns: what each link holds and how long, the links between each two nodes, nodes that are alike.

Resource ids: port p is p, link l as a resource of its own is (number of ports) + l, `none` stands for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.symmetric.prices import Prices

Ints = NDArray[np.int64]

# Entries of the table of links between nodes; 8 bytes each.
MOST_GATES = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """What messages on each link hold, and how long they take. Column 0 of `resource` is always there."""

    resource: Ints  # [links, width]; `none` fills up
    per_chunk_fs: Ints  # [links, width]: hold of a chunk, on top of the occupancy
    occupancy_fs: Ints  # per link
    alpha_fs: Ints
    chunk_fs: Ints
    none: int
    reduce_alpha_fs: int
    reduce_chunk_fs: int

    def holds(self, link: Ints, count: Ints | int = 1) -> Ints:
        """[links, width]: how long a message of so many chunks holds each resource."""
        times: Ints = (
            self.occupancy_fs[link][:, None]
            + np.asarray(count, np.int64).reshape(-1, 1) * self.per_chunk_fs[link]
        )
        return times

    def transit_fs(self, link: Ints, count: Ints | int = 1) -> Ints:
        """From the start of messages to their arrival."""
        times: Ints = self.alpha_fs[link] + count * self.chunk_fs[link]
        return times


def lanes(links: LinkTable, prices: Prices) -> Lanes:
    """The lanes of all links. A link counts by itself where it has no port, or none that it holds as long."""
    ports = len(prices.port_hold_fs)
    number, width = links.ports.shape
    none = ports + number
    there = links.ports >= 0
    port_hold = np.zeros((number, width), np.int64)
    if ports:
        port_hold = np.where(there, prices.port_hold_fs[links.ports], 0)
    # A link is covered by a port of its own that every message on it holds at least as long.
    bare = ~(there & (port_hold >= prices.own_hold_fs[:, None])).any(axis=1)
    resource = np.where(there, links.ports, none)
    if bare.any():
        own = np.where(bare, ports + np.arange(number), none)
        resource = np.concatenate([resource, own[:, None]], axis=1)
        port_hold = np.concatenate([port_hold, np.where(bare, prices.own_hold_fs, 0)[:, None]], axis=1)
    order = np.argsort(resource == none, axis=1, kind="stable")  # what is there comes first
    return Lanes(
        np.take_along_axis(resource, order, axis=1),
        np.take_along_axis(port_hold, order, axis=1),
        prices.occupancy_fs,
        prices.alpha_fs,
        prices.chunk_fs,
        none,
        prices.reduce_alpha_fs,
        prices.reduce_chunk_fs,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Nodes, the links between them and within them."""

    topology: Topology
    links: LinkTable
    lanes: Lanes
    node_of: Ints  # per rank
    place: Ints  # per rank: which of its node
    members: Ints  # [nodes, most ranks of a node] -> rank, -1 fills up
    sizes: Ints  # per node
    gates: Ints  # [nodes, nodes, most]: links from one node to another, -1 fills up
    kind: Ints  # per node: those of one kind have the same links within
    inside: tuple[Ints, ...]  # per node its links within, in an order that is the same for all of a kind

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.sizes)


def cluster(topology: Topology, links: LinkTable, prices: Prices) -> Cluster | None:
    """The cluster of a topology; None where some node has no link to some other, or there is but one."""
    count, ranks = len(topology.nodes), topology.ranks
    most = max(len(members) for members in topology.nodes)
    node_of, place = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    members = np.full((count, most), -1, np.int64)
    for node, here in enumerate(topology.nodes):
        node_of[list(here)], place[list(here)] = node, np.arange(len(here))
        members[node, : len(here)] = here
    a, b = node_of[links.src], node_of[links.dst]
    across = np.flatnonzero(a != b)
    pair = a[across] * count + b[across]
    # From each rank to its own place first, then to the next: what all do alike meets at no port.
    aside = (place[links.dst[across]] - place[links.src[across]]) % most
    across = across[np.lexsort((place[links.src[across]], aside, pair))]
    per_pair = np.bincount(pair, minlength=count * count).reshape(count, count)
    np.fill_diagonal(per_pair, 1)
    wide = int(per_pair.max(initial=0))
    if count < 2 or int(per_pair.min()) == 0 or count * count * wide > MOST_GATES:
        return None
    gates = np.full((count * count, wide), -1, np.int64)
    np.fill_diagonal(per_pair, 0)
    first = np.concatenate([[0], np.cumsum(per_pair.ravel())])
    row = np.repeat(np.arange(count * count), per_pair.ravel())
    gates[row, np.arange(len(across)) - first[row]] = across
    kind, inside = _kinds(topology, links, prices, node_of, place)
    return Cluster(
        topology,
        links,
        lanes(links, prices),
        node_of,
        place,
        members,
        np.array([len(here) for here in topology.nodes], np.int64),
        gates.reshape(count, count, wide),
        kind,
        inside,
    )


def _kinds(
    topology: Topology, links: LinkTable, prices: Prices, node_of: Ints, place: Ints
) -> tuple[Ints, tuple[Ints, ...]]:
    """(the kind of each node, its links in an order that nodes of one kind share)."""
    local = np.flatnonzero(node_of[links.src] == node_of[links.dst])
    home = node_of[links.src[local]]
    local = local[np.lexsort((local, place[links.dst[local]], place[links.src[local]], home))]
    home = node_of[links.src[local]]
    cuts = np.searchsorted(home, np.arange(len(topology.nodes) + 1))
    known: dict[object, int] = {}
    kind, inside = [], []
    for node, here in enumerate(topology.nodes):
        mine = local[cuts[node] : cuts[node + 1]]
        names: dict[int, int] = {}  # ports by their first use
        ports = tuple(names.setdefault(p, len(names)) for p in links.ports[mine].ravel().tolist())
        holds = tuple(prices.port_hold_fs[p] if p >= 0 else -1 for p in names)
        key = (
            len(here),
            place[links.src[mine]].tobytes(),
            place[links.dst[mine]].tobytes(),
            links.link_class[mine].tobytes(),
            ports,
            holds,
        )
        kind.append(known.setdefault(key, len(known)))
        inside.append(mine)
    return np.array(kind, np.int64), tuple(inside)
