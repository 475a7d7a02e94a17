"""Frame memory on a device, and the work on it: kernels on a codec stream, with nothing for the host to wait for.

An encoder is followed by a kernel that closes the frame where it lies; a decoder follows one that looks at header and
directory first, so that no kernel follows a size that is wrong. Where the host must know a length, to send so many
bytes, the kernel writes it to host memory too. There it also says what it found wrong: the host looks when the
events have come that come after it, before anything leaves the rank and at the end of a run. What was wrong
numpy's decoder says, of a copy of the area, in the same words as on the host.

The arrays that kernels work in between belong to a stream each, whose work is done in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from taccl.runtime.codecs import TILE, Codec, ErrorFeedback, FrameError, Origin, Scratch, decode_into
from taccl.runtime.codecs.device import (
    OPTIONS,
    PART_BYTES,
    PART_THREADS,
    PART_VALUES,
    SPACE_BYTES,
    THREADS,
    grid,
    in_parts,
    slot_bytes,
    source,
)
from taccl.runtime.codecs.device_task import TASK, crc_table, header_of, window_width
from taccl.runtime.codecs.frame import ENTRY, HEADER_BYTES, directory_bytes
from taccl.runtime.dtypes import DType
from taccl.runtime.frames import FrameMemory, FrameSizes
from taccl.runtime.gpu import Cuda, address
from taccl.runtime.plan import Frame, Operation, Plan, Range
from taccl.runtime.streams import coders
from taccl.runtime.transport import HEAD_BYTES, used_bytes

APPEND_BLOCKS = 64  # of a kernel that moves a frame
NOTHING = np.uint64(0)

Action = Callable[[], object]


@dataclass(frozen=True, slots=True)
class DeviceLosses:
    """Error feedback on a device: its residual is there. places: as in `Losses`."""

    feedback: ErrorFeedback
    places: Mapping[int, slice]


@dataclass(frozen=True, slots=True)
class _Bench:
    """Work space of a codec stream, for a frame: (bytes,) uint8 each, on the device."""

    slots: Any  # tiles whose length is not known yet
    space: Any  # of encoders and decoders; zeros at first
    entries: Any
    decoded: Any  # the frame's values


def bench_bytes(codec: Codec, dtype: DType, count: int, adds: bool) -> tuple[int, int, int, int]:
    """Of each array of a codec stream's work space, for frames of so many values. adds: decoded values are added."""
    tiles = -(-count // TILE)
    windows = bool(window_width(codec, dtype))
    return (
        tiles * slot_bytes(TILE) if windows else 0,
        tiles * (SPACE_BYTES * TILE if windows else PART_BYTES if in_parts(codec) else 0),
        tiles * ENTRY.itemsize if windows else 0,
        count * dtype.bytes if adds else 0,
    )


def work_bytes(plan: Plan, codec: Codec, dtype: DType, count: int, feedback: bool = False) -> int:
    """Device memory that the work on a plan's frames takes beside them."""
    streams = set(coders(plan.operations, feedback).values())
    tasks = sum(len(op.frames) for op in plan.operations) * TASK.itemsize
    return len(streams) * sum(bench_bytes(codec, dtype, count, _adds(plan, feedback))) + tasks


def _adds(plan: Plan, feedback: bool) -> bool:
    return feedback or any(op.kind == "accumulate" for op in plan.operations)


class DeviceFrames:
    """The areas of one rank on a device. data: (slots * stride,) uint8 there, which begins at a multiple of 16 bytes.

    dtype, chunk_elements: of the values in each frame.
    """

    def __init__(
        self,
        cuda: Cuda,
        plan: Plan,
        sizes: FrameSizes,
        dtype: DType,
        chunk_elements: int,
        data: Any,
        losses: DeviceLosses | None = None,
    ) -> None:
        self.sizes, self.data = sizes, data
        self._cuda, self._dtype, self._count, self._losses = cuda, dtype, chunk_elements, losses
        self.streams = coders(plan.operations, losses is not None)
        self._tiles = -(-chunk_elements // TILE)
        self._module = cuda.xp.RawModule(code=source(), options=OPTIONS)
        self._kernels: dict[str, Any] = {}
        xp = cuda.xp
        lengths = bench_bytes(sizes.codec, dtype, chunk_elements, _adds(plan, losses is not None))
        self._benches = {
            stream: _Bench(*(xp.zeros(length, np.uint8) for length in lengths))
            for stream in sorted(set(self.streams.values()))
        }
        self._table = xp.empty(4 * 128, np.uint8)
        cuda.upload(self._table, crc_table().view(np.uint8))
        self._heads = cuda.pinned(HEAD_BYTES * max(plan.slots, 1)) if sizes.sized else None
        # Of each operation, and behind the last of it each task of theirs.
        self._wrong = cuda.pinned(4 * max(len(plan.operations), 1)).view(np.uint32)
        self._wrong[:] = 0
        self._reads: dict[int, Operation] = {}
        records = [
            (number, frame, index)
            for number, op in enumerate(plan.operations)
            for index, frame in enumerate(op.frames)
        ]
        self._first = {number: at for at, (number, _, index) in enumerate(records) if index == 0}
        rows = np.zeros(len(records), TASK)
        for row, (number, frame, index) in zip(rows, records, strict=True):
            self._fill(row, plan.operations[number], number, frame, index)
        self._tasks = xp.empty(max(rows.nbytes, 1), np.uint8)
        if len(rows):
            cuda.upload(self._tasks[: rows.nbytes], rows.view(np.uint8))

    def _fill(self, row: Any, op: Operation, number: int, frame: Frame, index: int) -> None:
        codec, dtype = self.sizes.codec, self._dtype
        made = op.kind == "encode"
        slot = op.dst[1] if made and op.dst is not None else frame.area
        rest = self._count - (self._tiles - 1) * TILE
        row["header"] = header_of(codec, dtype, self._count, Origin(frame.rank, frame.chunk))
        row["room"] = self.data.nbytes - slot * self.sizes.stride
        row["head"] = 0 if self._heads is None else address(self._heads) + slot * HEAD_BYTES
        row["wrong"] = address(self._wrong) + 4 * number
        row["index"] = index if made else frame.index
        row["width"] = window_width(codec, dtype)
        row["most"], row["last"] = (codec.most(dtype, count) for count in (TILE, rest))

    # Areas

    def _place(self, slot: int) -> int:
        return slot * self.sizes.stride

    def view(self, area: Range) -> Any:
        """An area with all its room."""
        _, first, count = area
        begin = self._place(first)
        head = HEAD_BYTES if self.sizes.sized else 0
        return self.data[begin : begin + head + count * self.sizes.most]

    def head(self, area: Range) -> np.ndarray[Any, Any] | None:
        """(HEAD_BYTES,) uint8 in host memory: the head of an area, once what wrote it is done; None where areas have
        none."""
        if self._heads is None:
            return None
        return self._heads[area[1] * HEAD_BYTES : (area[1] + 1) * HEAD_BYTES]

    def used(self, area: Range) -> int:
        """Bytes that the last message of an area has."""
        head = self.head(area)
        room = len(self.view(area))
        return room if head is None else used_bytes(head, room)

    # Work

    def work(
        self,
        number: int,
        op: Operation,
        view: Callable[[Range | None], Any],
        combine: Callable[..., object],
    ) -> Action:
        """What puts an operation's kernels on the current stream, which is its codec stream's. view: of ranges of
        chunks. combine: as in `Executor`."""
        bench = self._benches[self.streams[number]]
        if op.kind != "encode":
            self._reads[number] = op
        calls: list[Action] = []
        if op.kind == "encode":
            self._encode(calls, number, op, view(op.src), bench)
        elif op.kind == "pack":
            self._pack(calls, number, op)
        else:
            self._decode(calls, number, op, view, combine, bench)

        def put() -> None:
            for call in calls:
                call()

        return put

    def _encode(self, calls: list[Action], number: int, op: Operation, source: Any, bench: _Bench) -> None:
        assert op.dst is not None
        codec, dtype, sizes = self.sizes.codec, self._dtype, self.sizes
        area = self.view(op.dst)
        name, start = f"encode_{dtype.bytes}", directory_bytes(self._tiles)
        for index, chunk in enumerate(op.chunks):
            values = source[index * self._count : (index + 1) * self._count]
            task = self._task(number, index)
            begin = 0 if sizes.sized else index * sizes.most
            if sizes.sized:
                slot = slot_bytes(TILE)
                self._codec(calls, name, values, bench.slots, slot, bench.entries, bench.space)
                self._launch(
                    calls, "place_tiles", self._tiles, bench.slots, area, slot, bench.entries, None, task
                )
                entries = bench.entries
            else:
                frame = area[begin : begin + sizes.most]
                entries = frame[HEADER_BYTES:]
                self._codec(calls, name, values, frame[start:], codec.most(dtype, TILE), entries, bench.space)
            self._launch(calls, "seal_frame", 1, None, area, begin, entries, self._table, task)
            if self._losses is not None:
                where = self._losses.places[chunk]
                self._codec(
                    calls, f"decode_{dtype.bytes}", bench.decoded, area, start, None, bench.space, task
                )
                owed = self._losses.feedback.residual[where]
                if len(owed):
                    self._each(calls, "lose", values, owed, bench.decoded, len(owed))

    def _pack(self, calls: list[Action], number: int, op: Operation) -> None:
        assert op.dst is not None
        area = self.view(op.dst)
        for index, frame in enumerate(op.frames):
            if self._heads is None:
                begin = frame.area * self.sizes.stride + frame.index * self.sizes.most
                target = area[index * self.sizes.most : (index + 1) * self.sizes.most]
                calls.append(self._copy(target, self.data[begin : begin + self.sizes.most]))
                continue
            source, task = self._find(calls, number, index, frame), self._task(number, index)
            self._launch(
                calls,
                "append_frame",
                APPEND_BLOCKS,
                source,
                area,
                index,
                None,
                None,
                task,
                tile=APPEND_BLOCKS,
            )
            self._launch(calls, "extend_area", 1, source, area, index, None, self.head(op.dst), task)

    def _find(self, calls: list[Action], number: int, index: int, frame: Frame) -> Any:
        """Put the look at a frame; gives its area and all behind it."""
        area = self.data[self._place(frame.area) :]
        begin = 0 if self.sizes.sized else frame.index * self.sizes.most
        self._launch(calls, "find_frame", 1, None, area, begin, None, self._table, self._task(number, index))
        return area

    def _decode(
        self,
        calls: list[Action],
        number: int,
        op: Operation,
        view: Callable[[Range | None], Any],
        combine: Callable[..., object],
        bench: _Bench,
    ) -> None:
        dtype, count = self._dtype, self._count
        target = view(op.dst)
        source = target if op.kind == "decode" else view(op.src)
        name, start = f"decode_{dtype.bytes}", directory_bytes(self._tiles)
        for index, frame in enumerate(op.frames):
            area, task = self._find(calls, number, index, frame), self._task(number, index)
            part = slice(index * count, (index + 1) * count)
            total, mine = target[part], source[part]
            adds = op.kind == "accumulate" and combine is self._cuda.xp.add and dtype.name == "float32"
            if adds and op.src != op.dst:
                calls.append(self._copy(total, mine))
            if adds and in_parts(self.sizes.codec):
                self._codec(calls, f"add_{dtype.bytes}", total, area, start, None, bench.space, task)
                continue
            values = total if op.kind == "decode" else bench.decoded
            self._codec(calls, name, values, area, start, None, bench.space, task)
            if adds:
                self._each(calls, "add_float32", bench.decoded, total, None, count)
            elif op.kind == "accumulate":
                decoded = bench.decoded.view(dtype.numpy)
                calls.append(self._reduction(combine, total if op.src == op.dst else mine, decoded, total))

    @staticmethod
    def _reduction(combine: Callable[..., object], mine: Any, decoded: Any, total: Any) -> Action:
        return lambda: combine(mine, decoded, out=total)

    def _copy(self, target: Any, source: Any) -> Action:
        cuda = self._cuda

        def put() -> None:
            stream = cuda.xp.cuda.get_current_stream()
            cuda.copy(address(target), address(source), target.nbytes, stream)()

        return put

    def _task(self, number: int, index: int) -> Any:
        first = (self._first[number] + index) * TASK.itemsize
        return self._tasks[first : first + TASK.itemsize]

    def _codec(self, calls: list[Action], name: str, values: Any, wire: Any, stride: int, *rest: Any) -> None:
        codec = self.sizes.codec
        kernel = f"{codec.name.replace('-', '_')}_{name}"
        blocks, threads = grid(codec, self._tiles, TILE)
        self._launch(calls, kernel, blocks, values, wire, stride, *rest, threads=threads)

    def _each(self, calls: list[Action], name: str, values: Any, wire: Any, decoded: Any, count: int) -> None:
        """Add the start of a kernel that does something with each of `count` values, whatever their tiles."""
        blocks = -(-count // PART_VALUES)
        self._launch(
            calls,
            name,
            blocks,
            values,
            wire,
            0,
            decoded,
            None,
            None,
            count,
            tile=PART_VALUES,
            threads=PART_THREADS,
        )

    def _launch(
        self,
        calls: list[Action],
        kernel: str,
        blocks: int,
        values: Any,
        wire: Any,
        stride: int,
        entries: Any,
        space: Any,
        task: Any = None,
        count: int | None = None,
        *,
        tile: int = TILE,
        threads: int = THREADS,
    ) -> None:
        """Add the start of a kernel; arrays may be None."""
        if kernel not in self._kernels:
            self._kernels[kernel] = self._module.get_function(kernel)
        start, shape = self._kernels[kernel], ((blocks,), (threads,))
        places = [
            NOTHING if a is None else np.uint64(address(a)) for a in (values, wire, entries, space, task)
        ]
        count = self._count if count is None else count
        arguments = (
            places[0], np.uint64(count), np.uint32(tile), places[1], np.uint64(stride), places[2], places[3], NOTHING,
            places[4],
        )  # fmt: skip
        calls.append(lambda: start(*shape, arguments))

    # What was found

    def check(self) -> None:
        """Raise FrameError for what a kernel has found wrong, in all work whose event has come."""
        if not self._wrong.any():
            return
        self._cuda.synchronize()
        number = int(np.flatnonzero(self._wrong)[0])
        op = self._reads.get(number)
        if op is not None:
            self._explain(op)
            names = " and ".join(f"{Origin(frame.rank, frame.chunk)}" for frame in op.frames)
            raise FrameError(
                f"frame from {names}: refused on the device and found right by numpy: it was not there yet"
            )
        raise FrameError(f"operation {number} has coded what its own codec cannot decode")

    def _explain(self, op: Operation) -> None:
        """Decode on the host what was refused, for the words."""
        copy = np.empty(self.data.nbytes, np.uint8)
        self._cuda.download(copy, self.data)
        values = np.empty(self._count, self._dtype.numpy)
        memory = FrameMemory(self.sizes, copy)
        with np.errstate(all="ignore"):
            for frame, wire in zip(op.frames, memory.find(op.frames), strict=True):
                decode_into(self.sizes.codec, wire, values, Scratch(), Origin(frame.rank, frame.chunk))
