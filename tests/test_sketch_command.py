"""taccl sketch: what it prints, in which form, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from taccl.cli import cli
from taccl.sketches import check_sketch, load_sketch, restrict, sketch_names
from taccl.sketches.sketch_file import read_sketch

GOOD = "schema: taccl/sketch/v1\nname: good\navoid: [{pairs: [[0, 1]]}]\n"
BAD = """\
schema: taccl/sketch/v1
nodes: two
avoid: [{pairs: [[0, 1]], kinds: nvlink}]
symetry: auto
"""
HALF = "schema: taccl/sketch/v1\nuse: [{from: 0, to: 1}, {from: 1, to: 0}]\n"  # a warning: ranks cut off


def taccl(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["sketch", *arguments])


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_good_sketch(tmp_path: Path) -> None:
    done = taccl("check", written(tmp_path, "good.yaml", GOOD))
    assert done.exit_code == 0 and done.stdout == "1 sketch: 0 errors, 0 warnings\n"
    done = taccl("check", written(tmp_path, "good.yaml", GOOD), "--topology", "ndv2:1")
    assert done.exit_code == 0 and done.stdout == "1 sketch on ndv2:1: 0 errors, 0 warnings\n"


def test_an_unknown_key_hides_nothing_that_is_wrong_on_the_topology(tmp_path: Path) -> None:
    text = "schema: taccl/sketch/v1\ncolour: red\navoid: [{pairs: [[0, 99]]}]\nnodes: 3\n"
    path = written(tmp_path, "bad.yaml", text)
    done = taccl("check", path, "--topology", "ndv2:1", "--format", "json")
    found = [(f["code"], f["line"]) for f in json.loads(done.stdout)["findings"]]
    assert done.exit_code == 3 and found == [("Y102", 2), ("S202", 3), ("S201", 4)]
    # What is wrong in the text itself says nothing of the topology.
    path = written(tmp_path, "bad.yaml", text.replace("nodes: 3", "nodes: three"))
    done = taccl("check", path, "--topology", "ndv2:1", "--format", "json")
    assert [f["code"] for f in json.loads(done.stdout)["findings"]] == ["Y102", "Y103"]


def test_all_errors_of_all_files_in_one_run(tmp_path: Path) -> None:
    bad, good = written(tmp_path, "bad.yaml", BAD), written(tmp_path, "good.yaml", GOOD)
    done = taccl("check", bad, good)
    assert done.exit_code == 3
    assert done.stdout == (
        f"{bad}:2:8: error[Y103]: expected a number, found 'two'\n"
        "  nodes: two\n"
        "         ^\n\n"
        f"{bad}:3:27: error[Y102]: unknown key 'kinds'\n"
        "  avoid: [{pairs: [[0, 1]], kinds: nvlink}]\n"
        "                            ^\n"
        "  help: did you mean 'kind'?\n\n"
        f"{bad}:4:1: error[Y102]: unknown key 'symetry'\n"
        "  symetry: auto\n"
        "  ^\n"
        "  help: did you mean 'symmetry'?\n\n"
        "2 sketches: 3 errors, 0 warnings\n"
    )


def test_a_topology_finds_more(tmp_path: Path) -> None:
    good = written(tmp_path, "good.yaml", GOOD.replace("[0, 1]", "[0, 5]"))
    assert taccl("check", good).exit_code == 0
    done = taccl("check", good, "-t", "ndv2:1")
    assert done.exit_code == 3
    assert "error[S203]" in done.stdout and "rank 0 to rank 5" in done.stdout


def test_warnings_do_not_fail(tmp_path: Path) -> None:
    done = taccl("check", written(tmp_path, "half.yaml", HALF), "-t", "ring:4")
    assert done.exit_code == 0
    assert "warning[S208]" in done.stdout and done.stdout.endswith("0 errors, 2 warnings\n")


def test_json(tmp_path: Path) -> None:
    bad, half = written(tmp_path, "bad.yaml", BAD), written(tmp_path, "half.yaml", HALF)
    done = taccl("check", bad, half, "-t", "ring:4", "--format", "json")
    assert done.exit_code == 3
    document = json.loads(done.stdout)
    assert document["schema"] == "taccl/sketch-check/v1" and document["ok"] is False
    assert document["files"] == [bad, half]
    assert [(f["file"], f["line"], f["code"], f["severity"]) for f in document["findings"][:3]] == [
        (bad, 2, "Y103", "error"), (bad, 3, "Y102", "error"), (bad, 4, "Y102", "error"),
    ]  # fmt: skip
    assert document["findings"][0] == {
        "file": bad, "line": 2, "column": 8, "severity": "error", "code": "Y103", "path": "nodes", "help": "",
        "message": "expected a number, found 'two'",
    }  # fmt: skip
    assert {f["severity"] for f in document["findings"][3:]} == {"warning"}
    clean = taccl("check", half, "--format", "json")
    assert clean.exit_code == 0 and json.loads(clean.stdout)["ok"] is True


def test_annotations_for_github(tmp_path: Path) -> None:
    name = written(tmp_path, "a,b:100%.yaml", BAD)
    done = taccl("check", name, "--format", "github")
    assert done.exit_code == 3
    path = str(tmp_path / "a%2Cb%3A100%25.yaml")
    assert done.stdout.splitlines() == [
        f"::error file={path},line=2,col=8,title=Y103::expected a number, found 'two'",
        f"::error file={path},line=3,col=27,title=Y102::unknown key 'kinds'%0Ahelp: did you mean 'kind'?",
        f"::error file={path},line=4,col=1,title=Y102::unknown key 'symetry'%0Ahelp: did you mean 'symmetry'?",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["check"], 2, "FILE..."),
        (["check", "ndv2-sk-9"], 2, "did you mean 'ndv2-sk-2'?"),
        (["check", "ndv2-sk-1", "-t", "nvd2:2"], 2, "did you mean 'ndv2'?"),
        (["check", "ndv2-sk-1", "--format", "xml"], 2, "xml"),
        (["check", "no/such.yaml"], 3, "cannot be read"),
        (["suggest"], 2, "--topology"),
        (["suggest", "-t", "ndv2:2", "--size", "-4"], 2, "-4"),
    ],
)
def test_wrong_use(arguments: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """By way of `main`, which turns errors into messages and exit codes."""
    from taccl.cli import main

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr("sys.argv", ["taccl", "sketch", *arguments])
        main()
    output = capfd.readouterr()
    assert stopped.value.code == code
    assert said in output.out + output.err and "Traceback" not in output.err


def test_list() -> None:
    names = ["dgx2-sk-1", "dgx2-sk-2", "dgx2-sk-3", "ndv2-sk-1", "ndv2-sk-2"]
    assert sketch_names() == tuple(names)
    lines = taccl("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == names
    document = json.loads(taccl("list", "--json").stdout)
    assert document["schema"] == "taccl/sketches/v1"
    assert [(entry["name"], entry["description"]) for entry in document["sketches"]] == [
        (name, load_sketch(name).description) for name in names
    ]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["ndv2-sk-1", "ndv2-sk-2", "dgx2-sk-1", "dgx2-sk-2", "dgx2-sk-3"])
def test_bundled_sketches_follow_the_number_of_nodes(name: str, nodes: int) -> None:
    from taccl.profiles.load import load_topology

    topology = load_topology(f"{name[:4]}:{nodes}")
    sketch = load_sketch(name)
    assert check_sketch(sketch, topology) == []
    found = restrict(sketch, topology)
    assert found.symmetry is not None
    assert len(found.symmetry) == name.startswith("dgx2") + (nodes > 1)


def test_suggestions_are_sketches(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    done = taccl("suggest", "-t", "dgx2:2", "--size", "64MB", "-o", str(path))
    assert done.exit_code == 0 and done.stdout == "" and str(path) in done.stderr
    assert taccl("check", str(path), "-t", "dgx2:2").exit_code == 0
    shown = taccl("suggest", "-t", "dgx2:2", "--size", "64MB").stdout
    assert shown == path.read_text()
    assert read_sketch(shown, "s").size_bytes == 64 * 10**6
