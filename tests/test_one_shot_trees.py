"""Allreduce along a tree to every rank: sums that are passed on and not kept, from schedule to data."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_lower_random import topologies
from test_runtime_local import assert_right, checked

from taccl.errors import InvalidInput
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Topology
from taccl.runtime.dtypes import DTYPES
from taccl.synth.algorithm import Algorithm, Certificate, Message
from taccl.synth.at_scale import _trees, synthesise_at_scale
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import build
from taccl.synth.cost import costs, us
from taccl.synth.engines import BASELINES
from taccl.synth.engines.one_shot_trees import reshaped
from taccl.synth.explain import explain
from taccl.synth.export.timeline import of_algorithm
from taccl.synth.lower import lower_exact
from taccl.synth.native import read_native, write_native
from taccl.synth.request import Request
from taccl.synth.schedule import completion_fs, time_by_priority
from taccl.synth.synthesise import synthesise
from taccl.synth.verify import is_correct, verify

NAME = "one-shot-trees"
ROOT = Path(__file__).parents[1]


def made(
    topology: Topology, size_bytes: int, partition: int = 1, groups: tuple[tuple[int, ...], ...] | None = None
) -> Algorithm:
    collective = build("allreduce", topology.ranks, partition, groups=groups)
    priced = costs(topology, collective.chunk_bytes(size_bytes))
    messages = time_by_priority(topology, collective, priced, BASELINES[NAME](topology, collective))
    unknown = Certificate(0.0, "", 0.0, "feasible")
    time_fs = completion_fs(priced, messages)
    return Algorithm("made", collective, topology.name, size_bytes, messages, time_fs, unknown, NAME)


# (topology, links on the longest of all shortest paths); a hop of 1 KB takes 0.52 us
DIAMETERS = [
    ("ring:5", 2), ("ring:7", 3), ("ring:8", 4), ("torus2d:4x4", 4), ("torus2d:5x5", 4), ("torus2d:3x5", 3),
    ("torus3d:3x3x3", 3), ("mesh2d:3x3", 4), ("mesh2d:4x4", 6), ("hypercube:3", 3),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "diameter"), DIAMETERS)
def test_regular_machines_take_a_hop_for_each_link_of_the_diameter(spec: str, diameter: int) -> None:
    topology = load_topology(spec)
    algorithm = made(topology, 1000)
    assert us(algorithm.time_fs) == pytest.approx(0.52 * diameter, abs=1e-6)
    assert check_algorithm(algorithm, topology) == []
    lowered = lower_exact(algorithm, topology)
    assert lowered.slower_fs == 0 and lowered.simulated_time_fs == algorithm.time_fs
    assert is_correct(verify(lowered.program, strict=True))


@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(topologies(), st.integers(1, 2), st.booleans(), st.sampled_from(["sum", "max"]))
def test_random_machines(topology: Topology, partition: int, inplace: bool, op: str) -> None:
    algorithm = made(topology, 10_000, partition)
    assert check_algorithm(algorithm, topology) == []
    assert read_native(write_native(algorithm, topology)) == (algorithm, topology)
    lowered = lower_exact(algorithm, topology)
    findings = verify(lowered.program, collective=algorithm.collective, strict=True)
    assert is_correct(findings), [f.message for f in findings if f.severity == "error"]
    assert_right(checked(lowered.program, 300, DTYPES["float32"], op, inplace))


def test_groups_and_ranks_that_only_pass_on() -> None:
    """Ranks 0, 2, 4 of a ring of 6 meet over 1, 3, 5, which contribute nothing."""
    topology = load_topology("ring:6")
    algorithm = made(topology, 900, groups=((0, 2, 4),))
    assert check_algorithm(algorithm, topology) == []
    assert us(algorithm.time_fs) == pytest.approx(2 * (0.5 + 900 * 20e-6), abs=1e-6)
    findings = verify(lower_exact(algorithm, topology).program, collective=algorithm.collective, strict=True)
    assert is_correct(findings)


@pytest.fixture(scope="module")
def ring() -> tuple[Algorithm, Topology]:
    topology = load_topology("ring:8")
    return made(topology, 1000), topology


def test_a_ring_is_chosen_by_itself_and_certified(ring: tuple[Algorithm, Topology]) -> None:
    found = synthesise(Request(ring[1], "allreduce", 1000, time_limit_s=1.0))
    assert found.engine == NAME
    assert us(found.time_fs) == 2.08 and found.certificate.gap(2.08) < 0.04
    # Where bytes count, sums that are sent again and again lose.
    long = synthesise(Request(ring[1], "allreduce", 10**6, time_limit_s=1.0))
    assert long.engine != NAME


def test_long_arrays_and_crowded_machines_are_left_to_others() -> None:
    long = Request(load_topology("torus2d:6x6"), "allreduce", 10**8)
    assert _trees(long, None, 10**18) is None
    crowded = Request(load_topology("dgx-a100:8"), "allreduce", 1000)
    assert _trees(crowded, None, 4 * 10**9) is None


def test_beyond_32_ranks_trees_are_chosen_where_they_are_quicker() -> None:
    found = synthesise_at_scale(Request(load_topology("ring:33"), "allreduce", 1000, time_limit_s=1.0))
    assert isinstance(found, Algorithm) and found.engine == NAME
    assert us(found.time_fs) == pytest.approx(16 * 0.52, abs=1e-6)
    assert found.certificate.gap(us(found.time_fs)) < 0.04


def test_other_ways_are_taken_where_links_are_crowded() -> None:
    topology = load_topology(str(ROOT / "docs" / "topologies" / "irregular" / "random-16.yaml"))
    collective = build("allreduce", 16)
    priced = costs(topology, Fraction(1000))
    first = made(topology, 1000)
    listed = reshaped(topology, collective, priced, 5_000, 0, lambda: False)
    assert listed == reshaped(topology, collective, priced, 5_000, 0, lambda: False)
    exact = costs(topology, collective.chunk_bytes(1000))
    messages = time_by_priority(topology, collective, exact, listed)
    better = replace(first, messages=messages, time_fs=completion_fs(exact, messages))
    assert check_algorithm(better, topology) == []
    assert better.time_fs < 0.95 * first.time_fs


def test_what_enters_another_sum_is_missing_or_twice_in_the_result(ring: tuple[Algorithm, Topology]) -> None:
    algorithm, topology = ring
    messages = algorithm.messages
    last = next(i for i, m in enumerate(messages) if m.into == (0,) and m.end_fs == algorithm.time_fs)
    beside = _changed(algorithm, last, into=(9,))
    assert any("are missing" in problem for problem in check_algorithm(beside, topology))
    # A rank's result, had it been passed on: what came from there would come back.
    relayed = next(i for i, m in enumerate(messages) if m.start_fs and m.into == (0,))
    both = _changed(algorithm, relayed, into=(0, messages[relayed].sum))
    other = next(i for i, m in enumerate(messages) if m.into != (0,) and 0 not in m.into)
    crossed = _changed(both, other, into=(0, *messages[other].into))
    assert any("twice" in problem for problem in check_algorithm(crossed, topology))
    for into in ((), (1, 0), (1, 1), (-1,)):
        assert any("sums must be" in p for p in check_algorithm(_changed(algorithm, 0, into=into), topology))


def _changed(algorithm: Algorithm, number: int, **what: object) -> Algorithm:
    messages: list[Message] = list(algorithm.messages)
    messages[number] = replace(messages[number], **what)  # type: ignore[arg-type]
    return replace(algorithm, messages=tuple(messages))


def test_a_message_into_two_values_is_reduced_twice() -> None:
    """Rank 1 of a path of three adds what comes from either side to what it keeps, and passes it on alone."""
    line = load_topology("mesh2d:1x3")
    topology = replace(line, reduce_alpha_us=Fraction(1))
    algorithm = made(topology, 1000)
    assert check_algorithm(algorithm, topology) == []
    reductions = [s for s in of_algorithm(algorithm, topology) if s.kind == "reduce" and s.src == 1]
    first, second = sorted(s.end_fs - s.start_fs for s in reductions)
    assert second == 2 * first
    assert check_algorithm(replace(algorithm, time_fs=algorithm.time_fs - 1), topology)
    lowered = lower_exact(algorithm, topology)
    assert is_correct(verify(lowered.program, strict=True))
    kinds = [step.kind for tb in lowered.program.gpus[1].threadblocks for step in tb.steps]
    assert kinds.count("re") == 2 and kinds.count("rrc") == 1


def test_the_file_says_sums_only_where_there_are_several(ring: tuple[Algorithm, Topology]) -> None:
    text = write_native(*ring)
    assert '"op","chunks","sum","into"]' in text.replace(", ", ",")
    assert write_native(*read_native(text)) == text
    for old, new, problem in [
        (",[0]]\n]}", ",[]]\n]}", "expected 1 to"),
        (",[0]]\n]}", ",[-1]]\n]}", "into"),
        (",[0]]\n]}", "]\n]}", "messages"),
        ('"sum"', '"sums"', "columns"),
    ]:
        assert old in text
        with pytest.raises(InvalidInput, match=problem):
            read_native(text.replace(old, new))


def test_a_short_file_cannot_ask_for_millions_of_sums(ring: tuple[Algorithm, Topology]) -> None:
    text = write_native(*ring)
    with pytest.raises(InvalidInput, match="further sums more than 524288 times"):
        read_native(re.sub(r",\[\d+\]\]", ",[[0,65535]]]", text))


def test_explain_follows_the_sum_that_was_carried(ring: tuple[Algorithm, Topology]) -> None:
    algorithm, topology = ring
    told = explain(algorithm, topology, 1000)
    assert [leg.reason for leg in told.path] == ["start", "data", "data", "data"]
    assert explain(algorithm, topology, 2000).time_us == pytest.approx(4 * 0.54)


def test_parts_of_chunks_keep_their_sums(ring: tuple[Algorithm, Topology]) -> None:
    algorithm, topology = ring
    lowered = lower_exact(algorithm, topology, instances=2)
    assert is_correct(verify(lowered.program, strict=True))
    assert np.lcm(8, lowered.program.chunks_per_loop) == 16
