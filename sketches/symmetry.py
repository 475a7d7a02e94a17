"""Symmetry of a topology: rank permutations that leave every price as it was.

Only groups that act freely are kept (no element but the identity leaves a rank where it is): then a symmetric
schedule is fixed by what happens to one rank of each orbit, and no message meets its own image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from taccl.profiles.topology import Topology
from taccl.sketches.restrictions import Permutation

# Looks at a neighbour in the search for irregular machines; counted, not timed, so that the result repeats.
SEARCH_STEPS = 200_000
REFINE_STEPS = 2_000_000


@dataclass(frozen=True, slots=True)
class _Fabric:
    """A topology with links told apart by class: equal numbers, and equal rates of the ports they cross."""

    ranks: int
    pairs: Mapping[tuple[int, int], tuple[tuple[int, tuple[int, ...]], ...]]  # (class, ports) of each link
    around: tuple[tuple[int, ...], ...]  # per rank the ranks that a link joins it to, either way


def is_automorphism(topology: Topology, permutation: Sequence[int]) -> bool:
    """Whether links map to links of equal numbers, and ports to ports of equal beta, consistently.

    Parallel links keep their order, and so do the ports of a link (out before in).
    """
    if sorted(permutation) != list(range(topology.ranks)):
        return False
    return _preserves(_fabric(topology), permutation)


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


def find_symmetry(
    topology: Topology, keeps: Callable[[Permutation], bool] = lambda permutation: True
) -> tuple[Permutation, ...]:
    """Generators of a group of automorphisms that acts freely, as large as found; () when there is none.

    keeps: what else they must leave as it is, e.g. groups of ranks.

    Natural candidates (rotations, node rotations, XOR shifts, grid translations and reflections) come first,
    then a bounded backtracking search over ranks that look alike.
    """
    n = topology.ranks
    fabric = _fabric(topology)
    generators: list[Permutation] = []
    group: tuple[Permutation, ...] = (tuple(range(n)),)
    tried: set[Permutation] = set(group)
    for candidate in _natural(topology):
        if len(group) == n:
            return tuple(generators)
        if candidate in tried or candidate in group:
            continue
        tried.add(candidate)
        if any(image == rank for rank, image in enumerate(candidate)) or not (
            keeps(candidate) and _preserves(fabric, candidate)
        ):
            continue
        larger = _grown(generators, candidate, n)
        if larger is not None:
            generators.append(candidate)
            group = larger
    if len(group) < n:
        _search(fabric, generators, group, keeps)
    return tuple(generators)


def _fabric(topology: Topology) -> _Fabric:
    classes: dict[object, int] = {}
    gathered: dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]] = {}
    around: list[set[int]] = [set() for _ in range(topology.ranks)]
    beta = [port.beta_us_per_mb for port in topology.ports]
    for link in topology.links:
        numbers = (link.alpha_us, link.beta_us_per_mb, link.occupancy_us, tuple(beta[p] for p in link.ports))
        number = classes.setdefault(numbers, len(classes))
        gathered.setdefault((link.src, link.dst), []).append((number, link.ports))
        around[link.src].add(link.dst)
        around[link.dst].add(link.src)
    pairs = {pair: tuple(links) for pair, links in gathered.items()}
    return _Fabric(topology.ranks, pairs, tuple(tuple(sorted(others)) for others in around))


def _preserves(fabric: _Fabric, permutation: Sequence[int]) -> bool:
    port_image: dict[int, int] = {}
    for (src, dst), links in fabric.pairs.items():
        images = fabric.pairs.get((permutation[src], permutation[dst]))
        if images is None or len(images) != len(links):
            return False
        for (number, ports), (image_number, image_ports) in zip(links, images, strict=True):
            if number != image_number:
                return False
            for p, q in zip(ports, image_ports, strict=True):
                if port_image.setdefault(p, q) != q:
                    return False
    return len(set(port_image.values())) == len(port_image)


def _grown(
    generators: Sequence[Permutation], candidate: Permutation, n: int
) -> tuple[Permutation, ...] | None:
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


def _natural(topology: Topology) -> Iterator[Permutation]:
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
        if width == 1:
            continue
        for step in _divisors(width):
            yield tuple((r % width + step) % width + r // width * width for r in ranks)
        yield tuple((r + width) % n for r in ranks)
        yield tuple((width - 1 - r % width) + r // width * width for r in ranks)
        yield tuple(r % width + (height - 1 - r // width) * width for r in ranks)
    yield tuple(n - 1 - r for r in ranks)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n) if n % d == 0]


def _search(
    fabric: _Fabric,
    generators: list[Permutation],
    group: tuple[Permutation, ...],
    keeps: Callable[[Permutation], bool],
) -> None:
    """Add generators that a backtracking search finds.

    An element of a group that acts freely is known by the image of one rank, so each image that the group does
    not yet reach is tried once; a rank that looks like no other one is kept by every automorphism.
    """
    colours = _colours(fabric)
    alike: dict[int, list[int]] = {}
    for rank, colour in enumerate(colours):
        alike.setdefault(colour, []).append(rank)
    fewest = min(alike.values(), key=lambda members: (len(members), members))
    if len(fewest) == 1:
        return
    root = fewest[0]
    left = SEARCH_STEPS
    share = max(SEARCH_STEPS // len(fewest), 16 * len(fabric.pairs))
    for target in fewest[1:]:
        if any(element[root] == target for element in group):
            continue
        allowed = min(share, left)
        trial = _Trial(fabric, colours, root, target, allowed)
        for candidate in trial.images():
            if not (keeps(candidate) and _preserves(fabric, candidate)):
                continue
            larger = _grown(generators, candidate, fabric.ranks)
            if larger is not None:
                generators.append(candidate)
                group = larger
                break
        left -= allowed - trial.left
        if left <= 0:
            return


class _Trial:
    """Backtracking for automorphisms without fixed ranks that take `root` to `target`.

    Ranks are assigned in breadth-first order, so that each has an image near that of a neighbour.
    """

    def __init__(self, fabric: _Fabric, colours: Sequence[int], root: int, target: int, steps: int) -> None:
        self.fabric, self.colours, self.target = fabric, colours, target
        self.left = steps
        self.order = [root]
        self.parent = [-1] * fabric.ranks  # an earlier neighbour; -1: none
        seen = {root}
        position = 0
        while len(self.order) < fabric.ranks:
            if position == len(self.order):  # another part of a cluster that is not connected
                rank = next(r for r in range(fabric.ranks) if r not in seen)
                self.order.append(rank)
                seen.add(rank)
                continue
            for other in fabric.around[self.order[position]]:
                if other not in seen:
                    seen.add(other)
                    self.parent[other] = self.order[position]
                    self.order.append(other)
            position += 1
        place = {rank: i for i, rank in enumerate(self.order)}
        self.earlier = [[o for o in fabric.around[r] if place[o] < place[r]] for r in range(fabric.ranks)]

    def images(self) -> Iterator[Permutation]:
        """Permutations that keep colours and link classes, until the steps are used up."""
        n = self.fabric.ranks
        image = [-1] * n
        used = [False] * n
        choices: list[Iterator[int]] = [iter((self.target,))]
        while choices:
            rank = self.order[len(choices) - 1]
            if image[rank] >= 0:
                used[image[rank]] = False
                image[rank] = -1
            found = next((c for c in choices[-1] if not used[c] and self._fits(rank, c, image)), None)
            if self.left <= 0:
                return
            if found is None:
                choices.pop()
                continue
            image[rank], used[found] = found, True
            if len(choices) == n:
                yield tuple(image)
                continue
            following = self.order[len(choices)]
            parent = self.parent[following]
            choices.append(iter(self.fabric.around[image[parent]] if parent >= 0 else range(n)))

    def _fits(self, rank: int, target: int, image: Sequence[int]) -> bool:
        self.left -= 1 + len(self.earlier[rank])
        if self.left <= 0 or target == rank or self.colours[target] != self.colours[rank]:
            return False
        pairs = self.fabric.pairs
        return all(
            _classes(pairs.get((rank, other))) == _classes(pairs.get((target, image[other])))
            and _classes(pairs.get((other, rank))) == _classes(pairs.get((image[other], target)))
            for other in self.earlier[rank]
        )


def _classes(links: Sequence[tuple[int, tuple[int, ...]]] | None) -> tuple[int, ...]:
    return tuple(number for number, _ in links or ())


def _colours(fabric: _Fabric) -> list[int]:
    """Colour refinement: ranks keep one colour while their links and neighbours' colours agree."""
    n = fabric.ranks
    colours = [0] * n
    around: list[list[tuple[bool, tuple[int, ...], int]]] = [[] for _ in range(n)]
    for (src, dst), links in fabric.pairs.items():
        around[src].append((True, _classes(links), dst))
        around[dst].append((False, _classes(links), src))
    for _ in range(min(n, 1 + REFINE_STEPS // (2 * len(fabric.pairs) + 1))):
        looks = [
            (colours[rank], tuple(sorted((out, links, colours[other]) for out, links, other in around[rank])))
            for rank in range(n)
        ]
        names = {look: index for index, look in enumerate(sorted(set(looks)))}
        finer = [names[look] for look in looks]
        if finer == colours:
            break
        colours = finer
    return colours
