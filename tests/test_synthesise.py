"""Synthesis as its users see it: right, priced as claimed, never worse than a baseline, bounded, repeatable."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import hypot
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.errors import Infeasible, Interrupted, UsageError
from taccl.produce import Order, produce
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Topology
from taccl.sketches.restrict import restrict
from taccl.sketches.restrictions import Restrictions, Rule
from taccl.sketches.sketch_file import read_sketch
from taccl.synth import model_stages
from taccl.synth.algorithm import Algorithm
from taccl.synth.bounds import lower_bound
from taccl.synth.candidates import best_timing
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import Chunk, Collective, build
from taccl.synth.cost import costs, us
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.lower import LoweringResult, lower_exact
from taccl.synth.problem import problem, unreachable
from taccl.synth.request import Request
from taccl.synth.synthesise import synthesise, synthesise_several
from taccl.synth.verify import is_correct, verify

COLLECTIVES = (
    "allgather", "alltoall", "reducescatter", "allreduce", "broadcast", "reduce", "gather", "scatter", "sendrecv",
)  # fmt: skip


def proved(algorithm: Algorithm, topology: Topology) -> None:
    """Checked without the scheduler, lowered, verified strictly, and as fast as claimed."""
    assert check_algorithm(algorithm, topology) == []
    lowered = lower_exact(algorithm, topology)
    assert is_correct(verify(lowered.program, collective=algorithm.collective, strict=True))
    assert check_algorithm(lowered.schedule, topology) == []
    # Where reducing takes time, sums may be made in an order that no schedule has (tests/test_lower_random.py).
    if not topology.reduce_alpha_us:
        assert lowered.schedule.time_fs == lowered.simulated_time_fs
    assert us(algorithm.time_fs) >= algorithm.certificate.lower_bound_us


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Connected, irregular, up to 5 ranks on one or two nodes."""
    ranks = draw(st.integers(2, 5))
    number = st.integers(1, 9)
    links = {}
    order = draw(st.permutations(range(ranks)))
    pairs = list(pairwise(order))
    every = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    extra = draw(st.lists(st.sampled_from(every), max_size=6))
    for a, b in [*pairs, *((b, a) for a, b in pairs), *extra]:
        alpha = Fraction(draw(number), 4)
        occupancy = draw(st.sampled_from([Fraction(0), alpha]))
        links[a, b] = Link(a, b, alpha, Fraction(draw(number)), occupancy)
    split = draw(st.integers(1, ranks))
    nodes = tuple(tuple(part) for part in (range(split), range(split, ranks)) if part)
    reducing = draw(st.sampled_from([Fraction(0), Fraction(0), Fraction(1, 2)]))
    return Topology("random", nodes, tuple(links[key] for key in sorted(links)), reduce_alpha_us=reducing)


@settings(deadline=None, max_examples=18)
@given(topologies(), st.sampled_from(COLLECTIVES), st.sampled_from([1, 900, 10**6]), st.integers(0, 4))
def test_every_answer_on_random_topologies_is_right(
    topology: Topology, name: str, size: int, root: int
) -> None:
    request = Request(topology, name, size, root=root % topology.ranks, time_limit_s=1.0)
    proved(synthesise(request), topology)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("spec", ["mesh2d:3x3", "ndv2:1"])
def test_never_slower_than_a_baseline(spec: str, name: str) -> None:
    topology = load_topology(spec)
    for size in (1000, 10**6):
        answer = synthesise(Request(topology, name, size, time_limit_s=0.5))
        for partition in (1, 2):
            collective = build(name, topology.ranks, partition)
            priced = costs(topology, collective.chunk_bytes(size))
            for engine, transfers in BASELINES.items():
                try:
                    seed = best_timing(engine, topology, collective, priced, transfers(topology, collective))
                except Inapplicable:
                    continue
                if partition == 1 and seed is not None:
                    assert answer.time_fs <= seed.time_fs, engine


@pytest.mark.parametrize(
    ("spec", "name", "partition", "us_expected"),
    [
        ("ndv2-1mb:1", "allgather", 1, 69),
        ("ndv2-1mb:1", "allgather", 6, 322),
        ("ndv2-1mb:1", "alltoall", 1, 138),
        ("ndv2-1mb:1", "allreduce", 1, 138),
        ("dgx2-1mb:1", "allgather", 1, 120),
        ("dgx2-1mb:1", "alltoall", 1, 120),
    ],
)
def test_published_reference_points(spec: str, name: str, partition: int, us_expected: int) -> None:
    """TACCL's profiles for chunks of 1 MB: at least as good as its authors' code, proven at this chunking."""
    topology = load_topology(spec)
    size = build(name, topology.ranks, partition).size_chunks * 10**6
    answer = synthesise(Request(topology, name, size, partition=partition, time_limit_s=60.0))
    assert us(answer.time_fs) == us_expected
    assert answer.certificate.status == "optimal"
    proved(answer, topology)


