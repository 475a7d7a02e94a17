"""Check and time a program for many sizes, types and reductions, beside MPI's own collective.

A time is the slowest rank's, averaged over the iterations (nccl-tests). Program and reference take turns, so
that what disturbs the machine disturbs both.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from taccl.errors import CheckFailed, EnvironmentProblem, UsageError
from taccl.runtime import check, gpu
from taccl.runtime.bind import (
    Bound,
    Buffers,
    Compiled,
    buffer_elements,
    compile_program,
    internal_bytes,
    memory_chunks,
)  # fmt: skip
from taccl.runtime.calibration import Message, Span, spans
from taccl.runtime.dtypes import DType, inside_type
from taccl.runtime.job import Job, Neighbours
from taccl.runtime.layout import Layout, layout
from taccl.runtime.paced import PacedTransport
from taccl.runtime.reference import Reference
from taccl.runtime.shm import ROOM_BYTES, ROOMS, SharedMemoryTransport
from taccl.runtime.trace import Trace
from taccl.runtime.transport import Transport
from taccl.runtime.transports import MpiTransport, StagedTransport
from taccl.synth.collective import ROOTED, Collective
from taccl.synth.program import SENDS, Program

MODES = ("out_of_place", "in_place")
MEMORY_SHARE = 0.9  # of what is free; the rest is for Python and the MPI library


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure."""

    sizes_bytes: tuple[int, ...]  # nccl-tests sizes
    dtypes: tuple[DType, ...]
    ops: tuple[str, ...]  # used by combining collectives only
    modes: tuple[str, ...]  # of MODES, those that the program claims
    iterations: int
    warmup: int
    checks: int  # runs whose result is compared; 0: no check
    device: str  # "host" | "cuda"
    transport: str  # "shm" | "mpi" | "mpi-cuda" | "staged-mpi"
    buffers: str  # "private" | "shared": whether the collective's buffers lie in shared memory
    pace: bool  # between nodes, of messages in host memory
    accumulate: str  # "type" | "float32": in which 16-bit floats are reduced on their way
    reference: bool
    calibrate: bool = False  # note when the messages of the last run started and arrived
    deadline_s: float | None = None  # without progress; None: `patience_s` of the size


@dataclass(frozen=True, slots=True)
class Loaded:
    """A program that can be run, and what it computes."""

    program: Program
    collective: Collective
    order: Trace
    modes: tuple[str, ...]  # of MODES, those that it claims


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds over the iterations; each iteration counts its slowest rank."""

    mean: float
    least: float
    median: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One mode of one row, the same on every rank."""

    time: Timing
    wrong: int | None  # elements, over all ranks and checks; None: not checked
    outside: int  # bytes written outside the buffers
    max_error: float
    reference: Timing | None  # of MPI's own collective, or of the program that this one is run against
    spans: Mapping[Message, Span] | None = None  # of the last run's messages, when asked for


@dataclass(frozen=True, slots=True)
class Row:
    """One size, type and reduction."""

    size_bytes: int
    count: int  # nccl-tests' count: elements of a natural block
    dtype: DType
    op: str | None
    root: int  # -1: none
    wire_bytes: int  # sent over all links in one run
    modes: Mapping[str, Measurement]


def measure(
    job: Job, loaded: Loaded, settings: Settings, neighbours: Neighbours, against: Loaded | None = None
) -> Iterator[Row]:
    """The rows, in order of type, reduction and size; collective over the ranks of the job.

    against: a program that takes turns with this one in place of MPI's own collective.
    Raises EnvironmentProblem when memory is too small, before allocating it; CheckFailed when `against` is wrong.
    """

    def compiled(one: Loaded) -> dict[str, Compiled]:
        modes = [mode for mode in settings.modes if mode in one.modes]
        nodes = neighbours.nodes if settings.pace and settings.device == "host" else None
        return {
            mode: compile_program(
                one.program, one.collective, mode == "in_place", [job.rank], one.order, nodes
            )
            for mode in modes
        }

    collective = loaded.collective
    mine, others = job.together(
        "the compilation of the program",
        lambda: (compiled(loaded), {} if against is None else compiled(against)),
    )
    for dtype in settings.dtypes:
        for op in settings.ops if collective.combining else (None,):
            inside = inside_type(dtype, op, settings.accumulate)
            for shape in layouts(collective, dtype, settings.sizes_bytes):
                found = {
                    mode: _measure_mode(
                        job, mine[mode], shape, dtype, op, settings, neighbours,
                        _other(collective, shape, others.get(mode)), against is None,
                    )
                    for mode in settings.modes
                }  # fmt: skip
                rooted = collective.name in ROOTED
                yield Row(
                    shape.elements * dtype.bytes, shape.block_elements, dtype, op,
                    collective.root if rooted else -1, wire_bytes(loaded.program, shape, inside), found,
                )  # fmt: skip


