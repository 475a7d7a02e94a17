"""Coding plans: clocks that keep every rule, choices that no subset beats, bounds below all, files that say so."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.errors import UsageError
from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.candidates import best_timing
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.coding import search
from taccl.synth.coding.bound import coded_bound
from taccl.synth.coding.check import check_plan
from taccl.synth.coding.choose import Choice, Effort, by_links, chosen, cut_finer, polished
from taccl.synth.coding.clock import DECODE, ENCODE, MESSAGE, REDUCE
from taccl.synth.coding.flow import passed_on
from taccl.synth.coding.node_sums import _shares, node_sums
from taccl.synth.coding.search import codecs_for, with_codec
from taccl.synth.collective import build
from taccl.synth.cost import costs, us
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.native import read_native, write_native
from taccl.synth.request import Request
from taccl.synth.schedule import Transfer, completion_fs, time_by_priority
from taccl.synth.synthesise import synthesise

LOSSY = CodecCost(
    "q8", "float32", False, Fraction(4), 100, Fraction(3), Fraction(20), Fraction(2), Fraction(10)
)
EXACT = replace(LOSSY, codec="xw", lossless=True, ratio=Fraction(3, 2))
SIZE = 10**6


def hosts(nodes: int, ranks: int, slow: int = 1) -> Topology:
    """Hosts with a quick wire inside and one slow card each; that of the last is `slow` times slower."""
    count = nodes * ranks
    ports = [
        Port(f"n{n}.{way}", Fraction(1000 * (slow if n == nodes - 1 else 1)), "nic")
        for n in range(nodes)
        for way in ("out", "in")
    ]
    links = []
    for a in range(count):
        for b in range(count):
            if a != b and a // ranks == b // ranks:
                links.append(Link(a, b, Fraction(1), Fraction(10), Fraction(1), ()))
            elif a != b:
                cards = (2 * (a // ranks), 2 * (b // ranks) + 1)
                links.append(Link(a, b, Fraction(20), Fraction(1000), Fraction(5), cards))
    members = tuple(tuple(range(n * ranks, (n + 1) * ranks)) for n in range(nodes))
    return Topology("hosts", members, tuple(links), tuple(ports), codecs=(LOSSY, EXACT))


def scheduled(topology: Topology, name: str, engine: str, partition: int = 1) -> Algorithm:
    collective = build(name, topology.ranks, partition)
    priced = costs(topology, collective.chunk_bytes(SIZE))
    found = best_timing(engine, topology, collective, priced, BASELINES[engine](topology, collective))
    assert found is not None
    return found.algorithm(topology, SIZE)


def timeline_problems(choice: Choice, topology: Topology) -> list[str]:
    """A second reading of the rules, from the activities alone."""
    a, coded = choice.algorithm, set(choice.coded)
    plain, framed = costs(topology, a.chunk_bytes), choice.prices.framed
    held: dict[tuple[str, int], list[tuple[int, int]]] = {}
    sent = {x.message: x for x in choice.activities if x.kind == MESSAGE}
    decoded: dict[tuple[int, int], list[int]] = {}
    reduced = {x.message: x.end_fs for x in choice.activities if x.kind == REDUCE}
    encoded: dict[int, list[int]] = {}
    for x in choice.activities:
        if x.kind == MESSAGE:
            m, priced = a.messages[x.message], framed if x.message in coded else plain
            for resource, each in priced.holds[m.link]:
                until = x.start_fs + priced.hold(m.link, each, len(m.chunks))
                held.setdefault(("link", resource), []).append((x.start_fs, until))
        elif x.kind in (ENCODE, DECODE):
            held.setdefault(("codec", x.rank), []).append((x.start_fs, x.end_fs))
            if x.kind == ENCODE:
                encoded.setdefault(x.rank, []).append(x.end_fs)
            else:
                decoded.setdefault((x.message, x.rank), []).append(x.end_fs)
        else:
            held.setdefault(("adder", x.rank), []).append((x.start_fs, x.end_fs))
    problems = []
    for key, spans in held.items():
        spans.sort()
        problems += [f"{key} twice at {b[0]}" for a_, b in pairwise(spans) if b[0] < a_[1]]
    for i, x in sent.items():
        m = a.messages[i]
        for supply in choice.flow.supplies[i]:
            frame = passed_on(a, supply) in coded
            for s in supply:
                there = reduced.get(s, sent[s].end_fs)
                if s in coded and not (i in coded and frame):
                    there = max([there, *decoded[s, m.src]])  # its values are sent, added or coded anew
                if x.start_fs < there:
                    problems.append(f"message {i} leaves before its data came with {s}")
            if i in coded and not frame and not any(end <= x.start_fs for end in encoded.get(m.src, [])):
                problems.append(f"message {i} leaves before it is coded")
        if i in coded and choice.flow.keeps[i] and (i, m.dst) not in decoded:
            problems.append(f"message {i} is never decoded")
    return problems


CASES = [
    (name, engine)
    for name in ("broadcast", "allgather", "alltoall", "reducescatter", "allreduce", "reduce")
    for engine in ("ring", "direct", "recursive-doubling", "hierarchical", "chain")
]


@settings(max_examples=20, deadline=None)
@given(case=st.sampled_from(CASES), lossy=st.booleans(), slow=st.sampled_from([1, 4]), data=st.data())
def test_clocks_keep_every_rule_and_stay_above_the_bound(
    case: tuple[str, str], lossy: bool, slow: int, data: st.DataObject
) -> None:
    topology, cost = hosts(2, 2, slow), LOSSY if lossy else EXACT
    try:
        algorithm = scheduled(topology, case[0], case[1])
    except Inapplicable:
        return
    wished = data.draw(st.sets(st.integers(0, len(algorithm.messages) - 1)))
    choice = chosen(algorithm, topology, cost, wished)
    assert choice is not None
    assert set(choice.coded) <= wished
    assert timeline_problems(choice, topology) == []
    bound = coded_bound(topology, algorithm.collective, SIZE, cost)
    assert bound.time_fs <= choice.time_fs
    if not lossy:
        assert set(choice.coded) == wished


@settings(max_examples=20, deadline=None)
@given(case=st.sampled_from(CASES), data=st.data())
def test_a_lossy_codec_codes_what_reaches_a_rank_once(case: tuple[str, str], data: st.DataObject) -> None:
    topology = hosts(2, 2)
    try:
        algorithm = scheduled(topology, case[0], case[1])
    except Inapplicable:
        return
    wished = data.draw(st.sets(st.integers(0, len(algorithm.messages) - 1)))
    choice = chosen(algorithm, topology, LOSSY, wished)
    assert choice is not None
    coded = set(choice.coded)

    def codings(i: int, results: bool) -> int:
        """The most codings on the way to a message's data; results: those of finished sums."""
        most = 0
        for supply in choice.flow.supplies[i]:
            before = max((codings(s, results) for s in supply), default=0)
            frame = passed_on(algorithm, supply) in coded
            finished = algorithm.collective.combining and choice.flow.complete[i]
            most = max(most, before + (i in coded and not frame and finished == results))
        return most

    for i in range(len(algorithm.messages)):
        assert codings(i, True) <= 1
        assert codings(i, False) <= 1


