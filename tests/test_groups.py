"""Groups of ranks that do one collective at the same time: what it is, bounds, schedules, programs, results."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from brute_force import Search, TooLarge
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_bounds_brute import random_topology

from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Topology
from taccl.runtime.local import run_in_process
from taccl.sketches.restrictions import Restrictions
from taccl.sketches.symmetry import closure, find_symmetry
from taccl.synth.bounds import granular_bound, lower_bound
from taccl.synth.candidates import best_timing
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import COMBINING, GROUPED, ROOTED, Collective, build, of_group, refined
from taccl.synth.cost import FS_PER_US, costs, us
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.engines.greedy import Taste, greedy
from taccl.synth.engines.groups import among_all, merged
from taccl.synth.forest.arborescence import cheapest
from taccl.synth.forest.members import along_ways, ways_between
from taccl.synth.lower import lower_exact
from taccl.synth.native import read_schedule, write_native
from taccl.synth.problem import problem, with_symmetry
from taccl.synth.request import Request
from taccl.synth.schedule import as_transfers
from taccl.synth.synthesise import synthesise
from taccl.synth.verify import verify

Groups = tuple[tuple[int, ...], ...]
MACHINES = ("ring:4", "ring:5", "mesh2d:2x3", "hypercube:2")


@st.composite
def divided(draw: st.DrawFn, ranks: int) -> Groups:
    """One group or more, of equal or unequal size, in any order; some ranks may be left out."""
    order = draw(st.permutations(range(ranks)))
    cuts = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    groups, begin = [], 0
    for size in cuts:
        if begin + size <= ranks:
            groups.append(tuple(order[begin : begin + size]))
            begin += size
    return tuple(groups)


def expected(name: str, collective: Collective, data: Sequence[Any]) -> list[Any]:
    """What every rank must have, by the definitions of the collectives and numpy alone; None: nothing is promised."""
    out: list[Any] = [None] * collective.ranks
    for group in collective.groups:
        mine, n, root = [data[rank] for rank in group], len(group), collective.root
        block = len(mine[root]) // n  # of scatter and reduce-scatter
        for place, rank in enumerate(group):
            own = slice(place * block, (place + 1) * block)
            if name == "allgather":
                out[rank] = np.concatenate(mine)
            elif name == "allreduce":
                out[rank] = sum(mine)
            elif name == "reducescatter":
                out[rank] = sum(mine)[own]
            elif name == "alltoall":
                out[rank] = np.concatenate([other.reshape(n, -1)[place] for other in mine])
            elif name == "broadcast":
                out[rank] = mine[root]
            elif name == "scatter":
                out[rank] = mine[root][own]
            elif place == root:
                out[rank] = sum(mine) if name == "reduce" else np.concatenate(mine)
    return out


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_each_group_gets_its_own_collective(data: st.DataObject) -> None:
    """A schedule of any engine, judged by the independent check, is no quicker than the bound; its program does what
    numpy says, whether groups are equal or not, and whoever relays."""
    topology = load_topology(data.draw(st.sampled_from(MACHINES)))
    name = data.draw(st.sampled_from(sorted(GROUPED)))
    groups = data.draw(divided(topology.ranks))
    root = data.draw(st.integers(0, min(map(len, groups)) - 1)) if name in ROOTED else 0
    collective = build(name, topology.ranks, data.draw(st.integers(1, 2)), root=root, groups=groups)
    collective.check()
    size = 10 ** data.draw(st.integers(3, 7))
    stated = problem(topology, collective, size, Restrictions())
    engine = data.draw(st.sampled_from(["greedy", *BASELINES]))
    try:
        transfers = (
            greedy(stated, Taste(1.0, True, 0))
            if engine == "greedy"
            else BASELINES[engine](topology, collective)
        )
    except Inapplicable:
        transfers = None
    assume(transfers is not None)
    assert transfers is not None
    found = best_timing(engine, topology, collective, stated.costs, transfers)
    assume(found is not None)
    assert found is not None
    algorithm = found.algorithm(topology, size)
    assume(engine == "greedy" or not check_algorithm(algorithm, topology))  # offers that synthesis refuses
    assert check_algorithm(algorithm, topology) == []
    bound = granular_bound(topology, collective, size)
    assert lower_bound(topology, collective, size).time_fs <= bound.time_fs <= algorithm.time_fs
    assert read_schedule(write_native(algorithm, topology), "x.json") == (algorithm, topology)
    program = lower_exact(algorithm, topology).program
    assert program.collective == "custom" and program.root == 0
    assert not [f for f in verify(program, collective=collective, strict=True) if f.severity == "error"]
    inputs = [
        np.array([100 * rank + x for x in range(2 * length)], np.int32)
        for rank, length in enumerate(collective.input_chunks)
    ]
    want = expected(name, collective, inputs)
    for inplace in (False, *([True] if program.inplace else [])):
        got = run_in_process(
            program, [array.copy() for array in inputs], collective=collective, inplace=inplace
        )
        for rank, array in enumerate(want):
            if array is not None:
                assert np.array_equal(got[rank], array), (rank, inplace)


@given(name=st.sampled_from(sorted(GROUPED)), data=st.data())
def test_a_group_of_all_ranks_in_order_is_the_collective_itself(name: str, data: st.DataObject) -> None:
    ranks, k = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    whole = build(name, ranks, k, groups=[range(ranks)])
    assert replace(whole, groups=()) == build(name, ranks, k)
    assert refined(whole, 2).groups == whole.groups
    refined(whole, 2).check()


@given(name=st.sampled_from(sorted(GROUPED)), data=st.data())
def test_a_group_taken_out_keeps_its_chunks(name: str, data: st.DataObject) -> None:
    groups = data.draw(divided(8))
    collective = build(name, 8, data.draw(st.integers(1, 3)), groups=groups)
    seen: list[int] = []
    for number, group in enumerate(groups):
        alone, chunks = of_group(collective, number)
        alone.check()
        assert [collective.chunks[c] for c in chunks] == list(alone.chunks)
        assert {rank for c in alone.chunks for rank, _ in (*c.sources, *c.destinations)} == set(group)
        assert alone.chunk_bytes(10**6) == collective.chunk_bytes(10**6)
        seen += chunks
    assert sorted(seen) == list(range(len(collective.chunks)))


@pytest.mark.parametrize("name", sorted(GROUPED))
def test_no_optimum_of_groups_is_below_a_bound(name: str) -> None:
    """True optima of two groups, or of one and an idle rank, by exhaustive search."""
    solved = tight = 0
    for seed in range(18):
        rng = random.Random(f"{name} in groups {seed}")
        topology = random_topology(rng, 5)
        order = rng.sample(range(topology.ranks), topology.ranks)
        if topology.ranks < 3:
            continue
        groups = [tuple(order[:2])]
        if topology.ranks > 3 and rng.random() < 0.8:
            groups.append(tuple(order[2:4]))
        collective = build(name, topology.ranks, groups=groups)
        if name == "allreduce":  # one chunk of each group, or the search would not end
            kept = tuple(c for c in collective.chunks if c.sources[0][1] == 0)
            lengths = tuple(min(1, length) for length in collective.input_chunks)
            collective = replace(
                collective, chunks=kept, input_chunks=lengths, output_chunks=lengths, size_chunks=1
            )
        size = collective.size_chunks * 10**6
        kept_whole = granular_bound(topology, collective, size)
        assert lower_bound(topology, collective, size).time_fs <= kept_whole.time_fs
        least = -(-kept_whole.time_fs // FS_PER_US)
        search = Search(topology, collective, 6000)
        try:
            assert least == 0 or not search.possible(least - 1), f"seed {seed}: {kept_whole.name} is beaten"
            tight += search.optimum(least) == least
            solved += 1
        except TooLarge:
            continue
    assert solved >= 6 and tight >= solved // 2


@pytest.mark.parametrize(
    ("name", "crossings"), [("allreduce", 16), ("allgather", 4), ("alltoall", 4), ("broadcast", 8)]
)
def test_bounds_add_up_what_groups_send_over_one_cable(name: str, crossings: int) -> None:
    """8 pairs share the one NIC of each node, which carries all their data: crossings = sizes over its two ports."""
    topology = load_topology("ndv2:2")
    pairs = [(rank, rank + 8) for rank in range(8)]
    size = 64 * 10**6
    alone = lower_bound(topology, build(name, 16, groups=pairs[:1]), size)
    together = lower_bound(topology, build(name, 16, groups=pairs), size)
    (port,) = {p.beta_us_per_mb for p in topology.ports if p.name == "node0.ib0.out"}
    data_us = float(port) * 64 * (crossings if name != "broadcast" else 8) / (2 if name == "allreduce" else 1)
    assert us(together.time_fs) == pytest.approx(data_us + 2.6, abs=0.2)
    assert together.time_fs > 7 * alone.time_fs - 10 * FS_PER_US


def test_many_ranks_alltoalls_of_groups_share_a_nodes_nics() -> None:
    """Each of 8 ranks of a node sends 7 of 8 MB over the node's 8 NICs of 40 us a MB; no linear program is solved."""
    collective = build("alltoall", 64, groups=[range(first, 64, 8) for first in range(8)])
    bound = lower_bound(load_topology("dgx-a100:8"), collective, 64_000_000)
    assert us(bound.time_fs) == pytest.approx(8 * 7 * 8 * 40 / 8 + 2.6)


