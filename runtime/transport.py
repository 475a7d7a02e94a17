"""What a way to move messages between ranks must offer; one file implements it for each way.

A transport is bound together with a program, in two steps. First every send is registered, and `offer` gives what
the other ranks must know of them; all ranks exchange their offers (`connect`), and then every receive is registered.
A message belongs to a port, which the executor asks for finished messages. Messages of several ports may meet in one
run: shared memory to the ranks of one node, TCP or MPI to the others.

A sized message has another length in each run, up to that of its array, and begins with a head of two words: its bytes,
head included, and the same number with all bits turned round, because a wrong length must not make a rank wait for what
never comes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from taccl.runtime.codecs.codec import FrameError

if TYPE_CHECKING:
    from taccl.runtime.sleep import Sleeper
    from taccl.runtime.streams import Lane

OFFER_WORDS = 9  # int64 numbers that a rank tells all others when its sends are registered
HEAD = struct.Struct("<QQ")  # of a sized message: its length, and all bits of it turned
HEAD_BYTES = HEAD.size
ALL_BITS = 2**64 - 1


def used_bytes(array: Any, room: int | None = None) -> int:
    """Bytes of a sized message in an array of uint8, or in one of `room` bytes of which this has the head. Raises
    FrameError for a damaged head."""
    used, turned = HEAD.unpack_from(array.data)
    if used ^ turned != ALL_BITS or not HEAD_BYTES <= used <= (len(array) if room is None else room):
        raise FrameError("the length of a message of frames is damaged")
    return int(used)


def write_head(array: Any, used: int) -> None:
    """Say how long a sized message is."""
    HEAD.pack_into(array.data, 0, used, used ^ ALL_BITS)


def take_done(tokens: Sequence[Any]) -> list[int]:
    """Places of the messages that are `done`, which then are not any more: each is told once. None: no message."""
    found = [place for place, token in enumerate(tokens) if token is not None and token.done]
    for place in found:
        tokens[place].done = False
    return found


class Port(Protocol):
    """Asked for finished messages."""

    idle: Any  # a token of no message
    # A port may have `news`: how many messages are finished that `poll` has not told since nobody asked for them.

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        """Places in the list of started messages that are finished; each is given once a run. Never waits."""


@dataclass(frozen=True, slots=True)
class Native:
    """How compiled code does a message through the memory of a node: addresses, 0 where there is none.

    Pairs are of runs of an even and of an odd number.
    """

    epoch: memoryview  # (1,) int64, the number of the run
    ranks: int  # that share the memory
    wait: int  # the flag that says that it has arrived, or that the receiver has read it
    tell: int = 0  # the flag that tells the receiver
    release: int = 0  # the flag that tells the sender that its memory was read
    room: tuple[int, int] = (0, 0)  # where the sender puts a copy
    source: tuple[int, int] = (0, 0)  # where a receiver finds the data
    process: int = 0  # from whose memory the kernel reads them
    lasting: bool = False  # they stay there until the end of the run
    bell: tuple[int, int] = (
        0,
        -1,
    )  # of the peer: the cell that says that it sleeps, and the pipe that wakes it


@dataclass(frozen=True, slots=True)
class Message:
    """A registered send or receive; it can be started once in every run."""

    port: Port | None  # None: it is finished when `start` returns
    token: Any  # what the port's `poll` knows it by
    start: Callable[[], object] | None  # None: there is nothing to do
    # Of a receive whose data can be read where the sender has them, once it is finished: an array of that place, and
    # what tells the sender that they were read. Otherwise the data lie in the array that was registered, after a call
    # of `take` where there is one.
    view: Any = None
    release: Callable[[], object] | None = None
    # Of such a receive of a sized message on a device: its bytes, once it is finished; puts them into the lane's head.
    used: Callable[[], int] | None = None
    take: Callable[[], object] | None = None
    # Of a receive over a transport that is buffered: whether it is finished, and where its data then lie until the end
    # of the run, which operations may read there instead of a call of `take`.
    arrived: Callable[[], bool] | None = None
    lies: Callable[[], Any] | None = None
    free: Callable[[], object] | None = None
    # Of a send whose transport knows: whether it is started and waits for its turn on an uplink.
    held: Callable[[], bool] | None = None
    # Of a send whose transport knows: whether what carries it has nothing else to carry now. Those that share what
    # carries them have the same one.
    wanted: Callable[[], bool] | None = None
    # Of a receive in device memory: finished means that the last of its work is on the lane's stream and recorded.
    queued: bool = False
    # What compiled code has to know of it, when the ranks are connected.
    native: Callable[[], Native] | None = None


class Transport(Protocol):
    """Moves arrays between ranks. Tags number the messages of an ordered pair of ranks from 0."""

    name: str
    # Whether each message of all ranks is short and finished for its sender when it is started; known when connected.
    buffered: bool

    @property
    def sleeper(self) -> Sleeper | None:
        """What a rank does that waits, where the transport has such."""

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        """Register a message from this contiguous array; a sized one of uint8. lane: given on devices only."""

    def offer(self) -> np.ndarray[Any, Any]:
        """(OFFER_WORDS,) int64 for the other ranks, after the last `send`."""

    def connect(self, offers: np.ndarray[Any, Any]) -> None:
        """Take the (ranks, OFFER_WORDS) offers of all ranks, before the first `recv`."""

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        """Register a message into this contiguous array."""

    def begin(self) -> str:
        """Begin a run; all messages of the last one are finished on this rank. When it cannot begin yet, what it waits
        for; it is called again then. A transport inside another one may be asked again after it has begun."""

    def end(self) -> None:
        """All messages of the run are finished on this rank."""

    def close(self) -> None:
        """Give up what the transport holds; its messages are freed before."""


class Plain:
    """What a transport inherits whose ranks need to know nothing of each other and whose runs leave nothing behind."""

    buffered = False
    sleeper: Sleeper | None = None

    def offer(self) -> np.ndarray[Any, Any]:
        """Zeros."""
        return np.zeros(OFFER_WORDS, np.int64)

    def connect(self, offers: np.ndarray[Any, Any]) -> None:
        """Messages are matched by rank and tag."""

    def begin(self) -> str:
        """A run can always begin."""
        return ""

    def end(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to give up."""
