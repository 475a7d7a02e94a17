"""A rank that waits sleeps, and is woken by what it waits for."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from tcp_ends import connected

from taccl.errors import EnvironmentProblem
from taccl.runtime import native, sleep
from taccl.runtime.pace import Pace
from taccl.runtime.process_memory import address
from taccl.runtime.shared import SharedMemory
from taccl.runtime.sleep import Bell, Sleeper
from taccl.runtime.tcp_links import Links
from taccl.runtime.tcp_messages import HEAD, LAST
from taccl.runtime.tcp_native import NativeLinks
from taccl.runtime.tcp_transport import TcpTransport
from taccl.runtime.transport import Plain

LONG_S = 20.0


@pytest.fixture(params=[Links, NativeLinks])
def links(request):
    if request.param is NativeLinks and native.library() is None:
        pytest.skip(f"no compiled code: {native.why_not()}")
    made = request.param({})
    yield made
    made.close()


@pytest.fixture
def sleeper(monkeypatch, links):
    monkeypatch.setattr(sleep, "MOST_S", LONG_S)
    made = links.sleeper = Sleeper(links, SharedMemory(), own_core=False)
    made.watch(lambda: 7)
    return made


def arm(sleeper):
    assert not sleeper.armed
    for _ in range(sleep.LOOKS_OF_MANY):
        if not sleeper.armed:
            sleeper()
    assert sleeper.armed


def slept_s(sleeper, after_s, wake):
    """How long it sleeps when something happens after a while."""
    timer = threading.Timer(after_s, wake)
    timer.start()
    begin = time.monotonic()
    sleeper()
    timer.join()
    return time.monotonic() - begin


def test_a_bell_wakes_it(sleeper):
    bell = Bell(sleeper._cell, sleeper._outside)
    for _ in range(3):
        arm(sleeper)
        assert slept_s(sleeper, 0.1, bell.ring) < LONG_S / 2
        assert not sleeper.armed
        sleeper.watch(lambda: 7)


def test_a_bell_that_rings_before_it_sleeps_is_heard(sleeper):
    arm(sleeper)
    Bell(sleeper._cell, sleeper._outside).ring()
    begin = time.monotonic()
    sleeper()
    assert time.monotonic() - begin < LONG_S / 2


def test_nobody_writes_while_it_is_awake(sleeper):
    Bell(sleeper._cell, sleeper._outside).ring()
    with pytest.raises(BlockingIOError):
        os.read(sleeper._inside, 1)


def test_progress_makes_it_look_again(sleeper):
    arm(sleeper)
    sleeper.watch(lambda: 6)
    begin = time.monotonic()
    sleeper()
    assert time.monotonic() - begin < LONG_S / 2, "it sleeps, and there may be more"
    assert sleeper.armed == bool(sleeper._cell[0])
    sleeper.forget()
    assert not sleeper.armed and not sleeper._cell[0]


def test_where_it_has_a_core_of_its_own_nobody_needs_to_wake_it_at_its_first_looks(links):
    sleeper = links.sleeper = Sleeper(links, SharedMemory(), own_core=True)
    for left in (7, 6):
        sleeper.watch(lambda left=left: left)
        for _ in range(sleep.LOOKS - 1):
            sleeper()
            assert not sleeper.armed and not sleeper._cell[0]
        sleeper()
        assert sleeper.armed and sleeper._cell[0]


def test_what_comes_over_a_connection_wakes_it(monkeypatch, links):
    monkeypatch.setattr(sleep, "MOST_S", LONG_S)
    mine, theirs = connected()
    links = type(links)({1: mine})
    sleeper = links.sleeper = Sleeper(links, SharedMemory(), own_core=False)
    sleeper.watch(lambda: 7)
    arm(sleeper)
    assert slept_s(sleeper, 0.1, theirs.close) < LONG_S / 2
    assert sleeper.armed, "no bell rang"
    links.move()
    assert slept_s(sleeper, 0.1, Bell(sleeper._cell, sleeper._outside).ring) < LONG_S / 2, "it slept unheard"
    links.close()


def test_it_wakes_by_itself(sleeper, monkeypatch):
    sleeper._most_s = 0.01
    arm(sleeper)
    sleeper()
    assert sleeper.armed and sleeper._cell[0]  # it has found nothing yet, and can be woken
    sleeper()


def test_a_full_pipe_and_a_rank_that_has_ended_do_not_matter(sleeper):
    arm(sleeper)
    bell = Bell(sleeper._cell, sleeper._outside)
    for _ in range(100_000):
        bell.ring()
    inside, outside = os.pipe()
    os.close(inside)
    Bell(sleeper._cell, outside).ring()
    os.close(outside)
    assert bell.cell_at == address(sleeper._cells)


def test_a_file_that_is_no_pipe_is_no_bell(tmp_path):
    with (tmp_path / "x").open("w") as file, pytest.raises(OSError, match="no pipe"):
        sleep._open(os.getpid(), file.fileno())


def test_without_shared_memory_it_sleeps_all_the_same(links):
    class Nothing(SharedMemory):
        def empty(self, elements, dtype):
            raise EnvironmentProblem("there is none")

    made = links.sleeper = Sleeper(links, Nothing(), own_core=True)
    made._most_s = 0.01
    for _ in range(sleep.LOOKS + 1):
        made()
    assert made.armed


def test_a_signal_wakes_it(sleeper):
    class Rung(Exception):
        pass

    def handler(number, frame):
        raise Rung

    arm(sleeper)
    before = signal.signal(signal.SIGALRM, handler)
    begin = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Rung):
            sleeper()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin < LONG_S / 2


def woken_until(links, port, done):
    """How often a rank that sleeps wakes until that is so."""
    count, begin = 0, time.monotonic()
    while not done():
        links.wait(LONG_S)
        port.poll([])
        count += 1
    assert time.monotonic() - begin < LONG_S / 2
    return count


@pytest.fixture
def rank(links):
    """The links of a rank, its transport, and the other end of its only connection."""
    mine, theirs = connected()
    theirs.setblocking(True)
    made = type(links)({1: mine})
    port = TcpTransport(made, 0, Plain(), paces={(0, 1): Pace(1000, 50, 0, ((0, 10**6),))})
    yield made, port, theirs
    port.close()
    made.close()
    theirs.close()


def receiving(port, nbytes):
    """An array, and the message that is to fill it, which has begun."""
    array = np.zeros(nbytes, np.uint8)
    message = port.recv(array, 1, 0)
    port.begin()
    message.start()
    port.poll([])
    return array, message


def test_the_end_of_a_message_wakes_it_and_parts_of_it_need_not(rank):
    links, port, theirs = rank
    array, message = receiving(port, 2**20)

    def send():
        theirs.sendall(HEAD.pack(LAST, links.run, len(array)))
        for part in range(8):
            time.sleep(0.02)
            theirs.sendall(bytes([part]) * (len(array) // 8))

    sender = threading.Thread(target=send)
    sender.start()
    count = woken_until(links, port, lambda: links.news)
    sender.join()
    assert port.poll([message.token]) == [0]
    assert array[::131072].tolist() == list(range(8))
    assert count == 1 or isinstance(links, Links)


def test_it_wakes_by_itself_while_parts_of_a_message_come(rank):
    """Others are to be heard meanwhile: signals, and the MPI library."""
    links, port, theirs = rank
    array, _ = receiving(port, 2**26)
    data = HEAD.pack(LAST, links.run, len(array)) + bytes(len(array))
    sender = threading.Thread(target=theirs.sendall, args=(data,))
    sender.start()
    assert not links.wait(1e-3) and not links.news
    woken_until(links, port, lambda: links.news)
    sender.join()


def test_what_is_due_leaves_while_it_sleeps(rank):
    links, port, theirs = rank
    message = port.send(np.zeros(30_000, np.uint8), 1, 0)  # 30 ms of its uplink, which gets 5 at once
    port.begin()
    begin = time.monotonic()
    message.start()
    port.poll([])
    count = woken_until(links, port, links.links[1].idle)
    assert time.monotonic() - begin >= 0.02 and links.due_ns == 0
    assert count == 1 or isinstance(links, Links)
    left = 30_000 + 30 * HEAD.size
    while left:
        left -= len(theirs.recv(left))
    woken_until(links, port, lambda: links.news)
    assert port.poll([message.token]) == [0]


def test_what_was_due_before_it_sleeps_is_not_slept_over(rank):
    links, port, _ = rank
    message = port.send(np.zeros(30_000, np.uint8), 1, 0)
    port.begin()
    message.start()
    port.poll([])
    assert links.due_ns
    time.sleep(0.05)  # all of it may go by now
    woken_until(links, port, links.links[1].idle)
