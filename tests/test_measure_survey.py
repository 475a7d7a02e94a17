"""The whole measurement against simulated machines: what is there is found, what is not is not."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from cluster.simulated import Flow, SimulatedProber
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp

from taccl.profiles.measure.boundary import by_cost, by_name, find_nodes, meet
from taccl.profiles.measure.classes import classify
from taccl.profiles.measure.result import document, rounded, topology
from taccl.profiles.measure.rounds import directed, pack, tournament
from taccl.profiles.measure.survey import FULL, QUICK, Survey, survey
from taccl.profiles.measure.together import FoundPort, port_beta
from taccl.profiles.profile_file import read_topology
from taccl.profiles.profile_writer import write_topology
from taccl.sketches.symmetry import is_automorphism


def crossing(sources: Iterable[int], targets: Iterable[int]) -> frozenset[Flow]:
    targets = list(targets)
    return frozenset((s, t) for s in sources for t in targets if s != t)


def machine(
    nodes: int,
    per_node: int,
    uplinks: list[float] | None,
    intra: tuple[float, float] = (3.0, 100.0),
    inter: tuple[float, float] = (50.0, 900.0),
    same_name: bool = False,
    **noise: float,
) -> SimulatedProber:
    """Nodes with one uplink each of the given beta (both ways); None: nothing shared."""
    ranks = nodes * per_node
    node = [rank // per_node for rank in range(ranks)]
    ports = []
    for k, beta in enumerate(uplinks or []):
        inside = [r for r in range(ranks) if node[r] == k]
        outside = [r for r in range(ranks) if node[r] != k]
        ports.append((f"{k}.out", beta, crossing(inside, outside)))
        ports.append((f"{k}.in", beta, crossing(outside, inside)))
    return SimulatedProber(
        hosts=["host" if same_name else f"host{k}" for k in node],
        alpha_us=lambda s, d: (intra if node[s] == node[d] else inter)[0],
        beta=lambda s, d: (intra if node[s] == node[d] else inter)[1],
        ports=ports,
        occupancy_share=0.4,
        **noise,  # type: ignore[arg-type]
    )


def found_ports(found: Survey) -> dict[str, float]:
    return {port.name: port.beta_us_per_mb for port in found.ports}


@pytest.mark.parametrize("same_name", [False, True])
@pytest.mark.parametrize("effort", [QUICK, FULL])
def test_two_nodes_with_shared_uplinks(effort: object, same_name: bool) -> None:
    prober = machine(2, 4, [1000.0, 1000.0], same_name=same_name, noise=0.02, outliers=0.02)
    found = survey(prober, effort)  # type: ignore[arg-type]
    assert found.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    ports = found_ports(found)
    assert sorted(ports) == [f"node{k}.uplink.{way}" for k in (0, 1) for way in ("in", "out")]
    assert list(ports.values()) == pytest.approx([1000] * 4, rel=0.05)
    assert [cls.name for cls in found.classes] == ["inter", "intra"]
    inter, intra = (cls.fit for cls in found.classes)
    assert (inter.alpha_us, inter.beta_us_per_mb) == pytest.approx((50, 1000), rel=0.05)
    assert (intra.alpha_us, intra.beta_us_per_mb) == pytest.approx((3, 100), rel=0.05)
    assert (inter.occupancy_us, intra.occupancy_us) == pytest.approx((20, 1.2), rel=0.1)


def test_four_nodes_with_one_slow_uplink() -> None:
    found = survey(machine(4, 2, [1000.0, 1000.0, 1000.0, 4000.0], noise=0.02), QUICK)
    assert found.nodes == ((0, 1), (2, 3), (4, 5), (6, 7))
    for name, beta in found_ports(found).items():
        assert beta == pytest.approx(4000 if name.startswith("node3") else 1000, rel=0.05)
    assert sorted(found_ports(found)) == [f"node{k}.uplink.{way}" for k in range(4) for way in ("in", "out")]
    inter = [cls for cls in found.classes if cls.name.startswith("inter")]
    assert [cls.fit.beta_us_per_mb for cls in inter] == pytest.approx([1000, 4000], rel=0.05)
    assert [len(cls.links) for cls in inter] == [24, 24]


def test_a_full_mesh_shares_nothing() -> None:
    prober = machine(1, 8, None, noise=0.03, outliers=0.02)
    found = survey(prober, QUICK)
    assert found.ports == ()
    assert found.nodes == (tuple(range(8)),)
    assert [len(cls.links) for cls in found.classes] == [56]
    assert found.concurrent


def test_nodes_that_share_nothing_have_no_ports() -> None:
    found = survey(machine(3, 4, None, noise=0.02), QUICK)
    assert len(found.nodes) == 3
    assert found.ports == ()


def test_a_switch_shows_as_a_port_for_each_rank_and_direction() -> None:
    prober = machine(1, 8, None, noise=0.02)
    prober.ports = [
        *((f"{r}.out", 100.0, crossing([r], range(8))) for r in range(8)),
        *((f"{r}.in", 100.0, crossing(range(8), [r])) for r in range(8)),
    ]
    found = survey(prober, QUICK)
    ports = found_ports(found)
    assert sorted(ports) == sorted(f"rank{r}.switch.{way}" for r in range(8) for way in ("in", "out"))
    assert all(beta == pytest.approx(100, rel=0.05) for beta in ports.values())
    result = topology(found, "switch", "simulated")
    assert [switch.ranks for switch in result.switches] == [tuple(range(8))]
    assert all(len(link.ports) == 2 for link in result.links)


def test_two_network_interfaces_of_a_node_are_told_apart() -> None:
    prober = machine(3, 4, None, noise=0.02)
    prober.ports = []
    for node in range(3):
        for pair in ((0, 1), (2, 3)):
            near = [4 * node + k for k in pair]
            far = [r for r in range(12) if r // 4 != node]
            prober.ports += [
                (f"{near}.out", 1000.0, crossing(near, far)),
                (f"{near}.in", 1000.0, crossing(far, near)),
            ]
    found = survey(prober, QUICK)
    groups = {(port.direction, port.ranks) for port in found.ports}
    assert groups == {
        (way, (4 * n + k, 4 * n + k + 1)) for way in ("out", "in") for n in range(3) for k in (0, 2)
    }
    nics = topology(found, "nics", "simulated").nics
    assert sorted(nic.ranks for nic in nics) == sorted({ranks for _, ranks in groups})


def test_an_uplink_that_only_many_flows_fill() -> None:
    # Two flows at 900 us/MB need 450; the uplink carries 300: only all eight together show it.
    found = survey(machine(3, 8, [300.0] * 3, noise=0.01), QUICK)
    ports = found_ports(found)
    assert sorted(ports) == [f"node{k}.uplink.{way}" for k in range(3) for way in ("in", "out")]
    assert all(beta == pytest.approx(300, rel=0.1) for beta in ports.values())


def test_pairs_inside_a_node_that_share_a_bus() -> None:
    prober = machine(1, 4, None, noise=0.02)
    prober.ports = [("bus", 100.0, crossing(range(4), range(4)))]
    found = survey(prober, QUICK)
    assert found_ports(found) == {"node0.bus": pytest.approx(100, rel=0.05)}


def test_probes_for_ports_grow_with_the_ranks_and_not_with_the_pairs() -> None:
    asked = []
    for nodes in (2, 4, 8):
        prober = machine(nodes, 4, [1000.0] * nodes)
        survey(prober, QUICK)
        asked.append(sum(probe.together for probe in prober.probes))
    assert asked[1] < 2.6 * asked[0]
    assert asked[2] < 2.6 * asked[1]  # the pairs grow fourfold


def test_probes_for_trunks_grow_with_the_nodes_where_none_explains_what_holds_flows_up() -> None:
    asked = []
    for nodes in (6, 12):
        prober = machine(nodes, 1, [900.0] * nodes)
        prober.ports = [
            *prober.ports,
            ("switch", 900.0 / (0.6 * nodes), crossing(range(nodes), range(nodes))),
        ]
        survey(prober, QUICK)
        asked.append(sum(probe.together and len(probe.flows) > nodes // 2 for probe in prober.probes))
    assert asked[1] < 2.6 * asked[0]  # rounds times flows of each grow fourfold


@pytest.mark.parametrize("sizes", [(), (8192, 65536)])
def test_many_ranks_that_start_late_are_no_port(sizes: tuple[int, ...]) -> None:
    """4 MiB take 840 us, a common start of 12 ranks as long."""
    prober = machine(6, 2, None, intra=(1.0, 100.0), inter=(10.0, 200.0), noise=0.02)
    prober.gate_us = 70.0
    assert found_ports(survey(prober, QUICK, sizes)) == {}
    shared = machine(6, 2, [200.0] * 6, intra=(1.0, 100.0), inter=(10.0, 200.0), noise=0.02)
    shared.gate_us = 70.0
    ports = survey(shared, QUICK, sizes).ports
    assert [port.kind for port in ports] == ["nic"] * 12
    assert [port.beta_us_per_mb for port in ports] == [pytest.approx(200, rel=0.06)] * 12


def test_slow_links_are_timed_no_more_often_because_of_quick_ones_beside_them() -> None:
    """A message of 4 MiB takes 160 ms between nodes; within one many repeats take no time."""
    prober = machine(2, 4, [40_000.0] * 2, inter=(1000.0, 40_000.0))
    found = survey(prober, QUICK)
    assert found.concurrent
    long = [
        probe
        for probe in prober.probes
        if not probe.together and max(trial.bytes for row in probe.trials for trial in row) > 2**18
    ]
    assert any(len({s // 4 == d // 4 for s, d in members}) == 2 for members in rounds_of(prober))
    for probe in long:
        if any(s // 4 != d // 4 for s, d in probe.flows):
            assert probe.repeats <= QUICK.repeats + 5


def rounds_of(prober: SimulatedProber) -> list[tuple[Flow, ...]]:
    return [probe.flows for probe in prober.probes if len(probe.flows) > 1 and not probe.together]


def test_sleeping_ranks_hear_of_the_work_on_every_link() -> None:
    prober = machine(2, 4, [1000.0] * 2)
    survey(prober, QUICK)
    assert prober.signs >= 8 * 7


def test_what_is_within_nodes_of_one_crowded_host_and_what_is_between_them_is_kept_apart() -> None:
    prober = machine(2, 3, [1000.0] * 2, same_name=True, noise=0.02)
    prober.host_cores = 2
    found = survey(prober, QUICK)
    assert found.nodes == ((0, 1, 2), (3, 4, 5))
    inter, intra = (cls.fit for cls in found.classes)
    assert (inter.alpha_us, inter.beta_us_per_mb) == pytest.approx((50, 1000), rel=0.05)
    assert intra.alpha_us == pytest.approx(3, rel=0.05)
    assert intra.beta_us_per_mb < 0.5 * inter.beta_us_per_mb


def test_one_disturbed_latency_does_not_make_unlike_links_alike() -> None:
    fit = survey(machine(1, 3, None), QUICK).fits[0, 1]
    fits = {(0, far): replace(fit, alpha_us=50.0, alpha_ci_us=2.0) for far in range(1, 5)}
    fits |= {(1, far): replace(fit, alpha_us=500.0, alpha_ci_us=2.0) for far in range(2, 5)}
    fits[0, 4] = replace(fits[0, 4], alpha_us=52.0, alpha_ci_us=2900.0)
    fits[1, 4] = replace(fits[1, 4], alpha_us=480.0, alpha_ci_us=2900.0)
    classes = classify(fits, dict.fromkeys(fits, "inter"))
    assert [(len(cls.links), cls.fit.alpha_us) for cls in classes] == [(4, 50.0), (3, 500.0)]


@functools.cache
def pair() -> Survey:
    return survey(machine(2, 1, None), QUICK)


@settings(deadline=None)
@given(st.lists(st.floats(10, 1000), min_size=1, max_size=12))
def test_ports_that_count_as_equal_are_so_within_a_third(betas: list[float]) -> None:
    ports = tuple(
        FoundPort(f"node{k}.uplink.out", "nic", beta, ((0, 1),), (0,), 0, "out")
        for k, beta in enumerate(betas)
    )
    result = topology(replace(pair(), ports=ports), "steps", "simulated")
    for beta, port in zip(betas, result.ports, strict=True):
        assert beta / 1.31 < port.beta_us_per_mb < beta * 1.31
    if max(betas) < 1.15 * min(betas):
        assert len({port.beta_us_per_mb for port in result.ports}) == 1


def test_a_measurement_has_the_same_result_twice() -> None:
    def text() -> str:
        return write_topology(topology(survey(machine(2, 3, [800.0] * 2, noise=0.05), QUICK), "m", "s"))

    assert text() == text()


@settings(deadline=None, max_examples=8)
@given(
    nodes=st.integers(2, 4),
    per_node=st.integers(2, 4),
    rates=st.lists(st.sampled_from([500.0, 1000.0, 3000.0, 20_000.0]), min_size=4, max_size=4),
    alpha=st.floats(20, 3000),
    seed=st.integers(0, 1000),
)
def test_any_star_of_nodes_comes_back(
    nodes: int, per_node: int, rates: list[float], alpha: float, seed: int
) -> None:
    rates = rates[:nodes]
    # Of ranks that all have one host name, the step to a node forty times slower can hide the one between the others.
    assume(alpha > 200 or max(rates) < 20_000)
    prober = machine(nodes, per_node, rates, inter=(alpha, 450.0), noise=0.02, seed=seed, same_name=True)
    found = survey(prober, QUICK)
    assert len(found.nodes) == nodes
    result = topology(found, "star", "simulated")
    node_of = result.node_of()
    for link in result.links:
        if node_of[link.src] != node_of[link.dst]:
            slowest = max(rates[node_of[link.src]], rates[node_of[link.dst]])
            assert float(link.beta_us_per_mb) == pytest.approx(slowest, rel=0.08)
            assert float(link.alpha_us) == pytest.approx(alpha, rel=0.08)
    # With flows to one other node a port shows the slower of both ends, with flows to several its own rate; and
    # one that limits every way must show.
    for port in found.ports:
        own, others = rates[port.node], [rate for k, rate in enumerate(rates) if k != port.node]
        assert any(port.beta_us_per_mb == pytest.approx(x, rel=0.1) for x in (own, max(own, min(others))))
    for k, rate in enumerate(rates):
        if rate >= min(other for j, other in enumerate(rates) if j != k):
            assert {port.direction for port in found.ports if port.node == k} == {"out", "in"}


def uneven_star(per_node: list[int], uplinks: list[float], noise: float, seed: int) -> SimulatedProber:
    """Nodes with so many ranks each, and an uplink each of the given beta (both ways)."""
    node = [k for k, ranks in enumerate(per_node) for _ in range(ranks)]
    prober = machine(1, len(node), None, noise=noise, seed=seed)
    prober.hosts = [f"host{k}" for k in node]
    prober.alpha_us = lambda s, d: 3.0 if node[s] == node[d] else 200.0
    prober.beta = lambda s, d: 100.0 if node[s] == node[d] else 300.0
    prober.occupancy_share = 0.1
    for k, beta in enumerate(uplinks):
        inside = [r for r, mine in enumerate(node) if mine == k]
        outside = [r for r, mine in enumerate(node) if mine != k]
        prober.ports = [
            *prober.ports,
            (f"{k}.out", beta, crossing(inside, outside)),
            (f"{k}.in", beta, crossing(outside, inside)),
        ]
    return prober


def most_at_once(links: dict[Flow, float], ports: Iterable[tuple[float, Iterable[Flow]]]) -> float:
    """Bytes/us that flows bring through together at most. links, ports: beta in us/MB."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    rates = {flow: solver.NumVar(0, 1e6 / beta, "") for flow, beta in links.items()}
    for beta, through in ports:
        solver.Add(sum(rates[flow] for flow in through if flow in rates) <= 1e6 / beta)
    solver.Maximize(sum(rates.values()))
    assert solver.Solve() == solver.OPTIMAL
    return float(solver.Objective().Value())


