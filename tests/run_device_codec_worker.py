"""A rank that runs coded programs on devices, over the transports of sys.argv[1], and beside it in host memory.

sys.argv[2:]: names of programs, all without; "damaged": rank 0 sends a frame of which a byte is changed on its device.
See test_run_device_codecs.py.
"""

import json
import sys

import numpy as np
import runtime_programs as programs

from taccl.runtime import cuda_ipc, gpu, nccl, staged, staged_shm
from taccl.runtime.bind import Bound, Buffers, buffer_elements, compile_program
from taccl.runtime.codecs import CODECS, ErrorFeedback
from taccl.runtime.coded import Coding
from taccl.runtime.coders import Inline
from taccl.runtime.device_frames import DeviceFrames
from taccl.runtime.device_memory import DeviceMemory
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.job import Job
from taccl.runtime.layout import layout
from taccl.runtime.nccl_ranks import open_nccl
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace
from taccl.runtime.transports import MpiCudaTransport, MpiTransport

NODES = (0, 0, 2, 2)
TURNS = 2
staged.SEGMENT_BYTES = 2000


def make(job, cuda, how, compiled):
    """(transport, where memory comes from)"""
    devices = DeviceMemory(cuda)
    over_mpi = MpiTransport(job.MPI, job.data, 1)
    transport = MpiCudaTransport(over_mpi) if how == "direct" else staged.StagedTransport(over_mpi, cuda)
    if how == "pinned":
        everyone = [tuple(range(job.ranks))] * job.ranks
        transport = staged_shm.StagedSharedTransport(
            job.memory, cuda, job.rank, everyone, compiled.messages, transport
        )
    if how == "nccl":
        RANKS.connect(job, {(source, target) for source, target, _ in compiled.rounds})
        transport = nccl.NcclTransport(RANKS, cuda, job.rank, compiled.rounds, over_mpi)
    if how in ("staged", "direct", "pinned", "nccl"):
        return transport, None
    sharing = [tuple(range(job.ranks))] * job.ranks if how == "shared" else [(0, 1), (0, 1), (2, 3), (2, 3)]
    found = cuda_ipc.CudaIpcTransport(
        job.memory, devices, cuda, job.rank, sharing, compiled.messages, transport
    )
    return found, devices.empty


def values_of(job, turn, elements, dtype):
    rng = np.random.default_rng(1000 * turn + job.rank)
    return (0.05 * rng.standard_normal(elements)).astype(np.float32).astype(dtype.numpy)


def run(job, bound, cuda, dtype):
    """The outputs of some runs, and what they sent."""
    found = []
    for turn in range(TURNS):
        values = values_of(job, turn, len(bound.user.input), dtype)
        if cuda is None:
            bound.user.input[:] = values
            bound.user.output[:] = 0
        else:
            cuda.upload(bound.user.input, values)
            bound.user.output[:] = 0
        job.run(bound)
        host = np.empty(len(bound.user.output), dtype.numpy)
        if cuda is None:
            host[:] = bound.user.output
        else:
            cuda.download(host, bound.user.output)
        found.append((host.tobytes(), bound.executor.coded_bytes(), sent(bound, cuda)))
    bound.close()
    bound.transport.close()
    job.barrier()
    return found


def sent(bound, cuda):
    """The messages of frames, as they lie in frame memory."""
    frames = bound.executor._frames
    found = []
    for op in bound.executor.plan.operations:
        if op.kind == "send" and op.frames:
            message = frames.view(op.src)[: frames.used(op.src)]
            host = np.empty(len(message), np.uint8)
            if cuda is None:
                host[:] = message
            else:
                cuda.download(host, message)
            found.append(host.tobytes())
    return found


def spoil(job):
    """Rank 0 changes a byte of the last frame that it codes, after it was closed."""
    work = DeviceFrames.work

    def spoiled(self, number, op, *rest):
        put = work(self, number, op, *rest)
        if op.kind != "encode" or job.rank:
            return put

        def change():
            put()
            last = self.view(op.dst)
            last[200:201] = last[201:202]

        return change

    DeviceFrames.work = spoiled


