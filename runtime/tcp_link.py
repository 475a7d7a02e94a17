"""What passes over one TCP connection between two ranks, in both directions.

A message goes in segments, each behind a head, and those of several messages may take turns. Its data go straight to
where they belong, so a receiver says that its receive is ready, and only then a segment is sent; short messages go at
once, and their receiver has room for them.

A rank may be in a later run than its peer. What it sends then stays in the connection until the peer is there as well,
so nobody has to keep what comes early.

Compiled code does the same (`runtime/native/tcp.c`).
"""

from __future__ import annotations

import functools
import heapq
import math
import select
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from taccl.errors import RunFailed
from taccl.runtime import tcp_options
from taccl.runtime.codecs.codec import FrameError
from taccl.runtime.pace import ORDERLY_BYTES, Pace
from taccl.runtime.tcp_messages import (
    HEAD,
    KINDS,
    LAST,
    OPEN,
    READY,
    RUNS,
    SEGMENT,
    Incoming,
    Messages,
    Outgoing,
    Word,
)
from taccl.runtime.uplink import Uplink

if TYPE_CHECKING:
    from taccl.runtime.tcp_links import Links

READS = 16  # of a connection at a time
WAKE_BYTES = 128 << 10  # of a segment that is under way, which wake a rank that waits for more
# A segment of more ends a frame of the kernel's, which else goes on with what the next one begins with: its last bytes
# would come with that frame, on a slow link milliseconds later.
FRAME_BYTES = 16 << 10

NONE: Messages[Outgoing, Incoming] = Messages({}, {}, Pace(1, 1))


class Link:
    """This rank's end of a connection, one of `links`."""

    def __init__(self, peer: int, connection: socket.socket, links: Links) -> None:
        self.peer = peer
        self.lost = False
        self.at = connection.fileno()
        self._connection, self._links = connection, links
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
        self._most = tcp_options.NO_LIMIT  # bytes in a second
        self._unlimited_bytes = math.inf
        self._early = False  # the head is of a run that has not begun here
        links.poller.register(self.at, 0)
        self._want(select.EPOLLIN, True)

    @property
    def run(self) -> int:
        """The number of the run."""
        return self._links.run

    def outgoing(self, array: Any, tag: int, place: int, sized: bool, eager: bool, gates: int) -> Outgoing:
        """A message to the peer, as in `Outgoing`."""
        return Outgoing(self, array, tag, place, sized, eager, gates)

    def incoming(self, array: Any, tag: int, sized: bool, eager: bool, words: Sequence[Word]) -> Incoming:
        """One from it, as in `Incoming`."""
        return Incoming(self, array, tag, sized, eager, words)

    def teller(self, word: Word) -> Callable[[], object]:
        """What says a word."""
        if word.peer is None:
            return lambda: self._links.gated[word.number].open()
        return functools.partial(self._links.links[word.peer].say, OPEN, word.number)

    def finished(self) -> None:
        """A message is."""
        self._links.news += 1

    def _want(self, what: int, wanted: bool) -> None:
        wants = self._wants | what if wanted else self._wants & ~what
        if wants != self._wants:
            self._wants = wants
            self._links.poller.modify(self.at, wants)

    def begin(self, messages: Messages[Outgoing, Incoming]) -> None:
        """A run begins, or there is nothing to be done any more (NONE)."""
        self._messages = messages
        if messages is not NONE and messages.pace != self._kept:
            tcp_options.keep(self._connection, messages.pace, self._kept is not None)
            self._kept, self._unlimited_bytes = messages.pace, messages.pace.unlimited_bytes()
        if self._early and not self.lost and messages is not NONE:
            self._early = False
            self._want(select.EPOLLIN, True)
            self._look_at_head()

    def _limit(self, nbytes: int) -> None:
        """A message begins."""
        most = self._messages.pace.bytes_per_s if nbytes > self._unlimited_bytes else tcp_options.NO_LIMIT
        if most != self._most:
            self._most = most
            tcp_options.limit_rate(self._connection, most)

    def send(self, message: Outgoing) -> None:
        """Something may go, with the next look at the connections: words that are said meanwhile are not to wait behind
        it in the queue of the uplink."""
        heapq.heappush(self._work, (message.place, message))
        self._links.sending[self] = None

    def say(self, kind: int, tag: int) -> None:
        """A word to the peer, which goes with the next look at the connections."""
        self._words += HEAD.pack(tag * KINDS + kind, self.run, 0)
        self._links.talking.append(self)

    def idle(self) -> bool:
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
        self._under_way += memoryview(HEAD.pack(message.tag * KINDS + kind, self.run, len(part))), part
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
            self.finished()

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
        if run != self.run:
            if not 0 < (run - self.run) % RUNS < RUNS // 2:
                raise self._unexpected(f"something of run {run} in run {self.run}")
            self._early = True
            self._want(select.EPOLLIN, False)
            return
        self._head_bytes = 0
        tag, kind = divmod(word, KINDS)
        if kind in (SEGMENT, LAST):
            receive = self._messages.receives.get(tag)
            room = None if receive is None else receive.room(nbytes)
            if receive is None or room is None:
                raise self._unexpected(f"{nbytes} bytes of message {tag}")
            self._room, self._segment = room, (receive, nbytes, kind == LAST)
            if not nbytes:
                self._end_segment()
            return
        message = (self._messages.sends if kind == READY else self._links.gated).get(tag)
        if message is None or nbytes or (kind == READY and not message.receiver_ready()):
            raise self._unexpected(f"a word about message {tag}")
        if kind == OPEN:
            message.open()

    def _end_segment(self) -> None:
        assert self._segment is not None
        (receive, nbytes, last), self._room, self._segment = self._segment, None, None
        try:
            receive.took(nbytes, last)
        except (FrameError, RunFailed) as error:
            raise type(error)(f"a message from rank {self.peer}: {error}") from error

    def _unexpected(self, what: str) -> RunFailed:
        return RunFailed(f"rank {self.peer} sends what is not expected here ({what})")

    def _lose(self, why: str | None) -> None:
        if self.lost:
            return
        self.lost = True
        self._links.poller.unregister(self.at)
        self._links.lose(f"the connection to rank {self.peer} is lost: {why}")

    def close(self) -> None:
        """No run is under way."""
        if not self.lost:
            self._links.poller.unregister(self.at)
        self._connection.close()
