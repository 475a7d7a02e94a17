"""The solver-free statement of what to synthesise: chunks, trees to be found, usable links, symmetry.

A layer asks for one tree a chunk. "spread": from any source to all targets (allgather, alltoall, broadcast).
"collect": from all targets to the root, partial sums on the way (reduce-scatter, reduce). An allreduce is a
collect layer and a spread layer with the same roots on the same links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Permutation, Restrictions, Rule
from taccl.synth.collective import Collective
from taccl.synth.cost import Costs, costs

# Links a rank, below which ranks are looked at one by one: such graphs may have long ways.
SPARSE = 8


@dataclass(frozen=True, slots=True)
class Layer:
    """One tree a chunk. Ranks without a role may relay (spread) or pass partial sums on (collect)."""

    kind: str  # "spread" | "collect"
    roots: tuple[
        tuple[int, ...], ...
    ]  # per chunk: ranks that have it (spread), the one that wants it (collect)
    targets: tuple[tuple[int, ...], ...]  # per chunk: ranks to reach (spread), that contribute (collect)
    usable: tuple[tuple[int, ...], ...]  # per chunk: link ids it may use, ascending


@dataclass(frozen=True, slots=True)
class Symmetry:
    """One automorphism of the problem: images of ranks, chunks and links."""

    ranks: Permutation
    chunks: Permutation
    links: Permutation


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that a model needs. Rules that only filter links are already applied in `Layer.usable`."""

    topology: Topology
    collective: Collective
    costs: Costs
    layers: tuple[Layer, ...]
    rules: tuple[Rule, ...] = ()  # "cap", "own-first", "uc-min", "uc-max"
    symmetries: tuple[Symmetry, ...] = ()  # generators

    @property
    def hops(self) -> int:
        """(chunk, link) pairs of all layers."""
        return sum(len(usable) for layer in self.layers for usable in layer.usable)


def problem(
    topology: Topology, collective: Collective, size_bytes: int, restrictions: Restrictions
) -> Problem:
    """State the problem; `symmetries` stays empty (see with_symmetry)."""
    return Problem(
        topology,
        collective,
        costs(topology, collective.chunk_bytes(size_bytes)),
        tuple(_layer(topology, collective, kind, restrictions) for kind in layer_kinds(collective)),
        tuple(rule for rule in restrictions.rules if not rule.kind.startswith("forbid")),
    )


def layer_kinds(collective: Collective) -> tuple[str, ...]:
    """The layers that a collective needs, in the order of their data flow."""
    if collective.name == "allreduce":
        return ("collect", "spread")
    return ("collect",) if collective.combining else ("spread",)


