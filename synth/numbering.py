"""Which chunk takes which route: chunks that come from the same ranks and go to the same ranks may change places.

The cost model knows only how many chunks a message carries. A program knows where they lie: chunks that are not
neighbours are gathered in scratch before they leave and spread after they have come, two copies more that the model
does not see. So chunks that travel together are to be neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from taccl.synth.algorithm import Algorithm, Message

_Key = tuple[tuple[int, ...], tuple[int, ...]]


def neatly_numbered(algorithm: Algorithm) -> Algorithm:
    """The algorithm with chunks on other routes of their kind, such that messages carry fewer separate stretches of
    chunks; itself where that leads to nothing. Times, links and lengths of messages are the same."""
    kinds: defaultdict[_Key, list[int]] = defaultdict(list)
    for number, chunk in enumerate(algorithm.collective.chunks):
        kinds[tuple(r for r, _ in chunk.sources), tuple(r for r, _ in chunk.destinations)].append(number)
    if all(len(numbers) < 2 for numbers in kinds.values()):
        return algorithm
    kind_of = {number: kind for kind, numbers in enumerate(kinds.values()) for number in numbers}
    place_of = {number: place for numbers in kinds.values() for place, number in enumerate(numbers)}
    messages = algorithm.messages
    carried: list[list[int]] = [[] for _ in algorithm.collective.chunks]
    for index, message in enumerate(messages):
        for number in message.chunks:
            carried[number].append(index)
    by_length = sorted(range(len(messages)), key=lambda index: (-len(messages[index].chunks), index))
    rank_of = {index: rank for rank, index in enumerate(by_length)}
    orders: tuple[list[list[int]], ...] = (
        carried,  # as they leave
        [indices[::-1] for indices in carried],  # as they arrive
        [sorted(rank_of[index] for index in indices) for indices in carried],  # long messages first
    )
    least, best = _stretches(messages, kind_of, place_of), algorithm
    for order in orders:
        new: dict[int, int] = {}
        for numbers in kinds.values():
            new.update(zip((n for _, n in sorted((order[n], n) for n in numbers)), numbers, strict=True))
        found = tuple(replace(m, chunks=tuple(sorted(new[c] for c in m.chunks))) for m in messages)
        count = _stretches(found, kind_of, place_of)
        if count < least:
            least, best = count, replace(algorithm, messages=found)
    return best


def _stretches(messages: Sequence[Message], kind_of: dict[int, int], place_of: dict[int, int]) -> int:
    """Chunks of messages that consist of several stretches of a kind, each as often as its message has more than one of
    its kind."""
    total = 0
    for message in messages:
        places: defaultdict[int, list[int]] = defaultdict(list)
        for chunk in message.chunks:
            places[kind_of[chunk]].append(place_of[chunk])
        for found in places.values():
            found.sort()
            breaks = sum(b != a + 1 for a, b in pairwise(found))
            total += breaks * len(found)
    return total
