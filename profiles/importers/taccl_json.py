"""TACCL's topology JSON (microsoft/taccl: INPUT_GUIDE.md, taccl/examples/topo) to a profile.

TACCL's costs are for one chunk, not for a megabyte, and scaled by hand so that they survive rounding to whole
numbers: alpha and remote_alpha are `scale` times the latency in us, the betas `scale` times a chunk's time.
Both factors are not in the file and are asked for. Matrices are indexed [dst][src], as TACCL does.

Findings: T101 keys that do not fit together, T102 a matrix, T103 a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from taccl.errors import InvalidInput, UsageError
from taccl.profiles.forms import Field, ListOf, Record, Values
from taccl.profiles.importers.machine import Imported, connection_notes
from taccl.profiles.load import library_text
from taccl.profiles.plain_forms import Integer, Number, Text
from taccl.profiles.profile_file import read_topology
from taccl.profiles.profile_writer import number_text, scalar_text
from taccl.profiles.schema import MAX_RANKS, PROFILE, SCHEMA_NAME
from taccl.profiles.yaml_reader import parse

LAYOUTS = ("ndv2", "dgx2", "hub-and-spoke", "custom")

_COST = Number("", minimum=-1, maximum=10**15)  # TACCL writes -1 for "there is none"
_COSTS = ListOf(_COST, minimum=1, maximum=2)
_MATRIX = ListOf(ListOf(_COST, minimum=1, maximum=MAX_RANKS), minimum=1, maximum=MAX_RANKS)
TACCL_TOPOLOGY = Record(
    {
        "name": Field(Text(max_length=100), "name of the topology", required=True),
        "gpus_per_node": Field(Integer(1, MAX_RANKS), "number of GPUs in a node", required=True),
        "nics_per_node": Field(Integer(-1, MAX_RANKS), "number of NICs in a node"),
        "alpha": Field(_COST, "latency within a node", required=True),
        "node_betas_list": Field(_COSTS, "time of a chunk on each kind of link, fastest first"),
        "node_invbws_list": Field(_COSTS, "alpha + beta of each kind of link"),
        "links": Field(_MATRIX, "number of links from each GPU to each"),
        "betas": Field(_MATRIX, "time of a chunk from each GPU to each"),
        "invbws": Field(_MATRIX, "alpha + beta from each GPU to each"),
        "remote_alpha": Field(_COST, "latency between nodes"),
        "remote_beta": Field(_COST, "time of a chunk between nodes"),
        "remote_invbw": Field(_COST, "remote_alpha + remote_beta"),
        "remote_invbws": Field(_COST, "remote_alpha + remote_beta"),
    },
    "a TACCL topology",
)


def read_taccl_json(
    text: str,
    file: str,
    nodes: int = 1,
    chunk_bytes: int = 10**6,
    scale: Fraction = Fraction(1),
    layout: str = "",
) -> Imported:
    """A profile of `nodes` nodes. `layout` is TACCL's topology argument; "" tells it from the file.

    `chunk_bytes` and `scale` undo what the file's numbers were multiplied by. Raises InvalidInput with every
    problem at its line and column; UsageError when the layout cannot be told.
    """
    root = parse(text.replace("\t", " "), file)  # JSON is YAML, but for tabs in the indentation
    values = TACCL_TOPOLOGY.read(root)
    root.findings.raise_if_any()
    assert values is not None
    layout = layout or _layout_of(values)
    profile = _profile(values, layout, nodes, Fraction(chunk_bytes, 10**6), scale)
    root.findings.raise_if_any()
    try:
        topology = read_topology(profile, file)
    except InvalidInput as error:
        reasons = "; ".join(found.message for found in error.diagnostics)
        root.error("T103", f"with {nodes} nodes, chunks of {chunk_bytes} bytes and this scale: {reasons}")
        raise InvalidInput(root.findings.errors) from error
    notes = (
        f"costs were taken to be of a chunk of {chunk_bytes} bytes, scaled by {number_text(scale)}",
        *connection_notes(topology),
    )
    return Imported(topology, profile, notes)


def _layout_of(values: Values) -> str:
    if "links" in values:
        return "custom"
    name = values["name"].lower()
    for layout in ("ndv2", "dgx2"):
        if layout in name.replace("-", ""):
            return layout
    raise UsageError(
        f"the file does not say how its {values['gpus_per_node']} GPUs are linked; say --layout ndv2, dgx2 "
        "or hub-and-spoke (the topology that TACCL was called with)"
    )


def _profile(values: Values, layout: str, nodes: int, chunk_mb: Fraction, scale: Fraction) -> str:
    """The profile text; wrong values are noted, and the text then means nothing."""
    gpus: int = values["gpus_per_node"]
    alpha = values["alpha"] / scale
    fixed = {"ndv2": 8, "dgx2": 16}.get(layout)
    if fixed is not None and gpus != fixed:
        values.at("gpus_per_node").error("T101", f"{layout} has {fixed} GPUs in a node, found {gpus}")
        return ""

    def beta(cost: Fraction) -> str:
        return number_text(cost / scale / chunk_mb)

    if alpha < 0:
        values.at("alpha").error("T103", "the latency within a node must not be negative")
        return ""
    link = f"alpha: {number_text(alpha)}"
    inner: list[str] = []
    classes: list[str] = []
    if layout == "custom":
        inner, classes = _custom_links(values, gpus, link, beta)
    else:
        betas = _betas(values, 2 if layout == "ndv2" else 1)
        if layout == "ndv2":
            inner = ["  links:", *_ndv2_links()]
            names = ["nvlink2", "nvlink1"]
        else:
            inner = ["  switches:", "    - {name: switch, ranks: all, class: nvlink}"]
            names = ["nvlink"]
        pairs = zip(names, betas, strict=False)
        classes = [f"  {name}: {{{link}, beta: {beta(cost)}, kind: nvlink}}" for name, cost in pairs]
    nics, network = _nics(values, gpus, nodes)
    if network:
        remote = f"alpha: {number_text(values['remote_alpha'] / scale)}, beta: {beta(values['remote_beta'])}"
        classes.append(f"  ib: {{{remote}}}")
    source = "imported from a TACCL topology file; its costs divided by the chunk and the scale"
    return "\n".join(
        [
            f"schema: {SCHEMA_NAME}",
            f"name: {scalar_text(values['name'] or 'taccl')}",
            f"source: {scalar_text(source)}",
            f"nodes: {nodes}",
            "node:",
            f"  ranks: {gpus}",
            *inner,
            *nics,
            *network,
            "classes:  # alpha in us, beta in us/MB",
            *classes,
            "",
        ]
    )


def _betas(values: Values, count: int) -> Sequence[Fraction]:
    betas: list[Fraction] = values.get("node_betas_list", [])
    if len(betas) != count:
        message = f"expected {count} number{'s' * (count > 1)} in node_betas_list, found {len(betas)}"
        values.at("node_betas_list").error("T101", message)
        return []
    if min(betas) <= 0:
        values.at("node_betas_list").error("T103", "the time of a chunk must be above 0")
        return []
    return betas


def _ndv2_links() -> list[str]:
    """The links of the bundled NDv2, which has TACCL's order of ranks."""
    bundled: Any = PROFILE.read(parse(library_text("ndv2"), "ndv2.yaml"))
    return [
        f"    - {{class: {group['class']}, both_ways: true, pairs: {group['pairs']}}}"
        for group in bundled["node"]["links"]
    ]


