"""M1 on the quotient: routes, order and exact times of the trees of representative chunks, one CP-SAT model.

One variable stands for a whole orbit of decisions, one no-overlap for an orbit of resources. Hops of one chunk into one
rank over links of one lane share an interval, since at most one of them is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from taccl.synth.models.cp_sat import cp_model
from taccl.synth.models.solver import Strategy, solve
from taccl.synth.symmetric.hops import RepHop, hop
from taccl.synth.symmetric.instance import Instance

# Times beyond this many units slow CP-SAT down; durations are then rounded up to a coarser unit.
MOST_UNITS = 1 << 24


@dataclass(frozen=True, slots=True)
class TimedTrees:
    """Hops in order of start. `proved`: no schedule of these links and this symmetry is quicker."""

    hops: tuple[RepHop, ...]
    proved: bool


def solve_timed_trees(
    inst: Instance,
    roots: Sequence[int],
    usable: Sequence[Iterable[int]],
    upper_fs: int,
    lower_fs: int,
    strategies: Sequence[Strategy],
    hint: Sequence[RepHop] = (),
    hint_start_fs: Sequence[int] = (),
    should_stop: Callable[[], bool] | None = None,
) -> TimedTrees | None:
    """Spanning trees from the root of each representative chunk that end by upper_fs; None when none was found.

    usable: per chunk the links it may take. lower_fs: a bound that is known; reaching it ends the search.
    """
    model = _Model(inst, roots, usable, upper_fs, lower_fs)
    model.add_hint(hint, hint_start_fs)
    outcome = solve(model.model, strategies, None, should_stop)
    if outcome.objective is None:
        return None
    return TimedTrees(model.hops(outcome.value), outcome.status == "optimal")


class _Model:
    def __init__(
        self,
        inst: Instance,
        roots: Sequence[int],
        usable: Sequence[Iterable[int]],
        upper_fs: int,
        lower_fs: int,
    ) -> None:
        self.inst, self.roots = inst, roots
        self.model = cp_model.CpModel()
        self.unit = _unit(inst, upper_fs)
        horizon = upper_fs // self.unit
        self.transit = [-(-t // self.unit) for t in inst.lane_transit_fs]
        self.time = self.model.new_int_var(min(-(-lower_fs // self.unit), horizon), horizon, "time")
        self.use: dict[tuple[int, int], cp_model.IntVar] = {}  # (chunk, link)
        self.arrival: dict[tuple[int, int], cp_model.IntVar] = {}  # (chunk, rank)
        intervals: dict[int, list[cp_model.IntervalVar]] = {}
        loads: dict[int, list[tuple[int, cp_model.IntVar]]] = {}
        slack: dict[int, int] = {}  # per resource the least time between its release and an arrival
        src, dst = inst.links.src.tolist(), inst.links.dst.tolist()
        for chunk, (root, links) in enumerate(zip(roots, usable, strict=True)):
            into: dict[int, dict[int, list[int]]] = {}
            for link in sorted(links):
                if dst[link] != root:
                    into.setdefault(dst[link], {}).setdefault(int(inst.lane[link]), []).append(link)
            for rank in range(inst.ranks):
                if rank != root:
                    name = f"arrival[{chunk},{rank}]"
                    self.arrival[chunk, rank] = self.model.new_int_var(0, horizon, name)
            for rank in range(inst.ranks):
                if rank == root:
                    continue
                ways: list[cp_model.IntVar] = []
                arrival = self.arrival[chunk, rank]
                for lane, same in sorted(into.get(rank, {}).items()):
                    chosen = []
                    for link in same:
                        x = self.model.new_bool_var(f"use[{chunk},{link}]")
                        self.use[chunk, link] = x
                        chosen.append(x)
                        earliest = self.transit[lane]
                        if src[link] == root:
                            self.model.add(arrival >= earliest).only_enforce_if(x)
                        else:
                            before = self.arrival[chunk, src[link]]
                            self.model.add(arrival >= before + earliest).only_enforce_if(x)
                    ways += chosen
                    present = chosen[0]
                    if len(chosen) > 1:
                        present = self.model.new_bool_var(f"lane[{chunk},{rank},{lane}]")
                        self.model.add(sum(chosen) == present)
                    for resource, hold_fs in inst.lane_holds[lane]:
                        hold = -(-hold_fs // self.unit)
                        intervals.setdefault(resource, []).append(
                            self.model.new_optional_fixed_size_interval_var(
                                arrival - self.transit[lane], hold, present, ""
                            )
                        )
                        loads.setdefault(resource, []).append((hold, present))
                        rest = self.transit[lane] - hold
                        slack[resource] = min(slack.get(resource, rest), rest)
                self.model.add_exactly_one(ways)  # no model has a solution where there is no way
                self.model.add(self.time >= arrival)
        for resource in sorted(intervals):
            self.model.add_no_overlap(intervals[resource])
            total = sum(hold * present for hold, present in loads[resource])
            self.model.add(total + min(0, slack[resource]) <= self.time)
        self.model.minimize(self.time)

    def add_hint(self, hops: Sequence[RepHop], start_fs: Sequence[int]) -> None:
        """Start from a known schedule."""
        taken = {load: start for known, start in zip(hops, start_fs, strict=True) for load in known.loads}
        for key, x in self.use.items():
            self.model.add_hint(x, key in taken)
        for (chunk, link), start in taken.items():
            arrival = self.arrival.get((chunk, int(self.inst.links.dst[link])))
            if arrival is not None:
                lane = int(self.inst.lane[link])
                self.model.add_hint(arrival, -(-start // self.unit) + self.transit[lane])

    def hops(self, value: Callable[[cp_model.LinearExprT], int]) -> tuple[RepHop, ...]:
        """The chosen hops by their starts."""
        chosen = []
        for (chunk, link), x in self.use.items():
            if value(x):
                rank = int(self.inst.links.dst[link])
                start = value(self.arrival[chunk, rank]) - self.transit[int(self.inst.lane[link])]
                chosen.append((start, chunk, link))
        chosen.sort()
        brought: dict[tuple[int, int], int] = {}
        hops = []
        for index, (_, chunk, link) in enumerate(chosen):
            before = brought.get((chunk, int(self.inst.links.src[link])))
            hops.append(hop(chunk, link, () if before is None else (before,)))
            brought[chunk, int(self.inst.links.dst[link])] = index
        return tuple(hops)


def _unit(inst: Instance, upper_fs: int) -> int:
    durations = [hold for holds in inst.lane_holds for _, hold in holds]
    unit = gcd(*durations, *inst.lane_transit_fs) or 1
    return max(unit, -(-upper_fs // MOST_UNITS))
