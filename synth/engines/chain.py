"""Chunked chain: the data go from the root through all ranks in a row, chunk behind chunk.

p - 2 + k rounds of one chunk each for p ranks and k chunks: (sqrt((p - 2) alpha) + sqrt(beta n))^2 at the best k. Trees
need fewer rounds, but a chain sends everything over each link once and crosses between nodes as seldom as possible.
That suits slow links between nodes, and frames that only the root codes. Reducing is the chain turned round.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.engines.circles import chain_from
from taccl.synth.engines.network import Inapplicable, Network, Want, both_ways
from taccl.synth.schedule import Transfer


def transfers(topology: Topology, collective: Collective) -> list[Transfer]:
    """Broadcast and reduce along a Hamiltonian path from the root. Raises Inapplicable elsewhere."""
    if collective.name not in ("broadcast", "reduce"):
        raise Inapplicable(f"chunked chains serve broadcast and reduce, not {collective.name}")
    return both_ways(topology, collective, _spread) if topology.ranks > 1 else []


def cuts(ranks: int, occupancy_fs: int, whole_fs: int, most: int) -> list[int]:
    """The number of chunks that suits a chain, sqrt((p - 2) beta n / alpha), and some near it, up to `most`.

    occupancy_fs: what a message holds a link for beside its bytes. whole_fs: time of all data over a link, without
    alpha.
    """
    best = max(1, isqrt(max(0, ranks - 2) * whole_fs // max(1, occupancy_fs)))
    return sorted({min(k, most) for k in (best // 2, best * 3 // 4, best, best * 3 // 2) if k} - {0})


def _spread(topology: Topology, wants: Sequence[Want]) -> list[Transfer]:
    if not wants:
        return []
    root = wants[0].root
    ranks = chain_from(topology, root)
    if ranks is None:
        raise Inapplicable(f"no chain over existing links from rank {root} visits every rank once")
    network = Network(topology)
    return [Transfer(network.link(src, dst), (want.chunk,)) for want in wants for src, dst in pairwise(ranks)]
