"""What a plan is laid out as before its runs: what to call when, and which messages are polled one after another.

A script is what happens when a message has arrived, through all the operations that waited for it alone, and which
operations with other predecessors it brings nearer. A line is of the messages of one connection.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taccl.runtime.actions import Action, Actions
from taccl.runtime.coders import CodecPort
from taccl.runtime.plan import Operation
from taccl.runtime.transport import Message, Port

# What to call, the polled messages that it starts, operations with one predecessor less, how many are finished.
Script = tuple[tuple[Action, ...], tuple[int, ...], tuple[int, ...], int]
Poll = Callable[[list[Any]], Sequence[int] | None]


@dataclass(frozen=True, slots=True)
class Lines:
    """Every polled message's line, and of each port the first messages of its lines. The lists within change in runs.

    Of each operation: tokens: of its message; line: the outstanding messages of its connection in order; heads: the
    list in which the token of the first of them stands; slot: its place there; is_late: whether it is polled at the end
    only. groups: of each port its poll, its idle token, its heads and its lines. long: of each port that has some its
    lines of more than one message. telling: ports that have news. late: by port the sends that nothing waits for.
    """

    tokens: list[Any]
    line: list[list[int]]
    heads: list[list[Any]]
    slot: list[int]
    is_late: list[bool]
    groups: list[tuple[Poll, Any, list[Any], list[list[int]]]]
    long: list[tuple[Any, list[list[int]]]]
    telling: list[Any]
    late: list[tuple[Port, list[int]]]


NO_LINES = Lines([], [], [], [], [], [], [], [], [])


def lay_lines(
    operations: Sequence[Operation], messages: Mapping[int, Message], awaited: Sequence[bool]
) -> Lines:
    """The lines of a plan. awaited: of each operation, whether another one waits for it."""
    count = len(operations)
    # A port moves its messages when it is polled for one of them. Where it is the only one, a rank that waits
    # polls it. Beside another one it may have to move a send that nothing here waits for.
    ports = {id(m.port): m.port for m in messages.values() if m.port is not None}
    found = Lines(
        tokens=[m.token if (m := messages.get(n)) else None for n in range(count)],
        line=[[]] * count,
        heads=[[]] * count,
        slot=[0] * count,
        is_late=[False] * count,
        groups=[],
        long=[],
        telling=[port for port in ports.values() if hasattr(port, "news")],
        late=[],
    )
    groups: dict[int, tuple[Port, list[Any], list[list[int]]]] = {}
    counts: Counter[int] = Counter()  # of the messages of each line
    slots: dict[tuple[int, str, int, int], int] = {}
    late: dict[int, tuple[Port, list[int]]] = {}
    alone = len(ports) == 1 and not found.telling
    for number, message in sorted(messages.items()):
        op, port = operations[number], message.port
        if port is None:
            continue
        if op.kind == "send" and alone and not awaited[number]:
            late.setdefault(id(port), (port, []))[1].append(number)
            found.is_late[number] = True
            continue
        _, heads, lines = groups.setdefault(id(port), (port, [], []))
        # Work on frames is finished in any order, and asking costs the same for all of it.
        line = (id(port), op.kind, op.peer, op.channel if op.peer >= 0 else number)
        if line not in slots:
            slots[line] = len(heads)
            heads.append(port.idle)
            lines.append([])
        slot = slots[line]
        found.line[number], found.heads[number], found.slot[number] = lines[slot], heads, slot
        counts[id(lines[slot])] += 1
    # What works when it is polled may be wanted only since other ports have moved something.
    for port, heads, lines in sorted(groups.values(), key=lambda group: isinstance(group[0], CodecPort)):
        found.groups.append((port.poll, port.idle, heads, lines))
        if long := [line for line in lines if counts[id(line)] > 1]:
            found.long.append((port, long))
    found.late.extend(late.values())
    return found


def write_scripts(
    operations: Sequence[Operation],
    messages: Mapping[int, Message],
    actions: Actions,
    needed: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    is_late: Sequence[bool],
    marks: list[tuple[int, float]] | None,
) -> list[Script]:
    """The script of the beginning of operation n is at n, that of the arrival of message n at ~n, and that of a run's
    beginning between the two. needed, found: of each operation those before it and after it. marks: as in
    `Executor`."""

    def mark(number: int) -> Action:
        noted = marks
        assert noted is not None
        return lambda: noted.append((number, time.perf_counter()))

    def messages_first(numbers: Sequence[int]) -> list[int]:
        return sorted(numbers, key=lambda n: (n not in messages, n))

    def script(begin: Sequence[int], arrived: int | None = None) -> Script:
        calls: list[Action] = []
        started: list[int] = []
        nearer: list[int] = []
        finished = 0
        stack = messages_first(begin)[::-1]

        def finish(number: int) -> None:
            nonlocal finished
            finished += 1
            alone = [later for later in found[number] if len(needed[later]) == 1]
            stack.extend(messages_first(alone)[::-1])
            nearer.extend(later for later in found[number] if len(needed[later]) > 1)

        if arrived is not None:
            if marks is not None and operations[arrived].kind == "recv":
                calls.append(mark(arrived))
            if (action := actions.arrival(arrived, operations[arrived])) is not None:
                calls.append(action)
            finish(arrived)
        while stack:
            number = stack.pop()
            action = actions.beginning(number, operations[number])
            if marks is not None and operations[number].kind == "send":
                calls.append(mark(number))
            if action is not None:
                calls.append(action)
            if number not in messages or messages[number].port is None:
                finish(number)
            elif not is_late[number]:
                started.append(number)
        return tuple(calls), tuple(started), tuple(nearer), finished

    nothing: Script = ((), (), (), 0)
    count = len(operations)
    scripts: list[Script] = [nothing] * (2 * count)
    for number in range(count):
        if len(needed[number]) > 1:
            scripts[number] = script([number])
        if number in messages and not is_late[number]:
            scripts[~number] = script([], number)
    scripts.insert(count, script([number for number in range(count) if not needed[number]]))
    return scripts
