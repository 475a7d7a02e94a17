"""Bit fields of a byte array, packed: the layout of `xw`'s dense bits.

A field of 1 bit is a bit plane in little bit order. Fields of 2 and 4 bits lie in slices: byte i of a field of
w bits holds the values i, i + s, i + 2s, ... with s = values w / 8, the first in its lowest bits. Slices need
only shifts of whole arrays, in numpy and in a kernel alike. Values are a multiple of 64.
"""

from __future__ import annotations

import numpy as np

from taccl.runtime.codecs.codec import Array

SHIFTS = {width: np.arange(0, 8, width, dtype=np.uint64)[:, None] for width in (2, 4)}
MASKS = {2: 0x0303030303030303, 4: 0x0F0F0F0F0F0F0F0F}


def fields(bits: int) -> list[tuple[int, int]]:
    """(width, lowest bit) of the fields that hold the `bits` low bits: widths 4, 2, 1 as in binary."""
    found, low = [], 0
    for width in (4, 2, 1):
        if bits & width:
            found.append((width, low))
            low += width
    return found


def pack(source: Array, bits: int, target: Array, work: Array) -> None:
    """Pack the `bits` low bits of (p,) uint8 into (p bits / 8,) uint8. work: (p,) uint8, overwritten."""
    place = 0
    for width, low in fields(bits):
        size = len(source) * width // 8
        field = target[place : place + size]
        if width == 1:
            np.bitwise_and(source, np.uint8(1 << low), out=work)
            field[:] = np.packbits(work, bitorder="little")
        else:
            words = work.view(np.uint64)
            np.bitwise_and(source.view(np.uint64), np.uint64(MASKS[width] << low), out=words)
            if low:
                np.right_shift(words, np.uint64(low), out=words)
            rows = words.reshape(8 // width, -1)
            np.left_shift(rows, SHIFTS[width], out=rows)
            np.bitwise_or.reduce(rows, axis=0, out=field.view(np.uint64))
        place += size


def unpack(source: Array, bits: int, target: Array, work: Array) -> None:
    """The inverse of `pack`: the other bits of (p,) uint8 `target` become 0. work: (p,) uint8, overwritten."""
    if bits == 0:
        target[:] = 0
    place = 0
    for width, low in fields(bits):
        size = len(target) * width // 8
        field = source[place : place + size]
        into = target if place == 0 else work
        words = into.view(np.uint64)
        if width == 1:
            into[:] = np.unpackbits(field, bitorder="little")
        else:
            np.right_shift(field.view(np.uint64), SHIFTS[width], out=words.reshape(8 // width, -1))
            np.bitwise_and(words, np.uint64(MASKS[width]), out=words)
        if place:
            np.left_shift(words, np.uint64(low), out=words)
            np.bitwise_or(target, work, out=target)
        place += size
