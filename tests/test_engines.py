"""Baselines: what their transfers achieve, executed symbolically, on many topologies."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.collective import NAMES, Chunk, Collective, build
from taccl.synth.cost import costs
from taccl.synth.engines import BASELINES, Inapplicable, chain
from taccl.synth.engines.circles import chain_from, circles
from taccl.synth.engines.circulant import rounds
from taccl.synth.engines.double_binary_tree import binary_tree
from taccl.synth.engines.embedding import embed
from taccl.synth.schedule import Transfer, completion_fs, time_in_order

COLLECTIVES = [name for name in NAMES if name not in ("alltoallv", "custom")]
ONE = Fraction(1)


def topology_of(nodes: list[list[int]], pairs: list[tuple[int, int]], beta: int = 10) -> Topology:
    links = tuple(Link(u, v, ONE, Fraction(beta), ONE) for u, v in pairs)
    made = Topology("test", tuple(tuple(node) for node in nodes), links)
    made.check()
    return made


def complete(ranks: int, nodes: int = 1) -> Topology:
    size = ranks // nodes
    members = [list(range(i * size, (i + 1) * size)) for i in range(nodes)]
    return topology_of(members, [(u, v) for u in range(ranks) for v in range(ranks) if u != v])


def two_way_ring(ranks: int) -> Topology:
    pairs = [(r, (r + 1) % ranks) for r in range(ranks)]
    return topology_of([list(range(ranks))], pairs + [(v, u) for u, v in pairs])


def execute(topology: Topology, collective: Collective, transfers: list[Transfer]) -> None:
    """Run transfers in list order on counted contributions; assert the postcondition, each exactly once."""
    initial: dict[tuple[int, int], Counter[int]] = {}
    for index, chunk in enumerate(collective.chunks):
        for rank, _ in chunk.sources:
            # Not combining: every source has the same value, named 0.
            initial[rank, index] = Counter([rank if collective.combining else 0])
    state: dict[tuple[int, int, int], Counter[int]] = {}  # (rank, chunk, sum), once something has entered
    payloads: list[dict[int, Counter[int]]] = []

    def digest(into: dict[tuple[int, int, int], Counter[int]], dst: int, number: int) -> None:
        for c, value in payloads[number].items():
            for place in [(dst, c, entered) for entered in transfers[number].into]:
                if transfers[number].op == "reduce":
                    into[place] = into.get(place, initial.get((dst, c), Counter())) + value
                else:
                    into[place] = value

    for number, transfer in enumerate(transfers):
        link = topology.links[transfer.link]
        assert len(set(transfer.chunks)) == len(transfer.chunks) > 0
        assert list(transfer.chunks) == sorted(transfer.chunks)
        held = state
        if transfer.after is not None:
            held = {}
            for before in transfer.after:
                assert before < number and topology.links[transfers[before].link].dst == link.src
                digest(held, link.src, before)
        payloads.append({
            c: held[key] if (key := (link.src, c, transfer.sum)) in held else initial[link.src, c]
            for c in transfer.chunks
        })  # fmt: skip
        digest(state, link.dst, number)
    for index, chunk in enumerate(collective.chunks):
        wanted = Counter({rank for rank, _ in chunk.sources}) if collective.combining else Counter([0])
        for rank, _ in chunk.destinations:
            found = state.get((rank, index, 0), initial.get((rank, index)))
            assert found == wanted, f"chunk {index} on rank {rank}"


def run(name: str, topology: Topology, collective: Collective) -> list[Transfer]:
    transfers = BASELINES[name](topology, collective)
    execute(topology, collective, transfers)
    assert transfers == BASELINES[name](topology, collective)  # nothing depends on earlier calls
    return transfers


BUNDLED = [
    "ndv2:1", "ndv2:2", "dgx2:1", "dgx-a100:1", "dgx-a100:2", "ring:8", "torus2d:4x4", "mesh2d:3x3",
    "hypercube:3", "mi300x:1",
]  # fmt: skip


@pytest.mark.parametrize("spec", BUNDLED)
@pytest.mark.parametrize("name", BASELINES)
def test_bundled_topologies(name: str, spec: str) -> None:
    topology = load_topology(spec)
    served = 0
    for which in COLLECTIVES:
        for partition in (1, 3):
            collective = build(which, topology.ranks, partition, root=1 if which != "allreduce" else 0)
            try:
                run(name, topology, collective)
            except Inapplicable as reason:
                assert str(reason)
            else:
                served += 1
    if name in ("ring", "direct"):
        assert served == 2 * len(COLLECTIVES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("name", ["ring", "recursive-doubling", "direct"])
def test_complete_graph_serves_everything(name: str, ranks: int) -> None:
    for which in COLLECTIVES:
        for root in {0, ranks - 1}:
            run(name, complete(ranks), build(which, ranks, 2, root=root))


@pytest.mark.parametrize("ranks", range(1, 10))
def test_trees_and_one_shots_on_complete_graphs(ranks: int) -> None:
    for which in ("broadcast", "reduce"):
        for root in {0, ranks // 2}:
            run("chain", complete(ranks), build(which, ranks, 3, root=root))
    for which in ("broadcast", "reduce", "allreduce"):
        for root in {0, ranks // 2}:
            run("double-binary-tree", complete(ranks), build(which, ranks, 3, root=root))
    for name in ("one-shot-doubling", "one-shot-levels", "one-shot-pairs", "one-shot-trees"):
        run(name, complete(ranks), build("allreduce", ranks, 1))


@pytest.mark.parametrize("topology", ["dgx1v:1", "dgx2:2", "ndv2:2", "ndv2:4", "torus3d:3x3x3", "nodes of 3"])
def test_one_shots_in_digits_add_every_contribution_once(topology: str) -> None:
    machine = complete(12, 4) if topology == "nodes of 3" else load_topology(topology)
    run("one-shot-levels", machine, build("allreduce", machine.ranks, 1))


def test_one_shots_in_digits_use_cliques_and_one_rank_for_each_nic() -> None:
    # A quad of four, then its counterpart: 3 + 1 messages a rank.
    assert len(run("one-shot-levels", load_topology("ndv2:1"), build("allreduce", 8))) == 8 * 4
    machine = load_topology("dgx2:2")
    transfers = run("one-shot-levels", machine, build("allreduce", 32))
    crossing = [
        machine.links[t.link]
        for t in transfers
        if machine.links[t.link].src // 16 != machine.links[t.link].dst // 16
    ]
    ports = [port for link in crossing for port in link.ports if machine.ports[port].kind == "nic"]
    assert len(crossing) == 16
    assert len(ports) == len(set(ports)) == 32


@pytest.mark.parametrize("ranks", [2, 6])
@pytest.mark.parametrize("size_mb", [1, 400])
def test_a_chain_takes_the_rounds_of_the_formula_and_is_cut_best(ranks: int, size_mb: int) -> None:
    """(p - 2 + k)(alpha + beta n / k) for every k, and the numbers of chunks that are tried have the least of them."""
    topology = complete(ranks)
    found = {}
    for k in range(1, 90):
        collective = build("broadcast", ranks, k, root=1)
        transfers = run("chain", topology, collective)
        priced = costs(topology, Fraction(size_mb * 10**6, k))
        time_fs = completion_fs(priced, time_in_order(topology, collective, priced, transfers))
        rounds = ranks - 2 + k
        assert 0 <= time_fs - rounds * (10**9 + Fraction(10 * size_mb * 10**9, k)) <= 2 * rounds
        found[k] = time_fs
    tried = chain.cuts(ranks, 10**9, 10 * size_mb * 10**9, 89)
    assert min(found[k] for k in tried) <= Fraction(101, 100) * min(found.values())


def test_a_chain_leaves_each_node_once() -> None:
    for spec, root in (("ndv2:2", 3), ("dgx-a100:2", 8)):
        topology = load_topology(spec)
        ranks = chain_from(topology, root)
        assert ranks is not None and ranks[0] == root and sorted(ranks) == list(range(topology.ranks))
        home = topology.node_of()
        assert sum(home[a] != home[b] for a, b in pairwise(ranks)) == 1


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_hierarchical_serves_everything(nodes: int) -> None:
    topology = complete(3 * nodes, nodes)
    for which in COLLECTIVES:
        for root in (0, 4):
            run("hierarchical", topology, build(which, 3 * nodes, 4, root=root))


def test_hierarchical_alltoall_crosses_in_batches_of_a_node() -> None:
    topology = complete(8, 2)
    transfers = run("hierarchical", topology, build("alltoall", 8))
    crossing = [t for t in transfers if (topology.links[t.link].src < 4) != (topology.links[t.link].dst < 4)]
    assert sorted(len(t.chunks) for t in crossing) == [4] * 8


def test_alltoallv_and_custom() -> None:
    topology = complete(4, 2)
    demand = [[0, 3, 0, 1], [2, 0, 0, 0], [0, 1, 1, 0], [4, 0, 2, 0]]
    chunk = Chunk(((0, 0), (2, 0)), ((1, 0), (3, 0)))
    scattered, summed = (
        Collective("custom", 4, (chunk,), combining, (1, 0, 1, 0), (0, 1, 0, 1), (None,) * 4, 1, 1)
        for combining in (False, True)
    )
    for name in ("ring", "recursive-doubling", "direct", "hierarchical"):
        run(name, topology, build("alltoallv", 4, 2, demand=demand))
        run(name, topology, scattered)
        run(name, topology, summed)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_random_connected_topologies(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 9))
    order = data.draw(st.permutations(range(ranks)))
    joined = {(order[i], order[(i + 1) % ranks]) for i in range(ranks)}  # strongly connected
    extra = st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1))
    joined |= {pair for pair in data.draw(st.lists(extra, max_size=40)) if pair[0] != pair[1]}
    ports = tuple(Port(f"p{i}", Fraction(i + 1)) for i in range(3))
    links = tuple(
        Link(
            u, v, Fraction(data.draw(st.integers(0, 3))), Fraction(data.draw(st.integers(1, 4))), Fraction(0),
            tuple(sorted(data.draw(st.sets(st.integers(0, 2), max_size=1)))),
        )
        for u, v in sorted(joined)
    )  # fmt: skip
    cut = data.draw(st.integers(1, ranks))
    nodes = (tuple(range(cut)), tuple(range(cut, ranks)))
    topology = Topology("random", tuple(node for node in nodes if node), links, ports)
    which = data.draw(st.sampled_from(COLLECTIVES))
    collective = build(which, ranks, data.draw(st.integers(1, 3)), root=data.draw(st.integers(0, ranks - 1)))
    served = []
    for name in BASELINES:
        try:
            run(name, topology, collective)
            served.append(name)
        except Inapplicable as reason:
            assert str(reason)
    # A circle exists by construction, and with so few ranks the search finds it.
    assert {"ring", "direct"} <= set(served)


def test_ring_uses_the_fast_links_and_both_directions() -> None:
    """NDv2 has a circle of double NVLinks and one of single ones: TACCL's numbers, 23 and 46 us/MB."""
    found = circles(load_topology("ndv2-1mb:1"))
    assert [circle.closed for circle in found] == [True, True]
    assert [circle.beta_fs for circle in found] == [23 * 10**9, 46 * 10**9]
    assert all(circle.back for circle in found)


