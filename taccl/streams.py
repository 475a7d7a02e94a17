"""The three standard streams, whatever the caller left of them.

A stream that is closed (`taccl ... >&-`) is opened on the null device, so that what has nowhere to go is
dropped, the exit code stays what it would be, and no file that is opened later gets the number of a stream.
Characters that a stream's encoding lacks are written as escapes.
"""

from __future__ import annotations

import io
import os
import sys

from taccl.errors import EnvironmentProblem


def make_usable() -> None:
    """Give the process three streams that take any text; call it before anything opens a file."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken, which is this one. Inherited by children, as streams are.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def check_stdout() -> None:
    """For output that was asked for on stdout by name (`-o -`): EnvironmentProblem when stdout was closed."""
    if sys.__stdout__ is None:
        raise EnvironmentProblem("the output is to go to standard output, which is closed")
