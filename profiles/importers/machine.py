"""A machine as other tools describe it (devices joined by wires) and how it becomes a `Topology`.

Two GPUs with a direct link (NVLink, Infinity Fabric) are linked by it; GPUs on an NVSwitch through one port
each way; every other pair over its PCIe path, on which each wire is a port each way that all paths over it
share. Between nodes a message takes the PCIe path to the sender's near NIC, the two NICs, and the PCIe path
from the receiver's near NIC. Such descriptions hold no latencies: ALPHA_US is assumed, and the profile's
`source` says so.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from taccl.errors import UsageError
from taccl.profiles.profile_writer import write_topology
from taccl.profiles.schema import MAX_RANKS
from taccl.profiles.topology import Link, Nic, Port, Switch, Topology

ALPHA_US = {
    "nvlink": Fraction(3, 10),  # TACCL's for V100
    "xgmi": Fraction(1, 2),
    "pcie": Fraction(1),  # under PCIe switches alone
    "phb": Fraction(3, 2),  # through a CPU's host bridge
    "sys": Fraction(2),  # from one NUMA node to another
    "net": Fraction(13, 5),  # TACCL's for InfiniBand
}
ASSUMED = "alpha is assumed (us): " + ", ".join(f"{kind} {float(us):g}" for kind, us in ALPHA_US.items())
_MAX_LINKS = 100_000  # more make a profile that is slow to read when written link by link
_SLOW_NIC = 4  # NICs this many times slower than the fastest are for management
_WEIGHT = {"c2c": 1, "pcie": 2, "sys": 1000}  # a path avoids crossing NUMA nodes before anything else


@dataclass(frozen=True, slots=True)
class Gpu:
    """One rank's device. `vertex` is its end of the wires."""

    vertex: int
    host: int
    name: str


@dataclass(frozen=True, slots=True)
class NicDevice:
    """A network interface."""

    vertex: int
    host: int
    name: str
    gb_per_s: Fraction
    latency_us: Fraction = Fraction(0)  # on top of ALPHA_US["net"]


@dataclass(frozen=True, slots=True)
class Wire:
    """A connection between two vertices, with this rate each way."""

    a: int
    b: int
    gb_per_s: Fraction
    kind: str  # "pcie" | "c2c" | "sys"
    name: str


@dataclass(frozen=True, slots=True)
class Direct:
    """A link from one GPU to another of its own, by their positions in `Machine.gpus`."""

    src: int
    dst: int
    gb_per_s: Fraction
    kind: str  # "nvlink" | "xgmi"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a description says of a machine: one host, or several that one NVLink domain joins."""

    gpus: tuple[Gpu, ...]  # in rank order
    nics: tuple[NicDevice, ...]
    wires: tuple[Wire, ...]
    direct: tuple[Direct, ...] = ()
    switched: tuple[tuple[int, Fraction], ...] = ()  # (position of a GPU, GB/s to the NVSwitches)
    cpus: frozenset[int] = frozenset()  # the vertices that are CPUs


@dataclass(frozen=True, slots=True)
class Imported:
    """A topology and what the reader should know of it, one sentence each."""

    topology: Topology
    text: str  # the profile
    notes: tuple[str, ...] = ()


def beta_of(gb_per_s: Fraction) -> Fraction:
    """us/MB of a rate in GB/s."""
    return 1000 / gb_per_s


def name_of(file: str, nodes: int) -> str:
    """A name for the topology: that of the file without its suffix."""
    stem = re.sub(r"\.[A-Za-z]{1,4}$", "", file.replace("\\", "/").rsplit("/", 1)[-1])
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", stem)[:100] or "imported"
    return name if nodes == 1 else f"{name}-{nodes}-nodes"


def assemble(machine: Machine, nodes: int, name: str, source: str, notes: Sequence[str] = ()) -> Imported:
    """The topology of `nodes` such machines. Raises UsageError when that is more than a profile may hold."""
    ranks = nodes * len(machine.gpus)
    if ranks > MAX_RANKS or ranks * (ranks - 1) > _MAX_LINKS:
        raise UsageError(
            f"{nodes} nodes of {len(machine.gpus)} GPUs are {ranks} ranks, with a link from each to each; at most "
            f"{_MAX_LINKS} links are written out. Describe one node and a `network` instead (docs/profiles.md)"
        )
    builder = _Builder(machine, nodes)
    builder.build()
    topology = Topology(
        name=name,
        nodes=tuple(builder.nodes),
        links=tuple(builder.links),
        ports=tuple(builder.ports),
        switches=tuple(builder.switches),
        nics=tuple(builder.nics),
        source=f"{source}; {ASSUMED}",
    )
    topology = _without_ports(topology, builder.idle_ports())
    topology.check()
    all_notes = (*notes, *builder.notes, *connection_notes(topology))
    return Imported(topology, write_topology(topology), all_notes)


