"""From an ordered list of transfers to exact times: the list schedulers that every engine shares.

A transfer is a message without a clock. Data dependencies follow from the order of the list: a transfer of
chunk c out of rank v waits for every earlier transfer of c into v, unless it names its predecessors itself
(`after`), as the two halves of a simultaneous exchange must.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Message
from taccl.synth.collective import Collective
from taccl.synth.cost import Costs


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks to be sent as one message over a link.

    after: indices of the transfers that must have arrived before this one starts; None (the rule): every
    earlier transfer of one of its chunks into the sum of its source rank that it carries. A recursive-doubling
    exchange needs () or the earlier rounds only, because both partners send what they held BEFORE the round.
    """

    link: int
    chunks: tuple[int, ...]
    op: str = "copy"  # "copy" | "reduce", as in Message
    after: tuple[int, ...] | None = None
    sum: int = 0  # as in Message
    into: tuple[int, ...] = (0,)

    @property
    def plain(self) -> bool:
        """Whether it is a hop of trees: it follows from the list alone, and ranks hold one sum of each chunk."""
        return self.after is None and self.sum == 0 and self.into == (0,)


class Unordered(ValueError):
    """A transfer sends what its source cannot have at that point of the list."""


def predecessors(
    topology: Topology, collective: Collective, transfers: Sequence[Transfer]
) -> list[list[int]]:
    """For each transfer the earlier ones whose arrival it needs. Raises Unordered for missing data."""
    sources = [{rank for rank, _ in chunk.sources} for chunk in collective.chunks]
    into: dict[tuple[int, int, int], list[int]] = {}  # (chunk, rank, sum)
    needs: list[list[int]] = []
    for index, transfer in enumerate(transfers):
        link = topology.links[transfer.link]
        if transfer.after is not None:
            needs.append(sorted(transfer.after))
        else:
            carried = ((c, link.src, transfer.sum) for c in transfer.chunks)
            needs.append(sorted({i for place in carried for i in into.get(place, ())}))
        for chunk in transfer.chunks:
            if link.src not in sources[chunk] and (chunk, link.src, transfer.sum) not in into:
                raise Unordered(f"transfer {index} sends chunk {chunk} from rank {link.src}, which lacks it")
        for chunk in transfer.chunks:
            for place in transfer.into:
                into.setdefault((chunk, link.dst, place), []).append(index)
    return needs


def time_in_order(
    topology: Topology, collective: Collective, costs: Costs, transfers: Sequence[Transfer]
) -> tuple[Message, ...]:
    """Start every transfer as early as its data and, in list order, its link and ports allow."""
    return _event_loop(topology, collective, costs, transfers, list(range(len(transfers))), keep_order=True)


def time_by_priority(
    topology: Topology,
    collective: Collective,
    costs: Costs,
    transfers: Sequence[Transfer],
    priority: Sequence[int] | None = None,
) -> tuple[Message, ...]:
    """Non-delay schedule: whenever a transfer can start, the ready one of smallest priority does.

    priority: one number a transfer, default its place in the list. Serial over events, O(m log m) for m transfers that
    cross few ports each.
    """
    order = list(range(len(transfers))) if priority is None else list(priority)
    return _event_loop(topology, collective, costs, transfers, order, keep_order=False)


def time_batched(
    topology: Topology,
    collective: Collective,
    costs: Costs,
    transfers: Sequence[Transfer],
    priority: Sequence[int] | None = None,
    links: Container[int] | None = None,
) -> tuple[Message, ...]:
    """Like time_by_priority, but a message takes along all that is ready for its link at that moment.

    links: where messages do so; None: on all links.
    """
    order = list(range(len(transfers))) if priority is None else list(priority)
    some = range(len(topology.links)) if links is None else links
    return _event_loop(topology, collective, costs, transfers, order, keep_order=False, batch=some)


class Sums:
    """Which sums of a rank are one value: those to which the same messages were added.

    Alive only while messages are walked through in the order of their arrivals. beside: whether any of them enters
    another sum than 0; where none does, every message is added to one value.
    """

    def __init__(self, beside: bool) -> None:
        self._beside = beside
        self._value: dict[tuple[int, int, int], int] = {}  # (rank, chunk, sum); 0: as in the beginning
        self._values = 0

    def enter(self, message: Message) -> int:
        """A message arrives; returns how many values it is added to, each of which takes a reduction."""
        if not self._beside:
            return 1
        fresh: dict[tuple[int, ...], tuple[int, ...]] = {}
        for place in message.into:
            keys = [(message.dst, chunk, place) for chunk in message.chunks]
            now = tuple(self._value.get(key, 0) for key in keys) if message.op == "reduce" else ()
            if now not in fresh:
                fresh[now] = tuple(range(self._values + 1, self._values + 1 + len(keys)))
                self._values += len(keys)
            self._value.update(zip(keys, fresh[now], strict=True))
        return len(fresh)


