"""The one door to MPI: loading it, naming it, starting it, and never letting a job hang.

Nothing else in the package imports mpi4py. Loading initialises MPI, so a process that only asks about the
launcher (`launcher`, `mpiexec`) does not pay for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from taccl.errors import EnvironmentProblem

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

ADVICE = "install one with: pip install 'taccl[mpi]'"


@dataclass(frozen=True, slots=True)
class Launcher:
    """What started this process: "mpich", "openmpi", "slurm", or "none"."""

    kind: str
    rank: int
    ranks: int


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
    unlink(segments(os.getpid()))
    return MPI


def segments(process: int) -> list[str]:
    """Files in memory that MPICH's ranks of one host meet in, as far as this process has them mapped."""
    try:
        maps = Path(f"/proc/{process}/maps").read_text(errors="replace")
    except OSError:  # the process is gone, or the system has no /proc
        return []
    paths = {line.partition(" /dev/shm/mpich_shm_")[2] for line in maps.splitlines()}
    return [
        f"/dev/shm/mpich_shm_{path}" for path in sorted(paths) if path and not path.endswith(" (deleted)")
    ]


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
    for kind, rank, ranks in (
        ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("mpich", "PMI_RANK", "PMI_SIZE"),
        ("slurm", "SLURM_PROCID", "SLURM_NTASKS"),
    ):
        try:
            return Launcher(kind, int(os.environ[rank]), int(os.environ[ranks]))
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
    sys.stdout.flush()
    sys.stderr.flush()
    last_resort = threading.Timer(2.0, os._exit, (code,))
    last_resort.daemon = True
    last_resort.start()
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


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
        say(f"taccl: rank {rank} failed with {kind.__name__}: {error}{where}; the job is ended")
        if os.environ.get("TACCL_DEBUG"):
            traceback.print_exception(kind, error, trace)
        abort(MPI, JOB_FAILED)

    sys.excepthook = hook


def say(message: str) -> None:
    """Write one message to stderr in one piece, so that the texts of several ranks do not mix."""
    sys.stderr.flush()
    os.write(2, (message + "\n").encode(errors="backslashreplace"))


class Waiter(Protocol):
    """Something that waits and can say for what."""

    left: int  # falls while there is progress

    def describe(self) -> str:
        """What it waits for, as the rest of "rank 3 made no progress for 5 s: ..."."""


class Watchdog:
    """A daemon thread that ends the job when this rank makes no progress for `deadline_s` seconds.

    The main thread says with `doing` what it is about to wait for, whose `left` falls with progress; None when
    it computes and waits for nobody. mpi4py gives up the GIL inside blocking calls, so the thread also runs
    while the main thread sits in one. `board` is shared by the ranks of this node: it decides which one speaks
    when several run out of time together, and tells who does not answer.
    """

    def __init__(self, MPI: Any, deadline_s: float, board: Board) -> None:
        self.beats = 0
        self.deadline_s = deadline_s
        self._mpi = MPI
        self._board = board
        self._doing: str | Waiter | None = None
        self._stop = threading.Event()
        self._rank = MPI.COMM_WORLD.Get_rank()
        self._thread = threading.Thread(target=self._watch, name="taccl-watchdog", daemon=True)
        self._thread.start()

    def doing(self, what: str | Waiter | None) -> None:
        """What the rank is about to wait for; None when it waits for nothing."""
        self.beats += 1
        self._doing = what

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, since = self._marks(), time.monotonic()
        # A tick well below the deadline, so that the job ends soon after it.
        while not self._stop.wait(min(0.1, self.deadline_s / 10)):
            now = time.monotonic()
            self._board.sign(now, self._doing is not None)
            if self._marks() != seen or self._doing is None:
                seen, since = self._marks(), now
            elif now - since > self.deadline_s:
                if self._board.claim():
                    self._report()
                abort(self._mpi, JOB_FAILED)

    def _marks(self) -> tuple[int, int]:
        """What changes when there is progress."""
        doing = self._doing
        return self.beats, 0 if doing is None or isinstance(doing, str) else doing.left

    def _report(self) -> None:
        doing = self._doing
        text = doing if isinstance(doing, str) else doing.describe() if doing is not None else "it waits"
        silent = self._board.silent(time.monotonic())
        say(
            f"taccl: rank {self._rank} made no progress for {self.deadline_s:g} s: {text}; "
            + "".join(f"{line}; " for line in silent)
            + "the job is ended"
        )


class Board:
    """A few numbers of each rank of this node in shared memory: a sign of life, and whether it waits."""

    CLAIM_S = 0.05  # longer than a store takes to be seen by every process of a busy node

    def __init__(self, MPI: Any, comm: Any) -> None:
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._slot = node.Get_rank()
        self._window = MPI.Win.Allocate_shared(
            8 * (1 + 2 * node.Get_size()) if self._slot == 0 else 0, 8, comm=node
        )
        self._cells = memoryview(self._window.Shared_query(0)[0]).cast("B").cast("d")
        if self._slot == 0:
            self._cells[:] = memoryview(bytes(8 * (1 + 2 * node.Get_size()))).cast("d")
        mine = array("i", [comm.Get_rank()])
        self._ranks = array("i", [0] * node.Get_size())
        node.Allgather(mine, self._ranks)  # also: nobody signs before the cells are cleared
        self.node = min(self._ranks)  # the node's first rank names it
        self.node_ranks = node.Get_size()
        self.node_slot = self._slot
        self._node = node
        self.sign(time.monotonic(), False)

    def sign(self, now: float, waits: bool) -> None:
        """This rank lives. CLOCK_MONOTONIC is one clock for all processes of a host."""
        self._cells[1 + 2 * self._slot] = now
        self._cells[2 + 2 * self._slot] = float(waits)

    def claim(self) -> bool:
        """Whether this rank may speak for the node (Fischer's mutual exclusion: the last to write wins).

        A rank that may not is held back for a second, in which the one that may ends the job.
        """
        if not self._cells[0]:
            self._cells[0] = self._slot + 1.0
            time.sleep(self.CLAIM_S)
            if self._cells[0] == self._slot + 1.0:
                return True
        time.sleep(1.0)
        return False

    def silent(self, now: float) -> list[str]:
        """What is known of the ranks of this node that do not wait as the others do."""
        found = []
        for slot, rank in enumerate(self._ranks):
            signed, waits = self._cells[1 + 2 * slot], self._cells[2 + 2 * slot]
            if slot != self._slot and now - signed > 1.0:
                found.append(f"rank {rank} has shown no sign of life for {now - signed:.1f} s")
            elif slot != self._slot and not waits:
                found.append(f"rank {rank} lives and waits for nobody")
        return found

    def close(self) -> None:
        """Free the shared memory (collective)."""
        self._cells.release()
        self._window.Free()
        self._node.Free()
