"""Exact certificates: weights on resources that prove a time, whoever found the weights.

In a deadline T resource R carries at most (T - offset_R)^+ ticks of useful data. So for any weights w >= 0

    sum_R w_R (T - offset_R)^+  >=  sum_l length(l) * (chunks over l),

where length(l) is the sum of w_R beta_R over the resources that link l holds. The right side is at least
what the demand needs: by rows (chunks that must cross a set of links) when the lengths cover the rows'
multipliers (of each family of rows for itself), or by shortest paths when no two destinations share data. The
least T that satisfies it is a bound.
Where chunks are whole, T - offset_R is rounded down to a multiple of beta_R. Floating-point solvers only
suggest weights; here they are rounded to rationals, repaired where rounding broke a condition, and evaluated
in whole numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from taccl.synth.bounds.network import UNREACHABLE, Network


@dataclass(frozen=True, slots=True)
class Row:
    """At least `demand` chunks must cross `links`, because data has to get into (or out of) `ranks`.

    Rows of different families speak of different data, so that each family needs room of its own on a link.
    """

    links: tuple[int, ...]
    demand: int
    ranks: tuple[int, ...]
    family: int = 0


@dataclass(frozen=True, slots=True)
class Certificate:
    """A proven time in ticks, the resource weights and the rows (with multipliers) that prove it."""

    time: Fraction
    weights: tuple[tuple[int, Fraction], ...]  # (resource, weight > 0)
    rows: tuple[tuple[Row, Fraction], ...] = ()


def open_at(network: Network, offsets: Sequence[int], time: Fraction) -> list[bool]:
    """Which resources can carry something in a deadline just above `time` (whole chunks: at `time`)."""
    return [
        offset + network.grain * beta <= time for offset, beta in zip(offsets, network.beta, strict=True)
    ]  # fmt: skip


def least_deadline(
    network: Network, weights: Mapping[int, Fraction], offsets: Sequence[int], needed: Fraction
) -> Fraction:
    """The least T >= 0 with sum_R w_R capacity_R(T) >= needed; UNREACHABLE when no T has it.

    capacity_R(T) is (T - offset_R)^+ ticks; where chunks are whole, only the part that holds whole chunks.
    """
    if needed <= 0:
        return Fraction(0)
    slope = shift = Fraction(0)
    steps = sorted((offsets[r], r) for r, w in weights.items() if w > 0 and offsets[r] < UNREACHABLE)
    time = Fraction(UNREACHABLE)
    for index, (offset, resource) in enumerate(steps):
        slope += weights[resource]
        shift += weights[resource] * offset
        time = (needed + shift) / slope
        if index + 1 == len(steps) or time <= steps[index + 1][0]:
            break
    if not network.grain or time >= UNREACHABLE:
        return time
    scale = math.lcm(needed.denominator, *(weights[r].denominator for _, r in steps))
    goal = int(needed * scale)
    terms = [(int(weights[r] * scale) * network.beta[r], network.beta[r], offset) for offset, r in steps]

    def reached(ticks: int) -> bool:
        return sum(w * ((ticks - off) // beta) for w, beta, off in terms if ticks > off) >= goal

    low, step = math.ceil(time) - 1, max(beta for _, beta, _ in terms)
    high = low + step
    while not reached(high):
        low, high = high, high + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return Fraction(high)


def by_rows(
    network: Network,
    offsets: Sequence[int],
    multipliers: Sequence[tuple[Row, Fraction]],
    weights: Mapping[int, Fraction],
) -> Certificate:
    """The time that rows prove. Where the lengths do not cover the rows, weights are raised until they do."""
    by_family: dict[tuple[int, int], Fraction] = {}
    for row, multiplier in multipliers:
        for link in row.links:
            by_family[row.family, link] = by_family.get((row.family, link), Fraction(0)) + multiplier
    used: dict[int, Fraction] = {}
    for (_, link), length in by_family.items():
        used[link] = max(used.get(link, Fraction(0)), length)
    raised = {r: w for r, w in weights.items() if w > 0}
    for link in sorted(used):
        length = sum((raised.get(r, Fraction(0)) * network.beta[r] for r in network.holds[link]), Fraction(0))
        if length < used[link]:
            # The resource that opens last counts least.
            latest = max(network.holds[link], key=lambda r: (offsets[r], -r))
            raised[latest] = raised.get(latest, Fraction(0)) + (used[link] - length) / network.beta[latest]
    needed = sum((multiplier * row.demand for row, multiplier in multipliers), Fraction(0))
    kept = tuple((row, m) for row, m in multipliers if m > 0)
    return Certificate(least_deadline(network, raised, offsets, needed), tuple(sorted(raised.items())), kept)


def by_paths(
    network: Network,
    ends: Sequence[tuple[int, int]],
    offsets: Sequence[int],
    demand: Sequence[tuple[int, Sequence[tuple[tuple[int, ...], int]]]],
    weights: Mapping[int, Fraction],
    closed: Sequence[int],
) -> Certificate:
    """The time that shortest paths prove for unshared demand: (sink, [(ranks that have them, chunks)]).

    Links that hold a `closed` resource (one that opens only after the times under test) count as very long.
    For one sink the row of the certificate is the cut round the ranks at distance 0 from it.
    """
    scale = math.lcm(1, *(weight.denominator for weight in weights.values()))
    whole = {r: int(w * scale) for r, w in weights.items() if w > 0}
    length = [sum(whole.get(r, 0) * network.beta[r] for r in held) for held in network.holds]
    far = 1 + sum(length)
    shut = set(closed)
    for held in network.holds if shut else ():
        blocking = [r for r in held if r in shut]
        if blocking:
            latest = max(blocking, key=lambda r: (offsets[r], -r))
            whole[latest] = max(whole.get(latest, 0), -(-far // network.beta[latest]))
    length = [sum(whole.get(r, 0) * network.beta[r] for r in held) for held in network.holds]
    into: list[list[tuple[int, int]]] = [[] for _ in range(network.ranks)]
    for (a, b), step in zip(ends, length, strict=True):
        into[b].append((a, step))
    needed = 0
    distance: dict[int, int] = {}
    for sink, wanted in demand:
        distance = {sink: 0}
        queue = [(0, sink)]
        while queue:
            so_far, rank = heapq.heappop(queue)
            if so_far > distance[rank]:
                continue
            for other, step in into[rank]:
                if other not in distance or so_far + step < distance[other]:
                    distance[other] = so_far + step
                    heapq.heappush(queue, (so_far + step, other))
        for group, chunks in wanted:
            reached = [distance[rank] for rank in group if rank in distance]
            if not reached:
                return Certificate(Fraction(UNREACHABLE), ())
            needed += chunks * min(reached)
    final = tuple((r, Fraction(w, scale)) for r, w in sorted(whole.items()) if w > 0)
    time = least_deadline(network, dict(final), offsets, Fraction(needed, scale))
    rows: tuple[tuple[Row, Fraction], ...] = ()
    if len(demand) == 1:
        side = {rank for rank, steps in distance.items() if not steps}
        links = tuple(e for e, (a, b) in enumerate(ends) if a not in side and b in side)
        crossing = sum(chunks for group, chunks in demand[0][1] if not side.intersection(group))
        rows = ((Row(links, crossing, tuple(sorted(side))), Fraction(1)),)
    return Certificate(time, tuple((r, w) for r, w in final if offsets[r] < time), rows)


def roundings(values: Sequence[float]) -> list[list[Fraction]]:
    """Rational readings of a float vector: ratios of small numbers, and plain binary rounding."""
    largest = max((abs(v) for v in values), default=0.0)
    if largest == 0.0:
        return [[Fraction(0)] * len(values)]
    scaled = [max(0.0, v / largest) for v in values]
    return [
        [Fraction(v).limit_denominator(2520) if v > 1e-9 else Fraction(0) for v in scaled],
        [Fraction(round(v * 2**40), 2**40) for v in scaled],
    ]
