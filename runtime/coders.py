"""What codes and decodes for a rank that moves messages: itself, or a thread beside.

Coding is work like a message: the executor starts a piece and polls for what is finished. One piece of work is begun,
or two with a thread; the rest waits here in order: first what a message of frames waits for, then what other work waits
for, then decodes that nothing follows. So a frame which must go out never stands behind a long line of decodes. Nor do
decodes stand behind frames that would only lie there: a piece is passed over while the connections that it leads to
have other things to carry, or a rank would code all that it sends before it decodes what has come for it, and take its
core from ranks that have something to send.

Where each rank has two cores, a thread codes. While it works and no message arrives, the executor sleeps a little
instead of polling: numpy's calls want the interpreter's lock each time they return, and a loop that never rests would
keep it from them for milliseconds. Where threads would outnumber cores, the rank codes a piece itself whenever it
polls: a thread would have to wait for the other ranks' to get a core, and the rank for the thread, each for longer than
a piece takes. A rank that has nothing to do sleeps there, or it would take its share of the cores from those that code.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from taccl.runtime.codecs import Scratch
from taccl.runtime.frames import Work
from taccl.runtime.transport import Message

AHEAD = 2  # pieces of work with the thread
REST_S = 300e-6
YIELDS = 5  # empty polls that offer the core to others before the first pause
LEAST_PAUSE_S, MOST_PAUSE_S = 50e-6, 300e-6


class Pauses:
    """Ever longer pauses of an executor that gets no message. left: of it; a change starts anew."""

    def __init__(self, left: Callable[[], int]) -> None:
        self._left, self._seen, self._count = left, -1, 0

    def __call__(self) -> None:
        left = self._left()
        self._count = self._count + 1 if left == self._seen else 0
        self._seen = left
        if self._count < YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(LEAST_PAUSE_S * 2 ** min(self._count - YIELDS, 8), MOST_PAUSE_S))


# Of each connection that the result of a piece of work leads to, whether that has nothing else to carry. It is enough
# that one has not; without any the piece is always wanted.
Wanted = tuple[Callable[[], bool], ...]


class Inline:
    """Works at once in the caller's thread: where all ranks live in one process, and for messages that are short."""

    def __init__(self) -> None:
        self.scratch = Scratch()

    def message(self, work: Work, turn: int, wanted: Wanted = ()) -> Message:
        """It is finished when it has started."""

        def start() -> None:
            with np.errstate(all="ignore"):
                work(self.scratch)

        return Message(None, None, start)


# Of a piece of work its number, and when it could begin and was finished, in seconds of one clock.
Note = tuple[int, float, float]


def _some(wanted: Wanted) -> bool:
    """Whether one of the connections has nothing else to carry."""
    for idle in wanted:  # noqa: SIM110 (this is asked often, and any() takes twice as long)
        if idle():
            return True
    return False


class CodecPort:
    """A port whose messages are pieces of work, done one whenever it is polled. Close it.

    notes: gets of each piece that is finished its number among those that were made, when it was handed over, and when
    the executor learned that it is finished (perf_counter).
    """

    idle = None

    def __init__(self, notes: list[Note] | None = None) -> None:
        self._notes = notes
        self._made = 0
        # By the connections that they lead to: (turn, count, piece) of those that wait, in order.
        self._waiting: defaultdict[Wanted, list[tuple[int, int, _Piece]]] = defaultdict(list)
        self._count = 0
        self._done: set[_Piece] = set()
        self._got: Counter[Wanted] = Counter()  # pieces that were made for the same connections
        self._scratch = Scratch()

    def message(self, work: Work, turn: int, wanted: Wanted = ()) -> Message:
        """A piece of work that can be started once in every run.

        turn: what has a lower one goes first.
        """
        piece = _Piece(work, self._made)
        self._made += 1

        def start() -> None:
            if self._notes is not None:
                piece.given_s = time.perf_counter()
            self._count += 1
            insort(self._waiting[wanted], (turn, self._count, piece))
            self._feed()

        return Message(self, piece, start)

    def _feed(self) -> None:
        """Work has been added, or is finished."""

    def _next(self) -> _Piece | None:
        """The first piece that is wanted, which waits no more; of several the one whose connections have got least.

        Were it the first of all, some connections would run dry while others are served, and end late.
        """
        found: tuple[int, int, int, Wanted] | None = None
        for wanted, line in self._waiting.items():
            if not line or (wanted and not _some(wanted)):
                continue
            turn, count, _ = line[0]
            mine = turn, self._got[wanted] if wanted else 0, count, wanted
            if found is None or mine < found:
                found = mine
        if found is None:
            return None
        self._got[found[3]] += 1
        return self._waiting[found[3]].pop(0)[2]

    def _finished(self, piece: _Piece) -> None:
        if piece.error is not None:
            raise piece.error
        self._done.add(piece)
        if self._notes is not None:
            self._notes.append((piece.number, piece.given_s, time.perf_counter()))

    def _go_on(self) -> None:
        """Move what can be moved without waiting for anybody."""
        piece = self._next()
        if piece is not None:
            piece.do(self._scratch)
            self._finished(piece)

    def poll(self, tokens: list[Any]) -> Sequence[int] | None:
        """Places of what is finished. Raises what the work raised."""
        self._go_on()
        if not self._done:
            return None
        found = [place for place, token in enumerate(tokens) if token in self._done]
        self._done.difference_update([tokens[place] for place in found])
        return found

    def close(self) -> None:
        """Nothing is under way."""


class CodecThread(CodecPort):
    """The same on a thread of its own."""

    def __init__(self, notes: list[Note] | None = None) -> None:
        super().__init__(notes)
        self.busy = 0  # pieces that are with the thread
        self._tasks: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="taccl-codec", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (piece := self._tasks.get()) is not None:
            piece.do(self._scratch)
            self._results.put(piece)

    def _feed(self) -> None:
        while self.busy < AHEAD and (piece := self._next()) is not None:
            self.busy += 1
            self._tasks.put(piece)

    def _take(self, piece: _Piece) -> None:
        self.busy -= 1
        self._feed()
        self._finished(piece)

    def _go_on(self) -> None:
        while not self._results.empty():
            self._take(self._results.get())
        self._feed()  # something may be wanted that was not

    def rest(self) -> None:
        """Sleep until something is finished, or a moment has passed."""
        try:
            self._take(self._results.get(timeout=REST_S))
        except queue.Empty:
            return

    def close(self) -> None:
        """End the thread; nothing is under way."""
        self._tasks.put(None)
        self._thread.join()


class _Piece:
    """Work, and what it raised."""

    __slots__ = ("_work", "error", "given_s", "number")

    def __init__(self, work: Callable[[Scratch], object], number: int) -> None:
        self._work, self.number = work, number
        self.given_s = 0.0
        self.error: BaseException | None = None

    def do(self, scratch: Scratch) -> None:
        """Sums and rounded values may overflow, which is the caller's matter; numpy's settings are a thread's own."""
        try:
            with np.errstate(all="ignore"):
                self._work(scratch)
        except BaseException as error:
            self.error = error


Coder = Inline | CodecPort
