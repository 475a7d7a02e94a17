"""From messages of representative chunks to all messages: their images under the elements of a group.

An element moves ranks, and with them links (parallel links keep their order) and chunks; times stay. Nothing here is
larger than its result, so a caller that takes a few elements at a time never holds the whole schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link_table import LinkTable
from taccl.synth.message_table import MessageTable
from taccl.synth.symmetric.group import Group

Ints = NDArray[np.int64]

# Collectives whose chunks move with ranks, and how many ranks name a block.
SYMMETRIC = {"allgather": 1, "reducescatter": 1, "allreduce": 1, "alltoall": 2}


@dataclass(frozen=True, slots=True, eq=False)
class LinkLookup:
    """Links by what joins them: the i-th link from src to dst is found by bisection."""

    ranks: int
    pair: Ints  # src * ranks + dst, ascending
    link: Ints  # the link at that place of `pair`
    ordinal: Ints  # per link: its place among the links that join the same two ranks

    def find(self, src: Ints, dst: Ints, ordinal: Ints) -> Ints:
        """Links, elementwise; -1 where there is none."""
        if not len(self.pair):
            return np.full(np.broadcast(src, dst).shape, -1, np.int64)
        wanted = src * self.ranks + dst
        place = np.searchsorted(self.pair, wanted) + ordinal
        inside = np.minimum(place, len(self.pair) - 1)
        return np.where((place == inside) & (self.pair[inside] == wanted), self.link[inside], -1)


def link_lookup(links: LinkTable, ranks: int) -> LinkLookup:
    """A lookup for the links of a topology of so many ranks; O(links log links)."""
    pair = links.src * ranks + links.dst
    link = np.argsort(pair, kind="stable")
    pair = pair[link]
    ordinal = np.empty(len(pair), np.int64)
    ordinal[link] = np.arange(len(pair)) - np.searchsorted(pair, pair)
    return LinkLookup(ranks, pair, link, ordinal)


def expanded(
    base: MessageTable,
    group: Group,
    elements: Ints,
    collective: str,
    ranks: int,
    partition: int,
    lookup: LinkLookup,
) -> MessageTable:
    """The images of all messages under `elements`, one element after the other.

    Chunk ids are those of `collective.build(collective, ranks, partition)`. Raises ValueError where an image of a link
    is none, and for a collective whose chunks do not move with ranks when there is more than the identity.
    """
    moved = group.image(elements[:, None], np.arange(ranks)[None, :])  # [elements, ranks]
    used, one, place = np.unique(base.link, return_index=True, return_inverse=True)
    link = lookup.find(moved[:, base.src[one]], moved[:, base.dst[one]], lookup.ordinal[used])
    if link.size and int(link.min()) < 0:
        where, which = np.argwhere(link < 0)[0]
        raise ValueError(f"element {elements[where]} of the group takes link {used[which]} to no link")
    count = len(elements)
    chunks = _chunk_images(base.chunks, moved, collective, ranks, partition)
    width = np.diff(base.first)
    first = np.zeros(count * len(base) + 1, np.int64)
    np.cumsum(np.tile(width, count), out=first[1:])
    flat = chunks.ravel()
    if len(flat) > count * len(base):  # chunks of a message ascend
        message = np.repeat(np.arange(count * len(base)), np.tile(width, count))
        flat = flat[np.lexsort((flat, message))]
    return MessageTable(
        link[:, place].ravel(),
        moved[:, base.src].ravel(),
        moved[:, base.dst].ravel(),
        np.tile(base.start_fs, count),
        np.tile(base.end_fs, count),
        np.tile(base.reduces, count),
        first,
        flat,
    )


def batches(
    base: MessageTable,
    group: Group,
    collective: str,
    ranks: int,
    partition: int,
    lookup: LinkLookup,
    most: int = 1 << 20,
) -> Iterator[MessageTable]:
    """All messages, in batches of about `most` chunk-hops that hold all messages of the chunks in them.

    Where the base itself has two images of one chunk (messages that gather chunks of several elements), there is a
    single batch.
    """
    if group.order == 1 and len(base.chunks) == len(base) > 2 * most:
        yield from _some_chunks_each(base, most)
        return
    step = max(1, most // max(1, len(base.chunks)))
    if step < group.order and not chunks_are_representatives(base, group, collective, ranks, partition):
        step = group.order
    for start in range(0, group.order, step):
        elements = np.arange(start, min(start + step, group.order), dtype=np.int64)
        yield expanded(base, group, elements, collective, ranks, partition, lookup)


def _some_chunks_each(table: MessageTable, most: int) -> Iterator[MessageTable]:
    """The messages, of one chunk each, in parts of about `most` that hold all messages of the chunks in them."""
    order = np.argsort(table.chunks, kind="stable")
    chunks = table.chunks[order]
    start = 0
    while start < len(order):
        end = min(start + most, len(order))
        end = int(np.searchsorted(chunks, chunks[end - 1], "right"))
        rows = np.sort(order[start:end])
        yield MessageTable(
            table.link[rows],
            table.src[rows],
            table.dst[rows],
            table.start_fs[rows],
            table.end_fs[rows],
            table.reduces[rows],
            np.arange(len(rows) + 1),
            table.chunks[rows],
        )
        start = end


def sorted_by_start(table: MessageTable) -> MessageTable:
    """The rows by (start, link, first chunk), as algorithms have them."""
    order = np.lexsort((table.chunks[table.first[:-1]], table.link, table.start_fs))
    width = np.diff(table.first)[order]
    first = np.zeros(len(order) + 1, np.int64)
    np.cumsum(width, out=first[1:])
    within = np.arange(int(first[-1])) - np.repeat(first[:-1], width)
    return MessageTable(
        table.link[order],
        table.src[order],
        table.dst[order],
        table.start_fs[order],
        table.end_fs[order],
        table.reduces[order],
        first,
        table.chunks[np.repeat(table.first[:-1][order], width) + within],
    )


def _chunk_images(chunks: Ints, moved: Ints, collective: str, ranks: int, partition: int) -> Ints:
    """[elements, chunks]."""
    names = SYMMETRIC.get(collective)
    if names is None:
        if not np.array_equal(moved, np.broadcast_to(np.arange(ranks), moved.shape)):
            raise ValueError(f"the chunks of {collective} do not move with ranks")
        return np.broadcast_to(chunks, (len(moved), len(chunks)))
    block, part = np.divmod(chunks, partition)
    image = moved[:, block % ranks]
    if names == 2:
        image = moved[:, block // ranks] * ranks + image
    return image * partition + part


def chunks_are_representatives(
    base: MessageTable, group: Group, collective: str, ranks: int, partition: int
) -> bool:
    """Whether no two chunks of the base are images of one another, so that elements can be taken a few at a time."""
    names = SYMMETRIC.get(collective, 0)
    chunks = np.unique(base.chunks)
    if not names:
        return True
    block, part = np.divmod(chunks, partition)
    first = block // ranks if names == 2 else block
    back = group.subtract(0, group.element[first])
    key = group.image(back, first)
    if names == 2:
        key = key * ranks + group.image(back, block % ranks)
    return len(np.unique(key * partition + part)) == len(chunks)
