"""What `taccl run` says beside its table: memory and transport of each rank, the preamble, the JSON document."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from taccl.commands.options import write_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taccl.profiles.topology import Topology
    from taccl.runtime.bench import Loaded, Row
    from taccl.runtime.bench_settings import Settings
    from taccl.runtime.calibration import Calibration
    from taccl.runtime.job import Job, Neighbours
    from taccl.runtime.planned import Planned
    from taccl.synth.program import Program


def say_turns(row: Row) -> None:
    """On stderr, of each mode whose messages could take turns: how many wait for theirs, or why none does."""
    for mode, found in row.modes.items():
        if found.turns is not None:
            said = (
                f"{found.turns} messages wait for their turns"
                if found.turns
                else f"no turns: {found.no_turns}"
            )
            print(
                f"taccl: {row.size_bytes} bytes, {mode.replace('_', ' ')}: {said}",
                file=sys.stderr,
                flush=True,
            )


MOST_NAME_BYTES = 64  # of a host
NEAR = ("shm", "cuda-ipc", "staged-shm")  # transports that reach some ranks only


def say_devices(job: Job, settings: Settings, neighbours: Neighbours, verbose: bool) -> None:
    """With -v one line a rank on stderr, in turn: where its buffers are, how it reaches its peers."""
    if not verbose:
        return
    from taccl.runtime.mpi import say

    for rank in range(job.ranks):
        if rank == job.rank:
            where = f" on {neighbours.devices[rank]}" if neighbours.devices else ""
            say(f"taccl: rank {rank}: {_memory(settings)} buffers{where}, {_how(job, settings, neighbours)}")
        job.barrier()


def say_shared_devices(job: Job, neighbours: Neighbours) -> None:
    """One line on stderr where ranks of the job share a GPU and cannot use it at the same time."""
    from taccl.runtime import gpu
    from taccl.runtime.mpi import say

    names = neighbours.devices
    if job.rank or not names:
        return
    near = [
        set(one) | set(two) for one, two in zip_longest(neighbours.sharing, neighbours.staging, fillvalue=())
    ]
    shared = any(names[rank] == names[peer] for rank, peers in enumerate(near) for peer in peers - {rank})
    if shared and gpu.Cuda(gpu.load()).alternates():
        say(
            "taccl: ranks that share a GPU take turns on it, which slows short messages; with CUDA's MPS they work at "
            "the same time (nvidia-cuda-mps-control -d)"
        )


def transports_used(settings: Settings, neighbours: Neighbours) -> str:
    """The transports that the job uses."""
    ranks = len(neighbours.sharing)
    used = {name for rank in range(ranks) for name, _ in _ways(settings, neighbours, rank)}
    order = (settings.transport, "staged-shm", "mpi", settings.others)
    return "+".join(name for name in dict.fromkeys(order) if name in used or name == settings.transport)


def _ways(settings: Settings, neighbours: Neighbours, rank: int) -> list[tuple[str, list[int]]]:
    """By which transports a rank reaches which peers."""
    peers = [peer for peer in range(len(neighbours.sharing)) if peer != rank]
    if settings.transport not in NEAR and neighbours.tcp is None:
        return [(settings.transport, peers)]
    staging = neighbours.staging[rank] if neighbours.staging else ()
    near = [peer for peer in peers if peer in neighbours.sharing[rank]]
    staged = [peer for peer in peers if peer in staging and peer not in near]
    rest = [peer for peer in peers if peer not in near and peer not in staged]
    linked = [peer for peer in rest if neighbours.linked(rank, peer)]
    unlinked = [peer for peer in rest if peer not in linked]
    others = "mpi" if settings.others == "tcp" else settings.others
    ways = ((settings.transport, near), ("staged-shm", staged), (others, unlinked), ("tcp", linked))
    return [(name, ranks) for name, ranks in ways if ranks]


def _memory(settings: Settings) -> str:
    return f"{settings.buffers} {settings.device}"


def _how(job: Job, settings: Settings, neighbours: Neighbours) -> str:
    """By which transport this rank reaches which peers."""
    from taccl.runtime import native

    ways = _ways(settings, neighbours, job.rank) or [(settings.transport, [])]
    why = f" ({neighbours.why_not})" if neighbours.why_not else ""
    if neighbours.no_tcp:
        why += f" (no tcp: {neighbours.no_tcp})"
    if ways[0][0] == "shm" and settings.buffers == "private" and neighbours.no_reading:
        why += f" (the kernel does not copy long messages: {neighbours.no_reading})"
    if settings.device == "host" and native.why_not():
        why += f" (no compiled code: {native.why_not()})"
    if len(ways) == 1:
        return f"transport {ways[0][0]} to every peer{'' if ways[0][0] == 'cuda-ipc' else why}"
    said = [
        f"{name} to rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for name, ranks in ways[:-1]
    ]
    return f"transport {', '.join(said)}, {ways[-1][0]} to the others{why}"


def preamble(
    job: Job,
    loaded: Loaded,
    settings: Settings,
    neighbours: Neighbours,
    file: str,
    against: Program | None,
    against_file: str | None,
    data: bool,
) -> list[str]:
    """The lines above the table. data: whether the values are the user's."""
    program, collective = loaded.program, loaded.collective
    lines = [
        where(job, settings, neighbours),
        f"# {file}: {program.name}, {collective.title}, {program.chunks_per_loop} chunks, {program.protocol}; "
        f"warmup {settings.warmup}, iterations {settings.iterations}, checks {settings.checks}",
    ]
    if against is not None:
        lines.append(
            f"# the last columns: {against_file}: {against.name}, {against.chunks_per_loop} chunks, {against.protocol}"
        )
    if loaded.inferred:
        option = "--demand" if collective.name == "alltoallv" else "--pairs"
        lines.append(f"# results are checked against what the program moves; {option} says what it should")
    lines += how(loaded, settings, neighbours, data)
    low, high = program.min_bytes, program.max_bytes
    if settings.sizes_bytes[0] < low or (high and settings.sizes_bytes[-1] > high):
        lines.append(f"# the file is made for sizes from {low} to {high or 'any'} bytes")
    return [*lines, "#"]


