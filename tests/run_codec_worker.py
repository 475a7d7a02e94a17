"""A rank that runs programs with coded messages over every transport. See test_run_codec.py."""

import functools
import json
import sys

import numpy as np
import runtime_programs as programs

from taccl.runtime import check, check_values, pace, paced, shm, tcp_transport, transports
from taccl.runtime.bind import Bound, compile_program
from taccl.runtime.codecs import CODECS
from taccl.runtime.coded import Coding
from taccl.runtime.coders import CodecPort, CodecThread
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.job import Job
from taccl.runtime.layout import layout
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace

NODES = (0, 0, 2)
# Messages of a few KB go every way that there is, between nodes in many segments, two at a time.
shm.SHORT_BYTES, shm.PARCEL_BYTES = 64, 4096
tcp_transport.EAGER_BYTES = paced.PLAIN_BYTES = 64
pace.SEGMENT_BYTES, pace.SEGMENTS = 400, 2
PACES = {(0, 2): pace.Pace(1000, 3)}  # one way on one link


def transport_of(job, how, compiled, chunk_bytes):
    inner = transports.MpiTransport(job.MPI, job.data, chunk_bytes)
    on_channel = paced.channels(compiled.plans[job.rank])
    if how == "mpi":
        return inner, None
    if how == "tcp":
        return tcp_transport.TcpTransport(LINKS, job.rank, inner, paces=PACES), None
    if how == "paced":
        return paced.PacedTransport(
            job.MPI, inner, job.receipts, NODES, on_channel=on_channel, paces=PACES
        ), None
    if how == "private":
        return shm.SharedMemoryTransport(job.memory, job.rank, (0, 1, 2), compiled.messages, inner), None
    between = inner
    if how == "mixed":
        between = paced.PacedTransport(
            job.MPI, inner, job.receipts, NODES, on_channel=on_channel, paces=PACES
        )
    bells = None
    if how == "tcp-mixed":
        between = tcp_transport.TcpTransport(LINKS, job.rank, inner, paces=PACES)
        bells = {peer: bell for peer, bell in LINKS.sleeper.bells.items() if peer < 2}
    node = (0, 1, 2) if how == "shared" else (0, 1) if job.rank < 2 else (2,)
    return (
        shm.SharedMemoryTransport(job.memory, job.rank, node, compiled.messages, between, bells=bells),
        job.memory.empty,
    )


def find_damaged(find, frames):
    found = find(frames)
    found[0] = found[0].copy()  # who looks twice is to find the same
    found[0][200] ^= 1
    return found


def one(job, coder, program, elements, codec, how, damage=False):
    """Elements that are wrong, and bytes of (values, frames)."""
    order = trace(program)
    collective = collective_of(program, order)
    op = "sum" if collective.combining else None
    coding = Coding(NODES if "mixed" in how else None, codec.lossless, recode=True)
    nodes = NODES if how in ("paced", "mixed", "tcp", "tcp-mixed") else None
    compiled = compile_program(
        program, collective, False, [job.rank], order, nodes, coding, sorts="tcp" in how
    )
    shape, dtype = layout(collective, elements), DTYPES["float32"]
    guarded = check.allocate(collective, shape, job.rank, dtype, False, np.empty)
    values = np.random.default_rng(5).standard_normal(50_000, np.float32)
    source = check_values.real_values(values, job.ranks)
    check_values.fill_values(guarded.buffers, source, job.rank)
    transport, empty = transport_of(job, how, compiled, shape.chunk_elements * dtype.bytes)
    bound = Bound(
        compiled,
        job.rank,
        shape,
        guarded.buffers,
        dtype,
        op,
        transport,
        empty=empty,
        codec=codec,
        coder=coder,
    )
    job.connect(bound)
    for turn in range(3):
        if damage and turn == 2 and job.rank == 1:
            # What arrived from rank 0 is damaged before it is passed on and decoded.
            memory = bound.executor._frames
            memory.find = functools.partial(find_damaged, memory.find)
        job.run(bound)
    tolerance = check_values.Tolerance(codec.promise, compiled.plans[job.rank].codings, False, dtype)
    found = check_values.inspect_values(
        guarded, collective, shape, job.rank, dtype, op, False, source, tolerance
    )
    sent = bound.executor.coded_bytes()
    bound.close()
    transport.close()
    return found.wrong + found.outside, sent


with Job(20.0) as job:
    coders = CodecPort(), CodecThread()
    LINKS = job.join_nodes(job.share_memory(), everyone=True).tcp
    if sys.argv[1] == "damage":
        one(job, coders[0], programs.chain_broadcast(3, 1), 5000, CODECS[sys.argv[2]], "mpi", damage=True)
    wrong = cases = values = wire = 0
    for how in ("mpi", "private", "shared", "paced", "mixed", "tcp", "tcp-mixed"):
        for name in ("allgather", "alltoall", "broadcast", "allreduce", "reduce"):
            for codec in ("xw", "q8"):
                for elements in (3005, 40):
                    for each in coders if elements > 40 else coders[:1]:
                        found, sent = one(job, each, programs.ALL[name](3, 2), elements, CODECS[codec], how)
                        wrong, cases = wrong + found, cases + 1
                        values, wire = values + sent[0], wire + sent[1]
    for each in coders:
        each.close()
    totals = job.reduce(np.array([wrong, cases, values, wire]), "sum")
    if job.rank == 0:
        print(json.dumps(dict(zip(("wrong", "cases", "values", "wire"), totals.tolist(), strict=True))))
