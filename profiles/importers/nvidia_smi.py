"""The matrix of `nvidia-smi topo -m` to a `Topology`.

The matrix gives classes (NV4, PIX, PHB, SYS, ...), no rates: those are assumed by generation, which the
number of NVLinks betrays, or given by the caller; the profile's `source` says which. `taccl profile` measures
instead.

Findings: N101 no matrix, N102 a row, N103 a cell, N104 too large.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from taccl.errors import Diagnostic, InvalidInput
from taccl.profiles.importers.machine import (
    Direct,
    Gpu,
    Imported,
    Machine,
    NicDevice,
    Wire,
    assemble,
    name_of,
)

MAX_DEVICES = 1024
MAX_BYTES = 2**20
_MOST_NVLINKS = 18  # of one GPU, to Blackwell: more to its peers together means that switches are between

_CELL = re.compile(r"\s*(X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC)", re.ASCII)
_DEVICE = re.compile(r"GPU[0-9]{1,4}|NIC[0-9]{1,4}|[A-Za-z][A-Za-z0-9_.:-]{0,40}", re.ASCII)
_ESCAPE = re.compile("\x1b\\[[0-9;]*m")
_LEGEND = re.compile(r"\s*(NIC[0-9]{1,4}):\s*([A-Za-z][A-Za-z0-9_.:-]{0,40})\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rates:
    """GB/s each way."""

    nvlink: Fraction  # of one link
    pcie: Fraction
    numa: Fraction  # from one NUMA node to another
    nic: Fraction


# By generation, as NCCL prices them: V100 (PCIe 3, EDR), A100 (PCIe 4, HDR), H100 and later (PCIe 5, NDR).
_RATES = {
    "V100": Rates(Fraction(20), Fraction(12), Fraction(10), Fraction(25, 2)),
    "A100": Rates(Fraction(20), Fraction(24), Fraction(16), Fraction(25)),
    "H100": Rates(Fraction("20.6"), Fraction(48), Fraction(22), Fraction(50)),
}


@dataclass(frozen=True, slots=True)
class _Matrix:
    devices: list[str]  # names as in the header
    names: list[str]  # by the NIC legend
    cells: dict[tuple[int, int], str]
    affinity: list[str]  # NUMA or CPU affinity of each device, "" when not given


def read_nvidia_smi(
    text: str,
    file: str,
    nodes: int = 1,
    nvlink_gb_per_s: Fraction | None = None,
    pcie_gb_per_s: Fraction | None = None,
    nic_gb_per_s: Fraction | None = None,
) -> Imported:
    """The topology of `nodes` machines with this matrix; rates that are not given are assumed.

    Raises InvalidInput when there is no matrix to read; UsageError when `nodes` is too many.
    """
    matrix = _read_matrix(text, file)
    gpus = [i for i, name in enumerate(matrix.devices) if name.startswith("GPU")]
    nics = [i for i in range(len(matrix.devices)) if i not in gpus]
    links = {place: int(cell[2:]) for place, cell in matrix.cells.items() if cell.startswith("NV")}
    most = max(links.values(), default=0)
    # A board of four H100 has 6 links from each to each, 18 in all; through switches the sum is larger still.
    whole = max((sum(count for (src, _), count in links.items() if src == gpu) for gpu in gpus), default=0)
    newest = most > 12 or (most == 6 and whole == 18)
    generation = "H100" if newest else "A100" if most in (4, 8, 12) else "V100"
    assumed = _RATES[generation]
    given = [rate for rate in (nvlink_gb_per_s, pcie_gb_per_s, nic_gb_per_s) if rate is not None]
    rates = Rates(
        nvlink_gb_per_s or assumed.nvlink,
        pcie_gb_per_s or assumed.pcie,
        assumed.numa,
        nic_gb_per_s or assumed.nic,
    )
    wires, cpus = _wires(matrix, rates)
    direct, switched = _nvlinks(matrix, gpus, rates)
    machine = Machine(
        tuple(Gpu(i, 0, matrix.names[i]) for i in gpus),
        tuple(NicDevice(i, 0, matrix.names[i], rates.nic) for i in nics),
        tuple(wires),
        tuple(direct),
        tuple(switched),
        frozenset(cpus),
    )
    source = (
        "imported from `nvidia-smi topo -m`, which gives classes of links and no rates; "
        f"{'some rates were given, the rest is' if given else 'rates are'} assumed as for {generation}: "
        f"NVLink {_gb(rates.nvlink)} a link, PCIe {_gb(rates.pcie)}, between NUMA nodes {_gb(rates.numa)}, "
        f"NIC {_gb(rates.nic)}"
    )
    name = name_of(file, nodes)
    note = f"the matrix holds no rates; assumed those of {generation} ({', '.join(source.split(': ')[1:])})"
    return assemble(machine, nodes, name, source, [note])


def _gb(rate: Fraction) -> str:
    return f"{float(rate):g} GB/s"


def _read_matrix(text: str, file: str) -> _Matrix:
    def refuse(line: int, code: str, message: str, help: str = "") -> InvalidInput:
        source = lines[line - 1] if line and len(lines[line - 1]) <= 200 else ""
        return InvalidInput(
            [Diagnostic(file, line, 1 if line else 0, code, message, help, source_line=source)]
        )

    if len(text) > MAX_BYTES:
        raise InvalidInput([Diagnostic(file, 0, 0, "N104", f"the file is larger than {MAX_BYTES} bytes")])
    lines = [_ESCAPE.sub("", line) for line in text.splitlines()]
    start = next((i for i, line in enumerate(lines) if _is_header(line)), None)
    if start is None:
        help = "save the output of: nvidia-smi topo -m > topology.txt"
        raise refuse(0, "N101", "the file holds no matrix of `nvidia-smi topo -m`", help)
    header = re.split("CPU Affinity|NUMA Affinity|GPU NUMA ID", lines[start])[0]
    devices = _DEVICE.findall(header)
    if len(devices) > MAX_DEVICES:
        raise refuse(
            start + 1, "N104", f"{len(devices)} devices are more than the {MAX_DEVICES} that are read"
        )
    if len(set(devices)) != len(devices):
        raise refuse(start + 1, "N101", "a device stands twice in the header")
    cells: dict[tuple[int, int], str] = {}
    affinity = [""] * len(devices)
    rows: dict[str, int] = {}  # of each device, the number of its line
    for number in range(start + 1, len(lines)):
        line = lines[number]
        found = _DEVICE.match(line.strip())
        if found is None or found.group() not in devices:
            if rows and line.strip().startswith("Legend"):
                break
            continue
        name = found.group()
        if name in rows:
            raise refuse(number + 1, "N102", f"the row {name} stands twice")
        rows[name] = number + 1
        row = devices.index(name)
        rest = line.strip()[found.end() :]
        for column in range(len(devices)):
            cell = _CELL.match(rest)
            if cell is None or (cell[1] == "X") != (column == row):
                what = "expected one of X, NV1, NV2, ..., PIX, PXB, PHB, NODE, SYS, and X on the diagonal"
                message = f"the cell {name} x {devices[column]}: {what}, found {rest.strip()[:20]!r}"
                raise refuse(number + 1, "N103", message)
            cells[row, column] = "SYS" if cell[1] == "SOC" else cell[1]
            rest = rest[cell.end() :]
        affinity[row] = rest.strip().split("\t")[0].split("  ")[0].strip()
    missing = [name for name in devices if name not in rows]
    if missing:
        raise refuse(start + 1, "N102", f"the matrix has no row for {', '.join(missing[:8])}")
    for (row, column), way in cells.items():
        back = cells[column, row]
        if way != back and "NV" in (way[:2], back[:2]):
            one, other = devices[row], devices[column]
            message = f"{one} x {other} says {way}, and {other} x {one} says {back}: an NVLink has two ends"
            raise refuse(rows[devices[row]], "N103", message)
    legend = {found[1]: found[2] for line in lines if (found := _LEGEND.fullmatch(line))}
    names = [legend.get(name, name) for name in devices]
    if len(set(names)) != len(names):
        names = devices
    return _Matrix(devices, names, cells, affinity)


def _is_header(line: str) -> bool:
    tokens = line.split()
    return bool(tokens) and tokens[0] == "GPU0" and (len(tokens) == 1 or not _CELL.fullmatch(tokens[1]))


class _Groups:
    """Disjoint sets of devices."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def find(self, item: int) -> int:
        while self.parent[item] != item:
            self.parent[item] = self.parent[self.parent[item]]
            item = self.parent[item]
        return item

    def join(self, a: int, b: int) -> None:
        low, high = sorted((self.find(a), self.find(b)))
        self.parent[high] = low


