"""What enters a node late must be received again by all others: counted in messages, with exact certificates.

docs/bounds.md, "Received again, in messages". Linear programs suggest weights of moments; what they prove is evaluated
in whole numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from taccl.synth.bounds.network import Network
from taccl.synth.bounds.wants import Wants

# Moments before the deadline that are looked at, close together near it, and messages a port that are told apart.
MOMENTS = 16
MOST_MESSAGES = 12
# Columns are added so many times, and times raised so often; less than STEP more is not worth another program.
MOST_COLUMNS = 60
MOST_RAISES = 6
STEP = Fraction(1, 1000)
SURE = 1e-6  # what floating point must at least say, in chunks, before a deadline is refuted exactly
SCALE = 1 << 24  # weights are whole numbers up to this
# Weights this near to the best there are are good enough to raise the time with.
ENOUGH = 0.5
# Nodes looked at, of those that differ.
MOST_NODES = 4

Kind = tuple[int, int, int]  # alpha, occupancy, beta in ticks: the least of the links seen through a resource
Pattern = tuple[int, ...]  # at which moments a port's first, second, ... message arrives
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cut:
    """A node, seen so that data enters it (for collectives that collect: backwards in time)."""

    ranks: tuple[int, ...]
    entering: int  # chunks that none of its ranks has and all want
    inside: int  # receptions of chunks that some of its ranks have: chunks times ranks that want them
    ports: tuple[tuple[Kind, int], ...]  # resources over which chunks enter, and how many of a kind
    local: tuple[tuple[Kind, int], ...]  # those of the links within


def again_time(
    network: Network, wants: Wants, combining: bool, floor: Fraction
) -> tuple[Fraction, tuple[int, ...]] | None:
    """A time in ticks above `floor` that no algorithm beats, and the node it rests on; None where there is none."""
    best: tuple[Fraction, tuple[int, ...]] | None = None
    seen: set[object] = set()
    for cut in cuts(network, wants, combining):
        key = (len(cut.ranks), cut.entering, cut.inside, cut.ports, cut.local)
        if key in seen or len(seen) == MOST_NODES:
            continue
        seen.add(key)
        time = _raised(cut, floor)
        if time is not None:
            floor, best = time, (time, cut.ranks)
    return best


def cuts(network: Network, wants: Wants, combining: bool) -> list[Cut]:
    """The nodes of several ranks that chunks enter which all their ranks want."""
    found = []
    for node in network.nodes if len(network.nodes) > 1 else ():
        members = frozenset(node)
        entering = inside = 0
        for (sources, destinations), chunks in wants.items():
            have, want = (destinations, sources) if combining else (sources, destinations)
            if have & members:
                inside += chunks * len((want & members) - have)
            elif members <= want:
                entering += chunks
        if len(members) < 2 or not entering:
            continue
        across: dict[int, list[int]] = {}
        within: dict[int, list[int]] = {}
        for link, (a, b) in enumerate(network.ends):
            a, b = (b, a) if combining else (a, b)
            if b in members:
                # A link is seen through the port of the rank that gets what it carries.
                held = network.holds[link]
                (within if a in members else across).setdefault(
                    held[min(1, len(held) - 1)] if combining else held[-1], []
                ).append(link)
        kinds = [tuple(sorted(Counter(_kind(network, r, links) for r, links in side.items()).items()))
                 for side in (across, within)]  # fmt: skip
        if not across or any(beta == 0 for side in kinds for (_, _, beta), _ in side):
            continue
        found.append(Cut(node, entering, inside, kinds[0], kinds[1]))
    return found


def _kind(network: Network, resource: int, links: Sequence[int]) -> Kind:
    return (
        min(network.alpha[e] for e in links),
        min(network.occupancy[e] for e in links),
        network.beta[resource],
    )


def local_chunks(cut: Cut, left: int) -> Fraction:
    """What the links within can carry in messages that neither start before nor end after so many ticks."""
    total = Fraction(0)
    for (alpha, _, beta), count in cut.local:
        total += Fraction(count * max(0, left - alpha), beta)
    return total


@dataclass(frozen=True, slots=True)
class Proof:
    """Weights of moments, so many ticks before the deadline, falling; and one for all that is received."""

    left: tuple[int, ...]
    weights: tuple[int, ...]
    total: int

    def needs(self, cut: Cut) -> Fraction:
        """What weighted arrivals must come to, and the deadline does not change."""
        size = len(cut.ranks)
        moments = zip(self.weights, self.left, strict=True)
        return sum((w * (size * cut.entering - local_chunks(cut, left)) for w, left in moments), Fraction(0))

    def refutes(self, cut: Cut, deadline: int) -> bool:
        """Whether no algorithm meets the deadline."""
        size = len(cut.ranks)
        all_receptions = size * cut.entering + cut.inside - local_chunks(cut, deadline)
        arrivals = sum(
            (count * Fraction(self.most_arrived(kind, size, deadline), kind[2]) for kind, count in cut.ports),
            Fraction(0),
        )
        return self.needs(cut) + self.total * all_receptions > arrivals

    def most_arrived(self, kind: Kind, size: int, deadline: int) -> int:
        """The most that one port's arrivals can weigh, times its beta: over all numbers of messages and all moments.

        What has arrived at a moment came with message i or a later one, if i - 1 moments before it had other arrivals.
        """
        times = [deadline - left for left in self.left] + [deadline]
        each = [w * (size - 1) for w in self.weights] + [sum(self.weights) + self.total]
        alpha, occupancy, _ = kind
        messages = MOST_MESSAGES if occupancy else 1
        suffix = [0] * (len(each) + 1)
        for k in range(len(each) - 1, -1, -1):
            suffix[k] = suffix[k + 1] + each[k]
        # best[i][k]: arrivals weigh so much until just before k, where the i-th comes.
        best: dict[tuple[int, int], int] = {}
        most = 0
        for k, time in enumerate(times):
            for i in range(1, messages + 1):
                holds = time - alpha - (i - 1) * occupancy
                if holds <= 0:
                    break
                so_far = [0] if i == 1 else []
                # Beyond the last number that is told apart messages are as good as that one.
                for before in {i - 1, i} if i == messages else {i - 1}:
                    for j in range(k):
                        known = best.get((before, j))
                        if known is not None:
                            there = times[j] - alpha - (before - 1) * occupancy
                            so_far.append(known + there * (suffix[j] - suffix[k]))
                if so_far:
                    best[i, k] = max(so_far)
                    most = max(most, best[i, k] + holds * suffix[k])
        return most


def _raised(cut: Cut, floor: Fraction) -> Fraction | None:
    """The greatest deadline above floor that was refuted."""
    best: int | None = None
    time = max(1, math.floor(floor))
    known: list[set[Pattern]] = [{()} for _ in cut.ports]
    for _ in range(MOST_RAISES):
        proof = _suggested(cut, time, known)
        if proof is None:
            break
        # The suggestion is judged in floating point until the end: only the answer must be exact.
        sure = SURE * (sum(proof.weights) + proof.total)
        low, high = time, 2 * time
        while _slack(cut, proof, high) > sure:
            low, high = high, 2 * high
        while high - low > max(1, low // 100_000):
            middle = (low + high) // 2
            low, high = (middle, high) if _slack(cut, proof, middle) > sure else (low, middle)
        gained = low - time
        if gained <= 0 or not proof.refutes(cut, low):
            break
        best = time = low
        if gained < STEP * time:
            break
    return None if best is None else Fraction(best)


def _slack(cut: Cut, proof: Proof, deadline: int) -> float:
    """By how much the arrivals that a deadline needs exceed those that it allows; roughly."""
    size = len(cut.ranks)
    each = np.array([w * (size - 1) for w in proof.weights] + [sum(proof.weights) + proof.total], float)
    needs = float(proof.needs(cut)) + proof.total * float(
        size * cut.entering + cut.inside - local_chunks(cut, deadline)
    )
    times = np.array([deadline - left for left in proof.left] + [deadline], float)
    return needs - sum(count * _heaviest(kind, times, each)[0] for kind, count in cut.ports)


def _heaviest(kind: Kind, times: Floats, each: Floats) -> tuple[float, Pattern]:
    """A port's arrivals of most weight, `each` at each moment."""
    alpha, occupancy, beta = kind
    moments = len(times)
    suffix = np.append(np.cumsum(each[::-1])[::-1], 0.0)
    earlier = np.arange(moments)[:, None] < np.arange(moments)[None, :]
    value, came = np.zeros(moments), []
    best, at = 0.0, (-1, -1)
    for i in range(MOST_MESSAGES if occupancy else 1):
        there = (times - alpha - i * occupancy) / beta
        value = np.where(there > 0, value, -np.inf)
        total = value + there * suffix[:-1]
        if total.max() > best:
            best, at = float(total.max()), (i, int(total.argmax()))
        onward = np.where(
            earlier, value[:, None] + there[:, None] * (suffix[:-1, None] - suffix[None, :-1]), -np.inf
        )
        came.append(onward.argmax(axis=0))
        value = onward.max(axis=0)
        if not np.isfinite(value).any():
            break
    i, k = at
    pattern = [k] if i >= 0 else []
    while i > 0:
        i -= 1
        k = int(came[i][k])
        pattern.append(k)
    return best, tuple(reversed(pattern))


