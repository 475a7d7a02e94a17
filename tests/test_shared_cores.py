"""Which schedule is taken where ranks share cores, which is in no time: the one that bears late messages best."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_coding_plan import hosts

from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.candidates import late_fs
from taccl.synth.collective import build
from taccl.synth.copying import copies_fs
from taccl.synth.cost import ceil_fs, costs, judged_fs, late_costs
from taccl.synth.lower import lower_exact
from taccl.synth.request import Request
from taccl.synth.schedule import Transfer, time_in_order
from taccl.synth.search import ALIKE, NEAR, STEADY
from taccl.synth.synthesise import synthesise

SIZE = 8 << 20


def crowded(load_us, topology=None):
    return replace(topology or hosts(2, 2, 4), load_us=Fraction(load_us))


def late(topology, made):
    return late_fs(topology, made.collective, costs(topology, made.chunk_bytes), made.messages)


def judged(topology, made):
    return judged_fs(topology, made.time_fs, len(made.messages))


@pytest.fixture(scope="module")
def quickest():
    return synthesise(Request(hosts(2, 2, 4), "allgather", SIZE, time_limit_s=2))


@pytest.fixture(scope="module", params=["0.001", "50", "2000"])
def chosen(request):
    topology = crowded(request.param)
    return topology, synthesise(Request(topology, "allgather", SIZE, time_limit_s=2))


def test_what_is_taken_is_steady_or_the_steadiest(quickest, chosen):
    topology, found = chosen
    steady = late(topology, found) <= STEADY * found.time_fs
    near = judged(topology, quickest) <= NEAR * judged(topology, found)
    assert steady or not near or late(topology, found) <= ALIKE * late(topology, quickest)
    assert found.time_fs >= quickest.time_fs  # by links alone nothing is quicker


def test_of_steady_ones_it_costs_least_and_has_fewest_messages(quickest, chosen):
    topology, found = chosen
    if late(topology, quickest) <= STEADY * quickest.time_fs:
        assert judged(topology, found) <= ALIKE * judged(topology, quickest)
        assert len(found.messages) <= len(quickest.messages)


def test_what_would_be_quicker_by_its_links_is_told(quickest, chosen):
    _, found = chosen
    if found.time_fs > quickest.time_fs:
        assert found.provenance["quickest_us"] < found.time_fs / 1e9
        assert found.provenance["load_us"] > 0


def test_a_schedule_that_bears_no_delay_is_left():
    """Short messages over links of a millisecond, ranks that share two cores: the quickest has a chain of hops."""
    topology = crowded(20, hosts(4, 2, 4))
    alone = synthesise(Request(hosts(4, 2, 4), "allreduce", 1 << 16, time_limit_s=2))
    found = synthesise(Request(topology, "allreduce", 1 << 16, time_limit_s=2))
    assert late(topology, alone) > STEADY * alone.time_fs
    assert late(topology, found) < late(topology, alone)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["ring:4", "mesh2d:2x2", "ndv2:2", "hypercube:3"]),
    st.fractions(Fraction(1, 1000), 100),
    st.data(),
)
def test_late_messages_are_late_and_keep_their_ranks(name, load_us, data):
    topology = crowded(load_us, load_topology(name))
    share_fs = ceil_fs(load_us * topology.ranks / 2)
    sender = data.draw(st.sampled_from(range(topology.ranks)))
    collective = build("allgather", topology.ranks, 4)
    own = [n for n, chunk in enumerate(collective.chunks) if sender in {rank for rank, _ in chunk.sources}]
    out = [index for index, one in enumerate(topology.links) if one.src == sender]
    listed = [Transfer(data.draw(st.sampled_from(out)), (chunk,)) for chunk in own]
    priced = costs(topology, Fraction(1000))
    messages = time_in_order(topology, collective, late_costs(topology, Fraction(1000)), listed)
    for message in messages:
        took = message.end_fs - message.start_fs
        alpha_fs = max(priced.alpha_fs[message.link] * 3 // 2, priced.occupancy_fs[message.link] + share_fs)
        within = any({message.src, message.dst} <= set(node) for node in topology.nodes)
        assert took == alpha_fs + priced.chunk_fs[message.link] * (2 if within else 1)
    # Whatever links they take, one after another they keep the rank that sends them.
    for first, second in pairwise(sorted(messages, key=lambda m: m.start_fs)):
        assert second.start_fs - first.start_fs >= share_fs


@pytest.mark.parametrize("name", ["broadcast", "alltoall", "allgather"])
def test_chunks_are_whole_words_where_that_costs_little(name):
    """Four ranks that share two cores: any order fills what they share, and of those some cut a block in three."""
    topology = crowded("0.5", one_host(4))
    made = synthesise(Request(topology, name, 16_000_000, time_limit_s=2))
    assert made.chunk_bytes % 4 == 0


@pytest.mark.parametrize("name", ["reducescatter", "allreduce", "allgather"])
def test_what_makes_programs_copy_is_not_taken_for_a_little_time(name):
    """Any order fills what the ranks share, and most orders make messages of chunks that lie apart."""
    topology = crowded("0.5", one_host(4))
    found = synthesise(Request(topology, name, 16_000_000, time_limit_s=2))
    direct = synthesise(Request(topology, name, 16_000_000, engine="direct"))
    # A rank's own block, which all programs copy, takes 400 us.
    assert copies_fs(direct, topology) == (400 * 10**9 if name == "allgather" else 0)
    both = [judged(topology, made) + copies_fs(made, topology) for made in (found, direct)]
    assert both[0] <= ALIKE * both[1]


def test_copies_are_those_of_the_program():
    topology = one_host(4)
    for name in ("reducescatter", "allgather", "alltoall"):
        made = synthesise(Request(topology, name, 16_000_000, partition=4, time_limit_s=2))
        program = lower_exact(made, topology).program
        copied = [
            sum(step.count for tb in rank.threadblocks for step in tb.steps if step.kind == "cpy")
            for rank in program.gpus
        ]
        assert copies_fs(made, topology) == max(copied) * costs(topology, made.chunk_bytes).holds[0][0][1]


def test_chunks_that_are_no_whole_words_are_copied_in_and_out():
    topology = one_host(4)
    even, uneven = (
        synthesise(Request(topology, "broadcast", 16_000_000, engine="direct", partition=k)) for k in (4, 3)
    )
    # The root copies all that it gives and all that it gets back.
    assert copies_fs(uneven, topology) - copies_fs(even, topology) >= 2 * 16 * 100 * 10**9


def one_host(ranks):
    """A bus that half of the ranks fill, and ranks that copy what they receive one after the other."""
    ports = (Port("bus", Fraction(50)), *(Port(f"rank{rank}.in", Fraction(100)) for rank in range(ranks)))
    links = tuple(
        Link(src, dst, Fraction(3, 2), Fraction(100), Fraction(1, 2), (0, 1 + dst))
        for src in range(ranks)
        for dst in range(ranks)
        if src != dst
    )
    return Topology("one host", (tuple(range(ranks)),), links, ports)


@pytest.mark.parametrize("load_us", ["0.001", "7"])
def test_no_schedule_is_quicker_with_late_messages(load_us):
    topology = crowded(load_us)
    made = synthesise(Request(topology, "allreduce", 1 << 16, time_limit_s=1))
    assert late(topology, made) > made.time_fs