def roots_of(collective: Collective) -> tuple[tuple[int, ...], ...]:
    """Per chunk the ranks its trees hang on. An allreduce chunk is rooted at the rank whose block it is."""
    if collective.name == "allreduce" and collective.groups:
        # Every group has as many chunks; each member sums up an equal share of them.
        of_group = collective.size_chunks
        return tuple(
            (chunk.sources[i % of_group * len(chunk.sources) // of_group][0],)
            for i, chunk in enumerate(collective.chunks)
        )
    if collective.name == "allreduce":
        per_rank, extra = divmod(len(collective.chunks), collective.ranks)
        if extra:
            return tuple((i % collective.ranks,) for i in range(len(collective.chunks)))
        return tuple((i // per_rank,) for i in range(len(collective.chunks)))
    pairs = ((c.destinations if collective.combining else c.sources) for c in collective.chunks)
    return tuple(tuple(sorted(rank for rank, _ in p)) for p in pairs)


def opposites(topology: Topology) -> list[tuple[int, ...]]:
    """Of each link the ones that run the other way: of parallel ones that at its place, and of the last the rest."""
    of_pair: dict[tuple[int, int], list[int]] = {}
    for index, link in enumerate(topology.links):
        of_pair.setdefault((link.src, link.dst), []).append(index)
    found: list[tuple[int, ...]] = [()] * len(topology.links)
    for (src, dst), members in of_pair.items():
        back = of_pair.get((dst, src), [])
        for place, index in enumerate(members):
            last = place == len(members) - 1
            found[index] = tuple(
                back[place:] if last and place < len(back) else back[place : place + 1] or back[-1:]
            )
    return found


def turned(topology: Topology, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules for links that carry sums."""
    if not any(rule.mirrored for rule in rules):
        return tuple(rules)
    back = opposites(topology)
    return tuple(
        replace(
            rule,
            links=frozenset(image for link in rule.links for image in back[link]),
            routes=frozenset((rank, image) for rank, link in rule.routes for image in back[link]),
        )
        if rule.mirrored
        else rule
        for rule in rules
    )


def _layer(topology: Topology, collective: Collective, kind: str, restrictions: Restrictions) -> Layer:
    roots = roots_of(collective)
    sides = [(c.sources if kind == "collect" else c.destinations) for c in collective.chunks]
    targets = tuple(
        tuple(sorted({rank for rank, _ in side} - set(root))) for side, root in zip(sides, roots, strict=True)
    )
    rules = restrictions.rules if kind == "spread" else turned(topology, restrictions.rules)
    forbidden = {link for rule in rules if rule.kind == "forbid-links" for link in rule.links}
    banned: dict[int, set[int]] = {}  # by rank, for chunks that hang on it
    for rank, link in (route for rule in rules if rule.kind == "forbid-routes" for route in rule.routes):
        banned.setdefault(rank, set()).add(link)
    allowed = [e for e in range(len(topology.links)) if e not in forbidden]
    last: tuple[frozenset[int], _Ways] | None = None  # chunks of a root stand together
    usable = []
    memo: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
    for root, target in zip(roots, targets, strict=True):
        key = (root, target)
        if key not in memo:
            # What is shortest for a chunk is so among the ways that it may go.
            without = frozenset(e for rank in root for e in banned.get(rank, ()))
            if last is None or last[0] != without:
                last = without, _ways(topology, [e for e in allowed if e not in without], kind)
            left, ends, hops = last[1]
            # These leave much of the machine idle, so that a way round over a neighbour's NIC can pay.
            detour = 2 if collective.name == "sendrecv" or collective.groups else 1
            on_the_way = _on_the_way(ends, hops, root, target, restrictions.extra_hops, detour)
            memo[key] = tuple(left[place] for place in on_the_way)
        usable.append(memo[key])
    return Layer(kind, roots, targets, tuple(usable))


# Links, where data of a chunk's tree enters and leaves them, and hops between ranks over them.
_Ways = tuple[list[int], NDArray[np.int64], NDArray[np.int64]]


def _ways(topology: Topology, links: list[int], kind: str) -> _Ways:
    ends = _ends(topology, links, kind)
    return links, ends, _hops(topology.ranks, ends)


def _ends(topology: Topology, links: Sequence[int], kind: str) -> NDArray[np.int64]:
    """[2, links]: where data of a chunk's tree enters each link and leaves it, seen from the root."""
    pairs = [(topology.links[e].src, topology.links[e].dst) for e in links]
    ends: NDArray[np.int64] = np.array(pairs, np.int64).reshape(-1, 2).T
    return ends if kind == "spread" else ends[::-1]


def _hops(n: int, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """[u, v] = least number of links from u to v, n = unreachable."""
    if ends.shape[1] < SPARSE * n:
        return _hops_one_by_one(n, ends)
    joined = np.zeros((n, n), np.float32)
    joined[ends[0], ends[1]] = 1
    table = np.full((n, n), n, np.int64)
    np.fill_diagonal(table, 0)
    ahead = np.eye(n, dtype=bool)
    for distance in range(1, n):
        ahead = (ahead.astype(np.float32) @ joined > 0) & (table == n)
        if not ahead.any():
            break
        table[ahead] = distance
    return table


def _hops_one_by_one(n: int, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    out: list[list[int]] = [[] for _ in range(n)]
    for a, b in ends.T.tolist():
        out[a].append(b)
    table = []
    for start in range(n):
        distance = [n] * n
        distance[start] = 0
        queue = deque([start])
        while queue:
            u = queue.popleft()
            for v in out[u]:
                if distance[v] == n:
                    distance[v] = distance[u] + 1
                    queue.append(v)
        table.append(distance)
    return np.array(table, np.int64)


def _on_the_way(
    ends: NDArray[np.int64],
    hops: NDArray[np.int64],
    roots: tuple[int, ...],
    targets: tuple[int, ...],
    extra_hops: int | None,
    detour: int,
) -> list[int]:
    """Places of the links that lie on some path from a root to a target within the allowed number of hops."""
    n = len(hops)
    # Without the author's word, trees to many targets may use any simple path; a single target keeps
    # to paths with few hops more than the shortest, or the model grows with no gain.
    slack = extra_hops if extra_hops is not None else (n if len(targets) > 1 else detour)
    here, there = ends
    from_root = hops[list(roots)].min(axis=0)
    to_targets = hops[:, list(targets)]
    limits = from_root[list(targets)] + slack
    # How many hops a link that ends at a rank may begin from the root, for the target that allows most.
    most = np.where(to_targets < n, limits - 1 - to_targets, -1).max(axis=1, initial=-1)
    into_root = np.isin(there, roots)
    kept = np.flatnonzero(~into_root & (from_root[here] < n) & (from_root[here] <= most[there]))
    return [int(place) for place in kept]


def unreachable(p: Problem) -> list[tuple[int, int, int]]:
    """(layer, chunk, rank) triples whose rank the chunk's usable links do not connect to a root."""
    missing = []
    for number, layer in enumerate(p.layers):
        memo: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
        for chunk, (roots, usable) in enumerate(zip(layer.roots, layer.usable, strict=True)):
            if (roots, usable) not in memo:
                memo[roots, usable] = _reached(p.topology, layer.kind, roots, usable)
            missing += [(number, chunk, t) for t in layer.targets[chunk] if t not in memo[roots, usable]]
    return missing


def _reached(topology: Topology, kind: str, roots: Iterable[int], usable: Iterable[int]) -> set[int]:
    out: dict[int, list[int]] = {}
    for e in usable:
        link = topology.links[e]
        a, b = (link.src, link.dst) if kind == "spread" else (link.dst, link.src)
        out.setdefault(a, []).append(b)
    seen = set(roots)
    queue = deque(seen)
    while queue:
        for v in out.get(queue.popleft(), ()):
            if v not in seen:
                seen.add(v)
                queue.append(v)
    return seen


def with_symmetry(p: Problem, generators: Sequence[Permutation]) -> tuple[Problem, list[Permutation]]:
    """Attach the rank permutations that are automorphisms of the whole problem; also return the rejected."""
    kept, rejected = [], []
    for generator in generators:
        symmetry = _extend(p, generator)
        if symmetry is None:
            rejected.append(generator)
        else:
            kept.append(symmetry)
    return replace(p, symmetries=tuple(kept)), rejected


def _extend(p: Problem, ranks: Permutation) -> Symmetry | None:
    chunks = _chunk_images(p, ranks)
    links = link_images(p.topology, ranks)
    if chunks is None or links is None:
        return None
    for layer in p.layers:
        # Chunks between the same ranks have one tuple of links, and a machine has many chunks.
        moves = {
            (id(layer.usable[chunk]), id(layer.usable[image])): (layer.usable[chunk], layer.usable[image])
            for chunk, image in enumerate(chunks)
        }
        for usable, of_image in moves.values():
            if sorted(links[e] for e in usable) != list(of_image):
                return None
    for rule in p.rules:
        if {links[e] for e in rule.links} != set(rule.links):
            return None
    return Symmetry(ranks, chunks, links)


def _chunk_images(p: Problem, ranks: Permutation) -> Permutation | None:
    """Chunks with equal roots and targets are told apart by their order, which every image keeps."""
    keys = []
    for chunk in range(len(p.collective.chunks)):
        keys.append(tuple((layer.roots[chunk], layer.targets[chunk]) for layer in p.layers))
    members: dict[object, list[int]] = {}
    for chunk, key in enumerate(keys):
        members.setdefault(key, []).append(chunk)
    images = []
    for chunk, key in enumerate(keys):
        image_key = tuple(
            (tuple(sorted(ranks[r] for r in roots)), tuple(sorted(ranks[t] for t in targets)))
            for roots, targets in key
        )
        peers = members.get(image_key, [])
        place = members[key].index(chunk)
        if place >= len(peers):
            return None
        images.append(peers[place])
    return tuple(images)


def link_images(topology: Topology, ranks: Sequence[int]) -> Permutation | None:
    """The link that each link becomes when ranks move; None where they are no automorphism of links and ports."""
    of_pair: dict[tuple[int, int], list[int]] = {}
    for index, link in enumerate(topology.links):
        of_pair.setdefault((link.src, link.dst), []).append(index)
    images = []
    port_image: dict[int, int] = {}
    for index, link in enumerate(topology.links):
        twins = of_pair.get((ranks[link.src], ranks[link.dst]), [])
        place = of_pair[link.src, link.dst].index(index)
        if place >= len(twins):
            return None
        image = topology.links[twins[place]]
        numbers = (link.alpha_us, link.beta_us_per_mb, link.occupancy_us, len(link.ports))
        if numbers != (image.alpha_us, image.beta_us_per_mb, image.occupancy_us, len(image.ports)):
            return None
        # Ports are listed in a fixed role order (out before in), so position decides the image.
        for a, b in zip(link.ports, image.ports, strict=True):
            if (
                port_image.setdefault(a, b) != b
                or topology.ports[a].beta_us_per_mb != topology.ports[b].beta_us_per_mb
            ):
                return None
        images.append(twins[place])
    if len(set(port_image.values())) != len(port_image):
        return None
    return tuple(images)
