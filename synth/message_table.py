"""Messages as columns, for schedules with more messages than Python objects are made for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taccl.synth.algorithm import Message

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class MessageTable:
    """Row i is message i; its chunks are `chunks[first[i]:first[i + 1]]`, ascending. Times are in fs."""

    link: Ints
    src: Ints
    dst: Ints
    start_fs: Ints
    end_fs: Ints
    reduces: NDArray[np.bool_]  # whether it is added to what dst has (op "reduce"), or replaces it ("copy")
    first: Ints  # [messages + 1]
    chunks: Ints

    def __len__(self) -> int:
        return len(self.link)


def message_table(messages: Iterable[Message]) -> MessageTable:
    """Columns for messages, in their order. Raises OverflowError for times of more than 2 hours, ValueError for
    messages of sums beside the one that is wanted."""
    rows = list(messages)
    if any(m.sum or m.into != (0,) for m in rows):
        raise ValueError("columns know one sum of a chunk on a rank")
    first = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(m.chunks) for m in rows], out=first[1:])
    return MessageTable(
        np.array([m.link for m in rows], np.int64),
        np.array([m.src for m in rows], np.int64),
        np.array([m.dst for m in rows], np.int64),
        np.array([m.start_fs for m in rows], np.int64),
        np.array([m.end_fs for m in rows], np.int64),
        np.array([m.op == "reduce" for m in rows], bool),
        first,
        np.array([c for m in rows for c in m.chunks], np.int64),
    )


def messages_of(table: MessageTable) -> tuple[Message, ...]:
    """The rows as messages."""
    chunks, first = table.chunks.tolist(), table.first.tolist()
    columns = (table.link, table.src, table.dst, table.start_fs, table.end_fs, table.reduces)
    return tuple(
        Message(
            link,
            src,
            dst,
            tuple(chunks[first[i] : first[i + 1]]),
            start,
            end,
            "reduce" if reduces else "copy",
        )
        for i, (link, src, dst, start, end, reduces) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        )
    )


def joined(tables: Sequence[MessageTable]) -> MessageTable:
    """The rows of all tables, in this order."""
    if len(tables) == 1:
        return tables[0]
    if not tables:
        return message_table(())
    width = np.concatenate([np.diff(table.first) for table in tables])
    first = np.zeros(len(width) + 1, np.int64)
    np.cumsum(width, out=first[1:])

    def column(name: str) -> Ints:
        return np.concatenate([getattr(table, name) for table in tables])

    return MessageTable(
        column("link"),
        column("src"),
        column("dst"),
        column("start_fs"),
        column("end_fs"),
        np.concatenate([table.reduces for table in tables]),
        first,
        column("chunks"),
    )
