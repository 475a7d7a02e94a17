"""Which frames that one rank passes to another of its node bring values along, so that the other need not decode them.

Ranks of a node share cores and memory. What one of them decodes for itself anyway, it can hand to the others as values:
a copy in place of a decode, which a slow codec takes ten times as long for. So each frame is decoded once in a node,
by the rank that it arrives at. It is passed on all the same, ahead of the values, where the other rank has to pass it
on; else the values alone go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taccl.runtime.plan import Frame, Operation, Plan, Range

Key = tuple[int, int, int]  # source, destination, tag


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message of frames from the sender's and from the receiver's side; slots of the receiver's frame memory."""

    key: Key
    frames: tuple[Frame, ...]
    carries: Range
    area: int
    staged: bool


def shared_values(plans: Sequence[Plan], near: Sequence[int]) -> dict[Key, bool]:
    """Of coded plans those messages of frames that shall bring values, and whether their frames are needed too.

    near: of each rank the first one that it shares memory with.
    """
    receives = {
        (op.peer, plan.rank, op.tag): op
        for plan in plans
        for op in plan.operations
        if op.kind == "recv" and op.frames
    }
    sent: list[dict[int, list[_Sent]]] = [defaultdict(list) for _ in plans]  # of each rank by area
    decoded: list[dict[tuple[int, int], set[tuple[str, int]]]] = [defaultdict(set) for _ in plans]
    for plan in plans:
        for op in plan.operations:
            if op.kind == "decode":
                for i, frame in enumerate(op.frames):
                    assert op.dst is not None
                    decoded[plan.rank][frame.area, frame.index].add((op.dst[0], op.dst[1] + i))
            elif op.kind == "send" and op.frames:
                key = (plan.rank, op.peer, op.tag)
                for area in {frame.area for frame in op.frames}:
                    sent[plan.rank][area].append(_message(key, op, receives[key]))
    found = {
        message.key
        for of_rank in sent
        for messages in of_rank.values()
        for message in messages
        if near[message.key[0]] == near[message.key[1]] and _both_decode(message, decoded)
    }
    needed: dict[Key, bool] = {}

    def needs(message: _Sent) -> bool:
        """Whether its receiver passes the frames on."""
        if message.key not in needed:
            later = sent[message.key[1]].get(message.area, ())
            needed[message.key] = any(one.key not in found or needs(one) for one in later)
        return needed[message.key]

    return {
        message.key: needs(message)
        for of_rank in sent
        for messages in of_rank.values()
        for message in messages
        if message.key in found
    }


def _message(key: Key, send: Operation, receive: Operation) -> _Sent:
    assert send.carries is not None and receive.dst is not None and receive.carries is not None
    return _Sent(key, send.frames, send.carries, receive.dst[1], receive.carries[0] == "t")


def _both_decode(message: _Sent, decoded: Sequence[Mapping[tuple[int, int], set[tuple[str, int]]]]) -> bool:
    """Whether the sender decodes what it sends where it sends it from, and the receiver wants the values.

    What is staged at the receiver is used by the very next operation, which reads frames as well.
    """
    source, destination, _ = message.key
    letter, first, _ = message.carries
    here = all(
        (letter, first + i) in decoded[source].get((frame.area, frame.index), ())
        for i, frame in enumerate(message.frames)
    )
    there = all((message.area, i) in decoded[destination] for i in range(len(message.frames)))
    return here and there and not message.staged
