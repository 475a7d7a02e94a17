"""Cluster files: all the algorithms that a cluster wants, for `taccl build`. docs/building.md explains the format.

Between two sizes of an entry the programs share the range at the geometric mean, so that a loader always
finds exactly one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import Any

from taccl.cluster_schema import CLUSTER, MOST_BYTES
from taccl.demand import read_demand
from taccl.errors import UsageError
from taccl.groups import groups_text, read_groups
from taccl.produce import Order
from taccl.profiles.forms import Values
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Topology
from taccl.profiles.yaml_reader import parse, read_text
from taccl.synth.collective import GROUPED, build
from taccl.synth.collective_file import read_collective

MANIFEST = "manifest.json"  # beside the results, see build_plan
PLACEHOLDERS = ("collective", "size", "topology", "sketch", "engine", "root")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One algorithm of a cluster: what to make and the files (paths without their suffix) to make of it."""

    order: Order
    stem: str  # file name without suffix


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster file, resolved."""

    file: str
    output: Path
    suffixes: tuple[str, ...]
    wanted: tuple[Wanted, ...]


def read_cluster(path: str) -> Cluster:
    """Read a cluster file. Raises InvalidInput with all errors; codes B001..B008."""
    node = parse(read_text(path), path)
    values = CLUSTER.read(node)
    node.findings.raise_if_any()
    assert values is not None
    base = Path(path).parent
    entries: list[Values] = values["collectives"]
    for named in (values, *entries):
        _check_name(named)
    for entry in entries:
        _check_together(entry)
    node.findings.raise_if_any()
    topology = load_topology(_place(base, values["topology"]))
    for place in (values, *entries):
        if place.get("root", 0) >= topology.ranks:
            what = f"root {place['root']}: the ranks of {topology.name} are 0..{topology.ranks - 1}"
            place.at("root").error("B006", what)
    form = values.get("format", "xml")
    suffixes = (".xml", ".json") if form == "both" else (f".{form}",)
    wanted: dict[str, Wanted] = {}
    for entry in entries:
        asked = _asked(entry, base, topology, values.get("root", 0))
        for size, wide in _sizes(entry):
            made = _wanted(values, entry, asked, size, wide, base)
            if made.stem in wanted:
                help = "add a placeholder such as {sketch} or {root} to `name`, or give the entry a name"
                entry.node.error("B003", f"two algorithms would be called {made.stem!r}", help)
            elif any(made.stem + suffix == MANIFEST for suffix in suffixes):
                at = entry if "name" in entry else values
                at.at("name").error("B005", f"an algorithm would be called {MANIFEST}, as the manifest is")
            wanted[made.stem] = made
    node.findings.raise_if_any()
    return Cluster(path, base / values.get("output", "algorithms"), suffixes, tuple(wanted.values()))


def _check_name(values: Values) -> None:
    pattern = values.get("name", "")
    for found in re.findall(r"\{([^}]*)\}", pattern):
        if found not in PLACEHOLDERS:
            known = ", ".join(PLACEHOLDERS)
            values.at("name").error("B001", f"unknown placeholder {{{found}}}; known are: {known}")
    if re.search(r"[/\\\0]", pattern) or pattern.startswith("."):
        values.at("name").error("B002", "a name holds no slash and does not begin with a dot")


def _check_together(entry: Values) -> None:
    collective = entry["collective"]
    for key, only in (("demand", "alltoallv"), ("pairs", "sendrecv"), ("pre_post", "custom")):
        if key in entry and collective != only:
            entry.at(key).error("B007", f"`{key}` is for {only}, not for {collective}")
        elif key not in entry and collective == only and key != "pairs":
            entry.at("collective").error("B007", f"{only} needs `{key}`")


def _asked(entry: Values, base: Path, topology: Topology, default_root: int) -> dict[str, Any]:
    """What alltoallv, sendrecv, custom and groups move, as the arguments of an Order; checked against the topology."""
    collective = entry["collective"]
    if "groups" in entry:
        return _groups(entry, base, topology, default_root)
    if collective == "custom":
        path = str(base / entry["pre_post"])
        ranks = read_collective(read_text(path), path).ranks
        if ranks != topology.ranks:
            entry.at("pre_post").error("B008", f"it has {ranks} ranks, {topology.name} has {topology.ranks}")
        return {"pre_post": path}
    if collective == "sendrecv" and "pairs" in entry:
        pairs = tuple((src, dst) for src, dst in entry["pairs"])
        try:
            build(collective, topology.ranks, pairs=pairs)
        except ValueError as error:
            entry.at("pairs").error("B008", str(error))
        return {"pairs": pairs}
    if collective != "alltoallv":
        return {}
    given = entry["demand"]
    try:
        demand = read_demand(_place(base, given)) if isinstance(given, str) else tuple(map(tuple, given))
    except UsageError as error:
        entry.at("demand").error("B008", str(error).removeprefix("--demand: "))
        return {}
    ranks = topology.ranks
    if demand is None or len(demand) != ranks or any(len(row) != ranks for row in demand):
        entry.at("demand").error(
            "B008", f"expected {ranks} rows of {ranks} counts, one for each rank of {topology.name}"
        )
    return {"demand": demand}


def _groups(entry: Values, base: Path, topology: Topology, default_root: int) -> dict[str, Any]:
    """The groups in their listed form, so that a file's content decides what is stale."""
    given = entry["groups"]
    collective = entry["collective"]
    if collective not in GROUPED:
        entry.at("groups").error("B007", f"groups are for {', '.join(sorted(GROUPED))}, not for {collective}")
        return {}
    text = _place(base, given) if isinstance(given, str) else groups_text(tuple(map(tuple, given)))
    try:
        groups = read_groups(text, topology.ranks)
    except UsageError as error:
        entry.at("groups").error("B008", str(error).removeprefix("--groups: "))
        return {}
    assert groups is not None
    root, least = entry.get("root", default_root), min(len(group) for group in groups)
    if root >= least:
        what = f"root {root}: it is a place in every group, 0..{least - 1} in the smallest"
        entry.at("root" if "root" in entry else "groups").error("B006", what)
    return {"groups": groups_text(groups)}


