"""What may stand in a cluster file (`schema: taccl/cluster/v1`): the tables that give reader and JSON Schema.

docs/building.md explains the format; `taccl.cluster_file` gives it its meaning.
"""

from __future__ import annotations

from typing import Any

from taccl.commands.synth import COLLECTIVES, ENGINES, PROTOCOLS
from taccl.demand import MOST
from taccl.profiles.forms import Either, Field, ListOf, Record
from taccl.profiles.plain_forms import Integer, Number, Text
from taccl.profiles.schema import MAX_RANKS
from taccl.sketches.schema import TIME_LIMIT

SCHEMA = "taccl/cluster/v1"
MOST_BYTES = 2**50

_NAME = Text(max_length=200)
_OPTIONS = {
    "engine": Field(Text(choices=ENGINES), "what searches"),
    "root": Field(Integer(0, 4095), "root of rooted collectives"),
    "partition": Field(Integer(1, 4096), "chunks per block of a rank"),
    "instances": Field(Integer(1, 32), "copies of the program on channels of their own"),
    "protocol": Field(Text(choices=PROTOCOLS), "protocol of the program"),
    "time_limit": Field(TIME_LIMIT, "time for one algorithm, e.g. 60s or 5min"),
    "target_gap": Field(Number("fraction", minimum=0, maximum=1), "stop at this gap to the lower bound"),
    "seed": Field(Integer(0, 2**31 - 1), "seed of the solver"),
    "workers": Field(Integer(1, 256), "threads of the solver for one algorithm"),
    "sketch": Field(Text(max_length=1000), "bundled sketch, or a file relative to this one"),
}
_ENTRY = Record(
    {
        "collective": Field(
            Text(choices=COLLECTIVES),
            "what to synthesise",
            required=True,
        ),
        "name": Field(_NAME, "name of these files, instead of that for all"),
        "demand": Field(
            Either((ListOf(ListOf(Integer(0, MOST)), minimum=1, maximum=MAX_RANKS), Text(max_length=1000))),
            "alltoallv: blocks from rank i (row) to rank j, or a file of them relative to this one",
        ),
        "pairs": Field(
            ListOf(ListOf(Integer(0, MAX_RANKS - 1), minimum=2, maximum=2), minimum=1, maximum=MAX_RANKS),
            "sendrecv: [from, to] (default: each rank to the next)",
        ),
        "groups": Field(
            Either(
                (
                    ListOf(
                        ListOf(Integer(0, MAX_RANKS - 1), minimum=2, maximum=MAX_RANKS),
                        minimum=1,
                        maximum=MAX_RANKS,
                    ),
                    Text(max_length=100_000),
                )
            ),
            "groups of ranks that do it side by side: lists, or as taccl synth --groups takes them (a mesh, a file)",
        ),
        "pre_post": Field(
            Text(max_length=1000), "custom: file with the place of every chunk, relative to this one"
        ),
        "sizes": Field(
            ListOf(Number("bytes", minimum=1, maximum=MOST_BYTES), minimum=1, maximum=1000),
            "nccl-tests sizes",
            required=True,
        ),
        **_OPTIONS,
    },
    "a collective at several sizes",
)
CLUSTER = Record(
    {
        "schema": Field(Text(choices=(SCHEMA,)), "format and version", required=True),
        "topology": Field(
            Text(max_length=1000), "bundled profile, or a file relative to this one", required=True
        ),
        "output": Field(Text(max_length=1000), "folder of the results, relative to this file"),
        "format": Field(Text(choices=("xml", "json", "both")), "what to write"),
        "name": Field(_NAME, "name of the files, without suffix (default: {collective}-{size})"),
        "collectives": Field(ListOf(_ENTRY, minimum=1, maximum=1000), "what to make", required=True),
        **_OPTIONS,
    },
    "the algorithms of a cluster",
)


def cluster_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of cluster files, for completion and checks in editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        "title": "taccl cluster",
        "description": "The algorithms that a cluster wants",
    } | CLUSTER.schema()
