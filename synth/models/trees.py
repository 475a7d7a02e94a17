"""M1: routes, order and exact times of one message per chunk and hop, as one CP-SAT model.

Every chunk gets a tree (see problem.Layer); every hop is an interval on its link and ports, which hold one
message at a time. Symmetric pairs share variables (orbits.py). With fixed trees the same model only orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from taccl.synth.algorithm import Message
from taccl.synth.models.cp_sat import cp_model
from taccl.synth.models.orbits import Orbits, orbits
from taccl.synth.models.solver import Strategy, solve
from taccl.synth.problem import Problem
from taccl.synth.schedule import Transfer

Hop = tuple[int, int, int]  # (layer, chunk, link)
Place = tuple[int, int, int]  # (layer, chunk, rank)


@dataclass(frozen=True, slots=True)
class TreeSolution:
    """Transfers in order of start; the model's bound holds within chunking, symmetry and usable links."""

    status: str
    transfers: tuple[Transfer, ...]
    bound_fs: int


def solve_trees(
    problem: Problem,
    upper_fs: int,
    lower_fs: int,
    strategies: Sequence[Strategy],
    hint: Sequence[Message] = (),
    on_time: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> TreeSolution:
    """Search for a schedule that ends by upper_fs; lower_fs is a bound that is already proven."""
    model = _Trees(problem, upper_fs, lower_fs)
    model.add_hint(hint)
    report = None
    if on_time:
        report = lambda objective, bound: on_time(objective * model.unit, bound * model.unit)  # noqa: E731
    outcome = solve(model.model, strategies, report, should_stop)
    bound = max(lower_fs, outcome.bound * model.unit) if outcome.status != "infeasible" else lower_fs
    if outcome.objective is None:
        return TreeSolution(outcome.status, (), bound)
    if model.preferences():
        # The author's uc-min / uc-max: among schedules of this time, the fewest or most different links.
        model.fix_time(outcome.objective, outcome.value)
        refined = solve(model.model, strategies, None, should_stop)
        if refined.objective is not None:
            outcome = refined
    return TreeSolution(
        "optimal" if outcome.status == "optimal" else "feasible", model.transfers(outcome.value), bound
    )


class _Trees:
    """The model under construction: times are in units of the greatest common divisor of all durations."""

    def __init__(self, problem: Problem, upper_fs: int, lower_fs: int) -> None:
        self.problem = problem
        self.model = cp_model.CpModel()
        self.orbits: Orbits = orbits(problem)
        self.unit = common_unit(problem, upper_fs)
        self.horizon = upper_fs // self.unit
        self.time = self.model.new_int_var(min(lower_fs // self.unit, self.horizon), self.horizon, "time")
        self.used: dict[Hop, cp_model.IntVar] = {}
        self.start: dict[Place, cp_model.IntVar] = {}
        # The moment a rank has the chunk (spread) or its complete partial sum (collect).
        self.has: dict[Place, cp_model.LinearExprT] = {}
        self.hops_at: dict[Place, list[int]] = {}  # links that could move the chunk at a place
        self._variables()
        self._trees()
        self._resources()
        self._rules()
        self.model.minimize(self.time)

    # A spread hop u->v belongs to (chunk, v): one parent. A collect hop v->u belongs to (chunk, v): one exit.
    def _owner(self, hop: Hop) -> Place:
        layer, chunk, e = hop
        link = self.problem.topology.links[e]
        return (layer, chunk, link.dst if self.problem.layers[layer].kind == "spread" else link.src)

    def _other(self, hop: Hop) -> Place:
        layer, chunk, e = hop
        link = self.problem.topology.links[e]
        return (layer, chunk, link.src if self.problem.layers[layer].kind == "spread" else link.dst)

    def _length(self, layer: int, e: int) -> int:
        costs = self.problem.costs
        extra = costs.reduce(1) if self.problem.layers[layer].kind == "collect" else 0
        return (costs.transit(e, 1) + extra) // self.unit

    def _variables(self) -> None:
        for hop, representative in self.orbits.hop.items():
            if hop == representative:
                self.used[hop] = self.model.new_bool_var(f"use[{hop[0]},{hop[1]},{hop[2]}]")
            self.hops_at.setdefault(self._owner(hop), []).append(hop[2])
        for place, representative in self.orbits.place.items():
            if place == representative and place in self.hops_at:
                name = f"start[{place[0]},{place[1]},{place[2]}]"
                self.start[place] = self.model.new_int_var(0, self.horizon, name)

    def x(self, hop: Hop) -> cp_model.IntVar:
        """Whether a hop is used."""
        return self.used[self.orbits.hop[hop]]

    def s(self, place: Place) -> cp_model.IntVar:
        """When the message of a place starts."""
        return self.start[self.orbits.place[place]]

    def end(self, place: Place) -> cp_model.LinearExprT:
        """When the message of a place has arrived and is reduced."""
        layer, chunk, _ = place
        terms = [self._length(layer, e) * self.x((layer, chunk, e)) for e in self.hops_at[place]]
        return self.s(place) + sum(terms)

    def _trees(self) -> None:
        model = self.model
        for number, layer in enumerate(self.problem.layers):
            for chunk in range(len(layer.roots)):
                for rank in range(self.problem.topology.ranks):
                    place = (number, chunk, rank)
                    if self.orbits.place[place] != place or rank in layer.roots[chunk]:
                        continue
                    own = [self.x((number, chunk, e)) for e in self.hops_at.get(place, ())]
                    if rank in layer.targets[chunk]:
                        model.add_exactly_one(own)
                    elif own:
                        model.add_at_most_one(own)
                    if own:
                        model.add(self.time >= self.end(place))
        for hop in self.used:
            number, chunk, _ = hop
            layer = self.problem.layers[number]
            owner, other = self._owner(hop), self._other(hop)
            used = self.used[hop]
            if other[2] in layer.roots[chunk]:
                self._after_root(hop, used)
                continue
            if other not in self.hops_at:
                model.add(used == 0)
                continue
            if other[2] not in layer.targets[chunk]:
                model.add(sum(self.x((number, chunk, e)) for e in self.hops_at[other]) >= used)
            if layer.kind == "spread":
                model.add(self.s(owner) >= self.end(other)).only_enforce_if(used)
            else:
                model.add(self.s(other) >= self.end(owner)).only_enforce_if(used)

    def _after_root(self, hop: Hop, used: cp_model.IntVar) -> None:
        """An allreduce's spread layer starts at the root when everything was collected there."""
        number, chunk, _ = hop
        if self.problem.layers[number].kind != "spread" or number == 0:
            return
        root = self.problem.layers[number].roots[chunk][0]
        self.model.add(self.s(self._owner(hop)) >= self._collected(number - 1, chunk, root)).only_enforce_if(
            used
        )

    def _collected(self, number: int, chunk: int, root: int) -> cp_model.IntVar:
        key = (number, chunk, root)
        representative = self.orbits.place[key]
        if representative not in self.has:
            done = self.model.new_int_var(0, self.horizon, f"collected[{chunk}]")
            self.has[representative] = done
            _, chunk0, root0 = representative
            for e in self.problem.layers[number].usable[chunk0]:
                if self.problem.topology.links[e].dst == root0:
                    hop = (number, chunk0, e)
                    self.model.add(done >= self.end(self._owner(hop))).only_enforce_if(self.x(hop))
        found = self.has[representative]
        assert isinstance(found, cp_model.IntVar)
        return found

    def _resources(self) -> None:
        """No two messages at once on a link or port; equal constraints (symmetric resources) stand once."""
        costs = self.problem.costs
        on: dict[int, list[tuple[Hop, int]]] = {}
        for hop in self.orbits.hop:
            e = hop[2]
            ports = costs.holds[e][1:]
            for resource, per_chunk in costs.holds[e]:
                # A port at least as slow as the link makes the link's own exclusion redundant.
                if resource == e and any(hold >= per_chunk for _, hold in ports):
                    continue
                on.setdefault(resource, []).append((hop, costs.hold(e, per_chunk, 1) // self.unit))
        seen: set[tuple[object, ...]] = set()
        intervals: dict[tuple[object, ...], cp_model.IntervalVar] = {}
        for resource in sorted(on):
            # Hops of one place and equal length share an interval: at most one of them is used.
            groups: dict[tuple[Place, int], list[Hop]] = {}
            for hop, hold in on[resource]:
                groups.setdefault((self._owner(hop), hold), []).append(hop)
            key = tuple(
                sorted(
                    (self.orbits.place[place], hold, tuple(sorted(self.orbits.hop[h] for h in hops)))
                    for (place, hold), hops in groups.items()
                )
            )
            if key in seen:
                continue
            seen.add(key)
            members, load = [], []
            for place, hold, hops in dict.fromkeys(key):
                if hold == 0:
                    continue
                if key.count((place, hold, hops)) > 1:
                    # Two symmetric images would hold this resource at the same moment.
                    for h in hops:
                        self.model.add(self.used[h] == 0)
                    continue
                same = (place, hold, hops)
                if same not in intervals:
                    present = self._any(hops)
                    intervals[same] = self.model.new_optional_fixed_size_interval_var(
                        self.start[place], hold, present, f"hold[{resource},{place}]"
                    )
                members.append(intervals[same])
                load += [hold * self.used[h] for h in hops]
            if len(members) > 1:
                self.model.add_no_overlap(members)
            if load:
                slack = min(
                    self._length(h[0], h[2])
                    - costs.hold(h[2], dict(costs.holds[h[2]])[resource], 1) // self.unit
                    for h, _ in on[resource]
                )
                self.model.add(sum(load) + max(0, slack) <= self.time)
        self._engines()

    def _engines(self) -> None:
        """Reductions on a rank run one after another."""
        duration = self.problem.costs.reduce(1) // self.unit
        if not duration:
            return
        for rank in range(self.problem.topology.ranks):
            members = []
            for hop in self.orbits.hop:
                link = self.problem.topology.links[hop[2]]
                if self.problem.layers[hop[0]].kind == "collect" and link.dst == rank:
                    arrival = self.s(self._owner(hop)) + (self._length(hop[0], hop[2]) - duration)
                    members.append(
                        self.model.new_optional_fixed_size_interval_var(
                            arrival, duration, self.x(hop), f"sum[{hop}]"
                        )
                    )
            if len(members) > 1:
                self.model.add_no_overlap(members)

    def _any(self, hops: Sequence[Hop]) -> cp_model.IntVar:
        if len(hops) == 1:
            return self.used[hops[0]]
        present = self.model.new_bool_var("present")
        self.model.add(sum(self.used[h] for h in hops) == present)
        return present

    def _carried(self) -> dict[int, list[Hop]]:
        """What each link may carry."""
        found: dict[int, list[Hop]] = {}
        for number, layer in enumerate(self.problem.layers):
            for c, usable in enumerate(layer.usable):
                for e in usable:
                    found.setdefault(e, []).append((number, c, e))
        return found

    def _rules(self) -> None:
        carried = self._carried() if self.problem.rules else {}
        for rule in self.problem.rules:
            if rule.kind == "cap":
                for e in sorted(rule.links):
                    over = carried.get(e, ())
                    if len(over) > rule.limit:
                        self.model.add(sum(self.x(hop) for hop in over) <= rule.limit)
            elif rule.kind == "own-first":
                for e in sorted(rule.links):
                    self._own_first(e)

    def _own_first(self, e: int) -> None:
        src = self.problem.topology.links[e].src
        for number, layer in enumerate(self.problem.layers):
            if layer.kind != "spread":
                continue
            over = [(number, c, e) for c, usable in enumerate(layer.usable) if e in usable]
            own = [hop for hop in over if src in layer.roots[hop[1]]]
            for mine in own:
                for other in over:
                    if src not in layer.roots[other[1]]:
                        self.model.add(
                            self.s(self._owner(mine)) <= self.s(self._owner(other))
                        ).only_enforce_if(self.x(mine), self.x(other))

    def preferences(self) -> bool:
        """Whether the sketch prefers few or many different links."""
        return any(rule.kind in ("uc-min", "uc-max") for rule in self.problem.rules)

    def fix_time(self, objective: int, value: Callable[[cp_model.LinearExprT], int]) -> None:
        """Keep the time found and turn the objective to the sketch's uc-min / uc-max preferences."""
        hints: list[tuple[cp_model.IntVar, int]] = [
            (x, value(x)) for x in [*self.used.values(), *self.start.values()]
        ]
        self.model.add(self.time <= objective)
        terms: list[cp_model.LinearExprT] = []
        carried = self._carried()
        for rule in self.problem.rules:
            if rule.kind not in ("uc-min", "uc-max"):
                continue
            for e in sorted(rule.links):
                over = [self.x(hop) for hop in carried.get(e, ())]
                if over:
                    connected = self.model.new_bool_var(f"connected[{e}]")
                    self.model.add_max_equality(connected, over)
                    terms.append(connected if rule.kind == "uc-min" else -connected)
        self.model.clear_hints()  # type: ignore[no-untyped-call]
        for variable, hinted in hints:
            self.model.add_hint(variable, hinted)
        self.model.minimize(sum(terms))

    def add_hint(self, messages: Sequence[Message]) -> None:
        """Start from a known schedule; only its part that is the representative of an orbit is told."""
        hinted = self._hinted(messages)
        if not hinted:
            return
        for hop, variable in self.used.items():
            self.model.add_hint(variable, hop in hinted)
        told: set[Place] = set()
        for hop, start in hinted.items():
            place = self._owner(hop)
            if place in self.start and place not in told and start // self.unit <= self.horizon:
                told.add(place)
                self.model.add_hint(self.start[place], start // self.unit)

    def _hinted(self, messages: Sequence[Message]) -> Mapping[Hop, int]:
        number_of = {
            ("reduce" if x.kind == "collect" else "copy"): i for i, x in enumerate(self.problem.layers)
        }
        hinted: dict[Hop, int] = {}
        for message in messages:
            for chunk in message.chunks:
                hop = (number_of.get(message.op, 0), chunk, message.link)
                if hop in self.used:
                    hinted[hop] = message.start_fs
        return hinted

    def transfers(self, value: Callable[[cp_model.LinearExprT], int]) -> tuple[Transfer, ...]:
        """The solution, expanded to all chunks and ranks, in order of start."""
        found = []
        for hop in self.orbits.hop:
            if value(self.x(hop)):
                number, chunk, e = hop
                op = "reduce" if self.problem.layers[number].kind == "collect" else "copy"
                found.append((value(self.s(self._owner(hop))), number, e, chunk, op))
        found.sort()
        return tuple(Transfer(e, (chunk,), op) for _, _, e, chunk, op in found)


def common_unit(problem: Problem, upper_fs: int) -> int:
    """Greatest common divisor of all durations; coarser if huge (they round DOWN, so that bounds hold)."""
    costs = problem.costs
    unit = gcd(costs.reduce_alpha_fs, costs.reduce_chunk_fs)
    for e in range(len(problem.topology.links)):
        unit = gcd(unit, costs.alpha_fs[e], costs.chunk_fs[e], costs.occupancy_fs[e])
        unit = gcd(unit, *(per_chunk for _, per_chunk in costs.holds[e]))
    # Beyond 2^40 units the linear relaxation loses precision and nothing is gained.
    return max(unit, upper_fs >> 40, 1)
