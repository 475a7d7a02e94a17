"""A sketch resolved on a topology: flat rules over link ids that synthesis turns into a model.

Every rule remembers the place in the sketch that asked for it, so that an infeasible model can be explained
in the author's own lines. What a sketch says of who sends between nodes speaks of the NON-combining direction; for the
reducing phase synthesis mirrors it (the rule on u->v then holds for v->u). What it says of links holds for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Permutation = tuple[int, ...]  # image of each rank


@dataclass(frozen=True, slots=True)
class Rule:
    """One restriction. Which fields count depends on `kind`.

    "forbid-links"   no chunk may use a link of `links`.
    "forbid-routes"  chunks whose source is rank r may not use link l, for every (r, l) in `routes`.
    "cap"            at most `limit` chunks in total over each link of `links`.
    "own-first"      on each link of `links`, chunks whose source is the link's own sender leave before others.
    "uc-min"         use as few different links of `links` as the best time allows (a preference).
    "uc-max"         use as many different links of `links` as the best time allows (a preference).
    """

    kind: str
    where: str = field(repr=False)  # "file:line:column" in the sketch, or "" when derived
    text: str  # the rule as one sentence
    links: frozenset[int] = frozenset()
    routes: frozenset[tuple[int, int]] = frozenset()
    limit: int = 0
    mirrored: bool = False  # when reducing, the rule holds for the links of the other direction


@dataclass(frozen=True, slots=True)
class Restrictions:
    """All that a sketch asks of synthesis on one topology."""

    rules: tuple[Rule, ...] = ()
    symmetry: tuple[Permutation, ...] | None = None  # generators; None: find them; (): none
    symmetry_where: str = field(default="", repr=False)
    partition: int | None = None  # chunks per natural block; None: synthesis chooses
    extra_hops: int | None = (
        None  # hops beyond a shortest path that a chunk may take; None: synthesis chooses
    )
    codec: str = "auto"  # "auto": a measured lossless one, "none", or a name
    codec_where: str = field(default="", repr=False)  # file:line:column
    codec_links: frozenset[int] | None = None  # over which messages may be coded; None: all
    size_bytes: int | None = None
    time_limit_s: float | None = None
    target_gap: float | None = None
    sketch_name: str = ""
    options: dict[str, object] = field(default_factory=dict)  # solver hyper-parameters, e.g. seed
