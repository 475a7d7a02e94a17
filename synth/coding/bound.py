"""What no schedule with a codec can beat, and the cluster as it looks to one that codes everything on some links."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction

from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.topology import Topology
from taccl.synth.bounds import Bound, lower_bound
from taccl.synth.collective import Collective


def shortened(topology: Topology, cost: CodecCost, links: Collection[int] | None = None) -> Topology:
    """The cluster with the betas of these links (None: all), and of the ports that only they cross, divided by the
    codec's ratio. Codec tasks and the frames' own bytes cost nothing here."""
    ratio = max(Fraction(1), cost.ratio)
    chosen = set(range(len(topology.links)) if links is None else links)
    others = {port for e, link in enumerate(topology.links) if e not in chosen for port in link.ports}
    return replace(
        topology,
        links=tuple(
            replace(link, beta_us_per_mb=link.beta_us_per_mb / ratio) if e in chosen else link
            for e, link in enumerate(topology.links)
        ),
        ports=tuple(
            port if index in others else replace(port, beta_us_per_mb=port.beta_us_per_mb / ratio)
            for index, port in enumerate(topology.ports)
        ),
        codecs=(),
    )


def coded_links(topology: Topology, cost: CodecCost, links: Collection[int]) -> Topology:
    """The cluster as a search of routes may see it when all messages over these links are coded: a frame also takes its
    coding and decoding, and frames follow one another no faster than a rank decodes them, so that short chunks are
    dear. No bound follows from it."""
    short, chosen = shortened(topology, cost, links), set(links)
    return replace(
        short,
        links=tuple(
            replace(
                link,
                alpha_us=link.alpha_us + cost.encode_alpha_us + cost.decode_alpha_us,
                beta_us_per_mb=max(link.beta_us_per_mb, cost.decode_beta_us_per_mb),
                occupancy_us=max(link.occupancy_us, cost.decode_alpha_us),
            )
            if e in chosen
            else link
            for e, link in enumerate(short.links)
        ),
    )


def coded_bound(topology: Topology, collective: Collective, size_bytes: int, cost: CodecCost) -> Bound:
    """A bound for any algorithm, whatever of its messages is coded: a message is at least as long as its frames
    without their heads would be, and coding takes no time."""
    return lower_bound(shortened(topology, cost), collective, size_bytes)
