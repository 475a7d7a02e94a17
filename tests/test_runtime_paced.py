"""Messages between nodes in confirmed segments, on an MPI whose requests finish when the test says."""

from types import SimpleNamespace

import numpy as np
import pytest

from taccl.runtime import paced


class Request:
    """A persistent request as MPI has it: one that is active cannot be started."""

    def __init__(self):
        self.active = self.arrived = False
        self.starts = 0

    def Start(self):
        assert not self.active, "Persistent request passed to MPI_Start is already active"
        self.active, self.arrived = True, False
        self.starts += 1

    def finish(self):
        assert self.active and self.arrived
        self.active = False


class Comm:
    """Makes requests, and keeps them in order."""

    def __init__(self):
        self.sends, self.receives = [], []

    def Get_rank(self):
        return 0

    def Send_init(self, data, peer, tag):
        self.sends.append(Request())
        return self.sends[-1]

    def Recv_init(self, data, peer, tag):
        self.receives.append(Request())
        return self.receives[-1]


def seen(requests):
    """MPI.Request.Testsome."""
    found = [place for place, request in enumerate(requests) if request.active and request.arrived]
    for place in found:
        requests[place].finish()
    return found


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 1, 0)])
def test_receipts_may_be_seen_in_any_order(order):
    """One that arrives while MPI looks at all of them is seen after the next one."""
    data, receipts = Comm(), Comm()
    inner = SimpleNamespace(comm=data, data=lambda array, tag: [array, array.nbytes, "byte"])
    port = paced.PacedTransport(
        SimpleNamespace(BYTE="byte", Request=SimpleNamespace(Testsome=seen)), inner, receipts, (0, 1)
    )
    segments = 3 * paced.SEGMENTS
    message = port.send(np.zeros(segments * paced.SEGMENT_BYTES, np.uint8), 1, 0)
    message.start()
    finished = 0
    for _ in range(3):
        for slot in order:
            finished += len(port.poll([message.token]))
            receipts.receives[slot].arrived = True
    finished += len(port.poll([message.token]))
    assert finished == 1
    assert [request.starts for request in receipts.receives] == [3] * paced.SEGMENTS
    assert [request.starts for request in data.sends] == [1] * segments