def _wires(matrix: _Matrix, rates: Rates) -> tuple[list[Wire], list[int]]:
    """The PCIe tree that the classes tell of, and the vertices that are CPUs.

    Devices joined by PIX or PXB hang under one PCIe switch, those joined by PHB or NODE under one CPU; NVLink
    hides the class of a pair, so that devices of one affinity are taken to be under one CPU too.
    """
    size = len(matrix.devices)
    switches, cpus = _Groups(size), _Groups(size)
    for (a, b), cell in matrix.cells.items():
        if cell in ("PIX", "PXB"):
            switches.join(a, b)
        if cell in ("PIX", "PXB", "PHB", "NODE"):
            cpus.join(a, b)
    if not any(
        cell == "SYS" and matrix.affinity[a] and matrix.affinity[a] == matrix.affinity[b]
        for (a, b), cell in matrix.cells.items()
    ):
        _join_equal(cpus, matrix.affinity)
    wires: list[Wire] = []
    cpu_vertex: dict[int, int] = {}
    switch_vertex: dict[int, int] = {}
    vertices = size

    def cpu_of(device: int) -> int:
        nonlocal vertices
        root = cpus.find(device)
        if root not in cpu_vertex:
            cpu_vertex[root] = vertices
            vertices += 1
        return cpu_vertex[root]

    members = [
        sum(switches.find(other) == switches.find(device) for other in range(size)) for device in range(size)
    ]
    for device in range(size):
        above = cpu_of(device)
        root = switches.find(device)
        if members[device] > 1:
            if root not in switch_vertex:
                switch_vertex[root] = vertices
                vertices += 1
                name = f"pcie-switch{len(switch_vertex) - 1}"
                wires.append(Wire(switch_vertex[root], above, rates.pcie, "pcie", name))
            above = switch_vertex[root]
        wires.append(Wire(device, above, rates.pcie, "pcie", f"pcie-{matrix.names[device]}"))
    centres = sorted(cpu_vertex.values())
    for i, a in enumerate(centres):
        for j in range(i + 1, len(centres)):
            wires.append(Wire(a, centres[j], rates.numa, "sys", f"cpu{i}-cpu{j}"))
    return wires, centres


def _join_equal(groups: _Groups, keys: Iterable[str]) -> None:
    first: dict[str, int] = {}
    for device, key in enumerate(keys):
        if key and key != "N/A":
            groups.join(first.setdefault(key, device), device)


def _nvlinks(
    matrix: _Matrix, gpus: list[int], rates: Rates
) -> tuple[list[Direct], list[tuple[int, Fraction]]]:
    """Links from GPU to GPU, or through NVSwitches where the counts cannot be links of their own."""
    counts = {
        (i, j): int(matrix.cells[a, b][2:])
        for i, a in enumerate(gpus)
        for j, b in enumerate(gpus)
        if matrix.cells[a, b].startswith("NV") and int(matrix.cells[a, b][2:])
    }
    totals = [sum(count for (src, _), count in counts.items() if src == gpu) for gpu in range(len(gpus))]
    if counts and max(totals) > _MOST_NVLINKS:
        most = [
            max((count for (src, _), count in counts.items() if src == gpu), default=0)
            for gpu in range(len(gpus))
        ]
        return [], [(gpu, rates.nvlink * count) for gpu, count in enumerate(most) if count]
    return [
        Direct(src, dst, rates.nvlink * count, "nvlink") for (src, dst), count in sorted(counts.items())
    ], []
