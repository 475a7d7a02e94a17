"""`taccl profile --codecs`: what codecs cost and gain on the ranks of a job."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.options import print_json, write_output
from taccl.commands.run_data import read_data
from taccl.commands.run_report import say_shared_devices
from taccl.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from taccl.profiles.measure.codec_fit import CodecFit
    from taccl.runtime.codec_trial import Reach
    from taccl.runtime.codecs import Codec
    from taccl.runtime.dtypes import DType
    from taccl.runtime.job import Job

SAMPLE_BYTES = 16 << 20  # of normal values
MOST_RESIDUAL = 0.2  # relative; above it there is a warning


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is spent on each codec and type."""

    chunk_bytes: tuple[int, ...]
    run_bytes: int  # of values that a rank codes in one run, about
    repeats: int


QUICK = Effort((64 << 10, 256 << 10, 1 << 20), 4 << 20, 3)
FULL = Effort((64 << 10, 256 << 10, 1 << 20, 4 << 20), 16 << 20, 7)
# A device wants many tiles at once, and codes one in the time of hundreds.
DEVICE_QUICK = Effort((1 << 20, 4 << 20, 16 << 20), 64 << 20, 3)
DEVICE_FULL = Effort((1 << 20, 4 << 20, 16 << 20, 64 << 20), 64 << 20, 7)


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure: codecs that take their types, values by type, words on what is left out."""

    pairs: tuple[tuple[Codec, DType], ...]
    values: dict[str, Any]
    origin: str  # of the values
    digest: str
    left_out: tuple[str, ...]


def profile_codecs(
    job: Job,
    names: str,
    dtypes: str | None,
    data: str | None,
    topology: str | None,
    output: str,
    quick: bool,
    as_json: bool,
    place: str,
) -> tuple[list[CodecFit], list[str]]:
    """Measure codecs on every rank, and write the given topology with them, if there is one; what was found, and the
    warnings that were said. place: "host" or "cuda", where the values are."""

    def prepare() -> tuple[Request, str]:
        asked = request(names, dtypes, data, place == "cuda")
        return asked, "" if topology is None else _profile_text(topology, job.ranks)

    asked, text = job.together("the reading of the options", prepare)
    same = ([(codec.name, dtype.name) for codec, dtype in asked.pairs], asked.digest, text, topology is None)
    job.agree_on(
        hashlib.sha256(repr(same).encode()).digest(),
        "choice of codecs, values or topology",
    )
    if job.rank == 0:
        for line in asked.left_out:
            click.echo(f"taccl: {line}", err=True)
    reach = _reach(job, place)
    if place == "cuda":
        if job.rank == 0:
            click.echo("taccl: codecs are measured in GPU memory (--device host: in host memory)", err=True)
        say_shared_devices(job, reach.neighbours)
    found = measure(job, asked, quick, reach)
    warned = warnings(found, job.machine.ranks, job.machine.cores, place == "cuda")
    for line in warned if job.rank == 0 else ():
        click.echo(f"taccl: {line}", err=True)
    if topology is not None:
        job.together(
            "the writing of the profile",
            lambda: _write(job, topology, text, found, warned, output, as_json) if job.rank == 0 else None,
        )
    return found, warned


def request(names: str, dtypes: str | None, data: str | None, on_device: bool = False) -> Request:
    """What the options ask for. Raises UsageError, InvalidInput for the file, EnvironmentProblem without a package, or
    where CuPy cannot add values of a type."""
    from taccl.runtime import gpu
    from taccl.runtime.codecs import CODECS, zstd
    from taccl.runtime.codecs.device import WITHOUT_KERNEL
    from taccl.runtime.codecs.samples import synthetic
    from taccl.runtime.dtypes import select_dtypes

    every = [name for name in CODECS if name != "raw"]
    chosen = every if names == "all" else list(dict.fromkeys(names.split(",")))
    types = select_dtypes(dtypes or "float32")
    left_out = []
    for name in chosen:
        if name not in every:
            raise UsageError(f"--codecs {name!r}: unknown; known: {', '.join(every)}, all")
    for name in WITHOUT_KERNEL if on_device else ():
        if name in chosen and names != "all":
            raise UsageError(f"--codecs {name}: {name} has no kernel; leave it out, or give --device host")
        if name in chosen:
            chosen.remove(name)
            left_out.append(f"{name} has no kernel: left out")
    if "zstd" in chosen:
        try:
            zstd.load()
        except EnvironmentProblem as problem:
            if names != "all":
                raise
            chosen.remove("zstd")
            left_out.append(str(problem))
    pairs = []
    for name in chosen:
        for dtype in types:
            if dtype.name in CODECS[name].dtypes:
                pairs.append((CODECS[name], dtype))
            else:
                left_out.append(f"{name} takes {', '.join(CODECS[name].dtypes)}; not {dtype.name}: left out")
    if not pairs:
        raise UsageError(f"--codecs: nothing to measure: {'; '.join(left_out)}")
    used = list({dtype.name: dtype for _, dtype in pairs}.values())
    if on_device:
        gpu.check_reductions((dtype.numpy for dtype in used), "leave it out of --dtype")
    given = read_data(data, used)
    if given is not None:
        values, origin, digest = dict(given.values), Path(str(data)).name, given.digest
    else:
        for dtype in used:
            if dtype.integer:
                raise UsageError(
                    f"{dtype.name} needs --data: how small integers become depends on them alone"
                )
        values = {dtype.name: synthetic(dtype, SAMPLE_BYTES).values for dtype in used}
        origin, digest = "normal values", ""
    return Request(tuple(pairs), values, origin, digest, tuple(left_out))


def _reach(job: Job, place: str) -> Reach:
    """How ranks reach each other's memory in a run, of the kind that `place` says; collective."""
    from taccl.commands.run_devices import reach_devices
    from taccl.runtime import gpu
    from taccl.runtime.codec_trial import Reach

    if place == "host":
        return Reach(job.reach_nodes(job.share_memory()))
    job.together("the choice of the device", lambda: gpu.select(job.board.node_slot))
    settings, neighbours = reach_devices(job)
    return Reach(neighbours, settings)


