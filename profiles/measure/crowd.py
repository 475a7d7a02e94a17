"""What a message costs inside a host whose ranks are more than its cores.

Links are measured while all other ranks sleep, so that a copy has a core to itself. In a collective all ranks are
awake, those that wait too, and the kernel gives each its part of the cores, whichever of them copies. So a copy takes
as many times as long as there are ranks to a core. (Measured beside one or two pairs of ranks that wait, it took 1, 2
or 3 times as long on two cores, as the kernel happened to place them: four ranks to two cores make 2.) The host as a
whole loses nothing: the port that all its messages share is measured with all ranks at work. Where devices copy, no
copy needs a core, and nothing of this holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from taccl.profiles.measure.fit import LinkFit
from taccl.profiles.measure.probe import Prober
from taccl.profiles.measure.together import FoundPort

Flow = tuple[int, int]


def ranks_to_a_core(prober: Prober, ranks: Sequence[int]) -> float:
    """Of ranks of one host where receivers do all the work; 1 where each has a core, or where they are not that."""
    hosts, host = list(prober.hosts), prober.hosts[ranks[0]]
    if not prober.receivers_work or any(hosts[rank] != host for rank in ranks):
        return 1.0
    return max(1.0, hosts.count(host) / max(1, prober.cores[ranks[0]]))


def slowed(fit: LinkFit, factor: float) -> LinkFit:
    """The fit of a link whose bytes take so many times as long."""
    return replace(
        fit,
        beta_us_per_mb=fit.beta_us_per_mb * factor,
        beta_ci_us_per_mb=fit.beta_ci_us_per_mb * factor,
    )


def least_load_us(ranks: Sequence[int], fits: Mapping[Flow, LinkFit], factor: float) -> float:
    """What a message takes of the time of all, at least: its sender's part, on as many cores as there are."""
    occupancy = median(fits[a, b].occupancy_us for a in ranks for b in ranks if a != b)
    return occupancy * factor / len(ranks)


def receivers(node: int, ranks: Sequence[int], fits: Mapping[Flow, LinkFit]) -> list[FoundPort]:
    """The ports of ranks that copy one message after the other: each is as fast as the links into it."""
    found = []
    for rank in ranks:
        links = tuple((other, rank) for other in ranks if other != rank)
        beta = median(fits[link].beta_us_per_mb for link in links)
        found.append(FoundPort(f"rank{rank}.switch.in", "switch", beta, links, (rank,), node, "in"))
    return found
