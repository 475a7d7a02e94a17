"""Messages between nodes in confirmed segments, on an MPI whose requests finish when the test says."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from taccl.profiles.topology import Link, Port, Topology
from taccl.runtime import pace, paced
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


def transport(data, receipts, turns=None, notices=None, on_channel=None, paces=None):
    """That of rank 0; rank 1 is another node."""
    requests = SimpleNamespace(Testsome=seen, Testall=all_seen)
    inner = SimpleNamespace(
        comm=data, data=lambda array, tag: [array, array.nbytes, "byte"], begin=lambda: ""
    )
    MPI = SimpleNamespace(BYTE="byte", Request=requests)
    return paced.PacedTransport(MPI, inner, receipts, (0, 1), turns, notices, on_channel, paces)


def test_the_next_run_begins_when_requests_of_both_kinds_are_finished():
    """64 persistent sends, and one of a single use for the end of a message that is shorter than its room."""
    data, receipts = Comm(), Comm()
    port = transport(data, receipts)
    array = np.zeros(66 * pace.SEGMENT_BYTES, np.uint8)
    write_head(array, 64 * pace.SEGMENT_BYTES + 1)
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
    segments = 3 * pace.SEGMENTS
    assert len(order) == pace.SEGMENTS
    message = port.send(np.zeros(segments * pace.SEGMENT_BYTES, np.uint8), 1, 0)
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
    assert [request.starts for request in receipts.receives] == [3] * pace.SEGMENTS
    assert [request.starts for request in data.sends] == [1] * segments


def test_a_message_counts_as_sent_when_mpi_has_read_all_of_it():
    """Whatever waits for it may write there."""
    data, receipts = Comm(), Comm()
    port = transport(data, receipts)
    message = port.send(np.zeros(3 * pace.SEGMENT_BYTES, np.uint8), 1, 0)
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
    long, short = 2 * pace.SEGMENTS, 3
    messages = [
        port.send(np.zeros(count * pace.SEGMENT_BYTES, np.uint8), 1, tag)
        for tag, count in enumerate((long, short))
    ]
    first, second = data.sends[:long], data.sends[long:]
    of_second = receipts.receives[pace.SEGMENTS]

    def sent():
        for request in data.sends:
            request.arrived = True
        finished = port.poll([message.token for message in messages])
        return sum(r.starts for r in first), sum(r.starts for r in second), finished

    for message in messages:
        message.start()
    assert sent() == (pace.SEGMENTS, 1, [])
    # The receiver takes the second one alone.
    for count in (2, 3):
        of_second.arrived = True
        assert sent() == (pace.SEGMENTS, count, [])
    assert sent() == (pace.SEGMENTS, short, [1])
    of_second.arrived = True
    for slot in range(pace.SEGMENTS):
        receipts.receives[slot].arrived = True
    assert sent() == (long, short, [])
    assert sent() == (long, short, [0])


def test_short_messages_of_a_channel_keep_within_the_segments_of_their_peer():
    """Before, as many were on their way as had data, and a slow uplink lost some of them."""
    data, receipts = Comm(), Comm()
    channels = {(1, tag): tag % 2 for tag in range(2 * pace.SEGMENTS)}
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
    assert on_their_way() == list(range(pace.SEGMENTS))
    receipts.receives[3].arrived = True  # of channel 1, whose message 1 is not taken yet
    port.poll([])
    assert on_their_way() == list(range(pace.SEGMENTS + 1))
    for tag in range(pace.SEGMENTS + 1):
        if tag != 3:
            receipts.receives[tag].arrived = True
    port.poll([])
    assert on_their_way() == list(range(2 * pace.SEGMENTS))


def test_a_message_that_others_wait_for_is_followed_until_they_are_told():
    """It would count as sent at once, and its rank, which has nothing else to do, would leave and never tell."""
    data, receipts, notices = Comm(), Comm(), Comm()
    turns = {(2, 1, 0): (Gate(0, (0, 1, 0), 1.0),)}
    port = transport(data, receipts, turns, notices)
    assert pace.SEGMENTS >= 2
    message = port.send(np.zeros(2 * pace.SEGMENT_BYTES, np.uint8), 1, 0)
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


def two_nodes(*links, beta=Fraction(1)):
    """Rank 0 is a node, ranks 1 and 2 are another one."""
    return Topology("two", ((0,), (1, 2)), links, (Port("out", beta),))


@pytest.mark.parametrize(
    ("alpha_us", "of_link", "of_port", "wanted"),
    [
        (1000, 40_000, 40_000, (64, 5)),  # 200 Mbit/s: 50 KB in a round trip
        (1000, 20_000, 20_000, (128, 3)),
        (1000, 8_000, 8_000, (256, 3)),  # 1 Gbit/s: 250 KB in a round trip
        (5000, 8_000, 8_000, (256, 10)),  # 1.25 MB, twice, in segments of 256 KiB
        (5000, 100, 8_000, (256, 10)),  # as the port has it
        (5000, 0, 8_000, (256, 10)),
        (5000, 40_000, 8_000, (64, 8)),
        (100_000, 800, 800, (256, pace.MOST_SEGMENTS)),
        (0, 8_000, 8_000, (256, 3)),
    ],
)
def test_segments_are_longer_on_quick_links_and_more_where_a_round_trip_takes_more(
    alpha_us, of_link, of_port, wanted
):
    wanted = pace.Pace(wanted[0] << 10, wanted[1])
    link = Link(0, 1, Fraction(alpha_us), Fraction(of_link), Fraction(0), (0,))
    within = Link(1, 2, Fraction(10**6), Fraction(1), Fraction(0))
    topology = two_nodes(link, within, beta=Fraction(of_port))
    unusual = {} if wanted == pace.usual("MPICH") else {(0, 1): wanted}
    assert pace.paces(topology, "MPICH") == unusual
    data, receipts = Comm(), Comm()
    port = transport(data, receipts, paces=unusual)
    port.send(np.zeros(100 * wanted.segment_bytes, np.uint8), 1, 0).start()
    assert len(data.sends) == 100
    assert sum(request.starts for request in data.sends) == wanted.segments
    for request in receipts.receives[:3]:
        request.arrived = True
    port.poll([])
    assert sum(request.starts for request in data.sends) == wanted.segments + 3


@pytest.mark.parametrize(
    ("library", "longer", "wanted"),
    [
        ("MPICH", True, (256, 10)),
        ("MPICH", False, (64, 39)),
        ("Open MPI", True, (60, 41)),  # more would be asked for
        ("Intel MPI", True, (64, 39)),  # nobody tried
    ],
)
def test_segments_are_longer_where_the_library_takes_them(library, longer, wanted):
    topology = two_nodes(Link(0, 1, Fraction(5000), Fraction(8000), Fraction(0)))
    found = pace.paces(topology, library, longer)
    assert found == {(0, 1): pace.Pace(wanted[0] << 10, wanted[1])}


def test_of_two_links_segments_are_short_enough_for_either_and_as_many_as_either_takes():
    quick, slow, far = (
        Link(0, 1, Fraction(alpha_us), Fraction(beta), Fraction(0))
        for alpha_us, beta in ((9, 8000), (9, 40_000), (100_000, 40_000))
    )
    for other, segments in ((far, pace.MOST_SEGMENTS), (slow, 12)):
        for links in ((quick, other), (other, quick)):
            assert pace.paces(two_nodes(*links), "MPICH") == {(0, 1): pace.Pace(64 << 10, segments)}


def test_a_link_without_beta_has_the_most_segments_on_their_way():
    found = pace.paces(two_nodes(Link(0, 1, Fraction(1), Fraction(0), Fraction(0))), "MPICH")
    assert found == {(0, 1): pace.Pace(256 << 10, pace.MOST_SEGMENTS)}


@pytest.mark.parametrize(
    ("of_link", "of_port", "wanted"),
    [
        (40_000, 1, 25_750_000),  # 200 Mbit/s, and 3 % more
        (1, 160_000, 6_437_500),
        (8_000, 1, 128_750_000),
        (800, 800, 0),  # 10 Gbit/s: what is on its way takes 0.6 ms
        (0, 0, 0),
    ],
)
def test_long_messages_leave_at_the_pace_of_their_link_over_tcp(of_link, of_port, wanted):
    link = Link(0, 1, Fraction(100), Fraction(of_link), Fraction(0), (0,))
    topology = two_nodes(link, beta=Fraction(of_port))
    found = pace.paces(topology, "TCP").get((0, 1), pace.usual("TCP"))
    assert found.bytes_per_s == wanted
    over_mpi = pace.paces(topology, "MPICH").get((0, 1), pace.usual("MPICH"))
    assert over_mpi == replace(found, bytes_per_s=0, uplinks=())


def test_uplinks_are_ports_that_one_node_sends_over_numbered_on_each_node():
    """Port 0 leads out of node 0, port 1 into node 2, port 2 out of node 1, port 3 is quick, port 4 is within node 0
    as well, port 5 leads out of node 0."""
    fast, slow = Fraction(100), Fraction(40_000)
    pairs = [(0, 2, (0,)), (1, 4, (0, 1)), (2, 4, (1, 2)), (3, 0, (3,)), (0, 4, (4, 5)), (0, 1, (4,))]
    links = tuple(Link(src, dst, Fraction(9), slow, Fraction(0), ports) for src, dst, ports in pairs)
    ports = tuple(Port(f"p{n}", fast if n == 3 else slow + n) for n in range(6))
    found = pace.paces(Topology("three", ((0, 1), (2, 3), (4,)), links, ports), "TCP")
    rates = [math.ceil(1.03 * 10**12 / (40_000 + n)) for n in range(6)]
    assert {pair: known.uplinks for pair, known in found.items()} == {
        (0, 2): ((0, rates[0]),), (1, 4): ((0, rates[0]),), (2, 4): ((0, rates[2]),), (3, 0): (),
        (0, 4): ((1, rates[5]),),
    }  # fmt: skip


def test_nobody_knows_by_which_uplink_leaves_what_may_take_two_links():
    ports = tuple(Port(f"p{n}", Fraction(40_000)) for n in range(2))
    for other, wanted in ((1, ()), (0, ((0, 25_750_000),))):
        links = [Link(0, 1, Fraction(9), Fraction(40_000), Fraction(0), (port,)) for port in (0, other)]
        found = pace.paces(Topology("two", ((0,), (1,)), tuple(links), ports), "TCP")
        assert found[0, 1].uplinks == wanted


@pytest.mark.parametrize(
    ("bytes_per_s", "uplinks", "short", "long"),
    [
        (0, (), False, False),
        (0, ((0, 900),), False, False),
        (900, (), True, True),
        (900, ((0, 1000),), True, True),
        (900, ((0, 989),), False, True),
        (900, ((0, 2000), (1, 900)), False, True),
    ],
)
def test_short_messages_of_several_segments_are_paced_where_uplinks_are_quicker(
    bytes_per_s, uplinks, short, long
):
    known = pace.Pace(1000, 3, bytes_per_s, uplinks)
    assert [nbytes > known.unlimited_bytes() for nbytes in (1, 1000, 1001, 3000, 3001)] == [
        False,
        False,
        short,
        short,
        long,
    ]


def test_what_leaves_over_a_quick_uplink_has_no_pace_beside():
    """And has one where the link is slower."""
    for segment_bytes, uplink, wanted in (
        (128 << 10, 900, 3 << 17),
        (256 << 10, 900, math.inf),
        (256 << 10, 1000, 1 << 18),
    ):
        assert pace.Pace(segment_bytes, 3, 900, ((0, uplink),)).unlimited_bytes() == wanted


@pytest.mark.parametrize(
    ("betas", "wanted"),
    [((40_000, 80_000), 38_625_000), ((40_000, 100), 0), ((40_000, 80_000, 80_000), 51_500_000)],
)
def test_several_links_of_a_pair_may_be_at_work_at_once(betas, wanted):
    links = [Link(0, 1, Fraction(9), Fraction(beta), Fraction(0)) for beta in betas]
    for order in itertools.permutations(links):
        found = pace.paces(two_nodes(*order), "TCP").get((0, 1), pace.usual("TCP"))
        assert found.bytes_per_s == wanted
