"""The native file: what is written is read back equal, and what is wrong is refused with its place."""

from __future__ import annotations

import json
import random
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_algorithms import algorithms, custom, timed, two_nodes

from taccl.errors import InvalidInput
from taccl.profiles.load import load_topology
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import Collective, build
from taccl.synth.json_reader import parse
from taccl.synth.native import read_native, write_native
from taccl.synth.native_collective import read_collective_value

TWO = two_nodes()
SMALL = write_native(timed(TWO, build("allreduce", 4), "ring"), TWO)

GOLDEN = """\
{
"schema": "taccl/algorithm/v1",
"name": "broadcast-ring",
"engine": "ring",
"size_bytes": 3,
"time_fs": 702300001,
"certificate": {"lower_bound_us": 0.35115, "bound_by": "half of it", "solver_bound_us": 0.2341, "status": \
"feasible", "proved_by": ""},
"topology_name": "pair",
"collective": {"name": "broadcast", "ranks": 2, "partition": 3, "root": 1},
"provenance": {"seed": 7},
"topology": {
"name": "pair", "source": "",
"reduce_alpha_us": 0, "reduce_beta_us_per_mb": 0,
"nodes": [[0, 1]],
"ports": [
],
"switches": [
],
"nics": [
],
"link_classes": [
{"kind": "link", "alpha_us": 0.7, "beta_us_per_mb": "2300/3", "occupancy_us": 0.7}
],
"links": [
[0,1,0,[]],
[1,0,0,[]]
]
},
"columns": ["link", "src", "dst", "start_fs", "end_fs", "op", "chunks"],
"messages": [
[1,1,0,0,702300001,"copy",[[0,2]]]
]}
"""


@settings(deadline=None, max_examples=60)
@given(algorithms())
def test_reading_gives_back_what_was_written(made: tuple[Any, Any]) -> None:
    algorithm, topology = made
    text = write_native(algorithm, topology)
    again, cluster = read_native(text, "x.json")
    assert (again, cluster) == (algorithm, topology)
    assert write_native(again, cluster) == text
    assert check_algorithm(again, cluster) == []
    json.loads(text)  # any other JSON reader takes it too


def test_golden_file() -> None:
    algorithm, topology = read_native(GOLDEN)
    assert check_algorithm(algorithm, topology) == []
    assert algorithm.messages[0].chunks == (0, 1, 2)
    assert algorithm.collective == build("broadcast", 2, 3, root=1)
    assert write_native(algorithm, topology) == GOLDEN


