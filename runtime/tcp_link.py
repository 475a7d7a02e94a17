"""What passes over one TCP connection between two ranks, in both directions.

Everything has a head of 16 bytes: what it is and which message it is about, the number of the run, and how many bytes
follow. A message goes in segments, and those of several messages may take turns. Its data go straight to where they
belong, so a receiver says that its receive is ready, and only then a segment is sent; short messages go at once, and
their receiver has room for them.

A rank may be in a later run than its peer. What it sends then stays in the connection until the peer is there as well,
so nobody has to keep what comes early.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import select
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from taccl.errors import RunFailed
from taccl.runtime.codecs.codec import FrameError
from taccl.runtime.gates import Progress
from taccl.runtime.pace import ORDERLY_BYTES, Pace
from taccl.runtime.transport import HEAD_BYTES, used_bytes
from taccl.runtime.uplink import Uplink

HEAD = struct.Struct("<IIQ")
KINDS = 4
# LAST is the segment that ends a message, OPEN says that a gate of a message opens.
SEGMENT, LAST, READY, OPEN = range(KINDS)
MOST_TAGS = 2**32 // KINDS
RUNS = 2**32  # numbers of runs, which then begin anew
READS = 16  # of a connection at a time
WAKE_BYTES = 32 << 10  # of a segment that is under way, which wake a rank that waits for more
# A segment of more ends a frame of the kernel's, which else goes on with what the next one begins with: its last bytes
# would come with that frame, on a slow link milliseconds later.
FRAME_BYTES = 16 << 10
UNSENT = 2  # segments that wait in the kernel behind what is on its way
USUAL_WMEM_MAX = 212992  # Linux's own
_SO_BUF_LOCK = 72  # since Linux 5.13; 0: the kernel finds the right length again
_SO_MAX_PACING_RATE = 47  # bytes in a second
NO_LIMIT = 2**64 - 1  # bytes in a second


def limit_rate(connection: socket.socket, bytes_per_s: int) -> None:
    """Send no faster than that, where the kernel knows how; a connection that is lost stays so."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("Q", bytes_per_s))


class Outgoing:
    """A message to a peer. array: of uint8. place: the least goes first. gates: that must open before it begins."""

    __slots__ = (
        "_array", "_bytes", "_count", "_gates", "_open", "_sized", "begun", "done", "eager", "left", "place", "ready",
        "tag",
    )  # fmt: skip

    def __init__(self, array: Any, tag: int, place: int, sized: bool, eager: bool, gates: int) -> None:
        self._array, self._bytes, self._sized, self._gates = array, memoryview(array), sized, gates
        self.tag, self.place, self.eager = tag, place, eager
        self.ready = -1  # the run for which the receiver is ready
        self._open = (-1, 0)  # gates that are open, and in which run
        self.begun = -1
        self._count = self.left = 0
        self.done = False

    def begin(self, run: int) -> None:
        """The executor has started it."""
        self._count = self.left = used_bytes(self._array) if self._sized else len(self._array)
        self.begun = run

    def open(self, run: int) -> None:
        """One of its gates opens."""
        self._open = (run, self._open[1] + 1 if self._open[0] == run else 1)

    def waits(self, run: int) -> bool:
        """Whether some of its gates are closed."""
        return self._gates > 0 and (self._open[0] != run or self._open[1] < self._gates)

    def may_go(self, run: int) -> bool:
        """Whether a segment of it may be sent."""
        return self.begun == run and (self.eager or self.ready == run) and not self.waits(run)

    @property
    def whole(self) -> bool:
        """Whether nothing of it has been sent."""
        return self.left == self._count

    def segment(self, most: int) -> memoryview:
        """Its next bytes; `left` says how many are left after them."""
        first = self._count - self.left
        length = min(most, self.left)
        self.left -= length
        return self._bytes[first : first + length]


