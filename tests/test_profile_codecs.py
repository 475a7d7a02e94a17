"""`taccl profile --codecs`: fits of known truth, costs put into profiles, and real ranks that code and send."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_jobs import launch, needs_mpi

from taccl.commands.profile import command
from taccl.commands.profile_codecs import request, warnings
from taccl.errors import InvalidInput, UsageError
from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.codec_merge import merged, with_codecs
from taccl.profiles.measure.codec_fit import CodecTimes, fit_codec, fit_wire
from taccl.profiles.profile_file import read_topology
from taccl.runtime.codec_trial import _means_us
from taccl.runtime.codecs import CODECS, most_bytes
from taccl.runtime.dtypes import DTYPES

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)


def times(
    truth: list[list[tuple[float, float]]], nodes: tuple[int, ...], noise: float = 0.0, wild: int = 0
) -> CodecTimes:
    """truth: of each rank (alpha, beta) of each step. wild: runs of each rank and size that take ten times as long."""
    random = np.random.default_rng(1)
    found = np.zeros((len(truth), len(SIZES), 7, 3))
    for rank, steps in enumerate(truth):
        for number, (alpha, beta) in enumerate(steps):
            ideal = np.array([alpha + beta * size / 1e6 for size in SIZES])[:, None]
            found[rank, :, :, number] = ideal * (1 + noise * random.uniform(-1, 1, (len(SIZES), 7)))
    found[:, :, :wild] *= 10
    wire = np.array([[100 + size / 4 for size in SIZES]] * len(truth))
    return CodecTimes("q8", "float32", False, "made up", nodes, SIZES, found, wire)


STEPS = [(30.0, 250.0), (20.0, 100.0), (21.0, 105.0)]


def test_what_was_put_in_is_found() -> None:
    cost = fit_codec(times([STEPS], (0,))).cost
    assert cost == CodecCost(
        "q8",
        "float32",
        False,
        Fraction(4),
        100,
        Fraction(30),
        Fraction(250),
        Fraction(21),
        Fraction(105),
        "made up",
    )


@given(st.floats(1, 500), st.floats(1, 5000))
@settings(deadline=None, max_examples=40)
def test_disturbed_runs_do_not_count(alpha: float, beta: float) -> None:
    fit = fit_codec(times([[(alpha, beta)] * 3], (0,), noise=0.02, wild=3)).encode
    assert fit.alpha_us == pytest.approx(alpha, abs=0.03 * (alpha + beta * 0.3))
    assert fit.beta_us_per_mb == pytest.approx(beta, abs=0.03 * (beta + alpha))
    assert fit.residual < 0.03 and fit.samples == 16


def test_a_slow_node_counts_and_an_unlucky_rank_does_not() -> None:
    slow = [(2 * alpha, 2 * beta) for alpha, beta in STEPS]
    unlucky = [(9 * alpha, 9 * beta) for alpha, beta in STEPS]
    nodes = (0, 0, 0, 3, 3, 3)
    fit = fit_codec(times([STEPS, STEPS, unlucky, slow, slow, slow], nodes))
    assert nodes[fit.encode.rank] == nodes[fit.decode.rank] == 3
    assert fit.cost.encode_beta_us_per_mb == 500 and fit.cost.decode_beta_us_per_mb == 210


def test_times_that_no_line_explains_are_warned_of() -> None:
    calm, wild = fit_codec(times([STEPS], (0,), noise=0.05)), fit_codec(times([STEPS], (0,)))
    assert warnings([calm], 2, 2) == []
    odd = times([STEPS], (0,))
    odd.times_us[:] *= np.array([1, 3, 1, 3])[None, :, None, None]
    (line,) = warnings([calm, fit_codec(odd), wild], 2, 2)
    assert "q8 on float32" in line and "measure again" in line
    (line,) = warnings([fit_codec(odd)], 4, 2)
    assert "4 ranks wait for each other on 2 cores" in line and "measure again" not in line


def test_nothing_is_below_zero() -> None:
    falling = times([STEPS], (0,))
    falling.times_us[:] = np.array([4.0, 3.0, 2.0, 1.0])[None, :, None, None]
    cost = fit_codec(falling).cost
    assert cost.encode_beta_us_per_mb == 0 < cost.encode_alpha_us
    steep = times([[(-5.0, 250.0)] * 3], (0,))
    cost = fit_codec(steep).cost
    assert cost.encode_alpha_us == 0 and cost.encode_beta_us_per_mb == pytest.approx(250, rel=0.2)


@pytest.mark.parametrize(("name", "ratio"), [("bf16", 2), ("q8", 256 * 4 / 260), ("fp8", 128 * 4 / 132)])
def test_ratios_of_codecs_with_fixed_frames_are_those_of_their_format(name: str, ratio: float) -> None:
    wire = np.array([most_bytes(CODECS[name], DTYPES["float32"], size // 4) for size in SIZES], float)
    frame, per_byte = fit_wire(SIZES, wire)
    assert 1 / per_byte == pytest.approx(ratio, rel=1e-3) and 64 <= frame <= 128
    for size, exact in zip(SIZES, wire, strict=True):
        assert frame + size * per_byte == pytest.approx(exact, rel=2e-4)


def test_a_frame_is_not_below_nothing() -> None:
    frame, per_byte = fit_wire(SIZES, np.array([size / 2 - 300 for size in SIZES]))
    assert frame == 0 and 0 < per_byte < 0.5


def test_pieces_take_from_when_they_could_begin() -> None:
    notes = [(0, 1.0, 1.5), (1, 1.0, 1.75), (2, 3.0, 3.25), (3, 3.0, 4.25)]
    kinds = ("encode", "send", "encode", "decode", "accumulate")
    operations = [SimpleNamespace(kind=kind) for kind in kinds]
    assert _means_us(operations, notes) == [0.375e6, 0.25e6, 1e6]


# --- into profiles

COST = CodecCost("q8", "float32", False, Fraction(4), 100, *[Fraction(1)] * 4, source="now")
LINES = """\
# the cluster in the cellar
schema: taccl/profile/v1
name: cellar
description: two of them
codecs:
  # measured long ago
  - {codec: q8, dtype: float32, lossless: false, ratio: 3, frame: 1, encode: {alpha: 9, beta: 9}, decode: {alpha: 9, beta: 9}}
  - codec: bf16
    dtype: float32
    lossless: false
    ratio: 2
    frame: 96
    encode: {alpha: 9, beta: 9}
    decode: {alpha: 9, beta: 9}

