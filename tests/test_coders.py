"""What codes beside messages: settings of numpy are a thread's own, and what overflows is the caller's matter."""

import time
import warnings

import numpy as np
import pytest

from taccl.runtime.coders import CodecPort, CodecThread, Inline

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
