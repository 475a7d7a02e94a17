"""Lowering of random algorithms on random machines: always proven, and priced as claimed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taccl.errors import CheckFailed, Infeasible
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.algorithm import Algorithm, Certificate, Message
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import Chunk, Collective, build
from taccl.synth.cost import costs
from taccl.synth.lower import MAX_CHANNELS, claim, lower, lower_exact
from taccl.synth.lower_scratch import Piece, place
from taccl.synth.program import Program
from taccl.synth.schedule import Transfer, completion_fs, time_batched, time_by_priority
from taccl.synth.verify import is_correct, verify

SIZE = 10**5
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
UNKNOWN = Certificate(0.0, "", 0.0, "feasible")
SPREADING = ("allgather", "alltoall", "broadcast", "gather", "scatter", "sendrecv")
COMBINING = ("reducescatter", "reduce", "allreduce")


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Strongly connected: a ring both ways, chords, doubled links, ports that links share."""
    ranks = draw(st.integers(2, 6))
    pairs = [(r, (r + 1) % ranks) for r in range(ranks)]
    pairs += [(v, u) for u, v in pairs]
    pairs += draw(st.lists(st.sampled_from([(u, v) for u in range(ranks) for v in range(ranks) if u != v])))
    count = draw(st.integers(0, 3))
    links = []
    for u, v in pairs[:24]:
        alpha = Fraction(draw(st.integers(0, 3)))
        ports = draw(st.sets(st.integers(0, count - 1))) if count else set()
        beta = Fraction(draw(st.sampled_from([10, 20, 33])))
        links.append(Link(u, v, alpha, beta, draw(st.sampled_from([alpha, alpha / 2])), tuple(sorted(ports))))
    reduce_alpha, reduce_beta = draw(st.sampled_from([(0, 0), (0, 3), (1, 3)]))
    return Topology(
        "random", (tuple(range(ranks)),), tuple(links),
        tuple(Port(f"p{i}", Fraction(draw(st.sampled_from([5, 20])))) for i in range(count)),
        reduce_alpha_us=Fraction(reduce_alpha), reduce_beta_us_per_mb=Fraction(reduce_beta),
    )  # fmt: skip


def tree(draw: st.DrawFn, topology: Topology, root: int, goals: set[int]) -> list[int]:
    """Links of a random tree from the root, in an order from the root, until every goal is reached."""
    reached, chosen = {root}, []
    while not goals <= reached:
        ways = [e for e, x in enumerate(topology.links) if x.src in reached and x.dst not in reached]
        link = draw(st.sampled_from(ways))
        reached.add(topology.links[link].dst)
        chosen.append(link)
    return chosen


def transfers_for(draw: st.DrawFn, topology: Topology, collective: Collective) -> list[Transfer]:
    """A tree for each chunk; for combining ones a tree towards a hub, each rank after its own children."""
    lists = []
    mirrored = Topology(
        "mirrored", topology.nodes, tuple(Link(x.dst, x.src, x.alpha_us, x.beta_us_per_mb, x.occupancy_us)
        for x in topology.links),
    )  # fmt: skip
    for number, chunk in enumerate(collective.chunks):
        sources = [rank for rank, _ in chunk.sources]
        goals = {rank for rank, _ in chunk.destinations}
        moves: list[Transfer] = []
        hub = sources[0]
        if collective.combining:
            hub = draw(st.sampled_from(sorted(goals)))
            inward = tree(draw, mirrored, hub, set(sources))
            moves = [Transfer(e, (number,), "reduce") for e in reversed(inward)]
        if goals != {hub}:
            moves += [Transfer(e, (number,)) for e in tree(draw, topology, hub, goals | {hub})]
        lists.append(moves)
    # Interleave the chunks at random, each chunk's own order kept.
    merged: list[Transfer] = []
    while any(lists):
        left = [number for number, moves in enumerate(lists) if moves]
        merged.append(lists[draw(st.sampled_from(left))].pop(0))
    return merged


