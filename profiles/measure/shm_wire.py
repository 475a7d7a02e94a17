"""Messages of a measurement between ranks of one node, which go as those of programs do there (`runtime/shm.py`):
short ones as a copy in shared memory, long ones are read by their receiver from the sender's memory.

A rank shares one piece of memory, with a part for each of its peers. A part has two boxes: one for messages, one for
answers. A box has a few slots that are used in turn, so its messages keep their order; a message waits for a free slot.

What a collective moves is seldom in the caches, and a copy from cache to cache is several times as quick as one that
the memory takes part in. So long messages have no place of their own: each lies behind the one before it, in a stretch
of memory that is longer than caches are.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from taccl.errors import RunFailed
from taccl.runtime import shared
from taccl.runtime.process_memory import address, reader
from taccl.runtime.shm import READ_BYTES

if TYPE_CHECKING:
    from taccl.profiles.measure.wires import Request, Wire
    from taccl.runtime.job import Job, Neighbours

SLOTS = 16  # of a box
# Cells of a slot, on cache lines of their own: the sender's number, length and address, and the receiver's number.
READY, LENGTH, ADDRESS, TAKEN, CELLS = 0, 1, 2, 8, 16
ROOMS = (READ_BYTES, 64)  # bytes of a slot of each box
HEAD_BYTES = SLOTS * CELLS * 8
BOX_BYTES = tuple(HEAD_BYTES + SLOTS * room for room in ROOMS)
PART_BYTES = sum(BOX_BYTES)
STRETCH_BYTES = 64 * 2**20

Array = np.ndarray[Any, Any]


def needed_bytes(ranks: int) -> int:
    """Memory that the messages among so many ranks of a node take at most."""
    return ranks * ((ranks - 1) * PART_BYTES + 2 * STRETCH_BYTES)


def wires(job: Job, found: Neighbours, tags: tuple[int, int]) -> dict[int, Wire]:
    """To each rank that this one shares memory with; collective over the ranks of the job.

    found: who shares memory with whom, and whether ranks read each other's. tags: of messages, and of answers.
    """
    node = found.sharing[job.rank]
    peers = [rank for rank in node if rank != job.rank]

    def make() -> Array:
        return job.memory.empty(len(peers) * PART_BYTES, np.uint8)

    mine = job.together("the sharing of memory", make)
    place = job.memory.place(mine) if peers else None
    record = (
        np.zeros(3, np.int64) if place is None else np.array([place.process, place.fd, place.token], np.int64)
    )
    offers = job.gather_bytes(record.view(np.uint8), "the sharing of memory").view(np.int64)

    def attach() -> dict[int, Wire]:
        made: dict[int, Wire] = {}
        places = _Stretch(), _Stretch()
        for number, peer in enumerate(peers):
            process, fd, token = offers[peer].tolist()
            theirs = shared.attach(process, fd, token, (len(node) - 1) * PART_BYTES, write=True)
            first = [rank for rank in node if rank != peer].index(job.rank) * PART_BYTES
            parts = mine[number * PART_BYTES :][:PART_BYTES], theirs[first:][:PART_BYTES]
            made[peer] = ShmWire(peer, process, parts, places, tags)
        return made

    return job.together("the sharing of memory", attach)


class ShmWire:
    """Messages to and from one peer. process: of the peer. parts: (PART_BYTES,) uint8 that both have, of this rank and
    of the peer. places: of long messages that leave, and that come."""

    def __init__(
        self,
        peer: int,
        process: int,
        parts: tuple[Array, Array],
        places: tuple[_Stretch, _Stretch],
        tags: tuple[int, int],
    ) -> None:
        outgoing, incoming = (_boxes(part) for part in parts)
        self._out = dict(zip(tags, (_Out(*box, places[0]) for box in outgoing), strict=True))
        self._in = dict(zip(tags, (_In(peer, process, *box, places[1]) for box in incoming), strict=True))

    def sender(self, data: Any, tag: int) -> Request:
        return _Send(self._out[tag], data)

    def receiver(self, data: Any, tag: int) -> Request:
        return _Receive(self._in[tag], data)


class _Stretch:
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


def _boxes(part: Array) -> list[tuple[memoryview, memoryview, int]]:
    """Of each box of a part its cells, its rooms, and the bytes of one."""
    found, first = [], 0
    for room, length in zip(ROOMS, BOX_BYTES, strict=True):
        box = part[first : first + length]
        found.append((box[:HEAD_BYTES].view(np.int64).data, box[HEAD_BYTES:].data, room))
        first += length
    return found


class _Out:
    """A box that this rank fills."""

    def __init__(self, cells: memoryview, rooms: memoryview, room: int, stretch: _Stretch) -> None:
        self._cells, self._rooms, self._room, self.stretch = cells, rooms, room, stretch
        self._sent = 0
        self._waiting: deque[_Send] = deque()

    def start(self, message: _Send) -> None:
        """Put a message into the next slot, behind those that wait for one."""
        self._waiting.append(message)
        self.move()

    def move(self) -> None:
        """Fill slots that are free."""
        cells = self._cells
        while self._waiting:
            slot = self._sent % SLOTS
            at = slot * CELLS
            if cells[at + TAKEN] < self._sent - SLOTS + 1:
                return
            message = self._waiting.popleft()
            length = len(message.data)
            if length <= self._room:
                first = slot * self._room
                self._rooms[first : first + length] = message.data
                message.done = True
            else:
                cells[at + ADDRESS] = address(self.stretch.place(length))
                message.slot, message.number = at, self._sent + 1
            cells[at + LENGTH] = length
            self._sent += 1
            # On x86 others see this store after the ones before it.
            cells[at + READY] = self._sent

    def taken(self, message: _Send) -> bool:
        """Whether the receiver has read it."""
        return message.number > 0 and self._cells[message.slot + TAKEN] >= message.number


class _In:
    """A box that a peer fills."""

    def __init__(
        self, peer: int, process: int, cells: memoryview, rooms: memoryview, room: int, stretch: _Stretch
    ) -> None:
        self._peer, self._process, self._cells, self._rooms, self._room = peer, process, cells, rooms, room
        self.stretch = stretch
        self._received = 0
        self._expected: deque[_Receive] = deque()

    def start(self, message: _Receive) -> None:
        """Expect a message."""
        self._expected.append(message)

    def forget(self, message: _Receive) -> None:
        """Expect it no longer."""
        if message in self._expected:
            self._expected.remove(message)

    def move(self) -> None:
        """Take what is there. Raises RunFailed for what is not expected, or cannot be read."""
        cells = self._cells
        while self._expected:
            slot = self._received % SLOTS
            at = slot * CELLS
            if cells[at + READY] <= self._received:
                return
            message = self._expected.popleft()
            length = len(message.data)
            if cells[at + LENGTH] != length:
                raise RunFailed(
                    f"rank {self._peer} sends {cells[at + LENGTH]} bytes where {length} are expected; give every rank "
                    "the same taccl"
                )
            if length <= self._room:
                first = slot * self._room
                message.data[:] = self._rooms[first : first + length]
            else:
                reader(self._peer, self._process, cells[at + ADDRESS], self.stretch.place(length))()
            self._received += 1
            cells[at + TAKEN] = self._received
            message.done = True


class _Send:
    """A message that leaves. It is done when a copy of it is in its slot, or its receiver has read it."""

    def __init__(self, box: _Out, data: Any) -> None:
        self._box, self.data = box, memoryview(data)
        box.stretch.reach(len(data))
        self.slot, self.number = 0, 0
        self.done = True

    def Start(self) -> None:
        self.done, self.number = False, 0
        self._box.start(self)

    def Test(self) -> bool:
        if not self.done:
            self._box.move()
            self.done = self.done or self._box.taken(self)
        return self.done

    def Free(self) -> None:
        return


class _Receive:
    """A message that comes."""

    def __init__(self, box: _In, data: Any) -> None:
        self._box, self.data = box, memoryview(data)
        box.stretch.reach(len(data))
        self.done = True

    def Start(self) -> None:
        self.done = False
        self._box.start(self)

    def Test(self) -> bool:
        if not self.done:
            self._box.move()
        return self.done

    def Free(self) -> None:
        self._box.forget(self)