class Incoming:
    """A message from a peer. array: of uint8. progress: of it, where others are told of that."""

    __slots__ = (
        "_array", "_progress", "_room", "_sized", "_target", "arrived", "done", "eager", "landed", "started",
    )  # fmt: skip

    def __init__(self, array: Any, sized: bool, eager: bool, progress: Progress | None) -> None:
        self._array, self._sized, self.eager, self._progress = array, sized, eager, progress
        # A short message may come before its receive is started, and lands there.
        self._room: Any = None
        self._target = array
        self.arrived = 0
        self.started = self.landed = -1  # the run
        self.done = False

    def start(self, run: int) -> bool:
        """The executor has started it; whether it has come already."""
        self.started = run
        return self._finish(run)

    def room(self, nbytes: int, run: int) -> memoryview | None:
        """Where the next segment belongs; None where it is none of this message."""
        if self.landed == run or nbytes > len(self._array) - self.arrived:
            return None
        if self.started != run:
            if not self.eager:
                return None
            if not self.arrived:
                if self._room is None:
                    self._room = np.empty(len(self._array), np.uint8)
                self._target = self._room
        return memoryview(self._target.data)[self.arrived : self.arrived + nbytes]

    def took(self, nbytes: int, last: bool, run: int) -> bool:
        """A segment has come; whether the message is finished. Raises FrameError for a damaged length of frames,
        RunFailed for a message that is shorter than its receive."""
        self.arrived += nbytes
        if self._progress is not None:
            self._progress.reached(self.arrived, len(self._array))
        if not last:
            return False
        if self._sized and (self.arrived < HEAD_BYTES or used_bytes(self._target) != self.arrived):
            raise FrameError("the length of a message of frames is damaged")
        if not self._sized and self.arrived != len(self._array):
            raise RunFailed("it is shorter than its receive")
        self.landed = run
        return self._finish(run)

    def _finish(self, run: int) -> bool:
        if self.landed != run or self.started != run:
            return False
        if self._target is self._room:
            self._array[: self.arrived] = self._room[: self.arrived]
            self._target = self._array
        self.arrived = 0
        self.done = True
        return True


@dataclass(frozen=True, slots=True)
class Messages:
    """Those of a program with one peer, by tag, and what happens to them. gated: all of this rank that have gates."""

    sends: Mapping[int, Outgoing]
    receives: Mapping[int, Incoming]
    gated: Mapping[int, Outgoing]
    pace: Pace
    finished: Callable[[], object]  # one of them is
    opened: Callable[[Outgoing], object]  # a gate has opened


NONE = Messages({}, {}, {}, Pace(1, 1), lambda: None, lambda message: None)


@functools.cache
def _wmem_max() -> int:
    """Bytes that a process may ask for as its part of a connection's memory."""
    try:
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    except (OSError, ValueError):  # some kernels show it to no network namespace but the first
        return USUAL_WMEM_MAX


