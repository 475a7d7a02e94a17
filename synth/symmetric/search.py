"""The search on quotients for one collective at one chunking: which engines, on which symmetry, how long.

Single-chunk trees use the whole group. Batches also look at subgroups: a scheme in which GPU l of every node serves the
node l further on is symmetric under rotations of nodes, but not under rotations within them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.cost import LONG_CHUNK
from taccl.synth.message_table import MessageTable
from taccl.synth.symmetric.batch import Appetite, grow_batches
from taccl.synth.symmetric.digits import digit_routes
from taccl.synth.symmetric.doubling import doubled
from taccl.synth.symmetric.expand import expanded, link_lookup, sorted_by_start
from taccl.synth.symmetric.hops import ChunkOf, RepHop, collected_then_spread, quickest, table, turned
from taccl.synth.symmetric.hops import priced as jobs
from taccl.synth.symmetric.instance import Instance, instance
from taccl.synth.symmetric.merge import merged
from taccl.synth.symmetric.prices import Prices, prices
from taccl.synth.symmetric.quotient import Quotient, quotient, trivial_quotient
from taccl.synth.symmetric.route import Pair, pairs_of
from taccl.synth.symmetric.solve import (
    Effort,
    finish_both,
    finish_collect,
    finish_spread,
    solve_paths,
    solve_spread,
    turned_instance,
)
from taccl.synth.symmetric.timing import Timing, longest_rest

SPREADING = ("allgather", "reducescatter", "allreduce")
PAIRED = ("alltoall", "alltoallv", "gather", "scatter", "sendrecv")
COLLECTIVES = (*SPREADING, *PAIRED, "broadcast", "reduce")

# Batched growths that are tried in any case.
FEWEST_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be scheduled: a collective at one chunking on a machine whose links are known as columns."""

    topology: Topology
    links: LinkTable
    collective: str  # one of COLLECTIVES
    partition: int
    chunk_bytes: Fraction
    root: int = 0
    pairs: tuple[tuple[int, int], ...] = ()  # sendrecv; alltoallv: all with blocks, by source and destination
    generators: tuple[tuple[int, ...], ...] | None = None  # a sketch's symmetry; None: find it
    batching: bool = True  # messages may carry several chunks
    amounts: tuple[int, ...] = ()  # alltoallv: blocks of each pair; with teams: of each root
    teams: tuple[tuple[int, ...], ...] = ()  # groups of ranks with data of their own; forests alone know them


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule on a quotient."""

    engine: str
    inst: Instance
    hops: tuple[RepHop, ...]
    timing: Timing
    names: tuple[tuple[int, ...], ...]  # per representative chunk the ranks that name it
    chunk_of: ChunkOf

    def base(self) -> MessageTable:
        """The messages of representative chunks."""
        return table(self.inst, self.hops, self.timing, self.names, self.chunk_of)

    def messages(self, collective: str, partition: int) -> MessageTable:
        """All messages, by (start, link, chunks)."""
        inst = self.inst
        elements = np.arange(inst.quotient.group.order, dtype=np.int64)
        lookup = link_lookup(inst.links, inst.ranks)
        everything = expanded(
            self.base(), inst.quotient.group, elements, collective, inst.ranks, partition, lookup
        )
        return sorted_by_start(everything)


def search(
    task: Task, lower_fs: int, effort: Effort, seed: int, should_stop: Callable[[], bool]
) -> Iterator[Found]:
    """Schedules as they are found, each quicker than those before."""
    priced = prices(task.topology, task.links, task.chunk_bytes)
    best_fs: int | None = None
    for found in _attempts(task, priced, lower_fs, effort, seed, should_stop):
        if best_fs is None or found.timing.time_fs < best_fs:
            best_fs = found.timing.time_fs
            yield found
        if best_fs <= lower_fs or should_stop():
            return


def _attempts(
    task: Task, priced: Prices, lower_fs: int, effort: Effort, seed: int, should_stop: Callable[[], bool]
) -> Iterator[Found]:
    if task.collective in PAIRED:
        yield from _paired(task, priced)
        return
    rooted = task.collective not in SPREADING
    whole = trivial_quotient(task.topology, task.links)
    if not rooted:
        whole = quotient(task.topology, task.links, task.generators)
    inst = instance(task.topology, task.links, whole, priced)
    short = task.batching and effort.most_batches and _batches_pay(priced)
    if short:
        yield from _doubled(task, inst)
    trees = _trees(task, inst, lower_fs, effort, seed, should_stop)
    batches = (
        found
        for smaller in _subgroups(task, whole)
        for found in _batched(
            task, instance(task.topology, task.links, smaller, priced), effort, seed, should_stop
        )
    )
    if not short:
        yield from trees
    elif _alpha_dominates(priced):
        yield from itertools.chain(batches, trees)
    else:
        yield from itertools.chain(trees, batches)


def _roots(task: Task, inst: Instance) -> tuple[list[int], tuple[tuple[int, ...], ...], ChunkOf]:
    k = task.partition
    block = block_of(task)
    roots = [task.root] * k
    if task.collective in SPREADING:
        roots = [rank for rank in inst.representatives for _ in range(k)]
    return roots, tuple((rank,) for rank in roots), lambda names, chunk: block(names) * k + chunk % k


def block_of(task: Task) -> Callable[[tuple[int, ...]], int]:
    """The number of the (first) block that ranks name: its only chunk when blocks are not cut."""
    n = task.topology.ranks
    number = {pair: place for place, pair in enumerate(task.pairs)}
    first = dict(zip(task.pairs, itertools.accumulate(task.amounts, initial=0), strict=False))
    if task.collective in SPREADING:
        return lambda names: names[0]
    paired: dict[str, Callable[[tuple[int, ...]], int]] = {
        "alltoall": lambda names: names[0] * n + names[1],
        "alltoallv": lambda names: first[names[0], names[1]],
        "gather": lambda names: names[0],
        "scatter": lambda names: names[1],
        "sendrecv": lambda names: number[names[0], names[1]],
    }
    return paired.get(task.collective, lambda names: 0)


def _trees(
    task: Task, inst: Instance, lower_fs: int, effort: Effort, seed: int, should_stop: Callable[[], bool]
) -> Iterator[Found]:
    roots, names, chunk_of = _roots(task, inst)
    if task.collective in ("allgather", "broadcast"):
        solved = solve_spread(inst, roots, lower_fs, effort, seed, should_stop, finish_spread(inst))
    else:
        back = turned_instance(inst)
        finish = finish_collect(inst)
        if task.collective == "allreduce":
            spread = solve_spread(inst, roots, 0, effort, seed, should_stop, finish_spread(inst))
            if spread is None:
                return
            finish = finish_both(inst, roots, spread[0])
        solved = solve_spread(back, roots, lower_fs, effort, seed, should_stop, finish)
    if solved is not None:
        hops, timing, engine, _ = solved
        yield Found(engine, inst, tuple(hops), timing, names, chunk_of)


def _doubled(task: Task, inst: Instance) -> Iterator[Found]:
    """Rounds of growing distance, each way of writing addresses."""
    roots, names, chunk_of = _roots(task, inst)
    hops: list[list[RepHop]] = []
    if task.collective in ("allgather", "broadcast", "allreduce"):
        hops = _quickest_of(inst, doubled(inst, roots))
    if task.collective != "allgather" and task.collective != "broadcast":
        back = turned_instance(inst)
        collecting = [turned(found) for found in _quickest_of(back, doubled(back, roots))]
        if task.collective == "allreduce":
            hops = [
                collected_then_spread(inst, roots, into, out)
                for into, out in zip(collecting, hops, strict=False)
            ]
        else:
            hops = collecting
    for found in hops:
        yield Found("batched", inst, tuple(found), quickest(inst, found), names, chunk_of)


def _quickest_of(inst: Instance, ways: Iterable[list[RepHop]]) -> list[list[RepHop]]:
    """The quickest, alone in a list; none of none."""
    return sorted(ways, key=lambda hops: quickest(inst, hops).time_fs)[:1]


def _batched(
    task: Task, inst: Instance, effort: Effort, seed: int, should_stop: Callable[[], bool]
) -> Iterator[Found]:
    roots, names, chunk_of = _roots(task, inst)
    kinds = {"allgather": "s", "broadcast": "s", "reducescatter": "c", "reduce": "c", "allreduce": "cs"}
    kind = kinds[task.collective]
    best: dict[str, tuple[int, list[RepHop]]] = {}
    machines = {"s": inst, "c": turned_instance(inst)}
    count = effort.batch_work // max(1, len(roots) * len(inst.out_links))
    for appetite in _appetites(min(effort.most_batches, max(FEWEST_BATCHES, count)), seed):
        if should_stop():
            break
        for side in kind:
            effort.spend(len(roots) * len(inst.out_links))
            grown = grow_batches(machines[side], roots, appetite)
            if grown is not None and (side not in best or grown[1] < best[side][0]):
                best[side] = (grown[1], grown[0])
    if any(side not in best for side in kind):
        return
    hops = best["s"][1] if "s" in kind else []
    if "c" in kind:
        collecting = turned(best["c"][1])
        hops = collected_then_spread(inst, roots, collecting, hops) if "s" in kind else collecting
    yield Found("batched", inst, tuple(hops), quickest(inst, hops), names, chunk_of)


def _appetites(count: int, seed: int) -> Iterator[Appetite]:
    draw = random.Random(seed)
    yield Appetite()
    yield Appetite(enter_once=True)
    for number in range(2, count):
        yield Appetite(
            eagerness=draw.choice((0.5, 1.0, 1.0, 1.5, 2.0, 3.0)),
            patience=(draw.choice((1, 1, 2, 3, 4, 6, 8, 12, 16)), draw.choice((1, 1, 1, 2, 3))),
            enter_once=draw.random() < 0.6,
            noise=draw.choice((0.0, 0.3, 1.0)),
            seed=number,
        )


def _subgroups(task: Task, whole: Quotient) -> Iterator[Quotient]:
    yield whole
    generators = whole.group.generators
    if len(generators) > 1:
        for generator in generators:
            yield quotient(task.topology, task.links, [generator])


def _batches_pay(priced: Prices) -> bool:
    """Whether for some link company saves more than rounding."""
    transit = priced.chunk_fs
    return bool(((priced.occupancy_fs > 0) & (transit < LONG_CHUNK * priced.occupancy_fs)).any())


def _alpha_dominates(priced: Prices) -> bool:
    """Whether one chunk costs more for being a message than for its bytes, on most links."""
    return bool(np.median(priced.chunk_fs) <= np.median(priced.occupancy_fs))


def pairs_at(task: Task, inst: Instance) -> list[Pair]:
    """Who sends to whom, up to the instance's symmetry."""
    if task.collective == "alltoall":
        return pairs_of(inst)
    others = [rank for rank in range(task.topology.ranks) if rank != task.root]
    return {
        "gather": [Pair(rank, task.root) for rank in others],
        "scatter": [Pair(task.root, rank) for rank in others],
    }.get(task.collective, [Pair(src, dst) for src, dst in task.pairs if src != dst])


