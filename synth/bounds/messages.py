"""Bounds from the number of messages: growth towards and away from a rank, pipelines, cuts, relays of an alltoall."""

from __future__ import annotations

import math
from fractions import Fraction

from taccl.synth.bounds.bound import Bound, ranks_text
from taccl.synth.bounds.crossings import crossing_time
from taccl.synth.bounds.fill import fill_time
from taccl.synth.bounds.fill_links import link_fill_time
from taccl.synth.bounds.growth import growth_time, relay_time
from taccl.synth.bounds.network import Network
from taccl.synth.bounds.wants import Wants
from taccl.synth.collective import Collective


def message_bounds(network: Network, collective: Collective, wants: Wants, floor: Fraction) -> list[Bound]:
    """Those above `floor` (ticks), each above the ones before it."""
    combining = collective.combining
    found = []
    entering, leaving = [0] * network.ranks, [0] * network.ranks
    heard: dict[int, set[int]] = {}
    told: dict[int, set[int]] = {}
    for (sources, destinations), chunks in wants.items():
        for d in destinations:
            if d not in sources or len(sources) > 1:
                entering[d] += chunks
            if combining or len(sources) == 1:
                heard.setdefault(d, {d}).update(sources)
        for s in sources if combining or len(sources) == 1 else ():
            if destinations - {s}:
                leaving[s] += chunks
            told.setdefault(s, {s}).update(destinations)
    for backwards, forced, known in ((False, entering, heard), (True, leaving, told)):
        needed = {rank: len(ranks) for rank, ranks in known.items() if len(ranks) > 1}
        late = growth_time(network, forced, needed, math.floor(floor), backwards)
        if late is not None:
            floor = Fraction(late[0])
            what = f"messages that spread data from rank {late[1]}" if backwards else ""
            what = what or f"messages that bring the data of {needed[late[1]]} ranks to rank {late[1]}"
            found.append(Bound(network.to_fs(floor), f"latency of the {what}"))
    for (sources, destinations), chunks in wants.items() if len(wants) == 1 else ():
        one, others = (destinations, sources) if combining else (sources, destinations)
        if len(one) == 1:
            root = min(one)
            way = "into" if combining else "out of"
            for time in (fill_time, link_fill_time):
                filled = time(network, root, others - one, chunks, combining)
                if filled is not None and filled > floor:
                    floor = filled
                    found.append(Bound(network.to_fs(floor), f"pipeline {way} rank {root}"))
    across = crossing_time(network, heard, math.floor(floor))
    if across is not None:
        floor = Fraction(across[0])
        found.append(Bound(network.to_fs(floor), f"latency of the messages out of {ranks_text(across[1])}"))
    if not combining and all(len(s) == len(d) == 1 for s, d in wants):
        pairs = [chunks for (s, d), chunks in wants.items() if s != d]
        if len(pairs) == network.ranks * (network.ranks - 1):
            relayed = relay_time(network, entering, min(pairs), math.floor(floor))
            if relayed is not None:
                found.append(Bound(network.to_fs(relayed), "latency of messages against traffic of relays"))
    return found
