"""The transport of device memory: CUDA IPC or pinned slots within a node, NCCL or MPI between nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taccl.runtime import gpu
from taccl.runtime.bench_settings import Settings
from taccl.runtime.bind import Buffers, Compiled, buffer_elements, memory_chunks
from taccl.runtime.codecs import Codec
from taccl.runtime.cuda_ipc import CudaIpcTransport, room_bytes
from taccl.runtime.device_memory import PIECE_BYTES, DeviceMemory
from taccl.runtime.dtypes import DType
from taccl.runtime.frames import frame_sizes
from taccl.runtime.job import Job, Neighbours
from taccl.runtime.layout import Layout
from taccl.runtime.nccl import NcclTransport
from taccl.runtime.staged import StagedTransport, pinned_bytes, slots
from taccl.runtime.staged_shm import StagedSharedTransport
from taccl.runtime.transport import Transport
from taccl.runtime.transports import MpiCudaTransport, MpiTransport


def device_transport(
    job: Job,
    compiled: Compiled,
    chunk_bytes: int,
    settings: Settings,
    neighbours: Neighbours,
    cuda: gpu.Cuda,
    devices: DeviceMemory,
) -> tuple[Transport, Callable[[int, Any], Any] | None]:
    """The transport, and where the memory that the program needs inside comes from (None: anywhere)."""
    over_mpi = MpiTransport(job.MPI, job.data, chunk_bytes)
    transport: Transport
    if neighbours.nccl is not None:
        transport = NcclTransport(neighbours.nccl, cuda, job.rank, compiled.rounds, over_mpi)
    elif "staged-mpi" in (settings.transport, settings.others):
        transport = StagedTransport(over_mpi, cuda)
    else:
        transport = MpiCudaTransport(over_mpi)
    staging = neighbours.sharing if settings.transport == "staged-shm" else neighbours.staging
    if staging:
        transport = StagedSharedTransport(job.memory, cuda, job.rank, staging, compiled.messages, transport)
    if settings.transport != "cuda-ipc":
        return transport, None
    near = CudaIpcTransport(
        job.memory, devices, cuda, job.rank, neighbours.sharing, compiled.messages, transport
    )
    return near, devices.empty


def device_bytes(
    compiled: Compiled,
    shape: Layout,
    dtype: DType,
    inside: DType,
    settings: Settings,
    neighbours: Neighbours,
    rank: int,
    codec: Codec | None,
) -> tuple[int, int]:
    """What a program's messages need on a device beside its buffers, and of pinned host memory."""
    chunk_bytes = shape.chunk_elements * inside.bytes
    near = neighbours.sharing[rank] if settings.transport == "cuda-ipc" else ()
    through_shared = set(neighbours.around(rank)) - set(near)
    copied = settings.buffers == "private" and not shape.padded and inside == dtype
    rooms, staged, shared = [], [], []
    for op in compiled.plans[rank].operations:
        extent = op.src if op.kind == "send" else op.dst
        if op.kind not in ("send", "recv") or extent is None:
            continue
        nbytes = extent[2] * chunk_bytes
        if op.frames and codec is not None:
            sizes = frame_sizes(codec, inside, shape.chunk_elements)
            nbytes = sizes.stride + (extent[2] - 1) * sizes.most
        if op.peer in through_shared:
            if op.kind == "send":  # the receiver uses the sender's slots
                shared.append(nbytes)
        elif op.peer not in near:
            staged.append(nbytes)
        elif op.kind == "send" and copied and extent[0] in "io":
            rooms.append(nbytes)
    pieces = 8 * PIECE_BYTES if settings.transport == "cuda-ipc" else 0  # each is rounded up
    through_host = "staged-mpi" in (settings.transport, settings.others)
    pinned = pinned_bytes(shared, slots(shared))
    pinned += pinned_bytes(staged, slots(staged)) if through_host else 0
    return room_bytes(rooms) + pieces, pinned


def device_buffers(
    empty: Callable[[int, Any], Any], compiled: Compiled, shape: Layout, dtype: DType, rank: int
) -> Buffers:
    """A rank's buffers from `empty(elements, dtype)`, on one piece of memory in place."""
    collective = compiled.collective
    lengths = buffer_elements(collective, shape, rank)
    pair = collective.inplace[rank] if compiled.inplace else None
    if pair is None:
        return Buffers(empty(lengths[0], dtype.numpy), empty(lengths[1], dtype.numpy))
    memory = empty(shape.start(memory_chunks(collective, rank)), dtype.numpy)
    first = shape.start(pair[0]), shape.start(pair[1])
    return Buffers(memory[first[0] : first[0] + lengths[0]], memory[first[1] : first[1] + lengths[1]])
