"""An independent judge of schedules with millions of messages: `check_table`.

It says of columns what `check_algorithm` says of objects. It shares the cost model with synthesis and nothing else;
of symmetry it knows nothing. Messages come in batches, so that they need never be in memory all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.link_table import LinkTable
from taccl.profiles.topology import Topology
from taccl.synth.check_flow import Hops, flow_problems
from taccl.synth.check_holds import Sent, overlaps
from taccl.synth.message_table import MessageTable, joined, message_table
from taccl.synth.places import Places
from taccl.synth.symmetric.prices import Prices, prices

Ints = NDArray[np.int64]

MAX_PROBLEMS = 50
LATEST_FS = 1 << 60  # 19 minutes; sums of a few such numbers are still exact


def check_table(
    topology: Topology,
    links: LinkTable,
    places: Places,
    size_bytes: int,
    batches: Iterable[MessageTable],
    time_fs: int,
) -> list[str]:
    """What is wrong with a schedule, one sentence a problem; empty if it is right.

    links: the table of `topology.links`, which themselves are not looked at. batches: the messages; each holds all
    messages of the chunks that appear in it. The verdict is that of `check_algorithm`, up to times of
    19 minutes, beyond which a schedule is refused. Messages are numbered in the order in which they come.

    O(m log m). Memory: 16 bytes a message, 0.5 GB for checking links and ports, and some 200 bytes for each chunk-hop
    of the largest batch; reductions that take time make one batch of all. Reductions that are no trees (recursive
    doubling, one-shot) take 4 us a chunk-hop instead of 0.4 us.

    Raises ValueError when a chunk appears in two batches, UsageError where a chunk takes more than 4 s.
    """
    problems: list[str] = []
    for problem in _problems(topology, links, places, size_bytes, batches, time_fs):
        problems.append(problem)
        if len(problems) == MAX_PROBLEMS:
            problems.append(f"stopped after {MAX_PROBLEMS} problems")
            break
    return problems


def _problems(
    topology: Topology,
    links: LinkTable,
    places: Places,
    size_bytes: int,
    batches: Iterable[MessageTable],
    time_fs: int,
) -> Iterator[str]:
    if places.ranks != topology.ranks:
        yield f"the algorithm is for {places.ranks} ranks, {topology.name} has {topology.ranks}"
        return
    price = prices(topology, links, places.chunk_bytes(size_bytes))
    reducing_takes_time = price.reduce_alpha_fs + price.reduce_chunk_fs > 0
    if places.combining and reducing_takes_time:
        batches = [joined(list(batches))]  # a rank's reductions wait for one another across batches
    seen = np.zeros(places.chunks, bool)
    sent: list[Sent] = []
    numbered = last = 0
    malformed = False
    for table in batches:
        for problem in _form(table, numbered, links, price, places):
            malformed = True
            yield problem
        if not malformed:
            here = np.zeros(places.chunks, bool)
            here[table.chunks] = True
            if (seen & here).any():
                raise ValueError(f"chunk {np.flatnonzero(seen & here)[0]} appears in two batches")
            seen |= here
            count = np.diff(table.first)
            ready = table.end_fs
            if reducing_takes_time and table.reduces.any():
                if _longest_engine_fs(table, count, price) > LATEST_FS:
                    yield "a rank reduces for more than 19 minutes"
                    return
                ready = _reduction_ends(table, count, price)
            last = max(last, int(ready.max(initial=0)))
            yield from flow_problems(_hops(table, count, ready, numbered), places, np.flatnonzero(here))
            sent.append(Sent(table.link.astype(np.int32), table.start_fs, count.astype(np.int32)))
        numbered += len(table)
    if malformed:
        return
    unsent = np.flatnonzero(~seen)
    if len(unsent):
        empty = message_table(())
        yield from flow_problems(_hops(empty, empty.link, empty.link, 0), places, unsent)
    if sent:
        whole = Sent(
            np.concatenate([part.link for part in sent]),
            np.concatenate([part.start_fs for part in sent]),
            np.concatenate([part.count for part in sent]),
        )
        sent.clear()
        yield from overlaps(whole, topology, links, price)
    if last != time_fs:
        yield f"time_fs is {time_fs}, but the last arrival or reduction ends at {last} fs"


def _form(
    table: MessageTable, numbered: int, links: LinkTable, price: Prices, places: Places
) -> Iterator[str]:
    """Whether messages follow their links, name chunks and keep to the cost model."""
    rows = len(table)
    columns = (table.src, table.dst, table.start_fs, table.end_fs, table.reduces)
    if any(len(column) != rows for column in columns) or len(table.first) != rows + 1:
        yield f"messages from {numbered} on: the columns have different lengths"
        return
    if not rows:
        return
    count = np.diff(table.first)
    if table.first[0] != 0 or table.first[-1] != len(table.chunks) or int(count.min()) < 1:
        yield f"messages from {numbered} on: every message must have chunks, and every chunk a message"
        return

    def each(wrong: NDArray[np.bool_], what: str) -> Iterator[str]:
        for row in np.flatnonzero(wrong).tolist():
            op = "reduce" if table.reduces[row] else "copy"
            route = f"{table.src[row]}->{table.dst[row]}, {table.start_fs[row]} fs"
            yield f"message {numbered + row} ({op} of chunk {table.chunks[table.first[row]]}, {route}): {what}"

    unknown = (table.link < 0) | (table.link >= len(links))
    if unknown.any():
        yield from each(unknown, f"its link does not exist (links are 0..{len(links) - 1})")
        return
    wrong = (links.src[table.link] != table.src) | (links.dst[table.link] != table.dst)
    yield from each(wrong, "its link joins other ranks")
    bad = (table.chunks < 0) | (table.chunks >= places.chunks)
    if len(table.chunks) > rows:
        bad[1:] |= table.chunks[1:] <= table.chunks[:-1]
        bad[table.first[:-1]] = False
        bad |= (table.chunks < 0) | (table.chunks >= places.chunks)
    if bad.any():
        per_message = np.add.reduceat(bad, table.first[:-1], dtype=np.int64) > 0
        yield from each(
            per_message, f"chunks must be ascending, without repeats, among 0..{places.chunks - 1}"
        )
    if not places.combining:
        yield from each(table.reduces, f"op 'reduce' has no meaning in {places.name}")
    yield from each(table.start_fs < 0, "starts before time 0")
    most = int(count.max())
    longest = max(
        int(price.alpha_fs.max()) + most * int(price.chunk_fs.max()),
        price.reduce_alpha_fs + most * price.reduce_chunk_fs,
    )
    late = table.start_fs > LATEST_FS
    if late.any() or longest > LATEST_FS:
        yield from each(late | (longest > LATEST_FS), "ends later than 19 minutes after the start")
        return
    wrong = table.end_fs - table.start_fs != price.alpha_fs[table.link] + count * price.chunk_fs[table.link]
    yield from each(wrong, "does not arrive when the cost model says")


def _hops(table: MessageTable, count: Ints, ready: Ints, numbered: int) -> Hops:
    message = np.arange(len(table), dtype=np.int64)
    if len(table.chunks) == len(table):
        return Hops(
            table.chunks,
            table.src,
            table.dst,
            table.start_fs,
            ready,
            table.reduces,
            table.link,
            message + numbered,
        )
    row = np.repeat(message, count)
    return Hops(
        table.chunks,
        table.src[row],
        table.dst[row],
        table.start_fs[row],
        ready[row],
        table.reduces[row],
        table.link[row],
        row + numbered,
    )


def _reduction_ends(table: MessageTable, count: Ints, price: Prices) -> Ints:
    """When each message can be used at its destination: a rank reduces one at a time, in order of arrival.

    Of equal arrivals the one that started first goes first, then that of the smaller link.
    """
    ready: Ints = table.end_fs.copy()
    rows = np.flatnonzero(table.reduces)
    order = np.lexsort((rows, table.link[rows], table.start_fs[rows], table.end_fs[rows], table.dst[rows]))
    rows = rows[order]
    arrival = table.end_fs[rows]
    cost = price.reduce_alpha_fs + count[rows] * price.reduce_chunk_fs
    bounds = np.flatnonzero(np.diff(table.dst[rows], prepend=-1, append=-1)).tolist()
    for first, last in pairwise(bounds):
        # end[i] = max(end[i - 1], arrival[i]) + cost[i], as a running maximum of arrival less what went before
        spent = np.cumsum(cost[first:last])
        idle = np.maximum.accumulate(arrival[first:last] - spent + cost[first:last])
        ready[rows[first:last]] = spent + idle
    return ready


def _longest_engine_fs(table: MessageTable, count: Ints, price: Prices) -> int:
    """The most that a rank's reductions take together."""
    dst = table.dst[table.reduces]
    messages = np.bincount(dst).tolist()
    hops = np.bincount(dst, count[table.reduces]).tolist()  # far below 2^53
    times = [
        m * price.reduce_alpha_fs + int(h) * price.reduce_chunk_fs
        for m, h in zip(messages, hops, strict=True)
    ]
    return max(times, default=0)
