"""Where a rank's values are while a schedule is lowered: buffers, addresses, runs of neighbours.

Inputs are in `i`, results in `o`, all else in scratch `s`. A rank may hold several sums of a chunk. Sums to which the
same was added share an address; those to which nothing was added yet are the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from taccl.synth.algorithm import Algorithm, Message
from taccl.synth.cost import Costs

MAX_COUNT = 71  # chunks a step can carry (MSCCL)

Address = tuple[str, int]  # (buffer, offset)
Item = TypeVar("Item")


class Memory:
    """Where a rank's values are, and who touched which cell last."""

    def __init__(self, inplace: tuple[int, int] | None) -> None:
        self.inplace = inplace
        self.pieces: list[tuple[int, int, tuple[int, ...]]] = []  # of scratch: (offset, length, beginning)
        self.own: dict[int, Address] = {}  # chunk -> the rank's own contribution
        self.at: dict[int, Address] = {}  # chunk -> where its present value (its sum 0) is
        self.beside: dict[tuple[int, int], Address] = {}  # (chunk, further sum) -> where it is, once entered
        self.also: dict[int, Address] = {}  # chunk -> the copy in `o` of a value that is also in `i`
        self.writer: dict[Address, int] = {}
        self.first: dict[Address, int] = {}  # who wrote it first
        self.readers: dict[Address, list[int]] = {}

    def place(self, chunk: int, number: int) -> Address | None:
        """Where a sum of a chunk is; before anything has entered it, the rank's own contribution, if it has one."""
        return self.at.get(chunk) if number == 0 else self.beside.get((chunk, number), self.own.get(chunk))

    def put(self, chunk: int, number: int, address: Address) -> None:
        """A sum of a chunk is now somewhere else."""
        if number:
            self.beside[chunk, number] = address
        else:
            self.at[chunk] = address

    def cell(self, address: Address) -> Address:
        """The memory behind an address; in place, input and output are views of the same memory."""
        buffer, offset = address
        if self.inplace is None or buffer == "s":
            return address
        return ("m", self.inplace[0 if buffer == "i" else 1] + offset)

    def allocate(self, count: int, *moment: int) -> int:
        """A fresh piece of scratch, needed from a moment on. Pieces lie apart, so that none looks like a part of
        another; where they really go is decided at the end."""
        offset = self.pieces[-1][0] + self.pieces[-1][1] + 1 if self.pieces else 0
        self.pieces.append((offset, count, moment))
        return offset


def may_overwrite_inputs(
    events: Sequence[tuple[int, int, int]], algorithm: Algorithm, priced: Costs
) -> frozenset[int]:
    """Messages whose result may overwrite the input of their destination in place: nobody reads that any more, and
    nobody is still sending it.

    events: (time, 0: data can be used | 1: start, message), in their order.
    """
    touched: dict[int, set[tuple[int, int]]] = {}  # rank -> (chunk, sum) that something has entered
    last: dict[int, int] = {}  # rank -> number of the last event that reads its input
    sent: dict[int, int] = {}  # rank -> when the last message of its input has left
    arrivals: list[tuple[int, int]] = []
    for turn, (_, kind, number) in enumerate(events):
        message = algorithm.messages[number]
        rank = message.src if kind else message.dst
        entered = touched.setdefault(rank, set())
        for_whom = [(c, s) for c in message.chunks for s in ((message.sum,) if kind else message.into)]
        if any(own not in entered for own in for_whom):
            last[rank] = turn
            if kind:
                sent[rank] = max(sent.get(rank, 0), released(priced, message))
        if not kind:
            entered.update(for_whom)
            arrivals.append((turn, number))
    return frozenset(
        number
        for turn, number in arrivals
        for message in [algorithm.messages[number]]
        if last.get(message.dst, -1) <= turn and sent.get(message.dst, 0) <= message.end_fs
    )


def released(priced: Costs, message: Message) -> int:
    """When the sender of a message may go on: its link is free again."""
    return message.start_fs + priced.hold(message.link, priced.holds[message.link][0][1], len(message.chunks))


def joined(before: tuple[Address, Address], after: tuple[Address, Address]) -> bool:
    """Whether a copy goes on where the one before ends, on both sides."""
    return all(b == (a[0], a[1] + 1) for a, b in zip(before, after, strict=True))


def contiguous(places: Sequence[Address]) -> bool:
    """Whether each address is the one after that before it."""
    return list(places) == address_range(places[0], len(places))


def address_range(address: Address, count: int) -> list[Address]:
    """So many addresses from this one on."""
    return [(address[0], address[1] + i) for i in range(count)]


def runs(items: Iterable[Item], joins: Callable[[Item, Item], bool]) -> list[list[Item]]:
    """Split a list wherever two neighbours do not join, and at the most chunks a step can carry."""
    found: list[list[Item]] = []
    for item in items:
        if found and joins(found[-1][-1], item) and len(found[-1]) < MAX_COUNT:
            found[-1].append(item)
        else:
            found.append([item])
    return found
