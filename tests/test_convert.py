"""`taccl convert`, and what the other commands do with a native file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from lxml import html
from native_algorithms import timed, two_nodes

from taccl.cli import cli
from taccl.profiles.load import load_topology
from taccl.profiles.profile_writer import write_topology
from taccl.program_file import open_program
from taccl.runtime.local import run_in_process
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.collective import build
from taccl.synth.msccl_xml import read_xml
from taccl.synth.native import write_native
from taccl.synth.verify import is_correct, verify

TWO = two_nodes()
NAMES_OF_OPTIONS = ("collective", "root", "demand", "pairs", "groups", "pre_post")
ALGORITHM = replace(
    timed(TWO, build("allgather", 4), "ring"),
    certificate=Certificate(20.0, "as somebody says", 15.0, "feasible"),
)


def taccl(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def text(*arguments: object) -> str:
    result = taccl(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return saved(ALGORITHM, tmp_path)


def saved(algorithm: Algorithm, folder: Path) -> Path:
    path = folder / "x.json"
    path.write_text(write_native(algorithm, TWO), "utf-8")
    return path


@pytest.fixture
def xml(native: Path) -> Path:
    path = native.with_suffix(".xml")
    text("convert", native, "--to", "msccl-xml", "-o", path)
    return path


def test_xml_of_an_algorithm_is_proven(xml: Path) -> None:
    program = read_xml(xml.read_bytes())
    assert is_correct(verify(program, strict=True))
    assert text("convert", xml, "--to", "msccl-xml") == xml.read_text()


def test_native_form_is_canonical(native: Path, tmp_path: Path) -> None:
    loose = tmp_path / "loose.json"
    loose.write_text(json.dumps(json.loads(native.read_text("utf-8")), indent=3))
    assert text("convert", loose, "--to", "json") == native.read_text("utf-8")


def test_perfetto_needs_nothing_but_a_native_file(native: Path) -> None:
    trace = json.loads(text("convert", native, "--to", "perfetto"))
    sent = [event for event in trace["traceEvents"] if event.get("cat") == "message"]
    assert len(sent) == len(ALGORITHM.messages)


def test_html_of_an_algorithm_knows_its_bound(native: Path, tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    text("convert", native, "--to", "html", "-o", page)
    said = html.fromstring(page.read_bytes()).text_content()
    assert "bound: " in said and "no algorithm below" in said
    assert "as somebody says" not in said  # the bound is proved again, not repeated
    # At another size the schedule's times and its bound do not hold.
    said = html.fromstring(text("convert", native, "--to", "html", "--size", "4MB").encode()).text_content()
    assert "no algorithm below" not in said and "4 MB" in said


def test_plan_between_nodes_uses_ports(native: Path, xml: Path) -> None:
    plan = json.loads(text("convert", native, "--to", "mscclpp-json"))
    kinds = {channel["channel_type"] for gpu in plan["gpus"] for channel in gpu["channels"]}
    assert kinds == {"memory", "port"}
    alone = json.loads(text("convert", xml, "--to", "mscclpp-json"))
    assert {c["channel_type"] for gpu in alone["gpus"] for c in gpu["channels"]} == {"memory"}


@pytest.mark.parametrize("form", ["perfetto", "html"])
def test_time_lines_of_xml_need_topology_and_size(xml: Path, tmp_path: Path, form: str) -> None:
    result = taccl("convert", xml, "--to", form)
    assert result.exit_code == 2 and "--topology" in result.stderr
    profile = tmp_path / "ring.yaml"
    profile.write_text(write_topology(TWO), "utf-8")
    result = taccl("convert", xml, "--to", form, "--topology", profile)
    assert result.exit_code == 2 and "--size" in result.stderr
    assert text("convert", xml, "--to", form, "--topology", profile, "--size", "1MB")


def test_xml_has_no_native_form(xml: Path) -> None:
    result = taccl("convert", xml, "--to", "json")
    assert result.exit_code == 2 and "taccl synth" in result.stderr


def test_bad_files_end_with_a_message(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"schema": }')
    result = taccl("convert", broken, "--to", "html")
    assert result.exit_code == 3 and f"{broken}:1:12: error[N001]" in result.stderr
    assert taccl("convert", tmp_path / "none.json", "--to", "html").exit_code == 3


def test_names_that_xml_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = saved(replace(ALGORITHM, name="a\x01b"), tmp_path)
    result = taccl("convert", path, "--to", "msccl-xml")
    assert result.exit_code == 2 and "XML cannot hold" in result.stderr


def test_verify_takes_a_native_file(native: Path, tmp_path: Path) -> None:
    assert json.loads(text("verify", native, "--json"))["ok"] is True
    late = replace(ALGORITHM, time_fs=ALGORITHM.time_fs + 1)
    result = taccl("verify", saved(late, tmp_path), "--json")
    assert result.exit_code == 1
    assert [error["code"] for error in json.loads(result.stdout)["errors"]] == ["A100"]


def test_chunks_that_a_step_could_not_count_are_joined_in_the_program_alone(tmp_path: Path) -> None:
    pair = load_topology("ring:2")
    path = tmp_path / "x.json"
    path.write_text(write_native(timed(pair, build("allreduce", 2, 100), "ring"), pair))  # 100 a message
    opened = open_program(str(path), dict.fromkeys(NAMES_OF_OPTIONS))
    assert opened.program.chunks_per_loop == 100 and opened.collective == build("allreduce", 2, 50)
    inputs = [np.arange(rank, 400 + rank, dtype=np.int32) for rank in range(2)]
    for output in run_in_process(opened.program, inputs, collective=opened.collective):
        assert (output == inputs[0] + inputs[1]).all()
    assert json.loads(text("verify", path, "--json"))["ok"] is True


def test_simulate_takes_topology_and_size_from_a_native_file(native: Path) -> None:
    found = json.loads(text("simulate", native, "--json"))
    assert found["size_bytes"] == ALGORITHM.size_bytes and found["topology"] == TWO.name
    assert found["time_us"] == pytest.approx(ALGORITHM.time_fs / 10**9, abs=1e-6)
    assert found["schedule_us"] == found["time_us"]
    other = json.loads(text("simulate", native, "--json", "--size", "2MB"))
    assert other["time_us"] > found["time_us"] and other["schedule_us"] is None


def test_explain_takes_a_native_file(native: Path) -> None:
    assert json.loads(text("explain", native, "--json"))["size_bytes"] == ALGORITHM.size_bytes


def test_options_of_xml_are_refused_for_native_files(native: Path) -> None:
    result = taccl("verify", native, "--root", "1")
    assert result.exit_code == 2 and "--root is for XML" in result.stderr
