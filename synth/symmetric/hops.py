"""Messages of the quotient: what engines and models on it hand to one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from taccl.synth.message_table import MessageTable
from taccl.synth.symmetric.instance import Instance
from taccl.synth.symmetric.timing import Hop, Timing, list_schedule, longest_rest

# (ranks that name a chunk, representative chunk) -> number of the chunk in the collective
ChunkOf = Callable[[tuple[int, ...], int], int]


@dataclass(frozen=True, slots=True)
class RepHop:
    """Representative chunks over links of one orbit at one time: on every single link, one message.

    loads: (representative chunk, link). needs: earlier hops of the list that bring chunks to their sources.
    """

    loads: tuple[tuple[int, int], ...]
    needs: tuple[int, ...]
    reduces: bool = False

    @property
    def link(self) -> int:
        """The link that stands for the orbit."""
        return self.loads[0][1]


def hop(chunk: int, link: int, needs: tuple[int, ...]) -> RepHop:
    """One chunk over one link."""
    return RepHop(((chunk, link),), needs)


def priced(inst: Instance, hops: Sequence[RepHop]) -> list[Hop]:
    """The hops as the scheduler wants them; a rank's reductions run on the engine of its orbit."""
    result = []
    prices = inst.prices
    costs_time = prices.reduce_alpha_fs + prices.reduce_chunk_fs > 0
    orbit_of = inst.quotient.group.orbit
    for hop in hops:
        lane, count = int(inst.lane[hop.link]), len(hop.loads)
        engine, reduce_fs = -1, 0
        if hop.reduces and costs_time:
            engine = int(orbit_of[inst.links.dst[hop.link]])
            reduce_fs = prices.reduce_alpha_fs + count * prices.reduce_chunk_fs
        result.append(
            Hop(inst.holds(lane, count), inst.transit_fs(lane, count), hop.needs, engine, reduce_fs)
        )
    return result


def turned(hops: Sequence[RepHop]) -> list[RepHop]:
    """Trees that spread as trees that collect: the last hop first, each after those that it once fed."""
    last = len(hops) - 1
    feeders: list[list[int]] = [[] for _ in hops]
    for index, hop in enumerate(hops):
        for before in hop.needs:
            feeders[before].append(last - index)
    return [RepHop(hops[i].loads, tuple(sorted(feeders[i])), reduces=True) for i in range(last, -1, -1)]


def collected_then_spread(
    inst: Instance, roots: Sequence[int], collecting: Sequence[RepHop], spreading: Sequence[RepHop]
) -> list[RepHop]:
    """An allreduce: a chunk is spread from its root once all that flows into the root has been reduced there."""
    into: dict[int, list[int]] = {}  # chunk -> collecting hops that end at its root
    for index, hop in enumerate(collecting):
        for chunk, link in hop.loads:
            if int(inst.links.dst[link]) == roots[chunk]:
                into.setdefault(chunk, []).append(index)
    offset = len(collecting)
    joined = list(collecting)
    for hop in spreading:
        needs = {offset + n for n in hop.needs}
        for chunk, link in hop.loads:
            if int(inst.links.src[link]) == roots[chunk]:
                needs.update(into[chunk])
        joined.append(replace(hop, needs=tuple(sorted(needs))))
    return joined


def quickest(inst: Instance, hops: Sequence[RepHop], in_turns: bool = False) -> Timing:
    """The best of the list scheduler's answers for a few priorities. in_turns: also `fullest_in_turns`."""
    jobs = priced(inst, hops)
    lanes = [int(inst.lane[hop.link]) for hop in hops]
    orders = [list(range(len(hops))), longest_rest(jobs), other_lanes_first(jobs, lanes)]
    if in_turns:
        orders.append(fullest_in_turns(inst, hops, jobs))
    return min((list_schedule(jobs, order) for order in orders), key=lambda timing: timing.time_fs)