class Link:
    """This rank's end of a connection. poller: an epoll, which learns what the link waits for. lost: is called once
    with the reason when the connection is lost. sending: gets the link when it has messages to send."""

    def __init__(
        self,
        peer: int,
        connection: socket.socket,
        poller: select.epoll,
        lost: Callable[[str], object],
        sending: dict[Link, None],
    ) -> None:
        self.peer = peer
        self.lost = False
        self._tell_lost, self._sending = lost, sending
        self.at = connection.fileno()
        self._connection, self._poller = connection, poller
        self._run = 0
        self._messages = NONE
        self._wants = 0
        # Outwards: messages that may go, by place; what is said beside them; what is under way.
        self._work: list[tuple[int, Outgoing]] = []
        self._words = bytearray()
        self._under_way: list[Any] = []
        self._flags = 0  # of handing this over
        self._now: Outgoing | None = None
        # Inwards: a head that comes, and the segment that follows it.
        self._head = memoryview(bytearray(HEAD.size))
        self._head_bytes = 0
        self._room: memoryview | None = None
        self._segment: tuple[Incoming, int, bool] | None = None
        self._least = 1
        self._kept: Pace | None = None  # no limit yet
        self._most = NO_LIMIT  # bytes in a second
        self._unlimited_bytes = math.inf
        self._early = False  # the head is of a run that has not begun here
        poller.register(self.at, 0)
        self._want(select.EPOLLIN, True)

    def _want(self, what: int, wanted: bool) -> None:
        wants = self._wants | what if wanted else self._wants & ~what
        if wants != self._wants:
            self._wants = wants
            self._poller.modify(self.at, wants)

    def begin(self, run: int, messages: Messages) -> None:
        """A run begins."""
        self._run, self._messages = run, messages
        if messages is not NONE:
            self._keep(messages.pace)
        if self._early and not self.lost:
            self._early = False
            self._want(select.EPOLLIN, True)
            self._look_at_head()

    def _keep(self, pace: Pace) -> None:
        """Let the kernel keep no more segments than are on their way until they have arrived, its own records among
        them, and little behind these, where it has lost its turn.

        Where no process may ask for as many, it finds out itself what is right.
        """
        if pace == self._kept:
            return
        before, self._kept = self._kept, pace
        self._unlimited_bytes = pace.unlimited_bytes()
        nbytes = pace.under_way_bytes
        allowed, option = _wmem_max(), self._connection.setsockopt
        if pace.uplinks:
            # Their clocks keep queues short, and confirmations may take longer than is known.
            nbytes = max(nbytes, min(2 * nbytes, 2 * allowed))
        # The connection may be lost, and the kernel may not know the second option.
        with contextlib.suppress(OSError):
            option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT * pace.segment_bytes)
            if before or nbytes // 2 <= allowed:
                # It takes twice what it is asked for.
                option(socket.SOL_SOCKET, socket.SO_SNDBUF, min(nbytes // 2, allowed))
            if nbytes // 2 > allowed:
                option(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)

    def _limit(self, nbytes: int) -> None:
        """A message begins."""
        most = self._messages.pace.bytes_per_s if nbytes > self._unlimited_bytes else NO_LIMIT
        if most != self._most:
            self._most = most
            limit_rate(self._connection, most)

    def send(self, message: Outgoing) -> None:
        """Something may go, with the next look at the connections: words that are said meanwhile are not to wait behind
        it in the queue of the uplink."""
        heapq.heappush(self._work, (message.place, message))
        self._sending[self] = None

    def say(self, kind: int, tag: int) -> None:
        """A word to the peer, which goes with the next `write`."""
        self._words += HEAD.pack(tag * KINDS + kind, self._run, 0)

    def hungry(self) -> bool:
        """Whether nothing that may go is left; the last of it may be on its way into the kernel."""
        return not self._work

    @property
    def owes(self) -> bool:
        """Whether something waits until the kernel takes it."""
        return bool(self._words or self._under_way) and not self.lost

    @property
    def first(self) -> int | None:
        """The place of the message that goes next; None while the kernel has to take what is laid out,
        and when there is none."""
        return self._work[0][0] if self._work and not self._under_way and not self.lost else None

    @property
    def uplinks(self) -> tuple[Uplink, ...]:
        """What its segments leave over, as far as that is known."""
        return self._messages.pace.uplinks

    def write(self, segments: int = 0) -> int:
        """Hand to the kernel what it takes: what is laid out, words, and at most so many segments more. Returns the
        bytes of these."""
        handed = 0
        if self.lost:
            return handed
        while True:
            if not self._under_way and segments and self._work:
                segments -= 1
                handed += self._lay_out()
            if not self._under_way and not self._say():
                self._want(select.EPOLLOUT, False)
                return handed
            try:
                taken = self._connection.sendmsg(self._under_way, (), self._flags)
            except BlockingIOError:
                self._want(select.EPOLLOUT, True)
                return handed
            except OSError as error:
                self._lose(error.strerror)
                return handed
            self._took(taken)

    def _say(self) -> bool:
        """Lay out what is to be said; whether there is something."""
        if self._words:
            self._under_way.append(memoryview(bytes(self._words)))
            self._words.clear()
        return bool(self._under_way)

    def _lay_out(self) -> int:
        """A segment of the message that goes next, with what is to be said before it; its bytes."""
        self._say()
        message = self._work[0][1]
        if message.whole:
            self._limit(message.left)
        part = message.segment(self._messages.pace.segment_bytes)
        if not message.left:
            heapq.heappop(self._work)
        kind = SEGMENT if message.left else LAST
        self._under_way += memoryview(HEAD.pack(message.tag * KINDS + kind, self._run, len(part))), part
        self._now = message
        self._flags = socket.MSG_EOR if FRAME_BYTES < len(part) <= ORDERLY_BYTES else 0
        return len(part)

    def _took(self, taken: int) -> None:
        parts = self._under_way
        while parts and taken >= len(parts[0]):
            taken -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][taken:]
            return
        message, self._now, self._flags = self._now, None, 0
        if message is not None and not message.left:
            message.done = True
            self._messages.finished()

    def read(self) -> None:
        """Take what has come. Raises RunFailed for what does not belong here."""
        if self._early or self.lost:
            return
        for _ in range(READS):
            head = self._head[self._head_bytes :]
            wanted = len(head) + (0 if self._room is None else len(self._room))
            try:
                if self._room is None:
                    got = self._connection.recv_into(head)
                else:
                    got = self._connection.recvmsg_into([self._room, head])[0]
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(error.strerror)
                return
            if not got:
                self._lose("it has ended")
                return
            self._take(got)
            if self.lost:
                return
            if got < wanted or self._early:
                break
        self._wake_at()

    def _take(self, got: int) -> None:
        if self._room is not None:
            data = min(got, len(self._room))
            got -= data
            self._room = self._room[data:]
            if len(self._room):
                return
            self._end_segment()
        self._head_bytes += got
        if self._head_bytes == HEAD.size:
            self._look_at_head()

    def _wake_at(self) -> None:
        """A rank that waits for a long segment sleeps until a good part of it has come."""
        least = 1 if self._room is None else max(1, min(len(self._room), WAKE_BYTES))
        if least != self._least:
            self._least = least
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def _look_at_head(self) -> None:
        word, run, nbytes = HEAD.unpack(self._head)
        if run != self._run:
            if not 0 < (run - self._run) % RUNS < RUNS // 2:
                raise self._unexpected(f"something of run {run} in run {self._run}")
            self._early = True
            self._want(select.EPOLLIN, False)
            return
        self._head_bytes = 0
        tag, kind = divmod(word, KINDS)
        if kind in (SEGMENT, LAST):
            receive = self._messages.receives.get(tag)
            room = None if receive is None else receive.room(nbytes, run)
            if receive is None or room is None:
                raise self._unexpected(f"{nbytes} bytes of message {tag}")
            self._room, self._segment = room, (receive, nbytes, kind == LAST)
            if not nbytes:
                self._end_segment()
            return
        message = (self._messages.sends if kind == READY else self._messages.gated).get(tag)
        if message is None or nbytes:
            raise self._unexpected(f"a word about message {tag}")
        if kind == READY:
            message.ready = run
            if message.may_go(run):
                self.send(message)
        else:
            self._messages.opened(message)

    def _end_segment(self) -> None:
        assert self._segment is not None
        (receive, nbytes, last), self._room, self._segment = self._segment, None, None
        try:
            finished = receive.took(nbytes, last, self._run)
        except (FrameError, RunFailed) as error:
            raise type(error)(f"a message from rank {self.peer}: {error}") from error
        if finished:
            self._messages.finished()

    def _unexpected(self, what: str) -> RunFailed:
        return RunFailed(f"rank {self.peer} sends what is not expected here ({what})")

    def _lose(self, why: str | None) -> None:
        if self.lost:
            return
        self.lost = True
        self._poller.unregister(self.at)
        self._tell_lost(f"the connection to rank {self.peer} is lost: {why}")

    def close(self) -> None:
        """No run is under way."""
        if not self.lost:
            self._poller.unregister(self.at)
        self._connection.close()
