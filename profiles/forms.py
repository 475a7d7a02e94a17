"""What may stand in a YAML file: forms that give both the typed reader and the JSON Schema of a format.

Forms are values, written once per format as a table:

    LINK = Record({
        "src":   Field(Integer(0, 4095), "sending rank", required=True),
        "beta":  Field(Number("us/MB", above=0), "time per megabyte", required=True),
        "kind":  Field(Text(choices=("nvlink", "pcie")), "link class"),
    }, "a directed link")
    values = LINK.read(node)      # Values, or None when the node is no mapping
    schema = LINK.schema()        # JSON Schema 2020-12 of the same table

`read` returns the typed value, or None after noting what is wrong in `node.findings`. YAML's null is never a
value. `Values` is what a `Record` or a `Row` gives: `values["src"]`, `values.get("kind", "link")`, `"kind" in
values`, `values.at("kind")` (the node of that value, or of the record when absent). `values.broken` is true
when one of its own keys is missing, unreadable or unknown, so that a caller can skip checks that would only
repeat it. `ListOf` gives a list without its unreadable records; None when a plain value in it is unreadable.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from taccl.profiles.plain_forms import Boolean, Integer, Number, Text, did_you_mean, wrong_type
from taccl.profiles.yaml_reader import MAX_NODES, Node, shorten

_NAME = Text(pattern=r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", looks="a name")


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of `item` with `minimum` to `maximum` items. Reads as list.

    Unreadable records and rows are left out of the result; an unreadable plain value makes it None, for a
    list of ranks without one of them says something else.
    """

    item: Form
    minimum: int = 0
    maximum: int = MAX_NODES

    def words(self) -> str:
        """What is expected, for messages."""
        return f"a list ({self.item.words()} each)"

    def accepts(self, node: Node) -> bool:
        """Whether the node has the look of this form (used by Either)."""
        return node.kind == "sequence"

    def read(self, node: Node) -> list[Any] | None:
        """The values, or None after noting an error."""
        if node.kind != "sequence":
            wrong_type(node, self.words())
            return None
        if not self.minimum <= len(node.items) <= self.maximum:
            bounds = (
                f"{self.minimum}" if self.minimum == self.maximum else f"{self.minimum} to {self.maximum}"
            )
            node.error("Y108", f"expected a list of {bounds} items, found {len(node.items)}")
            return None
        values = [self.item.read(item) for item in node.items]
        if None in values and not _is_compound(self.item):
            return None
        return [value for value in values if value is not None]

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the form."""
        limits = {"minItems": self.minimum} if self.minimum else {}
        limits |= {"maxItems": self.maximum} if self.maximum < MAX_NODES else {}
        return {"type": "array", "items": self.item.schema()} | limits


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping from names (or numbers) that the author chooses to `value`.

    Reads as dict without unreadable values; numbers written differently (1, +1) are one key.
    """

    value: Form
    key: Text | Integer = _NAME
    maximum: int = 10_000

    def words(self) -> str:
        """What is expected, for messages."""
        return f"a mapping from names to {self.value.words()}"

    def accepts(self, node: Node) -> bool:
        """Whether the node has the look of this form (used by Either)."""
        return node.kind == "mapping"

    def read(self, node: Node) -> dict[Any, Any] | None:
        """The values by name or number, or None after noting an error."""
        if node.kind != "mapping":
            wrong_type(node, self.words())
            return None
        if len(node.entries) > self.maximum:
            node.error("Y108", f"expected at most {self.maximum} names, found {len(node.entries)}")
            return None
        pairs = [(self.key.read(key), self.value.read(value)) for key, value in node.entries]
        return {name: value for name, value in pairs if name is not None and value is not None}

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the form; JSON's keys are texts, so numbers are described by their digits."""
        keys = {key: value for key, value in self.key.schema().items() if key != "type"}
        if isinstance(self.key, Integer):
            keys = {"pattern": "^[-+]?(0|[1-9][0-9]*)$"}
        return {
            "type": "object",
            "propertyNames": keys,
            "additionalProperties": self.value.schema(),
            "maxProperties": self.maximum,
        }


