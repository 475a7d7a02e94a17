"""Device memory over an MPI that takes host memory only: through pinned memory, in segments.

A message has a few slots of pinned memory. While one segment is on its way to the other rank, the next one is copied
off the device, and the one before it onto the device of its receiver: every copy is put on a stream, and events say
when it is done. So a long message takes hardly more than the slowest of the three, and less pinned memory than it has
bytes. The slots of a message are its own, because a message that waits for those of another one could wait for ever;
where there are many messages, each has fewer.

Of a sized message only what it fills is copied and sent. Its receiver learns the length from the first one, and waits
for no other one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taccl.runtime.gpu import Cuda, address
from taccl.runtime.streams import Lane
from taccl.runtime.transport import HEAD_BYTES, Message, Plain, take_done, used_bytes
from taccl.runtime.transports import MpiTransport

SEGMENT_BYTES = 2**20
SLOTS = 3  # of a message, where there is room: one arrives or leaves, one is copied, one is ready
PINNED_BYTES = 256 * 2**20  # for the slots of a rank's messages; each has one at least


def slots(lengths: Sequence[int]) -> int:
    """How many slots a message has; lengths: bytes of all messages of a rank."""
    return next((n for n in range(SLOTS, 1, -1) if pinned_bytes(lengths, n) <= PINNED_BYTES), 1)


def pinned_bytes(lengths: Sequence[int], count: int) -> int:
    """Pinned memory of a rank with `count` slots for each of its messages."""
    return sum(min(length, count * SEGMENT_BYTES) for length in lengths)


class StagedTransport(Plain):
    """Each message goes through slots of pinned memory. inner: moves the segments, which have the tags of their
    messages."""

    name = "staged-mpi"
    idle = None

    def __init__(self, inner: MpiTransport, cuda: Cuda) -> None:
        self.inner, self.comm, self.cuda = inner, inner.comm, cuda
        self.down = cuda.stream()  # off the device
        self._messages: list[_Outgoing | _Incoming] = []
        self._active: list[_Outgoing | _Incoming] = []
        self._ready = False

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        assert lane is not None
        return self._message(_Outgoing(self, array, peer, tag, lane, sized))

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        assert lane is not None
        return self._message(_Incoming(self, array, peer, tag, lane, sized))

    def _message(self, message: _Outgoing | _Incoming) -> Message:
        self._messages.append(message)

        def start() -> None:
            message.start()
            if not message.go_on():
                self._active.append(message)

        return Message(self, message, start, queued=isinstance(message, _Incoming))

    def begin(self) -> str:
        if not self._ready:  # now all messages are known
            count = slots([message.nbytes for message in self._messages])
            for message in self._messages:
                message.give(count)
            self._ready = True
        return ""

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        if self._active:
            self._active = [message for message in self._active if not message.go_on()]
        return take_done(tokens)

    def close(self) -> None:
        self._messages.clear()
        self.inner.close()


class _Segments:
    """A message's segments and slots. count: of the segments that the run's message fills, which of a sized one is 0
    until its length is known."""

    def __init__(
        self, port: StagedTransport, array: Any, peer: int, tag: int, lane: Lane, sized: bool
    ) -> None:
        self.port, self.array, self.peer, self.tag, self.lane = port, array, peer, tag, lane
        self.sized = sized
        self.nbytes: int = array.nbytes
        self.most = self.count = -(-self.nbytes // SEGMENT_BYTES)
        self.pinned: list[Any] = []
        self.done = False  # and the executor does not know it yet
        self.slots = 0
        self.events: list[Any] = []
        self.requests: list[Any] = []
        self.buffers: list[list[Any]] = []  # of each segment, as MPI takes it
        self.copies: list[Any] = []  # of each segment

    def give(self, slots: int) -> None:
        """Take pinned memory, and lay out what each segment needs."""
        self.slots = min(slots, self.most)
        length = min(self.nbytes, SEGMENT_BYTES)
        self.pinned = [self.port.cuda.pinned(length) for _ in range(self.slots)]
        self.events = [self.port.cuda.event() for _ in range(self.slots)]
        self.requests = [None] * self.slots
        for number in range(self.most):
            self._lay(number, min(SEGMENT_BYTES, self.nbytes - number * SEGMENT_BYTES))

    def _lay(self, number: int, used: int) -> None:
        """Lay out what a segment of so many bytes needs."""
        host, there = self.pinned[number % self.slots], address(self.array) + number * SEGMENT_BYTES
        down = isinstance(self, _Outgoing)
        stream = self.port.down if down else self.lane.stream
        ends = (address(host), there) if down else (there, address(host))
        self.copies[number : number + 1] = [self.port.cuda.copy(*ends, used, stream)]
        self.buffers[number : number + 1] = [self.port.inner.data(host[:used], self.tag)]

    def measure(self, head: Any) -> None:
        """Learn from its head which segments a sized message fills."""
        used = used_bytes(head, self.nbytes)
        self.count = -(-used // SEGMENT_BYTES)
        self._lay(self.count - 1, used - (self.count - 1) * SEGMENT_BYTES)

    def unmeasured(self) -> None:
        """Forget the length of the message of the run before."""
        if self.sized and self.count:
            self._lay(self.count - 1, min(SEGMENT_BYTES, self.nbytes - (self.count - 1) * SEGMENT_BYTES))
            self.count = 0


class _Outgoing(_Segments):
    """Copied: segments whose copy off the device is under way or done; sent: those handed to MPI; gone: those that MPI
    is done with."""

    copied = sent = gone = 0

    def start(self) -> None:
        """Begin a run's message."""
        self.copied = self.sent = self.gone = 0
        self.unmeasured()
        self.lane.order(self.port.down)

    def go_on(self) -> bool:
        """Do what can be done; whether it is finished."""
        port, slots = self.port, self.slots
        if not self.count:
            if not self.lane.ready():
                return False
            self.measure(self.lane.head)
        while self.gone < self.sent and self.requests[self.gone % slots].Test():
            self.gone += 1
        while self.copied < self.count and self.copied - self.gone < slots:
            self.copies[self.copied]()
            self.events[self.copied % slots].record(port.down)
            self.copied += 1
        while self.sent < self.copied and port.cuda.done(self.events[self.sent % slots]):
            if self.sent == 0 and self.lane.check is not None:
                self.lane.check()
            self.requests[self.sent % slots] = port.comm.Isend(self.buffers[self.sent], self.peer, self.tag)
            self.sent += 1
        self.done = self.gone == self.count
        return self.done


