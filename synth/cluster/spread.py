"""Every chunk to every rank of a cluster: over one link into each node, then along a tree within it.

Links into nodes are taken in rounds: in round t every node sends to the t-th after it, so that no two of a round meet
at a node, and what each takes is the link whose fullest port is then emptiest. Slow NICs get less, in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taccl.synth.cluster.dispatch import Plan
from taccl.synth.cluster.machine import Cluster, Ints
from taccl.synth.cluster.timetable import Timetable, slot_holds
from taccl.synth.cluster.trees import Tree, node_trees

# How much dearer a link from another rank is than one from the rank that has the chunk, in messages: the other must get
# it first. In the last rounds only loads count.
ELSEWHERE = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Chunks that enter nodes: row i is a chunk over a link, in the order of rounds."""

    chunk: Ints
    link: Ints


def entries(machine: Cluster, home: Ints) -> Entries:
    """A link into every other node for each chunk; home: per chunk the rank that has it."""
    lanes, links = machine.lanes, machine.links
    node = machine.node_of[home]
    count = np.bincount(node, minlength=machine.nodes)
    # Per node its chunks, one rank after the other, so that what is sent in one round comes from all of them.
    turn = turns(home)
    order = np.lexsort((machine.place[home], turn, node))
    first = np.concatenate([[0], np.cumsum(count)])
    load = np.zeros(lanes.none + 1, np.int64)
    across = machine.gates[machine.gates >= 0]
    slots = np.zeros((len(links), lanes.resource.shape[1]), np.int64)
    slots[across] = slot_holds(lanes, across, across)
    found: list[tuple[Ints, Ints]] = []
    nodes = np.arange(machine.nodes)
    for shift in range(1, machine.nodes):
        for number in range(int(count.max())):
            here = nodes[count > number]
            there = (here + shift) % machine.nodes
            chunk = order[first[here] + number]
            gate = machine.gates[here, there]
            held = lanes.resource[gate]
            hold = slots[gate]
            after = load[held] + hold
            score = 1.0 * (after.max(axis=2) + after.sum(axis=2))
            dearer = ELSEWHERE * (machine.nodes - shift) / machine.nodes
            score += dearer * hold.max(axis=2) * (links.src[gate] != home[chunk][:, None])
            score[gate < 0] = np.inf
            best = score.argmin(axis=1)
            rows = np.arange(len(here))
            np.add.at(load, held[rows, best], hold[rows, best])
            load[lanes.none] = 0
            found.append((chunk, gate[rows, best]))
    chunk, link = (np.concatenate([part[i] for part in found]) for i in range(2))
    return Entries(chunk, link)


def turns(of: Ints) -> Ints:
    """Per entry how many equal ones stand before it."""
    order = np.argsort(of, kind="stable")
    new = np.flatnonzero(np.diff(of[order], prepend=-1))
    turn = np.empty(len(of), np.int64)
    turn[order] = np.arange(len(of)) - np.repeat(new, np.diff(np.append(new, len(of))))
    return turn


