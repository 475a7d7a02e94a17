"""Bounds: values known on paper, invariants, and that no baseline beats them."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Port, Topology, reverse
from taccl.synth.bounds import Bound, granular_bound, lower_bound
from taccl.synth.bounds.certificate import Row, by_paths, by_rows, least_deadline
from taccl.synth.bounds.network import UNREACHABLE, distances, fluid, offsets, whole
from taccl.synth.collective import Chunk, Collective, build
from taccl.synth.cost import FS_PER_US, costs
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.schedule import completion_fs, time_in_order

NAMES = (
    "allgather", "alltoall", "reducescatter", "allreduce", "broadcast", "reduce", "gather", "scatter", "sendrecv",
)  # fmt: skip
MB = 10**6


def ring(ranks: int, alpha: str = "0", beta: int = 20) -> Topology:
    links = tuple(
        Link(r, (r + step) % ranks, Fraction(alpha), Fraction(beta), Fraction(alpha))
        for r in range(ranks)
        for step in (1, -1)
    )
    return Topology("ring", (tuple(range(ranks)),), links)


def switched(ranks: int, alpha: int, beta: int) -> Topology:
    """Every pair joined, one port out and one in a rank, occupancy all of alpha."""
    ports = [Port(f"gpu{r}.{way}", Fraction(beta), "switch") for r in range(ranks) for way in ("out", "in")]
    links = [
        Link(a, b, Fraction(alpha), Fraction(beta), Fraction(alpha), (2 * a, 2 * b + 1))
        for a in range(ranks)
        for b in range(ranks)
        if a != b
    ]
    return Topology("switched", (tuple(range(ranks)),), tuple(links), tuple(ports))


def bound_us(topology: Topology, name: str, size: int, partition: int = 1) -> float:
    return lower_bound(topology, build(name, topology.ranks, partition), size).time_us


def granular_us(topology: Topology, name: str, size: int, partition: int = 1) -> float:
    return granular_bound(topology, build(name, topology.ranks, partition), size).time_us


def uneven(ranks: int) -> Topology:
    """Every pair joined, each link at a rate of its own, so that betas have no short common denominator."""
    links = tuple(
        Link(a, b, Fraction(7, 10), Fraction(10**6, 10_007 + 97 * a + 1009 * b), Fraction(7, 10))
        for a in range(ranks)
        for b in range(ranks)
        if a != b
    )
    return Topology("uneven", (tuple(range(ranks)),), links)


@pytest.mark.parametrize("name", ["allgather", "alltoall", "reducescatter", "allreduce", "broadcast"])
def test_rates_without_a_common_denominator_have_bounds(name: str) -> None:
    cluster = uneven(8)
    slowest = max(link.beta_us_per_mb for link in cluster.links)
    even = replace(cluster, links=tuple(replace(link, beta_us_per_mb=slowest) for link in cluster.links))
    quickest = min(link.beta_us_per_mb for link in cluster.links)
    quick = replace(cluster, links=tuple(replace(link, beta_us_per_mb=quickest) for link in cluster.links))
    assert bound_us(quick, name, MB) <= bound_us(cluster, name, MB) <= bound_us(even, name, MB)


def test_numbers_far_apart_end_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    """Floating-point programs may fail on them or go round for ever; neither shows."""
    slow = Topology("slow", ((0, 1, 2, 3),), tuple(
        Link(a, b, Fraction(7, 10), Fraction(10**12), Fraction(7, 10)) for a in range(4) for b in range(4) if a != b
    ))  # fmt: skip
    assert bound_us(slow, "allgather", MB) > 0
    classes = {"a": (10**9, "1e-6"), "b": (1000, "1e-6"), "c": ("3.3333333e-9", "40")}
    ends = {
        (0, 1): "c",
        (1, 0): "c",
        (1, 2): "c",
        (1, 3): "a",
        (2, 0): "a",
        (2, 3): "b",
        (3, 0): "b",
        (3, 1): "c",
    }
    links = []
    for (src, dst), name in ends.items():
        alpha, beta = classes[name]
        links.append(Link(src, dst, Fraction(alpha), Fraction(beta), Fraction(alpha)))
    assert bound_us(Topology("far", ((0, 1, 2, 3),), tuple(links)), "alltoall", 1) > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "us"), [("allgather", 120), ("alltoall", 120), ("reducescatter", 120)])
def test_a_dgx2_node_is_bound_by_its_switch_ports(name: str, us: int) -> None:
    bound = lower_bound(switched(16, 0, 8), build(name, 16), 16 * MB)
    assert bound.time_us == us
    assert bound.bottleneck is not None
    assert bound.bottleneck.crossing[0].resource.startswith("gpu")


@pytest.mark.parametrize(
    ("name", "partition", "us"),
    [("allgather", 1, 69), ("allgather", 6, 322), ("alltoall", 1, 138), ("allreduce", 1, 138)],
)
def test_ndv2_with_whole_chunks_of_1_mb(name: str, partition: int, us: int) -> None:
    assert granular_us(load_topology("ndv2-1mb:1"), name, 8 * partition * MB, partition) == us


@pytest.mark.parametrize(
    ("topology", "name", "us"),
    [
        # One message of 2.6 us each way fits: two hops of 0.3 to collect for it, two to spread what it brings.
        ("ndv2:2", "allgather", 3.8),
        ("ndv2:2", "allreduce", 3.8),
        ("ndv2:2", "alltoall", 3.8),
        # Eight NICs for 64 pairs: 8 pairs a message, three doublings of 0.35.
        ("dgx-a100:2", "reducescatter", 2.6 + 3 * 0.35),
    ],
)
def test_few_messages_fit_between_two_nodes(topology: str, name: str, us: float) -> None:
    machine = load_topology(topology)
    bound = lower_bound(machine, build(name, machine.ranks), 100)
    assert bound.time_us == pytest.approx(us, abs=1e-6)
    assert bound.name.startswith("latency of the messages out of ranks")


@pytest.mark.parametrize("name", ["broadcast", "reduce"])
@pytest.mark.parametrize("topology", ["dgx2:1", "dgx-h100:1"])
def test_pipelines_behind_a_switch_are_within_two_percent_of_the_best_rounds(
    topology: str, name: str
) -> None:
    """Bar-Noy and Kipnis: m - 1 + log2(ranks) rounds of whole chunks; m as is best for 1 GB."""
    machine = load_topology(topology)
    link, port = machine.links[0], machine.ports[machine.links[0].ports[0]]
    depth = (machine.ranks - 1).bit_length()
    rounds = min(
        (m - 1 + depth) * (float(link.alpha_us) + float(port.beta_us_per_mb) * 1000 / m)
        for m in range(1, 2000)
    )
    bound = lower_bound(machine, build(name, machine.ranks), 1000 * MB)
    assert bound.name.startswith("pipeline")
    assert 0.98 * rounds < bound.time_us < rounds


@pytest.mark.parametrize("name", ["alltoall", "broadcast"])
def test_messages_are_counted_on_machines_of_72_ranks_too(name: str) -> None:
    """Seven rounds of 0.5 us on one switch."""
    machine = load_topology("gb200-nvl72:1")
    assert lower_bound(machine, build(name, 72), 72).time_us == pytest.approx(3.5, abs=1e-3)


def test_ndv2_fluid_optimum_of_allgather() -> None:
    # Each GPU takes 7 MB over links of 23, 23, 46 and 46 us/MB: 7 / (3/23) us.
    assert bound_us(load_topology("ndv2-1mb:1"), "allgather", 8 * MB) == pytest.approx(7 * 23 / 3, abs=1e-5)


def test_two_ndv2_nodes_are_bound_by_their_nics() -> None:
    bound = lower_bound(load_topology("ndv2-1mb:2"), build("allgather", 16), 16 * MB)
    assert bound.time_us == pytest.approx(8 * 105 + 2.6)
    assert bound.bottleneck is not None
    assert bound.bottleneck.ranks in (tuple(range(8)), tuple(range(8, 16)))
    assert bound.bottleneck.bytes == 8 * MB
    # The chunk that comes last must still get from where it arrived to the ranks behind.
    assert granular_us(load_topology("ndv2-1mb:2"), "allgather", 16 * MB) >= 8 * 105 + 2.6


def test_allreduce_over_two_nodes_carries_the_data_out_and_in() -> None:
    assert bound_us(load_topology("ndv2-1mb:2"), "allreduce", 16 * MB) >= 16 * 105 + 2.6


@pytest.mark.parametrize(
    ("ranks", "us"), [(8, 3 * 30 + 7), (16, 4 * 30 + 15), (4, 2 * 30 + 3)]
)  # fmt: skip
def test_recursive_doubling_is_optimal_on_one_switch(ranks: int, us: int) -> None:
    topology = switched(ranks, 30, 1)
    assert bound_us(topology, "allgather", ranks * MB) == us
    assert bound_us(topology, "reducescatter", ranks * MB) == us


def test_a_small_broadcast_doubles_at_best() -> None:
    assert bound_us(switched(16, 30, 1), "broadcast", 1) == pytest.approx(4 * 30, abs=1e-3)
    assert bound_us(switched(9, 30, 1), "broadcast", 1) == pytest.approx(4 * 30, abs=1e-3)


def test_direct_alltoall_pays_a_message_a_pair_or_relays() -> None:
    assert bound_us(switched(16, 1, 8), "alltoall", 16 * MB) == 15 * (1 + 8)


@pytest.mark.parametrize(
    ("name", "us"), [("allgather", 7 * 20 / 2), ("allreduce", 2 * 7 * 20 / 2), ("alltoall", 16 * 20 / 2)]
)
def test_ring_of_eight(name: str, us: float) -> None:
    # alltoall: hops 1,2,3,4,3,2,1 sum to 16 a rank, over its two links.
    assert bound_us(ring(8), name, 8 * MB) == us


def test_torus_of_4_by_4_with_whole_chunks() -> None:
    topology = load_topology("torus2d:4x4")
    link = topology.links[0]
    # 15 blocks over 4 links: one of them carries 4.
    assert granular_us(topology, "allgather", 16 * MB) >= float(link.alpha_us + 4 * link.beta_us_per_mb)


def test_a_hub_must_send_a_broadcast_once_a_leaf() -> None:
    """No cut into a single leaf shows it: the copies compete for the hub's port (tree packing)."""
    port = (Port("hub.out", Fraction(10)),)
    links = tuple(Link(0, leaf, Fraction(0), Fraction(1), Fraction(0), (0,)) for leaf in range(1, 5))
    back = tuple(Link(leaf, 0, Fraction(0), Fraction(1), Fraction(0)) for leaf in range(1, 5))
    star = Topology("star", (tuple(range(5)),), links + back, port)
    assert bound_us(star, "broadcast", MB) == 40


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("topology", ["ndv2:1", "ring:8", "mesh2d:3x3", "dgx-a100:1"])
@pytest.mark.parametrize("size", [1000, 16 * MB])
def test_no_baseline_beats_a_bound(topology: str, name: str, size: int) -> None:
    cluster = load_topology(topology)
    ran = 0
    for partition in (1, 2):
        collective = build(name, cluster.ranks, partition)
        prices = costs(cluster, collective.chunk_bytes(size))
        free = lower_bound(cluster, collective, size)
        kept = granular_bound(cluster, collective, size)
        assert 0 < free.time_fs <= kept.time_fs
        for transfers in BASELINES.values():
            try:
                made = transfers(cluster, collective)
            except Inapplicable:
                continue
            ran += 1
            assert completion_fs(prices, time_in_order(cluster, collective, prices, made)) >= kept.time_fs
    assert ran


