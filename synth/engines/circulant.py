"""Pipelined broadcast on a circulant graph: k chunks to n ranks in k - 1 + ceil(log2 n) rounds.

No algorithm with one port a rank needs fewer.

In round t every rank sends to the rank a fixed step ahead, the steps being n halved again and again (Traeff, "Optimal
Broadcast Schedules in Logarithmic Time", 2023; his construction of what to send is closed, here it is greedy). The root
sends a new chunk in each round. Any other rank sends, of what its partner lacks, the chunk that fewest ranks have, the
newest of equals: for up to 64 ranks that was seen to reach the optimum with any number of chunks that was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.engines.network import Inapplicable, Network, Want, both_ways
from taccl.synth.schedule import Transfer


def transfers(topology: Topology, collective: Collective) -> list[Transfer]:
    """Broadcast and reduce where ranks have links to those ahead; Inapplicable elsewhere."""
    if collective.name not in ("broadcast", "reduce"):
        raise Inapplicable(f"circulant graphs serve broadcast and reduce, not {collective.name}")
    return both_ways(topology, collective, _spread) if topology.ranks > 1 else []


def cuts(ranks: int, occupancy_fs: int, whole_fs: int, most: int) -> list[int]:
    """Numbers of chunks, up to `most`, that suit k - 1 + log2(ranks) rounds of one chunk each: where another round's
    occupancy is worth it. whole_fs: time of all data over a link, without alpha."""
    depth = max(1, (ranks - 1).bit_length() - 1)
    best = isqrt(depth * whole_fs // max(1, occupancy_fs))
    return sorted(
        {k for k in (best // 2, best * 3 // 4, best, best * 3 // 2) if 1 < k <= most}
        | {min(best, most)} - {0}
    )


def rounds(size: int, chunks: int) -> list[list[tuple[int, int, int]]]:
    """Per round (position, position ahead, chunk) of each message; the root is position 0. O(chunks^2 size)."""
    steps = _steps(size)
    have: list[set[int]] = [set(range(chunks)), *(set() for _ in range(size - 1))]
    copies = [1] * chunks
    listed: list[list[tuple[int, int, int]]] = []
    missing = chunks * (size - 1)
    while missing:
        step = steps[len(listed) % len(steps)]
        newest = min(len(listed), chunks - 1)
        sent = []
        for position in range(size):
            ahead = (position + step) % size
            useful = have[position] - have[ahead]
            if position == 0 and newest in useful:
                useful = {newest}
            if ahead and useful:
                sent.append((position, ahead, min(useful, key=lambda chunk: (copies[chunk], -chunk))))
        for _, ahead, chunk in sent:
            have[ahead].add(chunk)
            copies[chunk] += 1
        missing -= len(sent)
        listed.append(sent)
    return listed


def _steps(size: int) -> list[int]:
    """Half of the ranks, rounded up, half of that, and so on down to 1."""
    steps = []
    while size > 1:
        size = -(-size // 2)
        steps.append(size)
    return steps


def _spread(topology: Topology, wants: Sequence[Want]) -> list[Transfer]:
    if not wants:
        return []
    network = Network(topology)
    root, n = wants[0].root, topology.ranks
    for step in _steps(n):
        for rank in range(n):
            ahead = (rank + step) % n
            if ahead != root and not network.linked(rank, ahead):
                raise Inapplicable(f"a circulant graph needs a link from rank {rank} to rank {ahead}")
    return [
        Transfer(network.link((root + a) % n, (root + b) % n), (wants[chunk].chunk,))
        for sent in rounds(n, len(wants))
        for a, b, chunk in sent
    ]
