"""Messages between nodes in confirmed segments: a network that nobody floods, in full duplex.

MPI finishes a send of some hundred kilobytes when the kernel has it, seconds before it arrives on a slow uplink. A rank
that goes on then fills the uplink with everything it has: what the program sends first arrives last, and the peer that
all others wait for gets an equal share like any other. So a message goes in segments, and its receiver confirms each.
A few are on their way to each peer, in the order of the program. A send is finished, for whatever waits for it, when
all of it is on its way, as a send through a small socket buffer would be.

Where the turns of messages are known (`runtime/turns.py`), a message begins once its gates are open. Whoever sees that
an earlier one has come far enough says so by an empty message.

Segments (`runtime/pace.py`) are short enough for an MPI library's eager protocol. Over TCP that matters by itself: UCX,
under MPICH, moves messages of its rendezvous protocol between two ranks in one direction at a time, and halves the rate
of an exchange. Open MPI sends up to 64 KB eagerly, its own header included; the rest of a longer message waits for an
answer.
"""

from __future__ import annotations

import functools
import heapq
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from taccl.runtime import mpi
from taccl.runtime.gates import OWN, Gates, Progress
from taccl.runtime.pace import Pace, usual
from taccl.runtime.plan import Plan
from taccl.runtime.streams import Lane
from taccl.runtime.transport import Message, Plain, take_done, used_bytes
from taccl.runtime.transports import MpiTransport
from taccl.runtime.turns import Gate, Key

PLAIN_BYTES = 8 << 10  # messages up to here need no pace: they go as they are


def channels(plan: Plan) -> dict[tuple[int, int], int]:
    """Of each message of a plan, by destination and tag, its channel. The plan was compiled for these nodes: it runs to
    the end where messages of a channel to another node keep their order."""
    return {(op.peer, op.tag): op.channel for op in plan.operations if op.kind == "send"}


