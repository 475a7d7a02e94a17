"""Sketch files (`schema: taccl/sketch/v1`): YAML text to `Sketch`.

The tables of keys are in `taccl.sketches.schema`. What needs a topology to judge is judged by
`taccl.sketches.restrict`. Findings here: S101 keys that exclude or need each other, S102 a set of ranks,
S103 a choice of links, S104 senders and relays, S105 switches, S106 node groups, S107 symmetry, S108 the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import PurePath
from typing import Any

from taccl.profiles.forms import Values
from taccl.profiles.schema import MAX_RANKS
from taccl.profiles.yaml_reader import INTEGER, MAX_DIGITS, Node, parse
from taccl.sketches.schema import SKETCH
from taccl.sketches.sketch import (
    ExplicitPermutation,
    Internode,
    Intranode,
    LinkCap,
    LinkChoice,
    NodeGroups,
    Relay,
    Sender,
    Sketch,
    SwitchSet,
    Symmetry,
    SymmetryOffset,
)

_PLAIN = ("nodes", "size", "partition", "extra_hops", "codec", "time_limit", "target_gap")


def read_sketch(text: str, file: str) -> Sketch:
    """The sketch that a YAML text describes. `file` names it in messages.

    Raises InvalidInput with every error of the text at its line and column.
    """
    root = parse(text, file)
    sketch = _read(root, text, file)
    root.findings.raise_if_any()
    return sketch


def read_known_keys(text: str, file: str) -> Sketch:
    """The sketch without what cannot be read: for further checks of a text that `read_sketch` refused."""
    return _read(parse(text, file), text, file)


def _read(root: Node, text: str, file: str) -> Sketch:
    """The sketch, as far as it can be read; what is wrong is noted in the findings of `root`."""
    values = SKETCH.read(root)
    if values is None:
        root.findings.raise_if_any()
        raise AssertionError("a sketch that cannot be read has an error")
    size = values.get("size")
    if size is not None and size.denominator != 1:
        values.at("size").error("S108", "the size is not a whole number of bytes")
    hyper: Values | None = values.get("hyperparameters")
    codec: str | Values = values.get("codec", "auto")
    return Sketch(
        name=values.get("name", PurePath(file).stem),
        description=values.get("description", ""),
        nodes=values.get("nodes"),
        intranode=_intranode(values),
        internode=_internode(values),
        node_groups=_node_groups(values),
        use=tuple(_link_choice(entry) for entry in values.get("use", ())),
        avoid=tuple(_link_choice(entry) for entry in values.get("avoid", ())),
        caps=tuple(
            LinkCap(_link_choice(entry), entry.get("limit", 0), entry.node.where)
            for entry in values.get("caps", ())
        ),
        symmetry=_symmetry(values),
        size_bytes=None if size is None else int(size),
        partition=values.get("partition"),
        extra_hops=values.get("extra_hops"),
        codec=codec if isinstance(codec, str) else codec.get("name", "auto"),
        codec_links=() if isinstance(codec, str) else tuple(_link_choice(e) for e in codec.get("links", ())),
        time_limit_s=float(values["time_limit"]) if "time_limit" in values else None,
        target_gap=float(values["target_gap"]) if "target_gap" in values else None,
        seed=hyper.get("seed") if hyper is not None else None,
        workers=hyper.get("workers") if hyper is not None else None,
        places=_places(values),
        file=file,
        text=text,
    )


def _places(values: Values) -> dict[str, str]:
    places = {key: values.at(key).where for key in _PLAIN if key in values}
    hyper: Values | None = values.get("hyperparameters")
    if hyper is not None:
        places |= {
            f"hyperparameters.{key}": hyper.at(key).where for key in ("seed", "workers") if key in hyper
        }
    return places


def _ranks(value: Any, at: Node) -> tuple[int, ...] | None:
    """The ranks of a rank set in the order written; None for `all`, and after noting what is wrong."""
    if value == "all":
        return None
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return distinct(value, at)
    ranks: list[int] = []
    for part in value.split(","):
        first, _, last = part.strip().partition("-")
        low, high = int(first), int(last or first)
        if max(low, high) >= MAX_RANKS:
            at.error("S102", f"rank {max(low, high)} is above {MAX_RANKS - 1}, the highest that is read")
            return None
        if high < low:
            at.error("S102", f"the range {low}-{high} runs backwards", f"write {high}-{low}")
            return None
        ranks.extend(range(low, high + 1))
    return distinct(ranks, at)


def distinct(ranks: list[int], at: Node, what: str = "rank") -> tuple[int, ...]:
    """The ranks, after noting one that stands twice."""
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(set(ranks)) < len(ranks) else []
    if twice:
        at.error("S102", f"the {what} {twice[0]} stands twice in this set", "leave one of the two out")
    return tuple(ranks)


def _link_choice(values: Values) -> LinkChoice:
    pairs: list[list[int]] | None = values.get("pairs")
    named = [key for key in ("pairs", "from", "to", "kind", "scope") if key in values.nodes]
    if not named:
        values.node.error(
            "S103", "this line does not say which links it means",
            "name them by `pairs`, or by `from` and `to`, `kind` or `scope`",
        )  # fmt: skip
    for other in ("from", "to"):
        if "pairs" in named and other in named:
            values.at(other).error("S103", f"`pairs` and `{other}` exclude each other", "keep one of the two")
    for place, (src, dst) in enumerate(pairs or ()):
        if src == dst:
            at = values.at("pairs").items[place]
            at.error("S103", f"a link joins two different ranks, not {src} to itself")
    return LinkChoice(
        pairs=None if pairs is None else tuple((src, dst) for src, dst in pairs),
        sources=_ranks(values["from"], values.at("from")) if "from" in values else None,
        targets=_ranks(values["to"], values.at("to")) if "to" in values else None,
        kind=values.get("kind", ""),
        scope=values.get("scope", ""),
        both_ways=values.get("both_ways", False),
        where=values.node.where,
    )


def _intranode(values: Values) -> Intranode | None:
    intranode: Values | None = values.get("intranode")
    if intranode is None:
        return None
    strategy = intranode.get("strategy", "switch" if "switches" in intranode.nodes else "none")
    if strategy == "switch" and "switches" not in intranode.nodes:
        intranode.at("strategy").error("S101", "the strategy `switch` needs `switches`, with their policies")
    elif strategy != "switch" and "switches" in intranode.nodes:
        intranode.at("switches").error(
            "S101", f"`switches` are of the strategy switch, not of {strategy}", "write strategy: switch"
        )
    entries: list[Values] = intranode.get("switches", [])
    switches = [_switch(entry) for entry in entries]
    check_overlaps(switches, [entry.node for entry in entries], [entry.at("policy") for entry in entries])
    return Intranode(strategy, tuple(switches), intranode.at("strategy").where)


def check_overlaps(switches: Sequence[SwitchSet], nodes: Sequence[Node], policies: Sequence[Node]) -> None:
    """Note switches that share some ranks only, or that give the same ranks two policies.

    `nodes` and `policies` are where each switch and its policy stand.
    """
    for (i, a), (j, b) in combinations(enumerate(switches), 2):
        common = set(a.ranks) & set(b.ranks)
        if common and set(a.ranks) != set(b.ranks):
            nodes[j].error(
                "S105",
                f"rank {min(common)} is in this switch and in the one at {nodes[i].where}, which have other ranks",
                "let two switches have the same ranks, or none in common",
            )
        elif common and a.policy != b.policy:
            policies[j].error(
                "S105", f"the policy of these ranks is {a.policy} at {policies[i].where}, here {b.policy}"
            )


def _switch(values: Values) -> SwitchSet:
    named = [key for key in ("ranks", "name") if key in values.nodes]
    if len(named) != 1:
        values.node.error("S101", "a switch has either `ranks` or a `name`")
    ranks = _ranks(values["ranks"], values.at("ranks")) if "ranks" in values else None
    if ranks is not None and len(ranks) < 2:
        values.at("ranks").error("S105", "a switch joins at least two ranks")
    return SwitchSet(
        ranks=ranks or (),
        policy=values.get("policy", "free"),
        name=values.get("name", ""),
        where=values.node.where,
        policy_where=values.at("policy").where,
    )


def _lines(values: Values, key: str) -> list[tuple[int, tuple[int, ...], Node]]:
    """(sender, local ranks, place) for each line of a mapping from senders to lists of local ranks."""
    lines: dict[int, tuple[int, tuple[int, ...], Node]] = {}
    for name, node in values.at(key).entries:
        if not INTEGER.fullmatch(name.text) or len(name.text) > MAX_DIGITS:
            continue  # noted already
        sender = int(name.text)
        if sender in lines:
            name.error("S104", f"the sender {sender} stands twice (first at {lines[sender][2].where})")
        elif values[key].get(sender) is not None:
            lines[sender] = (sender, distinct(values[key][sender], node), name)
    return list(lines.values())


def _internode(values: Values) -> Internode | None:
    internode: Values | None = values.get("internode")
    if internode is None:
        return None
    connect = internode.get("connect", "fully-connected")
    senders = []
    if isinstance(connect, dict):
        lines = _lines(internode, "connect")
        senders = [Sender(sender, ranks, name.where) for sender, ranks, name in lines]
        if not internode.at("connect").entries:
            internode.at("connect").error(
                "S104", "nobody sends to other nodes", "list the receivers of each sender, e.g. {0: [1]}"
            )
    relays = []
    for sender, sources, name in _lines(internode, "relays") if "relays" in internode else ():
        if senders and sender not in {line.sender for line in senders}:
            known = ", ".join(str(line.sender) for line in senders)
            name.error("S104", f"rank {sender} sends to no other node (senders are {known})")
        relays.append(Relay(sender, sources, name.where))
    return Internode(
        connection="explicit" if isinstance(connect, dict) else connect,
        senders=tuple(senders),
        relays=tuple(relays),
        own_first=internode.get("own_first", False),
        where=internode.at("connect").where,
        own_first_where=internode.at("own_first").where,
    )


def _node_groups(values: Values) -> NodeGroups | None:
    internode: Values | None = values.get("internode")
    groups: Values | None = internode.get("groups") if internode is not None else None
    if groups is None:
        return None
    named = [key for key in ("size", "nodes") if key in groups.nodes]
    if len(named) != 1:
        groups.node.error("S101", "node groups need either their `size` or their `nodes`")
    listed: list[list[int]] = groups.get("nodes", [])
    pattern = groups.get("pattern", "round-robin")
    seen: dict[int, Node] = {}
    for members, node in zip(listed, groups.at("nodes").items, strict=False):
        for member in distinct(members, node, "node"):
            if seen.setdefault(member, node) is not node:
                node.error("S106", f"node {member} is in two groups (also in that at {seen[member].where})")
    if pattern == "round-robin" and len({len(members) for members in listed}) > 1:
        groups.at("nodes").error("S106", "round-robin needs groups of equal size")
    return NodeGroups(
        pattern, groups.get("size", 0), tuple(tuple(members) for members in listed), groups.node.where
    )


def _symmetry(values: Values) -> Symmetry:
    given = values.get("symmetry")
    where = values.at("symmetry").where if "symmetry" in values.nodes else ""
    if given is None or isinstance(given, str):
        return Symmetry(given or "auto", where=where)
    if isinstance(given, list):
        offsets = []
        for row in given:
            offset, group = row.get("offset", 0), row.get("group", 0)
            group = 0 if group == "all" else group
            if not row.broken and group and not 0 < offset < group:
                row.node.error(
                    "S107", f"an offset lies between 1 and {group - 1}, below the group size {group}"
                )
            offsets.append(SymmetryOffset(offset, group, row.node.where))
        return Symmetry("listed", offsets=tuple(offsets), where=where)
    permutations = []
    nodes = given.at("permutations").items
    for image, node in zip(given.get("permutations", ()), nodes, strict=False):
        if sorted(image) != list(range(len(image))):
            missing = sorted(set(range(len(image))) - set(image))
            node.error(
                "S107", f"a permutation of {len(image)} ranks names each of 0 to {len(image) - 1} once",
                f"rank {missing[0]} is missing",
            )  # fmt: skip
        permutations.append(ExplicitPermutation(tuple(image), node.where))
    return Symmetry("listed", permutations=tuple(permutations), where=where)
