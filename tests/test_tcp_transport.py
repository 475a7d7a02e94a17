"""Messages over TCP connections of our own: whatever the order of things, the right data arrive once."""

import random
import socket
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tcp_ends import connected

from taccl.errors import RunFailed
from taccl.runtime import native, tcp_link, tcp_native, tcp_options, tcp_transport
from taccl.runtime.codecs.codec import FrameError
from taccl.runtime.tcp_links import Links
from taccl.runtime.tcp_messages import HEAD, KINDS, LAST, OPEN, READY, RUNS, SEGMENT
from taccl.runtime.tcp_native import NativeLinks
from taccl.runtime.tcp_transport import TcpTransport
from taccl.runtime.transport import Plain, write_head
from taccl.runtime.turns import Gate

KINDS_OF_LINKS = {"python": Links, "compiled": NativeLinks}
used = []  # the kind under test


@pytest.fixture(scope="module", autouse=True, params=KINDS_OF_LINKS)
def kind(request):
    if request.param == "compiled" and native.library() is None:
        pytest.skip(f"no compiled code: {native.why_not()}")
    used[:] = [KINDS_OF_LINKS[request.param]]


def links_of(connections):
    return used[0](connections)


class Pair:
    """Two ranks in one process."""

    def __init__(self):
        self.links = [links_of({1 - rank: end}) for rank, end in enumerate(connected())]
        self.ports = []

    def transports(self, **options):
        self.ports = [TcpTransport(links, rank, Plain(), **options) for rank, links in enumerate(self.links)]
        return self.ports

    def close(self):
        for port in self.ports:
            port.close()
        for links in self.links:
            links.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


@pytest.fixture
def raw():
    """A rank's links, and the other end of its only connection, to rank 1."""
    mine, theirs = connected()
    theirs.setblocking(True)
    links = links_of({1: mine})
    yield links, theirs
    links.close()
    theirs.close()


LENGTHS = st.sampled_from([0, 1, 16, 40, 63, 64, 65, 399, 400, 401, 3000, 70_000])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.booleans(), LENGTHS, st.booleans()), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_any_messages_in_any_order_arrive_once_and_whole(monkeypatch, wanted, runs, seed):
    """Ranks start their ends in any order, and one may be a run ahead of the other."""
    for name, value in {"EAGER_BYTES": 64, "LONG_BYTES": 400, "LONG_MESSAGES": 3}.items():
        monkeypatch.setattr(tcp_transport, name, value)
    monkeypatch.setattr(tcp_transport, "usual", lambda library: tcp_transport.Pace(400, 2))
    draw, both = random.Random(seed), Pair()
    ports = both.transports()
    ends = [[], []]  # of each rank (message, array, peer's array)
    arrays = []
    for tag, (from_one, length, sized) in enumerate(wanted):
        length += 16 * sized
        source, target = np.zeros(length, np.uint8), np.zeros(length, np.uint8)
        arrays.append((source, target, sized))
        sender = int(from_one)
        ends[sender].append(ports[sender].send(source, 1 - sender, tag, sized))
        ends[1 - sender].append(ports[1 - sender].recv(target, sender, tag, sized))
    senders = [int(from_one) for from_one, *_ in wanted]

    def fill(rank, run):
        for tag, (source, _, sized) in enumerate(arrays):
            if senders[tag] == rank:
                source[:] = np.random.default_rng(1000 * run + tag).integers(0, 256, len(source), np.uint8)
                if sized:
                    write_head(source, draw.randint(16, len(source)))

    sent = {}  # by run and tag what was sent, as it was when the send was started

    def rank_runs(rank):
        """One rank's part, a step at a time."""
        port = ports[rank]
        for run in range(runs):
            fill(rank, run)
            for tag, (source, _, sized) in enumerate(arrays):
                if senders[tag] == rank:
                    used = int(source[:8].view(np.int64)[0]) if sized else len(source)
                    sent[run, tag] = source[:used].copy()
            assert port.begin() == ""
            left = list(range(len(arrays)))
            draw.shuffle(left)
            waiting = []
            while left or waiting:
                if left and draw.random() < 0.5:
                    tag = left.pop()
                    ends[rank][tag].start()
                    waiting.append(tag)
                tokens = [ends[rank][tag].token for tag in waiting]
                for place in sorted(port.poll(tokens) or (), reverse=True):
                    tag = waiting.pop(place)
                    if senders[tag] != rank:
                        got = arrays[tag][1]
                        assert got[: len(sent[run, tag])].tobytes() == sent[run, tag].tobytes()
                    else:
                        arrays[tag][0][:] = 0xEE  # whoever waits for a send may write there
                yield
            assert port.news == 0
            port.end()

    try:
        going = [rank_runs(0), rank_runs(1)]
        for _ in range(200_000):
            if not going:
                break
            one = draw.choice(going)
            if next(one, "over") == "over":
                going.remove(one)
        assert not going
    finally:
        both.close()