def test_circle_keeps_nodes_together() -> None:
    (circle, *_) = circles(complete(6, 2))
    assert {frozenset(circle.ranks[:3]), frozenset(circle.ranks[3:])} == {
        frozenset({0, 1, 2}),
        frozenset({3, 4, 5}),
    }


def test_ports_shared_by_all_links_make_one_circle_enough() -> None:
    ports = tuple(Port(f"{r}.{way}", Fraction(8)) for r in range(4) for way in ("out", "in"))
    links = tuple(
        Link(u, v, ONE, Fraction(1), ONE, (2 * u, 2 * v + 1)) for u in range(4) for v in range(4) if u != v
    )
    assert len(circles(Topology("switch", ((0, 1, 2, 3),), links, ports))) == 1


def test_odd_mesh_has_no_circle_but_a_chain() -> None:
    (chain,) = circles(load_topology("mesh2d:3x3"))
    assert not chain.closed and sorted(chain.ranks) == list(range(9))


def test_ring_allgather_goes_half_way_in_each_direction() -> None:
    topology = two_way_ring(8)
    collective = build("allgather", 8)
    transfers = run("ring", topology, collective)
    priced = costs(topology, Fraction(10**6))
    # 4 hops of 1 us + 10 us: the farthest rank is 4 away.
    assert completion_fs(priced, time_in_order(topology, collective, priced, transfers)) == 44 * 10**9


