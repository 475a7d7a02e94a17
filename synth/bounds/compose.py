"""The bounds of one collective, gathered: which arguments apply, and the strongest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link_table import link_table
from taccl.profiles.topology import Topology
from taccl.synth.bounds import commodities, loads
from taccl.synth.bounds.again import again_time
from taccl.synth.bounds.bound import Bottleneck, Bound, Crossing, ranks_text, stronger, strongest
from taccl.synth.bounds.certificate import Certificate, Row
from taccl.synth.bounds.commodities import MAX_VARIABLES, FlowProgram, Sink
from taccl.synth.bounds.large import EXPLICIT_RANKS, large_bound
from taccl.synth.bounds.messages import message_bounds
from taccl.synth.bounds.network import UNREACHABLE, Network, distances, fluid, offsets, whole
from taccl.synth.bounds.scale import COLLECTIVES, scale_bound
from taccl.synth.bounds.wants import Wants, wanted
from taccl.synth.collective import Collective, build
from taccl.synth.cost import FS_PER_US

# Groups times links up to which each group has loads of its own in a linear program.
MAX_GROUP_LOADS = 600


def lower_bound(topology: Topology, collective: Collective, size_bytes: int) -> Bound:
    """A time that no algorithm for the collective beats on this topology, however it cuts the data.

    Holds for every chunking, routing, order and batching under the cost model of `taccl.synth.cost`; the
    proofs are in docs/bounds.md. Beyond EXPLICIT_RANKS the bounds at scale speak alone where they know the
    collective. size_bytes is the nccl-tests size. Raises ValueError when the ranks differ or some data cannot
    reach its destination at all.
    """
    if topology.ranks != collective.ranks:
        raise ValueError(f"the collective is for {collective.ranks} ranks, the topology has {topology.ranks}")
    if topology.ranks > EXPLICIT_RANKS:
        return counting_bound(topology, collective, size_bytes) or linear_bound(
            topology, collective, size_bytes
        )
    exact = linear_bound(topology, collective, size_bytes)
    counted = counting_bound(topology, collective, size_bytes)
    return exact if counted is None else stronger(exact, counted)


def linear_bound(topology: Topology, collective: Collective, size_bytes: int) -> Bound:
    """The part of `lower_bound` that rests on linear programs and on growth, at any number of ranks."""
    wants = wanted(collective)
    if size_bytes <= 0 or not wants:
        return Bound(0, "nothing has to be moved")
    return bounds_on(fluid(topology, collective.chunk_bytes(size_bytes)), collective, wants)


def counting_bound(
    topology: Topology, collective: Collective, size_bytes: int, grain: str = "messages"
) -> Bound | None:
    """Bounds without linear programs where the collective is what its name says, else None; quick at any scale.

    grain: one of `scale_bound`, for its bound alone, or "messages": the fluid one and what `large_bound` adds to it.
    """
    if collective.groups:
        return _paired_bound(topology, collective, size_bytes, grain)
    demand = demand_of(collective) if collective.name == "alltoallv" else None
    if collective.name not in COLLECTIVES or collective != build(
        collective.name,
        collective.ranks,
        collective.partition,
        root=collective.root,
        demand=None if demand is None else demand.tolist(),
    ):
        return None
    links = link_table(topology)
    if grain == "messages":
        return large_bound(topology, links, collective.name, size_bytes, collective.root, demand)
    return scale_bound(
        topology, links, collective.name, collective.partition, size_bytes, grain, collective.root, demand
    )


def _paired_bound(topology: Topology, collective: Collective, size_bytes: int, grain: str) -> Bound | None:
    """`counting_bound` of groups whose blocks have one source and one destination: they are an alltoallv of all."""
    if collective.name != "alltoall":
        return None
    demand = demand_of(collective)
    if (
        max(demand.sum(axis=0).max(), demand.sum(axis=1).max()) * collective.partition
        != collective.size_chunks
    ):
        return None  # its size would be that of other buffers
    links = link_table(topology)
    if grain == "messages":
        return large_bound(topology, links, "alltoallv", size_bytes, 0, demand)
    return scale_bound(topology, links, "alltoallv", collective.partition, size_bytes, grain, 0, demand)


def demand_of(collective: Collective) -> NDArray[np.int64]:
    """[from, to]: blocks that go from one rank to another, of chunks with one source and one destination."""
    demand = np.zeros((collective.ranks, collective.ranks), np.int64)
    for chunk in collective.chunks:
        demand[chunk.sources[0][0], chunk.destinations[0][0]] += 1
    return demand // collective.partition


def granular_bound(topology: Topology, collective: Collective, size_bytes: int) -> Bound:
    """A time that no algorithm beats which keeps this collective's chunks whole; at least lower_bound.

    Stronger than lower_bound when chunks are few: links and ports carry whole numbers of chunks, and a chunk
    arrives only after its whole transit on every hop. Raises ValueError as lower_bound does.
    """
    free = lower_bound(topology, collective, size_bytes)
    wants = wanted(collective)
    if size_bytes <= 0 or not wants:
        return free
    counted = counting_bound(topology, collective, size_bytes, "whole")
    if counted is not None:
        free = stronger(free, counted)
        if topology.ranks > EXPLICIT_RANKS:
            return free
    tight = bounds_on(whole(topology, collective.chunk_bytes(size_bytes)), collective, wants, free.time_fs)
    return stronger(free, replace(tight, name=f"{tight.name}, whole chunks"))


def bounds_on(network: Network, collective: Collective, wants: Wants, floor_fs: int = 0) -> Bound:
    """Every bound on one network (fluid or whole chunks), the strongest chosen.

    Each one only has to beat those before it and floor_fs, so that most are settled by one small program.
    """
    found = [Bound(floor_fs, "known before")] if floor_fs else []
    found.append(distance_bound(network, collective.combining, wants))
    found += sink_bounds(network, collective.combining, wants, _best(network, found))
    found += shared_bounds(network, collective, wants, _best(network, found))
    found += message_bounds(network, collective, wants, _best(network, found))
    few = network.ranks <= EXPLICIT_RANKS
    again = again_time(network, wants, collective.combining, _best(network, found)) if few else None
    if again is not None:
        way = "received again in" if not collective.combining else "sent once more in"
        found.append(Bound(network.to_fs(again[0]), f"messages {way} {ranks_text(again[1])}"))
    return strongest(found)


def distance_bound(network: Network, combining: bool, wants: Wants) -> Bound:
    """Data cannot arrive before the quickest path lets it; each hop pays at least its alpha."""
    best, where = 0, ""
    memo: dict[frozenset[int], list[int]] = {}
    for sources, destinations in sorted(wants, key=lambda w: (sorted(w[0]), sorted(w[1]))):
        # A combined value needs every contribution, a copied one the nearest source.
        starts = [frozenset({s}) for s in sorted(sources)] if combining else [sources]
        for start in starts:
            if start not in memo:
                memo[start] = distances(network, start)
            for destination in sorted(destinations):
                if memo[start][destination] > best:
                    best = memo[start][destination]
                    where = f"from {ranks_text(tuple(sorted(start)))} to rank {destination}"
    if best >= UNREACHABLE:
        raise ValueError(f"no path leads {where}: the collective cannot run on this topology")
    return Bound(network.to_fs(best), f"latency of the path {where}" if where else "latency")


@dataclass(frozen=True, slots=True)
class _Side:
    """Demand seen from one rank: what must reach it, or (leaving) what must get away from it."""

    sink: Sink
    leaving: bool
    combined: bool


def sides(network: Network, combining: bool, wants: Wants) -> list[_Side]:
    """For each rank what must reach it and what must leave it, each as a flow to one sink.

    Entering: chunks wanted there. All contributions to a combining chunk reach its destination, but may travel
    as one: as a flow it counts once, from the contributor farthest away. Leaving: chunks that others want from
    this rank alone; of several destinations the farthest counts.
    """
    result = []
    for rank in range(network.ranks):
        there, back = distances(network, [rank]), distances(network, [rank], backwards=True)
        entering: dict[frozenset[int], int] = {}
        leaving: dict[frozenset[int], int] = {}
        for (sources, destinations), chunks in wants.items():
            if rank in destinations:
                if not combining:
                    entering[sources] = entering.get(sources, 0) + chunks
                elif sources - {rank}:
                    others = frozenset({min(sources - {rank}, key=lambda r: (-back[r], r))})
                    entering[others] = entering.get(others, 0) + chunks
            only_here = rank in sources and (combining or len(sources) == 1)
            if only_here and destinations - {rank}:
                targets = frozenset({min(destinations - {rank}, key=lambda r: (-there[r], r))})
                leaving[targets] = leaving.get(targets, 0) + chunks
        if entering:
            result.append(_Side(Sink(rank, entering), False, combining))
        if leaving:
            result.append(_Side(Sink(rank, leaving), True, combining))
    return result


def sink_bounds(network: Network, combining: bool, wants: Wants, floor: Fraction) -> list[Bound]:
    """For every rank the flow that must reach it and the flow that must leave it, with head and tail."""
    found = []
    programs: dict[bool, FlowProgram] = {}
    for side in sides(network, combining, wants):
        sink = side.sink
        others = frozenset().union(*sink.groups)
        if side.leaving:
            head = distances(network, [sink.rank])
            tail = distances(network, others, backwards=True)
        else:
            head = distances(network, others)
            tail = distances(network, [sink.rank], backwards=True)
        when = offsets(network, head, tail)
        if side.leaving not in programs:
            ends = [(b, a) for a, b in network.ends] if side.leaving else network.ends
            programs[side.leaving] = FlowProgram(network, ends, 1)
        proof = commodities.least_time(programs[side.leaving], when, [sink], floor)
        if proof is not None:
            floor = proof.time
            found.append(_named(network, proof, when, "max-flow cut", side.leaving))
    return found


def shared_bounds(network: Network, collective: Collective, wants: Wants, floor: Fraction) -> list[Bound]:
    """Bounds that see how all destinations compete for the same resources."""
    head = distances(network, frozenset().union(*(s for s, _ in wants)))
    tail = distances(network, frozenset().union(*(d for _, d in wants)), backwards=True)
    when = offsets(network, head, tail)
    combining = collective.combining
    if all(len(d) == 1 for _, d in wants) and not combining:
        facing = [side.sink for side in sides(network, combining, wants) if not side.leaving]
        if len(facing) * len(network.ends) > MAX_VARIABLES:
            return []
        program = FlowProgram(network, network.ends, len(facing))
        flow = commodities.least_time(program, when, facing, floor)
        return [_named(network, flow, when, "multicommodity flow", False)] if flow else []
    teams = collective.teams
    home = {rank: number for number, team in enumerate(teams) for rank in team}
    sinks: list[Sink] = []
    rows: list[Row] = []
    kind, backwards = "tree packing", False
    ends: Sequence[tuple[int, int]] = network.ends
    if combining and any(len(d) > 1 for _, d in wants):
        kind = "gossip"
        for team in teams:
            first, others = min(team), sorted(team)[1:]
            total = wants.get((frozenset(team), frozenset(team)), 0)
            if total:
                sinks += [Sink(r, {frozenset({first}): total}) for r in others]
                sinks += [Sink(first, {frozenset({r}): total}) for r in others]
                rows += gossip_rows(network, team, total, home[first])
        if not sinks:
            return []
    else:
        backwards = combining
        ends = [(b, a) for a, b in network.ends] if combining else network.ends
        sinks = [side.sink for side in sides(network, combining, wants) if side.leaving == combining]
        if len(sinks) < 2:
            return []
    if len(teams) == 1:
        proof = loads.least_time(network, when, ends, sinks, floor, rows)
        return [_named(network, proof, when, kind, backwards)] if proof else []
    return _shared_by_groups(network, wants, when, floor, kind, backwards, ends, sinks, rows, home)


def _shared_by_groups(
    network: Network,
    wants: Wants,
    when: Sequence[int],
    floor: Fraction,
    kind: str,
    backwards: bool,
    ends: Sequence[tuple[int, int]],
    sinks: Sequence[Sink],
    rows: Sequence[Row],
    home: Mapping[int, int],
) -> list[Bound]:
    """Several groups: what one exchanges is of no use to another.

    First by cuts that all groups' data must cross together, one load a link; where the program stays small also with
    loads of each group, which see that a group's cuts cannot be met by another's load.
    """
    combining = any(len(s) > 1 for s, _ in wants)

    def demand(side: frozenset[int]) -> int:
        """Chunks that must get into a set of ranks (collecting: out of it)."""
        crossing = 0
        for sources, destinations in wants:
            if backwards:
                crosses = bool(sources & side) and bool(destinations - side)
            elif combining:
                crosses = bool(destinations & side) and bool(sources - side)
            else:
                crosses = bool(destinations & side) and not sources & side
            crossing += wants[sources, destinations] if crosses else 0
        return crossing

    together: dict[tuple[int, ...], int] = {}
    for row in rows:
        together[row.links] = together.get(row.links, 0) + row.demand
    joint = [Row(links, chunks, ()) for links, chunks in together.items()]
    found = []
    proof = loads.least_time(network, when, ends, sinks, floor, joint, (), demand)
    if proof is not None:
        floor = max(floor, proof.time)
        found.append(_named(network, proof, when, kind, backwards))
    if (1 + max(home.values())) * len(network.ends) <= MAX_GROUP_LOADS:
        families = [home[sink.rank] for sink in sinks]
        proof = loads.least_time(network, when, ends, sinks, floor, rows, families)
        found += [_named(network, proof, when, f"{kind} of each group", backwards)] if proof else []
    return found


def gossip_rows(network: Network, team: Sequence[int], chunks: int, family: int) -> list[Row]:
    """A team learns everything of its `chunks` chunks: 2(M-1) crossings each for M groups (Harary, Schwenk).

    The first group that knows all has had M-1 crossings before; each other group needs one more after it. Groups
    without a member of the team only add links over which it may cross.
    """
    rows = []
    partitions: list[Sequence[tuple[int, ...]]] = [[(r,) for r in range(network.ranks)]]
    if 1 < len(network.nodes) < network.ranks:
        partitions.append(network.nodes)
    for groups in partitions:
        group_of = {rank: number for number, group in enumerate(groups) for rank in group}
        links = tuple(e for e, (a, b) in enumerate(network.ends) if group_of[a] != group_of[b])
        concerned = len({group_of[rank] for rank in team})
        if chunks and concerned > 1:
            rows.append(Row(links, 2 * (concerned - 1) * chunks, (), family))
    return rows


def _best(network: Network, found: Sequence[Bound]) -> Fraction:
    return Fraction(max(bound.time_fs for bound in found) * network.ticks_per_us, FS_PER_US)


def _named(network: Network, proof: Certificate, when: Sequence[int], kind: str, leaving: bool) -> Bound:
    weights = sorted(proof.weights, key=lambda item: (-item[1] * network.beta[item[0]], item[0]))
    heaviest = weights[0][1] * network.beta[weights[0][0]] if weights else Fraction(1)
    crossing = tuple(
        Crossing(network.names[r], r, float(w * network.beta[r] / heaviest), network.to_us(when[r]))
        for r, w in weights
    )
    # Families that must cross the same cut are told as one.
    share: dict[tuple[int, ...], Fraction] = {}
    demand: dict[tuple[int, ...], int] = {}
    for row, multiplier in proof.rows:
        share[row.ranks] = share.get(row.ranks, Fraction(0)) + multiplier * row.demand
        demand[row.ranks] = demand.get(row.ranks, 0) + row.demand
    ranks: tuple[int, ...] = ()
    main = max(share, key=lambda side: share[side], default=())
    must_cross = 0.0
    if main and share[main] * 2 > sum(share.values()):
        ranks = main
        must_cross = float(demand[main] * network.chunk_bytes)
        if 2 * len(ranks) > network.ranks:  # the same cut, told from its smaller side
            ranks = tuple(r for r in range(network.ranks) if r not in ranks)
            leaving = not leaving
    names = [c.resource for c in crossing[:3]]
    resources = ", ".join(names) + (f" and {len(crossing) - 3} more" if len(crossing) > 3 else "")
    way = f" {'out of' if leaving else 'into'} {ranks_text(ranks)}" if ranks else ""
    bottleneck = Bottleneck(ranks, leaving, must_cross, crossing)
    return Bound(network.to_fs(proof.time), f"{kind}{way} ({resources})", bottleneck)
