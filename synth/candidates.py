"""Candidates of synthesis: ordered transfers at some chunking, timed the best way the schedulers know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Restrictions
from taccl.synth.algorithm import Algorithm, Certificate, Message
from taccl.synth.collective import Collective
from taccl.synth.cost import LONG_CHUNK, Costs, late_costs
from taccl.synth.problem import Problem, roots_of, turned
from taccl.synth.schedule import (
    Transfer,
    Unordered,
    as_carried,
    coalesced,
    completion_fs,
    completions,
    time_batched,
    time_by_priority,
    time_in_order,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete schedule of one chunking."""

    engine: str
    collective: Collective
    transfers: tuple[Transfer, ...]  # as timed, in order of start
    messages: tuple[Message, ...]
    time_fs: int
    late_fs: int = 0  # its time when messages are late, where ranks share cores and it was tried

    @property
    def crosses(self) -> bool:
        """Whether some rank holds several sums of a chunk."""
        return any(m.sum or m.into != (0,) for m in self.messages)

    def algorithm(self, topology: Topology, size_bytes: int) -> Algorithm:
        """The schedule as an algorithm of which nothing is proven yet."""
        return Algorithm(
            name=f"{self.collective.title.replace(' ', '-')}-{topology.name}-{self.engine}",
            collective=self.collective,
            topology_name=topology.name,
            size_bytes=size_bytes,
            messages=self.messages,
            time_fs=self.time_fs,
            certificate=Certificate(0.0, "", 0.0, "feasible"),
            engine=self.engine,
        )


def best_timing(
    engine: str,
    topology: Topology,
    collective: Collective,
    costs: Costs,
    transfers: Sequence[Transfer],
    batching: bool = True,
    on_timed: Callable[[int], None] = lambda transfers: None,
) -> Candidate | None:
    """The quickest of the schedulers' results; None when the order of the list cannot be executed.

    on_timed hears of the number of transfers that each scheduler times.

    The non-delay schedule is preferred among equals: it is what a program's threadblocks do by themselves. Without
    batching, chunks that are listed in messages of their own stay there.
    """
    explicit = any(not t.plain for t in transfers)
    exchange = any(t.after is not None for t in transfers)
    attempts = [(time_by_priority, transfers), (time_in_order, transfers)]
    try:
        if batching and not explicit and any(_gains(costs, t.link) for t in transfers):
            attempts.append((time_batched, transfers))
            for links in _dear_links(costs, transfers):
                merged = coalesced(topology, collective, transfers, links)
                if merged is not None and len(merged) < len(transfers):
                    attempts += [(time_by_priority, merged), (time_batched, merged)]
    except Unordered:
        return None
    best: tuple[int, tuple[Message, ...]] | None = None
    for scheduler, listed in attempts:
        on_timed(len(listed))
        try:
            messages = scheduler(topology, collective, costs, listed)
        except Unordered:
            continue
        if exchange and not exchanges_hold(costs, transfers, messages):
            continue
        time_fs = completion_fs(costs, messages)
        if best is None or time_fs < best[0]:
            best = (time_fs, messages)
    if best is None:
        return None
    return Candidate(engine, collective, tuple(transfers), best[1], best[0])


def one_chunk_each(transfers: Sequence[Transfer]) -> list[Transfer]:
    """The same without company in messages."""
    return [replace(t, chunks=(c,), after=None) for t in transfers for c in t.chunks]


def _gains(costs: Costs, link: int) -> bool:
    """Whether company in a message saves anything worth having on a link."""
    return LONG_CHUNK * costs.occupancy_fs[link] > costs.chunk_fs[link]


def _dear_links(costs: Costs, transfers: Sequence[Transfer]) -> list[frozenset[int]]:
    """Links on which messages should be few: those where one costs far more than on the cheapest, and all."""
    used = frozenset(t.link for t in transfers)
    least = min(costs.occupancy_fs[e] for e in used)
    dear = frozenset(e for e in used if costs.occupancy_fs[e] > 2 * least)
    return [dear, used] if dear else [used]


def exchanges_hold(costs: Costs, transfers: Sequence[Transfer], messages: Sequence[Message]) -> bool:
    """Whether every message with explicit predecessors starts with exactly these digested at its source.

    A partner's half of an exchange must not have been reduced into the data before the own half leaves.
    """
    start_of = {(m.link, m.chunks, m.op): m for m in messages}
    if len(start_of) != len(messages):
        return False
    timed = [start_of[t.link, tuple(sorted(t.chunks)), t.op] for t in transfers]
    for transfer, message in zip(transfers, timed, strict=True):
        if transfer.after is None:
            continue
        before = set(transfer.after)
        for index, other in enumerate(timed):
            into_source = other.dst == message.src and not set(other.chunks).isdisjoint(message.chunks)
            if into_source and index not in before:
                digested = other.end_fs + (costs.reduce(len(other.chunks)) if other.op == "reduce" else 0)
                if digested <= message.start_fs:
                    return False
    return True