@st.composite
def algorithms(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[Algorithm, Topology]:
    topology = draw(topologies())
    name = draw(st.sampled_from(names))
    root = (
        draw(st.integers(0, topology.ranks - 1))
        if name in ("broadcast", "reduce", "gather", "scatter")
        else 0
    )
    collective = build(name, topology.ranks, draw(st.integers(1, 2)), root=root)
    priced = costs(topology, collective.chunk_bytes(SIZE))
    timed = time_batched if draw(st.booleans()) else time_by_priority
    messages = timed(topology, collective, priced, transfers_for(draw, topology, collective))
    made = Algorithm(
        "random", collective, "random", SIZE, messages, completion_fs(priced, messages), UNKNOWN, "test"
    )
    return made, topology


def proven(program: Program, collective: Collective) -> None:
    findings = verify(program, collective=collective, strict=True)
    assert is_correct(findings), [f.message for f in findings if f.severity == "error"]


def moves(algorithm: Algorithm) -> Counter[tuple[int, tuple[int, ...], str]]:
    return Counter((m.link, m.chunks, m.op) for m in algorithm.messages)


def judge(algorithm: Algorithm, topology: Topology) -> None:
    assert check_algorithm(algorithm, topology) == []
    result = lower_exact(algorithm, topology)
    proven(result.program, algorithm.collective)
    assert check_algorithm(result.schedule, topology) == []
    # A program's sums are made as its threadblocks come to them, a schedule's in the order of arrival: where reducing
    # takes time, a program's times need not be those of any schedule, and it keeps that which it was made from.
    if not topology.reduce_alpha_us and not topology.reduce_beta_us_per_mb:
        assert result.schedule.time_fs == result.simulated_time_fs
    assert moves(result.schedule) == moves(algorithm)
    assert result.slower_fs == max(0, result.simulated_time_fs - algorithm.time_fs)
    assert lower_exact(algorithm, topology) == result


@settings(deadline=None, max_examples=25, suppress_health_check=SLOW)
@given(algorithms(SPREADING))
def test_random_spreading_algorithms(case: tuple[Algorithm, Topology]) -> None:
    judge(*case)


@settings(deadline=None, max_examples=25, suppress_health_check=SLOW)
@given(algorithms(COMBINING))
def test_random_combining_algorithms(case: tuple[Algorithm, Topology]) -> None:
    judge(*case)


def needs_too_many_channels(topology: Topology, instances: int, refusal: Infeasible) -> bool:
    parallel = Counter((link.src, link.dst) for link in topology.links)
    return "channels" in str(refusal) and instances * max(parallel.values()) > MAX_CHANNELS


@settings(deadline=None, max_examples=12, suppress_health_check=SLOW)
@given(algorithms(SPREADING), st.integers(2, 3))
def test_spreading_in_instances(case: tuple[Algorithm, Topology], instances: int) -> None:
    algorithm, topology = case
    try:
        result = lower_exact(algorithm, topology, instances=instances)
    except Infeasible as refusal:
        assert needs_too_many_channels(topology, instances, refusal)
    else:
        proven(result.program, result.schedule.collective)


@settings(deadline=None, max_examples=25, suppress_health_check=SLOW)
@given(algorithms(COMBINING), st.integers(2, 3))
def test_sums_in_instances_are_right_or_refused_with_the_reason(
    case: tuple[Algorithm, Topology], instances: int
) -> None:
    algorithm, topology = case
    try:
        result = lower_exact(algorithm, topology, instances=instances)
    except Infeasible as refusal:
        if needs_too_many_channels(topology, instances, refusal):
            return
        assert f"in {instances} parts some would be added twice: use --instances 1" in str(refusal)
        proven(lower(algorithm, topology), algorithm.collective)
    else:
        proven(result.program, result.schedule.collective)


@settings(deadline=None, max_examples=12, suppress_health_check=SLOW)
@given(algorithms(("alltoall", "gather", "scatter", "reduce")))
def test_reuse_saves_scratch_and_never_needs_more(case: tuple[Algorithm, Topology]) -> None:
    algorithm, topology = case
    with_reuse, without = (lower(algorithm, topology, reuse_scratch=reuse) for reuse in (True, False))
    proven(without, algorithm.collective)
    proven(with_reuse, algorithm.collective)
    for shared, apart in zip(with_reuse.gpus, without.gpus, strict=True):
        assert shared.scratch_chunks <= apart.scratch_chunks


def test_a_relay_reuses_its_scratch() -> None:
    links = tuple(Link(r, r + 1, Fraction(1), Fraction(10), Fraction(1)) for r in range(2))
    topology = Topology("line", ((0, 1, 2),), links)
    collective = build("sendrecv", 3, 8, pairs=[(0, 2)])
    priced = costs(topology, collective.chunk_bytes(SIZE))
    moves = [Transfer(e, (c,)) for c in range(8) for e in (0, 1)]
    messages = time_by_priority(topology, collective, priced, moves)
    algorithm = Algorithm(
        "relay", collective, "line", SIZE, messages, completion_fs(priced, messages), UNKNOWN, "test"
    )
    result = lower_exact(algorithm, topology)
    proven(result.program, collective)
    assert result.slower_fs == 0
    # Chunks leave every 1.125 us. Each needs memory from 2 us before it leaves until it has left the relay, 4.25 us.
    assert result.program.gpus[1].scratch_chunks == 4


@pytest.mark.parametrize(("start", "shared"), [(50, False), (101, False), (103, True)])
def test_a_message_leaves_without_waiting_for_memory(start: int, shared: bool) -> None:
    """Rank 0 gathers two chunks in scratch, which leave until 100 us, and receives one to be passed on; the receiver's
    word that there is memory takes a latency of 1 us, and as long again is left for it to look."""
    links = tuple(Link(*pair, Fraction(1), Fraction(50), Fraction(0)) for pair in [(0, 1), (2, 0), (0, 3)])
    topology = Topology("star", ((0, 1, 2, 3),), links)
    ends = [((0, 0), (1, 0)), ((0, 2), (1, 1)), ((2, 0), (3, 0))]
    chunks = tuple(Chunk((source,), (target,)) for source, target in ends)
    collective = Collective(
        "custom", 4, chunks, False, (3, 0, 1, 0), (0, 2, 0, 1), (None,) * 4, 3, 3
    )  # fmt: skip
    size = 3 * 10**6
    assert collective.chunk_bytes(size) == 10**6
    messages = tuple(
        Message(link, *ends, chunks, at * 10**9, (at + 50 * len(chunks) + 1) * 10**9, "copy")
        for link, ends, chunks, at in [
            (0, (0, 1), (0, 1), 0),
            (1, (2, 0), (2,), start),
            (2, (0, 3), (2,), 200),
        ]
    )
    algorithm = Algorithm("apart", collective, "star", size, messages, 251 * 10**9, UNKNOWN, "test")
    assert not check_algorithm(algorithm, topology)
    program = lower(algorithm, topology)
    proven(program, collective)
    receive = next(step for tb in program.gpus[0].threadblocks for step in tb.steps if step.kind == "r")
    assert (receive.depends is not None) == shared
    assert program.gpus[0].scratch_chunks == 2 + (not shared)


def test_pieces_share_memory_only_when_their_lives_do_not_meet() -> None:
    pieces = [
        Piece(2, (0, 0, 0), (5, 1, 0), (0,), (1,), 1),
        Piece(1, (3, 0, 1), (9, 1, 1), (2,), (3,), 1),
        Piece(1, (6, 0, 2), (7, 1, 2), (4,), (5,), 1),  # takes half of the first
        Piece(2, (8, 0, 3), (9, 1, 3), (6,), (7,), 1),  # nothing of its length is free
    ]
    placed = place(pieces, reuse=True)
    assert placed.offsets == (0, 2, 0, 3)
    assert placed.waits == ((4, 1),)
    assert place(pieces, reuse=False).length == 6


def two_ranks(messages: tuple[Message, ...]) -> tuple[Algorithm, Topology]:
    link = Link(0, 1, Fraction(0), Fraction(10), Fraction(0))
    collective = Collective(
        "custom", 2, (Chunk(((0, 0),), ((1, 0),)), Chunk(((1, 0),), ((1, 1),))), False, (1, 1), (0, 2),
        (None, None), 2, 1,
    )  # fmt: skip
    made = Algorithm("two", collective, "two", 2, messages, 0, UNKNOWN, "test")
    return made, Topology("two", ((0, 1),), (link,))


@pytest.mark.parametrize(("chunk", "reason"), [(None, "never gets"), (1, "does not have it")])
def test_impossible_schedules_are_refused_with_the_reason(chunk: int | None, reason: str) -> None:
    messages = () if chunk is None else (Message(0, 0, 1, (chunk,), 0, 10, "copy"),)
    with pytest.raises(CheckFailed, match=reason):
        lower_exact(*two_ranks(messages))


def test_a_slower_schedule_keeps_its_bounds_and_loses_its_proof() -> None:
    algorithm, _ = two_ranks(())
    proof = Certificate(1.0, "cut", 2.0, "optimal", "any algorithm")
    assert claim(replace(algorithm, time_fs=2 * 10**9), proof).certificate == proof
    slower = claim(replace(algorithm, time_fs=3 * 10**9), proof).certificate
    assert slower == Certificate(1.0, "cut", 2.0, "feasible", "")
