"""Allreduce as a reduction to one root and a broadcast from it, every message carrying the whole vector.

Twice the depth of one tree instead of the many messages of reduce-scatter and allgather: the shape for vectors
so short that alpha is all that counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Restrictions
from taccl.synth.collective import Collective, build
from taccl.synth.engines.greedy import greedy, tastes
from taccl.synth.problem import problem, unreachable
from taccl.synth.schedule import Transfer


def rooted_allreduce(
    topology: Topology,
    collective: Collective,
    size_bytes: int,
    restrictions: Restrictions,
    passes: int,
    seed: int,
) -> Iterator[list[Transfer]]:
    """One list of transfers per root and taste, roots ascending."""
    whole = tuple(range(len(collective.chunks)))
    for root in range(topology.ranks):
        up = problem(topology, build("reduce", topology.ranks, 1, root=root), size_bytes, restrictions)
        down = problem(topology, build("broadcast", topology.ranks, 1, root=root), size_bytes, restrictions)
        if unreachable(up) or unreachable(down):
            continue
        for taste in tastes(passes, seed):
            gathered, spread = greedy(up, taste), greedy(down, taste)
            if gathered is not None and spread is not None:
                yield [replace(t, chunks=whole) for t in (*gathered, *spread)]
