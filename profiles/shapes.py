"""Regular shapes: which ranks a ring, mesh, torus, hypercube or fat tree links."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product


def grid_pairs(size: Sequence[int], wrap: bool) -> list[tuple[int, int]]:
    """Directed (src, dst) pairs of neighbours on a grid, ordered by src, dimension, direction.

    Rank numbers run fastest along the last dimension. With `wrap` each dimension is a ring (a torus); a
    dimension of 2 gives one link each way, not two.
    """
    strides = [1] * len(size)
    for axis in range(len(size) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * size[axis + 1]
    pairs = []
    for src, place in enumerate(product(*(range(extent) for extent in size))):
        for axis, extent in enumerate(size):
            steps = (1,) if wrap and extent == 2 else (1, -1)
            for step in steps:
                to = place[axis] + step
                if wrap:
                    to %= extent
                if 0 <= to < extent and to != place[axis]:
                    pairs.append((src, src + (to - place[axis]) * strides[axis]))
    return pairs


def hypercube_pairs(dimension: int) -> list[tuple[int, int]]:
    """Directed pairs of ranks whose numbers differ in one bit, ordered by src and bit."""
    return [(src, src ^ (1 << bit)) for src in range(1 << dimension) for bit in range(dimension)]


def grid_links(size: Sequence[int], wrap: bool) -> int:
    """Number of pairs that `grid_pairs` gives, without building them."""
    ranks = 1
    for extent in size:
        ranks *= extent
    total = 0
    for extent in size:
        rows = ranks // extent
        per_row = 2 * (extent - 1)
        if wrap and extent > 2:
            per_row = 2 * extent
        total += rows * per_row
    return total
