"""`bf16`: float32 rounded to bfloat16, to nearest, ties to even. `bf16-xw` codes the result by `xw` on top.

Infinities stay, and every NaN becomes the quiet one of its sign (0x7fc0). Values above 3.39e38 round to
infinity, as everywhere. The cast is ml_dtypes', one pass that gives up the interpreter lock.
"""

from __future__ import annotations

import numpy as np

from taccl.runtime.codecs import xw
from taccl.runtime.codecs.codec import (
    CODED,
    RAW,
    Array,
    Codec,
    Entry,
    Promise,
    Scratch,
    TileError,
    aligned,
)
from taccl.runtime.dtypes import DTYPES, DType

BFLOAT16 = DTYPES["bfloat16"].numpy

# Half a unit of the last of 8 bits; below the normal numbers half the smallest subnormal.
PROMISE = Promise(value=2.0**-8, floor=2.0**-134)


def most(dtype: DType, count: int) -> int:
    """Two bytes a value."""
    return aligned(2 * count)


def round_to(values: Array, half: Array) -> None:
    """(n,) float32 into the (n,) uint16 of their nearest bfloat16."""
    # The cast says "invalid value" of NaN, which it keeps.
    with np.errstate(invalid="ignore"):
        np.copyto(half.view(BFLOAT16), values, casting="unsafe")


def widen(half: Array, values: Array) -> None:
    """(n,) uint16 of bfloat16 into (n,) float32."""
    np.copyto(values, half.view(BFLOAT16))


def encode(values: Array, wire: Array, scratch: Scratch) -> Entry:
    """Round; exactly `most` bytes."""
    size, used = aligned(2 * len(values)), 2 * len(values)
    round_to(values, wire[:used].view(np.uint16))
    wire[used:size] = 0
    return Entry(size, CODED, kept=len(values))


def decode(entry: Entry, wire: Array, values: Array, scratch: Scratch) -> None:
    """Widen. Raises TileError for an entry that does not fit."""
    if entry != Entry(aligned(2 * len(values)), CODED, kept=len(values)):
        raise TileError(f"{entry.bytes} bytes for {len(values)} values")
    widen(wire[: 2 * len(values)].view(np.uint16), values)


def encode_windowed(values: Array, wire: Array, scratch: Scratch) -> Entry:
    """Round, then `xw`; as `encode` where that is not smaller."""
    half = scratch.values_half[: len(values)]
    round_to(values, half)
    found = xw.encode_words(half, wire, scratch)
    if found is not None:
        return found
    size, used = aligned(2 * len(values)), 2 * len(values)
    wire[:used].view(np.uint16)[:] = half
    wire[used:size] = 0
    return Entry(size, RAW, kept=len(values))


def decode_windowed(entry: Entry, wire: Array, values: Array, scratch: Scratch) -> None:
    """The inverse of `encode_windowed`. Raises TileError."""
    if entry.mode == RAW:
        if entry != Entry(aligned(2 * len(values)), RAW, kept=len(values)):
            raise TileError(f"{entry.bytes} raw bytes for {len(values)} values")
        half = wire[: 2 * len(values)].view(np.uint16)
    else:
        half = scratch.values_half[: len(values)]
        xw.decode_words(entry, wire, half, scratch)
    widen(half, values)


CODEC = Codec("bf16", 2, PROMISE, ("float32",), True, most, encode, decode)
WINDOWED = Codec("bf16-xw", 7, PROMISE, ("float32",), False, most, encode_windowed, decode_windowed)
