"""What a step costs, counted: polls and calls, not microseconds; and shared memory that is not what it should be."""

import dataclasses
import os
from types import SimpleNamespace

import numpy as np
import pytest

from taccl.errors import EnvironmentProblem
from taccl.runtime import shared
from taccl.runtime.executor import Executor
from taccl.runtime.plan import Operation, Plan, essential
from taccl.runtime.transport import Message, Plain


class Counting(Plain):
    """Finishes the first messages of all lines at every poll, and counts what it is asked."""

    name = "counting"
    idle = None

    def __init__(self):
        self.polls, self.calls, self.late = 0, [], 0

    def send(self, array, peer, tag, sized=False):
        return Message(self, ("send", tag), lambda: self.calls.append(("send", tag)))

    def recv(self, array, peer, tag, sized=False):
        return Message(self, ("recv", tag), lambda: self.calls.append(("recv", tag)))

    def end(self):
        self.calls.append("end")

    def poll(self, tokens):
        self.polls += 1
        return [place for place, token in enumerate(tokens) if token is not None]


def operation(kind, number, *before):
    place = ("o", number, 1)
    dst, src = (None, place) if kind == "send" else (place, None) if kind == "recv" else (place, place)
    peer = 1 if kind in ("send", "recv") else -1
    return Operation(kind, dst, src, None, peer, 0, number, 0, number, before)


def executed(operations):
    transport = Counting()
    memory = {"o": np.zeros(len(operations) * 4, np.float32)}
    executor = Executor(Plan(0, tuple(operations), 0), memory, 4, np.add, transport)
    executor.connect()
    for _ in range(3):  # a run leaves nothing behind for the next one
        transport.polls, transport.calls = 0, []
        executor.start()
        assert executor.advance(100) and executor.done
    return transport


def test_a_hop_costs_one_poll():
    """recv, copy and send, each waiting for the one before, and nothing for the send."""
    hops = 10
    operations = []
    for hop in range(hops):
        operations += [
            operation("recv", 3 * hop),
            operation("copy", 3 * hop + 1, 3 * hop),
            operation("send", 3 * hop + 2, 3 * hop + 1),
        ]
    transport = executed(operations)
    assert transport.polls == hops + 1  # all sends that nothing waits for together
    assert transport.calls[:hops] == [("recv", 3 * hop) for hop in range(hops)]  # posted before all else
    assert transport.calls[hops:] == [*(("send", 3 * hop + 2) for hop in range(hops)), "end"]


class Weak(Counting):
    """Two ways, as a node has: messages of odd tags take the other one, which moves them only when it is asked."""

    def __init__(self):
        super().__init__()
        self.other = Counting()
        self.moved = False
        self.other.poll = self.ask

    def ask(self, tokens):
        self.moved |= ("send", 1) in tokens
        return [place for place, token in enumerate(tokens) if token is not None]

    def send(self, array, peer, tag, sized=False):
        return dataclasses.replace(super().send(array, peer, tag), port=self.other if tag % 2 else self)

    def poll(self, tokens):
        # What arrives here is the answer to what was sent there.
        return [place for place, token in enumerate(tokens) if token is not None] if self.moved else []


def test_a_send_that_nothing_waits_for_moves_while_the_rank_waits_elsewhere():
    transport = Weak()
    operations = (operation("send", 1), operation("recv", 2))
    executor = Executor(Plan(0, operations, 0), {"o": np.zeros(12, np.float32)}, 4, np.add, transport)
    executor.connect()
    executor.start()
    assert executor.advance(100) and transport.moved


def receiving(transport, count):
    """A run that has begun, of receives from one rank that wait for nothing."""
    operations = tuple(Operation("recv", ("o", n, 1), None, None, 1, 0, n, 0, n, ()) for n in range(count))
    executor = Executor(Plan(0, operations, 0), {"o": np.zeros(4 * count, np.float32)}, 4, np.add, transport)
    executor.connect()
    executor.start()
    return executor


