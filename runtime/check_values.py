"""Is the result right within what codecs promise, and for values that are not made for exact sums?

Expected values are computed in float64, by whole blocks of a codec from the start of each chunk, few at a time: what
this takes beside the buffers does not grow with them. Where nothing is lost on the way (no codec or a lossless one, and
no rounded sum) a result must have the bits of its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from taccl.runtime.bind import Buffers
from taccl.runtime.check import UNWRITTEN, Finding, Guarded, written_outside
from taccl.runtime.codecs import Promise
from taccl.runtime.codecs.codec import EXACT
from taccl.runtime.dtypes import PERIOD, Array, DType, reduce_exactly, table
from taccl.runtime.layout import Layout
from taccl.synth.collective import Collective

Source = Callable[[int, int, int], Array]  # (rank, first element, elements) -> that part of the rank's input

SLAB = 1 << 16  # elements that are looked at together, at least a block

# Largest relative error of rounding to the type.
ROUNDING = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LARGEST = {"float32": 3.38e38, "float64": 1.7e308, "float16": 65000.0, "bfloat16": 3.38e38}
LEAST = {"float32": 2.0**-149, "float64": 5e-324, "float16": 2.0**-24, "bfloat16": 2.0**-133}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may differ.

    promise: of the codec. codings: how often a value was coded at most, of a reduction its result among them. once:
    each contribution was coded once at most, and the result. inside: the type in which is reduced.
    """

    promise: Promise
    codings: int
    once: bool
    inside: DType


def table_values(dtype: DType, op: str | None, ranks: int) -> Source:
    """The data of `check.fill`."""
    tables: dict[int, Array] = {}

    def part(rank: int, first: int, count: int) -> Array:
        if rank not in tables:
            tables[rank] = table(dtype, op, rank, ranks)
        return tables[rank][np.arange(first, first + count) % PERIOD]

    return part