@pytest.mark.parametrize("begins", [[], [0, 1], [1, 0]])
def test_the_first_of_the_order_goes_before_what_began_earlier(pair, monkeypatch, begins):
    """That of the program, where none is given."""
    first, second = begins or [0, 1]
    monkeypatch.setattr(tcp_transport, "usual", lambda library: tcp_transport.Pace(1000, 2))
    length = 30_000_000  # more than the kernel takes
    mine, theirs = pair.transports(begins=[(0, 1, tag) for tag in begins])
    arrays = [np.zeros(length, np.uint8) for _ in range(2)]
    sends = [mine.send(array, 1, tag) for tag, array in enumerate(arrays)]
    receives = [theirs.recv(np.ones(length, np.uint8), 0, tag) for tag in range(2)]
    for port in (mine, theirs):
        port.begin()
    for receive in receives:
        receive.start()
    theirs.poll([])
    order = []

    def move():
        mine.poll([])
        order.extend(theirs.poll([receive.token for receive in receives]) or ())

    sends[second].start()
    for _ in range(20):
        move()
    assert not order
    sends[first].start()
    for _ in range(100_000):
        move()
        if len(order) == 2:
            break
    assert order == [first, second]


def test_a_message_waits_for_its_gate(pair):
    """The second one of a rank goes when a half of the first has come."""
    turns = {(0, 1, 1): (Gate(0, (0, 1, 0), 0.5),)}
    mine, theirs = pair.transports(turns=turns)
    arrays = [np.full(300_000, tag + 1, np.uint8) for tag in range(2)]
    targets = [np.zeros(300_000, np.uint8) for _ in range(2)]
    sends = [mine.send(array, 1, tag) for tag, array in enumerate(arrays)]
    receives = [theirs.recv(array, 0, tag) for tag, array in enumerate(targets)]
    for _ in range(2):
        for port in (mine, theirs):
            port.begin()
        for receive in receives:
            receive.start()
        sends[1].start()
        for _ in range(50):
            theirs.poll([])
            mine.poll([])
        assert sends[1].held() and not targets[1].any()
        sends[0].start()
        done = set()
        for _ in range(10_000):
            mine.poll([])
            done.update(theirs.poll([receive.token for receive in receives]) or ())
            if len(done) == 2:
                break
        assert not sends[1].held() and targets[1].all() and targets[0].all()
        mine.poll([send.token for send in sends])
        targets[1][:] = 0
        for port in (mine, theirs):
            port.end()


