"""Messages between the ranks of one node through shared memory; to other ranks through another transport.

A message goes one of four ways.

- Lent: its data lie in shared memory. The sender only sets a flag; the receiver reads the data where they are, and sets
  a flag when it has. So it is copied once, or not at all when it is reduced on the way.
- Parcel: it is short, or its data are private and it is not long. The sender puts a copy into shared memory and is
  done. There is room for the parcels of two runs, so a rank may be one run ahead of the receivers of its parcels.
- Read: it is long and its data are private. The sender sets a flag, and the receiver has the kernel copy the data from
  the sender's memory to its own (`runtime/process_memory.py`), where ranks may.
- Elsewhere: as before, where they may not and two copies would leave the caches, or where there is no more room for
  parcels. It takes the other transport.

Ranks tell each other by flags (`runtime/flags.py`). Between polls the executor offers the core to other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.flags import CONTROL_WORDS, IDLE, Control
from taccl.runtime.process_memory import address, readable, reader
from taccl.runtime.shared import SharedMemory, attach
from taccl.runtime.sleep import Bell, Sleeper
from taccl.runtime.streams import Lane
from taccl.runtime.transport import OFFER_WORDS, Message, Native, Transport, used_bytes

SHORT_BYTES = 16 * 2**10  # up to here a second copy costs less than to wait for the receiver
ORDERED_BYTES = 64 * 2**10  # up to here to look what came first costs more than to wait for one after another
READ_BYTES = 64 * 2**10  # up to here a second copy costs less than to ask the kernel
PARCEL_BYTES = 2**20  # up to here private messages that cannot be read are parcels
ROOMS = 2  # runs whose parcels there is room for
ROOM_BYTES = 128 * 2**20  # for the parcels of one rank; further private messages go elsewhere
RECORD = 4  # cells of a message's record: fd, token, offset (of what is read its address), kind
LENT, PARCEL, READ, ELSEWHERE = range(4)  # kinds
FIRST = (0,)


class SharedMemoryTransport:
    """Shared memory between the ranks of `node` (this one among them), `others` to the rest.

    counts: (ranks, ranks), messages of the program from each rank to each. reads: whether all ranks of the node have
    read each other's private memory. bells: of peers that may sleep while they wait.
    """

    name = "shm"
    idle = IDLE
    buffered = False

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        node: Sequence[int],
        counts: Sequence[Sequence[int]],
        others: Transport,
        reads: bool = False,
        bells: Mapping[int, Bell] | None = None,
    ) -> None:
        self._memory, self._rank, self._others, self._reads = memory, rank, others, reads
        self._bells = bells or {}
        self._control = Control(memory, rank, dict.fromkeys(node, node), counts, RECORD)
        # Local names: every message and every poll needs them.
        self._layouts, self._cells = self._control.layouts, self._control.cells
        self._peers, self._epoch = self._control.peers, self._control.epoch
        self._attached: dict[tuple[int, int], Any] = {}
        # Who must have ended the run before the last one, and whom to tell of the end of a run: by rank, the cell.
        self._parcels_to: dict[int, int] = {}
        self._ends: list[tuple[int, int]] = []  # the same, when connected
        self._parcels_from: dict[int, tuple[memoryview, int]] = {}
        self._taken = 0  # bytes of ROOM_BYTES
        self._others_sends = 0  # more than 0: some message of this rank is no parcel, or a long one
        self._arena = memory.empty(0, np.uint8)

    @property
    def sleeper(self) -> Sleeper | None:
        """That of the other transport."""
        return self._others.sleeper

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if peer not in self._peers or array.nbytes > ORDERED_BYTES:
            self._others_sends += 1
        if peer not in self._peers:
            return self._others.send(array, peer, tag, sized)
        layout = self._layouts[self._rank]
        flags = self._peers[peer]
        ready = self._layouts[peer].ready[self._rank] + tag
        place = self._memory.place(array) if array.nbytes > SHORT_BYTES else None
        # A sized message takes as much as it uses, which a parcel's sender knows.
        long = self._reads and not sized and array.nbytes > READ_BYTES
        read = place is None and long and readable(array)
        if place is not None or read:
            self._others_sends += 1
            where = (0, 0, address(array)) if place is None else (place.fd, place.token, place.offset)
            self._control.write(peer, tag, (*where, READ if read else LENT))
            epoch = self._epoch

            def lend() -> None:
                flags[0][ready] = epoch[0]

            start = self._ringing(lend, peer)
            return Message(self, layout.done[peer] + tag, start, native=self._native_send(peer, tag, None))
        # An empty message has a place, too.
        room = self._carve(max(ROOMS * array.nbytes, 1)) if array.nbytes <= PARCEL_BYTES else None
        if room is None:
            self._others_sends += 1
            self._control.write(peer, tag, (0, 0, 0, ELSEWHERE))
            return self._others.send(array, peer, tag, sized)
        place = self._memory.place(room)
        assert place is not None
        room = room[: ROOMS * array.nbytes]
        self._control.write(peer, tag, (place.fd, place.token, place.offset, PARCEL))
        self._parcels_to[peer] = layout.ended[peer]
        put = _sized_parcel if sized else _parcel
        told = None if sized else self._native_send(peer, tag, room)
        start = self._ringing(put(_bytes(array), memoryview(room), flags, ready, self._epoch), peer)
        return Message(None, None, start, native=told)

    def _ringing(self, action: Callable[[], None], peer: int) -> Callable[[], None]:
        """What sets a flag of a peer, and wakes it if it sleeps."""
        if peer not in self._bells:
            return action
        ring = self._bells[peer].ring

        def both() -> None:
            action()
            ring()

        return both

    def _bell(self, peer: int) -> tuple[int, int]:
        """The same for compiled code."""
        bell = self._bells.get(peer)
        return (0, -1) if bell is None else (bell.cell_at, bell.pipe)

    def _native_send(self, peer: int, tag: int, room: Any) -> Callable[[], Native]:
        """room: of a parcel, for two runs."""
        flags, ready = self._peers[peer], self._layouts[peer].ready[self._rank] + tag
        done, ranks = self._layouts[self._rank].done[peer] + tag, 1 + len(self._peers)
        place = 0 if room is None else address(room)
        halves = (place, place + (0 if room is None else len(room) // ROOMS))

        def told() -> Native:
            wait = 0 if place else _cell(self._cells, done)
            return Native(
                self._epoch, ranks, wait, _cell(flags[0], ready), room=halves, bell=self._bell(peer)
            )

        return told

    def _native_recv(
        self, peer: int, tag: int, source: tuple[int, int], process: int = 0, lasting: bool = False
    ) -> Callable[[], Native]:
        ready, done = self._layouts[self._rank].ready[peer] + tag, self._layouts[peer].done[self._rank] + tag
        wait = _cell(self._cells, ready)
        release = 0 if lasting else _cell(self._peers[peer][0], done)
        told = Native(
            self._epoch,
            1 + len(self._peers),
            wait,
            0,
            release,
            source=source,
            process=process,
            lasting=lasting,
            bell=self._bell(peer),
        )
        return lambda: told

    def _carve(self, nbytes: int) -> Any:
        """(nbytes,) uint8 of shared memory on cache lines of its own; None when there is no more to take."""
        length = -(-nbytes // 64) * 64
        if self._taken + length > ROOM_BYTES:
            return None
        if len(self._arena) < length:
            self._arena = self._memory.empty(max(length, 2**20), np.uint8)
        self._taken += length
        found, self._arena = self._arena[:nbytes], self._arena[length:]
        return found

    def offer(self) -> np.ndarray[Any, Any]:
        words = np.zeros(OFFER_WORDS, np.int64)
        words[: CONTROL_WORDS + 1] = *self._control.words(), self._others_sends
        return words

    def connect(self, offers: np.ndarray[Any, Any]) -> None:
        self._control.connect(offers)
        self.buffered = not offers[:, CONTROL_WORDS].any()
        self._ends = list(self._parcels_to.items())
        self._others.connect(offers)

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if peer not in self._peers:
            return self._others.recv(array, peer, tag, sized)
        flags = self._peers[peer]
        fd, token, offset, kind = self._control.read(peer, tag)
        if kind == ELSEWHERE:
            return self._others.recv(array, peer, tag, sized)
        done = self._layouts[peer].done[self._rank] + tag
        ready = self._layouts[self._rank].ready[peer] + tag
        epoch, cells = self._epoch, flags[0]

        def said() -> None:
            cells[done] = epoch[0]

        release = self._ringing(said, peer)

        if kind == READ:
            copy = reader(peer, self._control.processes[peer], offset, array)

            def take() -> None:
                copy()
                release()

            told = self._native_recv(peer, tag, (offset, offset), self._control.processes[peer])
            return Message(self, ready, None, take=take, native=told)
        length = (ROOMS if kind == PARCEL else 1) * array.nbytes
        key = (peer, token)
        if key not in self._attached:
            self._attached[key] = attach(self._control.processes[peer], fd, token, 0)
        lent = self._attached[key]
        if not 0 <= offset <= len(lent) - length:
            raise EnvironmentProblem(f"rank {peer} sends from outside of the memory that it shares")
        view = lent[offset : offset + length]
        if kind == PARCEL:
            self._parcels_from[peer] = flags[0], self._layouts[peer].ended[self._rank]
            take = (_sized_unpack if sized else _unpack)(_bytes(array), memoryview(view), epoch)
            halves = view[: array.nbytes].view(array.dtype), view[array.nbytes :].view(array.dtype)
            places = (address(halves[0]), address(halves[1]))
            return Message(
                self, ready, None, take=take,
                arrived=_arrived(self._cells, ready, epoch), lies=lambda: halves[epoch[0] & 1],
                native=None if sized else self._native_recv(peer, tag, places, lasting=True),
            )  # fmt: skip
        told = self._native_recv(peer, tag, (address(view), address(view)))
        return Message(self, ready, None, view.view(array.dtype), release, native=None if sized else told)

    def begin(self) -> str:
        if not self.buffered and (closed := self._others.begin()):
            return closed
        cells, now = self._cells, self._epoch[0] + 1
        least = now - ROOMS
        for peer, cell in self._ends:
            if cells[cell] < least:
                return f"for rank {peer} to finish the run before the last one"
        self._epoch[0] = now
        return ""

    def end(self) -> None:
        now = self._epoch[0]
        for peer, (flags, cell) in self._parcels_from.items():
            flags[cell] = now
            if peer in self._bells:
                self._bells[peer].ring()
        if not self.buffered:
            self._others.end()

    def poll(self, tokens: list[int]) -> Sequence[int] | None:
        cells, now = self._cells, self._epoch[0]
        if len(tokens) == 1:
            return FIRST if cells[tokens[0]] >= now else None
        return [place for place, cell in enumerate(tokens) if cells[cell] >= now]

    def close(self) -> None:
        self._peers.clear()
        self._parcels_from.clear()
        self._attached.clear()
        self._others.close()


def _parcel(
    source: memoryview, room: memoryview, flags: list[memoryview], ready: int, epoch: memoryview
) -> Callable[[], None]:
    length = len(source)
    halves = room[:length], room[length:]

    def put() -> None:
        now = epoch[0]
        halves[now & 1][:] = source
        flags[0][ready] = now

    return put


def _sized_parcel(
    source: memoryview, room: memoryview, flags: list[memoryview], ready: int, epoch: memoryview
) -> Callable[[], None]:
    length, message = len(source), np.asarray(source)
    halves = room[:length], room[length:]

    def put() -> None:
        now, used = epoch[0], used_bytes(message)
        halves[now & 1][:used] = source[:used]
        flags[0][ready] = now

    return put


def _arrived(cells: memoryview, ready: int, epoch: memoryview) -> Callable[[], bool]:
    return lambda: cells[ready] >= epoch[0]


def _unpack(target: memoryview, room: memoryview, epoch: memoryview) -> Callable[[], None]:
    length = len(target)
    halves = room[:length], room[length:]

    def take() -> None:
        target[:] = halves[epoch[0] & 1]

    return take


def _sized_unpack(target: memoryview, room: memoryview, epoch: memoryview) -> Callable[[], None]:
    length = len(target)
    halves = [(half, np.asarray(half)) for half in (room[:length], room[length:])]

    def take() -> None:
        half, message = halves[epoch[0] & 1]
        used = used_bytes(message)
        target[:used] = half[:used]

    return take


def _cell(cells: memoryview, number: int) -> int:
    """The address of a cell."""
    return address(np.asarray(cells)) + 8 * number


def _bytes(array: Any) -> memoryview:
    return memoryview(array.view(np.uint8))
