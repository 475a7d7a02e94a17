"""Symmetric algorithms for tests: small machines that rotations map to themselves, and schedules on them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from taccl.profiles.link_table import link_table
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.algorithm import Certificate, Message
from taccl.synth.message_table import MessageTable, message_table
from taccl.synth.symmetric.algorithm import SymmetricAlgorithm
from taccl.synth.symmetric.group import Group, trivial_group, with_generator
from taccl.synth.symmetric.prices import prices


def group_of(ranks: int, *generators: list[int]) -> Group:
    """The group that these permutations generate."""
    group = trivial_group(ranks)
    for generator in generators:
        larger = with_generator(group, generator)
        assert larger is not None
        group = larger
    return group


def circulant(ranks: int = 6, *, reducing: int = 0) -> Topology:
    """Two parallel links to the next rank, one to the one after that and one back; an own port behind some."""
    ports = tuple(Port(f"out{r}", Fraction(30)) for r in range(ranks))
    links = []
    for step, alpha, beta, crosses in (
        (1, 1, 10, True),
        (1, 2, 20, False),
        (2, 1, 10, True),
        (-1, 1, 10, False),
    ):
        for r in range(ranks):
            peer = (r + step) % ranks
            links.append(Link(r, peer, Fraction(alpha), Fraction(beta), Fraction(alpha), (r,) * crosses))
    made = Topology(
        f"circulant{ranks}", (tuple(range(ranks)),), tuple(links), ports,
        reduce_alpha_us=Fraction(reducing), reduce_beta_us_per_mb=Fraction(reducing),
    )  # fmt: skip
    made.check()
    return made


def rotation(ranks: int, step: int = 1) -> list[int]:
    return [(r + step) % ranks for r in range(ranks)]


def link_of(topology: Topology, src: int, dst: int, ordinal: int = 0) -> int:
    found = [i for i, link in enumerate(topology.links) if (link.src, link.dst) == (src, dst)]
    return found[ordinal]


def priced(
    topology: Topology, chunk_bytes: Fraction, rows: list[tuple[int, tuple[int, ...], int, str]]
) -> MessageTable:
    """Rows (link, chunks, start, op) with the ends that the cost model gives them."""
    price = prices(topology, link_table(topology), chunk_bytes)
    return message_table(
        Message(
            link, topology.links[link].src, topology.links[link].dst, chunks, start,
            start + int(price.alpha_fs[link]) + len(chunks) * int(price.chunk_fs[link]), op,
        )
        for link, chunks, start, op in sorted(rows, key=lambda row: (row[2], row[0], row[1]))
    )  # fmt: skip


def ring_schedule(
    topology: Topology, group: Group, collective: str, partition: int, size_bytes: int
) -> SymmetricAlgorithm:
    """Every block of the group's first ranks goes round the ring of links r -> r + 1 (allgather, alltoall).

    Orbits go one after another with room between them, so the schedule is right, if slow.
    """
    n = topology.ranks
    chunk_bytes = Fraction(size_bytes, n * partition)
    longest = max(int(p) for p in prices(topology, link_table(topology), chunk_bytes).chunk_fs) * 4 + 10**10
    rows: list[tuple[int, tuple[int, ...], int, str]] = []
    clock = 0
    for root in group.rank_at[:, 0].tolist():
        for part in range(partition):
            for hop in range(n - 1):
                here = (root + hop) % n
                if collective == "allgather":
                    chunks = [root * partition + part]
                else:
                    farther = range(hop + 1, n)
                    chunks = [(root * n + (root + d) % n) * partition + part for d in farther]
                for chunk in chunks:
                    rows.append((link_of(topology, here, (here + 1) % n), (chunk,), clock, "copy"))
                    clock += longest
    table = priced(topology, chunk_bytes, rows)
    return SymmetricAlgorithm(
        f"{collective}-ring", collective, n, partition, size_bytes, topology.name, group, table,
        int(np.max(table.end_fs)), Certificate(1.5, "made up", 1.0, "feasible"), "ring", 0, {"seed": 3},
    )  # fmt: skip
