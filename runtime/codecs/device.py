"""Codecs on a GPU: the same frames, byte for byte, by the kernels of kernels.cu through CuPy.

Arrays are flat uint8 on the device, with the type of the values beside them, as CuPy has no bfloat16. Headers
and directories are checked on the host by the same code as everywhere, so that a kernel never follows a size
that is wrong; data are checked by the kernel that decodes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from taccl.runtime.codecs.codec import (
    CODED,
    FLOATS,
    RAW,
    TILE,
    Codec,
    Entry,
    FrameError,
    Scratch,
    TileError,
    raw_bytes,
)
from taccl.runtime.codecs.coding import check_room, expected
from taccl.runtime.codecs.frame import (
    ENTRY,
    HEADER_BYTES,
    Directory,
    Frame,
    Origin,
    close,
    directory_bytes,
    most_bytes,
    read_directory,
    read_header,
)
from taccl.runtime.codecs.xw import check_entry
from taccl.runtime.dtypes import DType
from taccl.runtime.gpu import Cuda

THREADS = 1024  # of a block that works on a tile
# Tiles of one length are cut into parts of so many values (PART in parts.cu), with a smaller block each.
PART_VALUES = 4096
PART_THREADS = 256
PART_BYTES = 16  # for each tile, zeros: what its parts add up
# Work space of an encoder or decoder for each value of a tile, and what a tile may overrun its bound by before
# it is given up and stored raw: SPACE in kernels.cu, a sparse plane.
SPACE_BYTES = 9
OPTIONS = ("--std=c++17",)
WITHOUT_KERNEL = ("zstd",)
WHAT_IS_WRONG = (
    "",
    "the data are damaged, their checksum differs",
    "the map of the sparse plane does not count as many bytes as its entry says",
    "the positions of exceptions do not rise, or lie outside of the tile",
    "the map of zeros does not keep as many values as its entry says",
)


@dataclass(frozen=True, slots=True)
class DeviceScratch:
    """Work space for frames of up to `tiles` tiles of `tile` values, about 21 bytes a value. One a stream.

    All arrays but `host` lie on the device.
    """

    cuda: Cuda
    module: Any
    tile: int
    tiles: int
    slots: Any
    space: Any
    parts: Any
    status: Any
    decoded: Any
    host: Scratch


FRAME_ALIGNMENT = 8  # bytes; as on the host


def source() -> str:
    """The CUDA C++ of the kernels."""
    files = resources.files("taccl.runtime.codecs")
    return "".join(
        files.joinpath(name).read_text(encoding="utf-8") for name in ("kernels.cu", "parts.cu", "frames.cu")
    )


def make_scratch(xp: Any, count: int, tile: int = TILE) -> DeviceScratch:
    """Work space for frames of up to `count` values. xp: cupy, or a module like it."""
    tiles = max(1, -(-count // tile))
    return DeviceScratch(
        Cuda(xp),
        xp.RawModule(code=source(), options=OPTIONS),
        tile,
        tiles,
        xp.empty(tiles * slot_bytes(tile), np.uint8),
        xp.empty(tiles * SPACE_BYTES * tile, np.uint8),
        xp.zeros(tiles * PART_BYTES, np.uint8),
        xp.empty(4 * tiles, np.uint8),
        xp.empty(4 * tiles * tile, np.uint8),
        Scratch(),
    )


def encode_on_device(
    codec: Codec,
    dtype: DType,
    values: Any,
    wire: Any,
    scratch: DeviceScratch,
    origin: Origin = Origin(),  # noqa: B008 - frozen
) -> int:
    """Code the values (uint8 on the device) into `wire`, of at least `most_bytes`; gives the frame's bytes.

    Waits for the device once, for the sizes. Raises ValueError as `encode_into` does.
    """
    count, tiles = check_call(codec, dtype, values, wire, scratch)
    start = directory_bytes(tiles)
    if tiles:
        entries = entries_of(wire, tiles)
        name = f"encode_{dtype.bytes}"
        if codec.fixed:
            most = codec.most(dtype, scratch.tile)
            _run(scratch, codec, name, tiles, values, count, wire[start:], most, entries)
        else:
            slot = slot_bytes(scratch.tile)
            _run(scratch, codec, name, tiles, values, count, scratch.slots, slot, entries)
            launch(scratch, "gather", tiles, scratch.slots, count, wire[start:], slot, entries)
    return close_on_device(codec, dtype, count, wire, scratch, origin)


def check_call(codec: Codec, dtype: DType, values: Any, wire: Any, scratch: DeviceScratch) -> tuple[int, int]:
    """(values, tiles) to encode. Raises ValueError for what `encode_on_device` cannot do."""
    count = len(values) // dtype.bytes
    tiles = -(-count // scratch.tile)
    if dtype.name not in codec.dtypes or codec.name in WITHOUT_KERNEL:
        raise ValueError(f"codec {codec.name} does not take {dtype.name} on a device")
    if len(wire) < most_bytes(codec, dtype, count, scratch.tile):
        raise ValueError(f"{len(wire)} bytes of wire; most_bytes says what {count} values may need")
    if tiles > scratch.tiles:
        raise ValueError(f"{count} values, the scratch holds {scratch.tiles * scratch.tile}")
    check_place(values, dtype.bytes, "values")
    check_place(wire, FRAME_ALIGNMENT, "the wire")
    return count, tiles


def check_place(array: Any, multiple: int, what: str) -> None:
    """Raise ValueError for an address that kernels cannot use, after which nothing would work in the process."""
    found = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    if len(array) and int(found["data"][0]) % multiple:
        raise ValueError(f"{what} must begin at a multiple of {multiple} bytes")


def entries_of(wire: Any, tiles: int) -> Any:
    """The bytes of the directory's entries."""
    return wire[HEADER_BYTES : HEADER_BYTES + tiles * ENTRY.itemsize]