def test_the_documented_file_is_one() -> None:
    page = Path(__file__).parents[1] / "docs" / "file-formats.md"
    found = re.search(r"```json\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    assert check_algorithm(*read_native(found[1])) == []


def test_messages_are_written_in_order_and_read_in_any() -> None:
    algorithm, topology = read_native(SMALL)
    turned = replace(algorithm, messages=algorithm.messages[::-1])
    assert write_native(turned, topology) == SMALL
    document = json.loads(SMALL)
    document["messages"].reverse()
    assert read_native(json.dumps(document)) == (algorithm, topology)


@pytest.mark.parametrize("collective", [
    custom(4),
    # Not what `build` makes of its name and numbers: the buffers are longer, a block is not whole.
    replace(build("allgather", 4), output_chunks=(5,) * 4),
    replace(build("alltoallv", 4, 2, demand=[[1] * 4] * 4), partition=3),
    build("sendrecv", 4, pairs=[(3, 0)]),
    build("alltoallv", 4, 2, demand=[[0, 1, 2, 0], [0] * 4, [1, 0, 0, 0], [0, 0, 0, 3]]),
], ids=["custom", "longer", "cut", "sendrecv", "alltoallv"])  # fmt: skip
def test_collectives_of_all_kinds_survive(collective: Collective) -> None:
    algorithm, _ = read_native(SMALL)
    odd = replace(algorithm, collective=collective, messages=())
    again, _ = read_native(write_native(odd, TWO))
    assert again.collective == collective


def test_what_build_makes_lists_no_chunks() -> None:
    document = json.loads(SMALL)
    assert document["collective"] == {"name": "allreduce", "ranks": 4, "partition": 1, "root": 0}
    algorithm, _ = read_native(SMALL)
    listed = json.loads(write_native(replace(algorithm, collective=custom(4), messages=()), TWO))
    assert listed["collective"]["chunks"][0] == [[[0, 0]], [[3, 1], [3, 2]]]


def test_large_files_stay_compact() -> None:
    """All of a message's neighbouring chunks are one range, all links of a kind one class."""
    topology = load_topology("torus2d:8x8")
    text = write_native(timed(topology, build("allgather", 64, 4), "ring"), topology)
    messages = text.split('"messages": [')[1]
    assert len(text) < 60 * (messages.count("\n") + len(topology.links))
    assert max(map(len, text.splitlines())) < 400


def test_other_topologies_and_other_json_are_refused() -> None:
    algorithm, _ = read_native(SMALL)
    with pytest.raises(ValueError, match="different numbers of ranks"):
        write_native(algorithm, load_topology("ring:5"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_native(replace(algorithm, provenance={"x": float("nan")}), TWO)


def refusal(text: str) -> Any:
    """The first finding about a text that must be refused."""
    with pytest.raises(InvalidInput) as caught:
        read_native(text, "x.json")
    return caught.value.diagnostics[0]


def test_broken_syntax_is_named_by_line_and_column() -> None:
    found = refusal('{\n"schema": "taccl/algorithm/v1",\n"name": }')
    assert (found.file, found.line, found.column, found.code) == ("x.json", 3, 9, "N001")
    assert refusal("").code == "N001"
    assert refusal('{"a": 1, "a": 2}').code == "N002" and "twice" in refusal('{"a": 1, "a": 2}').message
    for word in ("NaN", "Infinity", "-Infinity", "9" * 31):
        assert refusal(f'{{"a": {word}}}').code == "N002"
    assert refusal("[" * 100_000).code == "N003"
    assert refusal('{"a": "\\ud800"}').code == "N004"


def changed(path: str, value: Any) -> str:
    """SMALL with another value at a path such as messages.0.2; REMOVED takes the key away."""
    document = json.loads(SMALL)
    *way, last = (int(part) if part.isdigit() else part for part in path.split("."))
    place = document
    for part in way:
        place = place[part]
    if value is REMOVED:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document)


REMOVED = object()
WRONG = [
    ("schema", "taccl/algorithm/v2", "schema"),
    ("schema", REMOVED, ""),
    ("surplus", 1, ""),
    ("size_bytes", 0, "size_bytes"),
    ("size_bytes", 2.0, "size_bytes"),
    ("size_bytes", True, "size_bytes"),
    ("size_bytes", "5", "size_bytes"),
    ("time_fs", -1, "time_fs"),
    ("name", None, "name"),
    ("provenance", [], "provenance"),
    ("certificate.status", "perfect", "certificate.status"),
    ("certificate.lower_bound_us", -1, "certificate.lower_bound_us"),
    ("certificate.solver_bound_us", True, "certificate.solver_bound_us"),
    ("certificate.gap", 0, "certificate"),
    ("collective.name", "allgatherv", "collective.name"),
    ("collective.name", "custom", "collective"),
    ("collective.ranks", 3, "collective.ranks"),
    ("collective.ranks", 10**9, "collective.ranks"),
    ("collective.partition", 2**25, "collective"),
    ("collective.root", 4, "collective.root"),
    ("columns", ["link"], "columns"),
    ("messages", {}, "messages"),
    ("messages.1", [0, 0, 1], "messages[1]"),
    ("messages.1", "0123456", "messages[1]"),
    ("messages.0.0", 99, "messages[0].link"),
    ("messages.0.0", True, "messages[0].link"),
    ("messages.0.0", 0.0, "messages[0].link"),
    ("messages.0.1", 3, "messages[0]"),
    ("messages.0.3", -1, "messages[0].start_fs"),
    ("messages.0.4", 10**28, "messages[0].start_fs"),
    ("messages.0.5", "move", "messages[0].op"),
    ("messages.0.5", 1, "messages[0].op"),
    ("messages.0.6", [], "messages[0].chunks"),
    ("messages.0.6", [4], "messages[0].chunks[0]"),
    ("messages.0.6", [1, 1], "messages[0].chunks[1]"),
    ("messages.0.6", [[3, 1]], "messages[0].chunks[0]"),
    ("messages.0.6", [[0, 10**9]], "messages[0].chunks[0][1]"),
    ("messages.0.6", [True], "messages[0].chunks[0]"),
    ("topology.nodes", [[0, 1], [2, 2]], "topology"),
    ("topology.nodes", [], "topology.nodes"),
    ("topology.reduce_alpha_us", -1, "topology.reduce_alpha_us"),
    ("topology.reduce_beta_us_per_mb", "46us", "topology.reduce_beta_us_per_mb"),
    ("topology.ports.0.beta_us_per_mb", "1/0", "topology.ports[0].beta_us_per_mb"),
    ("topology.ports.0.beta_us_per_mb", "0", "topology"),
    ("topology.ports.1.name", "n0.nic.out", "topology"),
    ("topology.links.0.2", 9, "topology.links[0][2]"),
    ("topology.links.0.3", [9], "topology.links[0][3][0]"),
    ("topology.links.0", [0, 0, 0, []], "topology"),
    ("topology.link_classes.0.alpha_us", "1e99999", "topology.link_classes[0].alpha_us"),
    ("topology.link_classes.0.measured.samples", -1, "topology.link_classes[0].measured.samples"),
    ("topology.nics.0.ranks", [4], "topology.nics[0].ranks[0]"),
    ("topology.switches.0.ranks", 0, "topology.switches[0].ranks"),
    ("topology.codecs", {}, "topology.codecs"),
    ("topology.codecs.0.ratio", 0, "topology.codecs[0].ratio"),
    ("topology.codecs.0.lossless", 1, "topology.codecs[0].lossless"),
    ("topology.codecs.0.frame_bytes", 1.5, "topology.codecs[0].frame_bytes"),
    ("topology.codecs.0.encode_alpha_us", -1, "topology.codecs[0].encode_alpha_us"),
    ("topology.codecs.1.decode_beta_us_per_mb", REMOVED, "topology.codecs[1]"),
    ("topology.codecs.1.level", 3, "topology.codecs[1]"),
    ("topology.codecs.1", {"codec": "q8"}, "topology.codecs[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "blamed"), WRONG)
def test_what_is_wrong_is_named_by_its_path(path: str, value: Any, blamed: str) -> None:
    found = refusal(changed(path, value))
    assert found.path == blamed
    assert found.message.startswith(f"{blamed or 'the document'}: ")


def test_sizes_are_refused_before_they_are_allocated() -> None:
    """A few bytes must not ask for gigabytes: a demand of 2^50 chunks, a range of chunk ids beyond the collective."""
    document = json.loads(SMALL)
    document["collective"] = {
        "name": "alltoallv", "ranks": 4, "partition": 2**25, "root": 0, "demand": [[2**25] * 4] * 4,
    }  # fmt: skip
    assert "places" in refusal(json.dumps(document)).message


VALUES = [None, True, -1, 0, 1, 2**62, 1.5, "", "10/3", "x", [], [0], [[0, 3]], {}, {"name": "x"}, [[[0, 0]]]]


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32))
def test_damaged_values_are_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    document = json.loads(SMALL)
    for _ in range(rng.randint(1, 3)):
        place: Any = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and rng.random() < 0.85:
                place = place[key]
                continue
            if rng.random() < 0.2:
                del place[key]
            else:
                place[key] = deepcopy(rng.choice(VALUES))
            break
    read_and_judge(json.dumps(document))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32))
