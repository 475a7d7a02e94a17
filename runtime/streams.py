"""Work on the device: a stream for each threadblock, and events between them.

The executor's graph is the host's. There a copy or a reduction on the device counts as finished as soon as it is put
on its threadblock's stream; so is the copy of what a message brought. What comes after it on the same stream needs
nothing more. On another stream it first waits for the operation's event; and a message that touches host memory or
another rank waits until the event has come, which is polled. The last operation of a run waits for all streams.

Work on frames goes to codec streams, so that a chunk is coded or decoded while its threadblock's stream copies its
neighbours. What nothing else waits for, the decodes of results, has one of its own, behind the others by priority. Each
has its own work space, so there are few. What is put there is bounded by the run's frames, which have memory each.

An operation waits for those before it in the host's graph. Between two of them may stand a message that is settled: it
was itself not started, or not finished, before the event had come. Behind it nothing need be waited for. Or there
stands one whose data stay with their sender: it did nothing on the device, so that what came before it is still to be
waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from taccl.runtime.coders import Note
from taccl.runtime.gpu import Cuda, address
from taccl.runtime.plan import Operation
from taccl.runtime.transport import Message

Action = Callable[[], object]

# What an operation leaves behind for those that follow it.
WORK = "work"  # on its stream, and an event that is recorded
SETTLED = "settled"  # nothing: all before it is done, and seen from the host
PASSED = "passed"  # nothing, and what came before it may be under way


CODING = ("encode", "decode", "accumulate", "pack")
CODERS = 4  # codec streams at most, of which the last is for what nothing waits for
URGENT = -1  # priority of the others


def coders(operations: Sequence[Operation], one: bool = False) -> dict[int, int]:
    """Of each operation on frames its codec stream. one: they must be done one after another."""
    awaited = {before for op in operations for before in op.predecessors}
    return {
        number: 0 if one else op.threadblock % (CODERS - 1) if number in awaited else CODERS - 1
        for number, op in enumerate(operations)
        if op.kind in CODING
    }


class Lane:
    """Where the device work of one operation goes, and what must be done on the device before it.

    head: of a message that is sized, (HEAD_BYTES,) uint8 of host memory: the sender finds its head there when the lane
    is ready, and the receiver puts it there when the message has come. check: raises what kernels have found wrong; to
    be called when an event has come and before data leave this rank.
    """

    __slots__ = ("_cuda", "awaited", "before", "check", "event", "head", "stream")

    def __init__(self, cuda: Cuda, stream: Any, check: Action | None = None) -> None:
        self._cuda, self.stream = cuda, stream
        self.check = check
        self.head: np.ndarray[Any, Any] | None = None
        self.event = cuda.event()
        self.awaited = False  # whether the event need be recorded
        self.before: tuple[Lane, ...] = ()

    def order(self, stream: Any) -> None:
        """What is put on the stream from now on comes after what must be done before."""
        for lane in self.before:
            if lane.stream is not stream:
                stream.wait_event(lane.event)

    def ready(self) -> bool:
        """Whether all that must be done before is done, and right. Never waits."""
        done = self._cuda.done
        if not all(done(lane.event) for lane in self.before):
            return False
        if self.check is not None:
            self.check()
        return True

    def record(self) -> None:
        """The operation's work is on its stream."""
        self.event.record(self.stream)


