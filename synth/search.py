"""The search behind one request: what was tried, the best so far, and how much time is left.

Stages share this state: `Search.offer` times a list of transfers, keeps it when it is the best and obeys the
sketch; `Search.left_s` says how much of the limit remains. Limits handed to CP-SAT are deterministic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link_table import link_table
from taccl.profiles.topology import Topology, reverse
from taccl.sketches.restrictions import Permutation, Restrictions
from taccl.synth.annealing.search import anneal
from taccl.synth.candidates import Candidate, best_timing, complete, late_fs, obeys
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.cluster.compose import compose, composes
from taccl.synth.cluster.lengths import lengths
from taccl.synth.collective import Collective, refined
from taccl.synth.cost import Costs, judged_fs
from taccl.synth.engines.greedy import Taste, funnelled, greedy, tastes
from taccl.synth.forest.search import COLLECTIVES as FOREST_COLLECTIVES
from taccl.synth.forest.search import Effort as ForestEffort
from taccl.synth.forest.search import forests
from taccl.synth.message_table import messages_of
from taccl.synth.models.messages import solve_messages
from taccl.synth.models.orbits import close, free_group, identity
from taccl.synth.models.packing import pack_trees, refine
from taccl.synth.models.solver import Strategy
from taccl.synth.models.trees import solve_trees
from taccl.synth.pairs import Pairs, blocks_of_groups, pairs_of_groups
from taccl.synth.problem import Layer, Problem, Symmetry, problem, with_symmetry
from taccl.synth.schedule import Transfer, as_transfers
from taccl.synth.symmetric.prices import LONGEST_FS
from taccl.synth.symmetric.search import PAIRED, Task, search
from taccl.synth.symmetric.solve import Effort

Build = Callable[[int], Collective]  # partition -> collective

# Beyond this many (chunk, link) pairs the timed model finds nothing in the time people wait.
MOST_TREE_HOPS = 40_000
MOST_SLOT_VARIABLES = 40_000
# A finer cut must pay: tiny chunks cost steps and channels that the cost model does not see.
LEAST_CHUNK_BYTES = 256
WORTHWHILE = 0.995
# Where ranks share cores no time is known so well: of schedules this near to the best one, that of fewest messages is
# taken.
ALIKE = 1.01
# There a schedule is taken as it is when late messages make it longer by no more.
STEADY = 1.07
# Otherwise one that bears them better is taken, of those whose time and load are no more than so much longer.
NEAR = 1.1
# Without the relaxation CP-SAT counts so little deterministic time that a fraction is as long by the clock.
QUICK_SHARE = 0.15
# Deterministic seconds for a first schedule where the seeds break the sketch's rules.
RESCUE_S = (0.2, 2.0)
# What seeds may do for each second of the limit, counted so that the answer does not depend on the clock: transfers
# timed, and looks at (chunk, link) pairs on the quotient, for trees and for batches, at each chunking.
TIMED_PER_WALL = 3_000
LOOKS_PER_WALL = 3_000
BATCH_LOOKS_PER_WALL = 8_000
# Transfers that the search for lengths of messages between nodes may time, for each second of the limit.
LENGTHS_PER_WALL = 800
# To share a message, chunks must be free to make a detour of so many hops over the rank that sends it.
DETOUR = 4
# Local search starts from the best schedules of so many engines: the second best is sometimes on the better hill.
MOST_STARTS = 3
# Beyond this many messages lowering would need more channels and steps than a GPU has.
MOST_MESSAGES = 4_000
# Chunks down a few trees out of one root: a pipeline through many ranks needs them small.
MOST_PIPELINED = 16_000
ROOTED = ("broadcast", "reduce")
# Of the limit, where a slow machine takes long for forests: baselines want their turn.
FORESTS_SHARE = 0.8


@dataclass(slots=True)
class Search:
    """One request being worked on; mutable on purpose, and alive only inside `synthesise`."""

    topology: Topology
    build: Build
    size_bytes: int
    restrictions: Restrictions
    generators: tuple[Permutation, ...]
    lower_fs: int
    target_gap: float
    workers: int
    seed: int
    budget_s: float  # what counted work is in proportion to
    limit_s: float  # by the clock
    report: Callable[[str, int | None], None]  # (stage, best time in fs)
    should_stop: Callable[[], bool]
    fixed_partition: bool = False  # the author chose the chunking
    batching: bool = True  # messages may carry several chunks
    began: float = field(default_factory=time.monotonic)
    best: Candidate | None = None
    best_of: dict[int, Candidate] = field(default_factory=dict)  # by partition
    of_engine: dict[tuple[int, str], Candidate] = field(default_factory=dict)  # by partition and engine
    # The same by their times with late messages, where ranks share cores.
    steadiest: dict[tuple[int, str], Candidate] = field(default_factory=dict)
    bounds: dict[int, int] = field(default_factory=dict)  # by partition: what a model proved at this chunking
    stated: dict[int, Problem] = field(default_factory=dict)  # by partition
    timed: int = 0  # transfers of all schedules that were offered

    def left_s(self) -> float:
        """Wall-clock seconds until the request's limit."""
        return self.limit_s - (time.monotonic() - self.began)

    def seeds_spent(self, share: float = 1.0) -> bool:
        """Whether seeds have had so much of their share; the models want theirs of a short limit."""
        return self.best is not None and self.timed > share * TIMED_PER_WALL * self.budget_s

    def finished(self) -> bool:
        """Proof, target gap, time limit or the user's word."""
        return self.should_stop() or self.left_s() <= 0 or self.reached()

    def reached(self) -> bool:
        """Proof or target gap."""
        if self.best is None:
            return False
        return self.best.time_fs - self.lower_fs <= max(0.0, self.target_gap) * self.best.time_fs

    def problem(self, partition: int) -> Problem:
        """The problem at a chunking, with those symmetries that it has."""
        if partition not in self.stated:
            stated = problem(self.topology, self.build(partition), self.size_bytes, self.restrictions)
            self.stated[partition] = with_symmetry(stated, self.generators)[0]
        return self.stated[partition]

    def offer(self, engine: str, p: Problem, transfers: Sequence[Transfer]) -> Candidate | None:
        """Time transfers; remember them when they obey the sketch. Returns the candidate if acceptable."""
        if not complete(self.topology, p.collective, transfers):
            return None
        started = p.collective.partition in self.best_of  # the models want a start at every chunking
        if started and self.best is not None and _fullest(p.costs, transfers) >= self.best.time_fs:
            return None  # in whatever order, and with whatever company, they would be no better
        self.timed += len(transfers)
        if not self.batching and any(t.after is None and len(t.chunks) > 1 for t in transfers):
            transfers = _one_chunk_each(transfers)
        candidate = best_timing(engine, self.topology, p.collective, p.costs, transfers, self.batching)
        return self.accept(p, candidate)

    def accept(self, p: Problem, candidate: Candidate | None) -> Candidate | None:
        """Remember a timed schedule when it obeys the sketch and is the best of its chunking."""
        if candidate is not None and not self.batching and any(len(m.chunks) > 1 for m in candidate.messages):
            return None
        if candidate is None or not obeys(self.restrictions, self.topology, p.collective, candidate.messages):
            return None
        key = (p.collective.partition, candidate.engine)
        other, known = self.of_engine.get(key), self.best_of.get(p.collective.partition)
        better = other is None or self.judged_fs(candidate) < self.judged_fs(other)
        quickest = known is None or candidate.time_fs < known.time_fs
        # Exchanges and shared messages can reduce a contribution twice when their times fall badly.
        matters = quickest or (better and self.topology.load_us > 0)
        if matters and check_algorithm(candidate.algorithm(self.topology, self.size_bytes), self.topology):
            return None
        if better:
            self.of_engine[key] = candidate
        steadier = self.steadiest.get(key)
        if self.topology.load_us and (steadier is None or candidate.time_fs < steadier.late_fs):
            candidate = self._tried(p, candidate)
            if steadier is None or candidate.late_fs < steadier.late_fs:
                self.steadiest[key] = candidate
        if not quickest:
            return candidate
        self.best_of[p.collective.partition] = candidate
        if self.best is None or candidate.time_fs < self.best.time_fs:
            self.best = candidate
            self.report(f"{candidate.engine}, {p.collective.partition} per block", candidate.time_fs)
        return candidate

    def _tried(self, p: Problem, candidate: Candidate) -> Candidate:
        """The candidate with its time when messages are late, in the order that it has."""
        return replace(candidate, late_fs=late_fs(self.topology, p.collective, p.costs, candidate.messages))

    def judged_fs(self, candidate: Candidate) -> int:
        """What schedules are compared by."""
        return judged_fs(self.topology, candidate.time_fs, len(candidate.messages))

    def chosen(self) -> Candidate | None:
        """The best schedule: the quickest, or where ranks share cores one of fewer messages, and if the time of that
        one grows too much when messages are late, the one that is best then."""
        if self.best is None or not self.topology.load_us:
            return self.best
        usual = self._fewest([self.best, *self.of_engine.values()], self.judged_fs) or self.best
        usual = self._tried(self.problem(usual.collective.partition), usual)
        if usual.late_fs <= STEADY * usual.time_fs:
            return usual
        near = [c for c in self.steadiest.values() if self.judged_fs(c) <= NEAR * self.judged_fs(usual)]
        return self._fewest([usual, *near], lambda candidate: candidate.late_fs) or usual

    def others(self) -> list[Candidate]:
        """What may be taken instead, where a program cannot be what its schedule is: the best of each engine and
        chunking, or where ranks share cores those that bear late messages best."""
        return list((self.steadiest if self.topology.load_us else self.of_engine).values())

    def _fewest(self, among: list[Candidate], judged: Callable[[Candidate], int]) -> Candidate | None:
        """Of those that are judged alike, and least, the one of fewest messages; None when none of them is right."""
        most_fs = ALIKE * min(map(judged, among))
        for candidate in sorted(
            (c for c in among if judged(c) <= most_fs),
            key=lambda c: (len(c.messages), judged(c), c.time_fs, c.collective.partition, c.engine),
        ):
            if not check_algorithm(candidate.algorithm(self.topology, self.size_bytes), self.topology):
                return candidate
        return None

    def one_sum(self, partition: int) -> Candidate | None:
        """The best of a chunking that the models can start from: no rank holds several sums of a chunk."""
        best = self.best_of.get(partition)
        if best is None or not best.crosses:
            return best
        others = [c for (k, _), c in self.of_engine.items() if k == partition and not c.crosses]
        return min(others, key=lambda c: (c.time_fs, c.engine), default=None)

    def quotient(self, name: str, p: Problem, root: int, pairs: Pairs) -> None:
        """Schedules of representatives under the machine's symmetry, expanded; `name` is one of COLLECTIVES."""
        if self.should_stop():
            return
        if p.collective.groups:
            if name not in PAIRED:
                return  # quotients know blocks of all ranks, and blocks between pairs
            name, root, pairs = "alltoallv", 0, pairs_of_groups(self.build(1))
        priced = p.costs
        if not _in_columns(priced):
            return  # its columns have no room for such times; the other engines count without limit
        partition = p.collective.partition
        task = Task(
            self.topology, link_table(self.topology), name, partition, p.costs.chunk_bytes, root, pairs.ends,
            self.generators if self.restrictions.symmetry is not None else None, self.batching, pairs.amounts,
        )  # fmt: skip
        effort = Effort(
            work=min(200_000, round(LOOKS_PER_WALL * self.budget_s)),
            most_seeds=24,
            deterministic_s=0.0,
            batch_work=min(500_000, round(BATCH_LOOKS_PER_WALL * self.budget_s)),
            most_batches=60,
        )
        for found in search(task, self.lower_fs, effort, self.seed, self.finished):
            messages = messages_of(found.messages(name, partition))
            transfers = tuple(as_transfers(messages))
            candidate = Candidate(found.engine, p.collective, transfers, messages, found.timing.time_fs)
            self.accept(p, candidate)
            self.offer(found.engine, p, transfers)

    def composed(self, name: str, p: Problem, pairs: Pairs) -> None:
        """Schedules composed of nodes, where the collective and the machine are of that kind."""
        priced = p.costs
        if not _in_columns(priced) or self.restrictions.rules or not composes(self.topology, name):
            return
        task = Task(
            self.topology, link_table(self.topology), name, p.collective.partition, priced.chunk_bytes, 0, pairs.ends,
            None, self.batching, pairs.amounts,
        )  # fmt: skip
        for found in compose(task, self.lower_fs, self.finished):
            messages = messages_of(found.messages)
            transfers = tuple(as_transfers(messages))
            self.accept(p, Candidate(found.engine, p.collective, transfers, messages, found.time_fs))

    def lengths(self, name: str, wanted: int | None) -> None:
        """Allgathers and reduce-scatters between nodes with messages of chosen lengths; wanted: the chunking that is
        asked for."""
        if name not in ("allgather", "reducescatter") or not self.batching or self.should_stop():
            return
        if not composes(self.topology, name):
            return
        priced = self.problem(1).costs
        if not _in_columns(priced) or self.restrictions.rules:
            return
        turned = reverse(self.topology) if name == "reducescatter" else self.topology
        work = round(LENGTHS_PER_WALL * self.budget_s)
        for found in lengths(turned, priced.chunk_bytes, wanted, work, self.finished):
            p = self.problem(found.partition)
            if name == "allgather":
                transfers = tuple(as_transfers(found.messages))
                self.accept(p, Candidate("lengths", p.collective, transfers, found.messages, found.time_fs))
            else:
                # What spreads on links turned round collects on the links, last arrival first.
                backwards = sorted(found.messages, key=lambda m: (-m.end_fs, -m.start_fs, m.link))
                self.offer("lengths", p, [Transfer(m.link, m.chunks, "reduce") for m in backwards])

    def forest(self, name: str, root: int, pairs: Pairs, wanted: int | None) -> None:
        """Trees of the fluid optimum in whole chunks, pipelined; wanted: the chunking that is asked for."""
        if self.should_stop() or name not in FOREST_COLLECTIVES or not self.topology.links:
            return
        stated = self.problem(1)
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
            self.topology, link_table(self.topology), name, 1, priced.chunk_bytes, root, pairs.ends,
            self.generators if self.restrictions.symmetry is not None else None, self.batching, pairs.amounts,
            teams,
        )  # fmt: skip
        usable = _usable(stated) if self.restrictions.rules else None
        most = -wanted if wanted else max(1, self.size_bytes // (blocks * LEAST_CHUNK_BYTES))
        effort = ForestEffort(most_refined=MOST_PIPELINED if name in ROOTED else 0)
        for partition, found in forests(task, most, effort, self.seed, self._forests_done, usable):
            messages = messages_of(found.messages("groups" if teams else name, partition))
            p = self.problem(partition)
            candidate = Candidate(
                found.engine, p.collective, tuple(as_transfers(messages)), messages, found.timing.time_fs
            )
            self.accept(p, candidate)

    def _forests_done(self) -> bool:
        """Whether forests must leave the rest of a limit to others."""
        return self.finished() or self.left_s() < (1 - FORESTS_SHARE) * self.limit_s

    def strategies(self, deterministic_s: float, relax_only: bool = False) -> list[Strategy]:
        """CP-SAT runs for a stage that may use so many deterministic seconds, the quickest first.

        Ordering models do best without the linear relaxation; packing by load does best with it.
        """
        wall_s = max(0.5, self.left_s())
        relaxed = Strategy(deterministic_s, wall_s, self.seed)
        if relax_only:
            return [relaxed]
        quick = Strategy(deterministic_s * QUICK_SHARE, wall_s, self.seed, relax=False)
        return [quick, relaxed] if self.workers > 1 else [quick]

    def greedy(self, p: Problem, passes: int) -> None:
        """Greedy trees in several tastes, with and without the symmetry."""
        group: list[Symmetry] = (close([identity(p), *p.symmetries], 256) or []) if p.symmetries else []
        wide = self.restrictions
        if wide.extra_hops is None:
            wide = replace(wide, extra_hops=DETOUR)
        narrow = funnelled(problem(self.topology, p.collective, self.size_bytes, wide))
        for taste in tastes(2, self.seed) if narrow is not None else ():
            assert narrow is not None
            grown = greedy(narrow, taste)
            if grown is not None:
                self.offer("greedy", p, grown)
        for taste in tastes(passes, self.seed):
            if self.finished():
                return
            for images in [group, []] if len(group) > 1 else [[]]:
                grown = greedy(p, taste, images)
                if grown is not None:
                    self.offer("greedy", p, grown)

    def fullest(self, candidate: Candidate) -> int:
        """How long its chunks alone hold the fullest resource (fs), whatever their number."""
        partition = candidate.collective.partition
        return _fullest(self.problem(partition).costs, candidate.transfers)

    def pipeline(self, candidate: Candidate, engine: str) -> None:
        """Cut every chunk of a candidate finer and keep its routes, as long as that pays."""
        if candidate.engine == "lengths":
            return  # these were cut already
        if self.fixed_partition or any(not t.plain for t in candidate.transfers):
            return
        parts, last = 2, candidate.time_fs
        while len(candidate.transfers) * parts <= MOST_MESSAGES and not self.finished():
            cut = refined(candidate.collective, parts)
            if cut.chunk_bytes(self.size_bytes) < LEAST_CHUNK_BYTES:
                return
            finer = problem(self.topology, cut, self.size_bytes, self.restrictions)
            times = []
            for by_part in (True, False):
                split = refine(candidate.transfers, parts, finer.collective, by_part)
                offered = self.offer(engine, finer, split)
                if offered:
                    times.append(offered.time_fs)
            if not times or min(times) > last * WORTHWHILE:
                return
            last = min(times)
            parts *= 2

    def pack(self, partition: int, deterministic_s: float) -> None:
        """M3: trees by load, then pipelined."""
        p = self.problem(partition)
        if _hops(p) > MOST_TREE_HOPS:
            return
        known = self.one_sum(partition)
        hint = known.transfers if known else ()
        packed = pack_trees(p, self.strategies(deterministic_s, relax_only=True), hint, self.should_stop)
        if packed:
            offered = self.offer("cp-sat", p, packed)
            if offered:
                self.pipeline(replace(offered, transfers=tuple(packed)), "cp-sat")

    def rescue(self, partition: int) -> None:
        """Any trees within the rules, where no seed obeys them; a first answer may take longer than the limit."""
        p = replace(self.problem(partition), symmetries=())
        for deterministic_s in RESCUE_S:
            packed = pack_trees(p, [Strategy(deterministic_s, 60.0, self.seed)], (), self.should_stop)
            if self.should_stop() or (packed and self.offer("cp-sat", p, packed)):
                return

    def trees(self, partition: int, deterministic_s: float, symmetric: bool) -> None:
        """M1: timed trees at one chunking, from the best schedule known there."""
        p = self.problem(partition)
        p = replace(p, symmetries=tuple(free_group(p)[1:]) if symmetric else ())
        if symmetric and not p.symmetries:
            return
        known = self.one_sum(partition)
        if known is None or _hops(p) > MOST_TREE_HOPS:
            return
        single = best_timing("cp-sat", self.topology, p.collective, p.costs, _one_chunk_each(known.transfers))
        if single is None:
            return
        found = solve_trees(
            p,
            single.time_fs,
            self.lower_fs,
            self.strategies(deterministic_s),
            single.messages,
            self._improved(partition),
            self.should_stop,
        )
        if found.transfers:
            self.offer("cp-sat", p, found.transfers)
        if not p.symmetries and not _may_batch(p):
            self.bounds[partition] = max(self.bounds.get(partition, 0), found.bound_fs)

    def messages(self, partition: int, deterministic_s: float) -> None:
        """M2: batched messages, for each layer on its own; an allreduce joins the two."""
        p = self.problem(partition)
        known = self.one_sum(partition)
        if known is None:
            return
        joined: list[Transfer] = []
        for number, layer in enumerate(p.layers):
            single = _alone(p, number)
            ops = "reduce" if layer.kind == "collect" else "copy"
            own = [t for t in known.transfers if t.op == ops and t.plain]
            if not own:
                # The best schedule is no set of trees (an exchange); greedy trees are the start then.
                own = [t for t in greedy(p, Taste(1.0, True, 0)) or () if t.op == ops]
            # A collect layer is solved as a spread on the turned links, so its hint runs backwards.
            hint = [replace(t, op="copy") for t in (reversed(own) if ops == "reduce" else own)]
            seed = best_timing("cp-sat", single.topology, single.collective, single.costs, hint)
            if seed is None:
                return
            best, best_fs = tuple(Transfer(m.link, m.chunks) for m in seed.messages), seed.time_fs
            # Few slots first: small models, and in this regime few messages are what is wanted.
            for slots in (2, 3, 4, 6):
                if _hops(single) * slots > MOST_SLOT_VARIABLES or self.finished():
                    break
                strategies = self.strategies(deterministic_s / (4 * len(p.layers)))
                found = solve_messages(
                    single,
                    slots,
                    best_fs,
                    0,
                    strategies,
                    seed.messages,
                    self._improved(partition),
                    self.should_stop,
                )
                if not found.transfers:
                    continue
                timed = best_timing(
                    "cp-sat", single.topology, single.collective, single.costs, found.transfers
                )
                if timed is not None and timed.time_fs < best_fs:
                    best, best_fs = found.transfers, timed.time_fs
            transfers = best
            if ops == "reduce":
                joined += [Transfer(t.link, t.chunks, "reduce") for t in reversed(transfers)]
            else:
                joined += transfers
        self.offer("cp-sat", p, joined)

    def improve(self, partition: int, work: int) -> None:
        """Local search from the best schedules of a chunking, first with its symmetry; work is counted in hops."""
        wide = self.restrictions
        if wide.extra_hops is None:
            wide = replace(wide, extra_hops=DETOUR)
        stated = problem(self.topology, self.build(partition), self.size_bytes, wide)
        p = with_symmetry(stated, self.generators)[0]
        group = (close([identity(p), *p.symmetries], 256) or []) if p.symmetries else []
        starts = sorted(
            (c for (k, _), c in self.of_engine.items() if k == partition), key=lambda c: (c.time_fs, c.engine)
        )[:MOST_STARTS]
        alone = [identity(p)]
        runs = [(start, group if len(group) > 1 else alone, work // len(starts)) for start in starts]
        for start, images, share in [*runs, *([(None, alone, work)] if len(group) > 1 else [])]:
            known = start or self.best_of[partition]
            if self.finished():
                return
            found = anneal(
                p, known.messages, images, share, self.seed, self.batching, lambda _: self.finished()
            )
            if found:
                self.offer("local-search", p, found)

    def _improved(self, partition: int) -> Callable[[int, int], None]:
        return lambda time_fs, _: self.report(f"cp-sat, {partition} per block", None)


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


def _fullest(costs: Costs, transfers: Sequence[Transfer]) -> int:
    """How long the fullest resource is held by the chunks alone, without what each message costs."""
    load = [0] * costs.resources
    for transfer in transfers:
        for resource, per_chunk in costs.holds[transfer.link]:
            load[resource] += per_chunk * len(transfer.chunks)
    return max(load, default=0)


def _hops(p: Problem) -> int:
    """(chunk, link) pairs up to symmetry: what a model's size grows with."""
    order = len(free_group(p)) if p.symmetries else 1
    return sum(len(usable) for layer in p.layers for usable in layer.usable) // order


def _may_batch(p: Problem) -> bool:
    """Whether a message of several chunks can be cheaper than several messages."""
    return any(p.costs.occupancy_fs[e] for layer in p.layers for usable in layer.usable for e in usable)


def _one_chunk_each(transfers: Sequence[Transfer]) -> list[Transfer]:
    return [replace(t, chunks=(c,), after=None) for t in transfers for c in t.chunks]


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
