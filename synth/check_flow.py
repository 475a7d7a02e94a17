"""Whether data is where it is sent from, and ends where it is wanted, for messages as columns.

All hops of a chunk must be given together. Copies are judged by the earliest arrival at each rank. Reductions that
form a tree (every rank but one sends its sum once, after all that flows into it) are right, and so is what is copied
from the root's sum: both are told with sorts. Only what is neither is walked through event by event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taccl.synth.places import Places

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Hops:
    """Row i: one chunk of one message."""

    chunk: Ints
    src: Ints
    dst: Ints
    start_fs: Ints
    ready_fs: Ints  # of its arrival, or of the end of its reduction
    reduces: Flags
    link: Ints
    message: Ints  # its number, for people and to break ties

    def __len__(self) -> int:
        return len(self.chunk)

    def rows(self, which: Ints | Flags) -> Hops:
        """Some of the rows."""
        return Hops(
            self.chunk[which],
            self.src[which],
            self.dst[which],
            self.start_fs[which],
            self.ready_fs[which],
            self.reduces[which],
            self.link[which],
            self.message[which],
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Moments:
    """One moment for each (chunk, rank) that has one; keys are chunk * ranks + rank, ascending."""

    keys: Ints
    fs: Ints

    def at(self, keys: Ints, otherwise: int) -> Ints:
        """The moments of these keys."""
        if not len(self.keys):
            return np.full(len(keys), otherwise, np.int64)
        place = np.searchsorted(self.keys, keys)
        place[place == len(self.keys)] = 0
        return np.where(self.keys[place] == keys, self.fs[place], otherwise)

    def has(self, keys: Ints) -> Flags:
        """Whether these keys have a moment."""
        return self.at(keys, -1) >= 0


_NEVER = np.iinfo(np.int64).max


def flow_problems(hops: Hops, places: Places, chunks: Ints) -> Iterator[str]:
    """What is wrong with where the data of `chunks` (ascending) goes; `hops` are all hops of them and no others."""
    if places.combining:
        yield from _reduced(hops, places, chunks)
    else:
        yield from _copied(hops, places, chunks)


def _copied(hops: Hops, places: Places, chunks: Ints) -> Iterator[str]:
    n = places.ranks
    arrival = _earliest(hops.chunk * n + hops.dst, hops.ready_fs)
    source = places.source(hops.chunk)
    assert source is not None
    relayed = np.flatnonzero(hops.src != source)
    had = arrival.at(hops.chunk[relayed] * n + hops.src[relayed], _NEVER)
    for hop in relayed[had > hops.start_fs[relayed]].tolist():
        yield _not_there(hops, hop)
    origin = places.source(chunks)
    assert origin is not None
    for chunk in chunks[~_delivered(arrival, places, chunks, origin)].tolist():
        start = int(places.source(np.array([chunk]))[0])  # type: ignore[index]
        for rank in _wanted_by(places, chunk):
            if rank != start and not arrival.has(np.array([chunk * n + rank]))[0]:
                yield f"rank {rank} never gets chunk {chunk}"


def _reduced(hops: Hops, places: Places, chunks: Ints) -> Iterator[str]:
    n = places.ranks
    local = np.searchsorted(chunks, hops.chunk)
    right = np.ones(len(chunks), bool)
    sums, copies = np.flatnonzero(hops.reduces), np.flatnonzero(~hops.reduces)

    # Every rank but one sends its sum once, and after all that flows into it.
    sent = hops.chunk[sums] * n + hops.src[sums]
    in_order = np.sort(sent)
    right[np.searchsorted(chunks, in_order[1:][in_order[1:] == in_order[:-1]] // n)] = False
    count = np.bincount(local[sums], minlength=len(chunks))
    right &= count == n - 1
    # Sums of ranks are whole numbers far below 2^53. The root is the rank that sends nothing.
    senders = np.bincount(local[sums], hops.src[sums], len(chunks)).astype(np.int64)
    root = np.where(right, n * (n - 1) // 2 - senders, 0)
    full = _earliest(hops.chunk[sums] * n + hops.dst[sums], -hops.ready_fs[sums])  # minus the last
    early = -full.at(sent, 1) > hops.start_fs[sums]
    right[local[sums[early]]] = False

    # The sum spreads from the root. With all copies behind the last reduction nothing else can change it.
    arrival = _earliest(hops.chunk[copies] * n + hops.dst[copies], hops.ready_fs[copies])
    complete = -full.at(chunks * n + root, 0)
    from_root = hops.src[copies] == root[local[copies]]
    had = np.where(
        from_root,
        complete[local[copies]],
        arrival.at(hops.chunk[copies] * n + hops.src[copies], _NEVER),
    )
    right[local[copies[had > hops.start_fs[copies]]]] = False
    right &= _delivered(arrival, places, chunks, root)

    doubtful = np.flatnonzero(~right)
    if len(doubtful):
        chosen = np.flatnonzero(~right[local])
        chosen = chosen[np.argsort(local[chosen], kind="stable")]
        ends = np.searchsorted(local[chosen], doubtful, "right")
        starts = np.searchsorted(local[chosen], doubtful, "left")
        for which, start, end in zip(doubtful.tolist(), starts.tolist(), ends.tolist(), strict=True):
            yield from _walk(hops.rows(chosen[start:end]), places, int(chunks[which]))


# What happens at one instant happens in this order: what arrives or is reduced then can be sent then.
_ARRIVAL, _REDUCED, _START = range(3)


def _walk(hops: Hops, places: Places, chunk: int) -> Iterator[str]:
    """One chunk of a reduction through time. A value is two bit sets: contributions, those in it more than once."""
    value = {rank: (1 << rank, 0) for rank in range(places.ranks)}
    events = []
    columns = (hops.start_fs, hops.ready_fs, hops.reduces, hops.link, hops.message)
    for hop, (start, ready, reduces, link, message) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        turn = (start, link, message)
        events.append((start, _START, turn, hop))
        events.append((ready, _REDUCED if reduces else _ARRIVAL, turn, hop))
    events.sort()
    src, dst = hops.src.tolist(), hops.dst.tolist()
    carried: dict[int, tuple[int, int]] = {}
    for _, kind, _, hop in events:
        if kind == _START:
            carried[hop] = value[src[hop]]
        elif kind == _ARRIVAL:
            value[dst[hop]] = carried.pop(hop)
        else:
            sent, sent_twice = carried.pop(hop)
            mine, twice = value[dst[hop]]
            value[dst[hop]] = (mine | sent, twice | sent_twice | (mine & sent))
    for rank in _wanted_by(places, chunk):
        have, twice = value[rank]
        lacking = ~have & ((1 << places.ranks) - 1)
        for bits, fault in ((lacking, "are missing"), (twice, "are in it twice")):
            if bits:
                whose = [r for r in range(places.ranks) if bits >> r & 1]
                yield f"rank {rank}, chunk {chunk}: the contributions of ranks {whose} {fault}"


def _delivered(arrival: _Moments, places: Places, chunks: Ints, origin: Ints) -> Flags:
    """Per chunk whether it arrives wherever it is wanted; at `origin` it is from the beginning."""
    n = places.ranks
    destination = places.destination(chunks)
    if destination is not None:
        there: Flags = (destination == origin) | arrival.has(chunks * n + destination)
        return there
    chunk = np.searchsorted(chunks, arrival.keys // n)
    elsewhere = arrival.keys % n != origin[chunk]
    everywhere: Flags = np.bincount(chunk[elsewhere], minlength=len(chunks)) == n - 1
    return everywhere


def _wanted_by(places: Places, chunk: int) -> list[int]:
    destination = places.destination(np.array([chunk]))
    return list(range(places.ranks)) if destination is None else destination.tolist()


def _earliest(keys: Ints, fs: Ints) -> _Moments:
    """The least of the moments of each key."""
    if not len(keys):
        return _Moments(keys, fs)
    order = np.argsort(keys)
    keys, fs = keys[order], fs[order]
    new = np.empty(len(keys), bool)
    new[0] = True
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    if new.all():
        return _Moments(keys, fs)
    first = np.flatnonzero(new)
    return _Moments(keys[first], np.minimum.reduceat(fs, first))


def _not_there(hops: Hops, hop: int) -> str:
    src, chunk = hops.src[hop], hops.chunk[hop]
    return (
        f"message {hops.message[hop]} (copy of chunk {chunk}, {src}->{hops.dst[hop]}, {hops.start_fs[hop]} fs): "
        f"rank {src} does not have chunk {chunk} yet"
    )
