"""The `shape` of a profile: a ring, mesh, torus, hypercube or fat tree instead of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import numpy as np

from taccl.profiles.draft import Draft
from taccl.profiles.forms import Values
from taccl.profiles.link_columns import LinkClass, crossing
from taccl.profiles.schema import MAX_LINKS, MAX_RANKS
from taccl.profiles.topology import Nic


def build_shape(draft: Draft, values: Values, size: Sequence[int] | None) -> None:
    """Add the nodes, ports and links of `shape`; `size` replaces the written one."""
    shape: Values = values["shape"]
    for key in ("nodes", "network", "ports", "switches", "nics"):
        if key in values:
            values.at(key).error("P101", f"`{key}` and `shape` exclude each other", "keep one of the two")
    link_class = draft.link_class(shape)
    if "kind" not in shape or "size" not in shape:
        return
    kind: str = shape["kind"]
    extents: Sequence[int] = size if size is not None else shape["size"]
    wanted = {"ring": 1, "hypercube": 1, "fat-tree": 2}.get(kind, len(extents))
    at = shape.at("size")
    if len(extents) != wanted:
        at.error("P106", f"a {kind} has a size of {wanted} number{'s' * (wanted > 1)}, found {len(extents)}")
        return
    ranks = 1
    for extent in extents:
        ranks *= extent
    if kind == "hypercube":
        ranks = 2 ** min(extents[0], 64)
    if not 2 <= ranks <= MAX_RANKS:
        at.error("P106", f"the {kind} has {ranks} ranks, from 2 to {MAX_RANKS} are read")
        return
    across = draft.link_class(shape, "across") if "across" in shape else link_class
    if kind != "fat-tree":
        for key in ("across", "oversubscription"):
            if key in shape:
                shape.at(key).error("P101", f"`{key}` belongs to a fat-tree, not to a {kind}")
    if link_class is None or across is None:
        draft.nodes = [tuple(range(ranks))]
        draft.incomplete = True
        return
    if kind == "fat-tree":
        _build_fat_tree(draft, extents[0], extents[1], link_class, across, shape)
        return
    cube = kind == "hypercube"
    pairs = hypercube_pairs(extents[0]) if cube else grid_pairs(extents, wrap=kind != "mesh")
    draft.nodes = [tuple(range(ranks))]
    draft.links.add(link_class, *np.array(pairs, np.int64).reshape(-1, 2).T)


def _build_fat_tree(
    draft: Draft, leaves: int, per_leaf: int, link_class: LinkClass, across: LinkClass, shape: Values
) -> None:
    """Two levels: each rank has a port each way to its leaf, each leaf an uplink each way to the spine.

    The ranks under a leaf are one node, the uplink is its NIC.
    """
    ranks = leaves * per_leaf
    if ranks * (ranks - 1) > MAX_LINKS:
        shape.at("size").error(
            "P106", f"{ranks * (ranks - 1)} links are more than the {MAX_LINKS} that are read"
        )
        return
    ratio: Fraction = shape.get("oversubscription", Fraction(1))
    at = shape.node
    draft.nodes = [tuple(range(leaf * per_leaf, (leaf + 1) * per_leaf)) for leaf in range(leaves)]
    beta = link_class.beta_us_per_mb
    ends = [
        (
            draft.add_port(f"rank{rank}.out", beta, "nic", at),
            draft.add_port(f"rank{rank}.in", beta, "nic", at),
        )
        for rank in range(ranks)
    ]
    uplinks = []
    for leaf, members in enumerate(draft.nodes):
        draft.add_switch(f"leaf{leaf}", members, at)
        uplink = beta * ratio / per_leaf
        ways = [draft.add_port(f"leaf{leaf}.{way}", uplink, "switch", at) for way in ("up", "down")]
        uplinks.append(ways)
        if leaves > 1:
            draft.add_nic(Nic(f"leaf{leaf}", leaf, members, *ways), at)
    draft.links.reserve(ranks * (ranks - 1), 4 if leaves > 1 else 2)
    out, into = np.array(ends, np.int64).T
    up, down = np.repeat(np.array(uplinks, np.int64), per_leaf, axis=0).T  # of each rank's leaf
    every = np.arange(ranks)
    for src in range(ranks):
        first = src // per_leaf * per_leaf
        before, near, after = np.split(every, (first, first + per_leaf))
        near = near[near != src]
        draft.links.add(across, src, before, crossing(out[src], up[src], down[before], into[before]))
        draft.links.add(link_class, src, near, crossing(out[src], into[near]))
        draft.links.add(across, src, after, crossing(out[src], up[src], down[after], into[after]))


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
