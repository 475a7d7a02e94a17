"""Sketch files: what is read, every kind of mistake with its place, schema and reader in agreement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.errors import InvalidInput, UsageError
from taccl.profiles.yaml_reader import parse, plain_value
from taccl.sketches import load_sketch, sketch_names
from taccl.sketches.load import sketch_text
from taccl.sketches.schema import sketch_schema
from taccl.sketches.sketch import LinkChoice, Sender, Sketch, SwitchSet
from taccl.sketches.sketch_file import read_sketch

HEAD = "schema: taccl/sketch/v1\n"
VALIDATOR = jsonschema.Draft202012Validator(sketch_schema())

FULL = (
    HEAD
    + """\
name: full
description: everything at once
nodes: 4
intranode:
  strategy: switch
  switches:
    - {ranks: 0-3, policy: uc-min}
    - {ranks: "4, 5-7", policy: free}
    - {name: nvswitch, policy: uc-max}
internode:
  connect:
    0: [1, 2]
    3: [1]
  relays:
    3: [3, 4]
  own_first: true
  groups: {pattern: relay, nodes: [[0, 1], [2, 3]]}
use:
  - {kind: nvlink, scope: intra}
  - {scope: inter}
avoid:
  - {pairs: [[0, 1], [2, 3]], both_ways: true}
caps:
  - {limit: 3, from: all, to: 8-9}