def _other(
    collective: Collective, shape: Layout, compiled: Compiled | None
) -> tuple[Compiled, Layout] | None:
    """A compiled program on the layout of the same buffers. Raises UsageError when it wants others."""
    if compiled is None:
        return None
    found = layout(compiled.collective, shape.elements)
    for rank in range(collective.ranks):
        if buffer_elements(compiled.collective, found, rank) != buffer_elements(collective, shape, rank):
            raise UsageError("--against: the two programs do not work on the same buffers")
    return compiled, found


def layouts(collective: Collective, dtype: DType, sizes_bytes: Sequence[int]) -> list[Layout]:
    """The layouts of the sizes, each once: sizes are rounded down to equal blocks, and up to one element a block,
    because moving nothing proves nothing."""
    found = [layout(collective, size // dtype.bytes) for size in sizes_bytes]
    return list(dict.fromkeys(replace(one, block_elements=max(one.block_elements, 1)) for one in found))


def patience_s(size_bytes: int) -> float:
    """How long a run of this size may be without progress: long enough for one message of all of it over a
    link of 5 MB/s."""
    return max(30.0, size_bytes / 5e6)


def wire_bytes(program: Program, shape: Layout, dtype: DType) -> int:
    """Bytes that all ranks together send in one run."""
    chunks = sum(s.count for g in program.gpus for tb in g.threadblocks for s in tb.steps if s.kind in SENDS)
    return chunks * shape.chunk_elements * dtype.bytes


def _measure_mode(
    job: Job,
    compiled: Compiled,
    shape: Layout,
    dtype: DType,
    op: str | None,
    settings: Settings,
    neighbours: Neighbours,
    other: tuple[Compiled, Layout] | None,
    beside_mpi: bool,
) -> Measurement:
    collective, inplace = compiled.collective, compiled.inplace
    if settings.deadline_s is None:
        job.watchdog.deadline_s = patience_s(shape.elements * dtype.bytes)
    inside = inside_type(dtype, op, settings.accumulate)
    needed = internal_bytes(compiled, job.rank, shape, dtype, inside)
    if other is not None:
        needed += internal_bytes(other[0], job.rank, other[1], dtype, inside)
    job.together("the check of memory", lambda: _check_memory(job, compiled, shape, dtype, settings, needed))
    empty = job.memory.empty if settings.buffers == "shared" else np.empty
    guarded = check.allocate(collective, shape, job.rank, dtype, inplace, empty)
    host = guarded.buffers
    cuda = gpu.Cuda(gpu.load()) if settings.device == "cuda" else None
    buffers = host if cuda is None else _device_buffers(cuda, compiled, shape, dtype, job.rank)

    marks: list[tuple[int, float]] = []

    def bind(one: Compiled, on: Layout) -> Bound:
        noted = marks if settings.calibrate and one is compiled else None
        transport, own = _transport(job, one, on.chunk_elements * inside.bytes, settings, neighbours, cuda)
        xp = cuda.xp if cuda else np
        bound = job.together(
            "the binding of the program",
            lambda: Bound(one, job.rank, on, buffers, dtype, op, transport, xp, own, inside, noted),
        )
        job.connect(bound)
        return bound

    # Timed runs reduce again and again into the same data, which may overflow; checked runs never do.
    with np.errstate(all="ignore"):
        bounds = [bind(compiled, shape)] if other is None else [bind(compiled, shape), bind(*other)]
        reference = Reference(job.MPI, job.control, collective, shape, host, dtype, op, inplace)
        compare = functools.partial(check.inspect, guarded, collective, shape, job.rank, dtype, op, inplace)
        if other is not None:
            bad, beyond, _ = _check_results(job, bounds[1], host, cuda, dtype, op, compare, settings.checks)
            if bad or beyond:
                job.fail_alike(CheckFailed(f"--against: {other[0].program.name} gives wrong data"))
        wrong, outside, error = _check_results(
            job, bounds[0], host, cuda, dtype, op, compare, settings.checks
        )
        call = reference.call if settings.reference and cuda is None and beside_mpi else None
        if other is not None and settings.reference:
            call = functools.partial(job.run, bounds[1])
        mine, its = _time(job, bounds[0], call, settings)
        seen = spans(job, compiled.plans[job.rank], marks) if settings.calibrate else None
        reference.close()
        for bound in bounds:
            bound.close()
            bound.transport.close()
    return Measurement(mine, wrong, outside, error, its, seen)


def _transport(
    job: Job, compiled: Compiled, chunk_bytes: int, settings: Settings, neighbours: Neighbours, cuda: Any
) -> tuple[Transport, Callable[[int, Any], Any] | None]:
    """The transport, and where the memory that the program needs inside comes from (None: anywhere)."""
    over_mpi = MpiTransport(job.MPI, job.data, chunk_bytes, cuda)
    if cuda is not None and settings.transport == "staged-mpi":
        return StagedTransport(over_mpi, cuda), None
    between: Transport = over_mpi
    if cuda is None and settings.pace and len(set(neighbours.nodes)) > 1:
        between = PacedTransport(job.MPI, over_mpi, job.receipts, neighbours.nodes)
    if settings.transport == "shm":
        node = neighbours.sharing[job.rank]
        return SharedMemoryTransport(job.memory, job.rank, node, compiled.messages, between), job.memory.empty
    return between, None


def _device_buffers(cuda: Any, compiled: Compiled, shape: Layout, dtype: DType, rank: int) -> Buffers:
    collective = compiled.collective
    lengths = buffer_elements(collective, shape, rank)
    pair = collective.inplace[rank] if compiled.inplace else None
    if pair is None:
        return Buffers(cuda.xp.empty(lengths[0], dtype.numpy), cuda.xp.empty(lengths[1], dtype.numpy))
    memory = cuda.xp.empty(shape.start(memory_chunks(collective, rank)), dtype.numpy)
    first = shape.start(pair[0]), shape.start(pair[1])
    return Buffers(memory[first[0] : first[0] + lengths[0]], memory[first[1] : first[1] + lengths[1]])


def _check_results(
    job: Job,
    bound: Bound,
    host: Buffers,
    cuda: Any,
    dtype: DType,
    op: str | None,
    compare: Callable[[], check.Finding],
    checks: int,
) -> tuple[int | None, int, float]:
    """(wrong elements, bytes written outside, largest error) over all ranks and checks."""
    sums, largest = np.zeros(2, np.int64), np.zeros(1)
    for _ in range(max(checks, 1)):  # without checks too, because timed runs want defined data
        check.fill(host, dtype, op, job.rank, job.ranks)
        if cuda is not None:
            cuda.upload(bound.user.output, host.output)
            cuda.upload(bound.user.input, host.input)
        if not checks:
            return None, 0, 0.0
        job.barrier()
        job.run(bound)
        if cuda is not None:
            cuda.download(host.input, bound.user.input)
            cuda.download(host.output, bound.user.output)
        finding = compare()
        sums += (finding.wrong, finding.outside)
        largest[0] = max(largest[0], finding.max_error)
    total = job.reduce(sums, "sum")
    return int(total[0]), int(total[1]), float(job.reduce(largest, "max")[0])


def _time(
    job: Job, bound: Bound, reference: Callable[[], Any] | None, settings: Settings
) -> tuple[Timing, Timing | None]:
    runs: list[Callable[[], Any]] = [lambda: job.run(bound)]
    if reference is not None:
        runs.append(reference)
    taken = np.zeros((len(runs), settings.iterations))
    for turn in range(-settings.warmup, settings.iterations):
        for index, run in enumerate(runs):
            job.barrier()
            if index:
                job.watchdog.doing("it is inside MPI's own collective")
            begin = time.perf_counter()
            run()
            if turn >= 0:
                taken[index, turn] = (time.perf_counter() - begin) * 1e6
            if index:
                job.watchdog.doing(None)
    slowest = job.reduce(taken, "max")
    timings = [Timing(float(t.mean()), float(t.min()), float(np.median(t))) for t in slowest]
    return timings[0], timings[1] if reference is not None else None


def _check_memory(
    job: Job, compiled: Compiled, shape: Layout, dtype: DType, settings: Settings, inside: int
) -> None:
    lengths = buffer_elements(compiled.collective, shape, job.rank)
    mine = sum(lengths) * dtype.bytes
    on_host = mine + (inside if settings.device == "host" else 0)
    if settings.transport == "shm" and settings.buffers == "private":
        on_host += min(ROOM_BYTES, ROOMS * mine)
    free = available_bytes()
    if on_host * job.board.node_ranks > free * MEMORY_SHARE:
        raise EnvironmentProblem(
            f"a size of {shape.elements * dtype.bytes} bytes needs {on_host} bytes on each of "
            f"{job.board.node_ranks} ranks here, and {free} bytes are free; use a smaller -e"
        )
    if settings.device == "cuda":
        free = gpu.Cuda(gpu.load()).free_bytes()
        if mine + inside > free * MEMORY_SHARE:
            raise EnvironmentProblem(
                f"a size of {shape.elements * dtype.bytes} bytes needs {mine + inside} bytes on the device, "
                f"and {free} are free; use a smaller -e"
            )


def available_bytes() -> int:
    """Memory that this machine, or the control group that this process is in, can still give."""
    free = [2**62]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free.append(int(limit.read_text()) - int(used.read_text()))
    return min(free)
