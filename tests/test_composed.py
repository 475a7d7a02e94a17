"""Schedules composed of nodes: right by the independent judges, never below the bound, and all that was promised."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from irregular_clusters import SLOW, irregular, small_clusters

from taccl.errors import UsageError
from taccl.profiles.link_table import link_table
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.at_scale import at_scale, synthesise_at_scale
from taccl.synth.bounds.compose import counting_bound, lower_bound
from taccl.synth.bounds.scale import scale_bound
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.check_table import check_table
from taccl.synth.cluster.compose import COLLECTIVES, Composed, compose
from taccl.synth.cluster.dispatch import dispatch
from taccl.synth.cluster.in_order import in_order
from taccl.synth.cluster.machine import cluster
from taccl.synth.cluster.timetable import free_plan, timetables
from taccl.synth.collective import build
from taccl.synth.composed import composed_alone, synthesise_composed
from taccl.synth.message_table import messages_of
from taccl.synth.places import Places
from taccl.synth.request import Request
from taccl.synth.symmetric.expand import batches, link_lookup
from taccl.synth.symmetric.group import trivial_group
from taccl.synth.symmetric.prices import prices
from taccl.synth.symmetric.search import Task

NAMED = tuple(name for name in COLLECTIVES if name != "alltoallv")


def _all(
    topology: Topology, collective: str, chunk_bytes: int, partition: int, batching: bool
) -> list[Composed]:
    task = Task(
        topology, link_table(topology), collective, partition, Fraction(chunk_bytes), batching=batching
    )
    return list(compose(task, 0, lambda: False))


@settings(max_examples=16, deadline=None)
@given(
    topology=small_clusters(),
    collective=st.sampled_from(NAMED),
    chunk_bytes=st.sampled_from([100, 20_000, 1_000_000]),
    partition=st.integers(1, 2),
    batching=st.booleans(),
)
def test_every_composed_schedule_is_right_and_not_below_the_bound(
    topology: Topology, collective: str, chunk_bytes: int, partition: int, batching: bool
) -> None:
    n = topology.ranks
    size = n * partition * chunk_bytes
    links = link_table(topology)
    found = _all(topology, collective, chunk_bytes, partition, batching)
    assert found
    times = [one.time_fs for one in found]
    assert times == sorted(times, reverse=True)
    grain = "whole" if batching else "single"
    bound = scale_bound(topology, links, collective, partition, size, grain)
    assert bound.time_fs <= times[-1]
    assert lower_bound(topology, build(collective, n, partition), size).time_fs <= times[-1]
    for one in found:
        if not batching:
            assert len(one.messages.chunks) == len(one.messages)
        places = Places(collective, n, partition)
        assert check_table(topology, links, places, size, [one.messages], one.time_fs) == []
    last = found[-1]
    algorithm = Algorithm(
        "composed", build(collective, n, partition), topology.name, size, messages_of(last.messages), last.time_fs,
        Certificate(0.0, "", 0.0, "feasible", ""), last.engine,
    )  # fmt: skip
    assert check_algorithm(algorithm, topology) == []


@settings(max_examples=12, deadline=None)
@given(topology=small_clusters(), data=st.data(), batching=st.booleans())
def test_alltoallv_with_any_counts(topology: Topology, data: st.DataObject, batching: bool) -> None:
    n = topology.ranks
    counts = st.lists(st.integers(0, 6), min_size=n, max_size=n)
    demand = data.draw(st.lists(counts, min_size=n, max_size=n))
    collective = build("alltoallv", n, 1, demand=demand)
    size = collective.size_chunks * 50_000
    ends = tuple((s, d) for s in range(n) for d in range(n) if demand[s][d])
    amounts = tuple(demand[s][d] for s, d in ends)
    task = Task(
        topology, link_table(topology), "alltoallv", 1, collective.chunk_bytes(size), pairs=ends, amounts=amounts,
        batching=batching,
    )  # fmt: skip
    found = list(compose(task, 0, lambda: False))
    if not any(s != d for s, d in ends):
        assert all(one.time_fs == 0 for one in found)
        return
    bound = counting_bound(topology, collective, size, "whole" if batching else "single")
    assert bound is not None
    assert lower_bound(topology, collective, size).time_fs <= found[-1].time_fs
    assert bound.time_fs <= found[-1].time_fs
    for one in found:
        algorithm = Algorithm(
            "composed", collective, topology.name, size, messages_of(one.messages), one.time_fs,
            Certificate(0.0, "", 0.0, "feasible", ""), one.engine,
        )  # fmt: skip
        assert check_algorithm(algorithm, topology) == []


def _slow_nic(nodes: int, size: int, rails: bool = False) -> Topology:
    betas = [[Fraction(40)] * size for _ in range(nodes)]
    betas[0][0] = Fraction(80)
    return irregular([size] * nodes, betas, rails=rails)


@pytest.mark.parametrize(
    ("collective", "nodes"), [("allgather", 32), ("reducescatter", 12), ("allreduce", 12), ("alltoall", 12)]
)
def test_a_slow_nic_is_certified_within_a_few_percent(collective: str, nodes: int) -> None:
    topology = _slow_nic(nodes, 8, rails=True)
    request = Request(topology, collective, topology.ranks * 10**6, partition=1, batching=False)
    assert at_scale(request)
    found = synthesise_at_scale(request)  # which has checked every message
    assert found.engine == "composed"
    certificate = found.certificate
    # Of a ring or of trees that spare no NIC the slow one alone would take twice as long.
    most = 1.35 if collective == "allreduce" else 1.1
    assert found.time_fs / 10**9 <= most * certificate.solver_bound_us


def test_the_same_request_gives_the_same_messages() -> None:
    request = Request(_slow_nic(9, 4), "alltoall", 36 * 10**5, partition=1)
    found, again = synthesise_at_scale(request), synthesise_at_scale(request)
    assert np.array_equal(found.messages.start_fs, again.messages.start_fs)
    assert np.array_equal(found.messages.link, again.messages.link)
    assert np.array_equal(found.messages.chunks, again.messages.chunks)


def test_short_blocks_of_an_irregular_cluster_share_messages() -> None:
    topology = _slow_nic(12, 4)
    alone = _all(topology, "alltoall", 1000, 1, False)[-1]
    shared = _all(topology, "alltoall", 1000, 1, True)[-1]
    assert shared.engine == "bundled"
    assert 2 * shared.time_fs < alone.time_fs


def test_skewed_counts_leave_the_nic_of_the_hot_rank() -> None:
    """Where one rank is sent most, its node's other NICs take a part: the hot NIC alone would take far longer."""
    topology = irregular([4] * 10, [[Fraction(40)] * 4] * 10)
    n = topology.ranks
    demand = [[0 if s == d else 16 if d == 5 else 1 for d in range(n)] for s in range(n)]
    request = Request(
        topology, "alltoallv", (n - 1) * 16 * 10**6, demand=tuple(map(tuple, demand)), batching=False
    )
    assert composed_alone(request)
    found = synthesise_composed(request)
    hot_alone_us = 36 * 16 * 42.0
    assert found.time_fs / 10**9 < 0.5 * hot_alone_us
    assert found.time_fs / 10**9 < 1.1 * found.certificate.solver_bound_us
    with pytest.raises(UsageError, match="scale the demand down"):
        synthesise_composed(Request(topology, "alltoallv", 10**6, demand=((10**4,) * n,) * n))