def one(job, how, program, elements, codec, dtype, op, links, feeds=False, hop=False):
    """Whether devices and host disagree."""
    order = trace(program)
    collective = collective_of(program, order)
    op = op if collective.combining else None
    coding = Coding(NODES if links == "nodes" else None, codec.lossless, hop, recode=True)
    held = (lambda source, target: True) if how == "nccl" else None
    compiled = compile_program(program, collective, False, [job.rank], order, None, coding, held)
    shape = layout(collective, elements)
    lengths = buffer_elements(collective, shape, job.rank)

    def feedback(xp):
        return ErrorFeedback(lengths[0], xp) if feeds else None

    buffers = Buffers(*(np.zeros(length, dtype.numpy) for length in lengths))
    owed = feedback(np)
    bound = Bound(
        compiled, job.rank, shape, buffers, dtype, op, MpiTransport(job.MPI, job.data, 1), codec=codec,
        coder=Inline(), feedback=owed,
    )  # fmt: skip
    job.connect(bound)
    with np.errstate(all="ignore"):
        expected = run(job, bound, None, dtype)
    cuda = gpu.Cuda(gpu.load())
    transport, empty = make(job, cuda, how, compiled)
    buffers = Buffers(*(cuda.xp.zeros(length, dtype.numpy) for length in lengths))
    owes = feedback(cuda.xp)
    bound = Bound(
        compiled,
        job.rank,
        shape,
        buffers,
        dtype,
        op,
        transport,
        empty=empty,
        codec=codec,
        cuda=cuda,
        feedback=owes,
    )
    job.connect(bound)
    found = run(job, bound, cuda, dtype)
    if feeds:
        residual = np.empty(lengths[0], np.float32)
        cuda.download(residual, owes.residual)
        return found != expected or residual.tobytes() != owed.residual.tobytes()
    return found != expected


with Job(20.0) as job:
    wrong, cases = {}, 0
    hows, only = sys.argv[1].split(","), sys.argv[2:]
    gpu.select(job.board.node_slot)
    if "nccl" in hows:
        RANKS, why = open_nccl(job, gpu.Cuda(gpu.load()))
        assert not why, why
    if only == ["damaged"]:
        only = ["broadcast"]
        spoil(job)

    def add(how, name, *case, **more):
        global cases
        cases += 1
        program = programs.ALL[name](job.ranks, 2)
        codec, dtype = case[1], case[2]
        if one(job, how, program, case[0], CODECS[codec], DTYPES[dtype], *case[3:], **more):
            wrong[f"{how}: {name} {codec} {dtype}"] = 1

    for how in hows:
        if only:
            add(how, only[0], 8 * 531, "q8", "float32", "sum", "all")
            add(how, only[0], 8 * 531, "xw", "float32", "sum", "nodes")
            continue
        add(how, "allgather", 8 * 531, "xw", "float32", None, "all")
        add(how, "allreduce", 8 * 300 + 5, "q8", "float32", "avg", "all", feeds=True)
        if how in ("shared", "staged", "pinned", "nccl"):
            add(how, "alltoall", 8 * 531, "q8", "float32", None, "nodes")
            add(how, "broadcast", 8 * 300 + 3, "xw", "bfloat16", None, "all", hop=True)
            add(how, "broadcast", 8 * 300 + 3, "bf16-xw", "float32", None, "nodes")
            add(how, "allreduce", 8 * 300 + 3, "xw", "bfloat16", "max", "all")
    if "nccl" in hows:
        RANKS.close(job)
    names = json.dumps(sorted(wrong)).encode()
    record = np.zeros(4096, np.uint8)
    record[: len(names)] = np.frombuffer(names, np.uint8)
    everyone = job.gather_bytes(record, "the comparison")
    if job.rank == 0:
        bad = sorted({name for row in everyone for name in json.loads(row.tobytes().rstrip(b"\0"))})
        print(json.dumps({"cases": cases, "wrong": bad}))
