"""How messages between nodes are cut into segments, and how many of these are on their way to a peer at once.

Segments keep the order of a program on slow links, where 64 KB take milliseconds. On quick ones they and their
confirmations take processor time, and longer ones keep it as well.

Over connections of our own messages leave no faster than their links pass them, as far as that is known. Else what is
on its way stands in the queue of its node's uplink or of the other node's downlink, and in the same queue stand what
confirms the messages that come the other way and what says whose turn it is: both directions then wait for each other,
and links have nothing to do. The ranks of a node hand over one segment after the other to each uplink
(`runtime/uplink.py`). A link may be slower than those, and a long message may share them: there the kernel sends at the
rate of the link.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from taccl.profiles.topology import Topology
from taccl.runtime.uplink import MOST_UPLINKS, Uplink

SEGMENT_BYTES = 64 << 10
OPEN_MPI_SEGMENT_BYTES = 60 << 10  # and a header: less than 64 KB
LONGEST_BYTES = 256 << 10  # under MPICH, whose UCX asks before it sends more than 1 MB over TCP
SEGMENT_US = 2700  # that a longer one may take, as one of 64 KB does over 200 Mbit/s
SEGMENTS = 5  # that are on their way to a peer; more than the bytes that a round trip takes on most networks
LEAST_SEGMENTS = 3  # of longer ones
# Longer segments are of links so quick that the kernel's timers and frames cost more than order brings, where cores are
# what is short.
ORDERLY_BYTES = 128 << 10
MOST_SEGMENTS = 64  # over a link of which it is known that a round trip takes more
HASTE = Fraction(103, 100)  # a little more than a link passes, which then never idles
QUEUE_US = 1000  # a shorter queue is not worth avoiding
SLOWER = Fraction(11, 10)  # a link is slower than an uplink that is more than so many times as quick


@dataclass(frozen=True, slots=True)
class Pace:
    """Of messages from one rank to another: bytes of a segment, how many are on their way, the most bytes of a message
    that leave in a second (0 where there is no such limit), and the uplinks of its node that they leave over."""

    segment_bytes: int
    segments: int
    bytes_per_s: int = 0
    uplinks: tuple[Uplink, ...] = ()

    @property
    def under_way_bytes(self) -> int:
        """Most of a message that is on its way."""
        return self.segments * self.segment_bytes

    def unlimited_bytes(self) -> float:
        """Longer messages leave at no more than `bytes_per_s`. Where an uplink is no quicker, what fits into the kernel
        goes at once, one after the other: two that shared the uplink would both be late. And a segment is too little to
        be worth it: the kernel cuts what it paces into short packets."""
        if not self.bytes_per_s:
            return math.inf
        if all(SLOWER * self.bytes_per_s < rate for _, rate in self.uplinks):
            return self.segment_bytes
        return self.under_way_bytes if self.segment_bytes <= ORDERLY_BYTES else math.inf


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
    uplinks = _uplinks(topology, node_of) if library == "TCP" else {}
    found: dict[tuple[int, int], Pace] = {}
    of_kind: dict[tuple[Fraction, Fraction, tuple[int, ...]], Pace] = {}
    for link in topology.links:
        if node_of[link.src] == node_of[link.dst]:
            continue
        kind = link.alpha_us, link.beta_us_per_mb, link.ports
        pace = of_kind.get(kind)
        if pace is None:
            betas = [link.beta_us_per_mb, *(topology.ports[port].beta_us_per_mb for port in link.ports)]
            pace = _pace(least, link.alpha_us, max(betas), longest_bytes)
            if library == "TCP":
                own = [
                    (uplinks[port], topology.ports[port].beta_us_per_mb)
                    for port in link.ports
                    if port in uplinks
                ]
                pace = _limited(pace, max(betas), own)
            of_kind[kind] = pace
        pair = link.src, link.dst
        found[pair] = _both(pace, found[pair]) if pair in found else pace
    return {pair: pace for pair, pace in found.items() if pace != least}


def _both(one: Pace, other: Pace) -> Pace:
    """Of two links: segments that are short enough for either, as many bytes on their way as either wants, and in a
    second as many as both pass, which may be at work at once. Who can say over which uplink a segment leaves?"""
    length = min(one.segment_bytes, other.segment_bytes)
    most = max(one.under_way_bytes, other.under_way_bytes)
    limited = one.bytes_per_s and other.bytes_per_s
    return Pace(
        length,
        min(MOST_SEGMENTS, -(-most // length)),
        limited and one.bytes_per_s + other.bytes_per_s,
        one.uplinks if one.uplinks == other.uplinks else (),
    )


def _uplinks(topology: Topology, node_of: Sequence[int]) -> dict[int, int]:
    """Of each port that only links from one node to others use, its number among those of its node."""
    sources: defaultdict[int, set[int]] = defaultdict(set)
    for link in topology.links:
        for port in link.ports:
            between = node_of[link.src] != node_of[link.dst]
            sources[port] |= {node_of[link.src]} if between else {-1}
    numbers: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for port, nodes in sorted(sources.items()):
        (node, *others) = nodes
        if not others and node >= 0 and counts[node] < MOST_UPLINKS:
            numbers[port] = counts[node]
            counts[node] += 1
    return numbers


def _limited(pace: Pace, beta_us_per_mb: Fraction, uplinks: list[tuple[int, Fraction]]) -> Pace:
    """With the rate of a link and of its uplinks (number, beta in us/MB), where these are low enough to matter."""

    def bytes_per_s(beta: Fraction) -> int:
        matters = pace.under_way_bytes * beta >= QUEUE_US * 10**6
        return math.ceil(HASTE * 10**12 / beta) if matters else 0

    own = tuple((number, rate) for number, beta in uplinks if (rate := bytes_per_s(beta)))
    return replace(pace, bytes_per_s=bytes_per_s(beta_us_per_mb), uplinks=own)


def _pace(usual: Pace, alpha_us: Fraction, beta_us_per_mb: Fraction, longest_bytes: int) -> Pace:
    length = usual.segment_bytes
    while 2 * length <= longest_bytes and 2 * length * beta_us_per_mb <= SEGMENT_US * 10**6:
        length *= 2
    if not beta_us_per_mb:
        return Pace(length, MOST_SEGMENTS)
    passes = math.ceil(2 * 2 * alpha_us * 10**6 / (beta_us_per_mb * length))
    least = usual.segments if length == usual.segment_bytes else LEAST_SEGMENTS
    return Pace(length, max(least, min(MOST_SEGMENTS, passes)))
