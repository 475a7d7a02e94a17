"""The order of a whole measurement: boundary, sizes, every link, shared ports, classes, topology.

Runs on one place (rank 0) against a `Prober`; what it asks next depends only on the answers before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.measure.boundary import Partition, by_name, find_nodes
from taccl.profiles.measure.classes import LinkClass, classify, pool
from taccl.profiles.measure.contention import find_ports
from taccl.profiles.measure.crowd import least_load_us, ranks_to_a_core, receivers, slowed
from taccl.profiles.measure.devices import LARGEST_BYTES
from taccl.profiles.measure.fit import LinkFit, Point, fit_link, interval95, rough_link
from taccl.profiles.measure.load import find_load
from taccl.profiles.measure.probe import (
    TINY_BYTES,
    Probe,
    Prober,
    Trial,
    in_sequence,
    one_message,
    posted_together,
    solo,
    typical,
    undisturbed,
)
from taccl.profiles.measure.rounds import directed, pack, tournament
from taccl.profiles.measure.together import FoundPort

Flow = tuple[int, int]
Kind = tuple[int, int, bool]  # of a flow: its nodes, and whether a device copies it
Array = NDArray[np.float64]

_SCAN_BYTES = 262144
_SCAN_FIRST_BYTES = 16384
_SCAN_REPEATS = 3
_SCAN_SLOW_US = 20_000.0  # a link that needs this long for _SCAN_FIRST_BYTES is not asked for more
_LADDER = tuple(65536 << step for step in range(7))  # candidate sizes of the largest message: 64 KiB to 4 MiB
_DEVICE_LADDER = tuple(65536 << step for step in range((LARGEST_BYTES // 65536).bit_length()))
_MOST_REPEATS = 15
# Every link is measured this often, all others in between: what differs from sweep to sweep (on which cores
# the ranks run, what else runs) belongs to the moment and not to the link.
_SWEEPS = 3
_ODD = 0.1  # how far a link may be from its peers without being measured again
# A port whose beta is so far above its links' own, or below, is what limits them. (Flows that share it unevenly take
# longer, never less.)
_SNAP = 0.2, 0.08
_ROUNDS_TRIED = 8  # of flows between nodes, beside the fullest
_DISTURBED = 1.15  # flows of a round slower than alone by more disturb each other
_MORE = 3  # repeats than the slowest flow of a round has, at most, for the quick ones beside it
_COMPARED = 8  # flows of a round, with themselves alone


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is spent on a measurement. Short trials are repeated more often, for about the same time."""

    repeats: int  # of trials of large messages, at least, in one sweep
    tiny_us: float  # spent on the repeats of a tiny trial, about, in one sweep
    enough_us: float  # the largest message takes at least about this long (or is 4 MiB)
    chunks: tuple[int, ...]  # n of the one-message trials, as parts of the largest size: 8 chunks of 1/8

    def tiny_repeats(self, latency_us: float) -> int:
        """How often a tiny message is timed."""
        return int(min(max(self.tiny_us / latency_us, 3), _MOST_REPEATS))

    def large_repeats(self, time_us: float) -> int:
        """How often a message that takes `time_us` is timed."""
        return int(min(max(self.repeats * self.enough_us / time_us, self.repeats), _MOST_REPEATS))


