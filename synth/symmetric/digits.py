"""Routes of an alltoall for short chunks: few messages of many chunks, correcting one digit of the address at a time.

A rank's address is its place in its node and its node, both written in a mixed radix. A chunk visits the ranks that
agree with its destination in ever more digits. All that goes to one digit's value shares a message: with radices r_i
a rank sends the sum of (r_i - 1) messages instead of the product of r_i less 1 (the index algorithm with radix r of
Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE TPDS 1997, section 3; places first and nodes last is its two-level form).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from taccl.synth.symmetric.hops import RepHop, hop
from taccl.synth.symmetric.instance import Instance
from taccl.synth.symmetric.route import Pair


def digit_routes(inst: Instance, pairs: Sequence[Pair]) -> Iterator[list[RepHop]]:
    """Hops of a path for each pair (chunk i is pair i), for each way of writing addresses; where two stations
    have no link, over the fewest links between them."""
    nodes = inst.topology.nodes
    if len({len(members) for members in nodes}) > 1:
        return  # places of one node have no counterparts in another
    place = np.empty(inst.ranks, np.int64)
    for members in nodes:
        place[list(members)] = np.arange(len(members))
    places, node_of = place.tolist(), inst.node_of.tolist()
    own = list(range(len(nodes[0])))
    all_ways = Ways(inst)
    for inner, outer in product(radices(len(nodes[0])), radices(len(nodes))):
        ways = [(_steps(0, inner) + _steps(1, outer), own)]
        if inner and outer:
            ways.append((_steps(1, outer) + _steps(0, inner), own))
            heads = heads_of(inst, places)
            if heads is not None:
                ways.append((_steps(0, inner) + _steps(1, outer), heads))
        for steps, over in ways:
            hops: list[RepHop] = []
            for number, pair in enumerate(pairs):
                path = all_ways.along(_stations(pair, inst, places, node_of, steps, over))
                if path is None:
                    break
                for position, link in enumerate(path):
                    hops.append(hop(number, link, (len(hops) - 1,) if position else ()))
            else:
                yield hops


def radices(size: int) -> list[tuple[int, ...]]:
    """Ways of writing 0..size-1: as one digit, as two, as many of two values; the last digit may not use all of its."""
    if size == 1:
        return [()]
    ways: list[tuple[int, ...]] = [(size,)]
    ways += [(a, -(-size // a)) for a in range(2, size) if a * a <= 2 * size or size % a == 0]
    twos = (2,) * (size - 1).bit_length()
    return [*ways, twos] if len(twos) > 2 else ways


Step = tuple[int, int, int]  # (0 place | 1 node, weight of the digit, radix)


def _steps(level: int, radices: Sequence[int]) -> list[Step]:
    weight, steps = 1, []
    for radix in radices:
        steps.append((level, weight, radix))
        weight *= radix
    return steps


def heads_of(inst: Instance, places: Sequence[int]) -> list[int] | None:
    """Per place the first place at its NIC, through which all at this NIC may speak; None where none is shared."""
    heads = list(range(len(inst.topology.nodes[0])))
    for nic in inst.topology.nics:
        for rank in nic.ranks:
            heads[places[rank]] = min(heads[places[rank]], *(places[r] for r in nic.ranks))
    return None if heads == list(range(len(heads))) else heads


def _stations(
    pair: Pair,
    inst: Instance,
    places: Sequence[int],
    node_of: Sequence[int],
    steps: Sequence[Step],
    over: Sequence[int],
) -> list[int]:
    """The ranks that a chunk visits, its source and destination included. Between nodes it travels over the place
    that `over` names for its destination's."""
    nodes = inst.topology.nodes
    sizes = (len(nodes[0]), len(nodes))
    at = [places[pair.src], node_of[pair.src]]
    apart = (
        ((over[places[pair.dst]] if node_of[pair.src] != node_of[pair.dst] else places[pair.dst]) - at[0])
        % sizes[0],
        (node_of[pair.dst] - at[1]) % sizes[1],
    )
    visited = [pair.src]
    for level, weight, radix in steps:
        # Addresses are corrected by differences, so that all ranks do alike.
        digit = apart[level] // weight % radix
        if digit:
            at[level] = (at[level] + digit * weight) % sizes[level]
            visited.append(nodes[at[1]][at[0]])
    if visited[-1] != pair.dst:
        visited.append(pair.dst)
    return visited


class Ways:
    """Shortest ways between ranks of one node or of two, looked up again and again."""

    def __init__(self, inst: Instance) -> None:
        self.inst = inst
        self.out: dict[int, dict[int, int]] = {}  # rank -> destination -> link
        self.known: dict[tuple[int, int], list[int] | None] = {}

    def along(self, stations: Sequence[int]) -> list[int] | None:
        """The links from each rank to the next; None where there is no way."""
        path: list[int] = []
        for src, dst in pairwise(stations):
            if (src, dst) not in self.known:
                self.known[src, dst] = self._search(src, dst)
            part = self.known[src, dst]
            if part is None:
                return None
            path += part
        return path

    def links(self, rank: int) -> dict[int, int]:
        """Destination -> link, for what leaves a rank."""
        if rank not in self.out:
            inst = self.inst
            links = inst.out_links[inst.out_first[rank] : inst.out_first[rank + 1]]
            there: dict[int, int] = {}
            for link, end in zip(links.tolist(), inst.links.dst[links].tolist(), strict=True):
                there.setdefault(end, link)
            self.out[rank] = there
        return self.out[rank]

    def _search(self, src: int, dst: int) -> list[int] | None:
        """Fewest links, over ranks of the two nodes only."""
        node_of = self.inst.node_of
        came: dict[int, int] = {src: -1}
        queue = deque([src])
        while queue and dst not in came:
            rank = queue.popleft()
            links = self.links(rank)
            if dst in links:
                came[dst] = links[dst]
                break
            for end, link in links.items():
                if end not in came and node_of[end] in (node_of[src], node_of[dst]):
                    came[end] = link
                    queue.append(end)
        if dst not in came:
            return None
        path = []
        while came[dst] >= 0:
            path.append(came[dst])
            dst = int(self.inst.links.src[came[dst]])
        return path[::-1]
