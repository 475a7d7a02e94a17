"""`make bench-copies`: what two ranks of this machine copy a second, and the copies of a collective beside MPI's own.

Two ranks copy at the same time; GB/s are those of one, medians. "Behind" is how many bytes a target lies behind its
source in its page. "Copies alone" are those that every rank must do at least in an allgather or a broadcast out of
place, from memory that all share, without a message or a wait; in the way, past the caches or not, that is quicker.
Needs taccl's compiled code (`taccl doctor`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import numpy as np
from benchmarks_run import turns

from taccl.runtime import mpi, native
from taccl.runtime.job import Job
from taccl.runtime.process_memory import address, reader

TURNS, PAGE = 100, 4096
COPIED, READ = 32 * 2**20, 2**20
ALONE = {2: (("allgather", 16), ("allgather", 64)), 8: (("allgather", 1), ("broadcast", 1))}  # of ranks; MB


def pages(nbytes: int) -> np.ndarray:
    """(nbytes + PAGE,) uint8 of private memory that begins at a page."""
    raw = np.ones(nbytes + 2 * PAGE, np.uint8)
    return raw[-address(raw) % PAGE :][: nbytes + PAGE]


def copying(target: np.ndarray, source: np.ndarray, past: bool) -> Callable[[], object]:
    """A copy by compiled code, past the caches or not."""
    places = ctypes.c_void_p(address(target)), ctypes.c_void_p(address(source))
    size, stream = ctypes.c_size_t(target.nbytes), ctypes.c_int(past)
    return lambda: native.library().taccl_copy(*places, size, stream)


def speeds(job: Job) -> None:
    """Print what each of two ranks copies and reads."""
    source, target = (job.memory.empty(COPIED, np.uint8) for _ in range(2))
    source[:], target[:] = 1, 0
    runs = [copying(target, source, past) for past in (False, True)]
    rows = [("copy, 32 MB in shared memory", COPIED), ("copy past the caches, 32 MB", COPIED)]
    mine, into = pages(READ), pages(READ)
    told = np.array([os.getpid(), address(mine)], np.int64)
    everyone = job.gather_bytes(told.view(np.uint8), "the places").view(np.int64)
    process, place = everyone[1 - job.rank].tolist()
    for behind in (0, 16):
        with mock.patch.object(native, "library", return_value=None):  # the kernel's copy as it is
            runs.append(reader(1 - job.rank, process, place, into[behind : behind + READ]))
        rows.append((f"kernel's read of 1 MB, {behind} bytes behind", READ))
    runs.append(reader(1 - job.rank, process, place, into[16 : 16 + READ]))
    rows.append(("taccl's read of 1 MB, 16 bytes behind", READ))
    taken = np.median(turns(job, runs, TURNS), 0)
    if job.rank == 0:
        print("| two ranks at the same time | GB/s |\n| --- | --- |")
        for (words, nbytes), us in zip(rows, taken, strict=True):
            print(f"| {words} | {nbytes / us / 1e3:.1f} |")
        print("\n| ranks | collective | MPI (us) | copies alone (us) | ratio |\n| --- | --- | --- | --- | --- |")


def alone(job: Job, collective: str, nbytes: int) -> None:
    """Print a row of copies alone."""
    block = nbytes // job.ranks if collective == "allgather" else nbytes
    has = collective == "allgather" or job.rank == 0
    window = job.MPI.Win.Allocate_shared(block if has else 0, 1, comm=job.control)
    sources = [np.frombuffer(window.Shared_query(rank)[0], np.uint8) for rank in range(job.ranks)]
    own, out = sources[job.rank], job.memory.empty(nbytes, np.uint8)
    own[:], out[:] = job.rank + 1, 0
    if collective == "allgather":
        pairs = [(out[rank * block :][:block], sources[rank]) for rank in range(job.ranks)]
        pairs = pairs[job.rank :] + pairs[: job.rank]  # not all from the same one
        whole = lambda: job.control.Allgather(own, out)  # noqa: E731
    else:
        pairs = [(out, sources[0])] if job.rank else []
        whole = lambda: job.control.Bcast(out if job.rank else own)  # noqa: E731
    ways = [[copying(*pair, past) for pair in pairs] for past in (False, True)]

    def every(copies: list[Callable[[], object]]) -> None:
        for copy in copies:
            copy()

    taken = turns(job, [whole, *(functools.partial(every, copies) for copies in ways)], TURNS)
    if job.rank == 0:
        quicker = 1 + int(np.argmin(np.median(taken, 0)[1:]))
        mpi_us, us = np.median(taken[:, [0, quicker]], 0)
        ratio = np.median(taken[:, quicker] / taken[:, 0])
        named = f"{job.ranks} | {collective} of {nbytes >> 20} MB"
        print(f"| {named} | {mpi_us:.0f} | {us:.0f} | {ratio:.2f} |", flush=True)
    del sources, own, pairs, ways
    window.Free()


def worker() -> None:
    """All that so many ranks are asked for."""
    with Job(120.0) as job:
        if job.ranks == 2:
            speeds(job)
        for collective, megabytes in ALONE[job.ranks]:
            alone(job, collective, megabytes << 20)


def main() -> int:
    if native.library() is None:
        print(f"there is no compiled code: {native.why_not()}", file=sys.stderr)
        return 6
    if sys.argv[1:] == ["--worker"]:
        worker()
        return 0
    for ranks in ALONE:
        command = [mpi.mpiexec(), "-n", str(ranks), sys.executable, __file__, "--worker"]
        done = subprocess.run(command, env=mpi.launch_environment(), check=False)
        if done.returncode != 0:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
