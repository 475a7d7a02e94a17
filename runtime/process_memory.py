"""Memory of other processes of this host, read by the kernel (process_vm_readv).

It copies once from one process's memory to another's. The kernel allows it among processes of one user unless a
security module forbids it (Yama's ptrace_scope, containers' filters of system calls), so ranks try it before they count
on it. Memory of devices and secret memory is nobody's to read, so a rank tries its own arrays, too.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from taccl.errors import RunFailed
from taccl.runtime import native

PART = "the kernel has read a part only"
MOST_BYTES = 2**30  # of a call; the kernel reads at most 2 GiB less a page


class Span(ctypes.Structure):
    """The struct iovec of C."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _function() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if found is not None:
        found.restype = ctypes.c_ssize_t
        span = ctypes.POINTER(Span)
        found.argtypes = (ctypes.c_int, span, ctypes.c_ulong, span, ctypes.c_ulong, ctypes.c_ulong)
    return found


_readv = _function()
_BYTE = np.dtype(np.uint8)
_first_byte: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer


def address(array: np.ndarray[Any, Any]) -> int:
    """Where an array begins in this process's memory."""
    # A third of what numpy's own description takes, but not for arrays that are empty, strided, or not to be written.
    try:
        return ctypes.addressof(_first_byte(array if array.dtype is _BYTE else array.view(_BYTE)))
    except (TypeError, ValueError):
        return int(array.__array_interface__["data"][0])


def reader(rank: int, process: int, source: int, target: np.ndarray[Any, Any]) -> Callable[[], None]:
    """What copies target.nbytes bytes at the address `source` of a rank's process into a contiguous array.

    The call raises RunFailed where the kernel does not read all of them.
    """
    parts, compiled = _parts(source, target), _compiled(process, source, target)

    def read() -> None:  # it keeps the target, of which parts only have addresses
        if why := _read(process, parts) if compiled is None else compiled():
            if why == os.strerror(errno.ESRCH):
                raise RunFailed(f"rank {rank} has died (killed or crashed)")
            what = f"{target.nbytes} bytes of rank {rank} (process {process})"
            raise RunFailed(f"{what} cannot be read: {why}")

    return read


def _compiled(process: int, source: int, target: np.ndarray[Any, Any]) -> Callable[[], str] | None:
    """What reads by compiled code, which knows places where the kernel alone crawls, and says what went wrong."""
    found = native.library()
    if found is None:
        return None
    places = ctypes.c_void_p(address(target)), ctypes.c_void_p(source)
    call = functools.partial(found.taccl_read, process, *places, ctypes.c_size_t(target.nbytes), 0)

    def read() -> str:
        code = call()
        return PART if code < 0 else os.strerror(code) if code else ""

    return read


def readable(array: np.ndarray[Any, Any]) -> bool:
    """Whether the kernel reads the first and the last byte of a contiguous array of this process."""
    found, begin = np.zeros(1, np.uint8), address(array)
    return _readv is not None and not any(
        _read(os.getpid(), _parts(place, found)) for place in (begin, begin + array.nbytes - 1)
    )


def why_not(process: int, source: int, expected: int) -> str:
    """Why an int64 at an address of a process cannot be read, or is not the expected one; empty when it is."""
    if _readv is None:
        return "this system has no process_vm_readv"
    found = np.zeros(1, np.int64)
    if why := _read(process, _parts(source, found)):
        return f"process_vm_readv: {why}"
    return "" if found[0] == expected else "other ranks' processes have other numbers here"


def _parts(source: int, target: np.ndarray[Any, Any]) -> list[tuple[Any, Any, int]]:
    """Of each call where it writes, where it reads, and the bytes."""
    begin, left = address(target), target.nbytes
    parts = []
    while left:
        length = min(left, MOST_BYTES)
        parts.append((ctypes.byref(Span(begin, length)), ctypes.byref(Span(source, length)), length))
        begin, source, left = begin + length, source + length, left - length
    return parts


def _read(process: int, parts: list[tuple[Any, Any, int]]) -> str:
    """What went wrong; empty when all was read."""
    for here, there, length in parts:
        read = _readv(process, here, 1, there, 1, 0)
        if read < 0:
            return os.strerror(ctypes.get_errno())
        if read != length:
            # Asked for what comes next, the kernel says why it stopped.
            begin, source = here._obj.base + read, there._obj.base + read
            rest = ctypes.byref(Span(begin, 1)), ctypes.byref(Span(source, 1))
            stopped = _readv(process, rest[0], 1, rest[1], 1, 0) < 0
            return os.strerror(ctypes.get_errno()) if stopped else PART
    return ""
