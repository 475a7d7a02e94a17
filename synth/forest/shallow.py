"""Spanning trees for a broadcast over links of their own: as many as Edmonds promises, and as shallow as they come.

On a graph whose links share no ports, as many spanning trees leave the root without sharing a link's capacity as the
smallest maximum flow from the root to a rank has units (Edmonds, "Edge-disjoint branchings", 1973). Which trees decides
how long a pipeline takes to fill: on a hypercube there are such of depth log2(n) + 1 (Johnsson and Ho, "Optimum
broadcasting and personalized communication in hypercubes", 1989). Elsewhere CP-SAT looks for the least depth.
"""

from __future__ import annotations

from fractions import Fraction
from math import gcd, lcm

from taccl.profiles.topology import Topology
from taccl.synth.models.cp_sat import cp_model

# Trees times links of one model; a torus of 27 ranks has 972.
MOST_CHOICES = 4_000
MOST_RANKS = 32


def shallow_trees(
    topology: Topology, root: int, collects: bool, deterministic_s: float
) -> list[dict[int, int]]:
    """Per tree the parent of each rank but the root; collects: along links turned round.

    [] where links share ports, rates have no small common unit, or nothing was found.
    """
    if topology.ranks > MOST_RANKS or topology.ranks < 3 or any(link.ports for link in topology.links):
        return []
    units = _units(topology, collects)
    if units is None:
        return []
    import networkx as nx  # takes a quarter of a second to load, and few come here

    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(topology.ranks))
    graph.add_edges_from((src, dst, {"capacity": unit}) for (src, dst), unit in units.items())
    others = [rank for rank in range(topology.ranks) if rank != root]
    trees = min(int(nx.maximum_flow_value(graph, root, rank)) for rank in others)
    ways = {(src, dst): unit for (src, dst), unit in units.items() if dst != root}
    if trees < 1 or trees * len(ways) > MOST_CHOICES:
        return []
    model = cp_model.CpModel()
    used = {(t, way): model.new_bool_var("") for t in range(trees) for way in sorted(ways)}
    deepest = model.new_int_var(1, len(others), "")
    for t in range(trees):
        depth = {rank: model.new_int_var(1, len(others), "") for rank in others}
        for rank in others:
            model.add_exactly_one(used[t, way] for way in sorted(ways) if way[1] == rank)
            model.add(depth[rank] <= deepest)
        for src, dst in sorted(ways):
            if src != root:
                model.add(depth[dst] >= depth[src] + 1).only_enforce_if(used[t, (src, dst)])
    for way, unit in sorted(ways.items()):
        model.add(sum(used[t, way] for t in range(trees)) <= unit)
    model.minimize(deepest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = deterministic_s
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return []
    return [
        {dst: src for (tree, (src, dst)), var in used.items() if tree == t and solver.boolean_value(var)}
        for t in range(trees)
    ]


def _units(topology: Topology, collects: bool) -> dict[tuple[int, int], int] | None:
    """Rate of each pair of ranks in the greatest common unit; None where a unit is a tiny part of a link."""
    rates: dict[tuple[int, int], Fraction] = {}
    for link in topology.links:
        ends = (link.dst, link.src) if collects else (link.src, link.dst)
        rates[ends] = rates.get(ends, Fraction(0)) + 1 / link.beta_us_per_mb
    denominator = lcm(*(rate.denominator for rate in rates.values()))
    whole = {ends: int(rate * denominator) for ends, rate in rates.items()}
    unit = gcd(*whole.values())
    most = MOST_CHOICES // max(1, len(whole))
    found = {ends: rate // unit for ends, rate in whole.items()}
    return found if max(found.values()) <= most else None
