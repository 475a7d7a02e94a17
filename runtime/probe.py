"""What `taccl doctor` runs in child processes, so that a crash of a library is an answer and not a crash.

    python -m taccl.runtime.probe library           name and version of the MPI library, CUDA query
    python -m taccl.runtime.probe gpu               devices that CuPy sees
    python -m taccl.runtime.probe shared            whether processes can share memory
    mpiexec -n 2 python -m taccl.runtime.probe pair [BYTES...]    a checked exchange of host memory
    mpiexec -n 2 python -m taccl.runtime.probe cuda               the same with device memory
    mpiexec -n 2 python -m taccl.runtime.probe ipc                whether two ranks read each other's device memory
    mpiexec -n 2 python -m taccl.runtime.probe pinned             whether they exchange it through pinned shared memory
    mpiexec -n 2 python -m taccl.runtime.probe nccl               whether NCCL moves it between them

Each prints one JSON document on stdout (of rank 0).
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from taccl.runtime import gpu, mpi, shared

LENGTHS = (1024, 4 * 2**20)  # eager and rendezvous


def cuda_query() -> bool | None:
    """What the loaded MPI library says of itself; None when it does not say. MPI must be loaded.

    mpi4py has no call for it: the function is looked up in the library that the process has mapped.
    """
    for path in sorted(set(re.findall(r"\S*/libmpi[^/\s]*\.so\S*", Path("/proc/self/maps").read_text()))):
        try:
            loaded = ctypes.CDLL(path)
        except OSError:
            continue
        if hasattr(loaded, "MPIX_Query_cuda_support"):
            return bool(loaded.MPIX_Query_cuda_support())
    return None


def library() -> dict[str, object]:
    """The MPI library."""
    found = mpi.library(mpi.load())
    return {
        "name": found.name,
        "version": found.version,
        "standard": list(found.standard),
        "threads": found.threads,
        "cuda_query": cuda_query(),
    }


def devices() -> dict[str, object]:
    """The GPUs."""
    cupy = gpu.load()
    if cupy is None:
        return {"devices": [], "why_not": gpu.why_not()}
    runtime = cupy.cuda.runtime
    names = [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]
    total = cupy.arange(10, dtype=cupy.float32).sum().get()  # compiles a kernel: needs the toolkit
    why = "" if float(total) == 45.0 else f"a kernel gave {total} instead of 45"
    return {
        "devices": names,
        "why_not": why,
        "cupy": cupy.__version__,
        "alternates": gpu.Cuda(cupy).alternates(),
    }


def exchange(device: bool) -> dict[str, object]:
    """Two ranks swap data of each length and compare."""
    MPI = mpi.load()
    mpi.install_excepthook(MPI)
    comm = MPI.COMM_WORLD
    rank, other = comm.Get_rank(), 1 - comm.Get_rank()
    right = comm.Get_size() == 2
    for length in LENGTHS if right else ():
        data = np.arange(length, dtype=np.int64).astype(np.uint8) ^ np.uint8(rank + 1)
        expected = data ^ np.uint8(rank + 1) ^ np.uint8(other + 1)
        sent: Any = data
        received: Any = np.zeros(length, np.uint8)
        if device:
            gpu.select(rank)
            cuda = gpu.Cuda(gpu.load())
            sent, received = cuda.xp.asarray(sent), cuda.xp.asarray(received)
            cuda.synchronize()
        comm.Sendrecv([sent, MPI.BYTE], other, recvbuf=[received, MPI.BYTE], source=other)
        right &= (
            bool((received == expected).all()) if not device else bool((received.get() == expected).all())
        )
    everyone = comm.allreduce(right, op=MPI.LAND)
    return {"right": bool(everyone), "ranks": comm.Get_size()}


def ipc() -> dict[str, object]:
    """Two ranks open and read each other's device memory."""
    from taccl.runtime.device_memory import DeviceMemory
    from taccl.runtime.device_trial import share_devices
    from taccl.runtime.job import Job

    with Job(30.0) as job:
        gpu.select(job.board.node_slot)
        cuda = gpu.Cuda(gpu.load())
        found = share_devices(job, cuda, DeviceMemory(cuda), job.share_memory())
    return {"why_not": found.why_not, "ranks": job.ranks, "devices": sorted(set(found.devices))}


def pinned() -> dict[str, object]:
    """Two ranks exchange device memory through pinned shared memory."""
    from taccl.runtime.job import Job
    from taccl.runtime.staged_trial import share_pinned

    with Job(30.0) as job:
        gpu.select(job.board.node_slot)
        host = job.share_memory()
        found = share_pinned(job, gpu.Cuda(gpu.load()), host.sharing, host.why_not)
    return {"why_not": host.why_not or found.why_not, "ranks": job.ranks}


def nccl() -> dict[str, object]:
    """Two ranks move device memory by NCCL."""
    from taccl.runtime.job import Job
    from taccl.runtime.nccl_ranks import open_nccl

    with Job(30.0) as job:
        gpu.select(job.board.node_slot)
        ranks, why = open_nccl(job, gpu.Cuda(gpu.load()))
        version = 0 if ranks is None else ranks.version
        if ranks is not None:
            ranks.close(job)
    return {"why_not": why, "ranks": job.ranks, "version": version}


def main(what: str) -> None:
    """Print the JSON of one probe."""
    probes: dict[str, Callable[[], dict[str, object]]] = {
        "library": library, "gpu": devices, "shared": lambda: {"why_not": shared.try_out()},
        "pair": lambda: exchange(False), "cuda": lambda: exchange(True), "ipc": ipc, "pinned": pinned,
        "nccl": nccl,
    }  # fmt: skip
    document = probes[what]()
    if mpi.launcher().rank == 0:
        print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
