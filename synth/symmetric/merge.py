"""Batched list scheduling of single hops: what is ready for a link when it falls free leaves in one message."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from taccl.synth.symmetric.hops import RepHop
from taccl.synth.symmetric.instance import Instance
from taccl.synth.symmetric.timing import Timing


def merged(inst: Instance, hops: Sequence[RepHop], priority: Sequence[int]) -> tuple[list[RepHop], Timing]:
    """(messages, when they start) for copies of one chunk each; hops stand after those they need.

    Whenever a lane is free, the orbit of links with the ready hop of smallest priority sends all that is ready for it
    (alpha is paid once per message). O(m log m) for m hops.
    """
    orbit = inst.quotient.link_orbit
    orbits = [int(orbit[hop.link]) for hop in hops]
    waiting = [len(hop.needs) for hop in hops]
    followers: list[list[int]] = [[] for _ in hops]
    for index, hop in enumerate(hops):
        for before in hop.needs:
            followers[before].append(index)
    lane_of: dict[int, int] = {}
    users: dict[int, list[int]] = {}  # resource -> orbits of links that hold it
    for index, hop in enumerate(hops):
        if orbits[index] not in lane_of:
            lane = lane_of[orbits[index]] = int(inst.lane[hop.link])
            for resource, _ in inst.lane_holds[lane]:
                users.setdefault(resource, []).append(orbits[index])
    ready: dict[int, list[tuple[int, int]]] = {}  # orbit -> (priority, hop)
    free: dict[int, int] = {}
    message_of = [-1] * len(hops)
    made: list[RepHop] = []
    starts: list[int] = []
    events: list[tuple[int, int, int]] = []  # (time, 0 arrival | 1 free, message or resource)
    touched: set[int] = set()

    def make_ready(index: int) -> None:
        ready.setdefault(orbits[index], []).append((priority[index], index))
        touched.add(orbits[index])

    for index, count in enumerate(waiting):
        if not count:
            make_ready(index)
    carried: list[list[int]] = []
    now = last = 0
    while True:
        best = [(min(ready[o]), o) for o in touched if ready.get(o)]
        heapq.heapify(best)
        while best:
            _, o = heapq.heappop(best)
            lane = lane_of[o]
            if any(free.get(resource, 0) > now for resource, _ in inst.lane_holds[lane]):
                continue
            members = [index for _, index in sorted(ready.pop(o))]
            count = len(members)
            for index in members:
                message_of[index] = len(made)
            needs = sorted({message_of[n] for index in members for n in hops[index].needs})
            made.append(RepHop(tuple(load for i in members for load in hops[i].loads), tuple(needs)))
            starts.append(now)
            carried.append(members)
            for resource, hold in inst.holds(lane, count):
                free[resource] = now + hold
                heapq.heappush(events, (now + hold, 1, resource))
            end = now + inst.transit_fs(lane, count)
            last = max(last, end)
            heapq.heappush(events, (end, 0, len(made) - 1))
        if not events:
            break
        now = events[0][0]
        touched.clear()
        while events and events[0][0] == now:
            _, kind, subject = heapq.heappop(events)
            if kind == 1:
                touched.update(users[subject])
                continue
            for index in carried[subject]:
                for follower in followers[index]:
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        make_ready(follower)
    return made, Timing(tuple(starts), last)