@pytest.mark.parametrize("topology", ["ndv2:2", "dgx-a100:2", "dgx2:1"])
def test_sixteen_ranks_take_less_than_a_second(topology: str) -> None:
    cluster = load_topology(topology)
    for name in ("allgather", "allreduce", "alltoall"):
        collective = build(name, cluster.ranks)
        began = time.process_time()
        lower_bound(cluster, collective, 16 * MB)
        assert time.process_time() - began < 2.0


durations = st.fractions(min_value=0, max_value=5, max_denominator=8)
rates = st.fractions(min_value=Fraction(1, 4), max_value=20, max_denominator=4)


@st.composite
def topologies(draw: st.DrawFn, alike: bool = False) -> Topology:
    """Rings with chords, ports out of and into every rank; alike: one alpha and occupancy for all links."""
    ranks = draw(st.integers(2, 6))
    pairs = {(r, (r + 1) % ranks) for r in range(ranks)}
    every = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    pairs |= set(draw(st.lists(st.sampled_from(every), max_size=8)))
    ports = [Port(f"{way}{r}", draw(rates)) for r in range(ranks) for way in ("out", "in")]
    links = []
    common = draw(durations)
    for a, b in sorted(pairs):
        alpha = common if alike else draw(durations)
        through = draw(st.sampled_from([(), (2 * a,), (2 * b + 1,), (2 * a, 2 * b + 1)]))
        links.append(
            Link(
                a,
                b,
                alpha,
                draw(rates),
                alpha if alike else alpha * draw(st.sampled_from([0, Fraction(1, 2), 1])),
                through,
            )
        )
    half = ranks // 2
    nodes = (tuple(range(ranks)),) if draw(st.booleans()) else (tuple(range(half)), tuple(range(half, ranks)))
    return Topology("drawn", nodes, tuple(links), tuple(ports))


