"""Coding plans: exactly the messages that an algorithm's plan names travel as frames."""

from dataclasses import replace

import numpy as np
import pytest
import runtime_programs as programs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from native_algorithms import algorithms, timed, two_nodes, with_plan

from taccl.errors import CheckFailed, UsageError
from taccl.profiles.load import load_topology
from taccl.runtime import check_values
from taccl.runtime.bind import buffer_elements
from taccl.runtime.codecs import CODECS
from taccl.runtime.coded import Coding, coded
from taccl.runtime.compile import compile_ranks
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.layout import layout
from taccl.runtime.local import run_in_process
from taccl.runtime.planned import planned
from taccl.runtime.rendezvous import finishes
from taccl.runtime.trace import trace
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.coding.flow import flow, permitted
from taccl.synth.collective import build, refined
from taccl.synth.cost import costs
from taccl.synth.lower import lower, lower_exact
from taccl.synth.schedule import Transfer, completion_fs, time_in_order

NODES = (0, 0, 1, 1)


def chosen(algorithm, choose):
    return [number for number, message in enumerate(algorithm.messages) if choose(message)]


def rewritten(program, collective, coding):
    order = trace(program)
    plans = coded(compile_ranks(program, order, {}, range(program.ranks)), coding, collective, {})
    assert finishes(plans)
    return plans


def coded_chunks(plans):
    """How many chunks each pair of ranks exchanges as frames, and how many as they are."""
    found = {}
    for one in plans:
        for op in one.operations:
            if op.kind == "send":
                pair = found.setdefault((one.rank, op.peer), [0, 0])
                pair[not op.frames] += len(op.frames) or op.src[2]
    return found


def planned_chunks(algorithm):
    found = {}
    for number, message in enumerate(algorithm.messages):
        pair = found.setdefault((message.src, message.dst), [0, 0])
        pair[number not in algorithm.coding.messages] += len(message.chunks)
    return found


def inputs_of(collective, elements, seed=0):
    shape = layout(collective, elements)
    random = np.random.default_rng(seed)
    lengths = [buffer_elements(collective, shape, rank)[0] for rank in range(collective.ranks)]
    return shape, [random.standard_normal(length, np.float32) * np.float32(0.05) for length in lengths]


def kinds(plans):
    return [[op.kind for op in one.operations] for one in plans]


def planned_run(algorithm, program, inputs, codec, **more):
    found = planned(algorithm, algorithm.collective)
    coding = Coding(None, CODECS[codec].lossless, hops=found.hops, **more)
    plans = rewritten(program, algorithm.collective, coding)
    op = "sum" if algorithm.collective.combining else None
    how = {"op": op, "collective": algorithm.collective}
    plain = run_in_process(program, inputs, **how)
    return plans, plain, run_in_process(program, inputs, **how, codec=CODECS[codec], coding=coding)


# --- what is coded


def test_only_the_last_hop_of_a_chain():
    topology = load_topology("ring:4")
    chain = timed(topology, build("broadcast", 4, 3), "chain")
    last = {m.dst for m in chain.messages} - {m.src for m in chain.messages}
    chain = with_plan(chain, chosen(chain, lambda m: m.dst in last))
    program = lower_exact(chain, topology).program
    _, inputs = inputs_of(chain.collective, 3000)
    plans, plain, outputs = planned_run(chain, program, inputs, "q8")
    (end,) = last
    assert coded_chunks(plans) == planned_chunks(chain)
    for rank, (output, expected) in enumerate(zip(outputs, plain, strict=True)):
        assert (output.tobytes() == expected.tobytes()) == (rank != end)
        assert plans[rank].codings == (rank == end)


def test_frames_are_passed_on_as_values_where_the_plan_does_not_name_the_message():
    found = rewritten(
        programs.chain_broadcast(3, 1),
        build("broadcast", 3),
        Coding(None, False, hops=frozenset({(0, 1, 0, "copy")})),
    )
    assert kinds(found)[1:] == [["recv", "decode", "send"], ["recv"]]
    assert [one.codings for one in found] == [0, 1, 1]


