"""What ranks of a node hand over to its uplinks, and when."""

import contextlib
import ctypes
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taccl.errors import EnvironmentProblem
from taccl.runtime import native, tcp_links
from taccl.runtime.pace import Pace
from taccl.runtime.shared import SharedMemory
from taccl.runtime.tcp_links import Links
from taccl.runtime.tcp_messages import HEAD
from taccl.runtime.tcp_native import NativeLinks
from taccl.runtime.tcp_transport import TcpTransport
from taccl.runtime.transport import Plain
from taccl.runtime.uplink import MOST_NS, MOST_UPLINKS, QUEUE_NS, Uplinks

MS = 10**6
SEGMENT_BYTES = 1000
A_SEGMENT_IN_A_MS = ((0, 10**6),)


class Rank:
    """Rank 0 with connections to ranks 1 and 2, at a time that stands still."""

    def __init__(self, monkeypatch, kind, pace):
        self.now_ns = 5 * MOST_NS
        clock = SimpleNamespace(monotonic_ns=lambda: self.now_ns, monotonic=time.monotonic)
        monkeypatch.setattr(tcp_links, "time", clock)
        pairs = [socket.socketpair() for _ in range(2)]
        for end in (end for pair in pairs for end in pair):
            end.setblocking(False)
        self.ends = {peer: pair[1] for peer, pair in enumerate(pairs, 1)}
        self.links = kind({peer: pair[0] for peer, pair in enumerate(pairs, 1)})
        self.still = None
        if kind is NativeLinks:
            self.still = ctypes.c_int64.in_dll(native.library(), "taccl_still_ns")
        self.port = TcpTransport(self.links, 0, Plain(), paces={(0, 1): pace, (0, 2): pace})

    def started(self, *messages):
        """messages: (peer, segments), in the order of the program."""
        sends = [
            self.port.send(np.zeros(count * SEGMENT_BYTES, np.uint8), peer, tag)
            for tag, (peer, count) in enumerate(messages)
        ]
        self.port.begin()
        for send in reversed(sends):
            send.start()
        return sends

    def look(self, at_ms=0):
        """The segments that have come to each peer by then."""
        self.now_ns = 5 * MOST_NS + at_ms * MS
        self.poll()
        return {peer: self.came(end) // (SEGMENT_BYTES + HEAD.size) for peer, end in self.ends.items()}

    def poll(self):
        if self.still is not None:
            self.still.value = self.now_ns
        self.port.poll([])

    def came(self, end):
        count = 0
        with contextlib.suppress(BlockingIOError):
            while more := len(end.recv(1 << 20)):
                count += more
        return count

    @property
    def wakes_after_ms(self):
        return (self.links.due_ns - 5 * MOST_NS) / MS

    def close(self):
        if self.still is not None:
            self.still.value = 0
        self.port.close()
        self.links.close()
        for end in self.ends.values():
            end.close()


@pytest.fixture(params=["python", "compiled"])
def kind(request):
    if request.param == "compiled" and native.library() is None:
        pytest.skip(f"no compiled code: {native.why_not()}")
    return NativeLinks if request.param == "compiled" else Links


@pytest.fixture
def rank(monkeypatch, kind):
    made = Rank(monkeypatch, kind, Pace(SEGMENT_BYTES, 50, 0, A_SEGMENT_IN_A_MS))
    yield made
    made.close()


def test_a_rank_hands_over_what_its_uplink_passes_in_the_order_of_the_program(rank):
    rank.started((1, 2), (2, 6), (1, 3))
    full = QUEUE_NS // MS + 1
    assert rank.look() == {1: 2, 2: full - 2}
    assert rank.wakes_after_ms == 1
    assert rank.look() == {1: 0, 2: 0}
    assert rank.look(at_ms=1) == {1: 0, 2: 1}
    assert rank.look(at_ms=4) == {1: 1, 2: 2}
    assert rank.look(at_ms=1000) == {1: 2, 2: 0}
    assert rank.links.due_ns == 0


def test_what_is_known_of_no_uplink_goes_at_once(monkeypatch, kind):
    made = Rank(monkeypatch, kind, Pace(SEGMENT_BYTES, 50))
    made.started((1, 12), (2, 12))
    assert made.look() == {1: 12, 2: 12}
    assert made.links.due_ns == 0
    made.close()


def test_words_do_not_wait_for_an_uplink(rank):
    receive = rank.port.recv(np.zeros(100_000, np.uint8), 2, 5)
    rank.started((1, 12))
    rank.look()
    receive.start()
    rank.poll()
    assert rank.came(rank.ends[2]) == HEAD.size


def test_a_peer_that_takes_nothing_does_not_stop_the_others(rank):
    connection = rank.links.links[1]._connection
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    rank.started((1, 16), (2, 3))
    came = []
    for turn in range(40):
        rank.now_ns += 10 * MS
        rank.poll()
        came.append(rank.came(rank.ends[2]))
        if turn > 20:
            rank.came(rank.ends[1])
    assert sum(came[:20]) == 3 * (SEGMENT_BYTES + HEAD.size)
    assert all(link.idle() for link in rank.links.links.values())


def test_of_two_ranks_one_waits_for_what_the_other_has_handed_over(rank, monkeypatch, kind):
    other = Rank(monkeypatch, kind, Pace(SEGMENT_BYTES, 50, 0, A_SEGMENT_IN_A_MS))
    other.links.uplinks = rank.links.uplinks
    monkeypatch.setattr(tcp_links.time, "monotonic_ns", lambda: rank.now_ns)
    rank.started((1, 12))
    other.started((2, 12))
    assert rank.look()[1] == 5
    assert other.look() == {1: 0, 2: 0}
    assert other.wakes_after_ms == 1
    rank.now_ns += 2 * MS
    other.now_ns = rank.now_ns
    other.poll()
    assert other.came(other.ends[2]) == 2 * (SEGMENT_BYTES + HEAD.size)
    other.close()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20 * MS),
            st.integers(0, 10**6),
            st.lists(
                st.tuples(st.integers(0, 2), st.integers(10**7, 10**10)),
                max_size=2,
                unique_by=lambda one: one[0],
            ),
        ),
        max_size=60,
    )
)
def test_an_uplink_never_has_more_to_do_than_the_queue_and_a_segment(steps):
    uplinks, now_ns = Uplinks(), MOST_NS
    for later_ns, nbytes, over in steps:
        now_ns += later_ns
        due_ns = uplinks.due_ns(over, now_ns)
        assert now_ns <= due_ns <= now_ns + MOST_NS
        now_ns = due_ns
        before = [int(uplinks._free_ns[number]) for number, _ in over]
        assert all(free_ns - now_ns <= QUEUE_NS for free_ns in before)
        uplinks.take(over, nbytes, now_ns)
        for (number, rate), free_ns in zip(over, before, strict=True):
            took_ns = nbytes * 10**9 // rate
            assert uplinks._free_ns[number] == max(free_ns, now_ns) + took_ns


