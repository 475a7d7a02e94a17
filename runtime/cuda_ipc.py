"""Messages between ranks of one host whose devices reach each other: CUDA IPC; to other ranks another transport.

What lies in exported memory (`runtime/device_memory.py`) is lent: when the device is done with what wrote it, the
sender sets a flag; the receiver copies it to itself, or reduces it from where it is, on a stream of its own, and sets a
flag when the device has done so. What lies elsewhere is first copied, on the sender's device, to a room of its own that
is exported. Flags are in host memory (`runtime/flags.py`), and only the host sets and sees them. A kernel or a copy
that the host has seen the end of is seen by all that starts afterwards, on whatever device. Of a sized message the
sender writes its length into the message's record first, and the receiver copies so many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.device_memory import HANDLE_BYTES, PIECE_BYTES, DeviceMemory, DevicePlace
from taccl.runtime.flags import CONTROL_WORDS, IDLE, Control
from taccl.runtime.gpu import Cuda, address
from taccl.runtime.shared import SharedMemory
from taccl.runtime.streams import Lane
from taccl.runtime.transport import Message, Transport, used_bytes, write_head

HANDLE_CELLS = HANDLE_BYTES // 8
RECORD = (
    HANDLE_CELLS + 4
)  # cells of a message's record: handle, token, size, offset, bytes of a sized message
ROOM_BYTES = 256  # rooms begin at multiples of it
ARENA_BYTES = 32 * 2**20
FIRST = (0,)


def room_bytes(lengths: Sequence[int]) -> int:
    """Device memory for the rooms of messages of these bytes, as `CudaIpcTransport` makes them one after another."""
    total = left = 0
    for nbytes in lengths:
        length = -(-nbytes // ROOM_BYTES) * ROOM_BYTES
        if length > ARENA_BYTES // 2:
            total += -(-length // PIECE_BYTES) * PIECE_BYTES
        elif length > left:
            total, left = total + ARENA_BYTES, ARENA_BYTES - length
        else:
            left -= length
    return total


class CudaIpcTransport:
    """CUDA IPC to the ranks of `sharing[rank]`, `others` to the rest.

    sharing: of each rank those whose memory it opens and that open its own, itself among them. counts: (ranks, ranks),
    messages of the program from each rank to each.
    """

    name = "cuda-ipc"
    idle = IDLE
    buffered = False
    sleeper = None

    def __init__(
        self,
        memory: SharedMemory,
        devices: DeviceMemory,
        cuda: Cuda,
        rank: int,
        sharing: Sequence[Sequence[int]],
        counts: Sequence[Sequence[int]],
        others: Transport,
    ) -> None:
        self._devices, self._cuda, self._rank, self._others = devices, cuda, rank, others
        nodes = {peer: sharing[peer] for peer in sharing[rank]}
        self._control = Control(memory, rank, nodes, counts, RECORD)
        self._cells, self._peers, self._epoch = self._control.cells, self._control.peers, self._control.epoch
        self._opened: dict[int, int] = {}  # token -> address
        self._early: list[tuple[Callable[[], bool], Callable[[], None]]] = []  # when, what to do then
        self._rooms: list[Any] = []  # peers have them open until all ranks have closed
        self._arena: Any = None
        self._arena_left = 0

    def send(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if peer not in self._peers:
            return self._others.send(array, peer, tag, sized, lane)
        assert lane is not None
        place = self._devices.place(array)
        room = self._room(array.nbytes) if place is None else None
        place = place or self._devices.place(room)
        assert place is not None
        self._control.write(peer, tag, _record(place))
        flags, epoch = self._peers[peer], self._epoch
        ready = self._control.layouts[peer].ready[self._rank] + tag
        cells, head, nbytes = self._cells, lane.head, array.nbytes
        length = self._control.layouts[self._rank].records[peer] + RECORD * (tag + 1) - 1

        def lend() -> None:
            if sized:
                cells[length] = used_bytes(head, nbytes)
            flags[0][ready] = epoch[0]

        start = self._lending(lane, lend) if room is None else self._copying(lane, lend, room, array)
        return Message(self, self._control.layouts[self._rank].done[peer] + tag, start)

    def _lending(self, lane: Lane, lend: Callable[[], None]) -> Callable[[], None]:
        def start() -> None:
            if lane.ready():
                lend()
            else:
                self._early.append((lane.ready, lend))

        return start

    def _copying(self, lane: Lane, lend: Callable[[], None], room: Any, array: Any) -> Callable[[], None]:
        put = self._cuda.copy(address(room), address(array), array.nbytes, lane.stream)

        def copied() -> bool:
            return self._cuda.done(lane.event) and lane.ready()

        def start() -> None:
            lane.order(lane.stream)
            put()
            lane.record()
            self._early.append((copied, lend))

        return start

    def _room(self, nbytes: int) -> Any:
        """(nbytes,) uint8 of exported memory."""
        length = -(-nbytes // ROOM_BYTES) * ROOM_BYTES
        if length > ARENA_BYTES // 2:
            self._rooms.append(self._devices.empty(length, np.uint8))
            return self._rooms[-1][:nbytes]
        if self._arena_left < length:
            self._arena, self._arena_left = self._devices.empty(ARENA_BYTES, np.uint8), ARENA_BYTES
            self._rooms.append(self._arena)
        first = ARENA_BYTES - self._arena_left
        self._arena_left -= length
        return self._arena[first : first + nbytes]

    def offer(self) -> np.ndarray[Any, Any]:
        words = self._others.offer()
        words[:CONTROL_WORDS] = self._control.words()
        return words

    def connect(self, offers: np.ndarray[Any, Any]) -> None:
        self._control.connect(offers)
        self._others.connect(offers)

    def recv(self, array: Any, peer: int, tag: int, sized: bool = False, lane: Lane | None = None) -> Message:
        if peer not in self._peers:
            return self._others.recv(array, peer, tag, sized, lane)
        record = self._control.read(peer, tag)
        handle = np.array(record[:HANDLE_CELLS], np.int64).tobytes()
        token, size, offset, _ = record[HANDLE_CELLS:]
        if not 0 <= offset <= size - array.nbytes:
            raise EnvironmentProblem(f"rank {peer} sends from outside of the memory that it shares")
        if token not in self._opened:
            self._opened[token] = self._devices.attach(token, handle)
        view = self._cuda.array(self._opened[token] + offset, len(array), array.dtype, self)
        cells = self._peers[peer][0]
        done, epoch = self._control.layouts[peer].done[self._rank] + tag, self._epoch

        def release() -> None:
            cells[done] = epoch[0]

        ready = self._control.layouts[self._rank].ready[peer] + tag
        if not sized:
            return Message(self, ready, None, view, release)
        assert lane is not None
        head, nbytes = lane.head, array.nbytes
        length = self._control.layouts[peer].records[self._rank] + RECORD * (tag + 1) - 1

        def used() -> int:
            write_head(head, cells[length])
            return used_bytes(head, nbytes)

        return Message(self, ready, None, view, release, used)

    def begin(self) -> str:
        if closed := self._others.begin():
            return closed
        self._epoch[0] += 1
        return ""

    def end(self) -> None:
        self._others.end()

    def poll(self, tokens: list[int]) -> Sequence[int] | None:
        if self._early:
            self._early = [(when, do) for when, do in self._early if not _done(when, do)]
        cells, now = self._cells, self._epoch[0]
        if len(tokens) == 1:
            return FIRST if cells[tokens[0]] >= now else None
        return [place for place, cell in enumerate(tokens) if cells[cell] >= now]

    def close(self) -> None:
        self._peers.clear()
        for token in self._opened:
            self._devices.detach(token)
        self._opened.clear()
        self._others.close()


def _record(place: DevicePlace) -> list[int]:
    handle = np.frombuffer(place.handle, np.int64).tolist()
    return [*handle, place.token, place.size, place.offset, 0]


def _done(when: Callable[[], bool], do: Callable[[], None]) -> bool:
    if not when():
        return False
    do()
    return True
