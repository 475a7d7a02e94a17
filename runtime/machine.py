"""The machine that a rank runs on, with the cores and the memory that it shares with other ranks.

Containers and network namespaces of one machine look like nodes of their own to MPI and share no memory, but they have
one kernel, and what one of them takes from a core the others lack. Kernels are told apart by the identifier that each
draws when it boots (random(4)).
"""

from __future__ import annotations

import functools
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taccl.runtime import control_group

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ID_BYTES = 64
CORES_BYTES = 1024  # of a mask of cores


@dataclass(frozen=True, slots=True)
class Machine:
    """ranks: of the job on this rank's machine. cores: that some of them may use; launchers bind each to some, and the
    control group of a container or of a batch job may leave its ranks the time of fewer."""

    ranks: int
    cores: int


def identity(node: int) -> str:
    """What ranks of one machine have alike, and those of two do not. node: the first rank that shares memory with this
    one, which tells nodes apart where the kernel says nothing."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return f"node {node}"


def machine(comm: Any, node: int) -> Machine:
    """This rank's one; collective over all ranks."""
    mine = identity(node).encode()[:ID_BYTES].ljust(ID_BYTES, b"\0")
    everyone = bytearray(ID_BYTES * comm.Get_size())
    comm.Allgather(bytearray(mine), everyone)
    rows = [bytes(everyone[first : first + ID_BYTES]) for first in range(0, len(everyone), ID_BYTES)]
    here = comm.Split(rows.index(mine), comm.Get_rank())
    own = sum(1 << core for core in os.sched_getaffinity(0) if core < 8 * CORES_BYTES)
    masks = array("B", bytes(CORES_BYTES * here.Get_size()))
    here.Allgather(bytearray(own.to_bytes(CORES_BYTES, "little")), masks)
    parts = [
        int.from_bytes(masks[first : first + CORES_BYTES], "little")
        for first in range(0, len(masks), CORES_BYTES)
    ]
    # Ranks that share memory have one container.
    limits = array("q", bytes(16 * here.Get_size()))
    here.Allgather(array("q", [node, control_group.cores()]), limits)
    found = Machine(here.Get_size(), usable(list(zip(limits[::2], parts, limits[1::2], strict=True))))
    here.Free()
    return found


def usable(ranks: Sequence[tuple[int, int, int]]) -> int:
    """Cores that ranks of one machine have, each (its container, mask of cores, cores' worth of time or 0)."""
    union = functools.reduce(int.__or__, (mask for _, mask, _ in ranks)).bit_count()
    containers = {
        name: min((n for other, _, n in ranks if other == name and n), default=union) for name, _, _ in ranks
    }
    return min(union, sum(containers.values()))