# two nodes
nodes: 2
node: {ranks: 1, nics: [{name: ib, ranks: all}]}
network: {class: ib}   # the blue cable
classes: {ib: {alpha: 2us, beta: 100Gbit/s}}
"""  # noqa: E501


def test_what_else_a_file_holds_stays_as_it_is() -> None:
    made = with_codecs(LINES, "x.yaml", [COST])
    before, after = LINES.split("codecs:")[0], LINES[LINES.index("\n# two nodes") :]
    assert made.startswith(before + "codecs:") and made.endswith(after)
    costs = read_topology(made, "x.yaml").codecs
    assert [(cost.codec, cost.ratio, cost.source) for cost in costs] == [("bf16", 2, ""), ("q8", 4, "now")]
    assert with_codecs(made, "x.yaml", [COST]) == made


@pytest.mark.parametrize("end", ["", "\n", "\n\n# the end", "\n...\n"])
def test_costs_go_to_the_end_of_a_file_without_any(end: str) -> None:
    plain = "schema: taccl/profile/v1\nname: x\nnodes: [0-1]" + end
    made = with_codecs(plain, "x.yaml", [COST])
    assert read_topology(made, "x.yaml").codecs == (COST,)


def test_a_file_in_braces_is_written_anew() -> None:
    made = with_codecs(
        '{schema: taccl/profile/v1, name: x, description: "a: b", nodes: [0-1]}', "x.yaml", [COST]
    )
    found = read_topology(made, "x.yaml")
    assert found.codecs == (COST,) and found.name == "x" and 'description: "a: b"' in made


def test_what_is_no_profile_gets_no_costs() -> None:
    with pytest.raises(InvalidInput):
        with_codecs("name: x\n", "x.yaml", [COST])


def test_new_costs_replace_those_of_the_same_codec_and_type() -> None:
    old = CodecCost("q8", "float32", False, Fraction(3), 1, *[Fraction(1)] * 4)
    other = CodecCost("bf16", "float32", False, Fraction(2), 1, *[Fraction(1)] * 4)
    assert merged([old, other], [COST]) == (other, COST)


# --- what is asked


def test_codecs_that_do_not_take_a_type_are_left_out_with_a_word() -> None:
    asked = request("q8,xw", "float32,bfloat16", None)
    assert [(codec.name, dtype.name) for codec, dtype in asked.pairs] == [
        ("q8", "float32"), ("xw", "float32"), ("xw", "bfloat16"),
    ]  # fmt: skip
    assert asked.left_out == ("q8 takes float32; not bfloat16: left out",)
    assert asked.origin == "normal values" and asked.values["float32"].std() > 0


@pytest.mark.parametrize(
    ("names", "dtypes", "words"),
    [
        ("q9", None, "'q9': unknown; known: xw"),
        ("raw", None, "'raw': unknown"),
        ("q8", "bfloat16", "nothing to measure: q8 takes float32"),
        ("q8", "floaty", "unknown data type"),
        ("zstd", "int32", "int32 needs --data"),
    ],
)
def test_what_cannot_be_measured_is_refused(names: str, dtypes: str | None, words: str) -> None:
    if names == "zstd":
        pytest.importorskip("zstandard")
    with pytest.raises(UsageError, match=words):
        request(names, dtypes, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "x.npy"], "for --codecs"),
        (["-t", "ring:2"], "for --codecs"),
        (["--codecs", "q8", "-t", "ring:2", "--sizes", "64K,1M"], "leave out --sizes"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], words: str) -> None:
    result = CliRunner().invoke(command, ["-o", "x.yaml", *options])
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())


class TestUnderMpiexec:
    pytestmark = needs_mpi

    def test_codecs_are_put_into_a_profile(self, tmp_path: Path) -> None:
        profile, values = tmp_path / "p.yaml", tmp_path / "v.npy"
        profile.write_text("# mine\nschema: taccl/profile/v1\nname: pair\nnodes: [0-1]\n")
        np.save(values, np.random.default_rng(0).standard_normal(300_000, np.float32))
        ended = launch(
            2, "-m", "taccl", "profile", "-t", str(profile), "-o", str(profile), "--codecs", "q8,xw", "--quick",
            "--data", str(values), "--dtype", "float32,bfloat16", "--json",
        )  # fmt: skip
        assert ended.code == 0, ended.err
        assert "q8 takes float32; not bfloat16: left out" in ended.err
        text = profile.read_text()
        assert text.startswith("# mine\n")
        costs = {(cost.codec, cost.dtype): cost for cost in read_topology(text, "p.yaml").codecs}
        assert sorted(costs) == [("q8", "float32"), ("xw", "bfloat16"), ("xw", "float32")]
        q8 = costs["q8", "float32"]
        assert float(q8.ratio) == pytest.approx(3.938, abs=0.002) and not q8.lossless
        assert 1.3 < costs["xw", "bfloat16"].ratio < 1.5 and costs["xw", "bfloat16"].lossless
        assert 1.1 < costs["xw", "float32"].ratio < 1.3
        for cost in costs.values():
            assert cost.encode_beta_us_per_mb + cost.encode_alpha_us > 0 and 0 <= cost.frame_bytes < 400
            assert cost.decode_beta_us_per_mb + cost.decode_alpha_us > 0
            assert cost.source == "v.npy, 2 ranks on 1 node"
        found = json.loads(ended.out)
        assert found["schema"] == "taccl/measure/v1" and found["ranks"] == 2
        said = [line for line in ended.err.splitlines() if line.startswith("taccl: warning: ")]
        assert [f"taccl: {line}" for line in found["warnings"]] == said
        assert [len(codec["ranks"]) for codec in found["codecs"]] == [2, 2, 2]
        assert all(
            step in codec["ranks"][1] for codec in found["codecs"] for step in ("encode", "accumulate")
        )

    def test_links_and_codecs_are_measured_together(self, tmp_path: Path) -> None:
        profile = tmp_path / "p.yaml"
        ended = launch(2, "-m", "taccl", "profile", "-o", str(profile), "--codecs", "bf16", "--quick")
        assert ended.code == 0, ended.err
        topology = read_topology(profile.read_text(), "p.yaml")
        assert len(topology.links) == 2 and [cost.codec for cost in topology.codecs] == ["bf16"]
        assert topology.codecs[0].ratio == pytest.approx(2, rel=1e-3)
        assert "normal values" in topology.codecs[0].source
        assert "bf16" in ended.out and "encode us" in ended.out and "intra" in ended.out

    @pytest.mark.parametrize(
        ("ranks", "options", "words"),
        [
            (1, ("--codecs", "q8"), "was started with one"),
            (2, ("--codecs", "q8", "-t", "ring:3"), "has 3 ranks and this job 2"),
        ],
    )
    def test_refusals_are_said_once(self, ranks: int, options: tuple[str, ...], words: str) -> None:
        ended = launch(ranks, "-m", "taccl", "profile", "-o", "none.yaml", *options)
        assert ended.code == 2
        assert ended.err.count("taccl:") == 1 and words in ended.err
