"""Bounds for machines of any size: never above a true optimum, and met where they should be."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from brute_force import Search, TooLarge
from irregular_clusters import irregular
from numpy.typing import NDArray
from test_bounds_brute import MANY_CHUNKS, random_topology

from taccl.errors import TacclError
from taccl.profiles.link_table import link_table
from taccl.profiles.load import load_topology
from taccl.profiles.topology import reverse
from taccl.synth.bounds import lower_bound, scale
from taccl.synth.bounds.scale import COLLECTIVES, scale_bound
from taccl.synth.collective import build
from taccl.synth.cost import FS_PER_US, costs
from taccl.synth.engines import BASELINES
from taccl.synth.schedule import completion_fs, time_by_priority

INSTANCES = 18
MAX_STATES = 6000


@pytest.mark.parametrize("grain", ["whole", "single"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_no_optimum_is_below_a_bound(name: str, grain: str) -> None:
    solved = tight = 0
    # Few searches of allreduces come to an end.
    for seed in range(40 if name == "allreduce" else INSTANCES):
        rng = random.Random(f"{name} {seed}")
        few = name in (*MANY_CHUNKS, "allreduce", "alltoallv")
        topology = random_topology(rng, 3 if few else 4)
        # An allreduce of three ranks has three chunks of three contributions: too many for most searches.
        partition = rng.choice([1, 1, 2]) if name in ("broadcast", "reduce") or topology.ranks < 3 else 1
        demand = _some_demand(rng, name, topology.ranks)
        counts = None if demand is None else demand.tolist()
        collective = build(name, topology.ranks, partition, demand=counts)
        size = collective.size_chunks * 10**6
        links = link_table(topology)
        fluid, kept = (
            scale_bound(topology, links, name, partition, size, g, demand=demand) for g in ("fluid", grain)
        )
        assert fluid.time_fs <= kept.time_fs
        least = -(-kept.time_fs // FS_PER_US)  # optima are whole us
        search = Search(topology, collective, MAX_STATES, 1 if grain == "single" else None)
        try:
            assert least == 0 or not search.possible(least - 1), f"seed {seed}: {kept.name} is beaten"
            tight += search.optimum(least) == least
            solved += 1
        except TooLarge:
            continue
    assert solved >= (3 if name == "allreduce" else INSTANCES // 8), (
        "too few instances were solved for the test to mean anything"
    )
    assert tight >= solved // 3, "the bounds have become weak, or the search misses good schedules"


def _some_demand(rng: random.Random, name: str, ranks: int) -> NDArray[np.int64] | None:
    """Of an alltoallv what each of few ranks sends to each, some of it to itself."""
    if name != "alltoallv":
        return None
    rows = [
        [rng.choice([0, 0, 1, 1, 2]) if s != d else rng.randrange(2) for d in range(ranks)]
        for s in range(ranks)
    ]
    rows[0][1] = 1
    return np.array(rows)


@pytest.mark.parametrize(
    "spec", ["ndv2:2", "dgx2-1mb:2", "dgx-a100:2", "torus2d:4x4", "mesh2d:3x3", "ring:8"]
)
def test_no_baseline_is_below_a_bound(spec: str) -> None:
    topology = load_topology(spec)
    links = link_table(topology)
    for name in (name for name in COLLECTIVES if name != "alltoallv"):
        fluid, whole = (scale_bound(topology, links, name, 1, 16 * 10**6, g) for g in ("fluid", "whole"))
        assert fluid.time_fs <= whole.time_fs
        collective = build(name, topology.ranks)
        priced = costs(topology, collective.chunk_bytes(16 * 10**6))
        for baseline in BASELINES.values():
            try:
                messages = time_by_priority(topology, collective, priced, baseline(topology, collective))
            except (TacclError, ValueError):
                continue  # this baseline knows no such collective here
            assert completion_fs(priced, messages) >= whole.time_fs


@pytest.mark.parametrize(
    ("spec", "name", "size_mb", "grain", "expected_us"),
    [
        # One chunk a message: each is met by a schedule, so neither can be above or below.
        ("dgx2-1mb:2", "allgather", 32, "single", 279.2),
        ("dgx2-1mb:5", "allgather", 80, "single", 924.8),
        ("ndv2-1mb:10", "allgather", 80, "single", 7816.2),
        ("ndv2-1mb:10", "alltoall", 80, "single", 61977.6),
        ("torus2d:8x8", "allgather", 64, "single", 328.0),
        # By hand: 56 foreign blocks of 1 MB through 8 NICs of 12.5 MB/ms each way, and one alpha.
        ("dgx2:5", "alltoall", 0.08, "single", 346.24),
    ],
)
def test_known_values(spec: str, name: str, size_mb: float, grain: str, expected_us: float) -> None:
    topology = load_topology(spec)
    bound = scale_bound(topology, link_table(topology), name, 1, int(size_mb * 10**6), grain)
    assert bound.time_us == pytest.approx(expected_us, abs=1e-5)


@pytest.mark.parametrize("spec", ["ndv2:2", "mesh2d:3x3", "fat-tree:4x4"])
def test_collecting_is_spreading_backwards(spec: str) -> None:
    topology = load_topology(spec)
    links, turned = link_table(topology), link_table(reverse(topology))
    for there, back in (("allgather", "reducescatter"), ("broadcast", "reduce"), ("scatter", "gather")):
        for grain in ("fluid", "whole", "single"):
            forth = scale_bound(topology, turned, there, 2, 10**6, grain, root=1)
            assert scale_bound(topology, links, back, 2, 10**6, grain, root=1).time_fs == forth.time_fs


def test_a_rank_without_links_has_no_bound() -> None:
    topology = load_topology("ring:4")
    links = link_table(topology)
    with pytest.raises(ValueError, match="no bound for 'alltoallv'"):
        scale_bound(topology, links, "alltoallv", 1, 10**6)
    with pytest.raises(ValueError, match="grain 'coarse'"):
        scale_bound(topology, links, "allgather", 1, 10**6, "coarse")


def test_it_stays_below_what_is_known_of_small_machines() -> None:
    """The exact bounds of small machines see every cut; those at scale only some."""
    weak = 0
    for spec in ("ndv2:1", "dgx2:1", "dgx-a100:2", "torus2d:4x4"):
        topology = load_topology(spec)
        for name in ("allgather", "alltoall", "broadcast"):
            exact = lower_bound(topology, build(name, topology.ranks), 10**8).time_fs
            assert scale_bound(topology, link_table(topology), name, 1, 10**8).time_fs >= 0.5 * exact
            weak += scale_bound(topology, link_table(topology), name, 1, 10**8).time_fs < 0.98 * exact
    assert weak <= 4


def test_counting_is_part_of_the_bound_that_commands_show() -> None:
    topology = load_topology("dgx-a100:4")
    # Too many flow variables for one program: single sinks alone see less than a quarter of this.
    shown = lower_bound(topology, build("alltoall", 32, 1), 10**6)
    counted = scale_bound(topology, link_table(topology), "alltoall", 1, 10**6)
    assert shown.time_fs == counted.time_fs and shown.name == counted.name
    ring = load_topology("ring:40")
    for name in ("allgather", "reducescatter", "alltoall"):
        counted = scale_bound(ring, link_table(ring), name, 1, 10**6)
        assert lower_bound(ring, build(name, 40, 1), 10**6) == counted


@pytest.mark.parametrize(("name", "leaving"), [("allgather", False), ("reducescatter", True)])
def test_the_bottleneck_names_ranks_bytes_and_ports(name: str, leaving: bool) -> None:
    topology = load_topology("ndv2:2")
    cut = scale_bound(topology, link_table(topology), name, 1, 16 * 10**6).bottleneck
    assert cut is not None and cut.ranks in (tuple(range(8)), tuple(range(8, 16)))
    assert (cut.leaving, cut.bytes) == (leaving, 8 * 10**6)
    node = 0 if cut.ranks[0] == 0 else 1
    first = cut.crossing[0]
    ports = {
        f"node{node}.ib0.{'out' if leaving else 'in'}",
        f"node{1 - node}.ib0.{'in' if leaving else 'out'}",
    }
    assert first.resource in ports and first.weight == 1 and first.latency_us == pytest.approx(2.6)
    assert topology.ports[first.id - len(topology.links)].name == first.resource


def test_a_weak_node_is_cut_off_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines of very many links not every cut is looked at, but those of the weakest ranks and nodes are."""
    betas = [[Fraction(40)] * 4 for _ in range(12)]
    betas[7] = [Fraction(40), Fraction(80), Fraction(40), Fraction(40)]
    topology = irregular([4] * 12, betas)
    links = link_table(topology)
    for collective in ("allgather", "alltoall"):
        known = scale_bound(topology, links, collective, 1, 48 * 10**6)
        with monkeypatch.context() as patch:
            patch.setattr(scale, "MOST_LOOKS", 1)
            few = scale_bound(topology, links, collective, 1, 48 * 10**6)
        assert "ranks 28-31" in known.name
        assert few.time_fs == known.time_fs
