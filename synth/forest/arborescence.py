"""Spanning trees out of a root at least cost, on a dense matrix of costs.

`cheapest` is exact (Chu and Liu 1965, Edmonds 1967), all cycles of a round contracted at once; `shallow` keeps a limit
on depth, for which no exact method is quick, and grows by least cost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]  # [from, to]; inf where there is no link
Parents = NDArray[np.int64]  # per node its predecessor; -1 at the root


def cheapest(cost: Costs, root: int) -> Parents | None:
    """The spanning tree out of `root` of least total cost; None when a node cannot be reached. O(n^2 log n)."""
    n = len(cost)
    current = cost.astype(np.float64, copy=True)
    np.fill_diagonal(current, np.inf)
    origin = np.arange(n * n).reshape(n, n)  # the original edge behind each edge, from * n + to
    here = np.arange(n)  # per original node its node at this level
    top = root
    levels: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
    while True:
        size = len(current)
        parent = current.argmin(axis=0)
        paid = current[parent, np.arange(size)]
        parent[top] = top
        if np.isinf(np.delete(paid, top)).any():
            return None
        edge = origin[parent, np.arange(size)]
        cycle = _cycles(parent, top)
        if (cycle < 0).all():
            break
        levels.append((here, edge, cycle))
        # A cycle becomes one node; entering it at a member saves what the member's own edge cost.
        paid[cycle < 0] = 0.0
        current = current - paid[None, :]
        label = _labels(cycle)
        current, origin = _merged(current, origin, label)
        here, top = label[here], int(label[top])
    chosen = {int(node): int(e) for node, e in enumerate(edge) if node != top}
    for here, edge, cycle in reversed(levels):
        label = _labels(cycle)
        below = {int(node): int(e) for node, e in enumerate(edge) if cycle[node] >= 0}
        for e in chosen.values():
            below[int(here[e % n])] = e  # also for a cycle: the member that is entered leaves its own edge
        chosen = below
    parents = np.full(n, -1, np.int64)
    for e in chosen.values():
        parents[e % n] = e // n
    parents[root] = -1
    return parents


def _cycles(parent: NDArray[np.int64], top: int) -> NDArray[np.int64]:
    """Per node the smallest node of the cycle of parents it lies on, -1 when it lies on none."""
    size = len(parent)
    reached = parent.copy()
    for _ in range(size.bit_length()):
        reached = reached[reached]
    on_cycle = np.zeros(size, bool)
    on_cycle[reached] = True  # after so many steps everybody has arrived on a cycle
    found = np.full(size, -1, np.int64)
    for start in np.flatnonzero(on_cycle).tolist():
        if start == top or found[start] >= 0:
            continue
        members = [start]
        node = int(parent[start])
        while node != start:
            members.append(node)
            node = int(parent[node])
        found[members] = min(members)
    return found


def _labels(cycle: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per node its number after contraction."""
    stands = np.where(cycle >= 0, cycle, np.arange(len(cycle)))
    _, label = np.unique(stands, return_inverse=True)
    return label.astype(np.int64)


def _merged(
    current: Costs, origin: NDArray[np.int64], label: NDArray[np.int64]
) -> tuple[Costs, NDArray[np.int64]]:
    """Rows and columns of equal label reduced to their least entries."""
    size = int(label.max()) + 1
    first = np.unique(label, return_index=True)[1]
    for axis in (0, 1):
        fewer = current.take(first, axis=axis)
        fewer_origin = origin.take(first, axis=axis)
        for node in np.flatnonzero(np.bincount(label, minlength=size) > 1).tolist():
            members = np.flatnonzero(label == node)
            part, behind = current.take(members, axis=axis), origin.take(members, axis=axis)
            best = part.argmin(axis=axis)
            if axis == 0:
                fewer[node] = part[best, np.arange(part.shape[1])]
                fewer_origin[node] = behind[best, np.arange(part.shape[1])]
            else:
                fewer[:, node] = part[np.arange(part.shape[0]), best]
                fewer_origin[:, node] = behind[np.arange(part.shape[0]), best]
        current, origin = fewer, fewer_origin
    np.fill_diagonal(current, np.inf)
    return current, origin


def shallow(cost: Costs, root: int, depth: int) -> Parents | None:
    """A spanning tree no deeper than `depth`, grown by the cheapest next link, then mended link by link.

    None when growth ends before all nodes are reached. O(n^2).
    """
    n = len(cost)
    parents = np.full(n, -1, np.int64)
    level = np.zeros(n, np.int64)
    out = np.ones(n, bool)
    out[root] = False
    price = cost[root].copy()
    via = np.full(n, root, np.int64)
    if depth < 1:
        return None
    for _ in range(n - 1):
        node = int(np.where(out, price, np.inf).argmin())
        if not out[node] or np.isinf(price[node]):
            return None
        parents[node] = via[node]
        level[node] = level[via[node]] + 1
        out[node] = False
        if level[node] < depth:
            better = out & (cost[node] < price)
            price[better] = cost[node][better]
            via[better] = node
    return _mended(cost, root, depth, parents, level)


def _mended(cost: Costs, root: int, depth: int, parents: Parents, level: NDArray[np.int64]) -> Parents:
    """Leaves move to the cheapest parent that the limit on depth allows; growth took what it saw first."""
    n = len(cost)
    children = np.bincount(parents[parents >= 0], minlength=n)
    may_feed = level < depth
    for node in range(n):
        if node == root or children[node]:
            continue
        offers = np.where(may_feed, cost[:, node], np.inf)
        offers[node] = np.inf
        best = int(offers.argmin())
        old = int(parents[node])
        if offers[best] < cost[old, node]:
            children[old] -= 1
            children[best] += 1
            parents[node] = best
            level[node] = level[best] + 1
            may_feed[node] = level[node] < depth
    return parents
