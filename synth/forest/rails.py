"""Trees of a broadcast (or a reduce) on a cluster of equal nodes: a chain from node to node at each place.

The root's data are dealt out to the ranks at its node's NICs, go from each to the rank at the same place of the next
node, and in every node down a chain or a star of its links. Every NIC then sends and receives its share once, which no
broadcast can do with less, and a pipeline of many chunks hides the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.topology import Topology

Floats = NDArray[np.float64]
Parents = dict[int, int]  # rank -> the rank before it
Within = Callable[[Sequence[int], int, Floats], Parents | None]
# Looks for a chain through a node's ranks before none is believed in.
MOST_LOOKS = 20_000


def rails(topology: Topology, cost: Floats, root: int) -> list[list[Parents]]:
    """Sets of trees out of `root` that carry equal shares, as parents of every other rank.

    cost: [from, to] of links in the direction in which trees grow, inf where there is none. Empty for a single node,
    nodes of unequal sizes, or where ranks at one place of two nodes have no link.
    """
    nodes = topology.nodes
    if len(nodes) < 2 or len({len(members) for members in nodes}) > 1:
        return []
    home = next(v for v, members in enumerate(nodes) if root in members)
    order = [(home + step) % len(nodes) for step in range(len(nodes))]
    places = range(len(nodes[0]))
    # A profile may name ranks of other nodes, or none, beside a NIC.
    near = [[nodes[nic.node].index(r) for r in nic.ranks if r in nodes[nic.node]] for nic in topology.nics]
    first_at_nic = sorted({min(ranks) for ranks in near if ranks}) or list(places)
    found = []
    for starts, within in ((first_at_nic, _chain), (list(places), _star)):
        trees = [_rail(nodes, order, cost, root, place, within) for place in starts]
        if all(tree is not None for tree in trees):
            found.append([tree for tree in trees if tree is not None])
    return found


def _rail(
    nodes: Sequence[Sequence[int]], order: Sequence[int], cost: Floats, root: int, place: int, within: Within
) -> Parents | None:
    parents: Parents = {}
    before = root
    for node in order:
        head = nodes[node][place]
        if head != root:
            if not np.isfinite(cost[before, head]):
                return None
            parents[head] = before
        inside = within([r for r in nodes[node] if r not in (head, root)], head, cost)
        if inside is None:
            return None
        parents |= inside
        before = head
    return parents


def _star(ranks: Sequence[int], head: int, cost: Floats) -> Parents | None:
    """Straight from the head, over other ranks of the node where it has no link (Prim's order, nearest first)."""
    parents: Parents = {}
    far = {head: 0.0}
    left = set(ranks)
    while left:
        price, rank, parent = min((far[p] + cost[p, r], r, p) for p in far for r in left)
        if not np.isfinite(price):
            return None
        parents[rank], far[rank] = parent, price
        left.remove(rank)
    return parents


def _chain(ranks: Sequence[int], head: int, cost: Floats) -> Parents | None:
    """One after the other, over the quickest links that leave no rank out."""
    for limit in sorted(
        {float(cost[a, b]) for a in (head, *ranks) for b in ranks if np.isfinite(cost[a, b])}
    ):
        path = _path([head], set(ranks), cost, limit, [MOST_LOOKS])
        if path is not None:
            return {b: a for a, b in itertools.pairwise(path)}
    return {} if not ranks else None


def _path(path: list[int], left: set[int], cost: Floats, limit: float, looks: list[int]) -> list[int] | None:
    if not left:
        return path
    looks[0] -= 1
    if looks[0] < 0:
        return None
    for rank in sorted(left):
        if cost[path[-1], rank] <= limit:
            longer = _path([*path, rank], left - {rank}, cost, limit, looks)
            if longer is not None:
                return longer
    return None
