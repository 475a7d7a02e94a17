"""Load-first routing of an alltoall: shortest paths chosen so that the fullest resource is as empty as can be.

Routing by load and scheduling afterwards beats a joint model on machines with several hops (docs/synthesis.md). Paths
have as few links as possible; of those the one whose resources are least loaded so far is taken, far pairs first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from taccl.synth.symmetric.hops import RepHop, hop
from taccl.synth.symmetric.instance import Instance, Ints


@dataclass(frozen=True, slots=True)
class Pair:
    """A representative chunk of an alltoall."""

    src: int
    dst: int


def pairs_of(inst: Instance) -> list[Pair]:
    """One pair of each orbit of (source, destination), by source and destination."""
    return [Pair(s, d) for s in inst.representatives for d in range(inst.ranks) if s != d]


def route(inst: Instance, pairs: Sequence[Pair]) -> list[RepHop] | None:
    """Hops of a path for each pair (chunk i is pair i), each after the one it needs; None if one is not connected."""
    chooser = _Chooser(inst)
    paths: dict[int, list[int]] = {}
    by_source: dict[int, list[int]] = {}
    for number, pair in enumerate(pairs):
        by_source.setdefault(pair.src, []).append(number)
    order = []
    for source, numbers in by_source.items():
        distance = chooser.distances(source)
        if any(distance[pairs[n].dst] < 0 for n in numbers):
            return None
        order += [(-int(distance[pairs[n].dst]), n) for n in numbers]
    for _, number in sorted(order):
        paths[number] = chooser.path(pairs[number])
    for _ in range(2):  # those placed early saw little of the load
        for number in sorted(paths):
            chooser.remove(paths[number])
            paths[number] = chooser.path(pairs[number])
    hops: list[RepHop] = []
    for number in range(len(pairs)):
        for position, link in enumerate(paths[number]):
            hops.append(hop(number, link, (len(hops) - 1,) if position else ()))
    return hops


class _Chooser:
    """Loads so far, and shortest-path layers from the sources."""

    def __init__(self, inst: Instance) -> None:
        self.inst = inst
        resources = 1 + max((r for holds in inst.lane_holds for r, _ in holds), default=0)
        self.load = [0] * resources
        self.holds = inst.lane_holds
        self.lane = inst.lane
        self.layers: dict[int, Ints] = {}
        self.in_order = np.lexsort((inst.links.src, inst.links.dst))
        self.in_first = np.searchsorted(inst.links.dst[self.in_order], np.arange(inst.ranks + 1))
        self.into: dict[tuple[int, int], list[tuple[int, int, int]]] = {}

    def distances(self, source: int) -> Ints:
        """Fewest links from a source to each rank, -1 for none."""
        if source not in self.layers:
            inst = self.inst
            distance = np.full(inst.ranks, -1, np.int64)
            distance[source] = 0
            frontier = np.array([source])
            step = 0
            while len(frontier):
                step += 1
                reached = [
                    inst.links.dst[inst.out_links[inst.out_first[r] : inst.out_first[r + 1]]]
                    for r in frontier.tolist()
                ]
                fresh = np.unique(np.concatenate(reached))
                frontier = fresh[distance[fresh] < 0]
                distance[frontier] = step
            self.layers[source] = distance
        return self.layers[source]

    def path(self, pair: Pair) -> list[int]:
        """The path of least load among those of fewest links; its load is added."""
        level = {pair.dst}
        best_link: dict[int, int] = {}
        # Backwards from the destination: the layers of ranks on shortest paths, then prices forwards.
        layers = [level]
        while pair.src not in level:
            level = {u for v in level for u, _, _ in self._previous(pair.src, v)}
            layers.append(level)
        price = {pair.src: (0, 0)}
        for level in reversed(layers[:-1]):
            following: dict[int, tuple[int, int]] = {}
            for v in sorted(level):
                for u, link, lane in self._previous(pair.src, v):
                    if u not in price:
                        continue
                    worst, total = price[u]
                    for resource, hold in self.holds[lane]:
                        full = self.load[resource] + hold
                        worst, total = max(worst, full), total + full
                    if v not in following or (total, worst) < following[v][::-1]:
                        following[v] = (worst, total)
                        best_link[v] = link
            price = following
        path = [best_link[pair.dst]]
        while int(self.inst.links.src[path[-1]]) != pair.src:
            path.append(best_link[int(self.inst.links.src[path[-1]])])
        path.reverse()
        self._add(path, 1)
        return path

    def remove(self, path: Sequence[int]) -> None:
        """Take back what `path` has added."""
        self._add(path, -1)

    def _add(self, path: Sequence[int], sign: int) -> None:
        for link in path:
            for resource, hold in self.holds[int(self.lane[link])]:
                self.load[resource] += sign * hold

    def _previous(self, source: int, rank: int) -> list[tuple[int, int, int]]:
        """(rank, link, lane) of the last steps of shortest paths from a source to a rank."""
        if (source, rank) not in self.into:
            distance = self.layers[source]
            links = self.in_order[self.in_first[rank] : self.in_first[rank + 1]]
            before = self.inst.links.src[links]
            chosen = links[distance[before] == distance[rank] - 1]
            self.into[source, rank] = [
                (int(self.inst.links.src[e]), int(e), int(self.lane[e])) for e in chosen.tolist()
            ]
        return self.into[source, rank]
