"""`mpiexec -n N taccl run FILE`: execute a program on real ranks and check every result."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files
from taccl.commands.run_data import read_data
from taccl.commands.run_options import DEADLINE_S, execution_options
from taccl.commands.run_prepare import prediction, predictor, prepare, with_transport
from taccl.commands.run_report import (
    calibrated,
    document,
    host_names,
    preamble,
    say_devices,
    say_shared_devices,
    say_turns,
    write,
)
from taccl.errors import UsageError
from taccl.program_file import collective_options

if TYPE_CHECKING:
    from taccl.runtime.bench import Row
    from taccl.runtime.calibration import Calibration
    from taccl.runtime.job import Job

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
        number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else -1
        if number < 0 or unit not in UNITS or number * UNITS[unit] > 2**50:
            self.fail(f"{value!r} is not a size; write bytes, or e.g. 64K, 16M, 1MB, 1MiB", param, ctx)
        return number * UNITS[unit]


class RankedCommand(click.Command):
    """A command that every rank of a job runs: rank 0 alone prints its help."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """As in click."""
        from taccl.runtime.mpi import launcher

        silent = contextlib.redirect_stdout(io.StringIO()) if launcher().rank else contextlib.nullcontext()
        with silent:
            return super().make_context(*args, **kwargs)


@click.command(cls=RankedCommand)
@click.argument("file", type=click.Path(exists=False, dir_okay=False))
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
    help="float32 float64 float16 bfloat16 int32 int64 uint8, several with commas, or all. Default: float32, or the "
    "type that the file's coding plan is for.",
)
@click.option(
    "-o",
    "--op",
    help="sum prod min max avg, several with commas, or all. Default: the file's. Only for "
    "collectives that reduce.",
)
@click.option("-r", "nccl_root", type=click.IntRange(0), help="nccl-tests' name for --root.")
@click.option("--in-place", "inplace", is_flag=True, help="Only in place.")
@click.option(
    "--out-of-place",
    "outofplace",
    is_flag=True,
    help="Only out of place. Default: each mode that the file claims.",
)
@click.option(
    "--codec",
    "codecs",
    metavar="NAMES",
    help="Code messages with one codec, or with several in turn: raw (none) xw bf16 bf16-xw q8 fp8 zstd. Default: "
    "what the file plans, else raw.",
)
@click.option(
    "--codec-at",
    type=click.Choice(("collective", "hop")),
    default="collective",
    show_default=True,
    help="Code at the source and decode at destinations, or code and decode every message by itself.",
)
@click.option(
    "--recode", is_flag=True, help="Let a lossy codec code partial sums again at every hop of a reduction."
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
    "--calibrate",
    is_flag=True,
    help="Compare the messages of the last run with the model's, by class of links and by port.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    shell_complete=files,
    help="Write one JSON document; - is stdout (the table goes to stderr).",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Say which transport and memory each rank uses, and which sizes take turns.",
)
@execution_options
@collective_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Execute a program on real ranks and check every result (under mpiexec).

    FILE is MSCCL XML or a native .json algorithm. Columns are nccl-tests', then MPI's own collective in the
    same run. Sizes are nccl-tests' (allgather, reducescatter, alltoall: the whole array of a rank).
    """  # fmt: skip
    from taccl.runtime.job import Job

    if options["nccl_root"] is not None:
        if options["root"] not in (None, options["nccl_root"]):
            raise UsageError(
                f"-r {options['nccl_root']} and --root {options['root']} are two names of one option; give one"
            )
        options["root"] = options["nccl_root"]
    with Job(options["deadline"] or DEADLINE_S) as job:
        wrong = _run(job, options)
        if wrong:
            job.leave(1)


def _run(job: Job, options: dict[str, Any]) -> bool:
    """Print the table, write the JSON; whether anything was wrong (the same on every rank)."""
    import numpy as np

    from taccl.runtime import calibration, table
    from taccl.runtime.bench import measure
    from taccl.runtime.job import fingerprint

    loaded, against, settings, topology = job.together(
        "the reading of the file", lambda: prepare(job, options)
    )
    data = job.together("the reading of the data", lambda: read_data(options["data"], settings.dtypes))
    program, collective = loaded.program, loaded.collective
    # Some options decide whether ranks meet again to speak in turn or to write.
    rival = None if against is None else fingerprint(against.program, (against.collective,))
    values = None if data is None else data.digest
    plan = None if loaded.planned is None else loaded.planned.facts()
    # Where a cluster is known ranks compare what they make of it.
    known = [one is not None and one.topology is not None for one in (loaded, against)]
    said = options["verbose"], options["json_path"] is not None
    facts = (settings, collective, said, rival, values, plan, known)
    job.agree_on(fingerprint(program, facts), "program or coding plan")
    settings, neighbours = with_transport(job, settings)
    predict = job.together("the prediction of times", lambda: predictor(topology, program, collective))
    if against is not None:  # a link that it uses and the cluster lacks shows now
        its = against
        job.together("the prediction of times", lambda: predictor(its.topology, its.program, its.collective))
    say_devices(job, settings, neighbours, options["verbose"])
    say_shared_devices(job, neighbours)
    out = sys.stderr if options["json_path"] == "-" else sys.stdout
    first = job.rank == 0
    name, ranks = collective.name, collective.group_ranks
    # What is refused is refused before the head of the table.
    measured_rows = measure(job, loaded, settings, neighbours, against, None if data is None else data.values)
    if first:
        beside = None if not settings.reference else "MPI" if against is None else ""
        other = None if against is None else against.program
        lines = preamble(
            job, loaded, settings, neighbours, options["file"], other, options["against"], data is not None
        )
        for text in [*lines, *table.header(beside, bool(predict), table.codes(settings))]:
            print(text, file=out, flush=True)
    rows: list[tuple[Row, float | None]] = []
    reports: list[Calibration | None] = []
    for row in measured_rows:
        predicted = (
            prediction(row, predict, None if options["topology"] else loaded.planned, settings)
            if first
            else None
        )
        rows.append((row, predicted))
        if first:
            text = table.line(row, name, ranks, settings.reference, predicted, table.codes(settings))
            print(text, file=out, flush=True)
            reports.append(calibrated(loaded, topology, row, settings))
            if options["verbose"]:
                say_turns(row)
    if neighbours.nccl is not None:
        neighbours.nccl.close(job)
    measured = [found for row, _ in rows for found in row.modes.values()]
    bad = sum((found.wrong or 0) + found.outside for found in measured)
    speeds = [table.bandwidths(row, m, name, ranks)[1] for row, _ in rows for m in row.modes.values()]
    average = float(np.mean(speeds)) if speeds else 0.0
    if first:
        verdict = f"{bad} {'OK' if bad == 0 else 'FAILED'}" if settings.checks else "not checked"
        print(f"# Out of bounds values : {verdict}", file=out)
        print(f"# Avg bus bandwidth    : {average:.6g}", file=out, flush=True)
        for report in reports:
            for text in [] if report is None else calibration.lines(report):
                print(text, file=out, flush=True)
    if options["json_path"] is not None:
        hosts = host_names(job)
        made = (
            document(job, loaded, settings, neighbours, options, rows, reports, bad, average, hosts)
            if first
            else {}
        )
        job.together("the writing of the JSON", lambda: write(job, options["json_path"], made))
    return bad > 0
