"""Whether a size fits into the memory that is free, before any of it is taken."""

from __future__ import annotations

import resource
from pathlib import Path

from taccl.errors import EnvironmentProblem
from taccl.runtime import control_group, gpu
from taccl.runtime.bench_settings import Settings
from taccl.runtime.bind import Compiled, buffer_elements
from taccl.runtime.control_group import NO_LIMIT
from taccl.runtime.dtypes import DType
from taccl.runtime.job import Job, Neighbours
from taccl.runtime.layout import Layout
from taccl.runtime.shm import ROOM_BYTES, ROOMS

MEMORY_SHARE = 0.9  # of what is free; the rest is for Python and the MPI library
MEMINFO = Path("/proc/meminfo")


def check_memory(
    job: Job,
    compiled: Compiled,
    shape: Layout,
    dtype: DType,
    settings: Settings,
    neighbours: Neighbours,
    inside: int,
    pinned: int,
    pageable: int,
    cuda: gpu.Cuda | None,
) -> None:
    """Raise EnvironmentProblem where a size needs more than is free. inside, pinned, pageable: bytes that a rank needs
    beside its buffers, in the memory of these, in pinned and in other host memory."""
    lengths = buffer_elements(compiled.collective, shape, job.rank)
    mine = sum(lengths) * dtype.bytes
    on_host = mine + pageable + (inside if cuda is None else pinned)
    if settings.transport == "shm" and settings.buffers == "private":
        on_host += min(ROOM_BYTES, ROOMS * mine)
    for free, ranks in (
        (_machine_bytes(), job.machine.ranks),
        (control_group.free_bytes(), job.board.node_ranks),
    ):
        if on_host * ranks > free * MEMORY_SHARE:
            raise EnvironmentProblem(
                f"a size of {shape.elements * dtype.bytes} bytes needs {on_host} bytes on each of {ranks} ranks here, "
                f"and {free} bytes are free; use a smaller -e"
            )
    left = allowed_bytes()
    if on_host > left * MEMORY_SHARE:
        raise EnvironmentProblem(
            f"a size of {shape.elements * dtype.bytes} bytes needs {on_host} bytes on a rank, which may take {left} "
            "more (ulimit -v); use a smaller -e"
        )
    if cuda is not None:
        ranks, free = shared_device(cuda, neighbours, job.rank)
        if (mine + inside) * ranks > free * MEMORY_SHARE:
            there = "" if ranks == 1 else f" from each of {ranks} ranks"
            raise EnvironmentProblem(
                f"a size of {shape.elements * dtype.bytes} bytes needs {mine + inside} bytes{there} on the device, "
                f"and {free} are free; use a smaller -e"
            )


def shared_device(cuda: gpu.Cuda, neighbours: Neighbours, rank: int) -> tuple[int, int]:
    """How many ranks of the job are on this rank's device, itself among them, and the bytes that are free there."""
    devices = list(zip(neighbours.nodes, neighbours.devices, strict=True))
    return devices.count(devices[rank]), cuda.free_bytes()


def available_bytes() -> int:
    """Memory that this machine, or the control group that this process is in, can still give."""
    return min(_machine_bytes(), control_group.free_bytes())


def _machine_bytes() -> int:
    """Memory that this machine, with all its containers, can still give."""
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return NO_LIMIT


def allowed_bytes() -> int:
    """Address space that this process may still take (ulimit -v)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return NO_LIMIT
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return int(max(0, limit - pages * resource.getpagesize()))
