"""M3: trees for the bandwidth regime, chosen by load alone.

Finds one tree a chunk that minimises the time of the most loaded link or port, then the depth; no clock. The
result is cut into finer chunks (refine) and timed by the list scheduler, so that the pipeline hides alpha and
fill. The number of trees a block is the collective's partition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

from taccl.synth.collective import Collective
from taccl.synth.models.cp_sat import cp_model
from taccl.synth.models.orbits import Orbits, orbits
from taccl.synth.models.solver import Strategy, solve
from taccl.synth.problem import Problem
from taccl.synth.schedule import Transfer

Hop = tuple[int, int, int]
Place = tuple[int, int, int]


def pack_trees(
    problem: Problem,
    strategies: Sequence[Strategy],
    hint: Sequence[Transfer] = (),
    should_stop: Callable[[], bool] | None = None,
) -> tuple[Transfer, ...] | None:
    """Transfers, one a chunk and hop, parents before children; None when nothing was found in time."""
    packing = _packing(problem, hint)
    outcome = solve(packing.model, strategies, None, should_stop)
    if outcome.objective is None:
        return None
    links = problem.topology.links
    found = []
    for hop, rep in packing.same.hop.items():
        if outcome.value(packing.used[rep]):
            number, chunk, e = hop
            spread = problem.layers[number].kind == "spread"
            far = links[e].dst if spread else links[e].src
            level = outcome.value(packing.depth[packing.same.place[number, chunk, far]])
            found.append((number, level if spread else -level, chunk, e, spread))
    found.sort()
    return _without_dead_ends(problem, [(n, c, e) for n, _, c, e, _ in found])


@dataclass(frozen=True, slots=True)
class _Packing:
    """The model and its variables, by representatives of orbits."""

    model: cp_model.CpModel
    same: Orbits
    used: dict[Hop, cp_model.IntVar]
    depth: dict[Place, cp_model.IntVar]


def _packing(problem: Problem, hint: Sequence[Transfer] = (), optimise: bool = True) -> _Packing:
    model = cp_model.CpModel()
    same = orbits(problem)
    links = problem.topology.links
    used = {hop: model.new_bool_var(f"use[{hop}]") for hop, rep in same.hop.items() if hop == rep}

    def x(hop: Hop) -> cp_model.IntVar:
        return used[same.hop[hop]]

    longest = problem.topology.ranks
    depth = {p: model.new_int_var(0, longest, f"depth[{p}]") for p, rep in same.place.items() if p == rep}
    deepest = model.new_int_var(0, 2 * longest, "deepest")

    def near(hop: Hop) -> Place:
        """The end of a hop that lies towards the root."""
        link = links[hop[2]]
        return (*hop[:2], link.src if problem.layers[hop[0]].kind == "spread" else link.dst)

    def far(hop: Hop) -> Place:
        link = links[hop[2]]
        return (*hop[:2], link.dst if problem.layers[hop[0]].kind == "spread" else link.src)

    towards: dict[Place, list[Hop]] = {}
    for hop in same.hop:
        towards.setdefault(far(hop), []).append(hop)
    for place, rep in same.place.items():
        number, chunk, rank = place
        layer = problem.layers[number]
        if place != rep or rank in layer.roots[chunk]:
            continue
        mine = [x(h) for h in towards.get(place, ())]
        if rank in layer.targets[chunk]:
            model.add_exactly_one(mine)
            model.add(deepest >= depth[place])
        elif mine:
            model.add_at_most_one(mine)
    for hop, variable in used.items():
        inner, outer = near(hop), far(hop)
        layer = problem.layers[hop[0]]
        if inner[2] not in layer.roots[hop[1]]:
            if inner[2] not in layer.targets[hop[1]]:
                model.add(sum(x(h) for h in towards.get(inner, ())) >= variable)
            model.add(depth[same.place[outer]] >= depth[same.place[inner]] + 1).only_enforce_if(variable)
        else:
            model.add(depth[same.place[outer]] >= 1).only_enforce_if(variable)

    load: dict[int, list[tuple[int, Hop]]] = {}
    for hop in same.hop:
        for resource, per_chunk in problem.costs.holds[hop[2]]:
            load.setdefault(resource, []).append((per_chunk, same.hop[hop]))
    unit = gcd(*(per_chunk for entries in load.values() for per_chunk, _ in entries)) or 1
    total = sum(per_chunk for entries in load.values() for per_chunk, _ in entries)
    unit = max(unit, total >> 40)
    bottleneck = model.new_int_var(0, total // unit + 1, "bottleneck")
    for key in sorted({tuple(sorted(entries)) for entries in load.values()}):
        model.add(sum((per_chunk // unit) * used[hop] for per_chunk, hop in key) <= bottleneck)
    over: dict[int, list[Hop]] = {}
    for hop in same.hop:
        over.setdefault(hop[2], []).append(hop)
    for rule in problem.rules:
        if rule.kind == "cap":
            for e in sorted(rule.links):
                if len(over.get(e, ())) > rule.limit:
                    model.add(sum(x(hop) for hop in over[e]) <= rule.limit)
    if optimise:
        # Depth only breaks ties: one level is worth less than the smallest difference in load.
        model.minimize(bottleneck * (2 * longest + 1) + deepest)
    if hint:
        number_of = {("reduce" if x.kind == "collect" else "copy"): i for i, x in enumerate(problem.layers)}
        taken = {(number_of.get(t.op, 0), c, t.link) for t in hint for c in t.chunks}
        for hop, variable in used.items():
            model.add_hint(variable, hop in taken)
    return _Packing(model, same, used, depth)


def _without_dead_ends(problem: Problem, hops: list[Hop]) -> tuple[Transfer, ...]:
    """Drop relays that lead nowhere; load alone does not forbid them."""
    links = problem.topology.links
    kept = list(hops)
    while True:
        needed = set()
        for n, c, e in kept:
            spread = problem.layers[n].kind == "spread"
            needed.add((n, c, links[e].src if spread else links[e].dst))
        alive = []
        for n, c, e in kept:
            far = links[e].dst if problem.layers[n].kind == "spread" else links[e].src
            if far in problem.layers[n].targets[c] or (n, c, far) in needed:
                alive.append((n, c, e))
        if len(alive) == len(kept):
            break
        kept = alive
    ops = ["reduce" if layer.kind == "collect" else "copy" for layer in problem.layers]
    return tuple(Transfer(e, (c,), ops[n]) for n, c, e in kept)


def refine(transfers: Sequence[Transfer], parts: int, finer: Collective, by_part: bool) -> list[Transfer]:
    """The same routes for every chunk cut into `parts`; `finer` is the collective of that partition.

    by_part: all transfers of the first parts come first (a pipeline), else the parts of one transfer do.
    Only for transfers whose predecessors follow from list order.
    """
    pieces = [(i, t) for t in transfers for i in range(parts)]
    if by_part:
        pieces.sort(key=lambda piece: piece[0])
    refined = [replace(t, chunks=tuple(c * parts + i for c in t.chunks)) for i, t in pieces]
    assert all(c < len(finer.chunks) for t in refined for c in t.chunks)
    return refined


def routes_exist(problem: Problem) -> bool:
    """Whether trees within all rules may exist, whatever their load: False only when it is proved that none do."""
    enough = Strategy(deterministic_s=2.0, wall_s=20.0)
    packing = _packing(replace(problem, symmetries=()), optimise=False)
    return solve(packing.model, [enough]).status != "infeasible"
