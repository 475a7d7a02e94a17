"""Clusters without symmetry for tests: nodes of any sizes, ranks on a switch or on links of their own, unequal NICs."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hypothesis import strategies as st

from taccl.profiles.topology import Link, Nic, Port, Topology

FAST, SLOW = Fraction(3), Fraction(40)  # us/MB within a node and between nodes


def irregular(
    sizes: Sequence[int],
    nic_beta: Sequence[Sequence[Fraction]],
    missing: frozenset[tuple[int, int]] = frozenset(),
    reduce_us: Fraction = Fraction(0),
    rails: bool = False,
) -> Topology:
    """Nodes of `sizes` ranks, each pair in a node linked unless it is `missing`.

    NIC i of node a, of rate nic_beta[a][i], serves the ranks whose place is i modulo the NICs of its node. rails: links
    join ranks of one place alone, and the places that only one of two nodes has with the last of the other.
    """
    nodes: list[tuple[int, ...]] = []
    for size in sizes:
        start = sum(map(len, nodes))
        nodes.append(tuple(range(start, start + size)))
    ports: list[Port] = []
    nics: list[Nic] = []
    of_rank: dict[int, tuple[int, int]] = {}
    for node, ranks in enumerate(nodes):
        for number, beta in enumerate(nic_beta[node]):
            near = tuple(r for place, r in enumerate(ranks) if place % len(nic_beta[node]) == number)
            if not near:
                continue
            name = f"node{node}.ib{number}"
            ports += [Port(f"{name}.out", beta, "nic"), Port(f"{name}.in", beta, "nic")]
            nics.append(Nic(name, node, near, len(ports) - 2, len(ports) - 1))
            of_rank.update(dict.fromkeys(near, (len(ports) - 2, len(ports) - 1)))
    links = []
    for a, here in enumerate(nodes):
        for b, there in enumerate(nodes):
            for i, s in enumerate(here):
                for j, d in enumerate(there):
                    if a == b:
                        if s != d and (s, d) not in missing:
                            links.append(Link(s, d, Fraction(1, 2), FAST, Fraction(1, 2)))
                    elif (
                        not rails
                        or i == j
                        or (j >= len(here) and i == len(here) - 1)
                        or (i >= len(there) and j == len(there) - 1)
                    ):
                        crossed = (of_rank[s][0], of_rank[d][1])
                        links.append(Link(s, d, Fraction(2), Fraction(10), Fraction(2), crossed))
    return Topology(
        "irregular",
        tuple(nodes),
        tuple(links),
        tuple(ports),
        nics=tuple(nics),
        reduce_alpha_us=reduce_us,
        reduce_beta_us_per_mb=reduce_us,
    )


@st.composite
def small_clusters(draw: st.DrawFn) -> Topology:
    """2 to 5 nodes of 2 to 4 ranks; at most one link within each node is missing, so that all hang together."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=2, max_size=5))
    betas = [
        [
            draw(st.sampled_from([SLOW, SLOW / 2, SLOW * 2, SLOW * Fraction(4, 3)]))
            for _ in range(draw(st.integers(1, size)))
        ]
        for size in sizes
    ]
    missing = set()
    for node, size in enumerate(sizes):
        if size > 2 and draw(st.booleans()):
            missing.add((sum(sizes[:node]), sum(sizes[:node]) + 1))
    reduce_us = draw(st.sampled_from([Fraction(0), Fraction(1, 3)]))
    return irregular(sizes, betas, frozenset(missing), reduce_us, draw(st.booleans()))
