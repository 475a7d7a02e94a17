"""What a schedule costs that no time shows: local copies in its program.

Chunks that travel together and do not lie together are gathered before they leave and spread after they have come.
And a program whose chunks are no whole number of elements runs in memory where chunks have room to spare: it copies all
that it is given and all that it gives back.
"""

from __future__ import annotations

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.cost import costs
from taccl.synth.lower_operations import operations
from taccl.synth.numbering import neatly_numbered

WORD_BYTES = 4  # of the elements that most values have


def copies_fs(algorithm: Algorithm, topology: Topology) -> int:
    """How long the rank that copies most of all is busy with it (fs), in a program of the schedule.

    A copy costs what a message from the nearest rank costs a byte: within a host that is a copy too. Raises CheckFailed
    for a schedule that sends what is not there.
    """
    neat, priced = neatly_numbered(algorithm), costs(topology, algorithm.chunk_bytes)
    copied = [0] * topology.ranks
    for made in operations(neat, priced, [0] * len(neat.messages), True, False).all:
        if made.kind == "cpy":
            copied[made.rank] += made.count
    if algorithm.chunk_bytes % WORD_BYTES:
        for chunk in algorithm.collective.chunks:
            for rank, _ in (*chunk.sources, *chunk.destinations):
                copied[rank] += 1
    nearest = [0] * topology.ranks
    for index, link in enumerate(topology.links):
        own = next(fs for resource, fs in priced.holds[index] if resource == index)
        nearest[link.dst] = min(nearest[link.dst] or own, own)
    return max(count * fs for count, fs in zip(copied, nearest, strict=True))
