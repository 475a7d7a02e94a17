"""Symmetry of a topology: rank permutations that leave every price as it was.

Only groups that act freely are kept (no element but the identity leaves a rank where it is): then a symmetric
schedule is fixed by what happens to one rank of each orbit, and no message meets its own image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Permutation

# Steps of the backtracking search for irregular machines; counted, not timed, so that the result repeats.
SEARCH_STEPS = 50_000


def is_automorphism(topology: Topology, permutation: Sequence[int]) -> bool:
    """Whether links map to links of equal numbers, and ports to ports of equal beta, consistently."""
    if sorted(permutation) != list(range(topology.ranks)):
        return False
    pairs = _links_by_pair(topology)
    port_image: dict[int, int] = {}
    for (src, dst), links in pairs.items():
        images = pairs.get((permutation[src], permutation[dst]), [])
        if len(images) != len(links):
            return False
        for index, image in zip(links, images, strict=True):
            a, b = topology.links[index], topology.links[image]
            if (a.alpha_us, a.beta_us_per_mb) != (b.alpha_us, b.beta_us_per_mb):
                return False
            if a.occupancy_us != b.occupancy_us:
                return False
            # Ports of a link stand in the order of their role (out before in), so position decides.
            if len(a.ports) != len(b.ports):
                return False
            for p, q in zip(a.ports, b.ports, strict=True):
                same_rate = topology.ports[p].beta_us_per_mb == topology.ports[q].beta_us_per_mb
                if port_image.setdefault(p, q) != q or not same_rate:
                    return False
    return len(set(port_image.values())) == len(port_image)


def closure(generators: Sequence[Permutation], ranks: int) -> tuple[Permutation, ...]:
    """All products of the generators, the identity first, the others sorted."""
    identity = tuple(range(ranks))
    found = {identity}
    queue = [identity]
    while queue:
        element = queue.pop()
        for generator in generators:
            product = tuple(generator[rank] for rank in element)
            if product not in found:
                found.add(product)
                queue.append(product)
    return (identity, *sorted(found - {identity}))


def acts_freely(group: Sequence[Permutation]) -> bool:
    """Whether no element but the first (the identity) fixes a rank."""
    return all(image != rank for element in group[1:] for rank, image in enumerate(element))


def find_symmetry(topology: Topology) -> tuple[Permutation, ...]:
    """Generators of a group of automorphisms that acts freely, as large as found; () when there is none.

    Natural candidates (rotations, node rotations, XOR shifts, grid translations and reflections) come first,
    then a bounded backtracking search over ranks that look alike.
    """
    n = topology.ranks
    generators: list[Permutation] = []
    group: tuple[Permutation, ...] = (tuple(range(n)),)
    tried: set[Permutation] = set()
    for candidate in _candidates(topology):
        if len(group) == n:
            break
        if candidate in tried or candidate in group:
            continue
        tried.add(candidate)
        if any(image == rank for rank, image in enumerate(candidate)):
            continue
        if not is_automorphism(topology, candidate):
            continue
        larger = _grown(generators, candidate, n)
        if larger is not None:
            generators.append(candidate)
            group = larger
    return tuple(generators)


def _grown(generators: list[Permutation], candidate: Permutation, n: int) -> tuple[Permutation, ...] | None:
    """The group with one generator more, or None when that no longer acts freely."""
    identity = tuple(range(n))
    found = {identity}
    queue = [identity]
    while queue:
        element = queue.pop()
        for generator in (*generators, candidate):
            product = tuple(generator[rank] for rank in element)
            if product in found:
                continue
            if len(found) == n or any(image == rank for rank, image in enumerate(product)):
                return None
            found.add(product)
            queue.append(product)
    return (identity, *sorted(found - {identity}))


def _links_by_pair(topology: Topology) -> dict[tuple[int, int], list[int]]:
    pairs: dict[tuple[int, int], list[int]] = {}
    for index, link in enumerate(topology.links):
        pairs.setdefault((link.src, link.dst), []).append(index)
    for links in pairs.values():
        links.sort(
            key=lambda i: (
                topology.links[i].alpha_us,
                topology.links[i].beta_us_per_mb,
                topology.links[i].occupancy_us,
                i,
            )
        )
    return pairs


def _candidates(topology: Topology) -> Iterator[Permutation]:
    n = topology.ranks
    ranks = range(n)
    for step in _divisors(n):
        yield tuple((r + step) % n for r in ranks)
    sizes = {len(node) for node in topology.nodes}
    contiguous = [rank for node in topology.nodes for rank in node] == list(ranks)
    if len(sizes) == 1 and contiguous:
        size = sizes.pop()
        for step in _divisors(size):
            yield tuple((r % size + step) % size + r // size * size for r in ranks)
        for step in _divisors(n // size):
            yield tuple((r + step * size) % n for r in ranks)
    bit = 1
    while bit < n and n % (2 * bit) == 0:
        yield tuple(r ^ bit for r in ranks)
        bit *= 2
    for width in _divisors(n):
        height = n // width
        if width in (1, n):
            continue
        for step in _divisors(width):
            yield tuple((r % width + step) % width + r // width * width for r in ranks)
        yield tuple((r + width) % n for r in ranks)
        yield tuple((width - 1 - r % width) + r // width * width for r in ranks)
        yield tuple(r % width + (height - 1 - r // width) * width for r in ranks)
    yield tuple(n - 1 - r for r in ranks)
    yield from _searched(topology)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n) if n % d == 0]


def _searched(topology: Topology) -> Iterator[Permutation]:
    """Automorphisms without fixed ranks by backtracking over ranks of equal colour."""
    n = topology.ranks
    if n > 64:
        return
    colours = _colours(topology)
    kinds = {
        pair: tuple((topology.links[i].alpha_us, topology.links[i].beta_us_per_mb) for i in links)
        for pair, links in _links_by_pair(topology).items()
    }
    steps = 0
    image = [-1] * n
    used = [False] * n

    def extend(rank: int) -> Iterator[Permutation]:
        nonlocal steps
        if rank == n:
            yield tuple(image)
            return
        for target in range(n):
            steps += 1
            if steps > SEARCH_STEPS:
                return
            if used[target] or target == rank or colours[target] != colours[rank]:
                continue
            if all(
                kinds.get((rank, other)) == kinds.get((target, image[other]))
                and kinds.get((other, rank)) == kinds.get((image[other], target))
                for other in range(rank)
            ):
                image[rank], used[target] = target, True
                yield from extend(rank + 1)
                image[rank], used[target] = -1, False

    yield from extend(0)


def _colours(topology: Topology) -> list[int]:
    """Colour refinement: ranks keep one colour while their links and neighbours' colours agree."""
    n = topology.ranks
    colour = [0] * n
    for _ in range(n):
        seen = []
        for rank in range(n):
            around = sorted(
                (link.src == rank, link.alpha_us, link.beta_us_per_mb, link.occupancy_us, len(link.ports),
                 colour[link.dst if link.src == rank else link.src])
                for link in topology.links
                if rank in (link.src, link.dst)
            )  # fmt: skip
            seen.append((colour[rank], tuple(around)))
        names = {key: index for index, key in enumerate(sorted(set(seen)))}
        fresh = [names[key] for key in seen]
        if fresh == colour:
            break
        colour = fresh
    return colour