QUICK = Effort(repeats=1, tiny_us=8_000, enough_us=20_000, chunks=(3, 5, 8))
FULL = Effort(repeats=3, tiny_us=20_000, enough_us=25_000, chunks=(3, 4, 6, 8))


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything that was found."""

    nodes: Partition
    fits: dict[Flow, LinkFit]  # every directed pair
    classes: tuple[LinkClass, ...]
    ports: tuple[FoundPort, ...]
    reduce_alpha_us: float
    reduce_beta_us_per_mb: float
    load_us: float  # what each message adds where all ranks send at once
    concurrent: bool  # pairs were measured side by side (and shown not to disturb each other)


def survey(
    prober: Prober,
    effort: Effort,
    sizes: Sequence[int] = (),
    tell: Callable[[str, int, int], None] = lambda stage, done, of: None,
) -> Survey:
    """Measure the machine behind `prober`.

    sizes: message sizes in bytes for the slope, instead of sizes chosen per link. tell: called with
    (stage, done, of) as work goes on.
    """
    ranks = len(prober.hosts)
    costs = _scan(prober, effort, tell)
    nodes = _nodes(prober, costs)
    node_of = {rank: index for index, node in enumerate(nodes) for rank in node}
    flows = directed(tournament(ranks))
    kinds = {(s, d): (node_of[s], node_of[d], _by_device(prober, (s, d))) for s, d in flows}
    largest = _largest(prober, kinds, costs[0], effort, tell)
    plans, counts = {}, {}
    for src, dst in flows:
        size, time_us = largest[kinds[src, dst]]
        plans[src, dst] = _trials(sizes, effort, size)
        longest_us = time_us * max(sizes, default=size) / size
        counts[src, dst] = effort.tiny_repeats(costs[0][src, dst]), effort.large_repeats(longest_us)
    rounds = pack(flows, _things(prober, node_of), _capacity(prober))
    concurrent = _undisturbed(prober, rounds, plans, counts, node_of)
    if not concurrent:
        rounds = [(flow,) for flow in flows]
    sweeps: dict[Flow, list[list[Point]]] = {flow: [] for flow in flows}

    def sweep(of: Sequence[tuple[Flow, ...]], stage: str) -> None:
        for number in range(_SWEEPS):
            for done, members in enumerate(of):
                tell(stage, number * len(of) + done, _SWEEPS * len(of))
                for flow, points in _measure(prober, members, plans, counts).items():
                    sweeps[flow].append(points)

    def fitted(flow: Flow) -> LinkFit:
        each = sum(len(part) * count for part, count in zip(plans[flow], counts[flow], strict=True))
        return _combine(sweeps[flow], len(sweeps[flow]) * each)

    sweep(rounds, "links")
    fits = {}
    for flow in flows:  # minutes of some thousand links
        prober.alive()
        fits[flow] = fitted(flow)
    odd = _odd(fits, node_of)
    sweep([(flow,) for flow in odd], "odd links")
    fits.update({flow: fitted(flow) for flow in odd})

    if nodes != by_name(prober.hosts):
        # A boundary that no host name speaks of must still be there in the links as finally measured.
        nodes = _nodes(prober, _fitted_costs(fits, ranks))
        node_of = {rank: index for index, node in enumerate(nodes) for rank in node}
    # Whatever sizes were asked for: of short ones a start in common is most of the time, long ones need memory.
    largest_of = {flow: largest[kinds[flow]][0] for flow in flows}
    repeats = {flow: effort.large_repeats(largest[kinds[flow]][1]) for flow in flows}
    crowds = {
        number: factor
        for number, members in enumerate(nodes)
        if len(members) > 1 and (factor := ranks_to_a_core(prober, members)) > 1
    }
    ports = find_ports(prober, nodes, fits, largest_of, repeats, tell)
    calm, shares = _calmed(prober, fits, node_of), []
    for number, factor in crowds.items():
        inside = nodes[number]
        calm.update({(s, d): slowed(calm[s, d], factor) for s in inside for d in inside if s != d})
        own = receivers(number, inside, calm)
        named = {port.name for port in own}  # measured beside ranks that slept
        ports = [*(port for port in ports if port.name not in named), *own]
        shares.append(least_load_us(inside, calm, factor))
    label = {(s, d): "intra" if node_of[s] == node_of[d] else "inter" for s, d in flows}
    classes = classify(calm, label)
    small, large = prober.reduce_times((1024, 1 << 22))
    beta = max((large - small) / ((1 << 22) - 1024) * 1e6, 0.0)
    return Survey(
        nodes=nodes,
        fits=fits,
        classes=tuple(classes),
        ports=tuple(_snapped(ports, classes)),
        reduce_alpha_us=max(small - beta * 1024 / 1e6, 0.0),
        reduce_beta_us_per_mb=beta,
        load_us=max([find_load(prober, nodes, 2 * effort.repeats + 5), *shares]),
        concurrent=concurrent and any(len(members) > 1 for members in rounds),
    )


def _nodes(prober: Prober, costs: tuple[Array, Array]) -> Partition:
    """The nodes. Of one host with devices some may not reach each other, which is no boundary between nodes, however
    much it costs."""
    return by_name(prober.hosts) if prober.devices is not None else find_nodes(prober.hosts, costs)


def _by_device(prober: Prober, flow: Flow) -> bool:
    return prober.devices is not None and prober.devices.copy(flow)


def _fitted_costs(fits: dict[Flow, LinkFit], ranks: int) -> tuple[Array, Array]:
    """(latency, time of 256 KiB) of every pair in us, (ranks, ranks), symmetric."""
    latency, bulk = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
    for (src, dst), fit in fits.items():
        back = fits[dst, src]
        latency[src, dst] = (fit.alpha_us + back.alpha_us) / 2
        bulk[src, dst] = (fit.beta_us_per_mb + back.beta_us_per_mb) / 2 * _SCAN_BYTES / 1e6
    return latency, latency + bulk


def _odd(fits: dict[Flow, LinkFit], node_of: dict[int, int]) -> list[Flow]:
    """The links that differ from most links between the same two nodes: they are measured again."""
    groups: dict[tuple[int, int], list[Flow]] = {}
    for src, dst in sorted(fits):
        groups.setdefault((node_of[src], node_of[dst]), []).append((src, dst))
    odd = []
    for group in groups.values():
        alpha = median(fits[flow].alpha_us for flow in group)
        beta = median(fits[flow].beta_us_per_mb for flow in group)
        odd += [
            flow
            for flow in group
            if abs(fits[flow].beta_us_per_mb - beta) > _ODD * beta
            or abs(fits[flow].alpha_us - alpha) > max(1.0, _ODD * alpha)
        ]
    return odd


def _snapped(ports: Sequence[FoundPort], classes: Sequence[LinkClass]) -> list[FoundPort]:
    """The ports, each with its links' beta where that is about its own: many measurements know it better."""
    beta = {link: cls.fit.beta_us_per_mb for cls in classes for link in cls.links}
    snapped = []
    for port in ports:
        own = port.beta_us_per_mb
        above = _SNAP[1] if port.kind == "trunk" else _SNAP[0]
        least, most = own * (1 - above), own * (1 + _SNAP[1])
        near = [beta[link] for link in port.links if least <= beta[link] <= most]
        snapped.append(replace(port, beta_us_per_mb=median(near)) if near else port)
    return snapped


