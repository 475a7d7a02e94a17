"""What codes beside messages: settings of numpy are a thread's own, and what overflows is the caller's matter."""

import functools
import threading
import time
import warnings

import numpy as np
import pytest
import runtime_programs as programs

from taccl.runtime.codecs import CODECS
from taccl.runtime.coded import Coding, coded
from taccl.runtime.coders import CodecPort, CodecThread, Inline
from taccl.runtime.compile import compile_ranks
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.executor import Executor
from taccl.runtime.frames import FrameMemory, frame_sizes
from taccl.runtime.job import Job
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace
from taccl.runtime.transport import Message, Plain

LARGE = np.full(8, np.finfo(np.float16).max)


def finished(port, message):
    message.start()
    if message.port is None:
        return
    until = time.monotonic() + 30
    while port.poll([message.token]) is None:
        assert time.monotonic() < until
        time.sleep(1e-3)


@pytest.mark.parametrize("make", [CodecThread, CodecPort, Inline])
def test_sums_may_overflow_without_a_word(make):
    port, found = make(), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finished(port, port.message(lambda scratch: found.append(LARGE + LARGE), 0))
    assert np.isinf(found[0]).all()
    if make is not Inline:
        port.close()


@pytest.mark.parametrize("make", [CodecThread, CodecPort])
def test_what_a_piece_of_work_raises_reaches_the_executor(make):
    port = make()

    def wrong(scratch):
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        finished(port, port.message(wrong, 0))
    port.close()


def test_a_rank_does_one_piece_at_a_poll_and_first_what_others_wait_for():
    done, notes = [], []
    port = CodecPort(notes)
    messages = [port.message(lambda _, n=n: done.append(n), turn) for n, turn in enumerate((2, 0, 1, 0))]
    for message in messages:
        message.start()
    assert done == []
    tokens = [message.token for message in messages]
    assert [port.poll(tokens) for _ in range(5)] == [[1], [3], [2], [0], None]
    assert done == [1, 3, 2, 0] == [number for number, _, _ in notes]
    assert all(given <= finished for _, given, finished in notes)


@pytest.mark.parametrize("make", [CodecThread, CodecPort])
def test_what_nobody_wants_yet_is_passed_over(make):
    """A piece that leads to links waits until one of them wants it, and keeps nothing else waiting."""
    done, links = [], {"a": False, "b": False}
    a, b = (functools.partial(links.get, name) for name in links)
    port = make()
    messages = [
        port.message(lambda _, n=n: done.append(n), turn, wanted)
        for n, (turn, wanted) in enumerate([(0, (a,)), (0, (a, b)), (1, ()), (2, ())])
    ]
    for message in messages:
        message.start()
    tokens = [message.token for message in messages]

    def polled(count):
        found, until = [], time.monotonic() + 30
        while len(found) < count and time.monotonic() < until:
            found += port.poll(tokens) or ()
            time.sleep(1e-3)
        return found

    polled(2)
    assert done == [2, 3]
    assert port.poll(tokens) is None
    links["b"] = True
    assert polled(1) == [1]
    links["b"] = False
    assert port.poll(tokens) is None
    links["a"] = True
    assert polled(1) == [0]
    assert done == [2, 3, 1, 0]
    port.close()


@pytest.mark.parametrize("make", [CodecThread, CodecPort])
def test_connections_that_want_something_are_served_in_turns(make):
    """None of them runs dry until another one has got all that it waits for."""
    done, open_links = [], set()
    port = make()

    def link(name):
        return lambda: name in open_links

    links = [link(name) for name in range(3)]
    made = [(name, part) for name in range(3) for part in range(4)]
    messages = [port.message(lambda _, one=one: done.append(one), 0, (links[one[0]],)) for one in made]
    for message in messages:
        message.start()
    open_links.update(range(3))
    tokens, until = [message.token for message in messages], time.monotonic() + 30
    while len(done) < len(made) and time.monotonic() < until:
        port.poll(tokens)
    assert done == [(name, part) for part in range(4) for name in range(3)]
    port.close()


class Carrier(Plain):
    """Sends are finished when the test says so; then it wants another one."""

    name, idle = "carrier", None

    def __init__(self):
        self.under_way, self.finished = [], []

    def send(self, array, peer, tag, sized=False, lane=None):
        return Message(self, tag, lambda: self.under_way.append(tag), wanted=self.wanted)

    def wanted(self):
        return not self.under_way

    def poll(self, tokens):
        found = [place for place, tag in enumerate(tokens) if tag in self.finished]
        self.finished = [tag for tag in self.finished if tag not in [tokens[place] for place in found]]
        return found


@pytest.mark.parametrize("sorts", [False, True])
def test_a_frame_is_coded_when_its_connection_has_nothing_left_to_carry(sorts):
    """Whether or not sends wait for those before them."""
    program = programs.chain_broadcast(2, 4)
    collective = collective_of(program, trace(program))
    plans = compile_ranks(program, trace(program), {}, range(2), (0, 1), timed=False, sorts=sorts)
    plan = coded(plans, Coding(None, True), collective, {})[0]
    values, codec, notes = np.arange(4096, dtype=np.float32), CODECS["xw"], []
    sizes = frame_sizes(codec, DTYPES["float32"], 1024)
    frames = FrameMemory(sizes, np.zeros(plan.slots * sizes.stride, np.uint8))
    carrier, port = Carrier(), CodecPort(notes)
    executor = Executor(
        plan, {"i": values, "o": values.copy()}, 1024, np.add, carrier, frames=frames, coder=port
    )
    executor.connect()
    executor.start()
    for sent in range(4):
        executor.advance(50)
        assert (carrier.under_way, len(notes)) == ([sent], sent + 1)
        carrier.finished += carrier.under_way
        carrier.under_way.clear()
    assert executor.advance(50)


@pytest.mark.parametrize("two_cores", [True, False])
def test_a_thread_codes_where_each_rank_has_two_cores(two_cores):
    job = object.__new__(Job)
    job._two_cores = two_cores
    port, threads = job.coder(), {thread.name for thread in threading.enumerate()}
    found: list[str] = []
    finished(port, port.message(lambda _: found.append(threading.current_thread().name), 0))
    port.close()
    assert found == ["taccl-codec" if two_cores else threading.current_thread().name]
    assert ("taccl-codec" in threads) is two_cores
