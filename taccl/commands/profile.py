"""`taccl profile`: measure the machine under mpiexec."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files, topologies
from taccl.commands.options import Name, Quantity, print_json, write_output
from taccl.commands.run import Size
from taccl.errors import EnvironmentProblem, TacclError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taccl.profiles.measure.codec_fit import CodecFit
    from taccl.profiles.measure.mpi_prober import MpiProber
    from taccl.runtime.guard import Guard

_LEAST_BYTES, _MOST_BYTES = 1 << 10, 1 << 28


class Sizes(click.ParamType):  # type: ignore[type-arg]
    """At least two different message sizes, separated by commas."""

    name = "size,size,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The sizes in bytes, ascending."""
        if isinstance(value, tuple):
            return value
        sizes = {Size().convert(word.strip(), param, ctx) for word in value.split(",")}
        if len(sizes) < 2:
            self.fail("two different sizes are needed at least: a slope has two ends", param, ctx)
        if not _LEAST_BYTES <= min(sizes) <= max(sizes) <= _MOST_BYTES:
            self.fail(f"{value!r}: every size must lie between 1K and 256M", param, ctx)
        return tuple(sorted(sizes))


@click.command("profile")
@click.option(
    "-o", "--output", required=True, metavar="FILE", shell_complete=files, help="Profile to write (YAML)."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "host", "cuda"]),
    default="auto",
    show_default=True,
    help="Memory that messages start from and end in; auto takes the GPU where there is one.",
)
@click.option("--quick", is_flag=True, help="Fewer and smaller messages: seconds instead of a minute.")
@click.option(
    "--sizes",
    type=Sizes(),
    default=(),
    metavar="SIZE,SIZE,...",
    help="Message sizes for the bandwidth, e.g. 64K,256K,1M (default: chosen for each link).",
)
@click.option("--name", type=Name(), metavar="TEXT", help="Name of the topology.  [default: measured]")
@click.option(
    "--deadline",
    type=Quantity("s", 0.1, 1e6),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Longest wait for one message in seconds; then the job ends and the silent rank is named.",
)
@click.option(
    "--codecs",
    metavar="NAMES",
    help="Measure these codecs too, several with commas, or all: xw bf16 bf16-xw q8 fp8 zstd.",
)
@click.option(
    "--dtype",
    metavar="NAMES",
    help="Types of values that --codecs are measured on, several with commas.  [default: float32]",
)
@click.option(
    "--data",
    metavar="FILE",
    shell_complete=files,
    help="Measure --codecs on the values of a .npy or .safetensors file, or of raw ones of the first --dtype.  "
    "[default: normal values]",
)
@click.option(
    "-t",
    "--topology",
    metavar="T",
    shell_complete=topologies,
    help="Measure no links: write this profile with --codecs in it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as one JSON document.")
def command(
    output: str,
    device: str,
    quick: bool,
    sizes: tuple[int, ...],
    name: str | None,
    deadline: float,
    codecs: str | None,
    dtype: str | None,
    data: str | None,
    topology: str | None,
    as_json: bool,
) -> None:
    """Measure the links between ranks: latency, bandwidth, and what they share.

    Start it under mpiexec with the ranks that the collectives will run on:

        mpiexec -n 8 taccl profile -o profile.yaml

    Rank 0 writes the profile. Leave the machine alone meanwhile: what runs beside is measured too. With --codecs the
    ranks also code messages as `taccl run --codec` does, so that the profile says what that costs and gains.
    """
    from taccl.runtime import guard, mpi

    if as_json and output == "-":
        raise UsageError("--json and -o - both want stdout; name a file for the profile")
    if codecs is not None:
        from taccl.commands.profile_codecs import profile_codecs

        if device == "cuda":
            raise UsageError("--codecs work in host memory; leave out --device cuda")
        if topology is not None and (sizes or name is not None):
            raise UsageError("-t measures no links and keeps the name; leave out --sizes and --name")

        def links(MPI: Any, costs: Sequence[CodecFit]) -> None:
            _profile(MPI, _prober(MPI, "host", deadline), output, quick, sizes, name, as_json, costs)

        profile_codecs(codecs, dtype, data, topology, output, quick, deadline, as_json, links)
        return
    if dtype is not None or data is not None or topology is not None:
        raise UsageError("--dtype, --data and -t are for --codecs: name the codecs to measure")
    with guard.limited(deadline) as watched:
        MPI = mpi.load()
        if MPI.COMM_WORLD.Get_size() < 2:
            raise UsageError(
                "taccl profile measures the links between ranks and was started with one; "
                "start it as: mpiexec -n 4 taccl profile -o profile.yaml"
            )
        mpi.install_excepthook(MPI)
        with _fatal(MPI, watched):
            prober = _prober(MPI, device, deadline)
    with _fatal(MPI, watched):
        _profile(MPI, prober, output, quick, sizes, name, as_json)


