"""Small changes of a schedule where it is critical: split, join, shift, go another way. With all symmetric images."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from taccl.synth.annealing.sequence import Clock, Hops
from taccl.synth.annealing.trees import Trees, changed, far, needs_of, ways_to
from taccl.synth.problem import Problem, Symmetry


@dataclass(frozen=True, slots=True)
class Plan:
    """One schedule: trees, the groups that share a message, and their clock."""

    trees: Trees
    needs: list[tuple[int, ...]]  # by hop
    groups: list[tuple[int, ...]]
    clock: Clock


@dataclass(slots=True)
class Draft:
    """A plan while it is being changed; groups that became empty are dropped by `finish`."""

    plan: Plan
    trees: Trees
    needs: list[tuple[int, ...]]
    groups: list[tuple[int, ...]]
    keys: list[int]
    touched: set[int]

    @staticmethod
    def of(plan: Plan) -> Draft:
        return Draft(plan, plan.trees, plan.needs, list(plan.groups), list(plan.clock.starts_fs), set())

    def take(self, *groups: int) -> bool:
        """Whether none of the groups was changed yet in this draft; they count as changed from now on."""
        if not self.touched.isdisjoint(groups):
            return False
        self.touched.update(groups)
        return True

    def finish(self) -> tuple[list[tuple[int, ...]], list[int]]:
        kept = [g for g, members in enumerate(self.groups) if members]
        return [self.groups[g] for g in kept], [self.keys[g] for g in kept]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What moves look up and never change."""

    problem: Problem
    hops: Hops
    images: tuple[Symmetry, ...]  # identity first
    into: tuple[tuple[tuple[int, ...], ...], ...]  # [layer][rank] -> links whose far end it is
    batching: bool

    def image(self, symmetry: Symmetry, hop: int) -> int:
        hops = self.hops
        return hops.of(hops.layer[hop], symmetry.chunks[hops.chunk[hop]], symmetry.links[hops.link[hop]])


def _ready_fs(plan: Plan, hop: int) -> int:
    """When the data of a hop are there."""
    usable = plan.clock.usable_fs
    return max((usable[before] for before in plan.needs[hop]), default=0)


def _group_of(plan: Plan, hop: int) -> int:
    """The group of a hop of the plan, -1 for others."""
    known = plan.clock.group_of
    return known[hop] if hop < len(known) else -1


