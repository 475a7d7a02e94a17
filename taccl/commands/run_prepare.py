"""What `taccl run` was asked for: files, sizes, modes and transport, and all that can be wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from taccl.commands.options import check_output
from taccl.commands.run_codecs import choose_codecs
from taccl.commands.run_devices import DEVICE_TRANSPORTS, HOST_TRANSPORTS, check_near, on_devices
from taccl.errors import Diagnostic, InvalidInput, UsageError

if TYPE_CHECKING:
    from fractions import Fraction

    from taccl.profiles.topology import Topology
    from taccl.program_file import ProgramFile
    from taccl.runtime.bench import Loaded, Row
    from taccl.runtime.bench_settings import Settings
    from taccl.runtime.job import Job, Neighbours
    from taccl.runtime.planned import Planned
    from taccl.synth.collective import Collective
    from taccl.synth.program import Program

MAX_ROWS = 100_000  # sizes of one run


def prepare(job: Job, options: dict[str, Any]) -> tuple[Loaded, Loaded | None, Settings, Topology | None]:
    """Everything that can be wrong with the options or the files, on every rank alike."""
    from dataclasses import replace

    from taccl.profiles.load import load_topology
    from taccl.program_file import options_among
    from taccl.runtime import gpu
    from taccl.runtime.bench_settings import Settings
    from taccl.runtime.dtypes import inside_type, select_dtypes, select_ops

    sizes = _sizes(options)
    select_dtypes(options["dtype"] or "all")
    try:
        if options["topology"] is not None:
            _no_pipe(job, options["topology"])
        topology = None if options["topology"] is None else load_topology(options["topology"])
        names = [name for name in (options["file"], options["against"]) if name is not None]
        loaded, opened = load_program(job, names[0], options_among(names[0], names, options))
        against = None
        if options["against"] is not None:
            other, its = load_program(job, names[1], options_among(names[1], names, options))
            against = replace(other, topology=topology or its.topology)
    except OSError as error:
        place = str(error.filename or options["file"])
        raise InvalidInput([Diagnostic(place, 0, 0, "R100", error.strerror or str(error))]) from error
    program, collective = loaded.program, loaded.collective
    ops = tuple(select_ops(options["op"] or program.reduce_op or "sum")) if collective.combining else ()
    if options["op"] is not None and not collective.combining:
        select_ops(options["op"])
        raise UsageError(
            f"--op {options['op']}: {collective.name} copies data and reduces nothing; leave it out"
        )
    if against is not None:
        _check_against(options, loaded, against)
    if options["json_path"] is not None and job.rank == 0:
        check_output(options["json_path"])
    coded = choose_codecs(options, opened, collective, ops)
    no_kernel = options["device"] == "auto" and "zstd" in coded.names
    device = "host" if no_kernel else gpu.choose(options["device"])
    if device == "cuda":
        gpu.select(job.board.node_slot)
        if ops:
            gpu.check_reductions(
                inside_type(one, ops[0], options["accumulate"]).numpy for one in coded.dtypes
            )
    settings = Settings(
        sizes_bytes=sizes, dtypes=coded.dtypes, ops=ops, modes=_modes(options, loaded),
        iterations=options["iters"], warmup=options["warmup"], checks=options["checks"], device=device,
        transport=_transport(options["transport"], device, options["buffers"], options["pace"]),
        buffers=options["buffers"],
        accumulate=options["accumulate"], pace=options["pace"],
        turns=loaded.turns if options["turns"] is None else options["turns"], reference=options["reference"],
        calibrate=options["calibrate"], deadline_s=options["deadline"], codecs=coded.names,
        codec_links=coded.links, codec_at=options["codec_at"], recode=options["recode"],
    )  # fmt: skip
    topology = topology or opened.topology
    if settings.calibrate and topology is None:
        raise UsageError(
            "--calibrate compares with a model: give --profile, or a native file, which brings its own"
        )
    return replace(loaded, planned=coded.plan, topology=topology), against, settings, topology


def load_program(job: Job, file: str, options: dict[str, Any]) -> tuple[Loaded, ProgramFile]:
    """The program of a file, and what was read. Raises UsageError when the job has another number of ranks."""
    from dataclasses import replace

    from taccl.program_file import TURNS, open_program
    from taccl.runtime.bench import Loaded
    from taccl.runtime.semantics import check_buffers, collective_of
    from taccl.runtime.trace import trace
    from taccl.synth.collective import ROOTED

    _no_pipe(job, file)
    opened = open_program(file, options)
    program, collective = opened.program, opened.collective
    if job.ranks != program.ranks:
        raise UsageError(
            f"{file} is a program for {program.ranks} ranks and this job has {job.ranks}; start "
            f"it with: mpiexec -n {program.ranks} taccl {options.get('again') or f'run {file}'}"
        )
    _check_root(file, program)
    try:
        order = trace(program)
    except InvalidInput as problem:  # of the program, which has another name than its file
        raise InvalidInput([replace(found, file=file) for found in problem.diagnostics]) from problem
    inferred = collective is None and program.collective in ("alltoallv", "sendrecv")
    if collective is None:
        collective = collective_of(program, order)
    else:
        check_buffers(program, collective)
    if options["root"] and collective.name not in ROOTED:
        raise UsageError(f"{file} is a program for {collective.name}, which has no root; leave out --root")
    apart = all(pair is None for pair in collective.inplace)
    claimed = {"out_of_place": program.outofplace, "in_place": program.inplace and not apart}
    modes = tuple(mode for mode in claimed if claimed[mode])
    turns = opened.algorithm is None or opened.algorithm.provenance.get(TURNS) is not False
    return Loaded(program, collective, order, modes, inferred=inferred, turns=turns), opened


def _no_pipe(job: Job, file: str) -> None:
    """Raise InvalidInput for a pipe that several ranks would read: each would get a part, and wait for ever."""
    from pathlib import Path

    if job.ranks > 1 and Path(file).is_fifo():
        raise InvalidInput([
            Diagnostic(file, 0, 0, "R100", "a pipe, which only one rank could read", "write it to a file first")
        ])  # fmt: skip


def _check_against(options: dict[str, Any], loaded: Loaded, against: Loaded) -> None:
    """Raise UsageError when two programs do not do the same."""
    mine, its = loaded.collective, against.collective
    check_same_work(options["file"], mine, f"--against {options['against']}", its)
    if not options["reference"]:
        raise UsageError("--against times another program, and --no-reference says not to")


def check_same_work(file: str, mine: Collective, other_file: str, its: Collective) -> None:
    """Raise UsageError when two programs do not do the same."""
    if (mine.name, mine.root, mine.groups) != (its.name, its.root, its.groups):
        raise UsageError(f"{file} does {_what(mine)}, and {other_file} {_what(its)}; they must do the same")
    if mine.name in ("alltoallv", "sendrecv", "custom") and _parts(mine) != _parts(its):
        raise UsageError(
            f"{file} and {other_file} both do {mine.name}, but not with the same parts of the data between the same "
            "ranks; they must do the same"
        )


def _parts(collective: Collective) -> dict[tuple[frozenset[int], frozenset[int]], Fraction]:
    """What part of all chunks goes from which ranks to which, however finely they are cut."""
    from collections import Counter
    from fractions import Fraction

    counted = Counter(
        (frozenset(rank for rank, _ in chunk.sources), frozenset(rank for rank, _ in chunk.destinations))
        for chunk in collective.chunks
    )
    return {ways: Fraction(count, len(collective.chunks)) for ways, count in counted.items()}


def _what(collective: Collective) -> str:
    from taccl.synth.collective import ROOTED

    root = f" of root {collective.root}" if collective.name in ROOTED else ""
    groups = f" in {len(collective.groups)} groups" if collective.groups else ""
    return f"{collective.name}{root}{groups}"


def _check_root(file: str, program: Program) -> None:
    """Raise UsageError for a program that does its collective for another root than the one that is asked for."""
    from dataclasses import replace

    from taccl.synth.collective import ROOTED
    from taccl.synth.verify import verify

    def achieved(root: int) -> bool:
        # Of the findings, those on what buffers hold (V4xx) depend on the root.
        found = verify(replace(program, root=root))
        return not any(f.code.startswith("V4") and f.severity == "error" for f in found)

    if program.collective not in ROOTED or achieved(program.root):
        return
    for root in range(program.ranks):
        if root != program.root and achieved(root):
            raise UsageError(
                f"{file} is a {program.collective} of root {root}, not {program.root}: give --root {root}"
            )


def _sizes(options: dict[str, Any]) -> tuple[int, ...]:
    least, most, by = options["min_bytes"], options["max_bytes"], options["step_bytes"]
    if least > most:
        raise UsageError(f"-b {least} is larger than -e {most}")
    for option, given in (("-b", least), ("-i", by)):
        if given is not None and given < 1:
            raise UsageError(f"{option} {given}: sizes and steps must be at least one byte")
    if by is not None and (most - least) // by >= MAX_ROWS:
        raise UsageError(f"-i {by} makes more than {MAX_ROWS} sizes")
    sizes, size = [], least
    while size <= most:
        sizes.append(size)
        size = size + by if by is not None else size * options["step_factor"]
    return tuple(sizes)


def _modes(options: dict[str, Any], loaded: Loaded) -> tuple[str, ...]:
    asked = {"out_of_place": options["outofplace"], "in_place": options["inplace"]}
    for mode in asked:
        if asked[mode] and mode not in loaded.modes:
            raise UsageError(f"{options['file']} does not claim to work {mode.replace('_', ' ')}")
    chosen = [mode for mode in loaded.modes if asked[mode] or not any(asked.values())]
    if not chosen:
        raise UsageError(f"{options['file']} claims neither a usable in-place nor an out-of-place mode")
    return tuple(chosen)


def _transport(asked: str, device: str, buffers: str, pace: bool) -> str:
    if device == "host":
        if asked in DEVICE_TRANSPORTS:
            raise UsageError(f"--transport {asked} moves device memory; give --device cuda")
        if "tcp" in asked and not pace:
            raise UsageError(
                f"--no-pace is about messages over MPI; --transport {asked} has none between nodes"
            )
        if buffers == "shared" and asked in ("tcp", "mpi"):
            raise UsageError("--buffers shared is host memory of the transport shm")
        return asked
    if asked in HOST_TRANSPORTS:
        known = f"{', '.join(DEVICE_TRANSPORTS[:-1])} or {DEVICE_TRANSPORTS[-1]}"
        raise UsageError(f"--transport {asked} moves host memory; with --device cuda give {known}")
    if buffers == "shared" and asked not in ("auto", "cuda-ipc"):
        raise UsageError("--buffers shared with --device cuda is device memory of the transport cuda-ipc")
    return asked


def with_transport(job: Job, settings: Settings) -> tuple[Settings, Neighbours]:
    """Resolve `auto`: on the host shared memory within nodes, and between them TCP connections or MPI; on devices CUDA
    IPC, where ranks have them."""
    import dataclasses

    from taccl.runtime.host_transport import host_kind

    if settings.device == "cuda":
        return on_devices(job, settings)
    if settings.transport == "mpi":
        return settings, job.alone()
    if settings.transport == "tcp":
        return settings, job.join_nodes(job.alone(), everyone=True)
    found, asked = job.share_memory(), settings.transport
    if asked.startswith("shm") or settings.buffers == "shared":
        job.together("the choice of the transport", lambda: check_near(job, settings, found, "shm"))
    if asked == "shm+tcp":
        found = job.join_nodes(found)
    elif asked == "auto" and settings.pace:
        found = job.reach_nodes(found)
    kind = host_kind(found) if asked == "auto" and settings.buffers == "private" else "shm"
    others = "mpi" if found.tcp is None else "tcp"
    return dataclasses.replace(settings, transport=kind, others=others), found


def prediction(
    row: Row, predict: Callable[[int], float] | None, plan: Planned | None, settings: Settings
) -> float | None:
    """What the model says of a row in us, None for nothing. plan: that is followed, on its own cluster.

    Coded rows are predicted as if nothing were coded, but for the planned ones: those are where the plan was made.
    """
    from taccl.runtime.dtypes import inside_bytes

    if predict is None or settings.codec_links != "planned" or row.codec == "raw":
        moved = inside_bytes(row.size_bytes, row.dtype, row.op, settings.accumulate)
        return None if predict is None else predict(moved)
    if plan is None or (row.codec, row.size_bytes, settings.codec_at) != (
        plan.codec,
        plan.size_bytes,
        "collective",
    ):
        return None
    return plan.time_us


def predictor(
    topology: Topology | None, program: Program, collective: Collective
) -> Callable[[int], float] | None:
    """A function from the size in bytes to the predicted time in us; None when no topology is known."""
    if topology is None:
        return None
    from taccl.synth.cost import us
    from taccl.synth.simulate import simulate

    def predict(size_bytes: int) -> float:
        return us(simulate(program, topology, size_bytes, collective=collective).time_fs)

    predict(collective.size_chunks)  # a link that the program uses and the topology lacks shows now
    return predict
