"""`zstd`: Zstandard on byte planes, for integers: token ids, routing tables, counts.

The bytes of a tile are sorted by significance first (all lowest bytes, then the next ones), so that the upper
bytes of small numbers become long runs of zeros. Needs the package zstandard (`pip install 'taccl[zstd]'`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.codecs.codec import (
    CODED,
    EXACT,
    RAW,
    Array,
    Codec,
    Entry,
    Scratch,
    TileError,
    aligned,
    decode_raw,
    encode_raw,
    raw_bytes,
)
from taccl.runtime.dtypes import DTYPES

LEVEL = 1
# No tile is larger than this, so no honest stream asks for a larger window.
MOST_WINDOW = 1 << 20


def load() -> Any:
    """The module zstandard. Raises EnvironmentProblem without it."""
    try:
        import zstandard
    except ImportError:
        raise EnvironmentProblem(
            "codec zstd needs the Python package zstandard; pip install 'taccl[zstd]'"
        ) from None
    return zstandard


def encode(values: Array, wire: Array, scratch: Scratch) -> Entry:
    """Compress the planes; raw where that is not smaller."""
    width = values.dtype.itemsize
    planes = scratch.tile[: values.nbytes]
    planes.reshape(width, -1)[:] = values.view(np.uint8).reshape(-1, width).T
    packed = load().ZstdCompressor(level=LEVEL, write_checksum=False).compress(planes)
    size = aligned(4 + len(packed))
    if size >= aligned(values.nbytes):
        return encode_raw(values, wire)
    wire[:4].view(np.uint32)[0] = len(packed)
    wire[4 : 4 + len(packed)] = np.frombuffer(packed, np.uint8)
    wire[4 + len(packed) : size] = 0
    return Entry(size, CODED, kept=len(values))


def decode(entry: Entry, wire: Array, values: Array, scratch: Scratch) -> None:
    """The inverse of `encode`. Raises TileError for a stream that is not exactly the tile's."""
    if entry.mode == RAW:
        decode_raw(entry, wire, values)
        return
    zstandard = load()
    length = int(wire[:4].view(np.uint32)[0]) if entry.bytes >= 4 else 0
    if entry != Entry(aligned(4 + length), CODED, kept=len(values)):
        raise TileError(f"{entry.bytes} bytes do not hold a stream of {length}")
    planes = scratch.tile[: values.nbytes]
    # Into a buffer of the right size, so that a stream cannot grow beyond it.
    reader = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW).stream_reader(wire[4 : 4 + length])
    try:
        got = 0
        while got < len(planes):
            more = reader.readinto(planes[got:])
            if not more:
                break
            got += more
        beyond = reader.read(1)
    except zstandard.ZstdError as error:
        raise TileError(f"the stream of Zstandard cannot be read: {error}") from None
    if got != len(planes) or beyond:
        raise TileError(f"a stream of Zstandard that is not {len(planes)} bytes long")
    width = values.dtype.itemsize
    values.view(np.uint8).reshape(-1, width)[:] = planes.reshape(width, -1).T


CODEC = Codec("zstd", 5, EXACT, tuple(DTYPES), False, raw_bytes, encode, decode)
