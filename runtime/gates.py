"""One rank's share in the turns of a job: whom it tells of which message, and which words it waits for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from taccl.runtime.turns import Gate, Key

OWN = -1  # instead of a tag: the rank tells itself


class Gates:
    """Of the messages that this rank sees coming further, and of those that it sends.

    told: of an earlier message, for each that waits for it: the part that must have come, the later message, and the
    tag by which its sender is told. awaited: of a message of this rank, for each of its gates: who tells it, by which
    tag. Tags number the words from each rank to each.
    """

    def __init__(self, rank: int, turns: Mapping[Key, Sequence[Gate]]) -> None:
        self.told: defaultdict[Key, list[tuple[float, Key, int]]] = defaultdict(list)
        self.awaited: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)
        tags: Counter[tuple[int, int]] = Counter()
        for later, gates in sorted(turns.items()):
            for gate in gates:
                tag, sender = OWN, later[0]
                if gate.seen_by != sender:
                    tag = tags[gate.seen_by, sender]
                    tags[gate.seen_by, sender] += 1
                if gate.seen_by == rank:
                    self.told[gate.message].append((gate.part, later, tag))
                if sender == rank:
                    self.awaited[later].append((gate.seen_by, tag))


class Progress:
    """Tells of a message what must be told when so much of it has come. words: (part, what tells it)."""

    __slots__ = ("_next", "_words")

    def __init__(self, words: Sequence[tuple[float, Callable[[], object]]]) -> None:
        self._words = sorted(words, key=lambda word: word[0])
        self._next = 0

    def begin(self) -> None:
        """A run begins."""
        self._next = 0

    @property
    def left(self) -> bool:
        """Whether something is still to be told."""
        return self._next < len(self._words)

    def reached(self, segments: int, count: int) -> None:
        """So many segments of all have come."""
        while self._next < len(self._words) and segments >= self._words[self._next][0] * count:
            self._next += 1
            self._words[self._next - 1][1]()
