"""Test data, expected results, and that every kind of damage is found."""

import itertools

import numpy as np
import pytest
import runtime_programs as programs
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.errors import UsageError
from taccl.runtime import check
from taccl.runtime.bind import buffer_elements
from taccl.runtime.dtypes import DTYPES, OPS, PERIOD, divide, reduce_exactly, select_dtypes, select_ops, table
from taccl.runtime.layout import Layout, layout
from taccl.synth.collective import build


@settings(max_examples=60, deadline=None)
@given(elements=st.integers(0, 1000), chunks=st.integers(1, 64), blocks=st.integers(1, 9))
def test_pieces_cover_the_blocks_evenly(elements, chunks, blocks):
    shape = Layout(elements, chunks, blocks)
    pieces = shape.pieces(chunks * blocks)
    lengths = pieces[:, 1] - pieces[:, 0]
    assert lengths.sum() == elements * blocks == shape.start(chunks * blocks)
    assert lengths.max() - lengths.min() <= 1 and lengths.max() == shape.chunk_elements
    assert (pieces[1:, 0] == pieces[:-1, 1]).all()
    assert [shape.start(x) for x in range(chunks * blocks)] == pieces[:, 0].tolist()
    assert shape.padded == (elements % chunks != 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64, 255, 300, 1024])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_test_data_reduces_exactly_in_any_order(dtype, ranks):
    """Reduced as rational numbers, forwards and backwards: all agree, so no rounding happens anywhere."""
    kind = DTYPES[dtype]
    for op in OPS:
        tables = [table(kind, op, rank, ranks)[:600] for rank in range(ranks)]
        exact = np.stack([t.astype(np.float64) for t in tables])
        plain = "sum" if op == "avg" else op
        total = getattr(exact, plain)(0)
        forwards = reduce_exactly(kind, plain, tables)
        backwards = reduce_exactly(kind, plain, reversed(tables))
        np.testing.assert_array_equal(forwards.astype(np.float64), total)
        np.testing.assert_array_equal(backwards.astype(np.float64), total)


def test_moved_data_differs_between_ranks_and_places():
    for dtype in DTYPES.values():
        first, second = table(dtype, None, 0, 4), table(dtype, None, 1, 4)
        assert np.count_nonzero(first == second) < PERIOD / 50
        assert np.count_nonzero(first[1:] == first[:-1]) < PERIOD / 50


def test_average_truncates_integers_as_c_does():
    values = np.array([-7, -6, -1, 0, 1, 6, 7], np.int32)
    divide(values, 3)
    assert values.tolist() == [-2, -2, 0, 0, 0, 2, 2]
    small = np.array([0, 5, 255], np.uint8)
    divide(small, 2)
    assert small.tolist() == [0, 2, 127]
    for kind, ranks in (("int32", 2), ("int64", 2), ("int32", 3), ("int64", 7)):
        ends = np.iinfo(kind).min, np.iinfo(kind).min + 1, -ranks, 1 - ranks, -1, np.iinfo(kind).max
        sums = np.array(ends, kind)
        divide(sums, ranks)
        assert sums.tolist() == [-(-end // ranks) if end < 0 else end // ranks for end in ends]
    many = np.array([0, 255], np.uint8)
    divide(many, 256)
    assert many.tolist() == [0, 0]
    halves = np.array([1.0, 3.0], np.float16)
    divide(halves, 2)
    assert halves.tolist() == [0.5, 1.5]


def test_names_of_types_and_reductions():
    assert [d.name for d in select_dtypes("half,double,bfloat16")] == ["float16", "float64", "bfloat16"]
    assert len(select_dtypes("all")) == 7
    assert select_ops("all") == list(OPS)
    assert [d.name for d in select_dtypes("float32,half,float,float16")] == ["float32", "float16"]
    assert select_ops("sum,max,sum") == ["sum", "max"]
    with pytest.raises(UsageError, match="unknown data type 'float8'"):
        select_dtypes("float8")
    with pytest.raises(UsageError, match="unknown reduction 'xor'"):
        select_ops("sum,xor")


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(
        ["allgather", "alltoall", "allreduce", "reducescatter", "broadcast", "reduce", "gather"]
    ),
    ranks=st.integers(1, 5),
    partition=st.integers(1, 3),
    elements=st.integers(1, 400),
)
def test_spans_cover_each_output_once(name, ranks, partition, elements):
    collective = build(name, ranks, partition)
    shape = layout(collective, elements)
    for rank in range(ranks):
        wanted = sum(
            shape.start(offset + 1) - shape.start(offset)
            for chunk in collective.chunks
            for r, offset in chunk.destinations
            if r == rank
        )
        spans = check.spans(collective, shape, rank)
        assert sum(s.last - s.first for s in spans) == wanted
        assert all(a.last <= b.first for a, b in itertools.pairwise(spans))


def finished(name, dtype, op, inplace=False, elements=30000):
    """Guarded buffers of rank 1 as they are after a right run, and the arguments of `inspect`."""
    collective = build(name, 3, 2)
    shape = layout(collective, elements)
    guarded = check.allocate(collective, shape, 1, dtype, inplace)
    check.fill(guarded.buffers, dtype, op, 1, 3)
    inputs = [np.resize(table(dtype, op, r, 3), buffer_elements(collective, shape, r)[0]) for r in range(3)]
    if name == "allreduce":
        guarded.buffers.output[:] = reduce_exactly(dtype, op, inputs)
    else:
        guarded.buffers.output[:] = np.concatenate(inputs)
    return guarded, (collective, shape, 1, dtype, op, inplace)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("name", "op"), [("allgather", None), ("allreduce", "sum"), ("allreduce", "avg")])
