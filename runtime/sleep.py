"""Sleep until something comes, from another node or from a rank of this one.

A rank that waits asks the kernel to wake it for its connections. Ranks of its node write flags into its memory, of
which the kernel knows nothing; so a rank that is about to sleep says so in a cell that they read, looks at its flags
once more, and sleeps. Who sets a flag and finds the cell set writes a byte into the sleeper's pipe. What comes
otherwise, as a part of a message, may end nothing: compiled code moves it without waking anybody, its twin wakes the
rank, which sleeps again at once, for the cell is still set.

The cell may be read before the flag is seen, since processors delay stores. Then nobody wakes the sleeper, which wakes
by itself after a moment.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.process_memory import address
from taccl.runtime.shared import SharedMemory, attach

if TYPE_CHECKING:
    from taccl.runtime.job import Job, Neighbours
    from taccl.runtime.tcp_links import Links
    from taccl.runtime.tcp_native import NativeLinks

# Empty polls before a rank sleeps, where each has a core of its own; before the last one it says that it does.
LOOKS = 5
LOOKS_OF_MANY = 1  # where ranks share cores
MOST_S = 0.02  # of a sleep
BLIND_S = 0.001  # where a rank of the node cannot wake this one


@dataclass(frozen=True, slots=True)
class Bell:
    """How a rank of this node is woken. cell: says whether it sleeps. pipe: a file that wakes it."""

    cell: Any  # (1,) int64
    pipe: int

    def ring(self) -> None:
        """Wake it if it sleeps."""
        if self.cell[0]:
            with contextlib.suppress(OSError):  # the pipe is full: it wakes anyway; or the rank has ended
                os.write(self.pipe, b"\0")

    @property
    def cell_at(self) -> int:
        """The address of the cell."""
        return address(np.asarray(self.cell))


class Sleeper:
    """What an executor does when it finds nothing. links: its connections."""

    def __init__(self, links: Links | NativeLinks, memory: SharedMemory, own_core: bool) -> None:
        self.armed = False  # it sleeps when it is called again
        self.bells: dict[int, Bell] = {}
        self._links = links
        self._looks = LOOKS if own_core else LOOKS_OF_MANY
        self._memory = memory
        try:
            self._cells = memory.empty(8, np.int64)  # a cache line
        except EnvironmentProblem:  # then the ranks of this node share nothing
            self._cells = np.zeros(8, np.int64)
        self._cell = self._cells.data
        self._inside, self._outside = os.pipe()
        os.set_blocking(self._inside, False)
        os.set_blocking(self._outside, False)
        links.poller.register(self._inside, select.EPOLLIN)
        self._most_s = MOST_S
        self._left: Callable[[], int] = _nothing
        self._seen = -1
        self._count = 0

    def meet(self, job: Job, neighbours: Neighbours) -> None:
        """Let the ranks of the node wake each other; collective."""
        place = self._memory.place(self._cells)
        where = (0, 0, 0, 0) if place is None else (place.process, place.fd, place.token, place.offset)
        mine = np.array([*where, self._outside], np.int64)
        everyone = job.gather_bytes(mine.view(np.uint8), "the exchange of bells").view(np.int64)
        deaf = False
        for peer in neighbours.sharing[job.rank]:
            if peer == job.rank:
                continue
            process, fd, token, offset, pipe = everyone[peer].tolist()
            try:
                cells = attach(process, fd, token, offset + 8)[offset : offset + 8]
                self.bells[peer] = Bell(cells.view(np.int64).data, _open(process, pipe))
            except (OSError, EnvironmentProblem):
                deaf = True
        # Who cannot wake all others makes them wake by themselves.
        others = job.gather_bytes(np.array([deaf], np.uint8), "the trial of bells")[:, 0]
        if any(others[peer] for peer in neighbours.sharing[job.rank]):
            self._most_s = BLIND_S

    def watch(self, left: Callable[[], int]) -> None:
        """left: falls with progress, after which a rank looks a few times before it sleeps again."""
        self._left, self._seen = left, -1

    def forget(self) -> None:
        """What was watched is done."""
        self._left = _nothing
        self._awake()

    def __call__(self) -> None:
        left = self._left()
        if left != self._seen:
            self._seen, self._count = left, 0
            self._awake()
        self._count += 1
        if not self.armed:
            if self._count >= self._looks:
                self.armed = True
                self._cell[0] = 1
            os.sched_yield()
        elif self._links.wait(self._most_s):
            with contextlib.suppress(BlockingIOError):
                os.read(self._inside, 4096)
            self._awake()

    def _awake(self) -> None:
        if self.armed:
            self.armed = False
            self._cell[0] = 0

    def close(self) -> None:
        """Nobody rings any more."""
        for at in (self._inside, self._outside, *(bell.pipe for bell in self.bells.values())):
            os.close(at)
        self.bells.clear()


def _nothing() -> int:
    return 0


def _open(process: int, pipe: int) -> int:
    """The writing end of another process's pipe."""
    found = os.open(f"/proc/{process}/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(found).st_mode):
        os.close(found)
        raise OSError("it is no pipe")
    return found
