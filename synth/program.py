"""A program: per rank, threadblocks of steps over buffers. MSCCL XML is its text form, both ways.

Buffers: "i" input, "o" output, "s" scratch; offsets and counts are in chunks.
Step kinds (MSCCL's): s send, r recv, rcs recv-copy-send, rrs recv-reduce-send, rrc recv-reduce-copy,
rrcs recv-reduce-copy-send, cpy local copy, re local reduce (dst += src), nop.
For r and rcs `src_*` names the SENDER's buffer; for rrc, rrs, rrcs it is the LOCAL operand.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP_KINDS = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
SENDS = frozenset({"s", "rcs", "rrs", "rrcs"})
RECEIVES = frozenset({"r", "rcs", "rrs", "rrc", "rrcs"})
PROTOCOLS = ("Simple", "LL", "LL128")
FIFO_DEPTH = {"Simple": 2, "LL": 8, "LL128": 8}
# Data in one slot of a connection's FIFO with NCCL's default buffers: 4 MiB in 2 slots; 8 lines of 8 bytes for each of
# 512 threads; 120 words of 8 bytes for each of 640 threads, 15 of 16 of them data.
SLOT_BYTES = {"Simple": 2 << 20, "LL": 32 << 10, "LL128": 576_000}


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a threadblock."""

    kind: str
    src_buffer: str  # "i" | "o" | "s"
    src_offset: int
    dst_buffer: str
    dst_offset: int
    count: int  # chunks; 0 for nop
    depends: tuple[int, int] | None = None  # (threadblock id, step index) on the same rank that must be done
    has_dependents: bool = False
    line: int = 0  # line in the XML file it was read from, 0 if made here


@dataclass(frozen=True, slots=True)
class Threadblock:
    """Steps in order; at most one send peer and one receive peer (-1: none), on one channel."""

    id: int
    send: int
    recv: int
    channel: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank runs, and the lengths of its buffers in chunks."""

    rank: int
    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    threadblocks: tuple[Threadblock, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """All ranks' programs and the attributes of MSCCL's <algo>."""

    name: str
    collective: str  # MSCCL's coll: allgather, allreduce, alltoall, alltoallv, broadcast, ...
    protocol: str  # Simple | LL | LL128
    channels: int
    chunks_per_loop: int  # nchunksperloop: the element count is cut into this many chunks
    ranks: int
    inplace: bool
    outofplace: bool
    min_bytes: int
    max_bytes: int
    gpus: tuple[RankProgram, ...]
    reduce_op: str = "sum"
    root: int = 0


def sent(program: Program) -> int:
    """How many messages all ranks together send."""
    return sum(step.kind in SENDS for gpu in program.gpus for tb in gpu.threadblocks for step in tb.steps)
