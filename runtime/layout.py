"""Where the chunks of a collective begin and end for a given number of elements.

Every natural block (allgather, reducescatter, gather, scatter, alltoall(v): one rank's part; otherwise the
whole buffer) has `block_elements` elements and is cut into `block_chunks` pieces as evenly as possible: piece
j covers elements j*E//k up to (j+1)*E//k. Blocks lie one after another as MPI and NCCL lay them. When k does
not divide E the pieces differ by one element, and may be empty; the program then runs in padded memory where
every chunk has the length of the longest, so that any program, whatever it keeps where, moves whole chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from taccl.synth.collective import Collective


@dataclass(frozen=True, slots=True)
class Layout:
    """Chunk boundaries, the same on every rank."""

    block_elements: int  # nccl-tests' count
    block_chunks: int
    blocks: int  # how many blocks the nccl-tests size spans

    @property
    def chunk_elements(self) -> int:
        """Elements of the longest chunk."""
        return -(-self.block_elements // self.block_chunks)

    @property
    def padded(self) -> bool:
        """Whether chunks differ in length, so that the program runs in padded memory."""
        return self.block_elements % self.block_chunks != 0

    @property
    def elements(self) -> int:
        """Elements that the nccl-tests size counts."""
        return self.block_elements * self.blocks

    def start(self, chunk: int) -> int:
        """First element of a chunk in its buffer; of one past the last chunk, the buffer's length."""
        block, piece = divmod(chunk, self.block_chunks)
        return block * self.block_elements + piece * self.block_elements // self.block_chunks

    def pieces(self, chunks: int) -> np.ndarray:
        """(chunks, 2) int64: first and past-the-last element of each chunk of a buffer."""
        block, piece = np.divmod(np.arange(chunks, dtype=np.int64), self.block_chunks)
        size, k = self.block_elements, self.block_chunks
        return np.stack(
            [block * size + piece * size // k, block * size + (piece + 1) * size // k],
            axis=1,
        )


def layout_of(collective: Collective, chunks: int, elements: int) -> Layout:
    """The layout in which a buffer of so many chunks, one at least, has so many elements, or the most below."""
    unit = layout(collective, collective.size_chunks)
    return Layout(elements // max(1, chunks // unit.block_chunks), unit.block_chunks, unit.blocks)


def layout(collective: Collective, elements: int) -> Layout:
    """The layout of the largest size that has at most `elements` elements and equal blocks.

    Groups of unequal size: a block is a part of the size that all of them can be cut into.
    """
    if collective.name in ("allgather", "reducescatter", "gather", "scatter", "alltoall", "alltoallv"):
        chunks = collective.partition
    elif collective.name == "custom":
        chunks = 1
    else:
        chunks = collective.size_chunks
    blocks = collective.size_chunks // chunks
    return Layout(elements // blocks, chunks, blocks)
