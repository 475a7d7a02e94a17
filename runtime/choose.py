"""Several programs of one collective, timed in turns on real ranks, and the quickest of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from taccl.runtime.bench import Loaded, measure
from taccl.runtime.bench_settings import Settings
from taccl.runtime.job import Job, Neighbours
from taccl.synth.program import SENDS, Program

ALIKE = 1.01  # programs nearer to the quickest than this are as quick as it
MOST_ROUNDS = 0.8  # of the rounds in which a program must have been quicker than another to be called so
TURN_US = 200_000.0  # that a turn of the quickest takes where nobody says how many iterations it has
MOST_ITERATIONS = 100  # then


@dataclass(frozen=True, slots=True)
class Timed:
    """What one program took; the same on every rank."""

    times_us: tuple[float, ...]  # of each round its median, the slowest rank's
    wrong: int  # elements that are wrong, and bytes written outside the buffers
    sends: int  # of all ranks
    iterations: int = 1  # of each round
    candidate: int = 0  # which
    turns: bool | None = None  # whether its messages took turns; None: it has none to take

    @property
    def median_us(self) -> float:
        """Over the rounds."""
        return float(np.median(self.times_us))


def time_in_turns(
    job: Job,
    candidates: Sequence[tuple[Loaded, Settings]],
    neighbours: Neighbours,
    rounds: int,
    data: Mapping[str, Any] | None = None,
    both_ways: bool = False,
    more: bool = False,
) -> list[Timed]:
    """Time every program once a round, so that what changes on the cluster meanwhile changes for all; collective.

    candidates: each with settings of one size, type, reduction, mode and codec. data: as of `measure`. Results are
    checked in the first round. A program that is wrong ends the timing of all. both_ways: programs whose messages take
    turns are timed without them, too, after all others; whether that is quicker no model tells. more: where all are so
    quick that the settings' iterations say little, the first round only tells how many more all rounds get.
    """
    ways = [_Way(number, settings) for number, (_, settings) in enumerate(candidates)]

    def round_of(some: list[_Way], checked: bool) -> None:
        for way in some:
            _time(job, candidates[way.candidate][0], way, checked, neighbours, data)

    round_of(ways, True)
    if both_ways:
        without = [_Way(w.candidate, replace(w.settings, turns=False), False) for w in ways if w.turns]
        round_of(without, True)
        ways += without
    wrong = any(way.wrong for way in ways)
    iterations = candidates[0][1].iterations
    enough = min(MOST_ITERATIONS, math.ceil(TURN_US / max(1.0, min(way.times_us[0] for way in ways))))
    if more and enough > iterations and not wrong:
        iterations = enough
        ways = [replace(w, settings=replace(w.settings, iterations=enough), times_us=[]) for w in ways]
    while len(ways[0].times_us) < rounds and not wrong:
        round_of(ways, False)
    return [
        Timed(
            tuple(w.times_us), w.wrong, _sends(candidates[w.candidate][0].program), iterations,
            w.candidate, w.turns,
        )
        for w in ways
    ]  # fmt: skip


@dataclass(slots=True)
class _Way:
    """A way to run a candidate, and what has been seen of it."""

    candidate: int
    settings: Settings
    turns: bool | None = None
    times_us: list[float] = field(default_factory=list)
    wrong: int = 0


def _time(
    job: Job, loaded: Loaded, way: _Way, checked: bool, neighbours: Neighbours, data: Mapping[str, Any] | None
) -> None:
    """One round of a way."""
    asked = way.settings if checked else replace(way.settings, checks=0)
    (row,) = measure(job, loaded, asked, neighbours, None, data)
    (found,) = row.modes.values()
    way.times_us.append(found.time.median)
    way.wrong += (found.wrong or 0) + found.outside
    if found.turns:
        way.turns = True


def beats(one: Timed, other: Timed) -> bool:
    """Whether one was quicker by more than chance brings: in the median, and in most rounds, each by itself."""
    rounds = list(zip(one.times_us, other.times_us, strict=True))
    won = sum(ALIKE * mine < its for mine, its in rounds)
    return ALIKE * one.median_us < other.median_us and won >= MOST_ROUNDS * len(rounds)


def quickest(timed: Sequence[Timed]) -> int:
    """The index of the quickest; of those that were not told apart, the first."""
    best = 0
    for index, one in enumerate(timed):
        if beats(one, timed[best]):
            best = index
    return best


def _sends(program: Program) -> int:
    return sum(step.kind in SENDS for gpu in program.gpus for tb in gpu.threadblocks for step in tb.steps)
