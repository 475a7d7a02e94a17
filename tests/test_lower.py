"""Lowering: programs verify strictly, move what the schedule moves, and take exactly its time."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from taccl.errors import Infeasible
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.candidates import best_timing
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import Collective, build
from taccl.synth.cost import costs
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.lower import LoweringResult, lower_exact
from taccl.synth.msccl_xml import read_xml, write_xml
from taccl.synth.program import SENDS
from taccl.synth.schedule import Transfer
from taccl.synth.verify import is_correct, verify

COLLECTIVES = (
    "allgather", "alltoall", "reducescatter", "allreduce", "broadcast", "reduce", "gather", "scatter", "sendrecv",
)  # fmt: skip
SIZE = 10**5


def algorithm_of(topology: Topology, collective: Collective, transfers: list[Transfer]) -> Algorithm | None:
    priced = costs(topology, collective.chunk_bytes(SIZE))
    found = best_timing("test", topology, collective, priced, transfers)
    if found is None:
        return None
    unknown = Certificate(0.0, "", 0.0, "feasible")
    return Algorithm("test", collective, topology.name, SIZE, found.messages, found.time_fs, unknown, "test")


def switched(ranks: int) -> Topology:
    """Every pair joined, one port out and one in a rank, occupancy all of alpha."""
    ports = [Port(f"gpu{r}.{way}", Fraction(8), "switch") for r in range(ranks) for way in ("out", "in")]
    links = [
        Link(a, b, Fraction(3, 10), Fraction(8), Fraction(3, 10), (2 * a, 2 * b + 1))
        for a in range(ranks)
        for b in range(ranks)
        if a != b
    ]
    return Topology("switched", (tuple(range(ranks)),), tuple(links), tuple(ports))


def lowered(algorithm: Algorithm, topology: Topology, **options: int) -> LoweringResult:
    result = lower_exact(algorithm, topology, **options)  # type: ignore[arg-type]
    findings = verify(result.program, collective=result.schedule.collective, strict=True)
    assert is_correct(findings), [f.message for f in findings if f.severity == "error"]
    assert check_algorithm(result.schedule, topology) == []
    assert result.schedule.time_fs == result.simulated_time_fs
    return result


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("spec", ["ring:5", "ndv2:1", "mesh2d:2x3", "torus2d:3x3", "dgx-a100:1"])
def test_every_baseline_lowers_to_a_proven_program(spec: str, name: str) -> None:
    topology = load_topology(spec)
    for partition in (1, 3):
        collective = build(name, topology.ranks, partition)
        for engine in BASELINES.values():
            try:
                algorithm = algorithm_of(topology, collective, engine(topology, collective))
            except Inapplicable:
                continue
            if algorithm is not None:
                lowered(algorithm, topology)


@pytest.mark.parametrize("spec", ["ndv2:1", "mesh2d:2x3", "torus2d:3x3"])
def test_programs_of_machines_without_shared_ports_take_exactly_the_schedules_time(spec: str) -> None:
    topology = load_topology(spec)
    for name in ("allgather", "allreduce", "alltoall"):
        collective = build(name, topology.ranks, 2)
        algorithm = algorithm_of(topology, collective, BASELINES["ring"](topology, collective))
        assert algorithm is not None
        result = lowered(algorithm, topology)
        assert (result.slower_fs, result.simulated_time_fs) == (0, algorithm.time_fs)


def line(ranks: int) -> Topology:
    pairs = [(a, a + 1) for a in range(ranks - 1)] + [(a + 1, a) for a in range(ranks - 1)]
    links = tuple(Link(a, b, Fraction(1), Fraction(10), Fraction(1)) for a, b in pairs)
    return Topology("line", (tuple(range(ranks)),), links)


def test_a_batch_that_lies_apart_is_gathered_sent_once_and_scattered() -> None:
    topology = line(3)
    to = {(link.src, link.dst): e for e, link in enumerate(topology.links)}
    collective = build("alltoall", 3)  # chunk s*3+d
    transfers = [
        Transfer(to[0, 1], (1, 2)),
        Transfer(to[2, 1], (6, 7)),
        Transfer(to[1, 2], (2, 5)),  # one relayed, one of rank 1's own
        Transfer(to[1, 0], (3, 6)),
    ]
    algorithm = algorithm_of(topology, collective, transfers)
    assert algorithm is not None
    program = lowered(algorithm, topology).program
    sends = [s for gpu in program.gpus for tb in gpu.threadblocks for s in tb.steps if s.kind in SENDS]
    assert [s.count for s in sends] == [2, 2, 2, 2]


def test_long_connections_go_on_in_further_channels() -> None:
    topology = line(2)
    collective = build("broadcast", 2, 150)
    algorithm = algorithm_of(topology, collective, [Transfer(0, (c,)) for c in range(150)])
    assert algorithm is not None
    unbatched = Algorithm(
        "long", collective, "line", SIZE,
        *_each_alone(topology, collective), Certificate(0.0, "", 0.0, "feasible"), "test",
    )  # fmt: skip
    program = lowered(unbatched, topology).program
    assert program.channels >= 3
    assert max(len(tb.steps) for gpu in program.gpus for tb in gpu.threadblocks) <= 64


def _each_alone(topology: Topology, collective: Collective) -> tuple[tuple[object, ...], int]:
    from taccl.synth.schedule import completion_fs, time_in_order

    priced = costs(topology, collective.chunk_bytes(SIZE))
    messages = time_in_order(topology, collective, priced, [Transfer(0, (c,)) for c in range(150)])
    return messages, completion_fs(priced, messages)


@pytest.mark.parametrize("alphas", [4, 9, 30])
def test_a_fifo_with_few_slots_does_not_hold_up_a_link_that_takes_many_messages(alphas: int) -> None:
    beta = Fraction(40)
    chunk_us = beta * SIZE / 40 / 10**6
    link = Link(0, 1, chunk_us * alphas, beta, Fraction(0), ())
    topology = Topology("wire", ((0, 1),), (link,), ())
    collective = build("broadcast", 2, partition=40)
    algorithm = algorithm_of(topology, collective, [Transfer(0, (chunk,)) for chunk in range(40)])
    assert algorithm is not None
    result = lowered(algorithm, topology)
    assert result.slower_fs == 0
    # No connection of MSCCL's protocol Simple has more than two messages under way.
    assert result.program.channels >= (alphas + 1) // 2


def test_batches_beyond_71_chunks_are_split() -> None:
    topology = line(2)
    collective = build("broadcast", 2, 200)
    algorithm = algorithm_of(topology, collective, [Transfer(0, tuple(range(200)))])
    assert algorithm is not None
    program = lowered(algorithm, topology).program
    counts = [s.count for tb in program.gpus[0].threadblocks for s in tb.steps if s.kind == "s"]
    assert counts == [71, 71, 58]


@pytest.mark.parametrize("partition", [9, 10, 13])
def test_what_an_allreduce_always_moves_together_becomes_one_chunk(partition: int) -> None:
    """A step carries 71 chunks; two messages instead of one would pay alpha twice."""
    topology = load_topology("dgx-a100:1")
    collective = build("allreduce", 8, partition)
    algorithm = algorithm_of(topology, collective, BASELINES["one-shot-doubling"](topology, collective))
    assert algorithm is not None
    result = lowered(algorithm, topology)
    assert result.program.chunks_per_loop == collective.size_chunks // 2
    assert result.simulated_time_fs == pytest.approx(algorithm.time_fs, rel=1e-6)
    counts = {s.count for gpu in result.program.gpus for tb in gpu.threadblocks for s in tb.steps}
    assert counts == {collective.size_chunks // 2}


def test_instances_cut_chunks_over_more_channels() -> None:
    topology = load_topology("ring:4")
    collective = build("allgather", 4)
    algorithm = algorithm_of(topology, collective, BASELINES["ring"](topology, collective))
    assert algorithm is not None
    plain, four = lowered(algorithm, topology), lowered(algorithm, topology, instances=4)
    assert four.program.channels == 4 * plain.program.channels
    assert four.program.chunks_per_loop == 4 * plain.program.chunks_per_loop


def test_a_program_that_does_not_fit_is_refused_with_advice() -> None:
    topology = line(2)
    collective = build("broadcast", 2, 3000)
    messages, time_fs = (), 0
    from taccl.synth.schedule import completion_fs, time_in_order

    priced = costs(topology, collective.chunk_bytes(SIZE))
    messages = time_in_order(topology, collective, priced, [Transfer(0, (c,)) for c in range(3000)])
    time_fs = completion_fs(priced, messages)
    too_long = Algorithm(
        "too-long", collective, "line", SIZE, messages, time_fs, Certificate(0.0, "", 0.0, "feasible"), "test"
    )
    with pytest.raises(Infeasible, match="--partition"):
        lower_exact(too_long, topology)


@pytest.mark.parametrize(("name", "spec"), [("allgather", "ring:3"), ("allreduce", "ring:3")])
def test_golden_xml(name: str, spec: str) -> None:
    topology = load_topology(spec)
    collective = build(name, topology.ranks)
    algorithm = algorithm_of(topology, collective, BASELINES["ring"](topology, collective))
    assert algorithm is not None
    text = write_xml(lowered(algorithm, topology).program)
    golden = Path(__file__).parent / "golden" / f"lower-{name}-ring3.xml"
    assert text == golden.read_text()
    assert read_xml(text).ranks == 3


def test_messages_with_nothing_to_wait_for_do_not_jump_the_queue() -> None:
    """A pipeline's first rounds leave ranks idle; ready early, they would take others' turns at a port ever after."""
    topology = switched(18)
    collective = build("broadcast", 18, 6)
    algorithm = algorithm_of(topology, collective, BASELINES["circulant"](topology, collective))
    assert algorithm is not None
    assert lowered(algorithm, topology).slower_fs == 0
