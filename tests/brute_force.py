"""True optima of tiny instances by exhaustive search, written without any code of the package but its values.

Every schedule that is pushed to the left starts its messages at time 0, when a message arrives or when a
link or port falls free. The search walks these instants; at each it starts any set of messages of any
contents that are at hand. Reductions cost no time, and partial sums may be merged or replaced at will as
long as no contribution is counted twice, which can only lower the optimum.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective

FAR = 10**9


class TooLarge(Exception):
    """The search was given up: the instance has too many states."""


class Search:
    """Times are whole us, a chunk is 1 MB; all alphas, occupancies and betas must be whole numbers."""

    def __init__(
        self,
        topology: Topology,
        collective: Collective,
        max_states: int = 200_000,
        most_chunks: int | None = None,  # that one message may carry
    ) -> None:
        self.links = [(link.src, link.dst) for link in topology.links]
        self.alpha = [_whole(link.alpha_us) for link in topology.links]
        self.holds: list[list[tuple[int, int, int]]] = []  # per link: (resource, occupancy, per chunk)
        self.per_chunk = []
        for index, link in enumerate(topology.links):
            occupancy = _whole(link.occupancy_us)
            used = [(index, occupancy, _whole(link.beta_us_per_mb))]
            for port in link.ports:
                beta = _whole(topology.ports[port].beta_us_per_mb)
                used.append((len(self.links) + port, occupancy, beta))
            self.holds.append(used)
            self.per_chunk.append(max(beta for _, _, beta in used))
        self.resources = len(self.links) + len(topology.ports)
        self.ranks = topology.ranks
        self.chunks = len(collective.chunks)
        self.most_chunks = self.chunks if most_chunks is None else most_chunks
        start = [[0] * self.chunks for _ in range(self.ranks)]
        self.goal: list[tuple[int, int, int]] = []  # (rank, chunk, contributions)
        for c, chunk in enumerate(collective.chunks):
            everything = 0
            for place, (rank, _) in enumerate(chunk.sources):
                bit = 1 << place if collective.combining else 1
                start[rank][c] = bit
                everything |= bit
            self.goal += [(rank, c, everything) for rank, _ in chunk.destinations]
        self.start = tuple(tuple(row) for row in start)
        self.distance = [[FAR] * self.ranks for _ in range(self.ranks)]
        for r in range(self.ranks):
            self.distance[r][r] = 0
        for e, (a, b) in enumerate(self.links):
            self.distance[a][b] = min(self.distance[a][b], self.alpha[e] + self.per_chunk[e])
        for k in range(self.ranks):
            for a in range(self.ranks):
                for b in range(self.ranks):
                    through = self.distance[a][k] + self.distance[k][b]
                    self.distance[a][b] = min(self.distance[a][b], through)
        self.max_states = max_states
        self.left = 0
        self.seen: set[object] = set()

    def possible(self, limit: int) -> bool:
        """Whether some algorithm is done at `limit` us. Raises TooLarge."""
        self.left = self.max_states
        self.seen = set()
        return self._search(0, self.start, (), (0,) * self.resources, limit)

    def optimum(self, at_least: int = 0) -> int:
        """The least possible completion time that is not below `at_least`."""
        limit = at_least
        while not self.possible(limit):
            limit += 1
        return limit

    def _search(
        self,
        now: int,
        held: tuple[tuple[int, ...], ...],
        flying: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...],
        free: tuple[int, ...],
        limit: int,
    ) -> bool:
        """flying: (arrival, rank, ((chunk, contributions), ...)), sorted. free: end of each hold."""
        landed = [list(row) for row in held]
        for arrival, rank, load in flying:
            if arrival <= now:
                for chunk, value in load:
                    merged = _merge(landed[rank][chunk], value)
                    if merged is None:
                        return False
                    landed[rank][chunk] = merged
        flying = tuple(f for f in flying if f[0] > now)
        held = tuple(tuple(row) for row in landed)
        if all(held[rank][c] == value for rank, c, value in self.goal):
            return True
        if not self._in_reach(now, held, flying, limit):
            return False
        key = (now, held, flying, tuple(max(now, f) for f in free))
        if key in self.seen:
            return False
        self.seen.add(key)
        for more, busy in self._starts(now, held, flying, free, 0, limit):
            self.left -= 1
            if self.left < 0:
                raise TooLarge
            events = [f[0] for f in more] + [f for f in busy if f > now]
            if events and self._search(min(events), held, more, busy, limit):
                return True
        return False

    def _starts(
        self,
        now: int,
        held: tuple[tuple[int, ...], ...],
        flying: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...],
        free: tuple[int, ...],
        first: int,
        limit: int,
    ) -> Iterator[tuple[tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...], tuple[int, ...]]]:
        """Every set of messages that can start now on links from `first` on, most first."""
        for e in range(first, len(self.links)):
            if any(free[r] > now for r, _, _ in self.holds[e]):
                continue
            a, b = self.links[e]
            coming = {c: v for _, rank, load in flying if rank == b for c, v in load}
            useful = [
                (c, held[a][c])
                for c in range(self.chunks)
                if held[a][c]
                and _merge(held[b][c], held[a][c]) is not None
                # A second copy is of no use; a partial sum may still be joined by another.
                and (c not in coming or _merge(coming[c], held[a][c]) is not None)
            ]
            for count in range(min(len(useful), self.most_chunks), 0, -1):
                arrival = now + self.alpha[e] + count * self.per_chunk[e]
                if arrival > limit:
                    continue
                busy = list(free)
                for r, occupancy, beta in self.holds[e]:
                    busy[r] = now + occupancy + count * beta
                for load in combinations(useful, count):
                    more = tuple(sorted((*flying, (arrival, b, load))))
                    yield from self._starts(now, held, more, tuple(busy), e + 1, limit)
        yield flying, free

    def _in_reach(
        self,
        now: int,
        held: tuple[tuple[int, ...], ...],
        flying: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...],
        limit: int,
    ) -> bool:
        """Every contribution can still get to where it is wanted, were nothing else under way."""
        for rank, c, wanted in self.goal:
            if held[rank][c] == wanted:
                continue
            bit = 1
            while bit <= wanted:
                if wanted & bit and not held[rank][c] & bit:
                    soonest = min(
                        (now + self.distance[r][rank] for r in range(self.ranks) if held[r][c] & bit),
                        default=FAR,
                    )
                    for arrival, r, load in flying:
                        if arrival + self.distance[r][rank] < soonest and any(
                            x == c and v & bit for x, v in load
                        ):
                            soonest = arrival + self.distance[r][rank]
                    if soonest > limit:
                        return False
                bit <<= 1
        return True


def _merge(mine: int, theirs: int) -> int | None:
    """What a rank can make of its partial sum and one that arrives; None when the arrival is of no use."""
    if not mine & theirs:
        return mine | theirs
    if theirs & mine == mine and theirs != mine:
        return theirs
    return None


def _whole(value: Fraction) -> int:
    assert value.denominator == 1, "brute force needs whole numbers"
    return int(value)
