"""Non-delay list scheduling of single-chunk hops on resource orbits.

The hops of representative chunks are scheduled as if resource orbits were resources: their images then start at the
same times, on resources that differ because the group moves every port.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hop:
    """One chunk over one link. Resources and engines are orbits."""

    holds: tuple[tuple[int, int], ...]  # (resource, how long it is held in fs)
    transit_fs: int
    needs: tuple[int, ...]  # hops that must be usable at the source before
    engine: int = -1  # reduces there after arrival; -1: a copy
    reduce_fs: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """When hops start, and when the last has been digested."""

    start_fs: tuple[int, ...]
    time_fs: int


def list_schedule(hops: Sequence[Hop], priority: Sequence[int]) -> Timing:
    """Whenever a hop can start, the ready one of smallest (priority, index) does; O(m log m) for m hops.

    Reductions of a rank run one after another in order of arrival. What arrives there at one instant counts as reduced
    when all of it is: in which order that happens is decided by the numbers of links, which symmetry does not keep.
    """
    waiting = [len(hop.needs) for hop in hops]
    followers: list[list[int]] = [[] for _ in hops]
    for index, hop in enumerate(hops):
        for before in hop.needs:
            followers[before].append(index)
    starts = [-1] * len(hops)
    free: dict[int, int] = {}
    engine: dict[int, int] = {}
    queued: dict[int, list[tuple[int, int]]] = {}  # resource -> hops that wait for it, best first
    ready: list[tuple[int, int]] = [(priority[i], i) for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    # Kinds of events at one instant, in this order: arrival, usable, resource free.
    events: list[tuple[int, int, int, int]] = []
    now = last = 0
    while True:
        while ready:
            entry = heapq.heappop(ready)
            hop = hops[entry[1]]
            busy = next((r for r, _ in hop.holds if free.get(r, 0) > now), -1)
            if busy >= 0:
                heapq.heappush(queued.setdefault(busy, []), entry)
                # It may have been the one offered for another resource, which must not stay idle for that.
                _offer([r for r, _ in hop.holds if free.get(r, 0) <= now], queued, ready, hops, free, now)
                continue
            index = entry[1]
            starts[index] = now
            for resource, hold in hop.holds:
                free[resource] = now + hold
                heapq.heappush(events, (now + hold, 2, 0, resource))
            heapq.heappush(events, (now + hop.transit_fs, 0, now, index))
        if not events:
            break
        now = events[0][0]
        freed: list[int] = []
        together: dict[int, list[int]] = {}  # engine -> what arrives there now
        while events and events[0][0] == now:
            _, kind, _, subject = heapq.heappop(events)
            if kind == 2:
                freed.append(subject)
                continue
            if kind == 0:
                at = hops[subject].engine
                if at >= 0:
                    together.setdefault(at, []).append(subject)
                else:
                    last = max(last, now)
                    heapq.heappush(events, (now, 1, 0, subject))
                continue
            for follower in followers[subject]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready, (priority[follower], follower))
        for at, arrived in together.items():
            usable = max(engine.get(at, 0), now) + sum(hops[i].reduce_fs for i in arrived)
            engine[at] = usable
            last = max(last, usable)
            for index in arrived:
                heapq.heappush(events, (usable, 1, 0, index))
        _offer(freed, queued, ready, hops, free, now)
    if -1 in starts:
        raise ValueError("hops wait for one another in a circle")
    return Timing(tuple(starts), last)


def _offer(
    freed: Sequence[int],
    queued: dict[int, list[tuple[int, int]]],
    ready: list[tuple[int, int]],
    hops: Sequence[Hop],
    free: dict[int, int],
    now: int,
) -> None:
    """From the queue of each free resource its best hop that nothing else holds up becomes ready.

    The main loop starts it, or finds a better one first and queues it again. A hop held up elsewhere moves there.
    """
    for resource in freed:
        if free.get(resource, 0) > now:
            continue
        queue = queued.get(resource, [])
        while queue:
            entry = heapq.heappop(queue)
            busy = next((r for r, _ in hops[entry[1]].holds if free.get(r, 0) > now), -1)
            if busy < 0:
                heapq.heappush(ready, entry)
                break
            heapq.heappush(queued.setdefault(busy, []), entry)


def longest_rest(hops: Sequence[Hop]) -> list[int]:
    """Priorities: the hop with the longest path of hops behind it first."""
    rest = [0] * len(hops)
    for index in range(len(hops) - 1, -1, -1):
        hop = hops[index]
        rest[index] += hop.transit_fs + hop.reduce_fs
        for before in hop.needs:
            if before >= index:
                raise ValueError("hops must stand after those they need")
            rest[before] = max(rest[before], rest[index])
    return [-r for r in rest]
