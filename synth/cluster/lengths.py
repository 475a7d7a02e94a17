"""How long messages between nodes should be: tried, counted, the best kept.

Docs: docs/synthesis.md, "Irregular clusters".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from taccl.profiles.link_table import link_table
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Message
from taccl.synth.cluster.machine import Cluster, cluster
from taccl.synth.cluster.pieces import Run, contents, plan, shares
from taccl.synth.collective import build
from taccl.synth.cost import Costs, costs
from taccl.synth.schedule import Transfer, Unordered, completion_fs, time_batched, time_by_priority
from taccl.synth.symmetric.prices import prices

# Chunks a block that are tried where nobody asks for a number, and how many of them, those that fill ports most evenly.
FINEST, COARSEST = 16, 4
MOST_CHUNKINGS = 3
LEAST_BYTES = 256
# A chunk shorter than this share of a message's fixed cost makes more steps than difference.
LEAST_SHARE = Fraction(1, 4)
Profiles = tuple[tuple[int, ...], ...]  # by round between nodes: chunks of each message of the fullest link
# Shares of the messages of the last round, and of those before; the best is then changed chunk by chunk.
PROFILES: tuple[tuple[float, ...], ...] = (
    (0.65, 0.35), (0.58, 0.33, 0.09), (0.5, 0.3, 0.2), (0.25, 0.5, 0.25), (0.4, 0.3, 0.2, 0.1), (1.0,),
)  # fmt: skip


EARLIER: tuple[tuple[float, ...], ...] = ((1.0,), (0.5, 0.5))


@dataclass(frozen=True, slots=True)
class Lengths:
    """A timed allgather: chunks a block, its messages in order of start, and its time."""

    partition: int
    messages: tuple[Message, ...]
    time_fs: int


@dataclass(frozen=True, slots=True, eq=False)
class _Chunking:
    partition: int
    machine: Cluster
    costs: Costs
    carried: dict[int, list[Run]]
    most: tuple[int, ...]  # by round the chunks of the fullest link


def lengths(
    topology: Topology, block_bytes: Fraction, wanted: int | None, work: int, should_stop: Callable[[], bool]
) -> Iterator[Lengths]:
    """Allgathers as they are found, each quicker than those before of as many chunks.

    wanted: the number of chunks a block, None for any. work: transfers that may be timed. None where some node has no
    link to some other, or where messages cost no more than their bytes.
    """
    chunkings = _chunkings(topology, block_bytes, wanted)
    known: dict[int, int] = {}
    best: tuple[int, int, Profiles, bool] | None = None
    spent = 0

    def tried(number: int, parts: Profiles, direct: bool) -> Iterator[Lengths]:
        nonlocal best, spent
        chunking = chunkings[number]
        found = _timed(topology, chunking, parts, direct)
        if found is None:
            return
        spent += len(found.messages)
        if best is None or found.time_fs < best[0]:
            best = found.time_fs, number, parts, direct
        if found.time_fs < known.get(found.partition, found.time_fs + 1):
            known[found.partition] = found.time_fs
            yield found

    for profile in PROFILES:
        for number, chunking in enumerate(chunkings):
            for earlier in EARLIER if len(chunking.most) > 1 else EARLIER[:1]:
                for direct in (True,) if _joined(chunking.machine) else (False, True):
                    if (best is not None and spent >= work) or should_stop():
                        return
                    cuts = [earlier] * (len(chunking.most) - 1) + [profile]
                    parts = tuple(_whole(total, cut) for total, cut in zip(chunking.most, cuts, strict=True))
                    yield from tried(number, parts, direct)
    seen: set[Profiles] = set()
    while best is not None:
        time_fs, number, parts, direct = best
        changed = (
            (*parts[:i], cut, *parts[i + 1 :])
            for i in reversed(range(len(parts)))
            for cut in _neighbours(parts[i])
        )
        for other in changed:
            if spent >= work or should_stop():
                return
            if other not in seen:
                seen.add(other)
                yield from tried(number, other, direct)
            if best[0] < time_fs:
                break
        else:
            return


def _chunkings(topology: Topology, block_bytes: Fraction, wanted: int | None) -> list[_Chunking]:
    links = link_table(topology)
    found: list[tuple[float, int, _Chunking]] = []
    for partition in [wanted] if wanted else range(COARSEST, FINEST + 1):
        size = block_bytes / partition
        if not wanted and size < LEAST_BYTES:
            break
        machine = cluster(topology, links, prices(topology, links, size))
        if machine is None:
            return []
        lanes = machine.lanes
        across = machine.gates[machine.gates >= 0]
        fixed, each = int(np.median(lanes.occupancy_fs[across])), int(np.median(lanes.chunk_fs[across]))
        if not fixed or (each < LEAST_SHARE * fixed and not wanted):
            continue
        known: list[dict[int, int]] = []
        for own_first in (False, True) if machine.nodes > 2 else (False,):
            share = shares(machine, partition, own_first)
            if share in known:
                continue
            known.append(share)
            load = np.zeros(lanes.none + 1, np.int64)
            used = np.array(sorted(share), np.int64)
            count = np.array([share[e] for e in used.tolist()], np.int64)
            np.add.at(load, lanes.resource[used], count[:, None] * lanes.per_chunk_fs[used])
            load[lanes.none] = 0
            rounds = (machine.node_of[links.dst[used]] - machine.node_of[links.src[used]]) % machine.nodes
            most = tuple(int(count[rounds == shift].max()) for shift in range(1, machine.nodes))
            chunking = _Chunking(
                partition, machine, costs(topology, size), contents(machine, partition, share), most
            )
            found.append((round(float(load.max()) / fixed, 1), -partition, chunking))
    return [chunking for _, _, chunking in sorted(found, key=lambda entry: entry[:2])[:MOST_CHUNKINGS]]


def _joined(machine: Cluster) -> bool:
    """Whether in nodes nearly every rank has a link to each other."""
    pairs = {(int(machine.links.src[e]), int(machine.links.dst[e])) for mine in machine.inside for e in mine}
    return 4 * len(pairs) >= 3 * int((machine.sizes * (machine.sizes - 1)).sum())


def _whole(total: int, profile: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the profile's proportions; none of them 0."""
    bounds = [round(total * sum(profile[:i]) / sum(profile)) for i in range(len(profile) + 1)]
    return tuple(b - a for a, b in pairwise(bounds) if b > a)


