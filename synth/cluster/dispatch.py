"""List scheduling of millions of messages: whenever a link can carry something, it carries what is due first.

Time is walked in short steps. In a step every port that may send looks at the next few of its messages and proposes the
first that can start; where two need one port, the one that is due first gets it, and the others look again. Steps only
decide the order. Times are exact: a message starts when it is ready and the last of what it holds has been released.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from taccl.synth.cluster.machine import Ints, Lanes

# How many of a port's messages may overtake the one that is due.
WINDOW = 64
# A port looks at them in parts: most often one of the first can start.
LOOKS = (0, 4, 16, WINDOW)
# Steps that a schedule is walked in, at most.
MOST_STEPS = 3_000

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Messages without times, in the order in which they are due; each stands after those that it needs."""

    link: Ints
    reduces: NDArray[np.bool_]
    first: Ints  # [messages + 1]: message i carries chunks[first[i]:first[i + 1]], ascending
    chunks: Ints
    before: Ints  # pairs of messages: before[i] must have been digested at its destination ...
    after: Ints  # ... when after[i] starts
    release_fs: Ints  # no message starts before
    booked: NDArray[np.bool_]  # messages for which what they hold stays free from their release on

    def __len__(self) -> int:
        return len(self.link)


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """When the messages of a plan start, and when the last has been digested."""

    start_fs: Ints
    digested_fs: Ints  # arrivals, or ends of reductions
    time_fs: int


def dispatch(lanes: Lanes, plan: Plan, destination: Ints, free_fs: Ints | None = None) -> Timed:
    """Times for a plan. destination: per link its rank, whose reductions run one after another. free_fs: per resource
    when something before has released it.

    O(messages) for a bounded number of steps; 60 bytes a message. Raises ValueError where a message stands before one
    that it needs.
    """
    if len(plan.before) and int((plan.after - plan.before).min()) <= 0:
        raise ValueError("a message stands before one that it needs")
    return _Walk(lanes, plan, destination, free_fs).run()