class _Builder:
    """Collects the parts of the topology; copy c of the machine has the ranks from c * len(gpus)."""

    def __init__(self, machine: Machine, copies: int) -> None:
        self.machine = machine
        self.copies = copies
        self.links: list[Link] = []
        self.ports: list[Port] = []
        self.port_keys: list[tuple[int, object]] = []  # (copy, what it is within the copy) of each port
        self.nics: list[Nic] = []
        self.switches: list[Switch] = []
        self.nodes: list[tuple[int, ...]] = []
        self.notes: list[str] = []
        self.wire_ports: dict[tuple[int, int, bool], int] = {}  # (copy, wire, from a to b) -> port
        self.edges: dict[int, list[tuple[int, int]]] = {}  # vertex -> (wire, other end)
        for index, wire in enumerate(machine.wires):
            self.edges.setdefault(wire.a, []).append((index, wire.b))
            self.edges.setdefault(wire.b, []).append((index, wire.a))
        self.hosts = sorted({gpu.host for gpu in machine.gpus})

    def build(self) -> None:
        machine = self.machine
        paths = [self.paths_from(gpu.vertex) for gpu in machine.gpus]
        near = self.near_nics(paths)
        for copy in range(self.copies):
            base = copy * len(machine.gpus)
            for host in self.hosts:
                self.nodes.append(tuple(base + i for i, gpu in enumerate(machine.gpus) if gpu.host == host))
        first_nic = [self.add_nics(copy, near) for copy in range(self.copies)]
        for copy in range(self.copies):
            self.add_links_within(copy, paths)
        for a in range(self.copies):
            for b in range(self.copies):
                self.add_links_between(a, b, paths, near, first_nic)

    def paths_from(self, start: int) -> dict[int, tuple[int, ...]]:
        """The wires of the best path to each vertex; other devices are no way through."""
        devices = {gpu.vertex for gpu in self.machine.gpus} | {nic.vertex for nic in self.machine.nics}
        best: dict[int, tuple[int, Fraction, tuple[int, ...]]] = {start: (0, Fraction(0), ())}
        queue: list[tuple[int, Fraction, tuple[int, ...], int]] = [(0, Fraction(0), (), start)]
        while queue:
            weight, slowness, wires, vertex = heapq.heappop(queue)
            if (weight, slowness, wires) != best[vertex] or (vertex in devices and vertex != start):
                continue
            for index, other in self.edges.get(vertex, ()):
                wire = self.machine.wires[index]
                longer = (weight + _WEIGHT[wire.kind], slowness + 1 / wire.gb_per_s, (*wires, index))
                if other not in best or longer < best[other]:
                    best[other] = longer
                    heapq.heappush(queue, (*longer, other))
        return {vertex: wires for vertex, (_, _, wires) in best.items()}

    def near_nics(self, paths: list[dict[int, tuple[int, ...]]]) -> list[list[int]]:
        """For each GPU the NICs that it uses: one of its nearest, shared as evenly as may be.

        A NIC that would stay idle goes to the nearest GPU with the fewest.
        """
        machine = self.machine
        fastest = max((nic.gb_per_s for nic in machine.nics), default=Fraction(1))
        used = [i for i, nic in enumerate(machine.nics) if nic.gb_per_s * _SLOW_NIC > fastest]
        slow = [nic.name for i, nic in enumerate(machine.nics) if i not in used]
        if slow:
            self.notes.append(f"left out as too slow beside the others: NIC {', '.join(slow)}")

        def distance(gpu: int, nic: int) -> int:
            path = paths[gpu].get(machine.nics[nic].vertex)
            return 10**9 if path is None else sum(_WEIGHT[machine.wires[wire].kind] for wire in path)

        near: list[list[int]] = [[] for _ in machine.gpus]
        load = dict.fromkeys(used, 0)
        for gpu, device in enumerate(machine.gpus):
            here = [nic for nic in used if machine.nics[nic].host == device.host]
            if here:
                best = min(here, key=lambda nic: (distance(gpu, nic), load[nic], nic))
                near[gpu].append(best)
                load[best] += 1
        for nic in used:
            here = [i for i, device in enumerate(machine.gpus) if device.host == machine.nics[nic].host]
            if load[nic] == 0 and here:
                gpu = min(here, key=lambda gpu: (distance(gpu, nic), len(near[gpu]), gpu))
                near[gpu].append(nic)
        return near

    def prefix(self, copy: int, host: int) -> str:
        return f"node{copy * len(self.hosts) + self.hosts.index(host)}."

    def add_nics(self, copy: int, near: list[list[int]]) -> dict[int, int]:
        """The NICs of a copy; their positions in `self.nics` by those in the machine."""
        base = copy * len(self.machine.gpus)
        places: dict[int, int] = {}
        for index, device in enumerate(self.machine.nics):
            users = tuple(base + gpu for gpu, nics in enumerate(near) if index in nics)
            if users:
                name = self.prefix(copy, device.host) + device.name
                beta = beta_of(device.gb_per_s)
                out, into = (
                    self.add_port(copy, ("nic", index, way), f"{name}.{way}", beta, "nic")
                    for way in ("out", "in")
                )
                node = copy * len(self.hosts) + self.hosts.index(device.host)
                places[index] = len(self.nics)
                self.nics.append(Nic(name, node, users, out, into))
        return places

    def wire_port(self, copy: int, index: int, forward: bool) -> int:
        key = (copy, index, forward)
        if key not in self.wire_ports:
            wire = self.machine.wires[index]
            host = f"node{copy * len(self.hosts)}." if len(self.hosts) == 1 else f"copy{copy}."
            kind = "pcie" if wire.kind != "sys" else "sys"
            name = f"{host}{wire.name}.{'up' if forward else 'down'}"
            self.wire_ports[key] = self.add_port(copy, (index, forward), name, beta_of(wire.gb_per_s), kind)
        return self.wire_ports[key]

    def add_port(self, copy: int, key: object, name: str, beta: Fraction, kind: str) -> int:
        self.ports.append(Port(name, beta, kind))
        self.port_keys.append((copy, key))
        return len(self.ports) - 1

    def path_ports(self, copy: int, start: int, wires: Sequence[int]) -> list[int]:
        """The ports of a path of wires that begins at a vertex."""
        ports = []
        vertex = start
        for index in wires:
            wire = self.machine.wires[index]
            forward = wire.a == vertex
            ports.append(self.wire_port(copy, index, forward))
            vertex = wire.b if forward else wire.a
        return ports

    def slowest(self, wires: Sequence[int]) -> Fraction:
        return max((beta_of(self.machine.wires[wire].gb_per_s) for wire in wires), default=Fraction(0))

    def add_links_within(self, copy: int, paths: list[dict[int, tuple[int, ...]]]) -> None:
        machine = self.machine
        base = copy * len(machine.gpus)
        rates: dict[tuple[int, int], tuple[Fraction, str]] = {}
        for direct in machine.direct:
            known = rates.get((direct.src, direct.dst), (Fraction(0), ""))[0]
            rates[direct.src, direct.dst] = (known + direct.gb_per_s, direct.kind)
        switch = self.add_switch(copy)
        for i, src in enumerate(machine.gpus):
            for j, dst in enumerate(machine.gpus):
                path = paths[i].get(dst.vertex)
                if i == j:
                    continue
                if (i, j) in rates:
                    rate, kind = rates[i, j]
                    self.add_link(base + i, base + j, kind, beta_of(rate), ())
                elif i in switch and j in switch:
                    ports = (switch[i], switch[j] + 1)
                    beta = max(self.ports[port].beta_us_per_mb for port in ports)
                    self.add_link(base + i, base + j, "nvlink", beta, ports)
                elif path is not None:
                    crossed = tuple(self.path_ports(copy, src.vertex, path))
                    self.add_link(base + i, base + j, self.path_kind(path), self.slowest(path), crossed)

    def path_kind(self, path: Sequence[int]) -> str:
        """The class: "sys" between NUMA nodes, "phb" through one CPU, "pcie" under PCIe switches alone."""
        wires = [self.machine.wires[wire] for wire in path]
        if any(wire.kind == "sys" for wire in wires):
            return "sys"
        return "phb" if any({wire.a, wire.b} & self.machine.cpus for wire in wires) else "pcie"

    def add_switch(self, copy: int) -> dict[int, int]:
        """The NVSwitch of a copy: for each GPU on it its out port; the in port is the next."""
        base = copy * len(self.machine.gpus)
        ports: dict[int, int] = {}
        for gpu, rate in self.machine.switched:
            name = f"{self.prefix(copy, self.machine.gpus[gpu].host)}nvswitch.rank{base + gpu}"
            ports[gpu], _ = (
                self.add_port(copy, ("switch", gpu, way), f"{name}.{way}", beta_of(rate), "switch")
                for way in ("out", "in")
            )
        if ports:
            self.switches.append(Switch(f"nvswitch{copy}", tuple(base + gpu for gpu in sorted(ports))))
        return ports

    def add_link(self, src: int, dst: int, kind: str, beta: Fraction, ports: tuple[int, ...]) -> None:
        alpha = ALPHA_US[kind]
        self.links.append(Link(src, dst, alpha, beta, alpha, ports, kind))

    def add_links_between(
        self,
        a: int,
        b: int,
        paths: list[dict[int, tuple[int, ...]]],
        near: list[list[int]],
        places: list[dict[int, int]],
    ) -> None:
        """Links over the network: all pairs of two copies, or those of one copy's hosts not linked yet."""
        machine = self.machine
        if a == b and len(self.hosts) == 1:
            return
        linked = {(link.src, link.dst) for link in self.links} if a == b else set()
        base_a, base_b = a * len(machine.gpus), b * len(machine.gpus)
        for i, src in enumerate(machine.gpus):
            for j, dst in enumerate(machine.gpus):
                if a == b and (src.host == dst.host or (base_a + i, base_b + j) in linked):
                    continue
                for out, into in zip(near[i], near[j], strict=False):
                    up = paths[i].get(machine.nics[out].vertex, ())
                    down = paths[j].get(machine.nics[into].vertex, ())
                    sender, receiver = self.nics[places[a][out]], self.nics[places[b][into]]
                    back = tuple(reversed(down))
                    ports = (
                        *self.path_ports(a, src.vertex, up),
                        sender.out_port,
                        receiver.in_port,
                        *self.path_ports(b, machine.nics[into].vertex, back),
                    )
                    ends = (machine.nics[out], machine.nics[into])
                    beta = max(self.slowest((*up, *down)), *(beta_of(nic.gb_per_s) for nic in ends))
                    alpha = ALPHA_US["net"] + max(nic.latency_us for nic in ends)
                    self.links.append(Link(base_a + i, base_b + j, alpha, beta, alpha, ports, "net"))

    def idle_ports(self) -> set[int]:
        """The ports that can never hold a message up; those of NICs count as busy.

        A message holds all its ports from its start, each for occupancy + beta * size. So a port decides nothing
        when no link crosses it, when its one link is no faster itself, or when all links that cross it also cross
        one other port that is no faster. From three copies on, no port of another copy is that other one, so that
        three tell of all.
        """
        if self.copies > 3:
            few = _Builder(self.machine, 3)
            few.build()
            idle_keys = {few.port_keys[port][1] for port in few.idle_ports() if few.port_keys[port][0] == 0}
            return {port for port, (_, key) in enumerate(self.port_keys) if key in idle_keys}
        crossing = [0] * len(self.ports)  # a bit for each link
        first: dict[int, int] = {}
        for index, link in enumerate(self.links):
            for port in link.ports:
                crossing[port] |= 1 << index
                first.setdefault(port, index)
        fixed = {port for nic in self.nics for port in (nic.out_port, nic.in_port)}

        def outranks(other: int, port: int) -> bool:
            """A strict order, so that of ports that make each other idle one stays."""
            betas = self.ports[other].beta_us_per_mb, self.ports[port].beta_us_per_mb
            if crossing[port] & ~crossing[other] or betas[0] < betas[1]:
                return False
            if betas[0] > betas[1] or crossing[port] != crossing[other]:
                return True
            return (other not in fixed, other) < (port not in fixed, port)

        def idle(port: int) -> bool:
            if port not in first:
                return True
            link = self.links[first[port]]
            alone = crossing[port] == 1 << first[port]
            if alone and self.ports[port].beta_us_per_mb <= link.beta_us_per_mb:
                return True
            return any(other != port and outranks(other, port) for other in link.ports)

        return {port for port in range(len(self.ports)) if port not in fixed and idle(port)}


