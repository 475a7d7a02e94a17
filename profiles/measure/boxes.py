"""Boxes in memory that the ranks of a node share, through which they hand each other messages of a measurement.

A rank shares one piece of memory, with a part for each of its peers. A part has two boxes: one for messages, one for
answers. A box has a few slots that are used in turn, so its messages keep their order; a message waits for a free slot.
What fits in the room of a slot is copied there. Of the rest a slot says where it lies; its receiver fetches it, and
says when it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from taccl.errors import RunFailed
from taccl.runtime import shared

if TYPE_CHECKING:
    from taccl.runtime.job import Job

SLOTS = 16  # of a box
# Cells of a slot, on cache lines of their own: the sender's number, length and address, and the receiver's number.
READY, LENGTH, ADDRESS, TAKEN, CELLS = 0, 1, 2, 8, 16
HEAD_BYTES = SLOTS * CELLS * 8

Array = np.ndarray[Any, Any]
Box = tuple[memoryview, memoryview, int]  # its cells, its rooms, and the bytes of one


class Fetch(Protocol):
    """What brings a message of one length here, time after time."""

    def start(self, where: int) -> bool:
        """Begin to fetch what lies there; whether that is all."""
        ...

    def done(self) -> bool:
        """Whether what was begun is done."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A part of two ranks' memory: of this rank for the peer and of the peer for this rank, (bytes,) uint8 each."""

    mine: Array
    theirs: Array
    process: int  # of the peer


def part_bytes(rooms: Sequence[int]) -> int:
    """Of a part whose boxes have slots with so much room."""
    return sum(HEAD_BYTES + SLOTS * room for room in rooms)


def share_parts(job: Job, sharing: Sequence[Sequence[int]], nbytes: int) -> dict[int, Part]:
    """A part of so many bytes with each peer; collective over the ranks of the job.

    sharing: of each rank those that it shares memory with, itself among them; if one has another, so it is the other
    way round.
    """
    peers = _peers(sharing, job.rank)
    mine = job.together("the sharing of memory", lambda: job.memory.empty(len(peers) * nbytes, np.uint8))
    place = job.memory.place(mine) if peers else None
    words = [0, 0, 0] if place is None else [place.process, place.fd, place.token]
    offers = job.gather_bytes(np.array(words, np.int64).view(np.uint8), "the sharing of memory").view(
        np.int64
    )

    def attach() -> dict[int, Part]:
        made = {}
        for number, peer in enumerate(peers):
            process, fd, token = offers[peer].tolist()
            around = _peers(sharing, peer)
            theirs = shared.attach(process, fd, token, len(around) * nbytes, write=True)
            first = around.index(job.rank) * nbytes
            made[peer] = Part(mine[number * nbytes :][:nbytes], theirs[first:][:nbytes], process)
        return made

    return job.together("the sharing of memory", attach)


def _peers(sharing: Sequence[Sequence[int]], rank: int) -> list[int]:
    return [peer for peer in sharing[rank] if peer != rank]


def boxes(part: Array, rooms: Sequence[int]) -> list[Box]:
    """The boxes of a part."""
    found, first = [], 0
    for room in rooms:
        box = part[first:][: HEAD_BYTES + SLOTS * room]
        found.append((box[:HEAD_BYTES].view(np.int64).data, box[HEAD_BYTES:].data, room))
        first += len(box)
    return found


class OutBox:
    """A box that this rank fills. lay: gives the place of a message that does not fit in a slot."""

    def __init__(self, box: Box, lay: Callable[[int], int]) -> None:
        self._cells, self._rooms, self._room = box
        self._lay = lay
        self._sent = 0
        self._waiting: deque[Send] = deque()

    def start(self, message: Send) -> None:
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
                cells[at + ADDRESS] = self._lay(length)
                message.slot, message.number = at, self._sent + 1
            cells[at + LENGTH] = length
            self._sent += 1
            # On x86 others see this store after the ones before it.
            cells[at + READY] = self._sent

    def taken(self, message: Send) -> bool:
        """Whether the receiver has it."""
        return message.number > 0 and self._cells[message.slot + TAKEN] >= message.number


class InBox:
    """A box that a peer fills."""

    def __init__(self, peer: int, box: Box) -> None:
        self._peer = peer
        self._cells, self._rooms, self._room = box
        self._received = 0
        self._expected: deque[Receive] = deque()

    def start(self, message: Receive) -> None:
        """Expect a message."""
        self._expected.append(message)

    def forget(self, message: Receive) -> None:
        """Expect it no longer."""
        if message in self._expected:
            self._expected.remove(message)

    def move(self) -> None:
        """Take what is there. Raises RunFailed for what is not expected, or cannot be fetched."""
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
            self._received += 1
            message.slot, message.number = at, self._received
            if length <= self._room:
                first = slot * self._room
                message.data[:] = self._rooms[first : first + length]
                self.take(message)
            elif message.fetch.start(cells[at + ADDRESS]):
                self.take(message)

    def take(self, message: Receive) -> None:
        """Tell the sender that a message is here."""
        self._cells[message.slot + TAKEN] = message.number
        message.done = True


class Send:
    """A message that leaves. It is done when a copy of it is in its slot, or its receiver has it."""

    def __init__(self, box: OutBox, data: Any) -> None:
        self._box, self.data = box, memoryview(data)
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


class Receive:
    """A message that comes."""

    def __init__(self, box: InBox, data: Any, fetch: Fetch) -> None:
        self._box, self.data, self.fetch = box, memoryview(data), fetch
        self.slot, self.number = 0, 0  # where it came, 0 as long as it has not
        self.done = True

    def Start(self) -> None:
        self.done, self.number = False, 0
        self._box.start(self)

    def Test(self) -> bool:
        if not self.done:
            self._box.move()
            if not self.done and self.number and self.fetch.done():
                self._box.take(self)
        return self.done

    def Free(self) -> None:
        self._box.forget(self)
