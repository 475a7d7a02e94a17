"""Bounds against true optima: no algorithm that the exhaustive search finds is faster than a bound."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from brute_force import Search, TooLarge

from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.bounds import granular_bound, lower_bound
from taccl.synth.bounds.again import again_time
from taccl.synth.bounds.fill_links import link_fill_time
from taccl.synth.bounds.network import fluid, whole
from taccl.synth.bounds.wants import wanted
from taccl.synth.collective import Collective, build
from taccl.synth.cost import FS_PER_US

COLLECTIVES = (
    "allgather", "alltoall", "broadcast", "reducescatter", "allreduce", "reduce", "gather", "scatter", "sendrecv",
)  # fmt: skip
INSTANCES = 28
MAX_STATES = 6000
MANY_CHUNKS = ("alltoall", "reducescatter")  # searched with fewer ranks, or no search would end


def random_topology(rng: random.Random, most: int) -> Topology:
    """2 to `most` ranks, strongly connected, whole numbers of us; ports private, shared or absent."""
    ranks = min(most, rng.choice([2, 3, 3, 3, 4]))
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    while True:
        chosen = rng.sample(pairs, rng.randint(ranks, min(len(pairs), 6 if ranks < 4 else 7)))
        if reaches_all(chosen, ranks) and reaches_all([(b, a) for a, b in chosen], ranks):
            break
    if ranks > 2 and rng.random() < 0.1:
        chosen.append(rng.choice(chosen))
    style = rng.choice(["none", "private", "private", "shared"])
    ports: list[Port] = []
    of_rank: dict[tuple[int, str], int] = {}
    if style == "private":
        for rank in range(ranks):
            for way in ("out", "in"):
                if rng.random() < 0.8:
                    of_rank[rank, way] = len(ports)
                    ports.append(Port(f"gpu{rank}.{way}", Fraction(rng.randint(1, 3))))
    elif style == "shared":
        ports = [Port("left", Fraction(rng.randint(1, 3))), Port("right", Fraction(rng.randint(1, 3)))]
    links = []
    usual = rng.randint(0, 3)
    for a, b in chosen:
        alpha = usual if rng.random() < 0.7 else rng.randint(0, 4)
        occupancy = rng.choice([0, alpha, rng.randint(0, alpha)])
        crossed = [of_rank[key] for key in ((a, "out"), (b, "in")) if key in of_rank]
        if style == "shared":
            crossed = [port for port in (0, 1) if rng.random() < 0.5]
        beta = Fraction(rng.randint(1, 3))
        links.append(Link(a, b, Fraction(alpha), beta, Fraction(occupancy), tuple(crossed)))
    nodes = ((0, 1), tuple(range(2, ranks))) if ranks > 2 and rng.random() < 0.4 else (tuple(range(ranks)),)
    return Topology("random", nodes, tuple(links), tuple(ports))


def reaches_all(pairs: list[tuple[int, int]], ranks: int) -> bool:
    seen = {0}
    for _ in range(ranks):
        seen |= {b for a, b in pairs if a in seen}
    return len(seen) == ranks


def small_collective(rng: random.Random, name: str, ranks: int) -> Collective:
    """At most two chunks a block, or the search would not end; an allreduce of one or two chunks in all."""
    partition = rng.choice([1, 1, 2]) if ranks < 4 or name in ("broadcast", "reduce") else 1
    if name in MANY_CHUNKS and ranks > 2:
        partition = 1
    if name != "allreduce":
        return build(name, ranks, partition)
    whole = build(name, ranks)
    lengths = (partition,) * ranks
    return replace(
        whole, chunks=whole.chunks[:partition], input_chunks=lengths, output_chunks=lengths, size_chunks=partition
    )  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_no_optimum_is_below_a_bound(name: str) -> None:
    solved = tight = 0
    for seed in range(INSTANCES):
        rng = random.Random(f"{name} {seed}")
        topology = random_topology(rng, 3 if name in MANY_CHUNKS else 4)
        collective = small_collective(rng, name, topology.ranks)
        size = collective.size_chunks * 10**6
        free = lower_bound(topology, collective, size)
        kept = granular_bound(topology, collective, size)
        assert free.time_fs <= kept.time_fs
        least = -(-kept.time_fs // FS_PER_US)  # optima are whole us
        search = Search(topology, collective, MAX_STATES)
        try:
            assert least == 0 or not search.possible(least - 1), f"seed {seed}: {kept.name} is beaten"
            tight += search.optimum(least) == least
            solved += 1
        except TooLarge:
            continue
    assert solved >= INSTANCES // 4, "too few instances were solved for the test to mean anything"
    assert tight >= solved // 2, "the bounds have become weak, or the search misses good schedules"


@pytest.mark.parametrize("steps", [(1,), (2,), (1, 2), (1, -1)])
@pytest.mark.parametrize("occupancy", [0, 1, 2])
@pytest.mark.parametrize("name", ["allgather", "broadcast", "allreduce", "reducescatter"])
def test_no_optimum_of_a_machine_whose_ranks_are_all_alike_is_below_a_bound(
    name: str, occupancy: int, steps: tuple[int, ...]
) -> None:
    """One-way circles too: there a rank is told by others than those that it tells."""
    solved = 0
    for ranks in (3, 4, 5):
        if any(step % ranks == 0 for step in steps) or (ranks % 2 == 0 and steps == (2,)):
            continue
        pairs = sorted({(r, (r + step) % ranks) for r in range(ranks) for step in steps})
        links = tuple(Link(a, b, Fraction(2), Fraction(1), Fraction(occupancy)) for a, b in pairs)
        topology = Topology("circulant", (tuple(range(ranks)),), links)
        collective = build(name, ranks)
        if name == "allreduce":
            lengths = (1,) * ranks
            collective = replace(
                collective, chunks=collective.chunks[:1], input_chunks=lengths, output_chunks=lengths, size_chunks=1
            )  # fmt: skip
        kept = granular_bound(topology, collective, collective.size_chunks * 10**6)
        least = -(-kept.time_fs // FS_PER_US)
        try:
            possible = Search(topology, collective, MAX_STATES).possible(least - 1)
        except TooLarge:
            continue
        assert not possible, f"{ranks} ranks: {kept.name} is beaten"
        solved += 1
    assert solved


@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_no_optimum_of_a_pipeline_behind_one_port_a_rank_is_below_a_bound(name: str) -> None:
    """Whole chunks can only be slower than messages of any size."""
    solved = decided = 0
    for ranks, partition, alpha, occupancy in [
        (3, 2, 1, 1), (3, 3, 1, 1), (3, 4, 1, 1), (3, 2, 2, 2), (3, 3, 2, 1), (3, 3, 2, 2), (4, 2, 1, 1), (4, 2, 2, 2),
    ]:  # fmt: skip
        ports = tuple(Port(f"{way}{r}", Fraction(1)) for way in ("out", "in") for r in range(ranks))
        links = tuple(
            Link(a, b, Fraction(alpha), Fraction(1), Fraction(occupancy), (a, ranks + b))
            for a in range(ranks) for b in range(ranks) if a != b
        )  # fmt: skip
        topology = Topology("switch", (tuple(range(ranks)),), links, ports)
        collective = build(name, ranks, partition, root=ranks - 1)
        bound = lower_bound(topology, collective, partition * 10**6)
        least = -(-bound.time_fs // FS_PER_US)
        try:
            assert not Search(topology, collective, MAX_STATES).possible(least - 1), bound.name
        except TooLarge:
            continue
        solved += 1
        decided += bound.name.startswith("pipeline")
    assert solved >= 3 and decided, (solved, decided)


@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_no_optimum_of_a_pipeline_over_links_of_its_own_is_below_a_bound(name: str) -> None:
    """Rings and lines; from some roots every rank has a link, from others not."""
    solved = close = 0
    for ranks, closed, partition, alpha, occupancy in [
        (3, True, 2, 1, 1), (3, True, 3, 1, 1), (3, True, 4, 1, 1), (3, True, 3, 2, 1), (3, True, 3, 2, 2),
        (3, False, 3, 1, 1), (3, False, 4, 1, 1), (3, False, 4, 2, 2), (4, False, 3, 1, 1), (4, True, 2, 1, 1),
    ]:  # fmt: skip
        ends = [(r, (r + 1) % ranks) for r in range(ranks if closed else ranks - 1)]
        links = tuple(
            Link(a, b, Fraction(alpha), Fraction(1), Fraction(occupancy))
            for a, b in sorted({*ends, *((b, a) for a, b in ends)})
        )
        topology = Topology("graph", (tuple(range(ranks)),), links)
        network = fluid(topology, Fraction(10**6))
        for root in (0, 1):
            collective = build(name, ranks, partition, root=root)
            others = [rank for rank in range(ranks) if rank != root]
            time = link_fill_time(network, root, others, partition, name == "reduce")
            assert time is not None
            least = math.ceil(network.to_us(time))
            search = Search(topology, collective, MAX_STATES)
            try:
                assert not search.possible(least - 1), (ranks, closed, partition)
                close += search.possible(least + 1)
            except TooLarge:
                continue
            solved += 1
    assert solved >= 8 and close >= 5, (solved, close)


@pytest.mark.parametrize("name", ["allgather", "broadcast", "reducescatter", "reduce"])
def test_no_optimum_is_below_what_must_be_received_again(name: str) -> None:
    """By itself: among all bounds a stronger one would hide it."""
    solved = said = 0
    for seed in range(INSTANCES // 2):
        rng = random.Random(f"again {name} {seed}")
        topology = two_nodes(rng) if seed % 2 else random_topology(rng, 3 if name in MANY_CHUNKS else 4)
        collective = build(
            name, topology.ranks, rng.choice([1, 2, 3]) if name in ("reduce", "broadcast") else 1
        )
        size = collective.size_chunks * 10**6
        for network in (
            fluid(topology, collective.chunk_bytes(size)),
            whole(topology, collective.chunk_bytes(size)),
        ):
            found = again_time(network, wanted(collective), collective.combining, Fraction(1))
            if found is None:
                continue
            said += 1
            least = -(-network.to_fs(found[0]) // FS_PER_US)
            try:
                assert not Search(topology, collective, MAX_STATES).possible(least - 1), (
                    f"seed {seed}: {found}"
                )
                solved += 1
            except TooLarge:
                continue
    assert solved >= INSTANCES // 8, (said, solved)


def two_nodes(rng: random.Random) -> Topology:
    """Two nodes of one or two ranks, links within them, and links between them through one or two ports each way."""
    sizes = rng.choice([(1, 2), (2, 2), (2, 2)])
    nodes = (tuple(range(sizes[0])), tuple(range(sizes[0], sum(sizes))))
    near, far = rng.randint(2, 4), rng.randint(5, 9)
    ports = tuple(Port(f"{way}{nic}", Fraction(1)) for way in ("there", "back") for nic in range(2))
    nics = rng.choice([1, 1, 1, 2])
    links = []
    for a in range(sum(sizes)):
        for b in range(sum(sizes)):
            if a == b:
                continue
            if (a in nodes[0]) == (b in nodes[0]):
                links.append(Link(a, b, Fraction(near), Fraction(1), Fraction(rng.choice([0, near]))))
            else:
                port = (0 if a in nodes[0] else 2) + (a if a in nodes[0] else b) % nics
                links.append(
                    Link(a, b, Fraction(far), Fraction(1), Fraction(rng.choice([far, far, far - 1])), (port,))
                )
    return Topology("two nodes", nodes, tuple(links), ports)


@pytest.mark.parametrize("name", ["allgather", "broadcast", "allreduce"])
def test_no_optimum_of_two_nodes_is_below_a_bound(name: str) -> None:
    """Few messages between nodes: the bound across the cut decides an allreduce."""
    solved = met = 0
    for seed in range(INSTANCES // 2):
        rng = random.Random(f"two nodes {name} {seed}")
        topology = two_nodes(rng)
        collective = build(name, topology.ranks)
        if name == "allreduce":
            lengths = (1,) * topology.ranks
            collective = replace(
                collective, chunks=collective.chunks[:1], input_chunks=lengths, output_chunks=lengths, size_chunks=1
            )  # fmt: skip
        size = collective.size_chunks * 10**6
        kept = granular_bound(topology, collective, size)
        least = -(-kept.time_fs // FS_PER_US)
        search = Search(topology, collective, MAX_STATES)
        try:
            assert not search.possible(least - 1), f"seed {seed}: {kept.name} is beaten"
            solved += 1
            if "messages out of" in kept.name:
                met += search.optimum(least) == least
        except TooLarge:
            continue
    assert solved >= INSTANCES // 8
    assert name != "allreduce" or met, "the bound across a cut has become weak"


def line(ranks: int, alpha: int, beta: int, occupancy: int) -> Topology:
    pairs = [(a, a + 1) for a in range(ranks - 1)] + [(a + 1, a) for a in range(ranks - 1)]
    links = tuple(Link(a, b, Fraction(alpha), Fraction(beta), Fraction(occupancy)) for a, b in pairs)
    return Topology("line", (tuple(range(ranks)),), links)


@pytest.mark.parametrize(
    ("name", "partition", "ranks", "optimum"),
    [
        ("broadcast", 1, 3, 10),  # two hops of 2 + 3
        ("broadcast", 2, 3, 13),  # two messages: the second is at the middle at 8, at the end at 13
        ("allgather", 1, 2, 5),
        ("allgather", 1, 3, 10),
        ("allreduce", 1, 2, 8),  # both chunks of the two blocks in one message each way
        ("reduce", 1, 3, 10),
        ("alltoall", 1, 3, 10),  # the chunk between the ends goes first
    ],
)
def test_the_search_finds_known_optima(name: str, partition: int, ranks: int, optimum: int) -> None:
    assert Search(line(ranks, 2, 3, 0), build(name, ranks, partition)).optimum() == optimum