def close_on_device(
    codec: Codec, dtype: DType, count: int, wire: Any, scratch: DeviceScratch, origin: Origin
) -> int:
    """Write the header of a frame whose entries and tiles lie on the device; gives the frame's bytes."""
    tiles = -(-count // scratch.tile)
    start = directory_bytes(tiles)
    head = np.zeros(start, np.uint8)
    size = start
    if tiles:
        scratch.cuda.download(entries_of(head, tiles), entries_of(wire, tiles))
        size += int(entries_of(head, tiles).view(ENTRY)["bytes"].sum(dtype=np.int64))
    close(head, Frame(codec.code, dtype, count, size, scratch.tile, tiles, origin, 0), scratch.host)
    scratch.cuda.upload(wire[:start], head)
    return size


def decode_on_device(
    codec: Codec, dtype: DType, wire: Any, values: Any, scratch: DeviceScratch, origin: Origin | None = None
) -> Frame:
    """Decode a frame into the values (uint8 on the device). Raises FrameError as `decode_into` does."""
    check_place(values, dtype.bytes, "values")
    frame, directory = read_on_device(codec, wire, scratch, origin)
    check_room(frame, dtype, len(values))
    _decode(codec, frame, directory, wire, values, scratch)
    return frame


def accumulate_on_device(
    codec: Codec, wire: Any, total: Any, scratch: DeviceScratch, origin: Origin | None = None
) -> Frame:
    """Add the decoded values of a frame of floats to float32 values (uint8 on the device), in place."""
    check_place(total, 4, "values")
    frame, directory = read_on_device(codec, wire, scratch, origin)
    if 4 * frame.elements != len(total) or frame.dtype.name not in FLOATS:
        raise FrameError(
            f"frame from {frame.origin}: {frame.elements} values of {frame.dtype.name}, they cannot be added "
            f"to {len(total) // 4} of float32"
        )
    values = scratch.decoded[: frame.elements * frame.dtype.bytes]
    _decode(codec, frame, directory, wire, values, scratch)
    if frame.tiles:
        launch(
            scratch, f"add_{frame.dtype.name}", frame.tiles, values, frame.elements, total, 0, scratch.status
        )
    return frame


def slot_bytes(tile: int) -> int:
    """Room for a coded tile whose length is not known yet."""
    return 4 * tile + tile // 8 + 64


def read_on_device(
    codec: Codec, wire: Any, scratch: DeviceScratch, origin: Origin | None
) -> tuple[Frame, Directory]:
    """A frame's header and directory, checked as on the host. Raises FrameError."""
    check_place(wire, FRAME_ALIGNMENT, "the wire")
    head = np.zeros(min(HEADER_BYTES, len(wire)), np.uint8)
    scratch.cuda.download(head, wire[: len(head)])
    frame = expected(codec, lambda: read_header(head, len(wire)), origin)
    if frame.tile != scratch.tile or frame.tiles > scratch.tiles:
        raise FrameError(
            f"frame from {frame.origin}: {frame.tiles} tiles of {frame.tile} values, expected at most "
            f"{scratch.tiles} of {scratch.tile}"
        )
    start = directory_bytes(frame.tiles)
    head = np.zeros(start, np.uint8)
    scratch.cuda.download(head, wire[:start])
    return frame, read_directory(head, frame, scratch.host)


def _check(codec: Codec, dtype: DType, entry: Entry, count: int) -> None:
    """Raise TileError unless the kernel can follow the entry without leaving the tile."""
    windowed = codec.name in ("xw", "bf16-xw")
    width = 2 if codec.name == "bf16-xw" else dtype.bytes
    if windowed and entry.mode != RAW:
        check_entry(entry, width, count)
        return
    raw = codec.name == "raw" or windowed
    most = codec.most(dtype, count) if not raw or width != dtype.bytes else raw_bytes(dtype, count)
    if entry != Entry(most, RAW if raw else CODED, kept=count):
        raise TileError(f"{entry.bytes} bytes for {count} values")


def _decode(
    codec: Codec, frame: Frame, directory: Directory, wire: Any, values: Any, scratch: DeviceScratch
) -> None:
    for index, entry in enumerate(directory.entries):
        here = min(frame.tile, frame.elements - index * frame.tile)
        try:
            _check(codec, frame.dtype, entry, here)
        except TileError as error:
            raise FrameError(f"frame from {frame.origin}, tile {index}: {error}", index) from None
    if not frame.tiles:
        return
    entries = entries_of(wire, frame.tiles)
    name = f"decode_{frame.dtype.bytes}"
    start = directory.places[0]
    _run(scratch, codec, name, frame.tiles, values, frame.elements, wire, start, entries)
    raise_for_status(frame, scratch)


def raise_for_status(frame: Frame, scratch: DeviceScratch) -> None:
    """Raise the FrameError of the first tile in which a kernel found something wrong."""
    status = np.zeros(frame.tiles, np.uint32)
    scratch.cuda.download(status, scratch.status[: 4 * frame.tiles])
    wrong = np.flatnonzero(status)
    if len(wrong):
        index = int(wrong[0])
        raise FrameError(f"frame from {frame.origin}, tile {index}: {WHAT_IS_WRONG[status[index]]}", index)


def grid(codec: Codec, tiles: int, tile: int) -> tuple[int, int]:
    """(blocks, threads of a block) of a kernel that codes, decodes or adds tiles."""
    if not in_parts(codec):
        return tiles, THREADS
    return tiles * -(-tile // PART_VALUES), PART_THREADS


def in_parts(codec: Codec) -> bool:
    """Whether the kernels of a codec cut tiles into parts."""
    return codec.fixed and codec.name != "raw"


def _run(scratch: DeviceScratch, codec: Codec, name: str, tiles: int, *arguments: Any) -> None:
    kernel = f"{codec.name.replace('-', '_')}_{name}"
    blocks, threads = grid(codec, tiles, scratch.tile)
    launch(scratch, kernel, blocks, *arguments, threads=threads, parts=in_parts(codec))


def launch(
    scratch: DeviceScratch,
    kernel: str,
    blocks: int,
    values: Any,
    count: int,
    wire: Any,
    stride: int,
    entries: Any,
    *,
    threads: int = THREADS,
    parts: bool = False,
) -> None:
    """Start a kernel, with one block a tile or `grid`; the parameters are those that all kernels share."""
    scratch.module.get_function(kernel)(
        (blocks,),
        (threads,),
        (
            values, np.uint64(count), np.uint32(scratch.tile), wire, np.uint64(stride), entries,
            scratch.parts if parts else scratch.space, scratch.status, np.uint64(0),
        ),
    )  # fmt: skip
