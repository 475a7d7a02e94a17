"""The one door to MPI: loading it, naming it, starting it, ending it.

Nothing else in the package imports mpi4py. Loading initialises MPI, so a process that only asks about the
launcher (`launcher`, `mpiexec`) does not pay for it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import stat
import sys
import termios
import threading
import time
import traceback
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from taccl.errors import EnvironmentProblem

UNREAD_S = 1.0  # the longest that a last message waits for its reader
MEETING, MEETING_BYTES = "/dev/shm", 8 * 2**20  # where ranks of a host meet; enough for one rank there
JOB_FAILED = 86  # exit code of a job that was ended because a rank died, stalled or diverged

# Without these Open MPI 5 refuses to run as root or with more ranks than cores, spins while it waits, and
# prints an error at the creation of every window. They never override what the user has set.
OPEN_MPI_DEFAULTS: Mapping[str, str] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_osc": "^ucx",
}

# By which variables a launcher tells a process its rank, the number of ranks, and that of the ranks on its host.
PLACES: Mapping[str, tuple[str, str, str]] = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", ""),
}

ADVICE = "install one with: pip install 'taccl[mpi]'"


@dataclass(frozen=True, slots=True)
class Launcher:
    """What started this process: "mpich", "openmpi", "slurm", or "none"."""

    kind: str
    rank: int
    ranks: int
    local: int = 0  # ranks on this host; 0: not known


@dataclass(frozen=True, slots=True)
class Library:
    """The MPI library in use."""

    name: str  # "MPICH" | "Open MPI" | "Intel MPI" | "unknown"
    version: str
    standard: tuple[int, int]  # level of the MPI standard
    threads: str  # "single" | "funneled" | "serialized" | "multiple"


def load() -> Any:
    """The module `mpi4py.MPI`, with MPI initialised.

    Raises EnvironmentProblem when mpi4py is not installed or finds no MPI library.
    """
    for name, value in OPEN_MPI_DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise EnvironmentProblem(
            f"MPI is needed and mpi4py cannot be imported ({error}); {ADVICE}"
        ) from error
    except RuntimeError as error:  # mpi4py is there, the library is not
        first = str(error).splitlines()[0] if str(error) else "no reason given"
        raise EnvironmentProblem(f"mpi4py finds no MPI library ({first}); {ADVICE}") from error
    # All ranks of the host have these mapped by now. MPICH itself unlinks them at an orderly end only: a job
    # that ends by a signal or an abort would leave megabytes in /dev/shm.
    unlink(path for path in segments(os.getpid()) if "/mpich_shm_" in path)
    # Open MPI 5 forgets those of a process without a launcher, 16 MB, at an orderly end, too.
    if MPI.COMM_WORLD.Get_size() == 1:
        atexit.register(lambda: unlink(segments(os.getpid())))
    return MPI


def segments(process: int) -> list[str]:
    """Files in memory in which MPICH, UCX and Open MPI have their ranks of one host meet, as far as this process has
    them mapped or open and they still have a name."""
    found = set()
    with contextlib.suppress(OSError):  # the process is gone, or the system has no /proc
        maps = Path(f"/proc/{process}/maps").read_text(errors="replace")
        found = {
            f"{MEETING}/{name}" for line in maps.splitlines() if (name := line.partition(f" {MEETING}/")[2])
        }
        for opened in os.scandir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(opened.path))
    own = tuple(f"{MEETING}/{name}" for name in ("mpich_", "ucx_shm_posix_", "sm_segment."))
    return sorted(path for path in found if path.startswith(own) and not path.endswith(" (deleted)"))


def little_memory(ranks: int) -> str:
    """Why the ranks of this host may find no memory in which to meet, or "". The kernel kills who has mapped a file of
    /dev/shm and finds no room for it: MPI's libraries do so, and nobody says why a rank has died."""
    try:
        found = os.statvfs(MEETING)
    except OSError:
        return f"there is no {MEETING}, in which MPI's ranks of a host meet"
    if found.f_flag & os.ST_RDONLY or not os.access(MEETING, os.W_OK):
        return f"{MEETING}, in which MPI's ranks of a host meet, cannot be written"
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes >= ranks * MEETING_BYTES:
        return ""
    return (
        f"{MEETING}, in which MPI's ranks of a host meet, has {free_bytes >> 20} MB free and may need "
        f"{ranks * MEETING_BYTES >> 20}: make it larger (mount -o remount,size=..., docker run --shm-size)"
    )


