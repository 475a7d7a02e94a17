"""Reductions that a lossy codec may code: the sum of each node goes straight to the owner of a chunk.

A partial sum is coded at most once, so that errors do not add up hop after hop. The ranks of a node add up what they
have to one of them, without a codec; these sums go to the owner, which adds them up; the result of an allreduce goes
from the owner to one rank of every node and on inside it. Owners of an allreduce are shared out so that no node's
network carries more for its speed than another's: with N nodes one that owns a share w sends, and receives, 1 + (N-2) w
of the data.
"""

from __future__ import annotations

from fractions import Fraction

from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.schedule import Transfer

NAMES = ("allreduce", "reducescatter", "reduce")


def node_sums(topology: Topology, collective: Collective) -> list[Transfer] | None:
    """The transfers, chunk by chunk; None for other collectives, and where ranks lack the links."""
    if collective.name not in NAMES or collective.groups or len(topology.nodes) < 2:
        return None
    quickest: dict[tuple[int, int], int] = {}
    for e, link in enumerate(topology.links):
        known = quickest.get((link.src, link.dst))
        if known is None or _beta(topology, e) < _beta(topology, known):
            quickest[link.src, link.dst] = e
    node_of = topology.node_of()
    owners = _owners(topology, collective, node_of)
    listed: list[Transfer] = []
    for chunk, owner in enumerate(owners):
        inside: list[Transfer] = []
        across: list[Transfer] = []
        back: list[Transfer] = []
        spread: list[Transfer] = []
        for node, ranks in enumerate(topology.nodes):
            head = owner if node == node_of[owner] else _head(topology, quickest, ranks, owner, chunk)
            if head is None:
                return None
            for rank in ranks:
                if rank == head:
                    continue
                if (rank, head) not in quickest or (head, rank) not in quickest:
                    return None
                inside.append(Transfer(quickest[rank, head], (chunk,), "reduce"))
                spread.append(Transfer(quickest[head, rank], (chunk,)))
            if head != owner:
                across.append(Transfer(quickest[head, owner], (chunk,), "reduce"))
                back.append(Transfer(quickest[owner, head], (chunk,)))
        listed += [*inside, *across, *(back + spread if collective.name == "allreduce" else ())]
    return listed


def _beta(topology: Topology, e: int) -> Fraction:
    link = topology.links[e]
    return max(
        link.beta_us_per_mb, *(topology.ports[port].beta_us_per_mb for port in link.ports), Fraction(0)
    )


def _head(
    topology: Topology, quickest: dict[tuple[int, int], int], ranks: tuple[int, ...], owner: int, chunk: int
) -> int | None:
    """The rank of another node that speaks with the owner: over the quickest links, by turns where several are."""
    both = [r for r in ranks if (r, owner) in quickest and (owner, r) in quickest]
    if not both:
        return None
    slowness = {
        r: max(_beta(topology, quickest[r, owner]), _beta(topology, quickest[owner, r])) for r in both
    }
    best = [r for r in both if slowness[r] == min(slowness.values())]
    return best[chunk % len(best)]


def _owners(topology: Topology, collective: Collective, node_of: tuple[int, ...]) -> list[int]:
    """The rank that adds up each chunk."""
    if collective.name != "allreduce":
        return [chunk.destinations[0][0] for chunk in collective.chunks]
    nodes = topology.nodes
    slowness = [Fraction(0)] * len(nodes)  # of each node's network, per rank that reaches out
    for node, ranks in enumerate(nodes):
        ports: dict[object, Fraction] = {}
        for e, link in enumerate(topology.links):
            if node_of[link.src] != node_of[link.dst] and node in (node_of[link.src], node_of[link.dst]):
                here = [p for p in link.ports if _is_of(topology, p, ranks)]
                for port in here:
                    ports[port] = topology.ports[port].beta_us_per_mb
                if not here:
                    ports["link", e] = _beta(topology, e)
        rate = sum((1 / beta for beta in ports.values() if beta), Fraction(0))
        slowness[node] = 1 / rate if rate else Fraction(0)
    shares = _shares(slowness)
    given, owners = [0] * len(nodes), []
    for chunk in range(len(collective.chunks)):
        node = max(range(len(nodes)), key=lambda n: (shares[n] * (chunk + 1) - given[n], -n))
        owners.append(nodes[node][given[node] % len(nodes[node])])
        given[node] += 1
    return owners


def _is_of(topology: Topology, port: int, ranks: tuple[int, ...]) -> bool:
    """Whether a port is one of a NIC near these ranks."""
    return any(port in (nic.out_port, nic.in_port) and set(nic.ranks) & set(ranks) for nic in topology.nics)


def _shares(slowness: list[Fraction]) -> list[Fraction]:
    """Of each node the share that it owns, so that the largest of (1 + (N - 2) share) slowness is least."""
    count = len(slowness)
    if count == 2 or not all(slowness):
        return [Fraction(1, count)] * count
    # The level t: every node with slowness below t owns (t / slowness - 1) / (N - 2); the shares add up to 1.
    order = sorted(slowness)
    for most in range(count, 0, -1):
        level = (count - 2 + most) / sum((1 / s for s in order[:most]), Fraction(0))
        if level > order[most - 1] or most == 1:
            break
    shares = [max(Fraction(0), (level / s - 1) / (count - 2)) for s in slowness]
    return [share / sum(shares) for share in shares]
