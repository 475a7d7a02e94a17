"""Who sends to whom in collectives whose chunks go from one rank to one other."""

from __future__ import annotations

from dataclasses import dataclass

from taccl.synth.collective import Collective
from taccl.synth.problem import roots_of


@dataclass(frozen=True, slots=True)
class Pairs:
    """Who sends to whom, in the order of the chunks, and for alltoallv how many blocks."""

    ends: tuple[tuple[int, int], ...]
    amounts: tuple[int, ...] = ()


def pairs_of_groups(collective: Collective) -> Pairs:
    """Chunks of one source and one destination each, of groups at partition 1, as blocks between pairs."""
    counted: dict[tuple[int, int], int] = {}
    for chunk in collective.chunks:
        pair = chunk.sources[0][0], chunk.destinations[0][0]
        counted[pair] = counted.get(pair, 0) + 1
    return Pairs(tuple(counted), tuple(counted.values()))


def blocks_of_groups(collective: Collective) -> tuple[int, ...]:
    """Blocks of each root, group after group: every member's, or those of a group's only root."""
    counted: dict[int, int] = {}
    for (root,) in roots_of(collective):
        counted[root] = counted.get(root, 0) + 1
    return tuple(counted.values())
