"""What may stand in a sketch file (`schema: taccl/sketch/v1`): the tables that give reader and JSON Schema.

`taccl.sketches.sketch_file` gives them their meaning.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from taccl.profiles.forms import Either, Field, ListOf, MapOf, Record, Row
from taccl.profiles.plain_forms import Boolean, Integer, Number, Text
from taccl.profiles.schema import MAX_RANKS, RANK_SET
from taccl.sketches.sketch import CONNECTIONS, PATTERNS, POLICIES, SCOPES, STRATEGIES

SCHEMA_NAME = "taccl/sketch/v1"
MAX_SIZE_BYTES = 2**50
MAX_LINES = 100_000  # of any list in a sketch

_RANK = Integer(0, MAX_RANKS - 1)
_RANKS = ListOf(_RANK, minimum=1, maximum=MAX_RANKS)
_NAME = Text(pattern=r"[^\x00-\x1f\x7f-\x9f]{1,128}", looks="a name of 1 to 128 printable characters")
_CODEC = Text(pattern=r"[A-Za-z][A-Za-z0-9_.-]{0,63}", looks="auto, none or the name of a codec")

_LINK_FIELDS = {
    "pairs": Field(
        ListOf(ListOf(_RANK, minimum=2, maximum=2), minimum=1, maximum=MAX_LINES), "[src, dst] pairs"
    ),
    "from": Field(RANK_SET, "links from these ranks of the cluster (default: from any)"),
    "to": Field(RANK_SET, "links to these ranks of the cluster (default: to any)"),
    "kind": Field(_NAME, "links of this kind, as the topology names it, e.g. nvlink"),
    "scope": Field(Text(choices=SCOPES), "intra: links inside a node; inter: links between nodes"),
    "both_ways": Field(Boolean(), "also the links of the other direction (default: false)"),
}

LINKS = ListOf(
    Record(_LINK_FIELDS, "links by `pairs`, or by `from` and `to`, and by `kind` and `scope`"),
    minimum=1,
    maximum=MAX_LINES,
)

CAPS = ListOf(
    Record(
        {
            "limit": Field(Integer(0, 10**9), "most chunks in total over each of these links", required=True),
            **_LINK_FIELDS,
        },
        "a cap: `limit` and the links that it is for",
    ),
    maximum=MAX_LINES,
)

INTRANODE = Record(
    {
        "strategy": Field(
            Text(choices=STRATEGIES),
            "none; switch: the policies of `switches`; minmax, maxmin: spread the load over the node's links "
            "(default: switch when there are `switches`, else none)",
        ),
        "switches": Field(
            ListOf(
                Record(
                    {
                        "ranks": Field(RANK_SET, "local ranks that the switch joins"),
                        "name": Field(_NAME, "or the name that the topology gives the switch"),
                        "policy": Field(
                            Text(choices=POLICIES),
                            "uc-min: few of its links; uc-max: many; free: as is fastest",
                            required=True,
                        ),
                    },
                    "a switch by its `ranks` or its `name`, and its `policy`",
                ),
                minimum=1,
                maximum=1024,
            ),
            "switches inside each node",
        ),
    },
    "what happens inside a node",
)

INTERNODE = Record(
    {
        "connect": Field(
            Either((Text(choices=CONNECTIONS), MapOf(_RANKS, _RANK, MAX_RANKS))),
            "sender: [receivers] in local ranks; or direct-map: each rank to its own number; or "
            "fully-connected (default)",
        ),
        "relays": Field(
            MapOf(_RANKS, _RANK, MAX_RANKS),
            "sender: [local ranks whose chunks it takes to other nodes] (default: everybody's)",
        ),
        "own_first": Field(Boolean(), "a sender's own chunks leave before others (default: false)"),
        "groups": Field(
            Record(
                {
                    "pattern": Field(
                        Text(choices=PATTERNS),
                        "round-robin: the k-th nodes of the groups exchange; relay: only the first ones do",
                        required=True,
                    ),
                    "size": Field(Integer(1, MAX_RANKS), "nodes of a group, in order of their numbers"),
                    "nodes": Field(
                        ListOf(_RANKS, minimum=1, maximum=MAX_RANKS), "or the nodes of each group"
                    ),
                },
                "groups of nodes: `pattern`, and `size` or `nodes`",
            ),
            "groups of nodes, for many nodes; inside a group each node sends to each",
        ),
    },
    "what happens between nodes",
)

SYMMETRY = Either(
    (
        Text(choices=("auto", "none")),
        ListOf(
            Row(
                {
                    "offset": Field(_RANK, "how far ranks are turned", required=True),
                    "group": Field(
                        Either((Text(choices=("all",)), Integer(1, MAX_RANKS))),
                        "ranks of a group; all: those of the cluster",
                        required=True,
                    ),
                },
                "[offset, group size]: rank r looks like (r % group + offset) % group + r // group * group",
            ),
            minimum=1,
            maximum=64,
        ),
        Record(
            {
                "permutations": Field(
                    ListOf(_RANKS, minimum=1, maximum=64),
                    "each the list of the ranks that 0, 1, 2 ... look like",
                    required=True,
                )
            },
            "`permutations` of the ranks",
        ),
    )
)

CODEC = Either(
    (
        _CODEC,
        Record(
            {
                "name": Field(_CODEC, "auto, none or the codec", required=True),
                "links": Field(LINKS, "messages over these links only may be coded (default: over all)"),
            },
            "`name` of the codec, and the `links` whose messages may be coded",
        ),
    )
)

TIME_LIMIT = Number("s", minimum=Fraction(1, 10), maximum=10**6)  # as --time-limit

SKETCH = Record(
    {
        "schema": Field(Text(choices=(SCHEMA_NAME,)), "the format of this file", required=True),
        "name": Field(_NAME, "name of the sketch (default: that of the file)"),
        "description": Field(Text(max_length=400), "the sketch in one line"),
        "nodes": Field(Integer(1, MAX_RANKS), "the sketch is for this many nodes (default: any)"),
        "intranode": Field(INTRANODE, "what happens inside a node"),
        "internode": Field(INTERNODE, "what happens between nodes"),
        "use": Field(LINKS, "only links that one of these lines selects may be used"),
        "avoid": Field(LINKS, "links that may not be used"),
        "caps": Field(CAPS, "most chunks over a link"),
        "symmetry": Field(
            SYMMETRY, "auto: find it (default); none; [offset, group size] rows; or permutations"
        ),
        "size": Field(
            Number("bytes", minimum=1, maximum=MAX_SIZE_BYTES), "size as nccl-tests counts it, e.g. 1MB"
        ),
        "partition": Field(Integer(1, 4096), "chunks that each block is cut into (default: chosen)"),
        "extra_hops": Field(Integer(0, MAX_RANKS), "hops that a chunk may take beyond a shortest path"),
        "codec": Field(
            CODEC,
            "auto (default): a lossless codec that the profile has measured, where it pays; none; or the codec; with "
            "`links` to choose where",
        ),
        "time_limit": Field(TIME_LIMIT, "time for the search, e.g. 60s or 5min"),
        "target_gap": Field(
            Number("fraction", minimum=0, maximum=1), "stop within this of the lower bound, e.g. 5%"
        ),
        "hyperparameters": Field(
            Record(
                {
                    "seed": Field(Integer(0, 2**31 - 1), "seed of the solver"),
                    "workers": Field(Integer(1, 256), "threads of the solver"),
                },
                "settings of the solver",
            ),
            "settings of the solver",
        ),
    },
    "a sketch",
)


def sketch_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of sketch files, for completion and checks in editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_NAME,
        "title": "taccl sketch",
        "description": "What an author asks of the algorithms for a cluster",
    } | SKETCH.schema()
