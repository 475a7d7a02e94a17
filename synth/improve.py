"""Local search over trees: move one hop and its symmetric images to another parent, retime, keep what helps.

Works on what the models are too big for, above all batched schedules, where the value of a hop depends on
which other chunks travel with it. Simulated annealing with a fixed number of steps and a seed, so that it repeats.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from taccl.synth.algorithm import Message
from taccl.synth.problem import Problem, Symmetry
from taccl.synth.schedule import Transfer, completion_fs, time_batched, time_by_priority

Tree = dict[int, int]  # spread: rank -> link by which it gets the chunk; collect: rank -> link of its exit
Trees = list[list[Tree]]  # [layer][chunk]


def improve(
    problem: Problem,
    transfers: Sequence[Transfer],
    messages: Sequence[Message],
    group: Sequence[Symmetry],
    steps: int,
    seed: int,
    stop: Callable[[int], bool],
) -> tuple[Transfer, ...] | None:
    """Better transfers (already batched, in order of start), or None when none were found.

    transfers, messages: the schedule to start from; it must be one tree a chunk and layer. stop gets the best
    time so far and ends the search when it returns True.
    """
    trees = _trees_of(problem, transfers)
    if trees is None:
        return None
    shuffle = random.Random(seed)
    starts = _starts(problem, messages)
    start_fs = completion_fs(problem.costs, messages)
    current = best = (start_fs, sum(m.end_fs for m in messages))
    best_messages: Sequence[Message] | None = None
    places = [
        (n, c, rank) for n, layer in enumerate(trees) for c, tree in enumerate(layer) for rank in sorted(tree)
    ]
    images = list(group) if len(group) > 1 else []
    for step in range(steps):
        if step % 16 == 0 and stop(best[0]):
            break
        moved = _move(problem, trees, shuffle.choice(places), images, shuffle)
        if moved is None:
            continue
        result = _timed(problem, moved, starts)
        if result is None:
            continue
        score = (completion_fs(problem.costs, result), sum(m.end_fs for m in result))
        # Temperature falls from 2 % of the time to nothing; equal times are decided by the mean completion.
        heat = 0.02 * best[0] * (1 - step / steps)
        worse = score[0] - current[0]
        if score <= current or (worse > 0 and heat > 0 and shuffle.random() < math.exp(-worse / heat)):
            trees, current, starts = moved, score, _starts(problem, result)
            places = [
                (n, c, rank)
                for n, layer in enumerate(trees)
                for c, tree in enumerate(layer)
                for rank in sorted(tree)
            ]
            if score < best:
                best, best_messages = score, result
    if best_messages is None or best[0] >= start_fs:
        return None
    return tuple(Transfer(m.link, m.chunks, m.op) for m in best_messages)


def _trees_of(problem: Problem, transfers: Sequence[Transfer]) -> Trees | None:
    """Each chunk's tree; None when the schedule has another shape (a chunk arrives twice, an exchange)."""
    number_of = {
        ("reduce" if layer.kind == "collect" else "copy"): n for n, layer in enumerate(problem.layers)
    }
    trees: Trees = [[{} for _ in layer.roots] for layer in problem.layers]
    for transfer in transfers:
        number = number_of.get(transfer.op)
        if number is None or transfer.after is not None:
            return None
        link = problem.topology.links[transfer.link]
        owner = link.dst if transfer.op == "copy" else link.src
        for chunk in transfer.chunks:
            layer = problem.layers[number]
            if owner in trees[number][chunk] or owner in layer.roots[chunk]:
                return None
            if transfer.link not in layer.usable[chunk]:
                return None
            trees[number][chunk][owner] = transfer.link
    return trees


def _starts(problem: Problem, messages: Sequence[Message]) -> dict[tuple[str, int, int], int]:
    return {(m.op, c, m.link): m.start_fs for m in messages for c in m.chunks}


def _near(problem: Problem, number: int, e: int) -> int:
    """The end of a link that lies towards the root."""
    link = problem.topology.links[e]
    return link.src if problem.layers[number].kind == "spread" else link.dst


def _far(problem: Problem, number: int, e: int) -> int:
    link = problem.topology.links[e]
    return link.dst if problem.layers[number].kind == "spread" else link.src