class PacedTransport(Plain):
    """`inner` within a node and for short messages; segments with confirmations to the other nodes.

    nodes: of each rank its node. receipts: a communicator for confirmations alone, whose tags are those of `inner`.
    turns: the gates of messages between nodes, the same on all ranks. notices: a communicator by which ranks tell each
    other of it. on_channel: the `channels` of this rank's plan; None: each message has its own. paces: by source and
    destination, the same on all ranks, where it is not the usual one. Sends are made in the order of the plan.
    """

    name = "mpi"
    idle = None

    def __init__(
        self,
        MPI: Any,
        inner: MpiTransport,
        receipts: Any,
        nodes: Sequence[int],
        turns: Mapping[Key, Sequence[Gate]] | None = None,
        notices: Any = None,
        on_channel: Mapping[tuple[int, int], int] | None = None,
        paces: Mapping[tuple[int, int], Pace] | None = None,
    ) -> None:
        self._mpi, self._inner, self._receipts, self._nodes = MPI, inner, receipts, nodes
        self._rank = receipts.Get_rank()
        self._here = nodes[self._rank]
        self._on_channel = on_channel
        self._paces, self._usual = paces or {}, usual(mpi.library(MPI).name)
        self._gates, self._notices = Gates(self._rank, turns or {}), notices
        self._gated: dict[Key, _Outgoing] = {}
        self._progress: list[Progress] = []
        self._words: list[Any] = []  # requests of the notices that this rank gives
        self._peers: dict[int, _Peer] = {}
        self._leaving: list[_Outgoing] = []  # on their way; whether they count as sent must be seen
        # Started requests that something follows, and what; started ones that must only be finished some time.
        self._requests: list[Any] = []
        self._handlers: list[Callable[[], None]] = []
        self._loose: list[Any] = []
        # Such of one use are kept apart. Of more than 64 requests MPICH 5's Testall looks at the kinds of the last ones
        # alone: where these are of one use, it calls all finished and leaves the persistent ones before them active.
        self._once: list[Any] = []

    def _plain(self, array: Any, peer: int) -> bool:
        return self._nodes[peer] == self._here or int(array.nbytes) <= PLAIN_BYTES

    def _channel(self, peer: int, tag: int) -> int:
        return tag if self._on_channel is None else self._on_channel[peer, tag]

    def _pace(self, source: int, target: int) -> Pace:
        return self._paces.get((source, target), self._usual)

    def _segments(self, array: Any, length: int, tag: int) -> list[list[Any]]:
        """Buffers as MPI takes them."""
        data = array.view(np.uint8)
        return [
            self._inner.data(data[first : first + length], tag) for first in range(0, data.nbytes, length)
        ]

    def _nothing(self) -> list[Any]:
        return [np.empty(0, np.uint8), 0, self._mpi.BYTE]

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if self._plain(array, peer):
            return self._inner.send(array, peer, tag, sized)
        key = (self._rank, peer, tag)
        pace = self._pace(self._rank, peer)
        parts = self._segments(array, pace.segment_bytes, tag)
        segments = [self._inner.comm.Send_init(part, peer, tag) for part in parts]
        to = self._peers.setdefault(peer, _Peer(pace.segments))
        receipts = [self._receipts.Recv_init(self._nothing(), peer, tag) for _ in segments[: to.segments]]
        shorter = _Shorter(self._inner, array, peer, tag, pace.segment_bytes) if sized else None
        notices = [
            self._notices.Recv_init(self._nothing(), teller, self._word(word))
            for teller, word in self._gates.awaited[key]
            if word != OWN
        ]
        gates = len(self._gates.awaited[key])
        message = _Outgoing(
            self, to, self._channel(peer, tag), segments, receipts, shorter, self._tells(key), gates, notices
        )
        if gates:
            self._gated[key] = message
        return Message(self, message, message.start, free=message.free, held=message.held)

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if self._plain(array, peer):
            return self._inner.recv(array, peer, tag, sized)
        length = self._pace(peer, self._rank).segment_bytes
        parts = self._segments(array, length, tag)
        segments = [self._inner.comm.Recv_init(part, peer, tag) for part in parts]
        receipts = [self._receipts.Send_init(self._nothing(), peer, tag) for _ in segments]
        message = _Incoming(
            self, segments, receipts, array if sized else None, length, self._tells((peer, self._rank, tag))
        )
        return Message(self, message, message.start, free=message.free)

    def _word(self, tag: int) -> int:
        """The tag of a notice. Raises EnvironmentProblem where the library has none such."""
        self._inner.data(np.empty(0, np.uint8), tag)
        return tag

    def _tells(self, key: Key) -> Progress | None:
        """What this rank tells of a message that it sees."""
        words = [(part, self._tell(later, tag)) for part, later, tag in self._gates.told[key]]
        if not words:
            return None
        self._progress.append(Progress(words))
        return self._progress[-1]

    def _tell(self, later: Key, tag: int) -> Callable[[], object]:
        if tag == OWN:
            return lambda: self._gated[later].open()
        notice = self._notices.Send_init(self._nothing(), later[0], self._word(tag))
        self._words.append(notice)
        return functools.partial(self.start, notice)

    def start(self, request: Any, handler: Callable[[], None] | None = None) -> None:
        """Start a request; `handler` is called once it is finished."""
        request.Start()
        if handler is None:
            self._loose.append(request)
        else:
            self.follow(request, handler)

    def loose(self, request: Any) -> None:
        """See that a started request of one use is finished before the next run."""
        self._once.append(request)

    def follow(self, request: Any, handler: Callable[[], None]) -> None:
        """Call `handler` once a started request is finished."""
        self._requests.append(request)
        self._handlers.append(handler)

    def _go_on(self) -> None:
        """Do what follows from the requests that are finished."""
        found = self._mpi.Request.Testsome(self._requests) if self._requests else None
        if found:
            handlers = [self._handlers[place] for place in found]
            for place in sorted(found, reverse=True):
                del self._requests[place], self._handlers[place]
            for handler in handlers:
                handler()
        if self._leaving:
            self._leaving = [message for message in self._leaving if not message.left()]

    def leaves(self, message: _Outgoing) -> None:
        """All of a message is on its way."""
        self._leaving.append(message)

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        self._go_on()
        return take_done(tokens)

    def _settled(self) -> bool:
        """Whether everything that was started is finished, receipts of the last segments too."""
        self._go_on()
        test_all = self._mpi.Request.Testall
        if self._requests or not test_all(self._loose) or not test_all(self._once):
            return False
        self._loose.clear()
        self._once.clear()
        return True

    def settle(self) -> None:
        """Wait for that; every rank has ended the run."""
        while not self._settled():
            os.sched_yield()

    def begin(self) -> str:
        if not self._settled():
            return "for the other ranks to confirm what they received in the run before"
        for message in self._gated.values():
            message.close()
        for progress in self._progress:
            progress.begin()
        return self._inner.begin()

    def close(self) -> None:
        for request in self._words:
            request.Free()
        self._words.clear()
        self._inner.close()


