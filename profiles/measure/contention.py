"""Shared ports, found by flows at once.

A port is reported only where it explains more than the ports found before. Probes: at most
ranks x (groups + 3) per direction, never one for each pair of links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from taccl.profiles.measure.boundary import Partition
from taccl.profiles.measure.fit import LinkFit
from taccl.profiles.measure.probe import Prober
from taccl.profiles.measure.together import MOST_FLOWS, Bench, Flow, FoundPort
from taccl.profiles.measure.trunks import find_trunks
from taccl.profiles.measure.uplinks import find_uplinks, find_wide_uplink


def find_ports(
    prober: Prober,
    nodes: Partition,
    fits: Mapping[Flow, LinkFit],
    largest: Mapping[Flow, int],
    repeats: Mapping[Flow, int],
    tell: Callable[[str, int, int], None] = lambda stage, done, of: None,
) -> list[FoundPort]:
    """All shared ports that the probes show.

    nodes: ranks of each node. fits: of every directed pair. largest, repeats: bytes of the largest message to
    use on each, and how often.
    """
    bench = Bench(prober, fits, largest, repeats)
    for node, ranks in enumerate(nodes):
        tell("ports", node, len(nodes))
        _bus(bench, node, ranks)
        for direction in ("out", "in"):
            _switch_ports(bench, ranks, node, direction)
    if len(nodes) == 1:
        return bench.ports
    inside = list(bench.ports)
    _between(bench, nodes, tell)
    if trunks := find_trunks(bench, nodes, tell):
        # Flows that shared a trunk were taken to share an uplink.
        bench.ports = [*inside, *trunks]
        _between(bench, nodes, tell)
    return bench.ports


def _between(bench: Bench, nodes: Partition, tell: Callable[[str, int, int], None]) -> None:
    """Add every node's ways to the others."""
    ungrouped = []
    for node in range(len(nodes)):
        tell("uplinks", node, len(nodes))
        for direction in ("out", "in"):
            if not find_uplinks(bench, nodes, node, direction):
                ungrouped.append((node, direction))
    for node, direction in ungrouped:
        find_wide_uplink(bench, nodes, node, direction)


def _bus(bench: Bench, node: int, ranks: Sequence[int]) -> None:
    """Whether flows inside a node share something: its memory or PCIe bus, or its cores; or a device's memory.

    Disjoint pairs tell. Where receivers have all the work every rank receives at once, since pairs would leave cores
    and memory idle that a collective uses; where devices copy all receive at once, too.
    """
    inside = bench.on_devices(ranks)
    for number, group in enumerate(inside):
        if len(group) > 1:
            _shared_by(bench, node, group, _among(group), [_ring(group)], f"node{node}.gpu{number}.memory")
    near = {flow for group in inside for flow in _among(group)}
    links = tuple(flow for flow in _among(ranks) if flow not in near)
    half = min(len(ranks) // 2, MOST_FLOWS)
    pairs = [(ranks[2 * k], ranks[2 * k + 1]) for k in range(half)]
    tries = [pairs[:count] for count in sorted({2, half}) if len(ranks) >= 4]
    if bench.receivers_work(ranks):
        tries = [_ring(ranks)]
    if inside:
        # A rank of each device, so that what several of one share does not show again.
        first = [group[0] for group in inside]
        rest = [flow for flow in pairs if flow not in near]
        tries = [_ring(first)] if bench.by_devices(first) else [rest] if len(rest) > 1 else []
    _shared_by(bench, node, ranks, links, tries, f"node{node}.bus")


def _ring(ranks: Sequence[int]) -> list[Flow]:
    some = ranks[:MOST_FLOWS]
    return list(zip(some, [*some[1:], some[0]], strict=True))


def _among(ranks: Sequence[int]) -> tuple[Flow, ...]:
    return tuple((a, b) for a in ranks for b in ranks if a != b)


def _shared_by(
    bench: Bench,
    node: int,
    ranks: Sequence[int],
    links: tuple[Flow, ...],
    tries: Sequence[Sequence[Flow]],
    name: str,
) -> None:
    """Add the port that links among ranks of a node share, if flows show one: the first of `tries` that do."""
    for flows in tries:
        found = bench.shares(flows, bench.ports_of(node))
        if found is not None:
            # One message alone gets through as its link says, so what all share is no slower.
            beta = min(found.beta_us_per_mb, median(bench.beta(link) for link in links))
            bench.ports.append(FoundPort(name, "port", beta, links, tuple(ranks), node, "both"))
            return


def _switch_ports(bench: Bench, ranks: Sequence[int], node: int, direction: str) -> None:
    """The ranks' own limits within their node: one source to two destinations, or the reverse.

    The ranks of a node are built alike: what fewer than half of them show is a disturbance. Hosts with fewer
    cores than the probe has ranks there cannot be asked.
    """
    at = 0 if direction == "out" else 1
    ports = []
    for rank in ranks:
        peers = _peers(bench, ranks, rank, direction)
        if len(peers) < 2 or not bench.has_cores(peers):
            continue
        found = bench.shares(peers, bench.ports_of(node))
        if found is not None:
            own = tuple(flow for flow in _among(ranks) if flow[at] == rank)
            name = f"rank{rank}.switch.{direction}"
            ports.append(FoundPort(name, "switch", found.beta_us_per_mb, own, (rank,), node, direction))
    if 2 * len(ports) >= len(ranks):
        bench.ports += ports


def _peers(bench: Bench, ranks: Sequence[int], rank: int, direction: str) -> list[Flow]:
    """Two flows of a rank with the fastest peers in its node."""
    flows = [(rank, far) if direction == "out" else (far, rank) for far in ranks if far != rank]
    flows.sort(key=lambda flow: (bench.beta(flow), flow))
    # A device's copy and a message through the host are no like pair: their latencies alone tell them apart.
    return [flow for flow in flows if bench.by_devices(flow) == bench.by_devices(flows[0])][:2]