class _Walk:
    def __init__(self, lanes: Lanes, plan: Plan, destination: Ints, free_fs: Ints | None) -> None:
        self.lanes, self.link = lanes, plan.link
        count = len(plan)
        self.chunks = np.diff(plan.first)
        order = np.argsort(plan.before, kind="stable")
        self.follower = plan.after[order]
        self.follower_first = np.searchsorted(plan.before[order], np.arange(count + 1))
        self.waiting = np.bincount(plan.after, minlength=count)
        # The entry behind the last stands for no message.
        self.ready = np.zeros(
            count + 1, np.int64
        )  # its release, or the latest arrival so far of what a message needs
        self.usable = np.full(count + 1, _NEVER, np.int64)  # when it is ready, once that is known
        self.ready[:count] = plan.release_fs
        at_once = np.flatnonzero(self.waiting == 0)
        self.usable[at_once] = self.ready[at_once]
        self.start = np.full(count, -1, np.int64)
        self.free = np.zeros(lanes.none + 1, np.int64) if free_fs is None else free_fs.copy()
        self.claim = np.empty(lanes.none + 1, np.int64)
        self.reduce = np.zeros(count, np.int64)
        self.engine = np.zeros(0, np.int64)
        if (lanes.reduce_alpha_fs or lanes.reduce_chunk_fs) and plan.reduces.any():
            self.engine = np.zeros(int(destination.max()) + 1, np.int64)
            self.reduce = np.where(
                plan.reduces, lanes.reduce_alpha_fs + self.chunks * lanes.reduce_chunk_fs, 0
            )
        self.destination = destination
        # Queues: the messages that hold a resource in column 0, in their order.
        owner = lanes.resource[plan.link, 0]
        self.queue_of, line = np.unique(owner, return_inverse=True)
        self.line = np.append(np.argsort(line, kind="stable"), count)
        ends = np.cumsum(np.bincount(line, minlength=len(self.queue_of)))
        self.next = np.concatenate([[0], ends[:-1]])
        self.end = ends
        ahead = self.next[:, None] + np.arange(WINDOW)
        self.window = np.where(ahead < ends[:, None], self.line[np.minimum(ahead, count)], count)
        self.next = np.minimum(self.next + WINDOW, ends)
        self._book(plan)
        self.step = _step_fs(lanes, plan, self.chunks)
        self.arriving: dict[int, list[tuple[Ints, Ints]]] = {}  # step -> messages and when they are digested
        free = self.free[self.queue_of]
        self.known = {
            0,
            *np.unique(plan.release_fs // self.step).tolist(),
            *np.unique(free // self.step).tolist(),
        }
        self.steps = sorted(self.known)

    def _book(self, plan: Plan) -> None:
        """Lists of the bookings of each resource, and from when on the next of each takes it."""
        self.booked = np.append(plan.booked, False)
        rows = np.flatnonzero(plan.booked)
        held = self.lanes.resource[plan.link[rows]]
        resource, since = held.ravel(), np.repeat(plan.release_fs[rows], held.shape[1])
        resource, since = resource[resource != self.lanes.none], since[resource != self.lanes.none]
        order = np.lexsort((since, resource))
        # Behind the bookings of each resource one that never comes.
        several = np.bincount(resource, minlength=self.lanes.none + 1)
        self.booking = np.concatenate([[0], np.cumsum(several[:-1] + 1)])
        self.since = np.full(int(self.booking[-1]) + int(several[-1]) + 1, _NEVER, np.int64)
        shifted = resource[order]  # as many fillers lie before as resources
        self.since[np.arange(len(order)) + shifted] = since[order]
        self.until = self.since[self.booking]
        self.any_booked = bool(len(rows))

    def run(self) -> Timed:
        last = self._all_steps()
        if len(self.start) and int(self.start.min()) < 0:
            # Bookings that wait for one another's feeders: what is left goes as it can.
            self.until[:] = _NEVER
            self.since[:] = _NEVER
            self._visit(0)
            last = max(last, self._all_steps())
        if len(self.start) and int(self.start.min()) < 0:
            raise ValueError("messages wait for one another in a circle")
        transit = self.lanes.transit_fs(self.link, self.chunks)
        return Timed(self.start, self.start + transit + self.reduce, last)

    def _all_steps(self) -> int:
        last = 0
        while self.steps:
            now = heapq.heappop(self.steps)
            self.known.discard(now)
            for messages, times in self.arriving.pop(now, ()):
                last = max(last, int(times.max()))
                self._arrive(messages, times)
            self._serve(now, (now + 1) * self.step)
        return last

    def _arrive(self, messages: Ints, times: Ints) -> None:
        begin, end = self.follower_first[messages], self.follower_first[messages + 1]
        width = end - begin
        total = int(width.sum())
        if not total:
            return
        place = np.arange(total) + np.repeat(begin - (np.cumsum(width) - width), width)
        followers = self.follower[place]
        np.maximum.at(self.ready, followers, np.repeat(times, width))
        np.subtract.at(self.waiting, followers, 1)
        fresh = followers[self.waiting[followers] == 0]
        self.usable[fresh] = self.ready[fresh]

    def _serve(self, now: int, until: int) -> None:
        nobody = len(self.link)
        lanes, free = self.lanes, self.free
        rows = np.flatnonzero((free[self.queue_of] < until) & (self.window[:, 0] < nobody))
        while len(rows):
            column = self._first_that_can(rows, until)
            rows, column = rows[column >= 0], column[column >= 0]
            if not len(rows):
                return
            chosen = self.window[rows, column]
            resource = lanes.resource[self.link[chosen]]
            # Of those that want a resource the first gets it: later assignments overwrite.
            latest_first = np.argsort(-chosen)
            self.claim[resource[latest_first].ravel()] = np.repeat(chosen[latest_first], resource.shape[1])
            won = ((self.claim[resource] == chosen[:, None]) | (resource == lanes.none)).all(axis=1)
            self._start(now, rows[won], column[won], chosen[won], resource[won])
            rows = rows[free[self.queue_of[rows]] < until]

    def _first_that_can(self, rows: Ints, until: int) -> Ints:
        """Per queue the place in its window of the first message that can start before `until`, -1 for none."""
        place = np.full(len(rows), -1, np.int64)
        left = np.arange(len(rows))
        for first, last in pairwise(LOOKS):  # most find one among the first few
            seen = self.window[rows[left], first:last]
            can = self.usable[seen] < until
            line, column = np.nonzero(can)
            message = seen[line, column]
            link = self.link[message]
            held = self.lanes.resource[link]
            available = self.free[held]
            fits = available.max(axis=1) < until
            if self.any_booked:
                start = np.maximum(self.usable[message], available.max(axis=1))
                ends = start[:, None] + self.lanes.holds(link, self.chunks[message])
                fits &= self.booked[message] | (ends <= self.until[held]).all(axis=1)
            can[line, column] = fits
            found = can.any(axis=1)
            place[left[found]] = first + can[found].argmax(axis=1)
            left = left[~found]
            if not len(left):
                break
        return place

    def _start(self, now: int, rows: Ints, column: Ints, chosen: Ints, resource: Ints) -> None:
        lanes = self.lanes
        link, count = self.link[chosen], self.chunks[chosen]
        start = np.maximum(self.usable[chosen], self.free[resource].max(axis=1))
        transit = lanes.transit_fs(link, count)
        if len(self.engine):
            start = self._after_reductions(chosen, start, transit, self.destination[link])
        self.start[chosen] = start
        released = start[:, None] + lanes.holds(link, count)
        self.free[resource] = released
        self.free[lanes.none] = 0
        if self.any_booked:
            over = resource[self.booked[chosen]]
            over = over[over != lanes.none]
            self.booking[over] += 1
            self.until[over] = self.since[self.booking[over]]
        digested = start + transit + self.reduce[chosen]
        at = np.maximum(digested // self.step, now + 1)
        for step in np.unique(at).tolist():
            there = at == step
            self.arriving.setdefault(step, []).append((chosen[there], digested[there]))
            self._visit(step)
        for step in np.unique(released[resource != lanes.none] // self.step).tolist():
            if step > now:
                self._visit(step)
        # The others move up, and one more of the queue comes into sight.
        nobody = len(self.link)
        following = np.where(self.next[rows] < self.end[rows], self.line[self.next[rows]], nobody)
        self.next[rows] = np.minimum(self.next[rows] + 1, self.end[rows])
        wide = np.concatenate([self.window[rows], following[:, None]], axis=1)
        places = np.arange(self.window.shape[1])
        self.window[rows] = np.take_along_axis(wide, places + (places >= column[:, None]), axis=1)

    def _after_reductions(self, chosen: Ints, start: Ints, transit: Ints, rank: Ints) -> Ints:
        """Starts so late that a rank has reduced what came before when a message arrives."""
        start = start.copy()
        for i in np.flatnonzero(self.reduce[chosen]).tolist():
            start[i] = max(start[i], self.engine[rank[i]] - transit[i])
            self.engine[rank[i]] = start[i] + transit[i] + self.reduce[chosen[i]]
        return start

    def _visit(self, step: int) -> None:
        if step not in self.known:
            self.known.add(step)
            heapq.heappush(self.steps, step)


def fullest_fs(lanes: Lanes, link: Ints, count: Ints | int = 1) -> int:
    """How long the fullest link or port is held by messages of so many chunks."""
    load = np.zeros(lanes.none + 1, np.int64)
    for column in range(lanes.resource.shape[1]):
        hold = lanes.occupancy_fs[link] + count * lanes.per_chunk_fs[link, column]
        np.add.at(load, lanes.resource[link, column], hold)
    return int(load[:-1].max(initial=0))


def _step_fs(lanes: Lanes, plan: Plan, chunks: Ints) -> int:
    """Half of the shortest message, unless that makes too many steps of the time the fullest resource takes."""
    if not len(plan):
        return 1
    shortest = int(lanes.transit_fs(plan.link, chunks).min())
    return max(1, shortest // 2, fullest_fs(lanes, plan.link, chunks) // MOST_STEPS)
