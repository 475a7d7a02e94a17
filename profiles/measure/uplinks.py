"""The ports between nodes, found by flows from one node to several others.

Flows to different nodes have nothing in common but what they leave through (and the reverse), so what holds them up is
the port that is sought, however fast the other nodes are. Only where there are two nodes the way out of one is the way
into the other; both get the port then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from taccl.profiles.measure.boundary import Partition
from taccl.profiles.measure.together import CONFIRM, MOST_FLOWS, SHARED_FILLED, Bench, Flow, FoundPort

_ENOUGH = 1.9  # times what one flow takes, of flows that are to fill a port
_UNSEEN = 1.15  # other nodes whose flows would fill the fastest one's way less than this are left out


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks of a node, what they share on their way, and how many flows show it."""

    ranks: list[int]
    beta_us_per_mb: float | None  # None: nothing
    far: Partition  # nodes at the other end
    flows: int


def find_uplinks(bench: Bench, nodes: Partition, node: int, direction: str) -> bool:
    """Add the ports between a node and the others, each of some of its ranks; whether all its ranks share one.

    A rank belongs to a group where it and the group's first one together get no more through than that one alone.
    """
    known, ranks = bench.ports_of(node), nodes[node]
    groups: list[_Group] = []
    for rank in ranks:
        for group in groups:
            if _joins(bench, node, group, rank, direction):
                group.ranks.append(rank)
                break
        else:
            groups.append(_alone(bench, nodes, node, rank, direction))
    found = [group for group in groups if group.beta_us_per_mb is not None]
    # The ranks of a node are built alike: what so few of them show alone is a disturbance. And hosts with fewer cores
    # than flows have ranks there cannot be asked what one rank alone is held up by.
    alone = 2 * sum(len(group.ranks) for group in found) >= len(ranks)
    found = [
        group
        for group in found
        if len(group.ranks) > 1 or (alone and bench.has_cores(_flows(bench, group, direction)))
    ]
    several = 0
    for group in found:
        name = f"rank{group.ranks[0]}.nic"
        if len(group.ranks) > 1:
            name, several = f"node{node}.nic{several}", several + 1
        if len(groups) == 1 < len(ranks):
            name = f"node{node}.uplink"
        flows = _flows(bench, group, direction)
        beta = median(bench.contend(flows, known).beta_us_per_mb for _ in range(CONFIRM))
        _add(bench, nodes, node, group.ranks, direction, name, beta)
    return len(groups) == len(found) == 1


def find_wide_uplink(bench: Bench, nodes: Partition, node: int, direction: str) -> None:
    """Add a way out that only many flows fill: as many as there are ranks, spread over the other nodes."""
    ranks = nodes[node]
    if len(ranks) == 1:
        return
    far = _far_nodes(bench, nodes, node, ranks, direction)
    flows = _outward(bench, far, ranks, direction, max(len(ranks), len(far)))
    known = bench.ports if len(nodes) > 2 else bench.ports_of(node)
    found = bench.shares(flows, known) if len(flows) > 1 else None
    if found is not None:
        _add(bench, nodes, node, ranks, direction, f"node{node}.uplink", found.beta_us_per_mb)


def _alone(bench: Bench, nodes: Partition, node: int, rank: int, direction: str) -> _Group:
    """A rank with what it shows alone, by as few flows as could fill its way twice, or by all."""
    far = _far_nodes(bench, nodes, node, [rank], direction)
    flows = _outward(bench, far, [rank], direction, _ends(far))
    if _fill(bench, flows) < _UNSEEN:
        far = far[:1]
        flows = _outward(bench, far, [rank], direction, _ends(far))
    rates = [1 / bench.beta(flow) for flow in flows]
    few = next((k + 1 for k in range(len(rates)) if sum(rates[: k + 1]) >= _ENOUGH * rates[0]), len(rates))
    for count in sorted({few, len(flows)}):
        some = flows[:count]
        if len(some) > 1:
            found = bench.shares(some, bench.ports_of(node), _least(bench, some))
            if found is not None:
                return _Group([rank], found.beta_us_per_mb, far, count)
    return _Group([rank], None, far, few)


