"""Which ranks share a node, seen from the pair costs alone; host names only make it easier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Partition = tuple[tuple[int, ...], ...]  # groups of ranks, each sorted, ordered by their first rank

# Within one machine the pairs of ranks differ by cache and socket distance, at most about 2x; a cable
# costs more than that in latency or in bandwidth, else it does not matter that it is there.
BOUNDARY_RATIO = 3.0


def by_name(hosts: Sequence[str]) -> Partition:
    """The ranks of each host."""
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return tuple(sorted(tuple(group) for group in groups.values()))


def by_cost(cost: NDArray[np.float64]) -> tuple[Partition, float]:
    """The clearest partition of the ranks into groups, and how clear it is.

    cost: (ranks, ranks), symmetric, any unit. A partition is proper when it is what remains connected after
    cutting all pairs above some threshold and every pair within a group is below it; its clearness is the
    cheapest pair across groups over the dearest pair within one. Single ranks and one group of all are no
    partition; then the clearness is 1. Kruskal's order makes it O(ranks^2 log ranks).
    """
    ranks = len(cost)
    pairs = sorted((float(cost[i, j]), i, j) for i in range(ranks) for j in range(i + 1, ranks))
    group = list(range(ranks))
    members = {rank: [rank] for rank in range(ranks)}
    best: tuple[Partition, float] = ((tuple(range(ranks)),), 1.0)
    inside = 0  # pairs within the present groups
    for k, (dearest, i, j) in enumerate(pairs):
        a, b = group[i], group[j]
        if a != b:
            inside += len(members[a]) * len(members[b])
            for rank in members[b]:
                group[rank] = a
            members[a] += members.pop(b)
        if len(members) == 1:
            break
        if inside == k + 1:  # every pair so far lies within a group, and every pair within a group was seen
            clearness = pairs[k + 1][0] / max(dearest, 1e-9)
            if clearness > best[1]:
                best = tuple(sorted(tuple(sorted(m)) for m in members.values())), clearness
    return best


def meet(left: Partition, right: Partition) -> Partition:
    """The coarsest partition finer than both."""
    groups = {tuple(sorted(set(a) & set(b))) for a in left for b in right}
    return tuple(sorted(group for group in groups if group))


def find_nodes(hosts: Sequence[str], costs: Sequence[NDArray[np.float64]]) -> Partition:
    """The nodes: hosts as they name themselves, split further where any cost shows a clear boundary.

    costs: matrices (ranks, ranks) of pair costs at different message sizes (latency, bandwidth).
    """
    named = by_name(hosts)
    clearest = max((by_cost(cost) for cost in costs), key=lambda found: found[1])
    if clearest[1] < BOUNDARY_RATIO:
        return named
    return meet(named, clearest[0])
