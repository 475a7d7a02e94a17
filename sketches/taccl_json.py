"""TACCL's sketches (microsoft/taccl, taccl/examples/sketch/*.json) to `Sketch`.

What they say has the same meaning here, with one difference: TACCL divides a NIC's bandwidth among the
connections of a sketch once and for all, here the links of a node share their NIC's ports in the topology.
Findings have the codes of `taccl.sketches.sketch_file`.
"""

from __future__ import annotations

from pathlib import PurePath

from taccl.profiles.forms import Boolean, Either, Field, Integer, ListOf, MapOf, Record, Row, Text, Values
from taccl.profiles.schema import MAX_RANKS
from taccl.profiles.yaml_reader import parse
from taccl.sketches.sketch import (
    CONNECTIONS,
    STRATEGIES,
    Internode,
    Intranode,
    Relay,
    Sender,
    Sketch,
    SwitchSet,
    Symmetry,
    SymmetryOffset,
)
from taccl.sketches.sketch_file import check_overlaps, distinct

_RANK = Integer(0, MAX_RANKS - 1)
_RANKS = ListOf(_RANK, minimum=1, maximum=MAX_RANKS)
_SENDER = Text(pattern="0|[1-9][0-9]{0,3}", looks="the local rank of a sender in quotes")
_BY_SENDER = MapOf(_RANKS, _SENDER, MAX_RANKS)

TACCL_SKETCH = Record(
    {
        "nnodes": Field(Integer(1, MAX_RANKS), "number of nodes", required=True),
        "intranode_sketch": Field(
            Record(
                {
                    "strategy": Field(Text(choices=STRATEGIES), "what is asked of a node", required=True),
                    "switches": Field(ListOf(_RANKS, maximum=1024), "GPUs under each switch"),
                    "switch_hyperedge_strategy": Field(
                        ListOf(Text(choices=("uc-min", "uc-max")), maximum=1024), "policy of each switch"
                    ),
                },
                "the part about the inside of a node",
            ),
            "the inside of a node",
            required=True,
        ),
        "internode_sketch": Field(
            Record(
                {
                    "strategy": Field(Text(choices=("relay",)), "relay", required=True),
                    "internode_conn": Field(
                        Either((Text(choices=CONNECTIONS), _BY_SENDER)),
                        "receivers of each sender",
                        required=True,
                    ),
                    "gpus_to_sender_rev_map": Field(_BY_SENDER, "GPUs whose chunks each sender relays"),
                    "enforce_ordering": Field(Boolean(), "own chunks first"),
                },
                "the part about links between nodes",
            ),
            "links between nodes",
        ),
        "symmetry_offsets": Field(
            ListOf(
                Row(
                    {
                        "offset": Field(_RANK, "offset", required=True),
                        "group": Field(Integer(1, MAX_RANKS), "group size", required=True),
                    },
                    "[offset, group size]",
                ),
                maximum=64,
            ),
            "symmetries",
        ),
        "hyperparameters": Field(
            Record({"input_chunkup": Field(Integer(1, 4096), "chunks of each block")}, "chunking"), "chunking"
        ),
    },
    "a sketch of TACCL",
)


def read_taccl_sketch(text: str, file: str) -> Sketch:
    """The sketch that TACCL's JSON describes. `file` names it in messages.

    Raises InvalidInput with every error of the text at its line and column.
    """
    root = parse(text.replace("\t", " "), file)  # JSON is YAML, but for tabs in the indentation
    values = TACCL_SKETCH.read(root)
    root.findings.raise_if_any()
    assert values is not None
    hyper: Values | None = values.get("hyperparameters")
    places = {"nodes": values.at("nnodes").where}
    if hyper is not None and "input_chunkup" in hyper:
        places["partition"] = hyper.at("input_chunkup").where
    sketch = Sketch(
        name=PurePath(file).stem,
        description="a sketch of TACCL",
        nodes=values["nnodes"],
        intranode=_intranode(values["intranode_sketch"]),
        internode=_internode(values["internode_sketch"]) if "internode_sketch" in values else None,
        symmetry=_symmetry(values),
        partition=hyper.get("input_chunkup") if hyper is not None else None,
        places=places,
        file=file,
        text=text,
    )
    root.findings.raise_if_any()
    return sketch


def _intranode(values: Values) -> Intranode:
    strategy = values["strategy"]
    where = values.at("strategy").where
    if strategy != "switch":
        return Intranode(strategy, where=where)
    missing = [key for key in ("switches", "switch_hyperedge_strategy") if key not in values]
    if missing:
        values.at("strategy").error("S101", f"the strategy `switch` needs `{missing[0]}`")
        return Intranode(strategy, where=where)
    policies = values["switch_hyperedge_strategy"]
    if len(policies) != len(values["switches"]):
        message = f"there are {len(values['switches'])} switches and {len(policies)} policies"
        values.at("switch_hyperedge_strategy").error("S105", message, "give each switch one policy")
    switches = []
    nodes, policy_nodes = values.at("switches").items, values.at("switch_hyperedge_strategy").items
    for ranks, node, policy, at in zip(values["switches"], nodes, policies, policy_nodes, strict=False):
        if len(ranks) < 2:
            node.error("S105", "a switch joins at least two ranks")
        switches.append(SwitchSet(distinct(ranks, node), policy, where=node.where, policy_where=at.where))
    check_overlaps(switches, nodes, policy_nodes)
    return Intranode(strategy, tuple(switches), where)


def _lines(values: Values, key: str) -> list[tuple[int, tuple[int, ...], str]]:
    """(sender, local ranks, place) for each line of a mapping from senders to lists of local ranks."""
    return [
        (int(name.text), distinct(values[key][name.text], node), name.where)
        for name, node in values.at(key).entries
    ]


def _internode(values: Values) -> Internode:
    connection = values["internode_conn"]
    explicit = isinstance(connection, dict)
    senders = [Sender(*line) for line in _lines(values, "internode_conn")] if explicit else []
    if explicit and not senders:
        values.at("internode_conn").error("S104", "nobody sends to other nodes")
    relays = (
        [Relay(*line) for line in _lines(values, "gpus_to_sender_rev_map")]
        if "gpus_to_sender_rev_map" in values
        else []
    )
    for relay, (name, _) in zip(relays, values.at("gpus_to_sender_rev_map").entries, strict=False):
        if senders and relay.sender not in {line.sender for line in senders}:
            known = ", ".join(str(line.sender) for line in senders)
            name.error("S104", f"rank {relay.sender} sends to no other node (senders are {known})")
    return Internode(
        connection="explicit" if explicit else connection,
        senders=tuple(senders),
        relays=tuple(relays),
        own_first=values.get("enforce_ordering", False),
        where=values.at("internode_conn").where,
        own_first_where=values.at("enforce_ordering").where,
    )


def _symmetry(values: Values) -> Symmetry:
    """TACCL looks for no symmetry itself: without offsets there is none."""
    where = values.at("symmetry_offsets").where
    offsets = []
    for row in values.get("symmetry_offsets", ()):
        if not 0 < row["offset"] < row["group"]:
            last = row["group"] - 1
            row.node.error(
                "S107", f"an offset lies between 1 and {last}, below the group size {row['group']}"
            )
        offsets.append(SymmetryOffset(row["offset"], row["group"], row.node.where))
    return Symmetry("listed" if offsets else "none", tuple(offsets), where=where)