def _calmed(prober: Prober, fits: dict[Flow, LinkFit], node_of: Mapping[int, int]) -> dict[Flow, LinkFit]:
    """The fits, those inside a host with more ranks than cores replaced by the medians of those within its nodes, and
    of those between each two.

    Which two of its ranks sit on one core changes all the time: that difference is not one of links. Copies of devices
    do not sit on cores, and which devices are near each other is one.
    """
    if prober.devices is not None:
        return dict(fits)
    crowded = {
        host
        for host, cores in zip(prober.hosts, prober.cores, strict=True)
        if list(prober.hosts).count(host) > cores
    }
    calm = dict(fits)
    alike: dict[tuple[str, int, int], list[Flow]] = {}
    for src, dst in fits:
        if prober.hosts[src] == prober.hosts[dst] and prober.hosts[src] in crowded:
            alike.setdefault((prober.hosts[src], node_of[src], node_of[dst]), []).append((src, dst))
    for flows in alike.values():
        common = pool([fits[flow] for flow in flows])
        calm.update({flow: replace(common, samples=fits[flow].samples) for flow in flows})
    return calm


def _scan(prober: Prober, effort: Effort, tell: Callable[[str, int, int], None]) -> tuple[Array, Array]:
    """(latency, time of 256 KiB) of every pair in us, (ranks, ranks), symmetric.

    Up to 12 ranks pair after pair; more in the rounds of a tournament, as many at once as hosts have cores.
    What flows in one round take from each other only makes a boundary plainer.
    """
    ranks = len(prober.hosts)
    pairs = [pair for level in tournament(ranks) for pair in level]
    if ranks <= 12:
        rounds: list[tuple[Flow, ...]] = [(pair,) for pair in pairs]
    else:
        rounds = pack(pairs, lambda flow: [("host", prober.hosts[r]) for r in flow], _capacity(prober))
    latency, bulk = np.full((ranks, ranks), np.inf), np.full((ranks, ranks), np.inf)
    for sweep in range(_SWEEPS):
        for done, members in enumerate(rounds):
            tell("boundary", sweep * len(rounds) + done, _SWEEPS * len(rounds))
            tiny = _side_by_side(prober, members, in_sequence(1, TINY_BYTES), _SCAN_REPEATS)
            first = _side_by_side(prober, members, one_message(1, _SCAN_FIRST_BYTES), 1)
            fast = tuple(flow for flow in members if first[flow] < _SCAN_SLOW_US)
            second = _side_by_side(prober, fast, one_message(1, _SCAN_BYTES), 1) if fast else {}
            for i, j in members:
                time = second.get((i, j), first[i, j] * _SCAN_BYTES / _SCAN_FIRST_BYTES)
                latency[i, j] = latency[j, i] = min(latency[i, j], tiny[i, j] / 2)
                bulk[i, j] = bulk[j, i] = min(bulk[i, j], time)
    return latency, bulk


