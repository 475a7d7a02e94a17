"""Memory for a program on one rank, and the run of it: user buffers, padded copies, scratch, staging.

`Bound` is a collective that can be run again and again on the same buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem, UsageError
from taccl.runtime.codecs import Codec, ErrorFeedback
from taccl.runtime.coded import Coding, coded
from taccl.runtime.coders import Coder, Note
from taccl.runtime.compile import compile_ranks
from taccl.runtime.device_frames import DeviceFrames, DeviceLosses, work_bytes
from taccl.runtime.dtypes import DType, combiner, divide
from taccl.runtime.executor import Executor
from taccl.runtime.frames import FrameMemory, Losses, frame_sizes
from taccl.runtime.gpu import Cuda
from taccl.runtime.layout import Layout
from taccl.runtime.plan import Plan
from taccl.runtime.rendezvous import in_rounds
from taccl.runtime.trace import Trace, trace
from taccl.runtime.transport import Transport
from taccl.runtime.turns import MOST_MESSAGES
from taccl.synth.collective import Collective
from taccl.synth.program import Program


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program made ready for some ranks, in one mode."""

    program: Program
    collective: Collective
    inplace: bool
    order: Trace
    plans: Mapping[int, Plan]  # by rank: of those wanted, or of all
    messages: tuple[tuple[int, ...], ...]  # from each rank to each
    # Of messages (source, target, tag) that go in rounds their rounds, as `compile.in_rounds` has them.
    rounds: Mapping[tuple[int, int, int], int] = field(default_factory=dict)


def compile_program(
    program: Program,
    collective: Collective,
    inplace: bool,
    wanted: Sequence[int],
    order: Trace | None = None,
    nodes: Sequence[int] | None = None,
    coding: Coding | None = None,
    held: Callable[[int, int], bool] | None = None,
    ahead: bool = False,
    sorts: bool = False,
) -> Compiled:
    """Compile for the wanted ranks. In place, input and output are views of one memory where the collective
    says so. nodes: of each rank its node, where messages between nodes are paced. coding: which messages are
    frames; then raises UsageError as `coded` does. held: whether messages from one rank to another go in rounds; raises
    EnvironmentProblem where the program hangs when a send waits for its receive, and they cannot. ahead: messages
    between nodes leave in the order of the model; it is not known of coded ones. sorts: as in `compile_ranks`."""
    order = trace(program) if order is None else order
    views = {r: pair for r, pair in enumerate(collective.inplace) if pair is not None} if inplace else {}
    rewrite = (
        None
        if coding is None
        else functools.partial(coded, coding=coding, collective=collective, inplace=views)
    )
    everyone = range(program.ranks)
    # Turns are made from the plans of all ranks.
    every = nodes is not None and len(order.send_tag) <= MOST_MESSAGES
    plans = compile_ranks(
        program, order, views, wanted if held is None else everyone, nodes, rewrite, timed=coding is None,
        ahead=ahead and every and coding is None, sorts=sorts,
    )  # fmt: skip
    rounds: Mapping[tuple[int, int, int], int] | None = {}
    if held is not None:
        rounds = in_rounds(plans, plans[0].direct, held)
        plans = [plans[rank] for rank in wanted]
    if rounds is None:
        raise EnvironmentProblem(
            f"{program.name} hangs when a send waits for its receive, as it does with NCCL; take another transport"
        )
    messages = [[0] * program.ranks for _ in range(program.ranks)]
    for (rank, tb, _), tag in order.send_tag.items():
        peer = program.gpus[rank].threadblocks[tb].send
        messages[rank][peer] = max(messages[rank][peer], tag + 1)
    times = 1 if coding is None else coding.tags
    counts = tuple(tuple(times * count for count in row) for row in messages)
    kept = {plan.rank: plan for plan in plans if every or plan.rank in wanted}
    return Compiled(program, collective, inplace, order, kept, counts, rounds)


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


