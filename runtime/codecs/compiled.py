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
ANY = (-1, -1)  # origin


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
    found.taccl_encode.restype = ctypes.c_int64
    return found


def checksum(data: Array) -> int | None:
    """As `checksum.checksum`."""
    calls = library()
    return None if calls is None else int(calls.taccl_checksum(address(data), data.nbytes))


def encode(
    codec: Codec, code: int, values: Array, wire: Array, scratch: Scratch, origin: tuple[int, int], tile: int
) -> int | None:
    """The bytes of the frame. code: of the values' type, on the wire."""
    calls = library()
    if calls is None or codec.code not in CODES or not _fits(origin):
        return None
    call = Call(
        codec.code,
        code,
        len(values),
        tile,
        *origin,
        address(values),
        address(wire),
        len(wire),
        *_work(scratch),
    )
    return int(calls.taccl_encode(ctypes.byref(call))) or None


def decode(
    codec: Codec, code: int, wire: Array, values: Array, scratch: Scratch, origin: tuple[int, int]
) -> bool | None:
    """True when it is decoded, False when a tile is wrong and some are decoded. origin: or ANY."""
    return _take("taccl_decode", codec, code, wire, values, scratch, origin)


def accumulate(
    codec: Codec, code: int, wire: Array, total: Array, scratch: Scratch, origin: tuple[int, int]
) -> bool | None:
    """As `decode`, added to (n,) float32."""
    return _take("taccl_accumulate", codec, code, wire, total, scratch, origin)


def _take(
    name: str, codec: Codec, code: int, wire: Array, values: Array, scratch: Scratch, origin: tuple[int, int]
) -> bool | None:
    calls = library()
    if calls is None or codec.code not in CODES or not (origin == ANY or _fits(origin)):
        return None
    call = Call(
        codec.code,
        code,
        len(values),
        TILE,
        *origin,
        address(values),
        address(wire),
        len(wire),
        *_work(scratch),
    )
    done = calls[name](ctypes.byref(call))
    return None if done == 0 else done > 0


def _fits(origin: tuple[int, int]) -> bool:
    """Whether a header has room for it."""
    return all(0 <= number < 2**32 for number in origin)


def _work(scratch: Scratch) -> tuple[int, int]:
    return address(scratch.tile), address(scratch.values)
