"""Double binary tree: chunks alternate between two trees; the inner ranks of one are leaves of the other.

Each rank then sends every byte of the vector at most once in all, at logarithmic depth. The trees are
NCCL's: in-order trees, the second one mirrored (even sizes) or shifted by one (odd sizes). Where ranks lack
the links, the trees join nodes and a chain runs through each node, NCCL's form too. Sanders, Speck, Traeff:
Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from taccl.profiles.topology import Topology, reverse
from taccl.synth.collective import Collective
from taccl.synth.engines.circles import hamiltonian
from taccl.synth.engines.embedding import embed
from taccl.synth.engines.network import Inapplicable, Network
from taccl.synth.schedule import Transfer

Edge = tuple[int, int]  # (parent, child)


def transfers(topology: Topology, collective: Collective) -> list[Transfer]:
    """Two trees for broadcast, reduce and allreduce; Inapplicable for others or when links are missing."""
    if collective.name not in ("broadcast", "reduce", "allreduce"):
        raise Inapplicable(
            f"double binary trees serve broadcast, reduce and allreduce, not {collective.name}"
        )
    if topology.ranks == 1:
        return []
    trees = _trees(topology, None if collective.name == "allreduce" else collective.root)
    out: list[Transfer] = []
    chunks = range(len(collective.chunks))
    if collective.combining:
        network = Network(reverse(topology))
        grown = [
            Transfer(network.link(*edge), (chunk,), "reduce") for chunk in chunks for edge in trees[chunk % 2]
        ]
        # Turned round, the list ends with chunk 0; start with it instead.
        size = len(trees[0])
        for chunk in chunks:
            out += reversed(grown[chunk * size : (chunk + 1) * size])
    if collective.name != "reduce":
        network = Network(topology)
        out += [Transfer(network.link(*edge), (chunk,)) for chunk in chunks for edge in trees[chunk % 2]]
    return out


def binary_tree(size: int, second: bool) -> list[Edge]:
    """Edges over positions 0..size-1, parents first. The root is 0; in the second size - 1 or (odd) 1."""

    def parent(position: int) -> int:
        bit = position & -position
        up = (position ^ bit) | (bit << 1)
        return up if up < size else position ^ bit

    def shown(position: int) -> int:
        if not second:
            return position
        return size - 1 - position if size % 2 == 0 else (position + 1) % size

    children: dict[int, list[int]] = {}
    for position in range(1, size):
        children.setdefault(parent(position), []).append(position)
    edges: list[Edge] = []
    level = [0]
    while level:
        edges += [(shown(u), shown(v)) for u in level for v in children.get(u, [])]
        level = [v for u in level for v in children.get(u, [])]
    return edges


def _pattern(size: int, rooted: bool) -> tuple[list[Edge], list[Edge]]:
    """Both trees over `size` positions; rooted: position 0 feeds two trees over the others."""
    if not rooted or size == 1:
        return binary_tree(size, False), binary_tree(size, True)
    both: list[list[Edge]] = []
    for second in (False, True):
        edges = [(u + 1, v + 1) for u, v in binary_tree(size - 1, second)]
        top = 1 + (0 if not second else size - 2 if (size - 1) % 2 == 0 else 1 % (size - 1))
        both.append([(0, top), *edges])
    return both[0], both[1]


def _trees(topology: Topology, root: int | None) -> tuple[list[Edge], list[Edge]]:
    """Two trees over ranks, edges parents first, every edge linked both ways; both have the given root."""
    network = Network(topology)
    order = [rank for node in topology.nodes for rank in node]
    pattern = _pattern(len(order), root is not None)
    if root is None:
        ranks = embed(pattern[0] + pattern[1], order, network.linked)
    else:
        start = order.index(root)
        order = order[start:] + order[:start]
        ranks = embed(pattern[0] + pattern[1], order, network.linked)
        if ranks is not None and ranks[0] != root:
            ranks = None
    if ranks is not None:
        return [(ranks[u], ranks[v]) for u, v in pattern[0]], [(ranks[u], ranks[v]) for u, v in pattern[1]]
    if len(topology.nodes) == 1:
        raise Inapplicable("no way was found to place two binary trees on the links of this one node")
    home = 0 if root is None else topology.node_of()[root]
    nodes = list(topology.nodes[home:] + topology.nodes[:home])
    over_nodes = _pattern(len(nodes), root is not None)
    first = _through_nodes(network, nodes, over_nodes[0], root, 0)
    return first, _through_nodes(network, nodes, over_nodes[1], root, 1)


def _through_nodes(
    network: Network, nodes: Sequence[tuple[int, ...]], edges: Sequence[Edge], root: int | None, which: int
) -> list[Edge]:
    """A tree over nodes with a chain through the ranks of each; `which` tells the two trees apart."""
    top = edges[0][0]
    entry = {top: nodes[top][which % len(nodes[top])] if root is None else root}
    out = _chain(network, nodes[top], entry[top])
    busy: dict[int, int] = {}
    for parent, child in edges:
        pairs = [
            (u, v)
            for u in nodes[parent]
            for v in nodes[child]
            if network.linked(u, v) and network.linked(v, u)
        ]
        if not pairs:
            raise Inapplicable(
                f"ranks {nodes[parent][0]} and {nodes[child][0]} are on nodes without a two-way link"
            )
        u, v = min(
            pairs,
            key=lambda p: (busy.get(p[0], 0), p[0] != entry[parent], network.beta[network.between[p][0]], p),
        )
        busy[u] = busy.get(u, 0) + 1
        entry[child] = v
        out += [(u, v), *_chain(network, nodes[child], v)]
    return out


def _chain(network: Network, ranks: tuple[int, ...], start: int) -> list[Edge]:
    """Edges of a path from `start` through all ranks of a node over two-way links."""
    size = len(ranks)
    successors = {
        u: sorted(
            (v for v in ranks if v != u and network.linked(u, v) and network.linked(v, u)),
            key=lambda v, u=u: (
                -network.beta[network.between[u, v][0]],
                (ranks.index(u) - ranks.index(v)) % size,
            ),  # type: ignore[misc]
        )
        for u in ranks
    }
    path = hamiltonian(successors, start, None, closed=False)
    if path is None:
        raise Inapplicable(f"no chain over two-way links leads from rank {start} through its node")
    return list(pairwise(path))