def _custom_links(values: Values, gpus: int, link: str, beta: Any) -> tuple[list[str], list[str]]:
    if "links" not in values or "betas" not in values:
        values.node.error("T101", "a custom topology needs the matrices `links` and `betas`")
        return [], []
    for key in ("links", "betas"):
        rows = values[key]
        if len(rows) != gpus or any(len(row) != gpus for row in rows):
            values.at(key).error("T102", f"expected a matrix of {gpus} x {gpus}, for there are {gpus} GPUs")
            return [], []
    kinds: dict[Fraction, list[tuple[int, int]]] = {}
    for dst in range(gpus):
        for src in range(gpus):
            count, cost = values["links"][dst][src], values["betas"][dst][src]
            at = values.at("links").items[dst].items[src]
            if count == 0:
                continue
            if src == dst:
                at.error("T102", "a GPU has no link to itself: the diagonal must be 0")
            elif count.denominator != 1 or not 0 < count <= 64:
                at.error("T102", "the number of links is a whole number from 0 to 64")
            elif cost <= 0:
                values.at("betas").items[dst].items[src].error("T103", "the time of a chunk must be above 0")
            else:
                kinds.setdefault(cost, []).extend([(src, dst)] * int(count))
    lines = ["  links:"] if kinds else []
    classes = []
    for number, cost in enumerate(sorted(kinds), start=1):
        pairs = [list(pair) for pair in sorted(kinds[cost])]
        lines.append(f"    - {{class: link{number}, pairs: {pairs}}}")
        classes.append(f"  link{number}: {{{link}, beta: {beta(cost)}, kind: link}}")
    return lines, classes


def _nics(values: Values, gpus: int, nodes: int) -> tuple[list[str], list[str]]:
    """NICs, each near an equal share of neighbouring GPUs: TACCL's file says no more than how many."""
    count: int = values.get("nics_per_node", -1)
    if count <= 0:
        if nodes > 1:
            values.node.error("T101", f"{nodes} nodes need nics_per_node, remote_alpha and remote_beta")
        return [], []
    for key, least in (("remote_alpha", 0), ("remote_beta", 1)):
        cost = values.get(key)
        if cost is None or cost < 0 or (least and cost == 0):
            values.at(key).error("T103", f"with NICs, {key} must be {'above' if least else 'at least'} 0")
            return [], []
    near = [[rank for rank in range(gpus) if rank * count // gpus == nic] for nic in range(count)]
    rows = [f"    - {{name: ib{nic}, ranks: {ranks}}}" for nic, ranks in enumerate(near) if ranks]
    return ["  nics:", *rows], ["network: {class: ib}"]
