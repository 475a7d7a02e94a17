"""The collective inside a native algorithm file: a name and its numbers, or every chunk's places.

{"name": "allgather", "ranks": 8, "partition": 2, "root": 0} says it all where `collective.build` makes the same
from it; alltoallv adds "demand", sendrecv "pairs", groups of ranks "groups". Anything else lists its "chunks" as rows
[[[rank, offset], ...], [[rank, offset], ...]] (sources, destinations) and the lengths of the buffers.
"""

from __future__ import annotations

import math
from typing import Any

from taccl.errors import CheckFailed
from taccl.synth.collective import GROUPED, NAMES, Chunk, Collective, build, check_groups
from taccl.synth.json_reader import Place
from taccl.synth.program_collective import collective_of

MAX_PLACES = 1 << 25  # (rank, offset) pairs of all chunks together
MAX_LENGTH = 1 << 25  # chunks of a buffer
MAX_CELLS = 1 << 24  # of all buffers that are listed
# What their names and numbers say is all that there is to say of them.
NAMES_ALONE = frozenset(NAMES) - {"custom", "alltoallv", "sendrecv"}


def collective_value(collective: Collective) -> dict[str, Any]:
    """What stands in the file for a collective."""
    value: dict[str, Any] = {
        "name": collective.name,
        "ranks": collective.ranks,
        "partition": collective.partition,
        "root": collective.root,
    }
    if collective.name == "alltoallv":
        value["demand"] = _demand(collective)
    elif collective.name == "sendrecv":
        routes = [(c.sources[0][0], c.destinations[0][0]) for c in collective.chunks]
        value["pairs"] = [list(pair) for pair in dict.fromkeys(routes)]
    kept: tuple[str, ...] = ("name", "ranks", "partition", "root")
    if collective.groups:
        value["groups"] = [list(group) for group in collective.groups]
        kept = (*kept, "groups")
    if collective.name != "custom" and _built(value) == collective:
        return value
    return {key: value[key] for key in kept} | {
        "combining": collective.combining,
        "size_chunks": collective.size_chunks,
        "input_chunks": list(collective.input_chunks),
        "output_chunks": list(collective.output_chunks),
        "inplace": [views and list(views) for views in collective.inplace],
        "chunks": [
            [[list(pair) for pair in chunk.sources], [list(pair) for pair in chunk.destinations]]
            for chunk in collective.chunks
        ],
    }


def read_collective_value(place: Place, ranks: int) -> Collective:
    """The collective at a place, which must be one for `ranks` ranks. Raises InvalidInput."""
    place.only(
        "name", "ranks", "partition", "root", "demand", "pairs", "combining", "size_chunks", "input_chunks",
        "output_chunks", "inplace", "chunks", "groups",
    )  # fmt: skip
    name = place.at("name").text(NAMES)
    if place.at("ranks").integer(1, ranks) != ranks:
        place.at("ranks").fail(f"the topology has {ranks} ranks")
    partition = place.at("partition").integer(1, MAX_LENGTH)
    root = place.at("root").integer(0, ranks - 1)
    groups: list[list[int]] = []
    if "groups" in place.mapping():
        groups = [
            [rank.integer(0, ranks - 1) for rank in group.items(2, ranks)]
            for group in place.at("groups").items(1, ranks)
        ]
        if name not in GROUPED:
            place.at("groups").fail(f"groups are for {', '.join(sorted(GROUPED))}")
        try:
            check_groups(groups, ranks)
        except ValueError as error:
            place.at("groups").fail(str(error))
    if "chunks" in place.mapping():
        return _listed(place, name, ranks, partition, root, groups)
    if name == "custom":
        place.fail("a custom collective lists its chunks")
    value: dict[str, Any] = {"name": name, "ranks": ranks, "partition": partition, "root": root}
    if name == "alltoallv":
        rows = [
            [count.integer(0, MAX_LENGTH) for count in row.items(ranks, ranks)]
            for row in place.at("demand").items(ranks, ranks)
        ]
        value["demand"] = rows
        blocks = 2 * sum(map(sum, rows))
    elif name == "sendrecv":
        value["pairs"] = [
            [end.integer(0, ranks - 1) for end in pair.items(2, 2)]
            for pair in place.at("pairs").items(0, ranks)
        ]
        blocks = 2 * ranks
    else:
        # Places of a block: the holders before and after of all chunks of an unpartitioned collective.
        blocks = {
            "alltoall": 2 * ranks * ranks,
            "allreduce": 2 * ranks * ranks,
            "gather": 2 * ranks,
            "scatter": 2 * ranks,
            "broadcast": ranks + 1,
            "reduce": ranks + 1,
        }.get(name, ranks * (ranks + 1))
    if groups:
        value["groups"] = groups
        # Every group is cut into the least common multiple of all sizes, and each piece is known to its group.
        blocks = len(groups) * math.lcm(*map(len, groups)) * max(map(len, groups)) * 2
    if blocks * partition > MAX_PLACES:
        place.fail(f"the chunks have more than {MAX_PLACES} places together")
    try:
        return _built(value)
    except ValueError as error:
        place.fail(str(error))


