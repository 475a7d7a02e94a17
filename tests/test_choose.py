"""`taccl choose` on real ranks, and the alternatives that `taccl synth` writes for it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import runtime_programs as programs
from click.testing import CliRunner
from mpi_jobs import launch, messages, taccl, taccl_but
from native_algorithms import timed

from taccl.cli import cli
from taccl.commands.run_prepare import check_same_work
from taccl.errors import UsageError
from taccl.profiles.load import load_topology
from taccl.runtime.choose import Timed, beats, quickest
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import build
from taccl.synth.native import read_native, write_native
from taccl.synth.search import NEAR

mpi = pytest.mark.usefixtures("needs_a_launcher")
FAST = ("--rounds", "2", "-n", "2", "--deadline", "20")


@pytest.fixture
def natives(tmp_path):
    """Two allgathers of 64 KiB on a ring of four ranks."""
    topology = load_topology("ring:4")
    paths = []
    for engine in ("ring", "direct"):
        algorithm = timed(topology, build("allgather", 4), engine, 65536)
        paths.append(str(tmp_path / f"{engine}.json"))
        Path(paths[-1]).write_text(write_native(algorithm, topology))
    return paths


@pytest.mark.mpi
@mpi
def test_the_quickest_is_kept_as_it_is(natives, tmp_path):
    out = tmp_path / "best.json"
    ended = taccl(4, "choose", *natives, "-o", str(out), *FAST, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["schema"], found["size_bytes"], found["mode"]) == ("taccl/choose/v1", 65536, "out_of_place")
    programs_ = found["programs"]
    assert [one["file"] for one in programs_] == natives
    assert all(len(one["times_us"]) == 2 and one["predicted_time_us"] > 0 for one in programs_)
    chosen = programs_[
        int(all(1.01 * b < a for a, b in zip(*(one["times_us"] for one in programs_), strict=True)))
    ]
    assert found["chosen"] == chosen["file"] and found["path"] == str(out)
    assert out.read_bytes() == Path(chosen["file"]).read_bytes()


@pytest.mark.mpi
@mpi
def test_programs_without_a_size_or_a_model(saved):
    ring, direct = (
        saved(programs.ring_allgather(3, 2)),
        saved(dataclasses.replace(programs.ring_allgather(3, 1), name="other")),
    )
    asked = taccl(3, "choose", ring, direct, *FAST)
    assert asked.code == 2 and "--size is needed" in asked.err and len(messages(asked)) == 1
    ended = taccl(3, "choose", ring, direct, "--size", "3KB", *FAST)
    assert ended.code == 0, ended.err
    assert f"# chosen: {ring}" in ended.out or f"# chosen: {direct}" in ended.out


OVERWRITTEN = """
import sys
from pathlib import Path
from taccl import entry
from taccl.runtime import choose
time_in_turns = choose.time_in_turns
def overwrite_first(job, *rest, **how):
    for name in sys.argv[2:4] if job.rank == 0 else ():
        Path(name).write_text("{}")
    return time_in_turns(job, *rest, **how)
