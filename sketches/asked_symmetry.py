"""The symmetry that a sketch asks for, on a topology."""

from __future__ import annotations

from collections.abc import Collection

from taccl.profiles.topology import Topology
from taccl.profiles.yaml_reader import Findings
from taccl.sketches.places import note
from taccl.sketches.restrictions import Permutation
from taccl.sketches.sketch import Symmetry
from taccl.sketches.symmetry import is_automorphism


def generators_of(
    asked: Symmetry, topology: Topology, allowed: Collection[tuple[int, int]], findings: Findings
) -> tuple[Permutation, ...] | None:
    """Generators of the group: None for `auto`, () for `none`. Findings are S209.

    `allowed` holds the (src, dst) that the sketch's other rules leave: a symmetry that does not keep them is
    only warned of, for synthesis leaves it out. The identity, which an offset is on a small cluster, is dropped.
    """
    if asked.kind != "listed":
        return None if asked.kind == "auto" else ()
    ranks = topology.ranks
    images: list[tuple[Permutation, str]] = []
    for line in asked.offsets:
        group = line.group or ranks
        if ranks % group:
            message = f"groups of {group} ranks do not divide the {ranks} ranks of {topology.name}"
            note(findings, line.where, "S209", message, "`all` stands for the ranks of the whole cluster")
            continue
        image = tuple((r % group + line.offset) % group + r // group * group for r in range(ranks))
        images.append((image, line.where))
    for written in asked.permutations:
        if len(written.image) != ranks:
            message = f"the permutation has {len(written.image)} ranks, {topology.name} has {ranks}"
            note(findings, written.where, "S209", message)
            continue
        images.append((written.image, written.where))
    identity = tuple(range(ranks))
    generators = []
    for image, where in images:
        if image != identity and _is_kept(image, where, topology, allowed, findings):
            generators.append(image)
    return tuple(generators)


def _is_kept(
    image: Permutation,
    where: str,
    topology: Topology,
    allowed: Collection[tuple[int, int]],
    findings: Findings,
) -> bool:
    """Whether this is a symmetry of the topology; notes when it is none, or when other rules break it."""
    if not is_automorphism(topology, image):
        message = f"this is no symmetry of {topology.name}: {_difference(image, topology)}"
        note(findings, where, "S209", message, "write symmetry: auto to let it be found")
        return False
    broken = sorted((a, b) for a, b in allowed if (image[a], image[b]) not in allowed)
    if broken:
        a, b = broken[0]
        message = (
            f"the sketch's own rules do not keep this symmetry: {a} -> {b} may be used, but not its image "
            f"{image[a]} -> {image[b]}"
        )
        note(findings, where, "S209", message, "it will not be used", "warning")
    return True


def _difference(image: Permutation, topology: Topology) -> str:
    """A link that differs from its image, in words."""
    prices: dict[tuple[int, int], list[tuple[object, ...]]] = {}
    for link in topology.links:
        price = (link.alpha_us, link.beta_us_per_mb, link.occupancy_us)
        prices.setdefault((link.src, link.dst), []).append(price)
    for (a, b), here in sorted(prices.items()):
        c, d = image[a], image[b]
        if sorted(here, key=str) != sorted(prices.get((c, d), []), key=str):
            what = "differs from its image" if (c, d) in prices else "is there, but no"
            return f"the link {a} -> {b} {what} {c} -> {d}"
    return "the ports that links share do not fit"