def test_where_messages_cost_processor_time_few_of_them_are_better() -> None:
    topology = load_topology("mesh2d:2x3")
    quickest = synthesise(Request(topology, "allreduce", 10**5, time_limit_s=1.0))
    crowded = replace(topology, load_us=Fraction(1))
    answer = synthesise(Request(crowded, "allreduce", 10**5, time_limit_s=1.0))
    proved(answer, crowded)
    assert answer.time_fs > quickest.time_fs
    assert hypot(us(answer.time_fs), len(answer.messages)) < hypot(
        us(quickest.time_fs), len(quickest.messages)
    )
    assert answer.certificate.lower_bound_us == quickest.certificate.lower_bound_us
    assert answer.provenance["load_us"] == 1
    assert answer.provenance["quickest_us"] <= us(quickest.time_fs) + 1e-6
    assert "quickest_us" not in quickest.provenance


def test_the_same_request_gives_the_same_answer() -> None:
    topology = load_topology("mesh2d:2x3")
    request = Request(topology, "alltoall", 10**6, time_limit_s=2.0, partition=1)
    assert synthesise(request) == synthesise(request)


def test_alltoallv_and_custom_collectives() -> None:
    topology = load_topology("ring:4")
    demand = tuple(tuple((3 * i + j) % 3 for j in range(4)) for i in range(4))
    proved(synthesise(Request(topology, "alltoallv", 4000, demand=demand, time_limit_s=1.0)), topology)
    chunks = (Chunk(((0, 0), (2, 0)), ((1, 0), (3, 1))), Chunk(((1, 0),), ((0, 0), (1, 1))))
    custom = Collective("custom", 4, chunks, False, (1,) * 4, (2,) * 4, (None,) * 4, 2, 1)
    custom.check()
    proved(synthesise(Request(topology, "custom", 4000, custom=custom, time_limit_s=1.0)), topology)


def test_one_rank_needs_no_message() -> None:
    topology = Topology("one", ((0,),), ())
    answer = synthesise(Request(topology, "allreduce", 1000, time_limit_s=1.0))
    assert answer.messages == ()
    assert answer.time_fs == 0


def test_conflicting_rules_are_named_and_innocent_ones_are_not() -> None:
    topology = load_topology("ring:4")
    into_2 = frozenset(e for e, link in enumerate(topology.links) if link.dst == 2)
    clockwise = frozenset(e for e, link in enumerate(topology.links) if (link.src + 1) % 4 == link.dst)
    rules = (
        Rule("forbid-links", "s.yaml:3:5", "avoid the clockwise links", clockwise),
        Rule("forbid-links", "s.yaml:4:5", "avoid the other link into rank 2", into_2 - clockwise),
        Rule("cap", "s.yaml:5:5", "at most 99 chunks", into_2, limit=99),
    )
    with pytest.raises(Infeasible) as caught:
        synthesise(Request(topology, "allgather", 1000, Restrictions(rules)))
    assert caught.value.conflict == (
        "s.yaml:3:5: avoid the clockwise links",
        "s.yaml:4:5: avoid the other link into rank 2",
    )


def test_caps_and_forbidden_links_are_obeyed() -> None:
    topology = load_topology("ndv2:1")
    slow = frozenset(e for e, link in enumerate(topology.links) if link.beta_us_per_mb == 46)
    answer = synthesise(
        Request(
            topology,
            "allgather",
            10**6,
            Restrictions((Rule("forbid-links", "", "", slow),)),
            time_limit_s=1.0,
        )
    )
    assert not any(m.link in slow for m in answer.messages)
    for direction in ("allgather", "reducescatter"):
        capped = Restrictions((Rule("cap", "", "", frozenset({0, 1}), limit=1),), partition=1)
        answer = synthesise(Request(topology, direction, 10**6, capped, time_limit_s=2.0))
        assert sum(len(m.chunks) for m in answer.messages if m.link == 0) <= 1


