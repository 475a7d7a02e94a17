"""Copies in host memory, by compiled code where there is some: past the caches, where all that is moved is half of
them or more, and with the interpreter's lock given up."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from taccl.runtime import native
from taccl.runtime.process_memory import address

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Below this a call takes longer than what it saves.
LEAST_BYTES = 64 * 2**10


@functools.lru_cache(maxsize=1)
def cache_bytes() -> int:
    """Of the last-level cache; 32 MiB where the system does not say."""
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    units = {"K": 2**10, "M": 2**20}
    known = [int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units and size[:-1].isdigit()]
    return max(known, default=32 * 2**20)


def past_caches(nbytes: int, ranks: int) -> bool:
    """Whether copies of so many bytes by each of the ranks of a node, read and written, take half of the caches.

    Past them a copy reads nothing of its target first, and what little a collective finds there of what was written
    before does not make up for that once something else has run in between.
    """
    return 4 * nbytes * ranks >= cache_bytes()


def overlap(one: int, other: int, nbytes: int) -> bool:
    """Whether two places of so many bytes overlap without being the same, which compiled loops do not look at."""
    return 0 < abs(one - other) < nbytes


def copier(target: Any, source: Any, past: bool) -> Callable[[], object]:
    """What copies a contiguous array to another one of the same size. past: the caches."""
    found = native.library()
    if (
        found is None
        or target.nbytes < LEAST_BYTES
        or overlap(address(target), address(source), target.nbytes)
    ):
        # Assignment to a memoryview has a third of the cost of numpy's, and moves as many bytes a second.
        into, of = memoryview(target.view(np.uint8)), memoryview(source.view(np.uint8))
        return functools.partial(into.__setitem__, slice(None), of)
    places = ctypes.c_void_p(address(target)), ctypes.c_void_p(address(source))
    call = functools.partial(found.taccl_copy, *places, ctypes.c_size_t(target.nbytes), ctypes.c_int(past))
    kept = target, source  # of which the call has addresses only

    def copy() -> None:
        _ = kept
        call()

    return copy
