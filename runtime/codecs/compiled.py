"""Tiles by compiled code (`runtime/native/`): the same bytes as the array operations, in a quarter of the time.

Each function gives None or False where there is no such code, or where it leaves the tile to its twin: `xw` when a tile
is wrong, which the twin has words for, and `q8` when it holds NaN or infinities.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from taccl.runtime import native
from taccl.runtime.codecs.codec import Array, Entry, Scratch

WORDS = 7 * ctypes.c_int64  # of an entry, as in xw.c


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """The calls with their types; None where there are none."""
    found = native.library()
    if found is not None:
        place, number = ctypes.c_void_p, ctypes.c_int64
        found.taccl_checksum.argtypes, found.taccl_checksum.restype = (place, number), ctypes.c_uint64
        found.taccl_xw_encode.argtypes = (place, number, number, place, place, place)
        found.taccl_xw_decode.argtypes = (place, place, number, number, place, place)
        found.taccl_q8_encode.argtypes = (place, number, place)
        found.taccl_q8_decode.argtypes = (place, number, place)
        found.taccl_q8_decode.restype = None
    return found


def _at(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def checksum(data: Array) -> int | None:
    """As `checksum.checksum`."""
    calls = library()
    return None if calls is None else int(calls.taccl_checksum(_at(data), data.nbytes))


def xw_encode(words: Array, wire: Array, scratch: Scratch) -> tuple[bool, Entry | None]:
    """(whether there is such code, the entry as `xw.encode_words` gives it)."""
    calls = library()
    if calls is None:
        return False, None
    entry = WORDS()
    width = words.dtype.itemsize
    if calls.taccl_xw_encode(_at(words), width, len(words), _at(wire), _at(scratch.tile), entry):
        return True, Entry(*entry)
    return True, None


def xw_decode(entry: Entry, wire: Array, words: Array, scratch: Scratch) -> bool:
    """As `xw.decode_words`; whether it was done."""
    calls = library()
    if calls is None or entry.bytes != len(wire):
        return False
    told = WORDS(
        entry.bytes, entry.mode, entry.kept, entry.base, entry.bits, entry.sparse, entry.exceptions
    )
    width = words.dtype.itemsize
    return bool(
        calls.taccl_xw_decode(_at(wire), told, width, len(words), _at(words), _at(scratch.tile))
    )


def q8_encode(values: Array, wire: Array) -> bool:
    """As `q8.encode`; whether it was done."""
    calls = library()
    return calls is not None and bool(calls.taccl_q8_encode(_at(values), len(values), _at(wire)))


def q8_decode(wire: Array, values: Array) -> bool:
    """As `q8.decode`; whether it was done."""
    calls = library()
    if calls is None:
        return False
    calls.taccl_q8_decode(_at(wire), len(values), _at(values))
    return True
