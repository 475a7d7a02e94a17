"""What the kernel says of this process's TCP connections, without a change of anything."""

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taccl.runtime.tcp_counts import LEAST_BYTES_PER_S, Connections, Moving


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
    yield mine, theirs
    mine.close()
    theirs.close()


def test_what_moves_is_counted_at_both_ends(ends):
    mine, theirs = ends
    connections = Connections()
    before = connections.moved_bytes()
    mine.sendall(bytes(10_000))
    left = 10_000
    while left:
        left -= len(theirs.recv(left))
    moved = connections.moved_bytes()
    assert moved - before >= 10_000
    # What a connection has moved is not taken back when it is closed.
    mine.close()
    assert connections.moved_bytes() >= moved


def test_a_default_timeout_of_the_process_makes_no_connection_of_others_non_blocking(ends):
    blocking = [os.get_blocking(end.fileno()) for end in ends]
    socket.setdefaulttimeout(5.0)
    try:
        Connections().moved_bytes()
    finally:
        socket.setdefaulttimeout(None)
    assert blocking == [True, True] == [os.get_blocking(end.fileno()) for end in ends]


FRAMES = st.sampled_from([1, 1448, 8948, 62_636])
GAPS_S = st.floats(0.01, 20)


@given(FRAMES, GAPS_S, st.floats(0.1, 0.5))
def test_frames_now_and_then_are_no_progress_and_quick_ones_are(frame_bytes, gap_s, look_s):
    """However long frames are: what counts is the rate since it last sufficed. A frame that comes just before a look
    counts once, as what it is worth."""
    moving, moved, last_s = Moving(0.0, 0), 0, 0.0
    pauses = [0.0]
    for look in range(1, 1 + int(60 / look_s)):
        now_s = look * look_s
        moved = frame_bytes * int(now_s / gap_s)
        if moving.goes_on(now_s, moved):
            pauses.append(now_s - last_s)
            last_s = now_s
    worth_s, rate = frame_bytes / LEAST_BYTES_PER_S, frame_bytes / gap_s
    assert last_s <= moved / LEAST_BYTES_PER_S
    if rate > 2 * LEAST_BYTES_PER_S:
        assert max(pauses) <= 3 * (gap_s + look_s) and last_s >= 60 - 3 * (gap_s + look_s)
    if gap_s > 2 * (worth_s + look_s):
        assert last_s == 0


def test_after_a_pause_progress_begins_anew():
    moving = Moving(0.0, 0)
    assert moving.goes_on(1.0, 100_000)
    assert not any(moving.goes_on(1 + second, 100_000) for second in range(1, 20))
    resumed = [moving.goes_on(20 + second, 100_000 + 50_000 * second) for second in range(1, 8)]
    assert resumed[3:] == [True] * 4 and not resumed[0]


def test_nothing_is_never_progress():
    moving = Moving(5.0, 70)
    assert not moving.goes_on(5.0, 70) and not moving.goes_on(5.5, 70)
    assert moving.goes_on(5.5, 70 + LEAST_BYTES_PER_S)
