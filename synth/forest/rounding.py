"""From shares of a block to whole chunks: how many go over each tree so that the fullest resource is as free as it can.

A small integer program over the trees of a fluid optimum; its start is the method of largest remainders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from taccl.synth.forest.fluid import Forest, Side, Tree
from taccl.synth.models.cp_sat import cp_model
from taccl.synth.models.solver import Strategy, solve
from taccl.synth.symmetric.instance import Instance

# Loads are rounded to this many units, so that the solver's sums stay small.
UNITS = 1 << 20
# A whole number of chunks this near to the fluid optimum (relative) is as good; one further off than NEAR is no use.
SAME = 0.002
NEAR = 0.03


def evened(
    inst: Instance, sides: Sequence[Side], forest: Forest, free: bool, most: int, deterministic_s: float
) -> tuple[int, Forest] | None:
    """(chunks, forest) of the fewest chunks a block that load the fullest resource nearly as little as the optimum.

    Cut into a multiple of so many chunks, a block needs no rounding. Trees that the optimum leaves aside are taken too.
    None when up to `most` chunks come no nearer than NEAR.
    """
    trees = (*forest.trees, *forest.others)
    wide = replace(forest, trees=trees, shares=(*forest.shares, *(0.0 for _ in forest.others)))
    best: tuple[float, int, Forest] | None = None
    fluid = fullest(inst, forest.trees, forest.shares)
    for partition in range(1, most + 1):
        counts = whole_chunks(inst, sides, wide, partition, free, deterministic_s)
        used = [(tree, n / partition) for tree, n in zip(trees, counts, strict=True) if n]
        even = Forest(tuple(t for t, _ in used), tuple(x for _, x in used), forest.time, False)
        load = fullest(inst, even.trees, even.shares)
        if best is None or load < best[0]:
            best = (load, partition, even)
        if load <= fluid * (1 + SAME):
            break
    return None if best is None or best[0] > fluid * (1 + NEAR) else best[1:]


def fullest(inst: Instance, trees: Sequence[Tree], shares: Sequence[float]) -> float:
    """How long the fullest resource is held when each tree carries so many of the instance's chunks."""
    load: dict[int, float] = {}
    for tree, share in zip(trees, shares, strict=True):
        for link in tree.links:
            for resource, hold in inst.lane_holds[int(inst.lane[link])]:
                load[resource] = load.get(resource, 0.0) + share * hold
    return max(load.values())


def whole_chunks(
    inst: Instance, sides: Sequence[Side], forest: Forest, partition: int, free: bool, deterministic_s: float
) -> list[int]:
    """Chunks over each tree of the forest.

    Every side sends `partition` chunks, or, where amounts are free, the sides of a group the same number, and all
    groups together `partition` times their number.
    """
    start = _largest_remainders(sides, forest, partition, free)
    model = cp_model.CpModel()
    most = partition * max(len(sides), *(side.amount for side in sides))
    count = [model.new_int_var(0, most, f"n{i}") for i in range(len(forest.trees))]
    of_side: list[list[cp_model.IntVar]] = [[] for _ in sides]
    for variable, tree in zip(count, forest.trees, strict=True):
        of_side[tree.side].append(variable)
    groups = sorted({side.group for side in sides})
    if free:
        amount = {g: model.new_int_var(0, partition * len(groups), f"k{g}") for g in groups}
        model.add(sum(amount.values()) == partition * len(groups))
        for side, mine in zip(sides, of_side, strict=True):
            model.add(sum(mine) == amount[side.group])
    else:
        for side, mine in zip(sides, of_side, strict=True):
            model.add(sum(mine) == partition * side.amount)
    largest = max(hold for holds in inst.lane_holds for _, hold in holds)
    unit = max(1, largest * partition // UNITS)
    load: dict[int, dict[int, int]] = {}
    for number, tree in enumerate(forest.trees):
        for link in tree.links:
            for resource, hold in inst.lane_holds[int(inst.lane[link])]:
                entries = load.setdefault(resource, {})
                entries[number] = entries.get(number, 0) + hold
    top = model.new_int_var(
        0, sum(max(e.values()) for e in load.values()) * partition * len(sides) // unit + 1, "top"
    )
    for key in sorted({tuple(sorted(entries.items())) for entries in load.values()}):
        model.add(sum((hold // unit) * count[number] for number, hold in key) <= top)
    deepest = max(tree.depth for tree in forest.trees)
    worst = partition * len(sides) * deepest + 1
    model.minimize(top * worst + sum(tree.depth * n for tree, n in zip(forest.trees, count, strict=True)))
    for variable, value in zip(count, start, strict=True):
        model.add_hint(variable, value)
    outcome = solve(model, [Strategy(deterministic_s, 3600.0)])
    if outcome.objective is None:
        return start
    return [outcome.value(variable) for variable in count]


def _largest_remainders(sides: Sequence[Side], forest: Forest, partition: int, free: bool) -> list[int]:
    wanted = {number: float(partition * side.amount) for number, side in enumerate(sides)}
    if free:
        share = [0.0] * len(sides)
        for tree, part in zip(forest.trees, forest.shares, strict=True):
            share[tree.side] += part
        groups = sorted({side.group for side in sides})
        first = {g: next(i for i, side in enumerate(sides) if side.group == g) for g in groups}
        amounts = _apportioned([share[first[g]] for g in groups], partition * len(groups))
        for g, amount in zip(groups, amounts, strict=True):
            wanted.update({i: float(amount) for i, side in enumerate(sides) if side.group == g})
    counts = [0] * len(forest.trees)
    for side in range(len(sides)):
        mine = [i for i, tree in enumerate(forest.trees) if tree.side == side]
        for i, n in zip(mine, _apportioned([forest.shares[i] for i in mine], int(wanted[side])), strict=True):
            counts[i] = n
    return counts


def _apportioned(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to shares that add up to `total`."""
    whole = sum(shares)
    if not shares or whole <= 0:
        return [total, *[0] * (len(shares) - 1)] if shares else []
    exact = [share / whole * total for share in shares]
    counts = [int(x) for x in exact]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts
