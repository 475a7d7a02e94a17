"""First half of lowering: from timed messages to operations on buffers, with the order that data demands.

Every message becomes one send and one receive operation (more only where its chunks cannot be made contiguous in at
most 71-chunk pieces); chunks that lie apart are gathered and scattered by local copies, so that alpha is paid
once, as in the schedule. Inputs are read from `i`, results delivered into `o`; what a rank only relays, and partial
sums of ranks that do not want the result, live in scratch. `i` is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from taccl.synth.algorithm import Algorithm, Message
from taccl.synth.cost import Costs

MAX_COUNT = 71  # chunks a step can carry (MSCCL)
END = 1 << 62  # a time after all messages

Address = tuple[str, int]  # (buffer, offset)
Item = TypeVar("Item")


@dataclass(slots=True)
class Operation:
    """One step to be, on one rank."""

    rank: int
    kind: str  # s | r | rrc | cpy | re
    src: Address
    dst: Address
    count: int
    lane: tuple[
        str, int, int
    ]  # ("send" | "recv" | "local", peer or -1, which of the streams between the two)
    key: tuple[int, int, int]  # order within the lane: (time, message number, part)
    message: int  # index of the message it belongs to, -1 for set-up copies
    needs: set[int] = field(default_factory=set)  # operations of the same rank that must be complete before


@dataclass(frozen=True, slots=True)
class Operations:
    """All operations, and the scratch each rank needs (in chunks)."""

    all: list[Operation]
    scratch: tuple[int, ...]


class _Rank:
    """Where a rank's values are, and who touched which cell last."""

    def __init__(self, inplace: tuple[int, int] | None, inputs: int) -> None:
        self.inplace = inplace
        self.inputs = inputs
        self.scratch = 0
        self.at: dict[int, Address] = {}  # chunk -> where its present value is
        self.also: dict[int, Address] = {}  # chunk -> the copy in `o` of a value that is also in `i`
        self.writer: dict[Address, int] = {}
        self.readers: dict[Address, list[int]] = {}

    def cell(self, address: Address) -> Address:
        """The memory behind an address; in place, input and output are views of the same memory."""
        buffer, offset = address
        if self.inplace is None or buffer == "s":
            return address
        return ("m", self.inplace[0 if buffer == "i" else 1] + offset)

    def allocate(self, count: int) -> int:
        """Fresh contiguous scratch."""
        self.scratch += count
        return self.scratch - count


def operations(algorithm: Algorithm, priced: Costs, stream: Sequence[int], inplace: bool) -> Operations:
    """Operations in the order of the schedule, each with the operations of its rank that it must follow.

    stream: per message which of the streams between its two ranks it belongs to; a stream keeps its order.
    inplace: also keep apart what shares memory in place.
    """
    return _Builder(algorithm, priced, stream, inplace).build()


