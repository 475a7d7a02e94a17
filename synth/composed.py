"""Alltoallv beyond a few dozen ranks: composed of nodes, its counts as they are.

The same request as `synthesise` takes. Counts have no symmetry, and models of so many chunks are too large, so that
what is composed is all that is tried. docs/synthesis.md, "Irregular clusters", tells how.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from taccl.errors import CheckFailed, Infeasible, Interrupted, NoSolutionInTime, UsageError
from taccl.profiles.link_table import link_table
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.bounds.bound import stronger
from taccl.synth.bounds.compose import counting_bound, lower_bound
from taccl.synth.bounds.large import EXPLICIT_RANKS
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.cluster.compose import Composed, compose, composes
from taccl.synth.collective import build
from taccl.synth.cost import us
from taccl.synth.message_table import messages_of
from taccl.synth.request import SAME, Progress, Request, check_request, pairs_of_request, provenance
from taccl.synth.symmetric.search import Task

ENGINES = ("auto", "cp-sat")
# Chunks, each in two or three messages that are objects.
MOST_CHUNKS = 1 << 18


def composed_alone(request: Request) -> bool:
    """Whether a request is for `synthesise_composed`."""
    return (
        request.topology.ranks > EXPLICIT_RANKS
        and request.collective == "alltoallv"
        and request.engine in ENGINES
        and not request.restrictions.rules
        and request.restrictions.extra_hops is None
        and composes(request.topology, request.collective)
    )


def synthesise_composed(
    request: Request,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Algorithm:
    """The best schedule found for a request, checked message by message, with its certificate.

    Raises UsageError for a size or a demand that is none and where nothing can be composed, Infeasible when a rank
    cannot be reached, NoSolutionInTime, Interrupted.
    """
    check_request(request)
    began = time.monotonic()
    stop = should_stop or (lambda: False)
    partition = request.partition or request.restrictions.partition or 1
    try:
        total = partition * sum(map(sum, request.demand or ()))
        if total > MOST_CHUNKS:
            raise UsageError(
                f"alltoallv of {total} chunks: at most {MOST_CHUNKS} are synthesised; scale the demand down, only its "
                "proportions matter"
            )
        collective = build("alltoallv", request.topology.ranks, partition, demand=request.demand)
    except ValueError as error:
        raise UsageError(f"alltoallv: {error}") from error
    try:
        free = lower_bound(request.topology, collective, request.size_bytes)
    except ValueError as error:
        raise Infeasible(f"{request.topology.name}: {error}") from error
    pairs = pairs_of_request(request)
    task = Task(
        request.topology, link_table(request.topology), "alltoallv", partition,
        collective.chunk_bytes(request.size_bytes), 0, pairs.ends, None, request.batching, pairs.amounts,
    )  # fmt: skip

    def out_of_time() -> bool:
        return stop() or time.monotonic() - began > request.time_limit_s

    best: Composed | None = None
    target_fs = free.time_fs + int(request.target_gap * free.time_fs)
    for found in compose(task, target_fs, out_of_time):
        best = found
        if on_progress:
            elapsed = time.monotonic() - began
            on_progress(
                Progress(
                    elapsed, f"{found.engine}, {partition} per block", us(found.time_fs), us(free.time_fs)
                )
            )
    if best is None:
        if stop():
            raise Interrupted("stopped before a first algorithm was found")
        what = f"{request.topology.name}: no alltoallv of {request.topology.ranks} ranks was found"
        if out_of_time():
            raise NoSolutionInTime(f"{what} within {request.time_limit_s:g} s; give it longer (--time-limit)")
        raise UsageError(
            f"{what}. Beyond {EXPLICIT_RANKS} ranks schedules are composed of links between nodes and ways within "
            "them, and some rank has none of these to another"
        )
    grain = "whole" if request.batching else "single"
    within = counting_bound(request.topology, collective, request.size_bytes, grain)
    within_fs = free.time_fs if within is None else stronger(free, within).time_fs
    if best.time_fs < within_fs:
        raise CheckFailed("the bound is above the time of a schedule, a fault of taccl")
    status, proved_by = "feasible", ""
    if best.time_fs - free.time_fs <= SAME * best.time_fs:
        status, proved_by = "optimal", "any algorithm"
    elif best.time_fs - within_fs <= SAME * best.time_fs:
        status, proved_by = "optimal", "any algorithm of whole chunks"
    algorithm = Algorithm(
        name=f"alltoallv-{request.topology.name}-{best.engine}",
        collective=collective,
        topology_name=request.topology.name,
        size_bytes=request.size_bytes,
        messages=messages_of(best.messages),
        time_fs=best.time_fs,
        certificate=Certificate(us(free.time_fs), free.name, us(within_fs), status, proved_by),
        engine=best.engine,
        provenance=provenance(request),
    )
    wrong = check_algorithm(algorithm, request.topology)
    if wrong:
        raise CheckFailed(f"the schedule found by {best.engine} is wrong, a fault of taccl: {wrong[0]}")
    return algorithm
