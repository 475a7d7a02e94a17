"""Growth by batches, for sizes at which a message costs more for being one than for its bytes.

Under a symmetry, all chunks of an orbit that cross links of one orbit at the same time are, on every single link, one
message. So a message is grown as "link orbit l carries all that is ready for it", and what a rotation-symmetric machine
ends up with is Bruck's or recursive doubling's pattern where that is best, and a mixture on several levels otherwise.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from taccl.synth.symmetric.hops import RepHop
from taccl.synth.symmetric.instance import Instance


@dataclass(frozen=True, slots=True)
class Appetite:
    """How batches are chosen: by fresh^eagerness / duration, dear lanes `patience` chunks at least."""

    eagerness: float = 1.0
    patience: tuple[int, ...] = ()  # per lane class (by transit, dearest first) the least number of loads
    enter_once: bool = False
    noise: float = 0.0
    seed: int = 0


def grow_batches(inst: Instance, roots: Sequence[int], appetite: Appetite) -> tuple[list[RepHop], int] | None:
    """Batches that spread every chunk to all ranks, and when the last has arrived (fs); None if they cannot."""
    return _Growth(inst, roots, appetite).run()


class _Growth:
    def __init__(self, inst: Instance, roots: Sequence[int], appetite: Appetite) -> None:
        self.inst, self.roots, self.appetite = inst, roots, appetite
        self.node_of = inst.node_of.tolist()
        self.orbit_of_link = inst.quotient.link_orbit
        self.random = np.random.default_rng(appetite.seed)
        self.claimed = [
            [-1] * inst.ranks for _ in roots
        ]  # batch that brings it; -2: there from the beginning
        self.entered: list[set[int]] = [{self.node_of[root]} for root in roots]
        self.left = sum(inst.ranks - 1 for _ in roots)
        self.ready: dict[int, list[tuple[int, int]]] = {}  # link orbit -> (chunk, link)
        self.lane_of_orbit: dict[int, int] = {}
        self.free: dict[int, int] = {}
        self.batches: list[RepHop] = []
        self.last = 0
        transits = sorted({inst.lane_transit_fs[lane] for lane in range(len(inst.lane_holds))}, reverse=True)
        rank_of = {transit: place for place, transit in enumerate(transits)}
        patience = appetite.patience
        self.least = [patience[rank_of[t]] if rank_of[t] < len(patience) else 1 for t in inst.lane_transit_fs]

    def run(self) -> tuple[list[RepHop], int] | None:
        events: list[tuple[int, int]] = [(0, -1)]  # (time, batch that arrives; -1: a resource is free)
        for chunk, root in enumerate(self.roots):
            self.claimed[chunk][root] = -2
            self._open(chunk, root)
        impatient = False
        while self.left:
            if not events:
                # All that is ready waits for company that will not come.
                if impatient:
                    return None
                impatient = True
                now = self.last
            else:
                impatient = False
                now = events[0][0]
                while events and events[0][0] == now:
                    _, batch = heapq.heappop(events)
                    if batch >= 0:
                        for chunk, link in self.batches[batch].loads:
                            self._open(chunk, int(self.inst.links.dst[link]))
            while self._start_best(now, events, impatient):
                impatient = False
        return self.batches, self.last

    def _open(self, chunk: int, rank: int) -> None:
        """The rank has the chunk now: it can go out over all its links."""
        inst = self.inst
        for link in inst.out_links[inst.out_first[rank] : inst.out_first[rank + 1]].tolist():
            if self.claimed[chunk][int(inst.links.dst[link])] == -1:
                orbit = int(self.orbit_of_link[link])
                self.ready.setdefault(orbit, []).append((chunk, link))
                self.lane_of_orbit.setdefault(orbit, int(inst.lane[link]))

    def _useful(self, orbit: int) -> list[tuple[int, int]]:
        """What a message over a link orbit would carry now; forgets what is useless for good."""
        dst, src = self.inst.links.dst, self.inst.links.src
        kept, chosen = [], []
        taken: set[tuple[int, int]] = set()
        for chunk, link in self.ready[orbit]:
            target = int(dst[link])
            if self.claimed[chunk][target] != -1:
                continue
            node = self.node_of[target]
            if self.appetite.enter_once and node != self.node_of[int(src[link])]:
                if node in self.entered[chunk]:
                    continue
                if (chunk, node) in taken:
                    kept.append((chunk, link))
                    continue
                taken.add((chunk, node))
            elif (chunk, -1 - target) in taken:
                continue
            taken.add((chunk, -1 - target))
            kept.append((chunk, link))
            chosen.append((chunk, link))
        self.ready[orbit] = kept
        return chosen

    def _start_best(self, now: int, events: list[tuple[int, int]], impatient: bool) -> bool:
        inst = self.inst
        best: tuple[float, int] | None = None
        loads: list[tuple[int, int]] = []
        for orbit in list(self.ready):
            lane = self.lane_of_orbit[orbit]
            if any(self.free.get(resource, 0) > now for resource, _ in inst.lane_holds[lane]):
                continue
            chosen = self._useful(orbit)
            if not chosen:
                if not self.ready[orbit]:
                    del self.ready[orbit]
                continue
            if len(chosen) < self.least[lane] and not impatient:
                continue
            duration = inst.transit_fs(lane, len(chosen))
            score = len(chosen) ** self.appetite.eagerness / duration
            if self.appetite.noise:
                score *= 1 + self.appetite.noise * float(self.random.random())
            if best is None or (score, -orbit) > best:
                best, loads = (score, -orbit), chosen
        if best is None:
            return False
        lane = self.lane_of_orbit[-best[1]]
        number = len(self.batches)
        needs = set()
        for chunk, link in loads:
            target = int(inst.links.dst[link])
            before = self.claimed[chunk][int(inst.links.src[link])]
            if before >= 0:
                needs.add(before)
            self.claimed[chunk][target] = number
            self.entered[chunk].add(self.node_of[target])
        self.left -= len(loads)
        self.batches.append(RepHop(tuple(loads), tuple(sorted(needs))))
        for resource, hold in inst.holds(lane, len(loads)):
            self.free[resource] = now + hold
            heapq.heappush(events, (now + hold, -1))
        end = now + inst.transit_fs(lane, len(loads))
        heapq.heappush(events, (end, number))
        self.last = max(self.last, end)
        return True
