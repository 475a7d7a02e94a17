"""The time of a schedule with coded messages: list scheduling of messages, codec tasks and reductions.

Every rank has one codec engine, which codes and decodes chunks one after the other while messages travel, and one
reduction engine. Messages keep the schedule's order where they compete: whatever is ready and comes first there goes
first. A coded message is priced by the cost model at the length of its frames.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.coding.flow import Flow, passed_on
from taccl.synth.cost import Costs, ceil_fs, costs

MESSAGE, ENCODE, DECODE, REDUCE = range(4)


@dataclass(frozen=True, slots=True)
class CodecPrices:
    """One chunk of a schedule, in fs, and every link at the length of a chunk's frame."""

    encode_fs: int
    decode_fs: int
    framed: Costs


def codec_prices(topology: Topology, chunk_bytes: Fraction, cost: CodecCost) -> CodecPrices:
    """Prices of a codec at a chunk length."""
    megabytes = chunk_bytes / 10**6
    return CodecPrices(
        ceil_fs(cost.encode_alpha_us + cost.encode_beta_us_per_mb * megabytes),
        ceil_fs(cost.decode_alpha_us + cost.decode_beta_us_per_mb * megabytes),
        costs(topology, cost.frame_bytes + chunk_bytes / cost.ratio),
    )


@dataclass(frozen=True, slots=True)
class Activity:
    """What takes time: kind, the message or (of ENCODE) one of those that wait for it, the rank, when."""

    kind: int
    message: int
    rank: int
    start_fs: int
    end_fs: int


@dataclass(slots=True)
class _Task:
    kind: int
    message: int
    rank: int
    holds: tuple[tuple[int, int], ...]  # (resource, how long)
    takes: int
    order: int  # the schedule's place of the message that it belongs to
    waits: int = 0  # for so many ends and starts
    after_end: list[int] = field(default_factory=list)
    after_start: list[int] = field(default_factory=list)


def clock(
    algorithm: Algorithm,
    topology: Topology,
    found: Flow,
    prices: CodecPrices,
    coded: Sequence[int],
    lossless: bool,
    order: Sequence[int] | None = None,
) -> list[Activity] | None:
    """All activities when these messages are coded; the latest end is the schedule's time.

    order: of each message its place among those that compete, default that of the schedule. None where messages then
    wait for one another in a circle.
    """
    places = range(len(algorithm.messages)) if order is None else order
    tasks = _tasks(algorithm, topology, found, prices, frozenset(coded), lossless, places)
    return _run(tasks)


def time_of(activities: Sequence[Activity]) -> int:
    """When the last activity has ended."""
    return max((a.end_fs for a in activities), default=0)


