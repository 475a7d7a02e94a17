"""Codec costs in profiles: read with units, refused at their places, kept by everything that makes topologies."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from native_algorithms import timed, two_nodes

from taccl.errors import InvalidInput
from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.importers.machine import _without_ports
from taccl.profiles.link_table import link_table
from taccl.profiles.load import load_topology
from taccl.profiles.profile_file import read_topology, write_topology
from taccl.profiles.schema import CODEC_PATTERN, DTYPE_NAMES
from taccl.profiles.topology import Topology, reverse
from taccl.runtime.codecs import CODECS
from taccl.runtime.dtypes import DTYPES
from taccl.synth.collective import build
from taccl.synth.native import read_native, write_native
from taccl.synth.native_bundled import compact_topology_lines, fingerprint

PROFILE = """\
schema: taccl/profile/v1
name: pair
shape: {kind: ring, size: [2], class: wire}
classes:
  wire: {alpha: 1us, beta: 1GB/s}
codecs:
  - {codec: q8, dtype: float32, lossless: false, ratio: 3.94, frame: 112B, encode: {alpha: 30us, beta: 250us/MB}, decode: {alpha: 20us, beta: 10GB/s}}
  - codec: xw
    dtype: bfloat16
    lossless: true
    ratio: 10/7
    frame: 88
    encode: {alpha: 0, beta: 1000}
    decode: {alpha: 0.04ms, beta: 1ns/KB}
    source: "normal values: 4 ranks"
"""  # noqa: E501

Q8 = CodecCost(
    "q8", "float32", False, Fraction("3.94"), 112, Fraction(30), Fraction(250), Fraction(20), Fraction(100)
)
XW = CodecCost(
    "xw",
    "bfloat16",
    True,
    Fraction(10, 7),
    88,
    Fraction(0),
    Fraction(1000),
    Fraction(40),
    Fraction(1),
    "normal values: 4 ranks",
)


def test_a_profile_says_what_codecs_cost() -> None:
    assert read_topology(PROFILE, "p.yaml").codecs == (Q8, XW)


def test_writing_is_canonical_and_reads_back() -> None:
    text = write_topology(read_topology(PROFILE, "p.yaml"))
    start = text.index("codecs:")
    assert text[start : text.index("classes:")] == (
        "codecs:  # alpha in us, beta in us/MB of values, frame in bytes of a chunk\n"
        "  - {codec: q8, dtype: float32, lossless: false, ratio: 3.94, frame: 112, "
        "encode: {alpha: 30, beta: 250}, decode: {alpha: 20, beta: 100}}\n"
        "  - {codec: xw, dtype: bfloat16, lossless: true, ratio: 10/7, frame: 88, "
        'encode: {alpha: 0, beta: 1000}, decode: {alpha: 40, beta: 1}, source: "normal values: 4 ranks"}\n'
    )
    assert read_topology(text, "again.yaml").codecs == (Q8, XW)


@pytest.mark.parametrize(
    ("old", "new", "code", "place", "words"),
    [
        ("codec: q8", "codec: Q8!", "Y107", (7, 13), "the name of a codec"),
        ("dtype: float32", "dtype: flaot32", "Y106", (7, 24), "did you mean 'float32'"),
        ("lossless: false", "lossless: no", "Y105", (7, 43), "write false"),
        ("ratio: 3.94", "ratio: 0", "Y104", (7, 57), "above 0"),
        ("ratio: 3.94", "ratio: -2", "Y104", (7, 57), "above 0"),
        ("frame: 112B", "frame: -1", "Y104", (7, 70), "from 0"),
        ("frame: 112B", "frame: 1.5", "P108", (7, 70), "whole number"),
        ("alpha: 30us", "alpha: -30us", "Y104", (7, 92), "0 or from"),
        ("beta: 250us/MB", "beta: -1", "Y104", (7, 104), "0 or from"),
        ("beta: 250us/MB", "beta: 250us", "Y103", (7, 104), "a rate"),
        (", frame: 112B", "", "Y109", (7, 5), "'frame' is missing"),
        ("beta: 10GB/s", "bete: 10GB/s", "Y102", (7, 137), "did you mean 'beta'"),
        ("dtype: float32", "dtype: bfloat16", None, (0, 0), ""),
        ("codec: xw\n    dtype: bfloat16", "codec: q8\n    dtype: float32", "P108", (8, 12), "in line 7"),
        ("frame: 88", "frame: 88\n    level: 3", "Y102", (13, 5), "unknown key"),
    ],
)  # fmt: skip
def test_what_is_refused_and_where(
    old: str, new: str, code: str | None, place: tuple[int, int], words: str
) -> None:
    assert old in PROFILE
    text = PROFILE.replace(old, new, 1)
    if code is None:
        assert read_topology(text, "p.yaml").codecs == (replace(Q8, dtype="bfloat16"), XW)
        return
    with pytest.raises(InvalidInput) as caught:
        read_topology(text, "p.yaml")
    (found,) = caught.value.diagnostics
    assert (found.code, found.line, found.column) == (code, *place)
    assert words in f"{found.message} {found.help}"


def test_topologies_with_wrong_costs_are_not_written() -> None:
    topology = read_topology(PROFILE, "p.yaml")
    for wrong in (
        (Q8, Q8),
        (replace(Q8, ratio=Fraction(0)),),
        (replace(Q8, frame_bytes=-1),),
        (replace(Q8, decode_alpha_us=Fraction(-1)),),
    ):
        with pytest.raises(ValueError, match="codec"):
            write_topology(replace(topology, codecs=wrong))


def test_every_codec_and_type_of_the_runtime_can_be_written() -> None:
    assert set(DTYPE_NAMES) == set(DTYPES)
    topology = read_topology(PROFILE, "p.yaml")
    every = tuple(replace(Q8, codec=name, dtype=dtype) for name in CODECS for dtype in DTYPES)
    assert read_topology(write_topology(replace(topology, codecs=every)), CODEC_PATTERN).codecs == every


def test_topologies_that_are_made_from_others_keep_them() -> None:
    resized = read_topology(PROFILE, "p.yaml", size=[5], name="five")
    assert resized.ranks == 5 and resized.codecs == (Q8, XW)
    assert reverse(resized).codecs == (Q8, XW)
    assert _without_ports(replace(two_nodes(), nics=()), {0}).codecs == two_nodes().codecs != ()


def test_algorithm_files_keep_them() -> None:
    with_codecs = two_nodes()
    for topology in (with_codecs, replace(with_codecs, codecs=())):
        text = write_native(timed(topology, build("allgather", 4), "ring"), topology)
        assert ("codecs" in json.loads(text)["topology"]) == bool(topology.codecs)
        assert read_native(text)[1] == topology


def compact(topology: Topology) -> str:
    return "".join(compact_topology_lines(topology, link_table(topology)))


def test_a_bundled_name_with_codecs_is_not_the_bundled_topology() -> None:
    plain = load_topology("ring:4")
    richer = replace(plain, codecs=(Q8,))
    assert "library" in compact(plain)
    assert "library" not in compact(richer) and '"codecs"' in compact(richer)
    prints = {
        fingerprint(topology, link_table(topology))
        for topology in (plain, richer, replace(plain, codecs=(replace(Q8, ratio=Fraction(4)),)))
    }
    assert len(prints) == 3
