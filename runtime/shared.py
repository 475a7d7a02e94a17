"""Memory that the ranks of one node read from each other.

Every piece is an anonymous file in memory (memfd_create) of the rank that made it. It has no name in any folder, so
nothing of it is left, however its ranks end, and the size of /dev/shm is no limit. Another rank opens it as
/proc/PID/fd/FD, whose link must show the token that the maker has sent along.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.open_files import opened
from taccl.runtime.process_memory import address

Array = np.ndarray[Any, Any]

PAGE_BYTES = mmap.PAGESIZE
HUGE_BYTES = 2**21  # pieces from this size on ask for pages of it


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies, for other processes."""

    process: int
    fd: int
    token: int
    offset: int  # bytes, from the beginning of the piece


def why_not() -> str:
    """Why ranks cannot share memory on this system; empty when they can.

    Flags and data are plain stores in shared memory, which other processors see in order on x86 only.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the memory of {platform.machine()} processors does not keep the order of stores"
    if not hasattr(os, "memfd_create"):
        return "this system has no anonymous files in memory (memfd_create)"
    return ""


def try_out() -> str:
    """Why this process cannot make memory and open it as another one would; empty when it can."""
    if why := why_not():
        return why
    memory = SharedMemory()
    try:
        array = memory.empty(1, np.int64)
        place = memory.place(array)
        assert place is not None
        array[0] = 7
        seen = attach(place.process, place.fd, place.token, 8)[:8].view(np.int64)
    except EnvironmentProblem as problem:
        return str(problem)
    return "" if seen[0] == 7 else "memory that was opened a second time holds other data"


class SharedMemory:
    """This rank's pieces. A piece lives as long as an array in it."""

    def __init__(self) -> None:
        self._pieces: dict[int, tuple[int, int, int]] = {}  # fd -> (first address, past the last, token)

    def empty(self, elements: int, dtype: Any) -> Array:
        """(elements,) of a numpy type, zeros at first."""
        dtype = np.dtype(dtype)
        nbytes = elements * dtype.itemsize
        if nbytes == 0:
            return np.empty(0, dtype)
        token = secrets.randbits(62)
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        try:
            fd, raw = opened(lambda: _made(token, size))
        except OSError as error:
            raise EnvironmentProblem(f"no shared memory of {size} bytes: {error.strerror}") from error
        first = address(raw)
        self._pieces[fd] = (first, first + size, token)
        weakref.finalize(raw, self._forget, fd)
        return raw[:nbytes].view(dtype)

    def _forget(self, fd: int) -> None:
        del self._pieces[fd]
        os.close(fd)

    def place(self, array: Array) -> Place | None:
        """Where a contiguous array lies; None when it is not in a piece of this rank."""
        first = address(array)
        # A collector may drop one meanwhile, in any thread.
        for fd, (begin, end, token) in list(self._pieces.items()):
            if begin <= first and first + array.nbytes <= end:
                return Place(os.getpid(), fd, token, first - begin)
        return None


def attach(process: int, fd: int, token: int, least_bytes: int, write: bool = False) -> Array:
    """(bytes,) uint8: another rank's piece. Raises EnvironmentProblem when it is not what it should be."""
    path = f"/proc/{process}/fd/{fd}"

    def mapped() -> Array:
        if os.readlink(path) != f"/memfd:{_name(token)} (deleted)":
            raise EnvironmentProblem(f"process {process} does not hold the memory that it should share")
        file = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            if size < least_bytes:
                raise EnvironmentProblem(f"process {process} shares {size} bytes and should {least_bytes}")
            access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
            return np.frombuffer(_advised(mmap.mmap(file, size, access=access)), np.uint8)
        finally:
            os.close(file)

    try:
        return opened(mapped)
    except OSError as error:
        raise EnvironmentProblem(
            f"the memory of process {process} cannot be opened: {error.strerror}"
        ) from error


def _made(token: int, size: int) -> tuple[int, Array]:
    fd = os.memfd_create(_name(token))
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        os.ftruncate(fd, size)
        raw = np.frombuffer(_advised(mmap.mmap(fd, size)), np.uint8)
        undo.pop_all()
    return fd, raw


def _name(token: int) -> str:
    return f"taccl-{token:016x}"


def _advised(mapped: mmap.mmap) -> mmap.mmap:
    if len(mapped) >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
