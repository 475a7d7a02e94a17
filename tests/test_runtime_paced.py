"""Messages between nodes in confirmed segments, on an MPI whose requests finish when the test says."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from taccl.profiles.topology import Link, Port, Topology
from taccl.runtime import paced
from taccl.runtime.transport import write_head
from taccl.runtime.turns import Gate


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

    def Test(self):
        if self.active and self.arrived:
            self.finish()
        return not self.active


class Send(Request):
    """One of a single use, started."""

    def __init__(self):
        super().__init__()
        self.Start()
        self.arrived = True


class Comm:
    """Makes requests, and keeps them in order."""

    def __init__(self):
        self.sends, self.receives = [], []

    def Get_rank(self):
        return 0

    def Send_init(self, data, peer, tag):
        self.sends.append(Request())
        return self.sends[-1]

    def Isend(self, data, peer, tag):
        return Send()

    def Recv_init(self, data, peer, tag):
        self.receives.append(Request())
        return self.receives[-1]


def seen(requests):
    """MPI.Request.Testsome."""
    found = [place for place, request in enumerate(requests) if request.active and request.arrived]
    for place in found:
        requests[place].finish()
    return found


def all_seen(requests):
    """MPI.Request.Testall as MPICH 5.0 does it: the kinds of the last batch decide for all."""
    finished = all(request.arrived or not request.active for request in requests)
    if finished and not all(
        isinstance(request, Send) for request in requests[(len(requests) - 1) // 64 * 64 :]
    ):
        for request in requests:
            request.active = False
    return finished


@pytest.fixture(autouse=True)
def mpich(monkeypatch):
    monkeypatch.setattr(paced.mpi, "library", lambda MPI: SimpleNamespace(name="MPICH"))


def transport(data, receipts, turns=None, notices=None, on_channel=None, segments=None):
    """That of rank 0; rank 1 is another node."""
    requests = SimpleNamespace(Testsome=seen, Testall=all_seen)
    inner = SimpleNamespace(
        comm=data, data=lambda array, tag: [array, array.nbytes, "byte"], begin=lambda: ""
    )
    MPI = SimpleNamespace(BYTE="byte", Request=requests)
    return paced.PacedTransport(MPI, inner, receipts, (0, 1), turns, notices, on_channel, segments)


def test_the_next_run_begins_when_requests_of_both_kinds_are_finished():
    """64 persistent sends, and one of a single use for the end of a message that is shorter than its room."""
    data, receipts = Comm(), Comm()
    port = transport(data, receipts)
    array = np.zeros(66 * paced.SEGMENT_BYTES, np.uint8)
    write_head(array, 64 * paced.SEGMENT_BYTES + 1)
    message = port.send(array, 1, 0, sized=True)
    for run in range(3):
        assert port.begin() == ""
        message.start()
        for _ in range(65):
            for request in receipts.receives:
                request.arrived = True
            assert not port.poll([message.token])
        assert port.begin() != ""  # nothing is sent yet
        for request in data.sends:
            request.arrived = True
        assert port.poll([message.token]) == [0]
        assert [request.starts for request in data.sends] == [run + 1] * 64 + [0, 0]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 0, 3, 2, 4), (4, 3, 2, 1, 0)])
def test_receipts_may_be_seen_in_any_order(order):
    """One that arrives while MPI looks at all of them is seen after the next one."""
    data, receipts = Comm(), Comm()
    port = transport(data, receipts)
    segments = 3 * paced.SEGMENTS
    assert len(order) == paced.SEGMENTS
    message = port.send(np.zeros(segments * paced.SEGMENT_BYTES, np.uint8), 1, 0)
    message.start()
    finished = 0
    for _ in range(3):
        for slot in order:
            for request in data.sends:
                request.arrived = True
            finished += len(port.poll([message.token]))
            receipts.receives[slot].arrived = True
    finished += len(port.poll([message.token]))
    assert finished == 1
    assert [request.starts for request in receipts.receives] == [3] * paced.SEGMENTS
    assert [request.starts for request in data.sends] == [1] * segments


def test_a_message_counts_as_sent_when_mpi_has_read_all_of_it():
    """Whatever waits for it may write there."""
    data, receipts = Comm(), Comm()
    port = transport(data, receipts)
    message = port.send(np.zeros(3 * paced.SEGMENT_BYTES, np.uint8), 1, 0)
    for _ in range(2):
        assert port.begin() == ""
        message.start()
        for request in (data.sends[2], data.sends[0], *receipts.receives, data.sends[1]):
            assert not port.poll([message.token])
            request.arrived = True
        assert port.poll([message.token]) == [0] and not port.poll([message.token])


def test_messages_to_a_peer_follow_each_other():
    """A few segments in all are on their way, and one of each message, whose receive the first one may wait for."""
    data, receipts = Comm(), Comm()
    port = transport(data, receipts)
    long, short = 2 * paced.SEGMENTS, 3
    messages = [
        port.send(np.zeros(count * paced.SEGMENT_BYTES, np.uint8), 1, tag)
        for tag, count in enumerate((long, short))
    ]
    first, second = data.sends[:long], data.sends[long:]
    of_second = receipts.receives[paced.SEGMENTS]

    def sent():
        for request in data.sends:
            request.arrived = True
        finished = port.poll([message.token for message in messages])
        return sum(r.starts for r in first), sum(r.starts for r in second), finished

    for message in messages:
        message.start()
    assert sent() == (paced.SEGMENTS, 1, [])
    # The receiver takes the second one alone.
    for count in (2, 3):
        of_second.arrived = True
        assert sent() == (paced.SEGMENTS, count, [])
    assert sent() == (paced.SEGMENTS, short, [1])
    of_second.arrived = True
    for slot in range(paced.SEGMENTS):
        receipts.receives[slot].arrived = True
    assert sent() == (long, short, [])
    assert sent() == (long, short, [0])


def test_short_messages_of_a_channel_keep_within_the_segments_of_their_peer():
    """Before, as many were on their way as had data, and a slow uplink lost some of them."""
    data, receipts = Comm(), Comm()
    channels = {(1, tag): tag % 2 for tag in range(2 * paced.SEGMENTS)}
    port = transport(data, receipts, on_channel=channels)
    messages = [port.send(np.zeros(paced.PLAIN_BYTES + 1, np.uint8), 1, tag) for _, tag in channels]

    def on_their_way():
        return [tag for tag, request in enumerate(data.sends) if request.starts]

    for message in reversed(messages):  # the last ones have their data first
        message.start()
    ready = len(messages)
    # Those of a channel that come first in the program go whatever else is on its way: others may wait for them.
    assert on_their_way() == list(range(ready))

    data, receipts = Comm(), Comm()
    port = transport(data, receipts, on_channel=channels)
    messages = [port.send(np.zeros(paced.PLAIN_BYTES + 1, np.uint8), 1, tag) for _, tag in channels]
    for message in messages:
        message.start()
    assert on_their_way() == list(range(paced.SEGMENTS))
    receipts.receives[3].arrived = True  # of channel 1, whose message 1 is not taken yet
    port.poll([])
    assert on_their_way() == list(range(paced.SEGMENTS + 1))
    for tag in range(paced.SEGMENTS + 1):
        if tag != 3:
            receipts.receives[tag].arrived = True
    port.poll([])
    assert on_their_way() == list(range(2 * paced.SEGMENTS))


def test_a_message_that_others_wait_for_is_followed_until_they_are_told():
    """It would count as sent at once, and its rank, which has nothing else to do, would leave and never tell."""
    data, receipts, notices = Comm(), Comm(), Comm()
    turns = {(2, 1, 0): (Gate(0, (0, 1, 0), 1.0),)}
    port = transport(data, receipts, turns, notices)
    assert paced.SEGMENTS >= 2
    message = port.send(np.zeros(2 * paced.SEGMENT_BYTES, np.uint8), 1, 0)
    for run in range(1, 3):
        assert port.begin() == ""
        message.start()
        for request in data.sends:
            request.arrived = True
        for confirmed in (False, True):
            assert not port.poll([message.token]) and [word.starts for word in notices.sends] == [run - 1]
            receipts.receives[int(confirmed)].arrived = True
        assert port.poll([message.token]) == [0] and [word.starts for word in notices.sends] == [run]
        for request in notices.sends:
            request.arrived = True


@pytest.mark.parametrize(
    ("alpha_us", "of_link", "of_port", "wanted"),
    [
        (1000, 40_000, 40_000, {}),  # 200 Mbit/s: 50 KB in a round trip
        (1000, 8_000, 8_000, {1: 8}),  # 1 Gbit/s: 250 KB, twice, in segments of 65536 bytes
        (1000, 100, 8_000, {1: 8}),  # as the port has it
        (1000, 0, 8_000, {1: 8}),
        (5000, 40_000, 8_000, {1: 8}),
        (100_000, 800, 800, {1: paced.MOST_SEGMENTS}),
        (0, 8_000, 8_000, {}),
    ],
)
def test_more_segments_are_on_their_way_where_a_round_trip_takes_more(alpha_us, of_link, of_port, wanted):
    link = Link(0, 1, Fraction(alpha_us), Fraction(of_link), Fraction(0), (0,))
    back = Link(1, 0, Fraction(10**6), Fraction(1), Fraction(0))
    topology = Topology("two", ((0,), (1,)), (link, back), (Port("out", Fraction(of_port)),))
    assert paced.segments_to(topology, 0) == wanted
    data, receipts = Comm(), Comm()
    port = transport(data, receipts, segments=wanted)
    port.send(np.zeros(100 * paced.SEGMENT_BYTES, np.uint8), 1, 0).start()
    most = wanted.get(1, paced.SEGMENTS)
    assert sum(request.starts for request in data.sends) == most
    for request in receipts.receives[:3]:
        request.arrived = True
    port.poll([])
    assert sum(request.starts for request in data.sends) == most + 3


def test_a_link_without_beta_has_the_most_segments_on_their_way():
    link = Link(0, 1, Fraction(1), Fraction(0), Fraction(0))
    topology = Topology("two", ((0,), (1,)), (link,))
    assert paced.segments_to(topology, 0) == {1: paced.MOST_SEGMENTS}