def stretched(topology: Topology, factor: int) -> Topology:
    links = tuple(
        Link(x.src, x.dst, x.alpha_us * factor, x.beta_us_per_mb * factor, x.occupancy_us * factor, x.ports)
        for x in topology.links
    )
    ports = tuple(Port(p.name, p.beta_us_per_mb * factor) for p in topology.ports)
    return Topology("stretched", topology.nodes, links, ports)


@given(topologies(), st.sampled_from(NAMES), st.sampled_from([1, 10**4, 10**7]))
@settings(max_examples=30, deadline=None)
def test_bounds_depend_on_what_they_should(topology: Topology, name: str, size: int) -> None:
    ranks = topology.ranks
    bound = lower_bound(topology, build(name, ranks), size)
    # Not on the chunking.
    finer = lower_bound(topology, build(name, ranks, 3), size)
    assert abs(finer.time_fs - bound.time_fs) <= 1e-9 * bound.time_fs + 1
    # On durations in proportion.
    slower = lower_bound(stretched(topology, 3), build(name, ranks), size)
    assert abs(slower.time_fs - 3 * bound.time_fs) <= 1e-9 * bound.time_fs + 3
    # Keeping chunks whole only takes longer.
    assert granular_bound(topology, build(name, ranks), size).time_fs >= bound.time_fs


