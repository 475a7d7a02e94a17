"""Cluster files: all the algorithms that a cluster wants, for `taccl build`.

    schema: taccl/cluster/v1
    topology: profile.yaml            # or a bundled profile, e.g. ndv2:2
    output: algorithms                # folder, relative to this file
    format: xml                       # xml (programs), json (algorithms) or both
    name: "{collective}-{size}"       # may also hold {topology} {sketch} {engine} {root}
    time_limit: 30s                   # and other options of `taccl synth`, for all entries
    collectives:
      - collective: allgather
        sizes: [64KB, 1MB, 64MB]
        sketch: ndv2-sk-1             # name, or file relative to this one; options here go before those above

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

from taccl.commands.synth import COLLECTIVES, ENGINES, PROTOCOLS
from taccl.produce import Order
from taccl.profiles.forms import Field, Integer, ListOf, Number, Record, Text, Values
from taccl.profiles.yaml_reader import parse, read_text
from taccl.sketches.schema import TIME_LIMIT

SCHEMA = "taccl/cluster/v1"
MANIFEST = "manifest.json"  # beside the results, see build_plan
MOST_BYTES = 2**50
PLACEHOLDERS = ("collective", "size", "topology", "sketch", "engine", "root")

_OPTIONS = {
    "engine": Field(Text(choices=ENGINES), "what searches"),
    "root": Field(Integer(0, 4095), "root of rooted collectives"),
    "partition": Field(Integer(1, 4096), "chunks per block of a rank"),
    "instances": Field(Integer(1, 32), "copies of the program on channels of their own"),
    "protocol": Field(Text(choices=PROTOCOLS), "protocol of the program"),
    "time_limit": Field(TIME_LIMIT, "time for one algorithm, e.g. 60s or 5min"),
    "target_gap": Field(Number("fraction", minimum=0, maximum=1), "stop at this gap to the lower bound"),
    "seed": Field(Integer(0, 2**31 - 1), "seed of the solver"),
    "workers": Field(Integer(1, 256), "threads of the solver for one algorithm"),
    "sketch": Field(Text(max_length=1000), "bundled sketch, or a file relative to this one"),
}
_ENTRY = Record(
    {
        "collective": Field(
            Text(choices=tuple(c for c in COLLECTIVES if c not in ("custom", "alltoallv", "sendrecv"))),
            "what to synthesise",
            required=True,
        ),
        "sizes": Field(
            ListOf(Number("bytes", minimum=1, maximum=MOST_BYTES), minimum=1, maximum=1000),
            "nccl-tests sizes",
            required=True,
        ),
        **_OPTIONS,
    },
    "a collective at several sizes",
)
CLUSTER = Record(
    {
        "schema": Field(Text(choices=(SCHEMA,)), "format and version", required=True),
        "topology": Field(
            Text(max_length=1000), "bundled profile, or a file relative to this one", required=True
        ),
        "output": Field(Text(max_length=1000), "folder of the results, relative to this file"),
        "format": Field(Text(choices=("xml", "json", "both")), "what to write"),
        "name": Field(Text(max_length=200), "name of the files, without suffix"),
        "collectives": Field(ListOf(_ENTRY, minimum=1, maximum=1000), "what to make", required=True),
        **_OPTIONS,
    },
    "the algorithms of a cluster",
)


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
    """Read a cluster file. Raises InvalidInput with all errors; codes B001..B006."""
    node = parse(read_text(path), path)
    values = CLUSTER.read(node)
    node.findings.raise_if_any()
    assert values is not None
    base = Path(path).parent
    pattern = values.get("name", "{collective}-{size}")
    for found in re.findall(r"\{([^}]*)\}", pattern):
        if found not in PLACEHOLDERS:
            known = ", ".join(PLACEHOLDERS)
            values.at("name").error("B001", f"unknown placeholder {{{found}}}; known are: {known}")
    if re.search(r"[/\\\0]", pattern) or pattern.startswith("."):
        values.at("name").error("B002", "a name holds no slash and does not begin with a dot")
    node.findings.raise_if_any()
    form = values.get("format", "xml")
    suffixes = (".xml", ".json") if form == "both" else (f".{form}",)
    wanted: dict[str, Wanted] = {}
    for entry in values["collectives"]:
        for size, wide in _sizes(entry):
            made = _wanted(values, entry, size, wide, pattern, base)
            if made.stem in wanted:
                help = "add a placeholder such as {sketch} or {root} to `name`"
                entry.node.error("B003", f"two algorithms would be called {made.stem!r}", help)
            elif any(made.stem + suffix == MANIFEST for suffix in suffixes):
                values.at("name").error(
                    "B005", f"an algorithm would be called {MANIFEST}, as the manifest is"
                )
            wanted[made.stem] = made
    _check_roots(values, base)
    node.findings.raise_if_any()
    return Cluster(path, base / values.get("output", "algorithms"), suffixes, tuple(wanted.values()))


def _check_roots(values: Values, base: Path) -> None:
    places = [place for place in (values, *values["collectives"]) if "root" in place]
    if not places:
        return
    from taccl.profiles.load import load_topology

    topology = load_topology(_place(base, values["topology"]))
    for place in places:
        if place["root"] >= topology.ranks:
            what = f"root {place['root']}: the ranks of {topology.name} are 0..{topology.ranks - 1}"
            place.at("root").error("B006", what)


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
    values: Values, entry: Values, size: int, wide: tuple[int, int], pattern: str, base: Path
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
    )
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
