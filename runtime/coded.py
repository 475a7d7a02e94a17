"""Coded messages: a rewrite of the plans of all ranks.

A chunk is coded by the first rank that sends it over a link whose messages are coded. From there on it travels as a
frame, over whatever links, until ranks need its values: a rank that only passes it on never decodes it, and nobody
codes it again. Where ranks share memory and the codec is slower than a copy, one rank of a node decodes a frame and
hands the values to the others (`runtime/shared_values.py`), and the frame besides, when it arrives, to those that pass
it on. Otherwise each rank that keeps a chunk decodes it for itself.

A reduction takes decoded contributions. A partial sum is coded when nothing in it was coded before (the sum of a node
with one rank); otherwise errors would add up hop after hop, and the rewrite refuses unless it may recode. The complete
result is coded once, by the rank that made it, which takes the values of its own frame, so that all ranks end with the
same values.

Which messages are coded is said by nodes, or message by message by a coding plan (`runtime/planned.py`), which is
followed to the letter: a frame is passed on as the values in it where the plan does not name the message. A plan that
would have values coded again by a lossy codec is refused.

Every message of frames has an area of frame memory of its own, so its receive never waits for anything. A decode stands
where its values are first read, or at the end; it starts when the frame is there and its memory is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from taccl.errors import CheckFailed, UsageError
from taccl.runtime.hazards import Cell, Hazards
from taccl.runtime.parts import in_parts
from taccl.runtime.plan import Frame, Operation, Plan, Range
from taccl.runtime.shared_values import Key, shared_values
from taccl.synth.coding.plan import Hop
from taccl.synth.collective import Collective

_Result = tuple[int, int, int]  # rank, its operation that makes the sum, chunk

PARTS = 5  # of a message, where no plan says what is coded and chunks are in host memory
WRONG_PLAN = "the coding plan is wrong"


@dataclass(frozen=True, slots=True)
class Coding:
    """Which messages are coded.

    nodes: of each rank its node, where only messages from one to another are; None: all are. hop: each of them is coded
    and decoded by itself, the baseline that relays and sums are compared with. recode: partial sums with coded parts
    may be coded again. hops: instead of nodes exactly these, in chunks of the program's collective, where "reduce" is
    a sum that is not complete yet and "copy" is whatever else travels. near: of each rank the first one that it shares
    memory with, where those decode for each other. parts: that a message of several chunks is cut into at most.
    """

    nodes: tuple[int, ...] | None
    lossless: bool
    hop: bool = False
    recode: bool = False
    hops: frozenset[Hop] | None = None
    near: tuple[int, ...] | None = None
    parts: int = 1

    @property
    def tags(self) -> int:
        """For each message of the program."""
        return self.parts * (1 if self.near is None else 2)


@dataclass(frozen=True, slots=True)
class _Value:
    """What a cell holds: the sum of some ranks' contributions to a chunk of the collective."""

    chunk: int = -1
    ranks: int = 0  # a bit for each
    codings: int = 0  # of the values in memory
    birth: tuple[int, int] | None = None  # rank and its operation that made the sum
    frame: Frame | None = None
    coded: bool = False  # the values are those of the frame
    there: bool = True  # in memory


@dataclass(frozen=True, slots=True)
class _Message:
    coded: bool
    values: tuple[_Value, ...]
    values_tag: int = -1  # of a second message, which brings the values of the frames


