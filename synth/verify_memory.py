"""Symbolic execution: which contributions every chunk of every buffer holds, and who touched it.

A value is the multiset of the input chunks that were added up in it, so a contribution that enters twice is
seen whatever the reduction is. One execution stands for all: if no two conflicting accesses are unordered
(`verify_races`), every order of execution computes the same values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from taccl.synth.collective import Collective
from taccl.synth.program import Step
from taccl.synth.program_graph import ProgramGraph
from taccl.synth.verify_execution import finding_at
from taccl.synth.verify_finding import Finding

UNWRITTEN, GARBAGE = -1, -2  # value ids below 0: never written; made from something never written
IN_PLACE, OUT_OF_PLACE = "in place", "out of place"


@dataclass(frozen=True, slots=True)
class Memory:
    """Where each buffer of each rank lies in one line of cells, a cell a chunk."""

    base: tuple[dict[str, int], ...]  # per rank and buffer
    length: tuple[dict[str, int], ...]  # chunks that may be touched
    separate_input: tuple[bool, ...]  # the input is not also the output: it must survive
    cells: int

    def name(self, cell: int, rank: int, buffer: str) -> str:
        """The chunk of a cell as the program calls it, e.g. "s[3]"."""
        return f"{buffer}[{cell - self.base[rank][buffer]}]"


def lay_out(graph: ProgramGraph, collective: Collective, mode: str) -> Memory:
    """Place the buffers; in place, input and output of a rank are views of one memory."""
    base, length, separate = [], [], []
    cells = 0
    for gpu in graph.program.gpus:
        rank = gpu.rank
        sizes = (collective.input_chunks[rank], collective.output_chunks[rank])
        views = collective.inplace[rank] if mode == IN_PLACE else None
        input_at, output_at = views if views is not None else (0, sizes[0])
        shared = max(input_at + sizes[0], output_at + sizes[1])
        base.append({"i": cells + input_at, "o": cells + output_at, "s": cells + shared})
        length.append({
            "i": min(sizes[0], gpu.input_chunks), "o": min(sizes[1], gpu.output_chunks),
            "s": gpu.scratch_chunks,
        })  # fmt: skip
        separate.append(views is None)
        cells += shared + gpu.scratch_chunks
    return Memory(tuple(base), tuple(length), tuple(separate), cells)


def operands(step: Step) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """(buffer, offset) of what a step reads, and of what it writes, on its own rank."""
    src, dst = (step.src_buffer, step.src_offset), (step.dst_buffer, step.dst_offset)
    if step.kind in ("s", "rrs"):
        return (src,), ()
    if step.kind in ("r", "rcs"):
        return (), (dst,)
    if step.kind == "re":
        return (src, dst), (dst,)
    if step.kind == "nop":
        return (), ()
    return (src,), (dst,)  # rrc, rrcs, cpy


def check_places(graph: ProgramGraph, memory: Memory, mode: str) -> Iterator[Finding]:
    """Accesses outside a buffer, writes to an input that must survive, operands that overlap by halves."""
    for index, step in enumerate(graph.steps):
        rank = graph.places[index][0]
        reads, writes = operands(step)
        for buffer, offset in dict.fromkeys(reads + writes):
            limit = memory.length[rank][buffer]
            if offset < 0 or offset + step.count > limit:
                verb = "writes" if (buffer, offset) in writes else "reads"
                yield finding_at(
                    graph, index, "V401",
                    f"{verb} {buffer}[{offset}..{offset + step.count - 1}], but {buffer} has {limit} chunks",
                    mode=mode,
                )  # fmt: skip
        for buffer, offset in writes:
            if buffer == "i" and memory.separate_input[rank]:
                yield finding_at(
                    graph, index, "V403",
                    f"writes i[{offset}], but out of place the input must stay as it is",
                    mode=mode,
                )  # fmt: skip
            for other, start in reads:
                apart = memory.base[rank][buffer] + offset - memory.base[rank][other] - start
                if 0 < abs(apart) < step.count:
                    yield finding_at(
                        graph, index, "V404",
                        f"source {other}[{start}..] and destination {buffer}[{offset}..] overlap without "
                        "being the same, so the outcome depends on the order of single elements",
                        mode=mode,
                    )  # fmt: skip


@dataclass(slots=True)
class Execution:
    """What one symbolic execution saw."""

    findings: list[Finding] = field(default_factory=list)
    # Accesses of one cell by two threadblocks that must not happen at once: (earlier step, later step) ->
    # cell, earlier writes, later writes.
    conflicts: dict[tuple[int, int], tuple[int, bool, bool]] = field(default_factory=dict)


class _Values:
    """Interned multisets of contributions; a contribution is numbered by its place in `atoms`."""

    def __init__(self, most: int) -> None:
        self.limit = 2 * most + 2  # longer sums are wrong anyway and are cut, so that sums cannot explode
        self.ids: dict[tuple[int, ...], int] = {}
        self.of: list[tuple[int, ...]] = []
        self.sums: dict[tuple[int, int], int] = {}
        self.doubled_by: dict[int, int] = {}  # value with a repeated contribution -> step that made it

    def intern(self, atoms: tuple[int, ...]) -> int:
        value = self.ids.setdefault(atoms, len(self.of))
        if value == len(self.of):
            self.of.append(atoms)
        return value

    def add(self, a: int, b: int, step: int) -> int:
        if a < 0 or b < 0:
            return GARBAGE
        key = (a, b) if a < b else (b, a)
        total = self.sums.get(key)
        if total is None:
            merged = sorted(self.of[a] + self.of[b])
            total = self.sums[key] = self.intern(tuple(merged[: self.limit]))
            if a in self.doubled_by or b in self.doubled_by:
                self.doubled_by.setdefault(total, self.doubled_by.get(a, self.doubled_by.get(b, step)))
            elif any(x == y for x, y in pairwise(merged)):
                self.doubled_by.setdefault(total, step)
        return total


def execute_symbolically(
    graph: ProgramGraph, order: Sequence[int], collective: Collective, memory: Memory, mode: str
) -> Execution:
    """Run the steps in a possible order and compare every wanted output chunk with what it must hold.

    O(steps * count + contributions added). The order must come from `verify_execution.execute`.
    """
    result = Execution()
    atoms: list[tuple[int, int]] = []  # (rank, input offset)
    numbers: dict[tuple[int, int], int] = {}
    most = max((len(c.sources) for c in collective.chunks), default=1) if collective.combining else 1
    values = _Values(most)
    held = [UNWRITTEN] * memory.cells
    for chunk in collective.chunks:
        for rank, offset in chunk.sources:
            if (rank, offset) not in numbers:
                numbers[rank, offset] = len(atoms)
                held[memory.base[rank]["i"] + offset] = values.intern((len(atoms),))
                atoms.append((rank, offset))
    payload: dict[int, list[int]] = {}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    block = graph.threadblock_of
    conflicts = result.conflicts

    def read(index: int, buffer: str, offset: int, count: int, note: bool = True) -> list[int]:
        rank = graph.places[index][0]
        start = memory.base[rank][buffer] + offset
        chunks = held[start : start + count]
        for cell in range(start, start + count):
            last = writer.get(cell)
            if last is not None and block[last] != block[index]:
                conflicts.setdefault((last, index), (cell, True, False))
            if note:
                readers.setdefault(cell, []).append(index)
        if UNWRITTEN in chunks:
            missing = offset + chunks.index(UNWRITTEN)
            result.findings.append(finding_at(
                graph, index, "V402", f"reads {buffer}[{missing}], to which nothing has been written",
                mode=mode,
            ))  # fmt: skip
            chunks = [GARBAGE if value == UNWRITTEN else value for value in chunks]
        return chunks

    def write(index: int, buffer: str, offset: int, chunks: Sequence[int]) -> None:
        rank = graph.places[index][0]
        start = memory.base[rank][buffer] + offset
        for cell in range(start, start + len(chunks)):
            for reader in readers.pop(cell, ()):
                if block[reader] != block[index]:
                    conflicts.setdefault((reader, index), (cell, False, True))
            last = writer.get(cell)
            if last is not None and block[last] != block[index]:
                conflicts[last, index] = (cell, True, True)
            writer[cell] = index
        held[start : start + len(chunks)] = chunks

    for index in order:
        step = graph.steps[index]
        kind, count = step.kind, step.count
        if kind == "nop":
            continue
        if kind in ("s", "cpy", "re", "rrs", "rrc", "rrcs"):
            local = read(index, step.src_buffer, step.src_offset, count)
        if kind in ("r", "rcs", "rrs", "rrc", "rrcs"):
            chunks = payload.pop(graph.source[index])
            if kind[1:2] == "r":
                chunks = [values.add(a, b, index) for a, b in zip(chunks, local, strict=True)]
        elif kind == "re":
            mine = read(index, step.dst_buffer, step.dst_offset, count, note=False)
            chunks = [values.add(a, b, index) for a, b in zip(mine, local, strict=True)]
        else:
            chunks = local
        if kind in ("r", "rcs", "rrc", "rrcs", "cpy", "re"):
            write(index, step.dst_buffer, step.dst_offset, chunks)
        if kind in ("s", "rcs", "rrs", "rrcs"):
            payload[index] = chunks
    result.findings += _check_outputs(graph, collective, memory, mode, held, writer, values, atoms, numbers)
    return result


def _check_outputs(
    graph: ProgramGraph,
    collective: Collective,
    memory: Memory,
    mode: str,
    held: Sequence[int],
    writer: dict[int, int],
    values: _Values,
    atoms: Sequence[tuple[int, int]],
    numbers: dict[tuple[int, int], int],
) -> Iterator[Finding]:
    for chunk in collective.chunks:
        sources = sorted(numbers[source] for source in chunk.sources)
        if collective.combining:
            allowed = {values.intern(tuple(sources))}
        else:
            allowed = {values.intern((source,)) for source in sources}
        for rank, offset in chunk.destinations:
            cell = memory.base[rank]["o"] + offset
            value = held[cell]
            if value in allowed:
                continue
            wanted = _describe(Counter(sources), atoms, "the sum of " if collective.combining else "")
            if value == UNWRITTEN:
                yield Finding(
                    "V406", f"rank {rank}: output chunk {offset} is never written; it must hold {wanted}",
                    rank=rank, mode=mode,
                )  # fmt: skip
                continue
            index = writer.get(cell, -1)
            if value in values.doubled_by:
                index = values.doubled_by[value]
            if value == GARBAGE:
                holds = "data that nobody wrote"
            else:
                holds = _describe(Counter(values.of[value]), atoms, "")
                holds += _difference(Counter(values.of[value]), Counter(sources), atoms, collective.combining)
            reason = f"rank {rank}: output chunk {offset} must hold {wanted}, but holds {holds}"
            code = "V408" if value in values.doubled_by else "V405"
            if index < 0:
                yield Finding(code, reason + "; nothing writes it", rank=rank, mode=mode)
            else:
                doing = "added the second time" if code == "V408" else "last written"
                place, number = graph.places[index], graph.steps[index].line
                yield Finding(
                    code, f"{reason}; {doing} by {graph.where(index)}", "error", *place, number, mode
                )  # fmt: skip


def _describe(value: Counter[int], atoms: Sequence[tuple[int, int]], prefix: str) -> str:
    names = [
        f"rank {atoms[a][0]}'s input chunk {atoms[a][1]}" + (f" {n} times" if n > 1 else "")
        for a, n in sorted(value.items())
    ]
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    return (prefix if len(value) > 1 else "") + " + ".join(names)


def _difference(
    value: Counter[int], wanted: Counter[int], atoms: Sequence[tuple[int, int]], combining: bool
) -> str:
    if not combining:
        return ""
    lacking, surplus = wanted - value, value - wanted
    parts = []
    if lacking:
        parts.append("lacks " + _describe(lacking, atoms, ""))
    if surplus:
        parts.append("has too much of " + _describe(surplus, atoms, ""))
    return f" ({'; '.join(parts)})"
