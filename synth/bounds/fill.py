"""How long a pipeline takes to fill: broadcast and reduce where every rank has one port each way.

Short messages cost a port one occupancy after another, long ones keep others waiting for their end. With B bytes, b us
a byte and occupancy o no algorithm is quicker than b B + min over K of (b E / K + o K), about b B + 2 sqrt(o b E),
where E = B (d - 1) / d for d destinations. For m whole equal chunks on a switch m - 1 + log2(ranks) rounds are known to
be needed (Bar-Noy and Kipnis, "Broadcasting multiple messages in simultaneous send/receive systems", 1994); this holds
for messages of any sizes, on any links behind such ports. The proof is in docs/bounds.md.
"""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction
from math import isqrt

from taccl.synth.bounds.network import Network


def fill_time(
    network: Network, root: int, others: Collection[int], chunks: int, collecting: bool
) -> Fraction | None:
    """Ticks below which `chunks` chunks cannot get from root to all others (collecting: from all others to root).

    None where nothing is proved: fewer than two others, or ranks whose messages do not share one port.
    """
    if len(others) < 2:
        return None
    ends = [(b, a) for a, b in network.ends] if collecting else network.ends
    out = [e for e, (a, _) in enumerate(ends) if a == root]
    ports, links = [_shared(network, out)], set(out)
    into: dict[int, list[int]] = {rank: [] for rank in others}
    for e, (_, b) in enumerate(ends):
        if b in into:
            into[b].append(e)
    for found in into.values():
        ports.append(_shared(network, found))
        links.update(found)
    known = [port for port in ports if port is not None]
    if len(known) < len(ports):
        return None
    beta = min(network.beta[port] for port in known)
    occupancy = min(network.occupancy[e] for e in links)
    late = Fraction(chunks * beta * (len(others) - 1), len(others))
    best = isqrt(int(late / occupancy)) if occupancy else 0
    fill = min((late / k + occupancy * k for k in (best, best + 1) if k), default=Fraction(0))
    return chunks * beta + fill if occupancy else None


def _shared(network: Network, links: list[int]) -> int | None:
    """A resource that all the links hold, the one that lets least through; None where there is none."""
    if not links:
        return None
    common = set(network.holds[links[0]]).intersection(*(network.holds[e] for e in links[1:]))
    return max(common, key=lambda r: (network.beta[r], -r), default=None)
