"""The trees of a schedule, hop by hop, and other ways to reach one of their ranks."""

from __future__ import annotations

from collections.abc import Sequence

from taccl.synth.annealing.sequence import Hops
from taccl.synth.problem import Problem
from taccl.synth.schedule import Transfer

# spread: rank -> link by which it gets the chunk; collect: rank -> link of its exit
Tree = dict[int, int]
Trees = list[list[Tree]]  # [layer][chunk]


def trees_of(problem: Problem, transfers: Sequence[Transfer]) -> Trees | None:
    """Each chunk's tree; None when the schedule has another shape (a chunk arrives twice, an exchange)."""
    number_of = {
        ("reduce" if layer.kind == "collect" else "copy"): n for n, layer in enumerate(problem.layers)
    }
    trees: Trees = [[{} for _ in layer.roots] for layer in problem.layers]
    for transfer in transfers:
        number = number_of.get(transfer.op)
        if number is None or not transfer.plain:
            return None
        owner = far(problem, number, transfer.link)
        for chunk in transfer.chunks:
            layer = problem.layers[number]
            if owner in trees[number][chunk] or owner in layer.roots[chunk]:
                return None
            trees[number][chunk][owner] = transfer.link
    sound = all(
        is_sound(problem, number, chunk, tree)
        for number, chunks in enumerate(trees)
        for chunk, tree in enumerate(chunks)
    )
    return trees if sound else None


def near(problem: Problem, number: int, link: int) -> int:
    """The end of a link that lies towards the root."""
    ends = problem.topology.links[link]
    return ends.src if problem.layers[number].kind == "spread" else ends.dst


def far(problem: Problem, number: int, link: int) -> int:
    """The end of a link that lies away from the root: the rank whose place in the tree the link is."""
    ends = problem.topology.links[link]
    return ends.dst if problem.layers[number].kind == "spread" else ends.src


def needs_of(problem: Problem, hops: Hops, trees: Trees, chunk: int) -> list[tuple[int, tuple[int, ...]]]:
    """(hop, the hops that must be done before it) for every hop of a chunk."""
    found: list[tuple[int, tuple[int, ...]]] = []
    at_root: tuple[int, ...] = ()
    for number, layer in enumerate(problem.layers):
        tree = trees[number][chunk]
        number_at = {rank: hops.of(number, chunk, link) for rank, link in tree.items()}
        if layer.kind == "spread":
            for rank, link in tree.items():
                above = number_at.get(near(problem, number, link))
                found.append((number_at[rank], at_root if above is None else (above,)))
        else:
            below: dict[int, list[int]] = {}
            for rank, link in tree.items():
                below.setdefault(near(problem, number, link), []).append(number_at[rank])
            found += [(number_at[rank], tuple(below.get(rank, ()))) for rank in tree]
            at_root = tuple(h for root in layer.roots[chunk] for h in below.get(root, ()))
    return found


def is_sound(problem: Problem, number: int, chunk: int, tree: Tree) -> bool:
    """Whether every member leads to a root without a cycle."""
    roots = problem.layers[number].roots[chunk]
    known: set[int] = set(roots)
    for rank in tree:
        path = []
        while rank not in known:
            if rank in path or rank not in tree:
                return False
            path.append(rank)
            rank = near(problem, number, tree[rank])
        known.update(path)
    return True


def pruned(problem: Problem, number: int, chunk: int, tree: Tree) -> Tree:
    """Without relays that serve nobody."""
    targets = problem.layers[number].targets[chunk]
    while True:
        parents = {near(problem, number, link) for link in tree.values()}
        kept = {rank: link for rank, link in tree.items() if rank in targets or rank in parents}
        if len(kept) == len(tree):
            return kept
        tree = kept


def ways_to(
    problem: Problem, into: Sequence[Sequence[int]], number: int, chunk: int, tree: Tree, rank: int
) -> list[tuple[int, ...]]:
    """Other links, or pairs of links through a rank outside the tree, by which a rank could be reached.

    into: by rank the links whose far end it is, in this layer. Ways below the rank itself are not told from others;
    `is_sound` refuses them.
    """
    usable = set(problem.layers[number].usable[chunk])
    roots = problem.layers[number].roots[chunk]
    ways: list[tuple[int, ...]] = []
    for link in into[rank]:
        if link not in usable or link == tree[rank]:
            continue
        parent = near(problem, number, link)
        if parent in tree or parent in roots:
            ways.append((link,))
        else:
            for before in into[parent]:
                above = near(problem, number, before)
                if before in usable and above != rank and (above in tree or above in roots):
                    ways.append((before, link))
    return ways


def changed(problem: Problem, trees: Trees, number: int, chunk: int, way: Sequence[int]) -> Trees | None:
    """The trees with a chunk taking another way; None where it would run in a circle."""
    tree = dict(trees[number][chunk])
    for link in way:
        tree[far(problem, number, link)] = link
    if not is_sound(problem, number, chunk, tree):
        return None
    moved = list(trees)
    moved[number] = list(trees[number])
    moved[number][chunk] = pruned(problem, number, chunk, tree)
    return moved
