"""Why no algorithm exists: the smallest set of the sketch's rules that exclude each other."""

from __future__ import annotations

from dataclasses import replace

from taccl.errors import Infeasible
from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Restrictions, Rule
from taccl.synth.collective import Collective
from taccl.synth.models.packing import routes_exist
from taccl.synth.problem import problem, unreachable


def explain_infeasible(
    topology: Topology, collective: Collective, size_bytes: int, restrictions: Restrictions
) -> Infeasible | None:
    """None when routes for every chunk exist; else the error to raise, with a minimal set of rules.

    Deletion filter: a rule without which routes are still missing is not part of the conflict.
    """
    missing = _first_missing(topology, collective, size_bytes, restrictions)
    if missing is None:
        return None
    kept = [rule for rule in restrictions.rules if rule.kind not in ("uc-min", "uc-max", "own-first")]
    hops = restrictions.extra_hops
    if hops is not None and _first_missing(topology, collective, size_bytes, _only(restrictions, kept, None)):
        hops = None
    for rule in list(kept):
        fewer = [other for other in kept if other is not rule]
        if _first_missing(topology, collective, size_bytes, _only(restrictions, fewer, hops)) is not None:
            kept = fewer
    missing = _first_missing(topology, collective, size_bytes, _only(restrictions, kept, hops))
    reasons = [f"{rule.where}: {rule.text}" if rule.where else rule.text for rule in kept]
    if hops is not None:
        reasons.append(f"a chunk may take at most {hops} hops more than a shortest path")
    if not reasons:
        return Infeasible(f"{missing}; the topology itself does not connect them, so no algorithm exists")
    joined = "this rule excludes" if len(reasons) == 1 else "these rules together exclude"
    return Infeasible(f"{missing}; {joined} every algorithm:", reasons)


def _only(restrictions: Restrictions, rules: list[Rule], hops: int | None) -> Restrictions:
    return replace(restrictions, rules=tuple(rules), extra_hops=hops)


def _first_missing(
    topology: Topology, collective: Collective, size_bytes: int, restrictions: Restrictions
) -> str | None:
    """A sentence about the first chunk that cannot be routed, or None."""
    stated = problem(topology, collective, size_bytes, restrictions)
    lost = unreachable(stated)
    if lost:
        number, chunk, rank = lost[0]
        layer = stated.layers[number]
        root = layer.roots[chunk][0]
        if layer.kind == "spread":
            return f"chunk {chunk} of rank {root} cannot reach rank {rank}"
        return f"the contribution of rank {rank} to chunk {chunk} cannot reach rank {root}"
    if any(rule.kind == "cap" for rule in stated.rules) and not routes_exist(stated):
        return "the chunks do not fit through the links that may carry them"
    return None
