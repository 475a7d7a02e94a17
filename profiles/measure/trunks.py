"""The ports above the uplinks: what several nodes share on their way to several others, as racks do a trunk to a spine.

All nodes send at once, each to the one that is so many places further, for every number of places and in several
orders of the nodes; what takes longer than the ports found so far explain is looked at. Flows whose absence changes
nothing are left out one by one: those that remain share one port. Which other nodes are behind it is told by letting
one of them take the place of a flow's source, or of its end. Probes: 5 (nodes - 1), and 3 to 9 x nodes more for each
trunk, or round that is held up by what is none.

A port is believed only where other flows between the same two sets of nodes are held up as much, and where as many
flows within the two sets are not: cores that are too few slow these as well, and are no trunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from taccl.profiles.measure.boundary import Partition
from taccl.profiles.measure.together import CONFIRM, SHARED_FILLED, Bench, Flow, FoundPort

_FEWEST = 4  # nodes; of three, what two share on their way to the third is that one's uplink
_ALIKE = 0.85  # least part of a trunk's slowdown that other flows through it must show
_DRAWN = 4  # orders of the nodes, beside their own
_MOST = 2  # trunks for each node
_IN_VAIN = 6  # rounds in a row that are held up by what is no trunk, after which none is looked for
_FULL = 1.05  # part of a trunk's rate up to which flows fill it without being held up
_FILLED = 0.1  # of a flow: what may be missing of a port that flows are to fill

Hop = tuple[int, int]  # from one node to another


def find_trunks(
    bench: Bench, nodes: Partition, tell: Callable[[str, int, int], None] = lambda stage, done, of: None
) -> list[FoundPort]:
    """The trunks, which are added to the ports of the bench as well. The nodes' own ports must be known."""
    if len(nodes) < _FEWEST:
        return []
    way = _Ways(bench, nodes)
    found: list[_Trunk] = []
    rounds = _rounds(len(nodes))
    every, in_vain = len(rounds), 0
    while rounds and len(found) < _MOST * len(nodes):
        tell("trunks", max(0, every - len(rounds)), every)
        # What is known to be too narrow for a round hides what else is; from either end another part of it is left.
        parts = [_trimmed(way, hops, found) for hops in (rounds[0], rounds[0][::-1])]
        held = [hops for hops in dict.fromkeys(parts) if len(hops) > 1 and way.held_up(hops)]
        trunk = next(filter(None, (_trunk(way, hops, found) for hops in held)), None)
        if trunk is None:
            rounds.pop(0)
            in_vain += bool(held)
            if in_vain == _IN_VAIN:
                break
            continue
        in_vain = 0
        found.append(trunk)
        bench.ports.append(trunk.port)
        rounds.insert(0, [(b, a) for a, b in trunk.filled_by])  # what is narrow one way often is so the other
    return [trunk.port for trunk in found]


def _rounds(nodes: int) -> list[list[Hop]]:
    """Each node to the one that is so many places further, in the order of the nodes and in some drawn by chance (but
    always the same): nodes of a rack may be neighbours in a list, or lie anywhere."""
    chance = random.Random(nodes)
    orders = [range(nodes), *(chance.sample(range(nodes), nodes) for _ in range(_DRAWN))]
    return [
        [(order[k], order[(k + places) % nodes]) for k in range(nodes)]
        for places in range(1, nodes)
        for order in orders
    ]


@dataclass(frozen=True, slots=True)
class _Trunk:
    port: FoundPort
    hops: frozenset[Hop]  # that cross it
    filled_by: tuple[Hop, ...]


class _Ways:
    """The ways between nodes, each of as many flows as fill both ends."""

    def __init__(self, bench: Bench, nodes: Partition) -> None:
        self.bench, self.nodes = bench, nodes
        self._lanes = [
            {way: _lanes(bench, ranks, node, way) for way in ("out", "in")}
            for node, ranks in enumerate(nodes)
        ]
        if not bench.has_cores(self.flows([(k, (k + 1) % len(nodes)) for k in range(len(nodes))])):
            self._lanes = [{way: lanes[way][:1] for way in lanes} for lanes in self._lanes]

    def flows(self, hops: Sequence[Hop]) -> list[Flow]:
        """Between ranks, for those between nodes."""
        return [
            flow for a, b in hops for flow in zip(self._lanes[a]["out"], self._lanes[b]["in"], strict=False)
        ]

    def mb_per_us(self, hop: Hop) -> float:
        """What goes this way alone, in 10^6 bytes per us."""
        return sum(1 / self.bench.beta(flow) for flow in self.flows([hop]))

    def slowdown(self, hops: Sequence[Hop]) -> float:
        """Of flows at once: the least of some probes, since disturbances only add to it."""
        flows = self.flows(hops)
        return min(self.bench.contend(flows, (), fitted=True).slowdown for _ in range(CONFIRM))

    def held_up(self, hops: Sequence[Hop]) -> bool:
        """Whether flows at once take longer than the known ports explain, each time."""
        flows, bench = self.flows(hops), self.bench
        tries = (bench.contend(flows, bench.ports, fitted=True) for _ in range(CONFIRM))
        return all(outcome.slowdown >= SHARED_FILLED * outcome.expected for outcome in tries)