def _neighbours(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One chunk from a message to one beside it; one message more or less."""
    for i in range(len(parts) - 1):
        for give, take in ((i, i + 1), (i + 1, i)):
            moved = list(parts)
            moved[give] -= 1
            moved[take] += 1
            yield tuple(part for part in moved if part)
    for i, part in enumerate(parts):
        if part > 1:
            yield (*parts[:i], part - part // 2, part // 2, *parts[i + 1 :])


def _timed(topology: Topology, chunking: _Chunking, parts: Profiles, direct: bool) -> Lengths | None:
    made = plan(chunking.machine, chunking.partition, chunking.carried, parts, direct)
    if made is None:
        return None
    collective = build("allgather", topology.ranks, chunking.partition)
    transfers = [Transfer(hop.link, hop.chunks) for hop in made]
    inside = frozenset(e for mine in chunking.machine.inside for e in mine.tolist())
    try:
        both = [
            time_by_priority(topology, collective, chunking.costs, transfers),
            time_batched(topology, collective, chunking.costs, transfers, links=inside),
        ]
    except Unordered:
        return None  # dues are estimates: where few links lead on, something would be sent before it is there
    times = [completion_fs(chunking.costs, messages) for messages in both]
    best = times.index(min(times))
    return Lengths(chunking.partition, both[best], times[best])