class _Peer:
    """What goes to one rank: messages in the order of the program, so many segments at a time.

    On each channel the first message that has begun and not arrived has a segment on its way, whatever else is: what
    another receive waits for may come with it. Its own receive waits for nothing behind it on its channel, for a plan
    has been found to run to the end where each message follows the arrival of the one before (`runtime/compile.py`).
    """

    __slots__ = ("_begun", "_flying", "_made", "_work", "segments")

    def __init__(self, segments: int) -> None:
        self.segments = segments
        # Heaps of messages with their places in the program: with segments to hand over, and, of each channel, what
        # has begun.
        self._work: list[tuple[int, _Outgoing]] = []
        self._begun: defaultdict[int, list[tuple[int, _Outgoing]]] = defaultdict(list)
        self._made = 0
        self._flying = 0  # segments

    def next_place(self) -> int:
        """For a message that is made now; they are made in the order of the program."""
        self._made += 1
        return self._made

    def add(self, message: _Outgoing) -> None:
        """A message begins."""
        heapq.heappush(self._work, (message.place, message))
        heapq.heappush(self._begun[message.channel], (message.place, message))
        self._go_on(message)

    def confirmed(self, message: _Outgoing) -> None:
        """A segment of this one has arrived."""
        self._flying -= 1
        self._go_on(message)

    def _go_on(self, message: _Outgoing) -> None:
        while self._work and self._flying < self.segments:
            self._hand_over(self._work[0][1])
        begun = self._begun[message.channel]
        while begun and begun[0][1].arrived:
            heapq.heappop(begun)
        if begun and begun[0][1].stands:
            self._hand_over(begun[0][1])

    def _hand_over(self, message: _Outgoing) -> None:
        self._flying += 1
        if message.hand_over():
            self._work.remove((message.place, message))
            heapq.heapify(self._work)


class _Outgoing:
    """A message to another node."""

    __slots__ = (
        "_closed", "_confirmed", "_count", "_free", "_gates", "_handlers", "_last", "_notices", "_out", "_port",
        "_progress", "_receipts", "_segments", "_sent", "_shorter", "_started", "_to", "channel", "done", "place",
    )  # fmt: skip

    def __init__(
        self,
        port: PacedTransport,
        to: _Peer,
        channel: int,
        segments: list[Any],
        receipts: list[Any],
        shorter: _Shorter | None,
        progress: Progress | None,
        gates: int,
        notices: list[Any],
    ) -> None:
        self._port, self._to, self._shorter = port, to, shorter
        self.place, self.channel = to.next_place(), channel
        self._progress, self._gates, self._notices = progress, gates, notices
        self._closed = 0  # gates
        self._started = False
        self._segments, self._receipts = segments, receipts
        self._handlers = [functools.partial(self._on_receipt, slot) for slot in range(len(receipts))]
        self._free = list(range(len(receipts)))[::-1]  # with which nothing is expected
        self._last: Any = None  # request of the segment that was handed over last
        self._count = len(segments)  # of this run
        self._sent = self._out = self._confirmed = 0  # out: of this rank's memory
        self.done = False  # and the executor does not know it yet

    def close(self) -> None:
        """A run begins, with all gates closed."""
        self._closed, self._started = self._gates, False

    def open(self) -> None:
        """One of the gates opens."""
        self._closed -= 1
        if self._started and not self._closed:
            self._to.add(self)

    def held(self) -> bool:
        """Whether it is started and waits for its gates."""
        return self._started and self._closed > 0

    def start(self) -> None:
        """Begin, or wait for the gates."""
        self._sent = self._out = self._confirmed = 0
        if self._shorter is not None:
            self._count = self._shorter.count()
        self._started = True
        for notice in self._notices:
            self._port.start(notice, self.open)
        if not self._closed:
            self._to.add(self)

    @property
    def stands(self) -> bool:
        """Whether nothing of it is on its way, and not all has arrived."""
        return self._sent == self._confirmed < self._count

    @property
    def arrived(self) -> bool:
        """Whether all of it has."""
        return self._confirmed == self._count

    def hand_over(self) -> bool:
        """The next segment; whether it is the last one."""
        slot = self._free.pop()
        self._port.start(self._receipts[slot], self._handlers[slot])
        if self._shorter is not None and self._sent == self._count - 1:
            self._last = self._shorter.send_last()
            self._port.loose(self._last)
        else:
            self._last = self._segments[self._sent]
            self._port.start(self._last)
        self._sent += 1
        if self._sent < self._count:
            return False
        self._port.leaves(self)
        return True

    def left(self) -> bool:
        """Whether it counts as sent from now on; all of it is on its way."""
        # A rank whose messages count as sent may leave the run, so those that others wait for are followed further.
        if self._confirmed < self._count and self._progress is not None and self._progress.left:
            return False
        # MPI may still read what its requests name, and what waits for a send may write there.
        while self._out < self._count - 1 and self._segments[self._out].Test():
            self._out += 1
        self.done = self._out == self._count - 1 and self._last.Test()
        return self.done

    def _on_receipt(self, slot: int) -> None:
        # Receipts of one message arrive in the order of its segments: they have one tag. But a look at all of them may
        # miss one that arrives meanwhile and see the next, so the slot that is free is the one that was seen.
        self._free.append(slot)
        self._confirmed += 1
        self._to.confirmed(self)
        if self._progress is not None:
            self._progress.reached(self._confirmed, self._count)

    def free(self) -> None:
        """Free the requests; the last run is over."""
        self._port.settle()
        for request in (*self._segments, *self._receipts, *self._notices):
            request.Free()
        # The requests know the array, and the handlers this message: nobody is to wait for a collector of rings.
        self._segments, self._receipts, self._notices, self._handlers, self._last = [], [], [], [], None


