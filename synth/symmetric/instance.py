"""The problem on the quotient: links as lanes of resource orbits, priced, and the chunks that stand for all.

Resource ids: port orbit p is p, link orbit l is (number of port orbits) + l.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.symmetric.prices import Prices
from taccl.synth.symmetric.quotient import Quotient

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """A topology up to symmetry, priced at one chunk size. Lanes are classes of links that hold the same orbits."""

    topology: Topology
    links: LinkTable
    quotient: Quotient
    prices: Prices
    node_of: Ints  # per rank
    lane: Ints  # per link
    lane_holds: tuple[
        tuple[tuple[int, int], ...], ...
    ]  # per lane (resource, hold of a message of one chunk in fs)
    lane_transit_fs: tuple[int, ...]  # of a message of one chunk
    lane_alpha_fs: tuple[int, ...]
    lane_occupancy_fs: tuple[int, ...]
    out_first: Ints  # [ranks + 1]: links out of rank r are out_links[out_first[r]:out_first[r + 1]]
    out_links: Ints  # by source, lane, and distance

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.node_of)

    def transit_fs(self, lane: int, count: int) -> int:
        """From a message's start to its arrival, with `count` chunks."""
        alpha = self.lane_alpha_fs[lane]
        return alpha + count * (self.lane_transit_fs[lane] - alpha)

    def holds(self, lane: int, count: int) -> tuple[tuple[int, int], ...]:
        """(resource, how long a message of `count` chunks holds it in fs)."""
        if count == 1:
            return self.lane_holds[lane]
        occupancy = self.lane_occupancy_fs[lane]
        return tuple((r, occupancy + count * (hold - occupancy)) for r, hold in self.lane_holds[lane])

    @property
    def representatives(self) -> tuple[int, ...]:
        """The first rank of each orbit."""
        return tuple(int(r) for r in self.quotient.group.rank_at[:, 0])


def instance(topology: Topology, links: LinkTable, quotient: Quotient, prices: Prices) -> Instance:
    """Lanes and adjacency for a topology whose symmetry and prices are known; O(links log links)."""
    port_orbits = int(quotient.port_orbit.max(initial=-1)) + 1
    width = links.ports.shape[1]
    held = np.where(links.ports >= 0, quotient.port_orbit[links.ports] if port_orbits else -1, -1)
    # A link of its own rate is a resource of its own; behind a port that is held as long it never decides.
    port_hold = prices.port_hold_fs[links.ports] if port_orbits else np.zeros((len(links), width), np.int64)
    shortest = np.where(links.ports >= 0, port_hold, np.iinfo(np.int64).max).min(
        axis=1, initial=np.iinfo(np.int64).max
    )
    own = np.where(prices.own_hold_fs > shortest, quotient.link_orbit, -1)
    own[~(links.ports >= 0).any(axis=1)] = quotient.link_orbit[~(links.ports >= 0).any(axis=1)]
    columns = [*held.T, own, links.link_class]
    keys, lane = _numbered(columns)
    holds, transits = [], []
    for link in keys.tolist():
        occupancy = int(prices.occupancy_fs[link])
        mine = [
            (int(quotient.port_orbit[p]), occupancy + int(prices.port_hold_fs[p]))
            for p in links.ports[link].tolist()
            if p >= 0
        ]
        if own[link] >= 0:
            mine.append((port_orbits + int(own[link]), occupancy + int(prices.own_hold_fs[link])))
        holds.append(tuple(mine))
        transits.append(int(prices.alpha_fs[link] + prices.chunk_fs[link]))
    ranks = topology.ranks
    node_of, place = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    for node, members in enumerate(topology.nodes):
        node_of[list(members)] = node
        place[list(members)] = np.arange(len(members))
    # From each rank first to its own place in other nodes, the next node first: what all ranks do alike then
    # spreads over all nodes.
    aside = (place[links.dst] - place[links.src]) % max(len(members) for members in topology.nodes)
    ahead = (node_of[links.dst] - node_of[links.src]) % len(topology.nodes)
    order = np.lexsort((links.dst, ahead, aside, lane, links.src))
    out_first = np.searchsorted(links.src[order], np.arange(ranks + 1))
    return Instance(
        topology,
        links,
        quotient,
        prices,
        node_of,
        lane,
        tuple(holds),
        tuple(transits),
        tuple(prices.alpha_fs[keys].tolist()),
        tuple(prices.occupancy_fs[keys].tolist()),
        out_first,
        order,
    )


def _numbered(columns: list[Ints]) -> tuple[Ints, Ints]:
    """(first row of each distinct combination, number of each row's combination)."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, dense = np.unique(column, return_inverse=True)
        _, key = np.unique(key * (int(dense.max(initial=0)) + 1) + dense, return_inverse=True)
    _, first = np.unique(key, return_index=True)
    return first.astype(np.int64), key.astype(np.int64)
