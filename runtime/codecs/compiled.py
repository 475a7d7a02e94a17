"""Whole frames by compiled code (`runtime/native/frame.c`): the same bytes as `coding.py`, several times as quick.

Each function gives None where there is no such code, or where it leaves the frame to its twin: what is damaged or not
as expected, which the twin has words for, and values that `q8` and `fp8` treat apart (NaN, infinities).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from taccl.runtime import native
from taccl.runtime.codecs.codec import TILE, Array, Codec, Scratch
from taccl.runtime.process_memory import address

CODES = (0, 1, 2, 3, 4, 7)  # of the codecs that it has
ANY = (-1, -1)  # origin, for frame.c


class Call(ctypes.Structure):
    """As `struct call` in frame.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("codec", "type", "count", "tile", "rank", "chunk")),
        ("values", ctypes.c_void_p),
        ("wire", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("spare", ctypes.c_void_p),
    )


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """The calls with their types; None where there are none."""
    found = native.library()
    if found is None or sys.byteorder != "little":
        return None
    found.taccl_checksum.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    found.taccl_checksum.restype = ctypes.c_uint64
    for name in ("taccl_encode", "taccl_decode", "taccl_accumulate"):
        getattr(found, name).restype = ctypes.c_int64  # which found[name] would forget
    return found


def checksum(data: Array) -> int | None:
    """As `checksum.checksum`."""
    calls = library()
    return None if calls is None else int(calls.taccl_checksum(address(data), data.nbytes))


def encode(
    codec: Codec, code: int, values: Array, wire: Array, scratch: Scratch, origin: tuple[int, int], tile: int
) -> int | None:
    """The bytes of the frame. code: of the values' type, on the wire. origin: (rank, chunk)."""
    return _done("taccl_encode", codec, code, values, wire, scratch, origin, tile) or None


def decode(
    codec: Codec, code: int, wire: Array, values: Array, scratch: Scratch, origin: tuple[int, int] | None
) -> int | None:
    """The bytes of the frame, 0 when a tile is wrong and some are decoded. origin: (rank, chunk); None: any."""
    done = _done("taccl_decode", codec, code, values, wire, scratch, origin)
    return None if done == 0 else max(0, done)


def accumulate(
    codec: Codec, code: int, wire: Array, total: Array, scratch: Scratch, origin: tuple[int, int] | None
) -> int | None:
    """As `decode`, added to (n,) float32."""
    done = _done("taccl_accumulate", codec, code, total, wire, scratch, origin)
    return None if done == 0 else max(0, done)


def _done(
    name: str, codec: Codec, code: int, values: Array, wire: Array, scratch: Scratch,
    origin: tuple[int, int] | None, tile: int = TILE,
) -> int:  # fmt: skip
    """What a call gives, 0 where the frame is left to Python: also for an origin that no header has room for."""
    calls = library()
    fits = origin is None or all(0 <= number < 2**32 for number in origin)
    if calls is None or codec.code not in CODES or not fits:
        return 0
    call = Call(
        codec.code, code, len(values), tile, *(origin or ANY), address(values), address(wire), len(wire), *scratch.at
    )  # fmt: skip
    return int(getattr(calls, name)(ctypes.byref(call)))
