"""YAML files in which every value knows its line and column.

Profiles and sketches are read in three steps; all errors of a file come out together.

1. `parse(text, file)` (this module) turns the text into `Node`s. Only what makes further reading pointless
   stops it: broken syntax, alias bombs, a wrong encoding. Duplicate keys are noted and reading goes on.
2. `taccl.profiles.forms` says what may stand in the file, as tables that give the typed reader and the JSON
   Schema of a format; `taccl.profiles.quantity` reads numbers with units, exactly.
3. The caller checks meaning (ranks exist, names are known) and notes findings at the same places:

       node.error("P203", "rank 99 does not exist (ranks are 0-15)", help="...")
       node.findings.raise_if_any()

Codes of findings: Y0xx the file, Y1xx a value; the formats have their own letters (P profile, S sketch).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from taccl.errors import Diagnostic, InvalidInput

MAX_FILE_BYTES = 64 * 2**20
PIECE_BYTES = 2**20  # that are read together
MAX_NODES = 4_000_000  # after aliases are expanded
MAX_KEYS = 100_000  # of one mapping
MAX_DEPTH = 32
MAX_FINDINGS = 100  # that are shown
MAX_NOTED = 10_000  # errors after which reading stops
MAX_DIGITS = 60  # of a number
MAX_SOURCE_LINE = 200  # longer lines are not repeated under a message

_TOO_DEEP = f"values are nested deeper than {MAX_DEPTH} levels"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_YAML = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


def read_text(path: str | Path, limit: int = MAX_FILE_BYTES) -> str:
    """The text of a UTF-8 file of at most `limit` bytes; InvalidInput says why it cannot be had."""
    name = str(path)
    try:
        with open(path, "rb") as stream:
            data = read_most(stream, limit + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInput([Diagnostic(name, 0, 0, "Y001", f"the file cannot be read: {reason}")]) from error
    except ValueError as error:  # a NUL in the name
        raise InvalidInput([Diagnostic(repr(name), 0, 0, "Y001", f"no such file: {error}")]) from error
    if len(data) > limit:
        message = f"the file is larger than the {limit} bytes that are read"
        raise InvalidInput([Diagnostic(name, 0, 0, "Y002", message)])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = len(before) - (before.rfind(b"\n") + 1) + 1
        message = f"the file is not UTF-8 text (byte {data[error.start]:#04x})"
        diagnostic = Diagnostic(name, line, column, "Y003", message, "save it in UTF-8")
        raise InvalidInput([diagnostic]) from error


def read_most(stream: BinaryIO, most: int) -> bytes:
    """The first `most` bytes of a stream, or all there are; memory is taken for those that come only."""
    data = bytearray()
    while len(data) < most and (piece := stream.read(min(PIECE_BYTES, most - len(data)))):
        data += piece
    return bytes(data)


class Findings:
    """Everything found in one file. Errors make `raise_if_any` raise; warnings are kept for the caller."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self._lines = _LINE_BREAK.split(text)
        self._found: dict[tuple[int, int, str, str], Diagnostic] = {}
        self._errors = 0

    def add(
        self,
        line: int,
        column: int,
        code: str,
        message: str,
        help: str = "",
        path: str = "",
        severity: str = "error",
    ) -> None:
        """Note a finding at a 1-based place (0: the whole file). The same finding counts once.

        Raises InvalidInput with the first ones when there are MAX_NOTED errors: nobody reads them all.
        """
        if (line, column, code, message) in self._found:
            return
        source = self._lines[line - 1] if 0 < line <= len(self._lines) else ""
        if len(source) > MAX_SOURCE_LINE:
            source = ""
        finding = Diagnostic(self.file, line, column, code, message, help, path, source, severity)
        self._found[line, column, code, message] = finding
        self._errors += severity == "error"
        if self._errors >= MAX_NOTED:
            self.raise_if_any()

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The errors in file order."""
        return tuple(found for found in self._sorted() if found.severity == "error")

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """The warnings in file order."""
        return tuple(found for found in self._sorted() if found.severity != "error")

    def raise_if_any(self) -> None:
        """Raise InvalidInput with every error (at most MAX_FINDINGS and a count of the rest)."""
        errors = self.errors
        if len(errors) > MAX_FINDINGS:
            least = "at least " if self._errors >= MAX_NOTED else ""
            rest = f"{least}{len(errors) - MAX_FINDINGS} more errors are not shown"
            errors = (*errors[:MAX_FINDINGS], Diagnostic(self.file, 0, 0, "Y099", rest))
        if errors:
            raise InvalidInput(errors)

    def _sorted(self) -> list[Diagnostic]:
        return [self._found[key] for key in sorted(self._found)]


@dataclass(frozen=True, slots=True)
class Node:
    """One value of the file: a scalar with its text, a sequence or a mapping; its place and its path."""

    kind: str  # "scalar" | "sequence" | "mapping"
    line: int  # 1-based
    column: int  # 1-based
    path: str  # e.g. "links[1].dst"
    findings: Findings = field(repr=False, compare=False)
    text: str = ""  # of a scalar
    quoted: bool = False  # a scalar in quotes or a block scalar: always text
    items: tuple[Node, ...] = ()  # of a sequence
    entries: tuple[tuple[Node, Node], ...] = ()  # of a mapping: (key, value) in file order, each key once

    def error(self, code: str, message: str, help: str = "") -> None:
        """Note an error at this value."""
        self.findings.add(self.line, self.column, code, message, help, self.path)

    def warn(self, code: str, message: str, help: str = "") -> None:
        """Note a warning at this value."""
        self.findings.add(self.line, self.column, code, message, help, self.path, "warning")

    @property
    def where(self) -> str:
        """`file:line:column`, for values that remember where they came from."""
        return f"{self.findings.file}:{self.line}:{self.column}"

    def describe(self) -> str:
        """The value in a few words, for messages: `the text 'abc'`."""
        if self.kind != "scalar":
            return f"a {'list' if self.kind == 'sequence' else 'mapping'}"
        if not self.quoted and self.text in ("", "~", "null", "Null", "NULL"):
            return "nothing"
        value = plain_value(self)
        if isinstance(value, bool):
            return f"the boolean {shorten(self.text)}"
        return f"the {'text' if isinstance(value, str) else 'number'} {shorten(self.text)!r}"


def shorten(text: str, limit: int = 40) -> str:
    """At most `limit` characters of a text from a file, for messages."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def parse(text: str, file: str) -> Node:
    """The root value of a YAML text with exactly one document.

    Raises InvalidInput for what makes reading pointless: characters that YAML does not allow, broken syntax,
    no document or several, nesting deeper than MAX_DEPTH, more than MAX_NODES values after alias expansion,
    an alias inside its own anchor. Duplicate keys, tags and merge keys are noted in `root.findings`.
    """
    findings = Findings(file, text)
    bad = _NOT_YAML.search(text)
    if bad:
        line, column = _place(text, bad.start())
        findings.add(line, column, "Y004", f"the character U+{ord(bad.group()):04X} is not allowed in YAML")
        findings.raise_if_any()
    try:
        events = yaml.parse(text, Loader=_LOADER)
        root = _Composer(findings).document(iter(events))
    except yaml.YAMLError as error:
        _note_syntax(findings, error)
        raise InvalidInput(findings.errors) from error
    except (ValueError, OverflowError) as error:  # PyYAML without libyaml: an escape such as "\UFFFFFFFF"
        findings.add(0, 0, "Y005", f"the YAML cannot be read: {error}")
        raise InvalidInput(findings.errors) from error
    return root


