"""Where the chunks of a collective are before and after, by arithmetic on their numbers.

`collective.build` lists the same as objects; a thousand ranks' alltoall has a million of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# name -> who has a chunk at the start, who wants it. "block": the rank that its block is numbered by; "from", "to":
# the two ranks of an alltoall's block; "root"; "all": every rank. All ranks at the start means a contribution of each.
_SIDES = {
    "allgather": ("block", "all"),
    "alltoall": ("from", "to"),
    "reducescatter": ("all", "block"),
    "allreduce": ("all", "all"),
    "broadcast": ("root", "all"),
    "reduce": ("all", "root"),
    "gather": ("block", "root"),
    "scatter": ("root", "block"),
}
NAMED = tuple(_SIDES)  # collectives that a name, ranks, partition and root determine


@dataclass(frozen=True, slots=True)
class Places:
    """The chunks of `collective.build(name, ranks, partition, root=root)`; name is one of NAMED."""

    name: str
    ranks: int
    partition: int
    root: int = 0

    @property
    def combining(self) -> bool:
        """Whether every rank contributes to every chunk."""
        return _SIDES[self.name][0] == "all"

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        blocks = {"alltoall": self.ranks**2, "broadcast": 1, "reduce": 1}.get(self.name, self.ranks)
        return blocks * self.partition

    def chunk_bytes(self, size_bytes: int) -> Fraction:
        """Bytes of one chunk when the collective has this nccl-tests size."""
        blocks = 1 if self.name in ("broadcast", "reduce") else self.ranks
        return Fraction(size_bytes, blocks * self.partition)

    def source(self, chunks: Ints) -> Ints | None:
        """Per chunk the rank that has it at the start; None: all contribute."""
        return self._rank(_SIDES[self.name][0], chunks)

    def destination(self, chunks: Ints) -> Ints | None:
        """Per chunk the rank that wants it; None: all do."""
        return self._rank(_SIDES[self.name][1], chunks)

    def _rank(self, side: str, chunks: Ints) -> Ints | None:
        if side == "all":
            return None
        if side == "root":
            return np.full(len(chunks), self.root, np.int64)
        block = chunks // self.partition
        if side == "from":
            return block // self.ranks
        return block % self.ranks  # of an alltoall the second rank, else the block itself