def completions(costs: Costs, messages: Sequence[Message]) -> list[int]:
    """When each message's data can be used: at arrival, or after its turn on its destination's reduction engine."""
    done = [m.end_fs for m in messages]
    engine: dict[int, int] = {}
    sums = Sums(any(m.into != (0,) for m in messages))
    for i in sorted(
        range(len(messages)), key=lambda i: (messages[i].end_fs, messages[i].start_fs, messages[i].link)
    ):
        m = messages[i]
        values = sums.enter(m)
        if m.op == "reduce":
            took = values * costs.reduce(len(m.chunks))
            engine[m.dst] = done[i] = max(engine.get(m.dst, 0), m.end_fs) + took
    return done


def completion_fs(costs: Costs, messages: Sequence[Message]) -> int:
    """When the last arrival, or the reduction that follows it, has ended."""
    return max(completions(costs, messages), default=0)


def coalesced(
    topology: Topology, collective: Collective, transfers: Sequence[Transfer], links: Container[int]
) -> list[Transfer] | None:
    """All that goes over each of `links` in one message; None when messages would then wait in a circle.

    Waiting for the last chunk pays where alpha is much longer than the wait: between nodes, at small sizes.
    """
    needs = predecessors(topology, collective, transfers)
    group_of = list(range(len(transfers)))
    leader: dict[tuple[int, str], int] = {}
    for index, transfer in enumerate(transfers):
        if transfer.link in links:
            group_of[index] = leader.setdefault((transfer.link, transfer.op), index)
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_of):
        members.setdefault(group, []).append(index)
    before = {g: {group_of[n] for i in indices for n in needs[i]} for g, indices in members.items()}
    if any(group in earlier for group, earlier in before.items()):
        return None
    followers: dict[int, list[int]] = {}
    for group, earlier in before.items():
        for other in earlier:
            followers.setdefault(other, []).append(group)
    waiting = {group: len(earlier) for group, earlier in before.items()}
    ready = [(members[group][-1], group) for group, count in waiting.items() if not count]
    heapq.heapify(ready)
    merged = []
    while ready:
        _, group = heapq.heappop(ready)
        first = transfers[group]
        chunks = sorted({c for i in members[group] for c in transfers[i].chunks})
        merged.append(Transfer(first.link, tuple(chunks), first.op))
        for follower in followers.get(group, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (members[follower][-1], follower))
    return merged if len(merged) == len(members) else None


def _event_loop(
    topology: Topology,
    collective: Collective,
    costs: Costs,
    transfers: Sequence[Transfer],
    priority: Sequence[int],
    keep_order: bool,
    batch: Container[int] = (),
) -> tuple[Message, ...]:
    needs = predecessors(topology, collective, transfers)
    waiting = [len(need) for need in needs]
    followers: list[list[int]] = [[] for _ in transfers]
    for index, need in enumerate(needs):
        for before in need:
            followers[before].append(index)
    # When the order is kept, each resource is handed from one transfer to the next of the list.
    heirs: list[list[tuple[int, int]]] = [[] for _ in transfers]  # (hold per chunk, next transfer)
    if keep_order:
        holder: dict[int, tuple[int, int]] = {}
        for index, transfer in enumerate(transfers):
            for resource, per_chunk in costs.holds[transfer.link]:
                if resource in holder:
                    before, hold = holder[resource]
                    heirs[before].append((hold, index))
                    waiting[index] += 1
                holder[resource] = (index, costs.hold(transfer.link, per_chunk, len(transfer.chunks)))
    free = [0] * costs.resources
    engine = [0] * topology.ranks
    sums = Sums(any(t.into != (0,) for t in transfers))
    messages: list[Message] = []
    started = [False] * len(transfers)
    on_link: dict[tuple[int, str], list[int]] = {}  # ready and not started, for batching
    carried: list[list[int]] = []  # per message its transfers
    # Events in the order of one instant: 0 arrival, 1 data usable, 2 resource free, 3 turn of the next. What
    # arrives at one instant is reduced in the order (start, link), as in completion_fs.
    events: list[tuple[int, int, tuple[int, int], int]] = []
    # (priority, transfer, resource it has waited for or -1)
    ready: list[tuple[int, int, int]] = []

    def make_ready(index: int) -> None:
        heapq.heappush(ready, (priority[index], index, -1))
        if transfers[index].link in batch:
            on_link.setdefault((transfers[index].link, transfers[index].op), []).append(index)

    for index, count in enumerate(waiting):
        if not count:
            make_ready(index)
    blocked: dict[int, list[tuple[int, int]]] = {}  # resource -> heap of ready transfers that wait for it

    def call(resource: int) -> None:
        """Of those that wait for a resource, the first may try; the others follow if it leaves the resource free."""
        if blocked.get(resource):
            heapq.heappush(ready, (*heapq.heappop(blocked[resource]), resource))

    # One that was called and must wait for another resource leaves its own free: the next in its queue is called then,
    # so that nobody sleeps beside a free resource, and each event wakes few.
    now, called = 0, -1
    while True:
        while ready or called >= 0:
            if called >= 0 and free[called] <= now:
                call(called)
            called = -1
            if not ready:
                break
            _, index, called = heapq.heappop(ready)
            if started[index]:
                continue
            transfer = transfers[index]
            busy = next((r for r, _ in costs.holds[transfer.link] if free[r] > now), None)
            if busy is not None:
                heapq.heappush(blocked.setdefault(busy, []), (priority[index], index))
                continue
            link = topology.links[transfer.link]
            together = [index]
            if transfer.link in batch:
                waiting_here = on_link.pop((transfer.link, transfer.op))
                together = _disjoint(transfers, index, waiting_here)
                left = [i for i in waiting_here if i not in together]
                if left:
                    on_link[transfer.link, transfer.op] = left
            chunks = tuple(sorted(c for i in together for c in transfers[i].chunks))
            count = len(chunks)
            end = now + costs.transit(transfer.link, count)
            messages.append(
                Message(
                    transfer.link, link.src, link.dst, chunks, now, end, transfer.op, transfer.sum, transfer.into
                )
            )  # fmt: skip
            for i in together:
                started[i] = True
            heapq.heappush(events, (end, 0, (now, transfer.link), len(carried)))
            carried.append(together)
            for resource, per_chunk in costs.holds[transfer.link]:
                free[resource] = now + costs.hold(transfer.link, per_chunk, count)
                heapq.heappush(events, (free[resource], 2, (0, 0), resource))
            for hold, heir in heirs[index]:
                heapq.heappush(events, (now + hold, 3, (0, 0), heir))
        if not events:
            break
        now = events[0][0]
        while events and events[0][0] == now:
            _, kind, _, payload = heapq.heappop(events)
            released: list[int] = []
            if kind == 0:
                message, usable = messages[payload], now
                values = sums.enter(message)
                if message.op == "reduce":
                    took = values * costs.reduce(len(message.chunks))
                    usable = engine[message.dst] = max(engine[message.dst], now) + took
                heapq.heappush(events, (usable, 1, (0, 0), payload))
            elif kind == 1:
                released = [follower for i in carried[payload] for follower in followers[i]]
            elif kind == 2:
                call(payload)
            else:
                released = [payload]
            for follower in released:
                waiting[follower] -= 1
                if not waiting[follower]:
                    make_ready(follower)
    return tuple(sorted(messages, key=lambda m: (m.start_fs, m.link, m.chunks)))


def as_transfers(messages: Iterable[Message]) -> list[Transfer]:
    """Forget the clock, keep the order of starts (ties keep their place)."""
    ordered = sorted(messages, key=lambda m: (m.start_fs, m.end_fs))
    return [Transfer(m.link, m.chunks, m.op, None, m.sum, m.into) for m in ordered]


def as_carried(messages: Sequence[Message], usable_fs: Sequence[int]) -> list[Transfer]:
    """As `as_transfers`, but where partial sums cross each message waits for what it carried alone, and not for what
    reached its source later. usable_fs: per message when its data could be used at its destination."""
    listed = as_transfers(messages)
    if not all(transfer.plain for transfer in listed):
        return listed  # sums beside one another do not meet, each is waited for by its name
    order = sorted(range(len(messages)), key=lambda i: (messages[i].start_fs, messages[i].end_fs))
    into: dict[tuple[int, int], list[int]] = {}  # (rank, chunk) -> places in the order
    for place, i in enumerate(order):
        for chunk in messages[i].chunks:
            into.setdefault((messages[i].dst, chunk), []).append(place)
    crossing = False
    carried: list[tuple[int, ...]] = []
    for place, i in enumerate(order):
        message = messages[i]
        there = {p for chunk in message.chunks for p in into.get((message.src, chunk), ())}
        before = {p for p in there if usable_fs[order[p]] <= message.start_fs}
        crossing = crossing or any(p < place for p in there - before)
        carried.append(tuple(sorted(before)))
    return [
        Transfer(messages[i].link, messages[i].chunks, messages[i].op, after if crossing else None)
        for i, after in zip(order, carried, strict=True)
    ]


def _disjoint(transfers: Sequence[Transfer], first: int, others: Sequence[int]) -> list[int]:
    """The first transfer and those of the others whose chunks do not repeat one already taken."""
    chosen, taken = [first], set(transfers[first].chunks)
    for i in others:
        if i != first and taken.isdisjoint(transfers[i].chunks):
            chosen.append(i)
            taken.update(transfers[i].chunks)
    return chosen
