"""Flow bounds by row generation: the least time in which link loads can satisfy every cut.

The linear program has one load a link, a capacity row a resource and cut rows "at least so many chunks over
these links"; violated cuts are found by maximum flow. By max-flow min-cut it is the fluid optimum for one
sink, and for allgather and broadcast (every sink wants everything) the optimum of tree packing (Edmonds;
ForestColl, arXiv 2402.06787). Where groups of ranks exchange data of their own, each group is a family with loads of
its own, and the families' loads add up on the resources. Capacities (T - offset)^+ / beta bend at each offset, so the
program is solved between two offsets and restarted beyond, with the exact certificate of the last one as the new start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from ortools.graph.python import max_flow
from ortools.linear_solver import pywraplp

from taccl.synth.bounds.certificate import Certificate, Row, by_rows, open_at, roundings
from taccl.synth.bounds.commodities import Ends, Sink, capacity_row, linear_solver, stretch
from taccl.synth.bounds.network import UNREACHABLE, Network

MAX_ROUNDS = 60

Demand = Callable[[frozenset[int]], int]  # chunks that must enter a set of ranks


def least_time(
    network: Network,
    offsets: Sequence[int],
    ends: Ends,
    sinks: Sequence[Sink],
    start: Fraction,
    rows: Sequence[Row] = (),
    families: Sequence[int] = (),
    demand: Demand | None = None,
) -> Certificate | None:
    """The best proven time above `start` (ticks), None when these cuts prove nothing above it.

    ends: the links' ends, turned round for demand that is stated backwards. rows: extra requirements. families: per
    sink the number of its data, 0, 1, ...; sinks of one family may share what they want (default: all do). demand: of
    a cut, where more than the sink's own data must cross it.
    """
    families = families or (0,) * len(sinks)
    found: Certificate | None = None
    time = start
    known = list(dict.fromkeys([*rows, *_first_rows(network, ends, sinks, families, demand)]))
    for _ in range(MAX_ROUNDS):
        is_open = open_at(network, offsets, time)
        usable = [all(is_open[r] for r in held) for held in network.holds]
        if (
            not any(families)
            and demand is None
            and _even_loads_suffice(network, offsets, ends, sinks, known, usable, time)
        ):
            return found
        blocked = [row for row in known if row.demand and not any(usable[e] for e in row.links)]
        if blocked:
            proofs = [by_rows(network, offsets, [(row, Fraction(1))], {}) for row in blocked]
        else:
            proofs = _solve(network, offsets, ends, sinks, families, demand, known, is_open, usable, time)
        best = max(proofs, key=lambda proof: proof.time, default=None)
        if best is None or best.time <= time:
            return found
        found, time = best, best.time
        if time >= UNREACHABLE:
            return found
    return found


def _solve(
    network: Network,
    offsets: Sequence[int],
    ends: Ends,
    sinks: Sequence[Sink],
    families: Sequence[int],
    demand: Demand | None,
    known: list[Row],
    is_open: Sequence[bool],
    usable: Sequence[bool],
    time: Fraction,
) -> list[Certificate]:
    """One linear program with resources open as given; rows found on the way are added to `known`."""
    solver = linear_solver()
    unit = float(network.ticks_per_us)
    deadline = solver.NumVar(0, solver.infinity(), "T")
    kinds = range(1 + max((*families, *(row.family for row in known)), default=0))
    loads = {
        (f, e): solver.NumVar(0, solver.infinity(), "") for f in kinds for e in range(len(ends)) if usable[e]
    }
    solver.Minimize(deadline)
    capacity = {}
    for resource, links in enumerate(network.crossing):
        crossing = [e for e in links if usable[e]]
        if is_open[resource] and crossing:
            coefficient, bound = capacity_row(network, resource, offsets[resource], time)
            row = solver.Constraint(-solver.infinity(), bound)
            row.SetCoefficient(deadline, coefficient)
            for f in kinds:
                for e in crossing:
                    row.SetCoefficient(loads[f, e], network.beta[resource] / unit)
            capacity[resource] = row
    constraints: list[object] = []
    seen = set(known)
    blocked: list[Row] = []

    def add(row: Row) -> None:
        constraint = solver.Constraint(float(row.demand), solver.infinity())
        for e in row.links:
            if usable[e]:
                constraint.SetCoefficient(loads[row.family, e], 1)
        constraints.append(constraint)
        if row.demand and not any(usable[e] for e in row.links):
            blocked.append(row)

    for row in known:
        add(row)
    for _ in range(MAX_ROUNDS):
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return []  # betas too far apart for floating point suggest nothing
        x = [[loads[f, e].solution_value() if usable[e] else 0.0 for e in range(len(ends))] for f in kinds]
        fresh = [
            _told(row, family, demand)
            for sink, family in zip(sinks, families, strict=True)
            for row in violated_cuts(network.ranks, ends, sink, x[family])
        ]
        fresh = [row for row in dict.fromkeys(fresh) if row not in seen]
        if not fresh:
            break
        for row in fresh:
            seen.add(row)
            known.append(row)
            add(row)
        if blocked:
            return [by_rows(network, offsets, [(row, Fraction(1))], {}) for row in blocked]
    else:
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return []
    if stretch(network, solver.Objective().Value(), time) <= 1 + 1e-12:
        return []
    duals = [max(0.0, c.dual_value()) for c in constraints]  # type: ignore[attr-defined]
    prices = {r: max(0.0, -row.dual_value()) for r, row in capacity.items()}
    return exact(network, offsets, known, duals, prices)


def _even_loads_suffice(
    network: Network,
    offsets: Sequence[int],
    ends: Ends,
    sinks: Sequence[Sink],
    rows: Sequence[Row],
    usable: Sequence[bool],
    time: Fraction,
) -> bool:
    """Whether sharing every resource evenly among its links meets all cuts at `time` already."""
    users = [sum(usable[e] for e in links) for links in network.crossing]
    room = [float(time - off) / beta for off, beta in zip(offsets, network.beta, strict=True)]
    if network.grain:
        room = [math.floor(chunks) for chunks in room]
    loads = [
        min(room[r] / users[r] for r in held) if usable[e] else 0.0 for e, held in enumerate(network.holds)
    ]
    if any(sum(loads[e] for e in row.links) < row.demand * (1 - 1e-9) for row in rows):
        return False
    return not any(violated_cuts(network.ranks, ends, sink, loads) for sink in sinks)


def exact(
    network: Network,
    offsets: Sequence[int],
    rows: Sequence[Row],
    duals: Sequence[float],
    prices: Mapping[int, float],
) -> list[Certificate]:
    """Certificates from float multipliers of rows and resources."""
    resources = sorted(prices)
    top = max(prices.values(), default=0.0)
    proofs = []
    for weights in roundings([prices[r] for r in resources]):
        exact_weights = dict(zip(resources, weights, strict=True))
        priced = {e for r, w in exact_weights.items() if w for e in network.crossing[r]}
        lengths = (
            sum((exact_weights.get(r, Fraction(0)) * network.beta[r] for r in network.holds[e]), Fraction(0))
            for e in priced
        )
        unit = max(lengths, default=Fraction(0))
        if not unit:
            continue
        # roundings() divides by the largest price; the rows' duals, in us per chunk, follow it into lengths.
        ratios = [dual / top * network.ticks_per_us / float(unit) for dual in duals]
        for grain in (2520, 2**40):
            multipliers = [
                (row, Fraction(ratio).limit_denominator(grain) * unit)
                for row, ratio in zip(rows, ratios, strict=True)
                if ratio > 1e-9
            ]
            proofs.append(by_rows(network, offsets, multipliers, exact_weights))
    return proofs


def violated_cuts(ranks: int, ends: Ends, sink: Sink, loads: Sequence[float]) -> list[Row]:
    """Cuts into the sink over which the loads carry too little; up to two for one maximum flow."""
    groups = [(sorted(g), c) for g, c in sorted(sink.groups.items(), key=lambda i: sorted(i[0])) if c]
    total = sum(chunks for _, chunks in groups)
    if not total:
        return []
    resolution = 10**9 // total + 1
    flow = max_flow.SimpleMaxFlow()
    source, wide = ranks, 4 * resolution * total
    tails, heads, capacities = [], [], []
    for (a, b), load in zip(ends, loads, strict=True):
        if load > 0:
            tails.append(a)
            heads.append(b)
            capacities.append(min(wide, int(load * resolution)))
    for number, (members, chunks) in enumerate(groups):
        node = ranks + 1 + number
        tails.append(source)
        heads.append(node)
        capacities.append(chunks * resolution)
        for rank in members:
            tails.append(node)
            heads.append(rank)
            capacities.append(wide)
    flow.add_arcs_with_capacity(np.array(tails), np.array(heads), np.array(capacities))
    flow.solve(source, sink.rank)
    if flow.optimal_flow() >= resolution * total * (1 - 1e-7):
        return []
    near = frozenset(v for v in flow.get_sink_side_min_cut() if v < ranks)
    far = frozenset(range(ranks)) - frozenset(flow.get_source_side_min_cut())
    return [cut_row(ends, sink, side) for side in dict.fromkeys((near, far)) if sink.rank in side]


def cut_row(ends: Ends, sink: Sink, side: frozenset[int]) -> Row:
    """The requirement that the data wanted at the sink enters a set of ranks that holds the sink."""
    links = tuple(e for e, (a, b) in enumerate(ends) if a not in side and b in side)
    return Row(links, sink.demand(side), tuple(sorted(side)))


def _first_rows(
    network: Network, ends: Ends, sinks: Sequence[Sink], families: Sequence[int], demand: Demand | None
) -> list[Row]:
    """The cuts that bind most often: the sink alone, its node, and all ranks but one."""
    rows = []
    everyone = frozenset(range(network.ranks))
    for sink, family in zip(sinks, families, strict=True):
        sides = [frozenset({sink.rank})]
        sides += [frozenset(node) for node in network.nodes if sink.rank in node and len(network.nodes) > 1]
        if len(sinks) == 1:
            sides += [everyone - {r} for r in sorted(everyone) if r != sink.rank]
        rows += [_told(cut_row(ends, sink, side), family, demand) for side in sides]
    return [row for row in rows if row.demand]


def _told(row: Row, family: int, demand: Demand | None) -> Row:
    """A sink's cut as a requirement of its family, or of all data that must cross it."""
    return replace(row, family=family, demand=row.demand if demand is None else demand(frozenset(row.ranks)))