def where(job: Job, settings: Settings, neighbours: Neighbours) -> str:
    """The line that says what a job ran on."""
    from taccl import __version__
    from taccl.runtime import mpi

    library = mpi.library(job.MPI)
    return (
        f"# taccl {__version__}, {library.name} {library.version}, {job.ranks} ranks, "
        f"{_memory(settings)} buffers, transport {transports_used(settings, neighbours)}"
    )


def how(loaded: Loaded, settings: Settings, neighbours: Neighbours, data: bool) -> list[str]:
    """Lines on sums in another type, and on coded messages. data: whether the values are the user's."""
    from taccl.runtime import codecs

    lines = []
    if settings.accumulate != "type" and loaded.collective.combining:
        lines.append(f"# 16-bit floats are reduced in {settings.accumulate}")
    if settings.codecs != ("raw",):
        lines += _coded(settings, loaded)
        if settings.codec_links == "nodes" and len(set(neighbours.nodes)) == 1:
            lines.append("# there is one node, so that no message is coded; --codec-links all codes all")
        by_values = [name for name in settings.codecs if name != "raw" and not codecs.get(name).fixed]
        if by_values and not data:
            lines.append(
                f"# values are test data, which {', '.join(by_values)} makes shorter or longer than real ones: --data "
                "FILE takes yours"
            )
    return lines