def test_a_schedule_without_coded_messages_keeps_its_time() -> None:
    topology = hosts(2, 4)
    for name, engine in (("allgather", "ring"), ("alltoall", "direct"), ("reducescatter", "ring")):
        algorithm = scheduled(topology, name, engine)
        choice = chosen(algorithm, topology, LOSSY, ())
        assert choice is not None
        assert choice.time_fs == algorithm.time_fs


@pytest.mark.parametrize("cost", [LOSSY, EXACT])
@pytest.mark.parametrize("name", ["broadcast", "allgather", "reduce"])
def test_no_subset_of_messages_beats_the_choice(name: str, cost: CodecCost) -> None:
    topology = hosts(2, 2, 3)
    algorithm = scheduled(topology, name, "chain" if name == "broadcast" else "direct", 1)
    messages = range(len(algorithm.messages))
    subsets = [s for count in range(min(len(messages), 8) + 1) for s in combinations(messages, count)]
    best = min(
        choice.time_fs for s in subsets if (choice := chosen(algorithm, topology, cost, s)) is not None
    )
    every = range(len(topology.links))
    start = by_links(algorithm, topology, cost, every)
    assert start is not None
    found = polished(start, topology, every, Effort(20_000, 1.0), 0, lambda: False)
    assert found.time_fs <= best
    assert timeline_problems(found, topology) == []


def test_only_the_links_that_are_allowed_are_coded() -> None:
    topology = hosts(2, 2)
    algorithm = scheduled(topology, "alltoall", "direct")
    some = {e for e, link in enumerate(topology.links) if link.src == 0}
    start = by_links(algorithm, topology, EXACT, some)
    assert start is not None
    found = polished(start, topology, some, Effort(20_000, 0.5), 0, lambda: False)
    assert {algorithm.messages[i].link for i in found.coded} <= some
    assert found.coded