def amount_of(task: Task, pair: Pair) -> int:
    """Blocks that go from one rank to another."""
    return task.amounts[task.pairs.index((pair.src, pair.dst))] if task.amounts else 1


def _paired(task: Task, priced: Prices) -> Iterator[Found]:
    k = task.partition
    symmetry = trivial_quotient(task.topology, task.links)
    if task.collective == "alltoall":
        symmetry = quotient(task.topology, task.links, task.generators)
    inst = instance(task.topology, task.links, symmetry, priced)
    pairs = pairs_at(task, inst)
    block = block_of(task)
    repeated = [pair for pair in pairs for _ in range(k * amount_of(task, pair))]
    within = [place for pair in pairs for place in range(k * amount_of(task, pair))]

    def chunk_of(names: tuple[int, ...], chunk: int) -> int:
        return block(names) * k + within[chunk]

    solved = solve_paths(inst, repeated)
    if solved is not None:
        names = tuple((pair.src, pair.dst) for pair in repeated)
        yield Found("load-first", inst, tuple(solved[0]), solved[1], names, chunk_of)
    if solved is None or not task.batching or not _batches_pay(priced):
        return
    for routes in (solved[0], *digit_routes(inst, repeated)):
        for order in (list(range(len(routes))), longest_rest(jobs(inst, routes))):
            messages, timing = merged(inst, routes, order)
            yield Found("batched", inst, tuple(messages), timing, names, chunk_of)
