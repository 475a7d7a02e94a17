"""Run a program with all its ranks in this process: no MPI, the same compiled operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from taccl.errors import RunFailed, UsageError
from taccl.runtime.bind import Bound, Buffers, Compiled, buffer_elements, compile_program, memory_chunks
from taccl.runtime.codecs import Codec, ErrorFeedback
from taccl.runtime.coded import Coding
from taccl.runtime.coders import Inline
from taccl.runtime.dtypes import DTYPES, OPS, inside_type
from taccl.runtime.executor import PATIENCE
from taccl.runtime.layout import Layout, layout_of
from taccl.runtime.semantics import collective_of
from taccl.runtime.switch import LocalSwitch, LocalTransport
from taccl.runtime.trace import trace
from taccl.runtime.transport import OFFER_WORDS
from taccl.synth.collective import Collective
from taccl.synth.program import Program

Array = np.ndarray[Any, Any]


def compile_all(
    program: Program, inplace: bool, collective: Collective | None = None, coding: Coding | None = None
) -> Compiled:
    """Compile for every rank. collective: what the program computes; default: what its name says."""
    order = trace(program)
    known = collective_of(program, order) if collective is None else collective
    return compile_program(program, known, inplace, range(program.ranks), order, coding=coding)


def run_bound(bound: Sequence[Bound]) -> None:
    """Run all ranks, one after another a little, to the end. They are connected.

    Raises RunFailed, saying what each rank waits for, when none can go on.
    """
    for one in bound:
        one.start()
    vain = 0
    while not all(one.executor.done for one in bound):
        left = [one.executor.left for one in bound]
        for one in bound:
            one.executor.advance()
        vain = vain + 1 if left == [one.executor.left for one in bound] else 0
        if vain > 2 * PATIENCE:  # by now every rank has looked at every message
            waits = "; ".join(
                f"rank {one.executor.plan.rank}: {one.executor.describe()}"
                for one in bound
                if not one.executor.done
            )
            raise RunFailed(f"the program hangs: {waits}")
    for one in bound:
        one.finish()


def connect_all(bound: Sequence[Bound]) -> None:
    """Connect the ranks of this process."""
    offers = np.zeros((len(bound), OFFER_WORDS), np.int64)
    for one in bound:
        one.connect(offers)


def _layout(collective: Collective, inputs: Sequence[Array]) -> Layout:
    """The layout that gives the inputs their lengths."""
    rank = max(range(collective.ranks), key=lambda r: collective.input_chunks[r])
    found = layout_of(collective, collective.input_chunks[rank], len(inputs[rank]))
    for rank, array in enumerate(inputs):
        if len(array) != buffer_elements(collective, found, rank)[0]:
            raise UsageError(
                f"rank {rank} gives {len(array)} input elements; with blocks of {found.block_elements} "
                f"it must give {buffer_elements(collective, found, rank)[0]}"
            )
    return found


def run_in_process(
    program: Program,
    inputs: Sequence[Array],
    *,
    op: str | None = None,
    inplace: bool = False,
    collective: Collective | None = None,
    accumulate: str = "type",
    codec: Codec | None = None,
    coding: Coding | None = None,
    feedback: Sequence[ErrorFeedback] | None = None,
) -> list[Array]:
    """The ranks' outputs of a program on these inputs, one array a rank, all of one type of dtypes.DTYPES.

    op: for collectives that reduce (default sum). accumulate: "type", or "float32" to reduce 16-bit floats in it and
    round once at the end. codec, coding: with what messages are coded, and which ones; both or none. feedback: as in
    `Bound`, one a rank. Raises UsageError for inputs of unequal kind, InvalidInput for a program that cannot run,
    RunFailed for one that hangs.
    """
    dtype = next((d for d in DTYPES.values() if inputs and d.numpy == inputs[0].dtype), None)
    if dtype is None or len(inputs) != program.ranks or any(a.dtype != dtype.numpy for a in inputs):
        raise UsageError(f"a program of {program.ranks} ranks needs that many inputs, all of one known type")
    if op is not None and op not in OPS:
        raise UsageError(f"unknown reduction {op!r}; known: {', '.join(OPS)}")
    compiled = compile_all(program, inplace, collective, coding)
    known = compiled.collective
    op = (op or "sum") if known.combining else None
    shape = _layout(known, inputs)
    switch = LocalSwitch()
    coder = None if codec is None else Inline()
    bound: list[Bound] = []
    outputs: list[Array] = []
    for rank in range(program.ranks):
        lengths = buffer_elements(known, shape, rank)
        pair = known.inplace[rank] if inplace else None
        if pair is None:
            buffers = Buffers(inputs[rank].copy(), np.zeros(lengths[1], dtype.numpy))
        else:
            memory = np.zeros(shape.start(memory_chunks(known, rank)), dtype.numpy)
            first = shape.start(pair[0]), shape.start(pair[1])
            views = [memory[f : f + n] for f, n in zip(first, lengths, strict=True)]
            views[0][:] = inputs[rank]
            buffers = Buffers(views[0], views[1])
        outputs.append(buffers.output)
        inside = inside_type(dtype, op, accumulate)
        bound.append(
            Bound(
                compiled,
                rank,
                shape,
                buffers,
                dtype,
                op,
                LocalTransport(switch, rank),
                inside=inside,
                codec=codec,
                coder=coder,
                feedback=None if feedback is None else feedback[rank],
            )
        )
    connect_all(bound)
    if shape.block_elements:
        run_bound(bound)
    return outputs
