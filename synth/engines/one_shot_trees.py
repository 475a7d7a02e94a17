"""One-shot allreduce for ranks that are not all neighbours: every rank's result along a tree of its own.

For each destination there is a tree of links along which all others' contributions flow into it, every rank adding its
own to what it passes on. A rank that lies in many trees passes on many sums, none of which it keeps; where two trees
want the same sum of the same ranks, one message serves both. On a ring these are the sliding sums both ways (N / 2
steps instead of N), on a torus sums along rows and then along columns. The latency is the diameter, the price is that
whole vectors are sent again and again, so it is for short ones.

Trees are of quickest paths. Which of several quickest ways a rank takes decides how much is shared, so a few rules for
the choice are tried and the quickest schedule is taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.cost import Costs, costs
from taccl.synth.engines.network import Inapplicable
from taccl.synth.schedule import Transfer, as_transfers, completion_fs, time_by_priority

# Ways are compared for vectors of so many bytes: engines do not know the size, and longer ones are not for this one.
SHORT_BYTES = 1000
# Ranks beyond which nobody waits for as many trees.
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Sent:
    """A message to be: over which link, and which messages' sums are in it beside its sender's own contribution."""

    link: int
    of: frozenset[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """Messages, each after those that it carries, and per destination those whose sums make its result."""

    sent: list[Sent]
    results: dict[int, frozenset[int]]


def transfers(topology: Topology, collective: Collective) -> list[Transfer]:
    """The quickest of the schedules. Raises Inapplicable for other collectives, too many ranks, missing paths."""
    if collective.name != "allreduce":
        raise Inapplicable(f"one-shot algorithms serve allreduce, not {collective.name}")
    if topology.ranks > MOST_RANKS:
        raise Inapplicable(f"trees to every rank are made for up to {MOST_RANKS} ranks")
    members = tuple(sorted({rank for chunk in collective.chunks for rank, _ in chunk.sources}))
    everything = tuple(range(len(collective.chunks)))
    priced = costs(topology, Fraction(SHORT_BYTES, len(everything)))
    ways = _Ways(topology, priced, len(everything))
    best: tuple[tuple[int, int], list[Transfer]] | None = None
    for rule in _rules(topology, ways):
        plan = _plan(topology, ways, members, rule)
        listed = _listed(topology, priced, plan, everything)
        messages = time_by_priority(topology, collective, priced, listed, _urgency(topology, ways, plan))
        key = (completion_fs(priced, messages), len(messages))
        if best is None or key < best[0]:
            best = (key, as_transfers(messages))
    assert best is not None
    return best[1]


class _Ways:
    """Quickest paths of a whole vector."""

    def __init__(self, topology: Topology, priced: Costs, count: int) -> None:
        self.links = topology.links
        # One femtosecond more a hop: where links cost nothing, fewer are better, and next hops are nearer.
        self.transit = [priced.transit(e, count) + 1 for e in range(len(topology.links))]
        self.hold = [
            max(priced.hold(e, fs, count) for _, fs in priced.holds[e]) for e in range(len(topology.links))
        ]
        self._out: list[list[int]] = [[] for _ in range(topology.ranks)]
        self._into: list[list[int]] = [[] for _ in range(topology.ranks)]
        for e, link in enumerate(topology.links):
            self._out[link.src].append(e)
            self._into[link.dst].append(e)

    def distances(self, goal: int) -> dict[int, int]:
        """How long a vector is on its way to the goal from every rank that reaches it."""
        distance = {goal: 0}
        queue = [(0, goal)]
        while queue:
            far, v = heapq.heappop(queue)
            if far > distance[v]:
                continue
            for e in self._into[v]:
                u = self.links[e].src
                if far + self.transit[e] < distance.get(u, 1 << 200):
                    distance[u] = far + self.transit[e]
                    heapq.heappush(queue, (distance[u], u))
        return distance

    def tight(self, rank: int, distance: dict[int, int]) -> list[int]:
        """The links out of a rank that lie on a quickest path."""
        return [
            e for e in self._out[rank]
            if self.links[e].dst in distance and distance[rank] == distance[self.links[e].dst] + self.transit[e]
        ]  # fmt: skip


# (links to choose from, what is to be sent, known messages, messages on each link so far) -> link
Rule = Callable[[Sequence[int], frozenset[int], dict[Sent, int], Sequence[int]], int]


def _rules(topology: Topology, ways: _Ways) -> Iterator[Rule]:
    n, links = topology.ranks, topology.links

    def apart(e: int) -> int:
        step = (links[e].dst - links[e].src) % n
        return min(step, n - step)

    yield lambda among, of, known, load: min(
        among, key=lambda e: (apart(e), (links[e].dst - links[e].src) % n, e)
    )
    yield lambda among, of, known, load: min(
        among, key=lambda e: (-apart(e), (links[e].dst - links[e].src) % n, e)
    )
    yield lambda among, of, known, load: min(among, key=lambda e: (Sent(e, of) not in known, load[e], e))
    yield lambda among, of, known, load: min(among, key=lambda e: (Sent(e, of) not in known, e))
    yield lambda among, of, known, load: min(
        among, key=lambda e: (Sent(e, of) not in known, apart(e), load[e], e)
    )
    yield lambda among, of, known, load: min(among, key=lambda e: (load[e], e))


def _plan(topology: Topology, ways: _Ways, members: Sequence[int], rule: Rule) -> Plan:
    known: dict[Sent, int] = {}
    load = [0] * len(topology.links)
    results = {}
    for goal in members:
        distance = ways.distances(goal)
        lost = [rank for rank in members if rank not in distance]
        if lost:
            raise Inapplicable(f"no path of links leads from rank {lost[0]} to rank {goal}")
        gathered: dict[int, set[int]] = {rank: set() for rank in members}
        queue = [(-distance[rank], rank) for rank in members if rank != goal]
        heapq.heapify(queue)
        while queue:
            _, rank = heapq.heappop(queue)
            of = frozenset(gathered[rank])
            link = rule(ways.tight(rank, distance), of, known, load)
            sent = Sent(link, of)
            if sent not in known:
                known[sent] = len(known)
                load[link] += 1
            nearer = topology.links[link].dst
            if nearer not in gathered:
                gathered[nearer] = set()
                heapq.heappush(queue, (-distance[nearer], nearer))
            gathered[nearer].add(known[sent])
        results[goal] = frozenset(gathered[goal])
    return Plan(list(known), results)


def _listed(topology: Topology, priced: Costs, plan: Plan, everything: tuple[int, ...]) -> list[Transfer]:
    """Transfers in the plan's order, with a number for each sum that a rank passes on; its result is sum 0."""
    number: dict[int, dict[frozenset[int], int]] = {rank: {of: 0} for rank, of in plan.results.items()}
    for sent in plan.sent:
        sums = number.setdefault(topology.links[sent.link].src, {frozenset((-1,)): 0})
        sums.setdefault(sent.of, len(sums))
    into: dict[int, list[int]] = {}
    for sums in number.values():
        for of, place in sums.items():
            for message in of:
                into.setdefault(message, []).append(place)
    return [
        Transfer(
            sent.link, everything, "reduce", None, number[topology.links[sent.link].src][sent.of],
            tuple(sorted(into[m])),
        )
        for m, sent in enumerate(plan.sent)
    ]  # fmt: skip


def _urgency(topology: Topology, ways: _Ways, plan: Plan) -> list[int]:
    """Per message its place among all by how much still has to happen after its start, the most first."""
    after = [0] * len(plan.sent)
    for m in range(len(plan.sent) - 1, -1, -1):
        sent = plan.sent[m]
        after[m] += ways.transit[sent.link]
        for before in sent.of:
            after[before] = max(after[before], after[m])
    place = [0] * len(after)
    for i, m in enumerate(sorted(range(len(after)), key=lambda m: (-after[m], m))):
        place[m] = i
    return place
