"""Seeds of a search that are schedules of their own: on quotients, composed of nodes, forests, greedy trees.

Each stage makes schedules of one kind for one request and offers them to the `Search`, which times and keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link_table import link_table
from taccl.profiles.topology import reverse
from taccl.synth.candidates import Candidate
from taccl.synth.cluster.compose import compose, composes
from taccl.synth.cluster.lengths import lengths
from taccl.synth.collective import refined
from taccl.synth.cost import Costs
from taccl.synth.counted import COMPOSED_S, CUT_S, FORESTS_SHARE, GREEDY_S, LOOK_S, PIPED_S, STATED_S
from taccl.synth.engines.greedy import funnelled, greedy, tastes
from taccl.synth.forest.search import COLLECTIVES as FOREST_COLLECTIVES
from taccl.synth.forest.search import Effort as ForestEffort
from taccl.synth.forest.search import forests
from taccl.synth.message_table import messages_of
from taccl.synth.models.orbits import close, identity
from taccl.synth.models.packing import refine
from taccl.synth.pairs import Pairs, blocks_of_groups, pairs_of_groups
from taccl.synth.problem import Problem, Symmetry, problem
from taccl.synth.schedule import Transfer, as_transfers
from taccl.synth.search import Search
from taccl.synth.symmetric.prices import LONGEST_FS
from taccl.synth.symmetric.search import PAIRED, Task
from taccl.synth.symmetric.search import search as search_quotient
from taccl.synth.symmetric.solve import Effort

# A finer cut must pay: tiny chunks cost steps and channels that the cost model does not see.
LEAST_CHUNK_BYTES = 256
WORTHWHILE = 0.995
# What seeds may do for each second of the limit, counted so that the answer does not depend on the clock: looks at
# (chunk, link) pairs on the quotient, for trees and for batches, at each chunking.
LOOKS_PER_WALL = 3_000
BATCH_LOOKS_PER_WALL = 8_000
# Transfers that the search for lengths of messages between nodes may time, for each second of the limit.
LENGTHS_PER_WALL = 800
# To share a message, chunks must be free to make a detour of so many hops over the rank that sends it.
DETOUR = 4
# Beyond this many messages lowering would need more channels and steps than a GPU has.
MOST_MESSAGES = 4_000
# Chunks down a few trees out of one root: a pipeline through many ranks needs them small.
MOST_PIPELINED = 16_000
ROOTED = ("broadcast", "reduce")
# Of the limit by the clock, where a slow machine takes long for forests: baselines want their turn.
FORESTS_SHARE_BY_CLOCK = 0.8


def quotient(search: Search, name: str, p: Problem, root: int, pairs: Pairs) -> None:
    """Schedules of representatives under the machine's symmetry, expanded; `name` is one of COLLECTIVES."""
    if search.should_stop():
        return
    if p.collective.groups:
        if name not in PAIRED:
            return  # quotients know blocks of all ranks, and blocks between pairs
        name, root, pairs = "alltoallv", 0, pairs_of_groups(search.build(1))
    priced = p.costs
    if not _in_columns(priced):
        return  # its columns have no room for such times; the other engines count without limit
    partition = p.collective.partition
    task = Task(
        search.topology, link_table(search.topology), name, partition, p.costs.chunk_bytes, root, pairs.ends,
        search.generators if search.restrictions.symmetry is not None else None, search.batching, pairs.amounts,
    )  # fmt: skip
    effort = Effort(
        work=min(200_000, round(LOOKS_PER_WALL * search.budget_s)),
        most_seeds=24,
        deterministic_s=0.0,
        batch_work=min(500_000, round(BATCH_LOOKS_PER_WALL * search.budget_s)),
        most_batches=60,
        spend=lambda looks: search.spend(LOOK_S * looks),
    )
    for found in search_quotient(task, search.lower_fs, effort, search.seed, search.finished):
        messages = messages_of(found.messages(name, partition))
        transfers = tuple(as_transfers(messages))
        candidate = Candidate(found.engine, p.collective, transfers, messages, found.timing.time_fs)
        search.accept(p, candidate)
        search.offer(found.engine, p, transfers)


def _narrowed(search: Search) -> bool:
    """Whether a sketch leaves chunks fewer ways than the topology has."""
    return bool(search.restrictions.rules) or search.restrictions.extra_hops is not None


def composed(search: Search, name: str, p: Problem, pairs: Pairs) -> None:
    """Schedules composed of nodes, where the collective and the machine are of that kind."""
    priced = p.costs
    if not _in_columns(priced) or _narrowed(search) or not composes(search.topology, name):
        return
    task = Task(
        search.topology, link_table(search.topology), name, p.collective.partition, priced.chunk_bytes, 0, pairs.ends,
        None, search.batching, pairs.amounts,
    )  # fmt: skip
    for found in compose(task, search.lower_fs, search.finished):
        messages = messages_of(found.messages)
        transfers = tuple(as_transfers(messages))
        search.spend(COMPOSED_S * len(messages))
        search.accept(p, Candidate(found.engine, p.collective, transfers, messages, found.time_fs))


