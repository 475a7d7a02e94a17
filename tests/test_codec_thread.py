"""The thread on which ranks code: settings of numpy are a thread's own, and what overflows is the caller's matter."""

import time
import warnings

import numpy as np
import pytest

from taccl.runtime.codec_thread import CodecThread, Inline

LARGE = np.full(8, np.finfo(np.float16).max)


def finished(port, message):
    message.start()
    if message.port is None:
        return
    until = time.monotonic() + 30
    while port.poll([message.token]) is None:
        assert time.monotonic() < until
        time.sleep(1e-3)


@pytest.mark.parametrize("make", [CodecThread, Inline])
def test_sums_may_overflow_without_a_word(make):
    port, found = make(), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finished(port, port.message(lambda scratch: found.append(LARGE + LARGE), 0))
    assert np.isinf(found[0]).all()
    if make is CodecThread:
        port.close()


def test_what_a_piece_of_work_raises_reaches_the_executor():
    port = CodecThread()

    def wrong(scratch):
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        finished(port, port.message(wrong, 0))
    port.close()