def turned(topology: Topology) -> Topology:
    """Links turned round, with the port that leaves a rank first, as everywhere."""
    other = reverse(topology)
    return replace(other, links=tuple(replace(link, ports=link.ports[::-1]) for link in other.links))


@given(topologies(alike=True), st.sampled_from([1, 10**4, 10**7]))
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
def test_reducing_is_spreading_backwards(topology: Topology, size: int) -> None:
    """Exact where all alphas agree: a message holds its port at its start, so time cannot just be turned."""
    for forward, backward in (("allgather", "reducescatter"), ("broadcast", "reduce"), ("scatter", "gather")):
        one = lower_bound(topology, build(forward, topology.ranks), size)
        other = lower_bound(turned(topology), build(backward, topology.ranks), size)
        assert abs(one.time_fs - other.time_fs) <= 1e-9 * one.time_fs + 1


@given(topologies(), st.lists(st.integers(0, 20), min_size=30, max_size=30))
@settings(max_examples=20, deadline=None)
def test_any_weights_prove_less_than_the_best_ones(topology: Topology, weights: list[int]) -> None:
    """Certificates are valid for arbitrary weights, so none may exceed the optimum of the program."""
    collective = build("alltoall", topology.ranks)
    network = fluid(topology, collective.chunk_bytes(10**6))
    ranks = range(topology.ranks)
    free = [0] * topology.ranks
    when = offsets(network, free, free)
    demand = [(d, [((s,), 1) for s in ranks if s != d]) for d in ranks]
    chosen = {r: Fraction(w) for r, w in zip(range(len(network.beta)), weights, strict=False)}
    proof = by_paths(network, network.ends, when, demand, chosen, [])
    best = lower_bound(topology, collective, 10**6)
    assert network.to_fs(proof.time) <= best.time_fs + 1


def test_a_certificate_repairs_weights_that_do_not_cover_its_rows() -> None:
    network = fluid(ring(4), Fraction(MB))
    into_0 = Row(tuple(e for e, (_, b) in enumerate(network.ends) if b == 0), 3, (0,))
    proof = by_rows(network, [0] * 8, [(into_0, Fraction(1))], {})
    assert proof.time / network.ticks_per_us == 3 * 20 / 2


def test_whole_chunks_round_capacities_down() -> None:
    network = whole(ring(4), Fraction(MB))
    beta = 20 * FS_PER_US
    assert least_deadline(network, {0: Fraction(1), 1: Fraction(1)}, [0] * 8, Fraction(3 * beta)) == 2 * beta
    assert least_deadline(network, {0: Fraction(1)}, [UNREACHABLE] * 8, Fraction(1)) == UNREACHABLE


