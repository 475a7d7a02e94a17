"""Groups of ranks side by side: each does as an engine would do for it alone, and all share the machine.

A group keeps to the links between its own ranks where they serve; else it takes the whole machine, and ranks of
other groups, or of none, pass its data on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from taccl.profiles.topology import Topology
from taccl.synth.collective import ROOTED, Collective, build, of_group
from taccl.synth.engines.network import Inapplicable
from taccl.synth.schedule import Transfer

Engine = Callable[[Topology, Collective], list[Transfer]]


@dataclass(frozen=True, slots=True)
class Part:
    """A group as a machine and a collective of its own, and what its numbers are in the whole."""

    topology: Topology
    collective: Collective
    links: tuple[int, ...]
    chunks: tuple[int, ...]

    def outwards(self, transfers: Sequence[Transfer]) -> list[Transfer]:
        """Transfers of the part in the numbers of the whole."""
        return [
            replace(t, link=self.links[t.link], chunks=tuple(self.chunks[c] for c in t.chunks))
            for t in transfers
        ]


def for_groups(engine: Engine) -> Engine:
    """The engine, made to serve groups too. Raises Inapplicable when it serves one of them in no way."""

    def transfers(topology: Topology, collective: Collective) -> list[Transfer]:
        if not collective.groups:
            return engine(topology, collective)
        found = []
        for number in range(len(collective.groups)):
            inner = inside(topology, collective, number)
            try:
                found.append(inner.outwards(engine(inner.topology, inner.collective)))
            except Inapplicable:
                part = among_all(topology, collective, number)
                found.append(part.outwards(engine(part.topology, part.collective)))
        return merged(found)

    return transfers


def merged(lists: Sequence[Sequence[Transfer]]) -> list[Transfer]:
    """Lists of transfers as one, each going on at its own pace: what is in the middle of one meets other middles."""
    order = sorted(
        ((place + 0.5) / len(listed), number, place)
        for number, listed in enumerate(lists)
        for place in range(len(listed))
    )
    now = {(number, place): index for index, (_, number, place) in enumerate(order)}
    result = []
    for _, number, place in order:
        transfer = lists[number][place]
        if transfer.after is not None:
            transfer = replace(transfer, after=tuple(now[number, before] for before in transfer.after))
        result.append(transfer)
    return result


def inside(topology: Topology, collective: Collective, number: int) -> Part:
    """A group on the links between its ranks alone: an ordinary collective of all ranks of a small machine.

    Ranks, links and ports are renumbered, so that groups in equal places make equal machines but for names.
    """
    group = collective.groups[number]
    place = {rank: i for i, rank in enumerate(group)}
    kept = [e for e, link in enumerate(topology.links) if link.src in place and link.dst in place]
    kept.sort(key=lambda e: (place[topology.links[e].src], place[topology.links[e].dst], e))
    port_of: dict[int, int] = {}
    links = []
    for link in (topology.links[e] for e in kept):
        ports = tuple(port_of.setdefault(port, len(port_of)) for port in link.ports)
        links.append(replace(link, src=place[link.src], dst=place[link.dst], ports=ports))
    nodes = [tuple(sorted(place[rank] for rank in node if rank in place)) for node in topology.nodes]
    small = replace(
        topology, nodes=tuple(sorted(node for node in nodes if node)), links=tuple(links),
        ports=tuple(topology.ports[port] for port in port_of), switches=(), nics=(),
    )  # fmt: skip
    chunks = of_group(collective, number)[1]
    whole = collective.name in ("broadcast", "reduce")
    partition = collective.size_chunks if whole else collective.size_chunks // len(group)
    own = build(collective.name, len(group), partition, root=collective.root)
    return Part(small, own, tuple(kept), chunks)


def among_all(topology: Topology, collective: Collective, number: int) -> Part:
    """A group on the whole machine, whose other ranks want nothing."""
    alone, chunks = of_group(collective, number)
    if alone.name in ROOTED:
        alone = replace(alone, root=alone.groups[0][alone.root])
    every = tuple(range(len(topology.links)))
    return Part(topology, alone, every, chunks)
