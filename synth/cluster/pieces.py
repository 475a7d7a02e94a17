"""Allgathers between nodes in messages of chosen lengths, where alphas and bytes cost about the same.

A block is cut into many small chunks. Which of them travel together is decided here: a *piece* is a run of chunks of
one block that never part. Between each two nodes the chunks are dealt out to links so that ports fill evenly, in
proportion to their rates; a rank's own block goes over its own links first, and what is too much for them over those
of its neighbours, which have it from the exchange within the node. In the last round between nodes a link's chunks go
in several messages, each shorter than the one before, so that little is left to be spread when the last has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from taccl.synth.cluster.machine import Cluster, Ints, Lanes
from taccl.synth.cluster.trees import Tree, node_trees

# What a rank without a link to another is sent over others comes in parts so many times as long as their fixed cost.
PART = 3

Run = tuple[int, int, int]  # a rank, the first of some chunks of its block, the one behind the last


@dataclass(frozen=True, slots=True)
class Hop:
    """One message: chunks over a link (chunk j of rank r is r times chunks a block plus j); about when it starts."""

    link: int
    chunks: tuple[int, ...]
    due_fs: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """One message between nodes."""

    link: int
    runs: tuple[Run, ...]
    due_fs: int


def shares(machine: Cluster, chunks: int, own_first: bool) -> dict[int, int]:
    """How many chunks each link between nodes carries, if every node sends `chunks` of each rank to each other node.

    First over the links between equal places, in proportion to their rates; then chunks leave the fullest port as long
    as other links between the same nodes stay emptier with them. A link that carries nothing yet costs a message more.
    own_first: in the first round, when ranks do not have the blocks of others yet, rates are not looked at.
    """
    lanes, links, nodes = machine.lanes, machine.links, machine.nodes
    across = machine.gates[machine.gates >= 0]
    holds = np.where(lanes.resource == lanes.none, 0, lanes.per_chunk_fs)
    taken = np.zeros(len(links), np.int64)
    load = np.zeros(lanes.none + 1, np.int64)
    for here in range(nodes):
        for there in range(nodes):
            gates = machine.gates[here, there]
            gates = gates[gates >= 0]
            even = gates[machine.place[links.src[gates]] == machine.place[links.dst[gates]]]
            if here == there or not len(gates):
                continue
            if not len(even):
                even = gates
            rate = 1.0 / np.maximum(1, holds[even].max(axis=1))
            if own_first and (there - here) % nodes == 1:
                rate = np.ones(len(even))
            bounds = np.rint(np.cumsum(rate) / rate.sum() * int(machine.sizes[here]) * chunks).astype(
                np.int64
            )
            taken[even] = np.diff(bounds, prepend=0)
    np.add.at(load, lanes.resource[across], _load(lanes, holds, across, taken[across]))
    for _ in range(int(taken.sum())):
        load[lanes.none] = 0
        fullest = int(load.argmax())
        best: tuple[int, ...] | None = None
        for e in across[(lanes.resource[across] == fullest).any(axis=1) & (taken[across] > 0)].tolist():
            gates = machine.gates[int(machine.node_of[links.src[e]]), int(machine.node_of[links.dst[e]])]
            gates = gates[(gates >= 0) & (gates != e)]
            if not len(gates):
                continue
            one = holds[gates] + np.where(taken[gates] > 0, 0, lanes.occupancy_fs[gates])[:, None]
            after = load[lanes.resource[gates]] + np.where(lanes.resource[gates] == lanes.none, 0, one)
            # What holds a port that the chunk holds now is not held twice.
            same = (lanes.resource[gates][:, :, None] == lanes.resource[e][None, None, :]).any(axis=2)
            after -= np.where(same, one, 0)
            peak = np.where((lanes.resource[gates] == fullest).any(axis=1), load[fullest], after.max(axis=1))
            i = int(np.lexsort((after.sum(axis=1), peak))[0])
            round_ = int(machine.node_of[links.dst[e]] - machine.node_of[links.src[e]]) % nodes
            entry = (int(peak[i]), -round_, int(after[i].sum()), e, int(gates[i]))
            if best is None or entry < best:
                best = entry
        if best is None or best[0] >= load[fullest]:
            break
        for e, step in ((best[3], -1), (best[4], 1)):
            load[lanes.resource[e]] -= _load(lanes, holds, np.array([e]), taken[e : e + 1])[0]
            taken[e] += step
            load[lanes.resource[e]] += _load(lanes, holds, np.array([e]), taken[e : e + 1])[0]
    return {int(e): int(taken[e]) for e in np.flatnonzero(taken)}


def _load(lanes: Lanes, holds: Ints, links: Ints, count: Ints) -> Ints:
    there = (lanes.resource[links] != lanes.none) & (count > 0)[:, None]
    times: Ints = np.where(there, lanes.occupancy_fs[links][:, None] + count[:, None] * holds[links], 0)
    return times


def contents(machine: Cluster, chunks: int, share: dict[int, int]) -> dict[int, list[Run]]:
    """Per link between nodes the runs that it carries, those of its own rank first."""
    links = machine.links
    found: dict[int, list[Run]] = {e: [] for e in share}
    pairs: dict[tuple[int, int], list[int]] = {}
    for e in share:
        pairs.setdefault((int(machine.node_of[links.src[e]]), int(machine.node_of[links.dst[e]])), []).append(
            e
        )
    for (here, _), gates in sorted(pairs.items()):
        gone = {int(r): 0 for r in machine.members[here] if r >= 0}
        spare = {}
        for e in gates:
            own = int(links.src[e])
            many = min(share[e], chunks - gone[own])
            if many:
                found[e].append((own, gone[own], gone[own] + many))
            gone[own] += many
            spare[e] = share[e] - many
        for home, first in gone.items():
            while first < chunks:
                # What is left of a block goes in as few parts as will do, to links with most room.
                e = max(spare, key=lambda e: (spare[e], -e))
                many = min(spare[e], chunks - first)
                found[e].append((home, first, first + many))
                spare[e] -= many
                first += many
    return found


def crossings(
    machine: Cluster, carried: dict[int, list[Run]], profiles: Sequence[Sequence[int]], entered: int
) -> list[Crossing]:
    """Messages between nodes, round after round.

    profiles: per round how a link's chunks are cut into messages, as proportions. entered: how much later than at once
    a rank has the blocks of its node, in fs.
    """
    lanes, links, nodes = machine.lanes, machine.links, machine.nodes
    free = np.zeros(lanes.none + 1, np.int64)
    found = []
    for shift in range(1, nodes):
        of_round = sorted(
            e for e in carried
            if (machine.node_of[links.dst[e]] - machine.node_of[links.src[e]]) % nodes == shift
        )  # fmt: skip
        parts: list[tuple[int, int, tuple[Run, ...]]] = []
        for e in of_round:
            total = sum(last - first for _, first, last in carried[e])
            for number, some in enumerate(_cut(carried[e], _lengths(total, profiles[shift - 1]))):
                own = tuple(run for run in some if run[0] == int(links.src[e]))
                others = tuple(run for run in some if run[0] != int(links.src[e]))
                if shift == 1 and nodes > 2 and own and others:
                    parts += [(number, e, own), (number, e, others)]  # others would have to be waited for
                else:
                    parts.append((number, e, some))
        for _, e, some in sorted(parts, key=lambda part: part[0]):
            count = sum(last - first for _, first, last in some)
            held = lanes.resource[e]
            ready = 0 if all(run[0] == int(links.src[e]) for run in some) else entered
            start = max(ready, int(free[held[held != lanes.none]].max(initial=0)))
            free[held] = start + lanes.holds(np.array([e]), count)[0]
            free[lanes.none] = 0
            found.append(Crossing(e, some, start))
    return found


def _lengths(total: int, profile: Sequence[int]) -> list[int]:
    """Whole numbers of the profile's proportions; those of small totals are fewer."""
    bounds = [0]
    behind = 0
    for part in profile:
        behind += part
        bounds.append(round(total * behind / sum(profile)))
    return [b - a for a, b in pairwise(bounds) if b > a]


