"""Conflicting accesses that nothing orders.

Happens-before is the transitive closure of program order in a threadblock, dependencies, and messages (a send
before the receive that meets it): the order of Lamport, "Time, clocks, and the ordering of events in a
distributed system" (1978). A free FIFO slot is NOT counted as order, so a program without races stays so
with any depth. Instead of vector clocks, whose width would be the number of all threadblocks, a bit set of
only those earlier steps that take part in a conflict is carried along the edges; it decides the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from taccl.synth.program_graph import ProgramGraph

BITS = 8192  # earlier steps followed at once: bounds the memory of a pass to BITS/8 bytes a live step


def unordered(
    graph: ProgramGraph, order: Sequence[int], pairs: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Those pairs (earlier, later) of steps, as found along `order`, that happens-before does not order.

    O(steps * conflicting steps / 64) in the worst case.
    """
    wanted: dict[int, list[int]] = {}
    for earlier, later in pairs:
        if graph.needs[later] != earlier:
            wanted.setdefault(earlier, []).append(later)
    position = {index: at for at, index in enumerate(order)}
    sources = sorted(wanted, key=lambda index: position[index])
    last_use = _last_uses(graph, order, position)
    racing: list[tuple[int, int]] = []
    for begin in range(0, len(sources), BITS):
        bit = {source: 1 << i for i, source in enumerate(sources[begin : begin + BITS])}
        checks: dict[int, list[int]] = {}
        for source in bit:
            for later in wanted[source]:
                checks.setdefault(later, []).append(source)
        reached: dict[int, int] = {}
        for at in range(position[sources[begin]], len(order)):
            index = order[at]
            mask = 0
            for before in (graph.previous(index), graph.needs[index], graph.source[index]):
                if before >= 0:
                    mask |= reached.get(before, 0)
                    if last_use[before] == index:
                        reached.pop(before, None)
            for source in checks.get(index, ()):
                if not mask & bit[source]:
                    racing.append((source, index))
            reached[index] = mask | bit.get(index, 0)
    return sorted(racing, key=lambda pair: (position[pair[1]], position[pair[0]]))


def _last_uses(graph: ProgramGraph, order: Sequence[int], position: dict[int, int]) -> list[int]:
    """For each step the last step, in `order`, that has it as a direct predecessor (-1: none)."""
    last = [-1] * len(graph.steps)
    for index in order:
        for before in (graph.previous(index), graph.needs[index], graph.source[index]):
            if before >= 0:
                last[before] = index
    return last