def test_the_first_short_messages_go_before_they_are_wanted(pair, monkeypatch):
    """Then nothing but what the connection holds is waited for, and what comes early is kept."""
    monkeypatch.setattr(tcp_transport, "LONG_MESSAGES", 2)
    lengths = [1000, tcp_transport.LONG_BYTES, tcp_transport.LONG_BYTES, tcp_transport.LONG_BYTES + 1]
    mine, theirs = pair.transports()
    sources = [np.full(length, tag + 1, np.uint8) for tag, length in enumerate(lengths)]
    targets = [np.zeros(length, np.uint8) for length in lengths]
    sends = [mine.send(source, 1, tag) for tag, source in enumerate(sources)]
    receives = [theirs.recv(target, 0, tag) for tag, target in enumerate(targets)]
    for _ in range(3):
        for port in (mine, theirs):
            port.begin()
        for send in sends:
            send.start()
        gone = set()
        for _ in range(2000):
            gone |= set(mine.poll([send.token for send in sends]) or ())
            theirs.poll([])
        assert gone == {0, 1} and not any(target.any() for target in targets)
        for receive in receives:
            receive.start()
        left = set(range(len(lengths)))
        for _ in range(100_000):
            mine.poll([send.token for send in sends])
            left -= set(theirs.poll([receive.token for receive in receives]) or ())
            if not left:
                break
        assert all((target == tag + 1).all() for tag, target in enumerate(targets))
        for target in targets:
            target[:] = 0
        mine.end()
        theirs.end()


def receiving(links, length=1000, sized=False):
    port = TcpTransport(links, 0, Plain())
    array = np.zeros(length, np.uint8)
    message = port.recv(array, 1, 3, sized)
    port.begin()
    return port, message, array


def polled(port, message):
    return any(port.poll([message.token]) for _ in range(2000))


@pytest.mark.parametrize(
    "sent",
    [
        HEAD.pack(4 * KINDS + LAST, 1, 10),  # no such message
        HEAD.pack(3 * KINDS + LAST, 1, 1001),  # longer than its receive
        HEAD.pack(3 * KINDS + SEGMENT, 1, 600) + bytes(600) + HEAD.pack(3 * KINDS + SEGMENT, 1, 401),
        HEAD.pack(3 * KINDS + LAST, 1, 999) + bytes(999),  # shorter
        HEAD.pack(3 * KINDS + LAST, 0, 1000),  # of a run that is over
        HEAD.pack(3 * KINDS + LAST, 2**32 - 1, 1000),
        HEAD.pack(3 * KINDS + READY, 1, 0),  # nothing is sent
        HEAD.pack(0 * KINDS + OPEN, 1, 0),
        HEAD.pack(3 * KINDS + LAST, 1, 1000) + bytes(1000) + HEAD.pack(3 * KINDS + LAST, 1, 1000),  # twice
        b"\xff" * 64,
    ],
)
def test_what_is_not_expected_ends_the_job(raw, sent):
    links, theirs = raw
    port, message, _ = receiving(links)
    message.start()
    theirs.sendall(sent)
    with pytest.raises(RunFailed, match="rank 1"):
        for _ in range(3):
            polled(port, message)


@pytest.mark.parametrize("length, times", [(100, 1), (1_000_000, 2)])
def test_that_a_receiver_is_ready_is_said_once_and_of_no_short_message(raw, length, times):
    """Else a message would go twice."""
    links, theirs = raw
    port = TcpTransport(links, 0, Plain())
    message = port.send(np.zeros(length, np.uint8), 1, 0)
    port.begin()
    message.start()
    theirs.sendall(HEAD.pack(0 * KINDS + READY, 1, 0) * times)
    with pytest.raises(RunFailed, match=r"rank 1 sends what is not expected here \(a word about message 0\)"):
        for _ in range(100):
            port.poll([message.token])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_waited_for(sent):
    mine, theirs = connected()
    links = links_of({1: mine})
    try:
        port, message, array = receiving(links, 100)
        message.start()
        theirs.sendall(struct.pack("<II", 3 * KINDS + SEGMENT, 1) + sent)
        try:
            for _ in range(20):
                port.poll([message.token])
        except RunFailed as failure:
            assert "rank 1" in str(failure)
        assert len(array) == 100
    finally:
        links.close()
        theirs.close()


