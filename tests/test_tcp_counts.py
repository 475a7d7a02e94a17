"""What the kernel says of this process's TCP connections, without a change of anything."""

import os
import socket

import pytest

from taccl.runtime.tcp_counts import moved_bytes


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
    before = moved_bytes()
    mine.sendall(bytes(10_000))
    left = 10_000
    while left:
        left -= len(theirs.recv(left))
    assert moved_bytes() - before >= 10_000


def test_a_default_timeout_of_the_process_makes_no_connection_of_others_non_blocking(ends):
    blocking = [os.get_blocking(end.fileno()) for end in ends]
    socket.setdefaulttimeout(5.0)
    try:
        moved_bytes()
    finally:
        socket.setdefaulttimeout(None)
    assert blocking == [True, True] == [os.get_blocking(end.fileno()) for end in ends]
