"""The models of a search: packed trees, timed trees, batched messages, and local search beside them.

Each stage starts from what the `Search` knows already. Limits handed to CP-SAT are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from taccl.profiles.topology import reverse
from taccl.synth.annealing.search import anneal
from taccl.synth.candidates import best_timing, one_chunk_each
from taccl.synth.collective import Collective
from taccl.synth.counted import CLOCKED_S, GREEDY_S, LOAD_HOP_S, SLOT_S, SOLVED_S, STATED_S, TREE_HOP_S
from taccl.synth.engines.greedy import Taste, greedy
from taccl.synth.models.messages import solve_messages
from taccl.synth.models.orbits import close, free_group, identity
from taccl.synth.models.packing import pack_trees
from taccl.synth.models.solver import Strategy
from taccl.synth.models.trees import solve_trees
from taccl.synth.problem import Layer, Problem, problem, with_symmetry
from taccl.synth.schedule import Transfer
from taccl.synth.search import Search
from taccl.synth.seed_stages import DETOUR, cut_finer

# Beyond this many (chunk, link) pairs the timed model finds nothing in the time people wait.
MOST_TREE_HOPS = 40_000
MOST_SLOT_VARIABLES = 40_000
# Without the relaxation CP-SAT counts so little deterministic time that a fraction is as long by the clock.
QUICK_SHARE = 0.15
# Deterministic seconds for a first schedule where the seeds break the sketch's rules.
RESCUE_S = (0.2, 2.0)
# Local search starts from the best schedules of so many engines: the second best is sometimes on the better hill.
MOST_STARTS = 3


def _strategies(search: Search, deterministic_s: float, relax_only: bool = False) -> list[Strategy]:
    """CP-SAT runs for a stage that may use so many deterministic seconds, the quickest first.

    Ordering models do best without the linear relaxation; packing by load does best with it.
    """
    wall_s = max(0.5, search.left_s())

    def spend(share: float) -> None:
        search.spend(
            SOLVED_S * deterministic_s * share
        )  # with the relaxation or without, by the clock it is as long

    relaxed = Strategy(deterministic_s, wall_s, search.seed, spend=spend)
    if relax_only:
        return [relaxed]
    quick = Strategy(deterministic_s * QUICK_SHARE, wall_s, search.seed, relax=False, spend=spend)
    return [quick, relaxed] if search.workers > 1 else [quick]


def pack(search: Search, partition: int, deterministic_s: float) -> None:
    """M3: trees by load, then pipelined."""
    p = search.problem(partition)
    hops = _hops(p)
    if hops > MOST_TREE_HOPS or not _affordable(search, LOAD_HOP_S * hops):
        return
    known = search.one_sum(partition)
    hint = known.transfers if known else ()
    packed = pack_trees(p, _strategies(search, deterministic_s, relax_only=True), hint, search.should_stop)
    if packed:
        offered = search.offer("cp-sat", p, packed)
        if offered:
            cut_finer(search, replace(offered, transfers=tuple(packed)), "cp-sat")


def rescue(search: Search, partition: int) -> None:
    """Any trees within the rules, where no seed obeys them; a first answer may take longer than the limit."""
    p = replace(search.problem(partition), symmetries=())
    for deterministic_s in RESCUE_S:
        packed = pack_trees(p, [Strategy(deterministic_s, 60.0, search.seed)], (), search.should_stop)
        if search.should_stop() or (packed and search.offer("cp-sat", p, packed)):
            return


def timed_trees(search: Search, partition: int, deterministic_s: float, symmetric: bool) -> None:
    """M1: timed trees at one chunking, from the best schedule known there."""
    p = search.problem(partition)
    p = replace(p, symmetries=tuple(free_group(p)[1:]) if symmetric else ())
    if symmetric and not p.symmetries:
        return
    known, hops = search.one_sum(partition), _hops(p)
    if known is None or hops > MOST_TREE_HOPS:
        return
    single = best_timing("cp-sat", search.topology, p.collective, p.costs, one_chunk_each(known.transfers))
    if single is None:
        return
    if not _affordable(search, TREE_HOP_S * hops):
        return
    found = solve_trees(
        p,
        single.time_fs,
        search.lower_fs,
        _strategies(search, deterministic_s),
        single.messages,
        _improved(search, partition),
        search.should_stop,
    )
    if found.transfers:
        search.offer("cp-sat", p, found.transfers)
    if not p.symmetries and not _may_batch(p):
        search.bounds[partition] = max(search.bounds.get(partition, 0), found.bound_fs)


def batched_messages(search: Search, partition: int, deterministic_s: float) -> None:
    """M2: batched messages, for each layer on its own; an allreduce joins the two."""
    p = search.problem(partition)
    known = search.one_sum(partition)
    if known is None:
        return
    joined: list[Transfer] = []
    for number, layer in enumerate(p.layers):
        single = _alone(p, number)
        ops = "reduce" if layer.kind == "collect" else "copy"
        own = [t for t in known.transfers if t.op == ops and t.plain]
        if not own:
            # The best schedule is no set of trees (an exchange); greedy trees are the start then.
            search.spend(GREEDY_S * p.hops)
            own = [t for t in greedy(p, Taste(1.0, True, 0)) or () if t.op == ops]
        # A collect layer is solved as a spread on the turned links, so its hint runs backwards.
        hint = [replace(t, op="copy") for t in (reversed(own) if ops == "reduce" else own)]
        seed = best_timing("cp-sat", single.topology, single.collective, single.costs, hint)
        if seed is None:
            return
        best, best_fs = tuple(Transfer(m.link, m.chunks) for m in seed.messages), seed.time_fs
        hops = _hops(single)
        # Few slots first: small models, and in this regime few messages are what is wanted.
        for slots in (2, 3, 4, 6):
            if hops * slots > MOST_SLOT_VARIABLES or search.finished():
                break
            if not _affordable(search, SLOT_S * hops * slots):
                break
            strategies = _strategies(search, deterministic_s / (4 * len(p.layers)))
            found = solve_messages(
                single,
                slots,
                best_fs,
                0,
                strategies,
                seed.messages,
                _improved(search, partition),
                search.should_stop,
            )
            if not found.transfers:
                continue
            timed = best_timing("cp-sat", single.topology, single.collective, single.costs, found.transfers)
            if timed is not None and timed.time_fs < best_fs:
                best, best_fs = found.transfers, timed.time_fs
        transfers = best
        if ops == "reduce":
            joined += [Transfer(t.link, t.chunks, "reduce") for t in reversed(transfers)]
        else:
            joined += transfers
    search.offer("cp-sat", p, joined)


def improve(search: Search, partition: int, work: int) -> None:
    """Local search from the best schedules of a chunking, first with its symmetry; work is counted in hops."""
    wide = search.restrictions
    if wide.extra_hops is None:
        wide = replace(wide, extra_hops=DETOUR)
    stated = problem(search.topology, search.build(partition), search.size_bytes, wide)
    search.spend(STATED_S * stated.hops)
    p = with_symmetry(stated, search.generators)[0]
    group = (close([identity(p), *p.symmetries], 256) or []) if p.symmetries else []
    starts = sorted(
        (c for (k, _), c in search.of_engine.items() if k == partition), key=lambda c: (c.time_fs, c.engine)
    )[:MOST_STARTS]
    alone = [identity(p)]
    runs = [(start, group if len(group) > 1 else alone, work // len(starts)) for start in starts]
    for start, images, share in [*runs, *([(None, alone, work)] if len(group) > 1 else [])]:
        known = start or search.best_of[partition]
        if search.finished():
            return
        search.spend(CLOCKED_S * share)
        found = anneal(
            p, known.messages, images, share, search.seed, search.batching, lambda _: search.finished()
        )
        if found:
            search.offer("local-search", p, found)


def _improved(search: Search, partition: int) -> Callable[[int, int], None]:
    return lambda time_fs, _: search.report(f"cp-sat, {partition} per block", None)


def _hops(p: Problem) -> int:
    """(chunk, link) pairs up to symmetry: what a model's size grows with."""
    order = len(free_group(p)) if p.symmetries else 1
    return p.hops // order


