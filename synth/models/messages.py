"""M2: batched messages for the latency regime, where alpha is paid once for several chunks.

Every sending port (or link, when it has no port) owns a few ordered message slots. A slot takes one link of
its port and any chunks; its length grows with their number. Only one spread layer at a time: a collect layer is
solved on the turned links and run backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from taccl.synth.algorithm import Message
from taccl.synth.models.cp_sat import cp_model
from taccl.synth.models.orbits import free_group
from taccl.synth.models.solver import Strategy, solve
from taccl.synth.models.trees import TreeSolution, common_unit
from taccl.synth.problem import Problem
from taccl.synth.schedule import Transfer

Key = tuple[int, int]  # (chunk, link) or (chunk, rank)


def solve_messages(
    problem: Problem,
    slots: int,
    upper_fs: int,
    lower_fs: int,
    strategies: Sequence[Strategy],
    hint: Sequence[Message] = (),
    on_time: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> TreeSolution:
    """Search for a batched schedule with at most `slots` messages a sending port that ends by upper_fs.

    The bound returned holds within the number of slots and the symmetry.
    """
    model = _Messages(problem, slots, upper_fs, lower_fs)
    model.add_hint(hint)
    report = None
    if on_time:
        report = lambda objective, bound: on_time(objective * model.unit, bound * model.unit)  # noqa: E731
    outcome = solve(model.model, strategies, report, should_stop)
    bound = max(lower_fs, outcome.bound * model.unit) if outcome.status != "infeasible" else lower_fs
    if outcome.objective is None:
        return TreeSolution(outcome.status, (), bound)
    return TreeSolution(outcome.status, model.transfers(outcome.value), bound)


@dataclass(slots=True)
class _Slot:
    """One message of a representative owner."""

    start: cp_model.IntVar
    present: cp_model.IntVar
    count: cp_model.IntVar
    takes: dict[int, cp_model.IntVar]  # link -> whether the message goes over it
    carries: dict[Key, cp_model.IntVar]  # (chunk, link) -> whether it carries the chunk over the link


class _Messages:
    def __init__(self, problem: Problem, slots: int, upper_fs: int, lower_fs: int) -> None:
        self.problem = problem
        self.layer = problem.layers[0]
        self.model = cp_model.CpModel()
        self.unit = common_unit(problem, upper_fs)
        self.horizon = upper_fs // self.unit
        self.owner = [holds[1][0] if len(holds) > 1 else holds[0][0] for holds in problem.costs.holds]
        self.group = free_group(problem)
        self._find_representatives()
        self.time = self.model.new_int_var(min(lower_fs // self.unit, self.horizon), self.horizon, "time")
        self.arrives = {
            key: self.model.new_int_var(0, self.horizon, f"arrives[{key[0]},{key[1]}]")
            for key in sorted(set(self.place.values()))
        }
        self.slots: dict[int, list[_Slot]] = {}
        for owner in self.representatives:
            self.slots[owner] = [self._slot(owner, i) for i in range(slots)]
        self._order()
        self._trees()
        self._resources()
        self.model.minimize(self.time)

    def _find_representatives(self) -> None:
        """One owner an orbit; every (chunk, link) and (chunk, rank) is named by its image there."""
        links = self.problem.topology.links
        owner_of: dict[int, int] = {}  # owner -> representative owner
        self.hop: dict[Key, Key] = {}
        self.place: dict[Key, Key] = {}
        used_links = sorted({e for usable in self.layer.usable for e in usable})
        for e in used_links:
            if self.owner[e] not in owner_of:
                for g in self.group:
                    owner_of[self.owner[g.links[e]]] = self.owner[e]
        self.representatives = sorted(set(owner_of.values()))
        inside = set(self.representatives)
        for chunk, usable in enumerate(self.layer.usable):
            for e in usable:
                if self.owner[e] in inside:
                    for g in self.group:
                        self.hop[g.chunks[chunk], g.links[e]] = (chunk, e)
            for rank in range(self.problem.topology.ranks):
                for g in self.group:
                    image = (g.chunks[chunk], g.ranks[rank])
                    self.place.setdefault(image, (chunk, rank))
        self.into: dict[Key, list[int]] = {}
        self.members: dict[int, list[Key]] = {owner: [] for owner in self.representatives}
        for chunk, usable in enumerate(self.layer.usable):
            for e in usable:
                self.into.setdefault((chunk, links[e].dst), []).append(e)
                if self.owner[e] in inside:
                    self.members[self.owner[e]].append((chunk, e))

    def _slot(self, owner: int, index: int) -> _Slot:
        model, name = self.model, f"{owner},{index}"
        members = self.members[owner]
        slot = _Slot(
            model.new_int_var(0, self.horizon, f"start[{name}]"),
            model.new_bool_var(f"present[{name}]"),
            model.new_int_var(0, len({c for c, _ in members}), f"count[{name}]"),
            {e: model.new_bool_var(f"takes[{name},{e}]") for e in sorted({e for _, e in members})},
            {key: model.new_bool_var(f"carries[{name},{key}]") for key in members},
        )
        model.add(sum(slot.takes.values()) == slot.present)
        model.add(sum(slot.carries.values()) == slot.count)
        model.add(slot.count >= slot.present)
        for (_, e), carried in slot.carries.items():
            model.add_implication(carried, slot.takes[e])
        return slot

    def _hold(self, e: int, resource: int) -> tuple[int, int]:
        """(fixed, per chunk) hold of a resource by a message over link e, in units."""
        costs = self.problem.costs
        per_chunk = next(hold for r, hold in costs.holds[e] if r == resource)
        return costs.occupancy_fs[e] // self.unit, per_chunk // self.unit

    def _order(self) -> None:
        for owner, slots in self.slots.items():
            for slot, following in pairwise(slots):
                self.model.add_implication(following.present, slot.present)
                for e, takes in slot.takes.items():
                    fixed, per_chunk = self._hold(e, owner)
                    self.model.add(
                        following.start >= slot.start + fixed + per_chunk * slot.count
                    ).only_enforce_if(takes, following.present)

    def _trees(self) -> None:
        costs, links, model = self.problem.costs, self.problem.topology.links, self.model
        for chunk, roots in enumerate(self.layer.roots):
            for rank in range(self.problem.topology.ranks):
                if self.place[chunk, rank] != (chunk, rank):
                    continue
                if rank in roots:
                    model.add(self.arrives[chunk, rank] == 0)
                    continue
                carried = self._carried(chunk, rank)
                if rank in self.layer.targets[chunk]:
                    model.add_exactly_one(carried)
                elif carried:
                    model.add_at_most_one(carried)
                if rank in self.layer.targets[chunk]:
                    model.add(self.time >= self.arrives[chunk, rank])
        for owner in self.representatives:
            for slot in self.slots[owner]:
                for (chunk, e), carried_here in slot.carries.items():
                    src, dst = links[e].src, links[e].dst
                    alpha, per_chunk = costs.alpha_fs[e] // self.unit, costs.chunk_fs[e] // self.unit
                    held = self.arrives[self.place[chunk, src]]
                    model.add(slot.start >= held).only_enforce_if(carried_here)
                    model.add(
                        self.arrives[self.place[chunk, dst]] >= slot.start + alpha + per_chunk * slot.count
                    ).only_enforce_if(carried_here)
                    if src not in self.layer.roots[chunk] and src not in self.layer.targets[chunk]:
                        model.add(sum(self._carried(chunk, src)) >= carried_here)

    def _carried(self, chunk: int, rank: int) -> list[cp_model.IntVar]:
        """All variables that bring a chunk to a rank."""
        found = []
        for e in self.into.get((chunk, rank), ()):
            representative = self.hop[chunk, e]
            found += [s.carries[representative] for s in self.slots[self.owner[representative[1]]]]
        return found

    def _resources(self) -> None:
        """Exclusion on the resources other than the owner, whose slots are in order anyway."""
        model, costs = self.model, self.problem.costs
        on: dict[int, list[tuple[int, int]]] = {}  # resource -> (link, representative link)
        for chunk, usable in enumerate(self.layer.usable):
            for e in usable:
                representative = self.hop[chunk, e][1]
                ports = costs.holds[e][1:]
                for resource, per_chunk in costs.holds[e]:
                    slower = any(hold >= per_chunk for _, hold in ports)
                    if resource == self.owner[e] or (resource == e and slower):
                        continue
                    if (e, representative) not in on.setdefault(resource, []):
                        on[resource].append((e, representative))
        seen: set[tuple[tuple[int, int, int], ...]] = set()
        made: dict[tuple[int, int, int], list[cp_model.IntervalVar]] = {}
        for resource in sorted(on):
            # Per representative link: which hold applies (equal in one orbit) and how often it stands here.
            key = tuple(sorted((rep, *self._hold(e, resource)) for e, rep in on[resource]))
            if key in seen:
                continue
            seen.add(key)
            members: list[cp_model.IntervalVar] = []
            load: list[cp_model.LinearExprT] = []
            for entry in dict.fromkeys(key):
                rep, fixed, per_chunk = entry
                slots = self.slots[self.owner[rep]]
                if key.count(entry) > 1:
                    for slot in slots:
                        model.add(slot.takes[rep] == 0)
                    continue
                if entry not in made:
                    made[entry] = [self._interval(slot, rep, fixed, per_chunk) for slot in slots]
                members += made[entry]
                for slot in slots:
                    load.append(fixed * slot.takes[rep])
                    load += [per_chunk * v for (_, e), v in slot.carries.items() if e == rep]
            if len(members) > 1:
                model.add_no_overlap(members)
            model.add(sum(load) <= self.time)
        for owner in self.representatives:
            load = []
            for slot in self.slots[owner]:
                for e, takes in slot.takes.items():
                    load.append(self._hold(e, owner)[0] * takes)
                for (_, e), carried in slot.carries.items():
                    load.append(self._hold(e, owner)[1] * carried)
            model.add(sum(load) <= self.time)

    def _interval(self, slot: _Slot, e: int, fixed: int, per_chunk: int) -> cp_model.IntervalVar:
        size = self.model.new_int_var(0, self.horizon, "size")
        end = self.model.new_int_var(0, 2 * self.horizon, "end")
        self.model.add(size == fixed + per_chunk * slot.count).only_enforce_if(slot.takes[e])
        return self.model.new_optional_interval_var(slot.start, size, end, slot.takes[e], f"hold[{e}]")

    def add_hint(self, messages: Sequence[Message]) -> None:
        """Fill the representatives' slots with the messages that a known schedule sends there."""
        by_owner: dict[int, list[Message]] = {}
        for known in messages:
            if self.owner[known.link] in self.slots:
                by_owner.setdefault(self.owner[known.link], []).append(known)
        if not by_owner or any(len(sent) > len(self.slots[o]) for o, sent in by_owner.items()):
            return
        for owner, slots in self.slots.items():
            sent = sorted(by_owner.get(owner, []), key=lambda m: m.start_fs)
            for index, slot in enumerate(slots):
                message = sent[index] if index < len(sent) else None
                self.model.add_hint(slot.present, message is not None)
                self.model.add_hint(slot.count, len(message.chunks) if message else 0)
                if message:
                    self.model.add_hint(slot.start, min(self.horizon, message.start_fs // self.unit))
                for e, takes in slot.takes.items():
                    self.model.add_hint(takes, message is not None and message.link == e)
                for (chunk, e), carried in slot.carries.items():
                    here = message is not None and message.link == e and chunk in message.chunks
                    self.model.add_hint(carried, here)

    def transfers(self, value: Callable[[cp_model.LinearExprT], int]) -> tuple[Transfer, ...]:
        """The solution expanded over the group, in order of start."""
        found = []
        for owner in self.representatives:
            for slot in self.slots[owner]:
                if not value(slot.present):
                    continue
                link = next(e for e, takes in slot.takes.items() if value(takes))
                chunks = [c for (c, e), carried in slot.carries.items() if e == link and value(carried)]
                for g in self.group:
                    images = tuple(sorted(g.chunks[c] for c in chunks))
                    found.append((value(slot.start), g.links[link], images))
        found.sort()
        return tuple(Transfer(link, chunks) for _, link, chunks in found)