@pytest.mark.parametrize("used", [15, 16, 100, 1016])
def test_a_damaged_length_of_frames_is_noticed(raw, used):
    links, theirs = raw
    port, message, _ = receiving(links, 1016, sized=True)
    message.start()
    body = np.zeros(1016, np.uint8)
    write_head(body, max(used, 16))
    theirs.sendall(HEAD.pack(3 * KINDS + LAST, 1, 100) + body[:100].tobytes())
    if used == 100:
        assert polled(port, message)
    else:
        with pytest.raises(FrameError, match="a message from rank 1: the length of a message of frames"):
            polled(port, message)


def test_what_is_of_a_later_run_stays_in_the_connection(raw):
    links, theirs = raw
    port, message, array = receiving(links)
    theirs.sendall(HEAD.pack(3 * KINDS + LAST, 1, 1000) + b"a" * 1000)
    theirs.sendall(HEAD.pack(3 * KINDS + LAST, 2, 1000) + b"b" * 1000)
    message.start()
    assert polled(port, message) and array.tobytes() == b"a" * 1000
    assert not polled(port, message)
    port.end()
    port.begin()
    message.start()
    assert polled(port, message) and array.tobytes() == b"b" * 1000


def test_a_lost_connection_is_named_after_a_moment(raw, monkeypatch):
    """The job may end meanwhile for a reason that says more."""
    links, theirs = raw
    port, message, _ = receiving(links)
    message.start()
    theirs.close()
    for _ in range(10):
        port.poll([message.token])
    monkeypatch.setattr(tcp_transport, "LINGER_S", 0.0)
    with pytest.raises(RunFailed, match="the connection to rank 1 is lost"):
        for _ in range(10):
            port.poll([message.token])


def test_a_connection_that_is_lost_while_something_is_sent_is_named(raw, monkeypatch):
    monkeypatch.setattr(tcp_transport, "LINGER_S", 0.0)
    links, theirs = raw
    port = TcpTransport(links, 0, Plain())
    message = port.send(np.zeros(1000, np.uint8), 1, 0)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # what is sent is refused
    port.begin()
    theirs.close()
    message.start()
    with pytest.raises(RunFailed, match="the connection to rank 1 is lost"):
        for _ in range(10):
            port.poll([])


def test_a_kernel_that_cannot_let_go_of_a_limit_is_asked_for_none(monkeypatch):
    monkeypatch.setattr(tcp_options, "SO_BUF_LOCK", 9999)
    both = Pair()
    connection = both.links[0].links[1]._connection
    before = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    port = both.transports(paces={(0, 1): tcp_transport.Pace(1 << 20, 1000)})[0]
    assert port.begin() == ""
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before
    port.end()
    both.close()


def test_a_connection_that_is_lost_in_the_middle_of_a_look_is_named(raw, monkeypatch):
    """The peer's last word lets something be sent, which finds the connection lost; then there is nothing to read."""
    monkeypatch.setattr(tcp_transport, "LINGER_S", 0.0)
    links, theirs = raw
    port = TcpTransport(links, 0, Plain())
    message = port.send(np.zeros(1_000_000, np.uint8), 1, 0)
    port.begin()
    message.start()
    theirs.sendall(HEAD.pack(0 * KINDS + READY, 1, 0))
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with pytest.raises(RunFailed, match="the connection to rank 1 is lost"):
        for _ in range(10):
            port.poll([])


def test_a_connection_that_is_lost_behind_something_of_a_later_run_is_named_in_that_run(raw, monkeypatch):
    links, theirs = raw
    port = TcpTransport(links, 0, Plain())
    message = port.send(np.zeros(1000, np.uint8), 1, 0)
    port.begin()
    theirs.sendall(HEAD.pack(3 * KINDS + LAST, 2, 1000))
    port.poll([])
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    message.start()
    for _ in range(10):
        port.poll([])
    port.end()
    assert port.begin() == ""
    monkeypatch.setattr(tcp_transport, "LINGER_S", 0.0)
    with pytest.raises(RunFailed, match="the connection to rank 1 is lost"):
        port.poll([])


