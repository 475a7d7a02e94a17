"""`mpiexec -n N taccl run FILE`: execute a program on real ranks and check every result."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files, topologies
from taccl.commands.options import Quantity
from taccl.errors import Diagnostic, EnvironmentProblem, InvalidInput, UsageError
from taccl.program_file import collective_options
from taccl.streams import check_stdout

if TYPE_CHECKING:
    from taccl.profiles.topology import Topology
    from taccl.runtime.bench import Loaded, Row, Settings
    from taccl.runtime.job import Job, Neighbours
    from taccl.synth.collective import Collective
    from taccl.synth.program import Program

TRANSPORTS = ("auto", "shm", "mpi", "mpi-cuda", "staged-mpi")
DEADLINE_S = 30.0  # default; see bench.patience_s
MAX_ROWS = 100_000  # sizes of one run
UNITS = {
    "": 1, "B": 1,
    "K": 2**10, "M": 2**20, "G": 2**30, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
    "KB": 10**3, "MB": 10**6, "GB": 10**9,
}  # fmt: skip


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes: 65536, 64K (K, M, G count in 1024, as nccl-tests does), 64KiB, or 64KB (1000)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        digits = value.rstrip("KMGiBkmgb")
        unit = value[len(digits) :].upper()
        number = int(digits) if digits.isascii() and digits.isdigit() else -1
        if number < 0 or unit not in UNITS or number * UNITS[unit] > 2**50:
            self.fail(f"{value!r} is not a size; write bytes, or e.g. 64K, 16M, 1MB, 1MiB", param, ctx)
        return number * UNITS[unit]


class RankedCommand(click.Command):
    """A command that every rank of a job runs: what is wrong with its options is said by rank 0 only."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """As in click; other ranks leave silently with the exit code."""
        from taccl.runtime.mpi import launcher

        if launcher().rank == 0:
            return super().make_context(*args, **kwargs)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # --help
                return super().make_context(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit) as leaving:
            raise SystemExit(leaving.exit_code) from None


@click.command(cls=RankedCommand)
@click.argument("file", type=click.Path(exists=False, dir_okay=False))
@click.option(
    "--profile",
    "--topology",
    "topology",
    metavar="T",
    shell_complete=topologies,
    help="Predict times on this topology; a native file brings its own.",
)
@click.option("-b", "--min-bytes", type=Size(), default="1K", show_default=True, help="Smallest size.")
@click.option("-e", "--max-bytes", type=Size(), default="64M", show_default=True, help="Largest size.")
@click.option(
    "-f", "--step-factor", type=click.IntRange(2), default=4, show_default=True, help="Next size = size * f."
)
@click.option("-i", "--step-bytes", type=Size(), help="Next size = size + i, instead of -f.")
@click.option(
    "-n", "--iters", type=click.IntRange(1), default=20, show_default=True, help="Timed iterations."
)
@click.option(
    "-w", "--warmup", type=click.IntRange(0), default=5, show_default=True, help="Warm-up iterations."
)
@click.option(
    "-c",
    "--check",
    "checks",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Runs that are compared element by element; 0: none.",
)
@click.option(
    "-d",
    "--dtype",
    default="float32",
    show_default=True,
    help="float32 float64 float16 bfloat16 int32 int64 uint8, several with commas, or all.",
)
@click.option(
    "-o",
    "--op",
    help="sum prod min max avg, several with commas, or all. Default: the file's. Only for "
    "collectives that reduce.",
)
@click.option("-r", "nccl_root", type=click.IntRange(0), help="nccl-tests' name for --root.")
@click.option(
    "--accumulate",
    type=click.Choice(("type", "float32")),
    default="type",
    show_default=True,
    help="Reduce float16 and bfloat16 in their own type at every step, or in float32 until the end.",
)
@click.option("--in-place", "inplace", is_flag=True, help="Only in place.")
@click.option(
    "--out-of-place",
    "outofplace",
    is_flag=True,
    help="Only out of place. Default: each mode that the file claims.",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="auto",
    show_default=True,
    help="How messages travel; a forced one fails rather than falls back.",
)
@click.option(
    "--buffers",
    type=click.Choice(("private", "shared")),
    default="private",
    show_default=True,
    help="Memory of the collective's buffers: a program's own, or the executor's shared segments.",
)
@click.option(
    "--device",
    type=click.Choice(("auto", "host", "cuda")),
    default="host",
    show_default=True,
    help="Where the buffers are.",
)
@click.option(
    "--deadline",
    type=Quantity("s", 0.1, 1e6),
    metavar="S",
    help="Seconds without progress after which the job is ended. Default: 30, or a second for each 5 MB of the "
    "size where that is longer.",
)
@click.option(
    "--reference/--no-reference", default=True, show_default=True, help="Time MPI's own collective beside it."
)
@click.option(
    "--against",
    metavar="FILE",
    shell_complete=files,
    help="Time this program of the same collective beside it, instead of MPI's.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    shell_complete=files,
    help="Write one JSON document; - is stdout (the table goes to stderr).",
)
@click.option("-v", "--verbose", is_flag=True, help="Say which transport and memory each rank uses.")
@collective_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Execute a program on real ranks and check every result (under mpiexec).

    FILE is MSCCL XML or a native .json algorithm. Columns are nccl-tests', then MPI's own collective in the
    same run. Sizes are nccl-tests' (allgather, reducescatter, alltoall: the whole array of a rank).
    """  # fmt: skip
    from taccl.runtime.job import Job

    if options["nccl_root"] is not None:
        options["root"] = options["nccl_root"]
    with Job(options["deadline"] or DEADLINE_S) as job:
        wrong = _run(job, options)
        if wrong:
            job.leave(1)


