"""TACCL's JSON sketches: what they mean here, and every error with its place."""

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
from taccl.sketches import check_sketch, load_sketch, restrict
from taccl.sketches.taccl_json import TACCL_SKETCH, read_taccl_sketch

# The shapes of TACCL's own sketches, by the name of the bundled sketch that says the same.
SAME: dict[str, dict[str, Any]] = {
    "dgx2-sk-1": {
        "nnodes": 2,
        "intranode_sketch": {
            "strategy": "switch",
            "switches": [list(range(16))],
            "switch_hyperedge_strategy": ["uc-min"],
        },
        "internode_sketch": {
            "strategy": "relay",
            "internode_conn": {str(r): [r - 1] for r in range(1, 16, 2)},
            "gpus_to_sender_rev_map": {str(r): [r - 1, r] for r in range(1, 16, 2)},
            "enforce_ordering": True,
        },
        "symmetry_offsets": [[2, 16], [16, 32]],
        "hyperparameters": {"input_chunkup": 2},
    },
    "dgx2-sk-2": {
        "nnodes": 2,
        "intranode_sketch": {
            "strategy": "switch",
            "switches": [list(range(16))],
            "switch_hyperedge_strategy": ["uc-max"],
        },
        "internode_sketch": {
            "strategy": "relay",
            "internode_conn": "direct-map",
            "gpus_to_sender_rev_map": {str(r): [r] for r in range(16)},
        },
        "symmetry_offsets": [[2, 16], [16, 32]],
        "hyperparameters": {"input_chunkup": 1},
    },
    "ndv2-sk-1": {
        "nnodes": 2,
        "intranode_sketch": {"strategy": "none"},
        "internode_sketch": {"strategy": "relay", "internode_conn": {"0": [1]}},
        "symmetry_offsets": [[8, 16]],
        "hyperparameters": {"input_chunkup": 1},
    },
    "ndv2-sk-2": {
        "nnodes": 2,
        "intranode_sketch": {"strategy": "none"},
        "internode_sketch": {"strategy": "relay", "internode_conn": "fully-connected"},
        "symmetry_offsets": [[8, 16]],
        "hyperparameters": {"input_chunkup": 1},
    },
}


def text_of(document: object) -> str:
    return json.dumps(document, indent=1)


def small(**changes: Any) -> dict[str, Any]:
    """The second NDv2 sketch with some of its keys changed."""
    return SAME["ndv2-sk-2"] | changes


def between(**keys: Any) -> dict[str, Any]:
    return small(internode_sketch={"strategy": "relay", **keys})


def inside(**keys: Any) -> dict[str, Any]:
    return small(intranode_sketch={"strategy": "switch", **keys})


@pytest.mark.parametrize("name", SAME)
def test_taccl_sketch_gives_the_rules_of_the_bundled_one(name: str) -> None:
    topology = load_topology(f"{name.partition('-')[0]}:2")
    read = read_taccl_sketch(text_of(SAME[name]), f"{name}.json")
    assert read.nodes == 2
    assert check_sketch(read, topology) == []
    theirs, ours = restrict(read, topology), restrict(load_sketch(name), topology)
    assert [replace(rule, where="") for rule in theirs.rules] == [
        replace(rule, where="") for rule in ours.rules
    ]
    assert theirs.symmetry == ours.symmetry
    assert theirs.partition == ours.partition
    assert all(rule.where.startswith(f"{name}.json:") for rule in theirs.rules)


@pytest.mark.parametrize("indent", [None, 4, "\t"])
def test_json_file_is_loaded_by_name(tmp_path: Path, indent: int | str | None) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SAME["ndv2-sk-1"], indent=indent))
    sketch = load_sketch(str(path))
    assert (sketch.name, sketch.nodes, sketch.partition) == ("mine", 2, 1)
    assert sketch.internode is not None
    assert [(line.sender, line.receivers) for line in sketch.internode.senders] == [(0, (1,))]


def test_number_of_nodes_binds() -> None:
    sketch = read_taccl_sketch(text_of(SAME["ndv2-sk-1"]), "sk.json")
    with pytest.raises(InvalidInput, match=r"sk\.json:2:12: error\[S201\]"):
        restrict(sketch, load_topology("ndv2:4"))


@pytest.mark.parametrize("offsets", [{}, {"symmetry_offsets": []}])
def test_without_offsets_there_is_no_symmetry(offsets: dict[str, Any]) -> None:
    document = {"nnodes": 1, "intranode_sketch": {"strategy": "none"}, **offsets}
    sketch = read_taccl_sketch(text_of(document), "n1.json")
    assert (sketch.name, sketch.symmetry.kind, sketch.internode) == ("n1", "none", None)


def test_who_is_not_in_the_map_does_not_send() -> None:
    only_zero = {"0": [0, 1], "2": [2]}
    cases: list[tuple[object, list[tuple[int, tuple[int, ...]]]]] = [
        ({"0": [1], "2": [1], "3": [1]}, [(0, (1,)), (2, (1,))]),
        ("direct-map", [(0, (0,)), (2, (2,))]),
        ("fully-connected", [(0, (0, 1, 2)), (2, (0, 1, 2))]),
    ]
    for connection, expected in cases:
        text = text_of(between(internode_conn=connection, gpus_to_sender_rev_map=only_zero))
        internode = read_taccl_sketch(text, "sk.json").internode
        assert internode is not None and internode.connection == "explicit"
        assert [(line.sender, line.receivers) for line in internode.senders] == expected


