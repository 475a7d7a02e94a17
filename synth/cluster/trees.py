"""Trees within a node: how what has entered at one rank reaches the others; found once for each kind of node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from taccl.synth.cluster.machine import Cluster, Ints

# Trees from each rank of a node: what enters there takes them in turns.
TREES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Hops of a tree that spans a node, each after the one that feeds it."""

    link: Ints  # positions in `Cluster.inside`
    parent: Ints  # the hop that it waits for, -1: it starts at the root
    target: Ints  # place of the rank that it reaches
    arrival_fs: Ints  # since the root has it


def node_trees(machine: Cluster, kind: int, entering_fs: int, direct: bool) -> list[list[Tree]] | None:
    """[place][number]: trees from each rank of a node of a kind, where chunks enter at such distances.

    direct: the root itself sends to all that it has a link to, the next place first, so that ranks of a node that send
    at once do not meet. Else trees are grown one after the other by earliest arrival on ports that are busy with those
    before, and that are the dearer the more they carry, so that together they load them evenly. None where a rank
    cannot be reached from another.
    """
    node = int(np.flatnonzero(machine.kind == kind)[0])
    size, mine = int(machine.sizes[node]), machine.inside[node]
    lanes, links = machine.lanes, machine.links
    src, dst = machine.place[links.src[mine]], machine.place[links.dst[mine]]
    used, resource = np.unique(lanes.resource[mine], return_inverse=True)
    resource = resource.reshape(len(mine), lanes.resource.shape[1])
    ignored = np.flatnonzero(used == lanes.none)
    holds, transit = lanes.holds(mine), lanes.transit_fs(mine)
    free, load = np.zeros((2, len(used)), np.int64)
    found: list[list[Tree]] = [[] for _ in range(size)]
    for number in range((1 if direct else TREES) * size):
        root, now = number % size, number * entering_fs
        arrival = np.full(size, -1, np.int64)
        arrival[root] = now
        reached_by = np.full(size, -1, np.int64)
        hops: list[tuple[int, int]] = []
        for _ in range(size - 1):
            open_ = np.flatnonzero((arrival[src] >= 0) & (arrival[dst] < 0))
            if not len(open_):
                return None
            start = np.maximum(arrival[src[open_]], free[resource[open_]].max(axis=1))
            score = start + transit[open_] + load[resource[open_]].max(axis=1)
            if direct:
                score = np.where(src[open_] == root, (dst[open_] - root) % size - size, score)
            best = int(open_[np.argmin(score)])
            begin = max(int(arrival[src[best]]), int(free[resource[best]].max()))
            free[resource[best]] = begin + holds[best]
            load[resource[best]] += holds[best]
            free[ignored] = load[ignored] = 0
            arrival[dst[best]] = begin + transit[best]
            reached_by[dst[best]] = len(hops)
            hops.append((best, int(reached_by[src[best]])))
        link = np.array([hop[0] for hop in hops], np.int64)
        found[root].append(
            Tree(link, np.array([hop[1] for hop in hops], np.int64), dst[link], arrival[dst[link]] - now)
        )
    return found
