"""What coding costs a rank in place: pieces of work on all ranks while frames are on their way.

Every rank codes chunks, sends the frames to the next rank and decodes those of the one before, or adds them to a sum:
the plan, the frame memory, the coder and the transport that `taccl run --codec` has. A rank works on one piece
after another. A piece takes from when it was handed over, or the piece before was finished, until the executor learns
that it is finished, in wall-clock time: that is what the next message waits for, and what ranks take from each other
that share cores, memory or the interpreter's lock is in it. A chunk is coded when the one WINDOW before it has come: so
coding, decoding and messages mix as in the middle of a collective, at the rate that wire and cores allow. Coded all at
once, chunks would be coded while all ranks do nothing else, which many that share few cores do slowly.

In GPU memory kernels do the work, on the codec streams of `taccl run --device cuda`, between two events that have a
time. So what a piece waits for is not in it; that starting kernels takes the host longer than the device is, and what
streams and ranks take from each other that share a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime import gpu
from taccl.runtime.bench_settings import Settings
from taccl.runtime.bind import Bound, Buffers, Compiled, compile_program, internal_bytes
from taccl.runtime.codecs import Codec
from taccl.runtime.coded import Coding
from taccl.runtime.coders import Note
from taccl.runtime.device_memory import DeviceMemory
from taccl.runtime.device_transport import device_bytes, device_transport
from taccl.runtime.dtypes import DType
from taccl.runtime.free_memory import MEMORY_SHARE, shared_device
from taccl.runtime.host_transport import host_kind, host_transport
from taccl.runtime.job import Job, Neighbours
from taccl.runtime.layout import Layout, layout
from taccl.runtime.plan import Operation
from taccl.runtime.transport import Transport
from taccl.synth.collective import Collective, build
from taccl.synth.program import Program, RankProgram, Step, Threadblock

KINDS = ("encode", "decode", "accumulate")
LEAST_CHUNKS, MOST_CHUNKS = 8, 32  # of one run
WINDOW = 2  # chunks of a rank that are on their way

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class TrialTimes:
    """Of all ranks, the same on each. times_us: (ranks, repeats, kinds) means of a piece of a run; wire_bytes: (ranks,)
    means of a message."""

    times_us: Array
    wire_bytes: Array


@dataclass(frozen=True, slots=True)
class Reach:
    """How the ranks of a trial reach each other. settings: of GPU memory; None: the values are in host memory."""

    neighbours: Neighbours
    settings: Settings | None = None


def trial(
    job: Job,
    reach: Reach,
    codec: Codec,
    dtype: DType,
    values: Array,
    chunk_bytes: int,
    run_bytes: int,
    repeats: int,
) -> TrialTimes:
    """Time the pieces of chunks of so many bytes; collective over the ranks of the job, at least two.

    values: (n,) of `dtype`, which the ranks begin at different places and repeat. run_bytes: of values that a rank
    codes in one run, within LEAST_CHUNKS and MOST_CHUNKS.
    """
    chunks = min(max(run_bytes // chunk_bytes, LEAST_CHUNKS), MOST_CHUNKS)
    compiled = _compiled(job, reach, codec, chunks)
    elements = chunk_bytes // dtype.bytes
    first = job.rank * len(values) // job.ranks
    shape = layout(compiled.collective, chunks * elements)

    def mine() -> Array:
        return np.resize(np.roll(values, -first), chunks * elements)

    notes: list[Note] = []
    coder = cuda = None
    if reach.settings is None:
        coder = job.coder(notes)
        transport, empty = host_transport(
            job, compiled, chunk_bytes, reach.neighbours, host_kind(reach.neighbours)
        )
        buffers = Buffers(mine(), np.zeros(chunks * elements, dtype.numpy))
    else:
        cuda = gpu.Cuda(gpu.load())
        transport, empty = _between_devices(
            job, compiled, shape, reach.neighbours, reach.settings, codec, dtype, cuda
        )
        buffers = Buffers(*(cuda.xp.empty(chunks * elements, dtype.numpy) for _ in range(2)))
        cuda.upload(buffers.input, mine())
    bound = job.together(
        "the binding of the codec trial",
        lambda: Bound(
            compiled, job.rank, shape, buffers, dtype, None, transport, empty=empty, marks=[], codec=codec,
            coder=coder, cuda=cuda, notes=notes,
        ),
    )  # fmt: skip
    job.connect(bound)
    operations = compiled.plans[job.rank].operations
    means = _means_us if cuda is None else _means_on_device_us
    found = np.zeros((repeats, len(KINDS)))
    with np.errstate(all="ignore"):  # sums of the user's values may overflow
        for turn in range(-1, repeats):  # the first run touches pages and opens connections
            notes.clear()
            bound.user.output[:] = 0
            job.barrier()
            job.run(bound)
            if turn >= 0:
                found[turn] = means(operations, notes)
    sent = bound.executor.coded_bytes()[1] / chunks
    bound.close()
    transport.close()
    if coder is not None:
        coder.close()
    record = np.append(found.reshape(-1), sent)
    # Nobody has another rank's memory open any more when all have come here.
    everyone = job.gather_bytes(record.view(np.uint8), "the codec trial").view(np.float64)
    return TrialTimes(everyone[:, :-1].reshape(job.ranks, repeats, len(KINDS)), everyone[:, -1])


def _between_devices(
    job: Job,
    compiled: Compiled,
    shape: Layout,
    neighbours: Neighbours,
    settings: Settings,
    codec: Codec,
    dtype: DType,
    cuda: gpu.Cuda,
) -> tuple[Transport, Callable[[int, Any], Any] | None]:
    """As `device_transport`. Raises EnvironmentProblem where the device has too little memory."""
    if neighbours.nccl is not None:  # before the check, because connections take some
        neighbours.nccl.connect(job, {(source, target) for source, target, _ in compiled.rounds})
    rooms, _ = device_bytes(compiled, shape, dtype, dtype, settings, neighbours, job.rank, codec)
    inside = internal_bytes(compiled, job.rank, shape, dtype, None, codec, True)
    needed = 2 * shape.elements * dtype.bytes + inside + rooms
    cuda.give_back()
    job.barrier()  # all ranks of the device have freed what the trial before needed
    ranks, free = shared_device(cuda, neighbours, job.rank)

    def check() -> None:
        if needed * ranks > free * MEMORY_SHARE:
            raise EnvironmentProblem(
                f"chunks of {shape.chunk_elements * dtype.bytes} bytes need {needed} bytes on the device from each of "
                f"its {ranks} ranks, and {free} are free; --quick needs a quarter, --device host none"
            )

    job.together("the check of memory", check)
    chunk_bytes = shape.chunk_elements * dtype.bytes
    return device_transport(job, compiled, chunk_bytes, settings, neighbours, cuda, DeviceMemory(cuda))


def _means_us(operations: Sequence[Operation], notes: Sequence[Note]) -> list[float]:
    """The mean time of a piece of each kind, from the notes of one run in the order in which pieces were finished. They
    are numbered among each other, and one is done after another."""
    kinds = [op.kind for op in operations if op.kind in KINDS]
    total = dict.fromkeys(KINDS, 0.0)
    before = 0.0
    for number, given, finished in notes:
        total[kinds[number]] += finished - max(given, before)
        before = finished
    return [total[kind] / kinds.count(kind) * 1e6 for kind in KINDS]


def _means_on_device_us(operations: Sequence[Operation], notes: Sequence[Note]) -> list[float]:
    """As `_means_us`, of notes that have the numbers of operations. Pieces overlap: of one that others were under way
    with what they have not counted yet."""
    kinds = [op.kind for op in operations]
    total = dict.fromkeys(kinds, 0.0)
    counted: list[tuple[float, float]] = []  # spans, apart from each other
    for number, given, finished in notes:
        took, first = finished - given, given
        while counted and counted[-1][1] > given:
            begin, end = counted.pop()
            took -= end - max(begin, given)
            first = min(first, begin)
        counted.append((first, finished))
        total[kinds[number]] += took
    return [total[kind] / kinds.count(kind) * 1e6 for kind in KINDS]


def _compiled(job: Job, reach: Reach, codec: Codec, chunks: int) -> Compiled:
    """The ring, in which every second decode is an addition, and coding waits for what comes."""
    program, collective = _ring(job.ranks, chunks)
    coding, neighbours = Coding(None, codec.lossless), reach.neighbours
    compiled = compile_program(
        program, collective, False, [job.rank], nodes=neighbours.nodes if reach.settings is None else None,
        coding=coding, held=None if neighbours.nccl is None else neighbours.apart,
        sorts=neighbours.tcp is not None,
    )  # fmt: skip
    plan = compiled.plans[job.rank]
    return replace(compiled, plans={job.rank: replace(plan, operations=mixed(plan.operations))})


def mixed(ring: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations of a rank with additions among its decodes and a window before its coding."""
    coded = decoded = 0
    arrivals: list[int] = []
    operations = []
    for number, op in enumerate(ring):
        if op.kind == "recv":
            arrivals.append(number)
        elif op.kind == "encode":
            coded += 1
            if coded > WINDOW:
                op = replace(op, predecessors=tuple(sorted({*op.predecessors, arrivals[coded - 1 - WINDOW]})))
        elif op.kind == "decode":
            decoded += 1
            if decoded % 2 == 0:
                op = replace(op, kind="accumulate", src=op.dst)
        operations.append(op)
    return tuple(operations)


def _ring(ranks: int, chunks: int) -> tuple[Program, Collective]:
    """Every rank sends its chunks to the next one, each as a message of its own."""
    steps = tuple(Step(kind, "i", chunk, "o", chunk, 1) for chunk in range(chunks) for kind in ("s", "r"))
    gpus = tuple(
        RankProgram(
            rank, chunks, chunks, 0, (Threadblock(0, (rank + 1) % ranks, (rank - 1) % ranks, 0, steps),)
        )
        for rank in range(ranks)
    )
    program = Program("codec-trial", "sendrecv", "Simple", 1, chunks, ranks, False, True, 0, 2**40, gpus)
    return program, build("sendrecv", ranks, chunks)