def test_parallel_switches_may_be_repeated() -> None:
    document = inside(switches=[[0, 1], [1, 0]], switch_hyperedge_strategy=["uc-min", "uc-min"])
    intranode = read_taccl_sketch(text_of(document), "sk.json").intranode
    assert intranode is not None and len(intranode.switches) == 2


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (small(nodes=2), "Y102", "unknown key 'nodes'"),
    (small(nnodes=0), "Y104", "nnodes"),
    (small(nnodes="2"), "Y101", "nnodes"),
    ({k: v for k, v in small().items() if k != "internode_sketch"}, "S101", ""),
    (small(hyperparameters={}), "Y109", "hyperparameters"),
    (small(hyperparameters={"input_chunkup": 1.5}), "Y104", "hyperparameters.input_chunkup"),
    (small(intranode_sketch={"strategy": "swich"}), "Y106", "intranode_sketch.strategy"),
    (small(intranode_sketch={"strategy": "switch"}), "S101", "intranode_sketch.strategy"),
    (small(intranode_sketch={"strategy": "none", "switches": [[0, 1]]}), "S101", "switches"),
    (inside(switches=[[0, 1], [2, 3]], switch_hyperedge_strategy=["uc-min"]), "S105", "policies"),
    (inside(switches=[[0, 1], [1, 2]], switch_hyperedge_strategy=["uc-min"] * 2), "S105", "rank 1"),
    (inside(switches=[[0, 1]] * 2, switch_hyperedge_strategy=["uc-min", "uc-max"]), "S105", "policy"),
    (inside(switches=[[0, 0]], switch_hyperedge_strategy=["uc-min"]), "S102", "rank 0"),
    (inside(switches=[[0]], switch_hyperedge_strategy=["uc-min"]), "S105", "two ranks"),
    (inside(switches=[[0, 99999]], switch_hyperedge_strategy=["uc-min"]), "Y104", "99999"),
    (small(internode_sketch={"strategy": "ring", "internode_conn": "direct-map"}), "Y106", "relay"),
    (between(internode_conn="direct"), "Y101", "internode_conn"),
    (between(internode_conn={}), "S104", "nobody"),
    (between(internode_conn={"a": [1]}), "Y107", "local rank"),
    (between(internode_conn={"99999": [1]}), "S102", "99999"),
    (between(internode_conn={"0": [1]}, gpus_to_sender_rev_map={"5": [0]}), "S104", "rank 5"),
    (between(internode_conn="direct-map", enforce_ordering="yes"), "Y105", "enforce_ordering"),
    (small(symmetry_offsets=[[16, 16]]), "S107", "16"),
    (small(symmetry_offsets=[[0, 16]]), "S107", "0"),
    (small(symmetry_offsets=[[8]]), "Y108", "symmetry_offsets"),
]


@pytest.mark.parametrize(("document", "code", "names"), WRONG)
def test_wrong_sketch_is_refused_at_its_place(document: dict[str, Any], code: str, names: str) -> None:
    text = text_of(document)
    with pytest.raises(InvalidInput) as caught:
        read_taccl_sketch(text, "sk.json")
    [found] = caught.value.diagnostics
    assert found.code == code
    assert names in f"{found.path} {found.message}"
    assert found.file == "sk.json"
    assert 1 <= found.line <= text.count("\n") + 1
    assert found.source_line == text.splitlines()[found.line - 1]


def test_place_is_exact_and_all_errors_come_in_one_run() -> None:
    text = (
        '{"nnodes": 2, "nnodes": 3,\n'
        ' "intranode_sketch": {"strategy": "nun"},\n'
        ' "internode_sketch": {"strategy": "relay", "internode_conn": {"0": [-1]}},\n'
        ' "symmetry_ofsets": [[9, 8]],\n'
        ' "hyperparameters": {"input_chunkup": true}}\n'
    )
    with pytest.raises(InvalidInput) as caught:
        read_taccl_sketch(text, "sk.json")
    assert [(d.line, d.column, d.code) for d in caught.value.diagnostics] == [
        (1, 15, "Y015"),
        (2, 35, "Y106"),
        (3, 69, "Y104"),
        (4, 2, "Y102"),
        (4, 22, "S107"),
        (5, 39, "Y103"),
    ]


KEYS = sorted(
    {"0", "1", "7", "strategy", "switches", "internode_conn", "input_chunkup", *TACCL_SKETCH.fields}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["uc-min", "none", "switch", "relay", "direct-map", ""]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def read_or_refuse(text: str) -> None:
    """Reading ends in a sketch that names ranks that are read, or in errors that have places."""
    try:
        sketch = read_taccl_sketch(text, "sk.json")
    except InvalidInput as error:
        assert error.diagnostics and all(
            d.file == "sk.json" and d.severity == "error" for d in error.diagnostics
        )
        return
    assert sketch.nodes is not None and sketch.nodes >= 1
    assert sketch.partition is None or sketch.partition >= 1
    assert sketch.nodes == 1 or sketch.internode is not None


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(SAME)), st.data())
def test_any_value_anywhere_is_read_or_refused(name: str, data: st.DataObject) -> None:
    document = json.loads(json.dumps(SAME[name]))
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = document
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if not isinstance(at[key], (dict, list)) or data.draw(st.booleans()):
                at[key] = data.draw(VALUES)
                break
            at = at[key]
    read_or_refuse(text_of(document))


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(SAME)), st.integers(0, 900), st.integers(0, 40), st.text(max_size=6))
def test_damaged_text_is_read_or_refused(name: str, start: int, length: int, put: str) -> None:
    text = text_of(SAME[name])
    start = min(start, len(text))
    read_or_refuse(text[:start] + put + text[start + length :])


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=80) | VALUES.map(json.dumps))
def test_any_text_is_read_or_refused(text: str) -> None:
    read_or_refuse(text)
