"""What codes beside messages: settings of numpy are a thread's own, and what overflows is the caller's matter."""

import os
import threading
import time
import warnings

import numpy as np
import pytest
from mpi_jobs import launch

from taccl.runtime.coders import CodecPort, CodecThread, Inline
from taccl.runtime.job import Job

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


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_a_launcher")
@pytest.mark.parametrize("own", [1, 2])
def test_the_cores_of_a_node_are_those_of_all_its_ranks(own):
    """A rank that a launcher binds to one core or two sees these alone."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core")
    program = f"""
import os
from taccl.runtime.mpi import launcher
cores = {cores}
rank = launcher().rank
os.sched_setaffinity(0, [cores[rank]] if {own} == 1 else cores[:2])
from taccl.runtime.job import Job
with Job(20.0) as job:
    os.write(1, f"{{job.board.node_cores}} {{job._spins > 0}} {{job._two_cores}}\\n".encode())  # in one piece
"""
    ended = launch(2, "-c", program)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["2 True False"] * 2
