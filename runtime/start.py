"""A deadline for the start of MPI.

MPI_Init waits for all ranks, for ever when one of them left before it, and holds Python's lock meanwhile: no
thread and no signal handler of this process can run. So a child process watches over it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

from taccl.runtime import mpi

LEAST_S = 10.0  # processes of one job may begin seconds apart
TICK_S = 0.2  # between two looks at the memory that the rank has mapped


@contextlib.contextmanager
def limited(deadline_s: float) -> Iterator[None]:
    """End the job when what is done inside, by all ranks, lasts longer than the deadline (at least LEAST_S).

    The job ends with JOB_FAILED under MPICH's launcher; others give the code of a killed rank.
    """
    place = mpi.launcher()
    if place.ranks < 2:
        yield
        return
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    rank = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.close(writer)
            _watch(reader, rank, place, max(deadline_s, LEAST_S))
        finally:
            os._exit(0)
    os.close(reader)
    # Only the default action reaches a process that is inside MPI_Init.
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    by_default = in_main and handler is signal.default_int_handler
    if by_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if by_default:
            signal.signal(signal.SIGINT, handler)
        with contextlib.suppress(BrokenPipeError, ChildProcessError):  # somebody else ended it
            os.write(writer, b".")
            os.waitpid(child, 0)
        os.close(writer)


def _watch(reader: int, rank: int, place: mpi.Launcher, patience_s: float) -> None:
    """Until the rank writes to the pipe, closes it by its death, or is to be ended. rank: its process id."""
    os.setsid()  # signals are for the rank; this process ends with it, and clears up
    # One after another, so that the first one's message is the only one: it ends the job.
    end = time.monotonic() + patience_s + 0.5 * min(place.rank, 20)
    segments: set[str] = set()
    while (left_s := end - time.monotonic()) > 0:
        if select.select([reader], [], [], min(left_s, TICK_S))[0]:
            if not os.read(reader, 1):  # the rank died and could not clear up
                mpi.unlink(segments)
            return
        segments.update(mpi.segments(rank))
    mpi.say(
        f"taccl: rank {place.rank} waited {patience_s:g} s for MPI to start: another rank has ended "
        "(are its options the same?) or was never started; the job is ended"
    )
    mpi.unlink(segments.union(mpi.segments(rank)))
    if place.kind == "mpich" and "PMI_FD" in os.environ:
        time.sleep(0.2)  # the launcher drops what it has not passed on when it ends the job
        # What MPI_Abort does, in the words of PMI version 1.
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={mpi.JOB_FAILED}\n".encode())
        time.sleep(1.0)
    if os.getppid() == rank:
        os.kill(rank, signal.SIGKILL)
