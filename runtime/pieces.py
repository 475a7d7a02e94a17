"""Operations on frames as pieces of work for what codes on the host, in the order in which they matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from taccl.runtime.actions import Actions
from taccl.runtime.coders import Coder, Wanted
from taccl.runtime.frames import FrameMemory
from taccl.runtime.plan import Plan
from taccl.runtime.streams import CODING
from taccl.runtime.transport import Message


def pieces(
    plan: Plan,
    messages: Mapping[int, Message],
    frames: FrameMemory,
    actions: Actions,
    chunk_elements: int,
    combine: Callable[..., object],
    coder: Coder,
) -> dict[int, Message]:
    """Of each operation on frames the coder's message that does it. messages: of the sends."""
    operations = plan.operations
    awaited = {before for op in operations for before in op.predecessors}
    leads: set[int] = set()  # to messages of frames
    for number in reversed(range(len(operations))):
        if number in leads or (operations[number].kind == "send" and operations[number].frames):
            leads.update(operations[number].predecessors)
    wanted = _wanted(plan, messages)
    found = {}
    for number, op in enumerate(operations):
        if op.kind in CODING:
            work = frames.work(op, actions.view, chunk_elements, combine)
            turn = 0 if number in leads else 1 if number in awaited else 2
            found[number] = coder.message(work, turn, wanted[number])
    return found


def _wanted(plan: Plan, messages: Mapping[int, Message]) -> list[Wanted]:
    """Of each operation that only messages wait for which say whether they are wanted now, what says so."""
    operations = plan.operations
    asks: list[dict[Callable[[], bool], None] | None] = [{} for _ in operations]
    for number in reversed(range(len(operations))):
        op, mine = operations[number], asks[number]
        if op.kind == "send":
            idle = messages[number].wanted
            mine = None if idle is None else {idle: None}
        elif op.kind != "pack":
            mine = None
        for before in op.predecessors:
            known = asks[before]
            asks[before] = None if known is None or mine is None else known | mine
    return [
        tuple(found) if found and op.kind == "encode" else ()
        for found, op in zip(asks, operations, strict=True)
    ]
