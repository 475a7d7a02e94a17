"""Schedules of more ranks than programs are made for: written, proved and refused without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from taccl.cli import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An allgather of 256 ranks, one chunk a message."""
    path = tmp_path_factory.mktemp("large") / "ag.json"
    result = run(
        "synth", "-t", "torus2d:16x16", "-c", "allgather", "--size", "256MB", "--partition", "1", "--no-batching",
        "-o", str(path), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["status"] == "optimal"
    assert found["time_us"] == pytest.approx(255 / 4 * 20.5, rel=0.01)  # 4 links in, 0.5 us + 20 us a chunk
    assert "up to 128 ranks" in found["no_program"]
    return path


def test_a_large_schedule_is_proved(schedule: Path) -> None:
    result = run("verify", str(schedule), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"]
    assert found["ranks"] == 256 and found["groups"] == []
    assert run("verify", str(schedule), "--groups", "0-7 8-15").exit_code == 2
    assert found["certificate"]["checked"]
    assert found["certificate"]["status"] == "optimal"
    assert "65280 messages" in run("verify", str(schedule)).stdout


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"status": "optimal"', '"status": "feasible"', "its status is feasible"),
        ('"time_fs": ', '"time_fs": 1', "the last arrival or reduction ends at"),
        ('"lower_bound_us": ', '"lower_bound_us": 9', "can be proved"),
        ('"ranks": 256', '"ranks": 255', "the topology has 256 ranks"),
    ],
)
def test_a_changed_schedule_is_refused(
    schedule: Path, tmp_path: Path, old: str, new: str, reason: str
) -> None:
    text = schedule.read_text()
    assert old in text
    changed = tmp_path / "changed.json"
    changed.write_text(text.replace(old, new, 1))
    result = run("verify", str(changed))
    assert result.exit_code in (1, 3)
    assert reason in result.output


@pytest.mark.parametrize("command", ["simulate", "explain"])
def test_what_needs_a_program_says_so(schedule: Path, command: str) -> None:
    result = run(command, str(schedule))
    assert result.exit_code == 4
    assert "taccl verify proves the schedule" in result.output


def test_no_program_is_written(tmp_path: Path) -> None:
    result = run(
        "synth", "-t", "torus2d:16x16", "-c", "allgather", "--size", "1MB", "--partition", "1",
        "--time-limit", "1", "-o", str(tmp_path / "ag.xml"),
    )  # fmt: skip
    assert result.exit_code == 4
    assert "-o FILE.json" in result.output
    assert not list(tmp_path.iterdir())


def test_options_of_programs_are_refused(schedule: Path) -> None:
    result = run("verify", str(schedule), "--collective", "allgather")
    assert result.exit_code == 2
    assert "--collective" in result.output
