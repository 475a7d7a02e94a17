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
    circulant,
    direct,
    double_binary_tree,
    hierarchical,
    one_shot,
    recursive_doubling,
    ring,
)
from taccl.synth.engines.network import Inapplicable
from taccl.synth.schedule import Transfer

__all__ = ["BASELINES", "Inapplicable"]

# By name on the command line. Each returns the transfers of the whole collective or raises Inapplicable.
BASELINES: dict[str, Callable[[Topology, Collective], list[Transfer]]] = {
    "ring": ring.transfers,
    "recursive-doubling": recursive_doubling.transfers,
    "direct": direct.transfers,
    "hierarchical": hierarchical.transfers,
    "double-binary-tree": double_binary_tree.transfers,
    "circulant": circulant.transfers,
    "one-shot-doubling": one_shot.doubling,
    "one-shot-pairs": one_shot.all_pairs,
}
