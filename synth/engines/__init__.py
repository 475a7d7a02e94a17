"""Algorithms that need no solver: the baselines, which are warm starts too, and the greedy trees.

A baseline is a pure function of topology and collective. The order of its transfers is the order in which
they take links and ports; it knows no sizes, so the scheduler and the caller's choice of partition do the
rest.
"""

from __future__ import annotations

from collections.abc import Callable

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.engines import (
    chain,
    circulant,
    direct,
    double_binary_tree,
    hierarchical,
    one_shot,
    one_shot_levels,
    one_shot_trees,
    recursive_doubling,
    ring,
)
from taccl.synth.engines.groups import for_groups
from taccl.synth.engines.network import Inapplicable
from taccl.synth.schedule import Transfer

__all__ = ["BASELINES", "Inapplicable"]

# By name on the command line. Each returns the transfers of the whole collective, of every group of it, or raises
# Inapplicable.
BASELINES: dict[str, Callable[[Topology, Collective], list[Transfer]]] = {
    "ring": for_groups(ring.transfers),
    "recursive-doubling": for_groups(recursive_doubling.transfers),
    "direct": for_groups(direct.transfers),
    "hierarchical": for_groups(hierarchical.transfers),
    "double-binary-tree": for_groups(double_binary_tree.transfers),
    "circulant": for_groups(circulant.transfers),
    "chain": for_groups(chain.transfers),
    "one-shot-doubling": for_groups(one_shot.doubling),
    "one-shot-levels": for_groups(one_shot_levels.transfers),
    "one-shot-pairs": for_groups(one_shot.all_pairs),
    "one-shot-trees": for_groups(one_shot_trees.transfers),
}