@settings(max_examples=20, deadline=None)
@given(slowness=st.lists(st.integers(1, 20), min_size=3, max_size=6), data=st.data())
def test_owners_are_shared_out_so_that_the_slowest_node_is_as_quick_as_can_be(
    slowness: list[int], data: st.DataObject
) -> None:
    count = len(slowness)
    shares = _shares([Fraction(s) for s in slowness])
    assert sum(shares) == 1
    assert min(shares) >= 0

    def slowest(owned: list[Fraction]) -> Fraction:
        return max((1 + (count - 2) * w) * s for w, s in zip(owned, slowness, strict=True))

    weights = data.draw(st.lists(st.integers(0, 10), min_size=count, max_size=count).filter(any))
    assert slowest(shares) <= slowest([Fraction(w, sum(weights)) for w in weights])


@pytest.mark.parametrize("name", ["allreduce", "reducescatter", "reduce"])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (3, 2), (4, 3)])
def test_sums_of_nodes_are_right_and_every_crossing_may_be_coded(name: str, nodes: int, ranks: int) -> None:
    topology = hosts(nodes, ranks, 4)
    collective = build(name, topology.ranks, 2)
    transfers = node_sums(topology, collective)
    assert transfers is not None
    priced = costs(topology, collective.chunk_bytes(SIZE))
    messages = time_by_priority(topology, collective, priced, transfers)
    algorithm = Algorithm(
        "sums", collective, topology.name, SIZE, messages, completion_fs(priced, messages),
        Certificate(0.0, "", 0.0, "feasible"), "node-sums",
    )  # fmt: skip
    assert check_algorithm(algorithm, topology) == []
    node_of = topology.node_of()
    across = [i for i, m in enumerate(messages) if node_of[m.src] != node_of[m.dst]]
    choice = chosen(algorithm, topology, LOSSY, across)
    assert choice is not None
    assert choice.coded == tuple(across)
    assert timeline_problems(choice, topology) == []


@pytest.mark.parametrize("name", ["broadcast", "allgather", "alltoall", "allreduce"])
def test_the_answer_is_better_than_without_and_its_file_says_so(name: str) -> None:
    topology = hosts(3, 2, 4)
    request = Request(topology, name, SIZE, time_limit_s=2.0)
    uncoded = synthesise(request)
    found = with_codec(request, uncoded, uncoded.time_fs, (LOSSY,), lambda: False)
    assert found is not None
    plan = found.coding
    assert plan is not None
    assert plan.time_fs < 0.5 * uncoded.time_fs
    assert plan.lower_bound_us <= us(plan.time_fs)
    assert check_algorithm(found, topology) == []
    assert check_plan(found, topology) == []
    again, cluster = read_native(write_native(found, topology))
    assert again == found
    assert cluster.codecs == topology.codecs
    wrong = replace(found, coding=replace(plan, time_fs=plan.time_fs - 1))
    assert "order gives" in check_plan(wrong, topology)[0]
    wrong = replace(found, coding=replace(plan, lower_bound_us=2 * plan.lower_bound_us))
    assert "is proved" in check_plan(wrong, topology)[0]


def test_where_coding_takes_longer_than_the_wire_nothing_is_coded() -> None:
    slow = replace(LOSSY, encode_beta_us_per_mb=Fraction(10**5))
    topology = hosts(2, 2)
    request = Request(topology, "allgather", SIZE, time_limit_s=1.0, engine="ring")
    uncoded = synthesise(request)
    assert with_codec(request, uncoded, uncoded.time_fs, (slow,), lambda: False) is None


def test_when_the_time_is_up_the_best_plan_so_far_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> None:
        raise AssertionError("a search of routes began after the end")

    topology = hosts(3, 2, 4)
    request = Request(topology, "allgather", SIZE, time_limit_s=2.0)
    uncoded = synthesise(request)
    monkeypatch.setattr(search, "synthesise", late)
    found = with_codec(request, uncoded, uncoded.time_fs, (LOSSY,), lambda: False, 0.0)
    assert found is not None and found.coding is not None
    assert found.coding.time_fs < uncoded.time_fs
    assert check_plan(found, topology) == []


def test_a_long_schedule_is_coded_when_routes_have_been_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """To code it takes all the time, and other routes are what is missing then; where none are found, it is coded."""
    topology = hosts(3, 2, 4)
    request = Request(topology, "allgather", SIZE, time_limit_s=2.0)
    uncoded = synthesise(request)
    tried: list[str] = []

    def spied(algorithm: Algorithm, *rest: object) -> Choice | None:
        tried.append("at hand" if algorithm is uncoded else "routes")
        return by_links(algorithm, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "by_links", spied)
    with_codec(request, uncoded, uncoded.time_fs, (LOSSY,), lambda: False, 600.0)
    assert tried[0] == "at hand" and "routes" in tried
    monkeypatch.setattr(search, "LONG", 0)
    tried.clear()
    with_codec(request, uncoded, uncoded.time_fs, (LOSSY,), lambda: False, 600.0)
    assert tried[0] == "routes" and "at hand" in tried
    tried.clear()
    found = with_codec(request, uncoded, uncoded.time_fs, (LOSSY,), lambda: False, 0.0)
    assert tried == ["at hand"] and found is not None and check_plan(found, topology) == []


