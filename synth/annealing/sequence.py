"""A schedule as an ordered list of messages, and the quickest clock for it: what local search moves about.

A *hop* is one chunk on one link. Messages are groups of hops of one link. `decode` walks the groups in the order of
their keys and starts each as early as its data, its link and its ports allow: no heap, a few hundred nanoseconds a
hop. A group whose data are not there yet in that order waits for them, so that every order means some schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from taccl.profiles.topology import Topology
from taccl.synth.cost import Costs

COPY, REDUCE = 0, 1
NO_CAUSE = -1


@dataclass(slots=True)
class Hops:
    """All hops that were ever looked at, numbered as they come."""

    number: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (layer, chunk, link) -> hop
    layer: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    link: list[int] = field(default_factory=list)

    def of(self, layer: int, chunk: int, link: int) -> int:
        """The number of a hop."""
        key = (layer, chunk, link)
        known = self.number.get(key)
        if known is None:
            known = self.number[key] = len(self.link)
            self.layer.append(layer)
            self.chunk.append(chunk)
            self.link.append(link)
        return known


@dataclass(frozen=True, slots=True)
class Clock:
    """What `decode` found. Times in fs, by group; `usable_fs` and `group_of` by hop."""

    starts_fs: list[int]
    causes: list[int]  # the group that a group waited for last, or NO_CAUSE
    by_port: list[bool]  # whether it waited for a link or port, not for data
    usable_fs: list[int]
    group_of: list[int]
    last_fs: int
    sum_fs: int
    final: int  # the group that ends last

    def score(self) -> tuple[int, int]:
        return (self.last_fs, self.sum_fs)

    def critical(self) -> list[int]:
        """The groups that decide the end, the last first."""
        path = []
        group = self.final
        while group != NO_CAUSE:
            path.append(group)
            group = self.causes[group]
        return path


@dataclass(frozen=True, slots=True)
class Machine:
    """Prices by link in the shape that `decode` reads fastest."""

    alpha_fs: tuple[int, ...]
    occupancy_fs: tuple[int, ...]
    chunk_fs: tuple[int, ...]
    holds: tuple[tuple[tuple[int, int], ...], ...]
    receiver: tuple[int, ...]
    resources: int
    ranks: int
    reduce_alpha_fs: int
    reduce_chunk_fs: int

    @staticmethod
    def of(topology: Topology, costs: Costs) -> Machine:
        return Machine(
            costs.alpha_fs,
            costs.occupancy_fs,
            costs.chunk_fs,
            costs.holds,
            tuple(link.dst for link in topology.links),
            costs.resources,
            topology.ranks,
            costs.reduce_alpha_fs,
            costs.reduce_chunk_fs,
        )


def decode(
    machine: Machine,
    hops: Hops,
    reduces: Sequence[bool],
    needs: Sequence[tuple[int, ...]],
    groups: Sequence[tuple[int, ...]],
    keys: Sequence[int],
) -> Clock | None:
    """Clock the groups in the order of their keys (ties: of the list). None when they wait for one another in a circle.

    reduces: by layer whether its hops are reduced where they arrive (in the order of the keys: a rank's real order of
    arrival may be kinder); needs: by hop the hops before it.
    """
    many = len(hops.link)
    usable, group_of = [-1] * many, [-1] * many
    free, holder = [0] * machine.resources, [NO_CAUSE] * machine.resources
    engine = [0] * machine.ranks
    count = len(groups)
    starts, causes, by_port = [0] * count, [NO_CAUSE] * count, [False] * count
    link_of, layer_of = hops.link, hops.layer
    all_holds, occupancy, alpha, per_chunk = (
        machine.holds, machine.occupancy_fs, machine.alpha_fs, machine.chunk_fs,
    )  # fmt: skip
    reducing = machine.reduce_alpha_fs or machine.reduce_chunk_fs
    waiting: dict[int, list[int]] = {}  # hop -> groups that cannot start before it
    last, total, final, done = -1, 0, NO_CAUSE, 0
    for first in sorted(range(count), key=keys.__getitem__):
        stack = [first]
        while stack:
            group = stack.pop()
            members = groups[group]
            start, cause, missing = 0, NO_CAUSE, -1
            for hop in members:
                for before in needs[hop]:
                    there = usable[before]
                    if there < 0:
                        missing = before
                        break
                    if there > start:
                        start, cause = there, group_of[before]
                if missing >= 0:
                    break
            if missing >= 0:
                waiting.setdefault(missing, []).append(group)
                continue
            link = link_of[members[0]]
            holds = all_holds[link]
            for resource, _ in holds:
                if free[resource] > start:
                    start, cause, by_port[group] = free[resource], holder[resource], True
            size = len(members)
            end = start + alpha[link] + size * per_chunk[link]
            busy = start + occupancy[link]
            for resource, hold in holds:
                free[resource] = busy + size * hold
                holder[resource] = group
            if reducing and reduces[layer_of[members[0]]]:
                receiver = machine.receiver[link]
                end = max(engine[receiver], end) + machine.reduce_alpha_fs + size * machine.reduce_chunk_fs
                engine[receiver] = end
            starts[group], causes[group] = start, cause
            for hop in members:
                usable[hop], group_of[hop] = end, group
            if waiting:
                for hop in members:
                    stack += waiting.pop(hop, ())
            done += 1
            total += end
            if end > last:
                last, final = end, group
    if done < count:
        return None
    return Clock(starts, causes, by_port, usable, group_of, last, total, final)
