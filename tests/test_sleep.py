"""A rank that waits sleeps, and is woken by what it waits for."""

import os
import select
import threading
import time

import pytest

from taccl.errors import EnvironmentProblem
from taccl.runtime import sleep
from taccl.runtime.process_memory import address
from taccl.runtime.shared import SharedMemory
from taccl.runtime.sleep import Bell, Sleeper

LONG_S = 20.0


@pytest.fixture
def sleeper(monkeypatch):
    monkeypatch.setattr(sleep, "MOST_S", LONG_S)
    poller = select.epoll()
    made = Sleeper(poller, SharedMemory(), own_core=False)
    made.watch(lambda: 7)
    yield made
    made.close()
    poller.close()


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


def test_where_it_has_a_core_of_its_own_nobody_needs_to_wake_it_at_its_first_looks():
    poller = select.epoll()
    sleeper = Sleeper(poller, SharedMemory(), own_core=True)
    for left in (7, 6):
        sleeper.watch(lambda left=left: left)
        for _ in range(sleep.LOOKS - 1):
            sleeper()
            assert not sleeper.armed and not sleeper._cell[0]
        sleeper()
        assert sleeper.armed and sleeper._cell[0]
    sleeper.close()
    poller.close()


def test_what_comes_over_a_connection_wakes_it(sleeper):
    inside, outside = os.pipe()
    sleeper._poller.register(inside, select.EPOLLIN)
    arm(sleeper)
    assert slept_s(sleeper, 0.1, lambda: os.write(outside, b"x")) < LONG_S / 2
    os.read(inside, 1)
    assert slept_s(sleeper, 0.1, Bell(sleeper._cell, sleeper._outside).ring) < LONG_S / 2, "it slept unheard"
    sleeper._poller.unregister(inside)
    os.close(inside)
    os.close(outside)


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


def test_without_shared_memory_it_sleeps_all_the_same(monkeypatch):
    class Nothing(SharedMemory):
        def empty(self, elements, dtype):
            raise EnvironmentProblem("there is none")

    with select.epoll() as poller:
        made = Sleeper(poller, Nothing(), own_core=True)
        for _ in range(sleep.LOOKS + 1):
            made()
        assert made.armed
        made._most_s = 0.01
        made()
        made.close()


def test_it_wakes_when_it_has_something_to_do(sleeper):
    for after_s in (0.1, -1.0):
        arm(sleeper)
        begin = time.monotonic()
        sleeper.due_ns = time.monotonic_ns() + int(after_s * 1e9)
        sleeper()
        assert max(0.0, after_s) <= time.monotonic() - begin < LONG_S / 2
        sleeper.forget()
        sleeper.watch(lambda: 7)
