"""Connections between ranks, made by threads of one process: whoever else is at the ports, ranks find each other."""

import contextlib
import ipaddress
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taccl.errors import UsageError
from taccl.runtime import addresses, connections
from taccl.runtime.addresses import Place


class Ranks:
    """Jobs whose ranks are threads."""

    def __init__(self, number):
        self.number = number
        self.rows = [None] * number
        self.meet = threading.Barrier(number, timeout=30)

    def job(self, rank):
        def gather(mine, what):
            self.rows[rank] = mine
            self.meet.wait()
            found = np.stack(self.rows)
            self.meet.wait()
            return found

        return SimpleNamespace(
            rank=rank, ranks=self.number, gather_bytes=gather, together=lambda what, work: work(),
            waiting=lambda what: contextlib.nullcontext(), watchdog=SimpleNamespace(deadline_s=30.0),
        )  # fmt: skip

    def connect(self, peers=None):
        """Of each rank what it got."""
        found = [None] * self.number

        def others(rank):
            return [peer for peer in range(self.number) if peer != rank]

        def run(rank):
            found[rank] = connections.connect(self.job(rank), peers or others)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert None not in found
        return found


def talk(found):
    """Every pair of ends belongs together."""
    for rank, (made, why) in enumerate(found):
        assert not why
        for peer, connection in made.items():
            connection.setblocking(True)
            connection.sendall(bytes((rank, peer)))
    for rank, (made, _) in enumerate(found):
        for peer, connection in made.items():
            assert connection.recv(2) == bytes((peer, rank))
            connection.close()


@pytest.mark.parametrize("number", [2, 5])
def test_all_pairs_are_connected(number):
    found = Ranks(number).connect()
    assert [sorted(made) for made, _ in found] == [
        [p for p in range(number) if p != r] for r in range(number)
    ]
    talk(found)


def test_only_the_pairs_that_are_wanted():
    wanted = {0: [2], 1: [], 2: [0, 3], 3: [2]}
    found = Ranks(4).connect(lambda rank: wanted[rank])
    assert [sorted(made) for made, _ in found] == [wanted[rank] for rank in range(4)]
    talk(found)


def test_strangers_at_the_port_do_not_matter(monkeypatch):
    """One that says nothing, one that says something else, one that goes away, and some that say they are ranks."""
    real, strangers = connections._listen, []

    def listen():
        made = real()
        rank = connections.HELLO.pack(connections.MAGIC, bytes(16), 0, 1)
        for said in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n" * 9,
            None,
            connections.MAGIC + bytes(24),
            rank,
            rank + bytes(32),
        ):
            stranger = socket.create_connection(("127.0.0.1", made.getsockname()[1]))
            if said is None:
                stranger.close()
            else:
                stranger.sendall(said)
                strangers.append(stranger)
        return made

    monkeypatch.setattr(connections, "_listen", listen)
    talk(Ranks(3).connect())
    for stranger in strangers:
        stranger.close()


def test_addresses_are_tried_until_the_peer_answers(monkeypatch):
    """At one nobody listens, at one another program answers with rubbish, at one it says nothing."""
    silent = socket.create_server(("127.0.0.3", 0))
    rubbish = socket.create_server(("127.0.0.2", 0))
    port = rubbish.getsockname()[1]

    def answer():
        with contextlib.suppress(OSError):
            while True:
                guest, _ = rubbish.accept()
                guest.sendall(b"x" * 40)
                guest.close()

    threading.Thread(target=answer, daemon=True).start()
    real = socket.socket.connect_ex
    turned = {"127.0.0.2": port, "127.0.0.3": silent.getsockname()[1]}

    def connect_ex(self, where):
        return real(self, (where[0], turned.get(where[0], where[1])))

    class Socket(socket.socket):
        pass

    Socket.connect_ex = connect_ex
    monkeypatch.setattr(connections.socket, "socket", Socket)
    monkeypatch.setattr(
        addresses,
        "places",
        lambda: [Place(ipaddress.ip_address(f"127.0.0.{last}"), 8) for last in (4, 2, 3, 1)],
    )
    monkeypatch.setattr(connections, "_listen", lambda: socket.create_server(("127.0.0.1", 0), backlog=9))
    talk(Ranks(2).connect())
    silent.close()
    rubbish.close()


def test_who_is_called_must_know_the_secret_too(monkeypatch):
    """Another program at a peer's address that speaks as a rank would, and repeats what it is told."""
    real, heard = connections.socket.socket.connect_ex, []
    liar = socket.create_server(("127.0.0.2", 0))

    def answer():
        guest, _ = liar.accept()
        hello = guest.recv(connections.HELLO.size)
        heard.append(hello)
        guest.sendall(hello[8:24] + bytes(32))
        heard.append(guest.recv(100))
        guest.close()

    answering = threading.Thread(target=answer)
    answering.start()
    port = liar.getsockname()[1]

    class Socket(socket.socket):
        def connect_ex(self, where):
            return real(self, (where[0], port) if where[0] == "127.0.0.2" else where)

    monkeypatch.setattr(connections.socket, "socket", Socket)
    monkeypatch.setattr(
        addresses, "places", lambda: [Place(ipaddress.ip_address(f"127.0.0.{last}"), 8) for last in (2, 1)]
    )
    monkeypatch.setattr(connections, "_listen", lambda: socket.create_server(("127.0.0.1", 0), backlog=9))
    talk(Ranks(2).connect())
    answering.join(5)
    liar.close()
    assert len(heard[0]) == connections.HELLO.size and heard[1] == b""  # it is told nothing more


