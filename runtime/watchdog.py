"""A rank that makes no progress ends the job, with a message that says who waits for whom.

Progress is an operation of the program that is finished, on any rank of the host, or bytes that go on moving over TCP:
a long message on a slow link is no stall, whether the rank waits for it itself or for a neighbour that does. A rank
that the system has stopped is no matter of progress: its neighbours end the job even while they compute and wait for
nobody.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from typing import Any, Protocol

from taccl.runtime import mpi, tcp_counts
from taccl.runtime.guard import ASLEEP_S, KEY_BYTES, Guard, process_state

TCP_AFTER_S = 0.5  # of a wait, before TCP is asked for bytes, and between two such looks
FIRST_S = 0.5
NODE_S, MOST_NODES = 0.1, 10  # between two nodes that know nothing of who does not answer
SLOW = "if something is only slow, give a longer --deadline"
AWAKE_S = 2.0  # in which those that went to sleep with it wake up, too
CELLS = 4  # of a rank: its sign of life, whether it waits, its last progress, its process


class Waiter(Protocol):
    """Something that waits and can say for what."""

    @property
    def left(self) -> int:
        """Falls while there is progress."""

    def describe(self) -> str:
        """What it waits for, as the rest of "rank 3 made no progress for 5 s: ..."."""


class Watchdog:
    """A daemon thread that ends the job when this rank waits and there is no progress for `deadline_s` seconds.

    The main thread says with `doing` what it is about to wait for, whose `left` falls with progress; None when
    it computes and waits for nobody. mpi4py gives up the GIL inside blocking calls, so the thread also runs
    while the main thread sits in one. `board` is shared by the ranks of this node and tells who does not answer;
    `guard` decides which one speaks when several run out of time together, and gets a note of what this one waits
    for.
    """

    def __init__(self, MPI: Any, deadline_s: float, board: Board, guard: Guard) -> None:
        self.beats = 0
        self.deadline_s = deadline_s
        self._mpi = MPI
        self._board, self._guard = board, guard
        self._doing: str | Waiter | None = None
        self._stop = threading.Event()
        self._rank = MPI.COMM_WORLD.Get_rank()
        self._thread = threading.Thread(target=self._watch, name="taccl-watchdog", daemon=True)
        self._thread.start()

    def doing(self, what: str | Waiter | None) -> None:
        """What the rank is about to wait for; None when it waits for nothing."""
        self.beats += 1
        self._doing = what

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, since = self._marks(), time.monotonic()
        connections = tcp_counts.Connections()
        looked, moving = since, tcp_counts.Moving(since, connections.moved_bytes())
        before, woken = since, since - AWAKE_S
        # A tick well below the deadline, so that the job ends soon after it.
        while not self._stop.wait(min(0.1, self.deadline_s / 10)):
            now, marks = time.monotonic(), self._marks()
            if now - before > ASLEEP_S:  # the clock has gone on, and maybe nobody else
                since, woken = since + now - before, now
                looked = now
                moving.begin(now, connections.moved_bytes())
            before = now
            self._board.sign(now, self._doing is not None)
            self._guard.note(self._waits())
            if marks != seen or self._doing is None:
                if marks[0] == seen[0] and self._doing is not None:
                    self._board.progress(now)
                seen, since = marks, now
            elif now - max(since, looked) > min(TCP_AFTER_S, self.deadline_s / 4):
                first, looked, moved = looked < since, now, connections.moved_bytes()
                if first:  # what moved before this wait is no progress of it
                    moving.begin(now, moved)
                elif moving.goes_on(now, moved):
                    self._board.progress(now)
            # A rank that waits for the stopped one has more to say, and says it before.
            if now - woken < AWAKE_S:
                continue
            if (stopped := self._board.stopped(now, self.deadline_s + FIRST_S)) is not None:
                self._end(f"{stopped}; the job is ended")
            late_s = now - max(since, self._board.last_progress()) - self.deadline_s
            if self._doing is not None and late_s > self._leaves_first_s(now):
                self._end(self._report(now))

    def _leaves_first_s(self, now: float) -> float:
        """How long this rank leaves the end of the job to others, which then are the only ones to speak.

        Of several nodes the first is the one that knows who does not answer; where none does, they go one by one.
        """
        if self._board.one_node or self._board.silent(now):
            return 0.0
        return FIRST_S + NODE_S * min(self._board.node, MOST_NODES)

    def _end(self, report: str) -> None:
        if self._guard.speaks():
            mpi.say(f"taccl: {report}", last=True)
        mpi.abort(self._mpi, mpi.JOB_FAILED)

    def _marks(self) -> tuple[int, int]:
        """What changes when there is progress."""
        doing = self._doing
        return self.beats, 0 if doing is None or isinstance(doing, str) else doing.left

    def _waits(self) -> str:
        doing = self._doing
        if doing is None:
            return "it waits for nobody"
        try:
            return doing if isinstance(doing, str) else doing.describe()
        except Exception:  # what it waits for has come, and is being put away by the main thread
            return "it waits"

    def _report(self, now: float) -> str:
        silent = self._board.silent(now)
        return (
            f"rank {self._rank} made no progress for {self.deadline_s:g} s: {self._waits()}; "
            + "".join(f"{line}; " for line in silent or [SLOW])
            + "the job is ended"
        )


class Board:
    """A few numbers of each rank of this node in shared memory: a sign of life, and whether it waits."""

    def __init__(self, MPI: Any, comm: Any) -> None:
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._slot = node.Get_rank()
        nbytes = 8 * CELLS * node.Get_size()
        self._window = MPI.Win.Allocate_shared(nbytes if self._slot == 0 else 0, 8, comm=node)
        self._cells = memoryview(self._window.Shared_query(0)[0]).cast("B").cast("d")
        if self._slot == 0:
            self._cells[:] = memoryview(bytes(nbytes)).cast("d")
        mine = array("i", [comm.Get_rank()])
        self._ranks = array("i", [0] * node.Get_size())
        node.Allgather(mine, self._ranks)  # also: nobody signs before the cells are cleared
        key = bytearray(os.urandom(KEY_BYTES))
        node.Bcast(key)
        self.key = bytes(key)  # the node's ranks have it alike
        self.node = min(self._ranks)  # the node's first rank names it
        self.node_ranks = node.Get_size()
        self.one_node = self.node_ranks == comm.Get_size()
        self.node_slot = self._slot
        self._node = node
        self._cells[CELLS * self._slot + 3] = os.getpid()
        self.sign(time.monotonic(), False)

    def sign(self, now: float, waits: bool) -> None:
        """This rank lives. CLOCK_MONOTONIC is one clock for all processes of a host."""
        self._cells[CELLS * self._slot] = now
        self._cells[CELLS * self._slot + 1] = float(waits)

    def progress(self, now: float) -> None:
        """This rank waits, and what it waits for comes nearer."""
        self._cells[CELLS * self._slot + 2] = now

    def last_progress(self) -> float:
        """The latest progress of the ranks of this node."""
        return max(self._cells[2::CELLS].tolist())

    def stopped(self, now: float, least_s: float) -> str | None:
        """What to say of a rank of this node that was stopped (SIGSTOP) and has shown no sign of life for so long."""
        for slot, rank in enumerate(self._ranks):
            signed, _, _, process = self._cells[CELLS * slot : CELLS * (slot + 1)]
            if process and now - signed > least_s and process_state(int(process)) == "T":
                return f"rank {rank} has been stopped for {now - signed:.1f} s"
        return None

    def silent(self, now: float) -> list[str]:
        """What is known of the ranks of this node that do not wait as the others do."""
        found = []
        for slot, rank in enumerate(self._ranks):
            signed, waits = self._cells[CELLS * slot : CELLS * slot + 2]
            if slot != self._slot and now - signed > 1.0:
                found.append(f"rank {rank} has shown no sign of life for {now - signed:.1f} s")
            elif slot != self._slot and not waits:
                found.append(f"rank {rank} lives and waits for nobody")
        return found

    def close(self) -> None:
        """Free the shared memory (collective)."""
        self._cells.release()
        self._window.Free()
        self._node.Free()
