"""Latency bounds across a cut: few messages fit through its ports, so each must bring much to many.

Every pair of a rank on one side and a rank on the other that needs its data is served by some message across the cut,
the last one counting. A message that starts at s serves at most (ranks whose data can be at one rank by s) times
(ranks that one rank can tell from its arrival to the end); both are grown as in `growth`. The messages of one port come
one after another. The proof is in docs/bounds.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from taccl.synth.bounds.growth import Reach, spread
from taccl.synth.bounds.network import Network, together

# So many nodes are cut off one by one; of more an even sample.
MOST_NODES = 4


@dataclass(frozen=True, slots=True)
class Growth:
    """The greatest number of ranks that can be known (or told) by time: 1 from tick 0, then steps upwards."""

    times: tuple[int, ...]  # ticks, ascending, the first 0
    ranks: tuple[int, ...]  # from that tick on

    def at(self, ticks: int) -> int:
        """0 before tick 0."""
        return self.ranks[bisect_right(self.times, ticks) - 1] if ticks >= 0 else 0

    def full_from(self, ticks: int, ranks: int) -> Growth:
        """The same, with all `ranks` from `ticks` on."""
        kept = bisect_right(self.times, ticks - 1)
        return Growth((*self.times[:kept], ticks), (*self.ranks[:kept], ranks))


@dataclass(frozen=True, slots=True)
class Gate:
    """Links across a cut that hold one resource, so that their messages come one after another."""

    latency: int  # ticks, least of its links
    spacing: int  # ticks from one message's start to the next one's, least of its links

    def served(self, ticks: int, before: Growth, after: Growth, enough: int) -> int:
        """Most pairs that its messages can serve within `ticks`; `enough` stands for that and more."""
        last = ticks - self.latency
        if last < 0:
            return 0
        if self.spacing == 0:
            return enough
        # Starts lie `spacing` apart, so each window of that length has at most one of them.
        total = 0
        for begin in range(0, last + 1, self.spacing):
            end = min(begin + self.spacing - 1, last)
            first, beyond = bisect_right(before.times, begin), bisect_right(before.times, end)
            starts = (begin, *before.times[first:beyond])
            total += max(before.at(start) * after.at(last - start) for start in starts)
            if total >= enough:
                return enough
        return total


def crossing_time(
    network: Network, heard: Mapping[int, AbstractSet[int]], start: int
) -> tuple[int, tuple[int, ...]] | None:
    """(time in ticks, ranks of a side) above `start` before which the messages that can leave these ranks do not
    serve all that others must hear from them. None: nothing is proved.

    heard: for each rank the ranks whose data it needs.
    """
    best: tuple[int, tuple[int, ...]] | None = None
    for side in _sides(network):
        low = start if best is None else best[0]
        inside = frozenset(side)
        pairs = sum(len(sources & inside) for rank, sources in heard.items() if rank not in inside)
        found = _least_time(network, inside, pairs, low) if pairs else None
        if found is not None:
            best = (found, side)
    return best


def _sides(network: Network) -> list[tuple[int, ...]]:
    """Nodes, what lies outside each node, and halves of the nodes; of those with the same surroundings one."""
    if len(network.nodes) < 2:
        return []
    everybody = range(network.ranks)
    step = -(-len(network.nodes) // MOST_NODES)
    sides = [tuple(node) for node in network.nodes[::step]]
    if len(network.nodes) > 3:
        sides.append(tuple(rank for node in network.nodes[: len(network.nodes) // 2] for rank in node))
    outside = [tuple(rank for rank in everybody if rank not in set(side)) for side in sides]
    class_of = spread(network, [0] * network.ranks).class_of
    kinds: dict[tuple[int, ...], tuple[int, ...]] = {}
    for side in (*sides, *outside):
        if side:
            kinds.setdefault(tuple(sorted(class_of[rank] for rank in side)), side)
    return sorted(kinds.values())


def _least_time(network: Network, inside: frozenset[int], pairs: int, floor: int) -> int | None:
    """The least time above `floor` in which `pairs` can be served across the border out of `inside`."""
    out = [e for e, (a, b) in enumerate(network.ends) if a in inside and b not in inside]
    back = [e for e, (a, b) in enumerate(network.ends) if a not in inside and b in inside]
    if not out:
        return None
    gates = _gates(network, out)

    def possible(ticks: int, before: Growth, after: Growth) -> bool:
        total = 0
        for gate, count in gates.items():
            total += count * gate.served(ticks, before, after, pairs)
            if total >= pairs:
                return True
        return False

    alone = Growth((0,), (1,))
    if possible(floor, alone, alone):
        return None
    before = _growth(network, sorted(inside), False)
    if back:
        # By a way that leaves and comes back everything may have been brought together.
        again = min(network.latency(e) for e in out) + min(network.latency(e) for e in back)
        before = before.full_from(again, len(inside))
    after = _growth(network, [rank for rank in range(network.ranks) if rank not in inside], True)
    if possible(floor, before, after):
        return None
    low, step = floor, max(1, max(network.latency(e) for e in out))
    high = low + step
    while not possible(high, before, after):
        low, step = high, 2 * step
        high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle, before, after) else (middle, high)
    return high


def _gates(network: Network, links: Sequence[int]) -> dict[Gate, int]:
    """The links across, each seen through the one of its resources that most of them share; equal ones counted."""
    gates: dict[Gate, int] = {}
    for resource, held in together(network, links).items():
        spacing = min(network.occupancy[e] for e in held) + network.grain * network.beta[resource]
        gate = Gate(min(network.latency(e) for e in held), spacing)
        gates[gate] = gates.get(gate, 0) + 1
    return gates


def _growth(network: Network, ranks: Sequence[int], backwards: bool) -> Growth:
    """How many of `ranks` one of them can know of (backwards: can tell), over the links between them."""
    own = set(ranks)
    kept = [e for e, (a, b) in enumerate(network.ends) if a in own and b in own]
    within = replace(
        network,
        ends=tuple(network.ends[e] for e in kept),
        alpha=tuple(network.alpha[e] for e in kept),
        occupancy=tuple(network.occupancy[e] for e in kept),
        transit=tuple(network.transit[e] for e in kept),
        holds=tuple(network.holds[e] for e in kept),
    )
    around = spread(within, [0] * network.ranks, backwards)
    if around.fastest <= 0:
        return Growth((0,), (len(ranks),))
    classes = sorted({around.class_of[rank] for rank in ranks})
    reach = Reach(around, [None] * len(around.groups), len(ranks))

    def most(ticks: int) -> int:
        return max(reach(at, -1, ticks) for at in classes)

    until = around.slowest * len(ranks)  # then everything counts as known
    times, counts = [0], [most(0)]
    while counts[-1] < len(ranks):
        # The next moment at which one more can be known.
        low, high = times[-1], until
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if most(middle) > counts[-1] else (middle, high)
        times.append(high)
        counts.append(most(high))
    return Growth(tuple(times), tuple(counts))
