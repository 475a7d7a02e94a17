"""Which pairs of ranks are measured at the same time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence


def tournament(ranks: int) -> list[list[tuple[int, int]]]:
    """A 1-factorisation of the complete graph (circle method): every pair meets once, rounds are disjoint."""
    places: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        rounds.append(
            [
                (min(a, b), max(a, b))
                for a, b in zip(places[:half], reversed(places[half:]), strict=True)
                if a is not None and b is not None
            ]
        )
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def pack(
    flows: Iterable[tuple[int, int]],
    uses: Callable[[tuple[int, int]], Sequence[Hashable]],
    capacity: Mapping[Hashable, int],
) -> list[tuple[tuple[int, int], ...]]:
    """Rounds of flows that do not disturb each other, first fit in the given order.

    `uses(flow)` names the things that a flow needs (one unit for each time it is named); no round
    needs more of one than `capacity` says (1 where it says nothing). Each rank is in one flow of a round.
    """
    rounds: list[list[tuple[int, int]]] = []
    used: list[dict[Hashable, int]] = []
    for flow in flows:
        needs: dict[Hashable, int] = {}
        for thing in (*(("rank", rank) for rank in flow), *uses(flow)):
            needs[thing] = needs.get(thing, 0) + 1
        fits = (
            index
            for index, taken in enumerate(used)
            if all(taken.get(x, 0) + n <= capacity.get(x, 1) for x, n in needs.items())
        )
        index = next(fits, len(rounds))
        if index == len(rounds):  # one flow alone always fits, even where it needs more than there is
            rounds.append([])
            used.append({})
        rounds[index].append(flow)
        for thing, n in needs.items():
            used[index][thing] = used[index].get(thing, 0) + n
    return [tuple(members) for members in rounds]


def directed(pairs: Iterable[Iterable[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Both directions of the pairs of a tournament, round by round."""
    flows: list[tuple[int, int]] = []
    for one in pairs:
        level = list(one)
        flows += level
        flows += [(dst, src) for src, dst in level]
    return flows
