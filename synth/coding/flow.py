"""Where the data of each message come from, as the schedule's own times say, and what may travel as a frame.

Coding moves messages in time but not their order on a rank: a message waits for the same arrivals as in the schedule,
and a later arrival does not overtake the message that sends what was there before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.cost import costs
from taccl.synth.schedule import completions

Supply = tuple[
    int, ...
]  # messages that brought a value, or entered the sum, before it was sent on; (): the rank's own


@dataclass(frozen=True, slots=True)
class Flow:
    """Per message, in the order of Algorithm.messages."""

    supplies: tuple[tuple[Supply, ...], ...]  # of each chunk that it carries
    follows: tuple[tuple[int, ...], ...]  # messages that leave with what was there before this one enters it
    keeps: tuple[bool, ...]  # its destination needs the values, not just to pass them on
    complete: tuple[bool, ...]  # of reductions: what it carries are finished sums


def flow(algorithm: Algorithm, topology: Topology) -> Flow | None:
    """The data flow of a right schedule; None where ranks hold several sums of a chunk, which are not coded."""
    messages, collective = algorithm.messages, algorithm.collective
    if any(m.sum or m.into != (0,) for m in messages):
        return None
    done = completions(costs(topology, algorithm.chunk_bytes), messages)
    # What arrives at an instant can be sent at that instant.
    events = sorted(
        [(t, 0, i) for i, t in enumerate(done)] + [(m.start_fs, 1, i) for i, m in enumerate(messages)]
    )
    sources = [{rank for rank, _ in chunk.sources} for chunk in collective.chunks]
    wanted = [{rank for rank, _ in chunk.destinations} for chunk in collective.chunks]
    brought: dict[tuple[int, int], Supply] = {}
    entered: dict[tuple[int, int], set[int]] = {}  # contributions
    readers: dict[tuple[int, int], list[int]] = {}
    supplies: list[tuple[Supply, ...]] = [()] * len(messages)
    follows: list[tuple[int, ...]] = [()] * len(messages)
    sent: list[list[frozenset[int]]] = [[] for _ in messages]
    for _, starts, i in events:
        m = messages[i]
        if starts:
            places = [(m.src, c) for c in m.chunks]
            supplies[i] = tuple(brought.get(place, ()) for place in places)
            sent[i] = [frozenset(_held(entered, sources, place)) for place in places]
            for place in places:
                readers.setdefault(place, []).append(i)
            continue
        before: set[int] = set()
        for c, contributions in zip(m.chunks, sent[i], strict=True):
            place = (m.dst, c)
            before.update(readers.pop(place, ()))
            if m.op == "copy":
                brought[place] = (i,)
                entered[place] = set(contributions)
            else:
                entered[place] = _held(entered, sources, place) | contributions
                brought[place] = (*brought.get(place, ()), i)
        follows[i] = tuple(sorted(before))
    return Flow(
        tuple(supplies),
        tuple(follows),
        tuple(m.op == "reduce" or any(m.dst in wanted[c] for c in m.chunks) for m in messages),
        tuple(
            not collective.combining
            or all(len(held) == len(sources[c]) for held, c in zip(s, m.chunks, strict=True))
            for s, m in zip(sent, messages, strict=True)
        ),
    )


def _held(
    entered: dict[tuple[int, int], set[int]], sources: list[set[int]], place: tuple[int, int]
) -> set[int]:
    rank, chunk = place
    return entered.get(place, {rank} if rank in sources[chunk] else set())


def passed_on(algorithm: Algorithm, supply: Supply) -> int | None:
    """The message that brought a chunk as it is; None for what is a rank's own or a sum that it made."""
    return supply[0] if len(supply) == 1 and algorithm.messages[supply[0]].op == "copy" else None


def permitted(algorithm: Algorithm, found: Flow, wished: Collection[int], lossless: bool) -> tuple[int, ...]:
    """The wished messages that may be coded, ascending.

    A lossy codec codes a value once. What has been coded is passed on as the same frame, or as the values that were
    decoded from it, but these are not coded again; nor are partial sums that have coded parts, or errors would add up
    hop after hop. A complete sum may be coded where it is made and nowhere else, so that all ranks end with the same.
    """
    if lossless:
        return tuple(sorted(wished))
    messages = algorithm.messages
    coded: set[int] = set()
    rounded: set[int] = set()  # messages whose values have been coded

    def once(i: int) -> bool:
        for supply in found.supplies[i]:
            p = passed_on(algorithm, supply)
            if p is not None and p not in coded and (algorithm.collective.combining or p in rounded):
                return False
            if p is None and not found.complete[i] and any(s in rounded for s in supply):
                return False
        return True

    chosen = set(wished)
    for i in sorted(range(len(messages)), key=lambda i: (messages[i].start_fs, i)):
        if i in chosen and once(i):
            coded.add(i)
        if i in coded or any(s in rounded for supply in found.supplies[i] for s in supply):
            rounded.add(i)
    return tuple(sorted(coded))
