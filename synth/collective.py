"""What a collective must achieve: where each chunk is before, and where it must be after.

Sizes follow nccl-tests: `size_bytes` is the number that it prints (allgather, reduce-scatter, alltoall,
gather, scatter: the whole array per rank; allreduce, broadcast, reduce, sendrecv: the buffer).

Several groups of ranks can do the same collective at the same time. They are one collective here: each group has
chunks of its own, listed group after group, and all chunks compete for the same links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

NAMES = (
    "allgather", "alltoall", "alltoallv", "reducescatter", "allreduce",
    "broadcast", "reduce", "gather", "scatter", "sendrecv", "custom",
)  # fmt: skip
COMBINING = frozenset({"reducescatter", "allreduce", "reduce"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
# What groups of ranks can do side by side; the others name their own pairs or places.
GROUPED = frozenset({
    "allgather", "alltoall", "reducescatter", "allreduce", "broadcast", "reduce", "gather", "scatter",
})  # fmt: skip

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of data. Pairs are (rank, chunk offset in that rank's input or output buffer).

    Not combining: any one source's copy serves. Combining: the value wanted is the reduction of the
    pieces at ALL sources, each exactly once.
    """

    sources: tuple[tuple[int, int], ...]
    destinations: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on `ranks` ranks, cut into chunks of equal size. Chunk ids are indices into `chunks`."""

    name: str  # one of NAMES
    ranks: int
    chunks: tuple[Chunk, ...]
    combining: bool
    input_chunks: tuple[int, ...]  # length of each rank's input buffer, in chunks
    output_chunks: tuple[int, ...]
    # In place, both buffers are views of one memory; per rank the offsets (input, output) of the views in it,
    # or None when the two stay separate on that rank.
    inplace: tuple[tuple[int, int] | None, ...]
    size_chunks: int  # how many chunks the nccl-tests size spans; chunk bytes = size / size_chunks
    # The k of "each natural block is cut into k chunks". Groups of unequal size: of each part of the size that the
    # least common multiple of their sizes makes, so that chunks are equal everywhere.
    partition: int
    root: int = 0  # of rooted collectives; with groups the place in each group
    groups: Groups = ()  # ranks in the groups' own order, each rank at most once; (): all ranks are one group

    @property
    def teams(self) -> Groups:
        """The groups; all ranks where there are none."""
        return self.groups or (tuple(range(self.ranks)),)

    @property
    def group_ranks(self) -> int:
        """Ranks of the largest group, the n of busbw."""
        return max(len(group) for group in self.teams)

    @property
    def title(self) -> str:
        """The name for people: "allreduce", "allreduce in 8 groups of 2"."""
        return titled(self.name, self.groups)

    def chunk_bytes(self, size_bytes: int) -> Fraction:
        """Bytes of one chunk when the collective has this nccl-tests size."""
        return Fraction(size_bytes, self.size_chunks)

    def check(self) -> None:
        """Raise ValueError when offsets, lengths or ranks are inconsistent."""
        if self.name not in NAMES or self.ranks < 1 or self.size_chunks < 1:
            raise ValueError("unknown collective, no ranks or no chunks")
        if not len(self.input_chunks) == len(self.output_chunks) == len(self.inplace) == self.ranks:
            raise ValueError("per-rank fields must have one entry a rank")
        for index, chunk in enumerate(self.chunks):
            if not chunk.sources or not chunk.destinations:
                raise ValueError(f"chunk {index} has no source or no destination")
            for pairs, lengths in (
                (chunk.sources, self.input_chunks),
                (chunk.destinations, self.output_chunks),
            ):
                for rank, offset in pairs:
                    if not (0 <= rank < self.ranks and 0 <= offset < lengths[rank]):
                        raise ValueError(f"chunk {index}: rank {rank} offset {offset} is out of range")
        if self.groups:
            check_groups(self.groups, self.ranks)
            self._check_apart()

    def _check_apart(self) -> None:
        """No chunk has to do with two groups, and each group has as many chunks, one group after the other."""
        of = {rank: number for number, group in enumerate(self.groups) for rank in group}
        places = [{of.get(r, -1) for r, _ in (*c.sources, *c.destinations)} for c in self.chunks]
        if any(len(place) != 1 or -1 in place for place in places):
            raise ValueError("a chunk belongs to no group, or to several")
        numbers = [min(place) for place in places]
        if numbers != sorted(numbers):
            raise ValueError("the chunks do not stand group after group")


def titled(name: str, groups: Sequence[Sequence[int]]) -> str:
    """A collective's name with its groups, for people."""
    if not groups:
        return name
    sizes = sorted({len(group) for group in groups})
    of = f"of {sizes[0]}" if len(sizes) == 1 else f"of {sizes[0]} to {sizes[-1]}"
    return f"{name} in {len(groups)} group{'s' if len(groups) > 1 else ''} {of}"


