"""Schedules for the bandwidth regime at the chunkings that suit them: fluid optimum, whole chunks, pipeline.

Deeper trees carry more, and finer chunks hide the depth but pay alpha more often. An estimate, load of the fullest
resource plus one chunk's way down the deepest tree, says where to begin; neighbours are tried as long as that helps.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from taccl.synth.forest.fluid import PATIENCE, Floats, Forest, Side, evenly, fluid_optima
from taccl.synth.forest.pipeline import piped
from taccl.synth.forest.rails import rails
from taccl.synth.forest.rerooted import rerooted
from taccl.synth.forest.rounding import evened, whole_chunks
from taccl.synth.forest.shallow import shallow_trees
from taccl.synth.symmetric.hops import ChunkOf
from taccl.synth.symmetric.instance import Instance, instance
from taccl.synth.symmetric.prices import Prices, prices
from taccl.synth.symmetric.quotient import Quotient, quotient, trivial_quotient
from taccl.synth.symmetric.search import PAIRED, SPREADING, Found, Task, amount_of, block_of, pairs_at
from taccl.synth.symmetric.solve import turned_instance

COLLECTIVES = (*SPREADING, *PAIRED, "broadcast", "reduce")
# The collective of all ranks whose trees serve one root as well.
SAME_TREES = {"broadcast": "allgather", "reduce": "reducescatter"}
# Those in which all ranks do alike.
SYMMETRIC = (*SPREADING, "alltoall")
ENGINE = "forest"
Usable = Callable[[tuple[int, ...], bool], NDArray[np.bool_]]
# Deeper trees must carry this fraction more.
WORTHWHILE = 0.002
# Beyond so many ranks each limit on depth takes seconds, and the least never carry much; nor does a cut into few chunks
# without rounding exist.
FEW_RANKS = 32
# Messages under way on a link at once, beyond which slots of FIFOs would hold them up: two on each of four connections.
UNDER_WAY = 8
# Times as many messages as a schedule may have.
TOO_MANY = 4
# A block whose transit is shorter than so many alphas is not worth trees of its own.
LONG_BLOCK = 4
# Ranks that only pass on, on a way down a tree that reaches some ranks alone.
MOST_RELAYS = 2
# Up to so many ranks an allreduce gives up symmetry for the choice of how much each rank sums up.
MOST_FREE_RANKS = 32


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried."""

    most_messages: int = 4_000  # of one schedule on the whole machine
    most_refined: int = (
        0  # the same for the best trees, where chunks of one root are not small enough by then
    )
    most_cuts: int = 1_000  # chunks a block
    most_even: int = 16  # chunks a block for which trees that need no rounding are sought
    deterministic_s: float = 0.02  # of CP-SAT, for each rounding
    shallow_s: float = 1.0  # of CP-SAT, for trees of least depth


def forests(
    task: Task,
    most: int,
    effort: Effort,
    seed: int,
    should_stop: Callable[[], bool],
    usable: Usable | None = None,
) -> Iterator[tuple[int, Found]]:
    """(partition, schedule), the deepest trees first. `task` is at partition 1.

    most: chunks a block, or 0 for as many as `effort` allows; a negative number asks for exactly so many.
    usable: (root or pair of ranks, whether the trees collect) -> links that may be used; None: all, with symmetry.
    """
    whole = trivial_quotient(task.topology, task.links)
    if task.collective not in SYMMETRIC or usable is not None or task.teams:
        yield from _forests(task, whole, False, most, effort, seed, should_stop, usable)
        return
    best = quotient(task.topology, task.links, task.generators)
    yield from _forests(task, best, False, most, effort, seed, should_stop, None)
    if task.collective == "allreduce" and best.group.orbits > 1 and task.topology.ranks <= MOST_FREE_RANKS:
        # Ranks that differ may sum up different amounts. Images of one chunk are numbered by rank, which forbids that.
        yield from _forests(task, whole, True, most, effort, seed, should_stop, None)


def pays(task: Task) -> bool:
    """Whether blocks take longer than the alpha of their messages on some link, so that load decides."""
    priced = prices(task.topology, task.links, task.chunk_bytes)
    return bool((priced.chunk_fs > LONG_BLOCK * priced.alpha_fs).any())


