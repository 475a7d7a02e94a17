"""Coded plans: what is coded where, and that every rank ends with the right values."""

import functools
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import runtime_programs as programs
from hypothesis import given, settings
from hypothesis import strategies as st
from native_algorithms import timed, two_nodes

from taccl.errors import UsageError
from taccl.runtime import check_values
from taccl.runtime.bind import buffer_elements, compile_program
from taccl.runtime.codecs import CODECS, FrameError, Scratch, decode_into, encode_into, most_bytes
from taccl.runtime.codecs.codec import EXACT
from taccl.runtime.coded import Coding, coded
from taccl.runtime.compile import compile_ranks
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.executor import Executor
from taccl.runtime.frames import FrameMemory
from taccl.runtime.layout import layout
from taccl.runtime.local import compile_all, run_in_process
from taccl.runtime.parts import part_bounds
from taccl.runtime.rendezvous import finishes
from taccl.runtime.semantics import collective_of
from taccl.runtime.trace import trace
from taccl.synth.collective import build
from taccl.synth.lower import lower_exact

SUMS = ("allreduce", "reducescatter", "reduce")
LOSSY = ("bf16", "bf16-xw", "q8", "fp8")
NODES = (0, 0, 1, 1)


@functools.cache
def lowered(name, engine):
    """A baseline on two nodes of two ranks."""
    topology = two_nodes()
    collective = build(name, 4, 2)
    return lower_exact(timed(topology, collective, engine), topology).program


def rewritten(program, coding, inplace=False):
    order = trace(program)
    collective = collective_of(program, order)
    views = dict(enumerate(collective.inplace)) if inplace else {}
    plans = compile_ranks(program, order, views, range(program.ranks))
    return coded(plans, coding, collective, views)


def kinds(plan):
    return [op.kind for op in plan.operations]


def inputs_of(program, elements, dtype="float32", seed=0):
    collective = collective_of(program, trace(program))
    shape = layout(collective, elements)
    random = np.random.default_rng(seed)
    lengths = [buffer_elements(collective, shape, rank)[0] for rank in range(program.ranks)]
    made = [random.standard_normal(length, np.float32) * np.float32(0.05) for length in lengths]
    return collective, shape, [array.astype(DTYPES[dtype].numpy) for array in made]


def source_of(inputs):
    return lambda rank, first, count: inputs[rank][first : first + count]


# --- what is coded where


def test_relays_pass_frames_on_and_code_nothing():
    """Four ranks in a chain: one codes, two relay and decode for themselves."""
    root, one, two, last = rewritten(programs.chain_broadcast(4, 1), Coding(None, False))
    assert kinds(root) in (["encode", "send", "copy"], ["copy", "encode", "send"])
    for relay in (one, two):
        assert kinds(relay) == ["recv", "send", "decode"]
        receive, send, decode = relay.operations
        assert send.src == receive.dst  # the very bytes
        assert send.predecessors == decode.predecessors == (0,)  # neither waits for the other
    assert kinds(last) == ["recv", "decode"]


def test_a_rank_that_only_relays_decodes_nothing():
    # rank 1 passes rank 0's chunk on from its scratch
    gpus = [
        (1, 0, 0, [(1, -1, 0, [("s", "i", 0, "s", 0, 1)])]),
        (0, 0, 1, [(2, 0, 0, [("rcs", "s", 0, "s", 0, 1)])]),
        (0, 1, 0, [(-1, 1, 0, [("r", "s", 0, "o", 0, 1)])]),
    ]
    program = programs.program("custom", 3, 1, gpus)
    collective = build("alltoallv", 3, demand=[[0, 0, 1], [0, 0, 0], [0, 0, 0]])
    plans = compile_ranks(program, trace(program), {}, range(3))
    found = coded(plans, Coding(None, False), collective, {})
    assert [kinds(plan) for plan in found] == [["encode", "send"], ["recv", "send"], ["recv", "decode"]]