def _run(job: Job, options: dict[str, Any]) -> bool:
    """Print the table, write the JSON; whether anything was wrong (the same on every rank)."""
    import numpy as np

    from taccl.runtime import table
    from taccl.runtime.bench import measure
    from taccl.runtime.job import fingerprint

    loaded, against, settings, topology = job.together(
        "the reading of the file", lambda: _prepare(job, options)
    )
    program, collective = loaded.program, loaded.collective
    # Some options decide whether ranks meet again to speak in turn or to write.
    rival = None if against is None else fingerprint(against.program, (against.collective,))
    facts = (settings, collective, options["verbose"], options["json_path"] is not None, rival)
    job.agree_on(fingerprint(program, facts), "program, or has other options,")
    settings, neighbours = _with_transport(job, settings)
    predict = job.together("the prediction of times", lambda: _predictor(topology, program, collective))
    _say_devices(job, settings, neighbours, options["verbose"])
    out = sys.stderr if options["json_path"] == "-" else sys.stdout
    first = job.rank == 0
    name, ranks = collective.name, collective.group_ranks
    if first:
        beside = None if not settings.reference else "MPI" if against is None else ""
        other = None if against is None else against.program
        preamble = _preamble(job, program, collective, settings, neighbours, other)
        for text in [*preamble, *table.header(beside, bool(predict))]:
            print(text, file=out, flush=True)
    rows: list[tuple[Row, float | None]] = []
    for row in measure(job, loaded, settings, neighbours.sharing[job.rank], against):
        predicted = predict(row.size_bytes) if predict is not None and first else None
        rows.append((row, predicted))
        if first:
            print(table.line(row, name, ranks, settings.reference, predicted), file=out, flush=True)
    measured = [found for row, _ in rows for found in row.modes.values()]
    bad = sum((found.wrong or 0) + found.outside for found in measured)
    speeds = [table.bandwidths(row, m, name, ranks)[1] for row, _ in rows for m in row.modes.values()]
    average = float(np.mean(speeds)) if speeds else 0.0
    if first:
        print(f"# Out of bounds values : {bad} {'OK' if bad == 0 else 'FAILED'}", file=out)
        print(f"# Avg bus bandwidth    : {average:.6g}", file=out, flush=True)
    if options["json_path"] is not None:
        document = (
            _document(job, program, collective, settings, neighbours, options, rows, bad, average)
            if first
            else {}
        )
        job.together("the writing of the JSON", lambda: _write(job, options["json_path"], document))
    return bad > 0


def _prepare(job: Job, options: dict[str, Any]) -> tuple[Loaded, Loaded | None, Settings, Topology | None]:
    """Everything that can be wrong with the options or the files, on every rank alike."""
    from pathlib import Path

    from taccl.profiles.load import load_topology
    from taccl.runtime import gpu
    from taccl.runtime.bench import Settings
    from taccl.runtime.dtypes import select_dtypes, select_ops

    sizes = _sizes(options)
    dtypes = tuple(select_dtypes(options["dtype"]))
    try:
        topology = None if options["topology"] is None else load_topology(options["topology"])
        loaded, its_topology = _load(job, options["file"], options)
        against = None if options["against"] is None else _load(job, options["against"], options)[0]
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
    if options["json_path"] not in (None, "-") and not Path(options["json_path"]).resolve().parent.is_dir():
        raise UsageError(f"--json {options['json_path']}: its directory does not exist")
    if options["json_path"] == "-" and job.rank == 0:
        check_stdout()
    device = gpu.choose(options["device"])
    if device == "cuda":
        gpu.select(job.board.node_slot)
    settings = Settings(
        sizes_bytes=sizes, dtypes=dtypes, ops=ops, modes=_modes(options, loaded),
        iterations=options["iters"], warmup=options["warmup"], checks=options["checks"], device=device,
        transport=_transport(options["transport"], device, options["buffers"]), buffers=options["buffers"],
        accumulate=options["accumulate"], reference=options["reference"], deadline_s=options["deadline"],
    )  # fmt: skip
    return loaded, against, settings, topology or its_topology


