"""Second half of lowering: from ordered operations to threadblocks of steps.

Every connection gets a threadblock of its own at either end, so that nothing waits that does not wait in the
schedule; what a threadblock cannot hold goes on in a further channel. Dependencies that follow from a threadblock's
order or from other dependencies are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from taccl.errors import CheckFailed, Infeasible
from taccl.synth.algorithm import Algorithm, Message
from taccl.synth.lower_operations import Lane, Operation
from taccl.synth.program import Step, Threadblock

MAX_STEPS = 64
MAX_THREADBLOCKS = 80
MAX_PEERS_OF_CHANNEL = 32
LOCAL_STEPS = 32  # operations of a threadblock that only copies; each may need steps to wait

TbKey = tuple[str, int, int]  # (direction, peer, channel)
Sender = tuple[int, TbKey]  # a sending threadblock: its rank and key


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The threadblocks of a rank, and which sending operation each (threadblock, step) is."""

    threadblocks: tuple[Threadblock, ...]
    sends: dict[tuple[int, int], int]


def lanes_of(ops: Sequence[Operation], ranks: int) -> list[dict[Lane, list[int]]]:
    """Per rank the operations of each lane, in the order in which they will run."""
    lanes: list[dict[Lane, list[int]]] = [{} for _ in range(ranks)]
    for i, op in enumerate(ops):
        lanes[op.rank].setdefault(op.lane, []).append(i)
    for by_lane in lanes:
        for members in by_lane.values():
            members.sort(key=lambda i: ops[i].key)
    return lanes


def direct_needs(ops: Sequence[Operation], lanes: list[dict[Lane, list[int]]]) -> list[list[int]]:
    """The needs of every operation that do not follow from its lane's order or from other needs.

    `below` maps a lane to the latest of its operations that is known to be complete.
    """
    place: dict[int, tuple[Lane, int]] = {}
    for by_lane in lanes:
        for lane, members in by_lane.items():
            for position, i in enumerate(members):
                place[i] = (lane, position)
    needs: list[list[int]] = [[] for _ in ops]
    below: list[dict[Lane, int]] = [{} for _ in ops]
    for i in _causal_order(ops, lanes, place):
        lane, position = place[i]
        known: dict[Lane, int] = {}
        if position:
            before = lanes[ops[i].rank][lane][position - 1]
            known = dict(below[before])
        candidates = sorted(
            (n for n in ops[i].needs if place[n][0] != lane), key=lambda n: ops[n].key, reverse=True
        )
        for n in candidates:
            other, at = place[n]
            if known.get(other, -1) >= at:
                continue
            needs[i].append(n)
            for reached, upto in below[n].items():
                known[reached] = max(known.get(reached, -1), upto)
        # A need that a later accepted one implies is dropped.
        needs[i] = [
            n for n in needs[i]
            if not any(m != n and below[m].get(place[n][0], -1) >= place[n][1] for m in needs[i])
        ]  # fmt: skip
        known[lane] = position
        below[i] = known
    return needs


def _causal_order(
    ops: Sequence[Operation], lanes: list[dict[Lane, list[int]]], place: dict[int, tuple[Lane, int]]
) -> Iterable[int]:
    """All operations, each after those before it in its lane and those it needs."""
    waiting = [0] * len(ops)
    followers: list[list[int]] = [[] for _ in ops]
    for i, op in enumerate(ops):
        lane, position = place[i]
        before = set(op.needs)
        if position:
            before.add(lanes[op.rank][lane][position - 1])
        waiting[i] = len(before)
        for n in before:
            followers[n].append(i)
    ready = [i for i, count in enumerate(waiting) if not count]
    done = 0
    while ready:
        i = ready.pop()
        done += 1
        yield i
        for follower in followers[i]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    if done != len(ops):
        raise CheckFailed("the schedule's steps wait for one another in a circle; this is a fault of taccl")