choose.time_in_turns = overwrite_first
sys.argv = ["taccl", *sys.argv[1:]]
entry.main()
"""


@pytest.mark.mpi
@mpi
def test_short_times_are_taken_more_often(natives):
    """A turn of 64 KiB between processes of one machine is far from 0.2 s."""
    ended = taccl(4, "choose", *natives, "--rounds", "2", "--deadline", "20", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert 3 < found["iterations"] <= 100
    assert all(len(one["times_us"]) == 2 for one in found["programs"])


@pytest.mark.mpi
@mpi
def test_what_is_written_is_what_was_timed(natives, tmp_path):
    before = {Path(name).read_bytes() for name in natives}
    out = tmp_path / "best.json"
    ended = launch(4, "-c", OVERWRITTEN, "choose", *natives, "-o", str(out), *FAST)
    assert ended.code == 0, ended.err
    assert all(Path(name).read_text() == "{}" for name in natives)
    assert out.read_bytes() in before


@pytest.mark.mpi
@mpi
def test_with_a_codec_and_real_values(natives, tmp_path):
    values = tmp_path / "values.npy"
    np.save(values, np.linspace(-1, 1, 1000, dtype=np.float32))
    how = ("--codec", "q8", "--codec-links", "all", "--data", str(values))
    ended = taccl(4, "choose", *natives, *how, *FAST, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["chosen"] in natives
    several = taccl(4, "choose", *natives, *how, "--codec", "q8,xw", *FAST)
    assert several.code == 2 and "on one codec, not on q8, xw" in several.err


@pytest.mark.mpi
@mpi
def test_wrong_data_are_not_chosen(saved, tmp_path):
    program = programs.direct_alltoall(3)
    wrong = saved(programs.wrong_alltoall(3))
    out = tmp_path / "best.xml"
    ended = taccl(3, "choose", saved(program), wrong, "--size", "3000", "-o", str(out), *FAST)
    assert ended.code == 1
    assert messages(ended) == [f"taccl: {wrong} gives wrong data; nothing was chosen"]
    assert not out.exists()


@pytest.mark.mpi
@mpi
def test_what_cannot_be_compared_is_refused(saved, natives, tmp_path):
    ring, exchange = saved(programs.ring_allgather(3)), saved(programs.direct_alltoall(3))
    inside = saved(dataclasses.replace(programs.ring_allgather(3, inplace=True), name="inside"))
    for words, said in (
        ((ring, ring, "--size", "3KB", "-o", "-"), "-o names a file"),
        ((ring, exchange, "--size", "3KB"), "they must do the same"),
        ((ring, ring, "--size", "3KB", "-o", str(tmp_path / "a.json")), "must have the same suffix"),
        ((ring, exchange, "--size", "3KB", "-o", str(tmp_path / "a.json")), "they must do the same"),
        ((ring, inside, "--size", "3KB"), "no mode in common"),
        ((ring, ring, "--size", "3KB", "-d", "float32,int32"), "on one type, not on float32, int32"),
        ((ring, str(tmp_path / "none.xml"), "--size", "3KB"), "none.xml"),
        ((natives[0], ring), "is a program for 4 ranks and this job has 3"),
    ):
        ended = taccl(3, "choose", *words, *FAST)
        assert ended.code in (2, 3) and said in ended.err and len(messages(ended)) == 1, ended.err


def test_programs_for_other_demands_are_not_compared():
    """However finely the blocks are cut."""
    one, other = (build("alltoallv", 2, demand=demand) for demand in (((0, 1), (2, 0)), ((0, 2), (1, 0))))
    check_same_work("a", one, "b", build("alltoallv", 2, 3, demand=((0, 1), (2, 0))))
    with pytest.raises(UsageError, match="a and b both do alltoallv, but not with the same parts"):
        check_same_work("a", one, "b", other)
    with pytest.raises(UsageError, match="they must do the same"):
        check_same_work("a", one, "b", build("alltoall", 2))


@pytest.mark.mpi
@mpi
def test_options_for_xml_are_not_for_native_files_beside_it(natives, tmp_path):
    """XML does not say what a custom program does; the native file does."""
    program = tmp_path / "ring.xml"
    made = CliRunner().invoke(cli, ["convert", natives[0], "--to", "msccl-xml", "-o", str(program)])
    assert made.exit_code == 0
    program.write_text(program.read_text().replace('coll="allgather"', 'coll="custom"'))
    size = ("--size", "64KiB")
    alone = taccl(4, "choose", natives[1], str(program), *size, *FAST)
    assert alone.code == 3
    told = taccl(4, "choose", natives[1], str(program), "--collective", "allgather", *size, *FAST)
    assert told.code == 0, told.err
    against = ("--against", str(program), "--collective", "allgather", "-b", "64K", "-e", "64K")
    ended = taccl(4, "run", natives[1], *against, "-n", "2", "--deadline", "20")
    assert ended.code == 0, ended.err
    only_native = taccl(4, "choose", *natives, "--collective", "allgather", *FAST)
    assert only_native.code == 2 and "--collective is for XML" in only_native.err


@pytest.mark.mpi
@mpi
def test_a_pattern_that_the_shell_found_nothing_for_is_left_out(natives, tmp_path):
    pattern = str(tmp_path / "ring.*.json")
    ended = taccl(4, "choose", natives[0], pattern, "--json", *FAST)
    assert ended.code == 0, ended.err
    assert [one["file"] for one in json.loads(ended.out)["programs"]] == natives[:1]
    assert messages(ended) == [f"taccl: warning: there is no file {pattern}: only the others are timed"]
    assert taccl(4, "choose", pattern, *FAST).code == 3


# A file that becomes another one right after all ranks have read it as a program.
CHANGED = """
import os, sys
from pathlib import Path
from taccl.cli import main
from taccl.commands import choose
read = choose._candidates
def late(job, options):
    found = read(job, options)
    job.barrier()
    if job.rank == 0:
        Path(options["files"][0]).write_text("another one")
    return found