def size_name(size_bytes: int) -> str:
    """A size as people write it, without spaces: 1MB, 64KiB, 1000001B."""
    if size_bytes % 1000 and size_bytes % 1024 == 0:
        units = [("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)]
    else:
        units = [("GB", 10**9), ("MB", 10**6), ("KB", 10**3)]
    return next(
        (f"{size_bytes // unit}{name}" for name, unit in units if size_bytes % unit == 0), f"{size_bytes}B"
    )


def _sizes(entry: Values) -> list[tuple[int, tuple[int, int]]]:
    """Ascending sizes with the range of sizes that each one's program serves."""
    sizes: list[int] = []
    for size in entry["sizes"]:
        if size.denominator != 1:
            entry.at("sizes").error("B004", f"a size is a whole number of bytes, found {float(size):g}")
        elif int(size) in sizes:
            entry.at("sizes").error("B004", f"the size {size_name(int(size))} stands twice")
        else:
            sizes.append(int(size))
    sizes.sort()
    borders = [0, *(isqrt(a * b) for a, b in pairwise(sizes)), MOST_BYTES]
    return [(size, (borders[i] + (i > 0), borders[i + 1])) for i, size in enumerate(sizes)]


def _wanted(
    values: Values, entry: Values, asked: dict[str, Any], size: int, wide: tuple[int, int], base: Path
) -> Wanted:
    def option(key: str, default: Any = None) -> Any:
        return entry.get(key, values.get(key, default))

    sketch = option("sketch")
    limit, gap = option("time_limit"), option("target_gap")
    order = Order(
        topology=_place(base, values["topology"]),
        collective=entry["collective"],
        size_bytes=size,
        sketch=None if sketch is None else _place(base, sketch),
        engine=option("engine", "auto"),
        root=option("root", 0),
        partition=option("partition"),
        instances=option("instances", 1),
        protocol=option("protocol", "Simple"),
        time_limit_s=None if limit is None else float(limit),
        target_gap=None if gap is None else float(gap),
        seed=option("seed", 0),
        workers=option("workers", 2),
        size_range=wide,
        **asked,
    )
    pattern = option("name", "{collective}-{size}")
    shown = {
        "collective": order.collective,
        "size": size_name(size),
        "topology": _plain(values["topology"]),
        "sketch": _plain(sketch or "no-sketch"),
        "engine": order.engine,
        "root": str(order.root),
    }
    return Wanted(order, re.sub(r"\{(\w+)\}", lambda found: shown[found[1]], pattern))


def _place(base: Path, spec: str) -> str:
    """A file beside the cluster file if there is one, else the spec as it stands (a bundled name)."""
    beside = base / spec
    return str(beside) if beside.is_file() else spec


def _plain(spec: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(spec).stem if "/" in spec or "." in spec else spec)