@settings(deadline=None, max_examples=10)
@example(
    per_node=[1, 2, 3], uplinks=[400.0, 400.0, 1400.0, 1.0, 1.0, 1.0], seed=0
)  # one slow: 1.3 fills the others
@example(per_node=[1] * 6, uplinks=[400.0, *[1200.0] * 5], seed=0)  # one that no two others fill
@example(per_node=[1, 2, 2, 2, 2, 1], uplinks=[1500.0, 700.0, 1000.0, 1000.0, 400.0, 400.0], seed=29)
@example(per_node=[2, 1, 2, 1, 2, 3], uplinks=[700.0, 1500.0, 400.0, 3000.0, 1500.0, 8000.0], seed=35)
@given(
    per_node=st.lists(st.integers(1, 3), min_size=2, max_size=6),
    uplinks=st.lists(
        st.sampled_from([400.0, 500.0, 700.0, 1000.0, 1500.0, 3000.0, 8000.0]), min_size=6, max_size=6
    ),
    seed=st.integers(0, 1000),
)
def test_what_passes_at_once_between_uneven_nodes_is_what_the_profile_says(
    per_node: list[int], uplinks: list[float], seed: int
) -> None:
    uplinks = uplinks[: len(per_node)]
    prober = uneven_star(per_node, uplinks, 0.02, seed)
    found = topology(survey(prober, QUICK), "star", "simulated")
    node_of = found.node_of()
    assert len(found.nodes) == len(per_node)
    ports = [
        (float(port.beta_us_per_mb), [(link.src, link.dst) for link in found.links if index in link.ports])
        for index, port in enumerate(found.ports)
    ]
    for node in range(len(per_node)):
        for at in (0, 1):  # all that leaves it, all that comes to it
            far = [
                link
                for link in found.links
                if node_of[link.src] != node_of[link.dst] and node_of[(link.src, link.dst)[at]] == node
            ]
            said = most_at_once({(link.src, link.dst): float(link.beta_us_per_mb) for link in far}, ports)
            true = most_at_once(
                {(link.src, link.dst): 300.0 for link in far},
                [(beta, through) for _, beta, through in prober.ports],
            )
            assert 0.8 * true < said < 1.25 * true


