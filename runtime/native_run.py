"""A plan whose messages all go through the memory of a node, run by compiled code (`runtime/native/executor.c`).

The graph of operations is laid out once as a table of numbers, addresses among them; a run is one call, which comes
back when it is done, when Python has something to do (reductions that the code has no loop for), and after some polls
without success. What it does is what the executor does in Python, with the same flags.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from taccl.runtime import native
from taccl.runtime.actions import Action, Actions
from taccl.runtime.copying import cache_bytes, overlap, past_caches
from taccl.runtime.plan import Operation, Plan, essential, followers, staged
from taccl.runtime.process_memory import address
from taccl.runtime.transport import Message, Native

BURST = 16  # polls without success in one call

# As the structs in executor.c.
OPERATION = np.dtype(
    [(name, np.int64) for name in ("kind", "needed", "first", "count", "bytes")]
    + [("to", np.int64, 2), ("from", np.int64, 2)]
    + [
        (name, np.int64)
        for name in (
            "mine",
            "wait",
            "tell",
            "release",
            "process",
            "how",
            "asleep",
            "pipe",
            "missing",
            "phase",
            "when_ns",
        )
    ]
)
SEND, RECEIVE, COPY, REDUCE, CALL = range(5)
MOVE, READ = 1, 2
DONE, IDLE, ASK = range(3)
STARTED = 1
SUMS = ("float32", "float64", "int32", "int64", "uint8")


class Way(ctypes.Structure):
    """As `struct way` in executor.c."""

    _fields_ = (
        ("past", ctypes.c_int64),
        ("tries", ctypes.c_int64),
        ("now_ns", ctypes.c_int64),
        ("taken_ns", ctypes.c_int64 * 2),
    )


class State(ctypes.Structure):
    """As `struct state` in executor.c."""

    _fields_ = (
        ("operations", ctypes.c_void_p),
        ("followers", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("ready", ctypes.c_void_p),
        ("outstanding", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "firsts", "left", "readies", "started")),
        ("run", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("epoch", "marks")),
        *((name, Way) for name in ("copies", "reads")),
        *((name, ctypes.c_int64) for name in ("runs", "polls", "spins", "yields")),
        ("asked", ctypes.c_int64),
    )


@functools.lru_cache(maxsize=1)
def _calls() -> tuple[Any, Any]:
    """(answer, advance) of the compiled code, which is there."""
    found = native.library()
    assert found is not None
    answer, advance = found.taccl_answer, found.taccl_advance
    # Without argtypes a call of one pointer takes half of the time.
    answer.restype, advance.restype = None, ctypes.c_int
    return answer, advance


class NativeRun:
    """The table of a plan, and runs of it. marks: as in `Executor`."""

    def __init__(
        self,
        plan: Plan,
        messages: Mapping[int, Message],
        actions: Actions,
        combine: Callable[..., object],
        marks: list[tuple[int, float]] | None,
    ) -> None:
        self._answer, self._advance = _calls()
        self._plan, self._messages, self._actions, self._marks = plan, messages, actions, marks
        self._told = {number: message.native() for number, message in messages.items() if message.native}
        operations = plan.operations
        needed = essential(operations)
        found = followers(needed)
        table = self._table = np.zeros(len(operations) + 1, OPERATION)
        first = 0
        for number, op in enumerate(operations):
            row = table[number]
            row["needed"], row["first"], row["count"] = len(needed[number]), first, len(found[number])
            first += len(found[number])
            if number in messages:
                self._write_message(row, number, op)
            else:
                self._write_work(row, number, op, combine)

        def order(numbers: Iterable[int]) -> list[int]:
            """As they lie on a stack of which messages come first: nobody waits for copies to end before they begin."""
            return sorted(numbers, key=lambda number: (number not in messages, number), reverse=True)

        begin = order(number for number, before in enumerate(needed) if not before)
        self._begin = np.array(begin or [0], np.int64)
        self._followers = np.array([later for one in found for later in order(one)] or [0], np.int64)
        self._lists = np.zeros((2, len(operations) + 1), np.int64)
        told = next(iter(self._told.values()))
        self._epoch = told.epoch
        moved = int(table["bytes"].sum())
        # A first guess, where both ways are timed (executor.c): what is read and written is less than twice the caches.
        copies = Way(past=past_caches(moved, told.ranks), tries=moved * told.ranks < cache_bytes())
        self._state = State(
            operations=address(table), followers=address(self._followers), first=address(self._begin),
            ready=address(self._lists[0]), outstanding=address(self._lists[1]), count=len(operations),
            firsts=len(begin), run=address(np.asarray(self._epoch)), epoch=self._epoch[0], copies=copies,
            marks=marks is not None, reads=Way(tries=True),
        )  # fmt: skip
        self._place = ctypes.byref(self._state)
        self._asked = (0, 0, False)
        self._known: dict[int, Action] = {}  # what Python was asked for

    def _lies(self, number: int) -> Native | None:
        """Where the next operation finds what a message brings, if it reads it there."""
        told = self._told.get(number)
        if told is None or told.process or not staged(self._plan.operations[number]):
            return None
        return told if told.lasting or self._plan.direct else None

    def _write_message(self, row: Any, number: int, op: Operation) -> None:
        told = self._told[number]
        array = self._actions.view(op.src if op.kind == "send" else op.dst)
        row["wait"], row["tell"] = told.wait, told.tell
        row["asleep"], row["pipe"] = told.bell
        if op.kind == "send":
            row["kind"], row["to"], row["from"] = SEND, told.room, address(array)
            row["bytes"] = array.nbytes if told.room[0] else 0
            return
        row["kind"] = RECEIVE
        if self._lies(number) is None:
            row["how"] = READ if told.process else MOVE
            row["to"], row["from"], row["bytes"] = address(array), told.source, array.nbytes
            row["process"], row["release"] = told.process, told.release

    def _write_work(self, row: Any, number: int, op: Operation, combine: Callable[..., object]) -> None:
        view = self._actions.view
        result = view(op.dst)
        row["to"], row["bytes"] = address(result), result.nbytes
        told = self._lies(number - 1)
        if told is None:
            row["from"] = address(view(op.src if op.kind == "copy" else op.received))
        else:
            row["from"], row["release"] = told.source, told.release
            row["asleep"], row["pipe"] = told.bell
        to, operands = int(row["to"][0]), [int(row["from"][0])]
        if op.kind == "reduce":
            row["mine"] = address(view(op.src))
            operands.append(int(row["mine"]))
        known = op.kind == "copy" or (combine is np.add and result.dtype.name in SUMS)
        # Copies take any address; and what lies in a parcel is read by the code alone.
        odd = op.kind == "reduce" and any(place % result.itemsize for place in (to, *operands))
        if not known or odd or any(overlap(to, place, result.nbytes) for place in operands):
            row["kind"] = CALL
        elif op.kind == "copy":
            row["kind"] = COPY
        else:
            row["kind"], row["how"] = REDUCE, SUMS.index(result.dtype.name)

    def _call(self, number: int) -> None:
        """What the code has no loop for, or where it failed: here errors have words."""
        if number in self._known:
            self._known[number]()
            return
        op = self._plan.operations[number]
        if number in self._messages:
            action = self._actions.arrival(number, op)
        elif self._actions.reduces_next(number - 1):
            action = self._actions.reduce_from(op, self._messages[number - 1].lies)
        else:
            action = self._actions.beginning(number, op)
        assert action is not None
        self._known[number] = action
        action()

    @property
    def left(self) -> int:
        """Operations that are not finished."""
        state = self._state
        return int(state.left if state.epoch == self._epoch[0] else state.count)

    def start(self) -> None:
        """Begin a run, as it does when the transport has given it a number."""

    def advance(self, polls: int, rest: Callable[[], object] | None, spins: int) -> bool:
        """As `Executor.advance`."""
        advance, place = self._advance, self._place
        burst = polls if polls < BURST else BURST
        asked = (burst, spins, rest is not None)
        if asked != self._asked:
            self._asked = self._state.polls, self._state.spins, self._state.yields = asked
        left = vain = 0
        while True:
            code = advance(place)
            if code == DONE:
                if self._marks is not None:
                    self._note(self._marks)
                return True
            if code == ASK:
                self._call(self._state.asked)
                self._answer(place)
                continue
            before, left = left, self._state.left
            vain = vain + burst if left == before else burst
            if rest is not None:
                rest()
            if vain >= polls:
                return False

    def _note(self, marks: list[tuple[int, float]]) -> None:
        times = self._table["when_ns"][:-1]
        for number in np.argsort(times, kind="stable").tolist():
            if times[number]:
                marks.append((number, float(times[number]) / 1e9))

    def waiting(self) -> list[int]:
        """The messages that are started and not finished, the first of each connection, in step order."""
        operations = self._plan.operations
        first: dict[tuple[str, int, int], int] = {}
        for number in np.flatnonzero(self._table["phase"][:-1] == STARTED).tolist():
            op = operations[number]
            first.setdefault((op.kind, op.peer, op.channel), number)
        return sorted(first.values())
