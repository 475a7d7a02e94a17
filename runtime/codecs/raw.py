"""`raw`: the bytes as they are, in a frame with checksums."""

from __future__ import annotations

from taccl.runtime.codecs.codec import EXACT, Array, Codec, Entry, Scratch, decode_raw, encode_raw, raw_bytes
from taccl.runtime.dtypes import DTYPES


def encode(values: Array, wire: Array, scratch: Scratch) -> Entry:
    """Copy."""
    return encode_raw(values, wire)


def decode(entry: Entry, wire: Array, values: Array, scratch: Scratch) -> None:
    """Copy back. Raises TileError for a size that does not fit."""
    decode_raw(entry, wire, values)


CODEC = Codec("raw", 0, EXACT, tuple(DTYPES), True, raw_bytes, encode, decode)
