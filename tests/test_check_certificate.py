"""Certificates in files: nothing above what is proved here passes, and what is only claimed is called so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from lxml import html
from native_algorithms import timed
from verify_programs import ring_allreduce, with_step

from taccl.cli import cli
from taccl.profiles.load import load_topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.bounds import lower_bound
from taccl.synth.check_certificate import ANY_ALGORITHM, CLAIMED, WHOLE_CHUNKS, judge_certificate
from taccl.synth.collective import build
from taccl.synth.cost import us
from taccl.synth.msccl_xml import write_xml
from taccl.synth.native import write_native
from taccl.synth.request import Request
from taccl.synth.synthesise import synthesise
from taccl.synth.verify import verify

RING = load_topology("ring:4")
MADE = timed(RING, build("allreduce", 4), "ring")
TIME_US = us(MADE.time_fs)
BOUND_US = lower_bound(RING, MADE.collective, MADE.size_bytes).time_us
SAID = "somebody said so"


def with_certificate(
    lower_us: float, solver_us: float, status: str = "feasible", proof: str = ""
) -> Algorithm:
    return replace(MADE, certificate=Certificate(lower_us, SAID, solver_us, status, proof))


def taccl(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def saved(algorithm: Algorithm, folder: Path) -> Path:
    path = folder / "x.json"
    path.write_text(write_native(algorithm, RING), "utf-8")
    return path


UNTRUE = {
    "a bound above the proof": (with_certificate(1.01 * BOUND_US, TIME_US), "only"),
    "a bound above the time": (with_certificate(1e9, TIME_US), "no algorithm takes less than 1e+09 us"),
    "optimal by its own word": (with_certificate(TIME_US, TIME_US, "optimal", "magic"), "only"),
    "optimal with a gap": (with_certificate(BOUND_US, 0.9 * TIME_US, "optimal", SAID), "says optimal"),
    "optimal among all": (with_certificate(BOUND_US, TIME_US, "optimal", ANY_ALGORITHM), "among all"),
    "a solver that knows better": (with_certificate(BOUND_US, 1.1 * TIME_US), "solver bound"),
    "a proof of nothing": (with_certificate(BOUND_US, BOUND_US, "feasible", SAID), "names a proof"),
}


@pytest.mark.parametrize("case", UNTRUE)
def test_what_is_untrue_is_refused_by_every_command(case: str, tmp_path: Path) -> None:
    algorithm, reason = UNTRUE[case]
    assert BOUND_US < 0.85 * TIME_US
    assert any(reason in problem for problem in judge_certificate(algorithm, RING).problems)
    path = saved(algorithm, tmp_path)
    result = taccl("verify", path, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert {error["code"] for error in document["errors"]} == {"A101"} and document["certificate"] is None
    for command in (
        ["simulate"], ["explain"], ["explain", "--unproven"], ["convert", "--to", "html"],
        ["convert", "--to", "json"], ["convert", "--to", "msccl-xml"],
    ):  # fmt: skip
        result = taccl(command[0], path, *command[1:])
        assert (result.exit_code, result.stdout) == (1, "") and "error[A101]" in result.stderr


def test_a_lower_bound_than_the_proof_is_no_fault() -> None:
    judgement = judge_certificate(with_certificate(0.5 * BOUND_US, 0.0), RING)
    assert judgement.problems == () and judgement.checked
    assert 0.5 * BOUND_US <= judgement.certificate.lower_bound_us <= BOUND_US
    assert SAID not in judgement.certificate.bound_by


def test_a_bound_of_whole_chunks_is_proved_again() -> None:
    lone = replace(
        timed(load_topology("ring:2"), build("broadcast", 2), "direct"), certificate=MADE.certificate
    )
    claim = Certificate(us(lone.time_fs), SAID, us(lone.time_fs), "optimal", "magic")
    judgement = judge_certificate(replace(lone, certificate=claim), load_topology("ring:2"))
    assert judgement.certificate.proved_by == ANY_ALGORITHM and judgement.checked
    # Four ranks in a ring, chunks whole: three rounds one way, or two both ways.
    made = synthesise(Request(RING, "reducescatter", 64_000, engine="cp-sat", partition=1, time_limit_s=5))
    assert made.certificate.status == "optimal" and made.certificate.proved_by != ANY_ALGORITHM
    judgement = judge_certificate(made, RING)
    assert judgement.certificate.proved_by.startswith(WHOLE_CHUNKS) and judgement.checked


def test_what_cannot_be_proved_again_is_called_a_claim(tmp_path: Path) -> None:
    path = saved(with_certificate(BOUND_US, TIME_US, "optimal", "within a sketch"), tmp_path)
    words = f"within a sketch; {CLAIMED}"
    result = taccl("verify", path)
    assert result.exit_code == 0 and f"optimal ({words})" in result.stdout
    for command in ("verify", "explain"):
        found = json.loads(taccl(command, path, "--json").stdout)["certificate"]
        assert (found["checked"], found["status"], found["proved_by"]) == (False, "optimal", words)
        assert found["lower_bound_us"] == pytest.approx(BOUND_US)
    assert words in taccl("explain", path).stdout
    page = html.fromstring(taccl("convert", path, "--to", "html").stdout.encode()).text_content()
    assert f"optimal ({words})" in page and f"{CLAIMED}" in page.split("dark mark")[1]
    # The file itself stays what it is.
    assert taccl("convert", path, "--to", "json").stdout == path.read_text("utf-8")


@pytest.mark.parametrize(
    ("spec", "collective", "size", "partition"),
    [
        ("ndv2:1", "allgather", 10**6, None),
        ("dgx1v:1", "alltoall", 1000, None),
        ("torus2d:3x3", "broadcast", 10**6, 3),
        ("hypercube:3", "allreduce", 12345, None),
        ("ring:5", "gather", 77, 2),
        ("ring:3", "sendrecv", 1, None),
    ],
)
def test_own_certificates_stand(spec: str, collective: str, size: int, partition: int | None) -> None:
    topology = load_topology(spec)
    made = synthesise(
        Request(topology, collective, size, engine="greedy", partition=partition, time_limit_s=10)
    )
    judgement = judge_certificate(made, topology)
    assert judgement.problems == ()
    assert judgement.certificate.lower_bound_us == pytest.approx(made.certificate.lower_bound_us, rel=1e-5)
    assert judgement.certificate.status == made.certificate.status


def test_wrong_programs_are_refused_as_verify_refuses_them(tmp_path: Path) -> None:
    right = ring_allreduce(3)
    wrong = with_step(right, 1, 0, 2, replace(right.gpus[1].threadblocks[0].steps[2], kind="rcs"))
    findings = [finding for finding in verify(wrong) if finding.severity == "error"]
    path = tmp_path / "wrong.xml"
    path.write_text(write_xml(wrong), "utf-8")
    where = ("--topology", "ring:3", "--size", "1MB")
    commands = (
        ["simulate", path, *where], ["explain", path, *where], ["convert", path, "--to", "perfetto", *where],
        ["convert", path, "--to", "msccl-xml"], ["convert", path, "--to", "mscclpp-json"],
    )  # fmt: skip
    assert taccl("verify", path).exit_code == 1
    for command in commands:
        refused = taccl(*command)
        assert (refused.exit_code, refused.stdout) == (1, ""), command
        assert "the program is wrong" in refused.stderr and "--unproven" in refused.stderr
        assert findings[0].message in refused.stderr
    for command in commands[:-1]:
        taken = taccl(*command, "--unproven")
        assert taken.exit_code == 0 and taken.stdout and "warning" in taken.stderr, command
