"""`mpiexec -n N taccl choose FILE FILE...`: time several programs in turns and keep the quickest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files, topologies
from taccl.commands.options import Quantity, Size, check_output, write_output
from taccl.commands.run import DEADLINE_S, TRANSPORTS, RankedCommand
from taccl.commands.run_data import read_data
from taccl.commands.run_prepare import check_same_work, predictor, prepare, with_transport
from taccl.errors import CheckFailed, UsageError
from taccl.program_file import collective_options

if TYPE_CHECKING:
    from taccl.runtime.bench import Loaded
    from taccl.runtime.bench_settings import Settings
    from taccl.runtime.choose import Timed
    from taccl.runtime.job import Job

# What `taccl run` would ask besides.
PLAIN = {
    "against": None, "calibrate": False, "codec_at": "collective",
    "json_path": None, "recode": False, "reference": False, "step_bytes": None, "step_factor": 2, "pace": True,
    "turns": True,
}  # fmt: skip


@click.command("choose", cls=RankedCommand)
@click.argument("files", nargs=-1, required=True, metavar="FILE FILE...", shell_complete=files)
@click.option(
    "-o", "--output", metavar="FILE", shell_complete=files, help="Write the quickest one there, as it is."
)
@click.option("--size", type=Size(), help="nccl-tests size. Default: that for which the first file was made.")
@click.option(
    "--profile",
    "--topology",
    "topology",
    metavar="T",
    shell_complete=topologies,
    help="Predict times on this topology; a native file brings its own.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="In each, all files in turn."
)
@click.option(
    "-n", "--iters", type=click.IntRange(1), default=3, show_default=True, help="Timed iterations of a turn."
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
    "--accumulate",
    type=click.Choice(("type", "float32")),
    default="type",
    show_default=True,
    help="As of taccl run.",
)
@click.option(
    "--codec",
    "codecs",
    metavar="NAME",
    help="Code messages with it; raw: none. Default: what each file plans, else raw.",
)
@click.option(
    "--codec-links",
    type=click.Choice(("nodes", "all", "planned")),
    help="With --codec: code messages from node to node (the default), all, or those that the file plans.",
)
@click.option(
    "--data",
    metavar="FILE",
    shell_complete=files,
    help="Run on the values of a .npy or .safetensors file, or of raw ones of the type of -d.",
)
@click.option(
    "--in-place", "inplace", is_flag=True, help="In place. Default: out of place where all files can."
)
@click.option(
    "--transport", type=click.Choice(TRANSPORTS), default="auto", show_default=True, help="As of taccl run."
)
@click.option(
    "--buffers",
    type=click.Choice(("private", "shared")),
    default="private",
    show_default=True,
    help="As of taccl run.",
)
@click.option(
    "--device",
    type=click.Choice(("auto", "host", "cuda")),
    default="host",
    show_default=True,
    help="As of taccl run.",
)
@click.option(
    "--deadline",
    type=Quantity("s", 0.1, 1e6),
    metavar="S",
    help="Seconds without progress after which the job is ended. Default: as of taccl run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@collective_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Time several programs on real ranks and keep the quickest (under mpiexec).

    FILEs are MSCCL XML or native .json algorithms of one collective, as `taccl synth --alternatives` makes them.
    They take turns, every one is checked element by element, and the slowest rank's time counts. Of programs within
    1 % of the quickest the one that is named first is taken.

        taccl synth -t cluster.yaml -c allreduce --size 64MB -o a.json --alternatives 5

        mpiexec -n 8 taccl choose a.json a.?.json -o best.json
    """
    from taccl.runtime.job import Job

    with Job(options["deadline"] or DEADLINE_S) as job:
        _choose(job, options)


