"""`xw`, the exponent window: lossless for bfloat16, float16 and float32.

In tensors of neural networks only the exponents compress: most lie in a narrow window, the mantissas are
noise. So a tile is shifted until its usual exponents have few significant bits, and then

* all bytes but the top one are stored as they are,
* of the top byte: the sign and `bits` low bits of the symbol as dense planes,
* the next bit, which is set for the lower ("cold") half of the window, as a sparse plane: a map of its
  non-zero bytes, and those,
* what lies outside the window as exceptions: positions, and top bytes.

A tile with many zeros keeps a map of the others first; one that does not shrink stays raw. There are no tables
and no entropy state, so a tile decodes by itself with shifts, one prefix count and one scatter.
"""

from __future__ import annotations

import numpy as np

from taccl.runtime.codecs.codec import (
    CODED,
    EXACT,
    FLOATS,
    RAW,
    ZERO_MAP,
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
from taccl.runtime.codecs.plan import MOST_BITS, choose_window, sample_step
from taccl.runtime.codecs.planes import pack, unpack

SIGN = np.uint8(0x80)
MOST_EXCEPTIONS = 0xFFFF
# A map of the zeros pays from one zero in so many values, by bytes of a value.
ZEROS_ONE_IN = {2: 16, 4: 32}


def padded(count: int) -> int:
    """Values for which there is room in the planes."""
    return aligned(count, 64)


def sizes(width: int, count: int, kept: int, mode: int, bits: int, sparse: int, exceptions: int) -> list[int]:
    """Bytes of the sections of a coded tile, each a multiple of 8: zero map, low 16 bits, low byte, signs,
    dense planes, map of the sparse plane, its non-zero bytes, positions of exceptions, their top bytes."""
    room = padded(kept)
    return [
        padded(count) // 8 if mode == ZERO_MAP else 0,
        2 * room if width == 4 else 0,
        room,
        room // 8,
        bits * room // 8,
        aligned(room // 64, 8),
        aligned(sparse, 8),
        aligned(2 * exceptions, 8),
        aligned(exceptions, 8),
    ]


def encode(values: Array, wire: Array, scratch: Scratch) -> Entry:
    """Code a tile; raw where that is not larger."""
    words = values.view(np.uint16 if values.dtype.itemsize == 2 else np.uint32)
    return encode_words(words, wire, scratch) or encode_raw(values, wire)


def encode_words(words: Array, wire: Array, scratch: Scratch) -> Entry | None:
    """Code (n,) uint16 or uint32 bit patterns; None when that would not be smaller than they are."""
    count, width = len(words), words.dtype.itemsize
    sample = words[:: sample_step(count)]
    mode = CODED
    kept_words = words
    zero_map = np.empty(0, np.uint8)
    if (len(sample) - np.count_nonzero(sample)) * ZEROS_ONE_IN[width] > len(sample):
        mode = ZERO_MAP
        keep = np.not_equal(words, 0, out=scratch.flags[:count])
        zero_map = np.packbits(keep, bitorder="little")
        kept_words = scratch.tile.view(words.dtype)[: np.count_nonzero(keep)]
        np.compress(keep, words, out=kept_words)
        sample = kept_words[:: sample_step(len(kept_words))]
    kept = len(kept_words)
    room = padded(kept)
    if width == 4:
        sample = (sample >> 16).astype(np.uint16)
    base, bits = choose_window(sample) if kept else (0, 0)
    limit = aligned(words.nbytes)
    if sum(sizes(width, count, kept, mode, bits, 0, 0)) >= limit:
        return None

    half, top, work = scratch.half[:kept], scratch.bytes[:room], scratch.bytes_too[:room]
    if width == 4:
        wide = scratch.wide[:kept]
        np.right_shift(kept_words, np.uint32(16), out=wide)
        np.copyto(half, wide, casting="unsafe")
        np.subtract(half, np.uint16(base << 7), out=half)
    else:
        np.subtract(kept_words, np.uint16(base << 7), out=half)
    low = wire[_start(width, count, kept, mode) :][:room]
    np.copyto(low[:kept], half, casting="unsafe")
    np.right_shift(half, np.uint16(8), out=half)
    np.copyto(top[:kept], half, casting="unsafe")
    top[kept:] = 1 << bits

    cold, used, exceptions = _cold_and_exceptions(top, bits, work, scratch)
    sparse = int(np.count_nonzero(used))
    parts = sizes(width, count, kept, mode, bits, sparse, len(exceptions))
    total = aligned(sum(parts))
    if total >= limit or len(exceptions) > MOST_EXCEPTIONS:
        return None
    low[kept:] = 0
    cut = _Cutter(wire)
    _fill(cut(parts[0]), zero_map)
    low16 = cut(parts[1]).view(np.uint16)
    if width == 4:
        np.copyto(low16[:kept], kept_words, casting="unsafe")
        low16[kept:] = 0
    cut(parts[2])
    np.bitwise_and(top, SIGN, out=work)
    cut(parts[3])[:] = np.packbits(work, bitorder="little")
    pack(top, bits, cut(parts[4]), work)
    _fill(cut(parts[5]), np.packbits(used, bitorder="little"))
    _fill(cut(parts[6]), cold.compress(used))
    _fill(cut(parts[7]), exceptions.astype(np.uint16).view(np.uint8))
    _fill(cut(parts[8]), top.take(exceptions))
    wire[sum(parts) : total] = 0
    return Entry(total, mode, kept, base, bits, sparse, len(exceptions))


def _cold_and_exceptions(top: Array, bits: int, work: Array, scratch: Scratch) -> tuple[Array, Array, Array]:
    """(cold plane, which of its bytes are not 0, positions of exceptions) of padded top bytes."""
    np.bitwise_and(top, np.uint8(1 << bits), out=work)
    cold = np.packbits(work, bitorder="little")
    np.invert(cold, out=cold)
    beyond = 0x7F & -(2 << bits)
    if not beyond:
        return cold, cold != 0, np.empty(0, np.intp)
    np.bitwise_and(top, np.uint8(beyond), out=work)
    exceptions = np.flatnonzero(np.not_equal(work, 0, out=scratch.flags[: len(top)]))
    return cold, cold != 0, exceptions


def decode(entry: Entry, wire: Array, values: Array, scratch: Scratch) -> None:
    """The inverse of `encode`. Raises TileError when the bytes contradict the entry or themselves."""
    if entry.mode == RAW:
        decode_raw(entry, wire, values)
    else:
        decode_words(
            entry, wire, values.view(np.uint16 if values.dtype.itemsize == 2 else np.uint32), scratch
        )


def decode_words(entry: Entry, wire: Array, words: Array, scratch: Scratch) -> None:
    """Decode a coded tile into (n,) uint16 or uint32 bit patterns. Raises TileError."""
    count, width, kept = len(words), words.dtype.itemsize, entry.kept
    check_entry(entry, width, count)
    room = padded(kept)
    parts = sizes(width, count, kept, entry.mode, entry.bits, entry.sparse, entry.exceptions)
    cut = _Cutter(wire)
    zero_map = cut(parts[0])
    target = words
    if entry.mode == ZERO_MAP:
        keep = np.unpackbits(zero_map, bitorder="little").view(np.bool_)
        if np.count_nonzero(keep) != kept or keep[count:].any():
            raise TileError("the map of zeros does not keep as many values as its entry says")
        target = scratch.tile.view(words.dtype)[:kept]
    low16, low, signs = cut(parts[1]).view(np.uint16), cut(parts[2]), cut(parts[3])
    top, work = scratch.bytes[:room], scratch.bytes_too[:room]
    unpack(cut(parts[4]), entry.bits, top, work)
    plane = _sparse_plane(entry, cut(parts[5]), cut(parts[6]), room)
    _add_cold_and_signs(top, np.unpackbits(plane, bitorder="little"), signs, entry.bits)
    positions, tops = cut(parts[7]).view(np.uint16), cut(parts[8])
    if entry.exceptions:
        positions = positions[: entry.exceptions]
        if int(positions[-1]) >= kept or not (positions[1:] > positions[:-1]).all():
            raise TileError("the positions of exceptions do not rise, or lie outside of the tile")
        top[positions] = tops[: entry.exceptions]

    half = target if width == 2 else scratch.half[:kept]
    low_half = scratch.half_too[:kept]
    np.copyto(half, top[:kept])
    np.multiply(half, np.uint16(256), out=half)
    np.copyto(low_half, low[:kept])
    np.bitwise_or(half, low_half, out=half)
    np.add(half, np.uint16(entry.base << 7), out=half)
    if width == 4:
        wide = scratch.wide[:kept]
        np.copyto(target, half)
        np.left_shift(target, np.uint32(16), out=target)
        np.copyto(wide, low16[:kept])
        np.bitwise_or(target, wide, out=target)
    if entry.mode == ZERO_MAP:
        words[:] = 0
        words[np.flatnonzero(keep)] = target


def check_entry(entry: Entry, width: int, count: int) -> None:
    """Raise TileError unless the entry of a coded tile is one that an encoder could have written."""
    if entry.mode not in (CODED, ZERO_MAP):
        raise TileError(f"unknown mode {entry.mode}")
    if entry.bits > MOST_BITS:
        raise TileError(f"{entry.bits} dense bits, at most {MOST_BITS} are possible")
    if entry.kept > count or (entry.mode == CODED and entry.kept != count):
        raise TileError(f"{entry.kept} coded values in a tile of {count}")
    if entry.sparse > padded(entry.kept) // 8 or entry.exceptions > entry.kept:
        raise TileError("more exceptions, or bytes of the sparse plane, than values")
    parts = sizes(width, count, entry.kept, entry.mode, entry.bits, entry.sparse, entry.exceptions)
    if aligned(sum(parts)) != entry.bytes:
        raise TileError(f"{entry.bytes} bytes, its sections need {aligned(sum(parts))}")


def _sparse_plane(entry: Entry, used_map: Array, found: Array, room: int) -> Array:
    """(room / 8,) uint8: the plane that is set for hot values, that is the cold one inverted."""
    used = np.flatnonzero(np.unpackbits(used_map, bitorder="little").view(np.bool_))
    if len(used) != entry.sparse or (len(used) and int(used[-1]) >= room // 8):
        raise TileError("the map of the sparse plane does not count as many bytes as its entry says")
    plane = np.full(room // 8, 0xFF, np.uint8)
    plane[used] = ~found[: entry.sparse]
    return plane


def _add_cold_and_signs(top: Array, hot: Array, signs: Array, bits: int) -> None:
    """Put the bit of the half window and the sign above the dense bits of (p,) uint8, in place.

    hot: (p,) uint8 of 0 and 1. Whole words are shifted: 0 and 1 in a byte stay in it.
    """
    both = np.unpackbits(signs, bitorder="little").view(np.uint64)
    np.left_shift(both, np.uint64(7 - bits), out=both)
    np.bitwise_or(both, hot.view(np.uint64), out=both)
    np.left_shift(both, np.uint64(bits), out=both)
    words = top.view(np.uint64)
    np.bitwise_or(words, both, out=words)


class _Cutter:
    """Cuts consecutive sections off a wire."""

    def __init__(self, wire: Array) -> None:
        self.wire, self.place = wire, 0

    def __call__(self, size: int) -> Array:
        self.place += size
        return self.wire[self.place - size : self.place]


def _start(width: int, count: int, kept: int, mode: int) -> int:
    return sum(sizes(width, count, kept, mode, 0, 0, 0)[:2])


def _fill(section: Array, source: Array) -> None:
    """Copy what there is, zeros behind it."""
    section[: len(source)] = source
    section[len(source) :] = 0


CODEC = Codec("xw", 1, EXACT, FLOATS, False, raw_bytes, encode, decode)