def test_each_chunk_is_coded_once_whoever_gets_it():
    for program, encodes in ((lowered("allgather", "direct"), 1), (lowered("allgather", "ring"), 1)):
        for plan in rewritten(program, Coding(None, False)):
            frames = [frame for op in plan.operations if op.kind == "encode" for frame in op.frames]
            assert len(frames) == 2 * encodes  # its two chunks, once each, for three peers
    hop = rewritten(lowered("allgather", "direct"), Coding(None, False, hop=True))
    assert all(kinds(plan).count("encode") == kinds(plan).count("send") for plan in hop)


def test_only_messages_between_nodes_are_coded_and_frames_stay_frames():
    # chain 0, 1 | 2, 3: raw to rank 1, which codes; rank 2 passes the frame on to rank 3 of its own node
    found = rewritten(programs.chain_broadcast(4, 1), Coding(NODES, False))
    assert "encode" not in kinds(found[0]) and kinds(found[1]) == ["recv", "encode", "send"]
    assert kinds(found[2]) == ["recv", "send", "decode"] and kinds(found[3]) == ["recv", "decode"]
    assert [plan.codings for plan in found] == [0, 0, 1, 1]
    hop = rewritten(programs.chain_broadcast(4, 1), Coding(NODES, False, hop=True))
    assert kinds(hop[2]) == ["recv", "decode", "send"] and kinds(hop[3]) == ["recv"]
    same = rewritten(programs.chain_broadcast(4, 1), Coding((5,) * 4, False))
    assert all(not op.frames for plan in same for op in plan.operations)


def test_ranks_of_a_node_decode_for_each_other():
    # 0, 1 | 2, 3 | 4, 5: rank 3 gets the frame, to pass it on, and the values, to keep them; rank 5 the values alone
    coding = Coding((0, 0, 2, 2, 4, 4), False, near=(0, 0, 2, 2, 4, 4))
    found = rewritten(programs.chain_broadcast(6, 2), coding)
    assert [kinds(plan).count("decode") for plan in found] == [0, 0, 2, 0, 2, 0]
    for first in (0, 1):
        border, inner = found[2].operations, found[3].operations
        sent = [op for op in border if op.kind == "send" and op.step == border[-1].step - first]
        got = [op for op in inner if op.kind == "recv" and op.tag in [message.tag for message in sent]]
        assert [len(op.frames) for op in sent] == [len(op.frames) for op in got] == [1, 0]
        (onward,) = (op for op in inner if op.kind == "send" and op.src == got[0].dst)
        assert onward.predecessors == (inner.index(got[0]),)  # it does not wait for the values
    assert len({(op.peer, op.tag) for op in border if op.kind == "send"}) == 4
    assert all(not op.frames for op in found[5].operations) and found[5].codings == 1
    # nobody decodes for a neighbour what it does not want itself, nor across nodes
    alone = rewritten(
        programs.chain_broadcast(6, 2), Coding((0, 0, 2, 2, 4, 4), False, near=(0, 1, 2, 3, 4, 5))
    )
    assert [kinds(plan).count("decode") for plan in alone] == [0, 0, 2, 2, 2, 2]


def test_messages_of_several_chunks_are_cut_into_parts():
    # blocks of three chunks go from rank to rank in one message
    gpu = (3, 6, 0, [(1, 1, 0, [("s", "i", 0, "i", 0, 3), ("r", "o", 3, "o", 3, 3)])])
    other = (3, 6, 0, [(0, 0, 0, [("s", "i", 0, "i", 0, 3), ("r", "o", 0, "o", 0, 3)])])
    program = programs.program("custom", 2, 3, [gpu, other])
    collective = build("allgather", 2, 3)
    plans = compile_ranks(program, trace(program), {}, range(2))
    for plan in coded(plans, Coding(None, False, parts=2), collective, {}):
        for kind, chunks in (("encode", [1, 2]), ("send", [1, 2]), ("recv", [1, 2])):
            found = [op for op in plan.operations if op.kind == kind]
            assert [len(op.frames) for op in found] == chunks
            assert kind == "encode" or [op.tag for op in found] == [0, 1]
        encodes, sends = (
            [at for at, op in enumerate(plan.operations) if op.kind == kind] for kind in ("encode", "send")
        )
        # the first part goes when it is coded, the second one after it
        assert [plan.operations[at].predecessors for at in sends] == [(encodes[0],), (sends[0], encodes[1])]