def _choose_part(plan: Plan, group: int, shuffle: random.Random) -> list[int] | None:
    """Some of a group's hops, to be sent before the rest: what others wait for, what is there early, or any."""
    members = plan.groups[group]
    if len(members) < 2:
        return None
    kind = shuffle.random()
    if kind < 0.4:
        path = plan.clock.critical()
        place = path.index(group) if group in path else 0
        if place:
            wanted = {before for hop in plan.groups[path[place - 1]] for before in plan.needs[hop]}
            part = [hop for hop in members if hop in wanted]
            if 0 < len(part) < len(members):
                return part
    by_ready = sorted(members, key=lambda hop: (_ready_fs(plan, hop), shuffle.random()))
    if kind < 0.7:
        cuts = [
            i
            for i in range(1, len(members))
            if _ready_fs(plan, by_ready[i - 1]) < _ready_fs(plan, by_ready[i])
        ]
        if cuts:
            return by_ready[: shuffle.choice(cuts)]
    return by_ready[
        : shuffle.choice((1, len(members) // 2, len(members) - 1, shuffle.randrange(1, len(members))))
    ]


def split(around: Surroundings, plan: Plan, group: int, shuffle: random.Random) -> Draft | None:
    """Send part of a message before the rest; sometimes all the way on, where the chunks travel together again."""
    part = _choose_part(plan, group, shuffle)
    if part is None:
        return None
    parts = [part, *_onward(plan, group, part)] if shuffle.random() < 0.5 else [part]
    draft = Draft.of(plan)
    for symmetry in around.images:
        for one in parts:
            first = [around.image(symmetry, hop) for hop in one]
            other = _group_of(plan, first[0])
            if other < 0 or any(_group_of(plan, hop) != other for hop in first) or not draft.take(other):
                continue
            rest = tuple(hop for hop in plan.groups[other] if hop not in first)
            if not rest:
                continue
            start = plan.clock.starts_fs[other]
            draft.groups[other] = rest
            draft.groups.append(tuple(first))
            draft.keys.append(min(start, max(_ready_fs(plan, hop) for hop in first)) - 1)
    return draft


def _onward(plan: Plan, group: int, part: list[int]) -> list[list[int]]:
    """Of the later messages that carry both what waits for the part and what waits for the rest: the former's hops."""
    early, late = set(part), set(plan.groups[group]) - set(part)
    found = []
    starts = plan.clock.starts_fs
    for later in sorted(range(len(plan.groups)), key=starts.__getitem__):
        if starts[later] <= starts[group]:
            continue
        members = plan.groups[later]
        first = [hop for hop in members if not early.isdisjoint(plan.needs[hop])]
        second = [hop for hop in members if not late.isdisjoint(plan.needs[hop])]
        early.update(first)
        late.update(second)
        if first and set(second) - set(first):
            found.append(first)
    return found


def _beside(around: Surroundings, plan: Plan, group: int, shuffle: random.Random) -> int | None:
    """The message before or after a group's on the same link, for the same purpose."""
    hops, starts = around.hops, plan.clock.starts_fs
    hop = plan.groups[group][0]
    link, layer = hops.link[hop], hops.layer[hop]
    same = [
        other
        for other, members in enumerate(plan.groups)
        if hops.link[members[0]] == link and hops.layer[members[0]] == layer
    ]
    if len(same) < 2:
        return None
    same.sort(key=lambda other: starts[other])
    place = same.index(group)
    sides = [same[i] for i in (place - 1, place + 1) if 0 <= i < len(same)]
    return shuffle.choice(sides)


def join(around: Surroundings, plan: Plan, group: int, shuffle: random.Random) -> Draft | None:
    """Send a message, or some of its chunks, with the one before or after it on the same link."""
    beside = _beside(around, plan, group, shuffle)
    if beside is None:
        return None
    part = (
        (_choose_part(plan, group, shuffle) or plan.groups[group])
        if shuffle.random() < 0.5
        else plan.groups[group]
    )
    draft = Draft.of(plan)
    starts = plan.clock.starts_fs
    for symmetry in around.images:
        moved = [around.image(symmetry, hop) for hop in part]
        a, b = _group_of(plan, moved[0]), _group_of(plan, around.image(symmetry, plan.groups[beside][0]))
        if (
            a < 0
            or b < 0
            or a == b
            or any(_group_of(plan, hop) != a for hop in moved)
            or not draft.take(a, b)
        ):
            continue
        draft.groups[a] = tuple(hop for hop in plan.groups[a] if hop not in moved)
        draft.groups[b] = plan.groups[b] + tuple(moved)
        ready = max(_ready_fs(plan, hop) for hop in draft.groups[b])
        draft.keys[b] = max(ready, min(starts[a], starts[b]))
    return draft


def shift(around: Surroundings, plan: Plan, group: int, shuffle: random.Random) -> Draft | None:
    """Let a message go before the one that it waited for at a link or port."""
    clock = plan.clock
    cause = clock.causes[group]
    if cause < 0 or not clock.by_port[group]:
        return None
    # Sometimes past several of them.
    while shuffle.random() < 0.3 and clock.causes[cause] >= 0 and clock.by_port[cause]:
        cause = clock.causes[cause]
    draft = Draft.of(plan)
    for symmetry in around.images:
        a = _group_of(plan, around.image(symmetry, plan.groups[group][0]))
        b = _group_of(plan, around.image(symmetry, plan.groups[cause][0]))
        if a < 0 or b < 0 or a == b or not draft.take(a):
            continue
        draft.keys[a] = clock.starts_fs[b] - 1
    return draft


def reroute(around: Surroundings, plan: Plan, group: int, shuffle: random.Random) -> Draft | None:
    """Bring one chunk of a message, or all of them, to the same rank another way."""
    problem, hops = around.problem, around.hops
    members = plan.groups[group]
    first = shuffle.choice(members)
    number, chunk, link = hops.layer[first], hops.chunk[first], hops.link[first]
    rank = far(problem, number, link)
    tree = plan.trees[number][chunk]
    ways = ways_to(problem, around.into[number], number, chunk, tree, rank)
    if not ways:
        return None
    way = shuffle.choice(ways)
    whole = len(members) > 1 and shuffle.random() < 0.4
    chunks = [hops.chunk[hop] for hop in members] if whole else [chunk]
    together = around.batching and shuffle.random() < 0.7
    draft = Draft.of(plan)
    draft.needs = list(plan.needs)
    starts, usable = plan.clock.starts_fs, plan.clock.usable_fs
    gone: set[int] = set()
    fresh: dict[tuple[int, int, int], list[int]] = {}  # (image, layer, link) -> new hops
    done: set[tuple[int, int]] = set()
    for place, symmetry in enumerate(around.images):
        turned = [symmetry.links[e] for e in way]
        for one in chunks:
            c = symmetry.chunks[one]
            if (c, turned[-1]) in done:
                continue
            done.add((c, turned[-1]))
            if far(problem, number, turned[-1]) not in draft.trees[number][c]:
                return None
            usable_links = problem.layers[number].usable[c]
            if whole and any(e not in usable_links for e in turned):
                continue
            before = draft.trees[number][c]
            moved = changed(problem, draft.trees, number, c, turned)
            if moved is None:
                if whole:
                    continue
                return None
            draft.trees = moved
            after = moved[number][c]
            gone |= {hops.of(number, c, e) for r, e in before.items() if after.get(r) != e}
            for r, e in after.items():
                if before.get(r) != e:
                    fresh.setdefault((place, number, e), []).append(hops.of(number, c, e))
    if not fresh:
        return None
    draft.needs += [()] * (len(hops.link) - len(draft.needs))
    for c in {hops.chunk[hop] for hop in gone} | {hops.chunk[hop] for new in fresh.values() for hop in new}:
        for hop, needs in needs_of(problem, hops, draft.trees, c):
            draft.needs[hop] = needs
    draft.needs += [()] * (len(hops.link) - len(draft.needs))
    for hop in gone:
        old = _group_of(plan, hop)
        if old >= 0:
            draft.groups[old] = tuple(h for h in draft.groups[old] if h != hop)
    known = len(usable)
    for (_, layer, link), new in fresh.items():
        new = [hop for hop in new if hop not in gone or _group_of(plan, hop) < 0]
        if not new:
            continue
        ready = max(
            (usable[b] for hop in new for b in draft.needs[hop] if b < known and usable[b] >= 0), default=0
        )
        if together:
            onto = [
                g
                for g, there in enumerate(plan.groups)
                if starts[g] >= ready
                and hops.link[there[0]] == link
                and hops.layer[there[0]] == layer
                and draft.groups[g]
            ]
            if onto:
                g = min(onto, key=lambda g: starts[g])
                draft.groups[g] = draft.groups[g] + tuple(new)
                continue
        if around.batching:
            draft.groups.append(tuple(new))
            draft.keys.append(ready)
        else:
            draft.groups += [(hop,) for hop in new]
            draft.keys += [ready] * len(new)
    return draft


def surroundings(problem: Problem, hops: Hops, images: Sequence[Symmetry], batching: bool) -> Surroundings:
    """What moves need to know of a problem; images with the identity first."""
    into = []
    for number, layer in enumerate(problem.layers):
        links: list[list[int]] = [[] for _ in range(problem.topology.ranks)]
        for link in sorted({e for usable in layer.usable for e in usable}):
            links[far(problem, number, link)].append(link)
        into.append(tuple(map(tuple, links)))
    return Surroundings(problem, hops, tuple(images), tuple(into), batching)
