"""Hamiltonian circles and chains over the links that exist: the roads of the ring engine.

The search is depth first with a step limit, so it is deterministic and ends; on the topologies of the library
it finds a circle wherever there is one. Fast links come first: the slowest link of the circle is made as fast
as possible by bisection over the link speeds. The ranks of a node stand together where that is possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from taccl.profiles.topology import Topology
from taccl.synth.cost import ceil_fs
from taccl.synth.engines.network import beta

MOST_STEPS = 20_000
MOST_CIRCLES = 8


@dataclass(frozen=True, slots=True)
class Circle:
    """Ranks in the order of travel; the last is joined to the first when `closed`."""

    ranks: tuple[int, ...]
    ahead: tuple[int, ...]  # link from ranks[i] to ranks[i+1] (closed: one more, back to the first)
    back: tuple[int, ...]  # link from ranks[i+1] to ranks[i]; () when that direction lacks a link
    closed: bool
    beta_fs: int  # slowest link, fs per MB


@lru_cache(maxsize=16)
def circles(topology: Topology) -> tuple[Circle, ...]:
    """Link-disjoint circles, fastest first, as many as raise the joint rate; else one chain; else none."""
    left = set(range(len(topology.links)))
    found: list[Circle] = []
    load: Fraction | None = None
    busy = [0] * len(topology.ports)  # circles through each port, times its beta in fs per MB
    while len(found) < MOST_CIRCLES:
        # Another start lets the circle leave a node at another rank, through another NIC.
        circle = _fastest(topology, left, busy, len(found))
        if circle is None:
            break
        more = _bottleneck(topology, [*found, circle])
        # A circle that only shares ports with the others adds messages but no rate.
        if load is not None and more >= load * Fraction(99, 100):
            break
        load = more
        found.append(circle)
        left.difference_update(circle.ahead, circle.back)
        for e in circle.ahead + circle.back:
            for p in topology.links[e].ports:
                busy[p] += ceil_fs(topology.ports[p].beta_us_per_mb)
    if not found:
        chain = _fastest(topology, left, busy, None)
        if chain is not None and chain.back:
            found.append(chain)
    return tuple(found)


def hamiltonian(
    successors: dict[int, list[int]], start: int, node_of: dict[int, int] | None, closed: bool
) -> tuple[int, ...] | None:
    """A path over all keys of `successors` from `start`, back to it when `closed`; None if none was found.

    successors: per rank the ranks it may go on to, best first. node_of: when given, a path leaves a node only
    after it has seen all its ranks. Gives up after MOST_STEPS steps.
    """
    path, seen = [start], {start}
    steps = 0

    def options(u: int) -> list[int]:
        free = [v for v in successors[u] if v not in seen]
        if node_of is not None:
            here = [v for v in free if node_of[v] == node_of[u]]
            if here or any(node_of[v] == node_of[u] and v not in seen for v in successors):
                free = here
        # Warnsdorff's rule: first those with the fewest ways on.
        onward = {v: sum(w not in seen for w in successors[v]) for v in free}
        return sorted(free, key=onward.__getitem__, reverse=True)

    stack = [options(start)]
    while stack:
        if len(path) == len(successors) and (not closed or start in successors[path[-1]]):
            return tuple(path)
        steps += 1
        if steps > MOST_STEPS:
            return None
        if stack[-1]:
            u = stack[-1].pop()
            path.append(u)
            seen.add(u)
            stack.append(options(u))
        else:
            stack.pop()
            seen.discard(path.pop())
    return None


@lru_cache(maxsize=64)
def chain_from(topology: Topology, root: int) -> tuple[int, ...] | None:
    """All ranks in a row from the root over existing links, the slowest as fast as possible; None if none was found."""
    found = _fastest(topology, set(range(len(topology.links))), [0] * len(topology.ports), None, [root])
    return None if found is None else found.ranks


def _fastest(
    topology: Topology, left: set[int], busy: list[int], number: int | None, starts: list[int] | None = None
) -> Circle | None:
    """The circle on the links of `left` whose slowest link is fastest; number None: a chain instead, from one of
    `starts` (None: from any rank)."""
    speeds = sorted({beta(topology, link) for link in left})
    low, high = 0, len(speeds) - 1
    if high < 0 or topology.ranks < 2:
        return None
    best = _within(topology, left, busy, speeds[high], number, starts)
    while best is not None and low < high:
        middle = (low + high) // 2
        circle = _within(topology, left, busy, speeds[middle], number, starts)
        if circle is None:
            low = middle + 1
        else:
            best, high = circle, middle
    return best


def _within(
    topology: Topology,
    left: set[int],
    busy: list[int],
    slowest: int,
    number: int | None,
    starts: list[int] | None,
) -> Circle | None:
    """A circle (number None: a chain) on the links of `left` that are not slower than `slowest`."""

    def cost(e: int) -> tuple[int, int, Fraction]:
        link = topology.links[e]
        return beta(topology, e), max((busy[p] for p in link.ports), default=0), link.alpha_us

    joined: dict[tuple[int, int], int] = {}
    for link in sorted(left, key=lambda e: (cost(e), e)):
        if beta(topology, link) <= slowest:
            joined.setdefault((topology.links[link].src, topology.links[link].dst), link)
    successors: dict[int, list[int]] = {rank: [] for rank in range(topology.ranks)}
    for src, dst in joined:
        successors[src].append(dst)
    for src, reached in successors.items():
        # `options` takes from the end and sorts stably: among equals the cheap link and near rank go first.
        reached.sort(key=lambda v, u=src: (v - u) % topology.ranks)  # type: ignore[misc]
        reached.sort(key=lambda v, u=src: cost(joined[u, v]))  # type: ignore[misc]
        reached.reverse()
    node_of = dict(enumerate(topology.node_of()))
    first = topology.nodes[0]
    closed = number is not None
    if starts is None:
        starts = list(range(topology.ranks)) if number is None else [first[number % len(first)]]
    for nodes in [node_of, None] if len(topology.nodes) > 1 else [None]:
        for start in starts:
            order = hamiltonian(successors, start, nodes, closed)
            if order is None:
                continue
            pairs = list(zip(order, order[1:] + order[:1], strict=True))
            if not closed:
                pairs.pop()
            ahead = tuple(joined[pair] for pair in pairs)
            behind = _backward(topology, left - set(ahead), pairs)
            return Circle(order, ahead, behind, closed, max(beta(topology, e) for e in ahead))
    return None


def _backward(topology: Topology, left: set[int], pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    back: list[int] = []
    for src, dst in pairs:
        turned = [e for e in sorted(left) if topology.links[e].src == dst and topology.links[e].dst == src]
        if not turned:
            return ()
        back.append(min(turned, key=lambda e: (beta(topology, e), topology.links[e].alpha_us, e)))
        left = left - {back[-1]}
    return tuple(back)


def _bottleneck(topology: Topology, rings: list[Circle]) -> Fraction:
    """Time of the busiest link or port when one megabyte goes round, shared out by the circles' speeds."""
    total = sum(Fraction(1, ring.beta_fs) for ring in rings)
    load: dict[tuple[str, int], Fraction] = {}
    for ring in rings:
        share = Fraction(1, ring.beta_fs) / total / (2 if ring.back else 1)
        for e in ring.ahead + ring.back:
            link = topology.links[e]
            held = [(("link", e), link.beta_us_per_mb)]
            held += [(("port", p), topology.ports[p].beta_us_per_mb) for p in link.ports]
            for resource, per_mb in held:
                load[resource] = load.get(resource, Fraction(0)) + share * per_mb
    return max(load.values())
