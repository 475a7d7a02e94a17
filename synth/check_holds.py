"""Whether links and ports carry one message at a time, for more messages than can be sorted at once.

Intervals of one resource are disjoint exactly when, starts and ends sorted each on their own, no end comes after the
next start: at no time have two more begun than ended. So two sorts of plain integers decide, resource by resource.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.symmetric.prices import Prices

Ints = NDArray[np.int64]

# Intervals that are sorted at once; 100 bytes each.
MOST_AT_ONCE = 1 << 22
MOST_NARROW = 16  # passes over all messages that are cheaper than renumbering times


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """What matters of messages for links and ports; 16 bytes a message."""

    link: NDArray[np.int32]
    start_fs: Ints
    count: NDArray[np.int32]  # chunks


def overlaps(sent: Sent, topology: Topology, links: LinkTable, prices: Prices) -> Iterator[str]:
    """A sentence for each message that starts while a link or port that it needs is still held.

    Times and what is added to them must stay below 2^61. Memory: some 0.4 GB on top of `sent`.
    """
    number_of_links = len(links)
    crossed = [links.ports[:, column] for column in range(links.ports.shape[1])]
    # A link behind a port that it holds at least as long never carries two where the port does not.
    covered = np.zeros(number_of_links, bool)
    for port in crossed:
        if len(prices.port_hold_fs):
            covered |= (port >= 0) & (prices.port_hold_fs[port] >= prices.own_hold_fs)
    # (resource, hold of one chunk) per link, resource -1 where there is none
    own = np.where(covered, -1, np.arange(number_of_links))
    lanes = [(own, prices.own_hold_fs)]
    for port in crossed:
        if len(prices.port_hold_fs):
            lanes.append((np.where(port >= 0, number_of_links + port, -1), prices.port_hold_fs[port]))
    load = np.zeros(number_of_links + len(topology.ports) + 1, np.int64)  # the last entry takes the -1
    per_link = np.bincount(sent.link, minlength=number_of_links)
    for resource, _ in lanes:
        np.add.at(load, resource, per_link)
    used = np.flatnonzero(load[:-1])
    load[-1] = 0
    dense = np.where(load > 0, np.cumsum(load > 0) - 1, -1)  # resources in use are renumbered
    lanes = [(dense[resource], hold) for resource, hold in lanes]
    longest = max(int(hold.max(initial=0)) for _, hold in lanes) * int(sent.count.max(initial=0))
    latest = int(sent.start_fs.max(initial=0)) + int(prices.occupancy_fs.max(initial=0)) + longest
    for first, last in _blocks(load[used], latest):
        found = list(_collect(sent, lanes, prices.occupancy_fs, first, last))
        resource, start, end = (np.concatenate([part[i] for part in found]) for i in range(3))
        for guilty in (_twice_held(resource - first, start, end) + first).tolist():
            resource_id = int(used[guilty])
            name = f"link {resource_id}"
            if resource_id >= number_of_links:
                name = f"port {topology.ports[resource_id - number_of_links].name}"
            yield from _explain(sent, links, lanes, prices.occupancy_fs, guilty, name)


def _blocks(load: Ints, latest_fs: int) -> Iterator[tuple[int, int]]:
    """Ranges of resources with some MOST_AT_ONCE intervals each, or one resource of more.

    If that does not make too many, they are narrow enough for a resource and a time to fit into 63 bits.
    """
    width = 1 << max(0, 63 - latest_fs.bit_length())
    if len(load) > MOST_NARROW * width:
        width = len(load)
    total = np.cumsum(load)
    first = done = 0
    while first < len(load):
        last = int(np.searchsorted(total, done + MOST_AT_ONCE, "right"))
        last = max(first + 1, min(last, first + width))
        yield first, last
        first, done = last, int(total[last - 1])


def _collect(
    sent: Sent, lanes: list[tuple[Ints, Ints]], occupancy_fs: Ints, first: int, last: int
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """(resource, start, end) of what holds the resources first..last-1."""
    for resource, hold in lanes:
        wanted = (resource >= first) & (resource < last)
        if not wanted.any():
            yield np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
            continue
        link, start, count = sent.link, sent.start_fs, sent.count
        if not wanted.all():
            chosen = np.flatnonzero(wanted[link])
            link, start, count = link[chosen], start[chosen], count[chosen]
        yield resource[link], start, start + occupancy_fs[link] + count * hold[link]


def _twice_held(resource: Ints, start: Ints, end: Ints) -> Ints:
    """The resources of which intervals meet."""
    if not len(resource):
        return resource
    bits = int(end.max()).bit_length()
    if int(resource.max()).bit_length() + bits > 63:
        times, place = np.unique(np.concatenate([start, end]), return_inverse=True)
        start, end = place[: len(start)], place[len(start) :]
        bits = len(times).bit_length()
    begun, ended = (resource << bits) + start, (resource << bits) + end
    begun.sort()
    ended.sort()
    met = ended[:-1] > begun[1:]
    return np.unique(ended[:-1][met] >> bits)


def _explain(
    sent: Sent, links: LinkTable, lanes: list[tuple[Ints, Ints]], occupancy_fs: Ints, resource: int, name: str
) -> Iterator[str]:
    intervals = []
    for held, hold in lanes:
        for number in np.flatnonzero((held == resource)[sent.link]).tolist():
            link, start = int(sent.link[number]), int(sent.start_fs[number])
            until = start + int(occupancy_fs[link]) + int(sent.count[number]) * int(hold[link])
            intervals.append((start, until, number))
    intervals.sort()
    latest, owner = -1, -1
    for start, until, number in intervals:
        if start < latest:
            yield (
                f"{_name(sent, links, number)}: {name} is still held by "
                f"{_name(sent, links, owner)} until {latest} fs"
            )
        if until > latest:
            latest, owner = until, number


def _name(sent: Sent, links: LinkTable, number: int) -> str:
    link = int(sent.link[number])
    return f"message {number} (link {link}, {links.src[link]}->{links.dst[link]}, {sent.start_fs[number]} fs)"
