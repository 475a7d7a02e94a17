"""The one entry to synthesis: a request in, an algorithm with its certificate out.

Order of attack, stopping at proof or target gap: structured seeds (baselines, greedy) at several chunkings;
trees packed by load and pipelined (M3); batched messages (M2) where alpha dominates; timed trees (M1). Every
model starts from the best schedule so far, and no answer is worse than any seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from taccl.errors import CheckFailed, Infeasible, Interrupted, NoSolutionInTime
from taccl.synth import model_stages
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.bounds import granular_bound, lower_bound
from taccl.synth.candidates import Candidate
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.conflict import explain_infeasible
from taccl.synth.cost import us
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.numbering import neatly_numbered
from taccl.synth.request import (
    SAME,
    Progress,
    Request,
    alpha_dominates,
    builder,
    check_pairs,
    check_request,
    generators,
    ladder_of,
    provenance,
)
from taccl.synth.search import Search
from taccl.synth.seed_stages import cut_finer
from taccl.synth.seeds import seeds

# One deterministic second of CP-SAT takes several wall-clock seconds on two slow cores; staying below the
# time limit with the deterministic one is what makes answers repeatable.
DETERMINISTIC_PER_WALL = 0.08
# Likewise for the local search: so many hops are clocked per second of the limit, whatever the clock says.
HOPS_PER_WALL = 70_000


def synthesise(
    request: Request,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    limit_s: float | None = None,
) -> Algorithm:
    """The best algorithm found for a request, with its certificate; see `synthesise_several`."""
    return next(synthesise_several(request, on_progress, should_stop, 0, limit_s))


def synthesise_several(
    request: Request,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    others: int = 3,
    limit_s: float | None = None,
) -> Iterator[Algorithm]:
    """The best algorithm found for a request, and after it the best that `others` more engines and chunkings have,
    the quickest first, each with its certificate, which is made when it is asked for.

    should_stop is polled; when it turns true the best so far is returned (Interrupted if there is none).
    limit_s: by the clock; None: the request's limit, which counted work is in proportion to in any case.
    Raises UsageError, Infeasible (with the sketch's conflicting rules), NoSolutionInTime, Interrupted.
    """
    check_request(request)
    make = builder(request)
    wanted = request.partition or request.restrictions.partition
    first = make(wanted or 1)
    check_pairs(request, first)
    conflict = explain_infeasible(request.topology, first, request.size_bytes, request.restrictions)
    if conflict is not None:
        raise conflict
    bound = lower_bound(request.topology, first, request.size_bytes)
    began = time.monotonic()

    def report(stage: str, best_fs: int | None) -> None:
        if on_progress:
            known = search.best.time_fs if search.best else None
            shown = min((t for t in (best_fs, known) if t is not None), default=None)
            elapsed = time.monotonic() - began
            on_progress(Progress(elapsed, stage, None if shown is None else us(shown), us(bound.time_fs)))

    search = Search(
        topology=request.topology,
        build=make,
        size_bytes=request.size_bytes,
        restrictions=request.restrictions,
        generators=generators(request),
        lower_fs=bound.time_fs,
        target_gap=max(request.target_gap, float(SAME)),  # closer is called optimal
        workers=request.workers,
        seed=request.seed,
        budget_s=request.time_limit_s,
        limit_s=request.time_limit_s if limit_s is None else limit_s,
        report=report,
        should_stop=should_stop or (lambda: False),
        fixed_partition=wanted is not None or request.custom is not None,
        batching=request.batching,
    )
    ladder = [wanted] if wanted else ladder_of(request, make)
    seeds(search, request, ladder)
    if request.engine in ("auto", "cp-sat"):
        if search.best is None and not search.should_stop():
            model_stages.rescue(search, ladder[0])
        _models(search, request, ladder)
    best = search.chosen()
    if best is None:
        if should_stop and should_stop():
            raise Interrupted("stopped before a first algorithm was found")
        if request.engine not in ("auto", "cp-sat", "greedy"):
            raise Infeasible(_why_not(search, request, ladder))
        if search.left_s() > 0:
            hint = "" if request.engine == "auto" else "; --engine auto tries all others too"
            raise Infeasible(
                f"engine {request.engine} cannot do this {request.collective}: none of its schedules brings all "
                f"data where they are wanted{hint}"
            )
        raise NoSolutionInTime(
            f"no algorithm was found within {request.time_limit_s:g} s; "
            "give more time with --time-limit or loosen the sketch"
        )
    lower_fs, bound_by = bound.time_fs, bound.name
    if best.time_fs < lower_fs:
        raise CheckFailed(f"the bound {bound_by!r} is above the time of a schedule, a fault of taccl")

    def certified(candidate: Candidate) -> Algorithm:
        found = neatly_numbered(candidate.algorithm(request.topology, request.size_bytes))
        wrong = check_algorithm(found, request.topology)
        if wrong:
            raise CheckFailed(
                f"the schedule found by {candidate.engine} is wrong, a fault of taccl: {wrong[0]}"
            )
        whole = granular_bound(request.topology, candidate.collective, request.size_bytes)
        return replace(
            found,
            certificate=_certificate(search, candidate, lower_fs, bound_by, whole.time_fs),
            provenance={**provenance(request), "workers": request.workers, **_quickest(search, candidate)},
        )

    rest = sorted(
        (c for c in search.others() if c.messages != best.messages),
        key=lambda c: (c.late_fs, search.judged_fs(c), c.time_fs, c.collective.partition, c.engine),
    )
    right = (
        c
        for c in rest
        if not check_algorithm(c.algorithm(request.topology, request.size_bytes), request.topology)
    )
    return map(certified, chain((best,), islice(right, others)))


def _quickest(search: Search, candidate: Candidate) -> dict[str, object]:
    """Where messages cost what no time shows: that, and the schedule that would be quicker without."""
    quickest, load_us = search.best, search.topology.load_us
    if quickest is None or not load_us or candidate.time_fs <= quickest.time_fs:
        return {}
    return {
        "load_us": float(load_us),
        "quickest_us": us(quickest.time_fs),
        "quickest_messages": len(quickest.messages),
    }


def _models(search: Search, request: Request, ladder: list[int]) -> None:
    """CP-SAT and local search, the best chunkings first.

    Where a chunk's transit outweighs alpha: packed trees and their pipeline, then timed trees. Where alpha
    outweighs it: batched messages and local search first.
    """
    budget = request.time_limit_s * DETERMINISTIC_PER_WALL
    short = alpha_dominates(request, search.build(ladder[0]))
    if not short:
        # More trees come nearer to the fluid optimum; the number that reaches it is not known beforehand.
        for partition in ladder:
            if search.finished():
                return
            model_stages.pack(search, partition, 0.3 * budget / len(ladder))
    ranked = sorted(
        (k for k in search.best_of if k in ladder), key=lambda k: (search.judged_fs(search.best_of[k]), k)
    )
    for partition in ranked[:2]:
        timed = [
            partial(model_stages.timed_trees, search, partition, 0.1 * budget, symmetric=True),
            partial(model_stages.timed_trees, search, partition, 0.2 * budget, symmetric=False),
        ]
        batched = (
            [partial(model_stages.batched_messages, search, partition, 0.15 * budget)]
            if request.batching
            else []
        )
        local = partial(model_stages.improve, search, partition, round(request.time_limit_s * HOPS_PER_WALL))
        for stage in (*batched, local, *timed) if short else (timed[0], local, timed[1], *batched):
            if search.finished():
                return
            stage()
    if search.best and not search.finished():
        cut_finer(search, search.best, search.best.engine)


def _certificate(
    search: Search, best: Candidate, lower_fs: int, bound_by: str, whole_chunks_fs: int
) -> Certificate:
    partition = best.collective.partition
    by_model = search.bounds.get(partition, 0)
    # A schedule quicker than that is none of those that the model has, such as an exchange.
    known = [other for (k, _), other in search.of_engine.items() if k == partition]
    known += [search.best_of[partition]] if partition in search.best_of else []
    if best.crosses or any(other.time_fs < by_model for other in known):
        by_model = 0
    solver_fs = max(lower_fs, whole_chunks_fs, by_model)
    solver_fs = min(solver_fs, best.time_fs)
    if best.time_fs - lower_fs <= SAME * best.time_fs:
        status, proved_by = "optimal", "any algorithm"
    elif best.time_fs - solver_fs <= SAME * best.time_fs:
        status, proved_by = "optimal", "within the sketch, the chunking and the routes considered"
    else:
        status, proved_by = "feasible", ""
    return Certificate(us(lower_fs), bound_by, us(solver_fs), status, proved_by)


def _why_not(search: Search, request: Request, ladder: list[int]) -> str:
    try:
        BASELINES[request.engine](request.topology, search.problem(ladder[0]).collective)
    except Inapplicable as reason:
        return f"engine {request.engine} cannot do {request.collective} here: {reason}"
    if not request.restrictions.rules and request.restrictions.extra_hops is None:
        return (
            f"the schedule of engine {request.engine} cannot be kept on {request.topology.name}: where its messages "
            "wait for shared ports, partial sums would be added twice; try --engine auto"
        )
    return f"engine {request.engine} has no schedule that obeys the sketch"
