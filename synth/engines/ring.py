"""Ring: chunks travel round Hamiltonian circles over existing links, both ways where both directions exist.

Each rank's chunks go half way round in either direction, which halves the steps of the one-way ring at the
same load; several link-disjoint circles share the chunks by their speed. From a single root (broadcast,
reduce) chunks go all the way, alternating between the directions, one behind the other. Where no circle
exists, a chain serves. Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.engines.circles import Circle, circles
from taccl.synth.engines.network import Inapplicable, Want, both_ways
from taccl.synth.schedule import Transfer


def transfers(topology: Topology, collective: Collective) -> list[Transfer]:
    """Ring algorithm of any collective. Raises Inapplicable when neither circle nor chain was found."""
    return both_ways(topology, collective, _spread)


@dataclass(frozen=True, slots=True)
class _Lane:
    """One direction of a circle."""

    ranks: tuple[int, ...]  # in the direction of travel
    links: tuple[int, ...]
    closed: bool
    beta_fs: int

    def distance(self, src: int, dst: int) -> int | None:
        """Hops from src to dst, None when dst lies behind the end of a chain."""
        hops = self.ranks.index(dst) - self.ranks.index(src)
        if hops < 0:
            return hops + len(self.ranks) if self.closed else None
        return hops

    def link(self, root: int, hop: int) -> int:
        """The link of a root's hop number `hop`."""
        return self.links[(self.ranks.index(root) + hop) % len(self.ranks)]


def _lanes(circle: Circle) -> list[_Lane]:
    lanes = [_Lane(circle.ranks, circle.ahead, circle.closed, circle.beta_fs)]
    if circle.back:
        turned = tuple(reversed(circle.ranks))
        links = tuple(reversed(circle.back))
        if circle.closed:
            # back[-1] leads from ranks[0] to ranks[-1]: it leaves the last of the turned order.
            links = (*links[1:], links[0])
        lanes.append(_Lane(turned, links, circle.closed, circle.beta_fs))
    return lanes


def _spread(topology: Topology, wants: Sequence[Want]) -> list[Transfer]:
    if not wants:
        return []
    found = circles(topology)
    if not found:
        raise Inapplicable("no circle or two-way chain over existing links visits every rank once")
    roads = [_lanes(circle) for circle in found]
    lanes = [lane for road in roads for lane in road]
    load = [0] * len(lanes)
    index = {id(lane): number for number, lane in enumerate(lanes)}
    one_root = len({want.root for want in wants}) == 1
    all_round = one_root and len(wants) >= len(lanes) and all(lane.closed for lane in lanes)
    trips: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (lane, root) -> (hops, chunk)

    def send(want: Want, lane: _Lane, hops: int) -> None:
        number = index[id(lane)]
        load[number] += hops
        trips.setdefault((number, want.root), []).append((hops, want.chunk))

    def finish(lane: _Lane, hops: int) -> int:
        return (load[index[id(lane)]] + hops) * lane.beta_fs

    for want in wants:
        reach = [[lane.distance(want.root, t) for t in want.targets] for lane in lanes]
        ways = [
            (lane, max(x for x in r if x is not None))
            for lane, r in zip(lanes, reach, strict=True)
            if None not in r
        ]
        if len(want.targets) == 1:
            lane, hops = min(ways, key=lambda way: (way[1], finish(*way)))
            send(want, lane, hops)
        elif all_round:
            lane, hops = min(ways, key=lambda way: finish(*way))
            send(want, lane, hops)
        else:
            road = min(roads, key=lambda road: sum(load[index[id(x)]] for x in road) * road[0].beta_fs)
            for lane, hops in _halves(road, want, load[index[id(road[0])]], load[index[id(road[-1])]]):
                send(want, lane, hops)
    return _emit(lanes, trips, one_root)


def _halves(road: list[_Lane], want: Want, ahead_load: int, back_load: int) -> list[tuple[_Lane, int]]:
    """Each target by the nearer direction; one exactly opposite by the direction with less load."""
    reach = [0] * len(road)
    for target in want.targets:
        hops = [lane.distance(want.root, target) for lane in road]
        ways = [(h, number) for number, h in enumerate(hops) if h is not None]
        nearest = min(h for h, _ in ways)
        ties = [number for h, number in ways if h == nearest]
        number = ties[0] if len(ties) == 1 or ahead_load <= back_load else ties[1]
        reach[number] = max(reach[number], nearest)
    return [(lane, hops) for lane, hops in zip(road, reach, strict=True) if hops]


def _emit(
    lanes: list[_Lane], trips: dict[tuple[int, int], list[tuple[int, int]]], one_root: bool
) -> list[Transfer]:
    out: list[Transfer] = []
    if one_root:
        # Far ones first, each chunk a message of its own, so that hops overlap.
        flat = [
            (-hops, chunk, number, root) for (number, root), trip in trips.items() for hops, chunk in trip
        ]
        for hops, chunk, number, root in sorted(flat):
            out += [Transfer(lanes[number].link(root, hop), (chunk,)) for hop in range(-hops)]
        return out
    longest = max(hops for trip in trips.values() for hops, _ in trip)
    for hop in range(longest):
        for (number, root), trip in sorted(trips.items()):
            chunks = tuple(sorted(chunk for hops, chunk in trip if hops > hop))
            if chunks:
                out.append(Transfer(lanes[number].link(root, hop), chunks))
    return out
