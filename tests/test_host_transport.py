"""What is chosen for a program in host memory: the length of its segments, and copies past the caches."""

import hashlib
from fractions import Fraction
from types import SimpleNamespace

import pytest

from taccl.profiles.topology import Link, Topology
from taccl.runtime import copying, host_transport
from taccl.runtime.pace import Pace
from taccl.runtime.turns import Gate

QUICK = Topology(
    "two", ((0,), (1,)), tuple(Link(a, 1 - a, Fraction(9), Fraction(8000), Fraction(0)) for a in (0, 1))
)
LONG = {(a, 1 - a): Pace(256 << 10, 3) for a in (0, 1)}
GATES = {(0, 1, 1): (Gate(0, (0, 1, 0), 0.5),)}


@pytest.fixture
def made(monkeypatch):
    """Arguments of the paced transport that is made for a job of two nodes, and what the ranks compare."""
    compared, got = [], []
    job = SimpleNamespace(
        rank=0, MPI=None, data=None, receipts=None, notices=None,
        agree_on=lambda digest, what: compared.append(digest),
    )  # fmt: skip
    monkeypatch.setattr(host_transport, "MpiTransport", lambda *arguments: None)
    monkeypatch.setattr(host_transport, "PacedTransport", lambda *arguments: got.append(arguments))
    monkeypatch.setattr(host_transport, "channels", lambda plan: {})
    monkeypatch.setattr(host_transport.mpi, "library", lambda MPI: SimpleNamespace(name="MPICH"))

    def make(topology, gates):
        taken = None if gates is None else SimpleNamespace(gates=gates)
        compiled, neighbours = SimpleNamespace(plans=[None]), SimpleNamespace(nodes=(0, 1), tcp=None)
        host_transport.host_transport(job, compiled, 2**20, neighbours, "mpi", taken=taken, topology=topology)
        return got.pop()[-1], compared.pop()

    return make


@pytest.mark.parametrize(
    ("topology", "gates", "wanted"),
    [(QUICK, None, LONG), (QUICK, {}, LONG), (QUICK, GATES, {}), (None, None, {})],
    ids=["no turns", "none for any message", "turns", "an unknown cluster"],
)
def test_segments_are_long_where_no_message_waits_for_its_turn(made, topology, gates, wanted):
    paces, _ = made(topology, gates)
    assert paces == wanted


def test_ranks_with_other_profiles_find_out(made):
    digests = {made(topology, None)[1] for topology in (QUICK, None)}
    assert len(digests) == 2
    assert all(len(digest) == hashlib.sha256().digest_size for digest in digests)


def test_copies_go_past_the_caches_from_half_of_these_on(monkeypatch):
    monkeypatch.setattr(copying, "cache_bytes", lambda: 32 * 2**20)
    assert copying.past_caches(2**20, 8)  # read and written
    assert not copying.past_caches(2**20 - 1, 8)
    assert not copying.past_caches(2**20, 4)
