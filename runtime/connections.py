"""TCP connections between ranks of different nodes: one for each pair, made once for a job.

Every rank listens on a port of its own and tells all others, over MPI, at which addresses. Of a pair the lower rank
calls, at one of the other one's addresses after the other, until somebody there knows the job's secret, which only its
ranks have; so a stranger at the port, or another host that has an address of a peer in its own private network, is no
peer. The secret itself is never sent: each side has the other one sign a number that it has drawn.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from taccl.runtime import addresses, networks, open_files
from taccl.runtime.addresses import in_order

if TYPE_CHECKING:
    from taccl.runtime.job import Job

MAGIC = b"taccl\0\0\2"
SECRET_BYTES = 32
HELLO = struct.Struct("<8s16sII")  # magic, the caller's number, who calls whom
WELCOME = struct.Struct("<16s32s")  # number and signature of who is called; then the caller signs
RECORD = struct.Struct("<32sHB")  # what ranks tell each other: their secrets, ports, and whether they cannot
CONNECT_S = 5.0  # for all connections
STAGGER_S = 0.25  # after which the next address of a peer is tried, too
MOST_PEERS = 512
SPARE_FILES = 256  # that a process may want beside its connections
WHY_BYTES = 512
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
            open_files.allow(len(wanted) + SPARE_FILES)
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


def between_nodes(job: Job) -> tuple[dict[int, socket.socket], str]:
    """This rank's connections to all ranks of other nodes, where messages of programs take such by themselves, or none
    and why; collective. None without a reason on one node."""
    nodes = job.alone().nodes
    if len(set(nodes)) == 1:
        return {}, ""
    if why := left_to_mpi(job):
        return {}, why
    return connect(job, lambda rank: [peer for peer, node in enumerate(nodes) if node != nodes[rank]])


def left_to_mpi(job: Job) -> str:
    """Why nobody should connect: a node has a network that an MPI library uses better; "" where none has.
    Collective."""
    devices = networks.direct()
    return first_reason(
        job, f"the node of rank {job.rank} has {devices}, which is left to MPI" if devices else ""
    )


def first_reason(job: Job, why: str) -> str:
    """What the first rank says that has something to say; on every rank, collective."""
    text = np.zeros(WHY_BYTES, np.uint8)
    said = why.encode(errors="backslashreplace")[:WHY_BYTES]
    text[: len(said)] = np.frombuffer(said, np.uint8)
    rows = job.gather_bytes(text, "the choice of connections")
    lines = (row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows)
    return next((line for line in lines if line), "")


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel knows IPv6, and this network does not
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=MOST_PEERS, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=MOST_PEERS)


def _settle(connection: socket.socket) -> None:
    """As messages want it: at once, and kept open by whoever stands between while nothing passes."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


@dataclass(eq=False)
class _Call:
    """A peer that we call. left: addresses that were not tried. next_s: when the next one is."""

    peer: int
    left: list[tuple[str, int]]
    tries: list[_Try] = field(default_factory=list)
    next_s: float = 0.0
    why: str = "it has no address"


@dataclass(eq=False)
class _Try:
    """A connection that we make, to one of its addresses."""

    call: _Call
    host: str
    connection: socket.socket
    number: bytes
    got: bytes = b""