def late_fs(topology: Topology, collective: Collective, priced: Costs, messages: Sequence[Message]) -> int:
    """The time of a schedule that keeps its order while every message is late, in the sense of `late_costs`.

    At least its own time, which is all that is known of one that no list can say: a program's, where a sum is made
    beside the one that is sent.
    """
    slow = late_costs(topology, priced.chunk_bytes)
    listed = as_carried(messages, completions(priced, messages))
    own_fs = completion_fs(priced, messages)
    try:
        return max(own_fs, completion_fs(slow, time_in_order(topology, collective, slow, listed)))
    except Unordered:
        return own_fs


def complete(topology: Topology, collective: Collective, transfers: Sequence[Transfer]) -> bool:
    """Whether the transfers touch every rank that must receive (or contribute to) every chunk.

    A cheap sieve against halves of schedules; the answer of synthesis is proven by check_algorithm.
    """
    received: dict[int, set[int]] = {}
    gave: dict[int, set[int]] = {}
    for transfer in transfers:
        link = topology.links[transfer.link]
        for number in transfer.chunks:
            received.setdefault(number, set()).add(link.dst)
            if transfer.op == "reduce":
                gave.setdefault(number, set()).add(link.src)
    for number, chunk in enumerate(collective.chunks):
        sources = {rank for rank, _ in chunk.sources}
        wanted = {rank for rank, _ in chunk.destinations}
        arrived, given = received.get(number, set()), gave.get(number, set())
        if not collective.combining and not wanted - sources <= arrived:
            return False
        if (
            collective.combining
            and len(sources) > 1
            and not (wanted <= arrived and len(given) >= len(sources) - 1)
        ):
            return False
    return True


def obeys(
    restrictions: Restrictions, topology: Topology, collective: Collective, messages: Sequence[Message]
) -> bool:
    """Whether a schedule keeps all binding rules of a sketch; engines that know none are judged by this."""
    roots = roots_of(collective)
    reduces = any(m.op != "copy" for m in messages)
    back = turned(topology, restrictions.rules) if reduces else restrictions.rules
    for rule, of_sums in zip(restrictions.rules, back, strict=True):
        if rule.kind == "forbid-links":
            if any(m.link in (rule if m.op == "copy" else of_sums).links for m in messages):
                return False
        elif rule.kind == "forbid-routes":
            for m in messages:
                routes = (rule if m.op == "copy" else of_sums).routes
                if any((rank, m.link) in routes for c in m.chunks for rank in roots[c]):
                    return False
        elif rule.kind == "cap":
            carried = Counter(m.link for m in messages for _ in m.chunks)
            if any(carried[link] > rule.limit for link in rule.links):
                return False
        elif rule.kind == "own-first" and not _own_first(rule.links, topology, roots, messages):
            return False
    return True


def keeps_to_ways(p: Problem, messages: Sequence[Message]) -> bool:
    """Whether each chunk goes over links of `Layer.usable` alone, which an author's `extra_hops` narrows."""
    usable = {layer.kind: layer.usable for layer in p.layers}
    sets: dict[int, frozenset[int]] = {}  # chunks of one root and target share a tuple

    def may(kind: str, link: int, chunk: int) -> bool:
        if kind not in usable:  # results that are passed on, where the problem is that of sums alone
            return True
        links = usable[kind][chunk]
        if id(links) not in sets:
            sets[id(links)] = frozenset(links)
        return link in sets[id(links)]

    return all(
        may("spread" if m.op == "copy" else "collect", m.link, chunk) for m in messages for chunk in m.chunks
    )


def _own_first(
    links: frozenset[int], topology: Topology, roots: Sequence[tuple[int, ...]], messages: Sequence[Message]
) -> bool:
    foreign_start: dict[int, int] = {}
    own_start: dict[int, int] = {}
    for m in messages:
        if m.link not in links or m.op != "copy":
            continue
        own = [topology.links[m.link].src in roots[c] for c in m.chunks]
        if not all(own):
            foreign_start[m.link] = min(foreign_start.get(m.link, m.start_fs), m.start_fs)
        if any(own):
            own_start[m.link] = max(own_start.get(m.link, 0), m.start_fs)
    return all(own_start[e] <= foreign_start.get(e, own_start[e]) for e in own_start)
