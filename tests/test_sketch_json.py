"""TACCL's own sketches: read as the bundled ones, refused with a place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.errors import InvalidInput
from taccl.profiles.load import load_topology
from taccl.sketches import load_sketch, restrict
from taccl.sketches.restrictions import Restrictions
from taccl.sketches.taccl_json import read_taccl_sketch


def dgx2_sk_1() -> dict[str, Any]:
    """The JSON form of dgx2-sk-1."""
    odd = range(1, 16, 2)
    return {
        "nnodes": 2,
        "intranode_sketch": {
            "strategy": "switch",
            "switches": [list(range(16))],
            "switch_hyperedge_strategy": ["uc-min"],
        },
        "internode_sketch": {
            "strategy": "relay",
            "internode_conn": {str(i): [i - 1] for i in odd},
            "gpus_to_sender_rev_map": {str(i): [i - 1, i] for i in odd},
            "enforce_ordering": True,
        },
        "symmetry_offsets": [[2, 16], [16, 32]],
        "hyperparameters": {"input_chunkup": 2},
    }


def ndv2(connection: object) -> dict[str, Any]:
    return {
        "nnodes": 2,
        "intranode_sketch": {"strategy": "none"},
        "internode_sketch": {"strategy": "relay", "internode_conn": connection},
        "symmetry_offsets": [[8, 16]],
        "hyperparameters": {"input_chunkup": 1},
    }


def meaning(restrictions: Restrictions) -> object:
    """What the rules ask, without the places and words."""
    rules = [replace(rule, where="", text="") for rule in restrictions.rules]
    return rules, restrictions.symmetry, restrictions.partition


@pytest.mark.parametrize(
    ("document", "bundled", "machine"),
    [
        (dgx2_sk_1(), "dgx2-sk-1", "dgx2:2"),
        (ndv2({"0": [1]}), "ndv2-sk-1", "ndv2:2"),
        (ndv2("fully-connected"), "ndv2-sk-2", "ndv2:2"),
    ],
)
@pytest.mark.parametrize("indent", [None, 4, "\t"])
def test_they_mean_what_the_bundled_ones_mean(
    tmp_path: Path, document: dict[str, Any], bundled: str, machine: str, indent: int | str | None
) -> None:
    path = tmp_path / "sk.json"
    path.write_text(json.dumps(document, indent=indent))
    topology = load_topology(machine)
    assert meaning(restrict(load_sketch(str(path)), topology)) == meaning(
        restrict(load_sketch(bundled), topology)
    )


def test_without_offsets_there_is_no_symmetry() -> None:
    document = {"nnodes": 1, "intranode_sketch": {"strategy": "none"}, "symmetry_offsets": []}
    sketch = read_taccl_sketch(json.dumps(document), "n1.json")
    assert (sketch.name, sketch.symmetry.kind, sketch.internode) == ("n1", "none", None)


def test_the_number_of_nodes_is_checked() -> None:
    sketch = read_taccl_sketch(json.dumps(ndv2("direct-map"), indent=1), "x.json")
    with pytest.raises(InvalidInput, match=r"x\.json:2:12: error\[S201\]"):
        restrict(sketch, load_topology("ndv2:3"))


def damaged(path: str, value: object) -> dict[str, Any]:
    document = dgx2_sk_1()
    *way, last = path.split(".")
    part = document
    for key in way:
        part = part[key]
    part[last] = value
    return document


MISTAKES: dict[str, tuple[object, str, str]] = {
    "nnode": (2, "Y102", "unknown key 'nnode'"),
    "intranode_sketch.strategy": ("swich", "Y106", "did you mean 'switch'?"),
    "intranode_sketch.switches": ([[0, 1], [1, 2]], "S105", "2 switches and 1 policies"),
    "intranode_sketch.switch_hyperedge_strategy": (["uc"], "Y106", "uc-min, uc-max"),
    "internode_sketch.strategy": ("ring", "Y106", "expected 'relay'"),
    "internode_sketch.internode_conn": ({"a": [1]}, "Y107", "local rank of a sender"),
    "internode_sketch.gpus_to_sender_rev_map": ({"0": [1]}, "S104", "senders are 1, 3"),
    "internode_sketch.enforce_ordering": (1, "Y101", "true or false"),
    "symmetry_offsets": ([[16, 16]], "S107", "an offset lies between 1 and 15"),
    "hyperparameters.input_chunkup": (0, "Y104", "from 1 to 4096"),
}


@pytest.mark.parametrize("path", MISTAKES)
def test_mistakes(path: str) -> None:
    value, code, words = MISTAKES[path]
    with pytest.raises(InvalidInput) as caught:
        read_taccl_sketch(json.dumps(damaged(path, value), indent=2), "x.json")
    found = [d for d in caught.value.diagnostics if d.code == code]
    assert found and words in found[0].render() and found[0].line > 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_file_never_raises_anything_else(data: st.DataObject) -> None:
    text = json.dumps(dgx2_sk_1(), indent=1)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 10)))
        junk = data.draw(st.sampled_from(["", "0", "-1", "[", "]", "}", ": ", "\n", '"', "null", "9" * 70]))
        text = text[:start] + junk + text[end:]
    try:
        sketch = read_taccl_sketch(text, "x.json")
    except InvalidInput as error:
        assert error.diagnostics
    else:
        assert sketch.nodes is not None and sketch.file == "x.json"