def test_recursive_doubling_takes_log_rounds() -> None:
    transfers = run("recursive-doubling", complete(8), build("allgather", 8))
    assert Counter(len(t.chunks) for t in transfers) == {1: 8, 2: 8, 4: 8}


def test_recursive_doubling_finds_the_gray_code_of_a_torus() -> None:
    """A 4x4 torus is a 4-cube once its ranks are placed in Gray order."""
    transfers = run("recursive-doubling", load_topology("torus2d:4x4"), build("allgather", 16))
    assert Counter(len(t.chunks) for t in transfers) == {1: 16, 2: 16, 4: 16, 8: 16}


def test_missing_links_are_named() -> None:
    with pytest.raises(Inapplicable, match="no way was found to place the 6 ranks"):
        BASELINES["recursive-doubling"](two_way_ring(6), build("allgather", 6))
    with pytest.raises(Inapplicable, match="rank 0 has no link to rank 2"):
        BASELINES["one-shot-pairs"](two_way_ring(4), build("allreduce", 4))
    with pytest.raises(Inapplicable, match="are no product of groups"):
        BASELINES["one-shot-levels"](two_way_ring(5), build("allreduce", 5))
    with pytest.raises(Inapplicable, match="nodes of one size"):
        BASELINES["one-shot-levels"](topology_of([[0, 1], [2]], [(0, 1), (1, 0)]), build("allreduce", 3))
    with pytest.raises(Inapplicable, match="at least two nodes"):
        BASELINES["hierarchical"](complete(4), build("allgather", 4))
    with pytest.raises(Inapplicable, match="not allgather"):
        BASELINES["double-binary-tree"](complete(4), build("allgather", 4))
    with pytest.raises(Inapplicable, match="no path of links leads from rank 0 to rank 1"):
        BASELINES["direct"](topology_of([[0, 1]], [(1, 0)]), build("allgather", 2))