def _coded(settings: Settings, loaded: Loaded) -> list[str]:
    """Which messages are coded, how, and with what."""
    from taccl.runtime import codecs

    names, plan = ", ".join(settings.codecs), loaded.planned
    lossless = any(name != "raw" and codecs.get(name).lossless for name in settings.codecs)
    again = ""
    if settings.recode:
        again = ", partial sums again at every hop"
    elif lossless and loaded.collective.combining:
        again = ", partial sums again where they are sent on"
    if plan is not None:
        how = ", each at every hop" if settings.codec_at == "hop" else again
        return [
            f"# messages as planned in the file are coded{how}: {names}, {plan.messages} of {plan.of_messages}",
            f"# planned with {plan.codec} for {plan.size_bytes} bytes: {plan.time_us:.6g} us; the best schedule "
            f"without a codec takes {plan.uncoded_time_us:.6g}",
        ]
    where = "between nodes" if settings.codec_links == "nodes" else "everywhere"
    how = "at every hop" if settings.codec_at == "hop" else f"once for all hops{again}"
    return [f"# messages {where} are coded {how}; {names}"]


def _plan(plan: Planned) -> dict[str, object]:
    return {
        "codec": plan.codec,
        "dtype": plan.dtype,
        "coded_messages": plan.messages,
        "messages": plan.of_messages,
        "size_bytes": plan.size_bytes,
        "time_us": plan.time_us,
        "uncoded_time_us": plan.uncoded_time_us,
    }


def calibrated(loaded: Loaded, topology: Topology | None, row: Row, settings: Settings) -> Calibration | None:
    """The report on a row whose messages were looked at; None for another."""
    from taccl.runtime.calibration import calibration
    from taccl.runtime.dtypes import inside_bytes

    spans = next(
        (found.spans for found in reversed(list(row.modes.values())) if found.spans is not None), None
    )
    if spans is None or topology is None:
        return None
    moved = inside_bytes(row.size_bytes, row.dtype, row.op, settings.accumulate)
    found = calibration(loaded.program, loaded.collective, loaded.order, topology, moved, spans)
    return replace(found, size_bytes=row.size_bytes)


def host_names(job: Job) -> list[str]:
    """Every rank's host. Collective."""
    import platform

    import numpy as np

    name = platform.node().encode(errors="replace")[:MOST_NAME_BYTES]
    everyone = job.gather_bytes(
        np.frombuffer(name.ljust(MOST_NAME_BYTES, b"\0"), np.uint8), "the gathering of host names"
    )
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in everyone]


def document(
    job: Job,
    loaded: Loaded,
    settings: Settings,
    neighbours: Neighbours,
    options: dict[str, Any],
    rows: list[tuple[Row, float | None]],
    reports: list[Calibration | None],
    bad: int,
    average: float,
    hosts: Sequence[str],
) -> dict[str, object]:
    """The JSON document of a run, schema taccl/run/v1. hosts: of each rank."""
    import time

    from taccl import __version__
    from taccl.runtime import calibration, mpi, table

    library = mpi.library(job.MPI)
    program, collective, plan = loaded.program, loaded.collective, loaded.planned
    name = collective.name
    return {
        "schema": "taccl/run/v1",
        "version": __version__,
        "start_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "args": sys.argv[1:],
        "env": {},
        "nccl_version": None if neighbours.nccl is None else neighbours.nccl.version,
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
            "codec_links": settings.codec_links,
            "codec_at": settings.codec_at,
            "coding_plan": None if plan is None else _plan(plan),
            "recode": settings.recode,
            "data": options["data"],
        },
        "devices": [
            {"rank": r, "host": hosts[r], "device": settings.device}
            | ({"bus_id": neighbours.devices[r]} if neighbours.devices else {})
            for r in range(job.ranks)
        ],
        "transport": transports_used(settings, neighbours),
        "codec": "none" if settings.codecs == ("raw",) else ",".join(settings.codecs),
        "results": [
            table.row_json(row, name, collective.group_ranks, predicted)
            | ({} if report is None else {"calibration": calibration.document(report)})
            for (row, predicted), report in zip(rows, reports, strict=True)
        ],
        "out_of_bounds": {"count": bad, "okay": bad == 0},
        "average_bus_bandwidth": {"bandwidth": average, "okay": bad == 0},
    }


def write(job: Job, path: str, document: dict[str, object]) -> None:
    """Rank 0 writes the document; - is stdout. Raises EnvironmentProblem where the file cannot be written."""
    if job.rank == 0:
        write_output(path, json.dumps(document, indent=2, allow_nan=False) + "\n")
