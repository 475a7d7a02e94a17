"""What the baseline engines share: wants, links by pair, load-aware shortest-path trees.

Every baseline but the one-shot allreduces is a rule for spreading: how a chunk gets from its root to its
targets along a tree. Reducing is the same tree turned round, so one rule gives both directions:
reduce-scatter is allgather on the turned links in reverse order, allreduce is one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from taccl.profiles.topology import Topology, reverse
from taccl.synth.collective import Collective
from taccl.synth.cost import ceil_fs
from taccl.synth.problem import roots_of
from taccl.synth.schedule import Transfer


class Inapplicable(ValueError):
    """An engine's pattern does not fit a topology or a collective; the message says why."""


@dataclass(frozen=True, slots=True)
class Want:
    """A chunk to be spread from its root to its targets (collecting: the other way round)."""

    chunk: int
    root: int
    targets: tuple[int, ...]  # ascending, without the root


Spread = Callable[[Topology, Sequence[Want]], list[Transfer]]


def collect_wants(collective: Collective) -> list[Want]:
    """Per chunk of a combining collective: the rank where it is summed up, and who contributes."""
    roots = roots_of(collective)
    return [
        Want(index, roots[index][0], tuple(sorted({r for r, _ in chunk.sources} - {roots[index][0]})))
        for index, chunk in enumerate(collective.chunks)
    ]


def spread_wants(collective: Collective) -> list[Want]:
    """Per chunk: the rank that has it (after collecting, if the collective combines), and who lacks it."""
    wants = []
    roots = roots_of(collective)
    for index, chunk in enumerate(collective.chunks):
        root = roots[index][0]
        have = {root} if collective.combining else {r for r, _ in chunk.sources}
        wants.append(Want(index, root, tuple(sorted({r for r, _ in chunk.destinations} - have))))
    return wants


def both_ways(topology: Topology, collective: Collective, spread: Spread) -> list[Transfer]:
    """Apply a spreading rule to a collective: collect by it turned round, then spread."""
    transfers: list[Transfer] = []
    if collective.combining:
        grown = spread(reverse(topology), _wanted(collect_wants(collective)))
        transfers += [Transfer(t.link, t.chunks, "reduce") for t in reversed(grown)]
    return transfers + spread(topology, _wanted(spread_wants(collective)))


def _wanted(wants: Iterable[Want]) -> list[Want]:
    return [want for want in wants if want.targets]


def beta(topology: Topology, link: int) -> int:
    """Time of one megabyte over a link and its ports, in fs."""
    x = topology.links[link]
    return ceil_fs(max([x.beta_us_per_mb, *(topology.ports[p].beta_us_per_mb for p in x.ports)]))


class Network:
    """Links by (source, destination) with the chunks that an engine has put on each so far.

    Alive only inside one call of an engine; the load spreads chunks over parallel links and equal paths.
    """

    def __init__(self, topology: Topology) -> None:
        self.links = topology.links
        self.load = [0] * len(topology.links)
        self.beta = [beta(topology, link) for link in range(len(topology.links))]
        # Transit of one megabyte ranks paths: engines do not know the size.
        self.weight = [b + ceil_fs(x.alpha_us) for b, x in zip(self.beta, topology.links, strict=True)]
        self.between: dict[tuple[int, int], list[int]] = {}
        self._into: list[list[int]] = [[] for _ in range(topology.ranks)]
        self._out: list[list[int]] = [[] for _ in range(topology.ranks)]
        for index, link in enumerate(topology.links):
            self.between.setdefault((link.src, link.dst), []).append(index)
            self._out[link.src].append(index)
            self._into[link.dst].append(index)
        self._distances: dict[tuple[int, frozenset[int] | None], dict[int, int]] = {}

    def linked(self, src: int, dst: int) -> bool:
        """Whether a link joins two ranks."""
        return (src, dst) in self.between

    def link(self, src: int, dst: int, count: int = 1) -> int:
        """The link from src to dst that is done first with `count` more chunks, which it gets."""
        if (src, dst) not in self.between:
            raise Inapplicable(f"rank {src} has no link to rank {dst}")
        choice = min(self.between[src, dst], key=lambda e: ((self.load[e] + count) * self.beta[e], e))
        self.load[choice] += count
        return choice

    def tree(
        self, root: int, targets: Iterable[int], within: frozenset[int] | None = None, count: int = 1
    ) -> list[int]:
        """Links of a tree of shortest paths from root to the targets, parents first.

        within: the ranks that paths may touch (None: all). count: chunks that will travel; of equally short
        paths the least loaded is taken. Raises Inapplicable when a target cannot be reached.
        """
        distance = self._distance(root, within)
        entered: dict[int, int] = {}
        for target in targets:
            if target not in distance:
                raise Inapplicable(f"no path of links leads from rank {root} to rank {target}")
            v = target
            while v != root and v not in entered:
                tight = [
                    e
                    for e in self._into[v]
                    if distance.get(self.links[e].src, -1) + self.weight[e] == distance[v]
                    and self.links[e].src in distance
                ]
                choice = min(tight, key=lambda e: (self.load[e], e))
                entered[v] = choice
                v = self.links[choice].src
        for e in entered.values():
            self.load[e] += count
        return sorted(entered.values(), key=lambda e: (distance[self.links[e].dst], e))

    def _distance(self, root: int, within: frozenset[int] | None) -> dict[int, int]:
        if (root, within) not in self._distances:
            distance = {root: 0}
            queue = [(0, root)]
            while queue:
                d, u = heapq.heappop(queue)
                if d > distance[u]:
                    continue
                for e in self._out[u]:
                    v = self.links[e].dst
                    # A link of weight 0 does not exist: beta is above 0. Hence parents are strictly nearer.
                    if (within is None or v in within) and d + self.weight[e] < distance.get(v, 1 << 200):
                        distance[v] = d + self.weight[e]
                        heapq.heappush(queue, (distance[v], v))
            self._distances[root, within] = distance
        return self._distances[root, within]
