"""Simulated annealing over whole schedules, with a fixed amount of work and a seed, so that it repeats.

What is moved is critical: a message on the chain of waits that ends last. Moves split it, join it with a neighbour on
its link, let it overtake, or bring chunks another way; the whole schedule is then clocked anew. It works on what the
models are too big for, above all where alpha and bytes cost about the same and the value of a hop depends on what
travels with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from taccl.synth.algorithm import Message
from taccl.synth.annealing.moves import Plan, join, reroute, shift, split, surroundings
from taccl.synth.annealing.sequence import Hops, Machine, decode
from taccl.synth.annealing.trees import needs_of, trees_of
from taccl.synth.problem import Problem, Symmetry
from taccl.synth.schedule import Transfer, as_transfers

# The first temperature of each cycle, as a share of the time: some landscapes need much of it, some hardly any.
HEATS = (0.03, 0.003)
MOVES = (split, join, shift, reroute)


def anneal(
    problem: Problem,
    messages: Sequence[Message],
    images: Sequence[Symmetry],
    work: int,
    seed: int,
    batching: bool,
    stop: Callable[[int], bool],
) -> tuple[Transfer, ...] | None:
    """Better transfers (already batched, in order of start), or None when none were found.

    messages: the schedule to start from; it must be one tree a chunk and layer. images: symmetries whose images of a
    move are made with it, identity first. work: hops that may be clocked. stop gets the best time so far and ends
    the search when it returns True.
    """
    layer_of = {
        ("reduce" if layer.kind == "collect" else "copy"): n for n, layer in enumerate(problem.layers)
    }
    ordered = sorted(messages, key=lambda m: (m.start_fs, m.end_fs))
    trees = trees_of(problem, as_transfers(ordered))
    if trees is None:
        return None
    hops = Hops()
    groups = [tuple(hops.of(layer_of[m.op], c, m.link) for c in m.chunks) for m in ordered]
    needs: list[tuple[int, ...]] = [()] * len(hops.link)
    for chunk in range(len(problem.collective.chunks)):
        for hop, before in needs_of(problem, hops, trees, chunk):
            needs[hop] = before
    reduces = [layer.kind == "collect" for layer in problem.layers]
    machine = Machine.of(problem.topology, problem.costs)
    clock = decode(machine, hops, reduces, needs, groups, range(len(groups)))
    if clock is None:
        return None
    around = surroundings(problem, hops, images, batching)
    moves = MOVES if batching and any(problem.costs.occupancy_fs) else (shift, reroute)
    shuffle = random.Random(seed)
    current = best = Plan(trees, needs, groups, clock)
    first = best.clock.score()
    spent, steps, cycle = 0, 0, 0
    share = -(-work // len(HEATS))
    while spent < work:
        steps += 1
        if spent // share > cycle:
            cycle, current = spent // share, best
        if steps % 64 == 0 and stop(best.clock.last_fs):
            break
        spent += 32  # a move that comes to nothing is work too
        path = current.clock.critical()
        draft = shuffle.choice(moves)(around, current, shuffle.choice(path), shuffle)
        if draft is None:
            continue
        changed_groups, keys = draft.finish()
        clock = decode(machine, hops, reduces, draft.needs, changed_groups, keys)
        spent += sum(map(len, changed_groups))
        if clock is None:
            continue
        score, known = clock.score(), current.clock.score()
        heat = HEATS[cycle] * first[0] * (1 - (spent - cycle * share) / share)
        worse = score[0] - known[0]
        if score <= known or (heat > 0 and shuffle.random() < math.exp(-max(worse, 1) / heat)):
            current = Plan(draft.trees, draft.needs, changed_groups, clock)
            if score < best.clock.score():
                best = current
    if best.clock.score() >= first:
        return None
    order = sorted(range(len(best.groups)), key=lambda g: best.clock.starts_fs[g])
    ops = ["reduce" if layer.kind == "collect" else "copy" for layer in problem.layers]
    found = []
    for g in order:
        hop = best.groups[g][0]
        chunks = tuple(sorted(hops.chunk[h] for h in best.groups[g]))
        found.append(Transfer(hops.link[hop], chunks, ops[hops.layer[hop]]))
    return tuple(found)
