"""What has to get where, as the bounds see it."""

from __future__ import annotations

from taccl.synth.collective import Collective

# (sources, destinations) -> chunks
Wants = dict[tuple[frozenset[int], frozenset[int]], int]


def wanted(collective: Collective) -> Wants:
    """How many chunks go from which ranks to which; ranks that need nothing moved are left out.

    Combining chunks count their contributors as sources. A destination that already has a copy is dropped.
    """
    wants: Wants = {}
    for chunk in collective.chunks:
        sources = frozenset(rank for rank, _ in chunk.sources)
        destinations = frozenset(rank for rank, _ in chunk.destinations)
        if not collective.combining:
            destinations -= sources
        if destinations and (len(sources | destinations) > 1):
            wants[sources, destinations] = wants.get((sources, destinations), 0) + 1
    return wants