def test_the_greedy_engine_goes_without_composition() -> None:
    topology = _slow_nic(9, 4)
    found = synthesise_at_scale(
        Request(topology, "allgather", 36 * 10**5, engine="greedy", partition=1, time_limit_s=0.01)
    )
    assert found.engine in ("greedy", "batched")


def _without_links_in_nodes() -> Topology:
    """Three nodes of twelve ranks of unequal rates, whose ranks reach each other over other nodes alone."""
    sizes = (12, 12, 12)
    betas = [[SLOW * Fraction(100 + 12 * node + place, 100) for place in range(12)] for node in range(3)]
    apart = frozenset(
        (a, b)
        for node in range(3)
        for a in range(12 * node, 12 * node + 12)
        for b in range(12 * node, 12 * node + 12)
    )
    return irregular(sizes, betas, apart)


@pytest.mark.parametrize("collective", ["allgather", "alltoall"])
def test_nodes_that_cannot_be_composed_are_searched_as_one_machine(collective: str) -> None:
    topology = _without_links_in_nodes()
    request = Request(topology, collective, 36 * 10**5, engine="cp-sat", partition=1, batching=False)
    assert at_scale(request)
    assert _all(topology, collective, 10**5, 1, False) == []
    found = synthesise_at_scale(request)  # which has checked every message
    assert found.time_fs / 10**9 < 2 * found.certificate.solver_bound_us


def test_what_is_not_found_is_not_called_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taccl.synth.at_scale.MOST_BOTH_RANKS", 0)
    request = Request(_without_links_in_nodes(), "alltoall", 36 * 10**5, engine="cp-sat", partition=1)
    with pytest.raises(UsageError, match="36 of them are unlike"):
        synthesise_at_scale(request)


def test_lockstep_keeps_the_order_of_every_port_and_dispatch_what_it_books() -> None:
    topology = _slow_nic(6, 4)
    links = link_table(topology)
    machine = cluster(topology, links, prices(topology, links, Fraction(10**6)))
    assert machine is not None
    rows = machine.gates[machine.gates >= 0]
    link = np.random.default_rng(0).permutation(np.repeat(rows, 3))
    one = np.ones_like(link)
    starts = in_order(machine.lanes, link, one)
    held, ends = machine.lanes.resource[link], starts[:, None] + machine.lanes.holds(link)
    for resource in np.unique(held[held != machine.lanes.none]).tolist():
        users, column = np.nonzero(held == resource)
        assert (starts[users][1:] >= ends[users, column][:-1]).all()
    # No message could start earlier: each begins when one that it waits for ends, or at once.
    assert set(starts.tolist()) <= {0, *ends.ravel().tolist()}
    several = list(timetables(machine.lanes, link, one, links.dst))
    booked = [when for when in several if when.booked.any()]
    assert booked
    for when in booked:
        order = np.argsort(when.due_fs, kind="stable")
        table = free_plan(link[order], one)
        around = replace(table, release_fs=when.release_fs[order], booked=when.booked[order])
        held_free = dispatch(machine.lanes, around, links.dst)
        kept = when.booked[order]
        assert (held_free.start_fs[kept] == when.release_fs[order][kept]).all()


def test_the_whole_schedule_comes_in_parts_that_hold_all_of_their_chunks() -> None:
    topology = _slow_nic(5, 3)
    table = _all(topology, "alltoall", 10**5, 1, False)[-1].messages
    n = topology.ranks
    lookup = link_lookup(link_table(topology), n)
    parts = list(batches(table, trivial_group(n), "alltoall", n, 1, lookup, most=40))
    assert len(parts) > 3
    seen: set[int] = set()
    for part in parts:
        mine = set(part.chunks.tolist())
        assert not mine & seen
        seen |= mine
    assert sum(map(len, parts)) == len(table)
    assert seen == set(table.chunks.tolist())
