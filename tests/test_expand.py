"""Expansion: every image of every message once, by another way than coordinates; batches of whole chunks."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from symmetric_algorithms import circulant, group_of, link_of, priced, ring_schedule, rotation

from taccl.profiles.link_table import link_table
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Message
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.check_table import check_table
from taccl.synth.message_table import MessageTable, messages_of
from taccl.synth.places import Places
from taccl.synth.symmetric.expand import SYMMETRIC, batches, expanded, link_lookup, sorted_by_start
from taccl.synth.symmetric.group import Group, trivial_group


def permutations(group: Group) -> list[list[int]]:
    """All elements as rank permutations, by applying generators one by one."""
    made = []
    for digits in product(*(range(order) for order in reversed(group.orders))):
        ranks = list(range(len(group.orbit)))
        for digit, generator in zip(reversed(digits), group.generators, strict=True):
            for _ in range(digit):
                ranks = [generator[r] for r in ranks]
        made.append(ranks)
    return made


def image(message: Message, p: list[int], topology: Topology, collective: str, partition: int) -> Message:
    n = topology.ranks
    link = topology.links[message.link]
    parallel = [i for i, x in enumerate(topology.links) if (x.src, x.dst) == (link.src, link.dst)]
    moved = link_of(topology, p[link.src], p[link.dst], parallel.index(message.link))
    chunks = []
    for chunk in message.chunks:
        block, part = divmod(chunk, partition)
        block = p[block // n] * n + p[block % n] if collective == "alltoall" else p[block]
        chunks.append(block * partition + part)
    return Message(
        moved, p[message.src], p[message.dst], tuple(sorted(chunks)), message.start_fs, message.end_fs, message.op
    )  # fmt: skip


def scattered(rng: random.Random, topology: Topology, collective: str, partition: int) -> MessageTable:
    known = Places(collective, topology.ranks, partition).chunks
    rows = []
    for _ in range(rng.randint(1, 12)):
        chunks = tuple(sorted(rng.sample(range(known), rng.randint(1, min(3, known)))))
        link = rng.randrange(len(topology.links))
        rows.append((link, chunks, rng.randrange(5) * 10**9, rng.choice(["copy", "reduce"])))
    return priced(topology, Fraction(1000), rows)


MACHINES = [
    (circulant(6), group_of(6, rotation(6))),
    (circulant(6), group_of(6, rotation(6, 2))),
    (circulant(6), group_of(6, rotation(6, 3), rotation(6, 2))),
    (circulant(5), trivial_group(5)),
    (
        load_topology("torus2d:2x3"),
        group_of(6, [(r + 3) % 6 for r in range(6)], [r // 3 * 3 + (r + 1) % 3 for r in range(6)]),
    ),
]


@pytest.mark.parametrize("collective", sorted(SYMMETRIC))
@pytest.mark.parametrize("machine", range(len(MACHINES)))
def test_every_image_once(collective: str, machine: int) -> None:
    topology, group = MACHINES[machine]
    n = topology.ranks
    lookup = link_lookup(link_table(topology), n)
    for seed in range(12):
        rng = random.Random(seed)
        partition = rng.randint(1, 3)
        base = scattered(rng, topology, collective, partition)
        elements = np.arange(group.order)
        found = messages_of(expanded(base, group, elements, collective, n, partition, lookup))
        by_element = [
            [image(m, p, topology, collective, partition) for m in messages_of(base)]
            for p in permutations(group)
        ]
        assert list(found) == [m for images in by_element for m in images]
        some = np.array(rng.sample(range(group.order), rng.randint(1, group.order)))
        part = messages_of(expanded(base, group, some, collective, n, partition, lookup))
        assert list(part) == [m for e in some.tolist() for m in by_element[e]]
        ordered = messages_of(
            sorted_by_start(expanded(base, group, elements, collective, n, partition, lookup))
        )
        assert Counter(ordered) == Counter(found)
        assert [(m.start_fs, m.link, m.chunks[0]) for m in ordered] == sorted(
            (m.start_fs, m.link, m.chunks[0]) for m in found
        )


def test_batches_hold_whole_chunks() -> None:
    topology, group = circulant(6), group_of(6, rotation(6))
    made = ring_schedule(topology, group, "alltoall", 2, 10**6)
    parts = list(made.batches(link_table(topology), most=40))
    assert len(parts) > 2
    chunks = [set(part.chunks.tolist()) for part in parts]
    assert sum(map(len, chunks)) == len(set().union(*chunks))
    assert sum(map(len, parts)) == made.message_count
    assert Counter(m for part in parts for m in messages_of(part)) == Counter(
        made.to_algorithm(topology).messages
    )


def test_messages_that_gather_chunks_of_several_elements_come_at_once() -> None:
    topology, group = circulant(6), group_of(6, rotation(6))
    base = priced(topology, Fraction(1000), [(0, (0,), 0, "copy"), (0, (0, 5), 10**12, "copy")])
    lookup = link_lookup(link_table(topology), 6)
    assert len(list(batches(base, group, "allgather", 6, 1, lookup, most=1))) == 1
    apart = priced(topology, Fraction(1000), [(0, (0,), 0, "copy"), (0, (0, 1), 10**12, "copy")])
    assert len(list(batches(apart, group, "allgather", 6, 2, lookup, most=1))) == 6


@pytest.mark.parametrize("collective", ["allgather", "alltoall"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_expanded_schedules_are_right(collective: str, step: int) -> None:
    topology = circulant(6)
    made = ring_schedule(topology, group_of(6, rotation(6, step)), collective, 2, 10**6)
    explicit = made.to_algorithm(topology)
    assert check_algorithm(explicit, topology) == []
    links = link_table(topology)
    places = Places(collective, 6, 2)
    for most in (1, 1 << 20):
        assert check_table(topology, links, places, 10**6, made.batches(links, most), made.time_fs) == []


def test_links_without_an_image_and_other_machines_are_refused() -> None:
    topology, group = circulant(6), group_of(6, rotation(6))
    made = ring_schedule(topology, group, "allgather", 1, 10**6)
    whole = link_lookup(link_table(topology), 6)
    no_symmetry = group_of(6, [1, 0, 4, 5, 2, 3])  # takes 1 -> 2 to 0 -> 4
    one = priced(topology, Fraction(1000), [(link_of(topology, 1, 2), (0,), 0, "copy")])
    with pytest.raises(ValueError, match="element 1 of the group takes link 1 to no link"):
        expanded(one, no_symmetry, np.arange(2), "allgather", 6, 1, whole)
    with pytest.raises(ValueError, match="is for 6 ranks"):
        made.to_algorithm(circulant(5))
    with pytest.raises(ValueError, match="chunks of broadcast do not move"):
        expanded(made.messages, group, np.arange(6), "broadcast", 6, 1, whole)
    still = expanded(made.messages, group, np.arange(1), "broadcast", 6, 1, whole)
    assert messages_of(still) == messages_of(made.messages)


def test_lookup_of_parallel_links() -> None:
    topology = circulant(6)
    lookup = link_lookup(link_table(topology), 6)
    src = np.array([link.src for link in topology.links])
    dst = np.array([link.dst for link in topology.links])
    assert lookup.find(src, dst, lookup.ordinal).tolist() == list(range(len(topology.links)))
    assert lookup.find(src[:1], dst[:1], np.array([2])).tolist() == [-1]
    assert lookup.find(np.array([0]), np.array([3]), np.array([0])).tolist() == [-1]
    empty = link_lookup(link_table(Topology("alone", ((0,), (1,)), ())), 2)
    assert empty.find(np.array([0]), np.array([1]), np.array([0])).tolist() == [-1]