choose._candidates = late
main()
"""


@pytest.mark.mpi
@mpi
def test_a_file_that_changes_is_not_taken_for_what_was_timed(saved, tmp_path):
    ring, out = saved(programs.ring_allgather(3)), tmp_path / "best.xml"
    ended = launch(3, "-c", CHANGED, "choose", ring, "--size", "3KB", "-o", str(out), *FAST)
    assert ended.code == 3 and not out.exists()
    (said,) = messages(ended)
    assert ring in said and "it changed while it was read" in said


@pytest.mark.mpi
@mpi
@pytest.mark.parametrize("other", [("--rounds", "3"), ("--turns",)])
def test_ranks_with_other_options_are_named(saved, other):
    """--turns alone says no more of how each program runs than that there is no second way to time it."""
    ring = saved(programs.ring_allgather(3))
    ended = taccl_but(3, 1, other, "choose", ring, ring, "--size", "3KB", *FAST)
    assert ended.code == 86 and "rank 1 runs another list of programs" in ended.err


def test_a_program_is_taken_before_an_earlier_one_only_for_more_than_chance():
    def took(*times_us: float) -> Timed:
        return Timed(times_us, 0, 1)

    steady, often, once = took(100, 100, 100, 100, 100), took(90, 90, 110, 90, 90), took(80, 80, 80, 120, 120)
    assert beats(often, steady) and not beats(once, steady) and not beats(steady, once)
    assert not beats(took(99.5), took(100)) and beats(took(98), took(100))
    assert quickest([steady, once, often]) == 2
    assert quickest([steady, once]) == 0 and quickest([once, steady]) == 0
    assert quickest([took(100)]) == 0


def synth(*words: str) -> dict:
    asked = (
        "synth", "-t", "mesh2d:2x3", "-c", "allgather", "--size", "1MB", "--engine", "greedy", "--json", *words,
    )  # fmt: skip
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_alternatives_are_near_differ_and_leave_the_best_as_it_is(tmp_path):
    best, alone = tmp_path / "a.json", tmp_path / "alone.json"
    found = synth("-o", str(best), "--alternatives", "3")
    synth("-o", str(alone))
    assert best.read_bytes() == alone.read_bytes()
    others = found["alternatives"]
    assert [one["path"] for one in others] == [
        str(tmp_path / f"a.{n}.json") for n in range(2, 2 + len(others))
    ]
    assert 1 <= len(others) <= 3
    seen = []
    for path in (best, *(one["path"] for one in others)):
        algorithm, topology = read_native(Path(path).read_text())
        assert not check_algorithm(algorithm, topology)
        assert CliRunner().invoke(cli, ["verify", str(path)]).exit_code == 0
        seen.append({(m.link, m.start_fs, m.end_fs, m.op) for m in algorithm.messages})
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
    times_us = [one["simulated_us"] for one in others]
    assert times_us == sorted(times_us) and times_us[-1] <= NEAR * found["simulated_us"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name it"),
        (("-o", "-"), "name it"),
        (("-o", "a.json", "--check-up-to-date"), "neither --sweep nor"),
        (("-o", "a", "--sweep", "1KB:1MB"), "neither --sweep nor"),
    ],
)
def test_alternatives_need_a_file(words, said):
    size = () if "--sweep" in words else ("--size", "1MB")
    asked = ["synth", "-t", "ring:4", "-c", "allgather", *size, "--alternatives", "2", *words]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code != 0
    assert said in str(done.exception) or said in done.output
