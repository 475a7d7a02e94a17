"""The gap to the bound: one number, rounded once, whoever prints it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from native_algorithms import timed

from taccl.cli import cli
from taccl.profiles.load import load_topology
from taccl.synth.algorithm import Certificate
from taccl.synth.check_certificate import judge_certificate
from taccl.synth.collective import build
from taccl.synth.gap import gap, gap_text
from taccl.synth.native import write_native

times = st.floats(0, 1e6)


@settings(deadline=None)
@given(time_us=times, bound_us=times)
def test_a_gap_is_a_share_and_is_rounded_once(time_us: float, bound_us: float) -> None:
    share = gap(time_us, bound_us)
    assert 0 <= share <= 1 and share == round(share, 6)
    assert Certificate(bound_us, "", 0, "feasible").gap(time_us) == share


def test_the_share_that_json_holds_is_the_one_that_people_read() -> None:
    # Rounded to six digits this is 0.18705 and reads 18.70 or 18.71 %, depending on what is rounded.
    share = gap(1.0, 1 - 0.1870495)
    assert gap_text(share) == gap_text(json.loads(json.dumps(share))) == f"{100 * 0.18705:.2f} %"


def test_every_command_prints_the_same_gap(tmp_path: Path) -> None:
    ring = load_topology("ring:4")
    made = timed(ring, build("allreduce", 4), "ring")
    made = replace(made, certificate=judge_certificate(replace(made, certificate=NONE), ring).certificate)
    file = tmp_path / "x.json"
    file.write_text(write_native(made, ring), "utf-8")
    document = json.loads(CliRunner().invoke(cli, ["verify", str(file), "--json"]).stdout)["certificate"]
    assert document["gap"] > 0
    for command in ("verify", "explain", "simulate"):
        shown = CliRunner().invoke(cli, [command, str(file)])
        assert gap_text(document["gap"]) in shown.stdout, command
    for command in ("explain", "simulate"):
        assert (
            json.loads(CliRunner().invoke(cli, [command, str(file), "--json"]).stdout)["gap"]
            == document["gap"]
        )


NONE = Certificate(0.0, "", 0.0, "feasible")
