"""`make bench-copies`: what two ranks of this machine copy a second, and their copies alone beside MPI's allgather.

Both ranks copy at the same time; GB/s are those of one, medians. "Behind" is how many bytes a target lies behind its
source in its page. Needs taccl's compiled code (`taccl doctor`).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from unittest import mock

import numpy as np
from benchmarks_run import turns

from taccl.runtime import mpi, native
from taccl.runtime.job import Job
from taccl.runtime.process_memory import address, reader

RANKS, TURNS, PAGE = 2, 100, 4096
COPIED, READ, GATHERED = 32 * 2**20, 2**20, (2**24, 2**26)
SHARED = 256 * 2**10


def pages(nbytes: int) -> np.ndarray:
    """(nbytes + PAGE,) uint8 of private memory that begins at a page."""
    raw = np.ones(nbytes + 2 * PAGE, np.uint8)
    return raw[-address(raw) % PAGE :][: nbytes + PAGE]


def copying(target: np.ndarray, source: np.ndarray, past: bool) -> Callable[[], object]:
    """A copy by compiled code, past the caches or not."""
    places = ctypes.c_void_p(address(target)), ctypes.c_void_p(address(source))
    size, stream = ctypes.c_size_t(target.nbytes), ctypes.c_int(past)
    return lambda: native.library().taccl_copy(*places, size, stream)


def worker() -> None:
    with Job(120.0) as job:
        source, target = (job.memory.empty(COPIED, np.uint8) for _ in range(2))
        source[:], target[:] = 1, 0
        runs = [copying(target, source, past) for past in (False, True)]
        rows = [("copy, 32 MB in shared memory", COPIED), ("copy past the caches, 32 MB", COPIED)]
        mine, into, small = pages(READ), pages(READ), pages(SHARED)[:SHARED]
        told = np.array([os.getpid(), address(mine), address(small)], np.int64)
        everyone = job.gather_bytes(told.view(np.uint8), "the places").view(np.int64)
        process, place, its_small = everyone[1 - job.rank].tolist()
        for behind in (0, 16):
            with mock.patch.object(native, "library", return_value=None):  # the kernel's copy as it is
                runs.append(reader(1 - job.rank, process, place, into[behind : behind + READ]))
            rows.append((f"kernel's read of 1 MB, {behind} bytes behind", READ))
        runs.append(reader(1 - job.rank, process, place, into[16 : 16 + READ]))
        rows.append(("taccl's read of 1 MB, 16 bytes behind", READ))
        for past, words in ((False, "copy"), (True, "copy past the caches")):
            runs.append(reader(1 - job.rank, process, its_small, into[:SHARED]))
            runs.append(copying(small, source[:SHARED], past))
            rows += [("", 0), (f"{words}, 256 KB that the other rank has read", SHARED)]
        taken = np.median(turns(job, runs, TURNS), 0)
        if job.rank == 0:
            print("| two ranks at the same time | GB/s |\n| --- | --- |")
            for (words, nbytes), us in zip(rows, taken, strict=True):
                if words:
                    print(f"| {words} | {nbytes / us / 1e3:.1f} |")
            print(
                "\n| allgather of 2 ranks | MPI (us) | copies alone (us) | ratio |\n| --- | --- | --- | --- |"
            )
        for nbytes in GATHERED:
            block = nbytes // RANKS
            own, other, out = (job.memory.empty(n, np.uint8) for n in (block, block, nbytes))
            own[:], other[:], out[:] = 1, 2, 0
            copies = [
                copying(out[k * block :][:block], (own, other)[k != job.rank], True) for k in range(RANKS)
            ]

            def alone(copies: list[Callable[[], object]] = copies) -> None:
                for copy in copies:
                    copy()

            taken = turns(job, [lambda o=own, a=out: job.control.Allgather(o, a), alone], TURNS)
            if job.rank == 0:
                both, ratio = np.median(taken, 0), np.median(taken[:, 1] / taken[:, 0])
                print(f"| {nbytes >> 20} MB | {both[0]:.0f} | {both[1]:.0f} | {ratio:.2f} |", flush=True)


def main() -> int:
    if native.library() is None:
        print(f"there is no compiled code: {native.why_not()}", file=sys.stderr)
        return 6
    if sys.argv[1:] == ["--worker"]:
        worker()
        return 0
    command = [mpi.mpiexec(), "-n", str(RANKS), sys.executable, __file__, "--worker"]
    os.execve(command[0], command, mpi.launch_environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
