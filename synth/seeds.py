"""Structured seeds of a search: forests, baselines, greedy trees, and the allreduces and groups built of them."""

from __future__ import annotations

import time
from dataclasses import replace

from taccl.synth import seed_stages
from taccl.synth.bounds.large import EXPLICIT_RANKS
from taccl.synth.candidates import Candidate
from taccl.synth.cost import Costs, costs
from taccl.synth.counted import CLOCKED_S
from taccl.synth.engines import BASELINES, Inapplicable, chain, circulant
from taccl.synth.engines.exchange import exchanging_allreduce
from taccl.synth.engines.one_shot_trees import ENGINE as TREES
from taccl.synth.engines.one_shot_trees import HOPELESS, crowded_fs, reshaped
from taccl.synth.engines.rooted import rooted_allreduce
from taccl.synth.problem import Problem
from taccl.synth.request import Request, alpha_dominates, builder, generators, pairs_of_request
from taccl.synth.schedule import as_transfers
from taccl.synth.search import Search
from taccl.synth.seed_stages import MOST_MESSAGES
from taccl.synth.side_by_side import side_by_side
from taccl.synth.symmetric.search import COLLECTIVES

# Baselines with a formula for the number of chunks, which is tried beside the ladder: the routes of circulant graphs
# depend on it, and a chain wants more chunks than any tree.
BY_ROUNDS = {"circulant": circulant.cuts, "chain": chain.cuts}
# Baselines that are looked at only where a chunk costs more for being a message than for its bytes.
FOR_SHORT = (TREES,)
# For other ways of trees to every rank so many messages are clocked for each second of the limit.
CLOCKED_PER_WALL = 3_000
# Of the seeds' share, for baselines; greedy trees and quotients come after them.
BASELINES_SHARE = 0.5
# Of an allreduce's limit, for the seeds of each of its halves on their own.
HALF_SHARE = 0.15
# Schedules are composed of nodes from so many ranks on; fewer are searched as a whole.
LEAST_COMPOSED = 17
# Lengths of messages between nodes are chosen from so many ranks on.
LEAST_LENGTHS = 12


def seeds(search: Search, request: Request, ladder: list[int]) -> None:
    """Offer every seed of a request at every chunking of the ladder."""
    grouped = bool(request.groups) and request.engine in ("auto", "cp-sat")
    if grouped:
        # Trees for all groups together gain most where there is much to share; looks at each group come after them.
        _forest(search, request, ladder)
        if search.best is None or not search.finished():
            side_by_side(search, request, ladder, _own_seeds)
    _seeds(search, request, ladder, forest=not grouped)


def _forest(search: Search, request: Request, ladder: list[int]) -> None:
    if len(ladder) > 1 - search.fixed_partition:
        fixed = ladder[0] if search.fixed_partition else None
        seed_stages.forest(search, request.collective, request.root, pairs_of_request(request), fixed)


def _seeds(search: Search, request: Request, ladder: list[int], forest: bool = True) -> None:
    """Forests, baselines and greedy trees at every chunking; the best are cut finer as long as that pays."""
    names = [request.engine] if request.engine in BASELINES else _for_size(request, search)
    if request.engine in ("auto", "cp-sat"):
        if request.collective == "allreduce" and (search.best is None or not search.finished()):
            _joined(search, request, ladder)
        # What is quick comes first: between 32 ranks of irregular nodes forests of an alltoall take many seconds.
        _composed(search, request, ladder)
        if forest:
            _forest(search, request, ladder)
    if request.engine != "greedy":
        _baselines(search, request, names, ladder)
        _reshaped(search, request, ladder[0])
    for partition in ladder if request.engine in ("auto", "cp-sat", "greedy") else ():
        if search.seeds_spent() or (search.best is not None and search.finished()):
            break
        p = search.problem(partition)
        if request.collective in COLLECTIVES:
            seed_stages.quotient(search, request.collective, p, request.root, pairs_of_request(request))
        seed_stages.greedy_trees(search, p, 8)
        if request.collective == "allreduce" and partition == ladder[0] and not request.groups:
            for transfers in rooted_allreduce(
                request.topology, p.collective, request.size_bytes, request.restrictions, 2, request.seed
            ):
                search.offer("greedy", p, transfers)
                if search.best is not None and search.finished():
                    break
            for transfers in exchanging_allreduce(
                request.topology, p.collective, request.size_bytes, request.restrictions, request.seed
            ):
                search.offer("greedy", p, transfers)
                if search.best is not None and search.finished():
                    break
    ranked = sorted(search.best_of.values(), key=lambda c: (c.time_fs, c.collective.partition))
    for candidate in ranked[:3]:
        if not search.finished():
            seed_stages.cut_finer(search, candidate, candidate.engine)


def _for_size(request: Request, search: Search) -> list[str]:
    """The baselines worth a look: those that send whole vectors again and again only where these are short."""
    short = alpha_dominates(request, search.build(1))
    return [name for name in BASELINES if short or name not in FOR_SHORT]


