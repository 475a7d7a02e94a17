"""Messages over TCP connections of our own, as a rank knows them (`runtime/tcp_link.py`).

Everything that passes has a head of 16 bytes: what it is and which message it is about, the number of the run, and how
many bytes follow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from taccl.errors import RunFailed
from taccl.runtime.codecs.codec import FrameError
from taccl.runtime.gates import Progress
from taccl.runtime.pace import Pace
from taccl.runtime.transport import HEAD_BYTES, used_bytes

if TYPE_CHECKING:
    from taccl.runtime.tcp_link import Link

HEAD = struct.Struct("<IIQ")
KINDS = 4
# LAST is the segment that ends a message, OPEN says that a gate of a message opens.
SEGMENT, LAST, READY, OPEN = range(KINDS)
MOST_TAGS = 2**32 // KINDS
RUNS = 2**32  # numbers of runs, which then begin anew

DAMAGED = "the length of a message of frames is damaged"
SHORT = "it is shorter than its receive"


class Word(NamedTuple):
    """What a rank says when a part of a message has come to it: that a gate opens of the message with that number among
    those with gates of a peer, or of its own (None)."""

    part: float
    peer: int | None
    number: int


S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Messages(Generic[S, R]):
    """Those of a program with one peer, by tag, and how those to it are cut."""

    sends: Mapping[int, S]
    receives: Mapping[int, R]
    pace: Pace


class Outgoing:
    """A message to a peer. array: of uint8. place: the least goes first. gates: that must open before it begins."""

    __slots__ = (
        "_array", "_bytes", "_count", "_gates", "_link", "_open", "_ready", "_run", "_sized", "done", "eager", "left",
        "place", "tag",
    )  # fmt: skip

    def __init__(
        self, link: Link, array: Any, tag: int, place: int, sized: bool, eager: bool, gates: int
    ) -> None:
        self._link = link
        self._array, self._bytes, self._sized, self._gates = array, memoryview(array), sized, gates
        self.tag, self.place, self.eager = tag, place, eager
        self._ready = -1  # the run for which the receiver is ready
        self._open = (-1, 0)  # gates that are open, and in which run
        self._run = -1  # in which it was started
        self._count = self.left = 0
        self.done = False

    def start(self) -> None:
        """The executor starts it. Raises FrameError for a damaged length of frames."""
        self._count = self.left = used_bytes(self._array) if self._sized else len(self._array)
        self._run = self._link.run
        self._go()

    def starts(self) -> Callable[[], None]:
        """What starts it."""
        return self.start

    def _begun(self) -> bool:
        return self._run == self._link.run

    def held(self) -> bool:
        """Whether it is started and some of its gates are closed."""
        return self._begun() and self._waits()

    def _waits(self) -> bool:
        return self._gates > 0 and (self._open[0] != self._link.run or self._open[1] < self._gates)

    def _go(self) -> None:
        wanted = self.eager or self._ready == self._link.run
        if wanted and self._begun() and not self._waits():
            self._link.send(self)

    def receiver_ready(self) -> bool:
        """A word says so. Whether it was to be said."""
        if self.eager or self._ready == self._link.run:
            return False
        self._ready = self._link.run
        self._go()
        return True

    def open(self) -> None:
        """One of its gates opens."""
        waited, run = self._waits(), self._link.run
        self._open = (run, self._open[1] + 1 if self._open[0] == run else 1)
        if waited:
            self._go()

    @property
    def whole(self) -> bool:
        """Whether nothing of it has been sent."""
        return self.left == self._count

    def segment(self, most: int) -> memoryview:
        """Its next bytes; `left` says how many are left after them."""
        first = self._count - self.left
        length = min(most, self.left)
        self.left -= length
        return self._bytes[first : first + length]


class Incoming:
    """A message from a peer. array: of uint8. words: that are said when parts of it have come."""

    __slots__ = (
        "_array", "_landed", "_link", "_progress", "_room", "_run", "_sized", "_tag", "_target", "arrived", "done",
        "eager",
    )  # fmt: skip

    def __init__(
        self, link: Link, array: Any, tag: int, sized: bool, eager: bool, words: Sequence[Word]
    ) -> None:
        self._link, self._array, self._tag, self._sized, self.eager = link, array, tag, sized, eager
        self._progress = Progress([(word.part, link.teller(word)) for word in words]) if words else None
        # A short message may come before its receive is started, and lands there.
        self._room: Any = None
        self._target = array
        self.arrived = 0
        self._run = self._landed = -1  # in which it was started, and came
        self.done = False

    def start(self) -> None:
        """The executor starts it; it may have come already."""
        self._run = self._link.run
        if self._landed == self._run:
            self._finish()
        elif not self.eager:
            self._link.say(READY, self._tag)

    def starts(self) -> Callable[[], None]:
        """What starts it."""
        return self.start

    def room(self, nbytes: int) -> memoryview | None:
        """Where the next segment belongs; None where it is none of this message."""
        run = self._link.run
        if self._landed == run or nbytes > len(self._array) - self.arrived:
            return None
        if self._run != run:
            if not self.eager:
                return None
            if not self.arrived:
                if self._room is None:
                    self._room = np.empty(len(self._array), np.uint8)
                self._target = self._room
        return memoryview(self._target.data)[self.arrived : self.arrived + nbytes]

    def took(self, nbytes: int, last: bool) -> None:
        """A segment has come. Raises FrameError for a damaged length of frames, RunFailed for a message that is shorter
        than its receive."""
        self.arrived += nbytes
        if self._progress is not None:
            self._progress.reached(self.arrived, len(self._array))
        if not last:
            return
        if self._sized and (self.arrived < HEAD_BYTES or used_bytes(self._target) != self.arrived):
            raise FrameError(DAMAGED)
        if not self._sized and self.arrived != len(self._array):
            raise RunFailed(SHORT)
        self._landed = self._link.run
        if self._run == self._landed:
            self._finish()

    def _finish(self) -> None:
        if self._target is self._room:
            self._array[: self.arrived] = self._room[: self.arrived]
            self._target = self._array
        self.arrived = 0
        if self._progress is not None:
            self._progress.begin()
        self.done = True
        self._link.finished()
