"""How messages between nodes are cut into segments, and how many of these are on their way to a peer at once.

Segments keep the order of a program on slow links, where 64 KB take milliseconds. On quick ones they and their
confirmations take processor time, and longer ones keep it as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from taccl.profiles.topology import Topology

SEGMENT_BYTES = 64 << 10
OPEN_MPI_SEGMENT_BYTES = 60 << 10  # and a header: less than 64 KB
LONGEST_BYTES = 256 << 10  # under MPICH, whose UCX asks before it sends more than 1 MB over TCP
SEGMENT_US = 2700  # that a longer one may take, as one of 64 KB does over 200 Mbit/s
SEGMENTS = 5  # that are on their way to a peer; more than the bytes that a round trip takes on most networks
LEAST_SEGMENTS = 3  # of longer ones
MOST_SEGMENTS = 64  # over a link of which it is known that a round trip takes more


@dataclass(frozen=True, slots=True)
class Pace:
    """Of messages from one rank to another: bytes of a segment, and how many are on their way."""

    segment_bytes: int
    segments: int


def usual(library: str) -> Pace:
    """Under an MPI library, where nothing is known of a link."""
    if library == "Open MPI":
        return Pace(min(SEGMENT_BYTES, OPEN_MPI_SEGMENT_BYTES), SEGMENTS)
    return Pace(SEGMENT_BYTES, SEGMENTS)


def paces(topology: Topology, library: str, longer: bool = True) -> dict[tuple[int, int], Pace]:
    """By (source, destination), ranks of different nodes, where it is not the usual one.

    longer: whether segments may be longer than those, as they are on quick links where the MPI library takes them.
    On their way is at least twice what passes in a round trip, since both ranks act on what has come only when they get
    round to it.
    """
    node_of, least = topology.node_of(), usual(library)
    longest_bytes = LONGEST_BYTES if longer and library in ("MPICH", "TCP") else least.segment_bytes
    found: dict[tuple[int, int], Pace] = {}
    of_kind: dict[tuple[Fraction, Fraction, tuple[int, ...]], Pace] = {}
    for link in topology.links:
        if node_of[link.src] == node_of[link.dst]:
            continue
        kind = link.alpha_us, link.beta_us_per_mb, link.ports
        pace = of_kind.get(kind)
        if pace is None:
            betas = [link.beta_us_per_mb, *(topology.ports[port].beta_us_per_mb for port in link.ports)]
            pace = of_kind[kind] = _pace(least, link.alpha_us, max(betas), longest_bytes)
        pair = link.src, link.dst
        found[pair] = _both(pace, found[pair]) if pair in found else pace
    return {pair: pace for pair, pace in found.items() if pace != least}


def _both(one: Pace, other: Pace) -> Pace:
    """Of two links: segments that are short enough for either, and as many bytes on their way as either wants."""
    length = min(one.segment_bytes, other.segment_bytes)
    most = max(one.segments * one.segment_bytes, other.segments * other.segment_bytes)
    return Pace(length, min(MOST_SEGMENTS, -(-most // length)))


def _pace(usual: Pace, alpha_us: Fraction, beta_us_per_mb: Fraction, longest_bytes: int) -> Pace:
    length = usual.segment_bytes
    while 2 * length <= longest_bytes and 2 * length * beta_us_per_mb <= SEGMENT_US * 10**6:
        length *= 2
    if not beta_us_per_mb:
        return Pace(length, MOST_SEGMENTS)
    passes = math.ceil(2 * 2 * alpha_us * 10**6 / (beta_us_per_mb * length))
    least = usual.segments if length == usual.segment_bytes else LEAST_SEGMENTS
    return Pace(length, max(least, min(MOST_SEGMENTS, passes)))