def test_a_clock_that_is_far_ahead_is_a_mistake():
    uplinks = Uplinks()
    uplinks._free_ns[3] = 10**18
    assert uplinks.due_ns(((3, 100),), 7) == 7 + MOST_NS - QUEUE_NS
    uplinks.take(((3, 100),), 1, 7)
    assert uplinks._free_ns[3] == 7 + MOST_NS + 10**7


class Job:
    """One rank of two that gather at once."""

    def __init__(self, rank, memory, said):
        self.rank, self.memory, self.said = rank, memory, said

    def gather_bytes(self, mine, what):
        self.said[self.rank] = mine
        return np.stack([self.said.get(rank, mine) for rank in range(2)])


class NoMemory:
    def empty(self, elements, dtype):
        raise EnvironmentProblem("no shared memory")


def met(sharing, memories):
    said = {}
    both = [Uplinks() for _ in memories]
    for rank, (uplinks, memory) in enumerate(zip(both, memories, strict=True)):
        uplinks.meet(Job(rank, memory, said), SimpleNamespace(sharing=sharing))
    return both


@pytest.mark.parametrize(
    ("sharing", "memories", "shared"),
    [
        (((0, 1), (0, 1)), (SharedMemory(), SharedMemory()), True),
        (((0,), (1,)), (SharedMemory(), SharedMemory()), False),
        (((), ()), (SharedMemory(), SharedMemory()), False),
        (((0, 1), (0, 1)), (NoMemory(), NoMemory()), False),
        (((0, 1), (0, 1)), (SharedMemory(), NoMemory()), True),
        (((0, 1), (0, 1)), (NoMemory(), SharedMemory()), False),
    ],
)
def test_ranks_that_share_memory_share_clocks(sharing, memories, shared):
    one, other = met(sharing, memories)
    one.take(((MOST_UPLINKS - 1, 1000),), 10, MOST_NS)
    seen = other.due_ns(((MOST_UPLINKS - 1, 1000),), MOST_NS) > MOST_NS
    assert seen == shared == (other._free_ns[MOST_UPLINKS - 1] == MOST_NS + 10 * MS)