def _choose(job: Job, options: dict[str, Any]) -> None:
    from dataclasses import replace

    from taccl.runtime import choose
    from taccl.runtime.job import fingerprint

    candidates = job.together("the reading of the files", lambda: _candidates(job, options))
    facts = [(settings, loaded.collective, loaded.program.name) for loaded, settings in candidates]
    # What a codec gains depends on the values.
    data = job.together(
        "the reading of the data", lambda: read_data(options["data"], candidates[0][1].dtypes)
    )
    digests = [fingerprint(loaded.program, facts) for loaded, _ in candidates]
    asked = (options["rounds"], options["output"], options["as_json"], data and data.digest)
    job.agree_on(choose.digest_of(digests, asked), "list of programs")
    settings, neighbours = with_transport(job, candidates[0][1])
    predicted = job.together(
        "the prediction of times", lambda: [_predicted(one, settings) for one, _ in candidates]
    )
    first, shows = job.rank == 0, job.rank == 0 and not options["as_json"]
    name = candidates[0][0].collective.title
    if shows:
        mode = settings.modes[0].replace("_", " ")
        what = f"{name} of {settings.sizes_bytes[0]} bytes, {settings.dtypes[0].name}, {mode}"
        print(f"# {job.ranks} ranks, {what}; {options['rounds']} rounds of {settings.iterations}", flush=True)
    # Alike but for the coding plans of files.
    several = [
        (loaded, replace(settings, codecs=own.codecs, codec_links=own.codec_links))
        for loaded, own in candidates
    ]
    timed = choose.time_in_turns(
        job, several, neighbours, options["rounds"], None if data is None else data.values
    )
    if neighbours.nccl is not None:
        neighbours.nccl.close(job)
    wrong = [file for file, one in zip(options["files"], timed, strict=True) if one.wrong]
    if wrong:
        job.fail_alike(CheckFailed(f"{wrong[0]} gives wrong data; nothing was chosen"))
    best = choose.quickest(timed)
    if shows:
        print(_table(options["files"], timed, predicted, best), flush=True)
    job.together(
        "the writing of the results", lambda: _write(options, settings, name, timed, predicted, best, first)
    )


def _candidates(job: Job, options: dict[str, Any]) -> list[tuple[Loaded, Settings]]:
    """The programs and how each is run: alike, out of place where all can, else in place."""
    from dataclasses import replace

    names = options["files"]
    if len(names) < 2:
        raise UsageError("there is nothing to choose from: name two files or more")
    if options["output"] is not None:
        other = [name for name in names if Path(name).suffix != Path(options["output"]).suffix]
        if other:
            raise UsageError(
                f"{options['output']} would be a copy of one of the files; give it the suffix of {other[0]}"
            )
        if job.rank == 0:
            check_output(options["output"])
    size = options["size"]
    found: list[tuple[Loaded, Settings]] = []
    for name in names:
        asked = {
            **PLAIN, **options, "file": name, "min_bytes": size or 1, "max_bytes": size or 1, "checks": 1,
            "outofplace": False,
        }  # fmt: skip
        loaded, _, settings, _ = prepare(job, asked)
        if found:
            check_same_work(names[0], found[0][0].collective, name, loaded.collective)
        elif size is None:
            size = _size_of(name)
        found.append((loaded, replace(settings, sizes_bytes=(size,))))
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


def _predicted(loaded: Loaded, settings: Settings) -> float | None:
    predict = predictor(loaded.topology, loaded.program, loaded.collective)
    return None if predict is None else predict(settings.sizes_bytes[0])


def _table(names: tuple[str, ...], timed: list[Timed], predicted: list[float | None], best: int) -> str:
    wide = max(map(len, names))
    lines = [
        f"# {'file':<{wide}}  {'sends':>6}  {'predicted (us)':>14}  {'time (us)':>12}  {'of the best':>11}"
    ]
    for name, one, model in zip(names, timed, predicted, strict=True):
        said = "" if model is None else f"{model:.2f}"
        ratio = one.median_us / timed[best].median_us
        lines.append(f"  {name:<{wide}}  {one.sends:>6}  {said:>14}  {one.median_us:>12.2f}  {ratio:>11.3f}")
    lines.append(f"# the quickest: {names[best]}")
    return "\n".join(lines)


def _write(
    options: dict[str, Any],
    settings: Settings,
    name: str,
    timed: list[Timed],
    predicted: list[float | None],
    best: int,
    first: bool,
) -> None:
    """On rank 0 the copy of the quickest, and the JSON document."""
    if not first:
        return
    files = options["files"]
    if options["output"] is not None:
        write_output(options["output"], Path(files[best]).read_text(encoding="utf-8"))
    if not options["as_json"]:
        if options["output"] is not None:
            print(f"# written to {options['output']}", flush=True)
        return
    document = {
        "schema": "taccl/choose/v1",
        "collective": name,
        "size_bytes": settings.sizes_bytes[0],
        "dtype": settings.dtypes[0].name,
        "mode": settings.modes[0],
        "rounds": options["rounds"],
        "iterations": settings.iterations,
        "chosen": files[best],
        "path": options["output"],
        "programs": [
            {
                "file": file,
                "sends": one.sends,
                "predicted_time_us": model,
                "median_time_us": round(one.median_us, 3),
                "times_us": [round(time_us, 3) for time_us in one.times_us],
            }
            for file, one, model in zip(files, timed, predicted, strict=True)
        ],
    }
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    print(flush=True)
