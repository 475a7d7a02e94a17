"""Run one rank's plan: a flat graph of operations, one thread, no callbacks.

Plan, memory and transport are bound once, into scripts: what to call when a message has arrived, through all the
operations that waited for it alone, and which operations with other predecessors it brings nearer. So a step of a
chain costs a poll and the calls that it needs. A run resets counters and starts what has no predecessor. What became
ready last runs first, so that a message which arrived is passed on before the next one is looked at.

As a rule only the first outstanding message of each connection is polled, because a poll costs something for each
message and messages mostly finish in order. A later one may finish first, though, and even be what the first one
waits for (a receive into memory that the later send still reads lets the peer go on). So when nothing happens for a
few polls, all outstanding messages are polled. Sends that no operation waits for are polled at the end only, when all
messages go one way.

Short messages of one node need none of this: they are done in the order of the trace (`runtime/in_order.py`). Where all
messages of a rank go through the memory of its node and taccl's compiled code is there, that has the loop
(`runtime/native_run.py`).

On a device local operations are put on streams (`runtime/streams.py`), and one more operation ends the run: it waits
until all streams are done.
"""

from __future__ import annotations

import os
from bisect import insort
from collections.abc import Callable, Mapping
from typing import Any

from taccl.runtime import native
from taccl.runtime.actions import Actions
from taccl.runtime.coders import CodecPort, CodecThread, Coder, Inline, Note
from taccl.runtime.device_frames import DeviceFrames
from taccl.runtime.frames import FrameMemory
from taccl.runtime.gpu import Cuda
from taccl.runtime.in_order import InOrder
from taccl.runtime.native_run import NativeRun
from taccl.runtime.pieces import pieces
from taccl.runtime.plan import Operation, Plan, essential, followers, staged
from taccl.runtime.scripts import NO_LINES, lay_lines, write_scripts
from taccl.runtime.streams import PASSED, SETTLED, WORK, Lane, Streams
from taccl.runtime.transport import Message, Port, Transport

PATIENCE = 16  # polls without success before all outstanding messages are polled