@contextlib.contextmanager
def _fatal(MPI: Any, guard: Guard) -> Iterator[None]:
    """One rank's problem ends the job: the others would wait for it. One of a host's ranks speaks."""
    from taccl.runtime import mpi

    try:
        yield
    except TacclError as error:
        if guard.speaks():
            mpi.say(f"taccl: {error}", last=True)
        mpi.abort(MPI, error.exit_code)


def _prober(MPI: Any, device: str, deadline: float) -> MpiProber:
    from taccl.profiles.measure.buffers import buffers
    from taccl.profiles.measure.mpi_prober import MpiProber
    from taccl.runtime import gpu

    comm = MPI.COMM_WORLD
    # All ranks must measure the same kind of memory: auto takes the GPU only where every rank has one.
    chosen = gpu.choose(device)
    everyone = comm.allgather((device, chosen))
    asked = [each[0] for each in everyone]
    if len(set(asked)) > 1:
        raise UsageError(f"the ranks were started with different --device: {', '.join(asked)}")
    if device == "auto" and any(each[1] == "host" for each in everyone):
        chosen = "host"
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    memory = buffers(chosen, int(local.Get_rank()))
    local.Free()
    return MpiProber(MPI, comm, memory, deadline)


def _profile(
    MPI: Any,
    prober: MpiProber,
    output: str,
    quick: bool,
    sizes: tuple[int, ...],
    name: str | None,
    as_json: bool,
    codecs: Sequence[CodecFit] = (),
) -> None:
    from dataclasses import replace

    from taccl.profiles.measure.result import document, topology
    from taccl.profiles.measure.survey import FULL, QUICK, survey
    from taccl.profiles.profile_file import write_topology
    from taccl.runtime import mpi

    if MPI.COMM_WORLD.Get_rank() != 0:
        prober.serve()
        return
    try:
        check_writable(output)
        library = mpi.library(MPI)
        about = f"measured over {library.name} {library.version}, {' and '.join(prober.memory)}"
        click.echo(f"taccl: {len(prober.hosts)} ranks, {about}", err=True)
        found = survey(prober, QUICK if quick else FULL, sizes, _progress())
    finally:
        prober.close()
    measured = topology(found, name or "measured", f"taccl profile: {about}")
    result = replace(measured, codecs=tuple(fit.cost for fit in codecs))
    write_output(output, write_topology(result))
    described = document(found, result, codecs)
    if as_json:
        print_json(described)
    elif output != "-":
        click.echo("\n".join([_summary(described), *codec_table(described)]))
    click.echo(f"taccl: wrote {output}", err=True)


def check_writable(output: str) -> None:
    """Find out before a minute of measuring that the result cannot be written."""
    if output == "-":
        return
    place = Path(output).resolve()
    if place.is_dir():
        raise UsageError(f"{output} is a directory; name a file in it")
    folder = next(folder for folder in place.parents if folder.exists())
    if not os.access(place if place.exists() else folder, os.W_OK):
        raise EnvironmentProblem(f"{output} cannot be written: no right to do so in {folder}")


def _progress() -> Callable[[str, int, int], None]:
    """A line on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda stage, done, of: None

    def tell(stage: str, done: int, of: int) -> None:
        last = stage == "ports" and done + 1 == of
        text = "" if last else f"measuring {stage}: {done + 1} of {of}"
        click.echo(f"\r\x1b[K{text}", err=True, nl=False)

    return tell


def codec_table(found: dict[str, Any]) -> list[str]:
    """Lines of a table of codecs; none without any."""
    if not found["codecs"]:
        return []
    lines = [
        f"{'codec':<9}{'type':<10}{'ratio':>7}{'frame B':>9}{'encode us':>11}{'us/MB':>8}{'residual':>10}"
        f"{'decode us':>11}{'us/MB':>8}{'residual':>10}"
    ]
    for codec in found["codecs"]:
        columns = [f"{codec['codec']:<9}{codec['dtype']:<10}{codec['ratio']:>7.2f}{codec['frame_bytes']:>9}"]
        for step in (codec["encode"], codec["decode"]):
            columns.append(f"{step['alpha_us']:>11g}{step['beta_us_per_mb']:>8g}{step['residual']:>10.1%}")
        lines.append("".join(columns))
    return lines


def _summary(found: dict[str, Any]) -> str:
    """A table of nodes, link classes and ports."""
    nodes = found["nodes"]
    shape = ", ".join(f"node{k}: ranks {','.join(map(str, ranks))}" for k, ranks in enumerate(nodes))
    lines = [f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} ({shape})"]
    lines.append(
        f"{'links':<12}{'count':>6}{'alpha us':>12}{'beta us/MB':>13}{'occupancy us':>14}{'residual':>10}"
    )
    for cls in found["classes"]:
        lines.append(
            f"{cls['name']:<12}{cls['links']:>6}{cls['alpha_us']:>12g}{cls['beta_us_per_mb']:>13g}"
            f"{cls['occupancy_us']:>14g}{cls['residual']:>10.1%}"
        )
    for port in found["ports"]:
        lines.append(f"shared port {port['name']}: {port['beta_us_per_mb']:g} us/MB")
    if not found["ports"]:
        lines.append("no shared ports found")
    return "\n".join(lines)