def test_a_cap_counts_all_chunks_of_a_link() -> None:
    """Those that are reduced on arrival and those that are copied; in every schedule that is taken."""
    topology = load_topology("ring:4")
    every = frozenset(range(len(topology.links)))
    for limit in (3, 4):
        capped = Restrictions((Rule("cap", "", "", every, limit=limit),))
        several = tuple(synthesise_several(Request(topology, "allreduce", 10**7, capped, time_limit_s=2.0)))
        assert several
        for found in several:
            assert max(Counter(m.link for m in found.messages for _ in m.chunks).values()) <= limit


def test_a_conflict_says_what_its_own_rules_exclude() -> None:
    topology = load_topology("ring:4")
    into_2 = frozenset(e for e, link in enumerate(topology.links) if link.dst == 2)
    rules = (
        Rule("forbid-links", "s.yaml:3:5", "avoid the links into rank 2", into_2),
        Rule("cap", "s.yaml:4:5", "no chunk at all", frozenset(range(len(topology.links))), limit=0),
    )
    with pytest.raises(Infeasible, match="the chunks do not fit through the links") as caught:
        synthesise(Request(topology, "allgather", 1000, Restrictions(rules)))
    assert caught.value.conflict == ("s.yaml:4:5: no chunk at all",)


def test_stopping_at_once_is_an_interruption_and_bad_requests_are_refused() -> None:
    topology = load_topology("ring:4")
    with pytest.raises(Interrupted):
        synthesise(Request(topology, "allgather", 1000, engine="greedy"), should_stop=lambda: True)
    with pytest.raises(UsageError):
        synthesise(Request(topology, "allgather", 0))
    with pytest.raises(UsageError):
        synthesise(Request(topology, "broadcast", 10, root=9))
    with pytest.raises(UsageError):
        synthesise(Request(topology, "gossip", 10))


def test_an_engine_that_cannot_do_it_says_so_at_once() -> None:
    """A sum that several ranks want is no tree; that more time would help is not true."""
    chunk = Chunk(((0, 0), (1, 0)), ((1, 0), (2, 0), (3, 0)))
    custom = Collective("custom", 4, (chunk,), True, (1, 1, 0, 0), (0, 1, 1, 1), (None,) * 4, 1, 1)
    request = Request(
        load_topology("ring:4"), "custom", 1000, engine="greedy", custom=custom, time_limit_s=60.0
    )
    with pytest.raises(Infeasible, match=r"engine greedy cannot do this custom.*--engine auto"):
        synthesise(request)


def test_rules_that_no_seed_obeys_still_have_an_answer() -> None:
    """Only ranks 0 of two nodes talk to one another, and every chunk crosses once: no baseline does that."""
    topology = load_topology("ndv2:2")
    sketch = (
        "schema: taccl/sketch/v1\nname: m\ninternode: {connect: {0: [0]}}\ncaps: [{limit: 8, scope: inter}]\n"
    )
    restrictions = restrict(read_sketch(sketch, "m.yaml"), topology)
    request = Request(topology, "allgather", 10**6, restrictions, partition=1, time_limit_s=0.2)
    found = synthesise(request)
    assert not check_algorithm(found, topology)
    crossing = [m for m in found.messages if (m.src < 8) != (m.dst < 8)]
    assert {(m.src % 8, m.dst % 8) for m in crossing} == {(0, 0)}
    assert sum(len(m.chunks) for m in crossing) == 16


