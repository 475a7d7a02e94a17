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


def _leave(*_: object) -> None:
    os.write(2, b"taccl: interrupted\n")
    os._exit(130)
