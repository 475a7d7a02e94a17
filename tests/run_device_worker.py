"""A rank that runs programs on devices, over the transports of sys.argv[1]: all programs, or those of sys.argv[2].

"killed": rank 2 dies in the middle of a run. "near-nccl": CUDA IPC between ranks 0 and 1. "three": of each pair of the
three ranks another transport. See test_run_devices.py.
"""

import json
import os
import signal
import sys

import numpy as np
import runtime_programs as programs

from taccl.runtime import check, cuda_ipc, gpu, nccl, nccl_ranks, staged, staged_shm
from taccl.runtime.bind import Bound, Buffers, compile_program
from taccl.runtime.device_memory import DeviceMemory
from taccl.runtime.device_trial import share_devices
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.job import Job
from taccl.runtime.layout import layout
from taccl.runtime.nccl_ranks import open_nccl
from taccl.runtime.semantics import collective_of
from taccl.runtime.staged_trial import share_pinned
from taccl.runtime.trace import trace
from taccl.runtime.transports import MpiCudaTransport, MpiTransport

TURNS = 3
TWO_NODES = ((0, 1), (0, 1), (2,))
# Which messages go over NCCL.
HELD = {
    "nccl": lambda source, target: True,
    "nccl-unordered": lambda source, target: True,
    "near-nccl": lambda source, target: 2 in (source, target),
    "three": lambda source, target: {source, target} == {1, 2},
    "three-killed": lambda source, target: {source, target} == {1, 2},
}


def on_device(cuda, make, host):
    array = make(len(host), host.dtype)
    cuda.upload(array, host)
    return array


def one(job, how, program, elements, dtype, op, inplace=False):
    order = trace(program)
    collective = collective_of(program, order)
    op = op if collective.combining else None
    compiled = compile_program(program, collective, inplace, [job.rank], order, held=HELD.get(how))
    shape = layout(collective, elements)
    guarded = check.allocate(collective, shape, job.rank, dtype, inplace)
    host = guarded.buffers
    cuda = gpu.Cuda(gpu.load())
    devices = DeviceMemory(cuda)
    make = devices.empty if how not in ("private", "staged", "direct", "pinned", "nccl") else cuda.xp.empty
    check.fill(host, dtype, op, job.rank, job.ranks)
    if inplace:
        whole = on_device(cuda, make, guarded.raw[0])
        first = check.GUARD_BYTES
        views = [whole[first + f : first + f + b.nbytes].view(b.dtype) for f, b in offsets(guarded)]
        buffers = Buffers(*views)
    else:
        buffers = Buffers(on_device(cuda, make, host.input), on_device(cuda, make, host.output))
    transport, inside = staged.StagedTransport(MpiTransport(job.MPI, job.data, 1), cuda), None
    if how == "direct":
        transport = MpiCudaTransport(MpiTransport(job.MPI, job.data, 1))
    if how in HELD:
        pairs = [(source, target) for source, target, _ in compiled.rounds]
        nccl_ranks.library(cuda).may_connect = True
        RANKS.connect(job, pairs)
        nccl_ranks.library(cuda).may_connect = False
        rounds = compiled.rounds
        if how == "nccl-unordered":  # each rank first sends
            rounds = {key: 2 * turn + (key[1] == job.rank) for key, turn in rounds.items()}
        transport = nccl.NcclTransport(RANKS, cuda, job.rank, rounds, transport.inner)
    if how in ("pinned", "three", "three-killed"):
        sharing = NEIGHBOURS.sharing if how == "pinned" else ((0, 2), (1,), (0, 2))
        transport = staged_shm.StagedSharedTransport(
            job.memory, cuda, job.rank, sharing, compiled.messages, transport
        )
    if how in ("shared", "private", "mixed", "three", "three-killed", "killed", "near-nccl"):
        sharing = NEIGHBOURS.sharing if how in ("shared", "private", "killed") else TWO_NODES
        transport = cuda_ipc.CudaIpcTransport(
            job.memory, devices, cuda, job.rank, sharing, compiled.messages, transport
        )
        inside = devices.empty
    bound = Bound(compiled, job.rank, shape, buffers, dtype, op, transport, np, inside, cuda=cuda)
    job.connect(bound)
    wrong = 0
    for turn in range(1 if inplace else TURNS):
        if turn:
            check.fill(host, dtype, op, job.rank, job.ranks)
            cuda.upload(buffers.output, host.output)
        if how.endswith("killed") and job.rank == 2:
            bound.start()
            bound.executor.advance()
            os.kill(os.getpid(), signal.SIGKILL)
        job.run(bound)
        cuda.download(host.input, buffers.input)
        cuda.download(host.output, buffers.output)
        found = check.inspect(guarded, collective, shape, job.rank, dtype, op, inplace)
        wrong += found.wrong + found.outside
    bound.close()
    transport.close()
    job.barrier()
    return wrong


def offsets(guarded):
    """(first byte in the memory, view) of input and output."""
    begin = guarded.raw[0].__array_interface__["data"][0] + check.GUARD_BYTES
    found = []
    for view in (guarded.buffers.input, guarded.buffers.output):
        found.append((view.__array_interface__["data"][0] - begin if len(view) else 0, view))
    return found


staged.SEGMENT_BYTES, staged.PINNED_BYTES = (
    500,
    20_000,
)  # of some programs each message has one slot, of others more
cuda_ipc.ARENA_BYTES = 4096

with Job(float(os.environ.get("DEADLINE", "20"))) as job:
    gpu.select(job.board.node_slot)
    cuda = gpu.Cuda(gpu.load())
    # Exported arrays are known whatever made them.
    assert DeviceMemory(cuda).place(DeviceMemory(cuda).empty(10, np.float32)) is not None
    NEIGHBOURS = share_devices(job, cuda, DeviceMemory(cuda), job.share_memory())
    assert NEIGHBOURS.sharing == (tuple(range(job.ranks)),) * job.ranks and not NEIGHBOURS.why_not
    found = share_pinned(job, cuda, NEIGHBOURS.sharing, "")
    assert found.sharing == NEIGHBOURS.sharing and not found.why_not
    wrong = {}
    cases = 0
    hows, only = sys.argv[1].split(","), sys.argv[2:]
    if any(how in HELD for how in hows):
        RANKS, why = open_nccl(job, cuda)
        assert not why, why

    def add(how, name, *case):
        global cases
        if not only or name in only:
            key = f"{how}: {name}"
            wrong[key] = wrong.get(key, 0) + one(job, how, *case)
            cases += 1

    for how in hows:
        for name, make in [*programs.ALL.items(), ("handed on", programs.handed_on)]:
            # Many chunks, so that some go wrong where nothing waits.
            program = make(job.ranks, 8 if name == "handed on" else 2)
            add(how, name, program, 2400, DTYPES["float32"], "sum")
            if name in ("allreduce", "reduce", "alltoall"):
                add(how, name, program, 2405, DTYPES["bfloat16"], "avg")
            if name == "allreduce":
                add(how, name, program, 240, DTYPES["int32"], "avg")
        add(how, "allreduce", programs.ring_allreduce(job.ranks, 2), 2400, DTYPES["int32"], "max", True)
        add(how, "alltoall", programs.inplace_exchange(job.ranks), 2400, DTYPES["int64"], "sum", True)
    names = sorted(wrong)
    totals = job.reduce(np.array([wrong[name] for name in names]), "sum")
    if any(how in HELD for how in hows):
        RANKS.close(job)
    if job.rank == 0:
        bad = {name: int(total) for name, total in zip(names, totals, strict=True) if total}
        print(json.dumps({"cases": cases, "wrong": bad}))
