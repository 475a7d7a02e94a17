"""Device memory between ranks of one node through pinned host memory that both of them have.

The sender's device copies a segment of a message to where the receiver's device copies it from: one piece of shared
memory for each pair of ranks, which both have registered with CUDA. Nothing else moves the data, and MPI is not called.
Flags in shared host memory (`runtime/flags.py`) count segments: those that lie in their slots, for the receiver, and
those whose slot is free again, for the sender. They count on from run to run, and a segment takes the slot of its
number among all runs; so a sender is done as soon as its last segment lies in its slot, be it before the receiver has
begun the run. Of a sized message only the segments that it fills go; the first one has its length.

A flag is set by the host, when it has seen the event after the copy: what a device has written to host memory is there
for all once its event has come. A message has the slots of `runtime/staged.py`, and as few where there are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime import staged
from taccl.runtime.flags import CONTROL_WORDS, Control
from taccl.runtime.gpu import Cuda, address
from taccl.runtime.shared import PAGE_BYTES, SharedMemory, attach
from taccl.runtime.streams import Lane
from taccl.runtime.transport import HEAD_BYTES, Message, Transport, take_done, used_bytes

RECORD = 4  # cells of a message's record: fd, token, offset of its slots in the piece, how many slots
SLOT_BYTES = 256  # slots begin at multiples of it
FIRST_WORD = 5  # of this transport's words in an offer; those before it are of the transport around it


class StagedSharedTransport:
    """Pinned shared memory to the ranks of `sharing[rank]`, `others` to the rest.

    sharing: of each rank those that it shares registered memory with, itself among them. counts: (ranks, ranks),
    messages of the program from each rank to each.
    """

    name = "staged-shm"
    idle = None
    buffered = False
    sleeper = None

    def __init__(
        self,
        memory: SharedMemory,
        cuda: Cuda,
        rank: int,
        sharing: Sequence[Sequence[int]],
        counts: Sequence[Sequence[int]],
        others: Transport,
    ) -> None:
        self._memory, self._rank, self._others = memory, rank, others
        nodes = {peer: sharing[peer] for peer in sharing[rank]}
        self.control = Control(memory, rank, nodes, counts, RECORD)
        self.cuda, self.down = cuda, cuda.stream()  # off the device
        self._sends: list[_Outgoing] = []
        self._active: list[_Outgoing | _Incoming] = []
        self._pieces: dict[int, Any] = {}  # own memory that a peer reads
        self._opened: dict[int, Any] = {}  # a peer's memory that is read here

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if peer not in self.control.peers:
            return self._others.send(array, peer, tag, sized, lane)
        assert lane is not None
        flags, layouts = self.control.peers[peer], self.control.layouts
        message = _Outgoing(self, array, lane, peer, tag, sized)
        message.filled_at = flags, layouts[peer].ready[self._rank] + tag
        message.freed_at = layouts[self._rank].done[peer] + tag
        self._sends.append(message)
        return self._message(message, False)

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if peer not in self.control.peers:
            return self._others.recv(array, peer, tag, sized, lane)
        assert lane is not None
        layouts = self.control.layouts
        message = _Incoming(self, array, lane, peer, tag, sized)
        message.filled_at = layouts[self._rank].ready[peer] + tag
        message.freed_at = self.control.peers[peer], layouts[peer].done[self._rank] + tag
        fd, token, offset, slots = self.control.read(peer, tag)
        if peer not in self._opened:
            opened = attach(self.control.processes[peer], fd, token, 0, write=True)
            self.cuda.register(opened)
            self._opened[peer] = opened
        message.slots = slots
        message.lay_out(self._opened[peer], offset)
        return self._message(message, True)

    def _message(self, message: _Outgoing | _Incoming, queued: bool) -> Message:
        def start() -> None:
            message.start()
            if not message.go_on():
                self._active.append(message)

        return Message(self, message, start, queued=queued)

    def offer(self) -> np.ndarray[Any, Any]:
        """Now all sends are known: they get their slots."""
        count = staged.slots([message.nbytes for message in self._sends])
        ends: dict[int, int] = {}
        places = []
        for message in self._sends:
            first = ends.get(message.peer, 0)
            message.slots = min(count, message.most)
            places.append(first)
            ends[message.peer] = first + message.slots * message.slot_bytes
        for peer, end in ends.items():
            self._pieces[peer] = self._memory.empty(-(-end // PAGE_BYTES) * PAGE_BYTES, np.uint8)
            self.cuda.register(self._pieces[peer])
        for message, first in zip(self._sends, places, strict=True):
            piece = self._pieces[message.peer]
            place = self._memory.place(piece)
            assert place is not None
            message.lay_out(piece, first)
            self.control.write(message.peer, message.tag, (place.fd, place.token, first, message.slots))
        words = self._others.offer()
        words[FIRST_WORD : FIRST_WORD + CONTROL_WORDS] = self.control.words()
        return words

    def connect(self, offers: np.ndarray[Any, Any]) -> None:
        self.control.connect(offers[:, FIRST_WORD:])
        self._others.connect(offers)

    def begin(self) -> str:
        return self._others.begin()

    def end(self) -> None:
        # The device is done with the run: what is left to do is to say so to the senders.
        left = [message for message in self._active if not message.go_on()]
        assert not left
        self._active.clear()
        self._others.end()

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        if self._active:
            self._active = [message for message in self._active if not message.go_on()]
        return take_done(tokens)

    def close(self) -> None:
        self._sends.clear()
        self.control.peers.clear()
        for array in [*self._pieces.values(), *self._opened.values()]:
            self.cuda.unregister(array)
        self._pieces.clear()
        self._opened.clear()
        self._others.close()


class _Segments:
    """A message's segments, its slots, and how far it is: numbers of segments in this run.

    segments: of the run's message, 0 as long as the length of a sized one is not known.
    """

    def __init__(
        self, port: StagedSharedTransport, array: Any, lane: Lane, peer: int, tag: int, sized: bool
    ) -> None:
        self.port, self.array, self.lane, self.peer, self.tag = port, array, lane, peer, tag
        self.sized = sized
        self.nbytes: int = array.nbytes
        self.most: int = -(-self.nbytes // staged.SEGMENT_BYTES)
        longest = min(self.nbytes, staged.SEGMENT_BYTES)
        self.slot_bytes = -(-longest // SLOT_BYTES) * SLOT_BYTES
        self.slots = 0
        self.done = False  # and the executor does not know it yet
        self.segments = 0
        self.copied = 0  # whose copy is on its stream
        self._used = 0  # bytes of the run's message
        self._before = 0  # segments of the runs before
        self._events: list[Any] = []
        self._slots: list[Any] = []

    def lay_out(self, piece: Any, offset: int) -> None:
        """The slots begin at this offset of a piece. Raises EnvironmentProblem when they do not fit."""
        if self.slots < 1 or not 0 <= offset <= len(piece) - self.slots * self.slot_bytes:
            raise EnvironmentProblem(f"rank {self.peer} sends from outside of the memory that it shares")
        ends = range(offset, offset + self.slots * self.slot_bytes, self.slot_bytes)
        self._slots = [piece[first : first + self.slot_bytes] for first in ends]
        self._events = [self.port.cuda.event() for _ in range(self.slots)]

    def _begin(self) -> None:
        self._before += self.segments
        self.copied = self.segments = 0
        if not self.sized:
            self._measure(self.nbytes)

    def _measure(self, used: int) -> None:
        self._used = used
        self.segments = -(-used // staged.SEGMENT_BYTES)

    def _slot(self, number: int) -> int:
        return (self._before + number) % self.slots

    def _copy(self, stream: Any, down: bool) -> None:
        """Put the next segment's copy on a stream."""
        first, slot = self.copied * staged.SEGMENT_BYTES, self._slot(self.copied)
        host, device = address(self._slots[slot]), address(self.array) + first
        used = min(staged.SEGMENT_BYTES, self._used - first)
        target, source = (host, device) if down else (device, host)
        self.port.cuda.copy(target, source, used, stream)()
        self._events[slot].record(stream)
        self.copied += 1

    def _seen(self, number: int) -> bool:
        """Whether the copy of a segment is done."""
        return self.port.cuda.done(self._events[self._slot(number)])