def chosen_lengths(search: Search, name: str, wanted: int | None) -> None:
    """Allgathers and reduce-scatters between nodes with messages of chosen lengths; wanted: the chunking that is
    asked for."""
    if name not in ("allgather", "reducescatter") or not search.batching or search.should_stop():
        return
    if not composes(search.topology, name):
        return
    priced = search.problem(1).costs
    if not _in_columns(priced) or _narrowed(search):
        return
    turned = reverse(search.topology) if name == "reducescatter" else search.topology
    work = round(LENGTHS_PER_WALL * search.budget_s)
    search.spend(CUT_S * work)
    for found in lengths(turned, priced.chunk_bytes, wanted, work, search.finished):
        p = search.problem(found.partition)
        if name == "allgather":
            transfers = tuple(as_transfers(found.messages))
            search.accept(p, Candidate("lengths", p.collective, transfers, found.messages, found.time_fs))
        else:
            # What spreads on links turned round collects on the links, last arrival first.
            backwards = sorted(found.messages, key=lambda m: (-m.end_fs, -m.start_fs, m.link))
            search.offer("lengths", p, [Transfer(m.link, m.chunks, "reduce") for m in backwards])


def forest(search: Search, name: str, root: int, pairs: Pairs, wanted: int | None) -> None:
    """Trees of the fluid optimum in whole chunks, pipelined; wanted: the chunking that is asked for."""
    if search.should_stop() or name not in FOREST_COLLECTIVES or not search.topology.links:
        return
    stated = search.problem(1)
    priced = stated.costs
    if not _in_columns(priced):
        return
    blocks = stated.collective.size_chunks
    teams = stated.collective.groups
    if teams and name in PAIRED:
        name, root, pairs, teams = "alltoallv", 0, pairs_of_groups(stated.collective), ()
    elif teams:
        pairs = Pairs((), blocks_of_groups(stated.collective))
    task = Task(
        search.topology, link_table(search.topology), name, 1, priced.chunk_bytes, root, pairs.ends,
        search.generators if search.restrictions.symmetry is not None else None, search.batching, pairs.amounts,
        teams,
    )  # fmt: skip
    usable = _usable(stated) if _narrowed(search) else None
    most = -wanted if wanted else max(1, search.size_bytes // (blocks * LEAST_CHUNK_BYTES))
    effort = ForestEffort(most_refined=MOST_PIPELINED if name in ROOTED else 0)
    for partition, found in forests(task, most, effort, search.seed, partial(_forests_done, search), usable):
        messages = messages_of(found.messages("groups" if teams else name, partition))
        search.spend(PIPED_S * len(messages))
        p = search.problem(partition)
        candidate = Candidate(
            found.engine, p.collective, tuple(as_transfers(messages)), messages, found.timing.time_fs
        )
        search.accept(p, candidate)


def _forests_done(search: Search) -> bool:
    """Whether forests must leave the rest of a limit to others."""
    slow = search.left_s() < (1 - FORESTS_SHARE_BY_CLOCK) * search.limit_s
    return search.finished() or slow or not search.work_left(FORESTS_SHARE)


def greedy_trees(search: Search, p: Problem, passes: int) -> None:
    """Greedy trees in several tastes, with and without the symmetry."""
    group: list[Symmetry] = (close([identity(p), *p.symmetries], 256) or []) if p.symmetries else []
    wide = search.restrictions
    if wide.extra_hops is None:
        wide = replace(wide, extra_hops=DETOUR)
    narrow = funnelled(problem(search.topology, p.collective, search.size_bytes, wide))
    for taste in tastes(2, search.seed) if narrow is not None else ():
        assert narrow is not None
        search.spend(GREEDY_S * narrow.hops)
        grown = greedy(narrow, taste)
        if grown is not None:
            search.offer("greedy", p, grown)
    for taste in tastes(passes, search.seed):
        if search.finished() or search.seeds_spent():
            return
        for images in [group, []] if len(group) > 1 else [[]]:
            search.spend(GREEDY_S * p.hops)
            grown = greedy(p, taste, images)
            if grown is not None:
                search.offer("greedy", p, grown)


def cut_finer(search: Search, candidate: Candidate, engine: str) -> None:
    """Cut every chunk of a candidate finer and keep its routes, as long as that pays."""
    if candidate.engine == "lengths":
        return  # these were cut already
    if search.fixed_partition or any(not t.plain for t in candidate.transfers):
        return
    parts, last = 2, candidate.time_fs
    while len(candidate.transfers) * parts <= MOST_MESSAGES and not search.finished():
        cut = refined(candidate.collective, parts)
        if cut.chunk_bytes(search.size_bytes) < LEAST_CHUNK_BYTES:
            return
        finer = problem(search.topology, cut, search.size_bytes, search.restrictions)
        search.spend(STATED_S * finer.hops)
        times = []
        for by_part in (True, False):
            split = refine(candidate.transfers, parts, finer.collective, by_part)
            offered = search.offer(engine, finer, split)
            if offered:
                times.append(offered.time_fs)
        if not times or min(times) > last * WORTHWHILE:
            return
        last = min(times)
        parts *= 2


def _in_columns(priced: Costs) -> bool:
    """Whether times are short enough for those who keep them in columns of whole numbers."""
    reducing = (priced.reduce_alpha_fs, priced.reduce_chunk_fs)
    return max(*priced.alpha_fs, *priced.chunk_fs, *reducing) <= LONGEST_FS


def _usable(p: Problem) -> Callable[[tuple[int, ...], bool], NDArray[np.bool_]]:
    """Which links trees of a root, or paths between two ranks, may use, spreading or collecting."""
    allowed: dict[tuple[bool, tuple[int, ...]], tuple[int, ...]] = {}
    for layer in p.layers:
        for roots, targets, links in zip(layer.roots, layer.targets, layer.usable, strict=True):
            allowed.setdefault((layer.kind == "collect", roots), links)
            allowed.setdefault((layer.kind == "collect", roots + targets), links)

    def usable(names: tuple[int, ...], collects: bool) -> NDArray[np.bool_]:
        mask = np.zeros(len(p.topology.links), bool)
        mask[list(allowed[collects, names])] = True
        return mask

    return usable
