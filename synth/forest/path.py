"""Cheapest paths out of a rank with at most so many links, on a dense matrix of costs (Bellman and Ford, in layers)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from taccl.synth.forest.arborescence import Costs


def cheapest_paths(cost: Costs, root: int, depth: int) -> tuple[Costs, NDArray[np.int64]]:
    """([layer, node] cost of the cheapest way with at most `layer` links, [layer, node] the node before, or -1).

    -1 in a layer means that no link more helps: the way is that of the layer before. O(depth n^2).
    """
    n = len(cost)
    price = np.full((depth + 1, n), np.inf)
    before = np.full((depth + 1, n), -1, np.int64)
    price[0, root] = 0.0
    for layer in range(1, depth + 1):
        through = price[layer - 1][:, None] + cost
        via = through.argmin(axis=0)
        paid = through[via, np.arange(n)]
        better = paid < price[layer - 1]
        price[layer] = np.where(better, paid, price[layer - 1])
        before[layer] = np.where(better, via, -1)
        if not better.any():
            price[layer:] = price[layer]
            break
    return price, before


def nodes_of(before: NDArray[np.int64], layer: int, target: int) -> list[int]:
    """The nodes of the cheapest way to `target` with at most `layer` links, from the root on."""
    nodes = [target]
    for step in range(layer, 0, -1):
        if before[step, nodes[-1]] >= 0:
            nodes.append(int(before[step, nodes[-1]]))
    return nodes[::-1]
