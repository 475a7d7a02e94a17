"""Start real jobs under mpiexec, and see that nothing of them is left."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from taccl.runtime import mpi

TIMEOUT_S = 150  # of a slow machine, too: the longest of these jobs takes 20 to 60 s
TOKEN = "TACCL_TEST_JOB"

needs_mpi = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        mpi.mpiexec() is None or importlib.util.find_spec("mpi4py") is None,
        reason="needs MPI: pip install 'taccl[mpi]'",
    ),
]


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    out: str
    err: str
    seconds: float


def launch(ranks: int, *arguments: str, **environment: str) -> Ended:
    """Run `mpiexec -n ranks python arguments`; fails when it exceeds the time limit or leaves processes."""
    token = uuid.uuid4().hex
    begin = time.monotonic()
    process = subprocess.Popen(
        [mpi.mpiexec(), "-n", str(ranks), sys.executable, *arguments],
        # Unbuffered, Python writes a line and its end in two pieces, and the launcher may put another rank's between.
        env={**mpi.launch_environment(), "PYTHONUNBUFFERED": "", **environment, TOKEN: token},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        for pid in left(token):
            os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"the job did not end within {TIMEOUT_S} s\n{out}\n{err}")
    seconds = time.monotonic() - begin
    deadline = time.monotonic() + 3
    while left(token) and time.monotonic() < deadline:
        time.sleep(0.05)  # the launcher's helpers need a moment to go
    assert left(token) == []
    return Ended(process.returncode, out, err, seconds)


def left(token: str) -> list[int]:
    """Processes, zombies excepted, that were started for this job."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{TOKEN}={token}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def taccl(ranks: int, *arguments: str) -> Ended:
    """`mpiexec -n ranks taccl arguments`."""
    return launch(ranks, "-m", "taccl", *arguments)


ODD = """
import os, signal, sys, time
from pathlib import Path
from taccl import entry
from taccl.runtime.mpi import launcher
victim, *line = sys.argv[1:]
split = line.index("--but")
more = line[split + 1:] if launcher().rank == int(victim) else []
if more == ["--stop"]:
    os.kill(os.getpid(), signal.SIGSTOP)
def children(process):
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))
if more == ["--interrupt"]:  # all ranks, as a terminal and the launcher do, when the others are inside MPI_Init
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while not all(children(rank) for rank in children(os.getppid()) if rank != os.getpid()):
        time.sleep(0.1)
    time.sleep(0.3)
    for _ in range(5):
        for rank in children(os.getppid()):
            os.kill(rank, signal.SIGINT)
        time.sleep(0.02)
    time.sleep(60)
sys.argv = ["taccl", *line[:split], *more]
entry.main()
"""


def taccl_but(ranks: int, victim: int, more: tuple[str, ...], *arguments: str) -> Ended:
    """As `taccl`, where the victim's rank is given more arguments."""
    return launch(ranks, "-c", ODD, str(victim), *arguments, "--but", *more)


def messages(ended: Ended) -> list[str]:
    """The lines that taccl itself wrote to stderr."""
    return [line for line in ended.err.splitlines() if line.startswith("taccl:")]
