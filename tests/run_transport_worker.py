"""A rank that runs programs over the transport of sys.argv[1]. See test_run_transports.py."""

import dataclasses
import gc
import itertools
import json
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import runtime_programs as programs

from taccl.profiles.topology import Link, Port, Topology
from taccl.runtime import check, pace, paced, shm, tcp_transport, transports, turns
from taccl.runtime.bind import Bound, compile_program
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.job import Job
from taccl.runtime.layout import layout
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace


def one(job, program, elements, dtype, op, how, inplace=False):
    order = trace(program)
    collective = collective_of(program, order)
    op = op if collective.combining else None
    nodes = NODES if how in PACED or "tcp" in how else None
    compiled = compile_program(
        program, collective, inplace, [job.rank], order, nodes, ahead=how == "tcp-turns"
    )
    shape = layout(collective, elements)
    empty = job.memory.empty if how == "shared" else np.empty
    guarded = check.allocate(collective, shape, job.rank, dtype, inplace, empty)
    host = guarded.buffers
    check.fill(host, dtype, op, job.rank, job.ranks)
    chunk_bytes = shape.chunk_elements * dtype.bytes
    inside = None
    if "tcp" in how:
        inner = transports.MpiTransport(job.MPI, job.data, chunk_bytes)
        found = turns.Turns({})
        if how == "tcp-turns":
            found = turns.turns(program, collective, order, compiled.plans, CLUSTER, NODES, chunk_bytes)
            ORDERED.append(found.begins)
            GATES.update(gate.seen_by != key[0] for key, gates in found.gates.items() for gate in gates)
        transport = tcp_transport.TcpTransport(LINKS, job.rank, inner, found.gates, PACES, found.begins)
        if how == "tcp-shared":
            node = (0, 1) if job.rank < 2 else (2,)
            bells = {peer: bell for peer, bell in LINKS.sleeper.bells.items() if peer in node}
            transport = shm.SharedMemoryTransport(
                job.memory, job.rank, node, compiled.messages, transport, bells=bells
            )
            inside = job.memory.empty
    elif how in SHM:
        inner = transports.MpiTransport(job.MPI, job.data, chunk_bytes)
        # "mixed": only ranks 0 and 1 share memory
        node = NEIGHBOURS.sharing[job.rank] if how != "mixed" else (0, 1) if job.rank < 2 else (job.rank,)
        reads = how == "read" and not NEIGHBOURS.no_reading
        transport = shm.SharedMemoryTransport(job.memory, job.rank, node, compiled.messages, inner, reads)
        inside = job.memory.empty
    elif how in PACED:
        inner = transports.MpiTransport(job.MPI, job.data, chunk_bytes)
        found = {}
        if how == "turns":
            found = turns.turns(program, collective, order, compiled.plans, CLUSTER, NODES, chunk_bytes).gates
            GATES.update(gate.seen_by != key[0] for key, gates in found.items() for gate in gates)
        on_channel = paced.channels(compiled.plans[job.rank])
        transport = paced.PacedTransport(
            job.MPI, inner, job.receipts, NODES, found, job.notices, on_channel, PACES
        )
    else:  # "large": every message is "too long", and is counted in chunks
        transport = inner = transports.MpiTransport(job.MPI, job.data, chunk_bytes, 8)
    bound = Bound(compiled, job.rank, shape, host, dtype, op, transport, np, inside)
    job.connect(bound)
    for _ in range(1 if inplace else 3):
        job.run(bound)
    found = check.inspect(guarded, collective, shape, job.rank, dtype, op, inplace)
    bound.close()
    transport.close()
    inner.close()
    return found.wrong + found.outside


SHM = ("shared", "private", "read", "mixed")
if sys.argv[1] in (*SHM, "tcp-shared"):
    # Messages of a few KB go every way that there is.
    shm.SHORT_BYTES, shm.READ_BYTES, shm.PARCEL_BYTES = 64, 256, 4096

# Messages of a few KB go in many segments to the other node, two at a time, the shortest as they are.
paced.PLAIN_BYTES, pace.SEGMENT_BYTES, pace.SEGMENTS = 64, 400, 2
tcp_transport.EAGER_BYTES = 64
turns.WINDOW_BYTES, turns.WORTH_HANDOVERS = 300, 0
PACES = {(0, 2): pace.Pace(1000, 3)}  # one way on one link
PACED = ("paced", "turns")
NODES = (0, 0, 2)
GATES = set()  # whether others open them
ORDERED = []  # of each program the messages that have a place in the order
# Two nodes, the second of one rank; its downlink and the uplink of the first have several users.
CLUSTER = Topology(
    "cluster",
    ((0, 1), (2,)),
    tuple(
        Link(a, b, Fraction(1), Fraction(100), Fraction(0), (NODES[a], NODES[b] + 1))
        if NODES[a] != NODES[b]
        else Link(a, b, Fraction(1), Fraction(10), Fraction(0))
        for a, b in itertools.permutations(range(3), 2)
    ),
    tuple(Port(name, Fraction(100)) for name in ("out 0", "in 0", "out 2", "in 2")),
)

with Job(20.0) as job:
    NEIGHBOURS = job.share_memory()
    if "tcp" in sys.argv[1]:
        # "tcp-between": ranks 0 and 1 have no connection to each other
        between = sys.argv[1] == "tcp-between"
        apart = dataclasses.replace(NEIGHBOURS, nodes=NODES)
        LINKS = job.join_nodes(apart, everyone=not between).tcp
        far = [peer for peer in range(job.ranks) if NODES[peer] != NODES[job.rank]]
        others = [peer for peer in range(job.ranks) if peer != job.rank]
        assert sorted(LINKS.links) == (far if between else others)
    assert NEIGHBOURS.sharing == (tuple(range(job.ranks)),) * job.ranks and not NEIGHBOURS.why_not
    wrong = cases = 0
    for name in ("allgather", "alltoall", "allreduce", "reducescatter", "reduce"):
        for dtype in ("float32", "bfloat16", "int64"):
            for op in ("sum", "avg") if name in ("allreduce", "reducescatter", "reduce") else ("sum",):
                for elements in (2400, 2405):
                    program = programs.ALL[name](job.ranks, 2)
                    wrong += one(job, program, elements, DTYPES[dtype], op, sys.argv[1])
                    cases += 1
    for program in (
        programs.ring_allgather(job.ranks, 2, inplace=True),
        programs.ring_allreduce(job.ranks, 2),
        programs.inplace_exchange(job.ranks),
    ):
        for elements in (2400, 24):
            wrong += one(job, program, elements, DTYPES["int32"], "sum", sys.argv[1], True)
            cases += 1
    assert "turns" not in sys.argv[1] or len(GATES) == 2
    assert sys.argv[1] != "tcp-turns" or 2 * sum(map(bool, ORDERED)) > cases, (sum(map(bool, ORDERED)), cases)
    gc.collect()
    pieces = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:taccl" in line]
    totals = job.reduce(np.array([wrong, cases, len(pieces)]), "sum")
    if job.rank == 0:
        names = ("wrong", "cases", "pieces")
        print(json.dumps(dict(zip(names, totals.tolist(), strict=True))))
