"""What the cluster is: ranks on nodes, directed links between ranks, and ports that links share.

Numbers are exact rationals in the units of the field: alpha and occupancy in us, beta in us/MB with
1 MB = 10^6 bytes. `taccl.synth.cost` turns them into integer times; nothing else prices a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from taccl.profiles.codec_cost import CodecCost, fault_of_codecs
from taccl.profiles.link import Link, Measurement, fault_of
from taccl.profiles.link_table import LinkTable

__all__ = ["Link", "Measurement", "Nic", "Port", "Switch", "Topology", "reverse"]


@dataclass(frozen=True, slots=True)
class Port:
    """One direction of a switch port, a NIC or a PCIe lane: a resource that links share.

    A message of b bytes over a link that crosses the port holds it for
    `link.occupancy_us + beta_us_per_mb * b / 10^6`.
    """

    name: str  # unique in the topology, e.g. "node0.nic0.out"
    beta_us_per_mb: Fraction  # > 0
    kind: str = "port"  # "switch" | "nic" | "pcie" | "trunk" | "port"


@dataclass(frozen=True, slots=True)
class Switch:
    """A set of ranks that one switch connects; sketches name it to set a policy."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface: the node it sits in, the ranks near it, its two ports."""

    name: str
    node: int
    ranks: tuple[int, ...]
    out_port: int
    in_port: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks 0..n-1, the nodes they live on, links, ports. Several links may join the same two ranks."""

    name: str
    nodes: tuple[tuple[int, ...], ...]  # ranks of each node; together 0..n-1, each once
    links: Sequence[Link]  # a tuple, or a LinkTable where they are very many
    ports: tuple[Port, ...] = ()
    switches: tuple[Switch, ...] = ()
    nics: tuple[Nic, ...] = ()
    reduce_alpha_us: Fraction = Fraction(0)  # cost of reducing one message on a rank
    reduce_beta_us_per_mb: Fraction = Fraction(0)
    source: str = ""  # where the numbers come from
    codecs: tuple[CodecCost, ...] = ()  # that were measured; each (codec, dtype) once
    # What a message adds where all ranks send at once, because they share cores; no part of any time, it only decides
    # between schedules.
    load_us: Fraction = Fraction(0)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(len(node) for node in self.nodes)

    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        node_of = [0] * self.ranks
        for node, members in enumerate(self.nodes):
            for rank in members:
                node_of[rank] = node
        return tuple(node_of)

    def check(self) -> None:
        """Raise ValueError with a full sentence when the value breaks a rule stated above."""
        members = sorted(rank for node in self.nodes for rank in node)
        if not members:
            raise ValueError("the topology has no ranks")
        if members != list(range(len(members))):
            raise ValueError("the nodes must hold the ranks 0..n-1, each exactly once")
        names = [port.name for port in self.ports]
        if len(set(names)) != len(names):
            raise ValueError("two ports have the same name")
        for port in self.ports:
            if port.beta_us_per_mb <= 0:
                raise ValueError(f"port {port.name}: beta must be above 0")
        if isinstance(self.links, LinkTable):
            self.links.check(len(members), len(self.ports))
        else:
            for index, link in enumerate(self.links):
                if (fault := fault_of(link, len(members), len(self.ports))) is not None:
                    raise ValueError(f"link {index} ({link.src}->{link.dst}): {fault}")
        if self.load_us < 0:
            raise ValueError("the load of a message must not be below 0")
        if (fault := fault_of_codecs(self.codecs)) is not None:
            raise ValueError(fault)
        for nic in self.nics:
            ends = (nic.out_port, nic.in_port)
            if not (0 <= nic.node < len(self.nodes) and all(0 <= port < len(names) for port in ends)):
                raise ValueError(f"NIC {nic.name}: its node or a port does not exist")


def reverse(topology: Topology) -> Topology:
    """The same cluster with every link turned round (ports keep their index, in and out swap roles)."""
    links: Sequence[Link]
    if isinstance(topology.links, LinkTable):
        links = topology.links.turned()
    else:
        links = tuple(replace(link, src=link.dst, dst=link.src) for link in topology.links)
    nics = tuple(replace(nic, out_port=nic.in_port, in_port=nic.out_port) for nic in topology.nics)
    return replace(topology, links=links, nics=nics)
