"""Flow bounds as linear programs over link flows: one sink, or many whose data is not shared.

Minimise T such that the flows fit into T - offset at every open resource. By linear programming duality the
optimum is a set of resource weights, and any weights prove a time through shortest paths (certificate.py).
Capacities (T - offset)^+ bend at each offset: the program is solved with the resources open that a time
opens, and again at the time that this proved, until nothing more is proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ortools.linear_solver import pywraplp

from taccl.synth.bounds.certificate import Certificate, by_paths, open_at, roundings
from taccl.synth.bounds.network import UNREACHABLE, Network

MAX_ROUNDS = 20
MAX_PIVOTS = 200_000  # of one program; the largest ones take some ten thousand
MAX_VARIABLES = 30_000  # flows x links; beyond it the program takes more than seconds
Ends = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Sink:
    """`groups[ranks]` chunks, each available at any rank of its group, must all reach `rank`."""

    rank: int
    groups: Mapping[frozenset[int], int]

    def demand(self, side: frozenset[int]) -> int:
        """Chunks that must enter a set of ranks that holds the sink."""
        return sum(chunks for ranks, chunks in self.groups.items() if not ranks & side)


@dataclass(slots=True)
class FlowProgram:
    """A linear program with one flow a sink; built once, its numbers are set before each solve."""

    network: Network
    ends: Ends  # the links' ends, turned round for demand that is stated backwards
    flows: int  # how many sinks are served at once
    solver: Any = field(init=False)
    deadline: Any = field(init=False)
    capacity: list[Any] = field(init=False)  # per resource
    loads: list[list[Any]] = field(init=False)  # per flow, per link
    balance: list[list[Any]] = field(init=False)  # per flow, per rank

    def __post_init__(self) -> None:
        self.solver = solver = linear_solver()
        unit, infinity = float(self.network.ticks_per_us), solver.infinity()
        self.deadline = solver.NumVar(0, infinity, "T")
        solver.Minimize(self.deadline)
        self.capacity = [solver.Constraint(-infinity, 0) for _ in self.network.beta]
        self.loads, self.balance = [], []
        per_chunk = [beta / unit for beta in self.network.beta]
        for _ in range(self.flows):
            balance = [solver.Constraint(0, infinity) for _ in range(self.network.ranks)]
            loads = []
            for held, (a, b) in zip(self.network.holds, self.ends, strict=True):
                load = solver.NumVar(0, infinity, "")
                balance[a].SetCoefficient(load, 1)
                balance[b].SetCoefficient(load, -1)
                for r in held:
                    self.capacity[r].SetCoefficient(load, per_chunk[r])
                loads.append(load)
            self.loads.append(loads)
            self.balance.append(balance)

    def prices(
        self, sinks: Sequence[Sink], offsets: Sequence[int], time: Fraction, is_open: Sequence[bool]
    ) -> tuple[float, list[float]]:
        """(least deadline in units of `time`, dual price of each resource) with only open resources.

        Where chunks are whole, the capacities are those of `time`, and all stretch alike. The deadline is
        infinite, and the prices are 0, when the open links cannot carry the demand at all.
        """
        infinity, network = self.solver.infinity(), self.network
        closed = {r for r, is_r_open in enumerate(is_open) if not is_r_open}
        for r, row in enumerate(self.capacity):
            coefficient, bound = capacity_row(network, r, offsets[r], time)
            row.SetCoefficient(self.deadline, coefficient)
            row.SetBounds(-infinity, infinity if r in closed else bound)
        extra: list[tuple[Any, Any]] = []
        for sink, loads, balance in zip(sinks, self.loads, self.balance, strict=True):
            for held, load in zip(network.holds, loads, strict=True):
                load.SetUb(0.0 if closed.intersection(held) else infinity)
            supply = [0] * network.ranks
            for group, chunks in sink.groups.items():
                if len(group) == 1:
                    supply[min(group)] += chunks
                elif chunks:
                    row = self.solver.Constraint(float(chunks), infinity)
                    for rank in sorted(group):
                        share = self.solver.NumVar(0, infinity, "")
                        row.SetCoefficient(share, 1)
                        balance[rank].SetCoefficient(share, -1)
                        extra.append((row, share))
            for rank, row in enumerate(balance):
                row.SetBounds(-infinity if rank == sink.rank else float(supply[rank]), infinity)
        solved = self.solver.Solve() == pywraplp.Solver.OPTIMAL
        prices = [max(0.0, -row.dual_value()) if solved else 0.0 for row in self.capacity]
        least = stretch(network, self.solver.Objective().Value(), time) if solved else infinity
        for row, share in extra:  # leave the program as it was found
            row.SetBounds(-infinity, infinity)
            share.SetUb(0.0)
        return least, prices


def least_time(
    program: FlowProgram, offsets: Sequence[int], sinks: Sequence[Sink], start: Fraction
) -> Certificate | None:
    """The best proven time above `start` (ticks) by which all sinks can be served; None for none.

    The sinks' data must be unshared: a chunk that two sinks want has to be sent twice.
    """
    network = program.network
    found: Certificate | None = None
    time = start
    for _ in range(MAX_ROUNDS):
        is_open = open_at(network, offsets, time)
        least, prices = program.prices(sinks, offsets, time, is_open)
        if least <= 1 + 1e-12:
            return found
        closed = [r for r, is_r_open in enumerate(is_open) if not is_r_open]
        proofs = [
            by_paths(network, program.ends, offsets, sinks_demand(sinks), dict(enumerate(weights)), closed)
            for weights in roundings(prices)
        ]
        best = max(proofs, key=lambda proof: proof.time)
        if best.time <= time:
            return found
        found, time = best, best.time
        if time >= UNREACHABLE:
            return found
    return found


def linear_solver() -> Any:
    """An empty program for GLOP that ends after MAX_PIVOTS: numbers far apart can make it go round for ever."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    assert solver.SetSolverSpecificParametersAsString(f"max_number_of_iterations: {MAX_PIVOTS}")
    return solver


def capacity_row(network: Network, resource: int, offset: int, time: Fraction) -> tuple[float, float]:
    """(coefficient of the deadline, upper bound) of the row that adds up a resource's loads in us."""
    unit = network.ticks_per_us
    if not network.grain:
        return -1.0, -offset / unit
    beta = network.beta[resource]
    return -float(max(0, (math.floor(time) - offset) // beta) * beta / unit), 0.0


def stretch(network: Network, deadline: float, time: Fraction) -> float:
    """A program's objective in units of `time`."""
    if network.grain:
        return deadline
    return deadline * network.ticks_per_us / float(time) if time else math.inf if deadline > 0 else 0.0


def sinks_demand(sinks: Iterable[Sink]) -> list[tuple[int, list[tuple[tuple[int, ...], int]]]]:
    """Sinks as plain sorted tuples: (rank, [(ranks of a group, chunks)])."""
    return [
        (sink.rank, sorted((tuple(sorted(group)), chunks) for group, chunks in sink.groups.items()))
        for sink in sinks
    ]
