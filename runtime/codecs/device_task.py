"""What the kernels of frames.cu are told of a frame: how its header must be, and where to say what they found.

A header is known but for the frame's bytes, the checksum of its directory and its own crc32. A crc32 is linear, so the
host computes it with zeros in place of the two words and what each of their bits changes; the kernels put these
together, and compare the rest byte for byte.
"""

from __future__ import annotations

import zlib

import numpy as np

from taccl.runtime.codecs.codec import TILE, Array, Codec
from taccl.runtime.codecs.frame import HEADER, HEADER_BYTES, Frame, Origin, write_header
from taccl.runtime.dtypes import DType

# struct Task of kernels.cu
TASK = np.dtype(
    [
        ("header", "u1", HEADER_BYTES),
        ("begin", "<u8"),
        ("room", "<u8"),
        ("head", "<u8"),
        ("wrong", "<u8"),
        ("index", "<u4"),
        ("width", "<u4"),
        ("most", "<u4"),
        ("last", "<u4"),
        ("refused", "<u4"),
        ("zero", "<u4"),
    ]
)
WORDS = (16, 40)  # bytes of the header at which the two words stand that the kernels write
CRC = 60


def crc_table() -> Array:
    """(128,) uint32: what each bit of the two words changes in the crc32 of a header."""
    changes = np.zeros(128, np.uint32)
    nothing = zlib.crc32(bytes(CRC))
    for place, first in enumerate(WORDS):
        for bit in range(64):
            message = bytearray(CRC)
            message[first + bit // 8] = 1 << bit % 8
            changes[64 * place + bit] = zlib.crc32(message) ^ nothing
    return changes


def header_of(codec: Codec, dtype: DType, count: int, origin: Origin) -> Array:
    """(64,) uint8: the header of a frame of so many values, the two words 0, with its crc32."""
    header = np.zeros(HEADER.size, np.uint8)
    tiles = -(-count // TILE)
    write_header(header, Frame(codec.code, dtype, count, HEADER_BYTES, TILE, tiles, origin, 0))
    return header


def window_width(codec: Codec, dtype: DType) -> int:
    """Bytes of a value in the windows of a codec's tiles; 0 where they have none, but one length."""
    if codec.fixed:
        return 0
    return 2 if codec.name == "bf16-xw" else dtype.bytes
