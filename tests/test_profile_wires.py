"""Messages of a measurement over a TCP connection of our own."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taccl.errors import RunFailed
from taccl.profiles.measure.wires import HEAD, TcpWire
from taccl.runtime.tcp_options import NO_LIMIT

Pair = tuple[TcpWire, TcpWire, socket.socket, socket.socket]


def connected() -> Pair:
    one, other = socket.socketpair()
    for end in (one, other):
        end.setblocking(False)
    return TcpWire(one, 1), TcpWire(other, 0), one, other


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = connected()
    yield found
    for end in found[2:]:
        end.close()


def finished(*requests) -> bool:
    """Whether all are done after a while."""
    left = list(requests)
    for _ in range(10_000):
        left = [request for request in left if not request.Test()]
        if not left:
            return True
    return False


def test_a_sender_keeps_to_a_rate_until_it_may_go_as_fast_as_it_can(pair: Pair) -> None:
    mine, _, one, _ = pair

    def kept() -> int:
        return int.from_bytes(one.getsockopt(socket.SOL_SOCKET, 47, 8), sys.byteorder)  # SO_MAX_PACING_RATE

    usual = kept()
    mine.keep_to(123_456_789)
    assert kept() == 123_456_789
    mine.keep_to(NO_LIMIT)
    assert kept() == usual


@given(
    messages=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300_000)), min_size=1, max_size=12),
    by_tag=st.permutations(range(4)),
    receives_first=st.booleans(),
)
def test_messages_arrive_as_they_were_sent(
    messages: list[tuple[int, int]], by_tag: list[int], receives_first: bool
) -> None:
    """In both directions at once, with receives that are started in any order of their tags, early or late."""
    mine, theirs, one, other = connected()
    rng = np.random.default_rng(len(messages))
    sends, receives, both = [], [], []
    for here, there in ((mine, theirs), (theirs, mine)):
        sources = [rng.integers(0, 256, size, np.uint8) for _, size in messages]
        targets = [np.zeros(size, np.uint8) for _, size in messages]
        for (tag, _), source in zip(messages, sources, strict=True):
            sends.append(here.sender(source, tag))
        for wanted in by_tag:
            for (tag, _), target in zip(messages, targets, strict=True):
                if tag == wanted:
                    receives.append(there.receiver(target, tag))
        both += zip(sources, targets, strict=True)
    requests = [*receives, *sends] if receives_first else [*sends, *receives]
    for request in requests:
        request.Start()
    try:
        assert finished(*requests)
        assert all((source == target).all() for source, target in both)
    finally:
        one.close()
        other.close()


def test_a_message_is_made_once_and_sent_many_times(pair: Pair) -> None:
    mine, theirs, *_ = pair
    source, target = np.zeros(100_000, np.uint8), np.zeros(100_000, np.uint8)
    send, receive = mine.sender(source, 3), theirs.receiver(target, 3)
    for turn in range(5):
        source[:] = turn + 1
        receive.Start()
        send.Start()
        assert finished(receive, send)
        assert (target == turn + 1).all()


def test_a_message_that_nobody_receives_waits_in_the_connection(pair: Pair) -> None:
    mine, theirs, *_ = pair
    first, second = mine.sender(np.full(10, 1, np.uint8), 1), mine.sender(np.full(10, 2, np.uint8), 2)
    target = np.zeros(10, np.uint8)
    behind, before = theirs.receiver(target, 2), theirs.receiver(np.zeros(10, np.uint8), 1)
    first.Start()
    second.Start()
    behind.Start()
    assert not any(behind.Test() for _ in range(10))
    before.Start()
    assert finished(before, behind, first, second)
    assert (target == 2).all()


def test_a_receive_that_is_given_up_gets_nothing(pair: Pair) -> None:
    mine, theirs, *_ = pair
    given_up, target = theirs.receiver(np.zeros(10, np.uint8), 1), np.zeros(10, np.uint8)
    given_up.Start()
    given_up.Free()
    send, receive = mine.sender(np.full(10, 7, np.uint8), 1), theirs.receiver(target, 1)
    send.Start()
    receive.Start()
    assert finished(send, receive)
    assert (target == 7).all() and not given_up.Test()


def test_a_message_of_another_length_is_refused(pair: Pair) -> None:
    _, theirs, one, _ = pair
    receive = theirs.receiver(np.zeros(10, np.uint8), 1)
    receive.Start()
    one.send(HEAD.pack(1, 2**60))
    with pytest.raises(RunFailed, match="rank 0 sends 1152921504606846976 bytes where 10 are expected"):
        receive.Test()


def test_a_rank_that_waits_for_a_lost_connection_waits(pair: Pair) -> None:
    """Until its deadline, which names the peer; the job may end before it for a better known reason."""
    mine, _, _, other = pair
    send, receive = mine.sender(np.zeros(10, np.uint8), 1), mine.receiver(np.zeros(10, np.uint8), 1)
    receive.Start()
    other.close()
    assert not any(receive.Test() for _ in range(10))
    send.Start()
    assert not any(send.Test() for _ in range(10))
    assert mine.lost == "it has ended"
