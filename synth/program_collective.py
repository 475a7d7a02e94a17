"""Which collective a program claims to be, in the program's own chunks."""

from __future__ import annotations

from collections.abc import Sequence

from taccl.errors import CheckFailed
from taccl.synth.collective import NAMES, Chunk, Collective, build

# nchunksperloop of these is a multiple of the ranks.
_BLOCKS_OF_RANKS = frozenset({"allgather", "alltoall", "reducescatter", "gather", "scatter"})
_WHOLE_BUFFER = frozenset({"allreduce", "broadcast", "reduce", "sendrecv"})


def collective_of(
    name: str,
    ranks: int,
    chunks_per_loop: int,
    root: int = 0,
    *,
    demand: Sequence[Sequence[int]] | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> Collective:
    """The collective that the attributes coll, ngpus, nchunksperloop and root of a program name.

    nchunksperloop counts the larger of a rank's input and output: ngpus * k for allgather, alltoall,
    reducescatter, gather and scatter cut into k chunks a block, and the whole buffer for allreduce,
    broadcast, reduce and sendrecv; for alltoallv, k times the longest buffer of the demand. demand and pairs
    (of alltoallv and sendrecv) stand in no attribute, nor do groups of ranks, for which nchunksperloop spans a
    group's size and root is a place in each. Raises CheckFailed when they are missing, when the name
    is unknown, or when nchunksperloop does not fit.
    """
    if not 0 <= root < ranks or chunks_per_loop < 1:
        raise CheckFailed(f"root {root} is no rank of {ranks}, or nchunksperloop is below 1")
    needs = {"alltoallv": ("demand", demand), "sendrecv": ("pairs", pairs)}.get(name)
    if name not in NAMES or name == "custom" or (needs is not None and needs[1] is None):
        missing = f"--{needs[0]}" if needs is not None else "--pre-post, or --collective and --groups,"
        raise CheckFailed(
            f"coll={name!r} does not say who gets what from whom: give {missing} as for taccl synth"
        )
    if groups is not None:
        return _of_groups(name, ranks, chunks_per_loop, root, groups)
    if name in _BLOCKS_OF_RANKS:
        block = ranks
    elif name in _WHOLE_BUFFER:
        block = 1
    else:
        block = _build(name, ranks, 1, root, demand, pairs).size_chunks
    if chunks_per_loop % block:
        of = f"the {ranks} ranks" if name in _BLOCKS_OF_RANKS else f"the longest buffer's {block} blocks"
        raise CheckFailed(f"nchunksperloop={chunks_per_loop} must be a multiple of {of} in {name}")
    if name != "allreduce":
        return _build(name, ranks, chunks_per_loop // block, root, demand, pairs)
    if chunks_per_loop % ranks == 0:
        return build(name, ranks, chunks_per_loop // ranks)
    # Rings and trees over the whole buffer need no block for each rank.
    holders = [tuple((rank, j) for rank in range(ranks)) for j in range(chunks_per_loop)]
    length = (chunks_per_loop,) * ranks
    return Collective(
        name, ranks, tuple(Chunk(h, h) for h in holders), True, length, length, ((0, 0),) * ranks,
        chunks_per_loop, 1,
    )  # fmt: skip


def _of_groups(
    name: str, ranks: int, chunks_per_loop: int, root: int, groups: Sequence[Sequence[int]]
) -> Collective:
    try:
        parts = build(name, ranks, 1, root=root, groups=groups).size_chunks
        if chunks_per_loop % parts:
            sizes = ", ".join(str(n) for n in sorted({len(group) for group in groups}))
            raise CheckFailed(
                f"nchunksperloop={chunks_per_loop} must be a multiple of {parts} in {name} in groups of {sizes}"
            )
        return build(name, ranks, chunks_per_loop // parts, root=root, groups=groups)
    except ValueError as error:
        raise CheckFailed(f"{name}: {error}") from error


def _build(
    name: str,
    ranks: int,
    partition: int,
    root: int,
    demand: Sequence[Sequence[int]] | None,
    pairs: Sequence[tuple[int, int]] | None,
) -> Collective:
    try:
        return build(name, ranks, partition, root=root, demand=demand, pairs=pairs)
    except ValueError as error:
        raise CheckFailed(f"{name}: {error}") from error
