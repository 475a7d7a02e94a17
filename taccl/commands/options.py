"""What several commands share: sizes and other quantities as options, output files, JSON documents."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from taccl.errors import EnvironmentProblem, UsageError
from taccl.streams import check_stdout

MOST_BYTES = 2**50


class Size(click.ParamType):  # type: ignore[type-arg]
    """A whole number of bytes: 65536, 1MB (10^6) or 1MiB (2^20)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes; fails for fractions of a byte, for less than one and for more than MOST_BYTES."""
        if isinstance(value, int):
            return value
        from taccl.profiles.quantity import quantity

        try:
            size = quantity(value, "bytes")
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size.denominator != 1 or not 1 <= size <= MOST_BYTES:
            self.fail(f"expected a whole number of bytes from 1 to 2^50, found {value!r}", param, ctx)
        return int(size)


class Quantity(click.ParamType):  # type: ignore[type-arg]
    """A number in a unit that `quantity` knows: "s" for times, "fraction" for 0.05 or 5%."""

    def __init__(self, unit: str, least: float, most: float) -> None:
        self.name = {"s": "seconds", "fraction": "fraction"}[unit]
        self.unit, self.least, self.most = unit, least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number as float; fails outside [least, most]."""
        if isinstance(value, float | int):
            return float(value)
        from taccl.profiles.quantity import quantity

        try:
            number = quantity(value, self.unit)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        # As written: the float 0.1 is a little above the number 0.1.
        if not Fraction(str(self.least)) <= number <= Fraction(str(self.most)):
            self.fail(f"expected a number from {self.least:g} to {self.most:g}, found {value!r}", param, ctx)
        return float(number)


class Name(click.ParamType):  # type: ignore[type-arg]
    """A name that may stand in a profile."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name; fails for one that a reader of profiles would refuse."""
        import re

        from taccl.profiles.schema import NAME_PATTERN, NAME_WORDS

        if not re.fullmatch(NAME_PATTERN, value):
            self.fail(f"expected {NAME_WORDS}, found {value!r}", param, ctx)
        return str(value)


def write_output(path: str, text: str | bytes) -> None:
    """Write a whole file or nothing; `-` is stdout. Missing directories are made. Text is written as UTF-8.

    Raises EnvironmentProblem when the place cannot be written; a file that was there before stays as it was then.
    """
    check_output(path)
    # A file name in it may be no text.
    encoded = text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text
    if path == "-":
        # Files are UTF-8 wherever they go; what only people read is in the terminal's encoding.
        sys.stdout.flush()
        sys.stdout.buffer.write(encoded)
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    if target.exists() and not target.is_file():
        try:
            target.write_bytes(encoded)  # a device or a pipe cannot be replaced
        except BrokenPipeError:
            raise
        except OSError as error:
            raise EnvironmentProblem(f"{path}: this cannot be written: {error.strerror}") from error
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, encoded)
    except OSError as error:
        # Whatever failed on the way (a temporary file has a name of its own), what was asked for is `path`.
        raise EnvironmentProblem(f"{path}: this cannot be written: {error.strerror}") from error


def check_output(path: str) -> None:
    """Raise what `write_output` would for a place that no file can have; for before long work. `-` is stdout.

    Raises UsageError, and EnvironmentProblem where the right to write is missing.
    """
    if path == "-":
        check_stdout()
        return
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{path} is a directory; name a file in it")
    if not target.exists():
        check_folder(target.parent, written=False)
    folder = next(folder for folder in target.absolute().parents if folder.exists())
    device = target.exists() and not target.is_file()  # is written to and not replaced
    if not os.access(target if device else folder, os.W_OK):
        raise EnvironmentProblem(f"{path}: this cannot be written: no right to do so in {folder}")


def _replace(target: Path, encoded: bytes) -> None:
    handle, partial = tempfile.mkstemp(prefix=f".{target.name[:40]}.", dir=target.parent)
    try:
        with open(handle, "wb") as stream:
            stream.write(encoded)
        # mkstemp makes files private; give this one what any new file gets.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(partial, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~mask)
        os.replace(partial, target)
    finally:
        with contextlib.suppress(OSError):  # once it has its name it is no longer there
            os.unlink(partial)


def check_folder(folder: Path, written: bool = True) -> None:
    """Raise UsageError when no directory of this name can be made, because it or one above it is a file.

    Raises EnvironmentProblem where the right to write into it is missing, if it is to be written.
    """
    place = next(place for place in (folder, *folder.parents) if os.path.lexists(place) or place == Path())
    if not place.is_dir():
        raise UsageError(
            f"{place} is no directory, and the output goes into a directory of this name; move it away, or "
            "name another place"
        )
    if written and not os.access(place, os.W_OK):
        raise EnvironmentProblem(f"{folder}: nothing can be written there: no right to do so in {place}")


def print_json(document: dict[str, Any]) -> None:
    """One JSON document on stdout; NaN and infinity are not JSON and are refused."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))