class _Shorter:
    """The part of a sized message that is sent: whole segments, and the bytes of the last one."""

    __slots__ = ("_array", "_inner", "_peer", "_segment_bytes", "_tag", "_used")

    def __init__(self, inner: MpiTransport, array: Any, peer: int, tag: int, segment_bytes: int) -> None:
        self._inner, self._array, self._peer, self._tag = inner, array, peer, tag
        self._segment_bytes = segment_bytes
        self._used = 0

    def count(self) -> int:
        """Segments of the message as it is now."""
        self._used = used_bytes(self._array)
        return -(-self._used // self._segment_bytes)

    def send_last(self) -> Any:
        """The started request of the last segment."""
        first = (self._used - 1) // self._segment_bytes * self._segment_bytes
        data = self._inner.data(self._array[first : self._used], self._tag)
        return self._inner.comm.Isend(data, self._peer, self._tag)


class _Incoming:
    """A message from another node. sized: its array, where its first segment says how many follow. length: of each."""

    __slots__ = (
        "_arrived", "_count", "_length", "_port", "_progress", "_receipts", "_segments", "_sized", "done",
    )  # fmt: skip

    def __init__(
        self,
        port: PacedTransport,
        segments: list[Any],
        receipts: list[Any],
        sized: Any,
        length: int,
        progress: Progress | None,
    ) -> None:
        self._length, self._progress = length, progress
        self._port, self._segments, self._receipts, self._sized = port, segments, receipts, sized
        self._arrived = 0
        self._count = len(segments)
        self.done = False  # and the executor does not know it yet

    def start(self) -> None:
        """Be ready for all segments."""
        self._arrived = 0
        for request in self._segments if self._sized is None else self._segments[:1]:
            request.Start()
        self._port.follow(self._segments[0], self._on_segment)

    def _on_segment(self) -> None:
        if self._sized is not None and self._arrived == 0:
            self._count = -(-used_bytes(self._sized) // self._length)
            for request in self._segments[1 : self._count]:
                request.Start()
        self._port.start(self._receipts[self._arrived])
        self._arrived += 1
        if self._progress is not None:
            self._progress.reached(self._arrived, self._count)
        if self._arrived < self._count:
            self._port.follow(self._segments[self._arrived], self._on_segment)
        else:
            self.done = True

    def free(self) -> None:
        """Free the requests; the last run is over."""
        self._port.settle()
        for request in (*self._segments, *self._receipts):
            request.Free()
