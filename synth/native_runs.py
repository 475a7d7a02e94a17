"""Ascending ids in a native file: numbers, and runs of three or more as [first, last]."""

from __future__ import annotations

from collections.abc import Iterable

from taccl.synth.json_reader import Place


def runs_text(chunks: Iterable[int]) -> str:
    """Ascending ids, runs of three or more as [first, last]."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1] + 1:
            runs[-1][1] = chunk
        else:
            runs.append([chunk, chunk])
    parts = []
    for first, last in runs:
        parts += [f"[{first},{last}]"] if last - first > 1 else [str(c) for c in range(first, last + 1)]
    return f"[{','.join(parts)}]"


def read_runs(place: Place, end: int) -> tuple[int, ...]:
    """Ids below `end`: numbers, and runs of them as [first, last]."""
    ids: list[int] = []
    for entry in place.items(1, end):
        if isinstance(entry.value, list):
            first, last = (id.integer(0, end - 1) for id in entry.items(2, 2))
        else:
            first = last = entry.integer(0, end - 1)
        if last < first or (ids and first <= ids[-1]):
            entry.fail("ids must ascend without repeats")
        ids.extend(range(first, last + 1))
    return tuple(ids)
