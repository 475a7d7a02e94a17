"""Latency bounds for small sizes: how far knowledge can spread when each message blocks its port.

Postal-model growth (Bar-Noy, Kipnis, "Designing broadcasting algorithms in the postal model") with two
additions: ports of different speed, and a cap on messages, because every message costs a port its occupancy
while the data that the rank must take anyway costs it bandwidth. For one port a rank, occupancy = alpha and
n blocks of time b this is the least T with broadcast growth in T / alpha rounds, at most (T - b(n-1)) / alpha
messages a rank, reaching n. The proofs are in docs/bounds.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from taccl.synth.bounds.network import Network, together

MAX_DEPTH = 100  # messages one after another; beyond them everything counts as known
MAX_STATES = 20_000


@dataclass(frozen=True, slots=True)
class Group:
    """Links into one rank that hold a common resource, so that their messages come one after another."""

    alpha: int  # least of its links
    occupancy: int  # least of its links
    beta: int  # of the common resource
    latency: int  # least of its links: alpha, and one chunk's transit where chunks are whole
    spacing: int  # least time from one message's start to the next one's
    senders: tuple[tuple[int, int], ...]  # (sender class, latency of the link), sorted, with repeats


@dataclass(frozen=True, slots=True)
class Spread:
    """Ranks in classes of equal surroundings: what each must take, from whom, through what."""

    class_of: tuple[int, ...]  # per rank
    groups: tuple[tuple[Group, ...], ...]  # per class
    forced: tuple[int, ...]  # per class: chunks that must enter a rank
    fastest: int  # least latency of a link
    slowest: int  # greatest latency of a link
    mutual: bool  # who can be told by a rank can also tell it


def spread(network: Network, forced: Sequence[int], backwards: bool = False) -> Spread:
    """Partition the ranks until equal class means equal surroundings (colour refinement)."""
    ends = [(b, a) for a, b in network.ends] if backwards else list(network.ends)
    into: list[list[int]] = [[] for _ in range(network.ranks)]
    for link, (_, b) in enumerate(ends):
        into[b].append(link)
    bundles = [sorted(together(network, links).items()) for links in into]
    classes = _numbered([(chunks,) for chunks in forced])
    while True:
        views = [
            (classes[rank], *sorted(_group(network, ends, classes, *item) for item in bundles[rank]))
            for rank in range(network.ranks)
        ]
        refined = _numbered(views)
        if max(refined) == max(classes):
            break
        classes = refined
    first = [classes.index(c) for c in range(max(classes) + 1)]
    groups = tuple(
        tuple(Group(*_group(network, ends, classes, *item)) for item in bundles[rank]) for rank in first
    )
    latencies = [network.latency(link) for link in range(len(ends))] or [0]
    needs = tuple(forced[r] for r in first)
    return Spread(
        tuple(classes), groups, needs, min(latencies), max(latencies),
        set(ends) == {(b, a) for a, b in ends},
    )  # fmt: skip


def message_cap(groups: Sequence[Group], forced: int, ticks: int) -> int | None:
    """Most messages that a rank can take before tick `ticks` + 1; None when nothing limits them.

    For a resource used by m messages with b chunks: alpha + (m - 1) occupancy + beta b <= T. Summed over the
    rank's resources in chunks: sum m * occupancy / beta <= sum (T - alpha + occupancy) / beta - forced.
    Negative when T is too short even for the forced chunks.
    """
    room = Fraction(-forced)
    cheapest: Fraction | None = None
    for group in groups:
        if ticks + 1 > group.alpha:
            room += Fraction(ticks + 1 - group.alpha + group.occupancy, group.beta)
            price = Fraction(group.occupancy, group.beta)
            cheapest = price if cheapest is None else min(cheapest, price)
    if cheapest is None:
        return 0
    # T stays below ticks + 1, so the quotient is not reached.
    return math.ceil(room / cheapest) - 1 if cheapest else None


@dataclass(slots=True)
class Reach:
    """Greatest number of ranks whose data can be at a rank of a class, by time, not through one neighbour."""

    spread: Spread
    caps: Sequence[int | None]
    enough: int
    memo: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def __call__(self, at: int, barred: int, time: int) -> int:
        """barred: class of the rank that will be told (its data does not come through it), -1 for none."""
        # Where an exact count would cost too much, the upper estimate "everything" keeps the bound valid.
        if time >= min(self.spread.slowest * self.enough, self.spread.fastest * MAX_DEPTH):
            return self.enough
        key = (at, barred, time)
        if key not in self.memo:
            if len(self.memo) > MAX_STATES:
                return self.enough
            self.memo[key] = self._count(at, barred, time)
        return self.memo[key]

    def _count(self, at: int, barred: int, time: int) -> int:
        groups = self.spread.groups[at]
        options = {(g, s) for g in groups for s in g.senders if s[0] == barred}
        if not options:
            return self._told(at, groups, time)
        # One of these links comes from the barred rank; which one is not known, so the best case counts.
        best = 0
        for group, sender in sorted(options, key=lambda option: (option[0].senders, option[1])):
            senders = list(group.senders)
            senders.remove(sender)
            place = groups.index(group)
            rest = replace(group, senders=tuple(senders))
            best = max(best, self._told(at, (*groups[:place], rest, *groups[place + 1 :]), time))
        return best

    def _told(self, at: int, groups: Sequence[Group], time: int) -> int:
        # A one-way link: the rank that is told need not be among those that tell, so none of these can be left out.
        barred = at if self.spread.mutual else -1
        values: list[int] = []
        for group in groups:
            kinds = sorted(set(group.senders))
            for slot in range(len(group.senders)):
                start = time - group.latency - slot * group.spacing
                if start < 0:
                    break
                value = max(
                    (self(sender, barred, min(start, time - late)) for sender, late in kinds if time >= late),
                    default=0,
                )
                if value >= self.enough - 1 and self.caps[at] != 0:
                    return self.enough
                values.append(value)
        values.sort(reverse=True)
        return min(self.enough, 1 + sum(values[: self.caps[at]]))


def growth_time(
    network: Network,
    forced: Sequence[int],
    needed: Mapping[int, int],
    start: int,
    backwards: bool = False,
) -> tuple[int, int] | None:
    """(time in ticks, rank) above `start` before which some rank cannot have heard from enough ranks.

    forced: chunks that must enter each rank. needed: for each rank how many ranks, itself included, have
    data for it. backwards: the same for leaving data, spreading from a rank. None: nothing is proved.
    """
    around = spread(network, forced, backwards)
    if around.fastest <= 0 or not needed:
        return None
    best: tuple[int, int] | None = None
    targets = {(around.class_of[rank], count): rank for rank, count in sorted(needed.items(), reverse=True)}
    for (at, count), rank in sorted(targets.items()):
        low = start if best is None else best[0]

        def possible(ticks: int, at: int = at, count: int = count) -> bool:
            caps = [message_cap(g, f, ticks) for g, f in zip(around.groups, around.forced, strict=True)]
            if any(cap is not None and cap < 0 for cap in caps):
                return False
            return Reach(around, caps, count)(at, -1, ticks) >= count

        if possible(low):
            continue
        step = max(1, around.slowest)
        high = low + step
        while not possible(high):
            low, step = high, 2 * step
            high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if possible(middle) else (middle, high)
        best = (high, rank)
    return best


def relay_time(network: Network, forced: Sequence[int], per_pair: int, start: int) -> int | None:
    """Alltoall of `per_pair` chunks or more a pair: few messages mean relays, relays mean traffic.

    With m messages into a rank at most m of its sources are direct and at most m * (greatest m) more are two
    hops away; the rest need three. Time in ticks above `start`, None when nothing above it is proved.
    """
    if not network.alpha or per_pair < 1 or network.ranks < 2:
        return None
    around = spread(network, forced)
    others = network.ranks - 1

    def possible(ticks: int) -> bool:
        caps = [message_cap(g, f, ticks) for g, f in zip(around.groups, around.forced, strict=True)]
        limited = [cap for cap in caps if cap is not None]
        if any(cap < 1 for cap in limited):
            return False
        most = min(others, max(limited)) if len(limited) == len(caps) else others
        room, cheapest = Fraction(0), None
        for at in around.class_of:
            for group in around.groups[at]:
                if ticks + 1 > group.alpha:
                    room += Fraction(ticks + 1 - group.alpha + group.occupancy, group.beta)
                    price = Fraction(group.occupancy, group.beta)
                    cheapest = price if cheapest is None else min(cheapest, price)
        if cheapest is None:
            return False
        # Traffic is convex and piecewise linear in the messages a rank, so its least lies at a bend.
        bends = {Fraction(1), Fraction(most), min(Fraction(most), Fraction(others, 1 + most))}
        least = min(
            m * cheapest + per_pair * max(3 * others - 2 * m - m * most, 2 * others - m)
            for m in bends
            if m >= 1
        )
        # Below tick + 1 the room is not quite reached.
        return network.ranks * least < room

    if possible(start):
        return None
    low, step = start, max(1, around.slowest)
    high = low + step
    while not possible(high):
        low, step = high, 2 * step
        high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return high


def _group(
    network: Network,
    ends: Sequence[tuple[int, int]],
    classes: Sequence[int],
    common: int,
    links: Sequence[int],
) -> tuple[int, int, int, int, int, tuple[tuple[int, int], ...]]:
    return (
        min(network.alpha[e] for e in links),
        min(network.occupancy[e] for e in links),
        network.beta[common],
        min(network.latency(e) for e in links),
        min(network.occupancy[e] for e in links) + network.grain * network.beta[common],
        tuple(sorted((classes[ends[e][0]], network.latency(e)) for e in links)),
    )


def _numbered(keys: Sequence[object]) -> list[int]:
    """Equal keys get equal numbers, in order of first appearance."""
    number: dict[object, int] = {}
    return [number.setdefault(key, len(number)) for key in keys]
