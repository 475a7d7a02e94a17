"""`taccl demo`: the whole way on this machine, from measuring its links to a report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import folders
from taccl.commands.options import Quantity, check_folder, write_output
from taccl.errors import CheckFailed, EnvironmentProblem

if TYPE_CHECKING:
    from taccl.produce import Product

COLLECTIVES = ("allgather", "alltoall", "allreduce")
SIZE_BYTES = 2**20  # what is synthesised for; the runs go a factor of 4 to either side
JOB_LIMIT_S = 120


@click.command("demo")
@click.option("-n", "--ranks", type=click.IntRange(2, 16), default=4, show_default=True, help="Local ranks.")
@click.option(
    "-o",
    "--output",
    default="demo-out",
    show_default=True,
    metavar="DIR",
    shell_complete=folders,
    help="Folder of the results.",
)
@click.option(
    "--time-limit", type=Quantity("s", 0.1, 600), default="6s", show_default=True, help="For each collective."
)
def command(ranks: int, output: str, time_limit: float) -> None:
    """Measure this machine, synthesise for it, prove, run, report.

    Profiles local ranks, synthesises AllGather, AllToAll and AllReduce for that profile, verifies the
    programs, runs them with every result checked beside MPI's own collective, and leaves an HTML report.
    """
    folder = Path(output)
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "profile.yaml"
    _say(f"1. measuring the links between {ranks} ranks on this machine")
    _job(ranks, "profile", "--quick", "--name", f"this machine, {ranks} ranks", "-o", str(profile))
    _say(f"2. synthesising for {profile}, every program proven before it is written")
    products = {name: _make(name, profile, folder, time_limit) for name in COLLECTIVES}
    _say("3. running them, every element checked; on the right MPI's own collective in the same run")
    measured: dict[str, list[dict[str, Any]]] = {}
    failed: list[str] = []
    for name in COLLECTIVES:
        try:
            lines = _run(ranks, name, profile, folder)
        except CheckFailed as error:
            _say(str(error))
            failed.append(name)
            continue
        rows = [line for line in lines if not line.startswith("#")]
        if not measured:
            # The three lines of column heads stand right above the first row.
            click.echo("\n".join(lines[lines.index(rows[0]) - 3 : lines.index(rows[0])]))
        click.echo("\n".join(f"{row}  {name}" for row in rows))
        measured[name] = json.loads((folder / f"{name}-run.json").read_text("utf-8"))["results"]
    report = folder / "report.html"
    write_output(str(report), _report(products, measured))
    _say(f"4. the report: {report}")
    if failed:
        raise CheckFailed(f"the runs of {', '.join(failed)} failed or gave wrong data (see above)")


def _say(message: str) -> None:
    click.echo(message, err=True)


def _job(ranks: int, *arguments: str) -> str:
    """Run a command of taccl under mpiexec; its stdout. Its messages go to our stderr."""
    from taccl.runtime import mpi

    launcher = mpi.mpiexec()
    if launcher is None:
        raise EnvironmentProblem("there is no mpiexec here; install taccl with the extra `mpi`: taccl[mpi]")
    line = [launcher, "-n", str(ranks), sys.executable, "-m", "taccl", *arguments]
    try:
        done = subprocess.run(
            line,
            env=mpi.launch_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=JOB_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(f"taccl {arguments[0]} did not end within {JOB_LIMIT_S} s") from error
    if done.returncode == 1:
        raise CheckFailed(f"taccl {arguments[0]} found something wrong:\n{done.stdout}")
    if done.returncode:
        raise EnvironmentProblem(f"taccl {arguments[0]} ended with exit code {done.returncode} (see above)")
    return done.stdout


def _make(name: str, profile: Path, folder: Path, time_limit: float) -> Product:
    from taccl.produce import Order, produce
    from taccl.product_document import document

    product = produce(Order(str(profile), name, SIZE_BYTES, time_limit_s=time_limit))
    for suffix in (".json", ".xml"):
        write_output(str(folder / (name + suffix)), product.text(suffix))
    found = document(product, None)
    click.echo(
        f"{name:<10} {found['time_us']:10.1f} us, by these links none below {found['lower_bound_us']:.1f} us, "
        f"{found['engine']}, {found['solve_s']:.1f} s, verified"
    )
    return product


def _run(ranks: int, name: str, profile: Path, folder: Path) -> list[str]:
    """Lines of the table of one program's run; its JSON lies in the folder."""
    return _job(
        ranks, "run", str(folder / f"{name}.xml"), "--profile", str(profile), "-b", str(SIZE_BYTES // 4),
        "-e", str(SIZE_BYTES * 4), "-f", "4", "-n", "10", "-w", "2", "--json", str(folder / f"{name}-run.json"),
    ).splitlines()  # fmt: skip


def _report(products: dict[str, Product], measured: dict[str, list[dict[str, Any]]]) -> str:
    from taccl.synth.export.html import Entry, report_html
    from taccl.synth.simulate import simulate

    entries = []
    for name, product in products.items():
        algorithm = product.explicit()
        assert product.program is not None  # its file was written
        simulation = simulate(
            product.program, product.topology, algorithm.size_bytes, collective=algorithm.collective
        )
        measurements = [
            {
                "size_bytes": row["size"],
                "time_us": row[mode]["time"],
                "reference_time_us": row[mode]["reference_time_us"],
                "predicted_us": row["predicted_time_us"],
                "wrong": row[mode]["nwrong"],
                "mode": mode.replace("_", " "),
            }
            for row in measured.get(name, ())
            for mode in ("out_of_place", "in_place")
            if row[mode] is not None
        ]
        entries.append(Entry(name, product.topology, simulation, algorithm, measurements))
    return report_html(entries, "taccl on this machine")
