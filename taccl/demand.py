"""The demand matrix of alltoallv, as an option or a file: rows of counts, separated by lines or `;`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from taccl.errors import Diagnostic, InvalidInput, UsageError

MOST = 10**6 - 1  # blocks from one rank to another


def read_demand(given: str | None) -> tuple[tuple[int, ...], ...] | None:
    """Blocks from rank i (row) to rank j (column); None for None.

    What is no existing file and holds a comma, a semicolon, a space or digits alone is the matrix itself. Raises
    UsageError for a bad matrix in the option, InvalidInput (code D001) with the line for one in a file.
    """
    if given is None:
        return None
    if not given.strip():
        raise UsageError('--demand is empty; give rows of counts, e.g. "0,2;1,0", or a file of them')
    if not os.path.isfile(given) and re.search(r"[,;\s]|^\d+$", given):
        return _matrix(given, "")
    from taccl.profiles.yaml_reader import read_text

    return _matrix(read_text(Path(given)), given)


def _matrix(text: str, file: str) -> tuple[tuple[int, ...], ...]:
    rows: list[tuple[int, ...]] = []
    for number, line in (
        (n, part) for n, whole in enumerate(text.splitlines(), 1) for part in whole.split(";")
    ):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith("#"):
            continue
        for word in words:
            if not re.fullmatch(r"\d{1,6}", word, re.ASCII):
                _refuse(f"row {len(rows)} holds {word!r}, no whole number from 0 to {MOST}", file, number)
        if rows and len(words) != len(rows[0]):
            _refuse(f"row {len(rows)} has {len(words)} counts, row 0 has {len(rows[0])}", file, number)
        rows.append(tuple(map(int, words)))
    if not rows or len(rows) != len(rows[0]):
        columns = len(rows[0]) if rows else 0
        _refuse(f"one row and one column for each rank are needed, found {len(rows)} x {columns}", file, 0)
    return tuple(rows)


def _refuse(what: str, file: str, line: int) -> None:
    if file:
        raise InvalidInput([Diagnostic(file, line, 0, "D001", f"the demand's {what}" if line else what)])
    raise UsageError(f"--demand: {what}")