symmetry: [[8, 16], [16, all]]
size: 1MiB
partition: 2
extra_hops: 1
codec: none
time_limit: 5min
target_gap: 5%
hyperparameters: {seed: 7, workers: 4}
"""
)


def test_everything_is_read_with_its_place() -> None:
    sketch = read_sketch(FULL, "full.yaml")
    assert sketch.name == "full" and sketch.nodes == 4
    assert sketch.intranode is not None and sketch.internode is not None and sketch.node_groups is not None
    assert sketch.intranode.switches == (
        SwitchSet((0, 1, 2, 3), "uc-min", "", "full.yaml:8:7", "full.yaml:8:28"),
        SwitchSet((4, 5, 6, 7), "free", "", "full.yaml:9:7", "full.yaml:9:33"),
        SwitchSet((), "uc-max", "nvswitch", "full.yaml:10:7", "full.yaml:10:32"),
    )
    assert sketch.internode.connection == "explicit"
    assert sketch.internode.senders == (
        Sender(0, (1, 2), "full.yaml:13:5"),
        Sender(3, (1,), "full.yaml:14:5"),
    )
    assert [(r.sender, r.sources, r.where) for r in sketch.internode.relays] == [
        (3, (3, 4), "full.yaml:16:5")
    ]
    assert sketch.internode.own_first and sketch.internode.own_first_where == "full.yaml:17:14"
    assert (sketch.node_groups.pattern, sketch.node_groups.groups) == ("relay", ((0, 1), (2, 3)))
    assert sketch.use == (
        LinkChoice(kind="nvlink", scope="intra", where="full.yaml:20:5"),
        LinkChoice(scope="inter", where="full.yaml:21:5"),
    )
    assert sketch.avoid[0].pairs == ((0, 1), (2, 3)) and sketch.avoid[0].both_ways
    assert (sketch.caps[0].limit, sketch.caps[0].links.sources, sketch.caps[0].links.targets) == (
        3,
        None,
        (8, 9),
    )
    assert [(o.offset, o.group, o.where) for o in sketch.symmetry.offsets] == [
        (8, 16, "full.yaml:26:12"),
        (16, 0, "full.yaml:26:21"),
    ]
    assert (sketch.size_bytes, sketch.partition, sketch.extra_hops) == (2**20, 2, 1)
    assert (sketch.codec, sketch.time_limit_s, sketch.target_gap) == ("none", 300.0, 0.05)
    assert (sketch.seed, sketch.workers) == (7, 4)
    assert sketch.places["target_gap"] == "full.yaml:32:13"
    assert sketch.places["hyperparameters.workers"] == "full.yaml:33:37"


def test_an_empty_sketch_leaves_everything_to_synthesis() -> None:
    sketch = read_sketch(HEAD, "plain.yaml")
    assert sketch == Sketch(name="plain", file="plain.yaml")
    assert sketch.symmetry.kind == "auto"


@pytest.mark.parametrize(
    ("text", "kind"), [("symmetry: none", "none"), ("symmetry: {permutations: [[1, 0]]}", "listed")]
)
def test_symmetry(text: str, kind: str) -> None:
    symmetry = read_sketch(HEAD + text, "s.yaml").symmetry
    assert symmetry.kind == kind
    assert [p.image for p in symmetry.permutations] == ([(1, 0)] if kind == "listed" else [])


# One mistake each: the text after the schema line, and where and what is reported.
MISTAKES = {
    "symetry: auto": ("2:1", "Y102", "did you mean 'symmetry'?"),
    "symmetry: atuo": ("2:11", "Y101", "did you mean 'auto'?"),
    "symmetry: [[16, 16]]": ("2:12", "S107", "an offset lies between 1 and 15"),
    "symmetry: [[2, 16, 3]]": ("2:12", "Y108", "found 3 items"),
    "symmetry: {permutations: [[1, 2, 2]]}": ("2:27", "S107", "rank 0 is missing"),
    "size: 1M": ("2:7", "Y103", "write MB"),
    "size: 3/2": ("2:7", "S108", "not a whole number of bytes"),
    "size: 0": ("2:7", "Y104", "from 1 to"),
    "time_limit: 1e-9": ("2:13", "Y104", "from 0.1 to 1e6, found 1e-9"),
    "time_limit: 2000000": ("2:13", "Y104", "from 0.1 to 1e6"),
    "time_limit: 5parsec": ("2:13", "Y103", "a time such as 60s"),
    "target_gap: 2": ("2:13", "Y104", "from 0 to 1, found 2"),
    "partition: 1e3.5": ("2:12", "Y103", "a number"),
    "codec: 7": ("2:8", "Y101", "put it in quotes"),
    "intranode: {strategy: switch}": ("2:23", "S101", "needs `switches`"),
    "intranode: {strategy: none, switches: [{ranks: 0-1, policy: free}]}": ("2:39", "S101", "strategy: switch"),
    "intranode: {switches: [{policy: free}]}": ("2:24", "S101", "either `ranks` or a `name`"),
    "intranode: {switches: [{ranks: [0], policy: free}]}": ("2:32", "S105", "at least two ranks"),
    "intranode: {switches: [{ranks: 3-1, policy: free}]}": ("2:32", "S102", "write 1-3"),
    "intranode: {switches: [{ranks: 0-9999, policy: free}]}": ("2:32", "S102", "above 4095"),
    "intranode: {switches: [{ranks: [0, 0], policy: free}]}": ("2:32", "S102", "stands twice"),
    "intranode: {switches: [{ranks: 0-1, policy: uc-mni}]}": ("2:45", "Y106", "did you mean 'uc-min'?"),
    "intranode: {switches: [{ranks: 0-1, policy: free}, {ranks: 1-2, policy: free}]}": (
        "2:52", "S105", "rank 1 is in this switch and in the one at x.yaml:2:24",
    ),
    "intranode: {switches: [{ranks: 0-1, policy: uc-min}, {ranks: 0-1, policy: uc-max}]}": (
        "2:75", "S105", "is uc-min at x.yaml:2:45, here uc-max",
    ),
    "internode: {connect: direct}": ("2:22", "Y101", "did you mean 'direct-map'?"),
    "internode: {connect: {}}": ("2:22", "S104", "nobody sends"),
    "internode: {connect: {a: [1]}}": ("2:23", "Y103", "expected a number"),
    "internode: {connect: {0: []}}": ("2:26", "Y108", "1 to 4096 items"),
    "internode: {connect: {0: [1], +0: [2]}}": ("2:31", "S104", "the sender 0 stands twice"),
    "internode: {connect: {0: [1, 1]}}": ("2:26", "S102", "stands twice"),
    "internode: {connect: {0: [1]}, relays: {1: [1]}}": ("2:41", "S104", "senders are 0"),
    "internode: {own_first: yes}": ("2:24", "Y105", "write true"),
    "internode: {groups: {pattern: relay}}": ("2:21", "S101", "either their `size` or their `nodes`"),
    "internode: {groups: {pattern: relay, nodes: [[0, 1], [1]]}}": ("2:54", "S106", "node 1 is in two groups"),
    "internode: {groups: {pattern: round-robin, nodes: [[0, 1], [2]]}}": ("2:51", "S106", "equal size"),
    "use: [{both_ways: true}]": ("2:7", "S103", "does not say which links"),
    "avoid: [{pairs: [[0, 1]], to: 3}]": ("2:31", "S103", "exclude each other"),
    "avoid: [{pairs: [[2, 2]]}]": ("2:18", "S103", "not 2 to itself"),
    "caps: [{from: 0}]": ("2:8", "Y109", "'limit' is missing"),
    "hyperparameters: {seeds: 1}": ("2:19", "Y102", "did you mean 'seed'?"),
    "nodes: 2\nnodes: 3": ("3:1", "Y015", "stands twice"),
    "extra_hops: null": ("2:13", "Y103", "found 'null'"),
}  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_reported_at_its_place(text: str) -> None:
    place, code, words = MISTAKES[text]
    with pytest.raises(InvalidInput) as caught:
        read_sketch(HEAD + text, "x.yaml")
    found = [(f"{d.line}:{d.column}", d.code) for d in caught.value.diagnostics]
    assert (place, code) in found
    assert words in caught.value.diagnostics[found.index((place, code))].render()
    assert len(found) == 1, str(caught.value)


def test_all_mistakes_of_a_file_come_in_one_run() -> None:
    text = HEAD + (
        "symetry: auto\n"
        "size: 1M\n"
        "internode:\n"
        "  connect:\n"
        "    0: [1]\n"
        "  relays:\n"
        "    2: [0]\n"
        "avoid:\n"
        "  - {pairs: [[0, 0]]}\n"
    )
    with pytest.raises(InvalidInput) as caught:
        read_sketch(text, "bad.yaml")
    assert str(caught.value) == (
        "bad.yaml:2:1: error[Y102]: unknown key 'symetry'\n"
        "  symetry: auto\n"
        "  ^\n"
        "  help: did you mean 'symmetry'?\n"
        "bad.yaml:3:7: error[Y103]: expected a size such as 1MB (10^6) or 1MiB (2^20) (a bare number is in "
        "bytes), found '1M': write MB (powers of 1000) or MiB (powers of 1024)\n"
        "  size: 1M\n"
        "        ^\n"
        "bad.yaml:8:5: error[S104]: rank 2 sends to no other node (senders are 0)\n"
        "      2: [0]\n"
        "      ^\n"
        "bad.yaml:10:14: error[S103]: a link joins two different ranks, not 0 to itself\n"
        "    - {pairs: [[0, 0]]}\n"
        "               ^"
    )


def test_taccls_sketches_are_bundled() -> None:
    assert sketch_names() == ("dgx2-sk-1", "dgx2-sk-2", "dgx2-sk-3", "ndv2-sk-1", "ndv2-sk-2")
    for name in sketch_names():
        sketch = load_sketch(name)
        assert sketch.name == name and sketch.description and sketch.nodes is None


def test_load_by_file_and_by_an_unknown_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(sketch_text("ndv2-sk-1"))
    assert load_sketch(str(path)).internode is not None
    with pytest.raises(UsageError, match="did you mean 'ndv2-sk-1'"):
        load_sketch("ndv2-sk1")
    with pytest.raises(InvalidInput, match="Y001"):
        load_sketch(str(tmp_path / "absent.yaml"))


def accepts(text: str) -> bool:
    try:
        read_sketch(text, "x.yaml")
    except InvalidInput:
        return False
    return True


def schema_accepts(text: str) -> bool:
    return bool(VALIDATOR.is_valid(plain_value(parse(text, "x.yaml"))))


def test_the_schema_accepts_what_the_reader_accepts() -> None:
    jsonschema.Draft202012Validator.check_schema(sketch_schema())
    for text in [FULL, HEAD, *(sketch_text(name) for name in sketch_names())]:
        assert accepts(text) and schema_accepts(text)


def test_the_schema_refuses_every_mistake_of_form() -> None:
    """Codes Y0xx to Y1xx are of the form (duplicate keys YAML itself loses); S is what a schema cannot say."""
    for text, (_, code, _) in MISTAKES.items():
        if code.startswith("Y1"):
            assert not schema_accepts(HEAD + text), text
        if code.startswith("S"):
            assert not accepts(HEAD + text) and schema_accepts(HEAD + text), text


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_sketch_never_raises_anything_else(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([FULL, *(sketch_text(name) for name in sketch_names())]))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 12)))
        junk = data.draw(
            st.sampled_from(["", "0", "-1", "[", "]", "{", ": ", "\n", "all", "none", "&a ", "*a", "9" * 70])
        )
        text = text[:start] + junk + text[end:]
    try:
        sketch = read_sketch(text, "x.yaml")
    except InvalidInput as error:
        assert all(d.code[0] in "YS" and d.message for d in error.diagnostics)
    else:
        assert schema_accepts(text) and sketch.file == "x.yaml"


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(["0", "1", "-1", "4095", "1.5", "all", "auto", "none", "true", "1MB", "0-3", "3-0", "", "~"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]"),
        st.lists(
            st.tuples(
                st.sampled_from(
                    ["ranks", "policy", "connect", "relays", "0", "1", "pairs", "from", "groups", "size", "limit",
                     "nodes", "pattern", "permutations", "switches", "seed"]
                ),
                inner,
            ),
            max_size=3,
        ).map(lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items) + "}"),
    ),
    max_leaves=8,
)  # fmt: skip
KEYS = ["nodes", "intranode", "internode", "use", "avoid", "caps", "symmetry", "size", "codec", "target_gap"]


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_values_are_read_or_refused_with_a_place(document: dict[str, str]) -> None:
    text = HEAD + "".join(f"{key}: {value}\n" for key, value in document.items())
    try:
        read_sketch(text, "x.yaml")
    except InvalidInput as error:
        assert all(1 <= d.line <= 1 + len(document) and d.column >= 1 for d in error.diagnostics)
    else:
        assert schema_accepts(text)
