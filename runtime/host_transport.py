"""The transport of host memory: shared memory within a node where there is some, TCP or paced MPI between nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from taccl.profiles.topology import Topology
from taccl.runtime import mpi
from taccl.runtime.bind import Compiled
from taccl.runtime.job import Job, Neighbours
from taccl.runtime.pace import paces
from taccl.runtime.paced import PacedTransport, channels
from taccl.runtime.shm import SharedMemoryTransport
from taccl.runtime.tcp_transport import TcpTransport
from taccl.runtime.transport import Transport
from taccl.runtime.transports import MpiTransport
from taccl.runtime.turns import Turns, turns


def host_kind(neighbours: Neighbours) -> str:
    """ "shm" where some ranks of the job share memory, else "tcp" where they have connections, or "mpi"."""
    if any(len(ranks) > 1 for ranks in neighbours.sharing):
        return "shm"
    return "mpi" if neighbours.tcp is None else "tcp"


def agreed_turns(
    job: Job, compiled: Compiled, chunk_bytes: int, neighbours: Neighbours, topology: Topology, wanted: bool
) -> Turns | None:
    """The turns that messages take on this cluster, agreed by all ranks; None on one node. wanted: False for their
    order alone."""
    if len(set(neighbours.nodes)) == 1:
        return None
    found = job.together(
        "the making of turns",
        lambda: turns(
            compiled.program, compiled.collective, compiled.order, compiled.plans, topology,
            neighbours.nodes, chunk_bytes, wanted,
        ),
    )  # fmt: skip
    _agree_on(job, found.gates)
    return found


def _agree_on(job: Job, made: Mapping[Any, Any]) -> None:
    """Of what every rank makes from its profile."""
    digest = hashlib.sha256(repr(sorted(made.items())).encode()).digest()
    job.agree_on(digest, "cluster (--profile)")


def host_transport(
    job: Job,
    compiled: Compiled,
    chunk_bytes: int,
    neighbours: Neighbours,
    kind: str,
    pace: bool = True,
    taken: Turns | None = None,
    topology: Topology | None = None,
) -> tuple[Transport, Callable[[int, Any], Any] | None]:
    """The transport of a compiled program, and where the memory that it needs inside comes from (None: anywhere).

    kind: "shm", or "tcp" or "mpi" between all ranks. pace: between nodes messages over MPI go in confirmed segments.
    taken: turns that they keep there and their order, the same on all ranks. topology: the cluster, where it is known.
    """
    over_mpi = MpiTransport(job.MPI, job.data, chunk_bytes)
    between: Transport = over_mpi
    if neighbours.tcp is not None and kind != "mpi":
        gates = {} if taken is None else taken.gates
        known = {} if topology is None else paces(topology, "TCP", longer=not gates)
        _agree_on(job, known)
        begins = () if taken is None else taken.begins
        between = TcpTransport(neighbours.tcp, job.rank, over_mpi, gates, known, begins)
    elif pace and len(set(neighbours.nodes)) > 1:
        gates = {} if taken is None else taken.gates
        # A turn is handed over when a segment has come, so those of messages with turns must not be long.
        library = mpi.library(job.MPI).name
        known = {} if topology is None else paces(topology, library, longer=not gates)
        _agree_on(job, known)
        between = PacedTransport(
            job.MPI, over_mpi, job.receipts, neighbours.nodes, gates, job.notices,
            channels(compiled.plans[job.rank]), known,
        )  # fmt: skip
    if kind in ("mpi", "tcp"):
        return between, None
    node = neighbours.sharing[job.rank]
    reads = not neighbours.no_reading
    bells = None if between.sleeper is None else between.sleeper.bells
    return SharedMemoryTransport(
        job.memory, job.rank, node, compiled.messages, between, reads, bells
    ), job.memory.empty