class Meanwhile(Counting):
    """The message of one way finishes while those behind the first one of another way are polled, just before the rank
    would sleep."""

    sleeper = SimpleNamespace(armed=True)

    def __init__(self):
        super().__init__()
        self.other = Counting()
        self.other.poll = self.ask
        self.news, self.left = 0, {("recv", 0)}

    def recv(self, array, peer, tag, sized=False):
        return dataclasses.replace(super().recv(array, peer, tag), port=self.other if tag else self)

    def ask(self, tokens):
        if ("recv", 2) in tokens:
            self.news = len(self.left)
        return []

    def poll(self, tokens):
        self.polls += 1
        if not self.news:
            return []
        self.news -= 1
        return [tokens.index(self.left.pop())]


def test_a_rank_does_not_sleep_over_what_came_while_it_polled_behind():
    transport, slept = Meanwhile(), []
    executor = receiving(transport, 3)
    executor.advance(50, lambda: slept.append(transport.news))
    assert slept and not any(slept) and not transport.left


class Telling(Counting):
    """It knows how many messages have come that nobody has asked for."""

    sleeper = SimpleNamespace(armed=True)

    def __init__(self):
        super().__init__()
        self.news, self.asked = 0, []

    def poll(self, tokens):
        self.asked.append(list(tokens))
        if self.news and ("recv", 1) in tokens:
            self.news = 0
            return [tokens.index(("recv", 1))]
        return []


def test_who_knows_of_no_news_is_not_asked_for_what_is_behind():
    transport = Telling()
    executor = receiving(transport, 2)
    executor.advance(50)
    assert transport.asked == [[("recv", 0)]] * 50
    transport.news = 1
    executor.advance(50)
    assert executor.waiting() == [0] and transport.asked[50:52] == [[("recv", 0)], [("recv", 1)]]


def test_what_has_arrived_is_passed_on_before_other_work():
    """Two messages arrive together; each has a copy, which takes time, and a message to send on."""
    operations = []
    for first in (0, 3):
        channel = first
        operations += [
            Operation("recv", ("o", first, 1), None, None, 1, channel, first, 0, first, ()),
            operation("copy", first + 1, first),
            operation("send", first + 2, first),
        ]
    calls = executed(operations).calls
    assert calls == [("recv", 0), ("recv", 3), ("send", 5), ("send", 2), "end"]


def test_predecessors_that_come_earlier_anyway_are_left_out():
    operations = [
        operation("copy", 0), operation("copy", 1, 0), operation("copy", 2, 0, 1), operation("copy", 3, 1),
        operation("copy", 4, 0, 2, 3),
    ]  # fmt: skip
    assert essential(operations) == [(), (0,), (1,), (1,), (2, 3)]


def test_memory_lives_as_long_as_an_array_in_it_and_has_no_name():
    memory = shared.SharedMemory()
    before = set(os.listdir("/dev/shm"))
    array = memory.empty(5000, np.float64)
    part = array[1000:2000]
    place, whole = memory.place(part), memory.place(array)
    assert (place.offset, place.fd) == (whole.offset + 8000, whole.fd)
    assert memory.place(np.zeros(4)) is None
    assert not array.any()
    other = shared.attach(os.getpid(), place.fd, place.token, place.offset + part.nbytes)
    part[:] = 7
    assert (other[place.offset : place.offset + part.nbytes].view(np.float64) == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        other[0] = 1
    assert {name for name in os.listdir("/dev/shm") if "taccl" in name} <= before
    del array
    assert memory.place(part) == place
    del part
    assert not os.path.exists(f"/proc/self/fd/{place.fd}")
    assert memory.empty(0, np.float32).shape == (0,)


def test_memory_that_is_not_what_it_should_be_is_refused():
    memory = shared.SharedMemory()
    array = memory.empty(100, np.uint8)
    place = memory.place(array)
    for process, fd, token, least, words in (
        (os.getpid(), place.fd, place.token + 1, 1, "does not hold the memory"),
        (os.getpid(), place.fd, place.token, 2**20, "shares 4096 bytes and should 1048576"),
        (os.getpid(), 0, place.token, 1, "does not hold the memory"),
        (2**30, place.fd, place.token, 1, "cannot be opened: No such file"),
    ):
        with pytest.raises(EnvironmentProblem, match=words):
            shared.attach(process, fd, token, least)
