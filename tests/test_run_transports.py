"""Every transport of host memory moves the right data."""

import json
from pathlib import Path

import numpy as np
import pytest
from mpi_jobs import launch, needs_mpi

from taccl.errors import EnvironmentProblem
from taccl.runtime import transports

WORKER = str(Path(__file__).with_name("run_transport_worker.py"))


@pytest.mark.parametrize(
    "how",
    [
        "large",
        "shared",
        "private",
        "read",
        "mixed",
        "paced",
        "turns",
        "tcp",
        "tcp-turns",
        "tcp-shared",
        "tcp-between",
    ],
)
@pytest.mark.mpi
@needs_mpi[1]
def test_right_data(how):
    """Shared memory with buffers in it and private ones, beside MPI and TCP to another node; each of these alone."""
    ended = launch(3, WORKER, how)
    assert ended.code == 0, ended.err
    # pieces: of shared memory, that are mapped when all is closed; ranks that sleep keep theirs, and see each
    # other's and their clocks of uplinks
    pieces = 3 * 3 + 3 if "tcp" in how else 0
    assert json.loads(ended.out) == {"wrong": 0, "cases": 3 * (48 + 6), "pieces": pieces}


class FakeMPI:
    """Enough of mpi4py to see how messages are described."""

    VERSION = 3
    TAG_UB = 0
    REQUEST_NULL = None
    BYTE = "byte"

    class Request:
        Testsome = staticmethod(lambda requests: [])

        def __init__(self, described):
            self.described = described

        def Start(self):
            pass

        Free = Start


class FakeComm:
    def Get_attr(self, _):
        return 9

    def Send_init(self, message, peer, tag):
        return FakeMPI.Request(message)


def test_messages_that_cannot_be_described_are_refused():
    # numpy gives out zeroed memory without touching it, so the length costs nothing
    long = np.zeros(2**31 + 8, np.uint8)
    old = transports.MpiTransport(FakeMPI, FakeComm(), len(long))
    with pytest.raises(EnvironmentProblem, match="longer than this MPI library can count"):
        old.send(long, 1, 0)
    with pytest.raises(EnvironmentProblem, match=r"more messages between two ranks than .* tags \(10\)"):
        old.send(long[:8], 1, 10)

    frames = transports.MpiTransport(FakeMPI, FakeComm(), 1000)
    with pytest.raises(
        EnvironmentProblem, match=r"a coded message of .* is longer than this MPI library can count"
    ):
        frames.send(long, 1, 0)

    class New(FakeMPI):
        VERSION = 4

    data, count, kind = transports.MpiTransport(New, FakeComm(), len(long)).send(long, 1, 0).token.described
    assert (len(data), count, kind) == (2**31 + 8, 2**31 + 8, "byte")
