"""Where the command `taccl` begins: Ctrl-C ends it without a traceback, also while it is still being loaded.

Imports next to nothing, because until `main` runs Python itself answers Ctrl-C.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from typing import Any

RANKS = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
)  # as in taccl.runtime.mpi, which is not loaded here
AGAIN_S = 1.0  # within it a Ctrl-C is the launcher's copy of the one before
DROPPED_S = 0.001  # from a KeyboardInterrupt that Python has dropped to the next
HOLD_S, HOLDS = 0.02, 500  # at most ten seconds

_interrupted = -AGAIN_S


def main() -> None:
    """Run the command line."""
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where Ctrl-C is to be ignored
    if own:
        signal.signal(signal.SIGINT, _leave)
    from taccl.cli import main as command_line

    if own:
        heed(interrupt if launched() else signal.default_int_handler)
    try:
        command_line()
    finally:
        if own:  # nothing is left that could end in an orderly way
            signal.signal(signal.SIGINT, signal.SIG_IGN if launched() else signal.SIG_DFL)


def heed(handler: Any) -> None:
    """Let `handler` answer Ctrl-C by a KeyboardInterrupt, and answer again when that is dropped: Python ignores what is
    raised in a finalizer or in a callback of its own, such as those that end the import of a module."""
    signal.signal(signal.SIGINT, handler)
    before = sys.unraisablehook

    def hook(unraisable: Any, /) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            before(unraisable)
            return
        global _interrupted
        _interrupted = -AGAIN_S
        _thread.start_new_thread(_again, ())

    sys.unraisablehook = hook


def _again() -> None:
    time.sleep(DROPPED_S)
    os.kill(os.getpid(), signal.SIGINT)


def launched() -> bool:
    """Whether this process is a rank that an MPI launcher has started."""
    return any(name in os.environ for name in RANKS)


def interrupt(*_: object) -> None:
    """Answer Ctrl-C with KeyboardInterrupt, but once: a terminal gives it to all processes, and then the launcher gives
    it to its ranks. The second one would interrupt the answer to the first."""
    global _interrupted
    before, _interrupted = _interrupted, time.monotonic()
    if _interrupted - before > AGAIN_S:
        raise KeyboardInterrupt


def just_interrupted() -> bool:
    """Whether a Ctrl-C was answered a moment ago. Libraries that drop KeyboardInterrupt raise something else in its
    place (mpi4py, which then finds no message in its arguments)."""
    return time.monotonic() - _interrupted < AGAIN_S


def voice() -> str:
    """The name of a socket: of the ranks that one launcher has started on a host, that which holds it speaks.

    Containers that share the host's network share these names, and may have launchers of the same number.
    """
    launcher = os.getppid()
    namespace, began = 0, ""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        began = status(launcher)[19]
    except OSError:  # no such system, or a launcher out of sight
        pass
    return f"\0taccl-start-{launcher}-{began}-{namespace}"


def status(process: int | str) -> list[str]:
    """What Linux says of a process, by its number or "self", from its state on (proc_pid_stat(5), from the third
    field)."""
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()


def speaks() -> bool:
    """Whether this process may say that it was interrupted. Of the ranks of a launcher the first that asks may."""
    if not launched():
        return True
    import socket

    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(voice())
    except OSError:  # another rank, or the child of one, is quicker
        return False
    launcher = os.getppid()
    if os.fork() == 0:
        _hold(held.detach(), launcher)
    return True


def _hold(voice_fd: int, launcher: int) -> None:
    """In a child, which keeps others from speaking until the launcher has ended them."""
    os.setsid()
    os.closerange(0, voice_fd)
    os.closerange(voice_fd + 1, 1024)  # the launcher waits until nobody holds its pipes
    for _ in range(HOLDS):
        try:
            if status(launcher)[0] in "ZX":
                break
        except OSError:
            break
        time.sleep(HOLD_S)
    os._exit(0)


def _leave(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if speaks():
        os.write(2, b"taccl: interrupted\n")
    os._exit(130)
