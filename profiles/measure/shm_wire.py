"""Messages of a measurement between ranks of one node, which go as those of programs do there (`runtime/shm.py`):
short ones as a copy in shared memory (`boxes.py`), long ones are read by their receiver from the sender's memory.

What a collective moves is seldom in the caches, and a copy from cache to cache is several times as quick as one that
the memory takes part in. So long messages have no place of their own: each lies behind the one before it, in a stretch
of memory that is longer than caches are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from taccl.profiles.measure.boxes import (
    InBox,
    OutBox,
    Part,
    Receive,
    Send,
    boxes,
    part_bytes,
    share_parts,
)
from taccl.runtime.process_memory import address, reader
from taccl.runtime.shm import READ_BYTES

if TYPE_CHECKING:
    from taccl.profiles.measure.wires import Request, Wire
    from taccl.runtime.job import Job, Neighbours

ROOMS = (READ_BYTES, 64)  # bytes of a slot of each box
PART_BYTES = part_bytes(ROOMS)
STRETCH_BYTES = 64 * 2**20

Array = np.ndarray[Any, Any]


def needed_bytes(ranks: int, largest_bytes: int = 0) -> int:
    """Memory that the messages among so many ranks of a node take at most, the longest of so many bytes."""
    return ranks * ((ranks - 1) * PART_BYTES + 2 * max(STRETCH_BYTES, largest_bytes))


def wires(job: Job, found: Neighbours, tags: tuple[int, int]) -> dict[int, Wire]:
    """To each rank that this one shares memory with; collective over the ranks of the job.

    found: who shares memory with whom, and whether ranks read each other's. tags: of messages, and of answers.
    """
    places = Stretch(), Stretch()
    parts = share_parts(job, found.sharing, PART_BYTES)
    return {peer: ShmWire(peer, part, places, tags) for peer, part in parts.items()}


class ShmWire:
    """Messages to and from one peer. part: PART_BYTES that both have. places: of long messages that leave, and that
    come."""

    def __init__(self, peer: int, part: Part, places: tuple[Stretch, Stretch], tags: tuple[int, int]) -> None:
        self._peer, self._process, self._places = peer, part.process, places
        outgoing, incoming = boxes(part.mine, ROOMS), boxes(part.theirs, ROOMS)
        self._out = dict(zip(tags, (OutBox(box, places[0].lay) for box in outgoing), strict=True))
        self._in = dict(zip(tags, (InBox(peer, box) for box in incoming), strict=True))

    def sender(self, data: Any, tag: int) -> Request:
        self._places[0].reach(len(data))
        return Send(self._out[tag], data)

    def receiver(self, data: Any, tag: int) -> Request:
        self._places[1].reach(len(data))
        return Receive(self._in[tag], data, _Read(self._peer, self._process, len(data), self._places[1]))


class _Read:
    """Reads a message of the peer's memory, which the kernel does at once."""

    def __init__(self, peer: int, process: int, nbytes: int, stretch: Stretch) -> None:
        self._peer, self._process, self._nbytes, self._stretch = peer, process, nbytes, stretch

    def start(self, where: int) -> bool:
        reader(self._peer, self._process, where, self._stretch.place(self._nbytes))()
        return True

    def done(self) -> bool:
        return True


class Stretch:
    """Memory in which long messages lie one behind the other."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._next = 0

    def reach(self, nbytes: int) -> None:
        """Have room for messages of so many bytes. All pages are touched, before a clock runs."""
        wanted = max(STRETCH_BYTES, nbytes) if nbytes > READ_BYTES else 0
        if wanted > len(self._memory):
            self._memory, self._next = np.full(wanted, 1, np.uint8), 0

    def place(self, nbytes: int) -> Array:
        """Where the next message lies."""
        if self._next + nbytes > len(self._memory):
            self._next = 0
        first = self._next
        self._next += nbytes
        return self._memory[first : self._next]

    def lay(self, nbytes: int) -> int:
        """The address of that."""
        return address(self.place(nbytes))
