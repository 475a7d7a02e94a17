"""One-shot allreduce for ranks that are not all neighbours: every rank's result along a tree of its own.

For each destination there is a tree of links along which all others' contributions flow into it, every rank adding its
own to what it passes on. A rank that lies in many trees passes on many sums, none of which it keeps; where two trees
want the same sum of the same ranks, one message serves both. On a ring these are the sliding sums both ways (N / 2
steps instead of N), on a torus sums along rows and then along columns. The latency is the diameter, the price is that
whole vectors are sent again and again, so it is for short ones.

Trees are of quickest paths. Which of several quickest ways a rank takes decides how much is shared, so a few rules for
the choice are tried and the quickest schedule is taken. On irregular machines (`reshaped`) some links are taken to be
longer than they are, as long as that helps.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Message
from taccl.synth.collective import Collective
from taccl.synth.cost import Costs, costs
from taccl.synth.engines.network import Inapplicable
from taccl.synth.schedule import Transfer, as_transfers, completions, time_by_priority

# Ways are compared for vectors of so many bytes: engines do not know the size, and longer ones are not for this one.
SHORT_BYTES = 1000
ENGINE = "one-shot-trees"
# Times what is known: trees that are so crowded, or that slow, are given up.
HOPELESS = 2
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
    machine = _machine(topology, collective, costs(topology, Fraction(SHORT_BYTES)))
    return _whole(min(_by_rules(machine), key=lambda trial: trial.key), collective)


def crowded_fs(topology: Topology, collective: Collective, vector_costs: Costs) -> int:
    """How long the fullest link or port is held by trees of the first rule: a cheap look at what is to be hoped for.

    Raises Inapplicable as `transfers`.
    """
    machine = _machine(topology, collective, vector_costs)
    plan = _plan(machine, machine.transit, next(_rules(topology)))
    load = [0] * vector_costs.resources
    for sent in plan.sent:
        for resource, per_chunk in vector_costs.holds[sent.link]:
            load[resource] += vector_costs.hold(sent.link, per_chunk, 1)
    return max(load)


def reshaped(
    topology: Topology,
    collective: Collective,
    vector_costs: Costs,
    work: int,
    seed: int,
    stop: Callable[[], bool],
) -> list[Transfer]:
    """Where machines are irregular: quickest paths by other lengths of links, as long as the schedule gets quicker.

    Paths of one set of lengths agree with each other, so that trees share what flows together. A link on which the last
    ranks wait becomes longer, some others any length; what is no worse is kept. vector_costs: of messages of one chunk,
    the whole vector. work: messages that may be clocked. Raises Inapplicable as `transfers`.
    """
    machine = _machine(topology, collective, vector_costs)
    best = min(_by_rules(machine), key=lambda trial: trial.key)
    shuffle = random.Random(seed)
    lengths = list(machine.transit)
    spent = 0
    while spent < work and best.key[0] > machine.farthest and not stop():
        tried = list(lengths)
        if shuffle.random() < 0.5:
            for _ in range(shuffle.choice((1, 2, 4))):
                e = shuffle.randrange(len(tried))
                tried[e] = machine.transit[e] * shuffle.choice((10, 11, 13, 16, 20)) // 10
        else:
            last = max(m.end_fs for m in best.messages)
            e = shuffle.choice([m.link for m in best.messages if m.end_fs == last])
            tried[e] = tried[e] * shuffle.choice((11, 13)) // 10
        trial = _clocked(machine, tried, best.rule)
        spent += len(trial.messages)
        if trial.key <= best.key:
            best, lengths = trial, tried
    return _whole(best, collective)


@dataclass(frozen=True, slots=True)
class _Machine:
    """What all trials of a request have in common."""

    topology: Topology
    vector: Collective  # as one chunk, as it is sent
    costs: Costs
    members: tuple[int, ...]  # ranks that contribute, and want the result
    out: list[list[int]]  # by rank: links
    into: list[list[int]]
    transit: list[int]  # by link
    farthest: int  # the longest of the quickest ways between members: nothing is quicker


# (links to choose from, what is to be sent, known messages, messages on each link so far) -> link
Rule = Callable[[Sequence[int], frozenset[int], dict[Sent, int], Sequence[int]], int]


@dataclass(frozen=True, slots=True)
class _Trial:
    """Trees and their times: (time, how much later than need be all results are, number of messages)."""

    key: tuple[int, int, int]
    messages: tuple[Message, ...]
    rule: Rule


def _machine(topology: Topology, collective: Collective, priced: Costs) -> _Machine:
    if collective.name != "allreduce":
        raise Inapplicable(f"one-shot algorithms serve allreduce, not {collective.name}")
    if topology.ranks > MOST_RANKS:
        raise Inapplicable(f"trees to every rank are made for up to {MOST_RANKS} ranks")
    members = tuple(sorted({rank for chunk in collective.chunks for rank, _ in chunk.sources}))
    out: list[list[int]] = [[] for _ in range(topology.ranks)]
    into: list[list[int]] = [[] for _ in range(topology.ranks)]
    for e, link in enumerate(topology.links):
        out[link.src].append(e)
        into[link.dst].append(e)
    # One femtosecond more a hop: where links cost nothing, fewer are better, and next hops are nearer.
    transit = [priced.transit(e, 1) + 1 for e in range(len(topology.links))]
    vector = replace(collective, chunks=collective.chunks[:1])
    machine = _Machine(topology, vector, priced, members, out, into, transit, 0)
    ways = [_distances(machine, transit, goal) for goal in members]
    for goal, distance in zip(members, ways, strict=True):
        lost = [rank for rank in members if rank not in distance]
        if lost:
            raise Inapplicable(f"no path of links leads from rank {lost[0]} to rank {goal}")
    return replace(machine, farthest=max(distance[rank] for distance in ways for rank in members))


def _by_rules(machine: _Machine) -> Iterator[_Trial]:
    for rule in _rules(machine.topology):
        yield _clocked(machine, machine.transit, rule)


def _clocked(machine: _Machine, lengths: Sequence[int], rule: Rule) -> _Trial:
    plan = _plan(machine, lengths, rule)
    listed = _listed(machine.topology, plan)
    messages = time_by_priority(
        machine.topology, machine.vector, machine.costs, listed, _urgency(machine.transit, plan)
    )
    done = completions(machine.costs, messages)
    result = dict.fromkeys(machine.members, 0)
    for message, end in zip(messages, done, strict=True):
        if message.into[0] == 0:
            result[message.dst] = max(result[message.dst], end)
    late = sum(max(0, end - machine.farthest) for end in result.values())
    return _Trial((max(done, default=0), late, len(messages)), messages, rule)


def _whole(trial: _Trial, collective: Collective) -> list[Transfer]:
    """Transfers of all chunks, in the order of their starts."""
    everything = tuple(range(len(collective.chunks)))
    return [replace(transfer, chunks=everything) for transfer in as_transfers(trial.messages)]


def _distances(machine: _Machine, lengths: Sequence[int], goal: int) -> dict[int, int]:
    """How far the goal is from every rank that reaches it."""
    links = machine.topology.links
    distance = {goal: 0}
    queue = [(0, goal)]
    while queue:
        far, v = heapq.heappop(queue)
        if far > distance[v]:
            continue
        for e in machine.into[v]:
            u = links[e].src
            if far + lengths[e] < distance.get(u, 1 << 200):
                distance[u] = far + lengths[e]
                heapq.heappush(queue, (distance[u], u))
    return distance


def _rules(topology: Topology) -> Iterator[Rule]:
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


def _plan(machine: _Machine, lengths: Sequence[int], rule: Rule) -> Plan:
    """The messages of one tree for each member, those that two trees have in common once."""
    links = machine.topology.links
    known: dict[Sent, int] = {}
    load = [0] * len(links)
    results = {}
    for goal in machine.members:
        distance = _distances(machine, lengths, goal)
        gathered: dict[int, set[int]] = {rank: set() for rank in machine.members}
        queue = [(-distance[rank], rank) for rank in machine.members if rank != goal]
        heapq.heapify(queue)
        while queue:
            _, rank = heapq.heappop(queue)
            of = frozenset(gathered[rank])
            tight = [
                e for e in machine.out[rank] if distance.get(links[e].dst, -1) == distance[rank] - lengths[e]
            ]
            link = rule(tight, of, known, load)
            sent = Sent(link, of)
            if sent not in known:
                known[sent] = len(known)
                load[link] += 1
            nearer = links[link].dst
            if nearer not in gathered:
                gathered[nearer] = set()
                heapq.heappush(queue, (-distance[nearer], nearer))
            gathered[nearer].add(known[sent])
        results[goal] = frozenset(gathered[goal])
    return Plan(list(known), results)


def _listed(topology: Topology, plan: Plan) -> list[Transfer]:
    """Transfers in the plan's order, with a number for each sum that a rank passes on; its result is sum 0."""
    links = topology.links
    number: dict[int, dict[frozenset[int], int]] = {rank: {of: 0} for rank, of in plan.results.items()}
    for sent in plan.sent:
        sums = number.setdefault(links[sent.link].src, {})
        if sent.of not in sums:
            sums[sent.of] = max(sums.values(), default=0) + 1
    into: dict[int, list[int]] = {}
    for sums in number.values():
        for of, place in sums.items():
            for message in of:
                into.setdefault(message, []).append(place)
    return [
        Transfer(
            sent.link, (0,), "reduce", None, number[links[sent.link].src][sent.of], tuple(sorted(into[m]))
        )
        for m, sent in enumerate(plan.sent)
    ]


def _urgency(transit: Sequence[int], plan: Plan) -> list[int]:
    """Per message its place among all by how much still has to happen after its start, the most first."""
    after = [0] * len(plan.sent)
    for m in range(len(plan.sent) - 1, -1, -1):
        sent = plan.sent[m]
        after[m] += transit[sent.link]
        for before in sent.of:
            after[before] = max(after[before], after[m])
    place = [0] * len(after)
    for i, m in enumerate(sorted(range(len(after)), key=lambda m: (-after[m], m))):
        place[m] = i
    return place
