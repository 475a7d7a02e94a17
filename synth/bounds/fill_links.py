"""How long a pipeline takes to fill: broadcast and reduce over links of their own, as in rings, tori and meshes.

What leaves the root early goes first over some link of the root's, and last over some link into each other rank. A byte
waits for the messages before its own on the first and makes way for those after its own on the last; on the average
over all bytes short messages cost occupancy there, and long ones their length, twice. With p equal links on either
side, occupancy o and b us a byte no algorithm is quicker than b B / p + (4/3) sqrt(2 o b B / p). The proof is in
docs/bounds.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import sqrt

from taccl.synth.bounds.network import Network, together

# Sums in floating point are true to about 1e-15 of themselves; what is claimed is smaller by this.
ROUNDING = 1e-9
STEPS = 60  # halvings of an interval of multipliers
TURNS = 6  # for the root's multiplier and the rank's


@dataclass(frozen=True, slots=True)
class Gate:
    """Links of one rank that hold one resource, so that their messages come one after another."""

    links: frozenset[int]
    beta: float  # ticks a chunk
    occupancy: float  # ticks a message


def link_fill_time(
    network: Network, root: int, others: Collection[int], chunks: int, collecting: bool
) -> Fraction | None:
    """Ticks below which `chunks` chunks cannot get from root to all others (collecting: from all others to root).

    None where nothing is proved: a rank has no links, or what the root sends it passes a gate with other messages.
    """
    ends = [(b, a) for a, b in network.ends] if collecting else network.ends
    out: list[int] = []
    into: dict[int, list[int]] = {rank: [] for rank in others}
    for e, (a, b) in enumerate(ends):
        if a == root:
            out.append(e)
        if b in into:
            into[b].append(e)
    leaving = _gates(network, out)
    found = [
        _least(leaving, _gates(network, links), {e for e in links if ends[e][0] == root}, chunks)
        for links in into.values()
    ]
    known = [time for time in found if time is not None]
    return Fraction(max(known) * (1 - ROUNDING)) if known else None


def _gates(network: Network, links: list[int]) -> list[Gate]:
    return [
        Gate(frozenset(mine), float(network.beta[resource]), float(min(network.occupancy[e] for e in mine)))
        for resource, mine in together(network, links).items()
    ]


def _least(leaving: list[Gate], arriving: list[Gate], direct: set[int], chunks: int) -> float | None:
    """The least average over all bytes of the time before and after them, by the dual of how they are split."""
    both = [gate for gate in leaving if gate.links & direct]
    into = {gate.links: gate for gate in arriving}
    if not leaving or not arriving or any(not g.links <= direct or g.links not in into for g in both):
        return None
    shared = [
        (min(gate.beta, into[gate.links].beta), min(gate.occupancy, into[gate.links].occupancy))
        for gate in both
    ]
    first = [gate for gate in leaving if not gate.links & direct]
    last = [gate for gate in arriving if not gate.links & direct]

    def dual(early: float, late: float) -> float:
        total = (early + late) * chunks
        total += sum(_spared(gate, early) for gate in first) + sum(_spared(gate, late) for gate in last)
        for beta, occupancy in shared:
            total -= max(0.0, early + late - occupancy) ** 2 / (4 * beta)
        return total

    most = 2 * sum(_price(gate, chunks) for gate in (*leaving, *arriving))
    early = late = 0.0
    for _ in range(TURNS):
        early = _highest(partial(dual, late=late), most)
        late = _highest(partial(dual, early), most)
    return dual(early, late) / chunks


def _price(gate: Gate, chunks: float) -> float:
    """What one chunk more costs when so many go through a gate."""
    return gate.beta * chunks + sqrt(2 * gate.occupancy * gate.beta * chunks)


def _spared(gate: Gate, price: float) -> float:
    """The least of beta x^2 / 2 + (2/3) sqrt(2 occupancy beta x) x - price x over x >= 0."""
    if price <= 0:
        return 0.0
    swing = sqrt(2 * gate.occupancy * gate.beta)
    root = (sqrt(swing * swing + 4 * gate.beta * price) - swing) / (2 * gate.beta)
    return gate.beta * root**4 / 2 + 2 / 3 * swing * root**3 - price * root**2


def _highest(value: Callable[[float], float], most: float) -> float:
    """Where a concave function is highest in [0, most], nearly: any point's value is a bound."""
    low, high = 0.0, most
    for _ in range(STEPS):
        third = (high - low) / 3
        if value(low + third) < value(high - third):
            low += third
        else:
            high -= third
    return (low + high) / 2
