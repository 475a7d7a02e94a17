"""Which collective a program claims to be, in the program's own chunks."""

from __future__ import annotations

from taccl.errors import CheckFailed
from taccl.synth.collective import NAMES, Chunk, Collective, build

# nchunksperloop of these is a multiple of the ranks.
_BLOCKS_OF_RANKS = frozenset({"allgather", "alltoall", "reducescatter", "gather", "scatter"})
_NEED_CALLER = frozenset(NAMES) - _BLOCKS_OF_RANKS - {"allreduce", "broadcast", "reduce"}


def collective_of(name: str, ranks: int, chunks_per_loop: int, root: int = 0) -> Collective:
    """The collective that the attributes coll, ngpus, nchunksperloop and root of a program name.

    nchunksperloop counts the larger of a rank's input and output: ngpus * k for allgather, alltoall,
    reducescatter, gather and scatter cut into k chunks a block, and the whole buffer for allreduce,
    broadcast and reduce. Raises CheckFailed when the name needs a demand that no attribute gives, or when
    ngpus does not divide nchunksperloop.
    """
    if name not in _BLOCKS_OF_RANKS and (name in _NEED_CALLER or name not in NAMES):
        raise CheckFailed(f"coll={name!r} does not say who sends what to whom: give the collective itself")
    if not 0 <= root < ranks or chunks_per_loop < 1:
        raise CheckFailed(f"root {root} is no rank of {ranks}, or nchunksperloop is below 1")
    if name in _BLOCKS_OF_RANKS:
        if chunks_per_loop % ranks:
            raise CheckFailed(
                f"nchunksperloop={chunks_per_loop} must be a multiple of the {ranks} ranks of {name}"
            )
        return build(name, ranks, chunks_per_loop // ranks, root=root)
    if name == "allreduce":
        if chunks_per_loop % ranks == 0:
            return build(name, ranks, chunks_per_loop // ranks)
        # Rings and trees over the whole buffer need no block for each rank.
        holders = [tuple((rank, j) for rank in range(ranks)) for j in range(chunks_per_loop)]
        length = (chunks_per_loop,) * ranks
        return Collective(
            name, ranks, tuple(Chunk(h, h) for h in holders), True, length, length, ((0, 0),) * ranks,
            chunks_per_loop, 1,
        )  # fmt: skip
    return build(name, ranks, chunks_per_loop, root=root)
