"""TACCL's JSON sketches (microsoft/taccl: taccl/cli/common.py, taccl/examples/sketch) to `Sketch`.

What TACCL asserts while it runs is said here of the file, with line and column; docs/sketches.md lists what
means something else than in TACCL. Findings have the codes of `taccl.sketches.sketch_file`.
"""

from __future__ import annotations

from pathlib import PurePath

from taccl.profiles.forms import Either, Field, ListOf, MapOf, Record, Row, Values
from taccl.profiles.plain_forms import Boolean, Integer, Text
from taccl.profiles.schema import MAX_RANKS
from taccl.profiles.yaml_reader import Node, parse
from taccl.sketches.sketch import (
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

_LOCAL_RANKS = ListOf(Integer(0, MAX_RANKS - 1), minimum=1, maximum=MAX_RANKS)
_SENDERS = MapOf(
    _LOCAL_RANKS, Text(pattern="0|[1-9][0-9]{0,5}", looks="the local rank of a sender in quotes"), MAX_RANKS
)

_INTRANODE = Record(
    {
        "strategy": Field(Text(choices=STRATEGIES), "what is asked inside a node", required=True),
        "switches": Field(ListOf(_LOCAL_RANKS, minimum=1, maximum=1024), "the GPUs of each switch"),
        "switch_hyperedge_strategy": Field(
            ListOf(Text(choices=("uc-min", "uc-max")), minimum=1, maximum=1024), "a policy for each switch"
        ),
    },
    "what happens inside a node",
)

_INTERNODE = Record(
    {
        "strategy": Field(Text(choices=("relay",)), "how nodes exchange", required=True),
        "internode_conn": Field(
            Either((Text(choices=("fully-connected", "direct-map")), _SENDERS)),
            'fully-connected, direct-map, or {"sender": [receivers]}',
            required=True,
        ),
        "gpus_to_sender_rev_map": Field(_SENDERS, '{"sender": [GPUs whose chunks it sends]}'),
        "enforce_ordering": Field(Boolean(), "a sender's own chunks leave first"),
    },
    "what happens between nodes",
)

TACCL_SKETCH = Record(
    {
        "nnodes": Field(Integer(1, MAX_RANKS), "number of nodes", required=True),
        "intranode_sketch": Field(_INTRANODE, "what happens inside a node", required=True),
        "internode_sketch": Field(_INTERNODE, "what happens between nodes"),
        "symmetry_offsets": Field(
            ListOf(
                Row(
                    {
                        "offset": Field(Integer(0, MAX_RANKS - 1), "how far ranks are turned", required=True),
                        "group": Field(Integer(1, MAX_RANKS), "ranks of a group", required=True),
                    }
                ),
                maximum=64,
            ),
            "[offset, group size] rows; none: no symmetry is used",
        ),
        "hyperparameters": Field(
            Record(
                {
                    "input_chunkup": Field(
                        Integer(1, 4096), "chunks that each block is cut into", required=True
                    )
                },
                "the hyperparameters, with input_chunkup",
            ),
            "input_chunkup",
        ),
    },
    "a TACCL sketch",
)


def read_taccl_sketch(text: str, file: str) -> Sketch:
    """The sketch that a JSON file of TACCL describes, for exactly its number of nodes; `file` names it.

    Raises InvalidInput with every error of the text at its line and column.
    """
    root = parse(text.replace("\t", " "), file)  # JSON is YAML, but for tabs in the indentation
    values = TACCL_SKETCH.read(root)
    if values is None:
        root.findings.raise_if_any()
        raise AssertionError("a sketch that cannot be read has an error")
    nodes: int = values.get("nnodes", 1)
    if nodes > 1 and "internode_sketch" not in values.nodes:
        root.error("S101", f"{nodes} nodes need an internode_sketch: how they exchange")
    hyper: Values | None = values.get("hyperparameters")
    intranode: Values | None = values.get("intranode_sketch")
    internode: Values | None = values.get("internode_sketch")
    sketch = Sketch(
        name=PurePath(file).stem,
        nodes=nodes,
        intranode=None if intranode is None else _intranode(intranode),
        internode=None if internode is None else _internode(internode),
        symmetry=_symmetry(values),
        partition=None if hyper is None else hyper.get("input_chunkup"),
        places={"nodes": values.at("nnodes").where}
        | ({} if hyper is None else {"partition": hyper.at("input_chunkup").where}),
        file=file,
        text=text,
    )
    root.findings.raise_if_any()
    return sketch


def _intranode(values: Values) -> Intranode:
    strategy: str = values.get("strategy", "none")
    switch_keys = [key for key in ("switches", "switch_hyperedge_strategy") if key in values.nodes]
    if strategy != "switch":
        for key in switch_keys if "strategy" in values else ():
            values.at(key).error("S101", f"`{key}` is of the strategy switch, not of {strategy}")
        return Intranode(strategy, where=values.at("strategy").where)
    absent = [f"`{key}`" for key in ("switches", "switch_hyperedge_strategy") if key not in switch_keys]
    if absent:
        values.at("strategy").error("S101", f"the strategy switch needs {' and '.join(absent)}")
    sets: list[list[int]] = values.get("switches", [])
    policies: list[str] = values.get("switch_hyperedge_strategy", [])
    if "switches" in values and "switch_hyperedge_strategy" in values and len(sets) != len(policies):
        values.at("switch_hyperedge_strategy").error(
            "S105", f"there are {len(sets)} switches and {len(policies)} policies", "give each switch one"
        )
    switches = []
    nodes, policy_nodes = values.at("switches").items, values.at("switch_hyperedge_strategy").items
    for ranks, node, policy, at in zip(sets, nodes, policies, policy_nodes, strict=False):
        if len(ranks) < 2:
            node.error("S105", "a switch joins at least two ranks")
        switches.append(SwitchSet(distinct(ranks, node), policy, where=node.where, policy_where=at.where))
    check_overlaps(switches, nodes, policy_nodes)
    return Intranode("switch", tuple(switches), values.at("strategy").where)


def _internode(values: Values) -> Internode:
    connect = values.get("internode_conn", "fully-connected")
    explicit = isinstance(connect, dict)
    if explicit and not connect and not values.at("internode_conn").entries:
        values.at("internode_conn").error("S104", "nobody sends to other nodes", 'such as {"0": [1]}')
    senders = [Sender(*line) for line in _lines(values, "internode_conn")] if explicit else []
    relays = []
    for sender, sources, where in _lines(values, "gpus_to_sender_rev_map"):
        if explicit and "internode_conn" in values and sender not in {line.sender for line in senders}:
            known = ", ".join(str(line.sender) for line in senders)
            _key(values.at("gpus_to_sender_rev_map"), sender).error(
                "S104", f"rank {sender} sends to no other node (senders are {known})"
            )
        relays.append(Relay(sender, sources, where))
    if relays:
        # Under a map a chunk leaves through the senders that the map gives its rank, and through no other.
        relaying = {line.sender for line in relays}
        where = values.at("internode_conn").where
        ranks = relaying.union(*(line.sources for line in relays))
        if not explicit and relaying != ranks:
            everyone = tuple(sorted(ranks))
            direct = connect == "direct-map"
            senders = [Sender(rank, (rank,) if direct else everyone, where) for rank in everyone]
        senders = [line for line in senders if line.sender in relaying]
    return Internode(
        connection="explicit" if senders or explicit else connect,
        senders=tuple(senders),
        relays=tuple(relays),
        own_first=values.get("enforce_ordering", False),
        where=values.at("internode_conn").where,
        own_first_where=values.at("enforce_ordering").where,
    )


def _lines(values: Values, key: str) -> list[tuple[int, tuple[int, ...], str]]:
    """(sender, local ranks, place) for each readable line of a mapping from senders."""
    lines = []
    for name, node in values.at(key).entries if key in values else ():
        ranks: list[int] | None = values[key].get(name.text)
        if ranks is None:
            continue  # noted already
        if int(name.text) >= MAX_RANKS:
            name.error("S102", f"rank {name.text} is above {MAX_RANKS - 1}, the highest that is read")
            continue
        lines.append((int(name.text), distinct(ranks, node), name.where))
    return lines


def _key(mapping: Node, sender: int) -> Node:
    return next(key for key, _ in mapping.entries if key.text == str(sender))


def _symmetry(values: Values) -> Symmetry:
    where = values.at("symmetry_offsets").where
    rows: list[Values] = values.get("symmetry_offsets", [])
    for row in rows:
        if not row.broken and not 0 < row["offset"] < row["group"]:
            last = row["group"] - 1
            row.node.error(
                "S107", f"an offset lies between 1 and {last}, below the group size {row['group']}"
            )
    offsets = (SymmetryOffset(row.get("offset", 0), row.get("group", 0), row.node.where) for row in rows)
    return Symmetry("listed" if rows else "none", offsets=tuple(offsets), where=where)
