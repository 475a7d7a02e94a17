"""All TCP connections of a rank, moved by compiled code (`runtime/native/tcp.c`).

Messages, links and what they have in common are structs that both sides know; a look at all connections is one call.
What it does is what `runtime/tcp_links.py` does in Python.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from taccl.errors import RunFailed
from taccl.runtime import native, tcp_link, tcp_options, uplink
from taccl.runtime.codecs.codec import FrameError
from taccl.runtime.pace import MOST_SEGMENTS, ORDERLY_BYTES, Pace
from taccl.runtime.process_memory import address
from taccl.runtime.sleep import Sleeper
from taccl.runtime.tcp_links import Lost
from taccl.runtime.tcp_messages import DAMAGED, HEAD, RUNS, SHORT, Messages, Word

MOST = 2**63 - 1
ENDED = -1  # instead of an errno
ABANDONED = -2
NOTHING, OTHER_RUN, OTHER_BYTES, OTHER_WORD, IS_DAMAGED, IS_SHORT, CROWDED = range(7)


def _numbers(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


def _places(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


class NativeOutgoing(ctypes.Structure):
    """A message to a peer, as `Outgoing` in runtime/tcp_messages.py and `struct outgoing` in tcp.c."""

    _fields_ = (
        *_places("data"),
        *_numbers("room", "link", "tag", "place", "sized", "eager", "gates"),
        *_numbers("ready", "open_run", "open", "begun_in", "count", "left", "done"),
    )
    _state: NativeState
    _array: Any

    def held(self) -> bool:
        """Whether it is started and some of its gates are closed."""
        run = self._state.run
        return bool(self.begun_in == run and self.gates and (self.open_run != run or self.open < self.gates))

    def starts(self) -> Callable[[], None]:
        """What starts it."""
        send, state, message = _calls().send, ctypes.byref(self._state), ctypes.byref(self)

        def start() -> None:
            if send(state, message):
                raise FrameError(DAMAGED)

        return start


class NativeWord(ctypes.Structure):
    """As `Word`, and `struct word`."""

    _fields_ = _numbers("at_bytes", "link", "number")


class NativeIncoming(ctypes.Structure):
    """A message from a peer, as `Incoming`, and `struct incoming`."""

    _fields_ = (
        *_places("data", "early", "into"),
        *_numbers("room", "link", "tag", "sized", "eager"),
        *_places("words"),
        *_numbers("word_count", "told", "arrived", "started", "landed", "done"),
    )
    _state: NativeState
    _array: Any
    said: Sequence[Word]

    def starts(self) -> Callable[[], object]:
        """What starts it."""
        return functools.partial(_calls().receive, ctypes.byref(self._state), ctypes.byref(self))


class NativeUplink(ctypes.Structure):
    """As `struct uplink`."""

    _fields_ = _numbers("number", "bytes_per_s")


class NativeMessages(ctypes.Structure):
    """Those of a program with one peer, as `struct messages`."""

    _fields_ = (
        *_places("sends", "heap", "receives"),
        *_numbers(
            "sends_end", "receives_end", "most_work", "segment_bytes", "bytes_per_s", "unlimited_bytes"
        ),
        *_places("uplinks"),
        *_numbers("uplink_count"),
        *_places("words", "out"),
        *_numbers("words_room"),
    )


class NativeLink(ctypes.Structure):
    """This rank's end of a connection, as `struct link`."""

    _fields_ = (
        *_numbers("fd", "lost", "wants", "talking", "sending"),
        *_places("messages"),
        *_numbers("work", "words_bytes", "out_at", "out_bytes"),
        *_places("part"),
        *_numbers("part_bytes"),
        *_places("now"),
        *_numbers("flags"),
        ("rate", ctypes.c_uint64),
        ("head", ctypes.c_uint8 * HEAD.size),
        *_numbers("head_bytes"),
        *_places("within"),
        *_numbers("in_bytes"),
        *_places("receiving"),
        *_numbers("segment", "last", "least", "early"),
    )
    _links: NativeLinks
    _connection: socket.socket
    number: int
    kept: Pace | None

    def outgoing(
        self, array: Any, tag: int, place: int, sized: bool, eager: bool, gates: int
    ) -> NativeOutgoing:
        """A message to the peer, as in `Outgoing`."""
        message = NativeOutgoing(
            data=address(array), room=len(array), link=self.number, tag=tag, place=place, sized=sized,
            eager=eager, gates=gates, ready=-1, open_run=-1, begun_in=-1,
        )  # fmt: skip
        message._state, message._array = self._links.state, array
        return message

    def incoming(
        self, array: Any, tag: int, sized: bool, eager: bool, words: Sequence[Word]
    ) -> NativeIncoming:
        """One from it, as in `Incoming`."""
        early = np.empty(len(array) if eager else 0, np.uint8)
        words = sorted(words, key=lambda word: word.part)
        told = (NativeWord * len(words))(*map(functools.partial(self._links.word, len(array)), words))
        message = NativeIncoming(
            data=address(array), into=address(array), early=address(early), room=len(array), link=self.number,
            tag=tag, sized=sized, eager=eager, words=ctypes.addressof(told), word_count=len(words), started=-1,
            landed=-1,
        )  # fmt: skip
        message._state, message._array, message.said = self._links.state, (array, early, told), words
        return message

    def idle(self) -> bool:
        """As `Link.idle`."""
        return not self.work


class NativeState(ctypes.Structure):
    """What links have in common, as `struct links`."""

    _fields_ = (
        *_numbers("poller"),
        *_places("links"),
        *_numbers("count"),
        *_places("by_fd"),
        *_numbers("fds"),
        *_places("talking", "sending"),
        *_numbers("talkings", "sendings", "run", "news", "due_ns", "drained"),
        *_places("gated"),
        *_numbers("gated_count"),
        *_places("free_ns"),
        *_numbers(
            "queue_ns", "most_ns", "reads", "most_segments", "wake_bytes", "frame_bytes", "orderly_bytes"
        ),
        *_numbers("pacing", "lost", "fault", "fault_link", "fault_first", "fault_second"),
    )


class _Calls(NamedTuple):
    send: Any
    receive: Any
    begin: Any
    move: Any
    sleep: Any
    owes: Any


STRUCTS = {
    "outgoing": NativeOutgoing,
    "word": NativeWord,
    "incoming": NativeIncoming,
    "uplink": NativeUplink,
    "messages": NativeMessages,
    "link": NativeLink,
    "links": NativeState,
}


@functools.lru_cache(maxsize=1)
def _calls() -> _Calls:
    """Of the compiled code, which is there."""
    found = native.library()
    assert found is not None
    # Without argtypes a call of pointers takes half of the time.
    calls = _Calls(*(getattr(found, f"taccl_tcp_{name}") for name in _Calls._fields))
    calls.receive.restype = None
    return calls


def _pointers(messages: Mapping[int, ctypes.Structure]) -> Any:
    """Addresses by number."""
    found = (ctypes.c_void_p * (max(messages, default=-1) + 1))()
    for number, message in messages.items():
        found[number] = ctypes.addressof(message)
    return found


class NativeProgram(NamedTuple):
    """As `Program`: what each link gets. kept: what these refer to."""

    by_link: Sequence[NativeMessages]
    paces: Sequence[Pace]
    gated: Any
    kept: Sequence[object]