def test_offsets_count_the_first_and_the_last_message_of_a_port() -> None:
    """First message over the link with the early start, last over the one with the short tail."""
    links = (
        Link(0, 1, Fraction(1), Fraction(1), Fraction(1), (0,)),
        Link(2, 3, Fraction(5), Fraction(1), Fraction(2), (0,)),
    )
    topology = Topology("pair", ((0, 1, 2, 3),), links, (Port("p", Fraction(1)),))
    network = fluid(topology, Fraction(MB))
    head, tail = [0, 0, 10, 0], [0, 20, 0, 0]
    ticks = network.ticks_per_us
    when = offsets(network, [h * ticks for h in head], [t * ticks for t in tail])
    assert when[0] == (0 + 1 + 20) * ticks
    assert when[1] == (10 + 5 + 0) * ticks
    assert when[2] == (0 + 1 + 5 + 0) * ticks  # start 0, occupancy 1 of the first, alpha 5 of the last


def test_distances_follow_alpha_alone_unless_chunks_are_whole() -> None:
    topology = ring(6, "1/2")
    assert (
        distances(fluid(topology, Fraction(MB)), [0])[3] * 2 == 3 * fluid(topology, Fraction(MB)).ticks_per_us
    )
    assert distances(whole(topology, Fraction(MB)), [0])[3] == 3 * (FS_PER_US // 2 + 20 * FS_PER_US)


def test_unreachable_ranks_are_named() -> None:
    one_way = Topology("oneway", ((0, 1),), (Link(0, 1, Fraction(1), Fraction(1), Fraction(1)),))
    with pytest.raises(ValueError, match="no path leads from rank 1 to rank 0"):
        lower_bound(one_way, build("allgather", 2), 100)
    with pytest.raises(ValueError, match="3 ranks"):
        lower_bound(one_way, build("allgather", 3), 100)


def test_nothing_to_move_takes_no_time() -> None:
    single = Topology("single", ((0,),), ())
    for name in ("allgather", "allreduce", "alltoall", "broadcast"):
        assert lower_bound(single, build(name, 1), 100) == Bound(0, "nothing has to be moved")
        assert granular_bound(single, build(name, 1), 100).time_fs == 0


def test_custom_collectives_with_several_sources_and_destinations() -> None:
    chunk = Chunk(((0, 0), (2, 0)), ((1, 0), (3, 0)))
    collective = Collective("custom", 4, (chunk,), False, (1,) * 4, (1,) * 4, (None,) * 4, 1, 1)
    # Each destination is one hop of 5 + 20 from a source, and can be fed over both its links.
    assert lower_bound(ring(4, "5"), collective, MB).time_us == 15.0
    assert granular_bound(ring(4, "5"), collective, MB).time_us == 25.0


def test_tried_bounds_are_listed_and_the_strongest_is_chosen() -> None:
    bound = lower_bound(ring(8, "1"), build("allreduce", 8), 8 * MB)
    assert (bound.name, bound.time_fs) in bound.tried
    assert bound.time_fs == max(fs for _, fs in bound.tried)
    assert len(bound.tried) >= 2


def test_custom_chunks_of_one_place_may_travel_together() -> None:
    """Rank 0's chunk is wanted at two places of rank 1, and is copied there."""
    places = [Chunk(((0, 0),), ((1, offset),)) for offset in range(2)]
    custom = Collective("custom", 2, tuple(places), False, (1, 0), (0, 2), (None, None), 2, 1)
    custom.check()
    once = replace(custom, chunks=tuple(places[:1]))
    topology = load_topology("ring:2")
    assert lower_bound(topology, custom, 10**6).time_fs == lower_bound(topology, once, 10**6).time_fs
    # Wanted on several ranks it is a broadcast, however it is written; and what its own rank wants is there.
    ranks = [Chunk(((0, 0),), ((rank, 0),)) for rank in range(4)]
    apart = replace(custom, ranks=4, chunks=tuple(ranks), input_chunks=(1, 0, 0, 0), output_chunks=(1,) * 4,
                    inplace=(None,) * 4, size_chunks=1)  # fmt: skip
    apart.check()
    ring = load_topology("ring:4")
    assert lower_bound(ring, apart, 10**6).time_fs == lower_bound(ring, build("broadcast", 4), 10**6).time_fs


@pytest.mark.parametrize("collective", ["allgather", "broadcast"])
def test_bounds_of_hours_are_bounds(collective: str) -> None:
    topology = load_topology("ring:4")
    bound = granular_bound(topology, build(collective, 4), 2**50)
    assert bound.time_fs > 10**18
