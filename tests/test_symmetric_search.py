"""Schedules on the quotient, expanded: always right, never below a bound, optimal where that is known."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taccl.profiles.link_table import link_table
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.bounds import lower_bound
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import Collective, build
from taccl.synth.message_table import messages_of
from taccl.synth.symmetric.group import smallest_in_orbit
from taccl.synth.symmetric.quotient import image_links, natural, quotient
from taccl.synth.symmetric.search import COLLECTIVES, Task, search
from taccl.synth.symmetric.solve import Effort
from taccl.synth.symmetric.timing import Hop, list_schedule, longest_rest

QUICK = Effort(work=20_000, most_seeds=6, deterministic_s=0.05, batch_work=50_000, most_batches=8)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@st.composite
def circulants(draw: st.DrawFn) -> Topology:
    """Nodes in a circle, ranks in each: links by offset, some sharing a NIC of their node or of their rank."""
    nodes, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    n = nodes * size
    if n < 2:
        nodes, n = 2, 2 * size
    links: list[Link] = []
    ports: list[Port] = []
    beta = Fraction(draw(st.sampled_from([10, 20, 33])))
    alpha = Fraction(draw(st.sampled_from([0, 1, 3])))
    for node in range(nodes):
        for a in range(size):
            for b in range(size):
                if a != b and ((b - a) % size in (1, size - 1) or beta == 10):
                    links.append(Link(node * size + a, node * size + b, alpha, beta, alpha))
    shared = draw(st.sampled_from(["rank", "node", "none"]))
    if nodes > 1:
        owners = n if shared == "rank" else nodes
        for owner in range(owners):
            ports += [Port(f"out{owner}", Fraction(40)), Port(f"in{owner}", Fraction(40))]
        for u in range(n):
            for v in range(n):
                if u // size != v // size and (u % size == v % size or alpha == 1):
                    mine, yours = (u, v) if shared == "rank" else (u // size, v // size)
                    held = () if shared == "none" else (2 * mine, 2 * yours + 1)
                    links.append(
                        Link(u, v, Fraction(5), Fraction(40), Fraction(draw(st.sampled_from([5]))), held)
                    )
    reduce_alpha = Fraction(draw(st.sampled_from([0, 1])))
    return Topology(
        "circulant", tuple(tuple(range(k * size, (k + 1) * size)) for k in range(nodes)), tuple(links),
        tuple(ports), reduce_alpha_us=reduce_alpha,
    )  # fmt: skip


def collective_of(name: str, ranks: int, partition: int) -> tuple[Collective, tuple[tuple[int, int], ...]]:
    pairs = tuple((r, (r + 1) % ranks) for r in range(ranks)) if name == "sendrecv" else ()
    if name != "alltoallv":
        return build(name, ranks, partition, pairs=pairs or None), pairs
    # One block or two to some, also to oneself, none to others.
    demand = tuple(tuple((2 * s + d) % 3 for d in range(ranks)) for s in range(ranks))
    ends = tuple((s, d) for s in range(ranks) for d in range(ranks) if demand[s][d])
    return build(name, ranks, partition, demand=demand), ends


def amounts_of(collective: Collective) -> tuple[int, ...]:
    """Blocks of each pair of an alltoallv, by source and destination."""
    if collective.name != "alltoallv":
        return ()
    ends = [(chunk.sources[0][0], chunk.destinations[0][0]) for chunk in collective.chunks]
    return tuple(ends.count(pair) // collective.partition for pair in sorted(set(ends)))


@settings(deadline=None, max_examples=40, suppress_health_check=SLOW)
@given(
    circulants(),
    st.sampled_from(COLLECTIVES),
    st.integers(1, 2),
    st.sampled_from([10**3, 10**6]),
    st.booleans(),
)
def test_every_schedule_that_is_found_is_right(
    topology: Topology, name: str, partition: int, size: int, batching: bool
) -> None:
    collective, pairs = collective_of(name, topology.ranks, partition)
    task = Task(
        topology,
        link_table(topology),
        name,
        partition,
        collective.chunk_bytes(size),
        0,
        pairs,
        None,
        batching,
        amounts_of(collective),
    )
    bound = lower_bound(topology, collective, size).time_fs
    times = []
    for found in search(task, 0, QUICK, 0, lambda: False):
        messages = messages_of(found.messages(name, partition))
        algorithm = Algorithm(
            "found", collective, topology.name, size, messages, found.timing.time_fs,
            Certificate(0.0, "", 0.0, "feasible"), found.engine,
        )  # fmt: skip
        assert check_algorithm(algorithm, topology) == []
        assert found.timing.time_fs >= bound
        assert batching or all(len(m.chunks) == 1 for m in messages)
        times.append(found.timing.time_fs)
    assert times and times == sorted(times, reverse=True)


@settings(deadline=None, max_examples=40, suppress_health_check=SLOW)
@given(circulants(), st.data())
def test_a_quotient_moves_every_rank_and_every_port(topology: Topology, data: st.DataObject) -> None:
    links = link_table(topology)
    found = quotient(topology, links)
    group = found.group
    element = data.draw(st.integers(0, group.order - 1))
    ranks = np.arange(topology.ranks)
    moved = group.image(element, ranks)
    assert sorted(moved.tolist()) == ranks.tolist()
    assert element == 0 or (moved != ranks).all()
    image = image_links(links, group, element, np.arange(len(links)))
    assert sorted(image.tolist()) == list(range(len(links)))
    assert np.array_equal(found.link_orbit[image], found.link_orbit)
    for index, other in enumerate(image.tolist()):
        a, b = topology.links[index], topology.links[other]
        assert (moved[a.src], moved[a.dst]) == (b.src, b.dst)
        assert (a.alpha_us, a.beta_us_per_mb, a.occupancy_us) == (
            b.alpha_us,
            b.beta_us_per_mb,
            b.occupancy_us,
        )
        for p, q in zip(a.ports, b.ports, strict=True):
            assert found.port_orbit[p] == found.port_orbit[q]
            assert element == 0 or p != q


@pytest.mark.parametrize(
    ("spec", "order"),
    [
        ("ring:8", 8), ("torus2d:4x6", 24), ("torus3d:3x3x3", 27), ("hypercube:4", 16), ("dgx2:2", 16),
        ("dgx-a100:4", 32), ("gb200-nvl72:2", 144), ("ndv2:3", 3), ("mesh2d:3x3", 1),
    ],
)  # fmt: skip
def test_the_symmetry_of_bundled_machines(spec: str, order: int) -> None:
    topology = load_topology(spec)
    assert quotient(topology, link_table(topology)).group.order == order


def test_a_failed_link_leaves_the_symmetry_that_keeps_it() -> None:
    whole = load_topology("ring:8")
    broken = Topology(whole.name, whole.nodes, whole.links[1:], whole.ports)
    assert quotient(broken, link_table(broken)).group.order == 1


@pytest.mark.parametrize(
    ("spec", "name", "chunk_bytes", "time_us"),
    [
        # In-degree bound: (ranks - 1) / 4 links into each rank, 20.5 us each at 1 MB.
        ("torus2d:8x8", "allgather", 10**6, 63 / 4 * 20.5 + 0.25 * 20.5),
        ("torus2d:16x16", "allgather", 10**6, 256 / 4 * 20.5),
        # Hops of all pairs over the links of a direction: 16 * 16 * 8 hops on 4 links a rank.
        ("torus2d:16x16", "alltoall", 10**6, 16 * 16 * 8 / 4 * 20.5),
        # 15 other nodes over each NIC, then 7 receives of the last chunks.
        ("dgx-a100:16", "allgather", 10**6, 15 * 42.6 + 7 * (0.35 + 10 / 3)),
        # Two GPUs to a NIC: two chunks each way, then eight rounds among 16 GPUs.
        ("dgx2-1mb:2", "allgather", 10**6, 2 * 107.6 + 8 * 8),
        # Short chunks are sent so often that ports must fall idle just before the last one comes over a NIC.
        ("dgx2:5", "allgather", 1000, 8 * 2.705 + 8 * 0.308),
        ("dgx2-1mb:5", "alltoall", 10**6, 2 * 64 * 107.6),
        ("ndv2-1mb:10", "alltoall", 10**6, 64 * 9 * 107.6),
    ],
)  # fmt: skip
def test_known_optima(spec: str, name: str, chunk_bytes: int, time_us: float) -> None:
    topology = load_topology(spec)
    task = Task(topology, link_table(topology), name, 1, Fraction(chunk_bytes), batching=False)
    effort = Effort(work=500_000, most_seeds=24, deterministic_s=0.0)
    *_, best = search(task, int(time_us * 10**9), effort, 0, lambda: False)
    assert best.timing.time_fs == pytest.approx(time_us * 10**9, rel=1e-9)


def test_trees_reach_ranks_that_have_no_link_within_their_node() -> None:
    """CP-SAT looks at links within nodes and from the root to other nodes alone, where these reach all."""
    links = [
        Link(s, d, Fraction(1), Fraction(10), Fraction(1))
        for s in range(4)
        for d in range(4)
        if s // 2 != d // 2
    ]
    topology = Topology("apart", ((0, 1), (2, 3)), tuple(links))
    table = link_table(topology)
    task = Task(topology, table, "allgather", 1, Fraction(10**6), batching=False)
    for found in search(task, 0, Effort(), 0, lambda: False):
        reached = {(load[0], int(table.dst[load[1]])) for hop in found.hops for load in hop.loads}
        assert len(reached) == 3 * len(found.inst.representatives)


def test_natural_candidates_are_permutations() -> None:
    topology = load_topology("dgx-a100:3")
    for candidate in natural(topology):
        assert sorted(candidate) == list(range(topology.ranks))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_list_schedule_never_idles_and_never_overlaps(data: st.DataObject) -> None:
    hops = []
    for index in range(data.draw(st.integers(1, 14))):
        resources = data.draw(st.sets(st.integers(0, 2), min_size=1))
        hold = data.draw(st.integers(1, 4))
        needs = data.draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        hops.append(Hop(tuple((r, hold) for r in sorted(resources)), hold + 1, tuple(sorted(needs))))
    timing = list_schedule(hops, longest_rest(hops))
    start = timing.start_fs
    held = {
        (r, t)
        for i, hop in enumerate(hops)
        for r, hold in hop.holds
        for t in range(start[i], start[i] + hold)
    }
    assert len(held) == sum(hold for hop in hops for _, hold in hop.holds)
    for i, hop in enumerate(hops):
        ready = max((start[n] + hops[n].transit_fs for n in hop.needs), default=0)
        assert start[i] >= ready
        for moment in range(ready, start[i]):
            assert any((r, moment) in held for r, _ in hop.holds), f"hop {i} could have started at {moment}"
    assert timing.time_fs == max(s + hop.transit_fs for s, hop in zip(start, hops, strict=True))


@given(st.permutations(range(9)), st.permutations(range(9)))
def test_smallest_in_orbit(a: list[int], b: list[int]) -> None:
    found = smallest_in_orbit([a, b], 9)
    for start in range(9):
        reached, queue = {start}, [start]
        while queue:
            x = queue.pop()
            for p in (a, b):
                if p[x] not in reached:
                    reached.add(p[x])
                    queue.append(p[x])
        assert found[start] == min(reached)


@pytest.mark.parametrize(
    ("spec", "name", "chunk_bytes", "at_most_us"),
    [
        # 32 steps each way, in step t a message with all that has 32 - t links to go.
        ("ring:64", "alltoall", 244, 32 * 0.5 + 32 * 33 / 2 * 20 * 244e-6 * 1.01),
        # One message to each other node over each NIC, instead of 64 over each pair of GPUs: 346 us.
        ("dgx2:5", "alltoall", 13, 12.0),
        ("dgx-a100:8", "alltoall", 16, 9.0),
        # Within a node not every pair has a link; over the network one message serves a node.
        ("ndv2:4", "alltoall", 32, 15.0),
        # Three rounds over each NIC, then the places of a node; one rank speaks for both at a NIC.
        ("dgx-a100:8", "allgather", 16, 8.9),
        ("dgx2:5", "reducescatter", 13, 9.4),
        ("ndv2:2", "scatter", 64, 6.0),
        ("ndv2:2", "gather", 64, 6.0),
    ],
)
def test_short_chunks_share_messages(spec: str, name: str, chunk_bytes: int, at_most_us: float) -> None:
    topology = load_topology(spec)
    task = Task(topology, link_table(topology), name, 1, Fraction(chunk_bytes))
    *_, best = search(task, 0, QUICK, 0, lambda: False)
    assert best.engine == "batched"
    assert best.timing.time_fs <= at_most_us * 10**9
    collective = build(name, topology.ranks)
    algorithm = Algorithm(
        "batched", collective, topology.name, chunk_bytes * collective.size_chunks,
        messages_of(best.messages(name, 1)), best.timing.time_fs, Certificate(0.0, "", 0.0, "feasible"), "batched",
    )  # fmt: skip
    assert check_algorithm(algorithm, topology) == []
