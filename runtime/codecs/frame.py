"""The frame round coded tiles: header, directory, and everything that a decoder refuses.

Little-endian. 64 bytes of header, a directory of 24 bytes a tile, padding to 16, then the tiles in order, each a
multiple of 16 bytes. The header's crc32 guards the header, which holds the checksum of the directory, which
holds those of the tiles: every byte counts, and damage is told with the tile where it is. docs/codecs.md has
the tables.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from taccl.runtime.codecs.checksum import checksum
from taccl.runtime.codecs.codec import (
    ALIGNMENT,
    TILE,
    TILE_STEP,
    Array,
    Codec,
    Entry,
    FrameError,
    Scratch,
    aligned,
)
from taccl.runtime.dtypes import DTYPES, DType

MAGIC = b"TCF1"
VERSION = 1
HEADER = struct.Struct("<4sBBBBQQIIIIQ12sI")
HEADER_BYTES = 64
ENTRY = np.dtype(
    [
        ("checksum", "<u8"),
        ("bytes", "<u4"),
        ("kept", "<u4"),
        ("mode", "u1"),
        ("base", "u1"),
        ("bits", "u1"),
        ("zero", "u1"),
        ("sparse", "<u2"),
        ("exceptions", "<u2"),
    ]
)
ENTRY_STRUCT = struct.Struct("<QIIBBBBHH")
DTYPE_CODES = {
    "uint8": 0, "float32": 1, "bfloat16": 2, "float16": 3, "int32": 4, "int64": 5, "float64": 6,
}  # fmt: skip
DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose data a frame holds: the rank that coded it and the number of the chunk; 32 bits each."""

    rank: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank}, chunk {self.chunk}"


@dataclass(frozen=True, slots=True)
class Frame:
    """A header that was found to be sound. bytes: of the whole frame; tiles: their number."""

    codec: int
    dtype: DType
    elements: int
    bytes: int
    tile: int
    tiles: int
    origin: Origin
    directory_checksum: int


def directory_bytes(tiles: int) -> int:
    """Bytes of header and directory, that is where the first tile starts."""
    return aligned(HEADER_BYTES + ENTRY.itemsize * tiles)


def most_bytes(codec: Codec, dtype: DType, count: int, tile: int = TILE) -> int:
    """The most bytes that a frame of `count` values can have; exactly its bytes where `codec.fixed`.

    For post and preallocation: a lossless frame is at most 64 + 24 tiles + 31 bytes larger than its values.
    """
    check_tile(tile)
    full, rest = divmod(count, tile)
    return (
        directory_bytes(full + (rest > 0))
        + full * codec.most(dtype, tile)
        + (codec.most(dtype, rest) if rest else 0)
    )


def check_tile(tile: int) -> None:
    """Raise ValueError for tiles that no frame may have."""
    if not (TILE_STEP <= tile <= TILE and tile % TILE_STEP == 0):
        raise ValueError(f"a tile has {TILE_STEP} to {TILE} values, a multiple of {TILE_STEP}; found {tile}")


def write_header(wire: Array, frame: Frame) -> None:
    """Write the 64 bytes at the start of the wire."""
    fields = (
        MAGIC, VERSION, frame.codec, DTYPE_CODES[frame.dtype.name], 0, frame.elements,
        frame.bytes - HEADER_BYTES, frame.tile, frame.tiles, frame.origin.rank, frame.origin.chunk,
        frame.directory_checksum, bytes(12),
    )  # fmt: skip
    packed = HEADER.pack(*fields, 0)[:-4]
    wire[:HEADER_BYTES] = np.frombuffer(packed + struct.pack("<I", zlib.crc32(packed)), np.uint8)