def _side_by_side(prober: Prober, members: Sequence[Flow], trial: Trial, repeats: int) -> dict[Flow, float]:
    # One more repeat than asked, and the first dropped: it opens connections and touches pages.
    times = prober.run(Probe(tuple(members), ((trial,) * len(members),), repeats + 1))
    found = typical(times[:, :, 1:])
    return {flow: float(found[0, k]) for k, flow in enumerate(members)}


def _largest(
    prober: Prober,
    kinds: Mapping[Flow, Kind],
    latency: Array,
    effort: Effort,
    tell: Callable[[str, int, int], None],
) -> dict[Kind, tuple[int, float]]:
    """For each kind of flow the size that is large enough to show the bandwidth, and its time in us.

    One pair of ranks stands for all of its kind.
    """
    sizes: dict[Kind, tuple[int, float]] = {}
    jobs: dict[Kind, Flow] = {}
    for flow in sorted(kinds):
        jobs.setdefault(kinds[flow], flow)
    for done, (kind, (src, dst)) in enumerate(jobs.items()):
        tell("sizes", done, len(jobs))
        enough = max(effort.enough_us, 8 * latency[src, dst])
        before = 0.0
        for size in _DEVICE_LADDER if kind[2] else _LADDER:
            times = prober.run(solo(src, dst, [one_message(1, size)], 2)) - 2 * latency[src, dst]
            time = max(float(times.min()), 1.0)
            sizes[kind] = size, time
            # A token bucket lets the first bytes through for nothing: until four times its burst, doubling the
            # size makes the time more than three times as long, and then the smallest trial exceeds the burst.
            linear = 0 < time <= 3 * before
            if times.max() >= enough and (linear or time >= 10 * enough):
                break
            before = time
    return sizes


