"""The demo: the whole way, with two ranks and little time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from taccl.cli import cli
from taccl.commands import demo
from taccl.errors import CheckFailed
from taccl.profiles.load import load_topology
from taccl.runtime import mpi
from taccl.synth.msccl_xml import read_xml
from taccl.synth.verify import is_correct, verify

needs_mpi = pytest.mark.skipif(mpi.mpiexec() is None, reason="there is no mpiexec")


@needs_mpi
@pytest.mark.mpi
def test_demo_leaves_a_report_and_checked_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(cli, ["demo", "-n", "2", "-o", str(out), "--time-limit", "1"])
    assert result.exit_code == 0, result.output
    assert load_topology(str(out / "profile.yaml")).ranks == 2
    heads = [line for line in result.stdout.splitlines() if line.startswith("#")]
    assert len(heads) == 3 and "algbw" in heads[1]
    for name in demo.COLLECTIVES:
        assert is_correct(verify(read_xml((out / f"{name}.xml").read_bytes()), strict=True))
        found = json.loads((out / f"{name}-run.json").read_text())
        assert found["out_of_bounds"] == {"count": 0, "okay": True}
        assert len([line for line in result.stdout.splitlines() if line.endswith(f"  {name}")]) == 3
    report = (out / "report.html").read_text()
    assert "<svg" in report
    # Self-contained: nothing is loaded from elsewhere.
    assert not re.search(r"<(script|img|iframe)[^>]+src\s*=|<link[^>]+href|url\((?!#|['\"]?data:)", report)


@needs_mpi
@pytest.mark.mpi
def test_wrong_data_fails_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def spoilt(ranks: int, name: str, profile: Path, folder: Path) -> list[str]:
        if name == "alltoall":
            raise CheckFailed("3 wrong elements")
        return run(ranks, name, profile, folder)

    run = demo._run
    monkeypatch.setattr(demo, "_run", spoilt)
    result = CliRunner().invoke(cli, ["demo", "-n", "2", "-o", str(tmp_path / "out"), "--time-limit", "1"])
    assert result.exit_code == 1
    assert "3 wrong elements" in result.stderr and "the runs of alltoall failed" in result.stderr
    assert (tmp_path / "out" / "report.html").exists()


def test_demo_without_mpi_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mpi, "mpiexec", lambda: None)
    result = CliRunner().invoke(cli, ["demo", "-o", str(tmp_path / "out")])
    assert result.exit_code == 6 and "there is no mpiexec" in result.stderr