def check_groups(groups: Sequence[Sequence[int]], ranks: int) -> None:
    """Raise ValueError unless groups have two or more ranks each, all of which exist and stand once."""
    if not groups:
        raise ValueError("there are no groups")
    home: dict[int, int] = {}
    for number, group in enumerate(groups):
        if len(group) < 2:
            one = f"rank {group[0]} alone" if group else "nobody"
            raise ValueError(
                f"group {number} is {one}: a group has two ranks or more; leave ranks out that take no part"
            )
        for rank in group:
            if not 0 <= rank < ranks:
                raise ValueError(f"group {number}: rank {rank} does not exist, the ranks are 0..{ranks - 1}")
            if home.setdefault(rank, number) != number:
                raise ValueError(f"rank {rank} is in group {home[rank]} and in group {number}")
        if len(set(group)) != len(group):
            twice = next(rank for rank in group if group.count(rank) > 1)
            raise ValueError(f"group {number}: rank {twice} stands twice")


def build(
    name: str,
    ranks: int,
    partition: int = 1,
    *,
    root: int = 0,
    demand: Sequence[Sequence[int]] | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> Collective:
    """The collective `name` with every natural block cut into `partition` chunks.

    groups: each of them does the collective for itself, all at the same time; of the names in GROUPED. `root` is then
    the place in a group. Ranks in no group have empty buffers and may pass on what others send. demand: alltoallv
    only, demand[i][j] = blocks that rank i sends to rank j. pairs: sendrecv only, (source, destination) with each rank
    at most once on either side; default: each rank to the next.
    Raises ValueError for an unknown name or arguments out of range.
    """
    if name not in NAMES or name == "custom":
        raise ValueError(
            f"unknown collective {name!r}; known: {', '.join(n for n in NAMES if n != 'custom')}"
        )
    if ranks < 1 or partition < 1:
        raise ValueError(f"ranks and partition must be at least 1, found {ranks} and {partition}")
    if groups is not None:
        return _grouped(name, ranks, partition, root, groups)
    if not 0 <= root < ranks:
        raise ValueError(f"the root must be one of the ranks 0..{ranks - 1}, found {root}")
    n, k = ranks, partition
    every = range(n)
    same = tuple((0, 0) for _ in every)
    chunks: list[Chunk] = []
    size_chunks = n * k
    inputs: Sequence[int]
    outputs: Sequence[int]
    inplace: Sequence[tuple[int, int] | None]
    if name == "allgather":
        chunks = [Chunk(((r, j),), tuple((d, r * k + j) for d in every)) for r in every for j in range(k)]
        inputs, outputs, inplace = [k] * n, [n * k] * n, [(r * k, 0) for r in every]
    elif name == "reducescatter":
        chunks = [Chunk(tuple((s, r * k + j) for s in every), ((r, j),)) for r in every for j in range(k)]
        inputs, outputs, inplace = [n * k] * n, [k] * n, [(0, r * k) for r in every]
    elif name == "alltoall":
        chunks = [Chunk(((s, d * k + j),), ((d, s * k + j),)) for s in every for d in every for j in range(k)]
        inputs, outputs, inplace = [n * k] * n, [n * k] * n, same
    elif name == "alltoallv":
        if demand is None:
            raise ValueError("the demand is missing")
        if len(demand) != n or any(len(row) != n or min(row) < 0 for row in demand):
            found = f"{len(demand)} x {len(demand[0]) if demand else 0}"
            raise ValueError(f"the demand must be {n} x {n} counts that are not negative, found {found}")
        received = [0] * n
        inputs_v = [0] * n
        for s in every:
            for d in every:
                for _ in range(demand[s][d] * k):
                    # Output offsets are in source order because sources are walked in order.
                    chunks.append(Chunk(((s, inputs_v[s]),), ((d, received[d]),)))
                    inputs_v[s] += 1
                    received[d] += 1
        inputs, outputs, inplace = inputs_v, received, [None] * n
        size_chunks = max(1, *inputs_v, *received)
    elif name in ("allreduce", "broadcast", "reduce"):
        total = n * k if name == "allreduce" else k
        size_chunks = total
        for j in range(total):
            holders = tuple((r, j) for r in every)
            only_root = ((root, j),)
            sources = only_root if name == "broadcast" else holders
            chunks.append(Chunk(sources, only_root if name == "reduce" else holders))
        inputs, outputs, inplace = [total] * n, [total] * n, same
    elif name == "gather":
        chunks = [Chunk(((r, j),), ((root, r * k + j),)) for r in every for j in range(k)]
        inputs, outputs = [k] * n, [n * k if r == root else 0 for r in every]
        inplace = [(root * k, 0) if r == root else None for r in every]
    elif name == "scatter":
        chunks = [Chunk(((root, r * k + j),), ((r, j),)) for r in every for j in range(k)]
        inputs, outputs = [n * k if r == root else 0 for r in every], [k] * n
        inplace = [(0, root * k) if r == root else None for r in every]
    else:  # sendrecv
        given = [(r, (r + 1) % n) for r in every] if pairs is None else list(pairs)
        for side in (0, 1):
            ends = [pair[side] for pair in given]
            if len(set(ends)) != len(ends) or any(not 0 <= r < n for r in ends):
                raise ValueError("sendrecv pairs must name existing ranks, each at most once on either side")
        chunks = [Chunk(((s, j),), ((d, j),)) for s, d in given for j in range(k)]
        inputs, outputs, inplace = [k] * n, [k] * n, [None] * n
        size_chunks = k
    return Collective(
        name, n, tuple(chunks), name in COMBINING, tuple(inputs), tuple(outputs), tuple(inplace),
        size_chunks, k, root if name in ROOTED else 0,
    )  # fmt: skip


def _grouped(name: str, ranks: int, partition: int, root: int, groups: Sequence[Sequence[int]]) -> Collective:
    """The collective of each group, renumbered to the cluster's ranks, one after the other.

    Every group's size is the same number of bytes, so a group of n is cut into n parts where the least common multiple
    of all sizes is L, and each part into L / n times `partition` chunks: all chunks are then equally long.
    """
    if name not in GROUPED:
        raise ValueError(f"{name} names its own pairs or places; groups are for {', '.join(sorted(GROUPED))}")
    check_groups(groups, ranks)
    least = min(len(group) for group in groups)
    if not 0 <= root < least:
        raise ValueError(f"the root is a place in every group, 0..{least - 1} in the smallest, found {root}")
    parts = math.lcm(*(len(group) for group in groups))
    chunks: list[Chunk] = []
    inputs, outputs = [0] * ranks, [0] * ranks
    inplace: list[tuple[int, int] | None] = [None] * ranks
    size_chunks = partition
    for group in groups:
        whole = name in ("broadcast", "reduce")
        own = build(name, len(group), partition if whole else partition * parts // len(group), root=root)
        size_chunks = own.size_chunks
        for chunk in own.chunks:
            sides = (tuple((group[r], x) for r, x in side) for side in (chunk.sources, chunk.destinations))
            chunks.append(Chunk(*sides))
        for place, rank in enumerate(group):
            inputs[rank], outputs[rank] = own.input_chunks[place], own.output_chunks[place]
            inplace[rank] = own.inplace[place]
    return Collective(
        name, ranks, tuple(chunks), name in COMBINING, tuple(inputs), tuple(outputs), tuple(inplace),
        size_chunks, partition, root if name in ROOTED else 0, tuple(tuple(group) for group in groups),
    )  # fmt: skip


def of_group(collective: Collective, number: int) -> tuple[Collective, tuple[int, ...]]:
    """One group's collective with all others idle, and which chunks of the whole its chunks are."""
    members = frozenset(collective.groups[number])
    kept = tuple(i for i, c in enumerate(collective.chunks) if c.sources[0][0] in members)
    mine = [rank in members for rank in range(collective.ranks)]
    alone = replace(
        collective,
        chunks=tuple(collective.chunks[i] for i in kept),
        input_chunks=tuple(x * own for x, own in zip(collective.input_chunks, mine, strict=True)),
        output_chunks=tuple(x * own for x, own in zip(collective.output_chunks, mine, strict=True)),
        inplace=tuple(x if own else None for x, own in zip(collective.inplace, mine, strict=True)),
        groups=(collective.groups[number],),
    )
    return alone, kept


def refined(collective: Collective, parts: int) -> Collective:
    """The same collective with every chunk c cut into the chunks c * parts ... c * parts + parts - 1."""

    def cut(pairs: tuple[tuple[int, int], ...], part: int) -> tuple[tuple[int, int], ...]:
        return tuple((rank, offset * parts + part) for rank, offset in pairs)

    return replace(
        collective,
        chunks=tuple(
            Chunk(cut(chunk.sources, part), cut(chunk.destinations, part))
            for chunk in collective.chunks
            for part in range(parts)
        ),
        input_chunks=tuple(length * parts for length in collective.input_chunks),
        output_chunks=tuple(length * parts for length in collective.output_chunks),
        inplace=tuple(
            None if views is None else (views[0] * parts, views[1] * parts) for views in collective.inplace
        ),
        size_chunks=collective.size_chunks * parts,
        partition=collective.partition * parts,
    )


def bus_factor(name: str, ranks: int) -> Fraction:
    """busbw = algbw * this (nccl-tests, doc/PERFORMANCE.md)."""
    n = ranks
    table: dict[str, Callable[[], Fraction]] = {
        "allreduce": lambda: Fraction(2 * (n - 1), n),
        "allgather": lambda: Fraction(n - 1, n),
        "reducescatter": lambda: Fraction(n - 1, n),
        "alltoall": lambda: Fraction(n - 1, n),
        "gather": lambda: Fraction(n - 1, n),
        "scatter": lambda: Fraction(n - 1, n),
    }
    return table.get(name, lambda: Fraction(1))()
