"""The one entry to synthesis: a request in, an algorithm with its certificate out.

Order of attack, stopping at proof or target gap: structured seeds (baselines, greedy) at several chunkings;
trees packed by load and pipelined (M3); batched messages (M2) where alpha dominates; timed trees (M1). Every
model starts from the best schedule so far, and no answer is worse than any seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from importlib.metadata import version

from taccl import __version__
from taccl.errors import CheckFailed, Infeasible, Interrupted, NoSolutionInTime, UsageError
from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Permutation, Restrictions
from taccl.sketches.symmetry import find_symmetry
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.bounds import granular_bound, lower_bound
from taccl.synth.bounds.compose import EXPLICIT_RANKS
from taccl.synth.candidates import Candidate
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import GROUPED, NAMES, ROOTED, Collective, Groups, build, check_groups
from taccl.synth.conflict import explain_infeasible
from taccl.synth.cost import costs, us
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.engines.exchange import exchanging_allreduce
from taccl.synth.engines.rooted import rooted_allreduce
from taccl.synth.schedule import as_transfers
from taccl.synth.search import MOST_MESSAGES, Pairs, Search
from taccl.synth.side_by_side import side_by_side
from taccl.synth.symmetric.search import COLLECTIVES

ENGINES = ("auto", "cp-sat", "greedy", *BASELINES)
# One deterministic second of CP-SAT takes several wall-clock seconds on two slow cores; staying below the
# time limit with the deterministic one is what makes answers repeatable.
DETERMINISTIC_PER_WALL = 0.08
# Likewise for the local search: so many hops are clocked per second of the limit, whatever the clock says.
HOPS_PER_WALL = 70_000
# Baselines whose routes depend on the number of chunks, so that a finer cut is not a cut of the same routes.
BY_ROUNDS = ("circulant",)
# Of the seeds' share, for baselines; greedy trees and quotients come after them.
BASELINES_SHARE = 0.5
# Of an allreduce's limit, for the seeds of each of its halves on their own.
HALF_SHARE = 0.15
# Chunks times destinations beyond which seeds alone take minutes.
MOST_PAIRS = 50_000
# Schedules are composed of nodes from so many ranks on; fewer are searched as a whole.
LEAST_COMPOSED = 17
# Times within this relative distance of a bound are called optimal: durations are whole femtoseconds, bounds
# of models with very long horizons are rounded down to coarser units.
SAME = Fraction(1, 10**6)


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that decides the answer; equal requests give byte-identical algorithms."""

    topology: Topology
    collective: str  # one of collective.NAMES
    size_bytes: int  # nccl-tests size
    restrictions: Restrictions = field(default_factory=Restrictions)
    engine: str = "auto"
    root: int = 0  # with groups the place in each group
    groups: Groups = ()  # that do the collective side by side; (): all ranks are one
    partition: int | None = None  # overrides the sketch's
    demand: tuple[tuple[int, ...], ...] | None = None  # alltoallv
    pairs: tuple[tuple[int, int], ...] | None = None  # sendrecv
    custom: Collective | None = None  # collective == "custom"
    time_limit_s: float = 60.0
    target_gap: float = 0.0
    seed: int = 0
    workers: int = 2
    batching: bool = True  # messages may carry several chunks


@dataclass(frozen=True, slots=True)
class Progress:
    """One line for a person who waits."""

    elapsed_s: float
    stage: str  # e.g. "cp-sat, 2 chunks per rank"
    time_us: float | None  # best so far
    lower_bound_us: float