@pytest.mark.parametrize("ranks", range(2, 34))
def test_two_trees_span_and_share_the_work(ranks: int) -> None:
    """Sanders, Speck, Traeff: a rank with children in one tree is (nearly always) a leaf of the other."""
    first, second = binary_tree(ranks, False), binary_tree(ranks, True)
    for edges in (first, second):
        assert len(edges) == ranks - 1 == len({child for _, child in edges})
        reached = {edges[0][0]}
        for parent, child in edges:
            assert parent in reached
            reached.add(child)
        assert max(Counter(parent for parent, _ in edges).values()) <= 2
    sends = Counter(parent for parent, _ in first) + Counter(parent for parent, _ in second)
    assert max(sends.values()) <= (2 if ranks > 2 else 1)


def test_embedding_prefers_the_given_order_and_gives_up_honestly() -> None:
    assert embed([(0, 1), (1, 2)], (4, 7, 9), lambda u, v: True) == (4, 7, 9)
    assert embed([(0, 1), (1, 2)], (4, 7, 9), lambda u, v: 9 in (u, v)) == (4, 9, 7)
    assert embed([(0, 1), (1, 2), (0, 2)], (4, 7, 9), lambda u, v: 9 in (u, v)) is None


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8, 12, 13, 16, 24, 31, 32, 48])
@pytest.mark.parametrize("chunks", [1, 2, 5, 20, 41])
def test_circulant_rounds_are_the_fewest_and_keep_to_one_port(size: int, chunks: int) -> None:
    listed = rounds(size, chunks)
    assert len(listed) == chunks - 1 + (size - 1).bit_length()
    have = [set(range(chunks)), *(set[int]() for _ in range(size - 1))]
    for sent in listed:
        assert len({a for a, _, _ in sent}) == len({b for _, b, _ in sent}) == len(sent)
        assert all(chunk in have[a] and chunk not in have[b] for a, b, chunk in sent)
        for _, b, chunk in sent:
            have[b].add(chunk)
    assert all(len(held) == chunks for held in have)


@pytest.mark.parametrize("ranks", [2, 5, 8, 16])
@pytest.mark.parametrize("root", [0, 1])
def test_circulant_broadcasts_and_reduces(ranks: int, root: int) -> None:
    for name in ("broadcast", "reduce"):
        for partition in (1, 7):
            collective = build(name, ranks, partition, root=root)
            execute(complete(ranks), collective, run("circulant", complete(ranks), collective))
    with pytest.raises(Inapplicable, match="link from rank"):
        BASELINES["circulant"](two_way_ring(6), build("broadcast", 6))
