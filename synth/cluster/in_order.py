"""Times of messages whose order on every link and port is fixed: the longest path through what waits for what."""

from __future__ import annotations

import numpy as np

from taccl.synth.cluster.machine import Ints, Lanes


def in_order(lanes: Lanes, link: Ints, chunks: Ints) -> Ints:
    """Starts of messages of so many chunks that hold every resource in the order in which they stand.

    Level by level, each all at once: O(messages) and as many levels as the longest chain has messages.
    """
    count, width = len(link), lanes.resource.shape[1]
    held, holds = lanes.resource[link], lanes.holds(link, chunks)
    message = np.repeat(np.arange(count), width)
    resource = held.ravel()
    there = np.flatnonzero(resource != lanes.none)
    order = there[np.argsort(resource[there], kind="stable")]  # by resource, then as they stand
    same = np.flatnonzero(resource[order[1:]] == resource[order[:-1]])
    before, after = message[order[same]], message[order[same + 1]]
    lag = holds.ravel()[order[same]]
    by_first = np.argsort(before, kind="stable")
    after, lag = after[by_first], lag[by_first]
    first = np.searchsorted(before[by_first], np.arange(count + 1))
    waiting = np.bincount(after, minlength=count)
    start = np.zeros(count, np.int64)
    level = np.flatnonzero(waiting == 0)
    while len(level):
        begin, fan = first[level], first[level + 1] - first[level]
        edge = np.arange(int(fan.sum())) + np.repeat(begin - (np.cumsum(fan) - fan), fan)
        following = after[edge]
        np.maximum.at(start, following, np.repeat(start[level], fan) + lag[edge])
        np.subtract.at(waiting, following, 1)
        level = np.unique(following[waiting[following] == 0])
    return start
