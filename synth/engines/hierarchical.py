"""Hierarchical: inside the node, between the nodes along rails, inside the nodes again.

A rail joins the ranks of equal place in their nodes. With many roots (allgather) each rank's chunk crosses to
its own rail peers and is handed out there; a chunk for one rank (alltoall) first moves to the rank of its own
node that shares a rail with the target, so that a node's chunks for one rank cross as one message. From a
single root the chunks spread over the rails and the nodes form a binomial tree. Where a rail has no link, the
least loaded link between the two nodes serves. Graham et al.: Cheetah, 2011; NCCL's PXN, 2.12.
"""

from __future__ import annotations

from collections.abc import Sequence

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.engines.network import Inapplicable, Network, Want, both_ways
from taccl.synth.schedule import Transfer

Key = tuple[int, int, int, int, int]  # (chunk's turn, stage, hop, turn within it, link)


def transfers(topology: Topology, collective: Collective) -> list[Transfer]:
    """Hierarchical algorithm of any collective. Raises Inapplicable on one node or for unconnected ranks."""
    if len(topology.nodes) < 2:
        raise Inapplicable("a hierarchical algorithm needs at least two nodes")
    return both_ways(topology, collective, _spread)


def _spread(topology: Topology, wants: Sequence[Want]) -> list[Transfer]:
    network = Network(topology)
    node_of = topology.node_of()
    one_root = len({want.root for want in wants}) == 1
    far_first = sorted(wants, key=lambda w: all(node_of[t] == node_of[w.root] for t in w.targets))
    batches: dict[Key, list[int]] = {}
    for number, want in enumerate(far_first if one_root else wants):
        for key in _trip(topology, network, node_of, want, number if one_root else None):
            batches.setdefault(key, []).append(want.chunk)
    return [Transfer(key[-1], tuple(sorted(chunks))) for key, chunks in sorted(batches.items())]


def _trip(
    topology: Topology, network: Network, node_of: tuple[int, ...], want: Want, number: int | None
) -> list[Key]:
    """The messages that a chunk is part of. number: its place among the chunks of the one root, else None."""
    nodes = topology.nodes
    home = node_of[want.root]
    wanted: dict[int, set[int]] = {home: set()}
    for target in want.targets:
        wanted.setdefault(node_of[target], set()).add(target)
    # Nodes in order of distance from the root's; a binomial tree over them, or a star.
    away = sorted((node for node in wanted if node != home), key=lambda node: (node - home) % len(nodes))
    tour = [home, *away]
    entry = {home: want.root}
    exits: dict[int, list[int]] = {node: [] for node in tour}
    crossings: list[tuple[int, int, int]] = []  # (depth, link, node)
    depth = {home: 0}
    for place, node in enumerate(tour[1:], 1):
        parent = tour[place & ~(1 << (place.bit_length() - 1))] if number is not None else home
        rail = nodes[home].index(want.root) + (number or 0)
        if len(want.targets) == 1:
            rail = nodes[node].index(want.targets[0])
        src, dst = nodes[parent][rail % len(nodes[parent])], nodes[node][rail % len(nodes[node])]
        if not network.linked(src, dst):
            src, dst = _any_link(network, nodes[parent], nodes[node])
        link = network.link(src, dst)
        depth[node] = depth[parent] + 1
        crossings.append((depth[node], link, node))
        exits[parent].append(src)
        entry[node] = dst
    turn = number or 0
    keys = [(turn, 2 * level - 1, 0, (node - home) % len(nodes), link) for level, link, node in crossings]
    for node in tour:
        for hop, link in _inside(network, frozenset(nodes[node]), entry[node], exits[node], wanted[node]):
            x = network.links[link]
            keys.append((turn, 2 * depth[node], hop, (x.dst - x.src) % topology.ranks, link))
            if number is None and node != home:
                # What different nodes sent arrives at different times: pass it on in separate messages.
                keys[-1] = (turn, 2 * depth[node] + (node - home) % len(nodes), *keys[-1][2:])
    return keys


def _any_link(network: Network, from_node: tuple[int, ...], to_node: tuple[int, ...]) -> tuple[int, int]:
    pairs = [(src, dst) for src in from_node for dst in to_node if network.linked(src, dst)]
    if not pairs:
        raise Inapplicable(f"no link leads from the node of rank {from_node[0]} to that of rank {to_node[0]}")

    def finish(pair: tuple[int, int]) -> int:
        return min((network.load[e] + 1) * network.beta[e] for e in network.between[pair])

    return min(pairs, key=lambda pair: (finish(pair), pair))


def _inside(
    network: Network, ranks: frozenset[int], entry: int, exits: list[int], wanted: set[int]
) -> list[tuple[int, int]]:
    """(hop, link) inside a node from where the chunk enters to where it leaves and to who wants it.

    The first rank where it leaves hands it out, so that a single root does not send everything itself.
    """
    reached = {entry: 0}
    found: list[tuple[int, int]] = []

    def grow(root: int, targets: list[int]) -> None:
        for link in network.tree(root, targets, ranks):
            x = network.links[link]
            if x.dst not in reached:
                reached[x.dst] = reached[x.src] + 1
                found.append((reached[x.src], link))

    hub = entry
    if exits:
        hub = exits[0]
        grow(entry, [] if hub == entry else [hub])
    grow(hub, sorted(rank for rank in {*exits, *wanted} if rank not in reached))
    return found
