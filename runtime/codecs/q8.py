"""`q8`: float32 as int8 with one float32 scale for every 256 values.

A coded tile is its scales, then one byte a value. A block's scale is absmax / 127 and a value the nearest of
-127 to 127 scales. A block that holds NaN or infinities has the sign of its scale set: finite values use -125 to
125 scales of absmax / 125, 126 is infinity, -126 minus infinity, -128 NaN. So the size is known in advance and
one bad value does not spoil its neighbours. Blocks below 2^-119 become zeros: their scale would not be normal.
"""

from __future__ import annotations

import numpy as np

from taccl.runtime.codecs.blocks import Blocks
from taccl.runtime.codecs.codec import Array, Codec, Entry, Promise, Scratch
from taccl.runtime.dtypes import DType

BLOCK = 256
LEVELS, SPECIAL_LEVELS = np.float32(127), np.float32(125)
INFINITE, NOT_A_NUMBER = 126, -128
LEAST = np.float32(2.0**-119)
# Half a scale; in blocks with NaN or infinities half of absmax / 125. Four roundings, of the scale, its inverse and
# their products with values, add up to 2^-24 of absmax each, and a little more together.
PROMISE = Promise(block=1 / 250 + 2.0**-21, block_values=BLOCK, floor=2.0**-119)
# Adding this to a number of at most 2^22 leaves its nearest integer, ties to even, in the low bits.
ROUND = np.float32(3 << 22)


def most(dtype: DType, count: int) -> int:
    """A byte a value and four a block."""
    return Blocks(count, BLOCK).bytes


def encode(values: Array, wire: Array, scratch: Scratch) -> Entry:
    """Quantise; exactly `most` bytes."""
    layout = Blocks(len(values), BLOCK)
    blocks, scales = layout.number, layout.scales(wire)
    rows = _rows(values, blocks, scratch)
    work = scratch.wide[: blocks * BLOCK].view(np.float32).reshape(blocks, BLOCK)
    np.abs(rows, out=work)
    # The bits of floats without a sign are ordered as the floats, NaN last, and integers reduce faster.
    largest = np.maximum.reduce(work.view(np.uint32), axis=1).view(np.float32)
    special = np.flatnonzero(~np.isfinite(largest))
    largest[special] = 0
    inverse = _scales(largest, LEVELS, scales)
    # Infinity times 0, in blocks that are done again below.
    with np.errstate(invalid="ignore"):
        np.multiply(rows, inverse[:, None], out=work)
    np.add(work, ROUND, out=work)
    codes = scratch.bytes[: blocks * BLOCK]
    np.copyto(codes, work.view(np.uint32).reshape(-1), casting="unsafe")
    if len(special):
        table = codes.view(np.int8).reshape(blocks, BLOCK)
        table[special], scales[special] = _special(rows[special])
    layout.codes(wire)[:] = codes[: layout.count]
    layout.clear_padding(wire)
    return layout.entry


def decode(entry: Entry, wire: Array, values: Array, scratch: Scratch) -> None:
    """Multiply by the scales. Raises TileError for an entry that does not fit."""
    layout = Blocks(len(values), BLOCK)
    layout.check(entry)
    scales, codes = layout.scales(wire), layout.codes(wire).view(np.int8)
    np.copyto(values, codes)
    layout.multiply(values, np.abs(scales))
    for block in np.flatnonzero(np.signbit(scales)):
        part = slice(int(block) * BLOCK, (int(block) + 1) * BLOCK)
        for code, value in ((INFINITE, np.inf), (-INFINITE, -np.inf), (NOT_A_NUMBER, np.nan)):
            values[part][codes[part] == code] = value


def _rows(values: Array, blocks: int, scratch: Scratch) -> Array:
    """(blocks, BLOCK) of the values, zeros behind the last."""
    if len(values) == blocks * BLOCK:
        return values.reshape(blocks, BLOCK)
    copy = scratch.wide_too[: blocks * BLOCK].view(np.float32)
    copy[: len(values)] = values
    copy[len(values) :] = 0
    return copy.reshape(blocks, BLOCK)


def _scales(largest: Array, levels: np.float32, scales: Array) -> Array:
    """Write absmax / levels and give (levels / absmax); both 0 for blocks below LEAST."""
    tiny = largest < LEAST
    np.divide(largest, levels, out=scales)
    # A scale that was rounded up may overflow when it is multiplied again.
    with np.errstate(over="ignore"):
        scales.view(np.uint32)[np.isinf(scales * levels)] -= 1
    scales[tiny] = 0
    inverse = np.divide(levels, largest, out=np.zeros_like(largest), where=~tiny)
    return inverse.astype(np.float32, copy=False)


def _special(rows: Array) -> tuple[Array, Array]:
    """(codes, scales) of blocks with NaN or infinities."""
    finite = np.isfinite(rows)
    plain = np.where(finite, rows, np.float32(0))
    scales = np.empty(len(rows), np.float32)
    inverse = _scales(np.abs(plain).max(axis=1), SPECIAL_LEVELS, scales)
    codes = np.rint(plain * inverse[:, None]).astype(np.int8)
    codes[~finite & (rows > 0)] = INFINITE
    codes[~finite & (rows < 0)] = -INFINITE
    codes[np.isnan(rows)] = NOT_A_NUMBER
    scales.view(np.uint32)[:] |= np.uint32(1 << 31)
    return codes, scales


CODEC = Codec("q8", 3, PROMISE, ("float32",), True, most, encode, decode)