def test_damaged_text_is_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    text = SMALL
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        piece = rng.choice(
            [text[at : at + 30] * 2, "", "-", "9", '"', "[", "}", "\\u0000", "é", "1e5", "null"]
        )
        text = text[:at] + piece + text[at + rng.choice([0, 1, 5, 300]) :]
    read_and_judge(text)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=80))
def test_any_text_is_refused(text: str) -> None:
    refusal(text)


def read_and_judge(text: str) -> None:
    """A value whose problems can be told, and which survives writing; or a refusal with a message."""
    try:
        algorithm, topology = read_native(text, "fuzz.json")
    except InvalidInput as refused:
        assert all(found.code.startswith("N") and found.message for found in refused.diagnostics)
        return
    check_algorithm(algorithm, topology)
    assert read_native(write_native(algorithm, topology)) == (algorithm, topology)


@pytest.mark.parametrize("change", [
    {"chunks": []},
    {"chunks": [[[[0, 0], [1, 0]], [[0, 0], [1, 0]]], [[[0, 1], [1, 1]], [[0, 1], [1, 0]]]]},
    {"size_chunks": 4}, {"size_chunks": 1 << 25}, {"name": "alltoall", "size_chunks": 1 << 25},
    {"input_chunks": [1 << 24, 1 << 24]},
])  # fmt: skip
def test_listed_chunks_are_those_of_the_name(change: dict[str, object]) -> None:
    listed: dict[str, object] = {
        "name": "allreduce", "ranks": 2, "partition": 1, "root": 0, "combining": True, "input_chunks": [2, 3],
        "output_chunks": [2, 2], "inplace": [None, None], "size_chunks": 2,
        "chunks": [[[[0, k], [1, k]], [[0, k], [1, k]]] for k in range(2)],
    }  # fmt: skip
    read = read_collective_value(parse(json.dumps(listed), "a.json"), 2)
    assert read.input_chunks == (2, 3)
    with pytest.raises(InvalidInput):
        read_collective_value(parse(json.dumps(listed | change), "a.json"), 2)