def _place(text: str, offset: int) -> tuple[int, int]:
    breaks = [match.end() for match in _LINE_BREAK.finditer(text, 0, offset)]
    return len(breaks) + 1, offset - (breaks[-1] if breaks else 0) + 1


def _note_syntax(findings: Findings, error: yaml.YAMLError) -> None:
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    context = getattr(error, "context", None)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    if "nesting depth" in problem:  # libyaml from 0.2.6 on has a limit too, and meets it looking ahead
        findings.add(line, column, "Y009", _TOO_DEEP)
        return
    help = ""
    if "'\\t'" in problem or "tab" in problem or "cannot start any token" in problem:
        help = "indent with spaces: YAML allows no tabs there; put text that begins with @ or ` in quotes"
    elif "mapping values are not allowed" in problem:
        help = "check the indentation, and put text that holds ': ' in quotes"
    elif "could not find expected ':'" in problem:
        help = "each key of a mapping is followed by a colon and a space"
    message = f"the YAML cannot be read: {problem}" + (f" ({context})" if context else "")
    findings.add(line, column, "Y005", message, help)


class _Composer:
    """Builds nodes from parser events, with limits that PyYAML's own composer does not have."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.anchors: dict[str, tuple[Node, int] | None] = {}  # None while the anchored value is being built
        self.count = 0

    def document(self, events: Iterator[Any]) -> Node:
        next(events)  # stream start
        event = next(events)
        if isinstance(event, yaml.StreamEndEvent):
            self.findings.add(
                1, 1, "Y006", "the file is empty", "see `taccl schema` for what may stand in it"
            )
            self.findings.raise_if_any()
        root, _ = self.value(next(events), events, "", 0)
        next(events)  # document end
        event = next(events)
        if not isinstance(event, yaml.StreamEndEvent):
            self.stop(event, "Y007", "the file holds several YAML documents; only one is allowed")
        return root

    def stop(self, event: Any, code: str, message: str, help: str = "") -> None:
        """Note an error after which reading on is pointless, and raise."""
        mark = event.start_mark
        self.findings.add(mark.line + 1, mark.column + 1, code, message, help)
        self.findings.raise_if_any()

    def grow(self, event: Any, size: int) -> None:
        self.count += size
        if self.count > MAX_NODES:
            self.stop(event, "Y008", f"the file holds more than {MAX_NODES} values (aliases counted in full)")

    def value(self, event: Any, events: Iterator[Any], path: str, depth: int) -> tuple[Node, int]:
        """The node that begins with `event`, and its number of values after alias expansion."""
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event)
        if depth > MAX_DEPTH:
            self.stop(event, "Y009", _TOO_DEEP)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.grow(event, 1)
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if event.tag is not None:
            message = f"the tag {shorten(str(event.tag))!r} has no meaning here"
            self.findings.add(line, column, "Y010", message, "leave tags (!, !!) out", path)
        if isinstance(event, yaml.ScalarEvent):
            quoted = event.style not in (None, "")
            node = Node("scalar", line, column, path, self.findings, event.value, quoted)
            size = 1
        elif isinstance(event, yaml.SequenceStartEvent):
            node, size = self.sequence(events, (line, column), path, depth)
        else:
            node, size = self.mapping(events, (line, column), path, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (node, size)
        return node, size

    def alias(self, event: Any) -> tuple[Node, int]:
        name = shorten(str(event.anchor))
        if event.anchor not in self.anchors:
            self.stop(event, "Y011", f"the alias *{name} has no anchor &{name} before it")
        known = self.anchors[event.anchor]
        if known is None:
            self.stop(event, "Y012", f"the alias *{name} stands inside its own anchor, an endless value")
        assert known is not None
        self.grow(event, known[1])
        return known

    def sequence(
        self, events: Iterator[Any], place: tuple[int, int], path: str, depth: int
    ) -> tuple[Node, int]:
        items: list[Node] = []
        total = 1
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            item, size = self.value(event, events, f"{path}[{len(items)}]", depth + 1)
            items.append(item)
            total += size
        return Node("sequence", *place, path, self.findings, items=tuple(items)), total

    def mapping(
        self, events: Iterator[Any], place: tuple[int, int], path: str, depth: int
    ) -> tuple[Node, int]:
        entries: dict[str, tuple[Node, Node]] = {}
        total, keys = 1, 0
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            keys += 1
            if keys > MAX_KEYS:
                self.stop(event, "Y008", f"a mapping holds more than {MAX_KEYS} keys")
            key, key_size = self.value(event, events, path, depth + 1)
            prefix = f"{path}." if path else ""
            value, size = self.value(next(events), events, f"{prefix}{shorten(key.text)}", depth + 1)
            total += key_size + size
            if key.kind != "scalar":
                key.error("Y013", f"a key must be a word, not {key.describe()}")
            elif key.text == "<<" and not key.quoted:
                key.error(
                    "Y014", "merge keys (<<) are not supported", "repeat the keys, or alias a whole value"
                )
            elif key.text in entries:
                first = entries[key.text][0]
                message = f"the key {shorten(key.text)!r} stands twice (first in line {first.line})"
                key.error("Y015", message, "remove one of the two")
            else:
                entries[key.text] = (key, value)
        return Node("mapping", *place, path, self.findings, entries=tuple(entries.values())), total


INTEGER = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


def plain_value(node: Node) -> Any:
    """The value as JSON would hold it, by the core rules of YAML 1.2: what a JSON Schema is applied to."""
    if node.kind == "sequence":
        return [plain_value(item) for item in node.items]
    if node.kind == "mapping":
        return {key.text: plain_value(value) for key, value in node.entries}
    text = node.text
    if node.quoted:
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    if INTEGER.fullmatch(text) and len(text) <= MAX_DIGITS:
        return int(text)
    if FLOAT.fullmatch(text) or _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    return text
