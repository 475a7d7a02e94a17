"""How much a set of links and ports can carry by a time: the one inequality behind all bounds at scale.

Messages hold a resource one after another. If the last of them starts at s and arrives at s + transit <= T, everything
before it is through at s. So a resource carries at most (T - lag) / hold chunks, where hold is what a chunk keeps it
busy at least and lag what the last message needs beyond that at least. Three grains (docs/bounds.md): "fluid" data has
no size, "whole" chunks may share messages, "single" ones may not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.cost import FS_PER_US, ceil_fs
from taccl.synth.symmetric.group import Ints

GRAINS = ("fluid", "whole", "single")


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


def pricing(topology: Topology, links: LinkTable, chunk_bytes: Fraction, grain: str) -> Pricing:
    """Prices of a chunk at a grain, one of GRAINS."""
    per_byte = chunk_bytes / 10**6

    def fs(value_us: Fraction) -> Fraction:
        return value_us * FS_PER_US if grain == "fluid" else Fraction(ceil_fs(value_us))

    rates: dict[Fraction, int] = {}
    rate = np.array([rates.setdefault(port.beta_us_per_mb, len(rates)) for port in topology.ports], np.int64)
    return Pricing(
        links,
        grain,
        tuple(fs(c.alpha_us) for c in links.classes),
        tuple(fs(c.occupancy_us) for c in links.classes),
        tuple(fs(c.beta_us_per_mb * per_byte) for c in links.classes),
        rate,
        tuple(fs(beta * per_byte) for beta in rates),
    )


def capacity(priced: Pricing, which: Ints, side: str, tail_fs: Fraction | int = 0) -> Capacity:
    """The capacity of the links `which`, seen through one resource of each.

    side: "in" the last port of a link, "out" the first, "link" the link itself; a link without ports is itself. tail_fs
    is what is to come after an arrival.
    """
    links = priced.links
    ports = links.ports[which]
    chosen = np.full(len(which), -1, np.int64)
    if side != "link" and ports.shape[1]:
        counts = (ports >= 0).sum(axis=1)
        column = np.maximum(counts - 1, 0) if side == "in" else np.zeros(len(which), np.int64)
        chosen = np.where(counts > 0, ports[np.arange(len(which)), column], -1)
    # One line for each resource and each kind of link that holds it; few kinds in all.
    slowest = slowest_rate(priced, which)
    resource = np.where(chosen >= 0, chosen, len(priced.rate) + which)
    kinds = np.stack([resource, np.where(chosen >= 0, priced.rate[chosen] if len(priced.rate) else 0, -1),
                      links.link_class[which], slowest])  # fmt: skip
    lines = np.unique(kinds, axis=1)
    numbers: dict[tuple[int, int, int], tuple[Fraction, Fraction]] = {}
    of_resource: dict[int, tuple[Fraction, Fraction]] = {}  # (last message, hold)
    for r, port_rate, link_class, slow in lines.T.tolist():
        key = (port_rate, link_class, slow)
        if key not in numbers:
            numbers[key] = _numbers(priced, *key)
        last, hold = numbers[key]
        known = of_resource.get(r)
        of_resource[r] = (last, hold) if known is None else (min(last, known[0]), min(hold, known[1]))
    counted = Counter(of_resource.values())
    classes = tuple((count, last - hold + tail_fs, hold) for (last, hold), count in sorted(counted.items()))
    return Capacity(classes, priced.grain != "fluid")


def slowest_rate(priced: Pricing, which: Ints) -> Ints:
    """Per link which rate of its ports is the slowest: index into `held`, -1 for none."""
    ports = priced.links.ports[which]
    if not ports.shape[1] or not len(priced.rate):
        return np.full(len(which), -1, np.int64)
    order = np.argsort(np.array([float(h) for h in priced.held]), kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    best = np.where(ports >= 0, place[priced.rate[ports]], -1).max(axis=1)
    return np.where(best >= 0, order[best], -1)


def _numbers(priced: Pricing, port_rate: int, link_class: int, slowest: int) -> tuple[Fraction, Fraction]:
    """(the least time of a message, hold of a chunk) of a resource crossed by links of one kind."""
    own = priced.own[link_class]
    hold = priced.held[port_rate] if port_rate >= 0 else own
    transit = max(own, priced.held[slowest]) if slowest >= 0 else own
    alpha, occupancy = priced.alpha[link_class], priced.occupancy[link_class]
    if priced.grain == "fluid":
        return alpha + hold, hold  # however little it carries
    return alpha + transit, hold if priced.grain == "whole" else occupancy + hold
