"""TACCL's topology JSON: known layouts, matrices, undone scaling, and what is refused."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.cli import load_command
from taccl.errors import InvalidInput, UsageError
from taccl.profiles.importers.taccl_json import read_taccl_json
from taccl.profiles.load import load_topology
from taccl.profiles.profile_file import read_topology

NDV2 = {
    "name": "NDv2_1MB", "gpus_per_node": 8, "nics_per_node": 1, "alpha": 0.3,
    "node_betas_list": [23, 46], "node_invbws_list": [23, 46],
    "remote_invbw": 107, "remote_alpha": 2.6, "remote_beta": 105,
}  # fmt: skip
DGX2 = NDV2 | {
    "name": "DGX2", "gpus_per_node": 16, "nics_per_node": 8, "node_betas_list": [8], "node_invbws_list": [8],
}  # fmt: skip
CUSTOM = {
    "name": "chain", "gpus_per_node": 3, "alpha": 1,
    "links": [[0, 1, 0], [1, 0, 2], [0, 2, 0]],
    "betas": [[0, 10, 0], [10, 0, 20], [0, 20, 0]],
    "invbws": [[0, 11, 0], [11, 0, 21], [0, 21, 0]],
}  # fmt: skip


def test_ndv2_and_dgx2_are_those_of_the_library() -> None:
    for data, name in ((NDV2, "ndv2:2"), (DGX2, "dgx2:2")):
        ours = read_taccl_json(json.dumps(data), "t.json", 2)
        library = load_topology(name)
        assert ours.topology.links == library.links
        assert [port.beta_us_per_mb for port in ours.topology.ports] == [
            port.beta_us_per_mb for port in library.ports
        ]
        assert read_topology(ours.text, "written") == ours.topology


def test_the_scaling_is_undone() -> None:
    """TACCL's 1 KB files hold a hundred times the costs of a thousandth of a megabyte."""
    small = NDV2 | {"alpha": 30, "node_betas_list": [2.3, 4.6], "remote_alpha": 260, "remote_beta": 10.5}
    ours = read_taccl_json(json.dumps(small), "t.json", 2, chunk_bytes=1000, scale=Fraction(100))
    assert ours.topology.links == load_topology("ndv2:2").links


def test_a_custom_topology() -> None:
    text = json.dumps(CUSTOM, indent="\t")
    topology = read_taccl_json(text, "t.json").topology
    assert sorted((link.src, link.dst, link.beta_us_per_mb) for link in topology.links) == [
        (0, 1, 10), (1, 0, 10), (1, 2, 20), (1, 2, 20), (2, 1, 20), (2, 1, 20),
    ]  # fmt: skip
    assert {link.alpha_us for link in topology.links} == {Fraction(1)}


def test_matrices_are_indexed_by_destination_first() -> None:
    one_way = CUSTOM | {
        "links": [[0, 0, 0], [1, 0, 0], [0, 1, 0]],
        "betas": [[0, 0, 0], [5, 0, 0], [0, 6, 0]],
    }
    result = read_taccl_json(json.dumps(one_way), "t.json")
    assert [(link.src, link.dst) for link in result.topology.links] == [(0, 1), (1, 2)]
    assert any("not connected" in note for note in result.notes)


def test_nics_are_near_equal_shares() -> None:
    data = CUSTOM | {"nics_per_node": 2, "remote_alpha": 2, "remote_beta": 50, "remote_invbw": 52}
    topology = read_taccl_json(json.dumps(data), "t.json", nodes=2).topology
    assert [nic.ranks for nic in topology.nics] == [(0, 1), (2,), (3, 4), (5,)]


@pytest.mark.parametrize(
    ("data", "nodes", "code", "words"),
    [
        (NDV2 | {"gpus_per_node": 4}, 1, "T101", "8 GPUs"),
        (NDV2 | {"node_betas_list": [23]}, 1, "T101", "2 numbers"),
        (NDV2 | {"node_betas_list": [23, 0]}, 1, "T103", "above 0"),
        (NDV2 | {"alpha": -1}, 1, "T103", "negative"),
        (NDV2 | {"remote_beta": 0}, 2, "T103", "remote_beta"),
        (NDV2 | {"alpha": "x"}, 1, "Y103", "expected a number"),
        (NDV2 | {"gpu_per_node": 8}, 1, "Y102", "unknown key"),
        ({"name": "NDv2"}, 1, "Y109", "'alpha' is missing"),
        (CUSTOM, 2, "T101", "nics_per_node"),
        (CUSTOM | {"links": [[0, 1], [1, 0]]}, 1, "T102", "3 x 3"),
        (CUSTOM | {"betas": [[0, 0, 0]] * 3}, 1, "T103", "above 0"),
        (CUSTOM | {"links": [[1, 1, 0], [1, 0, 2], [0, 2, 0]]}, 1, "T102", "diagonal"),
        (CUSTOM | {"links": [[0, 1000, 0], [1, 0, 2], [0, 2, 0]]}, 1, "T102", "0 to 64"),
        ({key: value for key, value in CUSTOM.items() if key != "betas"}, 1, "T101", "betas"),
        (NDV2, 4096, "T103", "4096 ranks"),
        (NDV2 | {"alpha": 10**14}, 1, "T103", "1000000000"),
    ],
)
def test_what_is_refused(data: dict[str, Any], nodes: int, code: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_taccl_json(json.dumps(data), "t.json", nodes)
    assert code in {found.code for found in caught.value.diagnostics}
    assert words in str(caught.value)


def test_a_layout_that_cannot_be_told_is_asked_for() -> None:
    text = json.dumps(NDV2 | {"name": "mine", "node_betas_list": [8]})
    with pytest.raises(UsageError, match="--layout"):
        read_taccl_json(text, "t.json")
    topology = read_taccl_json(text, "t.json", layout="hub-and-spoke").topology
    assert [switch.ranks for switch in topology.switches] == [tuple(range(8))]


def test_the_command(tmp_path: Path) -> None:
    source, target = tmp_path / "t.json", tmp_path / "p.yaml"
    source.write_text(json.dumps(NDV2 | {"alpha": 3, "node_betas_list": [230, 460]}))
    command = load_command("import")
    arguments = ["taccl", str(source), "-o", str(target), "--scale", "10", "--chunk-bytes", "1MB"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert load_topology(str(target)).links == load_topology("ndv2:1").links
    for wrong in (["--scale", "0"], ["--chunk-bytes", "1M"], ["--chunk-bytes", "0.5"]):
        refused = CliRunner().invoke(command, ["taccl", str(source), *wrong])
        assert isinstance(refused.exception, UsageError)


VALUES = st.sampled_from(
    [0, 1, -1, 8, 1e300, 10**40, None, True, "x", [], [[0, 1], [1, 0]], [23, 46], {}, "NDv2"]
)


@given(
    st.dictionaries(st.sampled_from(sorted({**NDV2, **CUSTOM})), VALUES), st.booleans(), st.text(max_size=20)
)
@settings(deadline=None, max_examples=200)
def test_any_file_is_imported_or_refused(changes: dict[str, Any], custom: bool, garbage: str) -> None:
    base: dict[str, Any] = CUSTOM if custom else NDV2
    for text in (json.dumps(base | changes), json.dumps(base) + garbage):
        try:
            topology = read_taccl_json(text, "t.json", 2).topology
        except (InvalidInput, UsageError) as error:
            assert str(error)
        else:
            assert topology.ranks % 2 == 0
