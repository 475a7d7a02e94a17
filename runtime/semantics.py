"""Which collective a program computes, when only the program is known (MSCCL XML carries no more)."""

from __future__ import annotations

from taccl.errors import CheckFailed, Diagnostic, InvalidInput
from taccl.runtime.trace import Trace, local_operands
from taccl.synth.collective import Collective, build
from taccl.synth.program import Program
from taccl.synth.program_collective import collective_of as named_collective

Origin = tuple[int, int]  # rank, chunk of its input


def collective_of(program: Program, order: Trace) -> Collective:
    """The collective that the program's name, rank count and chunk count define.

    The demand of an alltoallv and the pairs of a sendrecv follow from where the program moves data; an
    alltoallv must still pack its buffers in rank order. Raises InvalidInput when the chunk count does not fit
    the collective or the buffers, and for custom collectives, whose postcondition no XML carries.
    """
    name, n, total = program.collective, program.ranks, program.chunks_per_loop
    try:
        if name == "alltoallv":
            collective = build(name, n, demand=_demand(program, order))
        elif name == "sendrecv":
            received = enumerate(_origins(program, order))
            pairs = sorted({(source, d) for d, cells in received for source, _ in cells.values()})
            collective = build(name, n, total, pairs=pairs)
        elif name == "custom":
            raise ValueError(
                "its postcondition is not known; run the native .json file instead, or give --pre-post, or for "
                "groups of ranks --collective and --groups"
            )
        else:
            collective = named_collective(name, n, total, program.root)
    except (ValueError, CheckFailed) as error:
        raise _refuse(program, f"collective {name!r}: {error}") from error
    check_buffers(program, collective)
    return collective


def check_buffers(program: Program, collective: Collective) -> None:
    """Raise InvalidInput when the program's buffers are longer than the collective's.

    Shorter ones are fine: in-place programs often use only one of the two.
    """
    for gpu in program.gpus:
        for word, has, wants in (
            ("input", gpu.input_chunks, collective.input_chunks[gpu.rank]),
            ("output", gpu.output_chunks, collective.output_chunks[gpu.rank]),
        ):
            if has > wants:
                raise _refuse(
                    program,
                    f"rank {gpu.rank} has {has} {word} chunks; {collective.name} with "
                    f"{collective.size_chunks} chunks on {collective.ranks} ranks has {wants}",
                )


def _refuse(program: Program, message: str) -> InvalidInput:
    return InvalidInput([Diagnostic(program.name or "<program>", 0, 0, "R110", message)])


def _origins(program: Program, order: Trace) -> list[dict[int, Origin]]:
    """Per rank: for each output chunk that was written, the input chunk whose copy it is."""
    cells: list[dict[tuple[str, int], Origin]] = [
        {("i", x): (gpu.rank, x) for x in range(gpu.input_chunks)} for gpu in program.gpus
    ]
    wire: dict[tuple[int, int, int], list[Origin | None]] = {}
    for place in order.order:
        rank, tb_index, number = place
        tb = program.gpus[rank].threadblocks[tb_index]
        step = tb.steps[number]
        if step.kind not in ("s", "r", "rcs", "cpy", "nop"):
            raise ValueError(f"a step of kind {step.kind} reduces, this collective only moves data")
        operands = local_operands(step)
        if step.kind in ("s", "cpy"):
            buffer, offset = operands[0]
            values = [cells[rank].get((buffer, offset + x)) for x in range(step.count)]
        elif step.kind in ("r", "rcs"):
            values = wire.pop((tb.recv, rank, order.recv_tag[place]))
        if step.kind in ("r", "rcs", "cpy"):
            buffer, offset = operands[-1]
            for x, value in enumerate(values):
                if value is not None:
                    cells[rank][buffer, offset + x] = value
        if step.kind in ("s", "rcs"):
            wire[rank, tb.send, order.send_tag[place]] = values
    return [{x: v for (buffer, x), v in sorted(held.items()) if buffer == "o"} for held in cells]


def _demand(program: Program, order: Trace) -> list[list[int]]:
    """demand[i][j]: chunks that rank i sends to rank j."""
    demand = [[0] * program.ranks for _ in program.gpus]
    next_input: dict[int, int] = {}
    for destination, cells in enumerate(_origins(program, order)):
        for source, _ in cells.values():
            demand[source][destination] += 1
        expected = [s for s in range(program.ranks) for _ in range(demand[s][destination])]
        if [source for source, _ in cells.values()] != expected or sorted(cells) != list(range(len(cells))):
            raise ValueError(f"rank {destination} does not receive its data in the order of the sources")
        for source, offset in cells.values():
            if offset != next_input.get(source, 0):
                raise ValueError(f"rank {source} does not hold its data in the order of the destinations")
            next_input[source] = offset + 1
    return demand
