"""What has to get where, as the bounds see it."""

from __future__ import annotations

from taccl.synth.collective import Collective

# (sources, destinations) -> chunks
Wants = dict[tuple[frozenset[int], frozenset[int]], int]


def wanted(collective: Collective) -> Wants:
    """How many chunks go from which ranks to which; ranks that need nothing moved are left out.

    Combining chunks count their contributors as sources. A destination that already has a copy is dropped. In a custom
    collective several chunks may be made of the same places: one copy serves them all, so they are one here, and what
    shares only some of its places with another is left out.
    """
    merged: dict[tuple[tuple[int, int], ...], set[int]] = {}
    taken: set[tuple[int, int]] = set()
    for chunk in collective.chunks:
        if chunk.sources not in merged:
            if not taken.isdisjoint(chunk.sources):
                continue
            taken.update(chunk.sources)
            merged[chunk.sources] = set()
        merged[chunk.sources].update(rank for rank, _ in chunk.destinations)
    wants: Wants = {}
    for places, wanted_at in merged.items():
        sources, destinations = frozenset(rank for rank, _ in places), frozenset(wanted_at)
        if not collective.combining:
            destinations -= sources
        if destinations and (len(sources | destinations) > 1):
            wants[sources, destinations] = wants.get((sources, destinations), 0) + 1
    return wants