def internal_bytes(
    compiled: Compiled,
    rank: int,
    layout: Layout,
    dtype: DType,
    inside: DType | None = None,
    codec: Codec | None = None,
    on_device: bool = False,
) -> int:
    """Bytes that `Bound` allocates beside the user's buffers: scratch, staging, frames, padded or wider copies, and on
    a device what kernels work in."""
    inside = inside or dtype
    gpu = compiled.program.gpus[rank]
    chunks = gpu.scratch_chunks + compiled.plans[rank].staging_chunks
    if layout.padded or inside != dtype:
        chunks += compiled.collective.input_chunks[rank] + compiled.collective.output_chunks[rank]
    frames = 0
    if codec is not None:
        plan = compiled.plans[rank]
        frames = plan.slots * frame_sizes(codec, inside, layout.chunk_elements).stride
        if on_device:
            frames += work_bytes(plan, codec, inside, layout.chunk_elements)
    return chunks * layout.chunk_elements * inside.bytes + frames


class Bound:
    """One rank's part of a collective on fixed buffers.

    buffers: arrays of `dtype`, of the lengths that `buffer_elements` says. op: one of dtypes.OPS, None for
    collectives that only move data. `transport` stays the caller's to close. empty: gives memory that is needed
    inside, of (elements, numpy type); None: the array module's own. inside: the type in which the program moves and
    reduces, when it is another than that of the buffers. marks: as in `Executor`. codec, coder: of a coded plan. cuda:
    where buffers and memory are on a device. feedback: of the rank's float32 input to a sum; what it owes is added in
    each run, and what this rank's coding takes away is what it owes then. The input is not changed. notes: as in
    `Streams`, on a device. Raises UsageError where error feedback would owe what the rank does not contribute.

    After the constructor all ranks exchange their transports' offers, and then `connect` makes it ready to run.
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
        empty: Callable[[int, Any], Any] | None = None,
        inside: DType | None = None,
        marks: list[tuple[int, float]] | None = None,
        codec: Codec | None = None,
        coder: Coder | None = None,
        cuda: Cuda | None = None,
        feedback: ErrorFeedback | None = None,
        notes: list[Note] | None = None,
    ) -> None:
        xp = xp if cuda is None else cuda.xp
        self._cuda = cuda
        empty = xp.empty if empty is None else empty
        inside = inside or dtype
        collective = compiled.collective
        self.user = buffers
        self._layout = layout
        self._inner = buffers
        self.transport = transport
        # Chunks that the collective gives no value (reduce away from the root) stay as the user has them.
        given = {o: len(one.sources) for one in collective.chunks for r, o in one.destinations if r == rank}
        chunk = layout.chunk_elements
        self._averages = _averages(given, collective.output_chunks[rank], chunk) if op == "avg" else []
        self._feedback = feedback
        self._copies = layout.padded or inside != dtype or feedback is not None
        if self._copies:
            self._inner = self._padded(collective, rank, compiled.inplace, chunk, inside, empty)
            pieces = layout.pieces(
                max(collective.input_chunks[rank], collective.output_chunks[rank])
            ).tolist()
            self._input_pieces = [(x, *pieces[x]) for x in range(collective.input_chunks[rank])]
            self._output_pieces = [(x, *pieces[x]) for x in sorted(given)]
        plan = compiled.plans[rank]
        memory = {
            "i": self._inner.input,
            "o": self._inner.output,
            "s": empty(compiled.program.gpus[rank].scratch_chunks * chunk, inside.numpy),
            "t": empty(plan.staging_chunks * chunk, inside.numpy),
        }
        combine = combiner(op or "sum", xp)
        frames: FrameMemory | DeviceFrames | None = None
        if codec is not None:
            sizes = frame_sizes(codec, inside, chunk)
            places = {} if feedback is None else self._places(collective, plan, layout)
            data = empty(plan.slots * sizes.stride, np.uint8)
            if cuda is None:
                frames = FrameMemory(sizes, data, None if feedback is None else Losses(feedback, places))
            else:
                owes = None if feedback is None else DeviceLosses(feedback, places)
                frames = DeviceFrames(cuda, plan, sizes, inside, chunk, data, owes)
        self.executor = Executor(plan, memory, chunk, combine, transport, marks, frames, coder, cuda, notes)
        if cuda is not None:
            # A kernel is loaded at its first call, which may wait until the device is idle, and in a run another rank
            # may have to send before it is.
            for kind in {inside.numpy, np.dtype(np.float32)} if op is not None else ():
                one = xp.zeros(1, kind)
                combine(one, one, out=one)
            cuda.synchronize()  # what was filled here is not undone later, whatever stream calls come on

    @staticmethod
    def _places(collective: Collective, plan: Plan, layout: Layout) -> dict[int, slice]:
        """Of each chunk that the rank contributes to, its elements in the rank's input."""
        pieces = layout.pieces(collective.input_chunks[plan.rank]).tolist()
        found = {
            number: slice(*pieces[place])
            for number, chunk in enumerate(collective.chunks)
            for rank, place in chunk.sources
            if rank == plan.rank
        }
        if {number for op in plan.operations for number in op.chunks} - set(found):
            raise UsageError(
                f"{collective.name}: a rank that contributes nothing to some values codes them, and error feedback "
                "cannot give back to others what that takes away: leave it out, or take a program in which who codes "
                "contributes"
            )
        return found

    @staticmethod
    def _padded(
        collective: Collective,
        rank: int,
        inplace: bool,
        chunk: int,
        dtype: DType,
        empty: Callable[[int, Any], Any],
    ) -> Buffers:
        lengths = collective.input_chunks[rank] * chunk, collective.output_chunks[rank] * chunk
        pair = collective.inplace[rank] if inplace else None

        # Zeros, because the padding is sent and reduced too and must not raise floating-point warnings.
        def zeros(elements: int) -> Any:
            array = empty(elements, dtype.numpy)
            array[...] = 0
            return array

        if pair is None:
            return Buffers(zeros(lengths[0]), zeros(lengths[1]))
        memory = zeros(memory_chunks(collective, rank) * chunk)
        first = pair[0] * chunk, pair[1] * chunk
        return Buffers(memory[first[0] : first[0] + lengths[0]], memory[first[1] : first[1] + lengths[1]])

    def connect(self, offers: np.ndarray[Any, Any]) -> None:
        """Take the (ranks, OFFER_WORDS) offers of all ranks' transports."""
        self.transport.connect(offers)
        self.executor.connect()

    def start(self) -> None:
        """Begin a run; `executor.advance()` until `executor.done`, then `finish`."""
        if self._copies:
            chunk, source, target = self._layout.chunk_elements, self.user.input, self._inner.input
            if self._feedback is not None:
                source = self._feedback.owed(source)
            for index, first, last in self._input_pieces:
                target[index * chunk : index * chunk + last - first] = source[first:last]
            if self._feedback is not None:
                self._feedback.residual[:] = 0
        self.executor.start()

    def finish(self) -> None:
        """End a run: the result is in the user's output."""
        for place, ranks in self._averages:  # in the type of the sums
            divide(self._inner.output[place], ranks)
        if self._copies:
            chunk, source, target = self._layout.chunk_elements, self._inner.output, self.user.output
            for index, first, last in self._output_pieces:
                target[first:last] = source[index * chunk : index * chunk + last - first]
        if self._cuda is not None and (self._copies or self._averages):
            self._cuda.synchronize()

    @property
    def on_device(self) -> bool:
        """Whether buffers and memory are there."""
        return self._cuda is not None

    def close(self) -> None:
        """Free the transport's requests."""
        self.executor.close()


def _averages(given: Mapping[int, int], chunks: int, chunk_elements: int) -> list[tuple[slice, int]]:
    """What avg divides of an output of so many chunks, and by how many. given: of chunks of sums, of how many ranks."""
    if len(given) == chunks and len(set(given.values())) == 1:
        return [(slice(None), given[0])]
    return [
        (slice(place * chunk_elements, (place + 1) * chunk_elements), ranks)
        for place, ranks in sorted(given.items())
    ]
