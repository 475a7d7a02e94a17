"""Where the command `taccl` begins: Ctrl-C ends it without a traceback, also while it is still being loaded.

Imports next to nothing, because until `main` runs Python itself answers Ctrl-C.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line."""
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where Ctrl-C is to be ignored
    if own:
        signal.signal(signal.SIGINT, _leave)
    from taccl.cli import main as command_line

    if own:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command_line()
    finally:
        if own:  # nothing is left that could end in an orderly way
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def first_rank() -> bool:
    """Whether this process may speak for its job: by the variables of taccl.runtime.mpi, which is not loaded here."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def _leave(*_: object) -> None:
    if first_rank():
        os.write(2, b"taccl: interrupted\n")
    os._exit(130)
