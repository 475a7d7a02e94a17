"""Shared ports, found by running flows at once that would not disturb each other if nothing were shared.

Every probe compares flows together with the same flows alone. All flows are sized to take equally long alone,
so flows that share nothing take that long together too; flows that share a port must bring all their bytes
through it, whatever its way of sharing:

    T_together >= alpha + beta_port * (sum of their bytes),  with equality when the port is what limits them.

A port is reported only where it explains more than the ports found before. Probes: at most
ranks x (groups + 2) per direction, never one for each pair of links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from taccl.profiles.measure.boundary import Partition
from taccl.profiles.measure.fit import LinkFit
from taccl.profiles.measure.probe import Probe, Prober, Trial, typical

Flow = tuple[int, int]

_SHARED = 1.4  # two flows that share a port which one of them fills take 2x; independent ones 1x
_NEAR = 1.5  # far nodes whose links differ by less are equally good ends for flows
_CONFIRM = 3  # probes that must all show a port
_MOST_FLOWS = 16  # of one probe


@dataclass(frozen=True, slots=True)
class FoundPort:
    """A resource that flows share."""

    name: str
    kind: str  # as in taccl.profiles.topology.Port
    beta_us_per_mb: float
    links: tuple[Flow, ...]  # that cross it
    ranks: tuple[int, ...]  # behind it
    node: int
    direction: str  # "out" | "in" | "both"


@dataclass(frozen=True, slots=True)
class _Outcome:
    slowdown: float  # transfer time of all flows together against that of each alone
    beta_us_per_mb: float  # of a port that all flows would share
    expected: float  # slowdown that the ports known so far explain


class _Bench:
    """Runs flows together and alone, and remembers the latter."""

    def __init__(
        self,
        prober: Prober,
        fits: Mapping[Flow, LinkFit],
        largest: Mapping[Flow, int],
        repeats: Mapping[Flow, int],
    ) -> None:
        self.fits = fits
        self.ports: list[FoundPort] = []
        self._prober = prober
        self._largest = largest
        self._repeats = repeats
        self._measured: dict[tuple[Flow, int], float] = {}

    def beta(self, flow: Flow) -> float:
        return self.fits[flow].beta_us_per_mb

    def has_cores(self, flows: Sequence[Flow]) -> bool:
        """Whether every rank of the flows can have a core; else the kernel's scheduler would be measured."""
        busy = Counter(self._prober.hosts[rank] for rank in {rank for flow in flows for rank in flow})
        cores = dict(zip(self._prober.hosts, self._prober.cores, strict=True))
        return all(count <= cores[host] for host, count in busy.items())

    def receivers_work(self, ranks: Sequence[int]) -> bool:
        """Whether they are several ranks of one host, whose receivers have all the work."""
        hosts = {self._prober.hosts[rank] for rank in ranks}
        return self._prober.receivers_work and len(ranks) > 1 and len(hosts) == 1

    def by_devices(self, ranks: Sequence[int]) -> bool:
        """Whether devices copy all messages among the ranks."""
        return self._prober.devices is not None and self._prober.devices.copy_all(ranks)

    def on_devices(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Of the ranks of a node those on each of its devices; nothing where no rank shares a device and not all are
        reached by all, or where ranks of one device do not reach each other."""
        devices = self._prober.devices
        groups = [] if devices is None else devices.shared(ranks)
        several = [group for group in groups if len(group) > 1]
        if devices is None or not all(map(self.by_devices, several)):
            return []
        return groups if several or self.by_devices(ranks) else []

    def contend(self, flows: Sequence[Flow], known: Sequence[FoundPort]) -> _Outcome:
        """The flows together, against each alone, and what the known ports explain of that."""
        # Equal times alone: the slowest flow's largest message sets the time, none exceeds its own largest.
        time = min(self.beta(flow) * self._largest[flow] / 1e6 for flow in flows)
        sizes = [max(1024, int(time / self.beta(flow) * 1e6)) for flow in flows]
        alone = [self._alone(flow, size) for flow, size in zip(flows, sizes, strict=True)]
        together = self._run(flows, sizes)
        # What is not transfer: latencies, replies, the start and the end that all must hear of.
        rest = min(
            t - self.beta(flow) * size / 1e6 for t, flow, size in zip(alone, flows, sizes, strict=True)
        )
        return _Outcome(
            slowdown=(together - rest) / time,
            beta_us_per_mb=max(together - rest, 1e-3) / sum(sizes) * 1e6,
            expected=_explained(known, flows, sizes, time),
        )

    def shares(self, flows: Sequence[Flow], known: Sequence[FoundPort]) -> _Outcome | None:
        """The outcome when the flows disturb each other more than the known ports explain."""
        outcomes = []
        for _ in range(_CONFIRM):  # a disturbance by other work rarely comes every time
            outcomes.append(self.contend(flows, known))
            if outcomes[-1].slowdown < _SHARED * outcomes[-1].expected:
                return None
        return min(outcomes, key=lambda outcome: outcome.slowdown)

    def ports_of(self, node: int) -> list[FoundPort]:
        """The ports found at a node.

        Only these count as known while the node is looked at: with two nodes the way out of one is the way
        into the other, and both ends are to get their port.
        """
        return [port for port in self.ports if port.node == node]

    def _alone(self, flow: Flow, size: int) -> float:
        """The flow's time alone: measured here, or as its fit says where that is less.

        A connection may still be slow from the probe before (TCP remembers a crowded path for a while). The
        common start and end cost two more latencies than the fitted message and its reply.
        """
        fit = self.fits[flow]
        fitted = 4 * fit.alpha_us + fit.offset_us + fit.beta_us_per_mb * size / 1e6
        if (flow, size) not in self._measured:
            self._measured[flow, size] = self._run([flow], [size])
        return min(self._measured[flow, size], max(fitted, 0.5 * self._measured[flow, size]))

    def _run(self, flows: Sequence[Flow], sizes: Sequence[int]) -> float:
        trial = tuple(Trial(1, 1, size) for size in sizes)
        repeats = max(self._repeats[flow] for flow in flows) + 1
        times = self._prober.run(Probe(tuple(flows), (trial,), repeats, together=True))
        return float(typical(times[0, 0, 1:]))


def _explained(known: Sequence[FoundPort], flows: Sequence[Flow], sizes: Sequence[int], time: float) -> float:
    """The slowdown that the busiest of the known ports causes; time: of each flow's transfer alone, in us."""
    worst = 1.0
    for port in known:
        crossing = set(port.links)
        load = sum(size for flow, size in zip(flows, sizes, strict=True) if flow in crossing)
        worst = max(worst, port.beta_us_per_mb * load / 1e6 / time)
    return worst


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
    bench = _Bench(prober, fits, largest, repeats)
    ungrouped = []
    for node, ranks in enumerate(nodes):
        tell("ports", node, len(nodes))
        _bus(bench, node, ranks)
        for direction in ("out", "in"):
            if len(nodes) > 1 and not _uplinks(bench, nodes, node, direction):
                ungrouped.append((node, direction))
            _rank_ports(bench, nodes, node, direction)
    for node, direction in ungrouped:
        _wide_uplink(bench, nodes, node, direction)
    return bench.ports


def _bus(bench: _Bench, node: int, ranks: Sequence[int]) -> None:
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
    half = min(len(ranks) // 2, _MOST_FLOWS)
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
    some = ranks[:_MOST_FLOWS]
    return list(zip(some, [*some[1:], some[0]], strict=True))


def _among(ranks: Sequence[int]) -> tuple[Flow, ...]:
    return tuple((a, b) for a in ranks for b in ranks if a != b)


def _shared_by(
    bench: _Bench,
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


def _uplinks(bench: _Bench, nodes: Partition, node: int, direction: str) -> bool:
    """The ports between a node and the others that some of its ranks share; whether all its ranks share one."""
    ranks = nodes[node]
    known = bench.ports_of(node)
    # A rank joins the first group with whose leader it disturbs itself: ranks x groups probes.
    groups: list[list[int]] = []
    for rank in ranks:
        for group in groups:
            flows = _outward(bench, nodes, node, [group[0], rank], direction)
            if flows and bench.shares(flows, known):
                group.append(rank)
                break
        else:
            groups.append([rank])
    shared = [group for group in groups if len(group) > 1]
    for index, group in enumerate(shared):
        name = f"node{node}.uplink" if len(groups) == 1 else f"node{node}.nic{index}"
        flows = _outward(bench, nodes, node, group, direction)
        beta = median(bench.contend(flows, known).beta_us_per_mb for _ in range(_CONFIRM))
        _add_uplink(bench, nodes, node, group, direction, name, beta)
    return len(groups) == 1


def _wide_uplink(bench: _Bench, nodes: Partition, node: int, direction: str) -> None:
    """A way out that only many flows fill: as many as there are ranks, spread over the other nodes."""
    flows = _outward(bench, nodes, node, nodes[node], direction, crowd=True)
    known = bench.ports if len(nodes) > 2 else bench.ports_of(node)
    found = bench.shares(flows, known) if flows else None
    if found is not None:
        name = f"node{node}.uplink"
        _add_uplink(bench, nodes, node, nodes[node], direction, name, found.beta_us_per_mb)


def _add_uplink(
    bench: _Bench,
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


def _outward(
    bench: _Bench, nodes: Partition, node: int, ranks: Sequence[int], direction: str, crowd: bool = False
) -> list[Flow]:
    """Flows between ranks of a node and others, one for each rank and far rank; fewer than two are none.

    The fastest far nodes are taken, so that the far ends limit the flows as little as possible. Where
    several are about equally fast, each gets one flow (with `crowd`: as many as there are ranks).
    """
    others = [index for index in range(len(nodes)) if index != node]

    def link(rank: int, far: int) -> Flow:
        return (rank, far) if direction == "out" else (far, rank)

    def speed(index: int) -> float:
        return min(bench.beta(link(rank, far)) for rank in ranks for far in nodes[index])

    fastest = min(speed(index) for index in others)
    near = [index for index in others if speed(index) <= _NEAR * fastest]
    free = {index: list(nodes[index]) for index in near}
    flows: list[Flow] = []
    for rank in ranks[:_MOST_FLOWS]:
        taken = {index: len(nodes[index]) - len(free[index]) for index in near}
        usable = [i for i in near if free[i] and (crowd or len(near) == 1 or not taken[i])]
        if not usable:
            break
        index = min(usable, key=lambda i: (taken[i], i))
        far = min(free[index], key=lambda f: (bench.beta(link(rank, f)) > 1.2 * fastest, f))
        free[index].remove(far)
        flows.append(link(rank, far))
    return flows if len(flows) >= 2 else []


def _rank_ports(bench: _Bench, nodes: Partition, node: int, direction: str) -> None:
    """The ranks' own limits: one source to two destinations (or the reverse), near ones and far ones.

    The ranks of a node are built alike: what fewer than half of them show is a disturbance. Hosts with fewer
    cores than the probe has ranks there cannot be asked.
    """
    inside = set(nodes[node])
    at = 0 if direction == "out" else 1
    for name in ("switch", "nic"):
        ports = []
        for rank in nodes[node]:
            peers = _peers(bench, nodes, node, rank, direction, near=name == "switch")
            found = (
                bench.shares(peers, bench.ports_of(node))
                if len(peers) == 2 and bench.has_cores(peers)
                else None
            )
            if found is not None:
                own = [x for x in bench.fits if x[at] == rank and (x[1 - at] in inside) == (name == "switch")]
                full = f"rank{rank}.{name}.{direction}"
                ports.append(
                    FoundPort(full, name, found.beta_us_per_mb, tuple(sorted(own)), (rank,), node, direction)
                )
        if 2 * len(ports) >= len(inside):
            for port in ports:
                bench.ports.append(port)


def _peers(bench: _Bench, nodes: Partition, node: int, rank: int, direction: str, near: bool) -> list[Flow]:
    """Two flows of one rank with the fastest peers in its node, or in two others (one where that is faster)."""

    def link(far: int) -> Flow:
        return (rank, far) if direction == "out" else (far, rank)

    def fastest(group: Sequence[int]) -> list[int]:
        return sorted((r for r in group if r != rank), key=lambda r: (bench.beta(link(r)), r))

    if near:
        flows = [link(r) for r in fastest(nodes[node])]
        # A device's copy and a message through the host are no like pair: their latencies alone tell them apart.
        return [flow for flow in flows if bench.by_devices(flow) == bench.by_devices(flows[0])][:2]
    others = [fastest(group) for k, group in enumerate(nodes) if k != node]
    others.sort(key=lambda group: (bench.beta(link(group[0])), group[0]))
    if len(others) > 1 and bench.beta(link(others[1][0])) <= _NEAR * bench.beta(link(others[0][0])):
        return [link(others[0][0]), link(others[1][0])]
    return [link(r) for r in others[0][:2]] if others else []
