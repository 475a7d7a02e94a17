"""Hops of representative chunks: what engines and models on the quotient hand to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from taccl.synth.message_table import MessageTable
from taccl.synth.symmetric.instance import Instance
from taccl.synth.symmetric.timing import Hop, Timing, list_schedule, longest_rest


@dataclass(frozen=True, slots=True)
class RepHop:
    """Representative chunk number `chunk` crosses `link` once the hops `needs` have reached its source."""

    chunk: int
    link: int
    needs: tuple[int, ...]  # earlier hops in the list
    reduces: bool = False


def priced(inst: Instance, hops: Sequence[RepHop]) -> list[Hop]:
    """The hops as the scheduler wants them; a rank's reductions run on the engine of its orbit."""
    result = []
    cost = inst.prices.reduce_alpha_fs + inst.prices.reduce_chunk_fs
    orbit_of = inst.quotient.group.orbit
    for hop in hops:
        lane = int(inst.lane[hop.link])
        engine = int(orbit_of[inst.links.dst[hop.link]]) if hop.reduces and cost else -1
        result.append(
            Hop(
                inst.lane_holds[lane],
                inst.lane_transit_fs[lane],
                hop.needs,
                engine,
                cost if hop.reduces else 0,
            )
        )
    return result


def turned(hops: Sequence[RepHop]) -> list[RepHop]:
    """Trees that spread as trees that collect: the last hop first, each after those that it once fed."""
    last = len(hops) - 1
    feeders: list[list[int]] = [[] for _ in hops]
    for index, hop in enumerate(hops):
        for before in hop.needs:
            feeders[before].append(last - index)
    return [
        RepHop(hops[i].chunk, hops[i].link, tuple(sorted(feeders[i])), reduces=True)
        for i in range(last, -1, -1)
    ]


def collected_then_spread(
    inst: Instance, collecting: Sequence[RepHop], spreading: Sequence[RepHop]
) -> list[RepHop]:
    """An allreduce: a chunk is spread from its root once all that flows into the root has been reduced there."""
    into: dict[tuple[int, int], list[int]] = {}
    for index, hop in enumerate(collecting):
        into.setdefault((hop.chunk, int(inst.links.dst[hop.link])), []).append(index)
    offset = len(collecting)
    joined = list(collecting)
    for hop in spreading:
        needs = tuple(offset + n for n in hop.needs)
        if not needs:
            needs = tuple(into[hop.chunk, int(inst.links.src[hop.link])])
        joined.append(replace(hop, needs=needs))
    return joined


def quickest(inst: Instance, hops: Sequence[RepHop]) -> Timing:
    """The best of the list scheduler's answers for a few priorities."""
    jobs = priced(inst, hops)
    lanes = [int(inst.lane[hop.link]) for hop in hops]
    orders = [list(range(len(hops))), longest_rest(jobs), other_lanes_first(jobs, lanes)]
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


def table(inst: Instance, hops: Sequence[RepHop], timing: Timing, chunk_ids: Sequence[int]) -> MessageTable:
    """Hops at their times as messages of the representative chunks, by (start, link, chunk).

    chunk_ids: per representative chunk its number in the collective.
    """
    link = np.array([hop.link for hop in hops], np.int64)
    chunk = np.array([chunk_ids[hop.chunk] for hop in hops], np.int64)
    start = np.array(timing.start_fs, np.int64)
    order = np.lexsort((chunk, link, start))
    link, chunk, start = link[order], chunk[order], start[order]
    transit = np.array(inst.lane_transit_fs, np.int64)[inst.lane[link]]
    reduces = np.array([hop.reduces for hop in hops], bool)[order]
    return MessageTable(
        link,
        inst.links.src[link],
        inst.links.dst[link],
        start,
        start + transit,
        reduces,
        np.arange(len(hops) + 1, dtype=np.int64),
        chunk,
    )
