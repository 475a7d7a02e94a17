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

Short messages of one node need none of this. Where every message of the job is finished for its sender when it is sent
(`Transport.buffered`), each rank does its operations in the order of the trace. That order is one for all ranks, and
in it each message is sent before it is received; so the first operation that is not done can always be done.

Where all messages of a rank go through the memory of its node and taccl's compiled code is there, that has the loop
(`runtime/native_run.py`).

On a device local operations are put on streams (`runtime/streams.py`), and one more operation ends the run: it waits
until all streams are done.
"""

from __future__ import annotations

import os
import time
from bisect import insort
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from taccl.runtime import native
from taccl.runtime.actions import Action, Actions
from taccl.runtime.coders import CodecPort, CodecThread, Coder, Inline, Note, Wanted
from taccl.runtime.compile import Operation, Plan, essential, followers, staged
from taccl.runtime.device_frames import DeviceFrames
from taccl.runtime.frames import FrameMemory
from taccl.runtime.gpu import Cuda
from taccl.runtime.native_run import NativeRun
from taccl.runtime.streams import CODING, PASSED, SETTLED, WORK, Lane, Streams
from taccl.runtime.transport import Message, Port, Transport

PATIENCE = 16  # polls without success before all outstanding messages are polled

# What to call, the polled messages that it starts, operations with one predecessor less, how many are finished.
Script = tuple[tuple[Action, ...], tuple[int, ...], tuple[int, ...], int]

# What tells whether a message has arrived, its operation, and what to call then.
Step = tuple[Callable[[], bool], int, list[Action]]


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
        self._native: NativeRun | None = None
        self._chunk, self._combine = chunk_elements, combine
        self._marks = marks
        self._messages: dict[int, Message] = {}
        self._actions = Actions(plan, memory, chunk_elements, combine, self._messages, frames, self._streams)
        self._closed = ""  # what the beginning of the run waits for
        self._lines: list[list[int]] = []
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
            self._native = NativeRun(self.plan, self._messages, self._actions, self._combine, self._marks)
            return
        in_order = self.transport.buffered and self._marks is None
        if isinstance(self._frames, FrameMemory):
            self._bind_codec(self._frames, in_order)
        self._steps = self._write_steps() if in_order else []
        if self._steps:
            self._run = self._in_order()
            return
        if self._streams is not None:
            self._order_streams(self._streams)
        needed = essential(self._operations)
        found = followers(needed)
        self._counts = [len(before) for before in needed]
        self._lay_lines([bool(later) for later in found])
        self._write_scripts(needed, found)
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

    def _bind_codec(self, frames: FrameMemory, in_order: bool) -> None:
        """Make pieces of work of the operations on frames. in_order: they are done where they stand."""
        assert self._coder is not None
        operations = self.plan.operations
        coder = Inline() if in_order else self._coder
        self._coder = coder
        awaited = {before for op in operations for before in op.predecessors}
        leads: set[int] = set()  # to messages of frames
        for number in reversed(range(len(operations))):
            if number in leads or (operations[number].kind == "send" and operations[number].frames):
                leads.update(operations[number].predecessors)
        wanted = self._wanted()
        for number, op in enumerate(operations):
            if op.kind in CODING:
                work = frames.work(op, self._actions.view, self._chunk, self._combine)
                turn = 0 if number in leads else 1 if number in awaited else 2
                self._messages[number] = coder.message(work, turn, wanted[number])

    def _wanted(self) -> list[Wanted]:
        """Of each operation that only messages wait for, which say whether they are wanted now, what asks them."""
        operations = self.plan.operations
        asks: list[dict[Callable[[], bool], None] | None] = [{} for _ in operations]
        for number in reversed(range(len(operations))):
            op, mine = operations[number], asks[number]
            if op.kind == "send":
                wants = self._messages[number].wanted
                mine = None if wants is None else {wants: None}
            elif op.kind != "pack":
                mine = None
            for before in op.predecessors:
                known = asks[before]
                asks[before] = None if known is None or mine is None else known | mine
        return [
            tuple(found) if found and op.kind == "encode" else ()
            for found, op in zip(asks, operations, strict=True)
        ]

    def _write_scripts(self, needed: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> None:
        """The script of the beginning of operation n is at n, that of the arrival of message n at ~n."""
        operations, messages = self._operations, self._messages

        def messages_first(numbers: Sequence[int]) -> list[int]:
            return sorted(numbers, key=lambda n: (n not in messages, n))

        def script(begin: Sequence[int], arrived: int | None = None) -> Script:
            actions: list[Action] = []
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
                if self._marks is not None and operations[arrived].kind == "recv":
                    actions.append(self._mark(arrived))
                if (action := self._actions.arrival(arrived, operations[arrived])) is not None:
                    actions.append(action)
                finish(arrived)
            while stack:
                number = stack.pop()
                action = self._actions.beginning(number, operations[number])
                if self._marks is not None and operations[number].kind == "send":
                    actions.append(self._mark(number))
                if action is not None:
                    actions.append(action)
                if number not in messages or messages[number].port is None:
                    finish(number)
                elif not self._is_late[number]:
                    started.append(number)
            return tuple(actions), tuple(started), tuple(nearer), finished

        nothing: Script = ((), (), (), 0)
        count = len(operations)
        self._scripts: list[Script] = [nothing] * (2 * count)
        for number in range(count):
            if len(needed[number]) > 1:
                self._scripts[number] = script([number])
            if number in messages and not self._is_late[number]:
                self._scripts[~number] = script([], number)
        # What begins a run has the place between the two.
        self._scripts.insert(count, script([number for number in range(count) if not needed[number]]))

    def _write_steps(self) -> list[Step]:
        """The operations in the order of the trace: what to wait for, and what to do up to the next wait."""
        steps: list[Step] = []
        begin: list[Action] = []
        actions = begin
        for number, op in enumerate(self.plan.operations):
            if op.kind == "recv":
                actions = []
                arrived = self._messages[number].arrived
                assert arrived is not None
                steps.append((arrived, number, actions))
                # Of what is staged the next operation is the only reader.
                action = None if self._actions.reduces_next(number) else self._actions.arrival(number, op)
            elif op.kind == "reduce" and self._actions.reduces_next(number - 1):
                action = self._actions.reduce_from(op, self._messages[number - 1].lies)
            else:
                action = self._actions.beginning(number, op)
            if action is not None:
                actions.append(action)
        return [(_true, -1, begin), *steps]

    def _in_order(self) -> Generator[int]:
        """Do the steps, for run after run; yields how many are left when a message has not arrived, and at the end."""
        steps = [(len(self._steps) - place, *step) for place, step in enumerate(self._steps)]
        while True:
            for left, arrived, _, actions in steps:
                while not arrived():
                    yield left
                for action in actions:
                    action()
            yield 0

    def _lay_lines(self, awaited: Sequence[bool]) -> None:
        """Give every polled message its line, and each port the first messages of its lines."""
        operations = self._operations
        self._tokens = [m.token if (m := self._messages.get(n)) else None for n in range(len(operations))]
        # Of each polled message: the outstanding messages of its connection in order, the list in which the token of
        # the first of them stands, and its place there.
        self._line: list[list[int]] = [[]] * len(operations)
        self._heads: list[list[Any]] = [[]] * len(operations)
        self._slot = [0] * len(operations)
        self._is_late = [False] * len(operations)
        groups: dict[int, tuple[Port, list[Any], list[list[int]]]] = {}
        slots: dict[tuple[int, str, int, int], int] = {}
        late: dict[int, tuple[Port, list[int]]] = {}
        # A port moves its messages when it is polled for one of them. Where it is the only one, a rank that waits
        # polls it. Beside another one it may have to move a send that nothing here waits for.
        ports = {id(m.port): m.port for m in self._messages.values() if m.port is not None}
        self._telling: list[Any] = [port for port in ports.values() if hasattr(port, "news")]
        alone = len(ports) == 1 and not self._telling
        for number, message in sorted(self._messages.items()):
            op, port = operations[number], message.port
            if port is None:
                continue
            if op.kind == "send" and alone and not awaited[number]:
                late.setdefault(id(port), (port, []))[1].append(number)
                self._is_late[number] = True
                continue
            _, heads, lines = groups.setdefault(id(port), (port, [], []))
            # Work on frames is finished in any order, and asking costs the same for all of it.
            line = (id(port), op.kind, op.peer, op.channel if op.peer >= 0 else number)
            if line not in slots:
                slots[line] = len(heads)
                heads.append(port.idle)
                lines.append([])
            slot = slots[line]
            self._line[number], self._heads[number], self._slot[number] = lines[slot], heads, slot
        self._groups = [(port.poll, port.idle, heads, lines) for port, heads, lines in groups.values()]
        self._lines = [line for *_, lines in self._groups for line in lines]
        self._all_late = list(late.values())
        self._late_count = sum(len(numbers) for _, numbers in self._all_late)

    def _mark(self, number: int) -> Action:
        """What notes that a send starts or a receive has arrived."""
        marks = self._marks
        assert marks is not None
        return lambda: marks.append((number, time.perf_counter()))

    @property
    def left(self) -> int:
        """Operations that are not finished; falls while there is progress."""
        if self._native is None:
            return self._left
        return len(self._operations) if self._closed else self._native.left

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
        self._closed = self.transport.begin()
        if self._marks is not None:
            self._marks.clear()
        if self._streams is not None:
            self._streams.begin()
        if self._native is not None:
            return
        if self._steps:
            self._left = len(self._steps)
            return
        self._missing = self._counts.copy()
        self._ready = [len(self._counts)]
        if self._all_late:
            self._late = [(port, numbers.copy()) for port, numbers in self._all_late]
        self._left = len(self._counts)
        self._waited = self._left - self._late_count

    def advance(self, polls: int = 1, rest: Callable[[], object] | None = None, spins: int = 0) -> bool:
        """Go on until the run is done or `polls` polls one after another found nothing; whether it is done.

        rest: called after each such poll beyond the first `spins`.
        """
        if self._closed and not self._open(polls, rest):
            return False
        if self._native is not None:
            if not self._native.advance(polls, rest, spins):
                return False
            self.transport.end()
            return True
        if self._steps:
            return self._advance_in_order(polls, rest, spins)
        # Local names: the loop below is what a small message costs.
        ready, missing, scripts, groups = self._ready, self._missing, self._scripts, self._groups
        lines, heads_of, slot_of, tokens = self._line, self._heads, self._slot, self._tokens
        late = self._late_count
        coder = self._coder if isinstance(self._coder, CodecThread) else None
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
                if not ready and (vain % PATIENCE == PATIENCE - 1 or self._must_look()):
                    self._poll_behind()
                    if not ready and any(port.news for port in self._telling):
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

    def _advance_in_order(self, polls: int, rest: Callable[[], object] | None, spins: int) -> bool:
        if not self._left:
            return True
        vain = 0
        for left in self._run:
            if not left:
                break
            if left != self._left:
                self._left = left
                vain = 0
            vain += 1
            if vain > spins and rest is not None:
                rest()
            if vain >= polls:
                return False
        self._left = 0
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
        return (sleeper is not None and sleeper.armed) or any(port.news for port in self._telling)

    def _poll_behind(self) -> None:
        """Poll the messages behind the first ones of their lines."""
        for poll, _, _, lines in self._groups:
            behind = [(line, number) for line in lines for number in line[1:]]
            finished = poll([self._tokens[number] for _, number in behind]) if behind else None
            for place in finished or ():
                line, number = behind[place]
                line.remove(number)
                self._ready.append(~number)

    def _poll_late(self) -> int:
        """Poll the sends that nothing waits for; how many are left."""
        for port, numbers in self._late:
            finished = port.poll([self._tokens[number] for number in numbers]) if numbers else None
            if finished:
                gone = {numbers[place] for place in finished}
                numbers[:] = [number for number in numbers if number not in gone]
        return sum(len(numbers) for _, numbers in self._late)

    def waiting(self) -> list[int]:
        """The messages that are started and not finished, the first of each connection, in step order."""
        if self._native is not None:
            return self._native.waiting()
        if self._steps:
            left = self._left  # the watchdog's thread asks too
            return [self._steps[-left][1]] if 0 < left < len(self._steps) else []
        # Copies, because the watchdog's thread asks too, while the run may go on.
        heads = sorted(line[0] for line in map(list, self._lines) if line)
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
        name = {"i": "input", "o": "output", "s": "scratch", "t": "staging"}[place[0]]
        last = f" to {place[1] + place[2] - 1}" if place[2] > 1 else ""
        return f"chunk{'s' * bool(last)} {place[1]}{last} of its {name}"

    def coded_bytes(self) -> tuple[int, int]:
        """Of the messages of frames that the last run sent: (bytes of the values in them, bytes on the wire)."""
        values = wire = 0
        for op in self.plan.operations:
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
        self._scripts, self._groups, self._steps = [], [], []
        self._native = None
        self._actions.forget()


def _true() -> bool:
    return True
