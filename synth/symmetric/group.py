"""Groups of rank permutations in coordinates: nothing of size ranks x ranks is ever built.

A commutative group that acts freely is a product of cyclic groups, and a rank is named by its orbit and by the
element that takes the orbit's first rank to it. Moving a rank is adding elements, digit by digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A commutative group that acts on ranks and fixes none (but by its identity, element 0).

    An element is a number 0..order-1, read as digits: digit i runs below `orders[i]`, the first varies quickest.
    """

    orders: tuple[int, ...]  # orders of the generators; () is the trivial group
    generators: tuple[tuple[int, ...], ...]  # the rank permutation of each
    orbit: Ints  # per rank
    element: Ints  # per rank: what takes the first rank of its orbit to it
    rank_at: Ints  # [orbit, element] -> rank

    @property
    def order(self) -> int:
        """Number of elements."""
        return math.prod(self.orders)

    @property
    def orbits(self) -> int:
        """Number of orbits; each has `order` ranks."""
        return len(self.rank_at)

    def add(self, a: Ints | int, b: Ints | int) -> Ints:
        """Elements a + b, elementwise."""
        return self._digits(np.asarray(a, np.int64), np.asarray(b, np.int64), 1)

    def subtract(self, a: Ints | int, b: Ints | int) -> Ints:
        """Elements a - b, elementwise."""
        return self._digits(np.asarray(a, np.int64), np.asarray(b, np.int64), -1)

    def image(self, element: Ints | int, ranks: Ints | int) -> Ints:
        """Where elements take ranks, elementwise."""
        found: Ints = self.rank_at[self.orbit[ranks], self.add(element, self.element[ranks])]
        return found

    def _digits(self, a: Ints, b: Ints, sign: int) -> Ints:
        total = np.zeros(np.broadcast(a, b).shape, np.int64)
        weight = 1
        for order in self.orders:
            total += weight * ((a // weight % order + sign * (b // weight % order)) % order)
            weight *= order
        return total


def trivial_group(ranks: int) -> Group:
    """The group that moves nothing."""
    return _group((), (), ranks)


def with_generator(group: Group, permutation: Sequence[int]) -> Group | None:
    """The group with one generator more; None when it would not be commutative, free and a direct product."""
    ranks = len(group.orbit)
    p = np.asarray(permutation, np.int64)
    for generator in group.generators:
        q = np.asarray(generator, np.int64)
        if not np.array_equal(p[q], q[p]):
            return None
    # p permutes the orbits of the group. Free and a direct product: every orbit of orbits is as long as the order.
    orbit_image = group.orbit[p[group.rank_at[:, 0]]]
    length = _cycle_length(orbit_image)
    if length is None or length == 1:
        return None
    power = np.arange(ranks)
    for _ in range(length):
        power = p[power]
    if not np.array_equal(power, np.arange(ranks)):
        return None
    return _group((*group.orders, length), (*group.generators, tuple(int(r) for r in p)), ranks)


def _cycle_length(permutation: Ints) -> int | None:
    """The length of all cycles; None when they differ."""
    start = np.arange(len(permutation))
    moved, length = permutation.copy(), 1
    while True:
        fixed = moved == start
        if fixed.all():
            return length
        if fixed.any():
            return None
        moved, length = permutation[moved], length + 1


def _group(orders: tuple[int, ...], generators: tuple[tuple[int, ...], ...], ranks: int) -> Group:
    order = math.prod(orders)
    # images[e] of one rank at a time would be ranks x order; only first ranks of orbits are needed.
    orbit = np.full(ranks, -1, np.int64)
    element = np.zeros(ranks, np.int64)
    first = _first_ranks(generators, ranks)
    rank_at = np.empty((len(first), order), np.int64)
    rank_at[:, 0] = first
    filled = 1
    for size, generator in zip(orders, generators, strict=True):
        p = np.asarray(generator, np.int64)
        block = rank_at[:, :filled]
        for step in range(1, size):
            block = p[block]
            rank_at[:, step * filled : (step + 1) * filled] = block
        filled *= size
    orbit[rank_at] = np.arange(len(first))[:, None]
    element[rank_at] = np.arange(order)[None, :]
    return Group(orders, generators, orbit, element, rank_at)


def _first_ranks(generators: tuple[tuple[int, ...], ...], ranks: int) -> Ints:
    return np.flatnonzero(smallest_in_orbit(generators, ranks) == np.arange(ranks)).astype(np.int64)


def smallest_in_orbit(generators: Iterable[Sequence[int] | Ints], count: int) -> Ints:
    """Per thing the smallest that the generators (permutations of 0..count-1) take it to."""
    label = np.arange(count, dtype=np.int64)
    generators = list(generators)
    changed = True
    while changed:
        before = label.copy()
        for generator in generators:
            power = np.asarray(generator, np.int64)
            # After k doublings a label has seen 2^k steps along its cycle.
            for _ in range(max(1, count.bit_length())):
                label = np.minimum(label, label[power])
                power = power[power]
        changed = not np.array_equal(before, label)
    return label
