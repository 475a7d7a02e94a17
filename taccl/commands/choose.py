"""`mpiexec -n N taccl choose FILE...`: time several programs in turns and keep the quickest."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files
from taccl.commands.options import Size, check_output, write_output
from taccl.commands.run import RankedCommand
from taccl.commands.run_data import read_data
from taccl.commands.run_options import DEADLINE_S, execution_options
from taccl.commands.run_prepare import check_same_work, predictor, prepare, with_transport
from taccl.commands.run_report import how, transports_used, where
from taccl.errors import CheckFailed, UsageError
from taccl.program_file import TURNS, collective_options, options_among

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taccl.runtime.bench import Loaded
    from taccl.runtime.bench_settings import Settings
    from taccl.runtime.choose import Timed
    from taccl.runtime.job import Job, Neighbours

LEAST_ITERATIONS = 3  # of a turn, where nobody says how many

# What `taccl run` would ask besides.
PLAIN = {
    "against": None, "calibrate": False, "codec_at": "collective",
    "json_path": None, "recode": False, "reference": False, "step_bytes": None, "step_factor": 2,
}  # fmt: skip


@click.command("choose", cls=RankedCommand)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=files)
@click.option(
    "-o", "--output", metavar="FILE", shell_complete=files, help="Write the quickest one there, as it is."
)
@click.option(
    "--size",
    type=Size(),
    help="nccl-tests size. Default: that for which the first file was made; XML does not say it.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=5, show_default=True, help="In each, all files in turn."
)
@click.option(
    "-n",
    "--iters",
    type=click.IntRange(1),
    help=f"Timed iterations of a turn. Default: {LEAST_ITERATIONS}, or up to 100 where a turn takes less than 0.2 s.",
)
@click.option(
    "-w",
    "--warmup",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Warm-up iterations of a turn.",
)
@click.option(
    "-d",
    "--dtype",
    help="float32 float64 float16 bfloat16 int32 int64 uint8. Default: float32, or the coding plans' type.",
)
@click.option("--op", help="sum prod min max avg. Default: the file's. Only for collectives that reduce.")
@click.option(
    "--codec",
    "codecs",
    metavar="NAME",
    help="Code messages with it; raw: none. Default: what each file plans, else raw.",
)
@click.option(
    "--in-place", "inplace", is_flag=True, help="In place. Default: out of place where all files can."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@execution_options
@collective_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Time several programs on real ranks and keep the quickest (under mpiexec).

    FILEs are MSCCL XML or native .json algorithms of one collective, as `taccl synth --alternatives` makes them.
    They take turns, every one is checked element by element, and the slowest rank's time counts. A program is taken
    before one that is named earlier when it was quicker by 1 % in the median and in at least four of five rounds.
    One whose messages take turns on shared uplinks is timed without them, too, unless --turns or --no-turns is
    given; a native file that is quicker so is written with that in its provenance, which `taccl run` obeys. So one
    file alone has a choice, too.

        taccl synth -t cluster.yaml -c allreduce --size 64MB -o a.json --alternatives 5

        mpiexec -n 8 taccl choose a.json a.*.json -o best.json
    """
    from taccl.runtime.job import Job

    with Job(options["deadline"] or DEADLINE_S) as job:
        _choose(job, options)


def _choose(job: Job, options: dict[str, Any]) -> None:
    from dataclasses import replace

    from taccl.runtime import choose
    from taccl.runtime.job import fingerprint

    options = {**options, "files": _there(job, options["files"])}
    more = options["iters"] is None
    options = {**options, "iters": options["iters"] or LEAST_ITERATIONS}
    # What is written is what was timed, whatever becomes of the files meanwhile.
    kept = [_content(name) if job.rank == 0 else b"" for name in options["files"]]
    candidates = job.together("the reading of the files", lambda: _candidates(job, options))
    job.together("the reading of the files", lambda: _check_unchanged(job, options["files"], kept))
    # What a codec gains depends on the values.
    data = job.together(
        "the reading of the data", lambda: read_data(options["data"], candidates[0][1].dtypes)
    )
    digests = [fingerprint(loaded.program, (settings, loaded.collective)) for loaded, settings in candidates]
    asked = (
        options["rounds"], options["output"], options["as_json"], options["turns"], more,
        data and data.digest,
    )  # fmt: skip
    job.agree_on(fingerprint(candidates[0][0].program, (digests, asked)), "list of programs")
    settings, neighbours = with_transport(job, candidates[0][1])
    predicted = job.together(
        "the prediction of times", lambda: [_predicted(one, own) for one, own in candidates]
    )
    first, shows = job.rank == 0, job.rank == 0 and not options["as_json"]
    if shows:
        for line in (
            where(job, settings, neighbours),
            *how(candidates[0][0], settings, neighbours, bool(options["data"])),
        ):
            print(line)
        mode, loaded = settings.modes[0].replace("_", " "), candidates[0][0]
        what = f"{loaded.collective.title} of {_bytes(loaded, settings)} bytes, {settings.dtypes[0].name}, {mode}"
        runs = f"{settings.iterations} or more" if more else settings.iterations
        times = f"warmup {settings.warmup}, iterations {runs} in each of {options['rounds']} rounds"
        print(f"# {what}; {times}", flush=True)
    # Alike but for the coding plans of files.
    several = [
        (loaded, replace(settings, codecs=own.codecs, codec_links=own.codec_links))
        for loaded, own in candidates
    ]
    timed = choose.time_in_turns(
        job, several, neighbours, options["rounds"], None if data is None else data.values,
        both_ways=options["turns"] is None, more=more,
    )  # fmt: skip
    if neighbours.nccl is not None:
        neighbours.nccl.close(job)
    wrong = [options["files"][one.candidate] for one in timed if one.wrong]
    if wrong:
        job.fail_alike(CheckFailed(f"{wrong[0]} gives wrong data; nothing was chosen"))
    best = choose.quickest(timed)
    if shows:
        if more:
            print(f"# {timed[best].iterations} iterations in a round")
        print(_table(options["files"], timed, predicted, best), flush=True)
    made = (
        {}
        if not first
        else _document(job, candidates[0][0], settings, neighbours, options, timed, predicted, best)
    )
    chosen = timed[best]
    job.together(
        "the writing of the results", lambda: _write(options, made, kept[chosen.candidate], chosen, first)
    )