class _Incoming(_Segments):
    """Posted: segments that MPI may bring; copied: those whose copy onto the device is on the stream."""

    posted = copied = 0

    def start(self) -> None:
        """Be ready for the first segments."""
        self.posted = self.copied = 0
        self.unmeasured()

    def go_on(self) -> bool:
        """Do what can be done; whether it is finished, which the device need not be."""
        port, slots, stream = self.port, self.slots, self.lane.stream
        while self.posted < (self.count or 1) and self._free(self.posted):
            self.requests[self.posted % slots] = port.comm.Irecv(
                self.buffers[self.posted], self.peer, self.tag
            )
            self.posted += 1
        # Segments of one message come in the order in which they were sent.
        while self.copied < self.posted and self.requests[self.copied % slots].Test():
            if self.copied == 0:
                self.lane.order(stream)
                if self.sized:
                    self._learn()
            self.copies[self.copied]()
            self.events[self.copied % slots].record(stream)
            self.copied += 1
        self.done = self.copied == self.count > 0
        if self.done:
            self.lane.record()
        return self.done

    def _learn(self) -> None:
        """The first segment has come: it has the head."""
        head = self.pinned[0][:HEAD_BYTES]
        self.measure(head)
        if self.lane.head is not None:
            self.lane.head[:] = head

    def _free(self, number: int) -> bool:
        """Whether the device is done with the slot of a segment."""
        before = number - self.slots
        return before < 0 or (before < self.copied and self.port.cuda.done(self.events[number % self.slots]))
