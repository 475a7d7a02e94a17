"""The links of a topology that a line of a sketch selects."""

from __future__ import annotations

from taccl.profiles.plain_forms import did_you_mean
from taccl.profiles.topology import Topology
from taccl.profiles.yaml_reader import Findings
from taccl.sketches.places import note, shown
from taccl.sketches.sketch import LinkChoice


def chosen(choice: LinkChoice, topology: Topology, findings: Findings) -> frozenset[int]:
    """Ids of the links that meet all that the line says.

    Findings: S202 a rank that does not exist, S203 a link that is not there (a warning when no link meets
    `from`, `to`, `kind` and `scope`), S204 an unknown kind.
    """
    ranks = topology.ranks
    named = [rank for pair in choice.pairs or () for rank in pair]
    unknown = {r for r in (*named, *(choice.sources or ()), *(choice.targets or ())) if r >= ranks}
    if unknown:
        message = f"rank {min(unknown)} does not exist: {topology.name} has ranks 0 to {ranks - 1}"
        note(findings, choice.where, "S202", message)
        return frozenset()
    kinds = sorted({link.kind for link in topology.links})
    if choice.kind and choice.kind not in kinds:
        help = did_you_mean(choice.kind, kinds) or f"kinds are {', '.join(kinds)}"
        note(findings, choice.where, "S204", f"{topology.name} has no links of kind {choice.kind!r}", help)
        return frozenset()
    node_of = topology.node_of()
    sources = None if choice.sources is None else set(choice.sources)
    targets = None if choice.targets is None else set(choice.targets)
    pairs = None if choice.pairs is None else set(choice.pairs)

    def meets(src: int, dst: int) -> bool:
        return (
            (pairs is None or (src, dst) in pairs)
            and (sources is None or src in sources)
            and (targets is None or dst in targets)
        )

    found = set()
    there: set[tuple[int, int]] = set()
    for index, link in enumerate(topology.links):
        if choice.kind and link.kind != choice.kind:
            continue
        if choice.scope and (node_of[link.src] != node_of[link.dst]) != (choice.scope == "inter"):
            continue
        there.add((link.src, link.dst))
        if meets(link.src, link.dst) or (choice.both_ways and meets(link.dst, link.src)):
            found.add(index)
    ways = [pair for src, dst in choice.pairs or () for pair in ((src, dst), (dst, src))]
    for src, dst in ways if choice.both_ways else choice.pairs or ():
        if (src, dst) not in there:
            message = f"there is no such link from rank {src} to rank {dst} in {topology.name}"
            note(findings, choice.where, "S203", message, neighbours(topology, src))
    if not found and choice.pairs is None:
        note(findings, choice.where, "S203", f"this line selects no link of {topology.name}", "", "warning")
    return frozenset(found)


def neighbours(topology: Topology, rank: int) -> str:
    """Where a rank's links lead, for a message."""
    reached = sorted({link.dst for link in topology.links if link.src == rank})
    return f"rank {rank} is linked to {shown(reached)}" if reached else f"rank {rank} is linked to none"


def in_words(choice: LinkChoice) -> str:
    """The line as part of a sentence."""
    words = [] if choice.kind == "" else [f"of kind {choice.kind}"]
    if choice.pairs is not None:
        arrow = "<->" if choice.both_ways else "->"
        arrows = [f"{src} {arrow} {dst}" for src, dst in choice.pairs[:4]]
        words.append(
            ", ".join(arrows) + (f" and {len(choice.pairs) - 4} more" if len(choice.pairs) > 4 else "")
        )
    if choice.sources is not None:
        words.append(f"from {shown(choice.sources)}")
    if choice.targets is not None:
        words.append(f"to {shown(choice.targets)}")
    if choice.scope:
        words.append("inside nodes" if choice.scope == "intra" else "between nodes")
    back = ", both ways," if choice.both_ways and choice.pairs is None else ""
    return f"links {' '.join(words)}{back}" if words else "all links"
