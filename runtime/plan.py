"""One rank's flat graph of operations: a send, a receive, a copy or a reduction over ranges of chunks.

An operation starts when its predecessors are done; they come before it in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Buffer "i" | "o" | "s" | "t" (staging), first chunk, chunks; or "f" (frames), first slot, slots.
Range = tuple[str, int, int]
Message = tuple[int, int, int]  # source, destination, tag

# Above this many operations the sets of `essential` cost more memory than shorter lists are worth.
REDUCTION_OPERATIONS = 20_000


@dataclass(frozen=True, slots=True)
class Frame:
    """A coded chunk in an area of frames: which one there, and whose data it holds."""

    area: int  # first slot of the area
    index: int
    rank: int  # that coded it
    chunk: int  # in the buffer from which it was coded


@dataclass(frozen=True, slots=True)
class Operation:
    """One node of the graph. For reduce and accumulate: dst = local (op) received."""

    # "send" | "recv" | "copy" | "reduce"; in coded plans (runtime/coded.py) also
    # "encode" (src to the frames of the area dst), "decode" (frames to dst), "accumulate" (reduce, received as frames)
    # and "pack" (frames of any areas to the area dst).
    kind: str
    dst: Range | None  # None for send
    src: Range | None  # None for recv; the local operand of reduce
    received: Range | None  # the other operand of reduce
    peer: int  # of send and recv, else -1
    channel: int
    tag: int
    threadblock: int
    step: int
    predecessors: tuple[int, ...]  # indices of earlier operations
    order: tuple[int, ...] = ()  # those of them that it waits for whatever data they bring
    frames: tuple[Frame, ...] = ()  # one for each chunk
    carries: Range | None = None  # of a message of frames: the chunks that it would move uncoded
    chunks: tuple[
        int, ...
    ] = ()  # of encode: for each frame the collective's chunk that it is a value of; -1: none


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does. Operations stand in trace order; connections' messages in theirs."""

    rank: int
    operations: tuple[Operation, ...]
    staging_chunks: int
    # Whether a staged message may be left with its sender until the next operation, which uses it, has read it.
    direct: bool = False
    slots: int = 0  # of frames
    codings: int = 0  # how often a value was coded, at most, before it ends in this rank's buffers


def staged(op: Operation) -> bool:
    """Whether this is a receive into staging memory; the operation after it uses what it brought."""
    return op.kind == "recv" and op.dst is not None and op.dst[0] == "t"


def essential(operations: Sequence[Operation]) -> list[tuple[int, ...]]:
    """The predecessors of each operation without those that come before another predecessor anyway."""
    if len(operations) > REDUCTION_OPERATIONS:
        return [op.predecessors for op in operations]
    before: list[int] = []  # for each operation the set of all that come before it, as bits
    found = []
    for op in operations:
        seen, kept = 0, []
        for number in reversed(op.predecessors):
            if not seen >> number & 1:
                kept.append(number)
                seen |= before[number] | 1 << number
        before.append(seen)
        found.append(tuple(reversed(kept)))
    return found


def followers(predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each operation those that wait for it."""
    found: list[list[int]] = [[] for _ in predecessors]
    for number, needed in enumerate(predecessors):
        for before in needed:
            found[before].append(number)
    return found