def _forests(
    task: Task,
    symmetry: Quotient,
    free: bool,
    most: int,
    effort: Effort,
    seed: int,
    should_stop: Callable[[], bool],
    usable: Usable | None,
) -> Iterator[tuple[int, Found]]:
    priced = prices(task.topology, task.links, task.chunk_bytes)
    block = instance(task.topology, task.links, symmetry, priced)
    names, sides = _sides(task, block, usable)
    hops = [
        side.amount * (2 if side.target >= 0 else len(side.members or range(block.ranks)) - 1)
        for side in sides
    ]
    least = sum(hops) * symmetry.group.order
    if least > TOO_MANY * effort.most_messages:
        return  # blocks are many and small already
    finest = max(1, min(effort.most_cuts, effort.most_messages // max(1, least), _held_back(block)))
    cuts = [-most] if most < 0 else grid(1, min(most, finest) if most else finest)
    holds = _holds(block, _nominal(block, cuts))
    weights = [1] * len(names)
    first: list[list[dict[int, int]]] = []
    shallow: list[Forest] = []
    if task.collective in SAME_TREES and usable is None and not task.teams:
        found = shallow_trees(task.topology, task.root, task.collective == "reduce", effort.shallow_s)
        if found and most >= 0 and len(found) <= cuts[-1]:
            shallow = [evenly(sides[0], found, holds)]
        first = hung_on_the_root(task, block, cuts, seed, should_stop)
    hung = [parents for images in first for parents in images]
    depths = _depths(block.ranks)
    if task.teams:
        most_links = max(len(team) for team in task.teams) - 1 + MOST_RELAYS
        depths = [depth for depth in depths if depth <= most_links]
    # The fullest resources of groups apart are equally full: the time falls only once all of them have better trees.
    patience = 2 * (PATIENCE + len(sides)) if task.teams else PATIENCE
    evens = [evenly(sides[0], images, holds) for images in first if most >= 0 and len(images) <= cuts[-1]]
    evens.sort(key=lambda forest: -forest.time)

    def candidates() -> Iterator[Forest]:
        yield from shallow
        # The linear program of a large machine takes longer than people wait for a first answer.
        if block.ranks > FEW_RANKS:
            yield from _different(evens)
        if not should_stop():
            yield from _different(
                fluid_optima(
                    sides, weights, len(names), free, holds, depths, seed, should_stop, hung, patience
                )
            )
        if block.ranks <= FEW_RANKS:
            yield from _different(evens)

    best_fs: int | None = None
    best: tuple[Forest, Sequence[int], int] | None = None
    for forest in candidates():
        plans = [(forest, cuts)]
        if forest in evens or forest in shallow:
            plans = [(forest, grid(len(forest.trees), cuts[-1]))]
        elif most >= 0 and block.ranks <= FEW_RANKS and not should_stop():
            even = evened(block, sides, forest, free, min(effort.most_even, cuts[-1]), effort.deterministic_s)
            if even is not None:
                plans.append((even[1], grid(even[0], cuts[-1])))
        for trees, partitions in plans:
            # Alpha is paid at least once: no schedule of these trees is quicker.
            if best_fs is not None and _load(trees, _holds(block, 1), block) >= best_fs:
                continue
            for k, made in _climb(task, block, names, sides, free, trees, partitions, effort, should_stop):
                if best_fs is None or made.timing.time_fs < best_fs:
                    best_fs, best = made.timing.time_fs, (trees, partitions, k)
                yield k, made
            if should_stop():
                return
    if best is not None and best[2] == best[1][-1] and len(best[1]) > 1:
        # As fine as it might be, and finer was better all along.
        finest = min(
            effort.most_cuts,
            most or effort.most_cuts,
            effort.most_refined // max(1, least),
            _held_back(block),
        )
        finer = [k for k in grid(best[1][0], finest) if k > best[2]]
        if finer:
            yield from _climb(task, block, names, sides, free, best[0], finer, effort, should_stop)


def hung_on_the_root(
    task: Task, block: Instance, cuts: Sequence[int], seed: int, should_stop: Callable[[], bool]
) -> list[list[dict[int, int]]]:
    """Sets of trees for a rooted collective: rails from node to node, and the trees of the collective in which every
    rank is a root, hung on the task's root, with their images."""
    cost = np.full((block.ranks, block.ranks), np.inf)
    grown = _sides(task, block, None)[1][0].inst
    np.minimum.at(
        cost, (grown.links.src, grown.links.dst), np.array(grown.lane_transit_fs, float)[grown.lane]
    )
    found: list[list[dict[int, int]]] = rails(task.topology, cost, task.root)
    symmetry = quotient(task.topology, task.links, task.generators)
    if symmetry.group.order == 1:
        return found
    every = replace(task, collective=SAME_TREES[task.collective])
    alike = instance(task.topology, task.links, symmetry, block.prices)
    names, sides = _sides(every, alike, None)
    holds = _holds(alike, _nominal(alike, cuts))
    weights = [1] * len(names)
    optima = fluid_optima(sides, weights, len(names), False, holds, _depths(alike.ranks), seed, should_stop)
    trees = [tree for forest in optima for tree in forest.trees]
    hung = [rerooted([tree], sides, symmetry.group, cost, task.root) for tree in trees]
    return [*found, *(images for images in hung if images)]


def _climb(
    task: Task,
    block: Instance,
    names: Sequence[tuple[int, ...]],
    sides: Sequence[Side],
    free: bool,
    forest: Forest,
    partitions: Sequence[int],
    effort: Effort,
    should_stop: Callable[[], bool],
) -> Iterator[tuple[int, Found]]:
    """From the chunking of the best estimate to finer or coarser ones as long as that helps."""
    both = 2 if task.collective == "allreduce" else 1
    depth = max(tree.depth for tree in forest.trees) * both
    loads = [_load(forest, _holds(block, k), block) for k in partitions]
    slowest = [
        max(a + (t - a) / k for a, t in zip(block.lane_alpha_fs, block.lane_transit_fs, strict=True))
        for k in partitions
    ]
    estimates = [load + depth * chunk for load, chunk in zip(loads, slowest, strict=True)]
    start = min(range(len(partitions)), key=lambda i: (estimates[i], i))
    times: dict[int, int] = {}

    def made(at: int) -> Found:
        k = partitions[at]
        inst = _at(task, block, k)
        counts = whole_chunks(inst, sides, forest, k, free, effort.deterministic_s)
        hops, groups, timing = piped(inst, sides, forest.trees, counts, loads[at])
        times[at] = timing.time_fs
        named = tuple(names[group] for group in groups)
        return Found(ENGINE, inst, tuple(hops), timing, named, _numbering(task, groups, k, free))

    yield partitions[start], made(start)
    for step in (-1, 1):
        at = start + step
        while 0 <= at < len(partitions) and not should_stop():
            yield partitions[at], made(at)
            if times[at] >= times[at - step]:
                break
            at += step
        if at - step != start:
            return


def _held_back(block: Instance) -> int:
    """The most chunks a block before a link would have more messages under way than FIFOs have slots."""
    most = sys.maxsize
    for alpha, occupancy, transit in zip(
        block.lane_alpha_fs, block.lane_occupancy_fs, block.lane_transit_fs, strict=True
    ):
        if alpha > UNDER_WAY * occupancy:
            most = min(most, (UNDER_WAY - 1) * (transit - alpha) // (alpha - UNDER_WAY * occupancy))
    return max(1, most)


def grid(step: int, most: int) -> list[int]:
    """Numbers of chunks a block worth looking at: multiples of `step` up to `most`, ever further apart."""
    found, factor = [step], 1.0
    while True:
        factor = max(factor + 1, factor * 1.25)
        if step * int(factor) > most:
            return found
        found.append(step * int(factor))


def _different(optima: Sequence[Forest]) -> list[Forest]:
    """Deeper forests only where they carry more."""
    kept: list[Forest] = []
    for forest in optima:
        if not kept or forest.time < kept[-1].time * (1 - WORTHWHILE):
            kept.append(forest)
    return kept[::-1]


def _sides(task: Task, inst: Instance, usable: Usable | None) -> tuple[list[tuple[int, ...]], list[Side]]:
    """(per group the ranks that name its blocks, sides)."""
    if task.collective in PAIRED:
        pairs = pairs_at(task, inst)

        def path(group: int, src: int, dst: int) -> Side:
            links = usable((src, dst), False) if usable else None
            return Side(inst, src, group, False, links, dst, amount_of(task, pairs[group]))

        return (
            [(pair.src, pair.dst) for pair in pairs],
            [path(group, pair.src, pair.dst) for group, pair in enumerate(pairs)],
        )
    roots = list(inst.representatives) if task.collective in SPREADING else [task.root]
    reached: list[tuple[int, ...]] = [()] * len(roots)
    if task.teams:
        roots = team_roots(task)
        home = {rank: team for team in task.teams for rank in team}
        reached = [home[root] for root in roots]

    def tree(on: Instance, group: int, collects: bool) -> Side:
        root = roots[group]
        links = usable((root,), collects) if usable else None
        amount = task.amounts[group] if task.teams else 1
        if len(reached[group]) == 2:
            (other,) = (rank for rank in reached[group] if rank != root)
            return Side(on, root, group, collects, links, other, amount)
        return Side(on, root, group, collects, links, -1, amount, reached[group])

    names: list[tuple[int, ...]] = [(root,) for root in roots]
    groups = range(len(roots))
    sides: list[Side] = []
    if task.collective not in ("allgather", "broadcast"):
        back = turned_instance(inst)
        sides += [tree(back, group, True) for group in groups]
    if task.collective not in ("reducescatter", "reduce"):
        sides += [tree(inst, group, False) for group in groups]
    return names, sides


def team_roots(task: Task) -> list[int]:
    """The ranks that blocks of teams are named by: every member, or the root of each."""
    if task.collective in SPREADING:
        return [rank for team in task.teams for rank in team]
    return [team[task.root] for team in task.teams]


def _depths(ranks: int) -> list[int]:
    depths = []
    depth = 1 if ranks <= FEW_RANKS else 4
    while depth < ranks - 1:
        depths.append(depth)
        depth = max(depth + 1, depth * 3 // 2)
    return [*depths, max(1, ranks - 1)]


def _nominal(inst: Instance, partitions: Sequence[int]) -> int:
    """The chunking at which the linear program is priced: where alpha paid again equals what a pipeline wins."""
    transit = max(inst.lane_transit_fs)
    occupancy = max(1, *inst.lane_occupancy_fs)
    wanted = math.isqrt(max(1, 3 * transit // occupancy))
    return min(partitions, key=lambda k: abs(k - wanted))


def _holds(inst: Instance, partition: int) -> Floats:
    """[lane, resource] how long a block in `partition` messages holds a resource."""
    resources = 1 + max((r for holds in inst.lane_holds for r, _ in holds), default=0)
    table = np.zeros((len(inst.lane_holds), resources))
    for lane, holds in enumerate(inst.lane_holds):
        for resource, hold in holds:
            table[lane, resource] += hold + (partition - 1) * inst.lane_occupancy_fs[lane]
    return table


def _load(forest: Forest, holds: Floats, inst: Instance) -> float:
    load = np.zeros(holds.shape[1])
    for tree, share in zip(forest.trees, forest.shares, strict=True):
        load += share * holds[inst.lane[list(tree.links)]].sum(axis=0)
    return float(load.max())


def _at(task: Task, block: Instance, partition: int) -> Instance:
    priced: Prices = prices(task.topology, task.links, task.chunk_bytes / partition)
    return instance(task.topology, task.links, block.quotient, priced)


def _numbering(task: Task, groups: Sequence[int], partition: int, free: bool) -> ChunkOf:
    """Which chunk of the collective each image of a representative chunk is.

    Blocks belong to those that name them. Where an allreduce is free to choose amounts they are numbered as they come.
    """
    if free:
        return lambda names, chunk: chunk
    started: dict[int, int] = {}
    within = [number - started.setdefault(group, number) for number, group in enumerate(groups)]
    if task.teams:
        firsts = dict(zip(team_roots(task), itertools.accumulate(task.amounts, initial=0), strict=False))
        return lambda names, chunk: firsts[names[0]] * partition + within[chunk]
    block = block_of(task)
    return lambda names, chunk: block(names) * partition + within[chunk]
