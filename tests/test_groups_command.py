"""Groups of ranks from the shell: what is read and refused, files, results on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from mpi_jobs import needs_mpi
from mpi_jobs import taccl as on_ranks

from taccl.cli import cli
from taccl.cluster_file import read_cluster
from taccl.errors import InvalidInput, UsageError
from taccl.groups import groups_text, read_groups

MAKE = ("synth", "-t", "ring:4", "--size", "64KB", "--engine", "greedy", "--time-limit", "20")


def taccl(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.parametrize(
    ("given", "ranks", "groups"),
    [
        ("0,2 1,3", 4, ((0, 2), (1, 3))),
        ("3,0;1,2", 4, ((3, 0), (1, 2))),
        (" 0 , 1 \n 2,3 ", 4, ((0, 1), (2, 3))),
        ("0-3 4-6", 8, ((0, 1, 2, 3), (4, 5, 6))),
        ("0-1,5 7,2-3", 8, ((0, 1, 5), (7, 2, 3))),
        ("dp=2,tp=4:dp", 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("dp=2,tp=4:tp", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("pp=2, dp=2, tp=2 : pp,tp", 8, ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("tp=4:tp", 4, ((0, 1, 2, 3),)),
    ],
)
def test_groups_are_read(given: str, ranks: int, groups: tuple[tuple[int, ...], ...]) -> None:
    assert read_groups(given, ranks) == groups
    assert read_groups(groups_text(groups), ranks) == groups


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("0,1 1,2", "rank 1 is in group 0 and in group 1"),
        ("0,4", "rank 4 does not exist, the ranks are 0..3"),
        ("0,0", "rank 0 stands twice"),
        ("0 1,2", "group 0 is rank 0 alone"),
        ("0,1 0,1", "rank 0 is in group 0 and in group 1"),
        ("0,,1", "an empty place between commas"),
        (",", "an empty place between commas"),
        ("a,b", "'a', which is no rank"),
        ("-1,2", "'-1', which is no rank"),
        ("0,1.5", "'1.5', which is no rank"),
        ("3-1", "write the lower one first"),
        ("0-9999999", "no run of ranks"),
        ("no/such/file", "which is no rank"),
        ("dp=2,tp=2", "does not say which dimension"),
        ("dp=2,tp=2:", "does not say which dimension"),
        ("dp=2,tp=2:pp", "no dimension 'pp'; it has dp, tp"),
        ("dp=2,tp=2:dp,dp", "a dimension stands twice"),
        ("dp=2,dp=2:dp", "the dimension dp stands twice"),
        ("dp=2,tp=4:dp", "2 x 4 = 8 ranks, there are 4"),
        ("dp=1,tp=4:dp", "group 0 is rank 0 alone"),
        ("dp=0,tp=4:dp", "is no dimension"),
        ("dp:dp", "'dp:dp', which is no rank"),
    ],
)
def test_groups_that_are_none_are_refused(given: str, words: str) -> None:
    with pytest.raises(UsageError, match="--groups") as refused:
        read_groups(given, 4)
    assert words in str(refused.value)
    result = taccl(*MAKE, "-c", "allreduce", "--groups", given)
    assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("-c", "sendrecv", "--groups", "0,1"), "sendrecv says itself who sends to whom"),
        (("-c", "alltoallv", "--demand", "0,1;1,0", "--groups", "0,1"), "groups are for"),
        (("-c", "broadcast", "--root", "2", "--groups", "0,1 2,3"), "place in every group, 0..1"),
        (("-c", "allreduce", "--groups", "0,1", "-t", "ring:70"), "on up to 64 ranks"),
    ],
)
def test_what_groups_cannot_do_is_said(more: tuple[str, ...], words: str) -> None:
    result = taccl(*MAKE, *more)
    assert result.exit_code == 2 and words in result.stderr


def test_groups_from_a_file_with_comments_and_places_of_errors(tmp_path: Path) -> None:
    path = tmp_path / "groups.txt"
    path.write_text("# data-parallel\n0,2  # first\n\n1,3\n")
    assert read_groups(str(path), 4) == ((0, 2), (1, 3))
    path.write_text("0,2\n1,x\n")
    with pytest.raises(InvalidInput) as refused:
        read_groups(str(path), 4)
    assert refused.value.diagnostics[0].line == 2 and refused.value.diagnostics[0].code == "D002"
    assert taccl(*MAKE, "-c", "allreduce", "--groups", str(path)).exit_code == 3


def test_the_file_says_its_groups_and_xml_is_told_them(tmp_path: Path) -> None:
    native, xml = str(tmp_path / "a.json"), str(tmp_path / "a.xml")
    made = taccl(*MAKE, "-c", "allreduce", "--groups", "0,2 1,3", "-o", native, "--json")
    assert made.exit_code == 0, made.output
    document = json.loads(made.stdout)
    assert document["collective"] == "allreduce" and document["groups"] == [[0, 2], [1, 3]]
    assert taccl(*MAKE, "-c", "allreduce", "--groups", "dp=2,tp=2:dp", "-o", xml).exit_code == 0
    assert 'coll="custom"' in Path(xml).read_text("utf-8").splitlines()[0]
    told = ("--collective", "allreduce", "--groups", "dp=2,tp=2:dp")
    for command, size in (("verify", ()), ("simulate", ("--size", "64KB")), ("explain", ("--size", "64KB"))):
        topology = () if command == "verify" else ("--topology", "ring:4")
        of_xml = taccl(command, xml, *told, *size, *topology, "--json")
        of_native = taccl(command, native, "--json")
        assert of_xml.exit_code == of_native.exit_code == 0, of_xml.output
        one, other = json.loads(of_xml.stdout), json.loads(of_native.stdout)
        assert one["collective"] == other["collective"] == "allreduce"
        assert one["groups"] == other["groups"] == [[0, 2], [1, 3]]
        assert "in 2 groups of 2" in taccl(command, native).stdout
    assert taccl("verify", xml).exit_code == 1
    assert taccl("verify", xml, "--collective", "allreduce", "--groups", "0,1 2,3").exit_code == 1
    unsaid = taccl("verify", xml, "--groups", "0,2 1,3")
    assert unsaid.exit_code == 2 and "--groups needs --collective" in unsaid.stderr
    assert taccl("verify", native, "--groups", "0,2 1,3").exit_code == 2
    again = taccl("convert", native, "--to", "json")
    assert again.exit_code == 0 and json.loads(again.stdout) == json.loads(Path(native).read_text("utf-8"))


def test_a_file_whose_groups_are_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert taccl(*MAKE, "-c", "allgather", "--groups", "0,2 1,3", "-o", str(path)).exit_code == 0
    whole = json.loads(path.read_text("utf-8"))
    for groups in ([[0, 2], [2, 3]], [[0, 9], [1, 3]], [[0]], [], [[0, 2], [1, "3"]], {"0": 1}):
        whole["collective"]["groups"] = groups
        path.write_text(json.dumps(whole))
        result = taccl("verify", str(path))
        assert result.exit_code == 3 and "Traceback" not in result.output, groups
    whole["collective"]["groups"] = [[1, 3], [0, 2]]  # other data than the messages move
    path.write_text(json.dumps(whole))
    assert taccl("verify", str(path)).exit_code == 1


def test_sweeps_and_cluster_files_take_groups(tmp_path: Path) -> None:
    swept = taccl(
        "synth", "-t", "ring:4", "-c", "allgather", "--groups", "0,2 1,3", "--engine", "greedy", "--sweep", "1KB,1MB",
        "-o", str(tmp_path / "out"), "--json",
    )  # fmt: skip
    assert swept.exit_code == 0, swept.output
    assert all(point["gap"] >= 0 for point in json.loads(swept.stdout)["sizes"])
    entry = "schema: taccl/cluster/v1\ntopology: ring:4\ncollectives:\n  - collective: {}\n    sizes: [1KB]\n    {}\n"
    path = tmp_path / "cluster.yaml"
    (tmp_path / "dp.txt").write_text("0,2\n1,3\n")
    for given in ("groups: [[0, 2], [1, 3]]", "groups: dp=2,tp=2:dp", "groups: dp.txt"):
        path.write_text(entry.format("allgather", given))
        assert read_cluster(str(path)).wanted[0].order.groups == "0,2 1,3"
    for collective, given, code in (
        ("allgather", "groups: [[0, 2], [2, 3]]", "B008"),
        ("allgather", "groups: x=2:x", "B008"),
        ("sendrecv", "groups: [[0, 2]]", "B007"),
        ("broadcast", "{groups: [[0, 2]], root: 2}", "B006"),
    ):
        text = entry.format(collective, given).replace(
            "{groups: [[0, 2]], root: 2}", "groups: [[0, 2]]\n    root: 2"
        )
        path.write_text(text)
        with pytest.raises(InvalidInput) as refused:
            read_cluster(str(path))
        assert [found.code for found in refused.value.diagnostics] == [code]


@pytest.mark.parametrize(
    ("collective", "groups", "options"),
    [
        ("allreduce", "0,2 1,3", ("-o", "sum,avg", "-d", "float32,float16")),
        ("allgather", "3,0,2", ()),
        ("reduce", "1,0 3,2", ("-o", "max")),
    ],
)
@needs_mpi[0]
@needs_mpi[1]
def test_groups_on_real_ranks(tmp_path: Path, collective: str, groups: str, options: tuple[str, ...]) -> None:
    path, report = str(tmp_path / "a.json"), tmp_path / "report.json"
    made = taccl(*MAKE, "-c", collective, "--groups", groups, "--partition", "2", "-o", path)
    assert made.exit_code == 0, made.output
    ended = on_ranks(
        4, "run", path, "-b", "1000", "-e", "5000", "-f", "5", "-n", "2", "-w", "1", "--deadline", "20",
        "--json", str(report), *options,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    found = json.loads(report.read_text("utf-8"))
    assert found["config"]["groups"] == [list(map(int, group.split(","))) for group in groups.split()]
    modes = [row[mode] for row in found["results"] for mode in ("out_of_place", "in_place")]
    assert modes and all(m["nwrong"] == 0 and m["outside_bytes"] == 0 for m in modes)
    assert all(m["reference_time_us"] > 0 for m in modes)
