"""Which message waits for which one on an uplink."""

from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import pytest
import runtime_programs as programs

from taccl.errors import UsageError
from taccl.profiles.topology import Link, Port, Topology
from taccl.runtime import turns as turns_module
from taccl.runtime.compile import compile_ranks
from taccl.runtime.trace import trace
from taccl.runtime.turns import WINDOW_BYTES, Gate, turns
from taccl.synth.collective import build

MB = 2**20
ALPHA_US = Fraction(1)


def cluster(nodes, slow=()):
    """Full mesh; between nodes each node has one uplink and one downlink, and the slow links are four times slower."""
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    links = []
    for a, b in permutations(sorted(node_of), 2):
        apart = node_of[a] != node_of[b]
        beta = Fraction(40_000 if (a, b) in slow else 10_000 if apart else 1000)
        ports = (2 * node_of[a], 2 * node_of[b] + 1) if apart else ()
        links.append(Link(a, b, ALPHA_US, beta, Fraction(0), ports))
    names = [f"{number} {way}" for number in range(len(nodes)) for way in ("out", "in")]
    return Topology(
        "cluster", tuple(nodes), tuple(links), tuple(Port(name, Fraction(10_000)) for name in names)
    )


def gates_of(nodes, pairs, slow=(), chunks=1, chunk_bytes=MB):
    return turns_of(nodes, pairs, slow, chunks, chunk_bytes).gates


def turns_of(nodes, pairs, slow=(), chunks=1, chunk_bytes=MB, channel=0, topology=None, **more):
    """Of messages between pairs of ranks, each of some chunks in messages of their own, all ready at once."""
    topology = topology or cluster(nodes, slow)
    ranks = topology.ranks
    gpus = []
    for rank in range(ranks):
        ends = [(b, -1, "s") for a, b in pairs if a == rank] + [(-1, a, "r") for a, b in pairs if b == rank]
        steps = [
            (send, recv, channel, [(kind, "i", c, "o", c, 1) for c in range(chunks)])
            for send, recv, kind in ends
        ]
        held = chunks if steps else 0
        gpus.append((held, held, 0, steps))
    program = programs.program("custom", ranks, chunks, gpus)
    collective = build("sendrecv", ranks, chunks, pairs=pairs)
    order = trace(program)
    node_of = topology.node_of()
    plans = dict(enumerate(compile_ranks(program, order, {}, range(ranks), node_of)))
    return turns(program, collective, order, plans, topology, node_of, chunk_bytes, **more)


REST = (MB - WINDOW_BYTES) / MB


def test_ranks_of_a_node_take_turns_on_its_uplink_and_senders_see_it():
    found = gates_of([(0, 1), (2,), (3,)], [(0, 2), (1, 3)])
    assert found == {(1, 3, 0): (Gate(0, (0, 2, 0), REST),)}


@pytest.mark.parametrize("pairs", [[(0, 2), (1, 3)], [(0, 1), (1, 2), (2, 0)]])
def test_messages_between_nodes_have_the_order_in_which_they_begin(pairs):
    """So none is behind one that waits for it, or for what its connection sends before it."""
    nodes = [(0, 1), (2,), (3,)]
    found = turns_of(nodes, pairs, chunks=2)
    between = {(a, b, tag) for a, b in pairs if {a, b} != {0, 1} for tag in (0, 1)}
    assert len(found.begins) == len(between) and set(found.begins) == between
    place = {key: n for n, key in enumerate(found.begins)}
    assert all(place[a, b, 0] < place[a, b, 1] for a, b, _ in between)
    assert all(place[gate.message] < place[later] for later, gates in found.gates.items() for gate in gates)
    alone = turns_of(nodes, pairs, chunks=2, wanted=False)
    assert found.gates and not alone.gates and alone.begins == found.begins


def test_senders_of_two_nodes_take_turns_on_a_downlink_and_receivers_see_it():
    found = gates_of([(0,), (1,), (2, 3)], [(0, 2), (1, 3)])
    assert found == {(1, 3, 0): (Gate(2, (0, 2, 0), REST),)}


def racks(rack_of):
    """Nodes of one rank whose racks have a trunk out that is no quicker than their links."""
    plain = cluster([(rank,) for rank in range(len(rack_of))])
    first = len(plain.ports)
    ports = (*plain.ports, *(Port(f"trunk {rack}", Fraction(10_000)) for rack in sorted(set(rack_of))))
    links = tuple(
        replace(link, ports=(*link.ports, first + rack_of[link.src]))
        if rack_of[link.src] != rack_of[link.dst]
        else link
        for link in plain.links
    )
    return replace(plain, ports=ports, links=links)


def test_senders_of_two_nodes_take_turns_on_the_trunk_of_their_rack_and_receivers_see_it():
    found = turns_of([], [(0, 2), (1, 3)], topology=racks((0, 0, 1, 1))).gates
    assert found == {(1, 3, 0): (Gate(2, (0, 2, 0), REST),)}
    assert not turns_of([], [(0, 2), (1, 3)], topology=racks((0, 1, 2, 3))).gates


def test_a_message_that_is_still_under_way_when_its_uplink_is_free_holds_nobody_up():
    assert gates_of([(0, 1), (2,), (3,)], [(0, 2), (1, 3)], slow=[(0, 2)]) == {}


