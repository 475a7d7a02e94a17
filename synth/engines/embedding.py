"""Placing a logical pattern (hypercube, trees) on ranks so that partners have links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

MOST_STEPS = 20_000


def embed(
    pattern: Iterable[tuple[int, int]], ranks: Sequence[int], linked: Callable[[int, int], bool]
) -> tuple[int, ...] | None:
    """The rank of each position such that both ends of every pair of the pattern are linked both ways.

    pattern: pairs of positions 0..n-1. ranks: n ranks in the order preferred for the positions; with all
    links present, that order is the answer. None when there is no such placing or MOST_STEPS were too few.
    """
    size = len(ranks)
    before: list[list[int]] = [[] for _ in range(size)]  # partners at lower positions
    for a, b in pattern:
        before[max(a, b)].append(min(a, b))
    placed: list[int] = []

    def options(position: int) -> list[int]:
        preferred = [ranks[position], *(rank for rank in ranks if rank != ranks[position])]
        fits = [
            rank
            for rank in preferred
            if rank not in placed
            and all(linked(rank, placed[p]) and linked(placed[p], rank) for p in before[position])
        ]
        return fits[::-1]

    stack = [options(0)]
    for _ in range(MOST_STEPS):
        if stack[-1]:
            placed.append(stack[-1].pop())
            if len(placed) == size:
                return tuple(placed)
            stack.append(options(len(placed)))
        else:
            stack.pop()
            if not stack:
                return None
            placed.pop()
    return None
