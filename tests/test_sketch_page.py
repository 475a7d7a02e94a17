"""docs/sketches.md: its examples are sketches, its tables name every key, sketch and code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from taccl.profiles.load import load_topology
from taccl.sketches import check_sketch, sketch_names
from taccl.sketches.schema import CAPS, INTERNODE, INTRANODE, LINKS, SKETCH
from taccl.sketches.sketch_file import read_sketch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "sketches.md").read_text()
EXAMPLES = re.findall(r"```yaml\n# on (\S+)\n(.*?)```", PAGE, re.DOTALL)


def test_every_example_says_where_it_holds() -> None:
    assert len(EXAMPLES) == PAGE.count("```yaml") >= 5


@pytest.mark.parametrize(("topology", "text"), EXAMPLES)
def test_examples_are_sketches(topology: str, text: str) -> None:
    assert check_sketch(read_sketch(text, "example.yaml"), load_topology(topology)) == []


def test_shown_mistakes_are_those_that_are_made() -> None:
    text = """\
schema: taccl/sketch/v1
name: mine
internode:
  connect: {1: [0], 16: [0]}
avoid:
  - {kind: nvlnk}
"""
    found = check_sketch(read_sketch(text, "mine.yaml"), load_topology("dgx2:2"))
    said = "\n".join(diagnostic.render() for diagnostic in found)
    assert said in "\n".join(line.removeprefix("    ") for line in PAGE.splitlines())


def test_every_key_is_explained() -> None:
    records = [SKETCH, INTRANODE, INTERNODE, LINKS.item, CAPS.item]
    for record in records:
        assert hasattr(record, "fields")
        for key in record.fields:
            assert re.search(rf"\b{key}\b", PAGE), f"docs/sketches.md does not explain {key}"


def test_every_bundled_sketch_is_listed() -> None:
    for name in sketch_names():
        assert f"`{name}`" in PAGE


def test_every_code_is_listed() -> None:
    raised = {
        code
        for file in (ROOT / "sketches").glob("*.py")
        for code in re.findall(r'"(S\d{3})"', file.read_text())
    }
    listed = set(re.findall(r"^\| (S\d{3}) \|", PAGE, re.MULTILINE))
    assert raised == listed
