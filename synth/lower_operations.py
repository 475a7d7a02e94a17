"""First half of lowering: from timed messages to operations on buffers, with the order that data demands.

Every message becomes one send and one receive operation (more only where its chunks cannot be made contiguous in at
most 71-chunk pieces); chunks that lie apart are gathered and scattered by local copies, so that alpha is paid
once, as in the schedule. Inputs are read from `i`, results delivered into `o`; what a rank only relays, and partial
sums of ranks that do not want the result, live in scratch. `i` is never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from taccl.errors import CheckFailed
from taccl.synth.algorithm import Algorithm, Message
from taccl.synth.cost import Costs
from taccl.synth.lower_memory import (
    MAX_COUNT,
    Address,
    Memory,
    address_range,
    contiguous,
    joined,
    may_overwrite_inputs,
    released,
    runs,
)
from taccl.synth.lower_scratch import Piece, place
from taccl.synth.schedule import completions

MAX_COPIES = 16  # more copies for one message go to a threadblock of their own
END = 1 << 62  # a time after all messages

Lane = tuple[str, int, int]  # ("send" | "recv" | "local", peer or -1, which of the streams between the two)

LOCAL: Lane = ("local", -1, 0)


@dataclass(slots=True)
class Operation:
    """One step to be, on one rank."""

    rank: int
    kind: str  # s | r | rrc | cpy | re
    src: Address
    dst: Address
    count: int
    lane: Lane
    key: tuple[int, int, int]  # order within the lane: (time, message number, part)
    message: int  # index of the message it belongs to, -1 for set-up copies
    peer: int = -1  # the operation at the other end of its message
    needs: set[int] = field(default_factory=set)  # operations of the same rank that must be complete before


@dataclass(frozen=True, slots=True)
class Operations:
    """All operations, and the scratch each rank needs (in chunks)."""

    all: list[Operation]
    scratch: tuple[int, ...]


def operations(
    algorithm: Algorithm, priced: Costs, stream: Sequence[int], inplace: bool, reuse: bool
) -> Operations:
    """Operations in the order of the schedule, each with the operations of its rank that it must follow.

    stream: per message which of the streams between its two ranks it belongs to; a stream keeps its order.
    inplace: also keep apart what shares memory in place. reuse: scratch whose content is no longer needed takes new
    content; what is still reading it is waited for, which in the schedule has always ended by then.
    """
    return _Builder(algorithm, priced, stream, inplace).build(reuse)


class _Builder:
    def __init__(self, algorithm: Algorithm, priced: Costs, stream: Sequence[int], inplace: bool) -> None:
        self.algorithm = algorithm
        self.collective = algorithm.collective
        self.priced = priced
        self.stream = stream
        self.done = completions(priced, algorithm.messages)
        self.made: list[Operation] = []
        self.ranks = [Memory(views if inplace else None) for views in self.collective.inplace]
        self.wanted: list[dict[int, list[int]]] = [{} for _ in self.ranks]  # rank -> chunk -> output offsets
        for number, chunk in enumerate(self.collective.chunks):
            for rank, offset in chunk.destinations:
                self.wanted[rank].setdefault(number, []).append(offset)
            for rank, offset in chunk.sources:
                self.ranks[rank].at[number] = self.ranks[rank].own[number] = ("i", offset)
        self.several = any(m.sum or m.into != (0,) for m in algorithm.messages)
        self.sums: list[set[int]] = [set() for _ in self.ranks]  # chunks whose partial sum has left `i`

    def build(self, reuse: bool) -> Operations:
        if not self.collective.combining:
            self._own_outputs()
        # Receives take effect when they complete, sends read at their start; what completes at a moment is
        # visible to what starts at it.
        events: list[tuple[int, int, int]] = []
        for number, done in enumerate(self.done):
            events.append((self.algorithm.messages[number].start_fs, 1, number))
            events.append((done, 0, number))
        events.sort()
        final = may_overwrite_inputs(events, self.algorithm, self.priced) if self.several else frozenset()
        source: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for time, kind, number in events:
            message = self.algorithm.messages[number]
            if kind == 1:
                source[number] = self._send(number, message, time)
            elif self.several:
                self._receive_several(number, message, source[number], number in final)
            else:
                self._receive(number, message, source[number])
        if self.collective.combining:
            self._own_outputs()
        self._extra_outputs()
        lengths = self._place_scratch(reuse)
        for operation in self.made:
            # What is sent names its place at both ends; a receiver that reduces names its own operand instead.
            if operation.kind == "s":
                operation.dst = self.made[operation.peer].dst
            elif operation.kind == "r":
                operation.src = self.made[operation.peer].src
        return Operations(self.made, lengths)

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
            rank.first.setdefault(cell, index)
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
            for run in runs(sorted(pairs), lambda a, b: b[0] == a[0] + 1 and b[1] == a[1] + 1):
                key = (0, -1, len(self.made)) if not self.collective.combining else (END, -1, len(self.made))
                self._copy(number, ("i", run[0][0]), ("o", run[0][1]), len(run), key, -1, LOCAL)
                for _, offset, chunk in run:
                    if self.collective.combining:
                        rank.at[chunk] = ("o", offset)
                    else:
                        rank.also[chunk] = ("o", offset)

    def _extra_outputs(self) -> None:
        """What is in its last place nowhere yet: sums gathered in scratch, chunks wanted at several offsets."""
        for number, rank in enumerate(self.ranks):
            never = sorted(chunk for chunk in self.wanted[number] if chunk not in rank.at)
            if never:
                raise CheckFailed(f"rank {number} wants chunk {never[0]} and never gets it")
            moves = [
                (rank.at[chunk], ("o", offset))
                for chunk, offsets in self.wanted[number].items()
                for offset in offsets
                if rank.at[chunk][0] != "i" and rank.at[chunk] != ("o", offset)
            ]
            for run in runs(sorted(moves), joined):
                key = (END, -1, len(self.made))
                self._copy(number, run[0][0], run[0][1], len(run), key, -1, LOCAL)

    def _place_scratch(self, reuse: bool) -> tuple[int, ...]:
        """Decide where the pieces of scratch go and give operations their real places; returns the lengths."""
        real: list[dict[Address, Address]] = []
        lengths = []
        for rank in self.ranks:
            pieces = [self._piece(rank, *piece) for piece in rank.pieces]
            order = sorted(range(len(pieces)), key=lambda n: (pieces[n].begin, n))
            placed = place([pieces[n] for n in order], reuse)
            for after, before in placed.waits:
                self.made[after].needs.add(before)
            lengths.append(placed.length)
            real.append({})
            for n, offset in zip(order, placed.offsets, strict=True):
                cells = address_range(("s", rank.pieces[n][0]), pieces[n].length)
                real[-1].update(zip(cells, address_range(("s", offset), pieces[n].length), strict=True))
        for operation in self.made:
            operation.src = real[operation.rank].get(operation.src, operation.src)
            operation.dst = real[operation.rank].get(operation.dst, operation.dst)
        return tuple(lengths)

    def _piece(self, rank: Memory, offset: int, length: int, begin: tuple[int, ...]) -> Piece:
        cells = address_range(("s", offset), length)
        last = {i for cell in cells for i in (rank.writer[cell], *rank.readers.get(cell, ()))}
        return Piece(
            length,
            begin,
            max(self._complete(self.made[i]) for i in last),
            tuple(sorted({rank.first[cell] for cell in cells})),
            tuple(sorted(last)),
            len({self.made[i].lane for i in last}),
        )

    def _complete(self, operation: Operation) -> tuple[int, ...]:
        """The moment at which an operation is complete in the schedule; sends release before anything else."""
        time, number, _ = operation.key
        if operation.kind == "s":
            return (released(self.priced, self.algorithm.messages[number]), -1)
        if number < 0:
            return (time, 0, number)
        if self.algorithm.messages[number].src == operation.rank:
            return (time, 1, number)
        return (self.done[number], 0, number)

    def _copy(
        self,
        rank: int,
        src: Address,
        dst: Address,
        count: int,
        key: tuple[int, int, int],
        message: int,
        lane: Lane,
        kind: str = "cpy",
    ) -> None:
        reads, writes = address_range(src, count), address_range(dst, count)
        if kind == "re":
            reads = [*reads, *writes]
        self._add(Operation(rank, kind, src, dst, count, lane, key, message), reads, writes)

    def _send(self, number: int, message: Message, time: int) -> list[tuple[int, tuple[int, ...]]]:
        """Make the source's operations; returns (send operation, chunk ids in the order they travel)."""
        rank = self.ranks[message.src]
        lane = ("send", message.dst, self.stream[number])
        found: dict[int, Address] = {}
        for c in message.chunks:
            here = rank.place(c, message.sum)
            if here is None:
                raise CheckFailed(
                    f"message {number} sends chunk {c} from rank {message.src}, which does not have it then"
                )
            found[c] = here
        if len(message.chunks) > 1 and any(a[0] == "o" or c in rank.also for c, a in found.items()):
            # The copy of the rank's own data in the output may lie beside what it has received there.
            found = {c: rank.also.get(c, a) for c, a in found.items()}
        order = self._travel_order(message, found)
        pieces = []
        for part, begin in enumerate(range(0, len(order), MAX_COUNT)):
            piece = order[begin : begin + MAX_COUNT]
            src = found[piece[0]]
            if [found[c] for c in piece] != address_range(src, len(piece)):
                base = rank.allocate(len(piece), time, 1, number)
                moves = [(found[c], ("s", base + i)) for i, c in enumerate(piece)]
                self._move(message.src, moves, (time, number, 100 * part), number, lane)
                src = ("s", base)
            reads = address_range(src, len(piece))
            key = (time, number, 100 * part + 99)
            sent = self._add(Operation(message.src, "s", src, src, len(piece), lane, key, number), reads, ())
            pieces.append((sent, tuple(piece)))
        return pieces

    def _travel_order(self, message: Message, found: dict[int, Address]) -> list[int]:
        """Chunks in an order that is contiguous at the destination if possible, else at the source."""
        target = {c: self._destination(message, c) for c in message.chunks}
        if all(a is not None for a in target.values()):
            by_target = sorted(message.chunks, key=lambda c: (target[c] or ("", 0), c))
            first = target[by_target[0]]
            if first is not None and [target[c] for c in by_target] == address_range(first, len(by_target)):
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

    def _receive(self, number: int, message: Message, pieces: list[tuple[int, tuple[int, ...]]]) -> None:
        rank = self.ranks[message.dst]
        lane = ("recv", message.src, self.stream[number])
        for part, (sent, piece) in enumerate(pieces):
            # Messages of a connection are received in the order in which they were sent, even where one that is
            # reduced takes longer than one behind it.
            key = (message.end_fs, number, 100 * part)
            target = [self._destination(message, c) for c in piece]
            if message.op == "copy" or all(rank.at.get(c) is None for c in piece):
                places, received = self._receive_copy(message, target, key, lane)
            elif any(rank.at.get(c) is None for c in piece):
                places, received = self._receive_mixed(message, piece, target, key, lane)
            else:
                places, received = self._receive_sum(message, piece, target, key, lane)
            self.made[sent].peer, self.made[received].peer = received, sent
            rank.at.update(zip(piece, places, strict=True))
            if message.op == "reduce":
                self.sums[message.dst].update(piece)

    def _receive_several(
        self, number: int, message: Message, pieces: list[tuple[int, tuple[int, ...]]], final: bool
    ) -> None:
        """As `_receive`, where ranks hold several sums of a chunk.

        What changes gets fresh memory, so that nothing waits for those who still read what was there. Sums in one place
        are one value and are added to once. final: the result may go to where it is wanted.
        """
        rank, lane = self.ranks[message.dst], ("recv", message.src, self.stream[number])
        for part, (sent, piece) in enumerate(pieces):
            key = (message.end_fs, number, 10_000 * part)
            alike: dict[tuple[Address | None, ...], list[int]] = {}
            for entered in message.into:
                own = tuple(rank.place(c, entered) for c in piece)
                alike.setdefault(own if message.op == "reduce" else (None,) * len(piece), []).append(entered)
            goals: list[list[Address]] = []
            for _ in alike:
                wanted = [self.wanted[message.dst].get(c, ()) for c in piece]
                goal = [("o", offsets[0]) for offsets in wanted if offsets]
                if not (final and message.into == (0,) and len(goal) == len(piece) and contiguous(goal)):
                    goal = address_range(
                        ("s", rank.allocate(len(piece), *self._needed(message, number))), len(piece)
                    )
                goals.append(goal)
            (first, *more), goal = alike, goals[0]
            if not more and all(own is None for own in first):
                received = self._land(message, goal, key, lane)
            elif not more and all(own is not None for own in first):
                operand = [own for own in first if own is not None]
                if not contiguous(operand):
                    self._move(message.dst, list(zip(operand, goal, strict=True)), key, number, lane)
                    operand = goal
                at = (*key[:2], key[2] + 99)
                summed = Operation(message.dst, "rrc", operand[0], goal[0], len(piece), lane, at, number)
                received = self._add(summed, operand, goal)
            else:
                base = rank.allocate(len(piece), *self._needed(message, number))
                landed = address_range(("s", base), len(piece))
                received = self._land(message, landed, key, lane)
                turn = key[2] + 1
                for owns, goal in zip(alike, goals, strict=True):
                    turn = self._combine(message, owns, landed, goal, (*key[:2], turn), lane)
            self.made[sent].peer, self.made[received].peer = received, sent
            for entering, goal in zip(alike.values(), goals, strict=True):
                for entered in entering:
                    for c, address in zip(piece, goal, strict=True):
                        rank.put(c, entered, address)

    def _combine(
        self,
        message: Message,
        owns: Sequence[Address | None],
        landed: Sequence[Address],
        goal: Sequence[Address],
        key: tuple[int, int, int],
        lane: Lane,
    ) -> int:
        """What has landed and what was there before, added up in a third place; nothing there: just what has landed.

        Returns the next free part of the key.
        """
        have = [own if own is not None else arrived for own, arrived in zip(owns, landed, strict=True)]
        self._move(message.dst, list(zip(have, goal, strict=True)), key, key[1], lane)
        added = [
            (arrived, place)
            for own, arrived, place in zip(owns, landed, goal, strict=True)
            if own is not None
        ]
        part = key[2] + len(goal)
        for run in runs(added, joined):
            part += 1
            self._copy(message.dst, run[0][0], run[0][1], len(run), (*key[:2], part), key[1], lane, "re")
        return part + 1

    def _needed(self, message: Message, number: int) -> tuple[int, int, int]:
        """The moment from which a receiver needs memory for a message: before it leaves, since most executors send when
        the receiver has said that there is some. (MSCCL's kernels put into slots what comes before its receive.)"""
        return (message.start_fs - 2 * self.priced.alpha_fs[message.link], 1, number)

    def _filled(self, number: int, message: Message, target: Sequence[Address | None]) -> list[Address]:
        """The targets, with one piece of scratch for those that have no place yet."""
        missing = sum(place is None for place in target)
        if not missing:
            return [place for place in target if place is not None]
        if missing == len(target):
            base = self.ranks[message.dst].allocate(missing, *self._needed(message, number))
            return address_range(("s", base), missing)
        base = self.ranks[message.dst].allocate(missing, *self._needed(message, number))
        fresh = iter(address_range(("s", base), missing))
        return [next(fresh) if place is None else place for place in target]

    def _receive_copy(
        self, message: Message, target: Sequence[Address | None], key: tuple[int, int, int], lane: Lane
    ) -> tuple[list[Address], int]:
        """Returns where the chunks are now, and the receiving operation."""
        places = self._filled(key[1], message, target)
        if contiguous(places):
            return places, self._land(message, places, key, lane)
        base = self.ranks[message.dst].allocate(len(places), *self._needed(message, key[1]))
        landed = address_range(("s", base), len(places))
        received = self._land(message, landed, key, lane)
        moves = list(zip(landed, places, strict=True))
        self._move(message.dst, moves, (*key[:2], key[2] + 1), key[1], lane)
        return places, received

    def _receive_sum(
        self,
        message: Message,
        piece: Sequence[int],
        target: Sequence[Address | None],
        key: tuple[int, int, int],
        lane: Lane,
    ) -> tuple[list[Address], int]:
        """One step adds the whole message to what the rank has, which is gathered first where it lies apart.

        The sums stay where this puts them; those that are wanted elsewhere are copied at the end.
        """
        rank, count = self.ranks[message.dst], len(piece)
        own = [rank.at[c] for c in piece]
        places = [place for place in target if place is not None]
        if len(places) < count or not contiguous(places):
            places = own
            if not contiguous(own) or own[0][0] == "i":
                places = address_range(("s", rank.allocate(count, *self._needed(message, key[1]))), count)
        operand = own
        if not contiguous(own):
            self._move(message.dst, list(zip(own, places, strict=True)), key, key[1], lane)
            operand = places
        at = (*key[:2], key[2] + 99)
        summed = Operation(message.dst, "rrc", operand[0], places[0], count, lane, at, key[1])
        return places, self._add(summed, operand, places)

    def _receive_mixed(
        self,
        message: Message,
        piece: Sequence[int],
        target: Sequence[Address | None],
        key: tuple[int, int, int],
        lane: Lane,
    ) -> tuple[list[Address], int]:
        """Some chunks meet a value to be added to, others are the first of their kind on this rank."""
        rank = self.ranks[message.dst]
        places = self._filled(key[1], message, target)
        base = rank.allocate(len(piece), *self._needed(message, key[1]))
        received = self._land(message, address_range(("s", base), len(piece)), key, lane)
        for i, (chunk, goal) in enumerate(zip(piece, places, strict=True)):
            own, arrived = rank.at.get(chunk), ("s", base + i)
            if own is not None and own != goal:
                self._copy(message.dst, own, goal, 1, (*key[:2], key[2] + 1), key[1], lane)
            kind = "cpy" if own is None else "re"
            self._copy(message.dst, arrived, goal, 1, (*key[:2], key[2] + 1), key[1], lane, kind)
        return places, received

    def _land(
        self, message: Message, places: Sequence[Address], key: tuple[int, int, int], lane: Lane
    ) -> int:
        """Receive into contiguous places; returns the operation."""
        operation = Operation(message.dst, "r", places[0], places[0], len(places), lane, key, key[1])
        return self._add(operation, (), places)

    def _move(
        self,
        rank: int,
        moves: Sequence[tuple[Address, Address]],
        key: tuple[int, int, int],
        message: int,
        lane: Lane,
    ) -> None:
        """Copy chunks, neighbours in one step; many copies leave the message's own threadblock."""
        steps = runs([move for move in moves if move[0] != move[1]], joined)
        where, owner = (LOCAL, -1) if len(steps) > MAX_COPIES else (lane, message)
        for i, run in enumerate(steps):
            self._copy(rank, run[0][0], run[0][1], len(run), (*key[:2], key[2] + i), owner, where)