def channels_of(
    ops: Sequence[Operation],
    algorithm: Algorithm,
    needs: Sequence[Sequence[int]],
    stream: Sequence[int],
    parallel: dict[tuple[int, int], int],
    per_link: int,
) -> dict[int, int]:
    """The channel of each message: further channels where either end's threadblock, or its rank's channel, is full."""
    steps: dict[tuple[int, int], int] = {}  # (message, rank) -> steps there
    for i, op in enumerate(ops):
        if op.message >= 0:
            key = (op.message, op.rank)
            steps[key] = steps.get(key, 0) + max(1, len(needs[i]))
    channel_of: dict[int, int] = {}
    # (source, destination, stream) -> (segment, steps at source, at destination)
    filled: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    peers: Counter[tuple[str, int, int]] = Counter()  # of (direction, rank, channel)
    for number in sorted(range(len(algorithm.messages)), key=lambda n: (algorithm.messages[n].start_fs, n)):
        message = algorithm.messages[number]
        here, there = steps[number, message.src], steps[number, message.dst]
        connection = (message.src, message.dst, stream[number])
        streams = parallel[message.src, message.dst] * per_link
        segment, at_source, at_destination = filled.get(connection, (-1, 0, 0))
        # One step more for the dependency that ties a segment to the one before it.
        full = max(at_source + here, at_destination + there) > MAX_STEPS - 2 and at_source
        if segment < 0 or full:
            segment, at_source, at_destination = segment + 1, 0, 0
            while any(
                peers[end] >= MAX_PEERS_OF_CHANNEL for end in _ends(message, stream[number], segment, streams)
            ):
                segment += 1
            peers.update(_ends(message, stream[number], segment, streams))
        filled[connection] = (segment, at_source + here, at_destination + there)
        channel_of[number] = stream[number] + segment * streams
    return channel_of


def _ends(message: Message, stream: int, segment: int, streams: int) -> tuple[tuple[str, int, int], ...]:
    """The two ends of a connection: (direction, rank, channel)."""
    channel = stream + segment * streams
    return (("send", message.src, channel), ("recv", message.dst, channel))


def threadblocks_of(
    ops: Sequence[Operation],
    lanes: dict[Lane, list[int]],
    needs: Sequence[Sequence[int]],
    channel_of: dict[int, int],
    rank: int,
    level: dict[Sender, int],
) -> RankPlan:
    """The threadblocks of a rank. level: where each sending one should stand among all ranks' (see `_numbering`)."""
    blocks, tied = _blocks(ops, lanes, channel_of)
    order = _numbering(ops, blocks, _merge(ops, blocks), rank, level)
    if len(order) > MAX_THREADBLOCKS:
        raise Infeasible(
            f"rank {rank} needs {len(order)} threadblocks and the smallest GPUs hold {MAX_THREADBLOCKS} at "
            "once: use fewer links or cut the data into fewer chunks (--partition)"
        )
    where: dict[int, tuple[int, int]] = {}
    waits: dict[int, list[int]] = {}
    members_of: list[list[int]] = []
    for number, keys in enumerate(order):
        members = sorted((i for key in keys for i in blocks[key]), key=lambda i: (ops[i].key, i))
        members_of.append(members)
        inside = set(members)
        position = 0
        for i in members:
            waits[i] = [n for n in needs[i] if n not in inside]
            if i in tied and tied[i] not in inside:
                waits[i].append(tied[i])
            position += max(1, len(waits[i]))
            where[i] = (number, position - 1)
    depended = {where[n] for awaited in waits.values() for n in awaited}
    result = []
    for number, (keys, members) in enumerate(zip(order, members_of, strict=True)):
        steps: list[Step] = []
        for i in members:
            op = ops[i]
            awaited = sorted(where[n] for n in waits[i])
            steps += [Step("nop", "i", -1, "o", -1, 0, extra) for extra in awaited[:-1]]
            last = awaited[-1] if awaited else None
            steps.append(Step(op.kind, *op.src, *op.dst, op.count, last, where[i] in depended))
        if len(steps) > MAX_STEPS:
            raise Infeasible(
                f"rank {rank} needs {len(steps)} steps in one threadblock; MSCCL allows {MAX_STEPS}"
            )
        send = next((peer for direction, peer, _ in keys if direction == "send"), -1)
        recv = next((peer for direction, peer, _ in keys if direction == "recv"), -1)
        channel = next((c for direction, _, c in keys if direction != "local"), 0)
        result.append(Threadblock(number, send, recv, channel, tuple(steps)))
    sends = {where[i]: i for members in members_of for i in members if ops[i].kind == "s"}
    return RankPlan(tuple(result), sends)