def synthesise(
    request: Request,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Algorithm:
    """The best algorithm found for a request, with its certificate.

    should_stop is polled; when it turns true the best so far is returned (Interrupted if there is none).
    Raises UsageError, Infeasible (with the sketch's conflicting rules), NoSolutionInTime, Interrupted.
    """
    check_request(request)
    make = _builder(request)
    wanted = request.partition or request.restrictions.partition
    first = make(wanted or 1)
    _check_pairs(request, first)
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
        generators=_generators(request),
        lower_fs=bound.time_fs,
        target_gap=max(request.target_gap, float(SAME)),  # closer is called optimal
        workers=request.workers,
        seed=request.seed,
        budget_s=request.time_limit_s,
        limit_s=request.time_limit_s,
        report=report,
        should_stop=should_stop or (lambda: False),
        fixed_partition=wanted is not None or request.custom is not None,
        batching=request.batching,
    )
    ladder = [wanted] if wanted else _ladder(request, make)
    asked_first = bool(request.groups) and request.engine in ("auto", "cp-sat")
    if asked_first:
        # Trees for all groups together gain most where there is much to share; looks at each group come after them.
        _forest(search, request, ladder)
        if search.best is None or not search.finished():
            side_by_side(search, request, ladder, _own_seeds)
    _seeds(search, request, ladder, forest=not asked_first)
    if request.engine in ("auto", "cp-sat"):
        if search.best is None and not search.should_stop():
            search.rescue(ladder[0])
        _models(search, request, ladder)
    best = search.best
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
    found = best.algorithm(request.topology, request.size_bytes)
    wrong = check_algorithm(found, request.topology)
    if wrong:
        raise CheckFailed(f"the schedule found by {best.engine} is wrong, a fault of taccl: {wrong[0]}")
    whole = granular_bound(request.topology, best.collective, request.size_bytes)
    return replace(
        found,
        certificate=_certificate(search, best, lower_fs, bound_by, whole.time_fs),
        provenance={
            "taccl": __version__,
            "ortools": version("ortools"),
            "seed": request.seed,
            "workers": request.workers,
            "time_limit_s": request.time_limit_s,
            "target_gap": request.target_gap,
            "engine_asked": request.engine,
            "sketch": request.restrictions.sketch_name,
            "batching": request.batching,
        },
    )


def check_request(request: Request) -> None:
    """Raise UsageError where a request is none."""
    if request.collective not in NAMES:
        raise UsageError(f"unknown collective {request.collective!r}; known: {', '.join(NAMES)}")
    if request.engine not in ENGINES:
        raise UsageError(f"unknown engine {request.engine!r}; known: {', '.join(ENGINES)}")
    if request.size_bytes < 1:
        raise UsageError("the size must be at least 1 byte")
    if request.groups:
        _check_groups(request)
    elif not 0 <= request.root < request.topology.ranks:
        last = request.topology.ranks - 1
        raise UsageError(f"root {request.root}: the ranks of {request.topology.name} are 0..{last}")
    if request.collective == "custom" and request.custom is None:
        raise UsageError("a custom collective needs its pre- and postconditions")
    if request.time_limit_s <= 0:
        raise UsageError("the time limit must be above 0 seconds")
    request.topology.check()


def _check_groups(request: Request) -> None:
    if request.collective not in GROUPED:
        known = ", ".join(name for name in NAMES if name in GROUPED)
        raise UsageError(f"groups are for {known}; {request.collective} says itself who sends to whom")
    try:
        check_groups(request.groups, request.topology.ranks)
    except ValueError as error:
        raise UsageError(f"groups of ranks: {error}") from error
    if request.topology.ranks > EXPLICIT_RANKS:
        raise UsageError(
            f"groups are synthesised on up to {EXPLICIT_RANKS} ranks, {request.topology.name} has "
            f"{request.topology.ranks}"
        )


def _check_pairs(request: Request, collective: Collective) -> None:
    """Raise UsageError where chunks are so many that nobody could wait for their messages."""
    pairs = sum(len(chunk.destinations) for chunk in collective.chunks)
    if pairs <= MOST_PAIRS:
        return
    message = (
        f"{request.collective} of {pairs} (chunk, destination) pairs: at most {MOST_PAIRS} are synthesised"
    )
    if request.custom is None and request.collective != "alltoallv":
        most = collective.partition * MOST_PAIRS // pairs
        message += f"; on {request.topology.ranks} ranks --partition may be up to {most}" if most else ""
        if len({len(group) for group in request.groups}) > 1:
            message += "; groups of unequal size need chunks that fit all of them"
    elif request.collective == "alltoallv":
        message += "; scale the demand down, only its proportions matter"
    raise UsageError(message)


def _builder(request: Request) -> Callable[[int], Collective]:
    if request.custom is not None:
        custom = request.custom
        return lambda partition: custom

    def make(partition: int) -> Collective:
        try:
            return build(
                request.collective,
                request.topology.ranks,
                partition,
                root=request.root,
                demand=request.demand,
                pairs=request.pairs,
                groups=request.groups or None,
            )
        except ValueError as error:
            raise UsageError(f"{request.collective}: {error}") from error

    return make


def _generators(request: Request) -> tuple[tuple[int, ...], ...]:
    if request.restrictions.symmetry is not None:
        return request.restrictions.symmetry
    if not request.groups:
        return tuple(find_symmetry(request.topology))
    groups = {frozenset(group) for group in request.groups}
    roots = {group[request.root] for group in request.groups} if request.collective in ROOTED else set()

    def keeps(permutation: Permutation) -> bool:
        return (
            all(frozenset(permutation[rank] for rank in group) in groups for group in request.groups)
            and {permutation[root] for root in roots} == roots
        )

    return tuple(find_symmetry(request.topology, keeps))


