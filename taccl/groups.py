"""Process groups as an option, a file or a cluster file's entry: listed, or cut out of a mesh of ranks.

Listed: ranks with commas, groups with spaces (or `;`, or lines): `0,8 1,9`; runs may be written `0-7 8-15`.
A mesh: `dp=2,tp=8:dp` lays the ranks out row by row, the last dimension the quickest (as torch's init_device_mesh
does), and groups those that differ in the dimensions after the colon alone.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from pathlib import Path
from typing import NoReturn

from taccl.errors import Diagnostic, InvalidInput, UsageError
from taccl.synth.collective import Groups, check_groups

MOST_RANKS = 1 << 20
FORMS = 'give ranks, e.g. "0,8 1,9" or "0-7 8-15", or a mesh and what varies, e.g. dp=2,tp=8:dp'

_MESH = re.compile(r"[^=:]*=[^:]*(:.*)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,30}", re.ASCII)
_RUN = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?", re.ASCII)


def read_groups(given: str | None, ranks: int) -> Groups | None:
    """The groups of a cluster of so many ranks, in the order in which they are given; None for None.

    Raises UsageError for groups that are none (overlapping, of one rank, of ranks that do not exist), InvalidInput
    (code D002) with the line for what is wrong in a file.
    """
    if given is None:
        return None
    if not given.strip():
        raise UsageError(f"--groups is empty; {FORMS}")
    if os.path.isfile(given):
        from taccl.profiles.yaml_reader import read_text

        return _listed(read_text(Path(given)), given, ranks)
    if _MESH.fullmatch(given.strip()):
        return _of_mesh(given.strip(), ranks)
    return _listed(given, "", ranks)


def groups_text(groups: Groups) -> str:
    """The listed form, which `read_groups` reads back."""
    return " ".join(",".join(map(str, group)) for group in groups)


def _listed(text: str, file: str, ranks: int) -> Groups:
    groups: list[tuple[int, ...]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0] if file else line
        for part in re.split(r"[;\s]+", re.sub(r"\s*,\s*", ",", words.strip())):
            if part:
                groups.append(_group(part, file, number))
    try:
        check_groups(groups, ranks)
    except ValueError as error:
        _refuse(str(error), file, 0)
    return tuple(groups)


def _group(part: str, file: str, line: int) -> tuple[int, ...]:
    found: list[int] = []
    for word in part.split(","):
        run = _RUN.fullmatch(word)
        if run is None:
            what = "an empty place between commas" if not word else f"{word!r}, which is no rank"
            _refuse(f"{part!r} holds {what}; {FORMS}", file, line)
        first, last = int(run[1]), int(run[2] or run[1])
        if last < first or last >= MOST_RANKS:
            _refuse(f"{word!r} is no run of ranks; write the lower one first", file, line)
        found += range(first, last + 1)
    return tuple(found)


def _of_mesh(text: str, ranks: int) -> Groups:
    shape, colon, along = text.partition(":")
    sizes: dict[str, int] = {}
    for part in shape.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not _NAME.fullmatch(name) or not equals or not re.fullmatch(r"[1-9]\d{0,6}", size, re.ASCII):
            _refuse(f"{part.strip()!r} is no dimension such as tp=8; {FORMS}", "", 0)
        if name in sizes:
            _refuse(f"the dimension {name} stands twice", "", 0)
        sizes[name] = int(size)
    if math.prod(sizes.values()) != ranks:
        shown = " x ".join(map(str, sizes.values()))
        _refuse(f"the mesh {shape} has {shown} = {math.prod(sizes.values())} ranks, there are {ranks}", "", 0)
    known = ", ".join(sizes)
    varying = [name.strip() for name in along.split(",")]
    if not colon or varying == [""]:
        _refuse(
            f"the mesh {shape} does not say which dimension a group spans; add one, e.g. {shape}:{known.split(',')[0]}",
            "", 0,
        )  # fmt: skip
    for name in varying:
        if name not in sizes:
            _refuse(f"the mesh has no dimension {name!r}; it has {known}", "", 0)
    if len(set(varying)) != len(varying):
        _refuse(f"a dimension stands twice after the colon: {along.strip()}", "", 0)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        fixed = tuple(x for x, name in zip(place, sizes, strict=True) if name not in varying)
        groups.setdefault(fixed, []).append(rank)
    found = tuple(map(tuple, groups.values()))
    try:
        check_groups(found, ranks)
    except ValueError as error:
        _refuse(str(error), "", 0)
    return found


def _refuse(what: str, file: str, line: int) -> NoReturn:
    if file:
        raise InvalidInput([Diagnostic(file, line, 0, "D002", what)])
    raise UsageError(f"--groups: {what}")
