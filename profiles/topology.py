"""What the cluster is: ranks on nodes, directed links between ranks, and ports that links share.

Numbers are exact rationals in the units of the field: alpha and occupancy in us, beta in us/MB with
1 MB = 10^6 bytes. `taccl.synth.cost` turns them into integer times; nothing else prices a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Port:
    """One direction of a switch port, a NIC or a PCIe lane: a resource that links share.

    A message of b bytes over a link that crosses the port holds it for
    `link.occupancy_us + beta_us_per_mb * b / 10^6`.
    """

    name: str  # unique in the topology, e.g. "node0.nic0.out"
    beta_us_per_mb: Fraction  # > 0
    kind: str = "port"  # "switch" | "nic" | "pcie" | "port"


@dataclass(frozen=True, slots=True)
class Measurement:
    """How a link's alpha and beta were obtained; never a date, so that files stay comparable."""

    samples: int
    residual: float  # relative residual of the fit, 0.03 = 3 %
    alpha_ci_us: float = 0.0  # half width of the 95 % interval
    beta_ci_us_per_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link. A message of b bytes arrives `alpha + beta * b` after it starts.

    beta is the slowest of the link's own and that of every port in `ports`. The message holds the
    link for `occupancy + own beta * b` and each port for `occupancy + port beta * b`, all from its start.
    """

    src: int
    dst: int
    alpha_us: Fraction  # >= 0
    beta_us_per_mb: Fraction  # > 0
    occupancy_us: Fraction  # 0 <= occupancy <= alpha
    ports: tuple[int, ...] = ()  # indices into Topology.ports
    kind: str = "link"  # link class, e.g. "nvlink", "ib"
    measured: Measurement | None = None


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
    links: tuple[Link, ...]
    ports: tuple[Port, ...] = ()
    switches: tuple[Switch, ...] = ()
    nics: tuple[Nic, ...] = ()
    reduce_alpha_us: Fraction = Fraction(0)  # cost of reducing one message on a rank
    reduce_beta_us_per_mb: Fraction = Fraction(0)
    source: str = ""  # where the numbers come from

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
        for index, link in enumerate(self.links):
            where = f"link {index} ({link.src}->{link.dst})"
            if not (0 <= link.src < len(members) and 0 <= link.dst < len(members)):
                raise ValueError(f"{where}: a rank does not exist (ranks are 0..{len(members) - 1})")
            if link.src == link.dst:
                raise ValueError(f"{where}: a link must join two different ranks")
            if link.beta_us_per_mb <= 0 or link.alpha_us < 0:
                raise ValueError(f"{where}: beta must be above 0 and alpha not below 0")
            if not 0 <= link.occupancy_us <= link.alpha_us:
                raise ValueError(f"{where}: occupancy must lie between 0 and alpha")
            if any(not 0 <= port < len(self.ports) for port in link.ports):
                raise ValueError(f"{where}: a port does not exist")
            if len(set(link.ports)) != len(link.ports):
                raise ValueError(f"{where}: a port stands twice")
        for nic in self.nics:
            if not (
                0 <= nic.node < len(self.nodes) and {nic.out_port, nic.in_port} <= set(range(len(names)))
            ):
                raise ValueError(f"NIC {nic.name}: its node or a port does not exist")


def reverse(topology: Topology) -> Topology:
    """The same cluster with every link turned round (ports keep their index, in and out swap roles)."""
    links = tuple(
        Link(x.dst, x.src, x.alpha_us, x.beta_us_per_mb, x.occupancy_us, x.ports, x.kind, x.measured)
        for x in topology.links
    )
    nics = tuple(Nic(n.name, n.node, n.ranks, n.in_port, n.out_port) for n in topology.nics)
    return Topology(
        topology.name, topology.nodes, links, topology.ports, topology.switches, nics,
        topology.reduce_alpha_us, topology.reduce_beta_us_per_mb, topology.source,
    )  # fmt: skip
