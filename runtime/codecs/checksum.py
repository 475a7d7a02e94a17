"""The checksum of tiles and directories: a sum over 64-bit words, in any order, on any device.

With w' = w xor (w >> 32), the sum over the words w_0, w_1, ... of (2i + 1) w'_i modulo 2^64. A GPU adds it up in
the kernel that writes the bytes, numpy in three passes over data that is in the cache; a CRC would need tables
and one order, and zlib's is half as fast.

What it notices, for up to 2^31 words: whatever changes one word (the fold is a bijection, and the weights are
odd), and any two flipped bits. Two flips in bits 0 to 31 of different words would have to cancel as
2^a (+-(2i+1) +- (2j+1)) = 0 modulo 2^64, impossible as the bracket is not 0 and smaller than 2^33. Bits from 32
on reach down to a - 32 through the fold and repeat the argument modulo 2^32 with weights below it. Without the
fold, two flips of bit 63 would cancel wherever they are.
"""

from __future__ import annotations

import functools

import numpy as np

from taccl.runtime.codecs import compiled
from taccl.runtime.codecs.codec import Array

MODULUS = 2**64
# Words at a time: what is folded stays in a second-level cache, whatever the length of the data.
BLOCK = 16384


@functools.lru_cache(maxsize=1)
def _weights() -> Array:
    weights = np.arange(1, 2 * BLOCK, 2, dtype=np.uint64)
    weights.flags.writeable = False
    return weights


def checksum(data: Array, work: Array) -> int:
    """The sum of (8 n,) uint8, aligned to 8 bytes. work: at least 8 BLOCK bytes, aligned, overwritten."""
    found = compiled.checksum(data)
    if found is not None:
        return found
    words = data.view(np.uint64)
    total = 0
    for first in range(0, len(words), BLOCK):
        block = words[first : first + BLOCK]
        folded = work.view(np.uint64)[: len(block)]
        np.right_shift(block, np.uint64(32), out=folded)
        np.bitwise_xor(folded, block, out=folded)
        # Weights 2 (first + i) + 1: those of the block, and what is the same for all of it.
        total += int(np.einsum("i,i->", folded, _weights()[: len(block)]))
        if first:
            total += 2 * first * int(np.add.reduce(folded))
    return total % MODULUS