def _built(value: dict[str, Any]) -> Collective:
    pairs = value.get("pairs")
    return build(
        value["name"],
        value["ranks"],
        value["partition"],
        root=value["root"],
        demand=value.get("demand"),
        pairs=None if pairs is None else [(src, dst) for src, dst in pairs],
        groups=value.get("groups"),
    )


def _demand(collective: Collective) -> list[list[int]]:
    """Blocks from each rank to each; rounded down where the chunks are no whole blocks."""
    count = [[0] * collective.ranks for _ in range(collective.ranks)]
    for chunk in collective.chunks:
        count[chunk.sources[0][0]][chunk.destinations[0][0]] += 1
    return [[chunks // collective.partition for chunks in row] for row in count]


def _listed(
    place: Place, name: str, ranks: int, partition: int, root: int, groups: list[list[int]]
) -> Collective:
    chunks = []
    places = 0
    for row in place.at("chunks").items(0, MAX_PLACES):
        row.array(2, 2)
        sides = []
        for side in row.items():
            pairs = []
            for pair in side.items(1, MAX_PLACES):
                rank, offset = pair.items(2, 2)
                pairs.append((rank.integer(0, ranks - 1), offset.integer(0, MAX_LENGTH - 1)))
            sides.append(tuple(pairs))
            places += len(pairs)
        if places > MAX_PLACES:
            row.fail(f"the chunks have more than {MAX_PLACES} places together")
        chunks.append(Chunk(*sides))
    collective = Collective(
        name,
        ranks,
        tuple(chunks),
        place.at("combining").boolean(),
        _lengths(place.at("input_chunks"), ranks),
        _lengths(place.at("output_chunks"), ranks),
        tuple(_views(views) for views in place.at("inplace").items(ranks, ranks)),
        place.at("size_chunks").integer(1, MAX_LENGTH),
        partition,
        root,
        tuple(map(tuple, groups)),
    )
    cells = (
        sum(collective.input_chunks)
        + sum(collective.output_chunks)
        + sum(map(sum, filter(None, collective.inplace)))
    )
    if cells > MAX_CELLS:
        place.fail(f"the buffers have {cells} chunks together; at most {MAX_CELLS} are looked at")
    try:
        collective.check()
        if name in NAMES_ALONE:
            teams = groups or [list(range(ranks))]
            largest = 1 if name in ("alltoall", "gather", "scatter") else max(map(len, teams))
            count = collective.size_chunks * (sum(map(len, teams)) if name == "alltoall" else len(teams))
            if len(chunks) != count or 2 * count * largest > MAX_PLACES:
                place.at("chunks").fail(
                    f"{len(chunks)} chunks, where {name} has {count}, in at most {MAX_PLACES} places"
                )
            known = collective_of(name, ranks, collective.size_chunks, root, groups=groups or None)
            if set(known.chunks) != set(chunks) or known.combining != collective.combining:
                place.at("chunks").fail(f"these are not the chunks of {known.title} of {ranks} ranks")
    except (ValueError, CheckFailed) as error:
        place.fail(str(error))
    return collective


def _lengths(place: Place, ranks: int) -> tuple[int, ...]:
    return tuple(length.integer(0, MAX_LENGTH) for length in place.items(ranks, ranks))


def _views(place: Place) -> tuple[int, int] | None:
    if place.value is None:
        return None
    before, after = (view.integer(0, MAX_LENGTH) for view in place.items(2, 2))
    return (before, after)