class _Outgoing(_Segments):
    """Filled: segments that lie in their slots, as the receiver knows."""

    filled_at: tuple[list[memoryview], int]
    freed_at = 0
    filled = 0

    def start(self) -> None:
        """Begin a run's message."""
        self._begin()
        self.filled = 0
        self.lane.order(self.port.down)

    def go_on(self) -> bool:
        """Do what can be done; whether it is finished."""
        if not self.segments:
            if not self.lane.ready():
                return False
            self._measure(used_bytes(self.lane.head, self.nbytes))
        free: int = self.port.control.cells[self.freed_at] + self.slots - self._before
        while self.copied < min(self.segments, free):
            self._copy(self.port.down, True)
        before = self.filled
        while self.filled < self.copied and self._seen(self.filled):
            self.filled += 1
        if self.filled > before:
            if before == 0 and self.lane.check is not None:
                self.lane.check()
            flags, cell = self.filled_at
            flags[0][cell] = self._before + self.filled
        self.done = self.filled == self.segments
        return self.done


class _Incoming(_Segments):
    """Freed: segments that the device has, so that their slots may be filled again, as the sender knows. The executor
    goes on when the last copy is on the stream."""

    filled_at = 0
    freed_at: tuple[list[memoryview], int]
    freed = 0

    def start(self) -> None:
        """Be ready for the first segments."""
        self._begin()
        self.freed = 0

    def go_on(self) -> bool:
        """Do what can be done; whether nothing is left to do."""
        stream = self.lane.stream
        filled: int = self.port.control.cells[self.filled_at] - self._before
        if filled > 0 and not self.segments:  # the first segment has the head
            head = self._slots[self._slot(0)][:HEAD_BYTES]
            self._measure(used_bytes(head, self.nbytes))
            assert self.lane.head is not None
            self.lane.head[:] = head
        there = min(filled, self.segments)
        if self.copied < there:
            if self.copied == 0:
                self.lane.order(stream)
            while self.copied < there:
                self._copy(stream, False)
            if self.copied == self.segments:
                self.lane.record()
                self.done = True
        before = self.freed
        while self.freed < self.copied and self._seen(self.freed):
            self.freed += 1
        if self.freed > before:
            flags, cell = self.freed_at
            flags[0][cell] = self._before + self.freed
        return self.freed == self.segments > 0
