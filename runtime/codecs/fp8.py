"""`fp8`: float32 as e4m3 (OCP: 4 bits of exponent, 3 of mantissa, no infinities) with one float32 scale for every
128 values.

A coded tile is its scales, then one byte a value. A block's scale is absmax / 448, so nothing saturates. NaN
and infinities become NaN (0x7f and their sign): an overflow stays visible. Small values keep a relative error
where `q8` has an absolute one. Blocks below 2^-117 become zeros: their scale would not be normal.
"""

from __future__ import annotations

import functools

import numpy as np

from taccl.runtime.codecs.blocks import Blocks
from taccl.runtime.codecs.codec import Array, Codec, Entry, Promise, Scratch
from taccl.runtime.dtypes import DType

BLOCK = 128
LARGEST = np.float32(448)
LEAST = np.float32(2.0**-117)
NOT_A_NUMBER = 0x7F
SMALLEST_NORMAL = np.float32(2.0**-6)
# Its unit in the last place is that of e4m3's subnormals, 2^-9.
ROUND_SUBNORMAL = np.float32(2.0**14)
# Half a unit of the last of 4 bits; among the subnormals half of 2^-9 scales. Roundings of scale, quotient and
# product are in the factor.
PROMISE = Promise(
    value=2.0**-4 * (1 + 2.0**-18), block=2.0**-10 / 448 * (1 + 2.0**-18), block_values=BLOCK, floor=2.0**-117
)


def most(dtype: DType, count: int) -> int:
    """A byte a value and four a block."""
    return Blocks(count, BLOCK).bytes


def encode(values: Array, wire: Array, scratch: Scratch) -> Entry:
    """Scale and round; exactly `most` bytes."""
    layout = Blocks(len(values), BLOCK)
    count, blocks, scales = layout.count, layout.number, layout.scales(wire)
    room = blocks * BLOCK
    copy = scratch.wide_too[:room].view(np.float32)
    np.abs(values, out=copy[:count])
    copy[count:] = 0
    rows = copy.reshape(blocks, BLOCK)
    largest = _largest(rows)
    bad = None
    if not np.isfinite(largest).all():
        bad = np.flatnonzero(~np.isfinite(copy))
        copy[bad] = 0
        largest = _largest(rows)
    tiny = largest < LEAST
    np.divide(largest, LARGEST, out=scales)
    scales[tiny] = 0
    inverse = np.divide(LARGEST, largest, out=np.zeros_like(largest), where=~tiny)
    np.multiply(rows, inverse[:, None], out=rows)
    np.minimum(copy, LARGEST, out=copy)
    codes = scratch.bytes[:room]
    _to_e4m3(copy, codes, scratch)
    codes = codes[:count]
    if bad is not None:
        codes[bad] = NOT_A_NUMBER
    signs = scratch.flags[:count]
    np.signbit(values, out=signs)
    _add_signs(codes, signs.view(np.uint8), layout.codes(wire))
    layout.clear_padding(wire)
    return layout.entry


def decode(entry: Entry, wire: Array, values: Array, scratch: Scratch) -> None:
    """Look up and multiply by the scales. Raises TileError for an entry that does not fit."""
    layout = Blocks(len(values), BLOCK)
    layout.check(entry)
    np.take(table(), layout.codes(wire), out=values, mode="clip")
    layout.multiply(values, layout.scales(wire))


@functools.lru_cache(maxsize=1)
def table() -> Array:
    """(256,) float32: the value of every e4m3 code."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[code & 0x7F == NOT_A_NUMBER] = np.nan
    values = np.where(code & 0x80, -size, size).astype(np.float32)
    values.flags.writeable = False
    return values


def _largest(rows: Array) -> Array:
    """Maxima of (b, n) float32 without signs: their bits are ordered as they are, NaN last."""
    found: Array = np.maximum.reduce(rows.view(np.uint32), axis=1).view(np.float32)
    return found


def _to_e4m3(sizes: Array, codes: Array, scratch: Scratch) -> None:
    """(n,) float32 from 0 to 448 into the (n,) uint8 of their nearest e4m3, ties to even.

    Values of at least 2^-6 round in their bits; for the others an addition rounds to multiples of 2^-9. Each
    path gets 2^-6 where it is the other's turn, whose code is 8, so that the codes add up.
    """
    large = scratch.wide[: len(sizes)]
    np.maximum(sizes, SMALLEST_NORMAL, out=large.view(np.float32))
    small = scratch.tile.view(np.float32)[: len(sizes)]
    np.minimum(sizes, SMALLEST_NORMAL, out=small)
    np.add(small, ROUND_SUBNORMAL, out=small)
    odd = scratch.tile.view(np.uint32)[len(sizes) : 2 * len(sizes)]
    np.right_shift(large, np.uint32(20), out=odd)
    np.bitwise_and(odd, np.uint32(1), out=odd)
    np.add(large, odd, out=large)
    # Exponent 121 of float32 is 1 of e4m3: its code starts at 120 << 3.
    np.add(large, np.uint32((0x7FFFF - (120 << 23)) % 2**32), out=large)
    np.right_shift(large, np.uint32(20), out=large)
    np.add(large, small.view(np.uint32), out=large)
    # The low byte of the sum: that of 2^14 in float32 is 0, and 8 was counted twice.
    np.copyto(codes, large, casting="unsafe")
    np.subtract(codes, np.uint8(8), out=codes)


def _add_signs(codes: Array, signs: Array, target: Array) -> None:
    """codes + 128 signs, signs being 0 and 1."""
    np.multiply(signs, np.uint8(0x80), out=target)
    np.bitwise_or(target, codes, out=target)


CODEC = Codec("fp8", 4, PROMISE, ("float32",), True, most, encode, decode)