def _blocks(
    ops: Sequence[Operation], lanes: dict[Lane, list[int]], channel_of: dict[int, int]
) -> tuple[dict[TbKey, list[int]], dict[int, int]]:
    """Operations by threadblock to be; and what ties the first of a further channel to the last before it."""
    blocks: dict[TbKey, list[int]] = {}
    tied: dict[int, int] = {}
    for (direction, peer, _), members in sorted(lanes.items()):
        if direction == "local":
            for begin in range(0, len(members), LOCAL_STEPS):
                blocks["local", -1, len(blocks)] = members[begin : begin + LOCAL_STEPS]
                if begin:
                    # What is known to follow from the lane's order must stay so when the lane is cut.
                    tied[members[begin]] = members[begin - 1]
            continue
        previous: int | None = None
        for i in members:
            key = (direction, peer, channel_of[ops[i].message])
            if key not in blocks and previous is not None:
                tied[i] = previous
            blocks.setdefault(key, []).append(i)
            previous = i
    return blocks, tied


def _numbering(
    ops: Sequence[Operation],
    blocks: dict[TbKey, list[int]],
    merged: Sequence[tuple[TbKey, ...]],
    rank: int,
    level: dict[Sender, int],
) -> list[tuple[TbKey, ...]]:
    """Ids decide who goes first among messages that are ready at the same moment, also between ranks.

    Senders stand in the order of level, then of first start, each at its level as far as others can fill the gaps.
    """

    def first(keys: tuple[TbKey, ...]) -> int:
        return min(ops[blocks[key][0]].key[0] for key in keys)

    def wanted(keys: tuple[TbKey, ...]) -> int:
        return max(level.get((rank, key), 0) for key in keys)

    senders = [keys for keys in merged if any(key[0] == "send" for key in keys)]
    others = [keys for keys in merged if all(key[0] != "send" for key in keys)]
    others.sort(key=lambda keys: (first(keys), keys))
    order: list[tuple[TbKey, ...]] = []
    for sender in sorted(senders, key=lambda keys: (wanted(keys), first(keys), keys)):
        while others and len(order) < wanted(sender):
            order.append(others.pop(0))
        order.append(sender)
    return [*order, *others]


def _merge(ops: Sequence[Operation], blocks: dict[TbKey, list[int]]) -> list[tuple[TbKey, ...]]:
    """Pair sending with receiving threadblocks of a channel, only when there are too many for a GPU."""
    excess = len(blocks) - MAX_THREADBLOCKS
    alone = sorted(blocks)
    pairs: list[tuple[TbKey, ...]] = []
    if excess > 0:
        receivers = [key for key in alone if key[0] == "recv"]
        for sender in [key for key in alone if key[0] == "send"]:
            if excess <= 0:
                break
            room = MAX_STEPS // 2 - len(blocks[sender])
            partner = next((r for r in receivers if r[2] == sender[2] and len(blocks[r]) <= room), None)
            if partner is not None:
                receivers.remove(partner)
                pairs.append((sender, partner))
                excess -= 1
    taken = {key for pair in pairs for key in pair}
    return [*pairs, *((key,) for key in alone if key not in taken)]
