"""A topology in whole numbers, as the bounds need it: durations in ticks, data in chunks.

Two grains. "fluid": data may be split without end, so a message's own duration can be arbitrarily close to
its alpha; a tick is small enough that every alpha, occupancy and time of one chunk is a whole number of
ticks. "whole": messages carry whole chunks and durations are those of `cost.Costs` (a tick is a femtosecond).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from taccl.profiles.topology import Topology
from taccl.synth.cost import FS_PER_US, costs

UNREACHABLE = 1 << 160  # ticks; above every time that can occur
# Many betas written as rates (24.7GB/s) have a common denominator of hundreds of digits. Beyond so many ticks a us,
# the least duration has 2^PRECISION ticks instead, and all are rounded down: times can only become shorter, so what
# bounds them bounds the true ones.
MAX_TICKS_PER_US = 1 << 80
PRECISION = 40


@dataclass(frozen=True, slots=True)
class Network:
    """Links and the resources they hold. Resource ids: link i is i, port p is len(links) + p."""

    ranks: int
    nodes: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, int], ...]  # per link: (source rank, destination rank)
    alpha: tuple[int, ...]  # per link, ticks
    occupancy: tuple[int, ...]  # per link, ticks
    transit: tuple[int, ...]  # per link: ticks of one chunk at the slowest beta of the link and its ports
    beta: tuple[int, ...]  # per resource: ticks for which one chunk holds it
    holds: tuple[tuple[int, ...], ...]  # per link: the resources it holds
    crossing: tuple[tuple[int, ...], ...]  # per resource: the links that hold it
    names: tuple[str, ...]  # per resource
    chunk_bytes: Fraction
    grain: int  # chunks that a message carries at least: 0 fluid, 1 whole
    ticks_per_us: int

    def latency(self, link: int) -> int:
        """The shortest time in which any data crosses the link."""
        return self.alpha[link] + self.grain * self.transit[link]

    def to_fs(self, ticks: Fraction | int) -> int:
        """Ticks as femtoseconds, rounded down."""
        return math.floor(Fraction(ticks) * FS_PER_US / self.ticks_per_us)

    def to_us(self, ticks: Fraction | int) -> float:
        """Ticks as us, for people."""
        return float(Fraction(ticks) / self.ticks_per_us)


def fluid(topology: Topology, chunk_bytes: Fraction) -> Network:
    """The network for bounds that hold whatever the chunking."""
    per_chunk = chunk_bytes / 10**6
    alphas = [link.alpha_us for link in topology.links]
    occupancies = [link.occupancy_us for link in topology.links]
    rates = [link.beta_us_per_mb for link in topology.links] + [p.beta_us_per_mb for p in topology.ports]
    betas = [rate * per_chunk for rate in rates]
    durations = [*alphas, *occupancies, *betas]
    ticks = math.lcm(1, *{f.denominator for f in durations})
    if ticks > MAX_TICKS_PER_US:
        ticks = math.ceil(2**PRECISION / min(d for d in durations if d))
    beta = [int(b * ticks) for b in betas]
    return _network(
        topology, [int(a * ticks) for a in alphas], [int(o * ticks) for o in occupancies], beta,
        [max(beta[i] for i in _resources(topology, link)) for link in range(len(topology.links))],
        chunk_bytes, 0, ticks,
    )  # fmt: skip


def whole(topology: Topology, chunk_bytes: Fraction) -> Network:
    """The network for bounds on algorithms that keep chunks whole; priced exactly as `cost.costs` prices."""
    prices = costs(topology, chunk_bytes)
    beta = [1] * prices.resources  # of ports that no link crosses; never used
    for held in prices.holds:
        for resource, hold in held:
            beta[resource] = hold
    return _network(
        topology, prices.alpha_fs, prices.occupancy_fs, beta, prices.chunk_fs, chunk_bytes, 1, FS_PER_US
    )  # fmt: skip


def together(network: Network, links: Iterable[int]) -> dict[int, list[int]]:
    """Resources and the links that hold them: each link once, at the resource that most of these links hold, the
    slowest of equals. The messages of links that stand together come one after another."""
    users: dict[int, int] = {}
    links = list(links)
    for link in links:
        for resource in network.holds[link]:
            users[resource] = users.get(resource, 0) + 1
    found: dict[int, list[int]] = {}
    for link in links:
        common = max(network.holds[link], key=lambda r: (users[r], network.beta[r], -r))
        found.setdefault(common, []).append(link)
    return found


def distances(network: Network, starts: Iterable[int], backwards: bool = False) -> list[int]:
    """Latency of the quickest path from any of `starts` to each rank (backwards: from each rank to them)."""
    neighbours: list[list[tuple[int, int]]] = [[] for _ in range(network.ranks)]
    for link, (a, b) in enumerate(network.ends):
        if backwards:
            a, b = b, a
        neighbours[a].append((b, network.latency(link)))
    distance = [UNREACHABLE] * network.ranks
    queue = []
    for rank in sorted(set(starts)):
        distance[rank] = 0
        queue.append((0, rank))
    while queue:
        so_far, rank = heapq.heappop(queue)
        if so_far > distance[rank]:
            continue
        for other, latency in neighbours[rank]:
            if so_far + latency < distance[other]:
                distance[other] = so_far + latency
                heapq.heappush(queue, (distance[other], other))
    return distance


def offsets(network: Network, head: Sequence[int], tail: Sequence[int]) -> list[int]:
    """Per resource: the part of any deadline T in which it cannot carry useful data.

    head[u]: earliest time at which rank u can have useful data; tail[v]: time that data at v still needs.
    Useful messages hold the resource one after another. The first starts at head or later; the last, started
    at s, arrives at s + alpha + beta b and then needs tail. So the sum of beta * b over all of them is at
    most T - offset, where first and last are the same link or (offset then counts one occupancy) differ.
    """
    result = []
    for resource, links in enumerate(network.crossing):
        beta = network.beta[resource]
        firsts, lasts, single = [], [], UNREACHABLE
        for link in links:
            start = head[network.ends[link][0]]
            # A whole last chunk travels at the slowest beta, of which this resource sees only its own part.
            rest = network.alpha[link] + network.grain * (network.transit[link] - beta)
            end = rest + tail[network.ends[link][1]]
            single = min(single, start + end)
            firsts.append((start + network.occupancy[link], link))
            lasts.append((end, link))
        pairs = [
            first + last
            for first, a in heapq.nsmallest(2, firsts)
            for last, b in heapq.nsmallest(2, lasts)
            if a != b
        ]
        result.append(min([single, *pairs, UNREACHABLE]))
    return result


def _resources(topology: Topology, link: int) -> tuple[int, ...]:
    return (link, *(len(topology.links) + p for p in topology.links[link].ports))


def _network(
    topology: Topology,
    alpha: Sequence[int],
    occupancy: Sequence[int],
    beta: Sequence[int],
    transit: Sequence[int],
    chunk_bytes: Fraction,
    grain: int,
    ticks_per_us: int,
) -> Network:
    links = topology.links
    holds = tuple(_resources(topology, link) for link in range(len(links)))
    crossing: list[list[int]] = [[] for _ in range(len(links) + len(topology.ports))]
    for link, held in enumerate(holds):
        for resource in held:
            crossing[resource].append(link)
    return Network(
        ranks=topology.ranks,
        nodes=topology.nodes,
        ends=tuple((link.src, link.dst) for link in links),
        alpha=tuple(alpha),
        occupancy=tuple(occupancy),
        transit=tuple(transit),
        beta=tuple(beta),
        holds=holds,
        crossing=tuple(tuple(c) for c in crossing),
        names=(*(f"link {x.src}->{x.dst}" for x in links), *(port.name for port in topology.ports)),
        chunk_bytes=chunk_bytes,
        grain=grain,
        ticks_per_us=ticks_per_us,
    )
