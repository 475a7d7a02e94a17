"""Greedy trees: whoever can be served soonest is served next (in the manner of TACOS, MICRO'24).

Chunks wanted by several ranks grow one hop at a time by earliest arrival under the load committed so far; a
chunk with a single destination takes its whole earliest-arrival path at once. Several passes differ in how
much they fear slow links and whether a chunk may enter a node twice; the scheduler decides which is best.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from taccl.profiles.topology import reverse
from taccl.synth.problem import Problem, Symmetry, unreachable
from taccl.synth.schedule import Transfer


@dataclass(frozen=True, slots=True)
class Taste:
    """What one pass prefers."""

    weight: float  # how much the transit of a hop counts against its arrival
    enter_once: bool  # a chunk enters each other node at most once
    seed: int  # 0: ties go to the lower chunk and link; else they are shuffled


def tastes(count: int, seed: int) -> Iterator[Taste]:
    """Different passes, best guesses first; deterministic."""
    shuffle = random.Random(seed)
    fixed = [Taste(1.0, True, 0), Taste(1.0, False, 0), Taste(2.0, True, 0)]
    for index in range(count):
        if index < len(fixed):
            yield fixed[index]
        else:
            yield Taste(shuffle.choice((0.5, 1.0, 1.0, 2.0)), index % 4 != 0, shuffle.randrange(1, 1 << 30))


def greedy(problem: Problem, taste: Taste, group: Sequence[Symmetry] = ()) -> list[Transfer] | None:
    """Transfers of all layers in order, or None when this pass ran into a dead end.

    group: all elements (identity first) of a symmetry group; with it, every decision is taken for all images
    at once, so that the result is a good start for a symmetric model.
    """
    transfers: list[Transfer] = []
    for number, layer in enumerate(problem.layers):
        if layer.kind == "spread":
            grown = _spread(problem, number, taste, group)
            if grown is None:
                return None
            transfers += grown
        else:
            # Collecting is spreading backwards in time on the turned links.
            turned = replace(
                problem, topology=reverse(problem.topology), layers=(replace(layer, kind="spread"),)
            )
            grown = _spread(turned, 0, taste, group)
            if grown is None:
                return None
            transfers += [Transfer(t.link, t.chunks, "reduce") for t in reversed(grown)]
    return transfers


def funnelled(problem: Problem) -> Problem | None:
    """The problem with one link per pair of NICs between two nodes, that of the most central ranks.

    What then crosses the network goes over few links and can share messages. None when nothing changes.
    """
    node_of = problem.topology.node_of()
    links = problem.topology.links
    reach: dict[int, int] = {}  # rank -> slowest transit to a neighbour in its node, a measure of centrality
    for node in problem.topology.nodes:
        for rank in node:
            inside = [
                problem.costs.transit(e, 1) for e, x in enumerate(links) if x.src == rank and x.dst in node
            ]
            reach[rank] = -len(inside) if inside else 0
    chosen: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for e, link in enumerate(links):
        if node_of[link.src] == node_of[link.dst]:
            continue
        key = (node_of[link.src], node_of[link.dst], link.ports)
        rank_pair = (reach[link.src] + reach[link.dst], abs(link.src % 8 - link.dst % 8), e)
        known = chosen.get(key)
        if known is None or rank_pair < (
            reach[links[known].src] + reach[links[known].dst],
            abs(links[known].src % 8 - links[known].dst % 8),
            known,
        ):
            chosen[key] = e
    # Of the pairs of NICs between two nodes, each outgoing NIC keeps one: its counterpart by position.
    kept: set[int] = set()
    by_pair: dict[tuple[int, int], list[int]] = {}
    for (a, b, _), e in sorted(chosen.items()):
        by_pair.setdefault((a, b), []).append(e)
    for members in by_pair.values():
        outs = sorted({links[e].ports[:1] for e in members})
        ins = sorted({links[e].ports[1:2] for e in members})
        for e in members:
            if outs.index(links[e].ports[:1]) % len(ins) == ins.index(links[e].ports[1:2]):
                kept.add(e)
    layers = tuple(
        replace(
            layer,
            usable=tuple(
                tuple(e for e in usable if e in kept or node_of[links[e].src] == node_of[links[e].dst])
                for usable in layer.usable
            ),
        )
        for layer in problem.layers
    )
    narrow = replace(problem, layers=layers, symmetries=())
    return None if layers == problem.layers or unreachable(narrow) else narrow


class _State:
    """Load committed so far and where every chunk has arrived."""

    def __init__(self, problem: Problem, number: int) -> None:
        self.costs = problem.costs
        self.links = problem.topology.links
        self.ranks = problem.topology.ranks
        self.free = [0] * problem.costs.resources
        self.transit = [problem.costs.transit(e, 1) for e in range(len(self.links))]
        self.resources = [tuple(r for r, _ in holds) for holds in problem.costs.holds]
        self._least: dict[int, list[int]] = {}
        layer = problem.layers[number]
        self.has: list[dict[int, int]] = [dict.fromkeys(roots, 0) for roots in layer.roots]
        self.sent: list[tuple[int, Transfer]] = []

    def start(self, link: int, ready: int) -> int:
        for resource in self.resources[link]:
            if self.free[resource] > ready:
                ready = self.free[resource]
        return ready

    def least(self, target: int) -> list[int]:
        """Per rank the least time to a rank when every link is free, 0 from where it cannot be reached."""
        if target not in self._least:
            into: dict[int, list[int]] = {}
            for e, link in enumerate(self.links):
                into.setdefault(link.dst, []).append(e)
            least: dict[int, int] = {}
            heap = [(0, target)]
            while heap:
                away, rank = heapq.heappop(heap)
                if rank in least:
                    continue
                least[rank] = away
                for e in into.get(rank, ()):
                    heapq.heappush(heap, (away + self.transit[e], self.links[e].src))
            self._least[target] = [least.get(rank, 0) for rank in range(self.ranks)]
        return self._least[target]

    def commit(self, chunk: int, link: int) -> None:
        start = self.start(link, self.has[chunk][self.links[link].src])
        for resource, per_chunk in self.costs.holds[link]:
            self.free[resource] = start + self.costs.hold(link, per_chunk, 1)
        self.has[chunk][self.links[link].dst] = start + self.transit[link]
        self.sent.append((start, Transfer(link, (chunk,))))


def _spread(problem: Problem, number: int, taste: Taste, group: Sequence[Symmetry]) -> list[Transfer] | None:
    layer = problem.layers[number]
    state = _State(problem, number)
    shuffle = random.Random(taste.seed)
    node_of = problem.topology.node_of()
    entered: set[tuple[int, int]] = {(c, node_of[r]) for c, roots in enumerate(layer.roots) for r in roots}
    wanted = [set(t) for t in layer.targets]
    outgoing: list[dict[int, list[int]]] = []
    memo: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for usable in layer.usable:
        if usable not in memo:
            table: dict[int, list[int]] = {}
            for e in usable:
                table.setdefault(problem.topology.links[e].src, []).append(e)
            memo[usable] = table
        outgoing.append(memo[usable])

    images = [(g.chunks, g.links) for g in group[1:]]

    def commit(chunk: int, e: int) -> None:
        """One hop and all its images; an image that is there already, or came by another way, is left out."""
        hops = [(chunk, e), *((chunks[chunk], links[e]) for chunks, links in images)]
        for c, link in dict.fromkeys(hops):
            src, dst = state.links[link].src, state.links[link].dst
            if dst in state.has[c] or src not in state.has[c]:
                continue
            state.commit(c, link)
            entered.add((c, node_of[dst]))
            wanted[c].discard(dst)
            if not single[c]:
                offer(c, dst)

    heap: list[tuple[float, float, int, int]] = []  # (score, tie, chunk, link or -1 for a path)

    def tie() -> float:
        return shuffle.random() if taste.seed else 0.0

    def score(chunk: int, e: int) -> float:
        ready = state.has[chunk][state.links[e].src]
        return state.start(e, ready) + taste.weight * state.transit[e]

    def offer(chunk: int, rank: int) -> None:
        for e in outgoing[chunk].get(rank, ()):
            if state.links[e].dst in wanted[chunk]:
                heapq.heappush(heap, (score(chunk, e), tie(), chunk, e))

    single = [len(t) == 1 for t in layer.targets]
    # Chunks between the same two ranks have the same paths: only the first of them that is left competes.
    alike: dict[tuple[object, ...], deque[int]] = {}
    queue_of: dict[int, deque[int]] = {}
    for chunk, roots in enumerate(layer.roots):
        if single[chunk]:
            key = (roots, layer.targets[chunk], layer.usable[chunk])
            queue_of[chunk] = alike.setdefault(key, deque())
            queue_of[chunk].append(chunk)
            if len(queue_of[chunk]) > 1:
                continue
            path = _earliest_path(state, outgoing[chunk], chunk, wanted[chunk])
            if path is None:
                return None
            heapq.heappush(heap, (path[0], tie(), chunk, -1))
        else:
            for rank in roots:
                offer(chunk, rank)
    while heap:
        old, tied, chunk, e = heapq.heappop(heap)
        if e < 0:
            queue = queue_of[chunk]
            while queue and not wanted[queue[0]]:
                queue.popleft()  # an image of a decision brought it
            if not queue:
                continue
            chunk = queue[0]
            path = _earliest_path(state, outgoing[chunk], chunk, wanted[chunk])
            assert path is not None
            if path[0] > old:
                heapq.heappush(heap, (path[0], tied, chunk, -1))
                continue
            for hop in path[1]:
                commit(chunk, hop)
            queue.popleft()
            if queue:
                heapq.heappush(heap, (path[0], tie(), queue[0], -1))
            continue
        if not wanted[chunk]:
            continue
        dst = state.links[e].dst
        if dst not in wanted[chunk]:
            continue
        foreign = node_of[state.links[e].src] != node_of[dst]
        if taste.enter_once and foreign and (chunk, node_of[dst]) in entered:
            continue
        now = score(chunk, e)
        if now > old:
            heapq.heappush(heap, (now, tied, chunk, e))
            continue
        commit(chunk, e)
    # What one-hop growth could not reach (relays that do not want the chunk) is reached by paths.
    for chunk, missing in enumerate(wanted):
        while missing:
            path = _earliest_path(state, outgoing[chunk], chunk, missing)
            if path is None:
                return None
            for hop in path[1]:
                commit(chunk, hop)
    state.sent.sort(key=lambda pair: pair[0])
    return [transfer for _, transfer in state.sent]


def _earliest_path(
    state: _State, outgoing: dict[int, list[int]], chunk: int, targets: set[int]
) -> tuple[int, list[int]] | None:
    """(arrival, links) of the soonest path from a holder of the chunk to one of the targets."""
    best = dict(state.has[chunk])
    via: dict[int, int] = {}
    links, transit = state.links, state.transit
    # Ranks are looked at in order of arrival and the least way on from there (A*); a guess of 0 is always right.
    left = state.least(next(iter(targets))) if len(targets) == 1 else [0] * state.ranks
    heap = [(at + left[rank], at, rank) for rank, at in best.items()]
    heapq.heapify(heap)
    soonest: int | None = None  # arrival at a target so far: what is later leads nowhere
    while heap:
        _, at, rank = heapq.heappop(heap)
        if at > best[rank]:
            continue
        if rank in targets:
            hops = []
            while rank in via:
                hops.append(via[rank])
                rank = links[via[rank]].src
            return at, hops[::-1]
        for e in outgoing.get(rank, ()):
            dst = links[e].dst
            known = best.get(dst)
            if known is not None and at + transit[e] >= known:
                continue  # even over a free link
            arrival = state.start(e, at) + transit[e]
            if (known is not None and arrival >= known) or (
                soonest is not None and arrival + left[dst] >= soonest
            ):
                continue
            best[dst] = arrival
            via[dst] = e
            if dst in targets:
                soonest = arrival
            heapq.heappush(heap, (arrival + left[dst], arrival, dst))
    return None
