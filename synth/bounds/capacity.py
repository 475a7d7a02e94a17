"""How much a set of links and ports can carry by a time: the one inequality behind all bounds at scale.

Messages hold a resource one after another. If the last of them starts at s and arrives at s + transit <= T, everything
before it is through at s. So a resource carries at most (T - lag) / hold chunks, where hold is what a chunk keeps it
busy at least and lag what the last message needs beyond that at least. Three grains (docs/bounds.md): "fluid" data has
no size, "whole" chunks may share messages, "single" ones may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.cost import FS_PER_US, ceil_fs
from taccl.synth.symmetric.group import Ints

GRAINS = ("fluid", "whole", "single")
LINK = "link"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Resources that must carry something, told apart by their numbers: (how many, lag, hold of a chunk), in fs."""

    classes: tuple[tuple[int, Fraction, Fraction], ...]
    floors: bool  # whole chunks only

    def carried(self, time_fs: Fraction | int) -> Fraction:
        """Chunks that have arrived by a time, at most."""
        total = Fraction(0)
        for count, lag, hold in self.classes:
            if time_fs > lag:
                chunks = (time_fs - lag) / hold
                total += count * (chunks.__floor__() if self.floors else chunks)
        return total

    def least_time(self, chunks: Fraction | int) -> int:
        """The first whole fs by which so many chunks can have arrived; -1 when they never can."""
        return _least_time(self, chunks)


@lru_cache(maxsize=4096)
def _least_time(resources: Capacity, chunks: Fraction | int) -> int:
    if chunks <= 0:
        return 0
    if not resources.classes:
        return -1
    low, high = 0, 1
    while resources.carried(high) < chunks:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if resources.carried(middle) >= chunks:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True, slots=True, eq=False)
class Pricing:
    """Durations by link class and by port, exact for the fluid grain, as the cost model rounds them otherwise."""

    links: LinkTable
    grain: str
    alpha: tuple[Fraction, ...]  # per link class, fs
    occupancy: tuple[Fraction, ...]
    own: tuple[Fraction, ...]  # hold of a chunk by the link itself
    rate: Ints  # per port: which of `held`
    held: tuple[Fraction, ...]  # hold of a chunk by ports of one beta
    ports: dict[str, Ints]  # by side, different ones: per link a port, -1 for none
    slowest: Ints  # per link which of `held` is that of its slowest port, -1 for none


def pricing(topology: Topology, links: LinkTable, chunk_bytes: Fraction, grain: str) -> Pricing:
    """Prices of a chunk at a grain, one of GRAINS."""
    per_byte = chunk_bytes / 10**6

    def fs(value_us: Fraction) -> Fraction:
        return value_us * FS_PER_US if grain == "fluid" else Fraction(ceil_fs(value_us))

    rates: dict[Fraction, int] = {}
    rate = np.array([rates.setdefault(port.beta_us_per_mb, len(rates)) for port in topology.ports], np.int64)
    none = np.full(len(links), -1, np.int64)
    slowest = none
    sides: dict[str, Ints] = {}
    if links.ports.shape[1] and len(rate):
        counts = (links.ports >= 0).sum(axis=1)
        rows = np.arange(len(links))
        # From a link's source to its destination: on a fat tree the second and the last but one are shared uplinks.
        for side, column in (
            ("out", np.zeros(len(links), np.int64)),
            ("second", np.minimum(1, np.maximum(counts - 1, 0))),
            ("last but one", np.maximum(counts - 2, 0)),
            ("in", np.maximum(counts - 1, 0)),
        ):
            chosen = np.where(counts > 0, links.ports[rows, column], -1)
            if not any(np.array_equal(chosen, known) for known in sides.values()):
                sides[side] = chosen
        order = np.array(sorted(range(len(rates)), key=list(rates).__getitem__), np.int64)
        place = np.argsort(order)
        most = np.where(links.ports >= 0, place[rate[links.ports]], -1).max(axis=1)
        slowest = np.where(most >= 0, order[most], -1)
    return Pricing(
        links,
        grain,
        tuple(fs(c.alpha_us) for c in links.classes),
        tuple(fs(c.occupancy_us) for c in links.classes),
        tuple(fs(c.beta_us_per_mb * per_byte) for c in links.classes),
        rate,
        tuple(fs(beta * per_byte) for beta in rates),
        sides,
        slowest,
    )


def capacity(priced: Pricing, which: Ints, side: str) -> Capacity:
    """The capacity of the links `which`, seen through one resource of each.

    side: LINK, the link itself, or one of `priced.ports`. A link without ports is itself.
    """
    rates, classes = 1 + len(priced.held), len(priced.own)
    chosen = np.full(len(which), -1, np.int64)
    if side != LINK:
        chosen = priced.ports[side][which]
    through = chosen >= 0
    # Few kinds of use in all: (rate of the chosen port, class of the link, its slowest port's rate).
    kind = (priced.links.link_class[which] * rates + 1 + priced.slowest[which]) * rates
    kind[through] += 1 + priced.rate[chosen[through]]
    present = np.flatnonzero(np.bincount(kind, minlength=rates * rates * classes))
    numbers = [
        _numbers(priced, k % rates - 1, k // (rates * rates), k // rates % rates - 1)
        for k in present.tolist()
    ]
    lasts, holds = (sorted({pair[i] for pair in numbers}) for i in (0, 1))
    place_of = np.zeros((2, rates * rates * classes), np.int64)  # among lasts, among holds
    for k, (last, hold) in zip(present.tolist(), numbers, strict=True):
        place_of[:, k] = lasts.index(last), holds.index(hold)
    # Of a port the least of either; of a link that stands for itself its own.
    last_at, hold_at = np.full((2, len(priced.rate)), len(numbers), np.int64)
    np.minimum.at(last_at, chosen[through], place_of[0, kind[through]])
    np.minimum.at(hold_at, chosen[through], place_of[1, kind[through]])
    used = last_at < len(numbers)
    pairs = np.concatenate([
        last_at[used] * len(holds) + hold_at[used],
        place_of[0, kind[~through]] * len(holds) + place_of[1, kind[~through]],
    ])  # fmt: skip
    counts = np.bincount(pairs, minlength=len(lasts) * len(holds)) if len(pairs) else np.zeros(0, np.int64)
    found = []
    for pair in np.flatnonzero(counts).tolist():
        last, hold = lasts[pair // len(holds)], holds[pair % len(holds)]
        found.append((int(counts[pair]), last - hold, hold))
    return Capacity(tuple(found), priced.grain != "fluid")


def _numbers(priced: Pricing, port_rate: int, link_class: int, slowest: int) -> tuple[Fraction, Fraction]:
    """(the least time of a message, hold of a chunk) of a resource crossed by links of one kind."""
    own = priced.own[link_class]
    hold = priced.held[port_rate] if port_rate >= 0 else own
    transit = max(own, priced.held[slowest]) if slowest >= 0 else own
    alpha, occupancy = priced.alpha[link_class], priced.occupancy[link_class]
    if priced.grain == "fluid":
        return alpha + hold, hold  # however little it carries
    return alpha + transit, hold if priced.grain == "whole" else occupancy + hold
