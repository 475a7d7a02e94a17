"""What may stand in a profile file (`schema: taccl/profile/v1`): the tables that give reader and JSON Schema.

docs/profiles.md explains the format with examples; `taccl.profiles.profile_file` gives it its meaning.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from taccl.profiles.forms import Either, Field, ListOf, MapOf, Record, Row
from taccl.profiles.plain_forms import Boolean, Integer, Number, Text

SCHEMA_NAME = "taccl/profile/v1"
MAX_RANKS = 4096
MAX_LINKS = 20_000_000  # of a cluster made of equal nodes, or of a shape
MAX_LISTED_LINKS = 2_000_000  # that a file lists, in groups or one by one
MAX_PORTS = 100_000
MIN_TIME_US = Fraction(1, 10**9)  # a femtosecond, in which all times are counted
MAX_TIME_US = 10**9
MIN_BETA_US_PER_MB = Fraction(1, 10**6)  # an exabyte a second
MAX_BETA_US_PER_MB = 10**9  # a kilobyte a second

_ALPHA = Number("us", minimum=0, maximum=MAX_TIME_US, nonzero=MIN_TIME_US)
_BETA = Number("us/MB", minimum=MIN_BETA_US_PER_MB, maximum=MAX_BETA_US_PER_MB)
_FREE_BETA = Number("us/MB", minimum=0, maximum=MAX_BETA_US_PER_MB, nonzero=MIN_BETA_US_PER_MB)
_RANK = Integer(0, MAX_RANKS - 1)
_COUNT = Integer(1, MAX_RANKS)
NAME_PATTERN = r"[^\x00-\x1f\x7f-\x9f]{1,128}"
NAME_WORDS = "a name of 1 to 128 printable characters"
_NAME = Text(pattern=NAME_PATTERN, looks=NAME_WORDS)
_CLASS = Text(pattern=r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", looks="the name of a link class")


def _rank_set(minimum: int) -> Either:
    """`all`, one rank, a list of at least `minimum` ranks, or ranges."""
    ranges = r"[0-9]{1,6}(-[0-9]{1,6})?(, *[0-9]{1,6}(-[0-9]{1,6})?)*"
    return Either(
        (
            Text(choices=("all",)),
            _RANK,
            ListOf(_RANK, minimum=minimum, maximum=MAX_RANKS),
            Text(pattern=ranges, looks="ranks such as 0-7 or 0-3,8"),
        )
    )


RANK_SET = _rank_set(1)

MEASURED = Record(
    {
        "samples": Field(Integer(1, 10**12), "how many timings the fit used", required=True),
        "residual": Field(Number("fraction", minimum=0, maximum=10**9), "relative residual", required=True),
        "alpha_ci": Field(
            Number("us", minimum=0, maximum=MAX_TIME_US), "half width of alpha's 95 % interval"
        ),
        "beta_ci": Field(
            Number("us/MB", minimum=0, maximum=MAX_BETA_US_PER_MB), "half width of beta's 95 % interval"
        ),
    },
    "how alpha and beta were measured",
)

LINK_CLASS = Record(
    {
        "alpha": Field(_ALPHA, "latency of a message, in us", required=True),
        "beta": Field(_BETA, "time per data of one link, in us/MB or as a rate", required=True),
        "occupancy": Field(_ALPHA, "part of alpha that blocks the next message (default: all of it)"),
        "kind": Field(_NAME, "what the links are, e.g. nvlink (default: the name of the class)"),
        "measured": Field(MEASURED, "how the numbers were measured"),
        "source": Field(Text(), "where the numbers come from"),
    },
    "a link class",
)

PORT = Record(
    {
        "beta": Field(_BETA, "time per data through the port, in us/MB or as a rate", required=True),
        "kind": Field(_NAME, "what it is: switch, nic, pcie or another word (default: port)"),
    },
    "a port that links share",
)

_PORT_NAMES = ListOf(_NAME, maximum=64)
LINKS = ListOf(
    Either(
        (
            Row(
                {
                    "src": Field(_RANK, "sending rank", required=True),
                    "dst": Field(_RANK, "receiving rank", required=True),
                    "class": Field(_CLASS, "link class", required=True),
                    "ports": Field(_PORT_NAMES, "ports that the link crosses"),
                },
                "one link: [src, dst, class] or [src, dst, class, [ports]]",
            ),
            Record(
                {
                    "class": Field(_CLASS, "link class", required=True),
                    "pairs": Field(
                        ListOf(ListOf(_RANK, minimum=2, maximum=2), maximum=MAX_LISTED_LINKS),
                        "[src, dst] pairs",
                    ),
                    "from": Field(RANK_SET, "sending ranks; each is linked to every rank of `to`"),
                    "to": Field(RANK_SET, "receiving ranks"),
                    "both_ways": Field(Boolean(), "also link the other direction (default: false)"),
                    "ports": Field(_PORT_NAMES, "ports that these links cross"),
                },
                "links of one class: `pairs`, or `from` and `to`",
            ),
        )
    ),
    maximum=MAX_LISTED_LINKS,
)

NODE = Record(
    {
        "ranks": Field(_COUNT, "number of ranks in a node", required=True),
        "ports": Field(MapOf(PORT, _NAME), "ports inside a node; `name` becomes `node0.name`"),
        "links": Field(LINKS, "links inside a node, between the node's own ranks 0, 1, ..."),
        "switches": Field(
            ListOf(
                Record(
                    {
                        "name": Field(
                            _NAME, "name of the switch; sketches set policies by it", required=True
                        ),
                        "ranks": Field(RANK_SET, "ranks that it connects, each to each", required=True),
                        "class": Field(_CLASS, "class of the links through it", required=True),
                        "port": Field(
                            _BETA,
                            "time per data of each rank's port, in and out (default: beta of the class)",
                        ),
                    },
                    "a switch with an out and an in port for each rank",
                ),
                maximum=1024,
            ),
            "switches inside a node",
        ),
        "nics": Field(
            ListOf(
                Record(
                    {
                        "name": Field(_NAME, "name of the NIC", required=True),
                        "ranks": Field(RANK_SET, "ranks that reach the network through it", required=True),
                        "beta": Field(
                            _BETA, "time per data of each direction (default: beta of the network)"
                        ),
                    },
                    "a network interface with an out and an in port",
                ),
                maximum=MAX_RANKS,
            ),
            "network interfaces of a node",
        ),
    },
    "one node of a homogeneous cluster",
)

NETWORK = Record(
    {
        "class": Field(_CLASS, "class of the links between nodes", required=True),
        "pairs": Field(
            Text(choices=("all", "rails")),
            "all: every rank to every rank of other nodes (default); rails: to those of its own number",
        ),
    },
    "how the nodes of a homogeneous cluster are connected",
)

SHAPE = Record(
    {
        "kind": Field(
            Text(choices=("ring", "mesh", "torus", "hypercube", "fat-tree")),
            "the regular shape",
            required=True,
        ),
        "size": Field(
            ListOf(Integer(1, MAX_RANKS), minimum=1, maximum=8),
            "ranks along each dimension; hypercube: [dimension]; fat-tree: [leaves, ranks under each]",
            required=True,
        ),
        "class": Field(_CLASS, "class of its links (fat-tree: of those under one leaf)", required=True),
        "across": Field(_CLASS, "fat-tree: class of the links between leaves (default: `class`)"),
        "oversubscription": Field(
            Number("", above=0, maximum=10**6),
            "fat-tree: rate of all ranks under a leaf over the rate of its uplink (default: 1)",
        ),
    },
    "a regular shape instead of nodes",
)

CHANGES = ListOf(
    Record(
        {
            "from": Field(RANK_SET, "the links from these ranks"),
            "to": Field(RANK_SET, "... to these ranks"),
            "both_ways": Field(Boolean(), "also those of the other direction (default: false)"),
            "remove": Field(Boolean(), "true: these links do not exist, e.g. failed"),
            "class": Field(_CLASS, "their class instead"),
            "nic": Field(_NAME, "the NIC of this name (node0.ib0): `beta` of both its ports"),
            "port": Field(_NAME, "the port of this name: `beta`"),
            "alpha": Field(_ALPHA, "their alpha instead"),
            "beta": Field(_BETA, "their beta instead"),
            "occupancy": Field(_ALPHA, "their occupancy instead"),
        },
        "a change to what stands above: of links (`from`, `to`), of a `nic` or of a `port`",
    ),
    maximum=100_000,
)

DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
CODEC_PATTERN = r"[a-z][a-z0-9_-]{0,63}"
MAX_RATIO = 10**9
MAX_FRAME_BYTES = 10**9
_CODING = Record(
    {
        "alpha": Field(_ALPHA, "time per chunk, in us", required=True),
        "beta": Field(
            _FREE_BETA, "time per data of the chunk's values, in us/MB or as a rate", required=True
        ),
    },
    "what a step of coding costs a rank",
)
CODEC = Record(
    {
        "codec": Field(Text(pattern=CODEC_PATTERN, looks="the name of a codec"), "the codec", required=True),
        "dtype": Field(Text(choices=DTYPE_NAMES), "the type of the values", required=True),
        "lossless": Field(Boolean(), "whether decoding gives back every bit", required=True),
        "ratio": Field(
            Number("", above=0, maximum=MAX_RATIO), "bytes of values for a byte on the wire", required=True
        ),
        "frame": Field(
            Number("bytes", minimum=0, maximum=MAX_FRAME_BYTES),
            "bytes on the wire of each chunk beside its values",
            required=True,
        ),
        "encode": Field(_CODING, "coding a chunk", required=True),
        "decode": Field(_CODING, "decoding a chunk, or decoding and adding it to a sum", required=True),
        "source": Field(Text(), "on which values and ranks it was measured"),
    },
    "a codec on values of one type",
)

PROFILE = Record(
    {
        "schema": Field(Text(choices=(SCHEMA_NAME,)), "the format of this file", required=True),
        "name": Field(_NAME, "name of the cluster", required=True),
        "description": Field(Text(max_length=400), "the cluster in one line"),
        "source": Field(Text(max_length=100_000), "where the numbers come from"),
        "nodes": Field(
            Either((_COUNT, ListOf(RANK_SET, minimum=1, maximum=MAX_RANKS))),
            "with `node`: how many such nodes (default: 1); else the ranks of each node",
        ),
        "node": Field(NODE, "one node of a homogeneous cluster"),
        "network": Field(NETWORK, "the links between the nodes of a homogeneous cluster"),
        "shape": Field(SHAPE, "a regular shape instead of nodes"),
        "reduce": Field(
            Record(
                {
                    "alpha": Field(_ALPHA, "time per message, in us"),
                    "beta": Field(_FREE_BETA, "time per data, in us/MB"),
                },
                "the cost of reducing an arrived message into local data",
            ),
            "what reducing costs a rank (default: nothing)",
        ),
        "load": Field(
            _ALPHA,
            "what each message adds where all ranks send at once, in us, because they share cores (default: nothing); "
            "it decides between schedules of about the same time",
        ),
        "codecs": Field(ListOf(CODEC, maximum=1000), "what codecs cost and gain, each once for a type"),
        "classes": Field(MapOf(LINK_CLASS, _CLASS), "link classes by name"),
        "ports": Field(MapOf(PORT, _NAME, MAX_PORTS), "ports by name"),
        "switches": Field(
            ListOf(
                Record(
                    {
                        "name": Field(_NAME, "name of the switch", required=True),
                        "ranks": Field(RANK_SET, "ranks that it connects", required=True),
                    },
                    "a set of ranks that one switch connects (its links stand under `links`)",
                ),
                maximum=MAX_PORTS,
            ),
            "switches by their ranks",
        ),
        "nics": Field(
            ListOf(
                Record(
                    {
                        "name": Field(_NAME, "name of the NIC", required=True),
                        "node": Field(Integer(0, MAX_RANKS - 1), "the node that it sits in", required=True),
                        "ranks": Field(_rank_set(0), "ranks near it", required=True),
                        "out": Field(_NAME, "the port that sent data crosses", required=True),
                        "in": Field(_NAME, "the port that received data crosses", required=True),
                    },
                    "a network interface (its links stand under `links`)",
                ),
                maximum=MAX_PORTS,
            ),
            "network interfaces",
        ),
        "links": Field(
            LINKS, "links between ranks of the cluster, in rows [src, dst, class, [ports]] or groups"
        ),
        "changes": Field(CHANGES, "what differs from the regular description, applied in order"),
    },
    "a profile",
)


def profile_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of profile files, for completion and checks in editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "taccl/profile/v1",
        "title": "taccl profile",
        "description": "The ranks, nodes, links and shared ports of a cluster",
    } | PROFILE.schema()