def test_messages_have_turns_that_last_much_longer_than_a_turn_takes_to_hand_over():
    """At 10 ms a MB and a latency of 1 us: from 3.2 ms on."""
    pairs, nodes = [(0, 2), (1, 3)], [(0, 1), (2,), (3,)]
    assert gates_of(nodes, pairs, chunk_bytes=325_000) and not gates_of(nodes, pairs, chunk_bytes=320_000)


def _waiting(*waits):
    """Four messages of rank 0 to rank 1, whose plans keep their order, and gates of some on others."""
    chunks = 4
    program = programs.program("custom", 2, chunks, [
        (chunks, chunks, 0, [(1, -1, 0, [("s", "i", c, "o", c, 1) for c in range(chunks)])]),
        (chunks, chunks, 0, [(-1, 0, 0, [("r", "i", c, "o", c, 1) for c in range(chunks)])]),
    ])  # fmt: skip
    plans = compile_ranks(program, trace(program), {}, range(2), (0, 1))
    keys = [(0, 1, tag) for tag in range(chunks)]
    found = {keys[later]: (Gate(0, keys[earlier], 0.5),) for later, earlier in waits}
    finishes = turns_module._without_circles(plans, found, (0, 1))
    return finishes, {key[2]: [gate.message[2] for gate in gates] for key, gates in found.items()}


def test_what_cannot_wait_for_a_message_waits_for_what_that_one_waits_for():
    """The plans have message after message; one that waits for a later one hangs."""
    assert _waiting((1, 0), (3, 1)) == (True, {1: [0], 3: [1]})
    assert _waiting((2, 3), (3, 1)) == (True, {2: [1], 3: [1]})
    assert _waiting((2, 3), (3, 0)) == (True, {2: [0], 3: [0]})
    assert _waiting((0, 1)) == (True, {})  # which waits for nothing
    assert _waiting((0, 1), (1, 2), (2, 3)) == (True, {})


def test_ranks_of_one_node_have_no_turns():
    assert gates_of([(0, 1, 2, 3)], [(0, 2), (1, 3)]) == {}


def test_messages_that_fit_into_the_window_go_together(monkeypatch):
    monkeypatch.setattr(turns_module, "WORTH_HANDOVERS", 0)
    assert gates_of([(0,), (1,)], [(0, 1)], chunks=3, chunk_bytes=WINDOW_BYTES) == {}
    length = WINDOW_BYTES + 1
    found = gates_of([(0,), (1,)], [(0, 1)], chunks=3, chunk_bytes=length)
    assert found == {(0, 1, tag): (Gate(0, (0, 1, tag - 1), 1 / length),) for tag in (1, 2)}


def test_a_program_needs_the_links_of_its_cluster():
    with pytest.raises(UsageError, match="no link"):
        program = programs.program("custom", 2, 1, [
            (1, 1, 0, [(1, -1, 0, [("s", "i", 0, "o", 0, 1)])]), (1, 1, 0, [(-1, 0, 0, [("r", "i", 0, "o", 0, 1)])]),
        ])  # fmt: skip
        lonely = Topology("lonely", ((0,), (1,)), (Link(1, 0, ALPHA_US, Fraction(1), Fraction(0)),))
        order = trace(program)
        plans = dict(enumerate(compile_ranks(program, order, {}, range(2), (0, 1))))
        turns(program, build("sendrecv", 2, 1, pairs=[(0, 1)]), order, plans, lonely, (0, 1), MB)


def test_a_program_of_too_many_messages_has_none_and_says_so(monkeypatch):
    pairs, nodes = [(0, 2), (1, 3)], [(0, 1), (2,), (3,)]
    monkeypatch.setattr(turns_module, "MOST_MESSAGES", 1)
    found = turns_of(nodes, pairs)
    assert found.gates == {} and found.why_none == "the program has more than 1 messages"


@pytest.mark.parametrize(("load_us", "mbps", "takes"), [(0, 800, True), (1, 360, False), (1, 340, True)])
def test_ranks_that_share_cores_take_turns_on_links_that_need_a_time_slice_for_the_window(
    load_us, mbps, takes
):
    """128 KB in 3 ms are 349.5 Mbit/s."""
    nodes, beta = [(0, 1), (2,), (3,)], Fraction(8_000_000, mbps)
    even = cluster(nodes)
    links = tuple(replace(link, beta_us_per_mb=beta) if link.ports else link for link in even.links)
    ports = tuple(replace(port, beta_us_per_mb=beta) for port in even.ports)
    topology = replace(even, links=links, ports=ports, load_us=Fraction(load_us))
    found = turns_of(nodes, [(0, 2), (1, 3)], chunk_bytes=4 * MB, topology=topology)
    assert bool(found.gates) == takes
    assert found.why_none == (
        "" if takes else "the ranks share cores, and their links are too quick for turns"
    )


def test_a_program_that_no_loader_takes_has_none_and_says_so():
    """The executor runs it; the model's rules are those of the loaders."""
    pairs, nodes = [(0, 2), (1, 3)], [(0, 1), (2,), (3,)]
    assert turns_of(nodes, pairs, channel=31).gates
    found = turns_of(nodes, pairs, channel=40)
    assert found.gates == {} and found.why_none == "the model of the cluster cannot run the program"
