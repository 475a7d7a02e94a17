"""Symmetry of topologies: known groups, what breaks them, and brute force on small random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Port, Topology
from taccl.sketches.symmetry import acts_freely, closure, find_symmetry, is_automorphism


def order(topology: Topology) -> int:
    """Order of the group found, after checking what it promises."""
    generators = find_symmetry(topology)
    assert generators == find_symmetry(topology)
    assert all(is_automorphism(topology, generator) for generator in generators)
    group = closure(generators, topology.ranks)
    assert acts_freely(group)
    assert topology.ranks % len(group) == 0
    return len(group)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("ndv2:1", 4), ("ndv2:2", 8), ("ndv2:4", 16), ("dgx1v:1", 4), ("dgx2:1", 16), ("dgx2:2", 32),
        ("dgx-a100:2", 16), ("torus2d:4x4", 16), ("torus2d:3x5", 15), ("ring:8", 8), ("hypercube:4", 16),
        ("fat-tree:4x4", 16), ("mesh2d:4x4", 4),
    ],
)  # fmt: skip
def test_bundled_shapes(spec: str, expected: int) -> None:
    assert order(load_topology(spec)) == expected


def test_a_rank_like_no_other_leaves_nothing() -> None:
    """Rotating or mirroring a 3x3 mesh keeps its centre."""
    mesh = load_topology("mesh2d:3x3")
    quarter_turn = (2, 5, 8, 1, 4, 7, 0, 3, 6)
    assert is_automorphism(mesh, quarter_turn) and not acts_freely(closure([quarter_turn], 9))
    assert find_symmetry(mesh) == ()


def with_link(topology: Topology, src: int, dst: int, **numbers: Any) -> Topology:
    """The topology with other numbers on one link."""
    links = [replace(x, **numbers) if (x.src, x.dst) == (src, dst) else x for x in topology.links]
    return replace(topology, links=tuple(links))


@pytest.mark.parametrize("numbers", [{"beta_us_per_mb": Fraction(999)}, {"alpha_us": Fraction(9)}])
@pytest.mark.parametrize("ranks", [8, 128])
def test_one_slow_link_leaves_the_mirror_image(ranks: int, numbers: dict[str, Fraction]) -> None:
    ring = load_topology(f"ring:{ranks}")
    one_way = with_link(ring, 0, 1, **numbers)
    both_ways = with_link(one_way, 1, 0, **numbers)
    rotation = tuple((rank + 1) % ranks for rank in range(ranks))
    assert is_automorphism(ring, rotation) and not is_automorphism(both_ways, rotation)
    assert order(one_way) == 1
    assert find_symmetry(both_ways) == (tuple((1 - rank) % ranks for rank in range(ranks)),)


def test_an_occupancy_counts() -> None:
    ring = load_topology("ring:6")
    other = ring.links[0].occupancy_us + Fraction(1, 7)
    changed = with_link(ring, 0, 1, occupancy_us=other, alpha_us=other)
    assert order(changed) == 1


def test_unequal_nics() -> None:
    """A slow NIC of one node leaves what turns the other ranks of its node round with it."""
    topology = load_topology("dgx-a100:2")
    slow = [
        replace(port, beta_us_per_mb=Fraction(80)) if port.name == "node0.ib3.out" else port
        for port in topology.ports
    ]
    assert order(replace(topology, ports=tuple(slow))) == 1
    both = [
        replace(port, beta_us_per_mb=Fraction(80)) if ".ib3." in port.name else port
        for port in topology.ports
    ]
    assert find_symmetry(replace(topology, ports=tuple(both))) == (tuple((r + 8) % 16 for r in range(16)),)


def test_ranks_that_share_a_port_move_together() -> None:
    """Four ranks, each linked to each, in two pairs behind one port: a rotation by one parts the pairs."""
    ports = tuple(Port(f"pair{i}.out", Fraction(5)) for i in range(2))
    links = tuple(
        Link(s, d, Fraction(1), Fraction(1), Fraction(1), (s // 2,))
        for s in range(4)
        for d in range(4)
        if s != d
    )
    topology = Topology("pairs", ((0, 1, 2, 3),), links, ports)
    assert not is_automorphism(topology, (1, 2, 3, 0))
    assert is_automorphism(topology, (2, 3, 0, 1)) and is_automorphism(topology, (1, 0, 3, 2))
    assert order(topology) == 4


def test_what_is_no_permutation() -> None:
    ring = load_topology("ring:4")
    for wrong in [(), (0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 4), (1, 2, 3, 0, 4)]:
        assert not is_automorphism(ring, wrong)


def test_closure() -> None:
    assert closure([], 3) == ((0, 1, 2),)
    assert closure([(1, 2, 0)], 3) == ((0, 1, 2), (1, 2, 0), (2, 0, 1))
    assert len(closure([(1, 0, 2, 3), (1, 2, 3, 0)], 4)) == 24


def relabelled(topology: Topology, names: Sequence[int]) -> Topology:
    """The same cluster with rank r called names[r]."""
    links = tuple(replace(x, src=names[x.src], dst=names[x.dst]) for x in topology.links)
    nodes = tuple(tuple(names[rank] for rank in node) for node in topology.nodes)
    return replace(topology, links=links, nodes=nodes)


@pytest.mark.parametrize("spec", ["ring:12", "ndv2:1", "dgx-a100:1"])
@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_the_numbers_of_the_ranks_do_not_matter(spec: str, data: Any) -> None:
    topology = load_topology(spec)
    names = data.draw(st.permutations(range(topology.ranks)))
    assert order(relabelled(topology, names)) >= 4


@st.composite
def small_topologies(draw: Any) -> Topology:
    ranks = draw(st.integers(2, 6))
    pairs = [(s, d) for s in range(ranks) for d in range(ranks) if s != d]
    ports = tuple(Port(f"p{i}", Fraction(draw(st.integers(1, 2)))) for i in range(3))
    links = [
        Link(*pair, Fraction(1), Fraction(draw(st.integers(1, 2))), Fraction(1), tuple(crossed))
        for pair in draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12))
        for crossed in [draw(st.lists(st.integers(0, 2), unique=True, max_size=1))]
    ]
    return Topology("small", (tuple(range(ranks)),), tuple(links), ports)


def brute_force(topology: Topology, image: Sequence[int]) -> bool:
    """The definition: some permutation of ports and the permutation of ranks map the links to themselves."""
    beta = [port.beta_us_per_mb for port in topology.ports]
    links = {(x.src, x.dst, x.beta_us_per_mb, x.ports) for x in topology.links}
    for ports in permutations(range(len(beta))):
        moved = {(image[s], image[d], own, tuple(ports[p] for p in crossed)) for s, d, own, crossed in links}
        if moved == links and all(beta[p] == beta[q] for p, q in enumerate(ports)):
            return True
    return False


@given(small_topologies())
@settings(deadline=None, max_examples=40)
def test_brute_force_on_small_topologies(topology: Topology) -> None:
    automorphisms = [p for p in permutations(range(topology.ranks)) if brute_force(topology, p)]
    for image in permutations(range(topology.ranks)):
        assert is_automorphism(topology, image) == (image in automorphisms)
    free = [p for p in automorphisms if acts_freely(closure([p], topology.ranks))]
    assert (order(topology) > 1) == (len(free) > 1)