def test_right_results_pass_and_one_wrong_element_is_counted(name, op, dtype):
    guarded, arguments = finished(name, DTYPES[dtype], op)
    assert check.inspect(guarded, *arguments) == check.Finding(0, 0, 0.0)
    was = guarded.buffers.output[12345]
    guarded.buffers.output[12345] = 1 if was != 1 else 2
    found = check.inspect(guarded, *arguments)
    assert found.wrong == 1 and found.outside == 0 and found.max_error > 0


def test_unwritten_output_is_wrong_everywhere():
    kind = DTYPES["float32"]
    guarded, arguments = finished("allgather", kind, None)
    check.fill(guarded.buffers, kind, None, 1, 3)
    found = check.inspect(guarded, *arguments)
    assert found.wrong == 30000 and found.max_error == float("inf")


def test_swapped_blocks_are_found():
    guarded, arguments = finished("allgather", DTYPES["uint8"], None)
    output = guarded.buffers.output
    output[:10000], output[10000:20000] = output[10000:20000].copy(), output[:10000].copy()
    assert check.inspect(guarded, *arguments).wrong > 19000


def test_changed_input_counts_out_of_place_only():
    guarded, arguments = finished("allreduce", DTYPES["int32"], "sum")
    guarded.buffers.input[77] += 1
    assert check.inspect(guarded, *arguments).wrong == 1
    guarded, arguments = finished("allreduce", DTYPES["int32"], "sum", inplace=True)
    assert check.inspect(guarded, *arguments).wrong == 0


@pytest.mark.parametrize("at", [0, check.GUARD_BYTES - 1, -1, -check.GUARD_BYTES])
def test_bytes_outside_the_buffers_are_guarded(at):
    guarded, arguments = finished("allgather", DTYPES["float64"], None)
    guarded.raw[1][at] ^= 1
    found = check.inspect(guarded, *arguments)
    assert (found.wrong, found.outside) == (0, 1)


def test_local_run_with_a_damaged_program_is_wrong():
    import dataclasses

    from test_runtime_local import checked

    program = programs.direct_alltoall(3)
    gpu = program.gpus[0]
    tb = gpu.threadblocks[1]
    bad = dataclasses.replace(tb, steps=(dataclasses.replace(tb.steps[0], src_offset=0), *tb.steps[1:]))
    gpus = (dataclasses.replace(gpu, threadblocks=(gpu.threadblocks[0], bad, *gpu.threadblocks[2:])),)
    findings = checked(
        dataclasses.replace(program, gpus=gpus + program.gpus[1:]), 3000, DTYPES["float32"], "sum"
    )
    assert [f.wrong for f in findings] == [0, 1000, 0]
