"""Flags and records by which ranks of one node tell each other of messages, in shared memory.

A flag is an 8-byte cell that holds the number of the run. A rank polls cells of its own control memory only, and
others write them. On x86 a store is seen after the stores before it, and loads are done in order, so what lies in host
memory needs no other fence. A record says where the data of a message lie; a rank writes those of what it sends before
the ranks connect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.shared import SharedMemory, attach

LINE_CELLS = 8  # in a cache line
CONTROL_WORDS = 4  # of an offer: where the control memory lies
IDLE = 0  # a cell that stays 0


class Layout:
    """Where things are in a rank's control memory, in cells. Every rank knows it of every other.

    First the idle cell; then, each peer's on cache lines of their own, the cells that others write: receivers of its
    messages, senders of those to it, and who has ended a run; then the records of its messages.
    """

    def __init__(
        self, rank: int, node: Sequence[int], counts: Sequence[Sequence[int]], record_cells: int
    ) -> None:
        self.done: dict[int, int] = {}
        self.ready: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.records: dict[int, int] = {}
        at = LINE_CELLS
        here, there = counts[rank], [row[rank] for row in counts]
        for group, lengths in (
            (self.done, here),
            (self.ready, there),
            (self.ended, [1] * len(counts)),
            (self.records, [record_cells * count for count in here]),
        ):
            for peer in node:
                if peer != rank:
                    group[peer] = at
                    at += -(-lengths[peer] // LINE_CELLS) * LINE_CELLS
        self.cells = at


class Control:
    """This rank's control memory, and those of its peers once the ranks are connected.

    nodes: of this rank and each peer the ranks that it reaches so, itself among them. counts: (ranks, ranks), messages
    of the program from each rank to each.
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        nodes: Mapping[int, Sequence[int]],
        counts: Sequence[Sequence[int]],
        record_cells: int,
    ) -> None:
        self._memory, self._rank, self._record_cells = memory, rank, record_cells
        self.layouts = {peer: Layout(peer, node, counts, record_cells) for peer, node in nodes.items()}
        self._own = memory.empty(self.layouts[rank].cells, np.int64)
        self.cells = self._own.data
        # Put into service by `connect`: messages that were registered before hold the lists.
        self.peers: dict[int, list[memoryview]] = {peer: [] for peer in nodes if peer != rank}
        self.processes: dict[int, int] = {}
        self.epoch = np.zeros(1, np.int64).data  # the number of the run

    def write(self, peer: int, tag: int, record: Sequence[int]) -> None:
        """Say where the data of a message to a peer lie."""
        first = self.layouts[self._rank].records[peer] + self._record_cells * tag
        self._own[first : first + self._record_cells] = record

    def read(self, peer: int, tag: int) -> list[int]:
        """Where the data of a message from a peer lie."""
        first = self.layouts[peer].records[self._rank] + self._record_cells * tag
        found: list[int] = self.peers[peer][0][first : first + self._record_cells].tolist()
        return found

    def words(self) -> list[int]:
        """The first CONTROL_WORDS of an offer."""
        place = self._memory.place(self._own)
        assert place is not None
        return [place.process, place.fd, place.token, self._own.nbytes]

    def connect(self, offers: np.ndarray[Any, Any]) -> None:
        """Open the control memories of all peers."""
        for peer, cells in self.peers.items():
            process, fd, token, nbytes = offers[peer, :CONTROL_WORDS].tolist()
            if nbytes != 8 * self.layouts[peer].cells:
                raise EnvironmentProblem(f"rank {peer} shares a control memory of another size")
            control = attach(process, fd, token, nbytes, write=True)
            cells.append(control[:nbytes].view(np.int64).data)
            self.processes[peer] = process
