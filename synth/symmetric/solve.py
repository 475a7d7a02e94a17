"""Synthesis on the quotient: seeds by growth or routing, then timed trees, at one chunking.

Everything here is counted, never timed, so that equal requests give equal answers: the budget says how many seeds are
grown and how long CP-SAT may search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from taccl.synth.models.solver import Strategy
from taccl.synth.symmetric.grow import Taste, grow
from taccl.synth.symmetric.hops import RepHop, collected_then_spread, quickest, turned
from taccl.synth.symmetric.instance import Instance, Ints, instance
from taccl.synth.symmetric.route import Pair, route
from taccl.synth.symmetric.timed_trees import solve_timed_trees
from taccl.synth.symmetric.timing import Timing

TASTES = (
    Taste(),
    Taste(order="late"),
    Taste(from_root=True),
    Taste(order="late", from_root=True),
    Taste(order="late", from_root=True, patience=1.0),
    Taste(order="depth"),
    Taste(order="scarce"),
    Taste(enter_once=False),
    Taste(enter_once=False, order="late"),
    Taste(order="late", patience=0.6),
)
SHUFFLED = (
    Taste(order="late", from_root=True, patience=1.0),
    Taste(order="late"),
    Taste(order="arrival", from_root=True),
    Taste(order="arrival"),
)
FEWEST_SEEDS = 4
# Beyond so many (chunk, link) choices the timed model finds nothing in the time people wait.
MOST_CHOICES = 12_000


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried before the best is taken."""

    work: int = 4_000_000  # looks at (chunk, link) pairs that all seeds together may take
    most_seeds: int = 60
    deterministic_s: float = 0.3  # of CP-SAT
    batch_work: int = 3_000_000  # looks at (chunk, link) pairs that all batched growths together may take
    most_batches: int = 150
    spend: Callable[[int], None] = lambda looks: None  # hears of the looks of each growth


def turned_instance(inst: Instance) -> Instance:
    """The same machine with every link turned round; resources keep their numbers."""
    links = replace(inst.links, src=inst.links.dst, dst=inst.links.src)
    return instance(inst.topology, links, inst.quotient, inst.prices)


def solve_spread(
    inst: Instance,
    roots: Sequence[int],
    lower_fs: int,
    effort: Effort,
    seed: int,
    should_stop: Callable[[], bool],
    finish: Callable[[Sequence[RepHop]], tuple[Sequence[RepHop], Timing]],
) -> tuple[Sequence[RepHop], Timing, str, bool] | None:
    """Spanning trees from the roots. `finish` turns them into the hops that are wanted (collecting, both) and times
    them. Returns (hops, timing, engine, whether the model proved it); None when a rank cannot be reached."""
    best: tuple[Sequence[RepHop], Timing] | None = None
    trees: Sequence[RepHop] = ()
    seeds = min(effort.most_seeds, max(FEWEST_SEEDS, effort.work // max(1, len(roots) * len(inst.out_links))))
    for taste in _tastes(seed)[:seeds]:
        if best is not None and (should_stop() or best[1].time_fs <= lower_fs):
            break
        effort.spend(len(roots) * len(inst.out_links))
        hops = grow(inst, roots, taste)
        if hops is None:
            continue
        made = finish(hops)
        if best is None or made[1].time_fs < best[1].time_fs:
            best, trees = made, hops
    if best is None:
        return None
    usable = _near_links(inst, roots)
    hopeless = effort.deterministic_s == 0 or sum(map(len, usable)) > MOST_CHOICES
    if best[1].time_fs <= lower_fs or hopeless or should_stop():
        return (*best, "greedy", False)
    timing = quickest(inst, trees)
    strategies = [Strategy(effort.deterministic_s, 3600.0, seed, relax=False)]
    found = solve_timed_trees(
        inst,
        roots,
        usable,
        timing.time_fs,
        min(lower_fs, timing.time_fs),
        strategies,
        trees,
        timing.start_fs,
        should_stop,
    )
    if found is None:
        return (*best, "greedy", False)
    made = finish(found.hops)
    if made[1].time_fs < best[1].time_fs:
        return (*made, "cp-sat", found.proved)
    return (*best, "greedy", found.proved)


def solve_paths(inst: Instance, pairs: Sequence[Pair]) -> tuple[Sequence[RepHop], Timing] | None:
    """A path for each pair; None when one is not connected."""
    hops = route(inst, pairs)
    return None if hops is None else (hops, quickest(inst, hops, in_turns=True))


def finish_spread(inst: Instance) -> Callable[[Sequence[RepHop]], tuple[Sequence[RepHop], Timing]]:
    """Allgather, broadcast: the trees as they are."""
    return lambda hops: (hops, quickest(inst, hops))


def finish_collect(inst: Instance) -> Callable[[Sequence[RepHop]], tuple[Sequence[RepHop], Timing]]:
    """Reduce-scatter, reduce: trees that were grown on the turned machine, walked backwards on `inst`."""

    def finish(hops: Sequence[RepHop]) -> tuple[Sequence[RepHop], Timing]:
        collecting = turned(hops)
        return collecting, quickest(inst, collecting)

    return finish


def finish_both(
    inst: Instance, roots: Sequence[int], spreading: Sequence[RepHop]
) -> Callable[[Sequence[RepHop]], tuple[Sequence[RepHop], Timing]]:
    """Allreduce: trees grown on the turned machine collect, then `spreading` spreads the sums."""

    def finish(hops: Sequence[RepHop]) -> tuple[Sequence[RepHop], Timing]:
        joined = collected_then_spread(inst, roots, turned(hops), spreading)
        return joined, quickest(inst, joined)

    return finish


def _tastes(seed: int) -> Sequence[Taste]:
    more = [replace(taste, seed=1 + 1000 * seed + number) for number in range(200) for taste in SHUFFLED]
    return (*TASTES, *more)


def _near_links(inst: Instance, roots: Sequence[int]) -> list[list[int]]:
    """Per chunk the links within nodes, and those that lead from its root to other nodes: to its own place in each,
    where it has such links. All links where these leave out a rank."""
    src, dst = inst.links.src, inst.links.dst
    inside: Ints = inst.node_of[src] == inst.node_of[dst]
    if int(inside.sum()) > MOST_CHOICES:
        return [list(range(MOST_CHOICES + 1))]  # too many to look at
    place = np.zeros(inst.ranks, np.int64)
    for ranks in inst.topology.nodes:
        place[list(ranks)] = np.arange(len(ranks))
    usable = []
    for root in roots:
        out = ~inside & (src == root)
        own = out & (place[dst] == place[root])
        if len(np.unique(inst.node_of[dst[own]])) == len(inst.topology.nodes) - 1:
            out = own
        near = (inside | out) & (dst != root)
        if len(np.unique(dst[near])) < inst.ranks - 1:
            near = dst != root
        usable.append(np.flatnonzero(near).tolist())
    return usable
