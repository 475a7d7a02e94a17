"""TCP connections moved by compiled code against those moved by its twin: whatever comes, the same happens."""

import collections
import contextlib
import ctypes
import itertools
import socket

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tcp_ends import connected

from taccl.errors import RunFailed
from taccl.runtime import native, tcp_native, tcp_transport
from taccl.runtime.codecs.codec import FrameError
from taccl.runtime.tcp_links import Links
from taccl.runtime.tcp_messages import HEAD, KINDS, LAST, OPEN, READY, SEGMENT
from taccl.runtime.tcp_native import NativeLinks
from taccl.runtime.tcp_transport import TcpTransport
from taccl.runtime.transport import Plain, write_head
from taccl.runtime.turns import Gate

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled code: {native.why_not()}")

# Received by rank 0, by tag: (bytes, whether it is a message of frames). The first two are short enough to come before
# they are started; of the third, what rank 1 or rank 0 itself sends later waits for a half.
INWARDS = [(100, False), (96, True), (70_000, False), (90_000, True), (70_001, False)]
OUTWARDS = [50, 80_000, 70_000]  # the last waits for a gate
TURNS = {
    (0, 1, 2): (Gate(0, (1, 0, 2), 0.5),),
    (1, 0, 4): (Gate(0, (1, 0, 2), 0.25), Gate(0, (1, 0, 3), 1.0)),
}


def heard(said):
    """The words, and by tag the data."""
    words, data = [], collections.defaultdict(bytes)
    while said:
        head, said = said[: HEAD.size], said[HEAD.size :]
        number, run, nbytes = HEAD.unpack(head)
        tag, kind = divmod(number, KINDS)
        if kind in (READY, OPEN):
            words.append((kind, tag, run, nbytes))
        else:
            data[tag] += said[:nbytes]
            said = said[nbytes:]
    return sorted(words), dict(data)


class Rank:
    """Rank 0, of which all that happens is noted, and the other end of its only connection."""

    def __init__(self, kind, started):
        mine, self.theirs = connected()
        self.theirs.setblocking(True)
        self.links = kind({1: mine})
        self.port = TcpTransport(self.links, 0, Plain(), turns=TURNS)
        self.sources = [np.arange(length, dtype=np.uint32).astype(np.uint8) for length in OUTWARDS]
        self.targets = [np.zeros(length, np.uint8) for length, _ in INWARDS]
        sends = [self.port.send(array, 1, tag) for tag, array in enumerate(self.sources)]
        receives = [
            self.port.recv(array, 1, tag, sized)
            for tag, (array, (_, sized)) in enumerate(zip(self.targets, INWARDS, strict=True))
        ]
        self.messages = [*sends, *receives]
        self.started = started
        self.finished, self.said, self.failed = [], b"", ""

    def begin(self):
        self.port.begin()
        for number, message in enumerate(self.messages):
            if self.started >> number & 1:
                message.start()

    def look(self, count=3):
        for _ in range(count):
            if self.failed:
                return
            try:
                found = self.port.poll([message.token for message in self.messages]) or []
                self.finished += sorted(found)
            except (FrameError, RunFailed) as error:
                self.failed = f"{type(error).__name__}: {error}"
            with contextlib.suppress(BlockingIOError):
                while more := self.theirs.recv(1 << 20, socket.MSG_DONTWAIT):
                    self.said += more

    @property
    def outcome(self):
        """Without what depends on when the kernel has passed on what was sent."""
        arrived = [target.tobytes() for target in self.targets]
        return (self.failed, arrived) if self.failed else (arrived, sorted(self.finished), heard(self.said))

    def close(self):
        self.port.close()
        self.links.close()
        self.theirs.close()