def test_the_first_part_of_a_message_is_short():
    assert [part_bounds(chunks, 5) for chunks in (16, 8, 4, 1)] == [
        [0, 1, 4, 8, 12, 16],
        [0, 1, 2, 4, 6, 8],
        [0, 1, 2, 3, 4],
        [0, 1],
    ]


@given(st.integers(1, 300), st.integers(2, 9))
def test_parts_of_a_message_are_all_of_it(chunks, most):
    bounds = part_bounds(chunks, most)
    lengths = [after - before for before, after in pairwise(bounds)]
    assert (bounds[0], bounds[-1]) == (0, chunks)
    assert len(lengths) <= most
    assert min(lengths) == lengths[0] > 0
    assert max(lengths[2:], default=1) <= min(lengths[2:], default=1) + 1


def test_a_lossy_codec_refuses_a_ring_of_partial_sums():
    for program in (programs.ring_allreduce(3), programs.ring_reducescatter(4)):
        with pytest.raises(UsageError, match=r"partial sum with coded parts.*--engine direct.*--recode"):
            rewritten(program, Coding(None, False))
        assert rewritten(program, Coding(None, True))
        assert rewritten(program, Coding(None, False, recode=True))
    # the sums of nodes of two are coded once
    assert rewritten(lowered("allreduce", "hierarchical"), Coding(NODES, False))


def test_a_direct_allreduce_codes_contributions_once_and_the_result_once():
    for plan in rewritten(lowered("allreduce", "direct"), Coding(None, False)):
        assert kinds(plan).count("accumulate") > 0 and "reduce" not in kinds(plan)
        assert plan.codings == 2


