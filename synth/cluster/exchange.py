"""Every rank's own data to every other of a cluster: one link between nodes for each chunk, and paths within them.

A chunk takes the link between the two nodes that is nearest to both its ends. Where a port would be fuller than those
of its node need be, an even part of its chunks goes over others. In round t every node sends to the t-th after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taccl.synth.cluster.dispatch import Plan
from taccl.synth.cluster.machine import Cluster, Ints
from taccl.synth.cluster.spread import tree_plan, turns
from taccl.synth.cluster.timetable import Timetable, slot_holds

# Ways from each rank to each within a node: chunks take them in turns.
VARIANTS = 4
# Chunks that leave their nearest link, at most.
MOST_MOVES = 100_000
_FAR = 1 << 60


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """Shortest ways within the nodes of a kind."""

    distance: Ints  # [from, to]: fs, _FAR where there is none
    step: Ints  # [variant, from, to] -> position in `Cluster.inside` of the first link, -1 for none


def ways(machine: Cluster, kind: int) -> Ways:
    """Shortest ways by time, on links that are a little dearer the more ways lead over them (Floyd, Warshall)."""
    node = int(np.flatnonzero(machine.kind == kind)[0])
    size, mine = int(machine.sizes[node]), machine.inside[node]
    src, dst = machine.place[machine.links.src[mine]], machine.place[machine.links.dst[mine]]
    transit = machine.lanes.transit_fs(mine)
    used = np.zeros(len(mine), np.int64)
    distance, steps = np.full((size, size), _FAR, np.int64), []
    for _ in range(VARIANTS):
        cost = transit + transit * used // (8 * size)
        far = np.full((size, size), _FAR, np.int64)
        first = np.full((size, size), -1, np.int64)
        for link in np.argsort(-cost, kind="stable").tolist():  # the cheapest of parallel links stays
            far[src[link], dst[link]], first[src[link], dst[link]] = cost[link], link
        np.fill_diagonal(far, 0)
        for via in range(size):
            nearer = far[:, via, None] + far[None, via, :] < far
            far = np.where(nearer, far[:, via, None] + far[None, via, :], far)
            first = np.where(nearer, first[:, via, None], first)
        distance = np.minimum(distance, far)
        steps.append(first)
        # Walk all ways at once to see which links they use.
        here, there = (a.ravel() for a in np.divmod(np.arange(size * size), size))
        walking = (here != there) & (first[here, there] >= 0)
        here, there = here[walking], there[walking]
        while len(here):
            link = first[here, there]
            np.add.at(used, link, 1)
            here = dst[link]
            on = here != there
            here, there = here[on], there[on]
    return Ways(distance, np.array(steps))


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Runs of chunks with one source and one destination that stay together, in the order of rounds."""

    chunk: Ints  # the first of each run
    count: Ints  # how many
    src: Ints
    dst: Ints

    def single(self) -> Traffic:
        """The same with every chunk for itself."""
        several = np.repeat(np.arange(len(self.count)), self.count)
        within = np.arange(len(several)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        one = np.ones(len(several), np.int64)
        return Traffic(self.chunk[several] + within, one, self.src[several], self.dst[several])


def traffic(machine: Cluster, chunk: Ints, count: Ints, src: Ints, dst: Ints) -> Traffic:
    """Runs in rounds: to the next node, then the one after it; within a round to the same place, then the next."""
    nodes, most = machine.nodes, machine.members.shape[1]
    turn = (machine.node_of[dst] - machine.node_of[src]) % nodes
    aside = (machine.place[dst] - machine.place[src]) % most
    part = turns(src * len(machine.node_of) + dst)  # of equal pairs one after the other
    order = np.lexsort((src, aside, turn, part))
    return Traffic(chunk[order], count[order], src[order], dst[order])


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Per chunk of a traffic the link between nodes that it takes (-1: it stays within one), and ways within nodes."""

    gate: Ints
    step: Ints  # [kind, variant, from, to] -> position in `Cluster.inside`


def routes(machine: Cluster, goods: Traffic) -> Routes | None:
    """A way for every chunk; None where a destination cannot be reached."""
    distance, step = _tables(machine)
    apart = machine.node_of[goods.src] != machine.node_of[goods.dst]
    gate = np.full(len(goods.src), -1, np.int64)
    gate[apart] = _nearest(machine, distance, goods.src[apart], goods.dst[apart])
    if len(gate) and bool((gate[apart] < 0).any()):
        return None
    _relieve(machine, distance, goods, gate)
    local = ~apart
    here, there = machine.place[goods.src[local]], machine.place[goods.dst[local]]
    if bool((distance[machine.kind[machine.node_of[goods.src[local]]], here, there] >= _FAR).any()):
        return None
    return Routes(gate, step)


def local_ways(machine: Cluster) -> Ints | None:
    """[kind, variant, from, to] -> position in `Cluster.inside` of the first link of a way within a node; None where
    a node does not hang together."""
    distance, step = _tables(machine)
    for kind in np.unique(machine.kind).tolist():
        size = int(machine.sizes[machine.kind == kind][0])
        if int(distance[kind, :size, :size].max(initial=0)) >= _FAR:
            return None
    return step


def _tables(machine: Cluster) -> tuple[Ints, Ints]:
    """The ways of all kinds side by side: distances and first links."""
    known = {kind: ways(machine, kind) for kind in np.unique(machine.kind).tolist()}
    kinds = sorted(known)
    size = machine.members.shape[1]
    distance = np.full((len(kinds), size, size), _FAR, np.int64)
    step = np.full((len(kinds), VARIANTS, size, size), -1, np.int64)
    for number, kind in enumerate(kinds):
        own = known[kind]
        here = len(own.distance)
        distance[number, :here, :here], step[number, :, :here, :here] = own.distance, own.step
    return distance, step


def _nearest(machine: Cluster, distance: Ints, src: Ints, dst: Ints) -> Ints:
    """Per chunk the link between its nodes from and to the nearest ranks; -1 where none can be reached."""
    links, node_of, place = machine.links, machine.node_of, machine.place
    ranks = len(node_of)
    # A link that joins source and destination is the nearest of all.
    across = machine.gates[machine.gates >= 0]
    pair = links.src[across] * ranks + links.dst[across]
    order = np.argsort(pair, kind="stable")
    wanted = src * ranks + dst
    at = np.minimum(np.searchsorted(pair[order], wanted), len(order) - 1)
    gate = np.where(pair[order][at] == wanted, across[order][at], -1)
    rest = np.flatnonzero(gate < 0)
    most = machine.members.shape[1]
    block = max(1, (1 << 21) // machine.gates.shape[2])
    for first in range(0, len(rest), block):
        some = rest[first : first + block]
        a, b = node_of[src[some]], node_of[dst[some]]
        gates = machine.gates[a, b]
        leaves, comes = links.src[gates], links.dst[gates]
        way = distance[machine.kind[a][:, None], place[src[some]][:, None], place[leaves]]
        way = way + distance[machine.kind[b][:, None], place[comes], place[dst[some]][:, None]]
        # Equal ones: every second turn first to the link, else first over it.
        late = (place[dst[some]] - place[src[some]]) % most % 2 == 0
        other = np.where(late[:, None], leaves != src[some][:, None], comes != dst[some][:, None])
        score = np.where(gates < 0, 2 * _FAR, 2 * way + other)
        best = score.argmin(axis=1)
        found = gates[np.arange(len(some)), best]
        gate[some] = np.where(score[np.arange(len(some)), best] < _FAR, found, -1)
    return gate


def _relieve(machine: Cluster, distance: Ints, goods: Traffic, gate: Ints) -> None:
    """Move an even part of the runs off ports that are fuller than the ports of their node together need be."""
    lanes, links, place = machine.lanes, machine.links, machine.place
    apart = np.flatnonzero(gate >= 0)
    if not len(apart):
        return
    across = machine.gates[machine.gates >= 0]
    slots = np.zeros(lanes.resource.shape, np.int64)
    slots[across] = slot_holds(lanes, across, across)
    alike = bool((goods.count == 1).all())

    def holds(which: Ints, count: Ints | int) -> Ints:
        times = slots[which] if alike else lanes.holds(which, count)
        return np.where(lanes.resource[which] == lanes.none, 0, times)

    load = np.zeros(lanes.none + 1, np.int64)
    np.add.at(load, lanes.resource[gate[apart]], holds(gate[apart], goods.count[apart]))
    target = _least_load(machine, load, holds(across, round(float(goods.count[apart].mean()))))
    moves = 0
    for resource in np.argsort(-load, kind="stable").tolist():
        excess = int(load[resource]) - target
        if excess <= 0:
            return
        users = np.flatnonzero((lanes.resource[gate[apart]] == resource).any(axis=1))
        if len(users) < 2:
            continue
        many = min(len(users), -(-excess * len(users) // int(load[resource])))
        for number in users[(np.arange(many) * len(users)) // many].tolist():
            row = int(apart[number])
            src, dst, count = int(goods.src[row]), int(goods.dst[row]), int(goods.count[row])
            a, b = int(machine.node_of[src]), int(machine.node_of[dst])
            others = machine.gates[a, b]
            others = others[others >= 0]
            way = distance[machine.kind[a], place[src], place[links.src[others]]]
            way = way + distance[machine.kind[b], place[links.dst[others]], place[dst]]
            after = np.where(
                lanes.resource[others] == lanes.none, 0, load[lanes.resource[others]] + holds(others, count)
            )
            fullest = np.maximum(after.max(axis=1), target)
            best = int(np.lexsort((after.sum(axis=1), way, fullest))[0])
            if fullest[best] >= load[resource] or way[best] >= _FAR:
                continue
            old, new = gate[row : row + 1], others[best : best + 1]
            load[lanes.resource[old[0]]] -= holds(old, count)[0]
            load[lanes.resource[new[0]]] += holds(new, count)[0]
            gate[row] = new[0]
            moves += 1
            if load[resource] <= target:
                break
        if moves > MOST_MOVES:
            return


def _least_load(machine: Cluster, load: Ints, holds: Ints) -> int:
    """What the fullest port between nodes carries if in every node all share as evenly as can be.

    load: per resource, as it is; holds: of each link between nodes, for a message as long as most.
    """
    lanes = machine.lanes
    across = machine.gates[machine.gates >= 0]
    resource = lanes.resource[across]
    rows, last = np.arange(len(across)), (resource != lanes.none).sum(axis=1) - 1
    worst = 0.0
    for end, column in ((machine.links.src, np.zeros(len(across), np.int64)), (machine.links.dst, last)):
        at, where = np.unique(resource[rows, column], return_index=True)
        rate = 1.0 / np.maximum(1, holds[where, column[where]])
        node = machine.node_of[end[across[where]]]
        amount = np.bincount(node, load[at] * rate, machine.nodes)
        worst = max(worst, float((amount / np.bincount(node, rate, machine.nodes)).max(initial=0)))
    return int(worst)


def exchange(machine: Cluster, goods: Traffic, along: Routes, when: Timetable) -> Plan:
    """Messages that bring every chunk to the link between nodes, over it at its time, and on.

    when: for the chunks that leave their node, in their order.
    """
    gate, step = along.gate, along.step
    lanes, links, count = machine.lanes, machine.links, len(gate)
    inside = np.full((machine.nodes, max(1, *(len(mine) for mine in machine.inside))), -1, np.int64)
    for number, mine in enumerate(machine.inside):
        inside[number, : len(mine)] = mine
    apart = np.flatnonzero(gate >= 0)
    crosses = np.zeros(count, np.int64)
    starts = when.due_fs
    crosses[apart] = starts
    # What stays within a node fills what is left, evenly.
    local = np.flatnonzero(gate < 0)
    crosses[local] = np.arange(len(local)) * int(starts.max(initial=0)) // max(1, len(local))
    parts: list[tuple[NDArray[np.generic], ...]] = []  # link, run, need, due, release, booked
    last = np.full(count, -1, np.int64)  # the message that brought a chunk where it is
    total = 0
    variant = (goods.src + goods.dst) % VARIANTS

    def walk(rows: Ints, here: Ints, there: Ints, due: Ints) -> None:
        nonlocal total
        while len(rows):
            on = here != there
            rows, here, there, due = rows[on], here[on], there[on], due[on]
            if not len(rows):
                return
            node = machine.node_of[here]
            first = step[machine.kind[node], variant[rows], machine.place[here], machine.place[there]]
            link = inside[node, first]
            nothing = np.zeros(len(rows), np.int64)
            parts.append((link, rows, last[rows], due, nothing, nothing > 0))
            last[rows] = total + np.arange(len(rows))
            total += len(rows)
            here, due = links.dst[link], due + lanes.transit_fs(link, goods.count[rows])

    leaves = np.where(gate >= 0, links.src[gate], goods.dst)
    walk(
        np.arange(count),
        goods.src,
        leaves,
        np.maximum(0, crosses - int(lanes.transit_fs(gate, goods.count).max())),
    )
    parts.append((gate[apart], apart, last[apart], starts, when.release_fs, when.booked))
    last[apart] = total + np.arange(len(apart))
    total += len(apart)
    walk(
        apart,
        links.dst[gate[apart]],
        goods.dst[apart],
        starts + lanes.transit_fs(gate[apart], goods.count[apart]),
    )
    link, run, need, due, release, booked = (np.concatenate([part[i] for part in parts]) for i in range(6))
    return tree_plan(link, goods.chunk[run], need, due, release, booked, goods.count[run])