def test_the_search_stops_where_the_answer_is_called_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are whole femtoseconds and the bound is rounded down: they need not meet to the last one."""

    def beyond(*_: object, **__: object) -> None:
        raise AssertionError("a model was built although the bound was reached")

    for stage in ("pack", "timed_trees", "batched_messages", "improve"):
        monkeypatch.setattr(model_stages, stage, beyond)
    found = synthesise(Request(load_topology("ndv2-1mb:1"), "allgather", 8 * 10**6))
    bound_fs = lower_bound(load_topology("ndv2-1mb:1"), found.collective, 8 * 10**6).time_fs
    assert found.time_fs > bound_fs and found.certificate.proved_by == "any algorithm"


def test_the_next_best_schedules_are_right_and_in_order() -> None:
    topology = load_topology("ring:4")
    several = tuple(synthesise_several(Request(topology, "allgather", 10**6, time_limit_s=1.0)))
    assert len(several) > 1 and [a.time_fs for a in several] == sorted(a.time_fs for a in several)
    assert len({(a.engine, a.collective.partition) for a in several}) == len(several)
    for algorithm in several:
        proved(algorithm, topology)


def test_a_schedule_that_loses_in_lowering_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LoweringResult] = []

    def first_loses(algorithm: Algorithm, *rest: Any, **options: Any) -> LoweringResult:
        found = lower_exact(algorithm, *rest, **options)
        if not made:
            found = replace(found, simulated_time_fs=100 * found.simulated_time_fs)
        made.append(found)
        return found

    monkeypatch.setattr("taccl.synth.lower.lower_exact", first_loses)
    found = produce(Order("ring:4", "allgather", 10**6, time_limit_s=1.0))
    assert len(made) == 2 and found.simulated_fs == made[1].simulated_time_fs
    assert found.program is not None and found.program.gpus == made[1].program.gpus
    assert found.algorithm.time_fs == found.simulated_fs


def sketched(topology: Topology, text: str) -> Restrictions:
    return restrict(read_sketch(f"schema: taccl/sketch/v1\nname: s\n{text}", "s.yaml"), topology)


@pytest.mark.parametrize("name", ["reducescatter", "reduce", "allreduce", "allgather"])
def test_links_that_are_not_to_be_used_are_not_whatever_they_would_carry(name: str) -> None:
    topology = load_topology("ring:4")
    clockwise = {e for e, link in enumerate(topology.links) if (link.src + 1) % 4 == link.dst}
    for text in (
        "use: [{pairs: [[0, 1], [1, 2], [2, 3], [3, 0]]}]",
        "avoid: [{pairs: [[1, 0], [2, 1], [3, 2], [0, 3]]}]",
    ):
        request = Request(topology, name, 10**6, sketched(topology, text), time_limit_s=2.0)
        answer = synthesise(request)
        proved(answer, topology)
        assert {m.link for m in answer.messages} <= clockwise


def test_who_sends_between_nodes_receives_when_sums_are_made() -> None:
    topology = load_topology("ndv2:2")
    restrictions = sketched(topology, "internode: {connect: {0: [1]}}")
    node_of, wanted = topology.node_of(), {"allgather": (0, 1), "reducescatter": (1, 0)}
    for name, (sender, receiver) in wanted.items():
        answer = synthesise(
            Request(topology, name, 10**5, restrictions, engine="greedy", partition=1, time_limit_s=2.0)
        )
        across = [m for m in answer.messages if node_of[m.src] != node_of[m.dst]]
        assert {(m.src % 8, m.dst % 8) for m in across} == {(sender, receiver)}


@pytest.mark.parametrize("engine", ["auto", "ring"])
def test_an_authors_extra_hops_hold_for_every_engine(engine: str) -> None:
    topology = load_topology("fat-tree:1x4")
    request = Request(
        topology, "allgather", 10**6, sketched(topology, "extra_hops: 0"), engine=engine, time_limit_s=2.0
    )
    if engine == "ring":
        with pytest.raises(Infeasible, match="no schedule that obeys the sketch"):
            synthesise(request)
        return
    answer = synthesise(request)
    proved(answer, topology)
    assert all(c // (len(answer.collective.chunks) // 4) == m.src for m in answer.messages for c in m.chunks)


def test_the_shortest_way_is_that_which_relays_leave() -> None:
    """Chunk 4 to rank 9 leaves over rank 5, four hops; over rank 0, which does not take it, it would be two."""
    topology = load_topology("ndv2:2")
    text = "internode:\n  connect: {0: [1], 5: [4]}\n  relays: {0: [0, 1, 2, 3], 5: [4, 5, 6, 7]}\n"
    stated = problem(topology, build("alltoall", 16), 10**6, sketched(topology, text))
    assert unreachable(stated) == []


def test_an_exchange_is_not_optimal_because_no_tree_is_quicker() -> None:
    """Messages cost alpha alone, so that an allreduce by exchanges is below all that trees can do."""
    links = tuple(
        Link(a, b, Fraction(1), Fraction(1), Fraction(0))
        for a in range(4)
        for b in ((a + 1) % 4, (a - 1) % 4)
    )
    topology = Topology("alphas", (tuple(range(4)),), links)
    found = synthesise(Request(topology, "allreduce", 1000, time_limit_s=4.0))
    proved(found, topology)
    if us(found.time_fs) > found.certificate.lower_bound_us * 1.0005:
        assert found.certificate.status == "feasible"
