"""The fluid optimum of spreading from roots over trees, or of sending over paths: a program whose columns are trees.

Minimise the time of the fullest resource when every root cuts its block over trees in any proportions. Columns are
generated: the dual prices of resources price links, and a tree of least cost is the column that helps most (for trees
of any depth Edmonds' arborescence, so the optimum is that of all trees; Edmonds 1973 and, for allgather, Zhao et al.,
"ForestColl", 2024, give the same value as cuts). An allreduce has trees that collect and trees that spread, and chooses
how much of the vector each root sums up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from taccl.synth.bounds.commodities import linear_solver
from taccl.synth.forest.arborescence import cheapest, shallow
from taccl.synth.forest.members import along_ways, ways_between
from taccl.synth.forest.path import cheapest_paths, nodes_of
from taccl.synth.symmetric.instance import Instance

Floats = NDArray[np.float64]

# A column that promises less than this fraction of the optimum is rounding.
SLACK = 1e-7
MOST_ROUNDS = 200
# This near to what dual prices prove is exact; ends a search that has gained less than TAIL in PATIENCE rounds.
EXACT = 1e-3
TAIL = 2e-3
PATIENCE = 8
# Trees that the optimum does not use, but that may go better with whole chunks: how many, and how near to the optimum.
MOST_OTHERS = 200
NEARLY = 0.02
NOISE = 0.02
# With so few families of trees all ways to leave the root are looked at.
FEW_SIDES = 2
MOST_FIRST = 20


@dataclass(frozen=True, slots=True)
class Side:
    """What one family of trees does: spread out of a root, collect into it (on the turned machine), or lead on."""

    inst: Instance
    root: int
    group: int  # families of one group carry the same amount
    collects: bool = False
    usable: NDArray[np.bool_] | None = None  # per link; None: all
    target: int = -1  # the only rank to be reached; -1: all
    amount: int = 1  # blocks
    members: tuple[int, ...] = ()  # the ranks to be reached, the root among them; (): all


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree to the ranks that a side is to reach, or a path: its links, each after the one that feeds its source."""

    side: int
    links: tuple[int, ...]
    levels: tuple[int, ...]  # per link: how many links lead from the root to its far end
    load: tuple[tuple[int, float], ...]  # (resource, how long one block over this tree holds it)

    @property
    def depth(self) -> int:
        """Links on the longest way from the root."""
        return max(self.levels)


@dataclass(frozen=True, slots=True)
class Forest:
    """An optimum within a limit on depth: trees and the share of a block that goes over each."""

    trees: tuple[Tree, ...]
    shares: tuple[float, ...]
    time: float  # of the fullest resource, in the unit of the holds
    exact: bool  # no trees of any depth would do noticeably better
    others: tuple[Tree, ...] = ()  # trees that would do nearly as well


def fluid_optima(
    sides: Sequence[Side],
    weights: Sequence[int],
    total: int,
    free: bool,
    holds: Floats,
    depths: Sequence[int],
    seed: int,
    should_stop: Callable[[], bool],
    first: Sequence[dict[int, int]] = (),
    patience: int = PATIENCE,
) -> list[Forest]:
    """The optimum for each limit on depth, ascending; a limit at which some root reaches nobody is left out.

    weights: per group how many roots it stands for; total: what the groups' amounts times weights add up to (free), or
    each group carries 1. holds: [lane, resource] how long a block over a link of the lane holds it. first: trees of the
    first side to start with, each as the rank before every rank. patience: rounds of columns without gain that end a
    search.
    """
    program = _Program(sides, weights, total, free, holds, first, patience)
    optima: list[Forest] = []
    for depth in depths:
        solved = program.solve(depth, random.Random(seed), should_stop)
        if solved is None:
            continue
        optima.append(solved)
        if solved.exact or should_stop():
            break
    return optima


def evenly(side: Side, parents: Sequence[dict[int, int]], holds: Floats) -> Forest:
    """The same share for each of these trees of the only side."""
    _, via = _Pairs(side).costs(holds.sum(axis=1))
    trees = tuple(_tree(0, side, before, via, holds) for before in parents)
    load = np.zeros(holds.shape[1])
    for tree in trees:
        for resource, hold in tree.load:
            load[resource] += hold / len(trees)
    return Forest(trees, (1.0 / len(trees),) * len(trees), float(load.max()), False)


