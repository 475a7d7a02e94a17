"""Forms of YAML values without parts: whole numbers, numbers with units, truth values and texts.

Of each: `words` says what is expected, `read` gives the typed value, or None after noting what is wrong, `schema` is
its JSON Schema, and `accepts` whether a value has the look of it. `forms.py` makes lists and mappings of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from taccl.profiles.quantity import UNIT_WORDS, quantity, units_of
from taccl.profiles.yaml_reader import BOOLEANS, FLOAT, INTEGER, Node, plain_value, shorten

_YAML11_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number between `minimum` and `maximum` (inclusive). Reads as int."""

    minimum: int | None = None
    maximum: int | None = None

    def words(self) -> str:
        """What is expected, for messages."""
        low, high = self.minimum, self.maximum
        if low is not None and high is not None:
            return f"a whole number from {low} to {high}"
        if low is not None:
            return f"a whole number of at least {low}"
        return "a whole number" + (f" of at most {high}" if high is not None else "")

    def accepts(self, node: Node) -> bool:
        """Whether the node has the look of this form (used by Either)."""
        return node.kind == "scalar" and not node.quoted and bool(INTEGER.fullmatch(node.text))

    def read(self, node: Node) -> int | None:
        """The number, or None after noting an error."""
        if not _is_number_text(node):
            wrong_type(node, self.words())
            return None
        try:
            value = quantity(node.text, "")
        except ValueError as error:
            node.error("Y103", str(error))
            return None
        if value.denominator != 1:
            node.error("Y104", f"expected {self.words()}, found {shorten(node.text)}")
            return None
        return value.numerator if _in_range(node, self, value) else None

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the form."""
        bounds = {"minimum": self.minimum, "maximum": self.maximum}
        return {"type": "integer"} | {key: value for key, value in bounds.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number in `unit` (see `quantity`), bounded by `minimum`, `maximum` (inclusive) or `above`.

    With `nonzero` it is 0 or at least that. Reads as Fraction.
    """

    unit: str = ""
    minimum: int | Fraction | None = None
    maximum: int | Fraction | None = None
    above: int | Fraction | None = None  # exclusive lower bound
    nonzero: Fraction | None = None  # least value other than 0

    def words(self) -> str:
        """What is expected, for messages."""
        words = UNIT_WORDS[self.unit]
        if self.nonzero is not None and self.maximum is not None:
            return f"{words}, 0 or from {_shown(self.nonzero)} to {_shown(self.maximum)}"
        if self.minimum is not None and self.maximum is not None:
            return f"{words} from {_shown(self.minimum)} to {_shown(self.maximum)}"
        if self.above is not None:
            words += f" above {self.above}"
        if self.minimum is not None:
            words += f" of at least {self.minimum}"
        return words + (f" of at most {self.maximum}" if self.maximum is not None else "")

    def accepts(self, node: Node) -> bool:
        """Whether the node has the look of this form (used by Either)."""
        return node.kind == "scalar" and bool(re.match(r"[-+]?\.?[0-9]", node.text))

    def read(self, node: Node) -> Fraction | None:
        """The number, or None after noting an error."""
        if node.quoted and FLOAT.fullmatch(node.text):
            node.error("Y101", f"expected {self.words()}, found {node.describe()}", "remove the quotes")
            return None
        if node.kind != "scalar" or node.text == "":
            wrong_type(node, self.words())
            return None
        try:
            value = quantity(node.text, self.unit)
        except ValueError as error:
            node.error("Y103", str(error))
            return None
        return value if _in_range(node, self, value) else None

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the form: a number, or a text with a unit or a fraction stroke."""
        bounds = {"minimum": self.minimum, "maximum": self.maximum, "exclusiveMinimum": self.above}
        bare: dict[str, Any] = {"type": "number"}
        for key, value in bounds.items():
            if value is not None:
                bare[key] = int(value) if Fraction(value).denominator == 1 else float(value)
        if self.nonzero is not None:
            bare = {"anyOf": [{"const": 0}, {**bare, "minimum": float(self.nonzero)}]}
        sign = "[-+]?" if all(b is None or b < 0 for b in (self.minimum, self.above)) else r"\+?"
        digits = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?"
        units = "|".join(re.escape(unit) for unit in units_of(self.unit))
        with_unit = rf"(/[0-9]+)?\s*({units})" if units else "/[0-9]+"
        tail = rf"({with_unit}|/[0-9]+)" if units else with_unit
        return {"anyOf": [bare, {"type": "string", "pattern": f"^{sign}{digits}{tail}$"}]}


@dataclass(frozen=True, slots=True)
class Boolean:
    """`true` or `false`. Reads as bool."""

    def words(self) -> str:
        """What is expected, for messages."""
        return "true or false"

    def accepts(self, node: Node) -> bool:
        """Whether the node has the look of this form (used by Either)."""
        return node.kind == "scalar" and not node.quoted and node.text in BOOLEANS

    def read(self, node: Node) -> bool | None:
        """The value, or None after noting an error."""
        if self.accepts(node):
            return BOOLEANS[node.text]
        meant = _YAML11_BOOLEANS.get(node.text.lower()) if node.kind == "scalar" else None
        if meant:
            node.error("Y105", f"expected true or false, found {node.text!r}", f"write {meant}")
            return None
        wrong_type(node, self.words())
        return None

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the form."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text:
    """A text: one of `choices`, or one that matches the regular expression `pattern` (said by `looks`)."""

    choices: tuple[str, ...] = ()
    pattern: str = ""
    looks: str = ""  # the pattern in words
    max_length: int = 4000

    def words(self) -> str:
        """What is expected, for messages."""
        if self.choices:
            return f"one of {', '.join(self.choices)}" if len(self.choices) > 1 else repr(self.choices[0])
        return self.looks or "a text"

    def accepts(self, node: Node) -> bool:
        """Whether the node has the look of this form (used by Either)."""
        if node.kind != "scalar":
            return False
        return isinstance(plain_value(node), str) and (not self.choices or node.text in self.choices)

    def read(self, node: Node) -> str | None:
        """The text, or None after noting an error."""
        if node.kind != "scalar" or not isinstance(plain_value(node), str):
            help = ""
            if node.kind == "scalar" and plain_value(node) is not None and not self.choices:
                help = f'put it in quotes: "{shorten(node.text)}"'
            wrong_type(node, self.words(), help)
            return None
        if self.choices and node.text not in self.choices:
            node.error("Y106", f"expected {self.words()}, found {shorten(node.text)!r}",
                       did_you_mean(node.text, self.choices))  # fmt: skip
            return None
        if self.pattern and not re.fullmatch(self.pattern, node.text):
            node.error("Y107", f"expected {self.words()}, found {shorten(node.text)!r}")
            return None
        if len(node.text) > self.max_length:
            node.error(
                "Y107", f"the text has {len(node.text)} characters, at most {self.max_length} are allowed"
            )
            return None
        return node.text

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the form."""
        if self.choices:
            return {"enum": list(self.choices)}
        pattern = {"pattern": f"^(?:{self.pattern})$"} if self.pattern else {}
        return {"type": "string", "maxLength": self.max_length} | pattern


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the known name closest to `name`; "" when none is close."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]!r}?" if close else ""


def wrong_type(node: Node, words: str, help: str = "") -> None:
    """Note that a value is not of the kind that `words` say."""
    node.error("Y101", f"expected {words}, found {node.describe()}", help)


def _shown(bound: int | Fraction) -> str:
    """A bound as people write it: 0.5, 1000, 1e9."""
    return re.sub(r"e([-+])0*", lambda found: "e" + found[1].strip("+"), f"{float(bound):g}")


def _is_number_text(node: Node) -> bool:
    return node.kind == "scalar" and not node.quoted and node.text != ""


def _in_range(node: Node, form: Integer | Number, value: Fraction) -> bool:
    above = form.above if isinstance(form, Number) else None
    if (
        (form.minimum is not None and value < form.minimum)
        or (form.maximum is not None and value > form.maximum)
        or (above is not None and value <= above)
        or (isinstance(form, Number) and form.nonzero is not None and 0 < value < form.nonzero)
    ):
        node.error("Y104", f"expected {form.words()}, found {shorten(node.text)}")
        return False
    return True
