"""Programs executed in one process, against numpy."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import runtime_programs as programs
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.errors import InvalidInput, RunFailed, UsageError
from taccl.runtime import check
from taccl.runtime.bind import Bound, Buffers
from taccl.runtime.dtypes import DTYPES, OPS
from taccl.runtime.executor import Executor
from taccl.runtime.layout import layout
from taccl.runtime.local import compile_all, connect_all, run_bound, run_in_process
from taccl.runtime.plan import Operation, Plan
from taccl.runtime.switch import LocalSwitch, LocalTransport
from taccl.synth.collective_file import read_collective


def checked(program, elements, dtype, op, inplace=False, direct=False):
    """Findings of all ranks after a run on the test data."""
    compiled = compile_all(program, inplace)
    collective = compiled.collective
    op = op if collective.combining else None
    shape = layout(collective, elements)
    switch = LocalSwitch(direct)
    memory = [check.allocate(collective, shape, r, dtype, inplace) for r in range(program.ranks)]
    bound = []
    for rank, guarded in enumerate(memory):
        check.fill(guarded.buffers, dtype, op, rank, program.ranks)
        transport = LocalTransport(switch, rank)
        bound.append(Bound(compiled, rank, shape, guarded.buffers, dtype, op, transport))
    connect_all(bound)
    for _ in range(2 if op is None and not inplace else 1):  # a second run gives the same
        if shape.block_elements:
            run_bound(bound)
    return [
        check.inspect(guarded, collective, shape, rank, dtype, op, inplace)
        for rank, guarded in enumerate(memory)
    ]


def assert_right(findings):
    assert [(f.wrong, f.outside, f.max_error) for f in findings] == [(0, 0, 0.0)] * len(findings)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("name", sorted(programs.ALL))
def test_every_collective_type_and_reduction(name, dtype):
    program = programs.ALL[name](4, 2)
    for op in OPS if name in ("allreduce", "reduce", "reducescatter") else ("sum",):
        for elements in (8 * 300, 8 * 300 + 5):
            assert_right(checked(program, elements, DTYPES[dtype], op))


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(programs.ALL)),
    ranks=st.integers(2, 6),
    partition=st.integers(1, 4),
    elements=st.one_of(st.integers(0, 40), st.integers(0, 30000)),
    dtype=st.sampled_from(sorted(DTYPES)),
    op=st.sampled_from(OPS),
    direct=st.booleans(),
)
def test_any_size_and_shape(name, ranks, partition, elements, dtype, op, direct):
    program = programs.ALL[name](ranks, partition)
    assert_right(checked(program, elements, DTYPES[dtype], op, direct=direct))


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(2, 6),
    partition=st.integers(1, 3),
    elements=st.integers(0, 5000),
    op=st.sampled_from(OPS),
    which=st.sampled_from(["allgather", "allreduce", "exchange", "either place"]),
    direct=st.booleans(),
)
def test_in_place(ranks, partition, elements, op, which, direct):
    program = {
        "allgather": lambda: programs.ring_allgather(ranks, partition, inplace=True),
        "allreduce": lambda: programs.ring_allreduce(ranks, partition),
        "exchange": lambda: programs.inplace_exchange(ranks),
        "either place": lambda: replace(programs.ring_allgather(ranks, partition), inplace=True),
    }[which]()
    assert_right(checked(program, elements, DTYPES["int32"], op, inplace=True, direct=direct))


def test_what_lies_in_its_place_is_not_copied_there():
    program = replace(programs.ring_allgather(3, 2), inplace=True)
    for inplace, expected in ((False, 1), (True, 0)):
        plans = compile_all(program, inplace).plans.values()
        assert [sum(op.kind == "copy" for op in plan.operations) for plan in plans] == [expected] * 3


@settings(max_examples=30, deadline=None)
@given(
    demand=st.integers(2, 4).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    units=st.integers(1, 7),
)
def test_alltoallv(demand, units):
    program = programs.direct_alltoallv(demand)
    assert_right(checked(program, units * program.chunks_per_loop, DTYPES["int64"], "sum"))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=st.integers(2, 5), elements=st.integers(1, 50), op=st.sampled_from(OPS))
def test_allreduce_agrees_with_numpy_on_any_integers(data, ranks, elements, op):
    values = st.lists(st.integers(-1000, 1000), min_size=elements, max_size=elements)
    inputs = [np.array(data.draw(values), np.int64) for _ in range(ranks)]
    outputs = run_in_process(programs.ring_allreduce(ranks, inplace=False), inputs, op=op)
    stacked = np.stack(inputs)
    expected = {
        "sum": stacked.sum(0), "prod": stacked.prod(0), "min": stacked.min(0), "max": stacked.max(0),
        "avg": np.trunc(stacked.sum(0) / ranks).astype(np.int64),
    }[op]  # fmt: skip
    for output in outputs:
        np.testing.assert_array_equal(output, expected)


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(2, 5), block=st.integers(1, 30), partition=st.integers(1, 4))
def test_blocks_lie_as_mpi_lays_them(ranks, block, partition):
    inputs = [np.arange(block, dtype=np.float32) + 100 * r for r in range(ranks)]
    for output in run_in_process(programs.ring_allgather(ranks, partition), inputs):
        np.testing.assert_array_equal(output, np.concatenate(inputs))
    whole = [np.arange(ranks * block, dtype=np.float32) + 1000 * r for r in range(ranks)]
    scattered = run_in_process(programs.ring_reducescatter(ranks, partition), whole)
    np.testing.assert_array_equal(np.concatenate(scattered), sum(whole))
    swapped = run_in_process(programs.direct_alltoall(ranks, partition), whole)
    for rank, output in enumerate(swapped):
        expected = np.concatenate([a[rank * block : (rank + 1) * block] for a in whole])
        np.testing.assert_array_equal(output, expected)


def test_inputs_are_not_changed():
    inputs = [np.full(7, r, np.float32) for r in range(3)]
    run_in_process(programs.ring_allreduce(3), inputs, inplace=True)
    run_in_process(programs.ring_allreduce(3, inplace=False), inputs)
    assert [set(a) for a in inputs] == [{0.0}, {1.0}, {2.0}]


def test_rooted_collectives_leave_other_ranks_alone():
    inputs = [np.full(5, r + 1, np.int32) for r in range(3)]
    outputs = run_in_process(programs.scratch_reduce(3, 2, root=1), inputs, op="avg")
    np.testing.assert_array_equal(outputs[1], [2] * 5)
    assert not outputs[0].any() and not outputs[2].any()


@pytest.mark.parametrize("dtype", ["int32", "float32", "float16"])
@pytest.mark.parametrize("accumulate", ["type", "float32"])
def test_an_average_is_of_as_many_ranks_as_are_in_its_sum(dtype, accumulate):
    """And what is given no value stays."""
    if accumulate == "float32" and dtype != "float16":
        accumulate = "type"
    inputs = [np.full(5 * chunks, 6 * (rank + 1), dtype) for rank, chunks in enumerate((2, 2, 1))]
    outputs = run_in_process(
        programs.sums_of_some(), inputs, op="avg", collective=programs.SUMS_OF_SOME, accumulate=accumulate
    )
    assert outputs[2].tolist() == [9] * 5 + [0] * 5 + [12] * 5


def test_an_average_leaves_what_has_no_value_as_it_is():
    compiled = compile_all(programs.sums_of_some(), False, programs.SUMS_OF_SOME)
    shape, switch = layout(programs.SUMS_OF_SOME, 4), LocalSwitch()
    outputs = [np.full(chunks * 4, 100.0) for chunks in (0, 0, 3)]
    bound = [
        Bound(
            compiled, rank, shape, Buffers(np.full(chunks * 4, 6.0 * (rank + 1)), outputs[rank]),
            DTYPES["float64"], "avg", LocalTransport(switch, rank),
        )
        for rank, chunks in enumerate((2, 2, 1))
    ]  # fmt: skip
    connect_all(bound)
    for _ in range(2):
        run_bound(bound)
    assert outputs[2].tolist() == [9] * 4 + [100] * 4 + [12] * 4


def test_bfloat16_rounds_after_every_addition():
    one = np.array([256.0, 1.0], ml_dtypes.bfloat16)
    outputs = run_in_process(programs.ring_allreduce(2, inplace=False), [one, np.array([1, 1], one.dtype)])
    assert outputs[0].dtype == one.dtype
    assert outputs[0].astype(float).tolist() == [256.0, 2.0]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_sums_in_float32_are_rounded_once(dtype, op, inplace):
    """The large value comes first on some elements and last on others; in the type itself the ones get lost."""
    big = 2.0 * DTYPES[dtype].exact
    inputs = [np.ones(7, np.float32) for _ in range(4)]
    for element in range(7):
        inputs[element % 4][element] = big
    typed = [values.astype(DTYPES[dtype].numpy) for values in inputs]
    program = programs.ring_allreduce(4, inplace=inplace)
    expected = (np.sum(inputs, 0) / (4 if op == "avg" else 1)).astype(DTYPES[dtype].numpy)
    outputs = run_in_process(program, typed, op=op, inplace=inplace, accumulate="float32")
    rounded = run_in_process(program, typed, op=op, inplace=inplace)
    for output in outputs:
        assert output.dtype == DTYPES[dtype].numpy and output.tolist() == expected.tolist()
    assert rounded[0].tolist() != expected.tolist()


def test_wrong_inputs_are_refused():
    program = programs.ring_allgather(2)
    with pytest.raises(UsageError, match="2 ranks needs that many inputs"):
        run_in_process(program, [np.zeros(3, np.float32)])
    with pytest.raises(UsageError, match="all of one known type"):
        run_in_process(program, [np.zeros(3, np.complex64)] * 2)
    with pytest.raises(UsageError, match="rank 1 gives 4 input elements"):
        run_in_process(program, [np.zeros(3, np.float32), np.zeros(4, np.float32)])
    with pytest.raises(UsageError, match="unknown reduction 'mean'"):
        run_in_process(programs.ring_allreduce(2, inplace=False), [np.zeros(2, np.float32)] * 2, op="mean")
    with pytest.raises(InvalidInput):
        run_in_process(programs.program("custom", 1, 1, [(1, 1, 0, [])]), [np.zeros(1, np.float32)])


def test_a_message_may_wait_for_a_later_one_of_its_connection():
    program = programs.crossed()
    collective = read_collective(programs.CROSSED, "crossed.yaml")
    inputs = [np.arange(600, dtype=np.int32), np.arange(1000, 1300, dtype=np.int32)]
    outputs = run_in_process(program, inputs, collective=collective)
    assert np.array_equal(outputs[0], inputs[1]) and np.array_equal(outputs[1], inputs[0])


def test_a_program_that_hangs_is_ended_with_the_places():
    class Stuck:
        def __init__(self, rank, switch):
            op = Operation("recv", ("o", 0, 1), None, None, 1 - rank, 0, 0, 4, 7, ())
            plan = Plan(rank, (op,), 0)
            self.executor = Executor(
                plan, {"o": np.zeros(1, np.int32)}, 1, np.add, LocalTransport(switch, rank)
            )
            self.executor.connect()

        def start(self):
            self.executor.start()

    switch = LocalSwitch()
    with pytest.raises(RunFailed, match="rank 1: threadblock 4, step 7 waits for a message from rank 0"):
        run_bound([Stuck(0, switch), Stuck(1, switch)])