def other_lanes_first(hops: Sequence[Hop], lanes: Sequence[int]) -> list[int]:
    """Priorities: first what still has most to do on other lanes, then what has most to do at all.

    What remains at the end is then work of a single lane each, which leaves none idle (the thought behind Johnson's
    rule for two machines); on tori this makes an alltoall as short as its loads allow.
    """
    other, rest = [0] * len(hops), [0] * len(hops)
    chains: list[dict[int, int]] = [{} for _ in hops]  # work behind a hop, by lane; along one longest path
    for index in range(len(hops) - 1, -1, -1):
        hop = hops[index]
        behind = chains[index]
        other[index] = sum(work for lane, work in behind.items() if lane != lanes[index])
        rest[index] = sum(behind.values())
        through = dict(behind)
        through[lanes[index]] = through.get(lanes[index], 0) + hop.transit_fs
        for before in hop.needs:
            if sum(through.values()) > sum(chains[before].values()):
                chains[before] = through
    order = sorted(range(len(hops)), key=lambda i: (-other[i], -rest[i], i))
    priority = [0] * len(hops)
    for place, index in enumerate(order):
        priority[index] = place
    return priority


def fullest_in_turns(inst: Instance, hops: Sequence[RepHop], jobs: Sequence[Hop]) -> list[int]:
    """Priorities: first what needs a full resource on its way, of equal ones what has most to do; then all ranks turn
    to the next node, and the next place in it, together, so that they do not meet at one port."""
    load: dict[int, int] = {}
    for job in jobs:
        for resource, hold in job.holds:
            load[resource] = load.get(resource, 0) + hold
    fullest = [max((load[resource] for resource, _ in job.holds), default=0) for job in jobs]
    for index in range(len(jobs) - 1, -1, -1):
        for before in jobs[index].needs:
            fullest[before] = max(fullest[before], fullest[index])
    place = np.empty(inst.ranks, np.int64)
    for ranks in inst.topology.nodes:
        place[list(ranks)] = np.arange(len(ranks))
    link = np.array([hop.link for hop in hops], np.int64)
    src, dst = inst.links.src[link], inst.links.dst[link]
    node = (inst.node_of[dst] - inst.node_of[src]) % len(inst.topology.nodes)
    aside = (place[dst] - place[src]) % (int(place.max()) + 1)
    rest = longest_rest(jobs)
    order = sorted(range(len(hops)), key=lambda i: (-fullest[i], rest[i], int(node[i]), int(aside[i]), i))
    priority = [0] * len(hops)
    for position, index in enumerate(order):
        priority[index] = position
    return priority


def table(
    inst: Instance,
    hops: Sequence[RepHop],
    timing: Timing,
    roots: Sequence[tuple[int, ...]],
    chunk_of: ChunkOf,
) -> MessageTable:
    """Hops at their times as messages, by (start, link, first chunk).

    roots: per representative chunk the ranks that name it; chunk_of turns (images of these ranks, representative
    chunk) into the number of a chunk of the collective.
    """
    group = inst.quotient.group
    rows = []
    for hop, start in zip(hops, timing.start_fs, strict=True):
        here = group.element[inst.links.src[hop.link]]
        chunks = []
        for chunk, own in hop.loads:
            # The element that takes this load's link to the one that stands for the orbit.
            moved = group.subtract(here, group.element[inst.links.src[own]])
            names = tuple(int(group.image(moved, rank)) for rank in roots[chunk])
            chunks.append(chunk_of(names, chunk))
        chunks.sort()
        rows.append((start, hop.link, chunks, hop.reduces))
    rows.sort(key=lambda row: (row[0], row[1], row[2][0]))
    link = np.array([row[1] for row in rows], np.int64)
    counts = np.array([len(row[2]) for row in rows], np.int64)
    start_fs = np.array([row[0] for row in rows], np.int64)
    transit = np.array(
        [inst.transit_fs(lane, n) for lane, n in zip(inst.lane[link].tolist(), counts.tolist(), strict=True)],
        np.int64,
    )
    first = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    return MessageTable(
        link,
        inst.links.src[link],
        inst.links.dst[link],
        start_fs,
        start_fs + transit,
        np.array([row[3] for row in rows], bool),
        first,
        np.array([c for row in rows for c in row[2]], np.int64),
    )
