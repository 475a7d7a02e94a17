"""Where pieces of scratch go: memory whose content has been used takes new content.

A piece is written, read and forgotten. It may take the place of one that, in the schedule, was forgotten before; its
first operations then wait for the last ones of its predecessor, so that the program is right at any speed. Interval
colouring, first fit by size (Dantzig and Fulkerson 1954 for why the order of starts serves).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_WAITS = 2  # threadblocks that reuse may have to wait for: each costs a step


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous chunks of scratch. Moments are (time, order within it), comparable with one another."""

    length: int
    begin: tuple[int, ...]  # the moment from which it is needed, of a message before it leaves
    end: tuple[int, ...]  # the moment after the last use
    first: tuple[int, ...]  # operations that write it first
    last: tuple[int, ...]  # operations after which it is free
    lanes: int  # number of lanes that `last` stand in


@dataclass(frozen=True, slots=True)
class Placement:
    """Per piece its offset; the operations that must wait for others; chunks of scratch in all."""

    offsets: tuple[int, ...]
    waits: tuple[tuple[int, int], ...]  # (operation, operation before it)
    length: int


def place(pieces: Sequence[Piece], reuse: bool) -> Placement:
    """Offsets for pieces in the order in which they begin."""
    offsets: list[int] = []
    waits: list[tuple[int, int]] = []
    used: list[int] = []  # pieces that hold memory which nobody has taken over
    free: list[tuple[int, int, tuple[int, ...]]] = []  # (length, offset, operations to wait for)
    total = 0
    for number, piece in enumerate(pieces):
        if reuse:
            ended = [p for p in used if pieces[p].end < piece.begin]
            free += [(pieces[p].length, offsets[p], pieces[p].last) for p in ended]
            used = [p for p in used if pieces[p].end >= piece.begin]
        best = min((region for region in free if region[0] >= piece.length), default=None)
        if best is None:
            offsets.append(total)
            total += piece.length
        else:
            free.remove(best)
            length, offset, before = best
            offsets.append(offset)
            waits += [(i, b) for i in piece.first for b in before]
            if length > piece.length:
                free.append((length - piece.length, offset + piece.length, before))
        if piece.lanes <= MAX_WAITS:
            used.append(number)
    return Placement(tuple(offsets), tuple(waits), total)
