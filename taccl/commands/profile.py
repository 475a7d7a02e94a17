"""`taccl profile`: measure the machine under mpiexec."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files, topologies
from taccl.commands.options import Name, Quantity, check_output, print_json, write_output
from taccl.commands.run import RankedCommand, Size
from taccl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taccl.commands.profile_ways import Ways
    from taccl.profiles.measure.codec_fit import CodecFit
    from taccl.runtime.job import Job

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


@click.command("profile", cls=RankedCommand)
@click.option(
    "-o", "--output", required=True, metavar="FILE", shell_complete=files, help="Profile to write (YAML)."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "host", "cuda"]),
    default="auto",
    show_default=True,
    help="Memory that messages start from and end in, and that --codecs work in; auto takes the GPU where every rank "
    "has one.",
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "mpi"]),
    default="auto",
    show_default=True,
    help="auto takes what `taccl run` takes by itself: within nodes shared memory, or CUDA IPC for GPU memory; between "
    "them TCP for host memory, where no node has an RDMA network.",
)
@click.option("--quick", is_flag=True, help="Fewer and smaller messages, where links are slow.")
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
    help="Longest wait for one message in seconds; then the job ends and the silent rank is named. MPI may take 10 s "
    "to start in any case.",
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
    transport: str,
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
    from taccl.commands.profile_ways import agreed_place
    from taccl.runtime.job import Job

    _check_together(click.get_current_context().params)
    with Job(deadline) as job:
        place = job.together(
            "the reading of the options", lambda: _prepare(job, click.get_current_context().params)
        )
        same = (place, transport, output, quick, sizes, name, deadline, codecs is None, as_json)
        job.agree_on(hashlib.sha256(repr(same).encode()).digest(), "measurement")
        place = agreed_place(job, place)
        found: Sequence[CodecFit] = ()
        warned: list[str] = []
        if codecs is not None:
            from taccl.commands.profile_codecs import profile_codecs

            found, warned = profile_codecs(job, codecs, dtype, data, topology, output, quick, as_json, place)
        if topology is None:
            from taccl.commands.profile_ways import open_ways

            ways = open_ways(job, place, transport, deadline, max(sizes, default=0), codecs is not None)
            _measure_links(job, ways, output, quick, sizes, name, as_json, found, warned)
            ways.close()


def _check_together(options: dict[str, Any]) -> None:
    """Raise click's UsageError for options that do not go together, which all ranks see before MPI starts."""
    coding = options["codecs"] is not None
    if options["as_json"] and options["output"] == "-":
        raise click.UsageError("--json and -o - both want stdout; name a file for the profile")
    links = options["sizes"] or options["name"] is not None or options["transport"] != "auto"
    if coding and options["topology"] is not None and links:
        raise click.UsageError(
            "-t measures no links and keeps the name; leave out --sizes, --name and --transport"
        )
    if not coding and any(options[one] is not None for one in ("dtype", "data", "topology")):
        raise click.UsageError("--dtype, --data and -t are for --codecs: name the codecs to measure")


def _prepare(job: Job, options: dict[str, Any]) -> str:
    """The kind of memory to measure, as far as this rank knows; what can be wrong is found before a minute's work."""
    from taccl.runtime import gpu

    output, device, coding = options["output"], options["device"], options["codecs"] is not None
    if job.ranks < 2:
        option = f" --codecs {options['codecs']}" if coding else ""
        raise UsageError(
            "taccl profile measures the links between ranks and was started with one; "
            f"start it as: mpiexec -n 4 taccl profile{option} -o profile.yaml"
        )
    if job.rank == 0:
        check_output(output)
    # What has no kernel is measured where `taccl run` then codes.
    if device == "auto" and coding and "zstd" in str(options["codecs"]).split(","):
        return "host"
    return gpu.choose(device) if device == "cuda" else str(device)


def _measure_links(
    job: Job,
    ways: Ways,
    output: str,
    quick: bool,
    sizes: tuple[int, ...],
    name: str | None,
    as_json: bool,
    codecs: Sequence[CodecFit],
    said: list[str],
) -> None:
    """Rank 0 measures and writes, the others do what it asks until it has written. said: warnings of before."""
    from dataclasses import replace

    from taccl.profiles.measure.busy import warnings
    from taccl.profiles.measure.result import document, topology
    from taccl.profiles.measure.survey import FULL, QUICK, survey
    from taccl.profiles.profile_file import write_topology

    prober = ways.prober
    if job.rank != 0:
        prober.serve()
        return
    way = f"{ways.words}, {ways.memory}"
    click.echo(f"taccl: measuring {job.ranks} ranks over {way}", err=True)
    warned = warnings(prober.hosts, prober.cores, prober.busy)
    for line in warned:
        click.echo(f"taccl: {line}", err=True)
    found = survey(prober, QUICK if quick else FULL, sizes, _progress())
    source = f"taccl profile: measured over {way}"
    result = replace(topology(found, name or "measured", source), codecs=tuple(fit.cost for fit in codecs))
    write_output(output, write_topology(result))
    described = {**document(found, result, codecs), "warnings": [*said, *warned]}
    if as_json:
        print_json(described)
    elif output != "-":
        click.echo("\n".join([_summary(described), *codec_table(described)]))
    click.echo(f"taccl: wrote {output}", err=True)
    prober.close()


def _progress() -> Callable[[str, int, int], None]:
    """A line on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda stage, done, of: None

    def tell(stage: str, done: int, of: int) -> None:
        text = "" if done + 1 == of else f"measuring {stage}: {done + 1} of {of}"
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
