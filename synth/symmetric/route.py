"""Load-first routing of an alltoall: shortest paths chosen so that the fullest resource is as empty as can be.

Routing by load and scheduling afterwards beats a joint model on machines with several hops (docs/synthesis.md). Paths
at first have as few links as possible; of those the one whose resources are least loaded so far is taken, far pairs
first. Then chunks leave the fullest resource, over detours if need be, as long as that makes it emptier (`relieved`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from taccl.synth.symmetric.hops import RepHop, hop
from taccl.synth.symmetric.instance import Instance, Ints

MOST_MOVES = 4_000
MOST_TRIES = 64  # chunks of one resource for which a detour is looked for
STEEPNESS = 8  # how much dearer full resources are on detours


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
    relieved(chooser, pairs, paths)
    hops: list[RepHop] = []
    for number in range(len(pairs)):
        for position, link in enumerate(paths[number]):
            hops.append(hop(number, link, (len(hops) - 1,) if position else ()))
    return hops


def relieved(chooser: _Chooser, pairs: Sequence[Pair], paths: dict[int, list[int]]) -> None:
    """Move chunks off the fullest resource, as long as one of them has a way on which everything stays emptier.

    Ways may lead over any rank of the two nodes.
    """
    users: dict[int, set[int]] = {}
    for number, path in paths.items():
        for resource in chooser.resources(path):
            users.setdefault(resource, set()).add(number)
    fullest = [(-load, resource) for resource, load in enumerate(chooser.load) if load]
    heapq.heapify(fullest)
    moves = 0
    while fullest:
        load, resource = heapq.heappop(fullest)
        if -load != chooser.load[resource]:
            if chooser.load[resource]:
                heapq.heappush(fullest, (-chooser.load[resource], resource))
            continue
        moves += 1
        if moves > MOST_MOVES:
            return
        for number in heapq.nsmallest(MOST_TRIES, users[resource], key=lambda n: (len(paths[n]), n)):
            old = paths[number]
            chooser.remove(old)
            new = chooser.detour(pairs[number], -load)
            if new is None:
                chooser.add(old)
                continue
            chooser.add(new)
            paths[number] = new
            for r in chooser.resources(old):
                users[r].discard(number)
            for r in chooser.resources(new):
                users.setdefault(r, set()).add(number)
                heapq.heappush(fullest, (-chooser.load[r], r))
            break
        else:
            return
        heapq.heappush(fullest, (-chooser.load[resource], resource))


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
        self.out: dict[int, list[tuple[int, int, int]]] = {}
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
        self.add(path)
        return path

    def detour(self, pair: Pair, limit_fs: int) -> list[int] | None:
        """The path over ranks of the two nodes on which every resource, with the chunk, stays below a limit, and of
        those one of least loads to a high power; None if there is none."""
        inst = self.inst
        near = {int(inst.node_of[pair.src]), int(inst.node_of[pair.dst])}
        price = {pair.src: 0.0}
        came: dict[int, int] = {}
        done: set[int] = set()
        queue = [(0.0, pair.src)]
        while queue:
            paid, rank = heapq.heappop(queue)
            if rank == pair.dst:
                break
            if rank in done:
                continue
            done.add(rank)
            for link, dst, lane in self._out(rank):
                if dst in done or (dst != pair.dst and inst.node_of[dst] not in near):
                    continue
                cost = paid
                for resource, hold in self.holds[lane]:
                    full = self.load[resource] + hold
                    if full >= limit_fs:
                        break
                    cost += hold * (full / limit_fs) ** STEEPNESS + hold * 1e-6
                else:
                    if dst not in price or cost < price[dst]:
                        price[dst] = cost
                        came[dst] = link
                        heapq.heappush(queue, (cost, dst))
        if pair.dst not in came:
            return None
        path = [came[pair.dst]]
        while int(inst.links.src[path[-1]]) != pair.src:
            path.append(came[int(inst.links.src[path[-1]])])
        return path[::-1]

    def resources(self, path: Sequence[int]) -> list[int]:
        """The resources that a path holds."""
        return [resource for link in path for resource, _ in self.holds[int(self.lane[link])]]

    def add(self, path: Sequence[int]) -> None:
        """Add the load of a path."""
        self._add(path, 1)

    def remove(self, path: Sequence[int]) -> None:
        """Take back what `path` has added."""
        self._add(path, -1)

    def _out(self, rank: int) -> list[tuple[int, int, int]]:
        """(link, destination, lane) of the links out of a rank."""
        if rank not in self.out:
            inst = self.inst
            links = inst.out_links[inst.out_first[rank] : inst.out_first[rank + 1]]
            self.out[rank] = list(
                zip(links.tolist(), inst.links.dst[links].tolist(), self.lane[links].tolist(), strict=True)
            )
        return self.out[rank]

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