def test_a_word_that_follows_from_what_is_read_leaves_with_the_same_look(raw):
    """The rank may sleep after it."""
    links, theirs = raw
    theirs.settimeout(5)
    turns = {(1, 0, 4): (Gate(0, (1, 0, 3), 0.5),)}
    port = TcpTransport(links, 0, Plain(), turns=turns)
    message = port.recv(np.zeros(1000, np.uint8), 1, 3)
    port.begin()
    message.start()
    theirs.sendall(HEAD.pack(3 * KINDS + LAST, 1, 1000) + bytes(1000))
    assert port.poll([message.token]) == [0]
    assert theirs.recv(100) == HEAD.pack(0 * KINDS + OPEN, 1, 0)


def test_numbers_of_runs_begin_anew(pair):
    for links in pair.links:
        links.run = RUNS - 2
    mine, theirs = pair.transports()
    source, target = np.zeros(100_000, np.uint8), np.zeros(100_000, np.uint8)
    send, receive = mine.send(source, 1, 0), theirs.recv(target, 0, 0)
    for run in range(4):
        source[:] = run + 1
        mine.begin()
        send.start()
        for _ in range(3):
            mine.poll([send.token])
        theirs.begin()
        receive.start()
        for _ in range(10_000):
            mine.poll([send.token])
            if theirs.poll([receive.token]):
                break
        assert (target == run + 1).all()
        mine.end()
        theirs.end()


def test_the_kernel_keeps_what_the_pace_says(monkeypatch):
    """Programs with other paces take turns; where no process may ask for as much there is no limit. Two segments more
    may wait behind what is on its way."""
    monkeypatch.setattr(tcp_options, "_wmem_max", lambda: 500_000)
    both = Pair()
    sizes, waiting = [], []
    over_one = ((0, 10**9),)  # of which clocks are kept: twice as much, or what is allowed
    kinds = [(100_000, 3, ()), (50_000, 2, ()), (100_000, 3, ()), (1_000_000, 64, ()), (50_000, 2, ())]
    kinds += [(50_000, 2, over_one), (100_000, 7, over_one), (100_000, 10, over_one)]
    for length, segments, uplinks in kinds:
        port = both.transports(paces={(0, 1): tcp_transport.Pace(length, segments, 0, uplinks)})[0]
        assert port.begin() == ""
        connection = both.links[0].links[1]._connection
        sizes.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        waiting.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT))
        port.end()
        port.close()
    both.close()
    assert sizes[:3] == [300_000, 100_000, 300_000] and sizes[4] == 100_000
    assert sizes[3] > 400_000
    assert sizes[5:] == [200_000, 1_000_000, 1_000_000]
    assert waiting == [200_000, 100_000, 200_000, 2_000_000, *[100_000] * 2, *[200_000] * 2]


def most_bytes_per_s(connection):
    return struct.unpack("Q", connection.getsockopt(socket.SOL_SOCKET, tcp_options.SO_MAX_PACING_RATE, 8))[0]


def test_a_long_message_leaves_at_the_pace_of_its_link_and_a_short_one_at_that_of_its_uplink(pair):
    """And at once those of a program of which no rate is known, which comes after one of which it is."""
    connection, rates = pair.links[0].links[1]._connection, []
    for known in (tcp_transport.Pace(1000, 3, 123_456_789, ((0, 123_456_789),)), tcp_transport.Pace(1000, 3)):
        mine, theirs = pair.transports(paces={(0, 1): known})
        sources = [np.full(length, 7, np.uint8) for length in (3001, 3000, 50_000)]
        targets = [np.zeros(len(source), np.uint8) for source in sources]
        sends = [mine.send(source, 1, tag) for tag, source in enumerate(sources)]
        receives = [theirs.recv(target, 0, tag) for tag, target in enumerate(targets)]
        for port in (mine, theirs):
            port.begin()
        for send, receive, target in zip(sends, receives, targets, strict=True):
            receive.start()
            send.start()
            while not theirs.poll([receive.token]):
                mine.poll([])
            assert (target == 7).all()
            rates.append(most_bytes_per_s(connection))
        mine.poll([send.token for send in sends])
        for port in (mine, theirs):
            port.end()
            port.close()
    assert rates == [123_456_789, tcp_options.NO_LIMIT, 123_456_789, *[tcp_options.NO_LIMIT] * 3]