def measure(job: Job, asked: Request, quick: bool, reach: Reach) -> list[CodecFit]:
    """What was found, in order of codec and type, the same on every rank; collective."""
    import numpy as np

    from taccl.profiles.measure.codec_fit import CodecTimes, fit_codec
    from taccl.runtime import gpu
    from taccl.runtime.codec_trial import trial

    neighbours, on_device = reach.neighbours, reach.settings is not None
    efforts = (DEVICE_FULL, DEVICE_QUICK) if on_device else (FULL, QUICK)
    there = " in GPU memory" if on_device else ""
    nodes = len(set(neighbours.nodes))
    source = f"{asked.origin}{there}, {job.ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}"
    effort = efforts[quick]
    sizes = effort.chunk_bytes
    found = []
    for codec, dtype in sorted(asked.pairs, key=lambda pair: (pair[0].name, pair[1].name)):
        values = asked.values[dtype.name]
        trials = [
            trial(job, reach, codec, dtype, values, size, effort.run_bytes, effort.repeats) for size in sizes
        ]
        times = CodecTimes(
            codec.name, dtype.name, codec.lossless, source, neighbours.nodes, sizes,
            np.stack([one.times_us for one in trials], axis=1),
            np.stack([one.wire_bytes for one in trials], axis=1),
        )  # fmt: skip
        found.append(fit_codec(times))
    if neighbours.nccl is not None:
        neighbours.nccl.close(job)
    if on_device:
        gpu.Cuda(gpu.load()).give_back()  # links want some
    return found


def warnings(found: Sequence[CodecFit], ranks: int, cores: int, on_device: bool = False) -> list[str]:
    """Words on numbers that decisions should not rest on. ranks, cores: of a machine."""
    if on_device:  # kernels need no cores of their own
        why = "the GPU did other things, or ranks took turns on it; measure again while it has time for all"
    elif ranks > cores:
        why = (
            f"{ranks} ranks wait for each other on {cores} core{'s' * (cores > 1)}, so plans made of them are guesses: "
            "run both, with and without"
        )
    else:
        why = "the machine was busy, measure again while it does nothing else"
    return [
        f"warning: {fit.cost.codec} on {fit.cost.dtype}: times of coding or decoding are {worst:.0%} off their line; "
        f"{why}"
        for fit in found
        if (worst := max(fit.encode.residual, fit.decode.residual)) > MOST_RESIDUAL
    ]


def _profile_text(topology: str, ranks: int) -> str:
    """The text of a profile file, or of a bundled topology. Raises UsageError for one of other ranks."""
    from taccl.profiles.load import library_names, load_topology
    from taccl.profiles.profile_file import write_topology
    from taccl.profiles.yaml_reader import read_text

    loaded = load_topology(topology)
    if loaded.ranks != ranks:
        raise UsageError(
            f"-t {topology} has {loaded.ranks} ranks and this job {ranks}; start it with: mpiexec -n {loaded.ranks} "
            f"taccl profile -t {topology} ..."
        )
    bundled = topology.partition(":")[0] in library_names()
    return write_topology(loaded) if bundled else read_text(topology)


def _write(
    job: Job,
    topology: str,
    text: str,
    found: Sequence[CodecFit],
    warned: list[str],
    output: str,
    as_json: bool,
) -> None:
    from taccl.commands.profile import codec_table
    from taccl.profiles.codec_merge import with_codecs
    from taccl.profiles.measure.codec_fit import codec_document
    from taccl.profiles.profile_file import read_topology

    made = with_codecs(text, topology, [fit.cost for fit in found])
    write_output(output, made)
    document = {
        "schema": "taccl/measure/v1",
        "name": read_topology(made, topology).name,
        "ranks": job.ranks,
        "codecs": [codec_document(fit) for fit in found],
        "warnings": warned,
    }
    if as_json:
        print_json(document)
    elif output != "-":
        click.echo("\n".join(codec_table(document)))
    click.echo(f"taccl: wrote {output}", err=True)