def test_an_address_that_never_answers_costs_a_moment_only(monkeypatch):
    silent = [socket.create_server((f"127.0.0.{last}", 0)) for last in range(2, 8)]
    ports = {server.getsockname()[0]: server.getsockname()[1] for server in silent}
    real = connections.socket.socket.connect_ex

    class Socket(socket.socket):
        def connect_ex(self, where):
            return real(self, (where[0], ports.get(where[0], where[1])))

    monkeypatch.setattr(connections.socket, "socket", Socket)
    found = [Place(ipaddress.ip_address(host), 8) for host in (*ports, "127.0.0.1")]
    monkeypatch.setattr(addresses, "places", lambda: found)
    monkeypatch.setattr(connections, "_listen", lambda: socket.create_server(("127.0.0.1", 0), backlog=9))
    talk(Ranks(2).connect())
    for server in silent:
        server.close()


def test_a_kernel_without_ipv6_reaches_the_other_addresses(monkeypatch):
    real = socket.socket

    def made(family=socket.AF_INET, *rest, **options):
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *rest, **options)

    found = [Place(ipaddress.ip_address(host), 8) for host in ("fd00::1", "127.0.0.1")]
    monkeypatch.setattr(addresses, "places", lambda: found)
    monkeypatch.setattr(connections, "_listen", lambda: socket.create_server(("127.0.0.1", 0), backlog=9))
    monkeypatch.setattr(connections, "socket", SimpleNamespace(**{**vars(socket), "socket": made}))
    talk(Ranks(2).connect())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"addresses.places": list}, "has no TCP connection to rank 1: it has no address"),
        ({"addresses.places": lambda: [Place(ipaddress.ip_address("127.0.0.9"), 8)]}, "nobody answers at 127.0.0.9"),
        ({"_listen": lambda: (_ for _ in ()).throw(OSError(98, "Address already in use"))}, "cannot listen"),
        ({"MOST_PEERS": 1}, "more than 1 peers, the most"),
    ],
)  # fmt: skip
def test_where_one_pair_fails_all_ranks_know_why(monkeypatch, damage, words):
    monkeypatch.setattr(connections, "CONNECT_S", 1.0)
    if "MOST_PEERS" not in damage:
        monkeypatch.setattr(connections, "_listen", lambda: socket.create_server(("127.0.0.1", 0), backlog=9))
    for name, instead in damage.items():
        monkeypatch.setattr(f"taccl.runtime.{'' if '.' in name else 'connections.'}{name}", instead)
    found = Ranks(3).connect()
    assert all(not made and words in why for made, why in found), found


def test_a_process_that_may_not_open_so_many_files_says_so(monkeypatch):
    resource = connections.open_files.resource
    limit = resource.RLIMIT_NOFILE
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 64) if what == limit else None)
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)
    found = Ranks(2).connect()
    assert all(not made and "it may not open" in why and "ulimit -n" in why for made, why in found)


PLACES = st.builds(
    Place,
    st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6).filter(lambda a: a.ipv4_mapped is None)),
    st.integers(0, 32),
)


@given(st.lists(PLACES, max_size=addresses.MOST))
def test_addresses_travel_whole(found):
    assert addresses.unpack(addresses.pack(found)) == found


def test_addresses_of_a_common_network_are_tried_first_and_the_loopback_last():
    def places(*words):
        found = map(ipaddress.ip_interface, words)
        return [Place(one.ip, one.network.prefixlen) for one in found]

    theirs = places("127.0.0.1/8", "172.17.0.1/16", "fd00::5/64", "10.1.2.3/24")
    mine = places("10.1.2.9/24", "127.0.0.1/8", "fd01::1/64")
    assert addresses.in_order(theirs, mine) == places(
        "10.1.2.3/24", "172.17.0.1/16", "fd00::5/64", "127.0.0.1/8"
    )


def test_interfaces_are_chosen_by_the_beginning_of_their_names(monkeypatch):
    loop = [place.address for place in addresses.places("lo")]
    assert ipaddress.ip_address("127.0.0.1") in loop and all(address.is_loopback for address in loop)
    assert [place.address for place in addresses.places("nothing, l")] == loop
    with pytest.raises(UsageError, match=r"TACCL_INTERFACES=none: no such network interface .* lo"):
        addresses.places("none")
    monkeypatch.setenv(addresses.INTERFACES, "none")
    with pytest.raises(UsageError):
        addresses.places()
