"""`make bench-run`: what a step costs, and programs beside MPI's own collectives on the ranks of this machine.

    python docs/benchmarks_run.py                      the tables of docs/benchmarks.md
    python docs/benchmarks_run.py step                 the first only
    python docs/benchmarks_run.py 4 allgather alltoall  rows of some numbers of ranks and collectives
    python docs/benchmarks_run.py 2 1KB 64KB            and of some sizes
    python docs/benchmarks_run.py in-place 4 4MB        the same in place, MPI too

Everything that is compared takes turns in one run; a ratio is the median over the turns of the time of a turn's slowest
rank, divided by that of MPI in the same turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from taccl.runtime import mpi
from taccl.runtime.bind import Bound, compile_program
from taccl.runtime.check import allocate
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.host_transport import host_transport
from taccl.runtime.job import Job, Neighbours
from taccl.runtime.layout import Layout, layout
from taccl.runtime.reference import Reference
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace
from taccl.runtime.transports import MpiTransport
from taccl.synth.collective import build
from taccl.synth.msccl_xml import read_xml
from taccl.synth.program import Program, RankProgram, Step, Threadblock

RANKS = (2, 4, 8)
SIZES = {"1 KB": 2**10, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24, "64 MB": 2**26}
MORE_SIZES = {"256 KB": 2**18, "4 MB": 2**22, "8 MB": 2**23, "32 MB": 2**25}  # where they are asked for
ENGINES = {
    "allgather": ("direct", "ring", "recursive-doubling"),
    "allreduce": ("one-shot-pairs", "one-shot-doubling", "direct", "ring", "recursive-doubling"),
    "broadcast": ("direct", "ring", "recursive-doubling"),
    "alltoall": ("direct", "recursive-doubling"),
    "reducescatter": ("direct", "ring", "recursive-doubling"),
}
HOPS = 64
TURNS = 200  # of the step
MOST_TURNS, LEAST_TURNS, ENOUGH_S = 200, 7, 3.0  # of a collective


def hops() -> Program:
    """A message of one chunk goes to and fro between two ranks, each time to a place of its own."""
    sides: tuple[list[Step], list[Step]] = ([], [])
    for hop in range(HOPS):
        sides[hop % 2].append(Step("s", "o", hop, "o", hop + 1, 1))
        sides[1 - hop % 2].append(Step("r", "o", hop, "o", hop + 1, 1))
    ranks = tuple(
        RankProgram(rank, HOPS + 1, HOPS + 1, 0, (Threadblock(0, 1 - rank, 1 - rank, 0, tuple(steps)),))
        for rank, steps in enumerate(sides)
    )
    return Program("hops", "custom", "Simple", 1, HOPS + 1, 2, False, True, 0, 0, ranks)


def transport(job: Job, how: str, compiled, near: Neighbours, chunk_bytes: int):
    """(transport, where the program's own memory comes from)."""
    if how == "mpi":
        return MpiTransport(job.MPI, job.data, chunk_bytes), np.empty
    return host_transport(job, compiled, chunk_bytes, near, "shm")


def bound(
    job: Job, how: str, program: Program, collective, shape: Layout, near: Neighbours, inplace: bool = False
) -> Bound:
    """A program on fresh float32 buffers: "mpi", "private" or "shared"."""
    compiled = compile_program(program, collective, inplace, [job.rank])
    way, inside = transport(job, how, compiled, near, shape.chunk_elements * 4)
    make = job.memory.empty if how == "shared" else np.empty
    buffers = allocate(collective, shape, job.rank, DTYPES["float32"], inplace, make).buffers
    buffers.output[:] = 0
    buffers.input[:] = 1
    op = "sum" if collective.combining else None
    made = Bound(compiled, job.rank, shape, buffers, DTYPES["float32"], op, way, np, inside)
    job.connect(made)
    return made


def turns(job: Job, runs: list, most: int, least: int = 1) -> np.ndarray:
    """(turns, runs) us of the slowest rank."""
    taken = []
    begin = time.perf_counter()
    for turn in range(-2, most):
        row = np.zeros(len(runs) + 1)
        for index, run in enumerate(runs):
            job.barrier()
            start = time.perf_counter()
            run()
            row[index] = (time.perf_counter() - start) * 1e6
        row[-1] = time.perf_counter() - begin
        row = job.reduce(row, "max")
        if turn >= 0:
            taken.append(row[:-1])
        if len(taken) >= least and row[-1] > ENOUGH_S:
            break
    return np.array(taken)


def step(job: Job) -> dict[str, float]:
    """us of a message of 64 bytes, and its ratio to a persistent request that is started and waited for."""
    near = job.share_memory()
    collective = build("broadcast", 2, HOPS + 1)
    shape = Layout(16 * (HOPS + 1), HOPS + 1, 1)
    other, bytes_ = 1 - job.rank, np.zeros(64, np.uint8)
    out = job.control.Send_init([bytes_, 64, job.MPI.BYTE], other, 1)
    into = job.control.Recv_init([bytes_.copy(), 64, job.MPI.BYTE], other, 1)

    def bare() -> None:
        for hop in range(HOPS):
            request = out if hop % 2 == job.rank else into
            request.Start()
            request.Wait()

    ways = {how: bound(job, how, hops(), collective, shape, near) for how in ("mpi", "private", "shared")}
    runs = [bare, *(lambda b=b: job.run(b) for b in ways.values())]
    taken = turns(job, runs, TURNS) / HOPS
    out.Free()
    into.Free()
    for made in ways.values():
        made.close()
    found = {"bare": float(np.median(taken[:, 0]))}
    for index, how in enumerate(ways, 1):
        found[how] = float(np.median(taken[:, index]))
        found[f"{how} ratio"] = float(np.median(taken[:, index] / taken[:, 0]))
    return found


def rows(job: Job, sizes: str, inplace: bool, files: list[str]):
    """For each size: us of MPI, and for private and shared buffers the quickest program and its ratio."""
    near = job.share_memory()
    programs = {path: read_xml(Path(path).read_text(), path) for path in files}
    for label, size in ((label, (SIZES | MORE_SIZES)[label]) for label in sizes.split(",")):
        found: dict[str, object] = {"size": label}
        for how in ("private", "shared"):
            made = {}
            for path, program in programs.items():
                collective = collective_of(program, trace(program))
                shape = layout(collective, size // 4)
                made[Path(path).stem] = bound(job, how, program, collective, shape, near, inplace)
            own = next(iter(made.values())).user
            op = "sum" if collective.combining else None
            reference = Reference(
                job.MPI, job.control, collective, shape, own, DTYPES["float32"], op, inplace
            ).call
            runs = [reference, *(lambda b=b: job.run(b) for b in made.values())]
            with np.errstate(all="ignore"):
                taken = turns(job, runs, MOST_TURNS, LEAST_TURNS)
            ratios = np.median(taken[:, 1:] / taken[:, :1], 0)
            best = int(np.argmin(ratios))
            found[how] = [list(made)[best], float(ratios[best])]
            found.setdefault("mpi", float(np.median(taken[:, 0])))
            found.setdefault("turns", len(taken))
            for one in made.values():
                one.close()
                one.transport.close()
        yield found


def worker(arguments: list[str]) -> None:
    with Job(120.0) as job:
        what, *more = arguments
        for found in [step(job)] if what == "step" else rows(job, what, more[0] == "in-place", more[1:]):
            if job.rank == 0:
                print(json.dumps(found), flush=True)


def launch(ranks: int, *arguments: str):
    """The worker's documents, as they come."""
    command = [mpi.mpiexec(), "-n", str(ranks), sys.executable, __file__, "--worker", *arguments]
    with subprocess.Popen(
        command, env=mpi.launch_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        sys.exit(process.returncode)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--worker"]:
        worker(arguments[1:])
        return
    if not arguments or "step" in arguments:
        (found,) = launch(2, "step")
        print("| 64 bytes between 2 ranks | us | ratio |\n| --- | --- | --- |")
        print(f"| bare persistent request, Start and Wait | {found['bare']:.2f} | 1 |")
        for how, text in (
            ("mpi", "a step over MPI"),
            ("private", "a step through shared memory, private buffers"),
            ("shared", "a step through shared memory, shared buffers"),
        ):
            print(f"| {text} | {found[how]:.2f} | {found[how + ' ratio']:.2f} |")
        print(flush=True)
    if arguments == ["step"]:
        return
    counts = [int(one) for one in arguments if one.isdigit()] or RANKS
    names = [one for one in arguments if one in ENGINES] or list(ENGINES)
    asked = [one for one in SIZES | MORE_SIZES if one.replace(" ", "") in arguments]
    sizes, where = ",".join(asked or SIZES), "in-place" if "in-place" in arguments else "out-of-place"
    print(
        "| ranks | collective | size | MPI (us) | private buffers | program | shared buffers | program | turns |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in counts:
            for name in names:
                files = [path for engine in ENGINES[name] if (path := make(folder, ranks, name, engine))]
                for row in launch(ranks, sizes, where, *files):
                    cells = [f"{row[how][1]:.2f} | {row[how][0]}" for how in ("private", "shared")]
                    print(
                        f"| {ranks} | {name} | {row['size']} | {row['mpi']:.1f} | {' | '.join(cells)} | "
                        f"{row['turns']} |",
                        flush=True,
                    )


def make(folder: str, ranks: int, name: str, engine: str) -> str | None:
    """The path of a program for even links; None where an engine cannot do it."""
    path = f"{folder}/{ranks}/{engine}.xml".replace(f"{ranks}/", f"{name}-{ranks}/")
    done = subprocess.run(
        [sys.executable, "-m", "taccl", "synth", "-t", f"fat-tree:1x{ranks}", "-c", name, "--size", "1MB",
         "--engine", engine, "--partition", "1", "-o", path],
        capture_output=True, text=True,
    )  # fmt: skip
    return path if done.returncode == 0 and Path(path).exists() else None


if __name__ == "__main__":
    main(sys.argv[1:])
