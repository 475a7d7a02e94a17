"""TCP connections between ranks of different nodes: one for each pair, made once for a job.

Every rank listens on a port of its own and tells all others, over MPI, at which addresses. Of a pair the lower rank
calls, and tries the other one's addresses until somebody there knows the job's secret, which only its ranks have; so a
stranger at the port, or another host that has an address of a peer in its own private network, is no peer.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from taccl.runtime import addresses
from taccl.runtime.addresses import in_order

if TYPE_CHECKING:
    from taccl.runtime.job import Job

MAGIC = b"taccl\0\0\1"
SECRET_BYTES = 32  # the caller shows the first half, who is called the second one
HELLO = struct.Struct("<8s16sII")  # magic, half of the secret, who calls whom
WELCOME = struct.Struct("<16sI")  # the other half, who it is
RECORD = struct.Struct("<32sHB")  # what ranks tell each other: their secrets, ports, and whether they cannot
CONNECT_S = 5.0  # for all connections
TRY_S = 2.0  # for one address
MOST_PEERS = 512
SPARE_FILES = 256  # that a process may want beside its connections
WHY_BYTES = 512
UNSENT_BYTES = 128 << 10  # that wait in the kernel behind what is on its way
ADVICE = "open the nodes' firewalls to one another, or name interfaces that they share in TACCL_INTERFACES"


def connect(job: Job, peers: Callable[[int], Iterable[int]]) -> tuple[dict[int, socket.socket], str]:
    """This rank's connections by peer, or none of any rank, and why; collective.

    peers: of a rank those that it is connected with; with b among those of a, a is among those of b. Raises UsageError
    on all ranks where the variable TACCL_INTERFACES names nothing.
    """
    mine = job.together("the look at network interfaces", addresses.places)
    wanted = sorted(peers(job.rank))
    why, listener = "", None
    if len(wanted) > MOST_PEERS:
        why = f"rank {job.rank} has more than {MOST_PEERS} peers, the most that it connects with"
    elif wanted:
        try:
            _allow_files(len(wanted) + SPARE_FILES)
            listener = _listen()
        except OSError as error:
            why = f"rank {job.rank} cannot listen for TCP connections: {error.strerror}"
    port = 0 if listener is None else listener.getsockname()[1]
    record = RECORD.pack(secrets.token_bytes(SECRET_BYTES), port, bool(why))
    told = np.concatenate([np.frombuffer(record, np.uint8), addresses.pack(mine)])
    everyone = job.gather_bytes(told, "the exchange of addresses")
    heads = [RECORD.unpack(row[: RECORD.size].tobytes()) for row in everyone]
    found: dict[int, socket.socket] = {}
    if listener is not None and not any(failed for _, _, failed in heads):
        meeting = _Meeting(job.rank, heads[0][0], listener)
        for peer in wanted:
            theirs = addresses.unpack(everyone[peer][RECORD.size :])
            if peer > job.rank:
                meeting.call(peer, [(str(p.address), heads[peer][1]) for p in in_order(theirs, mine)])
            else:
                meeting.expect(peer)
        with job.waiting("it waits for TCP connections to other nodes"):
            why = meeting.hold(min(CONNECT_S, job.watchdog.deadline_s / 2))
        found = meeting.made
    if listener is not None:
        listener.close()
    why = first_reason(job, why)
    if why:
        for connection in found.values():
            connection.close()
        found.clear()
    return found, why


def first_reason(job: Job, why: str) -> str:
    """What the first rank says that has something to say; on every rank, collective."""
    text = np.zeros(WHY_BYTES, np.uint8)
    said = why.encode(errors="backslashreplace")[:WHY_BYTES]
    text[: len(said)] = np.frombuffer(said, np.uint8)
    rows = job.gather_bytes(text, "the choice of connections")
    lines = (row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows)
    return next((line for line in lines if line), "")


def _allow_files(files: int) -> None:
    """Raise the process's own limit as far as that is needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        most = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < files:
        raise OSError(errno.EMFILE, f"it may not open {files} files at once (ulimit -n)")


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel knows IPv6, and this network does not
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=MOST_PEERS, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=MOST_PEERS)