def coded(
    plans: Sequence[Plan], coding: Coding, collective: Collective, inplace: Mapping[int, tuple[int, int]]
) -> list[Plan]:
    """The plans of all ranks with coded messages.

    inplace: as in `compile_ranks`. Raises UsageError for sums whose errors would add up at every hop, CheckFailed for
    hops that contradict one another or the program.
    """
    early: set[_Result] = set()
    sends = [Counter(op.peer for op in plan.operations if op.kind == "send") for plan in plans]
    shared: dict[Key, bool] | None = None if coding.near is not None and not coding.hop else {}
    if coding.parts > 1:
        plans = in_parts(plans, coding.parts, coding.nodes)
    while True:
        ranks = [
            _Rank(plan, coding, collective, inplace.get(plan.rank), early, shared or {}, sends[plan.rank])
            for plan in plans
        ]
        wire: dict[tuple[int, int, int], _Message] = {}
        steps = [rank.steps(wire) for rank in ranks]
        left = list(range(len(plans)))
        while left:
            # A rank goes on until it wants a message that is not sent yet; in the trace each is sent first.
            left = [rank for rank in left if next(steps[rank], None) is not None]
        found = {result for rank in ranks for result in rank.late}
        if not found - early:
            _check_all_sent(coding, ranks)
            done = [rank.plan() for rank in ranks]
            if shared is not None:
                return done
            assert coding.near is not None
            shared = shared_values(done, coding.near)
            continue
        # A result that is coded somewhere must be so from its birth: what went out before would differ from it.
        early |= found


def _check_all_sent(coding: Coding, ranks: Sequence[_Rank]) -> None:
    """Raise CheckFailed for hops that no message has made."""
    sent = {route for rank in ranks for route in rank.planned}
    for source, destination, chunk, _ in sorted(coding.hops or ()):
        if (source, destination, chunk) not in sent:
            raise CheckFailed(
                f"{WRONG_PLAN}: it codes chunk {chunk} from rank {source} to rank {destination}, and no message of the "
                "program brings it there"
            )