def with_racks(prober: SimulatedProber, node_of: list[int], rack_of: list[int], trunks: list[float]) -> None:
    """Give each rack of nodes a trunk of this beta, both ways."""
    for rack, beta in enumerate(trunks):
        inside = [rank for rank, node in enumerate(node_of) if rack_of[node] == rack]
        outside = [rank for rank, node in enumerate(node_of) if rack_of[node] != rack]
        prober.ports = [
            *prober.ports,
            (f"rack{rack}.out", beta, crossing(inside, outside)),
            (f"rack{rack}.in", beta, crossing(outside, inside)),
        ]


@pytest.mark.parametrize(
    ("per_node", "rack_of", "trunks"),
    [
        (2, [0, 0, 1, 1], [900.0, 900.0]),
        (1, [0, 1, 0, 1], [600.0, 600.0]),
        (2, [0, 0, 1, 1], [2000.0, 2000.0]),  # slower than an uplink
        (2, [0, 0, 0, 0, 1, 1, 1, 1], [450.0, 450.0]),
        (1, [0, 0, 1, 1, 2, 2], [900.0, 700.0, 900.0]),
        (2, [0, 1, 0, 1, 2, 2, 1, 0], [450.0, 450.0, 900.0]),
        (1, [0] * 8 + [1] * 8, [225.0, 225.0]),
    ],
)
def test_trunks_of_racks(per_node: int, rack_of: list[int], trunks: list[float]) -> None:
    """Found with the nodes behind them, and all uplinks as they are."""
    nodes = len(rack_of)
    prober = machine(nodes, per_node, [900.0] * nodes, noise=0.02, seed=1)
    with_racks(prober, [rank // per_node for rank in range(nodes * per_node)], rack_of, trunks)
    found = survey(prober, QUICK)
    ways: dict[tuple[frozenset[int], frozenset[int]], float] = {}
    for port in found.ports:
        if port.kind == "trunk":
            ends = [frozenset(link[at] // per_node for link in port.links) for at in (0, 1)]
            assert len(port.links) == len(ends[0]) * len(ends[1]) * per_node**2
            assert (ends[0], ends[1]) not in ways
            ways[ends[0], ends[1]] = port.beta_us_per_mb
    expected = {}
    for rack, beta in enumerate(trunks):
        own = frozenset(k for k in range(nodes) if rack_of[k] == rack)
        rest = frozenset(range(nodes)) - own
        expected |= {(own, rest): beta, (rest, own): beta}
    assert ways == {key: pytest.approx(beta, rel=0.06) for key, beta in expected.items()}
    uplinks = [port.beta_us_per_mb for port in found.ports if port.kind == "nic"]
    assert uplinks == [pytest.approx(900, rel=0.06)] * (2 * nodes)
    names = [port.name for port in found.ports]
    assert len(set(names)) == len(names)
    result = topology(found, "racks", "simulated")
    assert read_topology(write_topology(result), "racks.yaml") == result


@pytest.mark.parametrize(
    ("rack_of", "images"),
    [
        ([], [[1, 0, 3, 2, 5, 4, 7, 6], [2, 3, 4, 5, 6, 7, 0, 1], [6, 7, 4, 5, 2, 3, 0, 1]]),
        ([0, 0, 1, 1], [[1, 0, 3, 2, 5, 4, 7, 6], [2, 3, 0, 1, 6, 7, 4, 5], [6, 7, 4, 5, 2, 3, 0, 1]]),
    ],
)
def test_nodes_that_are_alike_are_seen_to_be(rack_of: list[int], images: list[list[int]]) -> None:
    prober = machine(4, 2, [900.0] * 4, noise=0.02)
    if rack_of:
        with_racks(prober, [rank // 2 for rank in range(8)], rack_of, [900.0] * 2)
    found = topology(survey(prober, QUICK), "alike", "simulated")
    assert all(is_automorphism(found, image) for image in images)
    # Racks are not: this one takes a node out of its own.
    assert is_automorphism(found, [0, 1, 4, 5, 2, 3, 6, 7]) == (not rack_of)


@pytest.mark.parametrize(("trunk", "concurrent"), [(900.0, False), (450.0, True)])
def test_flows_that_meet_in_a_trunk_are_not_measured_side_by_side(trunk: float, concurrent: bool) -> None:
    prober = machine(6, 1, [900.0] * 6, noise=0.02)
    with_racks(prober, list(range(6)), [0, 1, 0, 1, 0, 1], [trunk] * 2)
    found = survey(prober, QUICK)
    assert found.concurrent == concurrent
    assert [fit.beta_us_per_mb for fit in found.fits.values()] == [pytest.approx(900, rel=0.06)] * 30


@pytest.mark.parametrize("rate", [1.5, 2.5])
def test_what_all_share_is_no_trunk(rate: float) -> None:
    """Cores that are too few for all flows at once: as many bytes as so many uplinks carry, whichever they take."""
    prober = machine(6, 1, [900.0] * 6, noise=0.02)
    prober.ports = [*prober.ports, ("cores", 900.0 / rate, crossing(range(6), range(6)))]
    assert not [port.name for port in survey(prober, QUICK).ports if port.kind == "trunk"]


@settings(deadline=None, max_examples=8)
@example(
    uplinks=[8000.0, 700.0, 3000.0, 8000.0, 500.0, 400.0, 1500.0, 1000.0],
    per_node=[1, 2, 2, 3, 1, 1, 2, 2],
    seed=10,
)
@given(
    per_node=st.lists(st.integers(1, 3), min_size=4, max_size=7),
    uplinks=st.lists(
        st.sampled_from([400.0, 500.0, 700.0, 1000.0, 1500.0, 3000.0, 8000.0]), min_size=8, max_size=8
    ),
    seed=st.integers(0, 1000),
)
def test_nodes_on_one_switch_have_no_trunk(per_node: list[int], uplinks: list[float], seed: int) -> None:
    prober = uneven_star(per_node, uplinks[: len(per_node)], 0.05, seed)
    prober.outliers = 0.02
    assert not [port.name for port in survey(prober, QUICK).ports if port.kind == "trunk"]


@pytest.mark.parametrize(
    ("rates", "slowdown", "beta"),
    [
        ([1.0], 1.0, 1.0),
        ([1.0, 1.0], 2.0, 1.0),
        ([1.0, 1.0], 1.0, 0.5),
        ([2.0, 2.0, 2.0], 1.5, 0.25),
        # The slow one is done after 1; what the quick one has left then, 0.5, it brings at 2.
        ([2.0, 1.0], 1.25, 1 / 2.5),
    ],
)
def test_the_port_behind_a_slowdown(rates: list[float], slowdown: float, beta: float) -> None:
    assert port_beta(rates, slowdown) == pytest.approx(beta, rel=1e-6)


def test_the_profile_can_be_read_back() -> None:
    found = survey(machine(2, 4, [1000.0] * 2, noise=0.02), QUICK)
    result = topology(found, "star", "simulated: two nodes")
    again = read_topology(write_topology(result), "star.yaml")
    assert again == result
    told = document(found, result)
    assert told["schema"] == "taccl/measure/v1"
    assert len(told["pairs"]) == 56
    assert [cls["links"] for cls in told["classes"]] == [32, 24]


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_what_messages_take_from_each_other_is_found(noise: float) -> None:
    crowded = machine(2, 4, [1000.0] * 2, noise=noise)
    crowded.load_us = 20.0
    found = survey(crowded, QUICK)
    assert found.load_us == pytest.approx(20, rel=0.15)
    result = topology(found, "crowded", "simulated")
    assert result.load_us == pytest.approx(20, rel=0.15)
    assert read_topology(write_topology(result), "crowded.yaml") == result
    assert document(found, result)["load_us"] == float(result.load_us)
    # Links and ports are those of ranks that have a core to themselves.
    alone = topology(survey(machine(2, 4, [1000.0] * 2, noise=noise), QUICK), "crowded", "simulated")
    assert alone.load_us == 0
    for crowd, calm in zip(result.links, alone.links, strict=True):
        assert crowd.ports == calm.ports
        assert float(crowd.alpha_us) == pytest.approx(float(calm.alpha_us), rel=0.1)


@pytest.mark.parametrize(("per_node", "expected"), [(1, 0.0), (3, 20.0)])
def test_load_needs_two_pairs_at_work(per_node: int, expected: float) -> None:
    crowded = machine(2, per_node, [1000.0] * 2)
    crowded.load_us = 20.0
    assert survey(crowded, QUICK).load_us == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("cores", "own"), [(4, 50.0), (3, 200 / 3), (2, 100.0), (1, 200.0)])
def test_ranks_that_copy_what_they_receive_share_their_cores(cores: int, own: float) -> None:
    """Four ranks on one host: alone a copy has a core, in a collective a part of one; all at once they fill the bus."""
    crowded = machine(1, 4, None, intra=(2.0, 50.0))
    ring = frozenset((s, d) for s in range(4) for d in range(4) if s != d)
    crowded.ports = [("cores", 50.0 / cores, ring)]
    crowded.ports += [
        (f"{rank}.in", 50.0, frozenset(flow for flow in ring if flow[1] == rank)) for rank in range(4)
    ]
    crowded.host_cores, crowded.receivers_work = cores, True
    found = survey(crowded, QUICK)
    (links,) = found.classes
    assert links.fit.beta_us_per_mb == pytest.approx(own, rel=0.05)
    ports = found_ports(found)
    if cores < 3:  # of four copies on three cores none is slower by enough to be told from chance
        assert ports.pop("node0.bus") == pytest.approx(50.0 / cores, rel=0.1)
    assert ports == {f"rank{rank}.switch.in": pytest.approx(own, rel=0.05) for rank in range(4)}
    # A message takes some of what all share, whatever can be seen of it.
    assert (found.load_us > 0) == (cores < 4)
    names = [port.name for port in found.ports]
    assert len(set(names)) == len(names)


def test_what_a_fit_leaves_of_nothing_can_be_read_back() -> None:
    found = survey(machine(1, 3, None, noise=0.0), QUICK)
    fitted = found.classes[0]
    fit = replace(fitted.fit, alpha_us=1.2e-17, occupancy_us=3e-18, beta_us_per_mb=1e-19, alpha_ci_us=1e-16)
    found = replace(
        found, classes=(replace(fitted, fit=fit), *found.classes[1:]), reduce_alpha_us=1e-15,
        reduce_beta_us_per_mb=1e-12,
    )  # fmt: skip
    result = topology(found, "quick", "simulated")
    assert (
        result.reduce_alpha_us == result.reduce_beta_us_per_mb == min(x.alpha_us for x in result.links) == 0
    )
    assert read_topology(write_topology(result), "quick.yaml") == result


def test_numbers_have_four_digits() -> None:
    assert str(rounded(40123.456)) == "40120"
    assert float(rounded(0.00123456)) == 0.001235


@settings(deadline=None)
@given(st.integers(2, 33))
def test_a_tournament_lets_each_pair_meet_once(ranks: int) -> None:
    rounds = tournament(ranks)
    pairs = [pair for level in rounds for pair in level]
    assert sorted(pairs) == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    for level in rounds:
        assert len({rank for pair in level for rank in pair}) == 2 * len(level)
    assert len(rounds) == (ranks - 1 if ranks % 2 == 0 else ranks)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 16), st.integers(1, 4))
def test_rounds_respect_what_flows_share(ranks: int, cores: int) -> None:
    flows = directed(tournament(ranks))
    hosts = [rank // 4 for rank in range(ranks)]
    capacity = {("host", host): cores for host in hosts}
    rounds = pack(flows, lambda flow: [("host", hosts[rank]) for rank in flow], capacity)
    assert sorted(flow for members in rounds for flow in members) == sorted(flows)
    for members in rounds:
        busy = [rank for flow in members for rank in flow]
        assert len(busy) == len(set(busy))
        for host in set(hosts):
            there = [flow for flow in members if host in (hosts[flow[0]], hosts[flow[1]])]
            # A flow inside a host with one core cannot be made smaller: it goes there alone.
            assert len(there) <= 1 or sum(hosts[rank] == host for rank in busy) <= cores


def test_the_boundary_of_costs() -> None:
    group = np.array([0, 1, 0, 1, 2])
    cost = np.where(group[:, None] == group[None, :], 2.0, 30.0)
    assert by_cost(cost) == (((0, 2), (1, 3), (4,)), 15.0)
    assert by_cost(np.full((4, 4), 7.0)) == (((0, 1, 2, 3),), 1.0)
    # Near and far pairs that do not form groups (a chain) are no boundary.
    chain = np.full((4, 4), 30.0)
    for a in range(3):
        chain[a, a + 1] = chain[a + 1, a] = 2.0
    assert by_cost(chain)[1] == 1.0


def test_host_names_and_costs_are_both_heard() -> None:
    flat, named = np.full((4, 4), 5.0), ["a", "a", "b", "b"]
    assert find_nodes(named, [flat]) == ((0, 1), (2, 3)) == by_name(named)
    split = np.full((4, 4), 50.0)
    split[:2, :2] = split[2:, 2:] = 5.0
    assert find_nodes(["a"] * 4, [flat, split]) == ((0, 1), (2, 3))
    assert find_nodes(["a"] * 4, [flat, np.minimum(split, 12.0)]) == ((0, 1, 2, 3),)
    assert meet(((0, 1, 2), (3,)), ((0,), (1, 2, 3))) == ((0,), (1, 2), (3,))
