"""Trees that need only reach some ranks: spanning trees over the cheapest ways between these, with relays on them.

The least tree of this kind (Steiner's) is hard to find; a spanning tree over ways is at most as many times dearer as
there are ranks to reach, and where ranks are joined directly it is as good as that of the ranks alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from taccl.synth.forest.arborescence import Costs

# A little for every link: of ways that cost nothing the shortest is wanted.
LINK = 1e-9


def ways_between(cost: Costs) -> tuple[Costs, NDArray[np.int64]]:
    """([from, to] cost of the cheapest way, [from, to] the rank before the last on it; -1: none). O(n^3)."""
    n = len(cost)
    price = cost + LINK
    np.fill_diagonal(price, 0.0)
    before = np.where(np.isfinite(price), np.arange(n)[:, None], -1)
    for via in range(n):
        through = price[:, via : via + 1] + price[via : via + 1, :]
        better = through < price
        price = np.where(better, through, price)
        before = np.where(better, before[via : via + 1, :], before)
    return price, before


def along_ways(
    parents: Mapping[int, int], members: Sequence[int], before: NDArray[np.int64], cost: Costs, root: int
) -> dict[int, int]:
    """A tree over members, by their places in `members`, as the rank before every rank on its ways.

    Ways that meet become one: each rank is reached as cheaply as the links of all ways allow, and what leads to no
    member is left out.
    """
    onward: dict[int, set[int]] = {}
    for child, parent in parents.items():
        rank, first = members[child], members[parent]
        while rank != first:
            earlier = int(before[first, rank])
            onward.setdefault(earlier, set()).add(rank)
            rank = earlier
    paid = {root: 0.0}
    found: dict[int, int] = {}
    queue = [(0.0, root)]
    while queue:
        so_far, rank = heapq.heappop(queue)
        if so_far > paid[rank]:
            continue
        for after in sorted(onward.get(rank, ())):
            price = so_far + float(cost[rank, after]) + LINK
            if price < paid.get(after, np.inf):
                paid[after], found[after] = price, rank
                heapq.heappush(queue, (price, after))
    kept: dict[int, int] = {}
    for member in members:
        rank = member
        while rank != root and rank not in kept:
            kept[rank] = found[rank]
            rank = found[rank]
    return kept