def _settle(connection: socket.socket) -> None:
    """As messages want it: at once, and with little that waits in the kernel, where it has lost its turn."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


@dataclass
class _Call:
    """A connection that we make. left: addresses that were not tried."""

    peer: int
    left: list[tuple[str, int]]
    connection: socket.socket | None = None
    until_s: float = 0.0
    got: bytes = b""
    why: str = "it has no address"


@dataclass
class _Guest:
    """A connection that somebody else makes."""

    connection: socket.socket
    got: bytes = b""


@dataclass
class _Meeting:
    """The making of all connections of a rank."""

    rank: int
    secret: bytes
    listener: socket.socket
    made: dict[int, socket.socket] = field(default_factory=dict)
    _calls: dict[int, _Call] = field(default_factory=dict)
    _expected: set[int] = field(default_factory=set)
    _failed: dict[int, str] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def call(self, peer: int, places: list[tuple[str, int]]) -> None:
        """Connect to a peer that listens."""
        self._calls[peer] = _Call(peer, places)

    def expect(self, peer: int) -> None:
        """A peer will connect."""
        self._expected.add(peer)

    def hold(self, patience_s: float) -> str:
        """Make them; why not all were made."""
        until_s = time.monotonic() + patience_s
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ, None)
        for call in list(self._calls.values()):
            self._next(call)
        while (self._calls or self._expected) and (now := time.monotonic()) < until_s and not self._failed:
            for key, _ in self._selector.select(min(0.1, until_s - now)):
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, _Guest):
                    self._hear(key.data)
                else:
                    self._go_on(key.data)
            for call in [c for c in self._calls.values() if c.connection and time.monotonic() > c.until_s]:
                call.why = "it does not answer"
                self._next(call)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
        self._selector.close()
        for peer, call in self._calls.items():
            self._failed.setdefault(peer, call.why)
        for peer in self._expected:
            self._failed.setdefault(peer, "it has not called")
        if not self._failed:
            return ""
        peer = min(self._failed)
        return f"rank {self.rank} has no TCP connection to rank {peer}: {self._failed[peer]}; {ADVICE}"

    def _next(self, call: _Call) -> None:
        """Try the next address."""
        self._drop(call)
        while call.left:
            host, port = call.left.pop(0)
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            connection.setblocking(False)
            code = connection.connect_ex((host, port))
            if code in (0, errno.EINPROGRESS):
                call.connection, call.got = connection, b""
                call.until_s = time.monotonic() + TRY_S
                call.why = f"nobody answers at {host}"
                self._selector.register(connection, selectors.EVENT_WRITE, call)
                return
            connection.close()
            call.why = f"{host}: {os.strerror(code)}"
        self._failed[call.peer] = call.why
        del self._calls[call.peer]

    def _drop(self, call: _Call) -> None:
        if call.connection is not None:
            self._selector.unregister(call.connection)
            call.connection.close()
            call.connection = None

    def _go_on(self, call: _Call) -> None:
        """The connection is made, or has failed; or the peer answers."""
        connection = call.connection
        if connection is None:  # given up meanwhile
            return
        try:
            if self._selector.get_key(connection).events == selectors.EVENT_WRITE:
                if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                connection.send(HELLO.pack(MAGIC, self.secret[:16], self.rank, call.peer))
                self._selector.modify(connection, selectors.EVENT_READ, call)
                return
            more = connection.recv(WELCOME.size - len(call.got))
        except BlockingIOError:
            return
        except OSError as error:
            call.why = f"{call.why} ({error.strerror})"
            self._next(call)
            return
        call.got += more
        if not more:
            call.why = "another program answers at its address"
            self._next(call)
        elif len(call.got) == WELCOME.size:
            half, who = WELCOME.unpack(call.got)
            if who == call.peer and hmac.compare_digest(half, self.secret[16:]):
                self._selector.unregister(connection)
                del self._calls[call.peer]
                self._keep(call.peer, connection)
            else:
                call.why = "another program answers at its address"
                self._next(call)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, _Guest(connection))

    def _hear(self, guest: _Guest) -> None:
        try:
            more = guest.connection.recv(HELLO.size - len(guest.got))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        guest.got += more
        if more and len(guest.got) < HELLO.size:
            return
        self._selector.unregister(guest.connection)
        if more:
            magic, half, who, whom = HELLO.unpack(guest.got)
            known = magic == MAGIC and hmac.compare_digest(half, self.secret[:16])
            if known and whom == self.rank and who in self._expected:
                with contextlib.suppress(OSError):
                    guest.connection.send(WELCOME.pack(self.secret[16:], self.rank))
                    self._expected.remove(who)
                    self._keep(who, guest.connection)
                    return
        guest.connection.close()

    def _keep(self, peer: int, connection: socket.socket) -> None:
        _settle(connection)
        self.made[peer] = connection