def _content(name: str) -> bytes:
    """The bytes of a file; none where it cannot be read, of which the reading of the program says more."""
    path = Path(name)
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError:
        return b""


def _there(job: Job, names: Sequence[str]) -> list[str]:
    """The names without patterns that the shell found no file for, since a search may have no alternatives."""
    patterns = [name for name in names if set("*?[") & set(name) and not os.path.exists(name)]
    if len(patterns) == len(names):
        return list(names)
    if patterns and job.rank == 0:
        click.echo(
            f"taccl: warning: there is no file {', '.join(patterns)}: only the others are timed", err=True
        )
    return [name for name in names if name not in patterns]


def _check_unchanged(job: Job, names: Sequence[str], before: Sequence[bytes]) -> None:
    """Raise InvalidInput for a file that has changed while programs were read."""
    from taccl.errors import Diagnostic, InvalidInput

    for name, content in zip(names, before, strict=True):
        if job.rank == 0 and _content(name) != content:
            what = "it changed while it was read; start again when nothing writes it any more"
            raise InvalidInput([Diagnostic(name, 0, 0, "R100", what)])


def _candidates(job: Job, options: dict[str, Any]) -> list[tuple[Loaded, Settings]]:
    """The programs and how each is run: alike, out of place where all can, else in place."""
    from dataclasses import replace

    names, output = options["files"], options["output"]
    if output == "-":
        raise UsageError("-o names a file; what is written to stdout is the table, or --json's document")
    if output is not None and job.rank == 0:
        check_output(output)
    size = options["size"]
    found: list[tuple[Loaded, Settings]] = []
    for name in names:
        asked = {
            **PLAIN, **options, "file": name, "min_bytes": size or 1, "max_bytes": size or 1, "checks": 1,
            "outofplace": False, "again": f"choose {' '.join(names)}",
        }  # fmt: skip
        loaded, _, settings, _ = prepare(job, options_among(name, names, asked))
        if found:
            check_same_work(names[0], found[0][0].collective, name, loaded.collective)
        elif size is None:
            size = _size_of(name)
        found.append((loaded, replace(settings, sizes_bytes=(size,))))
    if output is not None and any(Path(name).suffix != Path(output).suffix for name in names):
        raise UsageError(
            f"{output} would be a copy of any one of the files: all must have the same suffix as it"
        )
    modes = [mode for mode in found[0][1].modes if all(mode in settings.modes for _, settings in found)]
    if not modes:
        raise UsageError(
            "the files have no mode in common: some work in place only, others out of place only"
        )
    for what, values in (
        ("type", {dtype.name for _, settings in found for dtype in settings.dtypes}),
        ("reduction", {op for _, settings in found for op in settings.ops}),
        ("codec", set(found[0][1].codecs)),
    ):
        if len(values) > 1:
            raise UsageError(
                f"programs are compared on one {what}, not on {', '.join(sorted(values))}: name one"
            )
    return [(loaded, replace(settings, modes=tuple(modes[:1]))) for loaded, settings in found]


def _size_of(file: str) -> int:
    from taccl.synth.native import read_native

    if not file.endswith(".json"):
        raise UsageError("--size is needed: MSCCL XML does not say for which size it was made")
    algorithm, _ = read_native(Path(file).read_text(encoding="utf-8"), file)
    return algorithm.size_bytes


