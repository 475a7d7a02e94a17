"""Schedules for irregular clusters: routes between nodes and within them, composed and timed message by message.

What is known of a machine without symmetry is that it has nodes. Docs: docs/synthesis.md, "Irregular clusters".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from taccl.profiles.link_table import LinkTable, link_table
from taccl.profiles.topology import Topology
from taccl.synth.cluster.bundles import bundled_exchange, bundled_spread
from taccl.synth.cluster.dispatch import Plan, Timed, dispatch, fullest_fs
from taccl.synth.cluster.exchange import Traffic, exchange, routes, traffic
from taccl.synth.cluster.machine import Cluster, Ints, Lanes, cluster, lanes
from taccl.synth.cluster.spread import entries, reversed_plan, spread
from taccl.synth.cluster.timetable import free_plan, timetables
from taccl.synth.cost import LONG_CHUNK
from taccl.synth.message_table import MessageTable
from taccl.synth.symmetric.expand import sorted_by_start
from taccl.synth.symmetric.prices import Prices, prices
from taccl.synth.symmetric.search import Task

COLLECTIVES = ("allgather", "reducescatter", "allreduce", "alltoall", "alltoallv")
# Beyond so many messages they are not sent one by one, unless they must.
MOST_MESSAGES = 1 << 23
RADICES = (2, 3, 4, 6, 8, 12, 16, 32)
MOST_RADICES = 3  # the most promising
# Runs of chunks are as long as so many times a message's fixed cost.
FIXED_SHARE = 8
# A schedule this near to what its fullest link or port carries is not tried in another order.
NEAR = 1.015


@dataclass(frozen=True, slots=True, eq=False)
class Composed:
    """A schedule with all its messages."""

    engine: str
    time_fs: int
    messages: MessageTable


def composes(topology: Topology, collective: str) -> bool:
    """Whether schedules can be composed: there are several nodes, each with links to each, and the collective is one of
    COLLECTIVES."""
    if collective not in COLLECTIVES or len(topology.nodes) < 2:
        return False
    links, nodes = link_table(topology), len(topology.nodes)
    node_of = np.array(topology.node_of(), np.int64)
    joined = np.zeros((nodes, nodes), np.bool_)
    joined[node_of[links.src], node_of[links.dst]] = True
    np.fill_diagonal(joined, True)
    return bool(joined.all())


def compose(task: Task, lower_fs: int, should_stop: Callable[[], bool]) -> Iterator[Composed]:
    """Schedules as they are found, each quicker than those before; none where a node has no link to another."""
    best_fs: int | None = None
    priced = prices(task.topology, task.links, task.chunk_bytes)
    for plan, timed in _tries(task, priced, should_stop):
        if best_fs is None or timed.time_fs < best_fs:
            best_fs = timed.time_fs
            engine = "composed" if len(plan.chunks) == len(plan) else "bundled"
            yield Composed(engine, timed.time_fs, _table(task.links, lanes(task.links, priced), plan, timed))
        if best_fs <= lower_fs or should_stop():
            return


def _tries(task: Task, priced: Prices, should_stop: Callable[[], bool]) -> _Tries:
    machine = cluster(task.topology, task.links, priced)
    if machine is None:
        return
    back = machine
    if task.collective in ("reducescatter", "allreduce"):
        turned = replace(task.links, src=task.links.dst, dst=task.links.src)
        found = cluster(task.topology, turned, priced)
        if found is None:
            return
        back = found
    bundles = task.batching and bool(
        ((priced.occupancy_fs > 0) & (priced.chunk_fs < LONG_CHUNK * priced.occupancy_fs)).any()
    )
    if task.collective in ("alltoall", "alltoallv"):
        yield from _exchanged(task, machine, bundles, should_stop)
        return
    n, k = task.topology.ranks, task.partition
    home = np.arange(n * k) // k
    quickest_fs = 0  # with bundles
    for bundled in (True, False) if bundles else (False,):
        if not bundled and n * (n - 1) * k > MOST_MESSAGES:
            return
        find = partial(_bundles if bundled else _trees, within_fs=quickest_fs)
        if task.collective == "allgather":
            tries = find(machine, home)
        elif task.collective == "reducescatter":
            tries = _collected(machine, find(back, home), should_stop)
        else:
            tries = _reduced_and_spread(machine, back, home, find, should_stop)
        for plan, timed in tries:
            quickest_fs = min(quickest_fs or timed.time_fs, timed.time_fs)
            yield plan, timed
            if should_stop():
                return


_Tries = Iterator[tuple[Plan, Timed]]


def _collected(machine: Cluster, spreading: _Tries, should_stop: Callable[[], bool]) -> _Tries:
    """What spreads on the machine turned round, walked backwards on the machine; of several the quickest alone."""
    best: tuple[Plan, Timed] | None = None
    for plan, timed in spreading:
        collecting = reversed_plan(plan, timed.start_fs, timed.digested_fs)
        for release_fs in (collecting.release_fs, np.zeros(len(plan), np.int64)):
            done = dispatch(machine.lanes, replace(collecting, release_fs=release_fs), machine.links.dst)
            if best is None or done.time_fs < best[1].time_fs:
                best = collecting, done
            if should_stop() or done.time_fs <= NEAR * timed.time_fs:
                break
        if should_stop():
            break
    if best is not None:
        yield best


def _reduced_and_spread(
    machine: Cluster,
    back: Cluster,
    home: Ints,
    find: Callable[[Cluster, Ints], _Tries],
    should_stop: Callable[[], bool],
) -> _Tries:
    """Allreduces: the quickest that collects, then what spreads."""
    for collecting, collected in _collected(machine, find(back, home), should_stop):
        for plan, _ in find(machine, home):
            yield _joined(machine, home, collecting, collected, plan)
            if should_stop():
                return


def _trees(machine: Cluster, home: Ints, within_fs: int) -> _Tries:
    """Every chunk to every rank, one chunk a message; nothing where that takes longer than within_fs, if that is
    given."""
    entering = entries(machine, home)
    least_fs = fullest_fs(machine.lanes, entering.link)
    if within_fs and least_fs >= within_fs:
        return
    direct = _direct(machine, entering.link)
    for when in timetables(machine.lanes, entering.link, np.ones_like(entering.link), machine.links.dst):
        plan = spread(machine, home, entering, when, direct)
        if plan is None:
            return
        timed = dispatch(machine.lanes, plan, machine.links.dst)
        yield plan, timed
        if timed.time_fs <= NEAR * least_fs:
            return


def _direct(machine: Cluster, link: Ints) -> bool:
    """Whether a rank at which chunks enter can send each of them to all of its node, as fast as they come in."""
    lanes, sizes = machine.lanes, machine.sizes
    load = np.zeros(lanes.none + 1, np.int64)
    np.add.at(load, lanes.resource[link], lanes.holds(link))
    load[lanes.none] = 0
    enters = np.bincount(machine.links.dst[link], minlength=len(machine.node_of))
    inside = np.concatenate(machine.inside) if machine.inside else np.zeros(0, np.int64)
    within = np.zeros(lanes.none + 1, np.int64)
    src = machine.links.src[inside]
    # From each rank one message to each other, over what direct links there are.
    _, once = np.unique(src * len(machine.node_of) + machine.links.dst[inside], return_index=True)
    inside, src = inside[once], src[once]
    np.add.at(within, lanes.resource[inside], lanes.holds(inside) * enters[src][:, None])
    within[lanes.none] = 0
    missing = int((sizes * (sizes - 1)).sum()) - len(inside)
    return int(within.max()) <= int(load.max()) and missing * 4 <= len(inside)


def _bundles(machine: Cluster, home: Ints, within_fs: int) -> _Tries:
    """Every chunk to every rank, with company; within_fs is not looked at."""
    for early in (False, True):
        plan = bundled_spread(machine, home, early)
        if plan is None:
            return
        yield plan, dispatch(machine.lanes, plan, machine.links.dst)


def _exchanged(task: Task, machine: Cluster, bundles: bool, should_stop: Callable[[], bool]) -> _Tries:
    """Every chunk from one rank to one other, in long messages and then in short ones."""
    chunk, count, src, dst = _blocks(task)
    if not len(chunk):
        yield free_plan(chunk, chunk), Timed(chunk, chunk, 0)
        return
    goods = traffic(machine, chunk, count, src, dst)
    best_fs = 0
    if bundles:
        for radix in _radices(machine, int(count.sum()))[:MOST_RADICES]:
            plan = bundled_exchange(machine, goods, radix)
            if plan is None or should_stop():
                break
            timed = dispatch(machine.lanes, plan, machine.links.dst)
            best_fs = min(best_fs or timed.time_fs, timed.time_fs)
            yield plan, timed
    for runs in (goods, _together(machine, goods, bundles)):
        if runs is None:
            return
        along = routes(machine, runs)
        if along is None:
            return
        apart = along.gate >= 0
        gate, width = along.gate[apart], runs.count[apart]
        least_fs = fullest_fs(machine.lanes, gate, width)
        if best_fs and best_fs <= least_fs:
            continue  # so they take longer
        for when in timetables(machine.lanes, gate, width, machine.links.dst):
            plan = exchange(machine, runs, along, when)
            timed = dispatch(machine.lanes, plan, machine.links.dst)
            best_fs = min(best_fs or timed.time_fs, timed.time_fs)
            yield plan, timed
            if timed.time_fs <= NEAR * least_fs:
                break
            if should_stop():
                return


def _radices(machine: Cluster, chunks: int) -> list[int]:
    """Radices for digits of the distance between nodes, by what each takes if all ranks send equally much: first what
    takes least."""
    across = machine.gates[machine.gates >= 0]
    fixed, each = (
        float(machine.lanes.occupancy_fs[across].mean()),
        float(machine.lanes.chunk_fs[across].mean()),
    )
    nodes = machine.nodes
    for_each_distance = chunks / (nodes * len(machine.node_of))
    known = []
    for radix in sorted({*(r for r in RADICES if r < nodes), nodes}):
        left, weight, takes = np.arange(nodes), 1, 0.0
        while weight < nodes:
            several = np.bincount(left // weight % radix, minlength=radix)[1:]
            takes += float((fixed * (several > 0) + each * for_each_distance * several).sum())
            weight *= radix
        known.append((takes, radix))
    return [radix for _, radix in sorted(known)]


def _blocks(task: Task) -> tuple[Ints, Ints, Ints, Ints]:
    """(first chunk, 1 for each, source, destination) of all that must move."""
    n, k = task.topology.ranks, task.partition
    if task.collective == "alltoall":
        chunk = np.arange(n * n * k)
        src, dst = chunk // k // n, chunk // k % n
    else:
        ends, amounts = np.array(task.pairs, np.int64).reshape(-1, 2), np.array(task.amounts, np.int64) * k
        src, dst = np.repeat(ends, amounts, axis=0).T
        chunk = np.arange(len(src))
    apart = src != dst
    return chunk[apart], np.ones(int(apart.sum()), np.int64), src[apart], dst[apart]


def _together(machine: Cluster, goods: Traffic, bundles: bool) -> Traffic | None:
    """Chunks of one pair in runs, so long that a message's fixed cost matters little; None where nothing changes."""
    pair = goods.src * len(machine.node_of) + goods.dst
    order = np.lexsort((goods.chunk, pair))
    _, several = np.unique(pair, return_counts=True)
    if not bundles or int(several.max(initial=0)) < 2:
        return None
    across = machine.gates[machine.gates >= 0]
    fixed = machine.lanes.occupancy_fs[across].astype(np.float64)
    enough = max(1, round(float((FIXED_SHARE * fixed / np.maximum(1, machine.lanes.chunk_fs[across])).max())))
    parts = -(-several // enough)  # even runs of each pair
    begin = np.repeat(np.cumsum(several) - several, parts)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    whole, cut = np.repeat(several, parts), np.repeat(parts, parts)
    first, last = number * whole // cut, (number + 1) * whole // cut
    row = order[begin + first]
    return traffic(machine, goods.chunk[row], last - first, goods.src[row], goods.dst[row])


def _joined(
    machine: Cluster, home: Ints, collecting: Plan, collected: Timed, spreading: Plan
) -> tuple[Plan, Timed]:
    """An allreduce: what a block's rank has summed up spreads from there, on links and ports as they become free."""
    lanes, links = machine.lanes, machine.links
    complete = np.zeros(len(home), np.int64)
    row = np.repeat(np.arange(len(collecting)), np.diff(collecting.first))
    at_home = links.dst[collecting.link[row]] == home[collecting.chunks]
    np.maximum.at(complete, collecting.chunks[at_home], collected.digested_fs[row[at_home]])
    free = np.zeros(lanes.none + 1, np.int64)
    held = lanes.resource[collecting.link]
    until = collected.start_fs[:, None] + lanes.holds(collecting.link, np.diff(collecting.first))
    np.maximum.at(free, held, until)
    free[lanes.none] = 0
    row = np.repeat(np.arange(len(spreading)), np.diff(spreading.first))
    begins = links.src[spreading.link[row]] == home[spreading.chunks]
    release = spreading.release_fs + np.where(spreading.release_fs > 0, collected.time_fs, 0)
    np.maximum.at(release, row[begins], complete[spreading.chunks[begins]])
    late = replace(spreading, release_fs=release, booked=np.zeros(len(spreading), bool))
    timed = dispatch(lanes, late, links.dst, free)
    return _both(collecting, spreading), Timed(
        np.concatenate([collected.start_fs, timed.start_fs]),
        np.concatenate([collected.digested_fs, timed.digested_fs]),
        max(collected.time_fs, timed.time_fs),
    )


def _both(one: Plan, other: Plan) -> Plan:
    """The messages of two plans, as they are to be listed; not to be timed again."""
    return Plan(
        np.concatenate([one.link, other.link]),
        np.concatenate([one.reduces, other.reduces]),
        np.concatenate([one.first, one.first[-1] + other.first[1:]]),
        np.concatenate([one.chunks, other.chunks]),
        np.concatenate([one.before, len(one) + other.before]),
        np.concatenate([one.after, len(one) + other.after]),
        np.concatenate([one.release_fs, other.release_fs]),
        np.concatenate([one.booked, other.booked]),
    )


def _table(links: LinkTable, lanes: Lanes, plan: Plan, timed: Timed) -> MessageTable:
    """The messages by (start, link, first chunk)."""
    count = np.diff(plan.first)
    table = MessageTable(
        plan.link,
        links.src[plan.link],
        links.dst[plan.link],
        timed.start_fs,
        timed.start_fs + lanes.transit_fs(plan.link, count),
        plan.reduces,
        plan.first,
        plan.chunks,
    )
    return sorted_by_start(table)
