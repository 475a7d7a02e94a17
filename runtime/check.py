"""Is the result right? Test data, guarded buffers, and the comparison element by element.

A rank's input holds dtypes.table(rank) again and again. So the expected output is known on every rank without
communication, for any collective, from the sources that its chunks have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from taccl.runtime.bind import Buffers, buffer_elements, memory_chunks
from taccl.runtime.dtypes import PERIOD, Array, DType, reduce_exactly, table
from taccl.runtime.layout import Layout
from taccl.synth.collective import Collective

GUARD_BYTES = 256
GUARD = 0xC7  # what guard bytes hold
UNWRITTEN = 0xFF  # what an output holds before a run: NaN in every floating-point type


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found on one rank."""

    wrong: int  # elements that differ, of the output and of an input that must not change
    outside: int  # bytes written outside the buffers
    max_error: float  # largest difference of the output; inf where something is not a number
    largest: float = -1.0  # absolute value of the exact result; -1 where it was not looked at


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a rank's output and the places in the ranks' inputs that it comes from."""

    first: int  # elements
    last: int
    sources: tuple[tuple[int, int], ...]  # (rank, first element of its input)


def spans(collective: Collective, layout: Layout, rank: int) -> list[Span]:
    """The output of a rank, in as few stretches as its sources allow. Empty chunks are left out."""
    wanted = sorted(
        (offset, tuple((r, layout.start(x)) for r, x in chunk.sources))
        for chunk in collective.chunks
        for r, offset in chunk.destinations
        if r == rank
    )
    found: list[Span] = []
    for offset, sources in wanted:
        first, last = layout.start(offset), layout.start(offset + 1)
        if first == last:
            continue
        if found and found[-1].last == first:
            before = found[-1]
            length = before.last - before.first
            if tuple((r, x + length) for r, x in before.sources) == sources:
                found[-1] = Span(before.first, last, before.sources)
                continue
        found.append(Span(first, last, sources))
    return found


@dataclass(frozen=True, slots=True)
class Guarded:
    """Buffers of one rank with guard bytes around, in host memory."""

    buffers: Buffers
    raw: tuple[Array, ...]  # (guard + data + guard,) uint8, one a memory


def allocate(
    collective: Collective,
    layout: Layout,
    rank: int,
    dtype: DType,
    inplace: bool,
    empty: Callable[[int, Any], Array] = np.empty,
) -> Guarded:
    """Host buffers for one rank and mode. empty: gives memory of (elements, numpy type)."""
    lengths = buffer_elements(collective, layout, rank)

    def guarded(elements: int) -> tuple[Array, Array]:
        raw = empty(elements * dtype.bytes + 2 * GUARD_BYTES, np.uint8)
        raw[:] = GUARD
        return raw, raw[GUARD_BYTES : GUARD_BYTES + elements * dtype.bytes].view(dtype.numpy)

    pair = collective.inplace[rank] if inplace else None
    if pair is None:
        (raw_in, data_in), (raw_out, data_out) = guarded(lengths[0]), guarded(lengths[1])
        return Guarded(Buffers(data_in, data_out), (raw_in, raw_out))
    raw, memory = guarded(layout.start(memory_chunks(collective, rank)))
    first = layout.start(pair[0]), layout.start(pair[1])
    return Guarded(
        Buffers(memory[first[0] : first[0] + lengths[0]], memory[first[1] : first[1] + lengths[1]]), (raw,)
    )


def fill(buffers: Buffers, dtype: DType, op: str | None, rank: int, ranks: int) -> None:
    """Put the test data into the input and a mark into the output (under the input when both are views of
    one memory)."""
    buffers.output.view(np.uint8)[:] = UNWRITTEN
    _repeat(buffers.input, table(dtype, op, rank, ranks))


def _repeat(target: Array, pattern: Array) -> None:
    whole = len(target) // PERIOD * PERIOD
    target[:whole].reshape(-1, PERIOD)[:] = pattern
    target[whole:] = pattern[: len(target) - whole]


def _differences(data: Array, pattern: Array) -> tuple[int, float]:
    """(elements that differ from the repeated pattern, the largest difference)."""
    wrong, largest = 0, 0.0
    for first in range(0, len(data), PERIOD * 64):  # slabs keep the temporary arrays in the cache
        part = data[first : first + PERIOD * 64]
        whole = len(part) // PERIOD * PERIOD
        for got, want in (
            (part[:whole].reshape(-1, PERIOD), pattern),
            (part[whole:], pattern[: len(part) - whole]),
        ):
            differ = got != want
            count = int(np.count_nonzero(differ))
            if count:
                wrong += count
                gap = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
                largest = max(largest, float(gap) if np.isfinite(gap) else float("inf"))
    return wrong, largest


def inspect(
    guarded: Guarded,
    collective: Collective,
    layout: Layout,
    rank: int,
    dtype: DType,
    op: str | None,
    inplace: bool,
) -> Finding:
    """Compare the output with what the collective promises, the guards and, out of place, the input with
    what they held before."""
    ranks = collective.ranks
    tables: dict[int, Array] = {}
    patterns: dict[tuple[tuple[int, int], ...], Array] = {}
    wrong, largest = 0, 0.0

    def rolled(source: int, first: int) -> Array:
        if source not in tables:
            tables[source] = table(dtype, op, source, ranks)
        return np.roll(tables[source], -(first % PERIOD))

    for span in spans(collective, layout, rank):
        key = tuple((r, first % PERIOD) for r, first in span.sources)
        if key not in patterns:
            operands = (rolled(r, first) for r, first in key)
            patterns[key] = next(operands) if op is None else reduce_exactly(dtype, op, operands)
        count, gap = _differences(guarded.buffers.output[span.first : span.last], patterns[key])
        wrong, largest = wrong + count, max(largest, gap)
    if not inplace or collective.inplace[rank] is None:
        wrong += _differences(guarded.buffers.input, rolled(rank, 0))[0]
    return Finding(wrong, written_outside(guarded), largest)


def written_outside(guarded: Guarded) -> int:
    """Guard bytes that have changed."""
    return sum(
        int(np.count_nonzero(raw[:GUARD_BYTES] != GUARD) + np.count_nonzero(raw[-GUARD_BYTES:] != GUARD))
        for raw in guarded.raw
    )