def _trials(
    sizes: Sequence[int], effort: Effort, largest: int
) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
    """(tiny trials, large trials) of one link; the first tiny one is the ping-pong."""
    tiny = (
        in_sequence(1, TINY_BYTES),
        in_sequence(2, TINY_BYTES),
        posted_together(8, TINY_BYTES),
        posted_together(16, TINY_BYTES),
    )
    if sizes:
        return tiny, tuple(one_message(1, size) for size in sorted(set(sizes)))
    return tiny, tuple(one_message(n, largest // 8) for n in effort.chunks)


def _things(prober: Prober, node_of: dict[int, int]) -> Callable[[Flow], list[tuple[str, object]]]:
    """What a flow occupies: a core at both ends, and the device where the memory is on one; between nodes the way out
    of one and into the other."""

    def uses(flow: Flow) -> list[tuple[str, object]]:
        src, dst = flow
        things: list[tuple[str, object]] = [("host", prober.hosts[rank]) for rank in flow]
        if prober.devices is not None:
            things += [("device", (prober.hosts[rank], prober.devices.names[rank])) for rank in flow]
        if node_of[src] != node_of[dst]:
            things += [("out", node_of[src]), ("in", node_of[dst])]
            # Replies go the other way: they must not queue behind another flow's bytes.
            things += [("in", node_of[src]), ("out", node_of[dst])]
        return things

    return uses


def _capacity(prober: Prober) -> dict[object, int]:
    return {("host", host): cores for host, cores in zip(prober.hosts, prober.cores, strict=True)}


def _undisturbed(
    prober: Prober,
    rounds: Sequence[tuple[Flow, ...]],
    plans: dict[Flow, tuple[tuple[Trial, ...], tuple[Trial, ...]]],
    counts: dict[Flow, tuple[int, int]],
    node_of: Mapping[int, int],
) -> bool:
    """Whether rounds give the times that their flows show alone: the fullest one, and some of those with several flows
    between nodes, which may share what lies between them."""
    fullest = max(rounds, key=len)
    if len(fullest) < 2:
        return True
    apart = [members for members in rounds if sum(node_of[s] != node_of[d] for s, d in members) > 1]
    some = random.Random(0).sample(apart, min(len(apart), _ROUNDS_TRIED))
    tried = [(fullest, 0), (fullest, 1), *((members, 1) for members in some)]  # latency, then bandwidth
    return not any(_disturbed(prober, *each, plans, counts) for each in tried)


def _disturbed(
    prober: Prober,
    members: tuple[Flow, ...],
    part: int,
    plans: dict[Flow, tuple[tuple[Trial, ...], tuple[Trial, ...]]],
    counts: dict[Flow, tuple[int, int]],
) -> bool:
    """Whether one of the flows is slower than alone, twice: of many flows some are so once, by chance."""
    picks = [plans[flow][part][-1] for flow in members]
    often = [counts[flow][part] for flow in members]
    repeats = min(max(often), min(often) + _MORE) + 2
    slow = list(range(min(len(members), _COMPARED)))
    for _ in range(2):
        beside = prober.run(Probe(members, (tuple(picks),), repeats))[0, :, 1:]
        alone = {k: prober.run(solo(*members[k], [picks[k]], repeats))[0, 0, 1:] for k in slow}
        slow = [k for k in slow if typical(beside[k]) > _DISTURBED * typical(alone[k])]
        if not slow:
            return False
    return True


def _measure(
    prober: Prober,
    members: Sequence[Flow],
    plans: dict[Flow, tuple[tuple[Trial, ...], tuple[Trial, ...]]],
    counts: dict[Flow, tuple[int, int]],
) -> dict[Flow, list[Point]]:
    """The points of the flows of one round, from one sweep."""
    points: dict[Flow, list[Point]] = {flow: [] for flow in members}
    for part in (0, 1):  # tiny messages, then large ones
        for same in _as_often({flow: counts[flow][part] for flow in members}):
            repeats = max(counts[flow][part] for flow in same)
            trials = tuple(zip(*(plans[flow][part] for flow in same), strict=True))
            # The first repeat is dropped: it opens connections, touches pages and empties token buckets.
            times = typical(prober.run(Probe(same, trials, repeats + 1))[:, :, 1:])
            for k, flow in enumerate(same):
                points[flow] += [Point(row[k], float(times[t, k])) for t, row in enumerate(trials)]
    return points


def _as_often(counts: Mapping[Flow, int]) -> list[tuple[Flow, ...]]:
    """The flows of a round by how often they are timed, about: slow links are not timed as often as quick ones."""
    alike: dict[int, list[Flow]] = {}
    for flow, count in counts.items():
        alike.setdefault(count.bit_length(), []).append(flow)
    return [tuple(flows) for _, flows in sorted(alike.items())]


def _combine(sweeps: Sequence[Sequence[Point]], samples: int) -> LinkFit:
    """One fit of a link from its sweeps.

    The intervals also cover what the sweeps say differently, which repeats within one sweep cannot show.
    """
    best = [
        Point(same[0].trial, float(undisturbed(np.array([point.time_us for point in same]))))
        for same in zip(*sweeps, strict=True)
    ]
    fit = fit_link(best, samples)
    alphas, betas = zip(*(rough_link(points) for points in sweeps), strict=True)
    return replace(
        fit,
        alpha_ci_us=max(fit.alpha_ci_us, interval95(alphas)),
        beta_ci_us_per_mb=max(fit.beta_ci_us_per_mb, interval95(betas)),
    )
