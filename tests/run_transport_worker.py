"""A rank that runs programs over the transport of sys.argv[1]. See test_run_transports.py."""

import json
import sys

import device_double
import numpy as np
import runtime_programs as programs

from taccl.runtime import check, transports
from taccl.runtime.bind import Bound, Buffers, compile_program
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.gpu import Cuda
from taccl.runtime.job import Job
from taccl.runtime.layout import layout
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace


def on_device(xp, host):
    array = xp.empty(len(host), host.dtype)
    array.view(np.uint8).set(host.view(np.uint8))
    return array


class Watching(transports.MpiTransport):
    """Counts messages that start before the device is done with what was started earlier."""

    early = 0

    def watched(self, request):
        class Request(self._mpi.Prequest):
            def Start(me):
                Watching.early += not device_double.state.clean
                super().Start()

        return Request(request)

    def send(self, array, peer, tag):
        return self.watched(super().send(array, peer, tag))

    def recv(self, array, peer, tag):
        return self.watched(super().recv(array, peer, tag))


def one(job, program, elements, dtype, op, how):
    order = trace(program)
    collective = collective_of(program, order)
    op = op if collective.combining else None
    compiled = compile_program(program, collective, False, [job.rank], order)
    shape = layout(collective, elements)
    guarded = check.allocate(collective, shape, job.rank, dtype, False)
    host = guarded.buffers
    check.fill(host, dtype, op, job.rank, job.ranks)
    xp, buffers, chunk_bytes = np, host, shape.chunk_elements * dtype.bytes
    if how == "large":  # every message is "too long", and is counted in chunks
        transport = inner = transports.MpiTransport(job.MPI, job.data, chunk_bytes, None, 8)
    else:
        xp = device_double.make()
        cuda = Cuda(xp)
        buffers = Buffers(on_device(xp, host.input), on_device(xp, host.output))
        cuda.synchronize()
        transport = inner = Watching(job.MPI, job.data, chunk_bytes, cuda)
        if how == "staged":
            transport = transports.StagedTransport(inner, cuda)
    bound = Bound(compiled, job.rank, shape, buffers, dtype, op, transport, xp)
    for _ in range(2):
        job.run(bound)
    if how != "large":
        cuda.download(host.input, buffers.input)
        cuda.download(host.output, buffers.output)
    found = check.inspect(guarded, collective, shape, job.rank, dtype, op, False)
    bound.close()
    inner.close()
    return found.wrong + found.outside


with Job(20.0) as job:
    wrong = cases = 0
    for name in ("allgather", "alltoall", "allreduce", "reducescatter", "reduce"):
        for dtype in ("float32", "bfloat16", "int64"):
            for op in ("sum", "avg") if name in ("allreduce", "reducescatter", "reduce") else ("sum",):
                for elements in (2400, 2405):
                    program = programs.ALL[name](job.ranks, 2)
                    wrong += one(job, program, elements, DTYPES[dtype], op, sys.argv[1])
                    cases += 1
    totals = job.reduce(np.array([wrong, Watching.early, cases]), "sum")
    if job.rank == 0:
        print(json.dumps({"wrong": int(totals[0]), "early": int(totals[1]), "cases": int(totals[2])}))
