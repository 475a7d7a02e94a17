"""The list schedulers: exact times, no resource held twice, order kept, batching."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.collective import Collective, build
from taccl.synth.cost import Costs, costs
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.schedule import (
    Transfer,
    Unordered,
    coalesced,
    completion_fs,
    predecessors,
    time_batched,
    time_by_priority,
    time_in_order,
)

US = 10**9


def two_links(occupancy: Fraction) -> Topology:
    """Rank 0 sends to 1 and 2 through one port of 2 us/MB; each link takes 1 us and 4 us/MB."""
    links = tuple(Link(0, dst, Fraction(1), Fraction(4), occupancy, (0,)) for dst in (1, 2))
    return Topology("fork", ((0, 1, 2),), links, (Port("out", Fraction(2)),))


@pytest.mark.parametrize(("occupancy", "second_start"), [(Fraction(1), 3), (Fraction(0), 2)])
def test_a_shared_port_is_held_for_occupancy_and_its_own_beta(occupancy: Fraction, second_start: int) -> None:
    topology = two_links(occupancy)
    collective = build("broadcast", 3)
    priced = costs(topology, Fraction(10**6))
    first, second = time_in_order(topology, collective, priced, [Transfer(0, (0,)), Transfer(1, (0,))])
    assert (first.start_fs, first.end_fs) == (0, 5 * US)
    assert (second.start_fs, second.end_fs) == (second_start * US, (second_start + 5) * US)


def test_alpha_is_paid_once_for_a_batch() -> None:
    topology = two_links(Fraction(1))
    collective = build("broadcast", 3, 2)
    priced = costs(topology, Fraction(10**6))
    transfers = [Transfer(0, (0,)), Transfer(0, (1,))]
    (message,) = time_batched(topology, collective, priced, transfers)
    assert message.chunks == (0, 1)
    assert message.end_fs == 9 * US
    assert time_by_priority(topology, collective, priced, transfers)[-1].end_fs == 10 * US


def test_reductions_on_a_rank_run_one_after_another() -> None:
    links = tuple(Link(src, 2, Fraction(1), Fraction(1), Fraction(1)) for src in (0, 1))
    topology = Topology("fan-in", ((0, 1, 2),), links, reduce_alpha_us=Fraction(3))
    collective = build("reduce", 3, root=2)
    priced = costs(topology, Fraction(10**6))
    messages = time_in_order(
        topology, collective, priced, [Transfer(0, (0,), "reduce"), Transfer(1, (0,), "reduce")]
    )
    assert [m.end_fs for m in messages] == [2 * US, 2 * US]
    assert completion_fs(priced, messages) == 8 * US


def test_data_that_never_arrived_is_refused() -> None:
    topology = load_topology("ring:4")
    collective = build("broadcast", 4)
    away = next(e for e, link in enumerate(topology.links) if link.src == 2)
    with pytest.raises(Unordered):
        time_in_order(topology, collective, costs(topology, Fraction(1)), [Transfer(away, (0,))])


def test_coalescing_waits_for_the_last_chunk_and_refuses_circles() -> None:
    topology = load_topology("ring:4")
    to = {(link.src, link.dst): e for e, link in enumerate(topology.links)}
    collective = build("allgather", 4)
    chain = [Transfer(to[0, 1], (0,)), Transfer(to[1, 2], (1,)), Transfer(to[1, 2], (0,))]
    merged = coalesced(topology, collective, chain, {to[1, 2]})
    assert merged == [Transfer(to[0, 1], (0,)), Transfer(to[1, 2], (0, 1))]
    # 1->2 carries what came over 2->1's batch and the other way round: neither could go first.
    circle = [
        Transfer(to[1, 2], (1,)),
        Transfer(to[2, 1], (2,)),
        Transfer(to[2, 1], (1,)),
        Transfer(to[1, 2], (2,)),
    ]
    assert coalesced(topology, collective, circle, {to[1, 2], to[2, 1]}) is None


@settings(deadline=None, max_examples=40)
@given(
    spec=st.sampled_from(["ring:5", "mesh2d:2x3", "ndv2:1", "dgx-a100:1", "hypercube:3"]),
    name=st.sampled_from(["allgather", "alltoall", "allreduce", "broadcast", "reducescatter", "gather"]),
    engine=st.sampled_from(["ring", "direct", "hierarchical", "double-binary-tree"]),
    partition=st.integers(1, 3),
    size=st.sampled_from([1, 1000, 10**6 + 7]),
)
def test_no_resource_is_ever_held_twice(spec: str, name: str, engine: str, partition: int, size: int) -> None:
    topology = load_topology(spec)
    collective = build(name, topology.ranks, partition)
    priced = costs(topology, collective.chunk_bytes(size))
    try:
        transfers = BASELINES[engine](topology, collective)
    except Inapplicable:
        return
    for scheduler in (time_in_order, time_by_priority, time_batched):
        held: dict[int, list[tuple[int, int]]] = {}
        for m in scheduler(topology, collective, priced, transfers):
            assert m.end_fs == m.start_fs + priced.transit(m.link, len(m.chunks))
            for resource, per_chunk in priced.holds[m.link]:
                span = (m.start_fs, m.start_fs + priced.hold(m.link, per_chunk, len(m.chunks)))
                held.setdefault(resource, []).append(span)
        for spans in held.values():
            spans.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(spans))


@settings(deadline=None, max_examples=40)
@given(
    spec=st.sampled_from(["ring:5", "mesh2d:2x3", "ndv2:1", "hypercube:3"]),
    name=st.sampled_from(["allgather", "alltoall", "broadcast", "gather"]),
    engine=st.sampled_from(["ring", "direct", "double-binary-tree"]),
    partition=st.integers(1, 2),
    random=st.randoms(use_true_random=False),
)
def test_whenever_a_transfer_can_start_the_first_one_does(
    spec: str, name: str, engine: str, partition: int, random: Random
) -> None:
    topology = load_topology(spec)
    collective = build(name, topology.ranks, partition)
    priced = costs(topology, collective.chunk_bytes(1000))
    try:
        transfers = BASELINES[engine](topology, collective)
    except Inapplicable:
        return
    priority = list(range(len(transfers)))
    random.shuffle(priority)
    found = time_by_priority(topology, collective, priced, transfers, priority)
    assert [(m.start_fs, m.link, m.chunks) for m in found] == naively(
        topology, collective, priced, transfers, priority
    )


def naively(
    topology: Topology,
    collective: Collective,
    priced: Costs,
    transfers: Sequence[Transfer],
    priority: Sequence[int],
) -> list[tuple[int, int, tuple[int, ...]]]:
    """The same schedule, from its definition: at every instant all transfers are asked, in turn."""
    needs = predecessors(topology, collective, transfers)
    arrival: dict[int, int] = {}  # per transfer that has started
    free: dict[int, int] = {}
    starts = []
    now = 0
    while len(arrival) < len(transfers):
        for i in sorted(range(len(transfers)), key=lambda i: priority[i]):
            e, count = transfers[i].link, len(transfers[i].chunks)
            if i in arrival or any(arrival.get(n, now + 1) > now for n in needs[i]):
                continue
            if any(free.get(resource, 0) > now for resource, _ in priced.holds[e]):
                continue
            arrival[i] = now + priced.transit(e, count)
            free.update({resource: now + priced.hold(e, hold, count) for resource, hold in priced.holds[e]})
            starts.append((now, e, transfers[i].chunks))
        now = min(t for t in [*arrival.values(), *free.values(), 2**62] if t > now)
    return sorted(starts)
