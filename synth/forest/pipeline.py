"""Chunks down their trees as a pipeline: the order in which the list scheduler is to serve them.

Chunks of one tree are spread evenly over the time that the fullest resource needs, and each hop is due when its chunk
would get there if nothing were in the way.
"""

from __future__ import annotations

from collections.abc import Sequence

from taccl.synth.forest.fluid import Side, Tree
from taccl.synth.symmetric.hops import RepHop, quickest
from taccl.synth.symmetric.instance import Instance
from taccl.synth.symmetric.timing import Timing


def piped(
    inst: Instance, sides: Sequence[Side], trees: Sequence[Tree], counts: Sequence[int], period_fs: float
) -> tuple[list[RepHop], list[int], Timing]:
    """(hops, per representative chunk its group, when they start).

    Chunks are numbered group by group. period_fs: how long the fullest resource is busy.
    """
    listed: dict[
        int, list[tuple[Tree, float]]
    ] = {}  # side -> its chunks: tree and release, in order of release
    for tree, n in zip(trees, counts, strict=True):
        listed.setdefault(tree.side, []).extend((tree, (j + 0.5) / n * period_fs) for j in range(n))
    for chunks in listed.values():
        chunks.sort(key=lambda entry: entry[1])
    places = sorted({side.group for side in sides})
    mine: list[dict[bool, int]] = [{} for _ in range(1 + max(places))]
    for number, side in enumerate(sides):
        mine[side.group][side.collects] = number
    entries: list[tuple[float, int, int, int, bool]] = []  # (due, rank in ties, chunk, link, reduces)
    groups: list[int] = []
    chunk = 0
    for group in places:
        up, down = listed.get(mine[group].get(True, -1), []), listed.get(mine[group].get(False, -1), [])
        for number in range(max(len(up), len(down))):
            groups.append(group)
            ready = 0.0
            if up:
                tree, release = up[number]
                way = _ways(inst, tree, True)
                ready = release + max(way)
                # The link nearest to the root comes last.
                for link, level, far in zip(tree.links, tree.levels, way, strict=True):
                    entries.append((ready - far, -level, chunk, link, True))
            if down:
                tree, release = down[number]
                start = max(ready, release) if up else release
                way = _ways(inst, tree, False)
                for link, level, far in zip(tree.links, tree.levels, way, strict=True):
                    transit = inst.lane_transit_fs[int(inst.lane[link])]
                    entries.append((start + far - transit, inst.ranks + level, chunk, link, False))
            chunk += 1
    # Within a chunk the order of need wins over rounding in sums.
    entries.sort()
    return _hops(inst, entries, groups)


def _ways(inst: Instance, tree: Tree, collects: bool) -> list[float]:
    """Per link of a tree how long an unhindered chunk takes between the root and its far end."""
    links = list(tree.links)
    near, far = inst.links.src[links].tolist(), inst.links.dst[links].tolist()
    if collects:
        near, far = far, near
    arrival: dict[int, float] = {}
    for link, a, b in zip(links, near, far, strict=True):
        arrival[b] = arrival.get(a, 0.0) + inst.lane_transit_fs[int(inst.lane[link])]
    return [arrival[b] for b in far]


def _hops(
    inst: Instance, entries: Sequence[tuple[float, int, int, int, bool]], groups: Sequence[int]
) -> tuple[list[RepHop], list[int], Timing]:
    src, dst = inst.links.src, inst.links.dst
    into: dict[tuple[int, int], list[int]] = {}
    hops = []
    for index, (_, _, chunk, link, reduces) in enumerate(entries):
        a, b = int(src[link]), int(dst[link])
        hops.append(RepHop(((chunk, link),), tuple(into.get((chunk, a), ())), reduces))
        into.setdefault((chunk, b), []).append(index)
    return hops, list(groups), quickest(inst, hops)
