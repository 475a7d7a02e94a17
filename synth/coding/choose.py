"""The choice which messages of a schedule are coded: by kinds of links, then finer cuts, then message by message.

First all messages over links above a threshold of beta are coded, for every threshold that there is. What is best is
cut finer as long as coding, sending and decoding overlap better. Then single messages are turned (many together where
there are many), and where the schedule is small CP-SAT decides about all of them and their order at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.coding.clock import Activity, CodecPrices, clock, codec_prices, time_of
from taccl.synth.coding.flow import Flow, flow, permitted
from taccl.synth.coding.model import decide
from taccl.synth.coding.plan import CodingPlan
from taccl.synth.collective import refined
from taccl.synth.cost import costs, load_fs
from taccl.synth.models.packing import refine
from taccl.synth.models.solver import Strategy
from taccl.synth.schedule import as_transfers, completion_fs, time_by_priority

# Chunks are not cut shorter than this, nor into more messages than lowering has room for.
LEAST_CHUNK_BYTES = 16_384
MOST_CUT_MESSAGES = 4_000
# A finer cut, or another choice, must gain so much.
WORTHWHILE = 0.998
# Messages that CP-SAT is asked to decide about.
MOST_DECIDED = 400
# Messages that are turned one by one; of more, those of a link are turned together.
MOST_SINGLE = 200


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried; counted, so that the answer does not depend on the clock."""

    clocked: int = 100_000  # messages in all clockings of single turns together
    deterministic_s: float = 1.0  # of CP-SAT


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule and the messages of it that are coded."""

    algorithm: Algorithm
    cost: CodecCost
    flow: Flow
    prices: CodecPrices
    coded: tuple[int, ...]
    activities: tuple[Activity, ...]

    @property
    def time_fs(self) -> int:
        return time_of(self.activities)

    def planned(self) -> Algorithm:
        """The schedule with its plan, whose bound and uncoded time are not filled in."""
        return replace(self.algorithm, coding=CodingPlan(self.cost, self.coded, self.time_fs, 0.0, 0.0))


def time_and_load_fs(choice: Choice, topology: Topology) -> int:
    """The time of a choice, and what its messages add where ranks share cores: frames wait for them at every step."""
    return choice.time_fs + load_fs(topology, len(choice.algorithm.messages))


def by_links(
    algorithm: Algorithm, topology: Topology, cost: CodecCost, links: Collection[int]
) -> Choice | None:
    """The best of coding all messages over the slowest links, the slowest and the next slowest, and so on; None where
    nothing can be coded. links: over which messages may be coded."""
    start = chosen(algorithm, topology, cost, ())
    return None if start is None else _best_of_kinds(start, topology, links)


def cut_finer(
    best: Choice, topology: Topology, links: Collection[int], should_stop: Callable[[], bool]
) -> Choice:
    """The same with chunks cut in 2, 4, 8, ... as long as that pays, and coded by links."""
    for finer in _finer(best.algorithm, topology, should_stop):
        whole = chosen(finer, topology, best.cost, ())
        found = _best_of_kinds(whole, topology, links) if whole else None
        if found is None or time_and_load_fs(found, topology) >= WORTHWHILE * time_and_load_fs(
            best, topology
        ):
            break
        best = found
    return best


def polished(
    best: Choice,
    topology: Topology,
    links: Collection[int],
    effort: Effort,
    seed: int,
    should_stop: Callable[[], bool],
) -> Choice:
    """A choice made better message by message, and where the schedule is small by CP-SAT."""
    among = set(links)
    allowed = frozenset(i for i, m in enumerate(best.algorithm.messages) if m.link in among)
    best = _turned(best, topology, allowed, effort.clocked, should_stop)
    if len(best.algorithm.messages) <= MOST_DECIDED and not should_stop():
        best = _decided(best, topology, allowed, effort.deterministic_s, seed, should_stop)
    return best


def chosen(
    algorithm: Algorithm, topology: Topology, cost: CodecCost, wished: Collection[int]
) -> Choice | None:
    """A schedule with these messages coded, as far as they may be; None where it cannot be coded at all."""
    found = flow(algorithm, topology)
    if found is None or not algorithm.messages:
        return None
    prices = codec_prices(topology, algorithm.chunk_bytes, cost)
    return _with(Choice(algorithm, cost, found, prices, (), ()), topology, wished)


def _with(state: Choice, topology: Topology, wished: Collection[int]) -> Choice | None:
    lossless = state.cost.lossless
    coded = permitted(state.algorithm, state.flow, wished, lossless)
    activities = clock(state.algorithm, topology, state.flow, state.prices, coded, lossless)
    return None if activities is None else replace(state, coded=coded, activities=tuple(activities))


def _kinds(topology: Topology, links: Collection[int]) -> Iterator[frozenset[int]]:
    """Sets of links of which all messages might be coded: the slowest, those and the next slowest, ..., and those
    between nodes."""
    node_of = topology.node_of()

    def beta(e: int) -> object:
        link = topology.links[e]
        return max(link.beta_us_per_mb, *(topology.ports[port].beta_us_per_mb for port in link.ports), 0)

    allowed = sorted(links)
    sets = [frozenset(e for e in allowed if beta(e) >= least) for least in {beta(e): 0 for e in allowed}]  # type: ignore[operator]
    between = frozenset(
        e for e in allowed if node_of[topology.links[e].src] != node_of[topology.links[e].dst]
    )
    yield from sorted({*sets, between} - {frozenset()}, key=lambda chosen: (len(chosen), sorted(chosen)))


def _best_of_kinds(start: Choice, topology: Topology, links: Collection[int]) -> Choice | None:
    messages, best = start.algorithm.messages, None
    seen: set[tuple[int, ...]] = {()}
    for kind in _kinds(topology, links):
        wished = [i for i, m in enumerate(messages) if m.link in kind]
        coded = permitted(start.algorithm, start.flow, wished, start.cost.lossless)
        if coded in seen or (best is not None and _fullest(start, topology, coded) >= best.time_fs):
            continue
        seen.add(coded)
        found = _with(start, topology, wished)
        if found is not None and (best is None or found.time_fs < best.time_fs):
            best = found
    return best


def _fullest(choice: Choice, topology: Topology, coded: Collection[int]) -> int:
    """How long the fullest link or port is held when these messages are coded: no order of them is quicker."""
    plain, framed, among = costs(topology, choice.algorithm.chunk_bytes), choice.prices.framed, set(coded)
    held = [0] * plain.resources
    for i, m in enumerate(choice.algorithm.messages):
        priced = framed if i in among else plain
        for resource, each in priced.holds[m.link]:
            held[resource] += priced.hold(m.link, each, len(m.chunks))
    return max(held, default=0)


def _finer(algorithm: Algorithm, topology: Topology, should_stop: Callable[[], bool]) -> Iterator[Algorithm]:
    """The schedule with every chunk cut in 2, 4, 8, ..., each piece in messages of its own."""
    transfers = as_transfers(algorithm.messages)
    parts = 2
    while len(transfers) * parts <= MOST_CUT_MESSAGES and not should_stop():
        finer = refined(algorithm.collective, parts)
        chunk_bytes = finer.chunk_bytes(algorithm.size_bytes)
        if chunk_bytes < LEAST_CHUNK_BYTES:
            return
        priced = costs(topology, chunk_bytes)
        made: list[Algorithm] = []
        for by_part in (True, False):
            messages = time_by_priority(topology, finer, priced, refine(transfers, parts, finer, by_part))
            cut = replace(
                algorithm,
                collective=finer,
                messages=messages,
                time_fs=completion_fs(priced, messages),
                certificate=algorithm.certificate.of_any_schedule(),
            )
            if not check_algorithm(cut, topology):
                made.append(cut)
        if not made:
            return
        yield min(made, key=lambda cut: cut.time_fs)
        parts *= 2


def _turned(
    best: Choice,
    topology: Topology,
    allowed: frozenset[int],
    clocked: int,
    should_stop: Callable[[], bool],
) -> Choice:
    """Turn one message, or those of one link, after the other as long as that helps."""
    messages = best.algorithm.messages
    units: list[frozenset[int]] = [frozenset([i]) for i in sorted(allowed)]
    if len(units) > MOST_SINGLE:
        of_link: dict[int, set[int]] = {}
        for i in sorted(allowed):
            of_link.setdefault(messages[i].link, set()).add(i)
        units = [frozenset(members) for _, members in sorted(of_link.items())]
    left, improved = clocked, True
    while improved:
        improved = False
        for unit in units:
            left -= len(messages)
            if left < 0 or should_stop():
                return best
            wished = set(best.coded)
            wished = wished - unit if unit <= wished else wished | unit
            found = _with(best, topology, wished)
            if found is not None and found.time_fs < best.time_fs:
                best, improved = found, True
    return best


def _decided(
    best: Choice,
    topology: Topology,
    allowed: frozenset[int],
    deterministic_s: float,
    seed: int,
    should_stop: Callable[[], bool],
) -> Choice:
    """What CP-SAT decides, clocked in the order that it found."""
    strategies = [Strategy(deterministic_s, 60.0, seed)]
    decision = decide(
        best.algorithm, topology, best.flow, best.prices, allowed, best.activities, best.coded, strategies,
        best.cost.lossless, should_stop,
    )  # fmt: skip
    if decision is None:
        return best
    found = _with(best, topology, decision.coded)
    if found is not None and found.time_fs < best.time_fs:
        best = found
    reordered = _reordered(best.algorithm, topology, decision.order)
    if reordered is not None:
        # Messages are numbered anew in their new order.
        hops = {(best.algorithm.messages[i].link, best.algorithm.messages[i].chunks) for i in decision.coded}
        wished = [i for i, m in enumerate(reordered.messages) if (m.link, m.chunks) in hops]
        found = chosen(reordered, topology, best.cost, wished)
        if found is not None and found.time_fs < best.time_fs:
            best = found
    return best


def _reordered(algorithm: Algorithm, topology: Topology, order: Sequence[int]) -> Algorithm | None:
    """The schedule with its messages in another order where they compete; None where it is then no schedule."""
    priced = costs(topology, algorithm.chunk_bytes)
    turn = sorted(range(len(order)), key=lambda i: order[i])
    transfers = as_transfers(algorithm.messages)
    place = {
        (algorithm.messages[i].link, algorithm.messages[i].chunks, algorithm.messages[i].op): order[i]
        for i in turn
    }
    priority = [place[t.link, t.chunks, t.op] for t in transfers]
    messages = time_by_priority(topology, algorithm.collective, priced, transfers, priority)
    messages = tuple(sorted(messages, key=lambda m: (m.start_fs, m.link, m.chunks)))
    found = replace(
        algorithm,
        messages=messages,
        time_fs=completion_fs(priced, messages),
        certificate=algorithm.certificate.of_any_schedule(),
    )
    return None if check_algorithm(found, topology) else found
