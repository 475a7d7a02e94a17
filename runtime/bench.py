"""Check and time a program for many sizes, types and reductions, beside MPI's own collective.

A time is the slowest rank's, averaged over the iterations (nccl-tests). Program and reference take turns, so
that what disturbs the machine disturbs both.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from taccl.errors import CheckFailed, UsageError
from taccl.profiles.topology import Topology
from taccl.runtime import check, check_values, codecs, gpu
from taccl.runtime.bench_checks import check_results, differs_uncoded, filled, judge
from taccl.runtime.bench_settings import RAW, Settings
from taccl.runtime.bind import (
    Bound,
    Compiled,
    buffer_elements,
    compile_program,
    internal_bytes,
)  # fmt: skip
from taccl.runtime.calibration import Message, Span, spans
from taccl.runtime.codecs import Codec
from taccl.runtime.coded import PARTS, Coding
from taccl.runtime.coders import CodecPort
from taccl.runtime.device_memory import DeviceMemory
from taccl.runtime.device_transport import device_buffers, device_bytes, device_transport
from taccl.runtime.dtypes import DType, inside_type
from taccl.runtime.free_memory import check_memory
from taccl.runtime.host_transport import agreed_turns, host_transport
from taccl.runtime.job import Job, Neighbours
from taccl.runtime.layout import Layout, layout
from taccl.runtime.planned import Planned
from taccl.runtime.reference import Reference
from taccl.runtime.trace import Trace
from taccl.runtime.turns import Turns
from taccl.synth.collective import ROOTED, Collective
from taccl.synth.program import SENDS, Program


@dataclass(frozen=True, slots=True)
class Loaded:
    """A program that can be run, and what it computes."""

    program: Program
    collective: Collective
    order: Trace
    modes: tuple[str, ...]  # of MODES, those that it claims
    planned: Planned | None = None  # the coding plan of its file, where settings follow it
    topology: Topology | None = None  # the cluster whose links it uses, where that is known
    inferred: bool = False  # whether the collective was read off the moves of the program
    turns: bool = True  # False: its file says that it is quicker without


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
    largest: float  # absolute value of the exact result; -1 where it was not looked at
    reference: Timing | None  # of MPI's own collective, or of the program that this one is run against
    spans: Mapping[Message, Span] | None = None  # of the last run's messages, when asked for
    # Of all ranks in the last run: bytes of the values that were coded, and of their frames.
    coded_bytes: tuple[int, int] = (0, 0)
    turns: int | None = None  # messages that wait for their turn; None where no turns are asked for, or known
    no_turns: str = ""  # why there are none where they were asked for


@dataclass(frozen=True, slots=True)
class Row:
    """One size, type and reduction."""

    size_bytes: int
    count: int  # nccl-tests' count: elements of a natural block
    dtype: DType
    op: str | None
    root: int  # -1: none
    wire_bytes: int  # sent over all links in one run, where nothing is coded
    modes: Mapping[str, Measurement]
    codec: str = RAW


def measure(
    job: Job,
    loaded: Loaded,
    settings: Settings,
    neighbours: Neighbours,
    against: Loaded | None = None,
    data: Mapping[str, Any] | None = None,
) -> Iterator[Row]:
    """The rows, in order of type, reduction, size and codec; collective over the ranks of the job. Programs are
    compiled before it returns, rows are measured one after the other as they are asked for.

    against: a program that takes turns with this one in place of MPI's own collective; it is never coded. data: by type
    the values to run on; None: test data.
    Raises EnvironmentProblem when memory is too small, before allocating it; CheckFailed when `against` is wrong;
    UsageError when a codec would be used at every hop of a sum unasked.
    """

    def compiled(one: Loaded, coding: Coding | None = None) -> dict[str, Compiled]:
        modes = [mode for mode in settings.modes if mode in one.modes]
        nodes = neighbours.nodes if settings.pace and settings.device == "host" else None
        held = None if neighbours.nccl is None else neighbours.apart
        sorts = neighbours.tcp is not None
        compile_mode = functools.partial(
            compile_program, one.program, one.collective, wanted=[job.rank], order=one.order, nodes=nodes,
            coding=coding, held=held, ahead=sorts and one.topology is not None, sorts=sorts,
        )  # fmt: skip
        return {mode: compile_mode(inplace=mode == "in_place") for mode in modes}

    chosen = {name: None if name == RAW else codecs.get(name) for name in settings.codecs}
    how_of = {
        name: None if codec is None else _coding(codec, settings, neighbours, loaded.planned)
        for name, codec in chosen.items()
    }
    plain, mine, others = job.together(
        "the compilation of the program",
        lambda: (
            compiled(loaded),
            {how: compiled(loaded, how) for how in set(how_of.values()) if how is not None},
            {} if against is None else compiled(against),
        ),
    )
    return _rows(
        job, loaded, settings, neighbours, chosen, how_of, plain, mine, others, against is None,
        None if against is None else against.topology, data,
    )  # fmt: skip


def _rows(
    job: Job,
    loaded: Loaded,
    settings: Settings,
    neighbours: Neighbours,
    chosen: Mapping[str, Codec | None],
    how_of: Mapping[str, Coding | None],
    plain: Mapping[str, Compiled],
    mine: Mapping[Coding, Mapping[str, Compiled]],
    others: Mapping[str, Compiled],
    beside_mpi: bool,
    other_links: Topology | None,
    data: Mapping[str, Any] | None,
) -> Iterator[Row]:
    """plain, mine, others: by mode the program without a codec, in every way of coding, and what it is run against."""
    collective = loaded.collective
    coder = job.coder() if mine and settings.device == "host" else None
    for dtype in settings.dtypes:
        for op in settings.ops if collective.combining else (None,):
            inside = inside_type(dtype, op, settings.accumulate)
            for shape in layouts(collective, dtype, settings.sizes_bytes):
                source = None
                if data is not None:
                    source = check_values.real_values(data[dtype.name], job.ranks)
                for name, codec in chosen.items():
                    how = how_of[name]
                    found = {
                        mode: _measure_mode(
                            job, plain[mode] if how is None else mine[how][mode], shape, dtype, op, settings,
                            neighbours, _other(collective, shape, others.get(mode), other_links), beside_mpi,
                            codec, coder, source, plain[mode], loaded.topology,
                        )
                        for mode in settings.modes
                    }  # fmt: skip
                    rooted = collective.name in ROOTED
                    yield Row(
                        shape.elements * dtype.bytes, shape.block_elements, dtype, op,
                        collective.root if rooted else -1, wire_bytes(loaded.program, shape, inside), found,
                        name,
                    )  # fmt: skip
    if coder is not None:
        coder.close()


def _coding(codec: Codec, settings: Settings, neighbours: Neighbours, planned: Planned | None) -> Coding:
    nodes = neighbours.nodes if settings.codec_links == "nodes" else None
    hops = None if planned is None else planned.hops
    near = neighbours.near if settings.codec_links == "nodes" and settings.transport == "shm" else None
    parts = PARTS if hops is None and settings.device == "host" else 1
    return Coding(nodes, codec.lossless, settings.codec_at == "hop", settings.recode, hops, near, parts)


def _other(
    collective: Collective, shape: Layout, compiled: Compiled | None, topology: Topology | None
) -> tuple[Compiled, Layout, Topology | None] | None:
    """A compiled program on the layout of the same buffers, and its cluster. Raises UsageError when it wants others."""
    if compiled is None:
        return None
    found = layout(compiled.collective, shape.elements)
    for rank in range(collective.ranks):
        if buffer_elements(compiled.collective, found, rank) != buffer_elements(collective, shape, rank):
            raise UsageError("--against: the two programs do not work on the same buffers")
    return compiled, found, topology


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
    other: tuple[Compiled, Layout, Topology | None] | None,
    beside_mpi: bool,
    codec: Codec | None,
    coder: CodecPort | None,
    source: check_values.Source | None,
    plain: Compiled,
    topology: Topology | None,
) -> Measurement:
    collective, inplace = compiled.collective, compiled.inplace
    if settings.deadline_s is None:
        job.watchdog.deadline_s = patience_s(shape.elements * dtype.bytes)
    inside = inside_type(dtype, op, settings.accumulate)
    on_device = settings.device == "cuda"
    needed = internal_bytes(compiled, job.rank, shape, dtype, inside, codec, on_device)
    if other is not None:
        needed += internal_bytes(other[0], job.rank, other[1], dtype, inside)
    compared_bytes = 0
    if (
        codec is not None and codec.lossless and op is not None
    ):  # with a run without codec, whose result waits
        needed += internal_bytes(plain, job.rank, shape, dtype, inside)
        compared_bytes = buffer_elements(collective, shape, job.rank)[1] * dtype.bytes
    cuda = gpu.Cuda(gpu.load()) if on_device else None
    pinned = 0
    if cuda is not None:
        bound_too = [(plain, shape)] if compared_bytes else []
        for one, on in [(compiled, shape), *bound_too, *([] if other is None else [other[:2]])]:
            frames = codec if one is compiled else None
            rooms, slots_bytes = device_bytes(one, on, dtype, inside, settings, neighbours, job.rank, frames)
            needed, pinned = needed + rooms, pinned + slots_bytes
        cuda.give_back()
        if neighbours.nccl is not None:  # before the check of memory, because connections take some
            for one in [compiled, plain] if other is None else [compiled, plain, other[0]]:
                neighbours.nccl.connect(job, {(source, target) for source, target, _ in one.rounds})
        job.barrier()  # all ranks of the device have freed what the mode before needed
    job.together(
        "the check of memory",
        lambda: check_memory(
            job, compiled, shape, dtype, settings, neighbours, needed, pinned, compared_bytes, cuda
        ),
    )
    empty = job.memory.empty if settings.buffers == "shared" and settings.device == "host" else np.empty
    guarded = check.allocate(collective, shape, job.rank, dtype, inplace, empty)
    host = guarded.buffers
    # One for all that the mode binds: a process may open a piece once.
    devices = None if cuda is None else DeviceMemory(cuda)
    buffers = host
    if cuda is not None and devices is not None:
        place = devices.empty if settings.buffers == "shared" else cuda.xp.empty
        buffers = device_buffers(place, compiled, shape, dtype, job.rank)

    marks: list[tuple[int, float]] = []

    def bind(one: Compiled, on: Layout, known: Topology | None, taken: Turns | None = None) -> Bound:
        noted = marks if settings.calibrate and one is compiled else None
        chunk_bytes = on.chunk_elements * inside.bytes
        if cuda is None or devices is None:
            kind, pace = settings.transport, settings.pace
            transport, own = host_transport(job, one, chunk_bytes, neighbours, kind, pace, taken, known)
        else:
            transport, own = device_transport(job, one, chunk_bytes, settings, neighbours, cuda, devices)
        bound = job.together(
            "the binding of the program",
            lambda: Bound(
                one,
                job.rank,
                on,
                buffers,
                dtype,
                op,
                transport,
                np,
                own,
                inside,
                noted,
                codec if one is compiled else None,
                coder,
                cuda,
            ),
        )
        job.connect(bound)
        return bound

    def turned(one: Compiled, on: Layout, known: Topology | None) -> Turns | None:
        if known is None or cuda is not None or not settings.pace:
            return None
        return agreed_turns(job, one, on.chunk_elements * inside.bytes, neighbours, known, settings.turns)

    # Timed runs reduce again and again into the same data, which may overflow; checked runs never do.
    with np.errstate(all="ignore"):
        # The model's times are those of messages without a codec.
        taken = turned(compiled, shape, topology) if codec is None else None
        bounds = [bind(compiled, shape, topology, taken)]
        if other is not None:
            bounds.append(bind(*other, turned(*other)))
        with job.waiting("it waits for the other ranks to make the groups' communicators"):
            reference = Reference(job.MPI, job.control, collective, shape, host, dtype, op, inplace)
        judged = judge(job, guarded, compiled, shape, dtype, inside, op, settings, codec, source)
        if other is not None:
            bad, beyond, *_ = check_results(
                job, bounds[1], host, cuda, judged.fill, judged.uncoded, settings.checks
            )
            if bad or beyond:
                job.fail_alike(CheckFailed(f"--against: {other[0].program.name} gives wrong data"))
        wrong, outside, error, largest = check_results(
            job, bounds[0], host, cuda, judged.fill, judged.compare, settings.checks
        )
        if wrong is not None and op is not None and codec is not None and codec.lossless:
            wrong += differs_uncoded(job, bounds[0], bind(plain, shape, topology), host, cuda, judged.fill)
        call = reference.call if settings.reference and cuda is None and beside_mpi else None
        if other is not None and settings.reference:
            call = functools.partial(job.run, bounds[1])
        refill = None
        if inplace and op is not None and codec is not None:
            # Run after run on its own sums the data would become what no codec is meant for.
            refill = functools.partial(filled, host, cuda, bounds[0], judged.fill)
        mine, its = _time(job, bounds[0], call, settings, refill)
        sent = job.reduce(np.array(bounds[0].executor.coded_bytes(), np.int64), "sum")
        seen = spans(job, compiled.plans[job.rank], marks) if settings.calibrate else None
        with job.waiting("it waits for the other ranks to free what the size needed"):
            reference.close()
            for bound in bounds:
                bound.close()
                bound.transport.close()
        if cuda is not None:
            job.barrier()  # nobody has this rank's memory open any more, which goes now
    coded_bytes = int(sent[0]), int(sent[1])
    asked = taken if settings.turns else None
    waiting = None if asked is None else len(asked.gates)
    why = "" if asked is None else asked.why_none
    return Measurement(mine, wrong, outside, error, largest, its, seen, coded_bytes, waiting, why)


def _time(
    job: Job,
    bound: Bound,
    reference: Callable[[], Any] | None,
    settings: Settings,
    refill: Callable[[], object] | None = None,
) -> tuple[Timing, Timing | None]:
    runs: list[Callable[[], Any]] = [lambda: job.run(bound)]
    if reference is not None:
        runs.append(reference)
    taken = np.zeros((len(runs), settings.iterations))
    for turn in range(-settings.warmup, settings.iterations):
        for index, run in enumerate(runs):
            if refill is not None:
                refill()
            # The first may be held up behind what the run before left on slow links, and ranks then leave it at
            # different times; the second finds them empty. Who is early leaves the cores to those that still run.
            job.barrier(patient=True)
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