def _affordable(search: Search, build_s: float) -> bool:
    """Whether a model that takes so much work to build fits into what is left; if so, the work is counted."""
    if build_s > min(search.budget_s - search.worked_s, search.left_s()):
        return False
    search.spend(build_s)
    return True


def _may_batch(p: Problem) -> bool:
    """Whether a message of several chunks can be cheaper than several messages."""
    if p.costs.reduce_alpha_fs and any(layer.kind == "collect" for layer in p.layers):
        return True
    return any(p.costs.occupancy_fs[e] for layer in p.layers for usable in layer.usable for e in usable)


def _alone(p: Problem, number: int) -> Problem:
    """One layer as a spread problem of its own, on turned links if it collects."""
    layer = p.layers[number]
    topology = p.topology if layer.kind == "spread" else reverse(p.topology)
    spread = replace(layer, kind="spread")
    return Problem(topology, _as_spread(p.collective, spread), p.costs, (spread,), (), p.symmetries)


def _as_spread(collective: Collective, layer: Layer) -> Collective:
    """The collective whose chunks start at the layer's roots and are wanted by its targets."""
    chunks = tuple(
        replace(
            chunk,
            sources=tuple((rank, 0) for rank in roots),
            destinations=tuple((rank, 0) for rank in targets),
        )
        for chunk, roots, targets in zip(collective.chunks, layer.roots, layer.targets, strict=True)
    )
    return replace(collective, chunks=chunks, combining=False)
