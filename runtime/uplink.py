"""When the uplinks of a node are free: a clock for each, which its ranks share.

What ranks hand to the kernel stands in the queue of their node's uplink, in the order in which it came. Behind it
stand words of other ranks, confirmations of what comes the other way, and messages that the program has before those
that began a moment earlier. So a segment is handed over only when what was handed over before has left, but for a
little; what waits, waits with its rank, where the program's order counts.

Nobody locks a clock. Where two ranks set it at once one segment is forgotten, and the queue is a little longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.process_memory import address
from taccl.runtime.shared import attach

if TYPE_CHECKING:
    from taccl.runtime.job import Job, Neighbours

MOST_UPLINKS = 64  # of a node
QUEUE_NS = 4_000_000  # what an uplink has left to do when it gets more: longer than a rank takes to wake up
MOST_NS = 10**9  # that a clock is ahead; more is a mistake

# (number of an uplink among those of its node, bytes that it passes in a second)
Uplink = tuple[int, int]


class Uplinks:
    """The clocks of this rank's node."""

    def __init__(self) -> None:
        # By the monotonic clock, which a node has once.
        self._free_ns: Any = np.zeros(MOST_UPLINKS, np.int64).data

    def meet(self, job: Job, neighbours: Neighbours) -> None:
        """Share them with the ranks of this node that share memory; collective."""
        where = (0, 0, 0, 0)
        with contextlib.suppress(EnvironmentProblem):  # or ranks of this node share nothing
            mine = job.memory.empty(MOST_UPLINKS, np.int64)
            if place := job.memory.place(mine):
                where = (place.process, place.fd, place.token, place.offset)
                self._free_ns = mine.data
        told = np.array(where, np.int64).view(np.uint8)
        everyone = job.gather_bytes(told, "the exchange of clocks").view(np.int64)
        first = min(neighbours.sharing[job.rank], default=job.rank)
        process, fd, token, offset = everyone[first].tolist()
        if first != job.rank and process:
            end = offset + 8 * MOST_UPLINKS
            with contextlib.suppress(OSError, EnvironmentProblem):  # this rank keeps its own
                self._free_ns = attach(process, fd, token, end, write=True)[offset:end].view(np.int64).data

    @property
    def at(self) -> int:
        """The address of the clocks."""
        return address(np.asarray(self._free_ns))

    def due_ns(self, uplinks: Sequence[Uplink], now_ns: int) -> int:
        """When a segment may leave over all of these."""
        due_ns = now_ns
        for number, _ in uplinks:
            free_ns = min(int(self._free_ns[number]), now_ns + MOST_NS)
            due_ns = max(due_ns, free_ns - QUEUE_NS)
        return due_ns

    def take(self, uplinks: Sequence[Uplink], nbytes: int, now_ns: int) -> None:
        """So many bytes leave over all of these."""
        for number, bytes_per_s in uplinks:
            begin_ns = min(max(int(self._free_ns[number]), now_ns), now_ns + MOST_NS)
            self._free_ns[number] = begin_ns + nbytes * 10**9 // bytes_per_s
