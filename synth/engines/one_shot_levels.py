"""One-shot allreduce in digits: full exchanges within small groups, inside nodes first and then between them.

Ranks of a node are numbers in mixed radices. In a round those that differ in one digit alone send each other what
they have summed up so far, all to all; after a round for every digit all know the node's sum. Radix 2 in every digit
is recursive doubling, one digit is all pairs; between them lies what fits machines whose ranks form cliques (DGX-1's
quads, the rows of a torus of width 3) or have many links of their own. Between nodes the same is done by one rank for
each NIC, and copies go back over the digits. Wide radices as in Bruck et al., "Efficient algorithms for all-to-all
communications in multiport message-passing systems", 1997.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.engines.network import Inapplicable, Network
from taccl.synth.schedule import Transfer

# Ways to write a number of ranks as digits that are looked at.
MOST_WAYS = 200


@dataclass(frozen=True, slots=True)
class Digit:
    """Members of a round's group are `stride` apart, `radix` of them."""

    stride: int
    radix: int

    def group(self, place: int) -> tuple[int, ...]:
        """The places that differ from `place` in this digit alone, itself included."""
        base = place - (place // self.stride % self.radix) * self.stride
        return tuple(base + digit * self.stride for digit in range(self.radix))


def transfers(topology: Topology, collective: Collective) -> list[Transfer]:
    """The rounds that take least time. Raises Inapplicable for other collectives, nodes of different sizes, and where
    no digits suit the links."""
    if collective.name != "allreduce":
        raise Inapplicable(f"one-shot algorithms serve allreduce, not {collective.name}")
    nodes = topology.nodes
    size = len(nodes[0])
    if any(len(node) != size for node in nodes):
        raise Inapplicable("one-shot rounds in digits need nodes of one size")
    network = Network(topology)
    inside = _rounds(topology, network, nodes, size)
    gates = _gates(topology, network) if len(nodes) > 1 else ()
    columns = [tuple(node[place] for node in nodes) for place in gates]
    between = _rounds(topology, network, columns, len(nodes))
    everything = tuple(range(len(collective.chunks)))
    script = _Script(network, everything)
    for digit in inside:
        script.exchange(((node[p], node[q]) for node in nodes for p, q in _pairs(digit, size)))
    for digit in between:
        script.exchange(((column[p], column[q]) for column in columns for p, q in _pairs(digit, len(nodes))))
    have = set(gates)
    for digit in inside if gates else ():
        told: list[tuple[int, int]] = []
        for place in sorted(set(range(size)) - have):
            holders = [other for other in digit.group(place) if other in have]
            if holders:
                told.append((holders[len(told) % len(holders)], place))
        script.copy(((node[p], node[q]) for node in nodes for p, q in told))
        have |= {place for _, place in told}
    return script.out


class _Script:
    """The transfers of rounds: each message carries what its sender held before the round."""

    def __init__(self, network: Network, everything: tuple[int, ...]) -> None:
        self.out: list[Transfer] = []
        self._network = network
        self._everything = everything
        self._into: dict[int, tuple[int, ...]] = {}

    def exchange(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._round(pairs, "reduce")

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._round(pairs, "copy")

    def _round(self, pairs: Iterable[tuple[int, int]], op: str) -> None:
        before = dict(self._into)
        for src, dst in pairs:
            link = self._network.link(src, dst, len(self._everything))
            self._into[dst] = (*self._into.get(dst, ()), len(self.out))
            self.out.append(Transfer(link, self._everything, op, before.get(src, ())))


def _pairs(digit: Digit, count: int) -> Iterator[tuple[int, int]]:
    """(from, to) for every two places of a group, in turns: first all to their next, then to the one after."""
    for turn in range(1, digit.radix):
        for place in range(count):
            group = digit.group(place)
            yield place, group[(group.index(place) + turn) % digit.radix]


def _rounds(
    topology: Topology, network: Network, families: Sequence[Sequence[int]], count: int
) -> tuple[Digit, ...]:
    """The quickest digits for `count` places, whose ranks in each family must have links: () when there is one place.

    A round takes the longest alpha, and where a rank's messages share a port one occupancy for each but the last.
    """
    if count == 1 or not families:
        return ()
    best: tuple[tuple[Fraction, int, tuple[tuple[int, int], ...]], tuple[Digit, ...]] | None = None
    cost_of: dict[Digit, Fraction | None] = {}
    for digits in _ways(count):
        total = Fraction(0)
        for digit in digits:
            if digit not in cost_of:
                cost_of[digit] = _cost(topology, network, families, digit, count)
            cost = cost_of[digit]
            if cost is None:
                break
            total += cost
        else:
            key = (total, len(digits), tuple((d.stride, d.radix) for d in digits))
            if best is None or key < best[0]:
                best = (key, digits)
    if best is None:
        raise Inapplicable(
            f"{count} ranks (or nodes) are no product of groups that exchange at once: all of a group need links to "
            "each other, and where their messages share a port only groups of two do (a power of two works)"
        )
    return best[1]


def _ways(count: int) -> Iterator[tuple[Digit, ...]]:
    """Ordered factorisations of a number, in every order of rounds."""
    seen: set[tuple[Digit, ...]] = set()
    for radices in _factorisations(count):
        stride, digits = 1, []
        for radix in radices:
            digits.append(Digit(stride, radix))
            stride *= radix
        # The order of rounds matters to ports that are shared, hardly ever to the estimate: first as they stand.
        for order in permutations(digits) if len(digits) <= 3 else (tuple(digits),):
            if order not in seen:
                seen.add(order)
                yield order
            if len(seen) >= MOST_WAYS:
                return


def _factorisations(count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield ()
    for radix in range(2, count + 1):
        if count % radix == 0:
            yield from ((radix, *rest) for rest in _factorisations(count // radix))


def _cost(
    topology: Topology, network: Network, families: Sequence[Sequence[int]], digit: Digit, count: int
) -> Fraction | None:
    """Time of a round in us, None where a link is missing or messages wait for a port too long."""
    worst = Fraction(0)
    for family in families:
        for place in range(count):
            sent: dict[int, list[Fraction]] = {}
            for other in digit.group(place):
                if other == place:
                    continue
                if not network.linked(family[place], family[other]):
                    return None
                link = topology.links[network.between[family[place], family[other]][0]]
                # Messages that share no port go at the same time.
                shared = link.ports[0] if link.ports else -1 - other
                sent.setdefault(shared, []).append(link.occupancy_us)
                worst = max(worst, link.alpha_us)
            for held in sent.values():
                # What leaves after the first has arrived would carry it too, and be added twice.
                late = sum(sorted(held)[1:], Fraction(0))
                if late >= link.alpha_us:
                    return None
                worst = max(worst, late + link.alpha_us)
    return worst


def _gates(topology: Topology, network: Network) -> tuple[int, ...]:
    """Places that speak for their node: the first of those whose links to the same place elsewhere share a port."""
    chosen: list[int] = []
    taken: set[int] = set()
    for place in range(len(topology.nodes[0])):
        column = [node[place] for node in topology.nodes]
        pairs = list(permutations(column, 2))
        if not all(network.linked(src, dst) for src, dst in pairs):
            continue
        ports = {p for pair in pairs for link in network.between[pair] for p in topology.links[link].ports}
        if not ports & taken:
            chosen.append(place)
            taken |= ports
    if not chosen:
        raise Inapplicable("no rank of a node has links to the same rank of every other node")
    return tuple(chosen)
