"""Spreading short chunks in few messages: all that a rank has goes to the rank at a fixed distance; distances grow.

The concatenation of Bruck, Ho, Kipnis, Upfal, Weathersby (IEEE TPDS 1997, section 4) in mixed radices, on two levels:
first between ranks of one place in different nodes (where ranks share a NIC, over one of them), then between the places
of each node. With radices r_i a rank sends the sum of (r_i - 1) messages, which reach the product of r_i ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from taccl.synth.symmetric.digits import Ways, heads_of, radices
from taccl.synth.symmetric.hops import RepHop
from taccl.synth.symmetric.instance import Instance

# Offsets (places, nodes) whose messages all carry what was there when the round began; the places that send; whether
# only to the place that speaks for them between nodes.
Round = tuple[list[tuple[int, int]], frozenset[int], bool]


def doubled(inst: Instance, roots: Sequence[int]) -> Iterator[list[RepHop]]:
    """Messages that bring every root's chunk to all ranks, for each way of writing addresses.

    Nothing where nodes differ in size, or ranks at such a distance have no link.
    """
    nodes = inst.topology.nodes
    sizes = (len(nodes[0]), len(nodes))
    if len({len(members) for members in nodes}) > 1:
        return
    place_of = [0] * inst.ranks
    for members in nodes:
        for place, rank in enumerate(members):
            place_of[rank] = place
    heads = heads_of(inst, place_of) or list(range(sizes[0]))
    speakers = frozenset(heads)
    everyone = frozenset(range(sizes[0]))
    mates = sorted({(heads[p] - p) % sizes[0] for p in everyone} - {0})
    ways = Ways(inst)
    for inner, outer in product(radices(sizes[0]), radices(sizes[1])):
        rounds: list[Round] = []
        if outer:
            # To the rank that speaks for all at its NIC; only those that share one have that far to go.
            rounds += [([(step, 0)], everyone - speakers, True) for step in mates]
            rounds += [(steps, speakers, False) for steps in _rounds(1, outer, sizes[1])]
        rounds += [(steps, everyone, False) for steps in _rounds(0, inner, sizes[0])]
        hops = _carried(inst, ways, roots, rounds, place_of, heads)
        if hops is not None:
            yield hops


def _rounds(level: int, digits: Sequence[int], size: int) -> Iterator[list[tuple[int, int]]]:
    weight = 1
    for radix in digits:
        steps = [weight * times for times in range(1, radix) if weight * times < size]
        yield [(step, 0) if level == 0 else (0, step) for step in steps]
        weight *= radix


def _carried(
    inst: Instance,
    ways: Ways,
    roots: Sequence[int],
    rounds: Sequence[Round],
    place_of: Sequence[int],
    heads: Sequence[int],
) -> list[RepHop] | None:
    """What each message of each round carries; None where a link is missing or a rank is left out."""
    nodes, node_of = inst.topology.nodes, inst.node_of.tolist()
    orbit_of = inst.quotient.link_orbit
    brought = [{root: -1} for root in roots]  # per chunk: rank -> the hop that brought it
    hops: list[RepHop] = []
    for steps, senders, to_heads in rounds:
        before = [list(have.items()) for have in brought]
        for places, shift in steps:
            loads: dict[int, list[tuple[int, int]]] = {}  # link orbit -> what its message carries
            needs: dict[int, set[int]] = {}
            claimed: list[tuple[int, int, int]] = []
            for chunk, holders in enumerate(before):
                for rank, came in holders:
                    place = place_of[rank]
                    onto = (place + places) % len(nodes[0])
                    if place not in senders or (to_heads and heads[place] != onto):
                        continue
                    target = nodes[(node_of[rank] + shift) % len(nodes)][onto]
                    if target in brought[chunk] or target == rank:
                        continue
                    link = ways.links(rank).get(target)
                    if link is None:
                        return None
                    orbit = int(orbit_of[link])
                    loads.setdefault(orbit, []).append((chunk, link))
                    if came >= 0:
                        needs.setdefault(orbit, set()).add(came)
                    claimed.append((chunk, target, orbit))
            number_of = {}
            for orbit in sorted(loads):
                number_of[orbit] = len(hops)
                hops.append(RepHop(tuple(loads[orbit]), tuple(sorted(needs.get(orbit, ())))))
            for chunk, target, orbit in claimed:
                brought[chunk][target] = number_of[orbit]
    if any(len(have) < inst.ranks for have in brought):
        return None
    return hops
