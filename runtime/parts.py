"""Messages of several chunks cut into parts, so that a codec works on one part while another is on its way.

A schedule without a codec has no reason to cut what travels together. Coded as one piece it would leave when its last
chunk is coded, and be decoded when its last byte is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from taccl.runtime.compile import Operation, Plan, Range, staged


def in_parts(plans: Sequence[Plan], most: int, nodes: Sequence[int] | None) -> list[Plan]:
    """The plans of all ranks with each message of several chunks in up to `most`.

    nodes: of each rank its node; parts go to another one in their order. Part i of the message with a tag has the tag +
    i times the number of messages between its ranks. Predecessors are left out, for `coded` finds them.
    """
    messages = Counter((plan.rank, op.peer) for plan in plans for op in plan.operations if op.kind == "send")
    return [_cut(plan, messages, most, nodes) for plan in plans]


def _cut(plan: Plan, messages: Counter[tuple[int, int]], most: int, nodes: Sequence[int] | None) -> Plan:
    made: list[Operation] = []
    last: list[int] = []  # of each old operation the last one that it has become
    operations = iter(plan.operations)
    for op in operations:
        extent = op.src if op.kind == "send" else op.dst
        count = 1
        if op.kind in ("send", "recv") and extent is not None:
            count = min(most, extent[2])
        pair = (plan.rank, op.peer) if op.kind == "send" else (op.peer, plan.rank)
        # What is staged the next operation uses, part by part.
        user = next(operations) if staged(op) else None
        order = {last[old] for old in op.order}
        paced = op.kind == "send" and (nodes is None or nodes[op.peer] != nodes[plan.rank])
        for i in range(count):
            part = replace(
                _part(op, i, count), tag=op.tag + i * messages[pair] if op.peer >= 0 else -1, predecessors=(),
                order=tuple(sorted(order | {len(made) - 1} if i and paced else order)),
            )  # fmt: skip
            made.append(part)
            if user is not None:
                made.append(replace(_part(user, i, count), predecessors=()))
        last += [len(made) - 1] if user is None else [len(made) - 2, len(made) - 1]
    return replace(plan, operations=tuple(made))


def _part(op: Operation, number: int, count: int) -> Operation:
    """One of `count` parts of an operation."""
    dst, src, received = (_piece(extent, number, count) for extent in (op.dst, op.src, op.received))
    return replace(op, dst=dst, src=src, received=received)


def _piece(extent: Range | None, number: int, count: int) -> Range | None:
    if extent is None:
        return None
    buffer, first, chunks = extent
    begin, end = number * chunks // count, (number + 1) * chunks // count
    return (buffer, first + begin, end - begin)
