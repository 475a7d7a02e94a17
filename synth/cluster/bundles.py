"""Few long messages instead of many short ones, where a message costs more than its bytes.

Ranks at one place of all nodes make a lane. Data go along lanes from node to node in powers of a radix (Bruck et al.,
"Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997; any number of nodes),
and within nodes all that is ready in one message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from taccl.synth.cluster.dispatch import Plan
from taccl.synth.cluster.exchange import Traffic, local_ways
from taccl.synth.cluster.machine import Cluster, Ints
from taccl.synth.cluster.trees import node_trees
from taccl.synth.symmetric.expand import link_lookup


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Chunks over links: row i needs row need[i] before (-1: nothing); rows of one group and link are one message."""

    link: Ints
    chunk: Ints
    need: Ints
    group: Ints


def bundled_spread(machine: Cluster, home: Ints, early: bool) -> Plan | None:
    """Every chunk to every rank: doubling along lanes, then within nodes; None where links for that are missing.

    early: what has come to a node goes on at once, instead of all together at the end.
    """
    nodes, node, lane = machine.nodes, machine.node_of[home], machine.place[home]
    trees = {}
    for kind in np.unique(machine.kind).tolist():
        grown = node_trees(machine, kind, 0, True)
        if grown is None:
            return None
        trees[kind] = grown
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []
    total = 0
    reached = np.full((len(home), nodes), -1, np.int64)  # row that brings a chunk to its lane in a node
    came = np.zeros((len(home), nodes), np.int64)  # in which round
    rounds, step = 0, 1
    chunks = np.arange(len(home))
    while step < nodes:
        rounds += 1
        offset = np.arange(min(step, nodes - step))
        chunk = np.repeat(chunks, len(offset))
        sender = (node[chunk] + np.tile(offset, len(home))) % nodes
        receiver = (sender + step) % nodes
        link = _lane_links(machine, sender, receiver, lane[chunk])
        if link is None:
            return None
        parts.append((link, chunk, reached[chunk, sender], np.full(len(chunk), rounds)))
        reached[chunk, receiver] = total + np.arange(len(chunk))
        came[chunk, receiver] = rounds
        total += len(chunk)
        step *= 2
    depth = int(machine.members.shape[1])
    for kind, grown in trees.items():
        of_kind = np.flatnonzero(machine.kind == kind)
        inside = np.stack([machine.inside[n] for n in of_kind.tolist()])
        size = int(machine.sizes[of_kind[0]])
        for root, some in enumerate(grown):
            mine = np.flatnonzero(lane % size == root)
            tree = some[0]
            chunk, where = (a.ravel() for a in np.meshgrid(mine, np.arange(len(of_kind)), indexing="ij"))
            since = reached[chunk, of_kind[where]]
            level = np.zeros(len(tree.link), np.int64)
            # Rows of a chunk in a node stand one hop after the other.
            base = total + np.arange(len(chunk)) * len(tree.link)
            links, needs, groups = [], [], []
            for hop, (position, parent) in enumerate(
                zip(tree.link.tolist(), tree.parent.tolist(), strict=True)
            ):
                level[hop] = 1 + (level[parent] if parent >= 0 else 0)
                links.append(inside[where, position])
                needs.append(since if parent < 0 else base + parent)
                when = came[chunk, of_kind[where]] if early else np.full(len(chunk), rounds)
                groups.append(rounds + 1 + when * depth + level[hop])
            if not links:
                continue
            link, need, group = (np.stack(column, axis=1).ravel() for column in (links, needs, groups))
            parts.append((link, np.repeat(chunk, len(tree.link)), need, group))
            total += len(link)
    link, chunk, need, group = (np.concatenate([part[i] for part in parts]) for i in range(4))
    if early:
        # In the order in which things happen: round r, then what came in it.
        crossing = group <= rounds
        group = np.where(
            crossing,
            group * (depth + 2),
            (group - rounds - 1) // depth * (depth + 2) + 1 + (group - rounds - 1) % depth,
        )
    return _bundled(_Rows(link, chunk, need, group))


def bundled_exchange(machine: Cluster, goods: Traffic, radix: int) -> Plan | None:
    """Every run to its destination: within the node to the lane, then along the lane digit by digit of the distance;
    None where links for that are missing."""
    goods = goods.single()
    nodes, ranks = machine.nodes, len(machine.node_of)
    lane = machine.place[goods.dst]
    node = machine.node_of[goods.src]
    step = local_ways(machine)
    if step is None:
        return None
    inside = np.full((nodes, max(1, *(len(mine) for mine in machine.inside))), -1, np.int64)
    for number, mine in enumerate(machine.inside):
        inside[number, : len(mine)] = mine
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []
    last = np.full(len(goods.chunk), -1, np.int64)
    total = group = 0
    here, there = goods.src.copy(), machine.members[node, lane % machine.sizes[node]]
    while True:
        rows = np.flatnonzero(here != there)
        if not len(rows):
            break
        way = step[machine.kind[node[rows]], 0, machine.place[here[rows]], machine.place[there[rows]]]
        link = inside[node[rows], way]
        parts.append((link, goods.chunk[rows], last[rows], np.full(len(rows), group)))
        last[rows] = total + np.arange(len(rows))
        total += len(rows)
        here[rows] = machine.links.dst[link]
        group += 1
    left = (machine.node_of[goods.dst] - node) % nodes
    weight = 1
    at = node.copy()
    while weight < nodes:
        digit = left // weight % radix
        for value in range(1, radix):
            rows = np.flatnonzero(digit == value)
            if not len(rows):
                continue
            receiver = (at[rows] + value * weight) % nodes
            link = _lane_links(machine, at[rows], receiver, lane[rows])
            if link is None:
                return None
            parts.append((link, goods.chunk[rows], last[rows], np.full(len(rows), group)))
            last[rows] = total + np.arange(len(rows))
            total += len(rows)
            at[rows] = receiver
            group += 1
        weight *= radix
    assert ranks == len(machine.place)
    link, chunk, need, groups = (np.concatenate([part[i] for part in parts]) for i in range(4))
    return _bundled(_Rows(link, chunk, need, groups))


def _lane_links(machine: Cluster, sender: Ints, receiver: Ints, lane: Ints) -> Ints | None:
    """The links between ranks of a lane in two nodes; None where one is missing."""
    src = machine.members[sender, lane % machine.sizes[sender]]
    dst = machine.members[receiver, lane % machine.sizes[receiver]]
    ranks = len(machine.node_of)
    pair, where = np.unique(src * ranks + dst, return_inverse=True)
    lookup = link_lookup(machine.links, ranks)
    found = lookup.find(pair // ranks, pair % ranks, np.zeros(len(pair), np.int64))
    return None if len(found) and int(found.min()) < 0 else found[where]


def _bundled(rows: _Rows) -> Plan:
    """Messages of rows, by group and link; rows of one message need messages of earlier groups only."""
    span = int(rows.link.max(initial=0)) + 1
    _, message = np.unique(rows.group * span + rows.link, return_inverse=True)
    count = int(message.max(initial=-1)) + 1
    order = np.lexsort((rows.chunk, message))
    first = np.concatenate([[0], np.cumsum(np.bincount(message, minlength=count))])
    link = np.empty(count, np.int64)
    link[message] = rows.link
    waits = np.flatnonzero(rows.need >= 0)
    pairs = np.unique(message[rows.need[waits]] * count + message[waits])
    return Plan(
        link,
        np.zeros(count, bool),
        first,
        rows.chunk[order],
        pairs // count,
        pairs % count,
        np.zeros(count, np.int64),
        np.zeros(count, bool),
    )
