"""The `links` of a profile, of a node or of the whole cluster: rows, pairs, or sets of ranks each to each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from taccl.profiles.draft import Draft, rank_set
from taccl.profiles.forms import Values
from taccl.profiles.link_columns import LinkClass
from taccl.profiles.link_table import Ints
from taccl.profiles.schema import MAX_LISTED_LINKS
from taccl.profiles.yaml_reader import Node


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """Links of one class that cross the same ports, in the order written."""

    link_class: LinkClass
    pairs: Ints  # [links, 2]: source, destination
    values: Values


def link_groups(draft: Draft, values: Values, limit: int, whole: str) -> Iterator[LinkGroup]:
    """The readable entries of `links`; `limit` ranks exist in `whole`. The rest is noted."""
    for entry in values.get("links", ()):
        link_class = draft.link_class(entry)
        pairs = _row_pair(entry, limit, whole) if "src" in entry.nodes else _group_pairs(entry, limit, whole)
        if link_class is not None and pairs is not None and not entry.broken:
            yield LinkGroup(link_class, np.array(pairs, np.int64).reshape(-1, 2), entry)
        else:
            draft.incomplete = True


def port_ids_of(draft: Draft, group: LinkGroup, prefix: str) -> tuple[int, ...]:
    """The ports that a group crosses; their names in the draft begin with `prefix`."""
    names: list[str] = group.values.get("ports", [])
    if not names:
        return ()
    ids = [
        draft.port(name, at, prefix) for name, at in zip(names, group.values.at("ports").items, strict=True)
    ]
    if len(set(names)) != len(names):
        group.values.at("ports").error("P104", "a port stands twice")
    return tuple(port for port in ids if port is not None)


def _row_pair(entry: Values, limit: int, whole: str) -> list[tuple[int, int]] | None:
    if entry.broken:
        return None
    pair = (entry["src"], entry["dst"])
    return [pair] if _pair_ok(pair, (entry.at("src"), entry.at("dst")), limit, whole) else None


def _pair_ok(pair: tuple[int, int], at: tuple[Node, Node], limit: int, whole: str) -> bool:
    for rank, node in zip(pair, at, strict=True):
        if rank >= limit:
            message = f"rank {rank} does not exist: {whole} has {limit} ranks (0-{limit - 1})"
            node.error("P102", message)
            return False
    if pair[0] == pair[1]:
        at[1].error("P105", f"a link must join two different ranks, found {pair[0]} twice")
        return False
    return True


def _group_pairs(entry: Values, limit: int, whole: str) -> list[tuple[int, int]] | None:
    given = [key for key in ("pairs", "from", "to") if key in entry.nodes]
    if given not in (["pairs"], ["from", "to"]):
        entry.node.error("P101", "links are given by `pairs`, or by `from` and `to`")
        return None
    if entry.broken:
        return None
    if given == ["pairs"]:
        pairs = [(pair[0], pair[1]) for pair in entry["pairs"]]
        nodes = entry.at("pairs").items
        checks = [
            _pair_ok(pair, (node.items[0], node.items[1]), limit, whole)
            for pair, node in zip(pairs, nodes, strict=True)
        ]
        if not all(checks):
            return None
    else:
        froms, tos = rank_set(entry, "from", limit, whole), rank_set(entry, "to", limit, whole)
        if froms is None or tos is None:
            return None
        if len(froms) * len(tos) > MAX_LISTED_LINKS:
            entry.node.error(
                "P106", f"{len(froms) * len(tos)} links are more than the {MAX_LISTED_LINKS} that are read"
            )
            return None
        pairs = [(src, dst) for src in froms for dst in tos if src != dst]
        if not pairs:
            entry.node.error("P105", "a link must join two different ranks")
            return None
    if entry.get("both_ways", False):
        there = set(pairs)
        pairs += [(dst, src) for src, dst in pairs if (dst, src) not in there]
    return pairs