class _Rank:
    """One rank's rewrite. early: the results that are coded at once; late: those that should have been. shared: the
    messages of frames that bring values, and whether they bring the frames too. sends: messages of the program to each
    rank."""

    def __init__(
        self,
        plan: Plan,
        coding: Coding,
        collective: Collective,
        inplace: tuple[int, int] | None,
        early: set[_Result],
        shared: Mapping[Key, bool],
        sends: Mapping[int, int],
    ) -> None:
        self.old, self.rank, self.coding, self.early, self.shared = plan, plan.rank, coding, early, shared
        self.combining = collective.combining
        self.sources = [len(chunk.sources) for chunk in collective.chunks]
        self.hazards = Hazards(inplace)
        self.cells: dict[Cell, _Value] = {}
        self.names: dict[Cell, tuple[str, int]] = {}
        self.operations: list[Operation] = []
        self.done: list[tuple[int, ...]] = []  # of each old operation those that it has become
        self.areas: dict[tuple[Frame, ...], int] = {}
        self.slots = 0
        self.late: set[_Result] = set()
        self.sends = sends
        self.planned: set[tuple[int, int, int]] = set()  # source, destination, chunk of what hops have named
        for number, chunk in enumerate(collective.chunks):
            for rank, place in chunk.sources:
                if rank == self.rank:
                    (cell,) = self.hazards.cells(("i", place, 1))
                    self.cells[cell] = _Value(number, 1 << rank)

    def plan(self) -> Plan:
        codings = max(
            (value.codings for cell, value in self.cells.items() if cell[0] in ("i", "o", "io")), default=0
        )
        return Plan(
            self.rank, tuple(self.operations), self.old.staging_chunks, slots=self.slots, codings=codings
        )

    def steps(self, wire: dict[tuple[int, int, int], _Message]) -> Iterator[bool]:
        """Rewrite operation after operation; yields when a message is missing."""
        for number, op in enumerate(self.old.operations):
            first = len(self.operations)
            if op.kind == "send":
                wire[self.rank, op.peer, op.tag] = self._send(op)
            elif op.kind == "recv":
                while (key := (op.peer, self.rank, op.tag)) not in wire:
                    yield True
                self._receive(number, op, wire.pop(key))
            elif op.kind == "copy":
                self._copy(op)
            else:
                self._reduce(number, op)
            made = len(self.operations)
            if op.kind == "recv" and self.operations[first].kind == "recv" and self.operations[first].frames:
                # What waits for the message waits for its frames, not for values behind them.
                made = first + 1
            self.done.append((made - 1,) if made > first else self._origin(op))
        self._keep()

    def _origin(self, op: Operation) -> tuple[int, ...]:
        """What stands for a copy that is not needed: the arrival of its frames."""
        frames = {value.frame.area for value in self._values(op.dst) if value.frame is not None}
        return tuple(sorted(self.hazards.writer["f", area] for area in frames))

    def _add(
        self,
        kind: str,
        like: Operation,
        dst: Range | None = None,
        src: Range | None = None,
        received: Range | None = None,
        frames: tuple[Frame, ...] = (),
        carries: Range | None = None,
        chunks: tuple[int, ...] = (),
        tag: int = -1,
    ) -> None:
        areas: list[Range] = (
            [] if kind == "encode" else [("f", area, 1) for area in sorted({frame.area for frame in frames})]
        )
        before = self.hazards.before(dst, src, received, *areas)
        order = {new for old in like.order for new in self.done[old]} if kind == "send" else set()
        message = kind in ("send", "recv")
        number = like.tag if tag < 0 else tag
        index = len(self.operations)
        self.operations.append(
            Operation(
                kind, dst, src, received, like.peer if message else -1, like.channel,
                number if message else -1, like.threadblock, like.step, tuple(sorted(before | order)),
                tuple(sorted(order)), frames, carries, chunks,
            )
        )  # fmt: skip
        self.hazards.record(index, dst, src, received, *areas)

    def _values(self, extent: Range | None) -> list[_Value]:
        return [self.cells.get(cell, _Value()) for cell in self.hazards.cells(extent)]

    def _put(self, extent: Range | None, values: Sequence[_Value]) -> None:
        assert extent is not None
        for i, (cell, value) in enumerate(zip(self.hazards.cells(extent), values, strict=True)):
            self.cells[cell] = value
            self.names[cell] = (extent[0], extent[1] + i)

    def _area(self, count: int) -> Range:
        self.slots += count
        return ("f", self.slots - count, count)

    def _complete(self, value: _Value) -> bool:
        return value.chunk >= 0 and value.ranks.bit_count() == self.sources[value.chunk]

    def _into_memory(self, extent: Range, like: Operation) -> None:
        """Decode what of a range is there as frames only, one message's chunks at a time."""
        values = self._values(extent)
        first = 0
        while first < len(values):
            last = first + 1
            if not values[first].there:
                while last < len(values) and not values[last].there and _follows(values, last):
                    last += 1
                part = (extent[0], extent[1] + first, last - first)
                frames = tuple(v.frame for v in values[first:last] if v.frame is not None)
                self._add("decode", like, part, frames=frames)
                self._put(part, [replace(v, there=True) for v in values[first:last]])
            first = last

    def _send(self, op: Operation) -> _Message:
        assert op.src is not None
        coding, values = self.coding, self._values(op.src)
        with_frames = self.shared.get((self.rank, op.peer, op.tag))
        if with_frames:
            return self._send_both(op)
        if with_frames is not None or not self._selected(op, values):
            self._into_memory(op.src, op)
            self._add("send", op, src=op.src)
            return _Message(
                False, tuple(replace(v, frame=None, coded=False, there=True) for v in self._values(op.src))
            )
        if coding.hop:
            self._into_memory(op.src, op)
            frames = self._encode(op.src, op)
            codings = [value.codings + 1 for value in values]
            values = [replace(value, frame=frame) for value, frame in zip(values, frames, strict=True)]
        else:
            self._into_frames(op.src, op)
            values = self._values(op.src)
            codings = [value.codings + (not value.coded) for value in values]
        frames = self._send_frames(op, values)
        return _Message(
            True,
            tuple(replace(v, frame=f, codings=c) for v, f, c in zip(values, frames, codings, strict=True)),
        )

    def _send_both(self, op: Operation) -> _Message:
        """Pass frames on at once, and their values when they are decoded."""
        assert op.src is not None
        values = self._values(op.src)
        self._send_frames(op, values)
        self._into_memory(op.src, op)
        tag = op.tag + self.sends[op.peer] * self.coding.parts  # these follow the program's own
        self._add("send", op, src=op.src, tag=tag)
        return _Message(True, tuple(values), tag)

    def _send_frames(self, op: Operation, values: Sequence[_Value]) -> tuple[Frame, ...]:
        """Send what there are frames of."""
        frames = tuple(value.frame for value in values if value.frame is not None)
        if frames not in self.areas:
            area = self._area(len(frames))
            self._add("pack", op, area, frames=frames)
            self.areas[frames] = area[1]
        self._add("send", op, src=("f", self.areas[frames], len(frames)), frames=frames, carries=op.src)
        return frames

    def _selected(self, op: Operation, values: Sequence[_Value]) -> bool:
        """Whether a message is one of frames. Raises CheckFailed where hops leave no choice that is right."""
        coding = self.coding
        if coding.hops is None:
            between = coding.nodes is None or coding.nodes[op.peer] != coding.nodes[self.rank]
            return between or any(value.coded for value in values)
        named = {v.chunk for v in values if (self.rank, op.peer, v.chunk, self._op(v)) in coding.hops}
        self.planned |= {(self.rank, op.peer, chunk) for chunk in named}
        for value in values:
            if named and value.chunk not in named:
                raise self._wrong_plan(
                    op, f"sends chunk {value.chunk} to rank {op.peer} together with chunk {min(named)}, which alone of "
                    "the two is to be coded"
                )  # fmt: skip
        return bool(named)

    def _op(self, value: _Value) -> str:
        return "reduce" if self.combining and not self._complete(value) else "copy"

    def _wrong_plan(self, op: Operation, what: str) -> CheckFailed:
        return CheckFailed(
            f"{WRONG_PLAN}: rank {self.rank}, threadblock {op.threadblock}, step {op.step} {what}"
        )

    def _into_frames(self, extent: Range, like: Operation) -> None:
        """Code what of a range has no frame."""
        values = self._values(extent)
        first = 0
        while first < len(values):
            last = first + 1
            if values[first].frame is None:
                while last < len(values) and values[last].frame is None:
                    last += 1
                part = (extent[0], extent[1] + first, last - first)
                self._check(values[first:last], like)
                frames = self._encode(part, like)
                self._put(
                    part, [replace(v, frame=f) for v, f in zip(values[first:last], frames, strict=True)]
                )
            first = last

    def _check(self, values: Sequence[_Value], like: Operation) -> None:
        """Raise for partial sums that would be coded again; remember results that should have been coded before."""
        for value in values:
            if self.coding.lossless:
                continue
            if not self.combining:
                if value.codings and not self.coding.recode:
                    raise self._wrong_plan(
                        like, f"codes the values of chunk {value.chunk}, which have been coded before: a lossy codec "
                        "would add a second error"
                    )  # fmt: skip
                continue
            if self._complete(value):
                if value.birth is None:
                    continue
                result = (*value.birth, value.chunk)
                if result in self.early:  # its owner has coded it, and then sent the values
                    owner = value.birth[0]
                    raise self._wrong_plan(
                        like,
                        f"codes the result of chunk {value.chunk}, which rank {owner} has made and sent uncoded: ranks "
                        f"would end with different values, unless rank {owner} codes it",
                    )
                self.late.add(result)
            elif value.codings and not self.coding.recode:
                raise UsageError(
                    f"rank {self.rank}, threadblock {like.threadblock}, step {like.step} sends on a partial sum with "
                    "coded parts, and a lossy codec would add an error at every such hop. Schedules qualify whose "
                    "owner of a chunk receives every contribution itself (or the uncoded sum of a node) and sends "
                    "the result: taccl synth --engine direct makes one where all ranks have links to each other. A "
                    "lossless codec adds no error there, and recode (taccl run --recode) lets this one code at every "
                    "hop"
                )

    def _encode(self, extent: Range, like: Operation) -> tuple[Frame, ...]:
        area = self._area(extent[2])
        frames = tuple(Frame(area[1], i, self.rank, extent[1] + i) for i in range(extent[2]))
        chunks = tuple(value.chunk for value in self._values(extent))
        self._add("encode", like, area, extent, frames=frames, chunks=chunks)
        self.areas[frames] = area[1]
        return frames

    def _receive(self, number: int, op: Operation, message: _Message) -> None:
        assert op.dst is not None
        if not message.coded:
            user = self.old.operations[number + 1] if op.dst[0] == "t" else None
            if user is not None and user.kind == "reduce" and user.src is not None:
                # What uses staged data is the operation right after the receive.
                self._into_memory(user.src, op)
            self._add("recv", op, op.dst)
            self._put(op.dst, message.values)
            return
        area = self._area(len(message.values))
        frames = tuple(
            Frame(area[1], i, value.frame.rank, value.frame.chunk)
            for i, value in enumerate(message.values)
            if value.frame is not None
        )
        self._add("recv", op, area, frames=frames, carries=op.dst)
        self.areas[frames] = area[1]
        there = message.values_tag >= 0
        if there:
            self._add("recv", op, op.dst, tag=message.values_tag)
        self._put(
            op.dst,
            [
                replace(value, frame=frame, coded=not self.coding.hop, there=there)
                for value, frame in zip(message.values, frames, strict=True)
            ],
        )

    def _copy(self, op: Operation) -> None:
        assert op.src is not None and op.dst is not None
        for first, last, there in _runs(self._values(op.src)):
            target = (op.dst[0], op.dst[1] + first, last - first)
            source = (op.src[0], op.src[1] + first, last - first)
            if there:
                self._add("copy", op, target, source)
            self._put(target, self._values(source))

    def _reduce(self, number: int, op: Operation) -> None:
        assert op.src is not None and op.dst is not None and op.received is not None
        self._into_memory(op.src, op)
        for first, last, there in _runs(self._values(op.received)):
            count = last - first
            dst, src, received = (
                (extent[0], extent[1] + first, count) for extent in (op.dst, op.src, op.received)
            )
            mine, theirs = self._values(src), self._values(received)
            if there:
                self._add("reduce", op, dst, src, received)
            else:
                frames = tuple(value.frame for value in theirs if value.frame is not None)
                self._add("accumulate", op, dst, src, frames=frames)
            sums = [
                _Value(a.chunk, a.ranks | b.ranks, max(a.codings, b.codings), (self.rank, number))
                for a, b in zip(mine, theirs, strict=True)
            ]
            self._put(dst, sums)
            now = [(self.rank, number, value.chunk) in self.early for value in sums]
            for coded_now, places in groupby(range(count), now.__getitem__):
                stretch = list(places)
                if coded_now:
                    self._code_result((dst[0], dst[1] + stretch[0], len(stretch)), op)

    def _code_result(self, extent: Range, like: Operation) -> None:
        """Code a complete sum, and give its owner the values that all others will have."""
        values = self._values(extent)
        frames = self._encode(extent, like)
        self._add("decode", like, extent, frames=frames)
        self._put(
            extent,
            [
                replace(value, frame=frame, coded=True, codings=value.codings + 1)
                for value, frame in zip(values, frames, strict=True)
            ],
        )

    def _keep(self) -> None:
        """Decode what the user's buffers must hold in the end."""
        left = sorted(
            (self.names[cell], value)
            for cell, value in self.cells.items()
            if not value.there and cell[0] in ("i", "o", "io")
        )
        first = 0
        while first < len(left):
            (letter, place), _ = left[first]
            last = first + 1
            while last < len(left) and left[last][0] == (letter, place + last - first):
                last += 1
            # The last operation lends its place in the program; a decode is not waited for by name.
            self._into_memory((letter, place, last - first), self.operations[-1])
            first = last


def _follows(values: Sequence[_Value], at: int) -> bool:
    """Whether a frame stands right behind that of the cell before."""
    before, here = values[at - 1].frame, values[at].frame
    assert before is not None and here is not None
    return here.area == before.area and here.index == before.index + 1


def _runs(values: Sequence[_Value]) -> Iterator[tuple[int, int, bool]]:
    """(first, past the last, whether in memory) of stretches whose frames, if they are frames, stand in a row."""
    first = 0
    while first < len(values):
        last, there = first + 1, values[first].there
        while last < len(values) and values[last].there == there and (there or _follows(values, last)):
            last += 1
        yield first, last, there
        first = last