class NativeLinks:
    """As `Links`."""

    def __init__(self, connections: Mapping[int, socket.socket], everyone: bool = False) -> None:
        self.everyone = everyone
        self.poller = select.epoll()
        self.lost: Lost | None = None
        self.sleeper: Sleeper | None = None
        self.uplinks = uplink.Uplinks()
        calls = _calls()
        self._move, self._begin, self._sleep, self._owes = calls.move, calls.begin, calls.sleep, calls.owes
        self._connections = tuple(connections.values())
        self._peers = tuple(connections)
        self.state = NativeState(
            poller=self.poller.fileno(),
            count=len(connections),
            lost=-1,
            queue_ns=uplink.QUEUE_NS,
            most_ns=uplink.MOST_NS,
            reads=tcp_link.READS,
            most_segments=MOST_SEGMENTS,
            wake_bytes=tcp_link.WAKE_BYTES,
            frame_bytes=tcp_link.FRAME_BYTES,
        )
        self._place = ctypes.byref(self.state)
        self._links = (NativeLink * len(connections))()
        self.links: dict[int, NativeLink] = {}
        self._numbers = {peer: number for number, peer in enumerate(connections)}
        fds = [connection.fileno() for connection in self._connections]
        self._by_fd = np.full(max(fds, default=-1) + 1, -1, np.int64)
        self._lists = np.zeros((2, max(1, len(fds))), np.int64)
        self._nothing = NativeMessages(segment_bytes=1, unlimited_bytes=MOST)
        for number, (peer, connection) in enumerate(connections.items()):
            link = self.links[peer] = self._links[number]
            link._links, link._connection, link.number, link.kept = self, connection, number, None
            link.fd, link.wants, link.least = fds[number], select.EPOLLIN, 1
            link.rate = tcp_options.NO_LIMIT
            link.messages = ctypes.addressof(self._nothing)
            self._by_fd[fds[number]] = number
            self.poller.register(fds[number], select.EPOLLIN)
        state = self.state
        state.links, state.by_fd, state.fds = (
            ctypes.addressof(self._links),
            address(self._by_fd),
            len(self._by_fd),
        )
        state.talking, state.sending = address(self._lists[0]), address(self._lists[1])
        self._program: NativeProgram | None = None

    @property
    def run(self) -> int:
        """The number of the run."""
        return int(self.state.run)

    @run.setter
    def run(self, number: int) -> None:
        self.state.run = number

    @property
    def news(self) -> int:
        """Messages that are finished, which nobody has asked for."""
        return int(self.state.news)

    @news.setter
    def news(self, count: int) -> None:
        self.state.news = count

    @property
    def due_ns(self) -> int:
        """As of `Links`."""
        return int(self.state.due_ns)

    def word(self, room: int, word: Word) -> NativeWord:
        """A word about a message of so many bytes."""
        link = -1 if word.peer is None else self._numbers[word.peer]
        return NativeWord(math.ceil(word.part * room), link, word.number)

    def program(
        self,
        messages: Mapping[int, Messages[NativeOutgoing, NativeIncoming]],
        gated: Mapping[int, NativeOutgoing],
    ) -> NativeProgram:
        """As `Links.program`."""
        said = [0] * len(self._peers)  # words to each peer
        for number, peer in enumerate(self._peers):
            for message in messages[peer].receives.values():
                said[number] += not message.eager
                for word in message.said:
                    if word.peer is None:
                        assert word.number in gated  # it is looked up there without a question
                    else:
                        said[self._numbers[word.peer]] += 1
        made = [self._laid(messages[peer], words) for peer, words in zip(self._peers, said, strict=True)]
        paces = [messages[peer].pace for peer in self._peers]
        pointers = _pointers(gated)
        return NativeProgram([laid for laid, _ in made], paces, pointers, [made, messages, gated])

    def _laid(
        self, known: Messages[NativeOutgoing, NativeIncoming], words: int
    ) -> tuple[NativeMessages, Sequence[object]]:
        """The messages with a peer, and what they refer to."""
        sends, receives = _pointers(known.sends), _pointers(known.receives)
        heap = (ctypes.c_void_p * len(known.sends))()
        uplinks = (NativeUplink * len(known.pace.uplinks))(
            *itertools.starmap(NativeUplink, known.pace.uplinks)
        )
        room = np.empty((2, (words + 1) * HEAD.size), np.uint8)
        limit = known.pace.unlimited_bytes()
        laid = NativeMessages(
            sends=ctypes.addressof(sends), receives=ctypes.addressof(receives), heap=ctypes.addressof(heap),
            sends_end=len(sends), receives_end=len(receives), most_work=len(heap),
            segment_bytes=known.pace.segment_bytes, bytes_per_s=known.pace.bytes_per_s,
            unlimited_bytes=MOST if math.isinf(limit) else int(limit),
            uplinks=ctypes.addressof(uplinks), uplink_count=len(uplinks),
            words=address(room[0]), out=address(room[1]), words_room=words * HEAD.size,
        )  # fmt: skip
        return laid, (sends, receives, heap, uplinks, room)

    def begin(self, program: NativeProgram) -> None:
        """As `Links.begin`."""
        state = self.state
        state.run = (state.run + 1) % RUNS
        state.news = 0
        if program is not self._program:
            self._take(program)
        if self._begin(self._place):
            self._complain()

    def _take(self, program: NativeProgram) -> None:
        state = self.state
        self._program = program
        state.gated, state.gated_count = ctypes.addressof(program.gated), len(program.gated)
        state.free_ns = self.uplinks.at
        state.orderly_bytes, state.pacing = ORDERLY_BYTES, tcp_options.SO_MAX_PACING_RATE
        self._hand_out(program.by_link)
        for link, pace in zip(self.links.values(), program.paces, strict=True):
            if pace != link.kept:
                tcp_options.keep(link._connection, pace, link.kept is not None)
                link.kept = pace

    def _hand_out(self, by_link: Iterable[NativeMessages]) -> None:
        """What is under way would be of memory that nobody keeps: then a run has failed, and the connection ends."""
        for link, messages in zip(self.links.values(), by_link, strict=True):
            busy = link.part_bytes or link.in_bytes or link.out_at < link.out_bytes or link.words_bytes
            if busy and not link.lost:
                link.lost = ABANDONED
                self.poller.unregister(link.fd)
                if self.state.lost < 0:
                    self.state.lost = link.number
            link.messages = ctypes.addressof(messages)
            link.work = link.words_bytes = link.out_at = link.out_bytes = link.part_bytes = link.in_bytes = 0
            link.now = link.receiving = None

    def move(self) -> None:
        """As `Links.move`."""
        if self._move(self._place):
            self._complain()

    def wait(self, most_s: float) -> bool:
        """As `Links.wait`. Wakes for what ends something only."""
        return bool(self._sleep(self._place, ctypes.c_int64(int(most_s * 1e9))))

    def _complain(self) -> None:
        state = self.state
        if state.lost >= 0 and self.lost is None:
            link = self._links[state.lost]
            why = {ENDED: "it has ended", ABANDONED: "a run has failed"}.get(link.lost) or os.strerror(
                link.lost
            )
            peer = self._peers[state.lost]
            self.lost = Lost(f"the connection to rank {peer} is lost: {why}", time.monotonic())
        if state.fault == NOTHING:
            return
        peer, first, second = self._peers[state.fault_link], state.fault_first, state.fault_second
        if state.fault == IS_DAMAGED:
            raise FrameError(f"a message from rank {peer}: {DAMAGED}")
        if state.fault == IS_SHORT:
            raise RunFailed(f"a message from rank {peer}: {SHORT}")
        what = {
            OTHER_RUN: f"something of run {first} in run {second}",
            OTHER_BYTES: f"{first % 2**64} bytes of message {second}",
            OTHER_WORD: f"a word about message {first}",
            CROWDED: "more than belongs to the program",
        }[state.fault]
        raise RunFailed(f"rank {peer} sends what is not expected here ({what})")

    @property
    def owes(self) -> bool:
        """As `Links.owes`."""
        return bool(self._owes(self._place))

    def forget(self, program: NativeProgram) -> None:
        """As `Links.forget`."""
        if self._program is program:
            self._program = None
            self.state.gated_count = 0
            self._hand_out([self._nothing] * len(self._peers))

    def close(self) -> None:
        """As `Links.close`."""
        for link, connection in zip(self.links.values(), self._connections, strict=True):
            if not link.lost:
                self.poller.unregister(link.fd)
                link.lost = ENDED
            connection.close()
            del link._links
        if self.sleeper is not None:
            self.sleeper.close()
        self.poller.close()
