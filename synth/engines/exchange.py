"""Allreduce of short vectors on several nodes: reduce to one rank a node, exchange between these, broadcast.

The leaders exchange whole partial sums by recursive doubling, both directions at once, so that the network's alpha
is paid log2(nodes) times instead of twice that for a tree. Nodes must be a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Restrictions
from taccl.synth.collective import Chunk, Collective, build
from taccl.synth.engines.greedy import greedy, tastes
from taccl.synth.problem import problem, unreachable
from taccl.synth.schedule import Transfer

MOST_CHOICES = 64  # of leaders, nodes taking the same position each


def exchanging_allreduce(
    topology: Topology, collective: Collective, size_bytes: int, restrictions: Restrictions, seed: int
) -> Iterator[list[Transfer]]:
    """One list of transfers for each choice of leaders."""
    nodes = topology.nodes
    if len(nodes) < 2 or len(nodes) & (len(nodes) - 1) or len({len(node) for node in nodes}) > 1:
        return
    size = len(nodes[0])
    links = {(x.src, x.dst): e for e, x in reversed(list(enumerate(topology.links)))}
    whole = tuple(range(len(collective.chunks)))
    choices = [tuple(node[start] for node in nodes) for start in range(size)]
    if len(nodes) == 2:
        choices = [(a, b) for a in nodes[0] for b in nodes[1]]
    for leaders in choices[:MOST_CHOICES]:
        pairs = [(a, leaders[i ^ bit]) for bit in _bits(len(nodes)) for i, a in enumerate(leaders)]
        if any(pair not in links for pair in pairs):
            continue
        inside = _within_nodes(topology, leaders, size_bytes, restrictions, seed)
        if inside is None:
            continue
        up, down = inside
        transfers = [replace(t, chunks=whole) for t in up]
        into: dict[int, list[int]] = {}
        for index, transfer in enumerate(transfers):
            into.setdefault(topology.links[transfer.link].dst, []).append(index)
        for bit in _bits(len(nodes)):
            before = {leader: tuple(into.get(leader, ())) for leader in leaders}
            for i, leader in enumerate(leaders):
                partner = leaders[i ^ bit]
                transfers.append(Transfer(links[leader, partner], whole, "reduce", before[leader]))
                into.setdefault(partner, []).append(len(transfers) - 1)
        yield [*transfers, *(replace(t, chunks=whole) for t in down)]


def _bits(count: int) -> list[int]:
    return [1 << i for i in range(count.bit_length() - 1)]


def _within_nodes(
    topology: Topology, leaders: tuple[int, ...], size_bytes: int, restrictions: Restrictions, seed: int
) -> tuple[list[Transfer], list[Transfer]] | None:
    """Greedy reductions to the leader of each node, and broadcasts from it, without leaving the node."""
    up: list[Transfer] = []
    down: list[Transfer] = []
    for node, leader in zip(topology.nodes, leaders, strict=True):
        spread = build("broadcast", topology.ranks, 1, root=leader)
        chunk = Chunk(((leader, 0),), tuple((rank, 0) for rank in node))
        local = replace(spread, chunks=(chunk,))
        gather = replace(
            local, name="reduce", combining=True, chunks=(Chunk(chunk.destinations, chunk.sources),)
        )
        for wanted, found in ((gather, up), (local, down)):
            stated = problem(topology, wanted, size_bytes, restrictions)
            members = set(node)
            layer = stated.layers[0]
            kept = tuple(
                e
                for e in layer.usable[0]
                if topology.links[e].src in members and topology.links[e].dst in members
            )
            stated = replace(stated, layers=(replace(layer, usable=(kept,)),))
            if unreachable(stated):
                return None
            grown = greedy(stated, next(iter(tastes(1, seed))))
            if grown is None:
                return None
            found += grown
    return up, down