def _own_seeds(search: Search, request: Request, ladder: list[int], share: float) -> dict[int, Candidate]:
    """The best of each chunking that the seeds of another request find within a share of a search's limit."""
    own = replace(
        search,
        topology=request.topology,
        build=builder(request),
        restrictions=request.restrictions,
        generators=generators(request),
        lower_fs=0,
        budget_s=search.budget_s * share,
        # By the clock they may take longer than by what they count, so that a busy machine does not cut them short.
        limit_s=search.left_s() / 4,
        began=time.monotonic(),
        report=lambda stage, best_fs: None,
        best=None,
        best_of={},
        of_engine={},
        steadiest={},
        bounds={},
        stated={},
        timed=0,
        worked_s=0.0,
    )
    _seeds(own, request, ladder)
    search.spend(own.worked_s)
    return own.best_of


def _composed(search: Search, request: Request, ladder: list[int]) -> None:
    """Schedules composed of nodes, where there are enough ranks for that to be worth a look."""
    wanted = request.engine in ("auto", "cp-sat") and not request.groups
    for partition in ladder if wanted and request.topology.ranks >= LEAST_COMPOSED else ():
        if search.best is None or not search.finished():
            seed_stages.composed(
                search, request.collective, search.problem(partition), pairs_of_request(request)
            )
    if (
        wanted
        and LEAST_LENGTHS <= request.topology.ranks <= EXPLICIT_RANKS
        and not (search.best and search.finished())
    ):
        seed_stages.chosen_lengths(search, request.collective, ladder[0] if search.fixed_partition else None)


def _baselines(search: Search, request: Request, names: list[str], ladder: list[int]) -> None:
    """Each baseline at every chunking, and its best three cut finer: what it would get if it were asked for alone."""
    found: dict[str, list[Candidate]] = {name: [] for name in names}
    finer = {} if search.fixed_partition or len(ladder) == 1 else _rounds_of(search, request)
    own = sorted({k for name in names for k in finer.get(name, ())} - {*ladder})
    for partition in [*ladder, *own]:
        p = search.problem(partition)
        for name in names if partition in ladder else [n for n in names if partition in finer.get(n, ())]:
            # However short the limit: an answer is never slower than a baseline of so many chunks.
            spent = search.seeds_spent(BASELINES_SHARE) or search.left_s() <= 0
            if search.should_stop() or search.reached() or (spent and search.best and partition != ladder[0]):
                return
            try:
                if name == TREES and len(names) > 1 and _crowded(search, request, p):
                    continue
                transfers = BASELINES[name](request.topology, p.collective)
            except Inapplicable:
                continue
            candidate = search.offer(name, p, transfers)
            if candidate is not None:
                found[name].append(candidate)
    few = [c for listed in found.values() for c in sorted(listed, key=_quickest)[:3]]
    # The finer the cut, the nearer a time comes to how long chunks alone hold the fullest resource.
    for candidate in sorted(few, key=lambda c: (search.fullest(c), _quickest(c))):
        if not (search.seeds_spent(BASELINES_SHARE) or search.finished()):
            seed_stages.cut_finer(search, candidate, candidate.engine)


def _quickest(candidate: Candidate) -> tuple[int, int]:
    return candidate.time_fs, candidate.collective.partition


def _crowded(search: Search, request: Request, p: Problem) -> bool:
    """Whether trees to every rank meet on some link or port so often that they are hopeless."""
    if search.best is None or request.groups:
        return False
    return crowded_fs(request.topology, p.collective, _of_vector(request, p)) > HOPELESS * search.best.time_fs


def _of_vector(request: Request, p: Problem) -> Costs:
    """Prices of the whole vector as one chunk."""
    return costs(request.topology, p.collective.chunk_bytes(request.size_bytes) * len(p.collective.chunks))


def _reshaped(search: Search, request: Request, partition: int) -> None:
    """Trees to every rank over other ways, where they are not far behind the best."""
    known = search.of_engine.get((partition, TREES))
    if known is None or request.groups or search.best is None or search.finished():
        return
    if known.time_fs > HOPELESS * search.best.time_fs:
        return
    p = search.problem(partition)
    work = round(CLOCKED_PER_WALL * search.budget_s)
    search.spend(CLOCKED_S * work)
    found = reshaped(
        request.topology, p.collective, _of_vector(request, p), work, request.seed, search.finished
    )
    search.offer(TREES, p, found)


def _rounds_of(search: Search, request: Request) -> dict[str, list[int]]:
    """Of the baselines that have rounds of one chunk each, the numbers of chunks a block that suit them."""
    p = search.problem(1)
    ranks = p.collective.group_ranks
    most = MOST_MESSAGES // max(1, len(p.collective.teams) * (ranks - 1))
    held, whole = min(p.costs.occupancy_fs, default=1), max(p.costs.chunk_fs, default=0)
    return {name: cuts(ranks, held, whole, most) for name, cuts in BY_ROUNDS.items()}


def _joined(search: Search, request: Request, ladder: list[int]) -> None:
    """An allreduce as a reduce-scatter and an allgather, each the best that its own seeds find at a chunking."""
    halves = [
        _own_seeds(search, replace(request, collective=name), ladder, HALF_SHARE)
        for name in ("reducescatter", "allgather")
    ]
    # Halves may have chunkings of their own; the best that they share is one more.
    shared = sorted(
        set(halves[0]) & set(halves[1]), key=lambda k: (sum(half[k].time_fs for half in halves), k)
    )
    for partition in [*ladder, *(k for k in shared[:1] if k not in ladder)]:
        found = [half.get(partition) for half in halves]
        if all(found):
            transfers = [t for candidate in found if candidate for t in as_transfers(candidate.messages)]
            search.offer("joined", search.problem(partition), transfers)