class Executor:
    """A plan bound to memory and a transport. `memory` maps each buffer letter to an array of elements.

    Made in two steps, because a receive may have to know where its sender's data lie: the constructor registers the
    sends, `connect` the receives. `combine` reduces two arrays into a third, `out`. `marks` gets what the last run did
    when: the operation and the time (perf_counter) of each send's start and of each receive's arrival. frames, coder:
    of a coded plan, its frame memory and what works on it, which on a device is the frame memory itself. cuda: where
    memory is on a device. notes: as in `Streams`, there.
    """

    def __init__(
        self,
        plan: Plan,
        memory: Mapping[str, Any],
        chunk_elements: int,
        combine: Callable[..., object],
        transport: Transport,
        marks: list[tuple[int, float]] | None = None,
        frames: FrameMemory | DeviceFrames | None = None,
        coder: Coder | None = None,
        cuda: Cuda | None = None,
        notes: list[Note] | None = None,
    ) -> None:
        self.plan = plan
        self._operations = plan.operations
        self._streams = None
        if isinstance(frames, DeviceFrames) and cuda is not None:
            self._streams = Streams(cuda, plan.operations, frames.streams, frames.check, notes)
        elif cuda is not None:
            self._streams = Streams(cuda, plan.operations)
        self._frames, self._coder = frames, coder
        self._sized = frames is not None and frames.sizes.sized
        self.transport = transport
        self._left = 0
        self._loop: NativeRun | InOrder | None = None  # that has the runs in place of the one below
        self._chunk, self._combine = chunk_elements, combine
        self._marks = marks
        self._messages: dict[int, Message] = {}
        self._begun = False  # once
        self._actions = Actions(plan, memory, chunk_elements, combine, self._messages, frames, self._streams)
        self._closed = ""  # what the beginning of the run waits for
        self._lines, self._all_lines = NO_LINES, list[list[int]]()
        self._late: list[tuple[Port, list[int]]] = []
        for number, op in enumerate(plan.operations):
            if op.kind == "send":
                self._messages[number] = transport.send(
                    self._actions.view(op.src),
                    op.peer,
                    op.tag,
                    self._sized and bool(op.frames),
                    *self._lane(number),
                )

    def _lane(self, number: int) -> tuple[Lane, ...]:
        if self._streams is None:
            return ()
        lane, op = self._streams.lanes[number], self.plan.operations[number]
        if op.frames and isinstance(self._frames, DeviceFrames):
            area = op.src if op.kind == "send" else op.dst
            assert area is not None
            lane.head = self._frames.head(area)
        return (lane,)

    def connect(self) -> None:
        """Register the receives and lay everything out for the runs."""
        operations = self.plan.operations
        for number, op in enumerate(operations):
            if op.kind == "recv":
                self._messages[number] = self.transport.recv(
                    self._actions.view(op.dst),
                    op.peer,
                    op.tag,
                    self._sized and bool(op.frames),
                    *self._lane(number),
                )
        told = {number: message.native for number, message in self._messages.items()}
        plain = self._frames is None and self._streams is None
        if plain and told and all(told.values()) and native.library() is not None:
            self._loop = NativeRun(self.plan, self._messages, self._actions, self._combine, self._marks)
            return
        in_order = self.transport.buffered and self._marks is None
        if isinstance(self._frames, FrameMemory):
            assert self._coder is not None
            if in_order:  # pieces are done where they stand
                self._coder = Inline()
            self._messages |= pieces(
                self.plan,
                self._messages,
                self._frames,
                self._actions,
                self._chunk,
                self._combine,
                self._coder,
            )
        if in_order:
            self._loop = InOrder(self.plan, self._messages, self._actions)
            return
        if self._streams is not None:
            self._order_streams(self._streams)
        needed = essential(self._operations)
        found = followers(needed)
        self._counts = [len(before) for before in needed]
        self._lines = lay_lines(self._operations, self._messages, [bool(later) for later in found])
        self._all_lines = [line for *_, lines in self._lines.groups for line in lines]
        self._late_count = sum(len(numbers) for _, numbers in self._lines.late)
        self._scripts = write_scripts(
            self._operations, self._messages, self._actions, needed, found, self._lines.is_late, self._marks
        )
        self._missing: list[int] = []
        self._ready: list[int] = []
        self._waited = 0  # operations left, of those that are not late sends
        self._vain = 0  # polls without success, one after another

    def _order_streams(self, streams: Streams) -> None:
        """Say what waits for what on the device, and add the operation that ends a run."""
        operations, messages = self.plan.operations, self._messages
        needed = essential(operations)

        def leaves(number: int) -> str:
            message = messages.get(number)
            if message is None or message.queued:
                return WORK
            if operations[number].kind == "send" or message.view is None:
                return SETTLED
            return PASSED if self._actions.lends(number) else WORK

        streams.connect(needed, [leaves(n) for n in range(len(operations))], set(messages))
        last = tuple(number for number, later in enumerate(followers(needed)) if not later)
        self._operations = (*operations, Operation("end", None, None, None, -1, 0, -1, -1, -1, last))
        messages[len(operations)] = streams.last()

    @property
    def left(self) -> int:
        """Operations that are not finished; falls while there is progress."""
        if self._loop is None:
            return self._left
        return len(self._operations) if self._closed else self._loop.left

    @property
    def coding(self) -> bool:
        """Whether it codes, where that is not done at once."""
        return self._frames is not None and isinstance(self._coder, CodecPort)

    @property
    def done(self) -> bool:
        """Whether the run is finished (also before the first one)."""
        return self.left == 0

    def start(self) -> None:
        """Begin a run."""
        self._begun = True
        self._closed = self.transport.begin()
        if self._marks is not None:
            self._marks.clear()
        if self._streams is not None:
            self._streams.begin()
        if self._loop is not None:
            self._loop.start()
            return
        self._missing = self._counts.copy()
        self._ready = [len(self._counts)]
        if self._late_count:
            self._late = [(port, numbers.copy()) for port, numbers in self._lines.late]
        self._left = len(self._counts)
        self._waited = self._left - self._late_count

    def advance(self, polls: int = 1, rest: Callable[[], object] | None = None, spins: int = 0) -> bool:
        """Go on until the run is done or `polls` polls one after another found nothing; whether it is done.

        rest: called after each such poll beyond the first `spins`.
        """
        if self._closed and not self._open(polls, rest):
            return False
        if self._loop is not None:
            if not self._loop.advance(polls, rest, spins):
                return False
            self.transport.end()
            return True
        # Local names: the loop below is what a small message costs.
        ready, missing, scripts, laid = self._ready, self._missing, self._scripts, self._lines
        lines, heads_of, slot_of, tokens = laid.line, laid.heads, laid.slot, laid.tokens
        groups, telling, late = laid.groups, laid.telling, self._late_count
        coder = self._coder if isinstance(self._coder, CodecThread) else None
        watched = bool(telling) or self.transport.sleeper is not None
        waited, vain, idle_polls = self._waited, self._vain, 0
        while self._left:
            while ready:
                actions, started, nearer, finished = scripts[ready.pop()]
                for action in actions:
                    action()
                waited -= finished
                for number in started:
                    line = lines[number]
                    if not line or number < line[0]:
                        heads_of[number][slot_of[number]] = tokens[number]
                    if not line or number > line[-1]:
                        line.append(number)
                    else:
                        insort(line, number)
                for number in nearer:
                    missing[number] -= 1
                    if not missing[number]:
                        ready.append(number)
            if waited:
                for poll, idle, heads, queues in groups:
                    found = poll(heads)
                    if found:
                        for slot in found:
                            line = queues[slot]
                            ready.append(~line.pop(0))
                            heads[slot] = tokens[line[0]] if line else idle
                if not ready and (vain % PATIENCE == PATIENCE - 1 or (watched and self._must_look())):
                    self._poll_behind()
                    if not ready and self._news():
                        continue  # what came meanwhile is a first one's, and nothing wakes the rank for it again
                if ready:
                    self._left = waited + late
                    vain = idle_polls = 0
                    continue
            else:
                left = self._poll_late() if late else 0
                if left < self._left:
                    self._left = left
                    vain = idle_polls = 0
                    continue
            vain += 1
            idle_polls += 1
            if coder is not None and coder.busy:
                coder.rest()
            elif idle_polls > spins and rest is not None:
                rest()
            if idle_polls >= polls:
                break
        self._waited, self._vain = waited, vain
        if self._left:
            return False
        self.transport.end()
        return True

    def _open(self, polls: int, rest: Callable[[], object] | None) -> bool:
        """Wait until the transport lets the run begin; whether it does."""
        for _ in range(polls):
            self._closed = self.transport.begin()
            if not self._closed:
                return True
            if rest is not None:
                rest()
            os.sched_yield()  # what wakes a rank that sleeps may not be what it waits for
        return False

    def _must_look(self) -> bool:
        """Whether messages behind the first ones are finished, or the rank sleeps unless they are."""
        sleeper = self.transport.sleeper
        return (sleeper is not None and sleeper.armed) or self._news()

    def _news(self) -> bool:
        """Whether a port knows of messages that it has not told."""
        for port in self._lines.telling:  # noqa: SIM110 (any() takes twice as long)
            if port.news:
                return True
        return False

    def _poll_behind(self) -> None:
        """Poll the messages behind the first ones of their lines, but for those of ports that would know of news."""
        for port, lines in self._lines.long:
            if port in self._lines.telling and not port.news:
                continue
            behind = [(line, number) for line in lines for number in line[1:]]
            finished = port.poll([self._lines.tokens[number] for _, number in behind]) if behind else None
            for place in finished or ():
                line, number = behind[place]
                line.remove(number)
                self._ready.append(~number)

    def _poll_late(self) -> int:
        """Poll the sends that nothing waits for; how many are left."""
        for port, numbers in self._late:
            finished = port.poll([self._lines.tokens[number] for number in numbers]) if numbers else None
            if finished:
                gone = {numbers[place] for place in finished}
                numbers[:] = [number for number in numbers if number not in gone]
        return sum(len(numbers) for _, numbers in self._late)

    def waiting(self) -> list[int]:
        """The messages that are started and not finished, the first of each connection, in step order."""
        if self._loop is not None:
            return self._loop.waiting()
        # Copies, because the watchdog's thread asks too, while the run may go on.
        heads = sorted(line[0] for line in map(list, self._all_lines) if line)
        return heads or sorted(number for _, numbers in self._late for number in list(numbers))

    def describe(self) -> str:
        """What the run waits for, for the message that ends a job."""
        operations, waiting = self._operations, self.waiting()
        if self._closed:
            return f"it waits {self._closed}"
        if not waiting:
            return f"it has {self.left} operations left and waits for no message"
        number = next((n for n in waiting if operations[n].kind == "recv"), waiting[0])
        op = operations[number]
        if op.kind == "end":
            return "it waits for its device to finish what was started"
        if op.peer < 0:
            return f"threadblock {op.threadblock}, step {op.step} waits for its codec to {op.kind} frames"
        what = "a message from" if op.kind == "recv" else "its message to be received by"
        if (held := self._messages[number].held) is not None and held():
            what = "its turn on the way to"
        more = f" ({len(waiting) - 1} other messages are waited for too)" if len(waiting) > 1 else ""
        return (
            f"threadblock {op.threadblock}, step {op.step} waits for {what} rank {op.peer}, "
            f"{self._chunks(number)}{more}"
        )

    def _chunks(self, number: int) -> str:
        """What a message carries, by the place where the program has it."""
        op = self.plan.operations[number]
        place = op.carries or (op.src if op.kind == "send" else op.dst)
        if staged(op):  # the next operation uses it
            user = self.plan.operations[number + 1]
            place = user.src if user.dst == place else user.dst
        assert place is not None
        if place[0] == "t":  # of sums; the rest of the step says which chunks
            step = [o for o in self.plan.operations if (o.threadblock, o.step) == (op.threadblock, op.step)]
            named = [
                extent for o in step for extent in (o.dst, o.src) if extent is not None and extent[0] in "ios"
            ]
            place = named[0] if named else place
        name = {"i": "input", "o": "output", "s": "scratch", "t": "staging"}[place[0]]
        last = f" to {place[1] + place[2] - 1}" if place[2] > 1 else ""
        return f"chunk{'s' * bool(last)} {place[1]}{last} of its {name}"

    def coded_bytes(self) -> tuple[int, int]:
        """Of the messages of frames that the last run sent (0 before the first): (bytes of the values, on the wire)."""
        values = wire = 0
        for op in self.plan.operations if self._begun else ():
            if op.kind == "send" and op.frames and self._frames is not None and op.src is not None:
                values += len(op.frames) * self._chunk * self._frames.sizes.value_bytes
                wire += self._frames.used(op.src)
        return values, wire

    def close(self) -> None:
        """Free the transport's messages."""
        for message in self._messages.values():
            if message.free is not None:
                message.free()
        # Views of shared memory live on in them.
        self._messages.clear()
        self._scripts, self._lines, self._all_lines, self._loop = [], NO_LINES, [], None
        self._actions.forget()
