"""Messages of several chunks cut into parts, so that a codec works on one part while another is on its way.

A schedule without a codec has no reason to cut what travels together. Coded as one piece it would leave when its last
chunk is coded, and be decoded when its last byte is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from taccl.runtime.plan import Operation, Plan, Range, staged

Cut = tuple[int, int]  # the first chunk of a part, and the one behind its last
SHORT = 2  # chunks of a part, below which it is not cut once more


def in_parts(plans: Sequence[Plan], most: int, nodes: Sequence[int] | None) -> list[Plan]:
    """The plans of all ranks with each message of several chunks in up to `most`, of which the first is short.

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
        cuts: list[Cut | None] = [None]
        if op.kind in ("send", "recv") and extent is not None:
            cuts = [*pairwise(part_bounds(extent[2], most))]
        pair = (plan.rank, op.peer) if op.kind == "send" else (op.peer, plan.rank)
        # What is staged the next operation uses, part by part.
        user = next(operations) if staged(op) else None
        order = {last[old] for old in op.order}
        paced = op.kind == "send" and (nodes is None or nodes[op.peer] != nodes[plan.rank])
        for i, cut in enumerate(cuts):
            part = replace(
                _part(op, cut), tag=op.tag + i * messages[pair] if op.peer >= 0 else -1, predecessors=(),
                order=tuple(sorted(order | {len(made) - 1} if i and paced else order)),
            )  # fmt: skip
            made.append(part)
            if user is not None:
                made.append(replace(_part(user, cut), predecessors=()))
        last += [len(made) - 1] if user is None else [len(made) - 2, len(made) - 1]
    return replace(plan, operations=tuple(made))


def part_bounds(chunks: int, most: int) -> list[int]:
    """Before which chunks the parts of a message begin, and its number of chunks.

    The connection has nothing to carry until the first part is coded. So that is a quarter of one, and the rest of it
    the second; the others are even.
    """
    even = min(most - 1, chunks)
    bounds = [number * chunks // even for number in range(even + 1)]
    if bounds[1] >= SHORT:
        bounds.insert(1, max(1, bounds[1] // 4))
    return bounds


def _part(op: Operation, cut: Cut | None) -> Operation:
    """Some chunks of an operation, or all."""
    if cut is None:
        return op
    dst, src, received = (_piece(extent, cut) for extent in (op.dst, op.src, op.received))
    return replace(op, dst=dst, src=src, received=received)


def _piece(extent: Range | None, cut: Cut) -> Range | None:
    if extent is None:
        return None
    buffer, first, _ = extent
    return (buffer, first + cut[0], cut[1] - cut[0])