def read_header(wire: Array, there: int | None = None) -> Frame:
    """Read and check the header of a frame in (m,) uint8. Raises FrameError.

    there: bytes of the buffer that holds the frame, when `wire` is only the start of it.
    """
    there = len(wire) if there is None else there
    if len(wire) < HEADER_BYTES:
        raise FrameError(f"{there} bytes, a frame has at least {HEADER_BYTES}")
    head = wire[:HEADER_BYTES].tobytes()
    magic, version, codec, dtype, zero, elements, payload, tile, tiles, rank, chunk, total, zeros, crc = (
        HEADER.unpack(head)
    )
    if magic != MAGIC:
        raise FrameError("this is no frame of coded values")
    if zlib.crc32(head[:-4]) != crc:
        raise FrameError("the header is damaged: its crc32 differs")
    origin = Origin(rank, chunk)
    if version != VERSION:
        raise FrameError(f"frame from {origin}: format version {version}, known: {VERSION}")
    if dtype not in DTYPE_NAMES or zero or any(zeros):
        raise FrameError(f"frame from {origin}: the header has values that version {VERSION} does not know")
    size = HEADER_BYTES + payload
    if not (TILE_STEP <= tile <= TILE and tile % TILE_STEP == 0) or tiles != -(-elements // tile):
        raise FrameError(f"frame from {origin}: {tiles} tiles of {tile} do not make {elements} elements")
    if size > there or size < directory_bytes(tiles) or size % ALIGNMENT:
        raise FrameError(f"frame from {origin}: {size} bytes by its header, {there} are there")
    return Frame(codec, DTYPES[DTYPE_NAMES[dtype]], elements, size, tile, tiles, origin, total)


@dataclass(frozen=True, slots=True)
class Directory:
    """Entries, checksums (u64 each) and places of the tiles, the place after the last one included."""

    entries: tuple[Entry, ...]
    checksums: tuple[int, ...]
    places: tuple[int, ...]


def write_entry(wire: Array, index: int, entry: Entry, total: int) -> None:
    """Write the directory entry of a tile and its checksum."""
    ENTRY_STRUCT.pack_into(
        wire.data, HEADER_BYTES + index * ENTRY.itemsize, total, entry.bytes, entry.kept, entry.mode, entry.base,
        entry.bits, 0, entry.sparse, entry.exceptions,
    )  # fmt: skip


def close(wire: Array, frame: Frame, scratch: Scratch) -> None:
    """Write padding, directory checksum and header, when all entries and tiles are there."""
    wire[HEADER_BYTES + ENTRY.itemsize * frame.tiles : directory_bytes(frame.tiles)] = 0
    total = checksum(wire[HEADER_BYTES : directory_bytes(frame.tiles)], scratch.tile)
    write_header(
        wire,
        Frame(
            frame.codec,
            frame.dtype,
            frame.elements,
            frame.bytes,
            frame.tile,
            frame.tiles,
            frame.origin,
            total,
        ),
    )


def read_directory(wire: Array, frame: Frame, scratch: Scratch) -> Directory:
    """Read and check the directory. Raises FrameError."""
    start = directory_bytes(frame.tiles)
    if checksum(wire[HEADER_BYTES:start], scratch.tile) != frame.directory_checksum:
        raise FrameError(f"frame from {frame.origin}: the directory is damaged, its checksum differs")
    rows = wire[HEADER_BYTES : HEADER_BYTES + frame.tiles * ENTRY.itemsize].view(ENTRY)
    entries, checksums, places = [], [], [start]
    for index, (total, nbytes, kept, mode, base, bits, zero, sparse, exceptions) in enumerate(rows.tolist()):
        if nbytes % ALIGNMENT or places[-1] + nbytes > frame.bytes or zero:
            raise FrameError(
                f"frame from {frame.origin}, tile {index}: {nbytes} bytes, more than there are or not a "
                f"multiple of {ALIGNMENT}",
                index,
            )
        entries.append(Entry(nbytes, mode, kept, base, bits, sparse, exceptions))
        checksums.append(total)
        places.append(places[-1] + nbytes)
    if places[-1] != frame.bytes:
        raise FrameError(f"frame from {frame.origin}: tiles end at byte {places[-1]}, not at {frame.bytes}")
    return Directory(tuple(entries), tuple(checksums), tuple(places))