class _Builder:
    def __init__(self, algorithm: Algorithm, priced: Costs, stream: Sequence[int], inplace: bool) -> None:
        self.algorithm = algorithm
        self.collective = algorithm.collective
        self.priced = priced
        self.stream = stream
        self.made: list[Operation] = []
        self.ranks = [
            _Rank(views if inplace else None, length)
            for views, length in zip(self.collective.inplace, self.collective.input_chunks, strict=True)
        ]
        self.wanted: list[dict[int, list[int]]] = [{} for _ in self.ranks]  # rank -> chunk -> output offsets
        for number, chunk in enumerate(self.collective.chunks):
            for rank, offset in chunk.destinations:
                self.wanted[rank].setdefault(number, []).append(offset)
            for rank, offset in chunk.sources:
                self.ranks[rank].at[number] = ("i", offset)
        self.sums: list[set[int]] = [set() for _ in self.ranks]  # chunks whose partial sum has left `i`

    def build(self) -> Operations:
        if not self.collective.combining:
            self._own_outputs()
        # Receives take effect when they complete, sends read at their start; what completes at a moment is
        # visible to what starts at it.
        events: list[tuple[int, int, int]] = []
        for number, done in enumerate(_completions(self.priced, self.algorithm.messages)):
            events.append((self.algorithm.messages[number].start_fs, 1, number))
            events.append((done, 0, number))
        source: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for time, kind, number in sorted(events):
            message = self.algorithm.messages[number]
            if kind == 1:
                source[number] = self._send(number, message, time)
            else:
                self._receive(number, message, time, source[number])
        if self.collective.combining:
            self._own_outputs()
        self._extra_outputs()
        return Operations(self.made, tuple(rank.scratch for rank in self.ranks))

    def _add(self, operation: Operation, reads: Iterable[Address], writes: Iterable[Address]) -> int:
        """Record an operation and the hazards it must respect."""
        rank = self.ranks[operation.rank]
        index = len(self.made)
        read_cells = {rank.cell(a) for a in reads}
        write_cells = {rank.cell(a) for a in writes}
        for cell in read_cells | write_cells:
            if cell in rank.writer:
                operation.needs.add(rank.writer[cell])
        for cell in write_cells:
            operation.needs.update(rank.readers.get(cell, ()))
        operation.needs.discard(index)
        for cell in write_cells:
            rank.writer[cell] = index
            rank.readers[cell] = []
        for cell in read_cells - write_cells:
            rank.readers.setdefault(cell, []).append(index)
        self.made.append(operation)
        return index

    def _own_outputs(self) -> None:
        """A rank's own data that it also wants: copied from input to output, neighbours in one step."""
        for number, rank in enumerate(self.ranks):
            pairs = []
            for chunk, offsets in sorted(self.wanted[number].items()):
                here = rank.at.get(chunk)
                if here is not None and here[0] == "i":
                    pairs += [(here[1], offset, chunk) for offset in offsets]
            for run in _runs(sorted(pairs), lambda a, b: b[0] == a[0] + 1 and b[1] == a[1] + 1):
                key = (0, -1, len(self.made)) if not self.collective.combining else (END, -1, len(self.made))
                self._copy(number, ("i", run[0][0]), ("o", run[0][1]), len(run), key, -1, ("local", -1, 0))
                for _, offset, chunk in run:
                    if self.collective.combining:
                        rank.at[chunk] = ("o", offset)
                    else:
                        rank.also[chunk] = ("o", offset)

    def _extra_outputs(self) -> None:
        """A chunk wanted at several offsets of one rank is received once and copied to the others."""
        for number, rank in enumerate(self.ranks):
            for chunk, offsets in sorted(self.wanted[number].items()):
                src = rank.at[chunk]
                if src[0] == "i":
                    continue
                for offset in offsets:
                    if ("o", offset) != src:
                        key = (END, -1, len(self.made))
                        self._copy(number, src, ("o", offset), 1, key, -1, ("local", -1, 0))

    def _copy(
        self,
        rank: int,
        src: Address,
        dst: Address,
        count: int,
        key: tuple[int, int, int],
        message: int,
        lane: tuple[str, int, int],
        kind: str = "cpy",
    ) -> None:
        reads, writes = _range(src, count), _range(dst, count)
        if kind == "re":
            reads = [*reads, *writes]
        self._add(Operation(rank, kind, src, dst, count, lane, key, message), reads, writes)

    def _send(self, number: int, message: Message, time: int) -> list[tuple[int, tuple[int, ...]]]:
        """Make the source's operations; returns (send operation, chunk ids in the order they travel)."""
        rank = self.ranks[message.src]
        lane = ("send", message.dst, self.stream[number])
        found = {c: rank.at[c] for c in message.chunks}
        if len(message.chunks) > 1 and any(a[0] == "o" or c in rank.also for c, a in found.items()):
            # The copy of the rank's own data in the output may lie beside what it has received there.
            found = {c: rank.also.get(c, a) for c, a in found.items()}
        order = self._travel_order(message, found)
        pieces = []
        for part, begin in enumerate(range(0, len(order), MAX_COUNT)):
            piece = order[begin : begin + MAX_COUNT]
            src = found[piece[0]]
            if [found[c] for c in piece] != _range(src, len(piece)):
                base = rank.allocate(len(piece))
                runs = _runs(
                    [(found[c], ("s", base + i)) for i, c in enumerate(piece)],
                    lambda a, b: b[0] == (a[0][0], a[0][1] + 1),
                )
                for i, run in enumerate(runs):
                    self._copy(
                        message.src,
                        run[0][0],
                        run[0][1],
                        len(run),
                        (time, number, 100 * part + i),
                        number,
                        lane,
                    )
                src = ("s", base)
            reads = _range(src, len(piece))
            key = (time, number, 100 * part + 99)
            # What dst names, the place at the receiver, is filled in when the receive is made.
            sent = self._add(Operation(message.src, "s", src, src, len(piece), lane, key, number), reads, ())
            pieces.append((sent, tuple(piece)))
        return pieces

    def _travel_order(self, message: Message, found: dict[int, Address]) -> list[int]:
        """Chunks in an order that is contiguous at the destination if possible, else at the source."""
        target = {c: self._destination(message, c) for c in message.chunks}
        if all(a is not None for a in target.values()):
            by_target = sorted(message.chunks, key=lambda c: (target[c] or ("", 0), c))
            first = target[by_target[0]]
            if first is not None and [target[c] for c in by_target] == _range(first, len(by_target)):
                return by_target
        return sorted(message.chunks, key=lambda c: (found[c], c))

    def _destination(self, message: Message, chunk: int) -> Address | None:
        """Where a chunk will live at the receiver; None when scratch is still to be chosen."""
        rank = self.ranks[message.dst]
        if message.op == "reduce" and chunk in self.sums[message.dst]:
            return rank.at[chunk]
        offsets = self.wanted[message.dst].get(chunk)
        if offsets:
            return ("o", offsets[0])
        here = rank.at.get(chunk)
        return here if here is not None and here[0] == "s" else None

    def _receive(
        self, number: int, message: Message, time: int, pieces: list[tuple[int, tuple[int, ...]]]
    ) -> None:
        rank = self.ranks[message.dst]
        lane = ("recv", message.src, self.stream[number])
        for part, (sent, piece) in enumerate(pieces):
            key = (time, number, 100 * part)
            target = [self._destination(message, c) for c in piece]
            fresh = rank.allocate(len(piece)) if any(a is None for a in target) else 0
            places = [a if a is not None else ("s", fresh + i) for i, a in enumerate(target)]
            received = len(self.made)
            if message.op == "copy":
                self._receive_copy(message, piece, places, key, number, lane)
            else:
                self._receive_sum(message, piece, places, key, number, lane)
            self.made[sent].dst = self.made[received].dst
            if self.made[received].kind == "r":
                self.made[received].src = self.made[sent].src
            for chunk, place in zip(piece, places, strict=True):
                rank.at[chunk] = place
                if message.op == "reduce":
                    self.sums[message.dst].add(chunk)

    def _receive_copy(
        self, message: Message, piece: tuple[int, ...], places: list[Address], key: tuple[int, int, int],
        number: int, lane: tuple[str, int, int],
    ) -> None:  # fmt: skip
        count = len(piece)
        if places == _range(places[0], count):
            operation = Operation(message.dst, "r", places[0], places[0], count, lane, key, number)
            self._add(operation, (), places)
            return
        landed = self._land(message, count, key, number, lane)
        moves = [(("s", landed + i), place) for i, place in enumerate(places)]
        for i, run in enumerate(_runs(moves, lambda a, b: b[1] == (a[1][0], a[1][1] + 1))):
            self._copy(message.dst, run[0][0], run[0][1], len(run), (*key[:2], key[2] + 1 + i), number, lane)

    def _receive_sum(
        self, message: Message, piece: tuple[int, ...], places: list[Address], key: tuple[int, int, int],
        number: int, lane: tuple[str, int, int],
    ) -> None:  # fmt: skip
        """Add to the partial sum where it is; the first addition takes the own contribution from `i`."""
        rank, count = self.ranks[message.dst], len(piece)
        own = [rank.at.get(c) for c in piece]
        first = own[0]
        if first is not None and own == _range(first, count) and places == _range(places[0], count):
            operation = Operation(message.dst, "rrc", first, places[0], count, lane, key, number)
            self._add(operation, _range(first, count), places)
            return
        landed = self._land(message, count, key, number, lane)
        for i, (before, place) in enumerate(zip(own, places, strict=True)):
            step = (*key[:2], key[2] + 1 + 2 * i)
            arrived = ("s", landed + i)
            if before is None:
                self._copy(message.dst, arrived, place, 1, step, number, lane)
                continue
            if before != place:
                self._copy(message.dst, before, place, 1, step, number, lane)
            after = (*step[:2], step[2] + 1)
            self._copy(message.dst, arrived, place, 1, after, number, lane, kind="re")

    def _land(
        self, message: Message, count: int, key: tuple[int, int, int], number: int, lane: tuple[str, int, int]
    ) -> int:
        """Receive into fresh scratch; returns its offset."""
        landed = self.ranks[message.dst].allocate(count)
        at = ("s", landed)
        self._add(Operation(message.dst, "r", at, at, count, lane, key, number), (), _range(at, count))
        return landed


def _completions(priced: Costs, messages: Sequence[Message]) -> list[int]:
    """When each message's data can be used: at arrival, or after its turn on the reduction engine."""
    done = [0] * len(messages)
    engine: dict[int, int] = {}
    by_arrival = sorted(
        range(len(messages)), key=lambda i: (messages[i].end_fs, messages[i].start_fs, messages[i].link)
    )
    for i in by_arrival:
        message = messages[i]
        done[i] = message.end_fs
        if message.op == "reduce":
            begin = max(engine.get(message.dst, 0), message.end_fs)
            engine[message.dst] = done[i] = begin + priced.reduce(len(message.chunks))
    return done


def _range(address: Address, count: int) -> list[Address]:
    return [(address[0], address[1] + i) for i in range(count)]


def _runs(items: Iterable[Item], joins: Callable[[Item, Item], bool]) -> list[list[Item]]:
    """Split a list wherever two neighbours do not join, and at the most chunks a step can carry."""
    runs: list[list[Item]] = []
    for item in items:
        if runs and joins(runs[-1][-1], item) and len(runs[-1]) < MAX_COUNT:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs
