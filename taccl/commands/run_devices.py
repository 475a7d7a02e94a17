"""How the ranks of `taccl run` reach each other's device memory: what was asked for, or what works."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from taccl.errors import EnvironmentProblem

if TYPE_CHECKING:
    from taccl.runtime.bench_settings import Settings
    from taccl.runtime.gpu import Cuda
    from taccl.runtime.job import Job, Neighbours

# In the order in which `auto` tries them.
HOST_TRANSPORTS = ("shm", "shm+tcp", "shm+mpi", "tcp", "mpi")
DEVICE_TRANSPORTS = ("cuda-ipc", "staged-shm", "nccl", "mpi-cuda", "staged-mpi")
ON_ONE_NODE = {"shm": "shared memory", "cuda-ipc": "CUDA IPC", "staged-shm": "pinned shared memory"}


def on_devices(job: Job, settings: Settings) -> tuple[Settings, Neighbours]:
    """Resolve `auto`, and see that what was asked for by name is there (collective).

    Ranks that reach each other's memory take CUDA IPC, the others of a node pinned shared memory. Between nodes NCCL
    comes before an MPI that takes device memory: it knows of streams and of the network cards beside each GPU.
    """
    from taccl.runtime import gpu
    from taccl.runtime.device_memory import DeviceMemory
    from taccl.runtime.device_trial import share_devices

    cuda = gpu.Cuda(gpu.load())
    asked, host = settings.transport, job.share_memory()
    found = share_devices(job, cuda, DeviceMemory(cuda), host)
    if asked in ("nccl", "mpi-cuda", "staged-mpi"):
        alone = tuple((rank,) for rank in range(job.ranks))
        found = replace(found, sharing=alone, why_not="")
        return (settings, _with_nccl(job, cuda, found)) if asked == "nccl" else (settings, found)
    if asked == "staged-shm":
        found = _with_pinned(job, cuda, replace(found, sharing=(), why_not=""), host)
        found = replace(found, sharing=found.staging, staging=())
        job.together("the choice of the transport", lambda: check_near(job, settings, found, asked))
        return settings, found
    shared = asked == "cuda-ipc" or settings.buffers == "shared"
    if shared:
        job.together("the choice of the transport", lambda: check_near(job, settings, found, "cuda-ipc"))
    near = "cuda-ipc"
    if any(found.sharing[rank] != host.sharing[rank] for rank in range(job.ranks)):
        found = _with_pinned(job, cuda, found, host)
        if not shared and not any(len(ranks) > 1 for ranks in found.sharing):
            near = "staged-shm"
            found = replace(found, sharing=found.staging or found.sharing, staging=())
    others = "staged-mpi"
    if any(len(found.around(rank)) < job.ranks for rank in range(job.ranks)):
        others, found = _between(job, cuda, found)
    reached = shared or any(len(ranks) > 1 for ranks in found.sharing)
    return replace(settings, transport=near if reached else others, others=others), found


def reach_devices(job: Job) -> tuple[Settings, Neighbours]:
    """How device memory travels by itself where nothing is asked for (collective)."""
    from taccl.runtime.bench_settings import Settings

    nothing = Settings(
        (), (), (), (), 0, 0, 0, device="cuda", transport="auto", buffers="private", pace=True, turns=True,
        accumulate="type", reference=False,
    )  # fmt: skip
    return on_devices(job, nothing)


def _with_pinned(job: Job, cuda: Cuda, found: Neighbours, host: Neighbours) -> Neighbours:
    """Ranks of a node that have no better way, and exchange data through pinned shared memory."""
    from taccl.runtime.staged_trial import share_pinned

    reached = found.sharing or tuple((rank,) for rank in range(job.ranks))
    rest = [
        tuple(peer for peer in ranks if peer == rank or peer not in reached[rank])
        for rank, ranks in enumerate(host.sharing)
    ]
    pinned = share_pinned(job, cuda, rest, host.why_not)
    return replace(found, staging=pinned.sharing, why_not=_both(found.why_not, pinned.why_not))


def _with_nccl(job: Job, cuda: Cuda, found: Neighbours) -> Neighbours:
    from taccl.runtime.nccl_ranks import open_nccl

    ranks, why = open_nccl(job, cuda)
    if ranks is None:
        job.fail_alike(EnvironmentProblem(f"--transport nccl cannot be used: {why}"))
    return replace(found, nccl=ranks)


def _between(job: Job, cuda: Cuda, found: Neighbours) -> tuple[str, Neighbours]:
    """What ranks take that have no memory in common. Rank 0 tries the MPI in child processes, because it may crash."""
    import numpy as np

    from taccl.runtime.doctor import TIMEOUT_S, device_memory_passes
    from taccl.runtime.nccl_ranks import open_nccl

    ranks, why = open_nccl(job, cuda)
    if ranks is not None:
        return "nccl", replace(found, nccl=ranks)
    found = replace(found, why_not=_both(found.why_not, f"no nccl: {why}"))
    aware = False
    if job.rank == 0:  # the others wait for it, and that has an end
        aware, how = device_memory_passes(min(TIMEOUT_S, job.watchdog.deadline_s / 2))
        found = found if aware else replace(found, why_not=_both(found.why_not, f"no mpi-cuda: {how}"))
    everyone = job.gather_bytes(np.array([aware], np.uint8), "the probe of device memory")
    return "mpi-cuda" if everyone[0, 0] else "staged-mpi", found


def _both(one: str, other: str) -> str:
    return "; ".join(reason for reason in (one, other) if reason)


def check_near(job: Job, settings: Settings, found: Neighbours, name: str) -> None:
    """Raise EnvironmentProblem when what was asked for by name cannot be."""
    mine = found.sharing[job.rank]
    missing, needed = len(mine) < job.ranks, settings.transport == name or len(mine) == 1
    if settings.transport.startswith(f"{name}+") and settings.buffers == "private":
        needed = found.nodes.count(found.nodes[job.rank]) > 1
    if found.why_not and missing and needed:
        raise EnvironmentProblem(f"memory cannot be shared: {found.why_not}")
    if settings.transport == name and missing:
        rest = "TCP or MPI" if name == "shm" else "another transport"
        raise EnvironmentProblem(
            f"--transport {name} needs all ranks on one node; auto takes {ON_ONE_NODE[name]} within nodes and {rest} "
            "between them"
        )
