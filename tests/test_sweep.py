"""`taccl synth --sweep`: ranges that leave no size out, and in each the quickest of the programs."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from fractions import Fraction
from math import isqrt
from pathlib import Path

import pytest
from click.testing import CliRunner

from taccl.cli import cli
from taccl.errors import UsageError
from taccl.produce import Order
from taccl.profiles.load import load_topology
from taccl.profiles.profile_writer import write_topology
from taccl.sweep import MOST_SIZES, sizes_of, sweep
from taccl.synth.msccl_xml import read_xml
from taccl.synth.simulate import simulate
from taccl.synth.verify import is_correct, verify


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("1KB:1MB", [1000, 4000, 16000, 64000, 256000, 1000000]),
        ("1KB:4KB:2", [1000, 2000, 4000]),
        ("1KB:5KB:2", [1000, 2000, 4000, 5000]),
        ("1MB:1MB", [1000000]),
        ("1MB,1KB,1KB", [1000, 1000000]),
        ("7", [7]),
    ],
)
def test_sizes(given: str, sizes: list[int]) -> None:
    assert sizes_of(given) == sizes


@pytest.mark.parametrize(
    "given",
    [
        "",
        "1MB:1KB",
        "1KB:1MB:1",
        "1KB:1MB:x",
        "1KB:1MB:2:2",
        "1KB:",
        "0:5",
        "1.5",
        "1KB,,2KB",
        "1:1e9GB",
        "1KB:1GB:" + "9" * 5000,
    ],
)
def test_bad_sizes_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="--sweep"):
        sizes_of(given)


def test_too_many_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match=str(MOST_SIZES)):
        sizes_of(",".join(str(k) for k in range(1, MOST_SIZES + 2)))


@pytest.mark.parametrize("collective", ["allreduce", "alltoall", "sendrecv"])
def test_ranges_meet_and_each_has_the_quickest(collective: str) -> None:
    sizes = [1000, 50_000, 4_000_000]
    found = sweep(Order("ring:4", collective, None, time_limit_s=1.0), sizes)
    topology = load_topology("ring:4")
    assert found.members[0].min_bytes == sizes[0] and found.members[-1].max_bytes == sizes[-1]
    for before, after in itertools.pairwise(found.members):
        assert after.min_bytes == before.max_bytes + 1
        assert before.made_for_bytes <= before.max_bytes

    def time_fs(number: int, size: int) -> int:
        product = found.members[number].product
        assert product.program is not None
        return simulate(product.program, topology, size, collective=product.explicit().collective).time_fs

    for point, size in zip(found.points, sizes, strict=True):
        member = found.members[point.member]
        assert point.size_bytes == size and member.min_bytes <= size <= member.max_bytes
        times = [time_fs(number, size) for number in range(len(found.members))]
        assert point.time_fs == min(times) == times[point.member]
        assert point.time_fs / 1e9 >= point.lower_bound_us * (1 - 1e-9)
    for number, (before, after) in enumerate(itertools.pairwise(found.members)):
        assert time_fs(number, before.max_bytes) <= time_fs(number + 1, before.max_bytes)
        later = min(after.max_bytes, round(before.max_bytes * 1.03) + 2)
        assert time_fs(number + 1, later) <= time_fs(number, later)


def test_where_ranks_share_cores_messages_count_at_every_size(tmp_path: Path) -> None:
    profile = tmp_path / "crowded.yaml"
    profile.write_text(write_topology(replace(load_topology("mesh2d:2x2"), load_us=Fraction(2))))
    sizes = [1000, 100_000, 4_000_000]
    found = sweep(Order(str(profile), "allreduce", None, time_limit_s=1.0), sizes)

    def judged_fs(number: int, size: int) -> int:
        product = found.members[number].product
        assert product.program is not None
        done = simulate(product.program, product.topology, size, collective=product.explicit().collective)
        messages = sum(activity.kind == "message" for activity in done.activities)
        return isqrt(done.time_fs**2 + (messages * 2 * 10**9) ** 2)

    for point in found.points:
        judged = [judged_fs(number, point.size_bytes) for number in range(len(found.members))]
        assert judged[point.member] == min(judged)
    alone = sweep(Order("mesh2d:2x2", "allreduce", None, time_limit_s=1.0), sizes)
    first = [len(one.members[one.points[0].member].product.explicit().messages) for one in (found, alone)]
    assert first[0] < first[1]


def test_the_command_writes_programs_that_verify(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    arguments = ["synth", "-t", "ring:4", "-c", "allreduce", "--sweep", "1KB,4MB", "--time-limit", "1"]
    ran = CliRunner().invoke(cli, [*arguments, "-o", str(folder), "--json"])
    assert ran.exit_code == 0, ran.output
    made = json.loads(ran.stdout)
    assert made["schema"] == "taccl/sweep/v1"
    assert [point["size_bytes"] for point in made["sizes"]] == [1000, 4_000_000]
    for entry in made["algorithms"]:
        path = Path(entry["path"])
        program = read_xml(path.read_text(), str(path))
        assert (program.min_bytes, program.max_bytes) == (entry["min_bytes"], entry["max_bytes"])
        assert is_correct(verify(program))
    (folder / "allreduce-9KB.xml").write_text("of an earlier call")
    again = CliRunner().invoke(cli, [*arguments, "-o", str(folder)])
    assert again.exit_code == 0 and "allreduce-9KB.xml was not written by this call" in again.stderr
    (folder / "allreduce-9KB.xml").unlink()
    text = CliRunner().invoke(cli, arguments)
    assert text.exit_code == 0 and "made for" in text.stdout
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        Path(entry["path"]).name for entry in made["algorithms"]
    )


@pytest.mark.parametrize(
    "more", [["--size", "1KB"], ["-o", "-"], ["-o", "x.xml", "--check-up-to-date"], ["-o", "x.xml"]]
)
def test_what_does_not_go_together_is_refused(more: list[str]) -> None:
    ran = CliRunner().invoke(cli, ["synth", "-t", "ring:4", "-c", "allreduce", "--sweep", "1KB", *more])
    assert ran.exit_code == 2 or isinstance(ran.exception, UsageError)


def test_a_file_in_the_folders_place_is_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    ran = CliRunner().invoke(
        cli, ["synth", "-t", "ring:4", "-c", "allreduce", "--sweep", "1KB", "-o", str(tmp_path / "there")]
    )
    assert ran.exit_code == 2 or isinstance(ran.exception, UsageError)
