"""Where the window of exponents lies: the choice that an `xw` encoder makes for a tile.

Any base and width decode; this rule is fixed so that every implementation writes the same bytes. It counts
symbols (bits 7 to 14 of a value's top 16 bits; the whole exponent of bfloat16 and float32) in a sample, and
compares widths by the bits that they would cost.
"""

from __future__ import annotations

import numpy as np

from taccl.runtime.codecs.codec import Array

SYMBOLS = 256
MOST_BITS = 6
FIRST_BITS = 2
# Bits that an exception costs: a position of 16 and a byte; counted a little dearer, for they are slow too.
EXCEPTION_BITS = 28
COLD_BITS = 7
# From this cost a value on, the first minimum may not be the least one, and all widths are tried.
DEAR_BITS = 6
# A window reaches at most this far beyond the symbols, on either side.
MARGIN = 4 << MOST_BITS


def sample_step(count: int) -> int:
    """Every how many-th value is looked at: about a thousand in a full tile, an odd step so that it visits
    every column of a matrix whose rows are a power of two."""
    return (count >> 10) | 1


def choose_window(sample: Array) -> tuple[int, int]:
    """(base, bits) for a sample of top halves, (s,) uint16, s >= 1.

    With bits = d the hot window is the 2^(d+1) symbols from base + 2^(d+1), the cold one the 2^(d+1) below;
    the rest are exceptions. For a d the base is the lowest one with the most of 28 hot + 21 cold (from -2^(d+1)
    on); widths are tried from FIRST_BITS downwards, then upwards, for as long as the cost falls.
    """
    count = len(sample)
    below = np.zeros(MARGIN + SYMBOLS + MARGIN, np.int32)
    counts = np.bincount((sample >> 7 & 0xFF).astype(np.intp), minlength=SYMBOLS)
    np.cumsum(counts, out=below[MARGIN : MARGIN + SYMBOLS])
    below[MARGIN + SYMBOLS :] = count
    hot_worth = EXCEPTION_BITS * below
    cold_worth = (EXCEPTION_BITS - COLD_BITS) * below
    difference = hot_worth - cold_worth

    def cost(bits: int) -> tuple[int, int]:
        # below[first + i] counts the symbols under base + i, for the bases from -width on: a hot window may
        # start at symbol 0.
        width = 2 << bits
        first, span = MARGIN - 1 - width, SYMBOLS + width
        worth = hot_worth[first + 2 * width :][:span] - difference[first + width :][:span]
        worth -= cold_worth[first : first + span]
        at = first + int(worth.argmax())
        start, half, end = below[at : at + 2 * width + 1 : width].tolist()
        return _cost(bits, count, end - half, half - start), at - MARGIN + 1

    best_bits = FIRST_BITS
    best = cost(best_bits)
    for step in (-1, 1):
        while 0 <= best_bits + step <= MOST_BITS:
            tried = cost(best_bits + step)
            if tried[0] >= best[0]:
                break
            best_bits, best = best_bits + step, tried
    if best[0] > DEAR_BITS * count:
        best_bits = min(range(MOST_BITS + 1), key=lambda bits: cost(bits)[0])
        best = cost(best_bits)
    return best[1] % SYMBOLS, best_bits


def _cost(bits: int, count: int, hot: int, cold: int) -> int:
    """Bits for a sample: dense planes, the map of the sparse plane, its non-zero bytes, exceptions.

    A byte of the sparse plane is non-zero with probability 1 - (1 - p)^8, which 8p / (1 + 5p) approaches
    within a twentieth, in integers that every implementation computes alike.
    """
    exceptions = count - hot - cold
    sparse = count // 8 + (8 * cold * count) // (count + 5 * cold)
    return bits * count + sparse + EXCEPTION_BITS * exceptions