def _load(job: Job, file: str, options: dict[str, Any]) -> tuple[Loaded, Topology | None]:
    """The program of a file, and the topology that it brings."""
    from taccl.program_file import open_program
    from taccl.runtime.bench import Loaded
    from taccl.runtime.semantics import check_buffers, collective_of
    from taccl.runtime.trace import trace

    opened = open_program(file, options)
    program, collective = opened.program, opened.collective
    if job.ranks != program.ranks:
        raise UsageError(
            f"{file} is a program for {program.ranks} ranks and this job has {job.ranks}; start "
            f"it with: mpiexec -n {program.ranks} taccl run {file}"
        )
    _check_root(file, program)
    order = trace(program)
    if collective is None:
        collective = collective_of(program, order)
    else:
        check_buffers(program, collective)
    apart = all(pair is None for pair in collective.inplace)
    claimed = {"out_of_place": program.outofplace, "in_place": program.inplace and not apart}
    modes = tuple(mode for mode in claimed if claimed[mode])
    return Loaded(program, collective, order, modes), opened.topology


def _check_against(options: dict[str, Any], loaded: Loaded, against: Loaded) -> None:
    """Raise UsageError when two programs do not do the same."""
    mine, its = loaded.collective, against.collective
    if (mine.name, mine.root, mine.groups) != (its.name, its.root, its.groups):
        raise UsageError(
            f"--against {options['against']} is a {its.name} of root {its.root}, and {options['file']} a "
            f"{mine.name} of root {mine.root}; they must do the same"
        )
    if not options["reference"]:
        raise UsageError("--against times another program, and --no-reference says not to")


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
    if least < 1 or (by is not None and by < 1):
        raise UsageError("sizes and steps must be at least one byte")
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


def _transport(asked: str, device: str, buffers: str) -> str:
    if buffers == "shared" and (device != "host" or asked == "mpi"):
        raise UsageError("--buffers shared is host memory of the transport shm")
    if device == "host":
        if asked in ("mpi-cuda", "staged-mpi"):
            raise UsageError(f"--transport {asked} moves device memory; give --device cuda")
        return asked
    if asked in ("mpi", "shm"):
        raise UsageError(
            f"--transport {asked} moves host memory; with --device cuda give mpi-cuda or staged-mpi"
        )
    return asked


def _with_transport(job: Job, settings: Settings) -> tuple[Settings, Neighbours]:
    """Resolve `auto`: on the host shared memory where ranks have it; on a device rank 0 tries whether MPI takes its
    memory, in child processes, because it may crash."""
    import dataclasses

    import numpy as np

    from taccl.runtime.doctor import mpi_takes_device_memory
    from taccl.runtime.job import Neighbours

    alone = Neighbours(tuple((rank,) for rank in range(job.ranks)), "")
    if settings.device == "host" and settings.transport in ("auto", "shm"):
        found = job.share_memory()
        some = any(len(ranks) > 1 for ranks in found.sharing)
        if settings.transport == "shm" or settings.buffers == "shared":
            job.together("the choice of the transport", lambda: _check_shared(job, settings, found))
        transport = "shm" if some or settings.transport == "shm" or settings.buffers == "shared" else "mpi"
        return dataclasses.replace(settings, transport=transport), found
    if settings.transport != "auto":
        return settings, alone
    aware = job.rank == 0 and mpi_takes_device_memory()[0]
    everyone = job.gather_bytes(np.array([aware], np.uint8), "the probe of device memory")
    return dataclasses.replace(settings, transport="mpi-cuda" if everyone[0, 0] else "staged-mpi"), alone


def _check_shared(job: Job, settings: Settings, found: Neighbours) -> None:
    """Raise EnvironmentProblem when what was asked for by name cannot be."""
    if found.why_not:
        raise EnvironmentProblem(f"memory cannot be shared: {found.why_not}")
    if settings.transport == "shm" and len(found.sharing[job.rank]) < job.ranks:
        raise EnvironmentProblem(
            "--transport shm needs all ranks on one node; auto takes shared memory within nodes and MPI between them"
        )


