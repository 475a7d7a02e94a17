"""The transport of host memory: shared memory within a node where there is some, MPI between nodes, paced there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from taccl.profiles.topology import Topology
from taccl.runtime.bind import Compiled
from taccl.runtime.job import Job, Neighbours
from taccl.runtime.paced import PLAIN_BYTES, PacedTransport
from taccl.runtime.shm import SharedMemoryTransport
from taccl.runtime.transport import Transport
from taccl.runtime.transports import MpiTransport
from taccl.runtime.turns import turns


def host_kind(neighbours: Neighbours) -> str:
    """ "shm" where some ranks of the job share memory, else "mpi"."""
    return "shm" if any(len(ranks) > 1 for ranks in neighbours.sharing) else "mpi"


def host_transport(
    job: Job,
    compiled: Compiled,
    chunk_bytes: int,
    neighbours: Neighbours,
    kind: str,
    pace: bool = True,
    topology: Topology | None = None,
) -> tuple[Transport, Callable[[int, Any], Any] | None]:
    """The transport of a compiled program, and where the memory that it needs inside comes from (None: anywhere).

    kind: "shm", or "mpi" between all ranks. pace: between nodes messages go in confirmed segments. topology: the
    cluster, where it is known; there they keep the turns that its model gives them, too.
    """
    over_mpi = MpiTransport(job.MPI, job.data, chunk_bytes)
    between: Transport = over_mpi
    if pace and len(set(neighbours.nodes)) > 1:
        found = None
        if topology is not None:
            found = job.together(
                "the making of turns",
                lambda: turns(
                    compiled.program, compiled.collective, compiled.order, compiled.plans, topology,
                    neighbours.nodes, chunk_bytes, PLAIN_BYTES,
                ),
            )  # fmt: skip
            job.agree_on(hashlib.sha256(repr(sorted(found.items())).encode()).digest(), "cluster (--profile)")
        between = PacedTransport(job.MPI, over_mpi, job.receipts, neighbours.nodes, found, job.notices)
    if kind == "mpi":
        return between, None
    node = neighbours.sharing[job.rank]
    return SharedMemoryTransport(job.memory, job.rank, node, compiled.messages, between), job.memory.empty