def _trimmed(way: _Ways, hops: Sequence[Hop], known: Sequence[_Trunk]) -> tuple[Hop, ...]:
    """Those of the hops that the known trunks carry at once, in order of the nodes."""
    kept: list[Hop] = []
    for hop in hops:
        through = [*kept, hop]
        if all(
            sum(map(way.mb_per_us, trunk.hops.intersection(through))) * trunk.port.beta_us_per_mb <= _FULL
            for trunk in known
            if hop in trunk.hops
        ):
            kept = through
    return tuple(sorted(kept))


def _trunk(way: _Ways, hops: Sequence[Hop], known: Sequence[_Trunk]) -> _Trunk | None:
    """The port that holds up a round most; None where no such port explains it."""
    some = _sharing(way, hops, way.slowdown(hops))
    sources, ends = {a for a, _ in some}, {b for _, b in some}
    if len(some) < 2 or sources & ends or not way.held_up(some):
        return None
    slow = way.slowdown(some)
    (a, b), others = some[0], sorted(set(range(len(way.nodes))) - sources - ends)
    before, behind = {}, {}
    for node in others:
        if (found := _in_place(way, some, slow, (node, b))) is not None:
            before[node] = found
        if (found := _in_place(way, some, slow, (a, node))) is not None:
            behind[node] = found
    if both := before.keys() & behind.keys():
        # Two trunks are equally narrow, or nearly: one out of the sources, one to the ends. The narrower one is meant.
        drop = before if median(before[k] for k in both) < median(behind[k] for k in both) else behind
        for node in both:
            del drop[node]
    sources |= before.keys()
    ends |= behind.keys()
    if not _believable(way, some, slow, sources, ends):
        return None
    bench = way.bench
    crossing = frozenset((a, b) for a in sources for b in ends)
    if any(crossing == trunk.hops for trunk in known):
        return None
    links = sorted((s, d) for a, b in crossing for s in way.nodes[a] for d in way.nodes[b])
    flows = way.flows(some)
    beta = median(bench.contend(flows, bench.ports).beta_us_per_mb for _ in range(CONFIRM))
    ranks = tuple(sorted(rank for node in sources for rank in way.nodes[node]))
    own, direction = _rack(sources, ends)
    taken = {trunk.port.name for trunk in known}
    names = (f"rack{min(own)}.trunk{number or ''}.{direction}" for number in range(len(taken) + 1))
    name = next(name for name in names if name not in taken)
    port = FoundPort(name, "trunk", beta, tuple(links), ranks, min(own), direction)
    return _Trunk(port, crossing, tuple(some))


def _sharing(way: _Ways, hops: Sequence[Hop], slow: float) -> list[Hop]:
    """Of flows that are held up those without any of which they would be held up less: all that share one port."""
    some = list(hops)
    for hop in hops:
        rest = [other for other in some if other != hop]
        part = way.mb_per_us(hop) / sum(way.mb_per_us(other) for other in some)
        if rest and way.slowdown(rest) > (slow + max(slow * (1 - part), 1.0)) / 2:
            some = rest
    return some


def _in_place(way: _Ways, some: Sequence[Hop], slow: float, instead: Hop) -> float | None:
    """By how much a flow is held up that is put in the place of the first of others: 1 is as much as they are, None
    that it does not share their port."""
    rates = [way.mb_per_us(hop) for hop in some]
    without, own = sum(rates[1:]), way.mb_per_us(instead)
    through, beside = slow * (without + own) / sum(rates), slow * without / sum(rates)
    found = way.slowdown([instead, *some[1:]])
    return found / through if found > (through + max(beside, 1.0)) / 2 else None


def _believable(way: _Ways, some: Sequence[Hop], slow: float, sources: set[int], ends: set[int]) -> bool:
    """Whether other flows between the two sets are held up as much, and as many within them are not."""
    turned = [(a, some[k - 1][1]) for k, (a, _) in enumerate(some)]
    rates = [sum(map(way.mb_per_us, hops)) for hops in (some, turned)]
    if way.slowdown(turned) < _ALIKE * slow * rates[1] / rates[0]:
        return False
    for nodes in (sorted(sources), sorted(ends)):
        within = [(node, nodes[(k + 1) % len(nodes)]) for k, node in enumerate(nodes)]
        if way.slowdown(within[: len(some)]) < (1 + slow) / 2:
            return True
    return False


def _rack(sources: set[int], ends: set[int]) -> tuple[set[int], str]:
    """The nodes that a trunk is said to be of, the smaller side, and its direction."""
    out = (len(sources), min(sources)) <= (len(ends), min(ends))
    return (sources, "out") if out else (ends, "in")


def _lanes(bench: Bench, ranks: Sequence[int], node: int, direction: str) -> list[int]:
    """As many ranks of a node as fill its ways out or in: of each port so many, all where there is none."""
    ports = [port for port in bench.ports_of(node) if port.kind == "nic" and port.direction == direction]
    at = 0 if direction == "out" else 1
    lanes = []
    for port in ports:
        own = {rank: min(bench.beta(link) for link in port.links if link[at] == rank) for rank in port.ranks}
        rates = 0.0
        for rank in port.ranks:
            if rates >= (1 - _FILLED) / port.beta_us_per_mb:
                break
            lanes.append(rank)
            rates += 1 / own[rank]
    return lanes or list(ranks)
