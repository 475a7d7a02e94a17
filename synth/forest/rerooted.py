"""First trees for a broadcast (or a reduce): those of the machine's own allgather, hung on the one root.

Where all ranks are alike, an allgather's few trees and their images under the symmetry use every port evenly; a
broadcast that sends each share to another rank, and from there down that rank's tree, is the scatter and allgather of
van de Geijn in one. A column generation that starts with them is near its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from taccl.synth.forest.arborescence import Costs
from taccl.synth.forest.fluid import Side, Tree
from taccl.synth.forest.path import cheapest_paths, nodes_of
from taccl.synth.symmetric.group import Group

MOST_LINKS = 3  # of the way from the root to where a tree begins


def rerooted(
    trees: Sequence[Tree], sides: Sequence[Side], group: Group, cost: Costs, root: int
) -> list[dict[int, int]]:
    """Spanning trees out of `root`, each as the rank before every other rank: one for each image of each tree.

    cost: [from, to] of links in the direction in which trees grow. Images that no short way leads to are left out.
    """
    price, before = cheapest_paths(cost, root, MOST_LINKS)
    every = np.arange(len(cost))
    found: list[dict[int, int]] = []
    for tree in trees:
        side = sides[tree.side]
        near = side.inst.links.src[list(tree.links)]
        far = side.inst.links.dst[list(tree.links)]
        for element in range(group.order):
            moved = group.image(element, every)
            top = int(moved[side.root])
            if not np.isfinite(price[MOST_LINKS, top]):
                continue
            parents = dict(zip(moved[far].tolist(), moved[near].tolist(), strict=True))
            for a, b in itertools.pairwise(nodes_of(before, MOST_LINKS, top)):
                parents[b] = a
            parents.pop(root, None)
            found.append(parents)
    return found