def _without_ports(topology: Topology, dropped: set[int]) -> Topology:
    """The topology without some of its ports."""
    kept = [port for port in range(len(topology.ports)) if port not in dropped]
    new_id = {old: new for new, old in enumerate(kept)}
    links_left = tuple(
        Link(
            link.src, link.dst, link.alpha_us, link.beta_us_per_mb, link.occupancy_us,
            tuple(new_id[port] for port in link.ports if port in new_id), link.kind, link.measured,
        )
        for link in topology.links
    )  # fmt: skip
    nics = tuple(
        Nic(nic.name, nic.node, nic.ranks, new_id[nic.out_port], new_id[nic.in_port]) for nic in topology.nics
    )
    ports = tuple(topology.ports[port] for port in kept)
    return replace(topology, links=links_left, ports=ports, nics=nics)


def connection_notes(topology: Topology) -> list[str]:
    """A warning when some rank cannot be reached from rank 0, or cannot reach it."""
    for forward in (True, False):
        reached = {0}
        queue = [0]
        there: dict[int, list[int]] = {}
        for link in topology.links:
            a, b = (link.src, link.dst) if forward else (link.dst, link.src)
            there.setdefault(a, []).append(b)
        while queue:
            for rank in there.get(queue.pop(), ()):
                if rank not in reached:
                    reached.add(rank)
                    queue.append(rank)
        missing = sorted(set(range(topology.ranks)) - reached)
        if missing:
            some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            how = "cannot be reached from" if forward else "cannot reach"
            return [f"warning: not connected: rank {some} {how} rank 0; add links before using this profile"]
    return []