def _alpha_dominates(request: Request, collective: Collective) -> bool:
    """Whether sending one chunk costs more for being a message than for its bytes."""
    priced = costs(request.topology, collective.chunk_bytes(request.size_bytes))
    alphas = sorted(priced.alpha_fs)
    return bool(alphas) and max(priced.chunk_fs) <= alphas[len(alphas) // 2]


def _ladder(request: Request, make: Callable[[int], Collective]) -> list[int]:
    """Chunkings worth trying: one chunk a block where alpha dominates, more where bandwidth does."""
    if request.custom is not None or _alpha_dominates(request, make(1)):
        return [1]
    priced = costs(request.topology, make(1).chunk_bytes(request.size_bytes))
    alphas = sorted(priced.alpha_fs) or [0]
    transit = max(priced.chunk_fs, default=0)
    few_blocks = request.collective in ("broadcast", "reduce", "sendrecv")
    together = max((len(group) for group in request.groups), default=request.topology.ranks)
    most = 16 if few_blocks else 8 if together <= 8 else 4
    ladder = [k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k <= most]
    # A chunk much shorter than alpha cannot pay for its own message.
    return [k for k in ladder if k == 1 or 4 * transit >= alphas[len(alphas) // 2] * k]


def _forest(search: Search, request: Request, ladder: list[int]) -> None:
    if len(ladder) > 1 - search.fixed_partition:
        fixed = ladder[0] if search.fixed_partition else None
        search.forest(request.collective, request.root, pairs_of_request(request), fixed)


def _seeds(search: Search, request: Request, ladder: list[int], forest: bool = True) -> None:
    """Forests, baselines and greedy trees at every chunking; the best are cut finer as long as that pays."""
    names = [request.engine] if request.engine in BASELINES else list(BASELINES)
    if request.engine in ("auto", "cp-sat"):
        if request.collective == "allreduce" and (search.best is None or not search.finished()):
            _joined(search, request, ladder)
        if forest:
            _forest(search, request, ladder)
    if request.engine != "greedy":
        _baselines(search, request, names, ladder)
    _composed(search, request, ladder)
    for partition in ladder if request.engine in ("auto", "cp-sat", "greedy") else ():
        if search.seeds_spent() or (search.best is not None and search.finished()):
            break
        p = search.problem(partition)
        if request.collective in COLLECTIVES:
            search.quotient(request.collective, p, request.root, pairs_of_request(request))
        search.greedy(p, 8)
        if request.collective == "allreduce" and partition == ladder[0] and not request.groups:
            for transfers in rooted_allreduce(
                request.topology, p.collective, request.size_bytes, request.restrictions, 2, request.seed
            ):
                search.offer("greedy", p, transfers)
            for transfers in exchanging_allreduce(
                request.topology, p.collective, request.size_bytes, request.restrictions, request.seed
            ):
                search.offer("greedy", p, transfers)
    ranked = sorted(search.best_of.values(), key=lambda c: (c.time_fs, c.collective.partition))
    for candidate in ranked[:3]:
        if not search.finished():
            search.pipeline(candidate, candidate.engine)


def _own_seeds(search: Search, request: Request, ladder: list[int], share: float) -> dict[int, Candidate]:
    """The best of each chunking that the seeds of another request find within a share of a search's limit."""
    own = replace(
        search,
        topology=request.topology,
        build=_builder(request),
        restrictions=request.restrictions,
        generators=_generators(request),
        lower_fs=0,
        budget_s=search.budget_s * share,
        # By the clock they may take longer than by what they count, so that a busy machine does not cut them short.
        limit_s=search.left_s() / 2,
        began=time.monotonic(),
        report=lambda stage, best_fs: None,
        best=None,
        best_of={},
        of_engine={},
        bounds={},
        timed=0,
    )
    _seeds(own, request, ladder)
    return own.best_of


def _composed(search: Search, request: Request, ladder: list[int]) -> None:
    """Schedules composed of nodes, where there are enough ranks for that to be worth a look."""
    wanted = request.engine in ("auto", "cp-sat") and not request.groups
    for partition in ladder if wanted and request.topology.ranks >= LEAST_COMPOSED else ():
        if search.best is None or not search.finished():
            search.composed(request.collective, search.problem(partition), pairs_of_request(request))


def _baselines(search: Search, request: Request, names: list[str], ladder: list[int]) -> None:
    """Each baseline at every chunking, and its best three cut finer: what it would get if it were asked for alone."""
    found: dict[str, list[Candidate]] = {name: [] for name in names}
    finer = [] if search.fixed_partition or len(ladder) == 1 else _rounds_of(search, request)
    for partition in [*ladder, *finer]:
        p = search.problem(partition)
        for name in names if partition in ladder else [n for n in names if n in BY_ROUNDS]:
            # However short the limit: an answer is never slower than a baseline of so many chunks.
            spent = search.seeds_spent(BASELINES_SHARE) or search.left_s() <= 0
            if search.should_stop() or search.reached() or (spent and search.best and partition != ladder[0]):
                return
            try:
                transfers = BASELINES[name](request.topology, p.collective)
            except Inapplicable:
                continue
            candidate = search.offer(name, p, transfers)
            if candidate is not None:
                found[name].append(candidate)
    for name in names:
        for candidate in sorted(found[name], key=lambda c: (c.time_fs, c.collective.partition))[:3]:
            if not (search.seeds_spent(BASELINES_SHARE) or search.finished()):
                search.pipeline(candidate, name)


def _rounds_of(search: Search, request: Request) -> list[int]:
    """Chunks a block that suit k - 1 + log2 n rounds of one chunk each: where another round's alpha is worth it."""
    p = search.problem(1)
    alpha = max(1, min(p.costs.occupancy_fs, default=1))
    ranks = p.collective.group_ranks
    depth = max(1, (ranks - 1).bit_length() - 1)
    best = math.isqrt(depth * max(p.costs.chunk_fs, default=0) // alpha)
    most = MOST_MESSAGES // max(1, len(p.collective.teams) * (ranks - 1))
    return sorted(
        {k for k in (best // 2, best * 3 // 4, best, best * 3 // 2) if 1 < k <= most}
        | {min(best, most)} - {0}
    )


def _joined(search: Search, request: Request, ladder: list[int]) -> None:
    """An allreduce as a reduce-scatter and an allgather, each the best that its own seeds find at a chunking."""
    halves = [
        _own_seeds(search, replace(request, collective=name), ladder, HALF_SHARE)
        for name in ("reducescatter", "allgather")
    ]
    for partition in ladder:
        found = [half.get(partition) for half in halves]
        if all(found):
            transfers = [t for candidate in found if candidate for t in as_transfers(candidate.messages)]
            search.offer("joined", search.problem(partition), transfers)


def pairs_of_request(request: Request) -> Pairs:
    """Who sends to whom, and how many blocks where the request has a demand."""
    n = request.topology.ranks
    if request.demand is not None:
        blocks = {(s, d): request.demand[s][d] for s in range(n) for d in range(n) if request.demand[s][d]}
        return Pairs(tuple(blocks), tuple(blocks.values()))
    return Pairs(request.pairs or tuple((rank, (rank + 1) % n) for rank in range(n)))


def _models(search: Search, request: Request, ladder: list[int]) -> None:
    """CP-SAT and local search, the best chunkings first.

    Where a chunk's transit outweighs alpha: packed trees and their pipeline, then timed trees. Where alpha
    outweighs it: batched messages and local search first.
    """
    budget = request.time_limit_s * DETERMINISTIC_PER_WALL
    short = _alpha_dominates(request, search.build(ladder[0]))
    if not short:
        # More trees come nearer to the fluid optimum; the number that reaches it is not known beforehand.
        for partition in ladder:
            if search.finished():
                return
            search.pack(partition, 0.3 * budget / len(ladder))
    ranked = sorted((k for k in search.best_of if k in ladder), key=lambda k: (search.best_of[k].time_fs, k))
    for partition in ranked[:2]:
        timed = [
            partial(search.trees, partition, 0.1 * budget, symmetric=True),
            partial(search.trees, partition, 0.2 * budget, symmetric=False),
        ]
        batched = [partial(search.messages, partition, 0.15 * budget)] if request.batching else []
        local = partial(search.improve, partition, round(request.time_limit_s * HOPS_PER_WALL))
        for stage in (*batched, local, *timed) if short else (timed[0], local, timed[1], *batched):
            if search.finished():
                return
            stage()
    if search.best and not search.finished():
        search.pipeline(search.best, search.best.engine)


def _certificate(
    search: Search, best: Candidate, lower_fs: int, bound_by: str, whole_chunks_fs: int
) -> Certificate:
    solver_fs = max(lower_fs, whole_chunks_fs, search.bounds.get(best.collective.partition, 0))
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
    return f"engine {request.engine} has no schedule that obeys the sketch"