class _Program:
    """The program with the columns found so far; grows while limits on depth are raised."""

    def __init__(
        self,
        sides: Sequence[Side],
        weights: Sequence[int],
        total: int,
        free: bool,
        holds: Floats,
        first: Sequence[dict[int, int]],
        patience: int,
    ) -> None:
        self.sides, self.first, self.patience = sides, first, patience
        self.weights, self.total, self.free = weights, total, free
        self.unit = float(holds.max()) or 1.0
        self.holds = holds / self.unit
        self.solver = solver = linear_solver()
        infinity = solver.infinity()
        self.time = solver.NumVar(0, infinity, "T")
        solver.Minimize(self.time)
        self.capacity = [solver.Constraint(-infinity, 0) for _ in range(holds.shape[1])]
        for row in self.capacity:
            row.SetCoefficient(self.time, -1)
        wanted = [0 if free else side.amount for side in sides]
        self.share = [solver.Constraint(blocks, blocks) for blocks in wanted]
        if free:
            whole = solver.Constraint(total, total)
            amounts = []
            for weight in weights:
                amount = solver.NumVar(0, infinity, "")
                whole.SetCoefficient(amount, weight)
                amounts.append(amount)
            for side, row in zip(sides, self.share, strict=True):
                row.SetCoefficient(amounts[side.group], -1)
        self.trees: list[Tree] = []
        self.known: set[tuple[int, tuple[int, ...]]] = set()
        self.columns: list[Any] = []
        self.pairs = [_Pairs(side) for side in sides]

    def solve(self, depth: int, draw: random.Random, should_stop: Callable[[], bool]) -> Forest | None:
        """Generate columns no deeper than `depth` until none helps."""
        ranks = self.sides[0].inst.ranks
        any_depth = depth >= ranks - 1
        flat = np.full(self.holds.shape[1], 1.0 / self.holds.shape[1])
        for side in range(len(self.sides)):
            if not self._add(side, flat, depth, any_depth, draw, None):
                return None
        if self.first:
            _, via = self.pairs[0].costs(self.holds @ flat)
            for parents in self.first:
                tree = _tree(0, self.sides[0], parents, via, self.holds)
                if tree.depth <= depth:
                    self._take(tree)
        best = float("inf")
        shares: list[float] = []
        exact = False
        history: list[float] = []
        for _ in range(MOST_ROUNDS):
            if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
                return None
            prices = np.array([max(0.0, -row.dual_value()) for row in self.capacity])
            best = self.solver.Objective().Value()
            history.append(best)
            worths = [row.dual_value() for row in self.share]
            shares = [column.solution_value() for column in self.columns]
            # All is read before a column is added: the solver forgets its answer then.
            exact = best <= self._least(prices) * (1 + EXACT)
            if exact or should_stop():
                break
            if len(history) > self.patience and best > history[-1 - self.patience] * (1 - TAIL):
                break
            added = False
            for side, worth in enumerate(worths):
                added |= self._add(side, prices, depth, any_depth, draw, worth - SLACK * best)
            if not added:
                break
        known = list(zip(self.trees, shares, strict=False))
        kept = [(t, share) for t, share in known if share > 1e-9]
        spare = [t for t, share in known if share <= 1e-9 and t.depth <= depth]
        others = self._nearly_as_good([*spare, *self._varied(prices, depth, draw)], prices, worths, best)
        return Forest(
            tuple(t for t, _ in kept),
            tuple(s for _, s in kept),
            best * self.unit,
            exact,
            others,
        )

    def _least(self, prices: Floats) -> float:
        """What no trees, however deep, can go below: they cost at least so much at any prices of resources."""
        dual = np.zeros(len(self.weights))
        for number, side in enumerate(self.sides):
            cost, _ = self.pairs[number].costs(self.holds @ prices)
            if side.target >= 0:
                paths, _ = cheapest_paths(cost, side.root, len(cost) - 1)
                dual[side.group] += side.amount * paths[-1, side.target]
                continue
            if side.members:  # at least the way to the dearest of them
                paths, _ = cheapest_paths(cost, side.root, len(cost) - 1)
                dual[side.group] += side.amount * paths[-1, list(side.members)].max()
                continue
            parents = cheapest(cost, side.root)
            assert parents is not None
            reached = np.flatnonzero(parents >= 0)
            dual[side.group] += side.amount * cost[parents[reached], reached].sum()
        whole = float(prices.sum()) or 1.0
        if self.free:
            return float((dual / np.array(self.weights)).min()) * self.total / whole
        return float(dual.sum()) / whole

    def _varied(self, prices: Floats, depth: int, draw: random.Random) -> list[Tree]:
        """Trees that cost little and differ from one another: where links cost the same there are very many."""
        found: list[Tree] = []
        for number, side in enumerate(self.sides):
            if side.target >= 0:
                continue
            cost, via = self.pairs[number].costs(self.holds @ prices)
            usual = float(cost[np.isfinite(cost)].mean())
            for _ in range(MOST_OTHERS // len(self.sides)):
                noise = np.random.default_rng(draw.getrandbits(32)).random(cost.shape)
                noisy = cost + NOISE * usual * noise
                if side.members:
                    for before in _reaching(side, noisy, depth, False, draw, few=False)[:1]:
                        tree = _tree(number, side, before, via, self.holds)
                        found += [tree] if tree.depth <= depth else []
                    continue
                parents = shallow(noisy, side.root, depth)
                if parents is not None:
                    before = {rank: p for rank, p in enumerate(parents.tolist()) if rank != side.root}
                    found.append(_tree(number, side, before, via, self.holds))
        return found

    def _nearly_as_good(
        self, trees: Sequence[Tree], prices: Floats, worths: Sequence[float], best: float
    ) -> tuple[Tree, ...]:
        paid: dict[tuple[int, tuple[int, ...]], tuple[float, int]] = {}
        for place, tree in enumerate(trees):
            extra = sum(prices[r] * hold for r, hold in tree.load) - worths[tree.side]
            if extra <= NEARLY * best:
                paid.setdefault((tree.side, tree.links), (extra, place))
        return tuple(trees[place] for _, place in sorted(paid.values())[:MOST_OTHERS])

    def _add(
        self, side: int, prices: Floats, depth: int, any_depth: bool, draw: random.Random, below: float | None
    ) -> bool:
        """Add the trees that cost less than `below` (None: whatever they cost). Returns whether there was one."""
        cost, via = self.pairs[side].costs(self.holds @ prices)
        if self.sides[side].target >= 0:
            found = _ways(self.sides[side], cost, depth)
        elif self.sides[side].members:
            found = _reaching(self.sides[side], cost, depth, any_depth, draw, len(self.sides) <= FEW_SIDES)
        else:
            root = self.sides[side].root
            found = _spanning(cost, root, depth, any_depth, draw)
            if len(self.sides) <= FEW_SIDES:
                found += _by_first_link(cost, root, depth, draw)
        added = False
        for parents in found:
            tree = _tree(side, self.sides[side], parents, via, self.holds)
            if tree.depth > depth:
                continue
            if below is None or sum(prices[r] * hold for r, hold in tree.load) < below:
                added |= self._take(tree) or below is None
        return added

    def _take(self, tree: Tree) -> bool:
        """A new column; returns whether it was new."""
        if (tree.side, tree.links) in self.known:
            return False
        self.known.add((tree.side, tree.links))
        column = self.solver.NumVar(0, self.solver.infinity(), "")
        self.share[tree.side].SetCoefficient(column, 1)
        for r, hold in tree.load:
            self.capacity[r].SetCoefficient(column, hold)
        self.trees.append(tree)
        self.columns.append(column)
        return True


class _Pairs:
    """The links of a side by pair of ranks."""

    def __init__(self, side: Side) -> None:
        inst = side.inst
        links = np.arange(len(inst.links)) if side.usable is None else np.flatnonzero(side.usable)
        key = inst.links.src[links] * inst.ranks + inst.links.dst[links]
        order = np.argsort(key, kind="stable")
        self.links = links[order]
        self.lane = inst.lane[self.links]
        self.key, self.first = np.unique(key[order], return_index=True)
        self.ranks = inst.ranks

    def costs(self, per_lane: Floats) -> tuple[Floats, NDArray[np.int64]]:
        """([from, to] cost of the cheapest link, [from, to] that link)."""
        price = per_lane[self.lane]
        # Among equals the first link; a stable sort by (pair, price) puts it first.
        pair = np.repeat(np.arange(len(self.first)), np.diff([*self.first, len(price)]))
        order = np.lexsort((price, pair))
        best = order[self.first]
        cost = np.full(self.ranks * self.ranks, np.inf)
        via = np.full(self.ranks * self.ranks, -1, np.int64)
        cost[self.key] = price[best]
        via[self.key] = self.links[best]
        return cost.reshape(self.ranks, self.ranks), via.reshape(self.ranks, self.ranks)


def _spanning(
    cost: Floats, root: int, depth: int, any_depth: bool, draw: random.Random
) -> list[dict[int, int]]:
    """Trees of little cost, each as the rank before every rank."""
    found: list[NDArray[np.int64] | None] = []
    for limit in sorted({min(depth, d) for d in (2, 3, 4, 6, 9, 14, depth)}):
        # Many links cost the same: a little noise shows other trees of the same worth.
        noisy = cost * (1 + 1e-3 * np.array([draw.random() for _ in range(len(cost))])[None, :])
        found += [shallow(cost, root, limit), shallow(noisy, root, limit)]
    if any_depth:
        found.append(cheapest(cost, root))
    return [
        {rank: before for rank, before in enumerate(parents.tolist()) if rank != root}
        for parents in found
        if parents is not None
    ]


def _by_first_link(cost: Floats, root: int, depth: int, draw: random.Random) -> list[dict[int, int]]:
    """For ranks that the root can send to, a tree in which it sends to no other: what relieves the root itself."""
    found = []
    firsts = np.flatnonzero(np.isfinite(cost[root])).tolist()
    for first in firsts if len(firsts) <= MOST_FIRST else sorted(draw.sample(firsts, MOST_FIRST)):
        single = cost.copy()
        single[root] = np.inf
        single[root, first] = cost[root, first]
        parents = shallow(single, root, depth)
        if parents is not None:
            found.append({rank: before for rank, before in enumerate(parents.tolist()) if rank != root})
    return found


def _reaching(
    side: Side, cost: Floats, depth: int, any_depth: bool, draw: random.Random, few: bool
) -> list[dict[int, int]]:
    """Trees of little cost to the side's members, each as the rank before every rank; some may be too deep."""
    members = side.members
    price, before = ways_between(cost)
    between = price[np.ix_(members, members)]
    np.fill_diagonal(between, np.inf)
    root, limit = members.index(side.root), min(depth, len(members) - 1)
    found = _spanning(between, root, limit, any_depth, draw)
    if few:
        found += _by_first_link(between, root, limit, draw)
    return [along_ways(parents, members, before, cost, side.root) for parents in found]


def _ways(side: Side, cost: Floats, depth: int) -> list[dict[int, int]]:
    """The cheapest path for every number of links up to `depth`, each as the rank before every rank on it."""
    # A little for every link: of paths that cost nothing the shortest is wanted.
    price, before = cheapest_paths(cost + 1e-9, side.root, depth)
    found = []
    for layer in range(1, depth + 1):
        if price[layer, side.target] < price[layer - 1, side.target]:
            nodes = nodes_of(before, layer, side.target)
            found.append(dict(zip(nodes[1:], nodes[:-1], strict=True)))
    return found


def _tree(side: int, of: Side, parents: dict[int, int], via: NDArray[np.int64], holds: Floats) -> Tree:
    level = {of.root: 0}
    order: list[int] = []
    below: dict[int, list[int]] = {}
    for rank, before in sorted(parents.items()):
        below.setdefault(before, []).append(rank)
    frontier = [of.root]
    while frontier:
        reached = [rank for before in frontier for rank in below.get(before, ())]
        level.update((rank, level[parents[rank]] + 1) for rank in reached)
        order += sorted(reached)
        frontier = sorted(reached)
    links = tuple(int(via[parents[rank], rank]) for rank in order)
    load = holds[of.inst.lane[list(links)]].sum(axis=0)
    used = np.flatnonzero(load)
    loads = tuple(zip(used.tolist(), load[used].tolist(), strict=True))
    return Tree(side, links, tuple(level[rank] for rank in order), loads)
