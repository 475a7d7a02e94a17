"""A stand-in for `cupy.cuda.nccl` between processes of one host, as strict as NCCL's documentation allows it to be.

- A communicator begins when all its ranks have called, and refuses two of them on one device.
- One operation of a process is under way at a time, of whatever communicator and on whatever stream, in the order of
  the calls: an operation waits for the one before it, and its stream waits for it. So ranks that issue in different
  orders hang.
- A send waits until its receive is under way. In a group messages go on beside each other, but those to one peer, or
  from one, one after another.
- The first exchange of two ranks holds the host up until both have called.

The unique id names a piece of memory of the rank that made it. There each ordered pair of ranks has a few numbers and
a room for a part of a message.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque

import numpy as np

import cupy
from taccl.runtime import shared

available = cupy.SETTINGS("CUPY_DOUBLE_NCCL", "") != "no"
NCCL_UINT8 = 1
ID_BYTES = 128
MOST_RANKS = 8
ROOM_BYTES = 4096
# Numbers of a pair: whether source and target have connected; receives that are under way or done, bytes of the last
# of them; parts put and taken.
LINKED_SOURCE, LINKED_TARGET, POSTED, LENGTH, PUT, TAKEN, NUMBERS = range(7)
PAIR_CELLS = NUMBERS + 2 + ROOM_BYTES // 8


class NcclError(RuntimeError):
    def __init__(self, status):
        self.status = status
        names = {
            2: "NCCL_ERROR_SYSTEM_ERROR",
            4: "NCCL_ERROR_INVALID_ARGUMENT",
            5: "NCCL_ERROR_INVALID_USAGE",
        }
        super().__init__(f"{names[status]}: of the double")


_boards = []  # that this process made
_operations: deque = deque()  # of this process, in the order of the calls
_living: set = set()
_group: list | None = None
may_connect = True  # set by tests


def left():
    """Communicators that were not given up."""
    return len(_living)


def get_version():
    return 22703


def get_unique_id():
    memory = shared.SharedMemory()
    board = memory.empty(MOST_RANKS + MOST_RANKS**2 * PAIR_CELLS, np.int64)
    _boards.append((memory, board))
    place = memory.place(board)
    packed = struct.pack("<4q", place.process, place.fd, place.token, board.nbytes).ljust(ID_BYTES, b"\0")
    return tuple(np.frombuffer(packed, np.int8).tolist())


class _Part:
    """One send or receive."""

    def __init__(self, comm, sends, address, nbytes, peer):
        self.comm, self.sends, self.address, self.nbytes, self.peer = comm, sends, address, nbytes, peer
        self.line = (comm, sends, peer)
        source, target = (comm.rank, peer) if sends else (peer, comm.rank)
        first = MOST_RANKS + (MOST_RANKS * source + target) * PAIR_CELLS
        self.cells = comm.board[first : first + PAIR_CELLS]
        self.room = self.cells[NUMBERS + 2 :].view(np.uint8)
        self.moved = 0
        self.begun = False

    def connect(self):
        if self.line in self.comm.connected:
            return
        assert may_connect, "a run that connects ranks, and holds the host up"
        mine, others = (LINKED_SOURCE, LINKED_TARGET) if self.sends else (LINKED_TARGET, LINKED_SOURCE)
        self.cells[mine] = 1
        self.comm.connected[self.line] = self.cells, others

    def go_on(self):
        """Move a part; whether the message is through."""
        cells = self.cells
        if not self.begun:
            if self.sends:
                if cells[POSTED] <= self.comm.sent.get(self.peer, 0):
                    return False
                assert cells[LENGTH] == self.nbytes, "a receive of another length than its send"
                self.comm.sent[self.peer] = self.comm.sent.get(self.peer, 0) + 1
            else:
                cells[LENGTH] = self.nbytes
                cells[POSTED] += 1
            self.begun = True
        part = min(ROOM_BYTES, self.nbytes - self.moved)
        place = cupy._bytes_at(self.address + self.moved, part)
        if self.sends:
            if cells[PUT] > cells[TAKEN]:
                return False
            self.room[:part] = place
            if cupy.SETTINGS("CUPY_DOUBLE_NCCL") == "wrong":
                self.room[0] ^= 1
            cells[PUT] += 1
        else:
            if cells[PUT] == cells[TAKEN]:
                return False
            place[:] = self.room[:part]
            cells[TAKEN] += 1
        self.moved += part
        return self.moved == self.nbytes


class _Operation(cupy.Kernel):
    """A group of sends and receives."""

    def __init__(self, parts):
        self._lines = {}
        for part in parts:
            cupy._check(part.address, part.nbytes)
            self._lines.setdefault(part.line, deque()).append(part)

    def go_on(self):
        if _operations[0] is not self:
            return False
        for line in self._lines.values():
            while line and (line[0].comm.given_up or line[0].go_on()):
                line.popleft()
        if any(self._lines.values()):
            return False
        _operations.popleft()
        return True


def groupStart():
    global _group
    assert _group is None
    _group = []


def groupEnd():
    global _group
    calls, _group = _group, None
    streams = {stream for _, stream in calls}
    assert len(streams) == 1
    _issue([part for part, _ in calls], streams.pop())


def _issue(parts, stream):
    for part in parts:
        part.connect()
    for part in parts:
        cells, others = part.comm.connected[part.line]
        while not cells[others]:
            time.sleep(50e-6)
            cupy._go_on()  # the device goes on while the host is held up
    operation = _Operation(parts)
    _operations.append(operation)
    cupy._queues[stream].append(operation)
    cupy._go_on()


class NcclCommunicator:
    def __init__(self, ndev, commId, rank):
        assert len(commId) == ID_BYTES and ndev <= MOST_RANKS
        process, fd, token, nbytes = struct.unpack_from("<4q", np.array(commId, np.int8).tobytes())
        self.board = shared.attach(process, fd, token, nbytes, write=True)[:nbytes].view(np.int64)
        self.rank = rank
        self.connected, self.sent = {}, {}
        self.given_up = False
        if cupy.SETTINGS("CUPY_DOUBLE_NCCL") == "hang" and rank == ndev - 1:
            time.sleep(3600)
        self.board[rank] = 1 + cupy._get_device()
        while not self.board[:ndev].all():
            time.sleep(50e-6)
        devices = self.board[:ndev].tolist()
        if devices.count(devices[rank]) > 1:
            raise NcclError(5)
        _living.add(self)

    def _call(self, sends, buffer, count, datatype, peer, stream):
        assert datatype == NCCL_UINT8
        if self.given_up:
            raise NcclError(4)
        part = _Part(self, sends, buffer, count, peer)
        if _group is None:
            _issue([part], stream)
        else:
            _group.append((part, stream))

    def send(self, sendbuf, count, datatype, peer, stream):
        self._call(True, sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._call(False, recvbuf, count, datatype, peer, stream)

    def check_async_error(self):
        if self.given_up:
            raise NcclError(4)

    def destroy(self):
        """Wait for what is under way."""
        while _operations:
            time.sleep(50e-6)
            cupy._go_on()
        self.abort()

    def abort(self):
        self.given_up = True
        _living.discard(self)


if os.environ.get("CUPY_DOUBLE_NCCL", "") not in ("", "no", "hang", "wrong"):
    raise ValueError("CUPY_DOUBLE_NCCL is no, hang or wrong")
