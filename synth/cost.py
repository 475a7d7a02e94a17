"""The one cost model: LogGP with shared ports, in integer femtoseconds.

A message of `count` chunks over link l that starts at t arrives at `t + alpha + count * chunk_fs` where
chunk_fs is the time of one chunk at the slowest beta of the link and its ports; it holds the link and each
port from t for `occupancy + count * hold_fs` of that resource. 1 us/MB is 10^3 fs per byte; a chunk's time
is rounded up to a whole femtosecond once, here, so every later sum is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import isqrt

from taccl.profiles.topology import Topology

FS_PER_US = 10**9
# A chunk that takes this much longer than its message's fixed cost gains nothing from company.
LONG_CHUNK = 20


def load_fs(topology: Topology, messages: int) -> int:
    """What so many messages take from the cores that ranks share; part of no time."""
    return messages * ceil_fs(topology.load_us)


def judged_fs(topology: Topology, time_fs: int, messages: int) -> int:
    """What schedules are compared by: their time, and what their messages take from cores that ranks share.

    Cores work while links do, but a message on the way that decides waits for them. So the two count for less than
    their sum, and for more than the longer of them: as the sides of a right angle.
    """
    load = load_fs(topology, messages)
    return isqrt(time_fs * time_fs + load * load) if load else time_fs


def ceil_fs(us: Fraction) -> int:
    """A duration in us as femtoseconds, rounded up."""
    return -((-us.numerator * FS_PER_US) // us.denominator)


def us(fs: int) -> float:
    """Femtoseconds as us for people and JSON (picosecond precision)."""
    return round(fs / FS_PER_US, 6)


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations on one topology at one chunk size. Resource ids: link i is i, port p is len(links) + p."""

    chunk_bytes: Fraction
    alpha_fs: tuple[int, ...]  # per link
    occupancy_fs: tuple[int, ...]  # per link
    chunk_fs: tuple[int, ...]  # per link: transit of one chunk at the slowest beta
    holds: tuple[tuple[tuple[int, int], ...], ...]  # per link: (resource id, hold of one chunk in fs)
    reduce_alpha_fs: int
    reduce_chunk_fs: int
    resources: int  # number of resource ids

    def transit(self, link: int, count: int) -> int:
        """From a message's start to its arrival."""
        return self.alpha_fs[link] + count * self.chunk_fs[link]

    def hold(self, link: int, per_chunk: int, count: int) -> int:
        """How long a message holds a resource whose hold of one chunk is `per_chunk`."""
        return self.occupancy_fs[link] + count * per_chunk

    def reduce(self, count: int) -> int:
        """Time of reducing an arrived message of `count` chunks into local data."""
        return self.reduce_alpha_fs + count * self.reduce_chunk_fs


def costs(topology: Topology, chunk_bytes: Fraction) -> Costs:
    """Price every link of a topology for messages made of chunks of `chunk_bytes`."""
    per_byte = chunk_bytes / 10**6  # us/MB times this gives us

    @cache
    def hold_fs(beta_us_per_mb: Fraction) -> int:
        return ceil_fs(beta_us_per_mb * per_byte)

    duration_fs = cache(ceil_fs)
    port_fs = [hold_fs(port.beta_us_per_mb) for port in topology.ports]
    first_port = len(topology.links)
    alpha_fs, occupancy_fs, chunk_fs, holds = [], [], [], []
    for index, link in enumerate(topology.links):
        alpha_fs.append(duration_fs(link.alpha_us))
        occupancy_fs.append(duration_fs(link.occupancy_us))
        own = (index, hold_fs(link.beta_us_per_mb))
        held = (own, *((first_port + port, port_fs[port]) for port in link.ports))
        chunk_fs.append(max(fs for _, fs in held))  # rounding up keeps the order of betas
        holds.append(held)
    return Costs(
        chunk_bytes=chunk_bytes,
        alpha_fs=tuple(alpha_fs),
        occupancy_fs=tuple(occupancy_fs),
        chunk_fs=tuple(chunk_fs),
        holds=tuple(holds),
        reduce_alpha_fs=ceil_fs(topology.reduce_alpha_us),
        reduce_chunk_fs=hold_fs(topology.reduce_beta_us_per_mb),
        resources=first_port + len(topology.ports),
    )


def late_costs(topology: Topology, chunk_bytes: Fraction) -> Costs:
    """The prices by which schedules are tried where ranks share cores, beside the links as they are.

    `load` is what a message adds to the time of all, half at either end. A rank has its share of the cores, so its part
    of a message keeps it as many times longer as there are ranks: that is a resource of each rank. And a message waits
    until its receiver has a core, now longer, now shorter: latencies are half as long again. Within a node a message is
    a copy, whose core another rank may want at any time: there bytes take twice as long to arrive, too, though what all
    share carries as many as ever.
    """
    priced, share_fs = costs(topology, chunk_bytes), ceil_fs(topology.load_us * topology.ranks / 2)
    first, held = priced.resources, zip(priced.holds, topology.links, strict=True)
    occupancy_fs = tuple(fs + share_fs for fs in priced.occupancy_fs)
    node_of = {rank: number for number, ranks in enumerate(topology.nodes) for rank in ranks}
    copied = (node_of[link.src] == node_of[link.dst] for link in topology.links)
    return replace(
        priced,
        chunk_fs=tuple(2 * fs if near else fs for fs, near in zip(priced.chunk_fs, copied, strict=True)),
        alpha_fs=tuple(max(a * 3 // 2, o) for a, o in zip(priced.alpha_fs, occupancy_fs, strict=True)),
        occupancy_fs=occupancy_fs,
        holds=tuple((*holds, (first + link.src, 0), (first + link.dst, 0)) for holds, link in held),
        resources=first + topology.ranks,
    )