def _predictor(
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


def _say_devices(job: Job, settings: Settings, neighbours: Neighbours, verbose: bool) -> None:
    if not verbose:
        return
    from taccl.runtime.mpi import say

    for rank in range(job.ranks):
        if rank == job.rank:
            say(f"taccl: rank {rank}: {_memory(settings)} buffers, {_ways(job, settings, neighbours)}")
        job.barrier()


def _names(settings: Settings, neighbours: Neighbours) -> str:
    """The transports that the job uses."""
    everywhere = all(len(ranks) == len(neighbours.sharing) for ranks in neighbours.sharing)
    return settings.transport if settings.transport != "shm" or everywhere else "shm+mpi"


def _memory(settings: Settings) -> str:
    return f"{settings.buffers} host" if settings.device == "host" else settings.device


def _ways(job: Job, settings: Settings, neighbours: Neighbours) -> str:
    """By which transport this rank reaches which peers."""
    near = [rank for rank in neighbours.sharing[job.rank] if rank != job.rank]
    if settings.transport != "shm" or not near:
        rest = "mpi" if settings.transport == "shm" else settings.transport
        why = f" ({neighbours.why_not})" if neighbours.why_not else ""
        return f"transport {rest} to every peer{why}"
    if len(near) == job.ranks - 1:
        return "transport shm to every peer"
    return f"transport shm to rank{'s' * (len(near) > 1)} {', '.join(map(str, near))}, mpi to the others"


def _preamble(
    job: Job,
    program: Program,
    collective: Collective,
    settings: Settings,
    neighbours: Neighbours,
    against: Program | None,
) -> list[str]:
    from taccl import __version__
    from taccl.runtime import mpi

    library = mpi.library(job.MPI)
    lines = [
        f"# taccl {__version__}, {library.name} {library.version}, {job.ranks} ranks, "
        f"{_memory(settings)} buffers, transport {_names(settings, neighbours)}",
        f"# {program.name}: {collective.title}, {program.chunks_per_loop} chunks, {program.protocol}; "
        f"warmup {settings.warmup}, iterations {settings.iterations}, checks {settings.checks}",
    ]
    if against is not None:
        lines.append(
            f"# the last columns: {against.name}, {against.chunks_per_loop} chunks, {against.protocol}"
        )
    if settings.accumulate != "type":
        lines.append(f"# 16-bit floats are reduced in {settings.accumulate}")
    low, high = program.min_bytes, program.max_bytes
    if settings.sizes_bytes[0] < low or (high and settings.sizes_bytes[-1] > high):
        lines.append(f"# the file is made for sizes from {low} to {high or 'any'} bytes")
    return [*lines, "#"]


def _document(
    job: Job,
    program: Program,
    collective: Collective,
    settings: Settings,
    neighbours: Neighbours,
    options: dict[str, Any],
    rows: list[tuple[Row, float | None]],
    bad: int,
    average: float,
) -> dict[str, object]:
    import platform
    import time

    from taccl import __version__
    from taccl.runtime import mpi, table

    library = mpi.library(job.MPI)
    name = collective.name
    return {
        "schema": "taccl/run/v1",
        "version": __version__,
        "start_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "args": sys.argv[1:],
        "env": {},
        "nccl_version": None,
        "mpi": {"name": library.name, "version": library.version, "standard": list(library.standard)},
        "config": {
            "file": options["file"],
            "collective": name,
            "protocol": program.protocol,
            "chunks": program.chunks_per_loop,
            "ranks": program.ranks,
            "groups": [list(group) for group in collective.groups],
            "iterations": settings.iterations,
            "warmup": settings.warmup,
            "checks": settings.checks,
            "modes": list(settings.modes),
            "against": options["against"],
            "buffers": settings.buffers,
            "accumulate": settings.accumulate,
        },
        "devices": [
            {"rank": r, "host": platform.node(), "device": settings.device} for r in range(job.ranks)
        ],
        "transport": _names(settings, neighbours),
        "codec": "none",
        "results": [table.row_json(row, name, collective.group_ranks, predicted) for row, predicted in rows],
        "out_of_bounds": {"count": bad, "okay": bad == 0},
        "average_bus_bandwidth": {"bandwidth": average, "okay": bad == 0},
    }


def _write(job: Job, path: str, document: dict[str, object]) -> None:
    from pathlib import Path

    if job.rank != 0:
        return
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise EnvironmentProblem(f"--json {path} cannot be written: {error.strerror}") from error
