"""The wires that messages of a measurement take: MPI's, or a TCP connection of our own between two nodes.

A message is made once, as a request of MPI is: `Start` begins it, `Test` says whether it is done, `Free` lets go of it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import defaultdict, deque
from typing import Any, Protocol

from taccl.errors import RunFailed
from taccl.runtime.tcp_options import limit_rate

HEAD = struct.Struct("<IQ")  # tag of a message, and its bytes
READS = 16  # of a connection at a time


class Request(Protocol):
    """One message, out or in, time after time."""

    def Start(self) -> None:
        """Begin it."""
        ...

    def Test(self) -> bool:
        """Whether the last one is done; moves what can be moved."""
        ...

    def Free(self) -> None:
        """It is not started again."""
        ...


class Wire(Protocol):
    """What leads to one other rank. data: uint8, whose bytes are read or written between Start and the end."""

    def sender(self, data: Any, tag: int) -> Request:
        """A message to it."""
        ...

    def receiver(self, data: Any, tag: int) -> Request:
        """A message of as many bytes from it."""
        ...


class MpiWire:
    """Messages over a communicator."""

    def __init__(self, MPI: Any, comm: Any, peer: int) -> None:
        self._byte, self._comm, self._peer = MPI.BYTE, comm, peer

    def sender(self, data: Any, tag: int) -> Request:
        request: Request = self._comm.Send_init([data, self._byte], self._peer, tag)
        return request

    def receiver(self, data: Any, tag: int) -> Request:
        request: Request = self._comm.Recv_init([data, self._byte], self._peer, tag)
        return request


class TcpWire:
    """Messages over a connection that does not block. Those of a tag keep their order. One that nobody receives stays
    in the connection until somebody does, and what is behind it as well."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._connection, self._peer = connection, peer
        self._out: deque[tuple[_TcpSend, list[memoryview]]] = deque()
        self._expected: defaultdict[int, deque[_TcpReceive]] = defaultdict(deque)
        self._head = memoryview(bytearray(HEAD.size))
        self._missing = self._head  # of what comes now
        self._now: _TcpReceive | None = None
        self._waits = False  # the head is of a message that nobody receives yet
        self.lost = ""  # why it is

    def sender(self, data: Any, tag: int) -> Request:
        return _TcpSend(self, data, tag)

    def receiver(self, data: Any, tag: int) -> Request:
        return _TcpReceive(self, data, tag)

    def keep_to(self, bytes_per_s: int) -> None:
        """Send no faster than that."""
        limit_rate(self._connection, bytes_per_s)

    def start_send(self, message: _TcpSend, data: memoryview, tag: int) -> None:
        """Put a message behind those that leave."""
        self._out.append((message, [memoryview(HEAD.pack(tag, len(data))), data]))
        self._write()

    def start_receive(self, message: _TcpReceive, tag: int) -> None:
        """Expect a message."""
        self._expected[tag].append(message)

    def forget(self, message: _TcpReceive, tag: int) -> None:
        """Expect it no longer."""
        if message in self._expected[tag]:
            self._expected[tag].remove(message)

    def move(self) -> None:
        """Move what can be moved. A connection that is lost moves nothing: who waits for its peer has a deadline, and
        the job may end before it for a reason that says more. Raises RunFailed for what does not belong here."""
        self._write()
        self._read()

    def _write(self) -> None:
        while self._out and not self.lost:
            message, parts = self._out[0]
            try:
                taken = self._connection.sendmsg(parts)
            except BlockingIOError:
                return
            except OSError as error:
                self.lost = os.strerror(error.errno or errno.EIO)
                return
            while parts and taken >= len(parts[0]):
                taken -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][taken:]
                continue
            self._out.popleft()
            message.done = True

    def _read(self) -> None:
        if self._waits:
            self._look_at_head()
        for _ in range(READS):
            if self._waits or self.lost:
                return
            try:
                got = self._connection.recv_into(self._missing)
            except BlockingIOError:
                return
            except OSError as error:
                self.lost = os.strerror(error.errno or errno.EIO)
                return
            if not got:
                self.lost = "it has ended"
                return
            self._missing = self._missing[got:]
            if len(self._missing):
                continue
            if self._now is None:
                self._look_at_head()
            else:
                self._end()

    def _look_at_head(self) -> None:
        tag, nbytes = HEAD.unpack(self._head)
        self._waits = not self._expected[tag]
        if self._waits:
            return
        self._now = self._expected[tag].popleft()
        if len(self._now.data) != nbytes:
            raise RunFailed(
                f"rank {self._peer} sends {nbytes} bytes where {len(self._now.data)} are expected; "
                "give every rank the same taccl"
            )
        self._missing = self._now.data
        if not nbytes:
            self._end()

    def _end(self) -> None:
        assert self._now is not None
        self._now.done, self._now, self._missing = True, None, self._head


class _TcpSend:
    """A message that leaves. It is done when the kernel has it."""

    def __init__(self, wire: TcpWire, data: Any, tag: int) -> None:
        self._wire, self._data, self._tag = wire, memoryview(data).cast("B"), tag
        self.done = True

    def Start(self) -> None:
        self.done = False
        self._wire.start_send(self, self._data, self._tag)

    def Test(self) -> bool:
        if not self.done:
            self._wire.move()
        return self.done

    def Free(self) -> None:
        return


class _TcpReceive:
    """A message that comes."""

    def __init__(self, wire: TcpWire, data: Any, tag: int) -> None:
        self._wire, self.data, self._tag = wire, memoryview(data).cast("B"), tag
        self.done = True

    def Start(self) -> None:
        self.done = False
        self._wire.start_receive(self, self._tag)

    def Test(self) -> bool:
        if not self.done:
            self._wire.move()
        return self.done

    def Free(self) -> None:
        self._wire.forget(self, self._tag)
