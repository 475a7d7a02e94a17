"""Untrusted JSON: strict syntax, and typed access that names the place of what is wrong.

Python's own reader accepts NaN, repeated keys and numbers of any length; this one does not. A `Place` is a value
and the path that leads to it, such as `messages[3].link`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn

from taccl.errors import Diagnostic, InvalidInput
from taccl.profiles.quantity import quantity

MAX_INTEGER_DIGITS = 30
MAX_SHOWN = 40
_SURROGATE = re.compile("[\ud800-\udfff]")


class DecimalText(str):
    """A JSON number with a point or an exponent, kept as text so that it can be read exactly."""

    __slots__ = ()


class _Refused(ValueError):
    """A value that JSON's grammar allows and this reader does not."""


@dataclass(frozen=True, slots=True)
class Place:
    """A value in a JSON file and where it stands."""

    file: str
    path: str  # "" is the whole document
    value: Any

    def fail(self, message: str, code: str = "N101") -> NoReturn:
        """Raise InvalidInput about this place."""
        where = self.path or "the document"
        raise InvalidInput([Diagnostic(self.file, 0, 0, code, f"{where}: {message}", path=self.path)])

    def at(self, key: str) -> Place:
        """The value of a key that must be there."""
        if key not in self.mapping():
            self.fail(f"{key!r} is missing", "N102")
        return Place(self.file, f"{self.path}.{key}" if self.path else key, self.value[key])

    def only(self, *keys: str) -> None:
        """Fail when the mapping has another key."""
        for key in self.mapping():
            if key not in keys:
                self.fail(f"{_shown(key)} is not known here; known are {', '.join(keys)}", "N103")

    def mapping(self) -> Mapping[str, Any]:
        """The value, which must be an object."""
        if not isinstance(self.value, dict):
            self.fail(f"expected an object, found {_shown(self.value)}")
        return self.value

    def items(self, least: int = 0, most: int | None = None) -> Iterator[Place]:
        """The elements of the value, which must be an array of so many."""
        values = self.array(least, most)
        return (Place(self.file, f"{self.path}[{i}]", value) for i, value in enumerate(values))

    def array(self, least: int = 0, most: int | None = None) -> list[Any]:
        """The value, which must be an array of so many elements."""
        if not isinstance(self.value, list):
            self.fail(f"expected an array, found {_shown(self.value)}")
        if len(self.value) < least or (most is not None and len(self.value) > most):
            wanted = f"{least}" if least == most else f"{least} to {'any' if most is None else most}"
            self.fail(f"expected {wanted} elements, found {len(self.value)}")
        return self.value

    def integer(self, least: int, most: int) -> int:
        """The value, which must be a whole number within the limits."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            self.fail(f"expected a whole number, found {_shown(self.value)}")
        if not least <= self.value <= most:
            self.fail(f"expected a whole number from {least} to {most}, found {_shown(self.value)}")
        return self.value

    def boolean(self) -> bool:
        """The value, which must be true or false."""
        if not isinstance(self.value, bool):
            self.fail(f"expected true or false, found {_shown(self.value)}")
        return self.value

    def text(self, choices: tuple[str, ...] = ()) -> str:
        """The value, which must be a string, one of the choices if there are any."""
        if not isinstance(self.value, str) or isinstance(self.value, DecimalText):
            self.fail(f"expected a string, found {_shown(self.value)}")
        if choices and self.value not in choices:
            self.fail(f"expected one of {', '.join(choices)}, found {_shown(self.value)}")
        return self.value

    def number(self) -> float:
        """The value, which must be a finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | DecimalText):
            self.fail(f"expected a number, found {_shown(self.value)}")
        found = float(self.value)
        if abs(found) == float("inf"):
            self.fail(f"expected a number within what a float holds, found {_shown(self.value)}")
        return found

    def not_negative(self) -> float:
        """The value, which must be a finite number and not below 0."""
        found = self.number()
        if found < 0:
            self.fail(f"must not be below 0, found {_shown(self.value)}")
        return found

    def exact(self) -> Fraction:
        """The value, which must be a number, or a fraction of whole numbers in a string such as "10/3"."""
        if not isinstance(self.value, int | str) or isinstance(self.value, bool):
            self.fail(f"expected a number, found {_shown(self.value)}")
        try:
            return quantity(str(self.value), "")
        except ValueError as error:
            self.fail(str(error))

    def plain(self) -> Any:
        """The value as Python's own reader would give it."""
        return _plain(self.value)


def parse(text: str, file: str) -> Place:
    """The document. Raises InvalidInput with line and column for broken syntax."""
    try:
        value = json.loads(
            text,
            parse_float=DecimalText,
            parse_int=_integer,
            parse_constant=_constant,
            object_pairs_hook=_once,
        )
    except json.JSONDecodeError as error:
        source = error.doc[error.pos - error.colno + 1 :].partition("\n")[0]
        raise InvalidInput([Diagnostic(
            file, error.lineno, error.colno, "N001", f"not well-formed JSON: {error.msg}",
            source_line=source if len(source) <= 200 else "",
        )]) from None  # fmt: skip
    except _Refused as error:
        raise InvalidInput([Diagnostic(file, 0, 0, "N002", str(error))]) from None
    except RecursionError:
        message = "arrays and objects are nested too deeply"
        raise InvalidInput([Diagnostic(file, 0, 0, "N003", message)]) from None
    if _SURROGATE.search(text) or ("\\u" in text and _has_surrogate(value)):
        message = "a string holds half of a surrogate pair, which is no text"
        raise InvalidInput([Diagnostic(file, 0, 0, "N004", message)])
    return Place(file, "", value)


def _integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise _Refused(f"a number has {len(text)} digits; at most {MAX_INTEGER_DIGITS} are read")
    return int(text)


def _constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is not a number in JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"the key {_shown(twice)} stands twice in one object")
    return found


def _has_surrogate(value: Any) -> bool:
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, dict):
            stack += [*top.keys(), *top.values()]
        elif isinstance(top, list):
            stack += top
        elif isinstance(top, str) and _SURROGATE.search(top):
            return True
    return False


def _plain(value: Any) -> Any:
    if isinstance(value, DecimalText):
        return float(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = str(value) if isinstance(value, DecimalText) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
