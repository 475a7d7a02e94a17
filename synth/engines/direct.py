"""Direct: every chunk goes straight from its root to each destination; without a link, by shortest paths.

The order is rotated (rank s serves s+1, s+2, ...), so that no two ranks aim at the same one at a time.
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005 (pairwise
exchange of reduce-scatter and alltoall).
"""

from __future__ import annotations

from collections.abc import Sequence

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.engines.network import Network, Want, both_ways
from taccl.synth.schedule import Transfer


def transfers(topology: Topology, collective: Collective) -> list[Transfer]:
    """Direct exchange for any collective. Raises Inapplicable when a destination cannot be reached."""
    return both_ways(topology, collective, _spread)


def _spread(topology: Topology, wants: Sequence[Want]) -> list[Transfer]:
    network = Network(topology)
    together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for want in wants:
        together.setdefault((want.root, want.targets), []).append(want.chunk)
    placed: list[tuple[tuple[int, int, int, int], Transfer]] = []
    for (root, targets), chunks in together.items():
        if all(network.linked(root, target) for target in targets):
            # One message for all chunks: nobody waits for a part of it.
            for target in targets:
                link = network.link(root, target, len(chunks))
                turn = (target - root) % topology.ranks
                placed.append(((turn, root, 0, chunks[0]), Transfer(link, tuple(chunks))))
            continue
        for chunk in chunks:
            turn = max((target - root) % topology.ranks for target in targets) if len(targets) == 1 else 0
            for hop, link in enumerate(network.tree(root, targets)):
                placed.append(((turn, root, hop, chunk), Transfer(link, (chunk,))))
    # Within one root the hops stay in tree order, so a chunk arrives before it is passed on.
    placed.sort(key=lambda item: item[0])
    return [transfer for _, transfer in placed]