# --- what comes out


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(programs.ALL)),
    ranks=st.integers(2, 5),
    partition=st.integers(1, 3),
    elements=st.integers(1, 3000),
    codec=st.sampled_from(sorted(CODECS)),
    split=st.integers(0, 4),
    how=st.sampled_from(["each", "shared", "hop"]),
    parts=st.integers(1, 3),
    op=st.sampled_from(["sum", "avg", "max"]),
)
def test_any_program_and_codec(name, ranks, partition, elements, codec, split, how, parts, op):
    program, codec = programs.ALL[name](ranks, partition), CODECS[codec]
    nodes = None if split == 0 else tuple(min(rank // split, 1) for rank in range(ranks))
    near = nodes if how == "shared" and nodes is not None else None
    coding = Coding(nodes, codec.lossless, how == "hop", recode=True, near=near, parts=parts)
    collective, shape, inputs = inputs_of(program, elements)
    if shape.block_elements == 0:
        return
    op = op if collective.combining else None
    outputs = run_in_process(program, inputs, op=op, codec=codec, coding=coding)
    plain = run_in_process(program, inputs, op=op)
    plans = rewritten(program, coding)
    assert finishes(plans)
    for rank, (output, expected) in enumerate(zip(outputs, plain, strict=True)):
        if codec.lossless:
            assert output.tobytes() == expected.tobytes()
        tolerance = check_values.Tolerance(codec.promise, plans[rank].codings, False, DTYPES["float32"])
        for chunk in collective.chunks:
            for place in [offset for r, offset in chunk.destinations if r == rank]:
                length = shape.start(place + 1) - shape.start(place)
                parts = [source_of(inputs)(r, shape.start(x), length) for r, x in chunk.sources]
                got = output[shape.start(place) : shape.start(place + 1)]
                assert check_values.compare(got, parts, DTYPES["float32"], op, tolerance)[0] == 0


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("name", ["allgather", "broadcast", "alltoall"])
def test_what_is_moved_has_the_error_of_one_coding_whatever_the_hops(name, codec):
    """Not within a bound: exactly what coding and decoding once gives."""
    codec, program = CODECS[codec], programs.ALL[name](5, 2)
    collective, shape, inputs = inputs_of(program, 4000)
    outputs = run_in_process(program, inputs, codec=codec, coding=Coding(None, False))
    scratch = Scratch()
    for chunk in collective.chunks:
        ((source, x),) = chunk.sources
        values = inputs[source][shape.start(x) : shape.start(x + 1)]
        wire = np.zeros(most_bytes(codec, DTYPES["float32"], len(values)), np.uint8)
        once = np.empty_like(values)
        decode_into(codec, wire[: encode_into(codec, values, wire, scratch)], once, scratch)
        for rank, y in chunk.destinations:
            got = outputs[rank][shape.start(y) : shape.start(y + 1)]
            assert got.tobytes() == (values if rank == source else once).tobytes()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("engine", ["direct", "hierarchical"])
@pytest.mark.parametrize(("nodes", "near"), [(None, None), (NODES, None), (NODES, NODES)])
def test_all_ranks_end_an_allreduce_with_the_same_bits_within_the_promise(engine, codec, nodes, near):
    program, codec = lowered("allreduce", engine), CODECS[codec]
    coding = Coding(nodes, False, near=near)
    if engine == "hierarchical" and nodes is None:
        with pytest.raises(UsageError):
            rewritten(program, coding)
        return
    collective, shape, inputs = inputs_of(program, 5003)
    outputs = run_in_process(program, inputs, op="sum", codec=codec, coding=coding)
    assert len({output.tobytes() for output in outputs}) == 1
    codings = {plan.codings for plan in rewritten(program, coding)}
    assert codings == {2}
    tolerance = check_values.Tolerance(codec.promise, 2, True, DTYPES["float32"])
    for chunk in collective.chunks:
        _, place = chunk.destinations[0]
        part = slice(shape.start(place), shape.start(place + 1))
        wrong, error, _ = check_values.compare(
            outputs[0][part], [array[part] for array in inputs], DTYPES["float32"], "sum", tolerance
        )
        assert wrong == 0 and error > 0


@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    op=st.sampled_from(["sum", "prod", "min", "avg"]),
    accumulate=st.sampled_from(["type", "float32"]),
    inplace=st.booleans(),
    hop=st.booleans(),
)
def test_lossless_sums_round_as_without_codec(dtype, op, accumulate, inplace, hop):
    program = programs.ring_allreduce(4, 2, inplace=inplace)
    _, _, inputs = inputs_of(program, 2001, dtype)
    how = {"op": op, "inplace": inplace, "accumulate": accumulate}
    plain = run_in_process(program, inputs, **how)
    outputs = run_in_process(program, inputs, **how, codec=CODECS["xw"], coding=Coding(None, True, hop))
    assert [output.tobytes() for output in outputs] == [output.tobytes() for output in plain]


def test_buffers_in_place():
    for program in (programs.ring_allgather(4, 2, inplace=True), programs.inplace_exchange(4)):
        _, _, inputs = inputs_of(program, 4000)
        plain = run_in_process(program, inputs, inplace=True)
        outputs = run_in_process(program, inputs, inplace=True, codec=CODECS["xw"], coding=Coding(None, True))
        assert [output.tobytes() for output in outputs] == [output.tobytes() for output in plain]


@pytest.mark.parametrize("codec", ["xw", "bf16-xw", "q8"])
def test_a_flipped_bit_is_named_with_rank_chunk_and_tile(monkeypatch, codec):
    """In a frame of rank 0's second chunk, after it was coded, on its way over two relays."""
    program, codec = programs.chain_broadcast(4, 2), CODECS[codec]
    _, _, inputs = inputs_of(program, 2 * 70000)
    closing = FrameMemory._close

    def close(self, area, used):
        closing(self, area, used)
        if damaged is not None:
            area[min(damaged, used - 30)] ^= 16

    monkeypatch.setattr(FrameMemory, "_close", close)
    for damaged in (None, 120_000_000, 16, 90):
        if damaged is None:
            run_in_process(program, inputs, codec=codec, coding=Coding(None, codec.lossless))
            continue
        words = "tile 1" if damaged == 120_000_000 else "damaged|frame of coded|bytes"
        with pytest.raises(FrameError, match=f"from rank 0, chunk [01].*({words})"):
            run_in_process(program, inputs, codec=codec, coding=Coding(None, codec.lossless))


def test_a_damaged_length_is_noticed(monkeypatch):
    program = programs.chain_broadcast(3, 1)
    _, _, inputs = inputs_of(program, 1000)
    closing = FrameMemory._close

    def close(self, area, used):
        closing(self, area, used)
        area[1] ^= 1

    monkeypatch.setattr(FrameMemory, "_close", close)
    with pytest.raises(FrameError, match="the length of a message of frames is damaged"):
        run_in_process(program, inputs, codec=CODECS["xw"], coding=Coding(None, True))


def test_without_coding_nothing_changes():
    program = programs.ring_allgather(3)
    collective = collective_of(program, trace(program))
    plain = compile_program(program, collective, False, range(3))
    assert all(plan.slots == 0 and plan.codings == 0 for plan in plain.plans.values())


def test_tolerances_are_no_wider_than_the_promise():
    """A value just outside of what one coding may do is wrong."""
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    once = check_values.Tolerance(CODECS["q8"].promise, 1, True, DTYPES["float32"])
    exact = check_values.Tolerance(EXACT, 0, True, DTYPES["float32"])
    for place, largest in ((0, 1.0), (300, 0.488), (999, 1.0)):
        wrong = values.copy()
        wrong[place] += np.float32(1.01 * largest / 250)
        assert check_values.compare(wrong, [values], DTYPES["float32"], None, once)[0] == 1
        wrong[place] = values[place] + np.float32(0.98 * largest / 250)
        assert check_values.compare(wrong, [values], DTYPES["float32"], None, once)[0] == 0
        assert check_values.compare(wrong, [values], DTYPES["float32"], None, exact)[0] == 1


def test_values_beside_infinities_and_nan_are_still_judged():
    """In sums, too, a value that is not finite leaves only itself without a judgement."""
    rng = np.random.default_rng(3)
    for name in ("q8", "fp8", "bf16"):
        tolerance = check_values.Tolerance(CODECS[name].promise, 2, True, DTYPES["float32"])
        for special in (np.nan, np.inf):
            parts = [rng.standard_normal(1024).astype(np.float32) for _ in range(3)]
            parts[1][::128] = special
            wrong = np.full(1024, 1e6, np.float32)
            assert check_values.compare(wrong, parts, DTYPES["float32"], "sum", tolerance)[0] == 1016
            right = np.sum(parts, axis=0)
            assert check_values.compare(right, parts, DTYPES["float32"], "sum", tolerance)[0] == 0


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_what_overflows_on_the_way_is_not_called_wrong(op):
    """Two values of which the sum is infinite, whatever the average of the exact ones; their neighbours are judged."""
    tolerance = check_values.Tolerance(EXACT, 0, True, DTYPES["float32"])
    parts = [np.float32([2e38, 1.0]), np.float32([2e38, 3.0])]
    right = 4.0 if op == "sum" else 2.0
    for value, wrong in ((right, 0), (right + 1, 1)):
        got = np.float32([np.inf, value])
        assert check_values.compare(got, parts, DTYPES["float32"], op, tolerance)[0] == wrong


def test_messages_of_sums_are_named_by_the_chunks_of_the_program():
    """Not by the slot that they arrive in or leave from, coded or not."""
    plain = compile_all(programs.ring_allreduce(3, 2), True).plans
    coded_ = compile_all(lowered("allreduce", "direct"), False, None, Coding(None, lossless=False)).plans
    for plan in [*plain.values(), *coded_.values()]:
        messages = [number for number, op in enumerate(plan.operations) if op.kind in ("send", "recv")]
        said = [Executor._chunks(SimpleNamespace(plan=plan), number) for number in messages]
        assert len(said) > 2 and not any("staging" in words for words in said), said