def _bytes(loaded: Loaded, settings: Settings) -> int:
    """What is run: sizes are rounded to whole blocks."""
    from taccl.runtime.bench import layouts

    dtype = settings.dtypes[0]
    return layouts(loaded.collective, dtype, settings.sizes_bytes)[0].elements * dtype.bytes


def _predicted(loaded: Loaded, settings: Settings) -> float | None:
    """In us; None where no cluster is known, or for coded messages, which only the planner prices."""
    from taccl.runtime.dtypes import inside_bytes

    if settings.codecs != ("raw",):
        plan = loaded.planned if settings.codec_links == "planned" else None
        return None if plan is None or plan.size_bytes != settings.sizes_bytes[0] else plan.time_us
    predict = predictor(loaded.topology, loaded.program, loaded.collective)
    op = settings.ops[0] if settings.ops else None
    moved = inside_bytes(settings.sizes_bytes[0], settings.dtypes[0], op, settings.accumulate)
    return None if predict is None else predict(moved)


def _table(files: tuple[str, ...], timed: list[Timed], predicted: list[float | None], best: int) -> str:
    from taccl.runtime.choose import beats

    names = [files[one.candidate] + (" --no-turns" if one.turns is False else "") for one in timed]
    wide = max(map(len, names))
    lines = [
        f"# {'file':<{wide}}  {'sends':>6}  {'predicted (us)':>14}  {'time (us)':>12}  {'least':>12}  {'most':>12}  "
        f"{'of the chosen':>13}"
    ]
    for name, one in zip(names, timed, strict=True):
        model = predicted[one.candidate]
        said = "" if model is None else f"{model:.2f}"
        ratio = one.median_us / timed[best].median_us
        times = "  ".join(f"{us:>12.2f}" for us in (one.median_us, min(one.times_us), max(one.times_us)))
        lines.append(f"  {name:<{wide}}  {one.sends:>6}  {said:>14}  {times}  {ratio:>13.3f}")
    lines.append(f"# chosen: {names[best]}")
    alike = [
        n
        for n, one in zip(names, timed, strict=True)
        if one is not timed[best] and not beats(timed[best], one)
    ]
    if alike:
        lines.append(f"# not told apart from it: {', '.join(alike)} (more --rounds and -n might)")
    return "\n".join(lines)


def _write(options: dict[str, Any], made: dict[str, object], kept: bytes, chosen: Timed, first: bool) -> None:
    """On rank 0 the copy of the chosen file, of these bytes, and the JSON document."""
    if not first:
        return
    output = options["output"]
    if output is not None:
        without = chosen.turns is False
        if without and output.endswith(".json"):
            kept = _without_turns(kept, options["files"][chosen.candidate])
        write_output(output, kept)
        if not options["as_json"]:
            print(f"# written to {output}", flush=True)
            if without and not output.endswith(".json"):
                print("# XML cannot say that it is to be run with --no-turns", flush=True)
    if options["as_json"]:
        json.dump(made, sys.stdout, indent=2, allow_nan=False)
        print(flush=True)


def _without_turns(kept: bytes, file: str) -> bytes:
    """A native file that says that it is run without turns."""
    from dataclasses import replace

    from taccl.synth.native import read_schedule, write_native

    algorithm, topology = read_schedule(kept.decode("utf-8"), file)
    marked = replace(algorithm, provenance={**algorithm.provenance, TURNS: False})
    return write_native(marked, topology).encode("utf-8")


def _document(
    job: Job,
    loaded: Loaded,
    settings: Settings,
    neighbours: Neighbours,
    options: dict[str, Any],
    timed: list[Timed],
    predicted: list[float | None],
    best: int,
) -> dict[str, object]:
    """The JSON document, schema taccl/choose/v1."""
    from taccl import __version__
    from taccl.runtime import mpi
    from taccl.runtime.choose import beats

    library = mpi.library(job.MPI)
    files = options["files"]
    return {
        "schema": "taccl/choose/v1",
        "version": __version__,
        "mpi": {"name": library.name, "version": library.version, "standard": list(library.standard)},
        "ranks": job.ranks,
        "collective": loaded.collective.name,
        "size_bytes": _bytes(loaded, settings),
        "dtype": settings.dtypes[0].name,
        "op": settings.ops[0] if settings.ops else None,
        "mode": settings.modes[0],
        "device": settings.device,
        "buffers": settings.buffers,
        "transport": transports_used(settings, neighbours),
        "codec": options["codecs"],
        "rounds": options["rounds"],
        "iterations": timed[best].iterations,
        "warmup": settings.warmup,
        "chosen": files[timed[best].candidate],
        "turns": timed[best].turns,
        "path": options["output"],
        "programs": [
            {
                "file": files[one.candidate],
                "turns": one.turns,
                "sends": one.sends,
                "predicted_time_us": predicted[one.candidate],
                "median_time_us": round(one.median_us, 3),
                "times_us": [round(time_us, 3) for time_us in one.times_us],
                "slower": beats(timed[best], one),
            }
            for one in timed
        ],
    }