def real_values(values: Array, ranks: int) -> Source:
    """Parts of (n,) values, which each rank begins elsewhere and repeats as often as it must."""
    step = -(-len(values) // ranks)

    def part(rank: int, first: int, count: int) -> Array:
        found = np.empty(count, values.dtype)
        done, at = 0, (rank * step + first) % len(values)
        while done < count:
            piece = values[at : at + count - done]
            found[done : done + len(piece)] = piece
            done, at = done + len(piece), 0
        return found

    return part


def fill_values(buffers: Buffers, source: Source, rank: int) -> None:
    """Put the rank's values into the input and a mark into the output."""
    buffers.output.view(np.uint8)[:] = UNWRITTEN
    for first, last in _slabs(len(buffers.input), SLAB):
        buffers.input[first:last] = source(rank, first, last - first)


def inspect_values(
    guarded: Guarded,
    collective: Collective,
    layout: Layout,
    rank: int,
    dtype: DType,
    op: str | None,
    inplace: bool,
    source: Source,
    tolerance: Tolerance,
) -> Finding:
    """Compare the output with what the collective promises, the guards and, out of place, the input with what they
    held before."""
    wrong, error, largest = 0, 0.0, -1.0
    block = max(tolerance.promise.block_values, 1)
    for chunk in collective.chunks:
        places = [offset for r, offset in chunk.destinations if r == rank]
        if not places:
            continue
        length = layout.start(places[0] + 1) - layout.start(places[0])
        for first, last in _slabs(length, block * max(1, SLAB // block)):
            parts = [source(r, layout.start(x) + first, last - first) for r, x in chunk.sources]
            for place in places:
                got = guarded.buffers.output[layout.start(place) + first : layout.start(place) + last]
                count, gap, size = compare(got, parts, dtype, op, tolerance)
                wrong, error, largest = wrong + count, max(error, gap), max(largest, size)
    if not inplace or collective.inplace[rank] is None:
        given = guarded.buffers.input
        for first, last in _slabs(len(given), SLAB):
            wrong += bits_differ(given[first:last], source(rank, first, last - first))
    return Finding(wrong, written_outside(guarded), error, largest)


def _slabs(length: int, slab: int) -> Iterator[tuple[int, int]]:
    """(first, last) of stretches of `slab` elements, the last one shorter."""
    return ((first, min(first + slab, length)) for first in range(0, length, slab))


def compare(
    got: Array, parts: list[Array], dtype: DType, op: str | None, tolerance: Tolerance
) -> tuple[int, float, float]:
    """(wrong elements, largest error, largest exact value that was judged by a promise or -1) of whole blocks of one
    chunk of a result, with its sources."""
    if op is None and tolerance.promise == EXACT:
        wrong = bits_differ(got, parts[0])
        return wrong, (float("inf") if wrong else 0.0), -1.0
    if dtype.integer:
        differ = got != (parts[0] if op is None else reduce_exactly(dtype, op, parts))
        return int(np.count_nonzero(differ)), (float("inf") if differ.any() else 0.0), -1.0
    with np.errstate(all="ignore"):
        wide = [part.astype(np.float64) for part in parts]
        exact = _reduced(wide, op)
        allowed = _allowed(wide, exact, dtype, op, tolerance)
        gaps = np.abs(got.astype(np.float64) - exact)
        # Promises are for finite values; a sum near the largest number of the type may be infinity.
        judged = np.all([np.isfinite(part) for part in wide], axis=0)
        judged &= _reach(wide, exact, op) + allowed < LARGEST[dtype.name]
        wrong = int(np.count_nonzero(~(gaps <= allowed) & judged))
        gaps = np.where(judged, gaps, 0.0)
        largest = float(np.abs(exact).max(initial=-1.0, where=judged))
    error = float(gaps.max(initial=0.0))
    return wrong, error if np.isfinite(error) else float("inf"), largest


def _reach(parts: list[Array], exact: Array, op: str | None) -> Array:
    """How large what is on the way to a result may become, whatever the order."""
    if op in ("sum", "avg"):
        total: Array = np.sum(np.abs(parts), axis=0)
        return total
    if op == "prod":
        product: Array = np.prod(np.maximum(np.abs(parts), 1.0), axis=0)
        return product
    return np.abs(exact)


def _reduced(parts: list[Array], op: str | None) -> Array:
    if op is None:
        return parts[0]
    stacked = np.stack(parts)
    how: dict[str, Callable[..., Any]] = {
        "sum": np.sum, "avg": np.mean, "prod": np.prod, "min": np.min, "max": np.max,
    }  # fmt: skip
    result: Array = how[op](stacked, axis=0)
    return result


def _allowed(parts: list[Array], exact: Array, dtype: DType, op: str | None, tolerance: Tolerance) -> Array:
    promise, codings = tolerance.promise, tolerance.codings
    sizes = [np.where(np.isfinite(part), np.abs(part), 0.0) for part in parts]
    total = np.sum(sizes, axis=0)
    error = np.sum([_bound(promise, size) for size in sizes], axis=0) if codings else np.zeros_like(total)
    if tolerance.once and codings <= (1 if op is None else 2):
        if codings == 2:
            # Infinities and NaN have no part in what a block promises to its other values.
            result = np.where(np.isfinite(exact), np.abs(exact), 0.0)
            error = error + _bound(promise, result * (len(parts) if op == "avg" else 1) + error)
    else:  # each coding may add the errors of all that is in a sum, and of the errors before
        error = codings * (1 + promise.value + promise.block) ** codings * error
    if op == "prod":
        slack: Array = len(parts) * ROUNDING[tolerance.inside.name] * np.abs(exact) + LEAST[dtype.name]
        return slack
    if op in ("sum", "avg"):
        error = error + len(parts) * ROUNDING[tolerance.inside.name] * (total + error)
        if op == "avg":
            error = error / len(parts) + ROUNDING[tolerance.inside.name] * np.abs(exact)
        error = error + len(parts) * LEAST[tolerance.inside.name]
    if tolerance.inside != dtype:
        error = error + ROUNDING[dtype.name] * (np.abs(exact) + error) + LEAST[dtype.name]
    # What float64 itself rounds while it computes all this.
    noise = len(parts) * 2.0**-52 * total if op is not None else 0.0
    allowed: Array = error * (1 + 1e-12) + noise
    return allowed


def _bound(promise: Promise, sizes: Array) -> Array:
    """The error that a codec may make of (n,) values of these absolute values, whole blocks."""
    bound = promise.value * sizes + promise.floor
    if promise.block:
        length = promise.block_values
        firsts = np.arange(0, len(sizes), length)
        largest = np.maximum.reduceat(sizes, firsts) if len(sizes) else sizes
        bound = bound + promise.block * np.repeat(largest, length)[: len(sizes)]
    return bound


def bits_differ(got: Array, wanted: Array) -> int:
    """Elements that are not the same bits."""
    wrong, bits = 0, np.dtype(f"u{got.dtype.itemsize}")  # no type is wider than 8 bytes
    for first, last in _slabs(len(got), SLAB):
        wrong += int(np.count_nonzero(got[first:last].view(bits) != wanted[first:last].view(bits)))
    return wrong
