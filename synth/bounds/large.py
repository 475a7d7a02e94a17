"""The bound of a large machine: counting over cuts, and messages where the links are not too many."""

from __future__ import annotations

from fractions import Fraction

from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.bounds.bound import Bound, stronger, strongest
from taccl.synth.bounds.messages import message_bounds
from taccl.synth.bounds.network import fluid
from taccl.synth.bounds.scale import scale_bound
from taccl.synth.bounds.wants import wanted
from taccl.synth.collective import ROOTED, build
from taccl.synth.cost import FS_PER_US
from taccl.synth.symmetric.group import Ints

# Up to so many ranks linear programs are solved for a bound; beyond, counting is all that is quick.
EXPLICIT_RANKS = 32
# Messages are counted link by link where there are no more links than this: in a second or two.
MOST_LINKS = 20_000
# And where blocks have no more destinations together than this, each of which is looked at.
MOST_DESTINATIONS = 1_100_000


def large_bound(
    topology: Topology,
    links: LinkTable,
    collective: str,
    size_bytes: int,
    root: int = 0,
    demand: Ints | None = None,
) -> Bound:
    """The fluid `scale_bound`, and beyond EXPLICIT_RANKS the bounds that count messages; errors are the same.

    Up to EXPLICIT_RANKS those are found beside the linear programs.
    """
    counted = scale_bound(topology, links, collective, 1, size_bytes, "fluid", root, demand)
    destinations = topology.ranks * (1 if collective in ROOTED else topology.ranks)
    few = topology.ranks > EXPLICIT_RANKS and len(links) <= MOST_LINKS and destinations <= MOST_DESTINATIONS
    if not few or demand is not None or size_bytes <= 0:
        return counted
    # Messages of any size are counted, so the chunking does not matter.
    whole = build(collective, topology.ranks, 1, root=root)
    network = fluid(topology, whole.chunk_bytes(size_bytes))
    floor = Fraction(counted.time_fs * network.ticks_per_us, FS_PER_US)
    found = message_bounds(network, whole, wanted(whole), floor)
    return stronger(counted, strongest(found)) if found else counted