@dataclass(frozen=True, slots=True)
class Values:
    """What stands in a mapping (or row): typed values by key, and the nodes they came from."""

    node: Node
    fields: Mapping[str, Any]
    nodes: Mapping[str, Node]
    broken: bool  # a key of its own is missing, unknown or unreadable (noted already)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def __contains__(self, key: str) -> bool:
        return key in self.fields

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` when it is absent or unreadable."""
        return self.fields.get(key, default)

    def at(self, key: str) -> Node:
        """Where the value of a key stands; the whole mapping when it is absent."""
        return self.nodes.get(key, self.node)


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a record: its form, what it means, whether it must be there."""

    form: Form
    doc: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """A mapping with known keys. Reads as Values."""

    fields: Mapping[str, Field]
    doc: str = ""

    def words(self) -> str:
        """What is expected, for messages."""
        return self.doc or f"a mapping with the keys {', '.join(self.fields)}"

    def accepts(self, node: Node) -> bool:
        """Whether the node has the look of this form (used by Either)."""
        return node.kind == "mapping"

    def read(self, node: Node) -> Values | None:
        """The values, or None when the node is no mapping."""
        if node.kind != "mapping":
            wrong_type(node, self.words())
            return None
        nodes: dict[str, Node] = {}
        broken = False
        present = {key.text for key, _ in node.entries}
        for key, value in node.entries:
            name = key.text
            if name not in self.fields:
                broken = True
                free = [known for known in self.fields if known not in present]
                close = difflib.get_close_matches(name, free, 1)
                help = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(self.fields)}"
                key.error("Y102", f"unknown key {shorten(name)!r}", help)
                if not close:
                    continue
                name = close[0]  # read it as what was meant, so that its own errors show in this run too
                present.add(name)
            nodes[name] = value
        values = {name: self.fields[name].form.read(value) for name, value in nodes.items()}
        for name, entry in self.fields.items():
            if entry.required and name not in nodes:
                node.error("Y109", f"the key {name!r} is missing ({entry.doc})")
                broken = True
        broken = broken or None in values.values()
        return Values(
            node, {name: value for name, value in values.items() if value is not None}, nodes, broken
        )

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the form."""
        properties = {
            name: entry.form.schema() | ({"description": entry.doc} if entry.doc else {})
            for name, entry in self.fields.items()
        }
        required = [name for name, entry in self.fields.items() if entry.required]
        return {"type": "object", "properties": properties, "additionalProperties": False} | (
            {"required": required} if required else {}
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A short list whose places have names: `[0, 1, nvlink]`. Required places come first. Reads as Values."""

    fields: Mapping[str, Field]
    doc: str = ""

    def words(self) -> str:
        """What is expected, for messages."""
        return f"a row [{', '.join(self.fields)}]"

    def accepts(self, node: Node) -> bool:
        """Whether the node has the look of this form (used by Either)."""
        return node.kind == "sequence"

    def read(self, node: Node) -> Values | None:
        """The values, or None when the node is no row of a right length."""
        if node.kind != "sequence":
            wrong_type(node, self.words())
            return None
        least = sum(entry.required for entry in self.fields.values())
        if not least <= len(node.items) <= len(self.fields):
            node.error("Y108", f"expected {self.words()}, found {len(node.items)} items")
            return None
        nodes = dict(zip(self.fields, node.items, strict=False))
        values = {name: self.fields[name].form.read(item) for name, item in nodes.items()}
        broken = None in values.values()
        return Values(
            node, {name: value for name, value in values.items() if value is not None}, nodes, broken
        )

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the form."""
        return {
            "type": "array",
            "description": self.doc or self.words(),
            "prefixItems": [entry.form.schema() for entry in self.fields.values()],
            "items": False,
            "minItems": sum(entry.required for entry in self.fields.values()),
        }


@dataclass(frozen=True, slots=True)
class Either:
    """The first of `forms` that the value has the look of. Reads as that form does."""

    forms: tuple[Form, ...]

    def words(self) -> str:
        """What is expected, for messages."""
        return ", or ".join(form.words() for form in self.forms)

    def accepts(self, node: Node) -> bool:
        """Whether the node has the look of one of the forms."""
        return any(form.accepts(node) for form in self.forms)

    def read(self, node: Node) -> Any:
        """The value, or None after noting an error."""
        for form in self.forms:
            if form.accepts(node):
                return form.read(node)
        texts = [form for form in self.forms if isinstance(form, Text)]
        if node.kind == "scalar" and texts and not any(form.choices for form in texts):
            return texts[0].read(node)  # a word that YAML takes for a number, say: it knows the help
        words = [word for form in texts for word in form.choices]
        wrong_type(node, self.words(), did_you_mean(node.text, words) if node.kind == "scalar" else "")
        return None

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the form."""
        return {"anyOf": [form.schema() for form in self.forms]}


Form = Integer | Number | Boolean | Text | ListOf | MapOf | Record | Row | Either


def _is_compound(form: Form) -> bool:
    """Whether every value of the form has parts of its own, each with its own errors."""
    if isinstance(form, Either):
        return all(_is_compound(option) for option in form.forms)
    return isinstance(form, (Record, Row))
