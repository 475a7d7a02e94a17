"""Greedy growth of spanning trees by matching: whenever a lane is free, it carries the most urgent useful chunk.

The idea is TACOS' (Won et al., MICRO'24, section 4: match free links with chunks that their destination lacks), on
lanes of the quotient instead of links: one decision serves a whole orbit. Chunks enter each node once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from taccl.synth.symmetric.hops import RepHop, hop
from taccl.synth.symmetric.instance import Instance


@dataclass(frozen=True, slots=True)
class Taste:
    """What a greedy tree prefers."""

    enter_once: bool = True  # a chunk crosses into each node over one link only
    from_root: bool = False  # only the rank that has the chunk at first sends it to other nodes
    order: str = "arrival"  # which rank sends first: "arrival" | "depth" | "late" | "scarce"
    seed: int = 0  # 0: ties by number; else shuffled
    # A lane stays idle where a chunk from another node will be there within this share of its next message's time.
    patience: float = 0.0


def grow(inst: Instance, roots: Sequence[int], taste: Taste) -> list[RepHop] | None:
    """Hops of trees that span all ranks from the root of each representative chunk, in the order of their starts.

    roots: per representative chunk the rank that has it. None when the taste leaves a rank unreached.
    """
    return _Growth(inst, roots, taste).run()


class _Growth:
    def __init__(self, inst: Instance, roots: Sequence[int], taste: Taste) -> None:
        self.inst, self.roots, self.taste = inst, roots, taste
        ranks = inst.ranks
        self.node_of = inst.node_of.tolist()
        self.dst: list[int] = inst.links.dst.tolist()
        self.arrived = [
            [-1] * ranks for _ in roots
        ]  # hop that reaches the rank (scheduled already), -2: root
        self.depth = [[0] * ranks for _ in roots]
        self.entered: list[set[int]] = [{self.node_of[root]} for root in roots]
        # Per lane a heap of (key, chunk, rank, position among the rank's links of this lane, number).
        self.cursors: list[list[tuple[object, int, int, int, int]]] = [[] for _ in inst.lane_holds]
        self.lanes_of: dict[int, list[int]] = {}  # resource -> lanes
        for lane, holds in enumerate(inst.lane_holds):
            for resource, _ in holds:
                self.lanes_of.setdefault(resource, []).append(lane)
        self.free = [0] * (1 + max(self.lanes_of, default=0))  # per resource
        self.hops: list[RepHop] = []
        self.left = [ranks - 1 for _ in roots]
        self.sequence = 0
        self.random = np.random.default_rng(taste.seed) if taste.seed else None
        self.segments: dict[int, dict[int, list[int]]] = {}
        self.coming: dict[
            int, list[int]
        ] = {}  # per resource a heap of the times at which lanes are kept free for it

    def run(self) -> list[RepHop] | None:
        events: list[tuple[int, int, int, int]] = []  # (time, 0 arrival | 1 free, chunk or resource, rank)
        for chunk, root in enumerate(self.roots):
            self.arrived[chunk][root] = -2
            heapq.heappush(events, (0, 0, chunk, root))
        while events and any(self.left):
            now = events[0][0]
            touched: set[int] = set()
            while events and events[0][0] == now:
                _, kind, subject, rank = heapq.heappop(events)
                if kind == 0:
                    touched.update(self._offer(now, subject, rank))
                else:
                    touched.update(self.lanes_of[subject])
            # Dear lanes first: what is slowest decides. Of equal ones that with most to do, or it alone is left.
            urgency = sorted(
                (-self.inst.lane_transit_fs[lane], -self._backlog(lane), lane)
                for lane in touched
                if self.cursors[lane] and self._is_free(lane, now)
            )
            for _, _, lane in urgency:
                self._serve(lane, now, events)
        return None if any(self.left) else self.hops

    def _offer(self, now: int, chunk: int, rank: int) -> list[int]:
        """A chunk has arrived: its rank can send it on every lane that leads somewhere."""
        lanes = []
        for lane, links in self._segments(rank).items():
            remote = self.node_of[rank] != self.node_of[self.dst[links[0]]]
            if remote and self.taste.from_root and rank != self.roots[chunk]:
                continue
            # What is of no use now never will be.
            if not any(self._useful(chunk, rank, self.dst[e]) for e in links):
                continue
            self.sequence += 1
            tie = self.sequence if self.random is None else int(self.random.integers(1 << 30))
            heapq.heappush(
                self.cursors[lane],
                ((self._order(now, chunk, rank, links), tie), chunk, rank, 0, self.sequence),
            )
            lanes.append(lane)
        return lanes

    def _order(self, now: int, chunk: int, rank: int, links: Sequence[int]) -> int:
        if self.taste.order == "depth":
            return self.depth[chunk][rank]
        if self.taste.order == "scarce":
            return self._options(chunk, links)
        return -now if self.taste.order == "late" else now

    def _useful(self, chunk: int, rank: int, target: int) -> bool:
        if self.arrived[chunk][target] != -1:
            return False
        node = self.node_of[target]
        foreign = node != self.node_of[rank]
        return not (foreign and self.taste.enter_once and node in self.entered[chunk])

    def _options(self, chunk: int, links: Sequence[int]) -> int:
        """How many ways lead to the first rank of a list that already have the chunk."""
        target = self.dst[links[0]]
        return sum(
            self.arrived[chunk][self.dst[e]] != -1 for more in self._segments(target).values() for e in more
        )

    def _segments(self, rank: int) -> dict[int, list[int]]:
        """Per lane the links out of a rank, those to its own place in other nodes first, near nodes first."""
        if rank not in self.segments:
            inst = self.inst
            links = inst.out_links[inst.out_first[rank] : inst.out_first[rank + 1]]
            lanes = inst.lane[links]
            cuts = np.flatnonzero(np.diff(lanes)) + 1
            self.segments[rank] = {
                int(inst.lane[part[0]]): part.tolist() for part in np.split(links, cuts) if len(part)
            }
        return self.segments[rank]

    def _is_free(self, lane: int, now: int) -> bool:
        return all(self.free[resource] <= now for resource, _ in self.inst.lane_holds[lane])

    def _backlog(self, lane: int) -> int:
        """How much the first chunk in a lane's queue still has to do there."""
        _, chunk, rank, position, _ = self.cursors[lane][0]
        reached = self.arrived[chunk]
        return sum(reached[self.dst[e]] == -1 for e in self._segments(rank)[lane][position:])

    def _serve(self, lane: int, now: int, events: list[tuple[int, int, int, int]]) -> None:
        inst = self.inst
        queue = self.cursors[lane]
        holds = inst.lane_holds[lane]
        while queue and self._is_free(lane, now) and not self._waits(lane, now):
            key, chunk, rank, position, number = queue[0]
            links = self._segments(rank)[lane]
            reached = self.arrived[chunk]
            while position < len(links):
                target = self.dst[links[position]]
                if self._useful(chunk, rank, target):
                    break
                position += 1
            if position == len(links):
                heapq.heappop(queue)
                continue
            heapq.heapreplace(queue, (key, chunk, rank, position + 1, number))
            reached[target] = len(self.hops)
            self.entered[chunk].add(self.node_of[target])
            self.depth[chunk][target] = self.depth[chunk][rank] + 1
            before = reached[rank]
            self.hops.append(hop(chunk, links[position], (before,) if before >= 0 else ()))
            self.left[chunk] -= 1
            for resource, hold in holds:
                self.free[resource] = now + hold
                heapq.heappush(events, (now + hold, 1, resource, -1))
            arrival = now + inst.lane_transit_fs[lane]
            heapq.heappush(events, (arrival, 0, chunk, target))
            if self.taste.patience and self.node_of[target] != self.node_of[rank]:
                self._announce(arrival, target, events)

    def _announce(self, arrival: int, rank: int, events: list[tuple[int, int, int, int]]) -> None:
        """A chunk from another node will be at a rank: what it can be sent on there may wait for it."""
        for lane, links in self._segments(rank).items():
            if self.node_of[self.dst[links[0]]] == self.node_of[rank]:
                for resource, _ in self.inst.lane_holds[lane]:
                    heapq.heappush(self.coming.setdefault(resource, []), arrival)
                    heapq.heappush(events, (arrival, 1, resource, -1))

    def _waits(self, lane: int, now: int) -> bool:
        """Whether a message that starts now would stand in the way of a chunk that is nearly there."""
        for resource, hold in self.inst.lane_holds[lane]:
            coming = self.coming.get(resource, [])
            while coming and coming[0] <= now:
                heapq.heappop(coming)
            if coming and coming[0] - now < self.taste.patience * hold:
                return True
        return False