@pytest.mark.parametrize("load_us", [0, 500])
def test_plans_are_judged_with_what_their_messages_add(load_us: int) -> None:
    topology = replace(hosts(3, 2, 4), load_us=Fraction(load_us))
    request = Request(topology, "allgather", SIZE, time_limit_s=2.0)
    uncoded = synthesise(request)
    found = with_codec(request, uncoded, uncoded.time_fs, (LOSSY,), lambda: False)
    if found is None:
        assert load_us  # without load this gains
        return
    assert found.coding is not None
    added = load_us * (len(found.messages) - len(uncoded.messages))
    assert us(found.coding.time_fs) + added < us(uncoded.time_fs)


def test_a_plan_of_one_connection_a_port_is_preferred_as_long_as_it_is_not_much_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Coded messages take no turns, so those of several connections of a card disturb each other."""
    topology = hosts(6, 2)
    request = Request(topology, "broadcast", SIZE // 20, time_limit_s=2.0)
    uncoded = few_rounds(topology, request.size_bytes)
    assert search.shares_ports(uncoded, topology)
    times = []
    for behind, shared in ((1.0, True), (100.0, False)):
        monkeypatch.setattr(search, "SHARED", behind)
        found = with_codec(request, uncoded, 10 * uncoded.time_fs, (LOSSY,), lambda: False)
        assert found is not None and found.coding is not None and check_plan(found, topology) == []
        assert search.shares_ports(found, topology) == shared
        times.append(found.coding.time_fs)
    assert times[0] < times[1]
    assert not search.shares_ports(uncoded, replace(topology, links=tuple(
        replace(link, ports=()) for link in topology.links
    )))  # fmt: skip


def few_rounds(topology: Topology, size: int) -> Algorithm:
    """A broadcast in as few rounds as can be."""
    collective = build("broadcast", topology.ranks)
    priced = costs(topology, collective.chunk_bytes(size))
    engine = BASELINES["recursive-doubling"]
    found = best_timing("recursive-doubling", topology, collective, priced, engine(topology, collective))
    assert found is not None
    return found.algorithm(topology, size)


def test_policies() -> None:
    topology = hosts(2, 2)
    assert codecs_for(topology, "auto", "float32") == (EXACT,)
    assert codecs_for(topology, "none", "float32") == ()
    assert codecs_for(topology, "q8", "float32") == (LOSSY,)
    assert codecs_for(topology, "auto", "bfloat16") == ()
    with pytest.raises(
        UsageError, match=r"says nothing of what it costs.* --codecs q8 --dtype bfloat16 measures"
    ):
        codecs_for(topology, "q8", "bfloat16")


def test_a_plan_that_codes_sums_again_is_refused() -> None:
    topology = hosts(2, 2)
    algorithm = scheduled(topology, "reducescatter", "ring")
    every = tuple(range(len(algorithm.messages)))
    choice = chosen(algorithm, topology, LOSSY, every)
    assert choice is not None
    plan = choice.planned().coding
    assert plan is not None
    assert plan.messages != every
    wrong = replace(algorithm, coding=replace(plan, messages=every))
    assert "again" in check_plan(wrong, topology)[0]


def test_chunks_are_cut_finer_where_coding_and_sending_overlap_better() -> None:
    topology = hosts(2, 1)
    collective = build("broadcast", 2)
    priced = costs(topology, collective.chunk_bytes(SIZE))
    link = next(e for e, x in enumerate(topology.links) if x.src == 0)
    messages = time_by_priority(topology, collective, priced, [Transfer(link, (0,))])
    whole = Algorithm(
        "one", collective, topology.name, SIZE, messages, completion_fs(priced, messages),
        Certificate(0.0, "", 0.0, "feasible"), "direct",
    )  # fmt: skip
    dear = replace(LOSSY, encode_beta_us_per_mb=Fraction(200), decode_beta_us_per_mb=Fraction(200))
    coarse = by_links(whole, topology, dear, [link])
    assert coarse is not None
    fine = cut_finer(coarse, topology, [link], lambda: False)
    assert fine.algorithm.collective.partition > 1
    assert fine.time_fs < coarse.time_fs
    assert check_algorithm(fine.algorithm, topology) == []
