"""How the messages of `taccl profile` go: as those of `taccl run` do between the same ranks, as far as they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import socket

    from taccl.profiles.measure.device_wire import DeviceWires
    from taccl.profiles.measure.devices import Devices
    from taccl.profiles.measure.mpi_prober import MpiProber
    from taccl.profiles.measure.wires import Wire
    from taccl.runtime.job import Job, Neighbours

STAGED = "staged through pinned host memory"
WHY_BYTES = 512  # of a rank's words, as rank 0 says them


@dataclass(frozen=True, slots=True)
class Ways:
    """What measures, and what it measures, for people: the library, the memory, and what carries messages."""

    prober: MpiProber
    words: str
    memory: str
    _near: DeviceWires | None = None

    def close(self) -> None:
        """Let go of other ranks' memory when all is measured; collective."""
        if self._near is not None:
            self._near.close()


def agreed_place(job: Job, place: str) -> str:
    """The memory that all ranks measure, "cuda" of "auto" only where every rank has a GPU; collective."""
    import numpy as np

    from taccl.runtime import gpu

    if place != "auto":
        return place
    mine = np.array([gpu.choose("auto") == "cuda"], np.uint8)
    return "cuda" if job.gather_bytes(mine, "the choice of the device").all() else "host"


def open_ways(job: Job, place: str, transport: str, deadline: float, largest_bytes: int, said: bool) -> Ways:
    """Connect the ranks; collective. place: as `agreed_place` gives it.

    largest_bytes: of the longest message that is asked for; 0 where the measurement chooses. said: whether a person has
    been told that ranks take turns on a device, if they do.
    """
    from taccl.profiles.measure.buffers import buffers
    from taccl.profiles.measure.mpi_prober import MpiProber
    from taccl.runtime import mpi

    memory = job.together("the choice of the device", lambda: buffers(place, job.board.node_slot))
    near: dict[int, Wire] = {}
    made: dict[int, socket.socket] = {}
    devices, device_wires, path = None, None, ""
    if place == "cuda":
        path = STAGED
        if transport == "auto":
            device_wires, devices, path = _between_devices(job, largest_bytes, said)
            near = dict(device_wires.wires) if device_wires is not None else {}
    elif transport == "auto":
        near, made = _in_host_memory(job, largest_bytes)
    with job.waiting("it waits for the other ranks before the measurement"):
        prober = MpiProber(job.MPI, job.MPI.COMM_WORLD, memory, deadline, near, made, devices)
    library = mpi.library(job.MPI)
    words = f"{library.name} {library.version}"
    words += ", within nodes through shared memory" if prober.receivers_work else ""
    words += ", between nodes over TCP" if prober.over_tcp else ""
    named = " and ".join(prober.memory)
    return Ways(prober, words, f"{named}, {path}" if path else named, device_wires)


def _in_host_memory(job: Job, largest_bytes: int) -> tuple[dict[int, Wire], dict[int, socket.socket]]:
    """Through shared memory within nodes, and over connections of our own between them."""
    import numpy as np

    from taccl.profiles.measure import shm_wire
    from taccl.profiles.measure.mpi_prober import ACK, DATA
    from taccl.runtime import connections
    from taccl.runtime.free_memory import available_bytes

    near: dict[int, Wire] = {}
    found = job.share_memory()
    # Who cannot read a peer's memory sends long messages otherwise.
    short = shm_wire.needed_bytes(len(found.sharing[job.rank]), largest_bytes) > available_bytes() // 2
    cannot = np.array([bool(found.no_reading) or short], np.uint8)
    if not job.gather_bytes(cannot, "the choice of memory").any():
        near = shm_wire.wires(job, found, (DATA, ACK))
    made, why = connections.between_nodes(job)
    if why and job.rank == 0:
        click.echo(f"taccl: messages between nodes go over MPI: {why}", err=True)
    return near, made


def _between_devices(
    job: Job, largest_bytes: int, said: bool
) -> tuple[DeviceWires | None, Devices | None, str]:
    """From one's memory to another's where devices reach each other; how messages go, in words."""
    from taccl.commands.run_report import say_shared_devices
    from taccl.profiles.measure.device_wire import DeviceWires, needed_bytes
    from taccl.profiles.measure.devices import Devices
    from taccl.profiles.measure.mpi_prober import ACK, DATA
    from taccl.runtime import gpu
    from taccl.runtime.device_memory import DeviceMemory
    from taccl.runtime.device_trial import share_devices
    from taccl.runtime.free_memory import shared_device

    cuda = gpu.Cuda(gpu.load())
    memory = DeviceMemory(cuda)
    found = share_devices(job, cuda, memory, job.share_memory())
    why, needed = found.why_not, needed_bytes(largest_bytes)
    ranks, free = shared_device(cuda, found, job.rank)
    free //= ranks
    short = not why and len(found.sharing[job.rank]) > 1 and free < needed
    if short:
        why = f"the measurement needs {needed} bytes on the device, and {free} are free for each of its ranks"
    _say_why(job, why)
    reached = any(len(ranks) > 1 for ranks in found.sharing)
    if not reached or _anywhere(job, short):
        return None, None, STAGED
    if not said:
        say_shared_devices(job, found)
    wires = DeviceWires(job, cuda, memory, found, (DATA, ACK), largest_bytes)
    devices = Devices(found.devices, found.sharing)
    return wires, devices, device_path(devices, found)


def _anywhere(job: Job, so: bool) -> bool:
    import numpy as np

    return bool(job.gather_bytes(np.array([so], np.uint8), "the choice of memory").any())


def _say_why(job: Job, why: str) -> None:
    """Rank 0 says what the first rank says that has a reason."""
    import numpy as np

    mine = np.zeros(WHY_BYTES, np.uint8)
    text = why.encode(errors="replace")[:WHY_BYTES]
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    for rank, row in enumerate(job.gather_bytes(mine, "the trial of device memory")):
        if job.rank == 0 and row.any():
            said = row.tobytes().rstrip(b"\0").decode(errors="replace")
            click.echo(
                f"taccl: messages that do not go by CUDA IPC are {STAGED}, over MPI (rank {rank}: {said})",
                err=True,
            )
            return


def device_path(devices: Devices, found: Neighbours) -> str:
    """How messages go between devices of which some reach each other, for people."""
    if not all(devices.copy_all(ranks) or len(ranks) == 1 for ranks in _members(found.nodes)):
        return f"CUDA IPC where devices reach each other, else {STAGED}"
    if len(set(found.nodes)) == 1:
        return "CUDA IPC within the node"
    return f"CUDA IPC within nodes, {STAGED} between them"


def _members(nodes: Sequence[int]) -> list[list[int]]:
    return [[rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)]