def _joins(bench: Bench, node: int, group: _Group, rank: int, direction: str) -> bool:
    """Whether a rank is behind the port of a group."""
    if group.beta_us_per_mb is None:
        return False
    at = 0 if direction == "out" else 1
    flows = _outward(bench, group.far, [group.ranks[0], rank], direction, group.flows)
    found = bench.shares(flows, bench.ports_of(node), _least(bench, flows)) if len(flows) > 1 else None
    if found is None:
        return False
    # Behind a port of its own it would leave the group's one to the flows of the other.
    loads = [sum(1 / bench.beta(flow) for flow in flows if flow[at] == one) for one in (group.ranks[0], rank)]
    apart = max(loads) / sum(loads)
    return found.beta_us_per_mb >= (1 + apart) / 2 * group.beta_us_per_mb


def _flows(bench: Bench, group: _Group, direction: str) -> list[Flow]:
    """Those that show a group's port, shared by its ranks."""
    return _outward(bench, group.far, group.ranks, direction, group.flows)


def _fill(bench: Bench, flows: Sequence[Flow]) -> float:
    """How often the flows would fill a port that the fastest one fills."""
    rates = [1 / bench.beta(flow) for flow in flows]
    return sum(rates) / max(rates)


def _least(bench: Bench, flows: Sequence[Flow]) -> float:
    """From which slowdown on flows share a port."""
    return min(SHARED_FILLED, (1 + _fill(bench, flows)) / 2)


def _far_nodes(bench: Bench, nodes: Partition, node: int, ranks: Sequence[int], direction: str) -> Partition:
    """The other nodes, the fastest first; of those behind one trunk only one."""
    others = [far for k, far in enumerate(nodes) if k != node]
    kept, crossed = [], set[str]()
    for far in sorted(others, key=lambda far: _nearest(bench, ranks[0], far, direction)):
        link = _link(ranks[0], far[0], direction)
        trunks = {port.name for port in bench.ports if port.kind == "trunk" and link in port.links}
        if not trunks & crossed:
            kept.append(far)
            crossed |= trunks
    return tuple(kept)


def _nearest(bench: Bench, rank: int, far: Sequence[int], direction: str) -> tuple[float, int]:
    """(beta, rank) of the far rank with the fastest link."""
    return min((bench.beta(_link(rank, one, direction)), one) for one in far)


def _link(rank: int, far: int, direction: str) -> Flow:
    return (rank, far) if direction == "out" else (far, rank)


def _ends(far: Partition) -> int:
    """How many flows have nothing in common at their far ends: one for each node; ranks, where there is one."""
    return len(far) if len(far) > 1 else len(far[0])


def _outward(bench: Bench, far: Partition, ranks: Sequence[int], direction: str, most: int) -> list[Flow]:
    """Flows between ranks of a node and far ones, at most so many, to all far nodes in turn.

    Each goes from the rank with the least to carry, to a far rank of its own.
    """
    free = [list(others) for others in far]
    load = dict.fromkeys(ranks, 0.0)
    flows: list[Flow] = []
    while any(free):
        for others in filter(None, free):
            if len(flows) == min(most, MOST_FLOWS):
                return flows
            rank = min(ranks, key=lambda one: load[one])
            beta, end = _nearest(bench, rank, others, direction)
            others.remove(end)
            load[rank] += 1 / beta
            flows.append(_link(rank, end, direction))
    return flows


def _add(
    bench: Bench,
    nodes: Partition,
    node: int,
    group: Sequence[int],
    direction: str,
    name: str,
    beta: float,
) -> None:
    """Add the port that the ranks of a group share with all nodes but their own."""
    at = 0 if direction == "out" else 1
    members, inside = set(group), set(nodes[node])
    links = tuple(sorted(link for link in bench.fits if link[at] in members and link[1 - at] not in inside))
    bench.ports.append(FoundPort(f"{name}.{direction}", "nic", beta, links, tuple(group), node, direction))
