"""The multicommodity flow bound for collectives whose chunks each have one destination (alltoall and kin).

One flow a destination (sources aggregated), all sharing the resources; minimise T. By linear programming
duality the optimum is a set of resource weights, and any weights prove a time through shortest paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from ortools.linear_solver import pywraplp

from taccl.synth.bounds.certificate import Certificate, by_paths, roundings
from taccl.synth.bounds.network import UNREACHABLE, Network

MAX_ROUNDS = 20
MAX_VARIABLES = 30_000  # flows x links; beyond it the program takes more than seconds


def least_time(
    network: Network, offsets: Sequence[int], demand: Mapping[tuple[int, int], int], start: Fraction
) -> Certificate | None:
    """The best proven time above `start` (ticks) for demand[source, destination] chunks; None for none."""
    found: Certificate | None = None
    time = start
    destinations = sorted({d for (s, d), chunks in demand.items() if chunks and s != d})
    if len(destinations) * len(network.ends) > MAX_VARIABLES:
        return None
    for _ in range(MAX_ROUNDS):
        is_open = [offset <= time for offset in offsets]
        closed = [r for r, is_r_open in enumerate(is_open) if not is_r_open]
        prices = _prices(network, offsets, demand, destinations, is_open)
        proofs = [
            by_paths(network, offsets, demand, dict(zip(prices, weights, strict=True)), closed)
            for weights in roundings(list(prices.values()))
        ]
        best = max(proofs, key=lambda proof: proof.time)
        if best.time <= time:
            return found
        found, time = best, best.time
        if time >= UNREACHABLE:
            return found
    return found


def _prices(
    network: Network,
    offsets: Sequence[int],
    demand: Mapping[tuple[int, int], int],
    destinations: Sequence[int],
    is_open: Sequence[bool],
) -> dict[int, float]:
    """Dual prices of the open resources; empty when the open links cannot carry the demand at all."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    unit = float(network.ticks_per_us)
    infinity = solver.infinity()
    deadline = solver.NumVar(0, infinity, "T")
    solver.Minimize(deadline)
    usable = [e for e, held in enumerate(network.holds) if all(is_open[r] for r in held)]
    capacity = {}
    for resource, links in enumerate(network.crossing):
        if is_open[resource] and any(is_open[r] for e in links for r in network.holds[e]):
            capacity[resource] = solver.Constraint(-infinity, -offsets[resource] / unit)
            capacity[resource].SetCoefficient(deadline, -1)
    for destination in destinations:
        balance = {
            v: solver.Constraint(float(demand.get((v, destination), 0)), infinity)
            for v in range(network.ranks)
            if v != destination
        }
        for e in usable:
            a, b = network.ends[e]
            if a == destination:
                continue
            flow = solver.NumVar(0, infinity, "")
            balance[a].SetCoefficient(flow, 1)
            if b != destination:
                balance[b].SetCoefficient(flow, -1)
            for r in network.holds[e]:
                capacity[r].SetCoefficient(flow, network.beta[r] / unit)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return {}
    return {r: max(0.0, -row.dual_value()) for r, row in capacity.items()}
