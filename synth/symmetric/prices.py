"""Prices of links as columns: the one cost model (synth/cost.py) for machines with very many links."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from taccl.errors import UsageError
from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.cost import ceil_fs

Ints = NDArray[np.int64]

# 4.5 s. Sums of many durations must stay below 2^63 fs (9 200 s); no collective has a single one this long.
LONGEST_FS = 1 << 52


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Durations in fs at one chunk size; entry i of each column belongs to link i, as in `cost.Costs`."""

    alpha_fs: Ints
    occupancy_fs: Ints
    chunk_fs: Ints  # transit of one chunk at the slowest beta
    own_hold_fs: Ints  # hold of the link itself by one chunk
    port_hold_fs: Ints  # [ports]: hold of a port by one chunk
    reduce_alpha_fs: int
    reduce_chunk_fs: int


def prices(topology: Topology, links: LinkTable, chunk_bytes: Fraction) -> Prices:
    """Price every link. Raises UsageError where a chunk takes more than 4 s (no int64 sum would be safe)."""
    per_byte = chunk_bytes / 10**6
    port_hold = np.array(
        [_checked(ceil_fs(port.beta_us_per_mb * per_byte)) for port in topology.ports], np.int64
    )
    by_class = [
        [_checked(ceil_fs(us)) for us in (c.alpha_us, c.occupancy_us, c.beta_us_per_mb * per_byte)]
        for c in links.classes
    ]
    table = np.array(by_class, np.int64).reshape(-1, 3)
    alpha, occupancy, own = table[links.link_class].T
    slowest = own.copy()
    if links.ports.shape[1] and len(port_hold):
        # Rounding up keeps order, so the slowest of rounded holds is the rounded slowest.
        held = np.where(links.ports >= 0, port_hold[links.ports], 0)
        slowest = np.maximum(slowest, held.max(axis=1))
    return Prices(
        alpha,
        occupancy,
        slowest,
        own,
        port_hold,
        _checked(ceil_fs(topology.reduce_alpha_us)),
        _checked(ceil_fs(topology.reduce_beta_us_per_mb * per_byte)),
    )


def _checked(fs: int) -> int:
    if fs > LONGEST_FS:
        raise UsageError("a chunk of this size takes more than 4 s on a link; cut it finer (--partition)")
    return fs
