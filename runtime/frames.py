"""Frame memory of one rank, and the work on it: code, decode, add, pack.

An area has the room of its frames at their longest. Frames of a fixed length stand at fixed distances, and a message is
the whole area. Others stand one behind the other after the head of a sized message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from taccl.runtime.codecs import (
    Codec,
    ErrorFeedback,
    FrameError,
    Origin,
    Scratch,
    accumulate_into,
    decode_into,
    encode_into,
)
from taccl.runtime.codecs.coding import decode_compiled
from taccl.runtime.codecs.frame import most_bytes, read_header
from taccl.runtime.dtypes import DType
from taccl.runtime.plan import Frame, Operation, Range
from taccl.runtime.transport import HEAD_BYTES, used_bytes, write_head

Array = np.ndarray[Any, Any]
Work = Callable[[Scratch], object]


@dataclass(frozen=True, slots=True)
class FrameSizes:
    """How long the frames of chunks are."""

    codec: Codec
    most: int  # bytes of a frame
    value_bytes: int  # of one value

    @property
    def sized(self) -> bool:
        """Whether messages say how long they are."""
        return not self.codec.fixed

    @property
    def stride(self) -> int:
        """Bytes of memory for each slot."""
        return self.most + (HEAD_BYTES if self.sized else 0)


def frame_sizes(codec: Codec, dtype: DType, chunk_elements: int) -> FrameSizes:
    """For chunks of so many values."""
    return FrameSizes(codec, most_bytes(codec, dtype, chunk_elements), dtype.bytes)


class Losses:
    """What this rank's coding takes away from sums goes into the error feedback of its own contributions.

    places: of the collective's chunks that this rank contributes to, their elements in its input. A sum is short by
    what was lost of it, whoever contributed that, so any rank that contributes to the same chunk may pay it back.
    """

    def __init__(self, feedback: ErrorFeedback, places: Mapping[int, slice]) -> None:
        self._feedback, self._places = feedback, places
        self._decoded = np.empty(0, np.float32)

    def note(self, codec: Codec, chunk: int, values: Array, frame: Array, scratch: Scratch) -> None:
        """Values of a chunk were coded; padding behind its last element counts for nothing."""
        if len(self._decoded) < len(values):
            self._decoded = np.empty(len(values), np.float32)
        decoded = self._decoded[: len(values)]
        decode_into(codec, frame, decoded, scratch)
        where = self._places[chunk]
        count = where.stop - where.start
        self._feedback.lost(where, values[:count], decoded[:count])


class FrameMemory:
    """The areas of one rank. data: (slots * stride,) uint8. losses: where to note what coding takes away."""

    def __init__(self, sizes: FrameSizes, data: Array, losses: Losses | None = None) -> None:
        self.sizes, self.data, self._losses = sizes, data, losses

    def view(self, area: Range) -> Array:
        """An area with all its room."""
        _, first, count = area
        begin = first * self.sizes.stride
        head = HEAD_BYTES if self.sizes.sized else 0
        return self.data[begin : begin + head + count * self.sizes.most]

    def used(self, area: Range) -> int:
        """Bytes that a message of an area has."""
        view = self.view(area)
        return used_bytes(view) if self.sizes.sized else len(view)

    def _room(self, frame: Frame) -> Array:
        """The area of a frame from its first slot on; its end is in its head, or does not matter."""
        rest = self.data[frame.area * self.sizes.stride :]
        try:
            return rest[: used_bytes(rest)] if self.sizes.sized else rest
        except FrameError as error:
            raise FrameError(f"frame from {Origin(frame.rank, frame.chunk)}: {error}") from None

    def find(self, frames: tuple[Frame, ...]) -> list[Array]:
        """The bytes of each frame; what is behind the last of an area may follow. Raises FrameError."""
        found: list[Array] = []
        for number, frame in enumerate(frames):
            before = frames[number - 1] if number else None
            if not self.sizes.sized:
                begin = frame.index * self.sizes.most
                found.append(self._room(frame)[begin : begin + self.sizes.most])
            elif self._follows(frame, before):
                assert before is not None
                found.append(found[-1][self._bytes(found[-1], before) :])
            else:
                rest = self._room(frame)[HEAD_BYTES:]
                for _ in range(frame.index):
                    rest = rest[self._bytes(rest, frame) :]
                found.append(rest)
        return found

    def _follows(self, frame: Frame, before: Frame | None) -> bool:
        """Whether it begins where the other one ends."""
        return (
            self.sizes.sized
            and before is not None
            and (frame.area, frame.index) == (before.area, before.index + 1)
        )

    def _bytes(self, wire: Array, frame: Frame) -> int:
        try:
            return read_header(wire).bytes
        except FrameError as error:
            raise FrameError(f"frame from {Origin(frame.rank, frame.chunk)}: {error}") from None

    def work(
        self,
        op: Operation,
        view: Callable[[Range | None], Any],
        chunk_elements: int,
        combine: Callable[..., object],
    ) -> Work:
        """What an operation of a coded plan does. view: of ranges of chunks. combine: as in `Executor`."""
        if op.kind == "encode":
            return self._encode(op, view(op.src), chunk_elements)
        if op.kind == "pack":
            return self._pack(op)
        target = view(op.dst)
        chunks = [target[at * chunk_elements : (at + 1) * chunk_elements] for at in range(len(op.frames))]
        codec, frames = self.sizes.codec, op.frames
        if op.kind == "decode":
            follows = [False, *(self._follows(frame, before) for before, frame in pairwise(frames))]

            def decode(scratch: Scratch) -> None:
                found: list[Array] | None = None
                wire, used = self.data, 0
                for number, (frame, values) in enumerate(zip(frames, chunks, strict=True)):
                    if found is not None:
                        wire = found[number]
                    else:
                        wire = wire[used:] if follows[number] else self.find((frame,))[0]
                    origin = Origin(frame.rank, frame.chunk)
                    used = decode_compiled(codec, wire, values, scratch, origin)
                    if not used:
                        if found is None:
                            found = self.find(frames)  # what is wrong with a header is said before all else
                        decode_into(codec, wire, values, scratch, origin)

            return decode
        source = view(op.src)
        local = [source[at * chunk_elements : (at + 1) * chunk_elements] for at in range(len(frames))]
        apart = op.src != op.dst

        def accumulate(scratch: Scratch) -> None:
            for frame, wire, mine, total in zip(frames, self.find(frames), local, chunks, strict=True):
                origin = Origin(frame.rank, frame.chunk)
                if combine is np.add and total.dtype == np.float32:
                    if apart:
                        total[:] = mine
                    accumulate_into(codec, wire, total, scratch, origin)
                else:
                    decoded = np.empty_like(total)
                    decode_into(codec, wire, decoded, scratch, origin)
                    combine(mine, decoded, out=total)

        return accumulate

    def _encode(self, op: Operation, source: Array, chunk_elements: int) -> Work:
        assert op.dst is not None
        area, codec, losses = self.view(op.dst), self.sizes.codec, self._losses
        parts = [
            (source[at * chunk_elements : (at + 1) * chunk_elements], Origin(frame.rank, frame.chunk))
            for at, frame in enumerate(op.frames)
        ]

        def encode(scratch: Scratch) -> None:
            place = HEAD_BYTES if self.sizes.sized else 0
            for (values, origin), chunk in zip(parts, op.chunks, strict=True):
                used = encode_into(codec, values, area[place:], scratch, origin)
                if losses is not None:
                    losses.note(codec, chunk, values, area[place : place + used], scratch)
                place += used
            self._close(area, place)

        return encode

    def _pack(self, op: Operation) -> Work:
        assert op.dst is not None
        area = self.view(op.dst)

        def pack(_: Scratch) -> None:
            place = HEAD_BYTES if self.sizes.sized else 0
            for frame, wire in zip(op.frames, self.find(op.frames), strict=True):
                length = self._bytes(wire, frame) if self.sizes.sized else len(wire)
                area[place : place + length] = wire[:length]
                place += length
            self._close(area, place)

        return pack

    def _close(self, area: Array, used: int) -> None:
        if self.sizes.sized:
            write_head(area, used)