@dataclass(eq=False)
class _Guest:
    """A connection that somebody else makes. proof: what it must answer, once it has said who it is."""

    connection: socket.socket
    got: bytes = b""
    who: int = -1
    proof: bytes = b""


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
        while (self._calls or self._expected) and (now := time.monotonic()) < until_s and not self._failed:
            for call in list(self._calls.values()):
                self._try(call)
            for key, _ in self._selector.select(min(STAGGER_S / 4, until_s - now)):
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, _Guest):
                    self._hear(key.data)
                else:
                    self._go_on(key.data)
        if not self._failed:
            for peer, call in self._calls.items():
                silent = ", ".join(one.host for one in call.tries)
                self._failed[peer] = f"nobody answers at {silent}" if silent else call.why
            self._failed.update(dict.fromkeys(self._expected, "it has not called"))
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
        self._selector.close()
        if not self._failed:
            return ""
        peer = min(self._failed)
        return f"rank {self.rank} has no TCP connection to rank {peer}: {self._failed[peer]}; {ADVICE}"

    def _sign(self, role: bytes, numbers: bytes, who: int, whom: int) -> bytes:
        """What only a rank of the job can say of a connection."""
        return hmac.digest(self.secret, MAGIC + role + numbers + struct.pack("<II", who, whom), "sha256")

    def _try(self, call: _Call) -> None:
        """Call the next addresses whose time has come; those before them may still answer."""
        while call.left and time.monotonic() >= call.next_s:
            (host, port), connection = call.left.pop(0), None
            try:
                connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                connection.setblocking(False)
                code = connection.connect_ex((host, port))
            except OSError as error:  # the kernel has no such network, or no more files
                code = error.errno or errno.EIO
            if connection is not None and code in (0, errno.EINPROGRESS):
                call.tries.append(_Try(call, host, connection, secrets.token_bytes(16)))
                call.next_s = time.monotonic() + STAGGER_S
                self._selector.register(connection, selectors.EVENT_WRITE, call.tries[-1])
                continue
            if connection is not None:
                connection.close()
            call.why = f"{host}: {os.strerror(code)}"
        if not call.left and not call.tries:
            self._failed[call.peer] = call.why
            self._calls.pop(call.peer, None)

    def _drop(self, one: _Try, why: str) -> None:
        """Nobody can be reached there, so the next address need not wait."""
        one.call.why, one.call.next_s = why, 0.0
        one.call.tries.remove(one)
        self._selector.unregister(one.connection)
        one.connection.close()

    def _go_on(self, one: _Try) -> None:
        """The connection is made, or has failed; or the peer answers."""
        call, connection = one.call, one.connection
        if one not in call.tries:  # given up meanwhile
            return
        try:
            if self._selector.get_key(connection).events == selectors.EVENT_WRITE:
                if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                connection.send(HELLO.pack(MAGIC, one.number, self.rank, call.peer))
                self._selector.modify(connection, selectors.EVENT_READ, one)
                return
            more = connection.recv(WELCOME.size - len(one.got))
            one.got += more
            if more and len(one.got) < WELCOME.size:
                return
            if more:
                number, proof = WELCOME.unpack(one.got)
                about = one.number + number, self.rank, call.peer
                if hmac.compare_digest(proof, self._sign(b"called", *about)):
                    connection.send(self._sign(b"caller", *about))
                    self._keep(call.peer, connection)
                    call.tries.remove(one)
                    for other in list(call.tries):
                        self._drop(other, "")
                    del self._calls[call.peer]
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(one, f"nobody answers at {one.host} ({error.strerror})")
            return
        self._drop(one, f"another program answers at {one.host}")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, _Guest(connection))

    def _hear(self, guest: _Guest) -> None:
        connection = guest.connection
        wanted = len(guest.proof) or HELLO.size
        try:
            more = connection.recv(wanted - len(guest.got))
            guest.got += more
            if more and len(guest.got) < wanted:
                return
            if more and self._answer(guest):
                return
        except BlockingIOError:
            return
        except OSError:  # it has gone
            pass
        self._selector.unregister(connection)
        connection.close()

    def _answer(self, guest: _Guest) -> bool:
        """To what it has said; whether it stays."""
        if guest.proof:
            proven = guest.who in self._expected and hmac.compare_digest(guest.got, guest.proof)
            if proven:
                self._keep(guest.who, guest.connection)
                self._expected.remove(guest.who)
            return proven
        magic, number, who, whom = HELLO.unpack(guest.got)
        if magic != MAGIC or whom != self.rank or who not in self._expected:
            return False
        mine = secrets.token_bytes(16)
        about = number + mine, who, whom
        guest.connection.send(WELCOME.pack(mine, self._sign(b"called", *about)))
        guest.got, guest.who, guest.proof = b"", who, self._sign(b"caller", *about)
        return True

    def _keep(self, peer: int, connection: socket.socket) -> None:
        """Raises OSError where it is lost already."""
        _settle(connection)
        self._selector.unregister(connection)
        self.made[peer] = connection