class _PieceTimes:
    """When the work of operations on frames is done, in seconds of the device's clock, from the beginning of a run."""

    def __init__(self, cuda: Cuda, notes: list[Note]) -> None:
        self._cuda, self._notes = cuda, notes
        self._zero = cuda.clock()
        self._ends: dict[int, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """A run begins, on the current stream."""
        self._zero.record()

    def around(self, number: int, stream: Any, put: Action) -> Action:
        """What puts the work on its stream between two events."""
        first, last = self._ends[number] = self._cuda.clock(), self._cuda.clock()

        def timed() -> None:
            first.record(stream)
            put()
            last.record(stream)

        return timed

    def read(self) -> None:
        """Note all work of a run that is over, in the order in which it was done."""
        between = self._cuda.between_s
        found = [
            (number, between(self._zero, first), between(self._zero, last))
            for number, (first, last) in self._ends.items()
        ]
        self._notes += sorted(found, key=lambda note: note[2])


class Streams:
    """The lanes of a plan's operations; a port too: of the message by which a run waits for the device.

    coders: of operations on frames their codec streams. check: as of a lane. notes: gets one of each of these
    operations when a run is over.
    """

    idle = None

    def __init__(
        self,
        cuda: Cuda,
        operations: Sequence[Operation],
        coders: Mapping[int, int] | None = None,
        check: Action | None = None,
        notes: list[Note] | None = None,
    ) -> None:
        self.cuda, self._check = cuda, check
        self._coded = coders = coders or {}
        self._pieces = None if notes is None else _PieceTimes(cuda, notes)
        self._streams = {tb: cuda.stream() for tb in sorted({op.threadblock for op in operations})}
        coding = {
            one: cuda.stream(None if one == CODERS - 1 else URGENT) for one in sorted(set(coders.values()))
        }
        self.lanes = [
            Lane(cuda, coding[coders[n]] if n in coders else self._streams[op.threadblock], check)
            for n, op in enumerate(operations)
        ]
        # What the caller put on its own stream before the run.
        self._root = Lane(cuda, None)
        self._ends = [(cuda.event(), stream) for stream in (*self._streams.values(), *coding.values())]
        self._after: list[tuple[Any, Action]] = []  # what is to be called once an event has come

    def connect(self, needed: Sequence[Sequence[int]], leaves: Sequence[str], messages: set[int]) -> None:
        """Lay out what waits for what.

        needed: of each operation those before it. leaves: of each one WORK, SETTLED or PASSED. messages: those that are
        no copy or reduction.
        """
        before: list[frozenset[int]] = []  # operations, -1: the beginning of the run
        for number, lane in enumerate(self.lanes):
            found: set[int] = set()
            for one in needed[number]:
                if leaves[one] == WORK:
                    found.add(one)
                elif leaves[one] == PASSED:
                    found |= before[one]
            before.append(frozenset(found) if needed[number] else frozenset({-1}))
            lane.before = tuple(self._root if one < 0 else self.lanes[one] for one in sorted(before[number]))
            for other in lane.before:
                # Messages may use streams of their own.
                if number in messages or other.stream is not lane.stream:
                    other.awaited = True

    def begin(self) -> None:
        """A run begins: it comes after what is on the current stream."""
        if self._pieces is not None:
            self._pieces.begin()
        self._root.event.record()

    def copy(self, number: int, target: Any, source: Any) -> Action:
        """What puts a copy between two arrays on the operation's stream."""
        return self.cuda.copy(address(target), address(source), target.nbytes, self.lanes[number].stream)

    def copy_used(self, number: int, target: Any, source: Any, used: Callable[[], int]) -> Action:
        """As `copy`, of as many bytes as are used then."""
        into, of, stream = address(target), address(source), self.lanes[number].stream
        return lambda: self.cuda.copy(into, of, used(), stream)()

    def reduce(
        self, number: int, combine: Callable[..., object], one: Any, other: Any, result: Any
    ) -> Action:
        """What puts a reduction of two arrays into a third on the operation's stream."""
        # CuPy first copies an operand that overlaps the result, if it is not the same object.
        operands = (result if address(array) == address(result) else array for array in (one, other))
        work = functools.partial(combine, *operands, out=result)
        return self.cuda.within(self.lanes[number].stream, work)

    def within(self, number: int, put: Action) -> Action:
        """What does `put` with the operation's stream as the current one."""
        return self.cuda.within(self.lanes[number].stream, put)

    def work(self, number: int, put: Action, then: Action | None = None) -> Action:
        """What puts work on the operation's stream, in its order. then: is called when the work is done."""
        lane = self.lanes[number]
        lane.awaited |= then is not None
        if self._pieces is not None and number in self._coded:
            put = self._pieces.around(number, lane.stream, put)

        def start() -> None:
            lane.order(lane.stream)
            put()
            if lane.awaited:
                lane.record()
            if then is not None:
                self._after.append((lane.event, then))

        return start

    def last(self) -> Message:
        """The message that ends a run: it is finished when all streams are done."""
        return Message(self, self, self._record_ends)

    def _record_ends(self) -> None:
        for event, stream in self._ends:
            event.record(stream)

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        """Call what has waited for its event; whether the run is over."""
        done = self.cuda.done
        if self._after:
            after, self._after = self._after, []
            self._after = [
                (event, then) for event, then in after if not self._called(event, then)
            ] + self._after
        for place, token in enumerate(tokens):
            if token is not None:
                over = not self._after and all(done(event) for event, _ in self._ends)
                if over and self._check is not None:
                    self._check()
                if over and self._pieces is not None:
                    self._pieces.read()
                return (place,) if over else None
        return None

    def _called(self, event: Any, then: Action) -> bool:
        if not self.cuda.done(event):
            return False
        then()
        return True
