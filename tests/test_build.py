"""taccl synth and taccl build: files that are proven, made only when stale, and the same bytes every time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.cli import cli
from taccl.cluster_file import MANIFEST, read_cluster, size_name
from taccl.commands.build import _result
from taccl.errors import EnvironmentProblem, InvalidInput
from taccl.produce import Order, produce, why_ended
from taccl.profiles.load import load_topology
from taccl.profiles.yaml_reader import parse, plain_value
from taccl.synth import lower_operations
from taccl.synth.collective_file import read_collective
from taccl.synth.msccl_xml import read_xml
from taccl.synth.request import Request
from taccl.synth.synthesise import synthesise
from taccl.synth.verify import is_correct, verify

CLUSTER = """\
schema: taccl/cluster/v1
topology: ring:4
output: out
engine: ring
partition: 2
collectives:
  - collective: allgather
    sizes: [1KB, 1MB]
  - collective: reduce
    sizes: [64KiB]
    root: 2
"""


def taccl(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.iterdir())}


# --- synth ---------------------------------------------------------------------------------------------------


def test_synth_writes_what_verifies(tmp_path: Path) -> None:
    target = tmp_path / "ag.xml"
    result = taccl("synth", "-t", "ring:4", "-c", "allgather", "--size", "1MB", "-o", str(target), "--json",
                   "--partition", "1", "--time-limit", "5s")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == "taccl/synth/v1"
    assert {"collective", "size_bytes", "ranks", "time_us", "lower_bound_us", "gap", "solver_bound_us", "status",
            "engine", "solve_s", "verified", "path", "provenance"} <= set(found)  # fmt: skip
    assert found["lower_bound_us"] <= found["solver_bound_us"] <= found["time_us"] == found["simulated_us"]
    assert is_correct(verify(read_xml(target.read_text(), str(target)), strict=True))


@pytest.mark.parametrize("early", [True, False])
def test_verify_warns_of_nothing_that_synth_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """early: memory is there before a message leaves, as programs are made. Where it is there when a message comes,
    connections have to hold messages, and messages of several chunks fill more than a slot beyond some size."""
    if not early:
        monkeypatch.setattr(
            lower_operations._Builder, "_needed", lambda _, message, number: (message.end_fs, 0, number)
        )
    for size, beyond in (("1MB", False), ("64MB", not early)):
        said, found = {}, {}
        for name in ("x.xml", "x.json"):
            file = str(tmp_path / name)
            made = taccl("synth", "-t", "ndv2:1", "-c", "reducescatter", "--size", size, "--engine", "ring",
                         "--json", "-o", file)  # fmt: skip
            said[name] = json.loads(made.stdout)["warnings"]
            found[name] = json.loads(taccl("verify", file, "--json").stdout)
            notes = {note["code"] for note in found[name]["notes"]}
            assert found[name]["ok"] and notes == (set() if early else {"V302"})
        assert found["x.xml"]["warnings"] == []  # its maxBytes says the rest
        assert (
            [warning["message"] for warning in found["x.json"]["warnings"]] == said["x.json"] == said["x.xml"]
        )
        assert len(said["x.xml"]) == beyond
        converted = taccl("convert", str(tmp_path / "x.json"), "--to", "msccl-xml")
        assert converted.stdout == (tmp_path / "x.xml").read_text()
        assert all(warning in converted.stderr for warning in said["x.xml"])


def test_synth_same_request_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for suffix in (".xml", ".json"):
            result = taccl("synth", "-t", "ring:4", "-c", "allreduce", "--size", "64KB", "--engine", "greedy",
                           "--partition", "1", "-o", str(tmp_path / (name + suffix)))  # fmt: skip
            assert result.exit_code == 0, result.output
    assert (tmp_path / "a.xml").read_bytes() == (tmp_path / "b.xml").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_synth_check_up_to_date(tmp_path: Path) -> None:
    target = tmp_path / "ag.xml"
    line = [
        "synth",
        "-t",
        "ring:4",
        "-c",
        "allgather",
        "--size",
        "1KB",
        "--engine",
        "ring",
        "-o",
        str(target),
    ]
    assert taccl(*line).exit_code == 0
    assert taccl(*line, "--check-up-to-date").exit_code == 0
    before = target.read_bytes()
    result = taccl(*line, "--check-up-to-date", "--partition", "2")
    assert result.exit_code == 1 and "is stale" in result.stderr
    assert target.read_bytes() == before
    for document, code in (
        (taccl(*line, "--check-up-to-date", "--json"), 0),
        (taccl(*line, "--check-up-to-date", "--json", "--partition", "2"), 1),
    ):
        assert document.exit_code == code
        expected = {"schema": "taccl/up-to-date/v1", "path": str(target), "ok": code == 0}
        assert json.loads(document.stdout) == expected


def test_a_check_for_which_there_is_no_file_or_no_time_says_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(order: Order, *_: object) -> object:
        made = produce(order)
        signal.raise_signal(signal.SIGINT)
        return made

    line = ("synth", "-t", "ring:4", "-c", "allgather", "--size", "1KB", "--engine", "ring", "-o")
    (tmp_path / "other.xml").write_text("another one")
    monkeypatch.setattr("taccl.produce.produce", interrupted)
    result = taccl(*line, str(tmp_path / "other.xml"), "--check-up-to-date")
    assert result.exit_code == 130 and "stale" not in result.stderr
    monkeypatch.setattr("taccl.produce.produce", lambda *_: pytest.fail("searched"))
    assert taccl(*line, str(tmp_path / "none.xml"), "--check-up-to-date").exit_code == 3


@pytest.mark.parametrize("protocol", ["Simple", "LL"])
def test_a_native_file_keeps_the_protocol(tmp_path: Path, protocol: str) -> None:
    native, program = tmp_path / "a.json", tmp_path / "a.xml"
    line = (
        "synth",
        "-t",
        "ring:4",
        "-c",
        "allreduce",
        "--size",
        "64KB",
        "--engine",
        "ring",
        "--protocol",
        protocol,
    )
    for path in (native, program):
        assert taccl(*line, "-o", str(path)).exit_code == 0
    converted = taccl("convert", str(native), "--to", "msccl-xml")
    assert converted.exit_code == 0, converted.stderr
    assert read_xml(converted.stdout).protocol == protocol
    assert converted.stdout == program.read_text()
    native.write_text(native.read_text().replace('"protocol": "LL"', '"protocol": ["LL"]'))
    assert taccl("verify", str(native)).exit_code == (0 if protocol == "Simple" else 3)


def test_numbers_in_provenance_are_finite(tmp_path: Path) -> None:
    native = tmp_path / "a.json"
    assert (
        taccl("synth", "-t", "ring:4", "-c", "allgather", "--size", "1KB", "-o", str(native)).exit_code == 0
    )
    native.write_text(native.read_text().replace('"provenance": {', '"provenance": {"x": 1e999, '))
    result = taccl("convert", str(native), "--to", "json")
    assert result.exit_code == 3 and "provenance" in result.stderr


def test_what_no_program_can_be_is_refused_before_the_search(tmp_path: Path) -> None:
    began = time.monotonic()
    for more in (
        ("--size", "1MB", "-o", str(tmp_path / "a.xml")),
        ("--sweep", "1KB,1MB", "-o", str(tmp_path)),
    ):
        result = taccl("synth", "-t", "torus2d:16x16", "-c", "alltoall", *more)
        assert result.exit_code == 4 and "up to 128; the schedule itself" in result.stderr
    assert time.monotonic() - began < 30


def test_synth_to_stdout_keeps_the_table_off_it() -> None:
    result = taccl("synth", "-t", "ring:4", "-c", "broadcast", "--size", "1KB", "--engine", "ring", "-o", "-")
    assert result.exit_code == 0 and "lower bound" in result.stderr
    assert is_correct(verify(read_xml(result.stdout), strict=True))


@pytest.mark.parametrize(
    ("added", "code", "message"),
    [
        (["-o", "x.yaml"], 2, "must be .xml (program) or .json"),
        (["-o", "-", "--json"], 2, "both want stdout"),
        (["--demand", "0,1;1,0"], 2, "--demand is for --collective alltoallv"),
        (["--pre-post", "x"], 2, "--pre-post is for --collective custom"),
        (["--check-up-to-date"], 2, "needs -o FILE"),
        (["--engine", "hierarchical"], 4, "at least two nodes"),
        (["--sketch", "no-such-sketch"], 2, "no-such-sketch"),
        (["--topology", "no-such-topology"], 2, "no-such-topology"),
        (["--topology", "./no-such-file.yaml"], 3, "no-such-file.yaml"),
        (["--size", "0"], 2, "whole number of bytes"),
        (["--target-gap", "200%"], 2, "from 0 to 1"),
        (["--root", "9"], 2, "root"),
        (
            ["-c", "allreduce", "--root", "1"],
            2,
            "--root is for broadcast, gather, reduce, scatter; allreduce has none",
        ),
    ],
)
def test_synth_refuses(added: list[str], code: int, message: str) -> None:
    result = taccl("synth", "-t", "ring:4", "-c", "broadcast", "--size", "1KB", *added)
    assert result.exit_code == code, result.output
    assert message in result.stderr and "Traceback" not in result.output


def test_a_place_that_no_file_can_have_is_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*_: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("taccl.produce.produce", searched)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.xml").mkdir()
    line = ("synth", "-t", "ring:4", "-c", "allgather", "--size", "1KB", "-o")
    refused = taccl(*line, str(tmp_path / "file" / "x.xml"))
    assert refused.exit_code == 2 and "is no directory" in refused.stderr
    refused = taccl(*line, str(tmp_path / "folder.xml"))
    assert refused.exit_code == 2 and "is a directory; name a file in it" in refused.stderr
    refused = taccl("demo", "-o", str(tmp_path / "file"))
    assert refused.exit_code == 2 and "is no directory" in refused.stderr
    assert isinstance(taccl(*line, str(tmp_path / "new" / "x.xml")).exception, AssertionError | SystemExit)
    assert "searched" in taccl(*line, str(tmp_path / "new" / "x.xml")).stderr


def test_synth_needs_a_size() -> None:
    result = taccl("synth", "-t", "ring:4", "-c", "allgather")
    assert result.exit_code == 2 and "--size is needed" in result.stderr


def test_synth_alltoallv_sendrecv_custom(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "schema: taccl/collective/v1\nranks: 4\nchunks:\n"
        "  - sources: [[0, 0]]\n    destinations: [[1, 0], [2, 0]]\n"
        "  - sources: [[3, 0]]\n    destinations: [[2, 1]]\n"
    )
    demand = tmp_path / "demand.txt"
    demand.write_text("# from rank i to rank j\n0 2 0 0\n0 0 1 0\n0 0 0 1\n3 0 0 0\n")
    common = ["synth", "-t", "ring:4", "--size", "1MB", "--engine", "direct", "--json"]
    for added in (
        ["-c", "custom", "--pre-post", str(own)],
        ["-c", "alltoallv", "--demand", str(demand)],
        ["-c", "alltoallv", "--demand", "0,1,0,0;0,0,1,0;0,0,0,1;1,0,0,0"],
        ["-c", "sendrecv", "--pairs", "0-2,2-0"],
    ):
        result = taccl(*common, *added)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["verified"] is True


@pytest.mark.parametrize(
    ("given_demand", "words"),
    [
        ("", "--demand is empty"),
        ("1,2", "found 1 x 2"),
        ("0,1;1", "row 1 has 1 counts, row 0 has 2"),
        ("a,b;c,d", "row 0 holds 'a'"),
        ("0,-1;1,0", "row 0 holds '-1', no whole number from 0 to 999999"),
        ("0,1;1.5,0", "row 1 holds '1.5'"),
        ("nan,1;1,1", "row 0 holds 'nan'"),
        (";".join(["0"] * 5000), "found 5000 x 1"),
        ("0,1,1;1,0,1;1,1,0", "the demand must be 2 x 2 counts that are not negative, found 3 x 3"),
    ],
)
def test_bad_demand(given_demand: str, words: str) -> None:
    result = taccl("synth", "-t", "ring:2", "-c", "alltoallv", "--size", "1", "--demand", given_demand)
    assert result.exit_code == 2 and words in result.stderr


def test_bad_demand_in_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "demand.txt"
    file.write_text("# from i to j\n0 1\n1 -2\n")
    result = taccl("synth", "-t", "ring:2", "-c", "alltoallv", "--size", "1", "--demand", str(file))
    assert result.exit_code == 3 and f"{file}:3: error[D001]" in result.stderr and "'-2'" in result.stderr
    result = taccl("synth", "-t", "ring:2", "-c", "alltoallv", "--size", "1", "--demand", "absent.txt")
    assert result.exit_code == 3 and "absent.txt" in result.stderr


def test_ctrl_c_keeps_the_best(tmp_path: Path) -> None:
    target = tmp_path / "ar.xml"
    line = [sys.executable, "-m", "taccl", "synth", "-t", "ndv2:1", "-c", "allreduce", "--size", "16MB",
            "--time-limit", "100", "-o", str(target)]  # fmt: skip
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            time.sleep(8)
            assert running.poll() is None
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=100)
        finally:
            running.kill()
    assert running.returncode == 130, err
    assert f"the best algorithm found so far was written to {target}" in err and "lower bound" in out
    assert is_correct(verify(read_xml(target.read_text()), strict=True))


# --- collectives of one's own ---------------------------------------------------------------------------------


def test_collective_file_errors_have_places() -> None:
    text = (
        "schema: taccl/collective/v1\nranks: 2\nchunks:\n"
        "  - sources: [[0, 0], [0, 1]]\n    destinations: [[5, 0]]\n"
        "  - sources: [[1, 0]]\n    destinations: [[1, 0]]\n"
        "  - sources: [[1, 1]]\n    destinations: [[1, 0]]\n"
    )
    with pytest.raises(InvalidInput) as caught:
        read_collective(text, "own.yaml")
    assert [(d.line, d.column, d.code) for d in caught.value.diagnostics] == [
        (4, 23, "C002"), (5, 20, "C001"), (9, 19, "C003"),
    ]  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=200) | st.binary(max_size=100).map(lambda b: b.decode("latin-1")))
def test_any_text_is_read_or_refused(text: str) -> None:
    for prefix in ("", "schema: taccl/collective/v1\nranks: 2\nchunks:\n  - "):
        try:
            read_collective(prefix + text, "fuzz.yaml").check()
        except InvalidInput as error:
            assert error.diagnostics


# --- build ----------------------------------------------------------------------------------------------------


def test_build_makes_checks_and_leaves_alone(cluster: Path) -> None:
    out = cluster.parent / "out"
    assert taccl("build", str(cluster), "--check").exit_code == 1
    assert not out.exists()
    result = taccl("build", str(cluster), "--json")
    assert result.exit_code == 0, result.output
    assert [row["state"] for row in json.loads(result.stdout)["algorithms"]] == ["made"] * 3
    before = contents(out)
    assert set(before) == {"allgather-1KB.xml", "allgather-1MB.xml", "reduce-64KiB.xml", MANIFEST}
    assert taccl("build", str(cluster)).exit_code == 0
    assert taccl("build", str(cluster), "--check").exit_code == 0
    assert contents(out) == before


def test_build_ranges_meet(cluster: Path) -> None:
    assert taccl("build", str(cluster)).exit_code == 0
    out = cluster.parent / "out"
    small = read_xml((out / "allgather-1KB.xml").read_bytes())
    large = read_xml((out / "allgather-1MB.xml").read_bytes())
    assert small.min_bytes == 0 and small.max_bytes + 1 == large.min_bytes
    assert 1000 < small.max_bytes < 10**6


def test_build_remakes_only_what_changed(cluster: Path) -> None:
    out = cluster.parent / "out"
    assert taccl("build", str(cluster)).exit_code == 0
    before = contents(out)
    (out / "allgather-1KB.xml").write_text("edited")
    result = taccl("build", str(cluster), "--check")
    assert result.exit_code == 1 and "allgather-1KB.xml was edited" in result.stderr
    assert taccl("build", str(cluster)).exit_code == 0
    after = contents(out)
    assert {name: data for name, (data, _) in after.items()} == {
        name: data for name, (data, _) in before.items()
    }
    assert after["allgather-1MB.xml"] == before["allgather-1MB.xml"]
    cluster.write_text(CLUSTER.replace("    root: 2\n", "    root: 1\n"))
    result = taccl("build", str(cluster), "--json")
    states = {row["name"]: row["state"] for row in json.loads(result.stdout)["algorithms"]}
    assert states == {"allgather-1KB": "up to date", "allgather-1MB": "up to date", "reduce-64KiB": "made"}


@pytest.mark.parametrize("output", ["out", "out/deep/er"])
def test_build_says_at_once_that_a_file_is_in_its_way(cluster: Path, output: str) -> None:
    cluster.write_text(CLUSTER.replace("output: out", f"output: {output}"))
    (cluster.parent / "out").write_text("mine")
    for options in ([], ["--check"], ["--json"]):
        result = taccl("build", str(cluster), *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{cluster.parent / 'out'} is no directory" in result.stderr
        assert "name another place" in result.stderr and result.stderr.count("\n") == 1
    assert (cluster.parent / "out").read_text() == "mine"
    target = cluster.parent / "out" / "x.xml"
    assert (
        taccl("synth", "-t", "ring:4", "-c", "allgather", "--size", "1KB", "-o", str(target)).exit_code == 2
    )


def test_a_comment_in_a_sketch_makes_nothing_stale(cluster: Path) -> None:
    """Nor does the place of what it says."""
    sketch = cluster.parent / "mine.yaml"
    text = "schema: taccl/sketch/v1\ncodec: none\ncaps: [{limit: 9, scope: intra}]\nsymmetry: [[1, all]]\n"
    sketch.write_text(text)
    cluster.write_text(CLUSTER + "sketch: mine.yaml\n")
    made = taccl("build", str(cluster))
    assert made.exit_code == 0, made.stderr
    sketch.write_text("# a comment\n" + text)
    assert taccl("build", str(cluster), "--check").exit_code == 0


def test_build_removes_what_is_no_longer_wanted(cluster: Path) -> None:
    out = cluster.parent / "out"
    assert taccl("build", str(cluster)).exit_code == 0
    (out / "mine.xml").write_text("not ours")
    cluster.write_text(CLUSTER.replace("[1KB, 1MB]", "[1MB]"))
    assert taccl("build", str(cluster), "--check").exit_code == 1
    assert taccl("build", str(cluster)).exit_code == 0
    assert set(contents(out)) == {"allgather-1MB.xml", "reduce-64KiB.xml", "mine.xml", MANIFEST}


def test_build_goes_on_after_a_failure(cluster: Path) -> None:
    cluster.write_text(CLUSTER.replace("engine: ring", "engine: hierarchical"))
    result = taccl("build", str(cluster))
    assert result.exit_code == 4 and result.stderr.count("at least two nodes") == 3
    assert taccl("build", str(cluster), "--check").exit_code == 1


@pytest.mark.parametrize("form", ["xml", "both"])
def test_build_goes_on_where_one_has_no_program(cluster: Path, form: str) -> None:
    """Each rank would need more threadblocks than there are."""
    cluster.write_text(
        f"schema: taccl/cluster/v1\ntopology: fat-tree:1x4\noutput: out\nengine: direct\nformat: {form}\n"
        "instances: 32\ncollectives:\n  - {collective: broadcast, sizes: [1KB], engine: chain, instances: 1}\n"
        "  - {collective: alltoall, sizes: [64KiB]}\n"
    )
    result = taccl("build", str(cluster), "--json")
    assert result.exit_code == 4 and result.stderr.count("taccl: alltoall-64KiB: ") == 1, result.stderr
    states = {one["name"]: one["state"] for one in json.loads(result.stdout)["algorithms"]}
    assert states == {"broadcast-1KB": "made", "alltoall-64KiB": "failed"}
    made = set(contents(cluster.parent / "out"))
    assert "broadcast-1KB.xml" in made and not any(name.startswith("alltoall") for name in made)


def test_build_makes_anew_what_was_damaged(cluster: Path) -> None:
    assert taccl("build", str(cluster)).exit_code == 0
    path = cluster.parent / "out" / "allgather-1MB.xml"
    before = path.read_bytes()
    path.write_bytes(b"\xff" + before)
    checked = taccl("build", str(cluster), "--check")
    assert checked.exit_code == 1 and "allgather-1MB.xml was edited" in checked.stderr
    assert taccl("build", str(cluster)).exit_code == 0
    assert path.read_bytes() == before


def test_a_killed_process_of_a_build_is_said(cluster: Path) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        killed = pool.submit(os.kill, 0, 0)
        killed.result()
        with pytest.raises(EnvironmentProblem, match="fewer at a time"):
            _result(pool.submit(os._exit, 9))  # type: ignore[arg-type]


def test_cluster_file_errors_come_together(cluster: Path) -> None:
    cluster.write_text(
        CLUSTER.replace("engine: ring", "engin: ring").replace("root: 2", "root: -2").replace("1MB", "1MX")
    )
    result = taccl("build", str(cluster))
    assert result.exit_code == 3
    assert result.stderr.count("error[") == 3 and f"{cluster}:4:1" in result.stderr


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("output: out", 'output: out\nname: "{colour}"', "B001"),
        ("output: out", 'output: out\nname: "a/{size}"', "B002"),
        ("output: out", 'output: out\nname: "{collective}"', "B003"),
        ("root: 2", "root: 4", "B006"),
        ("engine: ring", "time_limit: 1e-9s", "Y104"),
        ("root: 2", "time_limit: 1e30s", "Y104"),
        ("engine: ring", "root: 9", "B006"),
        ("[1KB, 1MB]", "[1KB, 1000]", "B004"),
        ("[1KB, 1MB]", "[1.5]", "B004"),
    ],
)
def test_cluster_file_rules(cluster: Path, old: str, new: str, code: str) -> None:
    cluster.write_text(CLUSTER.replace(old, new))
    with pytest.raises(InvalidInput) as caught:
        read_cluster(str(cluster))
    assert {d.code for d in caught.value.diagnostics} == {code}


def test_a_root_that_is_no_rank_is_named_with_its_place(cluster: Path) -> None:
    cluster.write_text(CLUSTER.replace("root: 2", "root: 4"))
    result = taccl("build", str(cluster))
    assert result.exit_code == 3
    assert f"{cluster}:11:11: error[B006]: root 4: the ranks of ring:4 are 0..3" in result.stderr


@pytest.mark.parametrize("topology", ["ring:4", "ring:40"])
def test_synth_says_which_roots_there_are(topology: str) -> None:
    result = taccl("synth", "-t", topology, "-c", "broadcast", "--root", "40", "--size", "1KB")
    last = int(topology.split(":")[1]) - 1
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"root 40: the topology {topology} has ranks 0..{last}" in result.stderr


MORE = """\
schema: taccl/cluster/v1
topology: ring:4
output: out
time_limit: 5s
collectives:
  - {collective: alltoallv, sizes: [1KB], demand: [[0, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [3, 0, 0, 0]]}
  - {collective: alltoallv, sizes: [1KB], demand: demand.txt, name: from-file}
  - {collective: sendrecv, sizes: [1KB], pairs: [[0, 2], [2, 0]], engine: greedy}
  - {collective: custom, sizes: [1KB], pre_post: own.yaml, engine: greedy}
"""
OWN = """\
schema: taccl/collective/v1
ranks: 4
chunks:
  - {sources: [[0, 0]], destinations: [[1, 0], [2, 0]]}
"""


@pytest.fixture
def more(tmp_path: Path) -> Path:
    (tmp_path / "demand.txt").write_text("0 1 0 0\n0 0 1 0\n0 0 0 1\n1 0 0 0\n")
    (tmp_path / "own.yaml").write_text(OWN)
    path = tmp_path / "cluster.yaml"
    path.write_text(MORE)
    return path


def test_collectives_with_words_of_their_own_are_built(more: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = more.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert taccl("build", str(more)).exit_code == 0
    names = {path.name for path in (more.parent / "out").iterdir()}
    assert names == {"alltoallv-1KB.xml", "from-file.xml", "sendrecv-1KB.xml", "custom-1KB.xml", MANIFEST}
    pairs = ("--pairs", "0-2,2-0", "--collective", "sendrecv")
    assert taccl("verify", str(more.parent / "out" / "sendrecv-1KB.xml"), *pairs).exit_code == 0
    assert taccl("build", str(more), "--check").exit_code == 0
    (more.parent / "own.yaml").write_text("# another comment\n" + OWN)
    assert taccl("build", str(more), "--check").exit_code == 0
    (more.parent / "own.yaml").write_text(OWN.replace("[2, 0]", "[3, 0]"))
    (more.parent / "demand.txt").write_text("0 1 0 0\n0 0 1 0\n0 0 0 1\n2 0 0 0\n")
    stale = json.loads(taccl("build", str(more), "--check", "--json").stdout)["algorithms"]
    assert {row["name"] for row in stale if row["state"] == "stale"} == {"custom-1KB", "from-file"}


@pytest.mark.parametrize(
    ("old", "new", "code", "place"),
    [
        ("pairs: [[0, 2], [2, 0]]", "pairs: [[0, 4]]", "B008", (8, 49)),
        ("demand: [[0, 2, 0, 0], [", "demand: [[0, 2, 0], [", "B008", (6, 51)),
        ("demand: demand.txt", 'demand: "0,1;1,0"', "B008", (7, 51)),
        ("collective: sendrecv", "collective: allgather", "B007", (8, 50)),
        (", pre_post: own.yaml", "", "B007", (9, 18)),
        ("name: from-file", 'name: "{colour}"', "B001", (7, 69)),
    ],
)
def test_words_of_their_own_are_checked(
    more: Path, old: str, new: str, code: str, place: tuple[int, int]
) -> None:
    assert old in MORE
    more.write_text(MORE.replace(old, new))
    with pytest.raises(InvalidInput) as caught:
        read_cluster(str(more))
    assert [(d.code, d.line, d.column) for d in caught.value.diagnostics] == [(code, *place)]


def test_a_collective_for_other_ranks_is_named(more: Path) -> None:
    (more.parent / "own.yaml").write_text(OWN.replace("ranks: 4", "ranks: 3"))
    result = taccl("build", str(more))
    assert result.exit_code == 3 and "error[B008]: it has 3 ranks, ring:4 has 4" in result.stderr


def test_schemas_of_cluster_and_collective_accept_what_is_read() -> None:
    for name, texts in (("cluster", (CLUSTER, MORE)), ("collective", (OWN,))):
        schema = json.loads(taccl("schema", name).stdout)
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        for text in texts:
            assert validator.is_valid(plain_value(parse(text, "x.yaml")))
            assert not validator.is_valid(plain_value(parse(text + "more: 1\n", "x.yaml")))


def test_the_page_shows_a_file_that_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "building.md").read_text("utf-8")
    path = tmp_path / "cluster.yaml"
    path.write_text(page.split("```yaml\n")[1].split("```")[0])
    stems = [wanted.stem for wanted in read_cluster(str(path)).wanted]
    assert stems == [
        "allgather-64KB",
        "allgather-1MB",
        "allgather-64MB",
        "broadcast-from-3-1MB",
        "sendrecv-1MB",
    ]
    keys = json.loads(taccl("schema", "cluster").stdout)["properties"]
    entry = keys["collectives"]["items"]["properties"]
    assert all(f"`{key}`" in page for key in (*keys, *entry))


@pytest.mark.parametrize(
    ("arguments", "ended", "words"),
    [
        (["-t", "ring:2", "-c", "allgather"], "proof", "the bound is reached"),
        (["-t", "ring:4", "-c", "allreduce", "--engine", "ring"], "nothing-left", "nothing is left to try"),
        (
            ["-t", "ring:4", "-c", "allreduce", "--target-gap", "99%"],
            "target-gap",
            "the target gap is reached",
        ),
    ],
)
def test_synth_says_why_the_search_ended(arguments: list[str], ended: str, words: str) -> None:
    line = ("synth", *arguments, "--size", "1MB")
    assert json.loads(taccl(*line, "--json").stdout)["ended"] == ended
    assert f"s, ended: {words}" in taccl(*line).stdout


def test_a_search_that_ends_early_without_proof_has_a_reason() -> None:
    request = Request(load_topology("ring:4"), "allreduce", 10**6, time_limit_s=60.0)
    found = synthesise(replace(request, engine="ring"))
    assert found.certificate.status == "feasible"
    assert why_ended(request, found, 3.0, False, False) == "stages-done"
    assert why_ended(request, found, 3.0, False, True) == "nothing-left"
    assert why_ended(request, found, 60.1, False, False) == "time-limit"
    assert why_ended(request, found, 3.0, True, False) == "interrupted"


def test_no_algorithm_takes_the_name_of_the_manifest(cluster: Path) -> None:
    text = CLUSTER[: CLUSTER.index("  - collective: reduce")].replace("[1KB, 1MB]", "[1KB]")
    cluster.write_text(text.replace("output: out", "output: out\nname: manifest\nformat: both"))
    result = taccl("build", str(cluster))
    assert result.exit_code == 3 and f"{cluster}:4:7: error[B005]" in result.stderr
    assert not (cluster.parent / "out").exists()
    cluster.write_text(text.replace("output: out", "output: out\nname: manifest"))  # manifest.xml
    assert taccl("build", str(cluster)).exit_code == taccl("build", str(cluster), "--check").exit_code == 0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 1, "algorithms": {}}', "{" * 5000, '{"algorithms": [1]}']
)
def test_damaged_manifest(cluster: Path, text: str) -> None:
    out = cluster.parent / "out"
    out.mkdir()
    (out / MANIFEST).write_text(text)
    result = taccl("build", str(cluster))
    assert result.exit_code == 3 and "delete it to build everything anew" in result.stderr


def test_doctored_manifest_deletes_nothing_elsewhere(cluster: Path) -> None:
    assert taccl("build", str(cluster)).exit_code == 0
    precious = cluster.parent / "precious"
    precious.write_text("x")
    path = cluster.parent / "out" / MANIFEST
    found = json.loads(path.read_text())
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # sha256 of "x"
    found["algorithms"]["old"] = {"inputs": "", "files": {"../precious": digest}, "time_us": 1.0}
    path.write_text(json.dumps(found))
    assert taccl("build", str(cluster)).exit_code == 0
    assert precious.exists()


@pytest.mark.parametrize(
    ("size", "name"),
    [(10**6, "1MB"), (2**20, "1MiB"), (1024, "1KiB"), (1000, "1KB"), (1, "1B"), (1500, "1500B")],
)
def test_size_names(size: int, name: str) -> None:
    assert size_name(size) == name


def test_what_is_proved_of_chunks_is_not_claimed_of_finer_ones(tmp_path: Path) -> None:
    """Two instances pipeline what one chunk does not."""
    native = tmp_path / "b.json"
    line = (
        "synth",
        "-t",
        "ring:4",
        "-c",
        "broadcast",
        "--size",
        "64MB",
        "--partition",
        "1",
        "--instances",
        "2",
    )
    assert taccl(*line, "--time-limit", "2", "-o", str(native)).exit_code == 0
    checked = taccl("verify", str(native))
    assert checked.exit_code == 0, checked.stdout