def _arrived(kind: Kind, times: Floats, pattern: Pattern) -> Floats:
    """What has arrived by each moment."""
    alpha, occupancy, beta = kind
    arrived = np.zeros(len(times))
    for i, k in enumerate(pattern):
        arrived[k:] = max(0.0, (times[k] - alpha - i * occupancy) / beta)
    return arrived


def _suggested(cut: Cut, deadline: int, known: list[set[Pattern]]) -> Proof | None:
    """Weights that refute a deadline; None where there seem to be none. known: per kind of ports patterns to start
    with; those that are found are added."""
    size = len(cut.ranks)
    left = sorted({deadline * k * k // MOMENTS**2 for k in range(1, MOMENTS)} - {0}, reverse=True)
    times = np.array([deadline - x for x in left] + [deadline], float)
    demand = [float(size * cut.entering - local_chunks(cut, x)) for x in left]
    demand.append(float(size * cut.entering + cut.inside - local_chunks(cut, deadline)))
    for _ in range(MOST_COLUMNS):
        solver = pywraplp.Solver.CreateSolver("GLOP")
        short = solver.NumVar(-solver.infinity(), solver.infinity(), "short")
        solver.Minimize(short)
        rows = [solver.Constraint(need, solver.infinity()) for need in demand]
        for row in rows:
            row.SetCoefficient(short, 1)
        sums = []
        for (kind, count), patterns in zip(cut.ports, known, strict=True):
            together = solver.Constraint(count, count)
            for pattern in sorted(patterns):
                arrived = _arrived(kind, times, pattern)
                share = solver.NumVar(0, solver.infinity(), "")
                together.SetCoefficient(share, 1)
                for k, row in enumerate(rows):
                    last = k == len(rows) - 1
                    row.SetCoefficient(share, float(arrived[-1] + (0 if last else (size - 1) * arrived[k])))
            sums.append(together)
        if solver.Solve() != pywraplp.Solver.OPTIMAL or short.solution_value() <= 0:
            return None
        price = np.maximum(0.0, np.array([row.dual_value() for row in rows]))
        each = np.append(price[:-1] * (size - 1), price.sum())
        lost = 0.0
        for (kind, count), patterns, together in zip(cut.ports, known, sums, strict=True):
            weight, pattern = _heaviest(kind, times, each)
            lost += count * max(0.0, weight + together.dual_value())
            patterns.add(pattern)
        if lost <= (1 - ENOUGH) * short.solution_value():
            break
    most = float(price.max())
    weights = [round(float(p) / most * SCALE) for p in price]
    return Proof(tuple(left), tuple(weights[:-1]), weights[-1])