DATA_FRAMES_AT = 156  # in struct tcp_info of linux/tcp.h: frames with data that were sent


def frames(connection):
    found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(found) < DATA_FRAMES_AT + 4:
        pytest.skip("this kernel counts no frames")
    return struct.unpack_from("I", found, DATA_FRAMES_AT)[0]


@pytest.mark.parametrize("length, least, most", [(20_000, 20, 40), (2000, 1, 18)])
def test_a_segment_ends_a_frame_of_the_kernels_but_a_short_one(pair, length, least, most):
    """What waits in the kernel is else sent in its longest frames, and a segment arrives with the one after it."""
    check_frames(pair, length, least, most)


@pytest.mark.parametrize(("orderly_bytes", "least", "most"), [(128 << 10, 20, 40), (16 << 10, 1, 18)])
def test_nor_does_a_long_one(pair, monkeypatch, orderly_bytes, least, most):
    for module in (tcp_link, tcp_native):
        monkeypatch.setattr(module, "ORDERLY_BYTES", orderly_bytes)
    check_frames(pair, 20_000, least, most)


def check_frames(pair, length, least, most):
    """Send a message of 20 segments, and count the kernel's frames."""
    mine, theirs = pair.transports(paces={(0, 1): tcp_transport.Pace(length, 64, 100 * length)})
    source = np.arange(20 * length, dtype=np.uint32).astype(np.uint8)
    target = np.zeros_like(source)
    send, receive = mine.send(source, 1, 0), theirs.recv(target, 0, 0)
    for port in (mine, theirs):
        port.begin()
    before = frames(pair.links[0].links[1]._connection)
    receive.start()
    send.start()
    while not theirs.poll([receive.token]):
        mine.poll([send.token])
    assert (target == source).all()
    assert least <= frames(pair.links[0].links[1]._connection) - before <= most
    for port in (mine, theirs):
        port.end()


def test_a_kernel_that_knows_no_pace_sends_all_the_same(pair, monkeypatch):
    monkeypatch.setattr(tcp_options, "SO_MAX_PACING_RATE", 9999)
    mine, theirs = pair.transports(paces={(0, 1): tcp_transport.Pace(1000, 3, 123_456_789)})
    source, target = np.full(50_000, 7, np.uint8), np.zeros(50_000, np.uint8)
    send, receive = mine.send(source, 1, 0), theirs.recv(target, 0, 0)
    for port in (mine, theirs):
        port.begin()
    receive.start()
    send.start()
    while not theirs.poll([receive.token]):
        mine.poll([send.token])
    assert (target == 7).all()
    for port in (mine, theirs):
        port.end()


def test_words_leave_before_data_that_were_started_before_them(raw):
    links, theirs = raw
    theirs.settimeout(5)
    port = TcpTransport(links, 0, Plain())
    send, receive = port.send(np.zeros(1000, np.uint8), 1, 0), port.recv(np.zeros(100_000, np.uint8), 1, 3)
    port.begin()
    send.start()
    receive.start()
    port.poll([])
    assert theirs.recv(HEAD.size) == HEAD.pack(3 * KINDS + READY, 1, 0)
    assert theirs.recv(HEAD.size) == HEAD.pack(0 * KINDS + LAST, 1, 1000)
