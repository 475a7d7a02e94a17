"""NCCL's and RCCL's topology XML (`NCCL_TOPO_DUMP_FILE`) to a `Topology`.

The elements and rates are those of NCCL 2.30 (src/graph/topo.cc, topo.h) and of RCCL (src/graph/topo.h), so
that the profile shows what these libraries believe: GB/s of an NVLink or Infinity Fabric link by GPU
generation, PCIe from link_speed and link_width, NUMA node to NUMA node by CPU, networks from their speed.
What NCCL adds to that (the overhead of P2P through Intel CPUs, flattened PCIe switches) is not taken over.

Findings: N001 not XML, N002 too large, N003 a document type, N004 not a topology, N005 an attribute, N006 a
GPU.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from lxml import etree

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

MAX_ELEMENTS = 8192
MAX_BYTES = 4 * 2**20
MAX_GPUS = 576  # NCCL's own limit
MAX_CPUS = 256

_NVLINK_GB_PER_S = ((100, "40.1"), (90, "20.6"), (70, "20"), (60, "18"))  # from this compute capability on
_XGMI_GB_PER_S = {"gfx95": 48, "gfx94": 48, "gfx90a": 36, "910": 36}  # others, Vega to MI100: 24
_PCIE_LANE = {"2.5": 15, "5": 30, "8": 60, "16": 120, "32": 240, "64": 480}  # 100 Mb/s a lane
_NVSWITCH, _POWER_BRIDGE = "0x068000", "0x068001"


def read_nccl_xml(text: str, file: str, nodes: int = 1) -> Imported:
    """The topology of `nodes` machines like the one in the dump; `file` names it in messages.

    Raises InvalidInput with every problem and its line; UsageError when `nodes` is too many.
    """
    root = _parse(text, file)
    reader = _Reader(file)
    machine = reader.machine(root)
    if reader.problems:
        raise InvalidInput(sorted(reader.problems, key=lambda found: (found.line, found.message)))
    source = (
        "imported from an NCCL topology dump; rates as in NCCL 2.30 and RCCL (src/graph/topo.h), not measured"
    )
    return assemble(machine, nodes, name_of(file, nodes), source, reader.notes)


def _parse(text: str, file: str) -> Any:
    def refuse(line: int, column: int, code: str, message: str, help: str = "") -> InvalidInput:
        return InvalidInput([Diagnostic(file, line, column, code, message, help)])

    if len(text) > MAX_BYTES or text.count("<") > 2 * MAX_ELEMENTS:
        limit = f"{MAX_BYTES} bytes or {MAX_ELEMENTS} elements"
        raise refuse(0, 0, "N002", f"the file is larger than the {limit} that a topology may have")
    found = re.search("<!(DOCTYPE|ENTITY)", text, re.IGNORECASE)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise refuse(
            line, 0, "N003", "document types and entities are not accepted", "remove the declaration"
        )
    parser = etree.XMLParser(
        encoding="utf-8", resolve_entities=False, no_network=True, load_dtd=False, dtd_validation=False,
        huge_tree=False, recover=False, remove_comments=True, remove_pis=True,
    )  # fmt: skip
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise refuse(0, 0, "N001", "the text holds characters that are no Unicode text") from error
    try:
        root: Any = etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:
        line, column = error.position
        reason = str(error.msg).split(", line ")[0]
        raise refuse(
            max(0, line or 0), max(0, column or 0), "N001", f"not well-formed XML: {reason}"
        ) from error
    if root.tag != "system":
        help = "write one with NCCL_TOPO_DUMP_FILE=topology.xml on a run with NCCL or RCCL"
        raise refuse(
            root.sourceline or 0, 0, "N004", f"expected the element <system>, found <{root.tag}>", help
        )
    return root


@dataclass(slots=True)
class _FoundGpu:
    element: Any
    vertex: int
    cpu: int
    host: int
    busid: str
    index: int  # in document order
    rank: int | None = None
    dev: int | None = None


@dataclass(slots=True)
class _Reader:
    """Walks the elements; every finding carries its line."""

    file: str
    problems: list[Diagnostic] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    gpus: list[_FoundGpu] = field(default_factory=list)
    bare_gpus: list[_FoundGpu] = field(default_factory=list)  # PCI devices of a GPU's class without <gpu>
    nics: list[NicDevice] = field(default_factory=list)
    pci: dict[tuple[int, str], int] = field(default_factory=dict)  # (host, busid) -> vertex
    pcilinks: list[tuple[int, int, str]] = field(default_factory=list)
    vertices: int = 0

    def problem(self, element: Any, code: str, message: str, help: str = "") -> None:
        self.problems.append(Diagnostic(self.file, element.sourceline or 0, 0, code, message, help))

    def vertex(self) -> int:
        self.vertices += 1
        return self.vertices - 1

    def number(self, element: Any, name: str, default: int | None, low: int, high: int) -> int:
        """An integer attribute, decimal or 0x...; the default when absent (None: it must be there)."""
        text = element.get(name)
        if text is None and default is not None:
            return default
        found = re.fullmatch(r"\s*([-+]?[0-9]{1,18}|0[xX][0-9a-fA-F]{1,15})\s*", text or "", re.ASCII)
        value = int(found[1], 16 if "x" in found[1].lower() else 10) if found else None
        if value is None or not low <= value <= high:
            what = "is missing" if text is None else f"is {text[:40]!r}"
            message = f"<{element.tag}>: {name} {what}; expected a whole number from {low} to {high}"
            self.problem(element, "N005", message)
            return low if default is None else default
        return value

    def machine(self, root: Any) -> Machine:
        """The machine of <system>. Problems are noted; the result means nothing when there are any."""
        cpus: list[tuple[Any, int, int]] = []  # (element, host, vertex)
        hosts: dict[str, int] = {}
        for element in root:
            if element.tag == "cpu":
                host = hosts.setdefault(element.get("host_hash", ""), len(hosts))
                cpus.append((element, host, self.vertex()))
        if len(cpus) > MAX_CPUS:
            self.problem(root, "N002", f"{len(cpus)} NUMA nodes are more than the {MAX_CPUS} that are read")
            return Machine((), (), ())
        for index, (element, host, vertex) in enumerate(cpus):
            self.children(element, host, vertex, index)
        self.connect_cpus(cpus)
        self.connect_switches()
        ranked = self.ranked_gpus(root)
        if not ranked:
            return Machine((), (), ())
        position = {(gpu.host, gpu.busid): place for place, gpu in enumerate(ranked)}
        direct: list[Direct] = []
        switched: list[tuple[int, Fraction]] = []
        for place, gpu in enumerate(ranked):
            self.fast_links(gpu, place, position, direct, switched, [vertex for _, _, vertex in cpus])
        devices = tuple(Gpu(gpu.vertex, gpu.host, f"gpu{place}") for place, gpu in enumerate(ranked))
        centres = frozenset(vertex for _, _, vertex in cpus)
        nics = self.unique_nics()
        return Machine(devices, nics, tuple(self.wires), tuple(direct), tuple(switched), centres)

    def children(self, parent: Any, host: int, vertex: int, cpu: int) -> None:
        """The devices under a <cpu>, in document order. A stack, for nesting may be deep."""
        stack = [(child, vertex) for child in reversed(parent)]
        while stack:
            element, above = stack.pop()
            if element.tag == "pci":
                busid = element.get("busid", "").lower()
                if not re.fullmatch(r"[0-9a-f:.]{1,32}", busid) or (host, busid) in self.pci:
                    what = (
                        "stands twice" if (host, busid) in self.pci else "is no bus id such as 0000:3b:00.0"
                    )
                    self.problem(element, "N005", f"<pci>: busid {busid[:40]!r} {what}")
                    continue
                below = self.vertex()
                label = f"pci-{busid}" if host == 0 else f"host{host}-pci-{busid}"
                self.wires.append(Wire(below, above, self.pcie_rate(element), "pcie", label))
                self.pci[host, busid] = below
                self.device(element, host, below, cpu, busid)
                stack.extend((child, below) for child in reversed(element))
            elif element.tag == "nic" and above == vertex:
                below = self.vertex()
                self.wires.append(Wire(below, above, Fraction(5000), "pcie", f"nic{below}"))
                self.networks(element, host, below)
            elif element.tag == "pcilink":
                self.pcilinks.append((host, above, element.get("target", "").lower()))

    def device(self, element: Any, host: int, vertex: int, cpu: int, busid: str) -> None:
        kind = element.get("class", "")
        gpus = element.findall("gpu")
        for gpu in gpus:
            found = _FoundGpu(gpu, vertex, cpu, host, busid, len(self.gpus))
            found.rank = self.number(gpu, "rank", -1, -1, 10**6)
            found.dev = self.number(gpu, "dev", -1, -1, 10**6)
            self.gpus.append(found)
        if len(gpus) > 1:
            self.problem(element, "N006", f"the device {busid[:40]} holds several GPUs (one is supported)")
        nic = element.find("nic")
        if nic is not None:
            self.networks(nic, host, vertex)
        elif not gpus and kind.startswith(("0x03", "0x12")):
            self.bare_gpus.append(_FoundGpu(element, vertex, cpu, host, busid, len(self.bare_gpus)))

    def networks(self, nic: Any, host: int, vertex: int) -> None:
        for net in nic.findall("net"):
            if net.get("dev") is None or net.get("net") == "0":
                continue  # NCCL ignores these: a part of a fused NIC, or one it could not open
            speed = self.number(net, "speed", 0, -(2**31), 2**31)
            if speed <= 0:
                speed = 10_000  # as in NCCL: some drivers do not know
                self.notes.append(
                    f"NIC {net.get('name', '?')[:40]}: speed unknown, 10 Gb/s assumed as NCCL does"
                )
            name = re.sub(r"[^A-Za-z0-9_.:-]", "-", net.get("name", f"net{net.get('dev')}"))[:60] or "net"
            device = NicDevice(vertex, host, name, Fraction(speed, 8000), self.latency(net))
            self.nics.append(device)

    def latency(self, net: Any) -> Fraction:
        text = net.get("latency")
        if text is None:
            return Fraction(0)
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,12})?", text, re.ASCII):
            self.problem(net, "N005", f"<net>: latency is {text[:40]!r}; expected a number of us")
            return Fraction(0)
        return Fraction(text)

    def pcie_rate(self, element: Any) -> Fraction:
        """GB/s of a PCI device's link: width x speed; Gen 3 x16 where it is not known, as in NCCL."""
        width = self.number(element, "link_width", 16, 0, 64) or 16
        found = re.match(r"\s*([0-9]+(?:\.[0-9]+)?) *GT/s", element.get("link_speed", ""), re.ASCII)
        lane = _PCIE_LANE.get(found[1].removesuffix(".0"), 60) if found else 60
        return Fraction(width * lane, 80)

    def connect_cpus(self, cpus: list[tuple[Any, int, int]]) -> None:
        for i, (a, host_a, vertex_a) in enumerate(cpus):
            for j, (_, host_b, vertex_b) in enumerate(cpus):
                if i < j and host_a == host_b:
                    self.wires.append(Wire(vertex_a, vertex_b, self.numa_rate(a), "sys", f"cpu{i}-cpu{j}"))

    def numa_rate(self, cpu: Any) -> Fraction:
        """GB/s from this NUMA node to another: NCCL's ncclTopoGetInterCpuBw."""
        arch, vendor = cpu.get("arch", ""), cpu.get("vendor", "")
        family = self.number(cpu, "familyid", 0, -1, 10**6)
        model = self.number(cpu, "modelid", 0, -1, 10**6)
        if arch == "ppc64":
            return Fraction(32)
        if vendor == "GenuineIntel":
            newest = model >= 0xCF or model in (0xAD, 0xAE, 0xAF)
            rates = [(newest, 40), (model >= 0x8F, 22), (model >= 0x55, 10)]
            return Fraction(next((rate for fits, rate in rates if family == 6 and fits), 6))
        if vendor == "AuthenticAMD":
            return Fraction({0xBF: 32, 26: 32, 0xAF: 24, 25: 24}.get(family, 16))
        if vendor in ("CentaurHauls", "  Shanghai  "):
            return Fraction(9 if (family, model) == (7, 0x5B) else 6)
        return Fraction(6)

    def connect_switches(self) -> None:
        """<pcilink>: two PCI switches joined besides the tree, given at both ends."""
        seen: set[frozenset[int]] = set()
        for host, vertex, target in self.pcilinks:
            other = self.pci.get((host, target))
            pair = frozenset((vertex, other)) if other is not None else frozenset()
            if other is not None and len(pair) == 2 and pair not in seen:
                seen.add(pair)
                # As in NCCL: 5000 GB/s, no limit.
                self.wires.append(Wire(vertex, other, Fraction(5000), "pcie", f"pcilink{len(seen)}"))

    def ranked_gpus(self, root: Any) -> list[_FoundGpu]:
        """The GPUs in rank order: those with a rank, else all, else the PCI devices of a GPU's class."""
        gpus = [gpu for gpu in self.gpus if gpu.rank is not None and gpu.rank >= 0]
        if gpus:
            if len(gpus) < len(self.gpus):
                self.notes.append(f"left out, for they have no rank: {len(self.gpus) - len(gpus)} GPUs")
            taken: dict[int, _FoundGpu] = {}
            for gpu in gpus:
                first = taken.setdefault(gpu.rank or 0, gpu)
                if first is not gpu:
                    said = f"two GPUs have the rank {gpu.rank} (first in line {first.element.sourceline})"
                    self.problem(gpu.element, "N006", said)
            gpus.sort(key=lambda gpu: (gpu.rank or 0, gpu.index))
        else:
            gpus = sorted(self.gpus, key=lambda gpu: (gpu.dev if gpu.dev is not None else 0, gpu.index))
        if not gpus and self.bare_gpus:
            gpus = self.bare_gpus
            note = "no <gpu> elements: the PCI devices of class 0x03 and 0x12 were taken, without NVLink"
            self.notes.append(note)
        if not gpus:
            self.problem(root, "N006", "the topology holds no GPU")
        elif len(gpus) > MAX_GPUS:
            self.problem(root, "N002", f"{len(gpus)} GPUs are more than the {MAX_GPUS} that are read")
            return []
        return gpus

    def fast_links(
        self,
        gpu: _FoundGpu,
        place: int,
        position: dict[tuple[int, str], int],
        direct: list[Direct],
        switched: list[tuple[int, Fraction]],
        cpus: list[int],
    ) -> None:
        """NVLink, Infinity Fabric and chip-to-chip links of one GPU."""
        to_switch = to_cpu = Fraction(0)
        strangers = 0
        for link in gpu.element:
            if link.tag == "c2c":
                to_cpu += Fraction(self.number(link, "bw", None, 1, 10**9), 1000) * self.count(link)
            if link.tag not in ("nvlink", "xgmi"):
                continue
            rate = self.link_rate(gpu.element, str(link.tag)) * self.count(link)
            target_class = link.get("tclass", "")
            target = position.get((gpu.host, link.get("target", "").lower()))
            if target == place:
                self.problem(link, "N005", f"<{link.tag}>: a GPU is its own target")
            elif target is not None:
                direct.append(Direct(place, target, rate, str(link.tag)))
            elif target_class.startswith(_NVSWITCH):
                to_switch += rate
            elif target_class.startswith(_POWER_BRIDGE):
                to_cpu += rate
            else:
                strangers += 1
        if to_switch:
            switched.append((place, to_switch))
        if to_cpu:
            wire = Wire(gpu.vertex, cpus[gpu.cpu], to_cpu, "c2c", f"c2c-gpu{place}-cpu{gpu.cpu}")
            self.wires.append(wire)
        if strangers:
            self.notes.append(f"rank {place}: {strangers} links to devices that the file does not hold")

    def count(self, link: Any) -> int:
        return self.number(link, "count", 1, 1, 1024)

    def link_rate(self, gpu: Any, kind: str) -> Fraction:
        if kind == "xgmi":
            architecture = gpu.get("gcn", "")
            return Fraction(
                next((r for key, r in _XGMI_GB_PER_S.items() if architecture.startswith(key)), 24)
            )
        generation = self.number(gpu, "sm", 80, -1, 10**6)
        if generation == 86:
            return Fraction(12)
        return Fraction(next((rate for least, rate in _NVLINK_GB_PER_S if generation >= least), "20"))

    def unique_nics(self) -> tuple[NicDevice, ...]:
        """The NICs, those with a name that another one has numbered."""
        given = {(nic.host, nic.name) for nic in self.nics}
        taken: set[tuple[int, str]] = set()
        nics = []
        for nic in self.nics:
            names = itertools.chain([nic.name], (f"{nic.name}-{number}" for number in itertools.count(1)))
            name = next(
                name
                for name in names
                if (nic.host, name) not in taken and (name == nic.name or (nic.host, name) not in given)
            )
            taken.add((nic.host, name))
            nics.append(NicDevice(nic.vertex, nic.host, name, nic.gb_per_s, nic.latency_us))
        return tuple(nics)