def test_unequal_groups_have_chunks_of_one_length_and_the_same_size() -> None:
    collective = build("allgather", 6, 2, groups=[(0, 3), (5, 1, 2)])
    assert collective.size_chunks == 12 and collective.chunk_bytes(1200) == 100
    assert collective.input_chunks == (6, 4, 4, 6, 0, 4) and collective.output_chunks == (
        12,
        12,
        12,
        12,
        0,
        12,
    )
    assert collective.title == "allgather in 2 groups of 2 to 3" and collective.group_ranks == 3


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([], "no groups"),
        ([(0, 1), ()], "group 1 is nobody"),
        ([(0, 1), (2,)], "group 1 is rank 2 alone"),
        ([(0, 1), (1, 2)], "rank 1 is in group 0 and in group 1"),
        ([(0, 0, 1)], "rank 0 stands twice"),
        ([(0, 4)], "rank 4 does not exist"),
        ([(0, -1)], "rank -1 does not exist"),
    ],
)  # fmt: skip
def test_groups_that_are_none_are_refused(groups: list[tuple[int, ...]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build("allreduce", 4, groups=groups)


def test_roots_are_places_in_a_group_and_other_collectives_have_no_groups() -> None:
    collective = build("broadcast", 6, root=1, groups=[(0, 3), (5, 1, 2)])
    assert [chunk.sources[0][0] for chunk in collective.chunks] == [3, 1]
    with pytest.raises(ValueError, match="place in every group, 0"):
        build("reduce", 6, root=2, groups=[(0, 3), (5, 1, 2)])
    with pytest.raises(ValueError, match="names its own pairs"):
        build("sendrecv", 4, groups=[(0, 1)])


def test_symmetries_take_groups_to_groups() -> None:
    topology = load_topology("ndv2:2")
    groups = tuple((rank, rank + 8) for rank in range(8))

    def keeps(turn: Sequence[int]) -> bool:
        return all(frozenset(turn[r] for r in g) in {frozenset(x) for x in groups} for g in groups)

    found = find_symmetry(topology, keeps)
    assert found and all(keeps(turn) for turn in closure(found, 16))
    stated = problem(topology, build("allreduce", 16, groups=groups), 10**6, Restrictions())
    assert with_symmetry(stated, found)[1] == []
    other = problem(topology, build("allreduce", 16, groups=[(0, 9), (1, 12)]), 10**6, Restrictions())
    kept, rejected = with_symmetry(other, found)
    assert len(kept.symmetries) + len(rejected) == len(found)


def split_ring(nodes: int) -> Topology:
    """Two nodes of `nodes` ranks, all joined inside; the first rank of each has the only cable."""
    links = [
        Link(a + base, b + base, Fraction(1), Fraction(1), Fraction(1))
        for base in (0, nodes)
        for a in range(nodes)
        for b in range(nodes)
        if a != b
    ]
    links += [Link(a, b, Fraction(5), Fraction(10), Fraction(5)) for a, b in ((0, nodes), (nodes, 0))]
    return Topology("cable", (tuple(range(nodes)), tuple(range(nodes, 2 * nodes))), tuple(links))


@pytest.mark.parametrize("name", ["allgather", "allreduce"])
def test_one_schedule_for_all_is_no_slower_than_each_groups_best_side_by_side(name: str) -> None:
    topology = split_ring(2)
    groups = ((0, 2), (1, 3))
    size = 1000
    joint = synthesise(Request(topology, name, size, groups=groups, time_limit_s=6.0))
    assert check_algorithm(joint, topology) == []
    partition = joint.collective.partition
    lists = []
    for number, group in enumerate(groups):
        own = synthesise(Request(topology, name, size, groups=(group,), partition=partition, engine="greedy"))
        part = among_all(topology, joint.collective, number)
        lists.append(part.outwards(as_transfers(own.messages)))
    priced = costs(topology, joint.collective.chunk_bytes(size))
    beside = best_timing("beside", topology, joint.collective, priced, merged(lists))
    assert beside is not None and joint.time_fs <= beside.time_fs
    assert us(joint.time_fs) >= joint.certificate.lower_bound_us


def test_what_groups_send_over_one_cable_shares_its_messages() -> None:
    """Alpha of the cable is paid once for both groups, which no group alone could bring about."""
    topology = split_ring(2)
    found = synthesise(Request(topology, "allgather", 100, groups=((0, 2), (1, 3)), engine="greedy"))
    over = [m for m in found.messages if {m.src, m.dst} == {0, 2}]
    assert len(over) == 2 and all(len(m.chunks) == 2 for m in over)


@given(ranks=st.integers(2, 9), seed=st.integers(0, 10**6), data=st.data())
def test_trees_over_ways_reach_their_members_and_end_there(
    ranks: int, seed: int, data: st.DataObject
) -> None:
    members = data.draw(st.permutations(range(ranks)))[: data.draw(st.integers(2, ranks))]
    rng = np.random.default_rng(seed)
    cost = np.where(
        rng.random((ranks, ranks)) < 0.4, rng.integers(0, 5, (ranks, ranks)).astype(float), np.inf
    )
    ring = np.arange(ranks)
    cost[ring, (ring + 1) % ranks] = np.minimum(cost[ring, (ring + 1) % ranks], 4.0)
    price, before = ways_between(cost)
    between = price[np.ix_(members, members)]
    np.fill_diagonal(between, np.inf)
    spanning = cheapest(between, 0)
    assert spanning is not None
    parents = {place: int(p) for place, p in enumerate(spanning.tolist()) if p >= 0}
    tree = along_ways(parents, members, before, cost, members[0])
    assert set(members) <= {members[0], *tree} and members[0] not in tree
    assert all(np.isfinite(cost[b, a]) for a, b in tree.items())
    assert {rank for rank in tree if rank not in tree.values()} <= set(members)
    for rank in tree:
        seen = {rank}
        while rank in tree:
            rank = tree[rank]
            assert rank not in seen
            seen.add(rank)
        assert rank == members[0]
    paid = sum(float(cost[b, a]) for a, b in tree.items())
    assert paid <= sum(float(between[p, place]) for place, p in parents.items()) + 1e-6


def test_forests_take_idle_ranks_cables() -> None:
    """Two ranks of two nodes have four cables where the others are idle, and a quarter goes over each."""
    topology = load_topology("dgx-a100:2")
    request = Request(topology, "broadcast", 64 * 10**6, groups=((0, 8),), time_limit_s=60, target_gap=0.3)
    found = synthesise(request)
    assert found.engine == "forest" and us(found.time_fs) < 500  # over its own NIC alone: 1282.6
    assert {m.src for m in found.messages if m.dst >= 8 > m.src} > {0, 1, 2}


def test_answers_repeat() -> None:
    request = Request(
        load_topology("ring:4"), "allreduce", 10**5, groups=((0, 2), (1, 3)), time_limit_s=60, engine="greedy"
    )
    first, second = (synthesise(request) for _ in range(2))
    assert write_native(first, request.topology) == write_native(second, request.topology)
    starts = [m.start_fs for m in first.messages]
    assert all(a <= b for a, b in pairwise(starts))


def test_combining_groups_reduce_only_their_own() -> None:
    """The check sees a contribution that strays into another group."""
    topology = load_topology("ring:4")
    collective = build("allreduce", 4, groups=((0, 1), (2, 3)))
    assert collective.name in COMBINING
    stated = problem(topology, collective, 10**6, Restrictions())
    grown = greedy(stated, Taste(1.0, True, 0))
    assert grown is not None
    found = best_timing("greedy", topology, collective, stated.costs, grown)
    assert found is not None
    algorithm = found.algorithm(topology, 10**6)
    assert check_algorithm(algorithm, topology) == []
    last = algorithm.messages[-1]
    strayed = replace(last, chunks=tuple(sorted(c ^ 2 for c in last.chunks)))
    assert check_algorithm(replace(algorithm, messages=(*algorithm.messages[:-1], strayed)), topology)