def test_only_the_border_of_one_node():
    topology = two_nodes()
    made = timed(topology, build("allgather", 4, 2), "direct")
    made = with_plan(made, chosen(made, lambda m: (NODES[m.src], NODES[m.dst]) == (0, 1)))
    program = lower_exact(made, topology).program
    _, inputs = inputs_of(made.collective, 8000)
    plans, plain, outputs = planned_run(made, program, inputs, "q8")
    assert coded_chunks(plans) == planned_chunks(made)
    assert [one.codings for one in plans] == [0, 0, 1, 1]
    assert [a.tobytes() == b.tobytes() for a, b in zip(outputs, plain, strict=True)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("codec", ["xw", "bf16", "q8", "fp8"])
@pytest.mark.parametrize("what", ["contributions", "result", "some of the result"])
def test_sums(codec, what):
    """op tells contributions from results, and all ranks end with the same bits even where some get them uncoded."""
    topology = two_nodes()
    made = timed(topology, build("allreduce", 4, 2), "direct")
    wanted = {
        "contributions": lambda m: m.op == "reduce",
        "result": lambda m: m.op == "copy",
        "some of the result": lambda m: m.op == "copy" and m.dst == 3,
    }[what]
    made = with_plan(made, chosen(made, wanted))
    assert {(m.src, m.dst, m.chunks) for m in made.messages if m.op == "copy"} & {
        (m.src, m.dst, m.chunks) for m in made.messages if m.op == "reduce"
    } == set()
    program = lower_exact(made, topology).program
    shape, inputs = inputs_of(made.collective, 4001)
    plans, plain, outputs = planned_run(made, program, inputs, codec)
    assert coded_chunks(plans) == planned_chunks(made)
    assert len({output.tobytes() for output in outputs}) == 1
    assert (outputs[0].tobytes() == plain[0].tobytes()) == CODECS[codec].lossless
    tolerance = check_values.Tolerance(CODECS[codec].promise, plans[0].codings, True, DTYPES["float32"])
    for chunk in made.collective.chunks:
        part = slice(shape.start(chunk.sources[0][1]), shape.start(chunk.sources[0][1] + 1))
        parts = [array[part] for array in inputs]
        assert check_values.compare(outputs[0][part], parts, DTYPES["float32"], "sum", tolerance)[0] == 0


def round_a_ring(ranks):
    """An allreduce in which each chunk takes most links twice: as a partial sum, and as the result."""
    topology = load_topology(f"ring:{ranks}")
    link = {(one.src, one.dst): number for number, one in enumerate(topology.links)}
    transfers = []
    for hop in range(2 * (ranks - 1)):
        for chunk in range(ranks):
            way = (chunk + hop) % ranks, (chunk + hop + 1) % ranks
            transfers.append(Transfer(link[way], (chunk,), "reduce" if hop < ranks - 1 else "copy"))
    collective = build("allreduce", ranks)
    priced = costs(topology, collective.chunk_bytes(10**6))
    messages = tuple(
        sorted(
            time_in_order(topology, collective, priced, transfers),
            key=lambda m: (m.start_fs, m.link, m.chunks),
        )
    )
    made = timed(topology, collective, "ring")
    made = replace(made, messages=messages, time_fs=completion_fs(priced, messages))
    assert not check_algorithm(made, topology)
    return made, topology


@pytest.mark.parametrize("codec", ["xw", "q8"])
@pytest.mark.parametrize("op", ["reduce", "copy"])
def test_op_tells_a_sum_from_its_result_on_the_same_way(codec, op):
    ring, topology = round_a_ring(4)
    ways = [
        {(m.src, m.dst, c) for m in ring.messages if m.op == o for c in m.chunks} for o in ("copy", "reduce")
    ]
    assert len(ways[0] & ways[1]) == 8
    ring = with_plan(
        ring, chosen(ring, lambda m: m.op == op and (op == "copy" or (m.chunks == (0,) and m.dst == 3)))
    )
    program = lower_exact(ring, topology).program
    _, inputs = inputs_of(ring.collective, 6000)
    plans, plain, outputs = planned_run(ring, program, inputs, codec)
    assert coded_chunks(plans) == planned_chunks(ring)
    assert len({output.tobytes() for output in outputs}) == 1
    assert (outputs[0].tobytes() == plain[0].tobytes()) == (codec == "xw")


def test_a_result_is_coded_by_who_made_it_or_by_nobody():
    ring, topology = round_a_ring(3)
    ring = with_plan(
        ring, chosen(ring, lambda m: m.op == "copy" and m.chunks == (0,) and m.src == 0)
    )  # made by rank 2
    program = lower_exact(ring, topology).program
    _, inputs = inputs_of(ring.collective, 6000)
    with pytest.raises(CheckFailed, match=r"rank 0, .* codes the result of chunk 0, which rank 2 has made"):
        planned_run(ring, program, inputs, "q8")
    plans, plain, outputs = planned_run(ring, program, inputs, "xw")
    assert coded_chunks(plans) == planned_chunks(ring)
    assert [a.tobytes() for a in outputs] == [a.tobytes() for a in plain]


def test_partial_sums_are_not_coded_again_unless_asked_to():
    ring, topology = round_a_ring(3)
    ring = with_plan(ring, range(len(ring.messages)))
    program = lower_exact(ring, topology).program
    _, inputs = inputs_of(ring.collective, 6000)
    with pytest.raises(UsageError, match=r"partial sum with coded parts.*--recode"):
        planned_run(ring, program, inputs, "q8")
    plans, _, outputs = planned_run(ring, program, inputs, "q8", recode=True)
    assert coded_chunks(plans) == planned_chunks(ring) and len({output.tobytes() for output in outputs}) == 1


def test_the_program_may_have_longer_or_shorter_chunks():
    pair = load_topology("ring:2")
    made = timed(pair, build("allreduce", 2, 100), "ring")
    made = with_plan(made, chosen(made, lambda m: m.op == "copy"), "xw")
    for program, collective in (
        (lower_exact(made, pair).program, build("allreduce", 2, 50)),
        (lower(replace(made, coding=None), pair, instances=2), refined(made.collective, 2)),
    ):
        assert program.chunks_per_loop == collective.size_chunks != made.collective.size_chunks
        coding = Coding(None, True, hops=planned(made, collective).hops)
        half = collective.size_chunks // 2
        assert coded_chunks(rewritten(program, collective, coding)) == {
            (0, 1): [half, half],
            (1, 0): [half, half],
        }


@st.composite
def planned_algorithms(draw):
    """Algorithms, and messages to be coded: any, or all of some ways."""
    algorithm, topology = draw(algorithms())
    ways = sorted({(m.src, m.dst) for m in algorithm.messages})
    if not ways or draw(st.booleans()):
        return (
            algorithm,
            topology,
            [number for number in range(len(algorithm.messages)) if draw(st.booleans())],
        )
    coded_ways = draw(st.sets(st.sampled_from(ways)))
    return algorithm, topology, chosen(algorithm, lambda m: (m.src, m.dst) in coded_ways)


@settings(max_examples=60, deadline=None)
@given(made=planned_algorithms(), codec=st.sampled_from(["xw", "q8"]), elements=st.integers(1, 2000))
def test_exactly_what_is_planned(made, codec, elements):
    """Frames are passed on as frames or as values, as the plan says; what synthesis permits can be run."""
    algorithm, topology, numbers = made
    found = flow(algorithm, topology)
    if codec == "q8":
        numbers = () if found is None else permitted(algorithm, found, numbers, False)
    assume(numbers)
    algorithm = with_plan(algorithm, numbers, codec)
    program = lower(algorithm, topology)
    collective = algorithm.collective
    shape, inputs = inputs_of(collective, max(elements, collective.size_chunks))
    try:
        plans, plain, outputs = planned_run(algorithm, program, inputs, codec)
    except CheckFailed as failure:  # several sums of a chunk travel between two ranks
        assert "several messages" in str(failure) and found is None
        return
    assert coded_chunks(plans) == planned_chunks(algorithm)
    for rank, (output, expected) in enumerate(zip(outputs, plain, strict=True)):
        if codec == "xw":
            assert output.tobytes() == expected.tobytes()
        tolerance = check_values.Tolerance(
            CODECS[codec].promise, plans[rank].codings, True, DTYPES["float32"]
        )
        for chunk in collective.chunks:
            for place in [offset for r, offset in chunk.destinations if r == rank]:
                length = shape.start(place + 1) - shape.start(place)
                parts = [inputs[r][shape.start(x) : shape.start(x) + length] for r, x in chunk.sources]
                op = "sum" if collective.combining else None
                got = output[shape.start(place) : shape.start(place + 1)]
                assert check_values.compare(got, parts, DTYPES["float32"], op, tolerance)[0] == 0
    if collective.name == "allreduce" and algorithm.engine in ("ring", "direct", "hierarchical"):
        assert len({output.tobytes() for output in outputs}) == 1  # one rank makes each result


# --- what no plan may ask for


def test_values_that_have_been_coded_are_not_coded_again():
    """Rank 1 passes on what it has decoded, rank 2 codes that."""
    program, collective = programs.chain_broadcast(4, 1), build("broadcast", 4)
    hops = frozenset({(0, 1, 0, "copy"), (2, 3, 0, "copy")})
    with pytest.raises(
        CheckFailed,
        match="rank 2, threadblock 0, step 0 codes the values of chunk 0, which have been coded before",
    ):
        rewritten(program, collective, Coding(None, False, hops=hops))
    for coding in (Coding(None, True, hops=hops), Coding(None, False, recode=True, hops=hops)):
        found = rewritten(program, collective, coding)
        assert kinds(found)[1:] == [
            ["recv", "decode", "send"],
            ["recv", "encode", "send"],
            ["recv", "decode"],
        ]
    assert [one.codings for one in found] == [0, 1, 1, 2]


def test_half_of_a_message():
    program = programs.ring_allgather(3, 2)
    hops = frozenset({(0, 1, 1, "copy")})
    with pytest.raises(CheckFailed, match="sends chunk 0 to rank 1 together with chunk 1, which alone"):
        rewritten(program, build("allgather", 3, 2), Coding(None, True, hops=hops))


def test_what_never_travels():
    hops = frozenset({(2, 0, 0, "copy")})
    with pytest.raises(CheckFailed, match="codes chunk 0 from rank 2 to rank 0, and no message"):
        rewritten(programs.chain_broadcast(3, 1), build("broadcast", 3), Coding(None, True, hops=hops))


def test_one_of_two_alike_and_one_that_is_not_there():
    topology = load_topology("ring:2")
    made = timed(topology, build("broadcast", 2, 2), "chain")
    twice = replace(made, messages=(made.messages[0], *made.messages))
    with pytest.raises(CheckFailed, match="chunk 0 goes from rank 0 to rank 1 in several messages"):
        planned(with_plan(twice, [0]), made.collective)
    assert planned(with_plan(twice, [0, 1]), made.collective).messages == 2
    with pytest.raises(CheckFailed, match="there is no message 99"):
        planned(with_plan(made, [0, 99]), made.collective)
    assert planned(made, made.collective) is None and planned(with_plan(made, []), made.collective) is None


# --- results that others code


def through_a_mate():
    """An allreduce whose result rank 0 makes and rank 1 passes on to rank 2."""
    gpus = [
        (1, 1, 0, [(-1, 2, 0, [("rrc", "i", 0, "o", 0, 1)]), (1, 1, 0, [("nop", "i", 0, "i", 0, 0, (0, 0)),
         ("rrcs", "o", 0, "o", 0, 1)])]),
        (1, 1, 0, [(0, 0, 0, [("s", "i", 0, "o", 0, 1), ("r", "o", 0, "o", 0, 1)]),
         (2, -1, 0, [("nop", "i", 0, "i", 0, 0, (0, 1)), ("s", "o", 0, "o", 0, 1)])]),
        (1, 1, 0, [(0, -1, 0, [("s", "i", 0, "o", 0, 1)]), (-1, 1, 0, [("r", "o", 0, "o", 0, 1)])]),
    ]  # fmt: skip
    return programs.program("allreduce", 3, 1, gpus)


def test_who_makes_a_result_codes_it_even_where_a_mate_sends_it_to_another_node():
    program = through_a_mate()
    _, inputs = inputs_of(build("allreduce", 3), 3000)
    run = {"op": "sum", "codec": CODECS["q8"], "coding": Coding((0, 0, 1), False)}
    assert len({output.tobytes() for output in run_in_process(program, inputs, **run)}) == 1
