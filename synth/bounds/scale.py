"""Lower bounds for machines of any size: cuts, re-reception inside a cut, distances; exact, in numpy and rationals.

Proofs are in docs/bounds.md, "At scale". Every bound holds for any algorithm of its grain; the choice of cuts only
decides how strong it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from itertools import combinations
from math import floor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.bounds.bound import Bound, ranks_text
from taccl.synth.bounds.capacity import GRAINS, LINK, Capacity, Pricing, capacity, pricing
from taccl.synth.bounds.passage import Passage, bottleneck
from taccl.synth.symmetric.group import Ints

Mask = NDArray[np.bool_]
_Item = TypeVar("_Item")

# Beyond so many looks at links only a sample of the ranks is cut off one by one.
MOST_LOOKS = 4_000_000
# In sets of up to so many ranks the last chunk is followed to the farthest of them.
MOST_SPREAD = 64
# Distances are measured from so many ranks.
MOST_STARTS = 16
FAR = 1 << 61  # more than any time, and twice as much still fits
COLLECTIVES = (
    "allgather", "reducescatter", "allreduce", "alltoall", "alltoallv", "broadcast", "reduce", "gather", "scatter",
)  # fmt: skip


def scale_bound(
    topology: Topology,
    links: LinkTable,
    collective: str,
    partition: int,
    size_bytes: int,
    grain: str = "fluid",
    root: int = 0,
    demand: Ints | None = None,
) -> Bound:
    """A time that no algorithm beats: of any chunking ("fluid"), with each block in `partition` chunks that stay
    whole ("whole"), or with one of these chunks a message ("single").

    size_bytes is the nccl-tests size. demand: of alltoallv, [from, to] in blocks. Raises ValueError for another
    collective or grain.
    """
    if (
        collective not in COLLECTIVES
        or grain not in GRAINS
        or (collective == "alltoallv") != (demand is not None)
    ):
        raise ValueError(f"no bound for {collective!r} at grain {grain!r}")
    n = topology.ranks
    blocks = 1 if collective in ("broadcast", "reduce") else n
    if demand is not None:
        demand = demand.copy()
        # The size is that of the longest buffer; what stays where it is needs no time.
        blocks = max(1, int(demand.sum(axis=0).max()), int(demand.sum(axis=1).max()))
        np.fill_diagonal(demand, 0)
        if not demand.any():
            return Bound(0, "nothing has to be moved")
    chunk_bytes = Fraction(size_bytes, blocks * partition)
    if n == 1 or size_bytes <= 0:
        return Bound(0, "nothing has to be moved")
    reverse = collective in ("reducescatter", "reduce", "gather")
    if reverse:
        # What collects is what spreads, backwards in time, on links turned round.
        links = _turned(links)
    priced = pricing(topology, links, chunk_bytes, grain)
    kind = {"reducescatter": "allgather", "reduce": "broadcast", "gather": "scatter"}.get(
        collective, collective
    )
    machine = _Machine(topology, links, priced, kind, partition, root, _message_fs(priced), demand)
    tried, best = [], _Claim(-1, "", None)
    for claim in _bounds(machine):
        tried.append((_worded(claim.name, grain, reverse), claim.time_fs))
        if claim.time_fs > best.time_fs:
            best = claim
    told = None
    if best.passage is not None:
        passage = replace(best.passage, leaving=best.passage.leaving != reverse)
        told = bottleneck(passage, topology, priced, chunk_bytes)
    return Bound(best.time_fs, _worded(best.name, grain, reverse), told, tuple(tried))


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    """A bound, and what it rests on; in words only once it is known to be the strongest."""

    time_fs: int
    name: str
    passage: Passage | None


@dataclass(frozen=True, slots=True, eq=False)
class _Machine:
    topology: Topology
    links: LinkTable
    priced: Pricing
    kind: str  # "allgather" | "allreduce" | "alltoall" | "alltoallv" | "broadcast" | "scatter"
    partition: int
    root: int
    message_fs: Ints  # per link the least time of a message, rounded down
    demand: Ints | None = None  # alltoallv: [from, to] in blocks, 0 where both are one

    @property
    def sides(self) -> tuple[str, ...]:
        """What of a link may be looked at."""
        return (*self.priced.ports, LINK)

    def wanted(self, inside: Mask) -> int:
        """Chunks that ranks inside need and none of them has."""
        n, k, size = len(inside), self.partition, int(inside.sum())
        if self.kind == "allgather":
            return (n - size) * k
        if self.kind == "alltoall":
            return (n - size) * size * k
        if self.demand is not None:
            return int(self.demand[~inside][:, inside].sum()) * k
        if self.kind == "allreduce":
            return n * k  # of every block at least what the others have added to it
        if inside[self.root]:
            return 0
        return k if self.kind == "broadcast" else size * k


def _turned(links: LinkTable) -> LinkTable:
    return replace(links, src=links.dst, dst=links.src, ports=_backwards(links.ports))


def _backwards(ports: Ints) -> Ints:
    """Ports of each link in the opposite order, fillers at the end."""
    turned = np.full_like(ports, -1)
    counts = (ports >= 0).sum(axis=1)
    for column in range(ports.shape[1]):
        source = counts - 1 - column
        there = source >= 0
        turned[there, column] = ports[np.flatnonzero(there), source[there]]
    return turned


def _bounds(machine: _Machine) -> Iterator[_Claim]:
    links, n = machine.links, machine.topology.ranks
    for inside in _cuts(machine):
        crossing = np.flatnonzero(~inside[links.src] & inside[links.dst])
        yield from _into(machine, inside, crossing)
        if machine.kind in ("alltoall", "alltoallv", "scatter", "broadcast", "allreduce"):
            leaving = np.flatnonzero(inside[links.src] & ~inside[links.dst])
            yield from _out_of(machine, inside, leaving)
    yield _distance(machine)
    everywhere = np.arange(len(links))
    if machine.kind == "alltoall":
        hops = _all_distances(machine)
        if hops is not None:
            yield from _traffic(machine, everywhere, Fraction(hops * machine.partition), "hops of all pairs")
    if machine.kind == "allreduce":
        # Everybody learns everything: 2 (m - 1) crossings of each block between m groups (Harary, Schwenk 1974).
        blocks = n * machine.partition
        yield from _traffic(machine, everywhere, Fraction(2 * (n - 1) * blocks), "gossip of all ranks")
        nodes = len(machine.topology.nodes)
        if nodes > 1:
            node_of = _node_of(machine.topology)
            between = np.flatnonzero(node_of[links.src] != node_of[links.dst])
            yield from _traffic(machine, between, Fraction(2 * (nodes - 1) * blocks), "gossip of all nodes")


def _distance(machine: _Machine) -> _Claim:
    """From some ranks (the root, if there is one) to the rank that is farthest from each."""
    links, n = machine.links, machine.topology.ranks
    hop = machine.message_fs
    rooted = machine.kind in ("broadcast", "scatter")
    starts = (
        [machine.root]
        if rooted
        else _sample(range(n), max(1, min(MOST_STARTS, MOST_LOOKS // max(1, len(links)))))
    )
    order = np.argsort(links.dst, kind="stable")
    src, dst, hop = links.src[order], links.dst[order], hop[order]
    firsts = np.flatnonzero(np.diff(dst, prepend=-1))
    farthest, pair = 0, (0, 0)
    for start in starts:
        known = np.full(n, FAR, np.int64)
        known[start] = 0
        while True:
            # All links at once, as often as a shortest path has links (Bellman, Ford).
            nearer = known.copy()
            nearer[dst[firsts]] = np.minimum(
                known[dst[firsts]], np.minimum.reduceat(known[src] + hop, firsts)
            )
            if np.array_equal(nearer, known):
                break
            known = nearer
        if machine.demand is not None:
            known = np.where(machine.demand[start] > 0, known, 0)
        last = int(np.argmax(known))
        if known[last] >= FAR:
            raise ValueError(
                f"rank {last} cannot be reached from rank {start}: the collective cannot run on this topology"
            )
        if known[last] > farthest:
            farthest, pair = int(known[last]), (start, last)
    return _Claim(farthest, f"distance from rank {pair[0]} to rank {pair[1]}", None)


def _message_fs(priced: Pricing) -> Ints:
    """Per link the least time of a message, rounded down; of the fluid grain, alpha alone."""
    times = []
    # So many that all hops of a way together are no more than FAR; a bound may be too low.
    most = FAR // max(2, int(max(priced.links.src.max(initial=1), priced.links.dst.max(initial=1))) + 1)
    for alpha, own in zip(priced.alpha, priced.own, strict=True):
        for held in (None, *priced.held):
            transit = Fraction(0) if priced.grain == "fluid" else own if held is None else max(own, held)
            times.append(min(floor(alpha + transit), most))
    kind = priced.links.link_class * (1 + len(priced.held)) + 1 + priced.slowest
    by_link: Ints = np.array(times, np.int64)[kind]
    return by_link


def _into(machine: _Machine, inside: Mask, crossing: Ints) -> Iterator[_Claim]:
    """What is wanted inside must cross; and what crosses late must still reach every rank inside."""
    chunks = machine.wanted(inside)
    if not chunks:
        return
    name = ranks_text(tuple(int(r) for r in np.flatnonzero(inside)))
    spreads = machine.kind in ("allgather", "broadcast") and int(inside.sum()) > 1
    local = (
        np.flatnonzero(inside[machine.links.src] & inside[machine.links.dst])
        if spreads
        else np.zeros(0, np.int64)
    )
    whole_chunks = spreads and machine.priced.grain != "fluid"
    for side in machine.sides:
        through = capacity(machine.priced, crossing, side)
        time = through.least_time(chunks)
        if time < 0:
            raise ValueError(f"no link leads into {name}: the collective cannot run on this topology")
        seen = (crossing, side, 1.0)
        cut = Passage(inside, False, chunks, (seen,))
        yield _Claim(_down(time, machine), f"cut into {name}", cut)
        if spreads:
            for local_side in machine.sides:
                again = capacity(machine.priced, local, local_side)
                late = _received_again(through, again, chunks, int(inside.sum()))
                both = Passage(inside, False, chunks, (seen, (local, local_side, 1 / int(inside.sum()))))
                yield _Claim(
                    _down(late, machine), f"cut into {name}, received again by each of its ranks", both
                )
            if whole_chunks:
                late = _spread_within(machine, inside, crossing, local, through, chunks)
                yield _Claim(_down(late, machine), f"cut into {name}, the last chunk on to its ranks", cut)


@lru_cache(maxsize=4096)
def _received_again(through: Capacity, local: Capacity, chunks: int, size: int) -> int:
    """What has not entered by t must be received by all `size` ranks after t: from outside or from within.

    With n(t) the chunks that can have entered by t: chunks * size - n(t) * (size - 1) <= n(T) + local(T - t). Times of
    whole chunks are whole femtoseconds, so what has not entered by t is sent on at t + 1 at the earliest.
    """
    if not local.classes:
        return 0
    best = 0
    moments = set()
    resources = sum(count for count, _, _ in through.classes)
    next_fs = 1 if through.floors else 0
    for late in {1, 2, *(min(chunks, resources * step) for step in (1, 2, 3, 4)), (chunks + 1) // 2, chunks}:
        moments.add(max(0, through.least_time(chunks - late + 1) - 1))
    for moment in sorted(moments):
        needed = chunks * size - through.carried(moment) * (size - 1)
        again = moment + next_fs
        low, high = best, max(2 * best, 1)
        while through.carried(high) + local.carried(high - again) < needed:
            low, high = high + 1, 2 * high
        while low < high:
            middle = (low + high) // 2
            if through.carried(middle) + local.carried(middle - again) >= needed:
                high = middle
            else:
                low = middle + 1
        best = max(best, low)
    return best


def _spread_within(
    machine: _Machine, inside: Mask, crossing: Ints, local: Ints, through: Capacity, chunks: int
) -> int:
    """The chunk that enters last, at t, enters in e places by T: chunks - 1 + e arrivals by T, and the other ranks
    inside get it from these e after t."""
    arrived = through.least_time(chunks)
    size = int(inside.sum())
    gates = np.unique(machine.links.dst[crossing]).tolist()
    hops = _nearest(machine, local)
    if size > MOST_SPREAD or not hops:
        return arrived
    ranks = np.flatnonzero(inside).tolist()
    from_gate = {gate: _distances(hops, gate) for gate in gates}

    def reach(entries: int) -> int:
        """Time until the farthest rank has it, from the best places of so many."""
        if entries >= size:
            return 0
        if entries > 2:
            return min(time for out in hops.values() for time in out.values())
        far = 1 << 62  # more than any time
        return min(
            (max(min(from_gate[g].get(r, far) for g in some) for r in ranks)
            for some in combinations(gates, entries)),
            default=far,
        )  # fmt: skip

    best = 1 << 62
    for entries in range(1, len(gates) + 1):
        last = through.least_time(chunks - 1 + entries)
        best = min(best, max(last, arrived + reach(entries)))
        if last >= best:
            break
    return best


def _nearest(machine: _Machine, which: Ints) -> dict[int, dict[int, int]]:
    """[src][dst]: the least time of a message of one chunk over the links `which`."""
    links = machine.links
    hops: dict[int, dict[int, int]] = {}
    times = machine.message_fs[which]
    for src, dst, time in zip(
        links.src[which].tolist(), links.dst[which].tolist(), times.tolist(), strict=True
    ):
        out = hops.setdefault(src, {})
        out[dst] = min(time, out.get(dst, time))
    return hops


def _distances(hops: dict[int, dict[int, int]], start: int) -> dict[int, int]:
    """Time from `start` to every rank that it reaches (Dijkstra)."""
    done: dict[int, int] = {}
    queue = [(0, start)]
    while queue:
        time, rank = heappop(queue)
        if rank in done:
            continue
        done[rank] = time
        for dst, hop in hops.get(rank, {}).items():
            if dst not in done:
                heappush(queue, (time + hop, dst))
    return done


def _out_of(machine: _Machine, inside: Mask, leaving: Ints) -> Iterator[_Claim]:
    """What only ranks inside have and others want must leave."""
    n, k, size = machine.topology.ranks, machine.partition, int(inside.sum())
    sent = 0 if machine.demand is None else int(machine.demand[inside][:, ~inside].sum()) * k
    chunks = {
        "alltoall": size * (n - size) * k,
        "alltoallv": sent,
        "allreduce": n * k,
        "broadcast": k if inside[machine.root] else 0,
        "scatter": (n - size) * k if inside[machine.root] else 0,
    }[machine.kind]
    if not chunks or size == n:
        return
    name = ranks_text(tuple(int(r) for r in np.flatnonzero(inside)))
    for side in machine.sides:
        time = capacity(machine.priced, leaving, side).least_time(chunks)
        if time < 0:
            raise ValueError(f"no link leads out of {name}: the collective cannot run on this topology")
        cut = Passage(inside, True, chunks, ((leaving, side, 1.0),))
        yield _Claim(_down(time, machine), f"cut out of {name}", cut)


def _traffic(machine: _Machine, which: Ints, crossings: Fraction, what: str) -> Iterator[_Claim]:
    for side in machine.sides:
        time = capacity(machine.priced, which, side).least_time(crossings)
        if time >= 0:
            yield _Claim(_down(time, machine), what, Passage(None, False, crossings, ((which, side, 1.0),)))


def _cuts(machine: _Machine) -> Iterator[Mask]:
    """Single ranks, the ranks of one NIC or port, nodes, halves; on big machines some of them, the weakest too."""
    topology, links = machine.topology, machine.links
    n = topology.ranks
    most = max(4, MOST_LOOKS // max(1, len(links)))
    ranks = _sample(range(n), most, machine.root)
    if n > most:
        ranks = sorted({*ranks, *_weakest(machine, np.arange(n))[:most]})
    yield from (_mask(n, [rank]) for rank in ranks)
    seen = set()
    for nic in _sample(topology.nics, most):
        if 1 < len(nic.ranks) < n and nic.ranks not in seen:
            seen.add(nic.ranks)
            yield _mask(n, nic.ranks)
    if len(topology.nodes) > 1:
        nodes = _sample(range(len(topology.nodes)), most)
        if len(topology.nodes) > most:
            nodes = sorted({*nodes, *_weakest(machine, _node_of(topology))[:most]})
        for node in (topology.nodes[number] for number in nodes):
            if tuple(node) not in seen:
                yield _mask(n, node)
        if len(topology.nodes) > 3:
            half = [rank for node in topology.nodes[: len(topology.nodes) // 2] for rank in node]
            yield _mask(n, half)
    elif n > 3:
        yield _mask(n, range(n // 2))
        for width in _divisors(n):
            if 1 < width < n:
                yield _mask(n, [r for r in range(n) if r % width < width // 2])


def _weakest(machine: _Machine, group_of: Ints) -> list[int]:
    """Groups of ranks by how little their ports together can take in or give out, the weakest first."""
    links, priced = machine.links, machine.priced
    crossing = np.flatnonzero(group_of[links.src] != group_of[links.dst])
    own = np.array([float(hold) for hold in priced.own])[links.link_class[crossing]]
    held = np.array([float(hold) for hold in priced.held])
    groups = int(group_of.max()) + 1
    least = np.full(groups, np.inf)
    for side, end in (("in", links.dst), ("out", links.src)):
        port = priced.ports.get(side, next(iter(priced.ports.values()), np.full(len(links), -1)))[crossing]
        through = port >= 0
        hold = own.copy()
        hold[through] = held[priced.rate[port[through]]]
        _, one = np.unique(np.where(through, port, len(priced.rate) + crossing), return_index=True)
        rate = 1.0 / np.maximum(hold[one], 1e-9)
        least = np.minimum(least, np.bincount(group_of[end[crossing[one]]], rate, groups))
    return [int(group) for group in np.argsort(least, kind="stable")]


def _sample(items: Sequence[_Item], most: int, always: int | None = None) -> list[_Item]:
    if len(items) <= most:
        return list(items)
    places = {int(p) for p in np.linspace(0, len(items) - 1, most)}
    return [items[p] for p in sorted(places | ({always} if always is not None else set()))]


def _mask(n: int, ranks: Sequence[int]) -> Mask:
    inside = np.zeros(n, bool)
    inside[list(ranks)] = True
    return inside


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _node_of(topology: Topology) -> Ints:
    return np.array(topology.node_of(), np.int64)


def _all_distances(machine: _Machine) -> int | None:
    """Sum over all ordered pairs of the fewest links between them; None where that would take too long."""
    links, n = machine.links, machine.topology.ranks
    if n * len(links) > 1 << 33 or not len(links):
        return None
    reached = np.eye(n, dtype=bool)
    frontier, total, step = reached.copy(), 0, 0
    pairs = np.unique(links.src * n + links.dst)
    src, dst = pairs // n, pairs % n
    if len(pairs) == n * (n - 1):
        return n * (n - 1)
    starts = np.searchsorted(dst[np.argsort(dst, kind="stable")], np.arange(n))
    order = np.argsort(dst, kind="stable")
    has_links = np.bincount(dst, minlength=n) > 0
    while frontier.any():
        step += 1
        # Column v of the next frontier: who reaches one of v's predecessors.
        ahead = np.zeros((n, n), bool)
        rows = frontier.T[src[order]]
        ahead[has_links] = np.logical_or.reduceat(rows, starts[has_links], axis=0)
        frontier = ahead.T & ~reached
        reached |= frontier
        total += step * int(frontier.sum())
    if not reached.all():
        raise ValueError(
            "some rank cannot be reached from another: the collective cannot run on this topology"
        )
    return total


def _down(time_fs: int, machine: _Machine) -> int:
    """Fluid times are no whole femtoseconds: the last that is certainly not enough."""
    return max(0, time_fs - 1) if machine.priced.grain == "fluid" else floor(time_fs)


def _worded(name: str, grain: str, reverse: bool) -> str:
    if reverse:
        name = name.replace("into", "out of", 1) if "into" in name else name.replace("out of", "into", 1)
        name = name.replace("received again by", "sent before by")
    words = {"fluid": "", "whole": ", whole chunks", "single": ", one chunk a message"}
    return name + words[grain]