def unlink(paths: Iterable[str]) -> None:
    """Take away the files' names; memory that is mapped lives on."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another rank was quicker
            os.unlink(path)


def library(MPI: Any) -> Library:
    """Name and version of the loaded library."""
    text = str(MPI.Get_library_version()).replace("\0", "").strip()
    if text.startswith("Open MPI"):
        name = "Open MPI"
    elif "Intel" in text:
        name = "Intel MPI"
    elif text.startswith("MPICH"):
        name = "MPICH"
    else:
        name = "unknown"
    found = re.search(r"\d+(\.\d+)+", text)
    threads = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }[MPI.Query_thread()]
    version = found.group() if found else (text.splitlines() or ["?"])[0]
    return Library(name, version, tuple(MPI.Get_version()), threads)


def launcher() -> Launcher:
    """Which launcher started this process, from its environment alone (MPI is not loaded)."""
    for kind, (rank, ranks, local) in PLACES.items():
        try:
            return Launcher(
                kind, int(os.environ[rank]), int(os.environ[ranks]), int(os.environ.get(local, 0))
            )
        except (KeyError, ValueError):
            continue
    return Launcher("none", 0, 1)


def mpiexec() -> str | None:
    """Path of the mpiexec that belongs to this environment: the one beside Python, else the one on PATH."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def launch_environment() -> dict[str, str]:
    """The environment to start mpiexec with: this one plus the Open MPI defaults it does not set.

    Variables by which a launcher names a process's place in its job are left out: a job started by a rank of
    another job must not take itself for a part of it.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "HYDRA_"))
    }
    return {**OPEN_MPI_DEFAULTS, **inherited}


def abort(MPI: Any, code: int) -> None:
    """End the whole job with this exit code; does not return.

    MPI_Abort may itself hang when the library is wedged, so the process exits on its own after two seconds.
    """
    last_resort = threading.Timer(2.0, os._exit, (code,))
    last_resort.daemon = True
    last_resort.start()
    flush()
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def flush() -> None:
    """Hand on what was printed, where somebody still takes it: who does not may be why the job ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def install_excepthook(MPI: Any) -> None:
    """Let an uncaught exception of one rank end the job.

    Without it Python's atexit runs MPI_Finalize, which waits for the other ranks for ever.
    """
    rank = MPI.COMM_WORLD.Get_rank()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            abort(MPI, 130)
        place = traceback.extract_tb(trace)[-1] if trace is not None else None
        where = f" at {Path(place.filename).name}:{place.lineno}" if place else ""
        say(f"taccl: rank {rank} failed with {kind.__name__}: {error}{where}; the job is ended", last=True)
        if os.environ.get("TACCL_DEBUG"):
            traceback.print_exception(kind, error, trace)
        abort(MPI, JOB_FAILED)

    sys.excepthook = hook


def say(message: str, last: bool = False) -> None:
    """Write one message to stderr in one piece, so that the texts of several ranks do not mix.

    last: the job ends next, and a launcher drops what it has not read by then, so wait until it has.
    """
    sys.stderr.flush()
    os.write(2, (message + "\n").encode(errors="backslashreplace"))
    if last and launcher().ranks > 1:
        unread, end = array("i", [1]), time.monotonic() + UNREAD_S
        with contextlib.suppress(OSError):
            while stat.S_ISFIFO(os.fstat(2).st_mode) and unread[0] and time.monotonic() < end:
                time.sleep(0.01)
                fcntl.ioctl(2, termios.FIONREAD, unread)
        time.sleep(0.05)  # from the launcher's part on this host to mpiexec
