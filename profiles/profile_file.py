"""Profile files (`schema: taccl/profile/v1`): YAML text to `Topology`.

A cluster is written in one of three ways, each of which `links` and `changes` may extend:

- homogeneous: `node` (ranks, links, switches, NICs of one node), `nodes` (how many), `network`;
- link by link: `nodes` (the ranks of each), `ports`, `switches`, `nics`, `links`;
- a regular `shape`: ring, mesh, torus, hypercube, fat tree.

The tables of keys are in `taccl.profiles.schema`; docs/profiles.md shows examples. Findings: P101 keys that
exclude each other or lack another, P102 a rank, P103 a link class, P104 a port, NIC or name, P105 a link,
P106 a size, P107 a change, P108 a codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from taccl.profiles.changes import apply_changes
from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.draft import Draft, read_classes
from taccl.profiles.forms import Values
from taccl.profiles.homogeneous import build_homogeneous
from taccl.profiles.listed import build_listed, build_nodes
from taccl.profiles.profile_writer import write_topology
from taccl.profiles.schema import PROFILE
from taccl.profiles.shapes import build_shape
from taccl.profiles.topology import Topology
from taccl.profiles.yaml_reader import parse

__all__ = ["read_topology", "write_topology"]


def read_topology(
    text: str,
    file: str,
    *,
    nodes: int | None = None,
    size: Sequence[int] | None = None,
    name: str | None = None,
) -> Topology:
    """The topology that a profile describes. `file` names it in messages.

    `nodes` (of a homogeneous profile), `size` (of a shape) and `name` replace what the file says: the bundled
    library is read so. Raises InvalidInput with every error of the text at its line and column.
    """
    root = parse(text, file)
    values = PROFILE.read(root)
    if values is None:
        root.findings.raise_if_any()
        raise AssertionError("a profile that cannot be read has an error")
    draft = Draft(values)
    _build(draft, values, nodes, size)
    codecs = _codecs(values)
    root.findings.raise_if_any()
    topology = Topology(
        name=name if name is not None else values["name"],
        nodes=tuple(draft.nodes),
        links=draft.links.sequence(),
        ports=tuple(draft.ports),
        switches=tuple(draft.switches),
        nics=tuple(draft.nics),
        reduce_alpha_us=_reduce(values, "alpha"),
        reduce_beta_us_per_mb=_reduce(values, "beta"),
        source=values.get("source", ""),
        codecs=codecs,
        load_us=values.get("load", Fraction(0)),
    )
    topology.check()
    return topology


def _reduce(values: Values, key: str) -> Fraction:
    reduce = values.get("reduce")
    return reduce.get(key, Fraction(0)) if reduce is not None else Fraction(0)


def _codecs(values: Values) -> tuple[CodecCost, ...]:
    """The codecs in the file's order; notes those that stand twice and frames of half a byte."""
    found: list[CodecCost] = []
    first: dict[tuple[str, str], Values] = {}
    for entry in values.get("codecs", ()):
        if "frame" in entry and entry["frame"].denominator != 1:
            entry.at("frame").error("P108", "a frame has a whole number of bytes")
        if "codec" in entry and "dtype" in entry:
            key = (entry["codec"], entry["dtype"])
            if first.setdefault(key, entry) is not entry:
                message = f"codec {key[0]!r} stands twice for {key[1]} (first in line {first[key].node.line})"
                entry.at("codec").error("P108", message, "remove one of the two")
        if entry.broken or entry["encode"].broken or entry["decode"].broken:
            continue
        found.append(
            CodecCost(
                codec=entry["codec"],
                dtype=entry["dtype"],
                lossless=entry["lossless"],
                ratio=entry["ratio"],
                frame_bytes=int(entry["frame"]),
                encode_alpha_us=entry["encode"]["alpha"],
                encode_beta_us_per_mb=entry["encode"]["beta"],
                decode_alpha_us=entry["decode"]["alpha"],
                decode_beta_us_per_mb=entry["decode"]["beta"],
                source=entry.get("source", ""),
            )
        )
    return tuple(found)


def _build(draft: Draft, values: Values, nodes: int | None, size: Sequence[int] | None) -> None:
    read_classes(draft, values)
    described = [key for key in ("node", "shape") if key in values.nodes]
    if len(described) == 2:
        values.at("shape").error("P101", "`node` and `shape` exclude each other", "keep one of the two")
        return
    if not all(key in values for key in described):
        return  # noted already
    if described == ["node"]:
        build_homogeneous(draft, values, nodes)
    elif described == ["shape"]:
        build_shape(draft, values, size)
    else:
        build_nodes(draft, values)
    if not draft.nodes:
        return
    build_listed(draft, values)
    apply_changes(draft, values)
