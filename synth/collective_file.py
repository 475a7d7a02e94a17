"""Collectives of one's own: a file with the place of every chunk before and after.

    schema: taccl/collective/v1
    ranks: 3
    combining: false
    chunks:                             # places are [rank, offset in chunks]
      - sources: [[0, 0]]
        destinations: [[1, 0], [2, 0]]

Buffers are as long as the offsets need; the size that commands speak of is that of the longest one. Output
and input stay separate buffers.
"""

from __future__ import annotations

from typing import Any

from taccl.profiles.forms import Field, ListOf, Record, Row, Values
from taccl.profiles.plain_forms import Boolean, Integer, Text
from taccl.profiles.yaml_reader import Node, parse
from taccl.synth.collective import Chunk, Collective

SCHEMA = "taccl/collective/v1"
MAX_RANKS = 4096
MAX_CHUNKS = 1_000_000
MAX_CELLS = 1 << 24  # chunks of all buffers

_PLACE = Row(
    {
        "rank": Field(Integer(0, MAX_RANKS - 1), "rank", required=True),
        "offset": Field(Integer(0, MAX_CHUNKS - 1), "offset in chunks", required=True),
    },
    "a place: rank and offset in its buffer, in chunks",
)
_CHUNK = Record(
    {
        "sources": Field(ListOf(_PLACE, minimum=1), "where the chunk is before", required=True),
        "destinations": Field(ListOf(_PLACE, minimum=1), "where it must be after", required=True),
    },
    "a chunk",
)
COLLECTIVE = Record(
    {
        "schema": Field(Text(choices=(SCHEMA,)), "format and version", required=True),
        "ranks": Field(Integer(1, MAX_RANKS), "number of ranks", required=True),
        "combining": Field(Boolean(), "whether the sources' pieces are reduced into one value"),
        "chunks": Field(ListOf(_CHUNK, minimum=1, maximum=MAX_CHUNKS), "all chunks", required=True),
    },
    "a collective by its pre- and postconditions",
)


def collective_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of these files, for completion and checks in editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        "title": "taccl collective",
        "description": "A collective of one's own, by the place of every chunk before and after",
    } | COLLECTIVE.schema()


def read_collective(text: str, file: str) -> Collective:
    """The collective in a file. Raises InvalidInput with every problem and its place; codes C001..C004."""
    node = parse(text, file)
    values = COLLECTIVE.read(node)
    node.findings.raise_if_any()
    assert values is not None
    ranks = values["ranks"]
    inputs, outputs = [0] * ranks, [0] * ranks
    chunks: list[Chunk] = []
    taken: dict[tuple[int, int], int] = {}
    for index, entry in enumerate(values["chunks"]):
        sources = _places(entry.at("sources"), entry["sources"], inputs)
        destinations = _places(entry.at("destinations"), entry["destinations"], outputs)
        for place in destinations:
            if taken.setdefault(place, index) != index:
                entry.at("destinations").error(
                    "C003", f"rank {place[0]} offset {place[1]} is also a destination of chunk {taken[place]}"
                )
        chunks.append(Chunk(sources, destinations))
    if sum(inputs) + sum(outputs) > MAX_CELLS:
        node.error(
            "C004",
            f"the buffers have {sum(inputs) + sum(outputs)} chunks together; at most {MAX_CELLS} are looked at",
        )
    node.findings.raise_if_any()
    made = Collective(
        "custom", ranks, tuple(chunks), values.get("combining", False), tuple(inputs), tuple(outputs),
        (None,) * ranks, max(*inputs, *outputs, 1), 1,
    )  # fmt: skip
    made.check()
    return made


def _places(node: Node, places: list[Values], lengths: list[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for place in places:
        rank, offset = place["rank"], place["offset"]
        if rank >= len(lengths):
            place.node.error("C001", f"rank {rank} does not exist (ranks are 0..{len(lengths) - 1})")
            continue
        if rank in {known for known, _ in found}:
            place.node.error("C002", f"rank {rank} stands twice; a chunk has one place on a rank")
        found.append((rank, offset))
        lengths[rank] = max(lengths[rank], offset + 1)
    return tuple(found)
