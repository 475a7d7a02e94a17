"""The quickest schedule with a codec: routes found with and without it in mind, and the choice of coded messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import chain as joined

from taccl.errors import Infeasible, Interrupted, NoSolutionInTime, UsageError
from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.bounds.large import EXPLICIT_RANKS
from taccl.synth.candidates import obeys
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.coding.bound import coded_bound, coded_links
from taccl.synth.coding.choose import (
    MOST_CUT_MESSAGES,
    WORTHWHILE,
    Choice,
    Effort,
    by_links,
    chosen,
    cut_finer,
    polished,
    time_and_load_fs,
)
from taccl.synth.coding.node_sums import node_sums
from taccl.synth.collective import Collective
from taccl.synth.cost import costs, load_fs, us
from taccl.synth.engines import chain
from taccl.synth.engines.network import Inapplicable
from taccl.synth.lower import lower_exact
from taccl.synth.numbering import neatly_numbered
from taccl.synth.request import Request, builder
from taccl.synth.schedule import Transfer, as_carried, completion_fs, completions, time_by_priority
from taccl.synth.synthesise import synthesise

# Per second of the limit: messages that are clocked for single turns, deterministic seconds of CP-SAT.
CLOCKED_PER_WALL = 5_000
DETERMINISTIC_PER_WALL = 0.01
# Of the limit, for each search of routes on a cluster whose links are shorter by the codec's ratio.
ROUTES_SHARE = 0.2
# The best of so many choices by links are looked at message by message.
MOST_POLISHED = 2
# A choice by links is cut finer where it takes at most so many times what the best one takes.
MOST_BEHIND = 2
# Chunks a block at which sums of nodes are tried.
CUTS = (1, 2, 4, 8, 12)
# Chunks a block of a chain, before it is cut finer.
CHAIN_CHUNKS = 8
# Messages of several connections that share a port of a node get in each other's way: coded messages take no turns.
# Where each port has one, a schedule may be slower by so much and is still preferred.
SHARED = 1.05
# Of more messages a schedule without a codec is coded after those that are made for one.
LONG = 600
# Schedules of more messages are not coded: finding out where would take too long.
MOST_MESSAGES = 20_000


def codecs_for(topology: Topology, policy: str, dtype: str) -> tuple[CodecCost, ...]:
    """The codecs that a policy lets synthesis choose from: "auto" those that change nothing, a name that one.

    Raises UsageError for a codec that the profile has not measured for the dtype.
    """
    measured = [cost for cost in topology.codecs if cost.dtype == dtype]
    if policy == "none":
        return ()
    if policy == "auto":
        return tuple(cost for cost in measured if cost.lossless)
    named = tuple(cost for cost in measured if cost.codec == policy)
    if not named:
        known = ", ".join(f"{cost.codec} for {cost.dtype}" for cost in topology.codecs) or "none"
        raise UsageError(
            f"codec {policy!r}: the profile {topology.name} says nothing of what it costs and gains for {dtype} "
            f"(codecs there: {known}); taccl profile --codecs {policy} --dtype {dtype} measures it, if there is such a "
            "codec and it takes such values; --codec none does without"
        )
    return named


def with_codec(
    request: Request,
    uncoded: Algorithm,
    uncoded_fs: int,
    candidates: Collection[CodecCost],
    should_stop: Callable[[], bool],
    left_s: float | None = None,
    on_late: Callable[[], None] = lambda: None,
) -> Algorithm | None:
    """The quickest schedule found with coded messages and its plan; None where none beats `uncoded_fs`.

    uncoded: the best schedule without a codec, in the order of its program, from which the search starts. What is found
    can be lowered, and its plan is that of its program's own order. left_s: wall-clock seconds after which no stage
    begins or goes on, the best so far is the answer (None: the request's limit). The shares of the stages are counted,
    so that the answer depends on the clock only where the machine is too slow for them; then on_late is called.
    """
    topology, restrictions = request.topology, request.restrictions
    if not candidates or len(uncoded.messages) > MOST_MESSAGES:
        return None
    end = time.monotonic() + (request.time_limit_s if left_s is None else left_s)

    def late() -> bool:
        if time.monotonic() <= end:
            return should_stop()
        on_late()
        return True

    links = restrictions.codec_links
    allowed = frozenset(range(len(topology.links)) if links is None else links)
    fixed = request.partition is not None or restrictions.partition is not None or request.custom is not None
    cut = not fixed and not restrictions.rules
    found: list[Choice] = []
    # What is at hand comes first: by then the rest may be left out. To code a long schedule takes all the time, though,
    # and frames of its many short chunks cost the most.
    routes = _other_routes(request, uncoded, candidates, allowed, late, end, on_late)
    at_hand = len(uncoded.messages) <= LONG
    for start in joined([uncoded], routes) if at_hand else joined(routes, [uncoded]):
        if found and late():
            break
        for cost in candidates:
            choice = by_links(start, topology, cost, allowed)
            if choice is None:
                continue
            found.append(choice)
            if cut and choice.time_fs <= MOST_BEHIND * min(other.time_fs for other in found):
                finer = cut_finer(choice, topology, allowed, late)
                found += [] if finer is choice else [finer]

    def judged(choice: Choice) -> float:
        shared = SHARED if shares_ports(choice.algorithm, topology) else 1.0
        return shared * time_and_load_fs(choice, topology)

    found.sort(key=judged)
    effort = Effort(
        round(CLOCKED_PER_WALL * request.time_limit_s / MOST_POLISHED),
        DETERMINISTIC_PER_WALL * request.time_limit_s / MOST_POLISHED,
    )
    best = [
        polished(choice, topology, allowed, effort, request.seed, late) for choice in found[:MOST_POLISHED]
    ]
    without_fs = uncoded_fs + load_fs(topology, len(uncoded.messages))
    # What was made for a codec may be quicker without one, too.
    known_fs = min(uncoded_fs, *(choice.algorithm.time_fs for choice in found)) if found else uncoded_fs

    def pays(choice: Choice) -> bool:
        enough = choice.time_fs < WORTHWHILE * known_fs
        return enough and time_and_load_fs(choice, topology) < WORTHWHILE * without_fs

    for choice in sorted([*best, *found], key=judged):
        if not pays(choice):
            continue
        kept = choice if choice.algorithm is uncoded else _as_lowered(choice, topology)
        if kept is None or not pays(kept):
            continue
        bound = coded_bound(topology, builder(request)(1), request.size_bytes, kept.cost)
        planned = kept.planned()
        assert planned.coding is not None
        plan = replace(planned.coding, lower_bound_us=us(bound.time_fs), uncoded_time_us=us(known_fs))
        return replace(planned, coding=plan)
    return None


def _other_routes(
    request: Request,
    uncoded: Algorithm,
    candidates: Collection[CodecCost],
    allowed: frozenset[int],
    should_stop: Callable[[], bool],
    end: float,
    on_late: Callable[[], None],
) -> Iterator[Algorithm]:
    """Schedules that may suit a codec better: sums that it may code, and routes for a cluster whose messages are
    shorter, between nodes and on all links.

    end: by time.monotonic(). Each search for routes may take half of what is left by then, so that only its counted
    share ends it where the machine is quick enough."""
    topology = request.topology
    if request.engine in ("auto", "cp-sat"):
        yield from _chain(request, uncoded)
        if not all(cost.lossless for cost in candidates):
            yield from _node_sums(request, uncoded)
    if topology.ranks > EXPLICIT_RANKS:
        return
    cost = max(candidates, key=lambda cost: cost.ratio)
    node_of = topology.node_of()
    between = frozenset(
        e for e in allowed if node_of[topology.links[e].src] != node_of[topology.links[e].dst]
    )
    for some in dict.fromkeys((between, allowed)):
        if not some or should_stop() or cost.ratio <= 1:
            continue
        short = coded_links(topology, cost, some)
        asked = replace(request, topology=short, time_limit_s=ROUTES_SHARE * request.time_limit_s)
        until = (time.monotonic() + end) / 2
        try:
            there = synthesise(asked, None, should_stop, max(0.0, until - time.monotonic()))
        except (Infeasible, Interrupted, NoSolutionInTime):
            continue
        finally:
            if time.monotonic() > until:
                on_late()
        priced = costs(topology, there.chunk_bytes)
        usable = completions(costs(short, there.chunk_bytes), there.messages)
        messages = time_by_priority(topology, there.collective, priced, as_carried(there.messages, usable))
        here = replace(
            there,
            topology_name=topology.name,
            name=uncoded.name.rpartition("-")[0] + f"-{there.engine}",
            messages=messages,
            time_fs=completion_fs(priced, messages),
            certificate=uncoded.certificate.of_any_schedule(),
            provenance=uncoded.provenance,
        )
        if not check_algorithm(here, topology):
            yield here


def shares_ports(algorithm: Algorithm, topology: Topology) -> bool:
    """Whether messages of several links go through one port between nodes."""
    node_of = topology.node_of()
    used = {message.link for message in algorithm.messages}
    crossing = [topology.links[e] for e in used]
    ports = [port for link in crossing if node_of[link.src] != node_of[link.dst] for port in set(link.ports)]
    return len(set(ports)) < len(ports)


def _chain(request: Request, uncoded: Algorithm) -> Iterator[Algorithm]:
    """A chunked chain, which crosses between nodes as seldom as possible and over one link at a time."""
    collective = builder(request)(request.partition or request.restrictions.partition or CHAIN_CHUNKS)
    try:
        transfers = chain.transfers(request.topology, collective)
    except Inapplicable:
        return
    yield from _timed(request, uncoded, "chain", collective, transfers)


def _node_sums(request: Request, uncoded: Algorithm) -> Iterator[Algorithm]:
    """Reductions with sums of nodes, at a few chunkings."""
    make = builder(request)
    wanted = request.partition or request.restrictions.partition
    for partition in [wanted] if wanted else CUTS:
        collective = make(partition)
        transfers = node_sums(request.topology, collective)
        if transfers is None or (len(transfers) > MOST_CUT_MESSAGES and partition != (wanted or CUTS[0])):
            return
        yield from _timed(request, uncoded, "node-sums", collective, transfers)


def _timed(
    request: Request, uncoded: Algorithm, engine: str, collective: Collective, transfers: list[Transfer]
) -> Iterator[Algorithm]:
    """The schedule of these transfers, where it obeys the request."""
    topology = request.topology
    priced = costs(topology, collective.chunk_bytes(request.size_bytes))
    messages = time_by_priority(topology, collective, priced, transfers)
    found = replace(
        uncoded,
        name=uncoded.name.rpartition("-")[0] + f"-{engine}",
        engine=engine,
        collective=collective,
        messages=messages,
        time_fs=completion_fs(priced, messages),
        certificate=uncoded.certificate.of_any_schedule(),
    )
    if not check_algorithm(found, topology) and obeys(request.restrictions, topology, collective, messages):
        yield found


def _as_lowered(choice: Choice, topology: Topology) -> Choice | None:
    """The choice in the order that the schedule's program keeps; None where it has no program."""
    neat = neatly_numbered(choice.algorithm)
    if neat is not choice.algorithm:
        renumbered = chosen(neat, topology, choice.cost, choice.coded)
        choice = choice if renumbered is None else renumbered
    try:
        lowered = lower_exact(choice.algorithm, topology)
    except Infeasible:
        return None
    schedule = lowered.schedule
    if schedule.messages == choice.algorithm.messages:
        return choice
    if schedule.collective != choice.algorithm.collective or check_algorithm(schedule, topology):
        return None
    hops = choice.planned().coded_hops()
    wished = [
        i for i, m in enumerate(schedule.messages) if all((m.src, m.dst, c, m.op) in hops for c in m.chunks)
    ]
    return chosen(replace(schedule, coding=None), topology, choice.cost, wished)
