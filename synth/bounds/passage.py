"""What a bound at scale rests on: chunks that must pass some links, each link seen through one resource."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.topology import Topology
from taccl.synth.bounds.bound import Bottleneck, Crossing
from taccl.synth.bounds.capacity import LINK, Pricing
from taccl.synth.cost import FS_PER_US
from taccl.synth.symmetric.group import Ints

# Of a machine's half a million links may lead into the other: so many resources are named, the others left out.
MOST_NAMED = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """`chunks` must get into or out of `inside`, over the links of `through`."""

    inside: NDArray[np.bool_] | None  # None: all ranks alike
    leaving: bool
    chunks: Fraction | int
    through: tuple[
        tuple[Ints, str, float], ...
    ]  # (links, by which side they are seen, share in the argument)


def bottleneck(passage: Passage, topology: Topology, priced: Pricing, chunk_bytes: Fraction) -> Bottleneck:
    """The same as explanations tell it: ranks, direction, bytes, resources by name."""
    crossing: list[Crossing] = []
    for links, side, weight in passage.through:
        for resource, alpha_fs in _resources(priced, links, side, MOST_NAMED - len(crossing)):
            crossing.append(Crossing(_name(topology, resource), resource, weight, alpha_fs / FS_PER_US))
    inside = passage.inside
    ranks = () if inside is None else tuple(int(rank) for rank in np.flatnonzero(inside))
    return Bottleneck(ranks, passage.leaving, float(passage.chunks * chunk_bytes), tuple(crossing))


def _resources(priced: Pricing, links: Ints, side: str, most: int) -> Iterator[tuple[int, float]]:
    """(resource id, least alpha in fs of the links that use it), in order of ids."""
    chosen = links.copy()
    if side != LINK:
        port = priced.ports[side][links]
        chosen = np.where(port >= 0, len(priced.links) + port, links)
    alpha = np.array([float(value) for value in priced.alpha])[priced.links.link_class[links]]
    ids, place = np.unique(chosen, return_inverse=True)
    least = np.full(len(ids), np.inf)
    np.minimum.at(least, place, alpha)
    yield from zip(ids[:most].tolist(), least[:most].tolist(), strict=True)


def _name(topology: Topology, resource: int) -> str:
    if resource < len(topology.links):
        link = topology.links[resource]
        return f"link {link.src}->{link.dst}"
    return topology.ports[resource - len(topology.links)].name
