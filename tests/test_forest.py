"""Trees for the bandwidth regime: arborescences, the fluid optimum, rounding, and the schedules made of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import networkx as nx
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
from taccl.synth.coding.node_sums import node_sums
from taccl.synth.collective import Collective, build
from taccl.synth.forest.arborescence import cheapest, shallow
from taccl.synth.forest.fluid import Side, fluid_optima
from taccl.synth.forest.path import cheapest_paths, nodes_of
from taccl.synth.forest.rails import rails
from taccl.synth.forest.rounding import evened, whole_chunks
from taccl.synth.forest.search import COLLECTIVES, Effort, forests, grid, hung_on_the_root
from taccl.synth.forest.shallow import shallow_trees
from taccl.synth.message_table import messages_of
from taccl.synth.symmetric.instance import Instance, instance
from taccl.synth.symmetric.prices import prices
from taccl.synth.symmetric.quotient import trivial_quotient
from taccl.synth.symmetric.search import Task

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    n = draw(st.integers(2, 5))
    cost = np.full((n, n), np.inf)
    for u, v in itertools.permutations(range(n), 2):
        if draw(st.integers(0, 3)):
            cost[u, v] = draw(st.integers(0, 9))
    return cost


def paid(cost: np.ndarray, parents: np.ndarray, root: int) -> float:
    """What a tree costs; fails when it is none."""
    assert parents[root] == -1
    for node in range(len(parents)):
        seen = set()
        while node != root:
            assert node not in seen, "a circle"
            seen.add(node)
            node = int(parents[node])
    return float(sum(cost[parents[v], v] for v in range(len(parents)) if v != root))


def least(cost: np.ndarray, root: int) -> float | None:
    """By trying every choice of parents."""
    others = [v for v in range(len(cost)) if v != root]
    best: float | None = None
    for parents in itertools.product(range(len(cost)), repeat=len(others)):
        before = dict(zip(others, parents, strict=True))
        price = float(sum(cost[u, v] for v, u in before.items()))
        if np.isinf(price) or (best is not None and price >= best):
            continue
        if all(_leads_to(before, v, root, len(cost)) for v in others):
            best = price
    return best


def _leads_to(before: dict[int, int], node: int, root: int, steps: int) -> bool:
    for _ in range(steps):
        if node == root:
            return True
        node = before[node]
    return node == root


@settings(deadline=None, max_examples=200)
@given(matrices(), st.data())
def test_arborescences_are_the_cheapest(cost: np.ndarray, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, len(cost) - 1))
    expected = least(cost, root)
    found = cheapest(cost, root)
    assert (found is None) == (expected is None)
    if found is not None:
        assert paid(cost, found, root) == expected


@settings(deadline=None, max_examples=150)
@given(matrices(), st.data())
def test_shallow_trees_keep_their_depth(cost: np.ndarray, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, len(cost) - 1))
    depth = data.draw(st.integers(1, len(cost)))
    found = shallow(cost, root, depth)
    if found is None:
        return
    expected = least(cost, root)
    assert expected is not None and paid(cost, found, root) >= expected
    for node in range(len(cost)):
        steps = 0
        while node != root:
            node, steps = int(found[node]), steps + 1
        assert steps <= depth


@settings(deadline=None, max_examples=150)
@given(matrices(), st.data())
def test_paths_are_the_cheapest_of_their_length(cost: np.ndarray, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, len(cost) - 1))
    depth = data.draw(st.integers(1, 4))
    price, before = cheapest_paths(cost, root, depth)
    for target in range(len(cost)):
        others = [v for v in range(len(cost)) if v not in (root, target)]
        ways = [
            sum(cost[a, b] for a, b in itertools.pairwise((root, *middle, target)))
            for count in range(depth)
            for middle in itertools.permutations(others, count)
        ]
        expected = 0.0 if target == root else min(ways, default=np.inf)
        assert price[depth, target] == expected
        if np.isfinite(expected):
            nodes = nodes_of(before, depth, target)
            assert nodes[0] == root and nodes[-1] == target and len(nodes) <= depth + 1
            assert sum(cost[a, b] for a, b in itertools.pairwise(nodes)) == expected


def at_block(topology: Topology, size_bytes: int) -> Instance:
    links = link_table(topology)
    return instance(
        topology, links, trivial_quotient(topology, links), prices(topology, links, Fraction(size_bytes))
    )


def holds_of(inst: Instance) -> np.ndarray:
    resources = 1 + max(r for holds in inst.lane_holds for r, _ in holds)
    table = np.zeros((len(inst.lane_holds), resources))
    for lane, holds in enumerate(inst.lane_holds):
        for resource, hold in holds:
            table[lane, resource] += hold
    return table


@st.composite
def graphs(draw: st.DrawFn) -> Topology:
    """Strongly connected, links of several rates, some behind ports of their rank."""
    n = draw(st.integers(3, 6))
    ports = tuple(Port(f"out{r}", Fraction(draw(st.sampled_from([5, 15])))) for r in range(n))
    links = []
    for u, v in itertools.permutations(range(n), 2):
        if v == (u + 1) % n or draw(st.booleans()):
            beta = Fraction(draw(st.sampled_from([10, 20, 40])))
            held = (u,) if draw(st.booleans()) else ()
            links.append(Link(u, v, Fraction(1), beta, Fraction(draw(st.sampled_from([0, 1]))), held))
    return Topology("graph", (tuple(range(n)),), tuple(links), ports)


@settings(deadline=None, max_examples=40, suppress_health_check=SLOW)
@given(graphs(), st.data())
def test_a_broadcast_flows_as_fast_as_the_narrowest_cut_lets_it(
    topology: Topology, data: st.DataObject
) -> None:
    """Edmonds 1973: where links are dedicated, trees carry what flows to the worst rank could."""
    topology = Topology(
        "graph",
        topology.nodes,
        tuple(Link(x.src, x.dst, x.alpha_us, x.beta_us_per_mb, Fraction(0)) for x in topology.links),
    )
    root = data.draw(st.integers(0, topology.ranks - 1))
    inst = at_block(topology, 10**6)
    optima = fluid_optima(
        [Side(inst, root, 0)], [1], 1, False, holds_of(inst), range(1, topology.ranks), 0, lambda: False
    )
    graph = nx.DiGraph()
    for link in topology.links:
        rate = 1.0 / float(link.beta_us_per_mb)
        old = graph.get_edge_data(link.src, link.dst, {"capacity": 0.0})["capacity"]
        graph.add_edge(link.src, link.dst, capacity=old + rate)
    worst = min(nx.maximum_flow_value(graph, root, v) for v in range(topology.ranks) if v != root)
    assert optima[-1].exact
    assert 1.0 / worst <= optima[-1].time / 1e9 * (1 + 1e-9) <= 1.002 / worst
    for shallower, deeper in itertools.pairwise(optima):
        assert deeper.time <= shallower.time * (1 + 1e-9)
    for forest in optima:
        assert sum(forest.shares) == pytest.approx(1.0)


@settings(deadline=None, max_examples=25, suppress_health_check=SLOW)
@given(graphs(), st.integers(1, 9))
def test_whole_chunks_add_up(topology: Topology, partition: int) -> None:
    inst = at_block(topology, 10**6)
    sides = [Side(inst, root, root) for root in range(topology.ranks)]
    forest = fluid_optima(
        sides, [1] * len(sides), len(sides), False, holds_of(inst), [topology.ranks - 1], 0, lambda: False
    )[-1]
    counts = whole_chunks(inst, sides, forest, partition, False, 0.02)
    for side in range(len(sides)):
        mine = [n for tree, n in zip(forest.trees, counts, strict=True) if tree.side == side]
        assert sum(mine) == partition and min(mine) >= 0
    free = whole_chunks(inst, sides, forest, partition, True, 0.02)
    assert sum(free) == partition * len(sides)


def test_a_switch_is_filled_by_as_many_trees_as_it_has_ranks_less_one_or_two() -> None:
    topology = load_topology("dgx2:1")
    inst = at_block(topology, 10**6)
    sides = [Side(inst, 0, 0)]
    forest = fluid_optima(sides, [1], 1, False, holds_of(inst), [2], 0, lambda: False)[-1]
    even = evened(inst, sides, forest, False, 16, 0.05)
    assert even is not None and even[0] in (14, 15)


@settings(deadline=None, max_examples=60, suppress_health_check=SLOW)
@given(graphs(), st.sampled_from(COLLECTIVES), st.sampled_from([10**4, 10**7]), st.data())
def test_every_schedule_of_trees_is_right(
    topology: Topology, name: str, size: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, topology.ranks - 1))
    most = data.draw(st.sampled_from([-2, 3, 40]))
    n = topology.ranks
    pairs = tuple((r, (r + 1) % n) for r in range(n)) if name == "sendrecv" else ()
    demand, amounts = None, ()
    if name == "alltoallv":
        demand = tuple(tuple(data.draw(st.integers(0, 3)) for _ in range(n)) for _ in range(n))
        pairs = tuple((s, d) for s in range(n) for d in range(n) if demand[s][d])
        amounts = tuple(demand[s][d] for s, d in pairs)
        if all(s == d for s, d in pairs):
            return

    def made(partition: int) -> Collective:
        ends = pairs if name == "sendrecv" else None
        return build(name, n, partition, root=root, pairs=ends, demand=demand)

    links = link_table(topology)
    task = Task(topology, links, name, 1, made(1).chunk_bytes(size), root, pairs, amounts=amounts)
    bound = lower_bound(topology, made(1), size).time_fs
    found = list(forests(task, most, Effort(most_messages=400), 0, lambda: False))
    assert found
    for partition, schedule in found[:4]:
        assert 0 < partition <= most or partition == -most
        messages = messages_of(schedule.messages(name, partition))
        algorithm = Algorithm(
            "tested", made(partition), topology.name, size, messages, schedule.timing.time_fs,
            Certificate(0.0, "", 0.0, "feasible"), "forest",
        )  # fmt: skip
        assert check_algorithm(algorithm, topology) == []
        assert schedule.timing.time_fs >= bound


@pytest.mark.parametrize(
    ("spec", "name", "most_us"),
    [
        ("ring:8", "broadcast", 732.0),  # two chains at their best number of chunks
        ("torus2d:4x4", "broadcast", 450.0),  # four links lead into each rank: 320 and the pipeline's fill
        ("dgx-a100:2", "allgather", 202.0),
        ("mesh2d:3x3", "alltoall", 857.0),
        ("ndv2:1", "reduce", 570.0),
    ],
)
def test_known_machines_get_what_their_links_can_carry(spec: str, name: str, most_us: float) -> None:
    topology, size = load_topology(spec), 64_000_000
    chunk_bytes = build(name, topology.ranks, 1).chunk_bytes(size)
    task = Task(topology, link_table(topology), name, 1, chunk_bytes, 0, ())
    found = min(s.timing.time_fs for _, s in forests(task, 1000, Effort(), 0, lambda: False))
    assert found / 1e9 <= most_us


def test_the_grid_of_chunkings_widens() -> None:
    steps = grid(3, 200)
    assert steps[:4] == [3, 6, 9, 12] and steps[-1] <= 200
    assert all(b - a >= 3 for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize("name", ["broadcast", "reduce"])
@pytest.mark.parametrize("root", [0, 5])
def test_trees_of_an_allgather_hung_on_one_root_span(name: str, root: int) -> None:
    topology = load_topology("dgx-a100:2")
    links = link_table(topology)
    task = Task(topology, links, name, 1, Fraction(10**8), root)
    hung = hung_on_the_root(task, at_block(topology, 10**8), [1, 2, 4], 0, lambda: False)
    assert len(hung[-1]) == topology.ranks
    ends = {(x.src, x.dst) if name == "broadcast" else (x.dst, x.src) for x in topology.links}
    for images in hung:
        for before in images:
            assert set(before) == set(range(topology.ranks)) - {root}
            for node in before:
                steps = 0
                while node != root:
                    assert (before[node], node) in ends
                    node, steps = before[node], steps + 1
                    assert steps < topology.ranks


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_rails_span_the_cluster(nodes: int, size: int, data: st.DataObject) -> None:
    n = nodes * size
    root = data.draw(st.integers(0, n - 1))
    cost = np.full((n, n), np.inf)
    for u, v in itertools.permutations(range(n), 2):
        if u // size == v // size or u % size == v % size or data.draw(st.booleans()):
            cost[u, v] = data.draw(st.integers(1, 3)) + 10 * (u // size != v // size)
    members = tuple(tuple(range(v * size, (v + 1) * size)) for v in range(nodes))
    topology = Topology("rails", members, ())
    found = rails(topology, cost, root)
    if nodes == 1:
        assert not found
    crossing = []
    for trees in found:
        assert len(trees) == size
        for parents in trees:
            tops = np.array([parents.get(rank, -1) for rank in range(n)])
            assert np.isfinite(paid(cost, tops, root))
            crossing.append(sum(u // size != v // size for v, u in parents.items()))
    # Every node is entered once, whatever is cheap inside.
    assert set(crossing) <= {nodes - 1}


def test_rails_need_links_between_equal_places() -> None:
    members = ((0, 1), (2, 3))
    cost = np.full((4, 4), np.inf)
    cost[0, 1] = cost[1, 0] = cost[2, 3] = cost[3, 2] = 1.0
    cost[0, 2] = 5.0  # one rail only
    assert rails(Topology("one rail", members, ()), cost, 0) == []
    cost[1, 3] = 5.0
    chains, stars = rails(Topology("two rails", members, ()), cost, 0)
    assert chains == stars == [{1: 0, 2: 0, 3: 2}, {1: 0, 3: 1, 2: 3}]
    assert rails(Topology("unequal", ((0, 1, 2), (3,)), ()), cost, 0) == []


@pytest.mark.parametrize(
    ("spec", "root", "trees", "depth"),
    [
        ("hypercube:3", 5, 3, 4),
        ("torus2d:4x4", 0, 4, 5),
        ("ndv2:1", 2, 6, 4),
        ("mi300x:1", 0, 7, 2),
        ("ring:5", 1, 2, 4),
    ],
)
def test_shallow_trees_share_links_and_span(spec: str, root: int, trees: int, depth: int) -> None:
    """On a hypercube of dimension d there are d such trees of depth d + 1 (Johnsson and Ho 1989)."""
    topology = load_topology(spec)
    slowest = max(link.beta_us_per_mb for link in topology.links)
    for collects in (False, True):
        found = shallow_trees(topology, root, collects, 1.0)
        assert len(found) == trees
        loads: dict[tuple[int, int], int] = {}
        for parents in found:
            assert sorted([root, *parents]) == list(range(topology.ranks))
            for rank, parent in parents.items():
                ends = (rank, parent) if collects else (parent, rank)
                loads[ends] = loads.get(ends, 0) + 1
                steps = 1
                while parent != root:
                    parent, steps = parents[parent], steps + 1
                assert steps <= depth
        rate = {(link.src, link.dst): slowest / link.beta_us_per_mb for link in topology.links}
        assert all(load <= rate[ends] for ends, load in loads.items())


def test_shallow_trees_leave_shared_ports_alone() -> None:
    assert shallow_trees(load_topology("dgx-a100:1"), 0, False, 1.0) == []


@pytest.mark.parametrize("near", ["[]", "[2]"])
def test_cards_near_no_rank_of_their_node_are_left_out(near: str, tmp_path: Path) -> None:
    """A profile may say so; broadcasts, and sums for a codec, look at which ranks are near a card."""
    path = tmp_path / "p.yaml"
    path.write_text(CARDS.replace("NEAR", near))
    topology = load_topology(str(path))
    cost = np.full((4, 4), np.inf)
    for link in topology.links:
        cost[link.src, link.dst] = 1
    # As of a topology without cards: each rank is where a tree may enter its node.
    assert rails(topology, cost, 0) == rails(replace(topology, nics=()), cost, 0)
    sums = node_sums(topology, build("allreduce", 4, 2))
    assert sums is not None and len(sums) > 4


CARDS = """\
schema: taccl/profile/v1
name: cards
nodes: [0-1, 2-3]
links:
  - {class: near, pairs: [[0, 1], [1, 0], [2, 3], [3, 2]]}
  - {class: far, pairs: [[0, 2], [1, 3]], ports: [out]}
  - {class: far, pairs: [[2, 0], [3, 1]], ports: [in]}
ports: {out: {beta: 80us/MB}, in: {beta: 80us/MB}}
nics: [{name: card, node: 0, ranks: NEAR, out: out, in: in}]
classes:
  near: {alpha: 1us, beta: 10us/MB}
  far: {alpha: 5us, beta: 80us/MB}
"""
