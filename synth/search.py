"""The search behind one request: what was tried, the best so far, and how much work is left.

Stages share this state: `Search.offer` times a list of transfers, keeps it when it is the best and obeys the
sketch; `Search.spend` adds what a stage did, and `Search.finished` says when that is all that the limit allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Permutation, Restrictions
from taccl.synth.candidates import (
    Candidate,
    best_timing,
    complete,
    keeps_to_ways,
    late_fs,
    obeys,
    one_chunk_each,
)
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import Collective
from taccl.synth.copying import copies_fs
from taccl.synth.cost import Costs, judged_fs
from taccl.synth.counted import CHECKED_S, LATE_S, SEEDS_SHARE, SHARE, STATED_S, TIMED_LINK_S, TIMED_S
from taccl.synth.problem import Problem, problem, with_symmetry
from taccl.synth.schedule import Transfer

Build = Callable[[int], Collective]  # partition -> collective

# Where ranks share cores no time is known so well: of schedules this near to the best one, that of fewest messages is
# taken.
ALIKE = 1.01
# There a schedule is taken as it is when late messages make it longer by no more.
STEADY = 1.07
# Otherwise one that bears them better is taken, of those whose time and load are no more than so much longer.
NEAR = 1.1
# Transfers that seeds may have timed for each second of the limit, counted so that the answer does not depend on the
# clock.
TIMED_PER_WALL = 3_000


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
    worked_s: float = 0.0  # counted work of all stages, by the estimates of `counted`

    def left_s(self) -> float:
        """Wall-clock seconds until the request's limit."""
        return self.limit_s - (time.monotonic() - self.began)

    def spend(self, work_s: float) -> None:
        """Add to the counted work."""
        self.worked_s += work_s

    def work_left(self, share: float = 1.0) -> bool:
        """Whether counted work is below so much of what the limit allows; a first schedule is always looked for."""
        return self.best is None or self.worked_s < share * SHARE * self.budget_s

    def seeds_spent(self, share: float = 1.0) -> bool:
        """Whether seeds have had so much of their share; the models want theirs of a short limit."""
        if self.best is None:
            return False
        return self.timed > share * TIMED_PER_WALL * self.budget_s or not self.work_left(share * SEEDS_SHARE)

    def finished(self) -> bool:
        """Proof, target gap, work, time limit or the user's word."""
        return self.should_stop() or self.left_s() <= 0 or not self.work_left() or self.reached()

    def reached(self) -> bool:
        """Proof or target gap."""
        if self.best is None:
            return False
        return self.best.time_fs - self.lower_fs <= max(0.0, self.target_gap) * self.best.time_fs

    def problem(self, partition: int) -> Problem:
        """The problem at a chunking, with those symmetries that it has."""
        if partition not in self.stated:
            stated = problem(self.topology, self.build(partition), self.size_bytes, self.restrictions)
            self.spend(STATED_S * stated.hops)
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
            transfers = one_chunk_each(transfers)
        transfer_s = TIMED_S + TIMED_LINK_S * len(self.topology.links)
        candidate = best_timing(
            engine,
            self.topology,
            p.collective,
            p.costs,
            transfers,
            self.batching,
            lambda count: self.spend(transfer_s * count),
        )
        return self.accept(p, candidate)

    def accept(self, p: Problem, candidate: Candidate | None) -> Candidate | None:
        """Remember a timed schedule when it obeys the sketch and is the best of its chunking."""
        if candidate is not None and not self.batching and any(len(m.chunks) > 1 for m in candidate.messages):
            return None
        if candidate is None or not obeys(self.restrictions, self.topology, p.collective, candidate.messages):
            return None
        if self.restrictions.extra_hops is not None and not keeps_to_ways(
            self.problem(p.collective.partition), candidate.messages
        ):
            return None
        key = (p.collective.partition, candidate.engine)
        other, known = self.of_engine.get(key), self.best_of.get(p.collective.partition)
        better = other is None or self.judged_fs(candidate) < self.judged_fs(other)
        quickest = known is None or candidate.time_fs < known.time_fs
        # Exchanges and shared messages can reduce a contribution twice when their times fall badly.
        matters = quickest or (better and self.topology.load_us > 0)
        self.spend(CHECKED_S * len(candidate.messages) * matters)
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
        self.spend(LATE_S * len(candidate.messages))
        return replace(candidate, late_fs=late_fs(self.topology, p.collective, p.costs, candidate.messages))

    def judged_fs(self, candidate: Candidate) -> int:
        """What schedules are compared by."""
        return judged_fs(self.topology, candidate.time_fs, len(candidate.messages))

    def chosen(self) -> Candidate | None:
        """The best schedule: the quickest, or where ranks share cores one of fewer messages and local copies, and if
        its time grows too much when messages are late, the one that is best then."""
        if self.best is None or not self.topology.load_us:
            return self.best
        copies: dict[int, int] = {}

        def copying(candidate: Candidate) -> int:
            key = id(candidate.messages)
            if key not in copies:
                self.spend(CHECKED_S * len(candidate.messages))
                copies[key] = copies_fs(candidate.algorithm(self.topology, self.size_bytes), self.topology)
            return copies[key]

        among = self._right([self.best, *self.of_engine.values()])
        limit_fs = NEAR * min(map(self.judged_fs, among), default=0)
        among = [c for c in among if self.judged_fs(c) <= limit_fs]
        usual = self._fewest(among, lambda c: self.judged_fs(c) + copying(c)) or self.best
        usual = self._tried(self.problem(usual.collective.partition), usual)
        if usual.late_fs <= STEADY * usual.time_fs:
            return usual
        near = [c for c in self.steadiest.values() if self.judged_fs(c) <= NEAR * self.judged_fs(usual)]
        return self._fewest(self._right([usual, *near]), lambda c: c.late_fs + copying(c)) or usual

    def _right(self, among: list[Candidate]) -> list[Candidate]:
        """Those that do what they should: not all were looked at when they were found."""
        return [
            c
            for c in among
            if not check_algorithm(c.algorithm(self.topology, self.size_bytes), self.topology)
        ]

    def others(self) -> list[Candidate]:
        """What may be taken instead, where a program cannot be what its schedule is: the best of each engine and
        chunking, or where ranks share cores those that bear late messages best."""
        if not self.topology.load_us:
            return list(self.of_engine.values())
        return list(self.steadiest.values())

    def _fewest(self, among: list[Candidate], judged: Callable[[Candidate], int]) -> Candidate | None:
        """Of those that are judged alike, and least, the one of fewest messages; None when there is none."""
        most_fs = ALIKE * min(map(judged, among), default=0)
        return min(
            (c for c in among if judged(c) <= most_fs),
            key=lambda c: (len(c.messages), judged(c), c.time_fs, c.collective.partition, c.engine),
            default=None,
        )

    def one_sum(self, partition: int) -> Candidate | None:
        """The best of a chunking that the models can start from: no rank holds several sums of a chunk."""
        best = self.best_of.get(partition)
        if best is None or not best.crosses:
            return best
        others = [c for (k, _), c in self.of_engine.items() if k == partition and not c.crosses]
        return min(others, key=lambda c: (c.time_fs, c.engine), default=None)

    def fullest(self, candidate: Candidate) -> int:
        """How long its chunks alone hold the fullest resource (fs), whatever their number."""
        partition = candidate.collective.partition
        return _fullest(self.problem(partition).costs, candidate.transfers)


def _fullest(costs: Costs, transfers: Sequence[Transfer]) -> int:
    """How long the fullest resource is held by the chunks alone, without what each message costs."""
    load = [0] * costs.resources
    for transfer in transfers:
        for resource, per_chunk in costs.holds[transfer.link]:
            load[resource] += per_chunk * len(transfer.chunks)
    return max(load, default=0)
