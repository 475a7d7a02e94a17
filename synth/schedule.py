"""From an ordered list of transfers to exact times: the list schedulers that every engine shares.

A transfer is a message without a clock. Data dependencies follow from the order of the list: a transfer of
chunk c out of rank v waits for every earlier transfer of c into v, unless it names its predecessors itself
(`after`), as the two halves of a simultaneous exchange must.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Message
from taccl.synth.collective import Collective
from taccl.synth.cost import Costs


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks to be sent as one message over a link.

    after: indices of the transfers that must have arrived before this one starts; None (the rule): every
    earlier transfer of one of its chunks into its source rank. A recursive-doubling exchange needs () or the
    earlier rounds only, because both partners send what they held BEFORE the round.
    """

    link: int
    chunks: tuple[int, ...]
    op: str = "copy"  # "copy" | "reduce", as in Message
    after: tuple[int, ...] | None = None


class Unordered(ValueError):
    """A transfer sends what its source cannot have at that point of the list."""


def predecessors(topology: Topology, collective: Collective, transfers: Sequence[Transfer]) -> list[list[int]]:
    """For each transfer the earlier ones whose arrival it needs. Raises Unordered for missing data."""
    sources = [{rank for rank, _ in chunk.sources} for chunk in collective.chunks]
    into: dict[tuple[int, int], list[int]] = {}
    needs: list[list[int]] = []
    for index, transfer in enumerate(transfers):
        link = topology.links[transfer.link]
        if transfer.after is not None:
            needs.append(sorted(transfer.after))
        else:
            needs.append(sorted({i for c in transfer.chunks for i in into.get((c, link.src), ())}))
        for chunk in transfer.chunks:
            if link.src not in sources[chunk] and (chunk, link.src) not in into:
                raise Unordered(f"transfer {index} sends chunk {chunk} from rank {link.src}, which lacks it")
        for chunk in transfer.chunks:
            into.setdefault((chunk, link.dst), []).append(index)
    return needs


def time_in_order(
    topology: Topology, collective: Collective, costs: Costs, transfers: Sequence[Transfer]
) -> tuple[Message, ...]:
    """Start every transfer as early as its data and, in list order, its link and ports allow."""
    needs = predecessors(topology, collective, transfers)
    free = [0] * costs.resources
    engine = [0] * topology.ranks
    done = [0] * len(transfers)
    messages = []
    for index, transfer in enumerate(transfers):
        start = max((done[i] for i in needs[index]), default=0)
        start = max(start, *(free[r] for r, _ in costs.holds[transfer.link]))
        message = _place(topology, costs, transfer, start, free)
        done[index] = _complete(costs, message, engine)
        messages.append(message)
    return _sorted(messages)


def time_by_priority(
    topology: Topology,
    collective: Collective,
    costs: Costs,
    transfers: Sequence[Transfer],
    priority: Sequence[int] | None = None,
) -> tuple[Message, ...]:
    """Non-delay schedule: whenever a transfer can start, the ready one of smallest priority does.

    priority: one number a transfer, default its place in the list. Serial over events, O(m log m) for m
    transfers when few compete for a resource.
    """
    needs = predecessors(topology, collective, transfers)
    rank_of = list(range(len(transfers))) if priority is None else list(priority)
    waiting = [len(need) for need in needs]
    followers: list[list[int]] = [[] for _ in transfers]
    for index, need in enumerate(needs):
        for before in need:
            followers[before].append(index)
    free = [0] * costs.resources
    engine = [0] * topology.ranks
    messages: list[Message] = []
    # Events: (time, kind, payload). kind 0 = a transfer's arrival was digested, 1 = a resource came free.
    events: list[tuple[int, int, int]] = []
    ready: list[tuple[int, int]] = [(rank_of[i], i) for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    blocked: dict[int, list[tuple[int, int]]] = {}  # resource -> transfers that wait for it
    now = 0
    while True:
        while ready:
            entry = heapq.heappop(ready)
            transfer = transfers[entry[1]]
            busy = next((r for r, _ in costs.holds[transfer.link] if free[r] > now), None)
            if busy is not None:
                blocked.setdefault(busy, []).append(entry)
                continue
            message = _place(topology, costs, transfer, now, free)
            messages.append(message)
            heapq.heappush(events, (_complete(costs, message, engine), 0, entry[1]))
            for resource, _ in costs.holds[transfer.link]:
                heapq.heappush(events, (free[resource], 1, resource))
        if not events:
            break
        now = events[0][0]
        while events and events[0][0] == now:
            _, kind, payload = heapq.heappop(events)
            if kind == 1:
                for entry in blocked.pop(payload, ()):
                    heapq.heappush(ready, entry)
            else:
                for follower in followers[payload]:
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        heapq.heappush(ready, (rank_of[follower], follower))
    return _sorted(messages)


def completion_fs(costs: Costs, messages: Iterable[Message]) -> int:
    """When the last arrival, or the reduction that follows it, has ended."""
    ranks = 1 + max((m.dst for m in messages), default=0)
    engine = [0] * ranks
    return max((_complete(costs, m, engine) for m in sorted(messages, key=lambda m: m.end_fs)), default=0)


def as_transfers(messages: Iterable[Message]) -> list[Transfer]:
    """Forget the clock, keep the order of starts (ties keep their place)."""
    return [Transfer(m.link, m.chunks, m.op) for m in sorted(messages, key=lambda m: (m.start_fs, m.end_fs))]


def _place(topology: Topology, costs: Costs, transfer: Transfer, start: int, free: list[int]) -> Message:
    link = topology.links[transfer.link]
    count = len(transfer.chunks)
    for resource, per_chunk in costs.holds[transfer.link]:
        free[resource] = start + costs.hold(transfer.link, per_chunk, count)
    end = start + costs.transit(transfer.link, count)
    return Message(transfer.link, link.src, link.dst, tuple(sorted(transfer.chunks)), start, end, transfer.op)


def _complete(costs: Costs, message: Message, engine: list[int]) -> int:
    """When the message's data can be used; a reduction takes the rank's one reduction engine."""
    if message.op == "copy":
        return message.end_fs
    engine[message.dst] = max(engine[message.dst], message.end_fs) + costs.reduce(len(message.chunks))
    return engine[message.dst]


def _sorted(messages: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(sorted(messages, key=lambda m: (m.start_fs, m.link, m.chunks)))
