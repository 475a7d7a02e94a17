"""Compiled code of the runtime: the loop of an executor, TCP connections, long copies, codecs. Everything has a twin in
Python.

It is built when taccl is installed where there is a C compiler, and taken where it was built; results are the same to
the bit. `taccl doctor` says which; TACCL_NATIVE=0 leaves it out. It is plain C behind ctypes, which lets other
threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
from pathlib import Path

# Of what the C files and their users agree on; one more with every change of it, so that older files are not taken.
VERSION = 10


@functools.lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("TACCL_NATIVE", "") == "0":
        return None, "TACCL_NATIVE=0 leaves it out"
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"library{suffix}"
        if not path.exists():
            continue
        try:
            found = ctypes.CDLL(str(path))
        except OSError as error:
            return None, f"it cannot be loaded: {error}"
        if not hasattr(found, "taccl_version") or found.taccl_version() != VERSION:
            return None, "it was built from other sources; install taccl again"
        return found, ""
    return None, "it was not built: no C compiler was found when taccl was installed, or it failed"


def library() -> ctypes.CDLL | None:
    """The compiled code; None where there is none."""
    return _load()[0]


def why_not() -> str:
    """Why there is none; empty where there is."""
    return _load()[1]
