"""The transport of host memory: shared memory within a node where there is some, MPI between nodes, paced there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taccl.runtime.bind import Compiled
from taccl.runtime.job import Job, Neighbours
from taccl.runtime.paced import PacedTransport
from taccl.runtime.shm import SharedMemoryTransport
from taccl.runtime.transport import Transport
from taccl.runtime.transports import MpiTransport


def host_kind(neighbours: Neighbours) -> str:
    """ "shm" where some ranks of the job share memory, else "mpi"."""
    return "shm" if any(len(ranks) > 1 for ranks in neighbours.sharing) else "mpi"


def host_transport(
    job: Job, compiled: Compiled, chunk_bytes: int, neighbours: Neighbours, kind: str, pace: bool = True
) -> tuple[Transport, Callable[[int, Any], Any] | None]:
    """The transport of a compiled program, and where the memory that it needs inside comes from (None: anywhere).

    kind: "shm", or "mpi" between all ranks. pace: between nodes messages go in confirmed segments.
    """
    over_mpi = MpiTransport(job.MPI, job.data, chunk_bytes)
    between: Transport = over_mpi
    if pace and len(set(neighbours.nodes)) > 1:
        between = PacedTransport(job.MPI, over_mpi, job.receipts, neighbours.nodes)
    if kind == "mpi":
        return between, None
    node = neighbours.sharing[job.rank]
    return SharedMemoryTransport(job.memory, job.rank, node, compiled.messages, between), job.memory.empty
