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
from taccl.synth.cost import costs
from taccl.synth.models.packing import refine
from taccl.synth.models.solver import Strategy
from taccl.synth.schedule import as_transfers, completion_fs, time_by_priority

# Chunks are not cut shorter than this, nor into more messages than lowering has room for.
LEAST_CHUNK_BYTES = 16_384
MOST_MESSAGES = 4_000
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
    cut: bool = True  # chunks may be cut finer


@dataclass(frozen=True, slots=True)
class _State:
    """A schedule and a choice for it."""

    algorithm: Algorithm
    flow: Flow
    prices: CodecPrices
    coded: tuple[int, ...]
    activities: tuple[Activity, ...]

    @property
    def time_fs(self) -> int:
        return time_of(self.activities)


def choose(
    algorithm: Algorithm,
    topology: Topology,
    cost: CodecCost,
    links: Collection[int],
    effort: Effort,
    seed: int,
    should_stop: Callable[[], bool],
) -> Algorithm | None:
    """The schedule, perhaps cut finer, with the best choice found of messages to be coded; None where coding none is
    as good. links: those over which messages may be coded. The plan's bound and uncoded time are not filled in.
    """
    start = _state(algorithm, topology, cost)
    if start is None:
        return None
    best = start
    kinds = list(_kinds(topology, links))
    for state in _all_of(start, topology, cost, kinds):
        best = min(best, state, key=_time)
    if effort.cut:
        for finer in _finer(algorithm, topology):
            cut = _state(finer, topology, cost)
            found = min(_all_of(cut, topology, cost, kinds), key=_time, default=None) if cut else None
            if should_stop() or found is None or found.time_fs >= WORTHWHILE * best.time_fs:
                break
            best = found
    allowed = frozenset(i for i, m in enumerate(best.algorithm.messages) if m.link in set(links))
    best = _turned(best, topology, cost, allowed, effort.clocked, should_stop)
    if len(best.algorithm.messages) <= MOST_DECIDED and not should_stop():
        best = _decided(best, topology, cost, allowed, effort.deterministic_s, seed, should_stop)
    if not best.coded or best.time_fs >= WORTHWHILE * start.time_fs:
        return None
    return replace(best.algorithm, coding=CodingPlan(cost, best.coded, best.time_fs, 0.0, 0.0))


def recoded(
    algorithm: Algorithm, topology: Topology, cost: CodecCost, wished: Collection[int]
) -> Algorithm | None:
    """The schedule with a plan that codes just these messages, as far as they may be; None where it has none."""
    start = _state(algorithm, topology, cost)
    found = None if start is None else _with(start, topology, cost, wished)
    if found is None:
        return None
    return replace(algorithm, coding=CodingPlan(cost, found.coded, found.time_fs, 0.0, 0.0))


def _time(state: _State) -> int:
    return state.time_fs


def _state(algorithm: Algorithm, topology: Topology, cost: CodecCost) -> _State | None:
    """The schedule with nothing coded; None where it cannot be coded."""
    found = flow(algorithm, topology)
    if found is None or not algorithm.messages:
        return None
    prices = codec_prices(topology, algorithm.chunk_bytes, cost)
    activities = clock(algorithm, topology, found, prices, (), cost.lossless)
    return None if activities is None else _State(algorithm, found, prices, (), tuple(activities))


def _with(state: _State, topology: Topology, cost: CodecCost, wished: Collection[int]) -> _State | None:
    coded = permitted(state.algorithm, state.flow, wished, cost.lossless)
    activities = clock(state.algorithm, topology, state.flow, state.prices, coded, cost.lossless)
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


def _all_of(
    state: _State, topology: Topology, cost: CodecCost, kinds: Sequence[frozenset[int]]
) -> Iterator[_State]:
    seen = {()}
    for kind in kinds:
        wished = [i for i, m in enumerate(state.algorithm.messages) if m.link in kind]
        found = _with(state, topology, cost, wished)
        if found is not None and found.coded not in seen:
            seen.add(found.coded)
            yield found


def _finer(algorithm: Algorithm, topology: Topology) -> Iterator[Algorithm]:
    """The schedule with every chunk cut in 2, 4, 8, ..., each piece in messages of its own."""
    transfers = as_transfers(algorithm.messages)
    parts = 2
    while len(transfers) * parts <= MOST_MESSAGES:
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
    best: _State,
    topology: Topology,
    cost: CodecCost,
    allowed: frozenset[int],
    clocked: int,
    should_stop: Callable[[], bool],
) -> _State:
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
            found = _with(best, topology, cost, wished)
            if found is not None and found.time_fs < best.time_fs:
                best, improved = found, True
    return best


def _decided(
    best: _State,
    topology: Topology,
    cost: CodecCost,
    allowed: frozenset[int],
    deterministic_s: float,
    seed: int,
    should_stop: Callable[[], bool],
) -> _State:
    """What CP-SAT decides, clocked in the order that it found."""
    strategies = [Strategy(deterministic_s, 60.0, seed)]
    decision = decide(
        best.algorithm, topology, best.flow, best.prices, allowed, best.activities, best.coded, strategies,
        cost.lossless, should_stop,
    )  # fmt: skip
    if decision is None:
        return best
    found = _with(best, topology, cost, decision.coded)
    if found is not None and found.time_fs < best.time_fs:
        best = found
    reordered = _reordered(best.algorithm, topology, decision.order)
    start = _state(reordered, topology, cost) if reordered else None
    if start is not None:
        # Messages are numbered anew in their new order.
        hops = {(best.algorithm.messages[i].link, best.algorithm.messages[i].chunks) for i in decision.coded}
        wished = [i for i, m in enumerate(start.algorithm.messages) if (m.link, m.chunks) in hops]
        found = _with(start, topology, cost, wished)
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
