"""What a codec is: it turns one tile of values into at most so many bytes, and back.

Codecs know tiles only. Header, directory, checksums and the loop over tiles are the frame's, the same for all
(`frame.py`, `coding.py`), so that a new codec is one small module and one line in the registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taccl.errors import CheckFailed
from taccl.runtime.dtypes import DTYPES, DType
from taccl.runtime.process_memory import address

Array = np.ndarray[Any, Any]

# Elements of a tile. Scratch for one stays in a second-level cache, and 16-bit positions reach all of it.
TILE = 65536
# Tiles are cut at multiples of this, so that blocks with a common scale never straddle two.
TILE_STEP = 256
# Every section of a frame starts at a multiple of this many bytes.
ALIGNMENT = 16

# Modes of a tile in the directory.
RAW, CODED, ZERO_MAP = 0, 1, 2

FLOATS = ("float32", "bfloat16", "float16")


class FrameError(CheckFailed):
    """A frame that cannot be decoded: damaged, malformed, or not the one that was expected.

    `tile` is the index of the tile in which it was noticed, None when it was noticed before any.
    """

    def __init__(self, message: str, tile: int | None = None) -> None:
        self.tile = tile
        super().__init__(message)


class TileError(ValueError):
    """A tile whose bytes contradict its directory entry. The frame turns it into a FrameError with places."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the directory says of a tile beside its checksum.

    bytes: of its payload, padding to ALIGNMENT included. kept: values that are coded (all, unless mode is
    ZERO_MAP). base, bits, sparse and exceptions: of `xw`, 0 for the others.
    """

    bytes: int
    mode: int
    kept: int = 0
    base: int = 0
    bits: int = 0
    sparse: int = 0
    exceptions: int = 0


@dataclass(frozen=True, slots=True)
class Promise:
    """|decoded - value| <= value |value| + block max|values of its block| + floor, for finite values.

    A block is `block_values` neighbours counted from the start of a tile; 0 where the block plays no part.
    """

    value: float = 0.0
    block: float = 0.0
    block_values: int = 0
    floor: float = 0.0


EXACT = Promise()


@dataclass(frozen=True, slots=True)
class Scratch:
    """Work space for one tile, 2.2 MB. One for each thread that codes; nothing in it outlives a call.

    `values` and `tile` hold a tile of any type: the first is the frame's (what it copies or adds up), the
    second the codec's, and the checksum's when the codec is done.
    """

    wide: Array = field(default_factory=lambda: np.empty(TILE, np.uint32))
    wide_too: Array = field(default_factory=lambda: np.empty(TILE, np.uint32))
    half: Array = field(default_factory=lambda: np.empty(TILE, np.uint16))
    half_too: Array = field(default_factory=lambda: np.empty(TILE, np.uint16))
    values_half: Array = field(default_factory=lambda: np.empty(TILE, np.uint16))
    bytes: Array = field(default_factory=lambda: np.empty(TILE, np.uint8))
    bytes_too: Array = field(default_factory=lambda: np.empty(TILE, np.uint8))
    flags: Array = field(default_factory=lambda: np.empty(TILE, np.bool_))
    tile: Array = field(default_factory=lambda: np.empty(8 * TILE, np.uint8))
    values: Array = field(default_factory=lambda: np.empty(8 * TILE, np.uint8))
    # Addresses of `tile` and `values`, for compiled code.
    at: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", (address(self.tile), address(self.values)))


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to code tiles.

    code: its number on the wire (128 and above: plug-ins). dtypes: what it takes, by name. most: (dtype,
    values) -> most bytes of a coded tile, a multiple of ALIGNMENT; exactly the bytes where `fixed`. encode:
    (values, wire, scratch) -> entry, into a wire of at least `most` bytes. decode: (entry, wire, values,
    scratch), the wire being the entry's bytes; raises TileError. Values are contiguous, aligned arrays of one
    tile; wires are uint8, aligned to 8 bytes.
    """

    name: str
    code: int
    promise: Promise
    dtypes: tuple[str, ...]
    fixed: bool
    most: Callable[[DType, int], int]
    encode: Callable[[Array, Array, Scratch], Entry]
    decode: Callable[[Entry, Array, Array, Scratch], None]

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit."""
        return self.promise == EXACT


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-nbytes // to) * to


def raw_bytes(dtype: DType, count: int) -> int:
    """Bytes of a tile as it is, padded."""
    return aligned(count * dtype.bytes)


def encode_raw(values: Array, wire: Array) -> Entry:
    """The tile as it is, for whatever does not shrink."""
    used = values.nbytes
    wire[:used] = values.view(np.uint8)
    size = aligned(used)
    wire[used:size] = 0
    return Entry(size, RAW, kept=len(values))


def decode_raw(entry: Entry, wire: Array, values: Array) -> None:
    """The inverse of `encode_raw`. Raises TileError when the size is not that of the values."""
    if entry != Entry(aligned(values.nbytes), RAW, kept=len(values)):
        raise TileError(f"{entry.bytes} raw bytes for {len(values)} values")
    values.view(np.uint8)[:] = wire[: values.nbytes]


def dtype_of(values: Array) -> DType:
    """The entry of DTYPES for an array's type. Raises ValueError for another type, or several dimensions."""
    if values.ndim != 1:
        raise ValueError(f"codecs take arrays of one dimension, found {values.ndim}; reshape(-1) first")
    found = _BY_NUMPY.get(values.dtype)
    if found is None:
        raise ValueError(f"no codec takes arrays of type {values.dtype}; known: {', '.join(DTYPES)}")
    return found


# The name of a numpy type is made anew each time that it is asked for.
_BY_NUMPY = {dtype.numpy: dtype for dtype in DTYPES.values()}
