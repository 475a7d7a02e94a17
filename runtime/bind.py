"""Memory for a program on one rank, and the run of it: user buffers, padded copies, scratch, staging.

`Bound` is a collective that can be run again and again on the same buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from taccl.runtime.compile import Plan, compile_ranks
from taccl.runtime.dtypes import UFUNCS, DType, divide
from taccl.runtime.executor import Executor, Transport
from taccl.runtime.layout import Layout
from taccl.runtime.trace import Trace, trace
from taccl.synth.collective import Collective
from taccl.synth.program import Program


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program made ready for some ranks, in one mode."""

    program: Program
    collective: Collective
    inplace: bool
    plans: Mapping[int, Plan]  # by rank


def compile_program(
    program: Program,
    collective: Collective,
    inplace: bool,
    wanted: Sequence[int],
    order: Trace | None = None,
) -> Compiled:
    """Compile for the wanted ranks. In place, input and output are views of one memory where the collective
    says so."""
    order = trace(program) if order is None else order
    views = {r: pair for r, pair in enumerate(collective.inplace) if pair is not None} if inplace else {}
    plans = compile_ranks(program, order, views, wanted)
    return Compiled(program, collective, inplace, {plan.rank: plan for plan in plans})


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a user hands to a collective: contiguous arrays, views of one memory when in place."""

    input: Any  # (input elements,)
    output: Any  # (output elements,)


def buffer_elements(collective: Collective, layout: Layout, rank: int) -> tuple[int, int]:
    """Elements of the rank's input and output."""
    return layout.start(collective.input_chunks[rank]), layout.start(collective.output_chunks[rank])


def memory_chunks(collective: Collective, rank: int) -> int:
    """Chunks of the one memory that holds both views of the rank in place."""
    pair = collective.inplace[rank]
    if pair is None:
        raise ValueError(f"{collective.name} keeps the buffers of rank {rank} apart")
    return max(pair[0] + collective.input_chunks[rank], pair[1] + collective.output_chunks[rank])


def internal_bytes(compiled: Compiled, rank: int, layout: Layout, dtype: DType) -> int:
    """Bytes that `Bound` allocates beside the user's buffers: scratch, staging, padded copies."""
    gpu = compiled.program.gpus[rank]
    chunks = gpu.scratch_chunks + compiled.plans[rank].staging_chunks
    if layout.padded:
        chunks += compiled.collective.input_chunks[rank] + compiled.collective.output_chunks[rank]
    return chunks * layout.chunk_elements * dtype.bytes


class Bound:
    """One rank's part of a collective on fixed buffers.

    buffers: arrays of `dtype`, of the lengths that `buffer_elements` says. op: one of dtypes.OPS, None for
    collectives that only move data. `transport` stays the caller's to close.
    """

    def __init__(
        self,
        compiled: Compiled,
        rank: int,
        layout: Layout,
        buffers: Buffers,
        dtype: DType,
        op: str | None,
        transport: Transport,
        xp: Any = np,
    ) -> None:
        collective = compiled.collective
        self._ranks = collective.ranks
        self._op = op
        self._xp = xp
        self.user = buffers
        self._layout = layout
        self._inner = buffers
        self._transport = transport
        # Chunks that the collective gives no value (reduce away from the root) stay as the user has them.
        given = sorted({o for chunk in collective.chunks for r, o in chunk.destinations if r == rank})
        self._divides = op == "avg" and bool(given)
        chunk = layout.chunk_elements
        if layout.padded:
            self._inner = self._padded(collective, rank, compiled.inplace, chunk, dtype, xp)
            pieces = layout.pieces(
                max(collective.input_chunks[rank], collective.output_chunks[rank])
            ).tolist()
            self._input_pieces = [(x, *pieces[x]) for x in range(collective.input_chunks[rank])]
            self._output_pieces = [(x, *pieces[x]) for x in given]
        plan = compiled.plans[rank]
        memory = {
            "i": self._inner.input,
            "o": self._inner.output,
            "s": xp.empty(compiled.program.gpus[rank].scratch_chunks * chunk, dtype.numpy),
            "t": xp.empty(plan.staging_chunks * chunk, dtype.numpy),
        }
        self.executor = Executor(plan, memory, chunk, UFUNCS[op or "sum"], transport, xp)

    @staticmethod
    def _padded(
        collective: Collective, rank: int, inplace: bool, chunk: int, dtype: DType, xp: Any
    ) -> Buffers:
        lengths = collective.input_chunks[rank] * chunk, collective.output_chunks[rank] * chunk
        pair = collective.inplace[rank] if inplace else None
        # Zeros, because the padding is sent and reduced too and must not raise floating-point warnings.
        if pair is None:
            return Buffers(xp.zeros(lengths[0], dtype.numpy), xp.zeros(lengths[1], dtype.numpy))
        memory = xp.zeros(memory_chunks(collective, rank) * chunk, dtype.numpy)
        first = pair[0] * chunk, pair[1] * chunk
        return Buffers(memory[first[0] : first[0] + lengths[0]], memory[first[1] : first[1] + lengths[1]])

    def start(self) -> None:
        """Begin a run; `executor.advance()` until `executor.done`, then `finish`."""
        if self._layout.padded:
            chunk, source, target = self._layout.chunk_elements, self.user.input, self._inner.input
            for index, first, last in self._input_pieces:
                target[index * chunk : index * chunk + last - first] = source[first:last]
            self._transport.flush()
        self.executor.start()

    def finish(self) -> None:
        """End a run: the result is in the user's output."""
        if self._layout.padded:
            chunk, source, target = self._layout.chunk_elements, self._inner.output, self.user.output
            for index, first, last in self._output_pieces:
                target[first:last] = source[index * chunk : index * chunk + last - first]
        if self._divides:
            divide(self.user.output, self._ranks)
        if self._layout.padded or self._divides:
            self._transport.flush()

    def close(self) -> None:
        """Free the transport's requests."""
        self.executor.close()
