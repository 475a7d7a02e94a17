"""Tiles of one byte a value and one float32 scale for every block of values: the layout of `q8` and `fp8`.

Scales first, padded to ALIGNMENT, then the bytes, padded too. What a byte means is the codec's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from taccl.runtime.codecs.codec import CODED, Array, Entry, TileError, aligned


@dataclass(frozen=True, slots=True)
class Blocks:
    """`count` values in blocks of `length`, the last one shorter where they do not go into each other."""

    count: int
    length: int

    @property
    def number(self) -> int:
        """How many blocks, the shorter one included."""
        return -(-self.count // self.length)

    @property
    def start(self) -> int:
        """The byte at which the values begin."""
        return aligned(4 * self.number)

    @property
    def bytes(self) -> int:
        """Of the coded tile."""
        return self.start + aligned(self.count)

    @property
    def entry(self) -> Entry:
        """What the directory says of such a tile."""
        return Entry(self.bytes, CODED, kept=self.count)

    def clear_padding(self, wire: Array) -> None:
        """Zeros behind the scales and behind the values."""
        wire[4 * self.number : self.start] = 0
        wire[self.start + self.count : self.bytes] = 0

    def scales(self, wire: Array) -> Array:
        """(number,) float32, in place."""
        return wire[: 4 * self.number].view(np.float32)

    def codes(self, wire: Array) -> Array:
        """(count,) uint8, in place."""
        return wire[self.start : self.start + self.count]

    def check(self, entry: Entry) -> None:
        """Raise TileError for an entry that does not fit."""
        if entry != self.entry:
            raise TileError(f"{entry.bytes} bytes for {self.count} values")

    def multiply(self, values: Array, scales: Array) -> None:
        """Each block of (count,) float32 by its scale, in place."""
        whole = self.count // self.length
        rows = values[: whole * self.length].reshape(whole, self.length)
        # Scales of a frame that no encoder wrote may overflow or be NaN; the sum of the values is theirs to answer.
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(rows, scales[:whole, None], out=rows)
            if whole < self.number:
                np.multiply(values[whole * self.length :], scales[whole], out=values[whole * self.length :])