def _move(
    problem: Problem,
    trees: Trees,
    place: tuple[int, int, int],
    images: Sequence[Symmetry],
    shuffle: random.Random,
) -> Trees | None:
    """Give (layer, chunk, rank) another parent, directly or through a rank that was not in the tree."""
    number, chunk, rank = place
    layer = problem.layers[number]
    tree = trees[number][chunk]
    inside = {*layer.roots[chunk], *tree}
    below = _below(problem, number, tree, rank)
    ways: list[tuple[int, ...]] = []
    for e in layer.usable[chunk]:
        if _far(problem, number, e) != rank or e == tree[rank]:
            continue
        parent = _near(problem, number, e)
        if parent in inside:
            if parent not in below:
                ways.append((e,))
        else:
            for before in layer.usable[chunk]:
                if _far(problem, number, before) == parent:
                    grand = _near(problem, number, before)
                    if grand in inside and grand not in below:
                        ways.append((before, e))
    if not ways:
        return None
    way = shuffle.choice(ways)
    moved = [list(chunks) for chunks in trees]
    for g in images or (None,):
        c = chunk if g is None else g.chunks[chunk]
        changed = dict(moved[number][c])
        for e in way:
            image = e if g is None else g.links[e]
            changed[_far(problem, number, image)] = image
        if not _sound(problem, number, c, changed):
            return None
        moved[number][c] = _pruned(problem, number, c, changed)
    return moved


def _below(problem: Problem, number: int, tree: Tree, rank: int) -> set[int]:
    """The rank and all that hang on it."""
    below = {rank}
    grown = True
    while grown:
        grown = False
        for other, e in tree.items():
            if other not in below and _near(problem, number, e) in below:
                below.add(other)
                grown = True
    return below


def _sound(problem: Problem, number: int, chunk: int, tree: Tree) -> bool:
    """Whether every member leads to a root without a cycle."""
    roots = problem.layers[number].roots[chunk]
    for rank in tree:
        seen = set()
        while rank not in roots:
            if rank in seen or rank not in tree:
                return False
            seen.add(rank)
            rank = _near(problem, number, tree[rank])
    return True


def _pruned(problem: Problem, number: int, chunk: int, tree: Tree) -> Tree:
    """Without relays that serve nobody."""
    targets = problem.layers[number].targets[chunk]
    while True:
        parents = {_near(problem, number, e) for e in tree.values()}
        kept = {rank: e for rank, e in tree.items() if rank in targets or rank in parents}
        if len(kept) == len(tree):
            return kept
        tree = kept


def _timed(
    problem: Problem, trees: Trees, starts: dict[tuple[str, int, int], int]
) -> tuple[Message, ...] | None:
    """The better of the batched and the plain schedule, hops ordered as in the schedule they came from."""
    hops: list[tuple[int, int, int, int, int, str]] = []  # (layer, level, start, link, chunk, op)
    for number, chunks in enumerate(trees):
        kind = problem.layers[number].kind
        op = "copy" if kind == "spread" else "reduce"
        for chunk, tree in enumerate(chunks):
            level: dict[int, int] = dict.fromkeys(problem.layers[number].roots[chunk], 0)
            for rank in tree:
                path = []
                at = rank
                while at not in level:
                    path.append(at)
                    at = _near(problem, number, tree[at])
                for up in reversed(path):
                    level[up] = level[_near(problem, number, tree[up])] + 1
            for rank, e in tree.items():
                signed = level[rank] if kind == "spread" else -level[rank]
                hops.append((number, signed, starts.get((op, chunk, e), -1), e, chunk, op))
    hops.sort()
    transfers = [Transfer(e, (chunk,), op) for _, _, _, e, chunk, op in hops]
    # A hop that is new takes the place in time that its level suggests.
    middle: dict[tuple[int, int], list[int]] = {}
    for number, signed, start, *_ in hops:
        if start >= 0:
            middle.setdefault((number, signed), []).append(start)
    wanted = []
    for number, signed, start, *_ in hops:
        known = middle.get((number, signed), [0])
        wanted.append(start if start >= 0 else known[len(known) // 2])
    rank_of = [0] * len(hops)
    for position, index in enumerate(sorted(range(len(hops)), key=lambda i: (wanted[i], i))):
        rank_of[index] = position
    topology, collective, costs = problem.topology, problem.collective, problem.costs
    plain = time_by_priority(topology, collective, costs, transfers, rank_of)
    if not any(costs.occupancy_fs[t.link] for t in transfers):
        return plain
    batched = time_batched(topology, collective, costs, transfers, rank_of)
    return min(plain, batched, key=lambda found: completion_fs(costs, found))