def spread(machine: Cluster, home: Ints, entering: Entries, when: Timetable, direct: bool) -> Plan | None:
    """Messages that bring every chunk to every rank; None where a node does not hang together.

    direct: within nodes the rank at which a chunk enters sends it to all others.
    """
    nodes, ranks = machine.nodes, len(machine.node_of)
    # A node must keep up with what enters it.
    busy = int(when.due_fs.max(initial=0))
    trees: dict[int, list[list[Tree]]] = {}
    for kind in np.unique(machine.kind).tolist():
        grown = node_trees(machine, kind, busy // max(1, len(home)), direct)
        if grown is None:
            return None
        trees[kind] = grown
    links = machine.links
    # Where chunks are first in a node, and which message brought them there: -1 for those that begin there.
    across = len(entering.chunk)
    chunk = np.concatenate([np.arange(len(home)), entering.chunk])
    gate = np.concatenate([home, links.dst[entering.link]])
    brought_by = np.concatenate([np.full(len(home), -1), np.arange(across)])
    transit = machine.lanes.transit_fs(entering.link)
    since = np.concatenate([np.zeros(len(home), np.int64), when.due_fs + transit])
    place, node = machine.place[gate], machine.node_of[gate]
    # The trees of a rank take turns.
    turn = turns(gate)
    reached = np.full((len(home), ranks), -1, np.int64)  # the message that brings a chunk to a rank
    reached[entering.chunk, links.dst[entering.link]] = np.arange(across)
    inside = np.full((nodes, max(1, *(len(mine) for mine in machine.inside))), -1, np.int64)
    for number, mine in enumerate(machine.inside):
        inside[number, : len(mine)] = mine
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []  # link, chunk, the message that is needed, due
    total = across
    for kind, grown in trees.items():
        of_kind = machine.kind[node] == kind
        for root, some in enumerate(grown):
            for number, tree in enumerate(some):
                rows = np.flatnonzero(of_kind & (place == root) & (turn % len(some) == number))
                hops = len(tree.link)
                if not len(rows) or not hops:
                    continue
                link = inside[node[rows]][:, tree.link]
                message = total + np.arange(len(rows) * hops).reshape(len(rows), hops)
                need = np.where(tree.parent >= 0, message[:, tree.parent], brought_by[rows][:, None])
                due = since[rows][:, None] + tree.arrival_fs
                reached[chunk[rows][:, None], links.dst[link]] = message
                carried = np.broadcast_to(chunk[rows][:, None], link.shape)
                parts.append((link.ravel(), carried.ravel(), need.ravel(), due.ravel()))
                total += link.size
    # What enters another node from another rank than its own must have come there within its node.
    sent_by = reached[entering.chunk, links.src[entering.link]]
    columns = [(entering.link, entering.chunk, sent_by, when.due_fs), *parts]
    link, carried, need, due = (np.concatenate([part[i] for part in columns]) for i in range(4))
    rest = total - across
    release = np.concatenate([when.release_fs, np.zeros(rest, np.int64)])
    booked = np.concatenate([when.booked, np.zeros(rest, bool)])
    return tree_plan(link, carried, need, due, release, booked)


def tree_plan(
    link: Ints,
    chunk: Ints,
    need: Ints,
    due: Ints,
    release: Ints,
    booked: NDArray[np.bool_],
    chunks: Ints | int = 1,
) -> Plan:
    """Messages in the order of their dues, each with so many chunks from `chunk` on.

    need: the message that each waits for, -1: none.
    """
    due = _after_needs(need, due)
    order = np.lexsort((np.arange(len(link)), due))
    rank = np.empty(len(link), np.int64)
    rank[order] = np.arange(len(link))
    after = np.flatnonzero(need[order] >= 0)
    before = rank[need[order][after]]
    width = np.broadcast_to(chunks, len(link))[order]
    first = np.concatenate([[0], np.cumsum(width)])
    carried = np.repeat(chunk[order] - first[:-1], width) + np.arange(int(first[-1]))
    return Plan(
        link[order], np.zeros(len(link), bool), first, carried, before, after, release[order], booked[order]
    )


def _after_needs(need: Ints, due: Ints) -> Ints:
    """Dues, later where a message would otherwise be due before the one that it needs."""
    waits = np.flatnonzero(need >= 0)
    due = due.copy()
    while True:
        late = waits[due[waits] <= due[need[waits]]]
        if not len(late):
            return due
        due[late] = due[need[late]] + 1


def reversed_plan(plan: Plan, start_fs: Ints, end_fs: Ints) -> Plan:
    """The plan walked backwards, last arrival first: what spreads on links turned round collects on the links."""
    count, last = len(plan), int(end_fs.max(initial=0))
    order = np.lexsort((-np.arange(count), -start_fs, -end_fs))
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    width = np.diff(plan.first)[order]
    first = np.concatenate([[0], np.cumsum(width)])
    within = np.arange(int(first[-1])) - np.repeat(first[:-1], width)
    return Plan(
        plan.link[order],
        np.ones(count, bool),
        first,
        plan.chunks[np.repeat(plan.first[:-1][order], width) + within],
        rank[plan.after],
        rank[plan.before],
        last - end_fs[order],
        np.zeros(count, bool),
    )