def both(started, parts):
    """What happens to either when these bytes come one after the other."""
    ranks = [Rank(kind, started) for kind in (Links, NativeLinks)]
    try:
        for rank in ranks:
            with contextlib.suppress(RunFailed, FrameError):
                rank.begin()
            rank.look()
            for part in parts:
                with contextlib.suppress(OSError):
                    rank.theirs.sendall(part)
                rank.look()
            rank.look(20)
        return [rank.outcome for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()


def frames(length, used):
    body = np.arange(length, dtype=np.uint32).astype(np.uint8)
    if length >= 16:
        write_head(body, max(used, 16))
    return body.tobytes()


@st.composite
def pieces(draw):
    """A head, mostly of something that may come, and what follows it."""
    kind = draw(st.sampled_from([SEGMENT, LAST, READY, OPEN, LAST, SEGMENT]))
    tag = draw(st.sampled_from([0, 1, 2, 3, 4, 2, 3, 7, 2**30 - 1]))
    run = draw(st.sampled_from([1, 1, 1, 1, 1, 1, 1, 1, 2, 0, 2**31, 2**32 - 1]))
    if kind in (READY, OPEN):
        return HEAD.pack(tag * KINDS + kind, run, draw(st.sampled_from([0, 0, 0, 0, 5])))
    length, sized = INWARDS[tag] if tag < len(INWARDS) else (10, False)
    length = draw(st.sampled_from([length, length, length, length // 2, 0, length + 1, 40, 2**63, 2**64 - 1]))
    there = min(length, 100_000)
    body = frames(there, draw(st.sampled_from([there, there, 40, 15]))) if sized else bytes(range(256)) * 400
    return HEAD.pack(tag * KINDS + kind, run, length) + body[:there]


def word(kind, tag, nbytes=0, run=1):
    return HEAD.pack(tag * KINDS + kind, run, nbytes)


EVERYTHING = 2 ** (len(INWARDS) + len(OUTWARDS)) - 1


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, EVERYTHING),
    st.lists(pieces(), max_size=7),
    st.lists(st.integers(0, 200_000), max_size=6),
)
@example(EVERYTHING, [word(READY, 1), word(LAST, 2, 70_000) + bytes(70_000), word(READY, 2)], [20, 40_000])
@example(EVERYTHING, [word(LAST, 2, 70_000) + bytes(70_000), word(READY, 2), word(OPEN, 0)], [])
@example(EVERYTHING, [word(READY, 2), word(OPEN, 0), word(OPEN, 0), word(LAST, 0, 100) + b"a" * 100], [])
@example(0, [word(LAST, 1, 40) + frames(40, 40), word(LAST, 0, 100) + b"b" * 100], [30])
def test_the_same_bytes_do_the_same_to_both(started, made, cuts):
    sent = b"".join(made)
    at = sorted({0, len(sent), *(min(cut, len(sent)) for cut in cuts)})
    parts = [sent[begin:end] for begin, end in itertools.pairwise(at)]
    in_python, in_c = both(started, parts)
    assert in_c == in_python


def test_what_comes_right_arrives_and_is_answered():
    """So the test above compares more than refusals."""
    bodies = [b"a" * 100, frames(96, 96), b"c" * 70_000, frames(90_000, 90_000), b"e" * 70_001]
    parts = [word(READY, tag) for tag in (1, 2)]
    for tag, body in enumerate(bodies):
        parts += [word(SEGMENT, tag, 64) + body[:64], word(LAST, tag, len(body) - 64) + body[64:]]
    # Words: of each long receive that it is ready, and of the two gates of rank 1's last message.
    words = [(READY, 2, 1, 0), (READY, 3, 1, 0), (READY, 4, 1, 0), (OPEN, 0, 1, 0), (OPEN, 0, 1, 0)]
    data = {tag: np.arange(n, dtype=np.uint32).astype(np.uint8).tobytes() for tag, n in enumerate(OUTWARDS)}
    expected = bodies, list(range(len(INWARDS) + len(OUTWARDS))), (sorted(words), data)
    assert both(EVERYTHING, parts) == [expected, expected]


def test_both_sides_lay_structs_out_alike():
    for name, kind in tcp_native.STRUCTS.items():
        told = ctypes.c_int64.in_dll(native.library(), f"taccl_{name}_bytes").value
        assert told == ctypes.sizeof(kind), name


def test_without_compiled_code_python_moves_them(monkeypatch):
    mine, theirs = connected()
    made = tcp_transport.join({1: mine})
    assert isinstance(made, NativeLinks)
    made.close()
    monkeypatch.setattr(native, "library", lambda: None)
    mine, other = connected()
    made = tcp_transport.join({1: mine})
    assert isinstance(made, Links)
    made.close()
    for end in (theirs, other):
        end.close()


def test_a_run_that_ends_within_a_segment_ends_its_connection(monkeypatch):
    """The memory of its message is nobody's any more, and the next run must not find the rest of it there."""
    monkeypatch.setattr(tcp_transport, "LINGER_S", 0.0)
    rank = Rank(NativeLinks, EVERYTHING)
    rank.begin()
    rank.theirs.sendall(word(LAST, 2, 70_000) + b"c" * 30_000)
    rank.look()
    assert rank.targets[2][:30_000].tobytes() == b"c" * 30_000
    rank.port.close()
    rank.theirs.sendall(b"d" * 40_000)
    rank.port = TcpTransport(rank.links, 0, Plain())
    rank.messages = [rank.port.recv(np.zeros(100, np.uint8), 1, 0)]
    rank.begin()
    rank.look(10)
    assert rank.failed == "RunFailed: the connection to rank 1 is lost: a run has failed"
    assert not rank.targets[2][30_000:].any()
    rank.close()


@pytest.mark.parametrize("kind", [Links, NativeLinks])
def test_a_program_may_be_given_up_after_its_connections_within_a_segment_too(kind):
    rank = Rank(kind, EVERYTHING)
    rank.begin()
    rank.theirs.sendall(word(LAST, 2, 70_000) + b"c" * 30_000)
    rank.look()
    rank.links.close()
    rank.port.close()
    rank.theirs.close()


def test_a_message_that_is_started_twice_is_refused_before_it_has_no_room():
    rank = Rank(NativeLinks, 0)
    rank.begin()
    for _ in range(1 + len(OUTWARDS)):
        rank.messages[0].start()
    rank.look()
    assert "more than belongs to the program" in rank.failed
    rank.close()