def _tasks(
    algorithm: Algorithm,
    topology: Topology,
    found: Flow,
    prices: CodecPrices,
    coded: frozenset[int],
    lossless: bool,
    places: Sequence[int],
) -> list[_Task]:
    plain = costs(topology, algorithm.chunk_bytes)
    codec_engine, adder = plain.resources, plain.resources + topology.ranks
    tasks: list[_Task] = []

    def add(kind: int, message: int, rank: int, holds: tuple[tuple[int, int], ...], takes: int) -> int:
        tasks.append(_Task(kind, message, rank, holds, takes, places[message]))
        return len(tasks) - 1

    def wait(task: int, *earlier: int) -> None:
        for other in earlier:
            tasks[other].after_end.append(task)
            tasks[task].waits += 1

    for i, m in enumerate(algorithm.messages):
        priced = prices.framed if i in coded else plain
        count = len(m.chunks)
        holds = tuple((resource, priced.hold(m.link, each, count)) for resource, each in priced.holds[m.link])
        add(MESSAGE, i, m.src, holds, priced.transit(m.link, count))
    usable = list(
        range(len(tasks))
    )  # of each message the task after which its values, or its frames, are there
    values = list(usable)  # the same for values alone
    for i, m in enumerate(algorithm.messages):
        count = len(m.chunks)
        if i in coded and found.keeps[i]:
            took = count * prices.decode_fs
            values[i] = add(DECODE, i, m.dst, ((codec_engine + m.dst, took),), took)
            wait(values[i], i)
        if m.op == "reduce":
            took = plain.reduce(count)
            reduced = add(REDUCE, i, m.dst, ((adder + m.dst, took),), took)
            wait(reduced, values[i])
            values[i] = reduced
        for earlier in found.follows[i]:
            # What overwrites a value, or adds to it, comes after the messages that leave with it have begun.
            tasks[earlier].after_start.append(values[i])
            tasks[values[i]].waits += 1
    encoders: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for i, m in enumerate(algorithm.messages):
        for c, supply in zip(m.chunks, found.supplies[i], strict=True):
            passed = passed_on(algorithm, supply)
            if i not in coded:
                wait(i, *(values[s] for s in supply))
            elif passed in coded:
                wait(i, supply[0])
            else:
                key = (m.src, c, supply)
                if key not in encoders:
                    takes, holds = prices.encode_fs, ((codec_engine + m.src, prices.encode_fs),)
                    encoders[key] = add(ENCODE, i, m.src, holds, takes)
                    wait(encoders[key], *(values[s] for s in supply))
                wait(i, encoders[key])
    if algorithm.collective.combining and not lossless:
        # The owner of a result decodes its own frame, so that all ranks end with the same values.
        owned: dict[tuple[int, int, tuple[int, ...]], int] = {}
        for i, m in enumerate(algorithm.messages):
            for c, supply in zip(m.chunks, found.supplies[i], strict=True):
                key = (m.src, c, supply)
                if not found.complete[i] or key not in encoders:
                    continue
                if key not in owned:
                    holds = ((codec_engine + m.src, prices.decode_fs),)
                    owned[key] = add(DECODE, i, m.src, holds, prices.decode_fs)
                    wait(owned[key], encoders[key])
                if i not in coded:
                    wait(i, owned[key])
    return tasks


def _run(tasks: list[_Task]) -> list[Activity] | None:
    """Whenever a task can start, the ready one that comes first does."""
    free: dict[int, int] = {}
    queued: dict[int, list[tuple[int, int]]] = {}  # resource -> tasks that wait for it
    ready: list[tuple[int, int, int]] = []  # (order, task, the resource that it waited for or -1)
    events: list[tuple[int, int, int]] = []  # (time, 0: a task ends, 1: a resource is free, which)
    activities: list[Activity | None] = [None] * len(tasks)
    now = started = 0

    def release(i: int) -> None:
        tasks[i].waits -= 1
        if not tasks[i].waits:
            heapq.heappush(ready, (tasks[i].order, i, -1))

    def call(resource: int) -> None:
        """The first of those that wait for a resource tries; the others come after it."""
        if queued.get(resource):
            heapq.heappush(ready, (*heapq.heappop(queued[resource]), resource))

    for i, task in enumerate(tasks):
        if not task.waits:
            heapq.heappush(ready, (task.order, i, -1))
    while True:
        while ready:
            order, i, called = heapq.heappop(ready)
            task = tasks[i]
            busy = next((r for r, _ in task.holds if free.get(r, 0) > now), None)
            if busy is not None:
                heapq.heappush(queued.setdefault(busy, []), (order, i))
                if called >= 0 and called != busy:
                    call(called)
                continue
            for resource, held in task.holds:
                free[resource] = now + held
                heapq.heappush(events, (now + held, 1, resource))
            activities[i] = Activity(task.kind, task.message, task.rank, now, now + task.takes)
            heapq.heappush(events, (now + task.takes, 0, i))
            started += 1
            for other in task.after_start:
                release(other)
        if not events:
            break
        now = events[0][0]
        while events and events[0][0] == now:
            _, kind, which = heapq.heappop(events)
            if kind:
                call(which)
            else:
                for other in tasks[which].after_end:
                    release(other)
    return None if started < len(tasks) else [a for a in activities if a is not None]