def _cut(runs: Sequence[Run], lengths: Sequence[int]) -> list[tuple[Run, ...]]:
    left = list(runs)
    found = []
    for length in lengths:
        some: list[Run] = []
        while length:
            home, first, last = left.pop(0)
            many = min(length, last - first)
            some.append((home, first, first + many))
            length -= many
            if first + many < last:
                left.insert(0, (home, first + many, last))
        found.append(tuple(some))
    return found


def plan(
    machine: Cluster,
    chunks: int,
    carried: dict[int, list[Run]],
    profiles: Sequence[Sequence[int]],
    direct: bool,
) -> list[Hop] | None:
    """All messages of an allgather with `chunks` chunks a block, in the order of their dues; None where a node does not
    hang together. direct: within nodes every rank sends itself to all that it has links to."""
    links, lanes = machine.links, machine.lanes
    ranks = len(machine.node_of)
    trees: dict[int, list[list[Tree]]] = {}
    for kind in np.unique(machine.kind).tolist():
        grown = node_trees(machine, kind, 0, direct)
        if grown is None:
            return None
        trees[kind] = grown
    inside = np.concatenate(machine.inside)
    local = int(lanes.transit_fs(inside, chunks).max(initial=0)) * int(machine.sizes.max() - 1)
    between = {(int(links.src[e]), int(links.dst[e])): int(e) for e in inside[::-1]}
    hops: list[Hop] = []
    turn = [0] * ranks
    relayed = [0] * ranks

    def spread(root: int, some: tuple[int, ...], since: int) -> None:
        node = int(machine.node_of[root])
        grown = trees[int(machine.kind[node])][int(machine.place[root])]
        tree = grown[turn[root] % len(grown)]
        turn[root] += 1
        free = {root: since}
        slot = int(lanes.transit_fs(machine.inside[node][tree.link], len(some)).max(initial=0))
        for e in machine.inside[node][tree.link].tolist():
            src, dst = int(links.src[e]), int(links.dst[e])
            due = free[src]
            if direct and src != root:
                # Who has no link to the root gets a part from each of several others, those that had least to relay.
                ways = [w for w in range(ranks) if (root, w) in between and (w, dst) in between]
                ways = sorted(ways, key=lambda w: (relayed[w], (w - root) % ranks))
                enough = max(
                    1, round(int(lanes.chunk_fs[e]) * len(some) / max(1, PART * int(lanes.occupancy_fs[e])))
                )
                ways = ways[: min(enough, len(some))]
                for i, way in enumerate(ways):
                    part = some[i * len(some) // len(ways) : (i + 1) * len(some) // len(ways)]
                    hops.append(Hop(between[way, dst], part, since + slot * len(tree.link)))
                    relayed[way] += len(part)
                if ways:
                    free[dst] = since + slot * (len(tree.link) + 2)
                    continue
            free[src] += slot
            free[dst] = due + int(lanes.transit_fs(np.array([e]), len(some))[0])
            hops.append(Hop(e, some, due))

    for rank in range(ranks):
        spread(rank, tuple(range(rank * chunks, (rank + 1) * chunks)), 0)
    for crossing in crossings(machine, carried, profiles, local):
        some = tuple(sorted(r * chunks + j for r, first, last in crossing.runs for j in range(first, last)))
        hops.append(Hop(crossing.link, some, crossing.due_fs))
        arrival = crossing.due_fs + int(lanes.transit_fs(np.array([crossing.link]), len(some))[0])
        spread(int(links.dst[crossing.link]), some, arrival)
    hops.sort(key=lambda hop: hop.due_fs)
    return hops
