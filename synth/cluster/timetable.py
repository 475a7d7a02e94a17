"""When messages between nodes should cross, before anything within nodes is looked at.

Three ways: all in lockstep, in the order of rounds; the messages of the fullest ports first, and the others around
them; or whoever can starts, the most urgent first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taccl.synth.cluster.dispatch import Plan, dispatch, fullest_fs
from taccl.synth.cluster.in_order import in_order
from taccl.synth.cluster.machine import Ints, Lanes

# Lockstep this near to the load of the fullest port is good enough.
NEAR = 1.005
# Ports this full, relative to the fullest, have their messages planned first, if those are few enough.
FULL = 0.97
MOST_FULL = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Timetable:
    """Entry i is message i between nodes."""

    due_fs: Ints
    release_fs: Ints
    booked: NDArray[np.bool_]


def timetables(lanes: Lanes, link: Ints, chunks: Ints, destination: Ints) -> Iterator[Timetable]:
    """Timetables for messages of so many chunks over links between nodes, in the order of rounds; the most promising
    first. destination: per link its rank."""
    count = len(link)
    nothing, never = np.zeros(count, np.int64), np.zeros(count, bool)
    held, holds = lanes.resource[link], lanes.holds(link, chunks)
    load = np.zeros(lanes.none + 1, np.int64)
    np.add.at(load, held, holds)
    load[lanes.none] = 0
    fullest = fullest_fs(lanes, link, chunks)
    lockstep = in_order(lanes, link, chunks)
    together = int((lockstep[:, None] + holds)[held != lanes.none].max(initial=0))
    if together <= NEAR * fullest:
        yield Timetable(lockstep, lockstep, never)
        return
    latest = latest_starts(lanes, link, chunks)
    full = load >= FULL * fullest
    urgent = np.flatnonzero(full[held].any(axis=1))
    if len(urgent) <= MOST_FULL * count:
        urgent = urgent[np.argsort(latest[urgent], kind="stable")]
        starts = dispatch(lanes, free_plan(link[urgent], chunks[urgent]), destination).start_fs
        due, release, booked = latest.copy(), nothing.copy(), never.copy()
        due[urgent] = release[urgent] = starts
        booked[urgent] = True
        yield Timetable(due, release, booked)
    yield Timetable(latest, nothing, never)
    yield Timetable(lockstep, lockstep, never)


def free_plan(link: Ints, chunks: Ints) -> Plan:
    """Messages of so many chunks that wait for nothing but links and ports, due in this order."""
    none = np.zeros(0, np.int64)
    first = np.concatenate([[0], np.cumsum(chunks)])
    idle = np.zeros(len(link), bool)
    return Plan(link, idle, first, np.arange(first[-1]), none, none, np.zeros(len(link), np.int64), idle)


def latest_starts(lanes: Lanes, link: Ints, chunks: Ints) -> Ints:
    """When messages of so many chunks must start at the latest for every resource to be done when the fullest is, if
    each takes what it carries in the order in which it stands."""
    held = lanes.resource[link]
    holds = np.where(held == lanes.none, 0, lanes.holds(link, chunks))
    # All (message, resource) pairs by resource, the last message first; sums run through.
    resource, hold = held.ravel(), holds.ravel()
    order = np.lexsort((-np.arange(len(resource)), resource))
    total = np.cumsum(hold[order])
    new = np.flatnonzero(np.diff(resource[order], prepend=-1))
    base = np.repeat(total[new] - hold[order][new], np.diff(np.append(new, len(order))))
    rest = np.empty(len(order), np.int64)
    rest[order] = total - base
    rest = np.where(held == lanes.none, 0, rest.reshape(held.shape)).max(axis=1)
    latest: Ints = rest.max(initial=0) - rest
    return latest


def slot_holds(lanes: Lanes, across: Ints, link: Ints) -> Ints:
    """Holds as they count for balance: longer than the usual one between nodes, a whole number of usual ones, since
    messages that meet at a port take turns with usual ones."""
    held, holds = lanes.resource[across], lanes.holds(across)
    values, several = np.unique(holds[held != lanes.none], return_counts=True)
    usual = max(1, int(values[several.argmax()]))
    mine = lanes.holds(link.ravel())
    slots = np.where(mine > usual, -(-mine // usual) * usual, mine)
    return np.where(lanes.resource[link.ravel()] == lanes.none, 0, slots)
