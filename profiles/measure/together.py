"""Flows at once, that would not disturb each other if nothing were shared, against each of them alone.

All flows are sized to take equally long alone, so flows that share nothing take that long together too; flows that
share a port must bring all their bytes through it, whatever its way of sharing:

    T_together >= alpha + beta_port * (sum of their bytes),  with equality when the port is what limits them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taccl.profiles.measure.fit import LinkFit
from taccl.profiles.measure.probe import TINY_BYTES, Probe, Prober, Trial, typical

Flow = tuple[int, int]

SHARED_FILLED = 1.1  # least slowdown of flows that share a port, where they are made to fill it
SHARED = 1.4  # two flows that share a port which one of them fills take 2x; independent ones 1x
CONFIRM = 3  # probes that must all show a port
MOST_FLOWS = 16  # of one probe
_TINY_RUNS = 3  # of tiny messages before those of a probe: disturbances only ever add to the least
_KEPT = 1.1  # times its rate alone that a flow's sender keeps to


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
class Outcome:
    slowdown: float  # transfer time of all flows together against that of each alone
    beta_us_per_mb: float  # of a port that all flows would share
    expected: float  # slowdown that the ports known so far explain


class Bench:
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
        self._measured: dict[tuple[Flow, int, int], float] = {}

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

    def contend(self, flows: Sequence[Flow], known: Sequence[FoundPort], fitted: bool = False) -> Outcome:
        """The flows together, against each alone, and what the known ports explain of that.

        fitted: alone they are taken to be as their fits say, so that none is run alone.
        """
        # Equal times alone: the slowest flow's largest message sets the time, none exceeds its own largest.
        time = min(self.beta(flow) * self._largest[flow] / 1e6 for flow in flows)
        sizes = [max(1024, int(time / self.beta(flow) * 1e6)) for flow in flows]
        # The clock is on the side that all flows have in common: there their start is the same, whether alone or not.
        clock = 0 if len({self._prober.hosts[source] for source, _ in flows}) == 1 else 1
        alone = [
            self._fitted(flow, size) if fitted else self._alone(flow, size, clock)
            for flow, size in zip(flows, sizes, strict=True)
        ]
        together, tiny = self._run(flows, sizes, clock)
        # What is not transfer: latencies, replies, the start and the end that all must hear of, the longer the more
        # they are. A fit knows a flow's own latency less well than a run does; the largest cannot make flows look
        # slowed that are not.
        rest = (max if fitted else min)(
            t - self.beta(flow) * size / 1e6 for t, flow, size in zip(alone, flows, sizes, strict=True)
        )
        rest = max(rest, tiny)
        return Outcome(
            slowdown=(together - rest) / time,
            beta_us_per_mb=port_beta([size / time for size in sizes], (together - rest) / time) * 1e6,
            expected=_explained(known, flows, sizes, time),
        )

    def shares(
        self, flows: Sequence[Flow], known: Sequence[FoundPort], least: float = SHARED
    ) -> Outcome | None:
        """The outcome when the flows disturb each other more than the known ports explain: `least` times as much."""
        outcomes = []
        for _ in range(CONFIRM):  # a disturbance by other work rarely comes every time
            outcomes.append(self.contend(flows, known))
            if outcomes[-1].slowdown < least * outcomes[-1].expected:
                return None
        return min(outcomes, key=lambda outcome: outcome.slowdown)

    def ports_of(self, node: int) -> list[FoundPort]:
        """The ports found at a node.

        Only these count as known while the node is looked at: with two nodes the way out of one is the way
        into the other, and both ends are to get their port.
        """
        return [port for port in self.ports if port.node == node]

    def _alone(self, flow: Flow, size: int, clock: int) -> float:
        """The flow's time alone: measured here, or as its fit says where that is less.

        A connection may still be slow from the probe before (TCP remembers a crowded path for a while). The
        common start and end cost two more latencies than the fitted message and its reply.
        """
        known = flow, size, clock
        if known not in self._measured:
            self._measured[known], _ = self._run([flow], [size], clock)
        return min(self._measured[known], max(self._fitted(flow, size), 0.5 * self._measured[known]))

    def _fitted(self, flow: Flow, size: int) -> float:
        fit = self.fits[flow]
        return 4 * fit.alpha_us + fit.offset_us + fit.beta_us_per_mb * size / 1e6

    def _run(self, flows: Sequence[Flow], sizes: Sequence[int], clock: int) -> tuple[float, float]:
        """The time of messages of the sizes, and the least of tiny ones where flows are several."""
        runs = _TINY_RUNS if len(flows) > 1 else 0
        tiny = (Trial(1, 1, TINY_BYTES),) * len(flows)
        trials = (*(runs * (tiny,)), tuple(Trial(1, 1, size) for size in sizes))
        repeats = max(self._repeats[flow] for flow in flows) + 1
        # No faster than alone: what one hands over all at once stands before the others in the queue of their uplink,
        # and its own way behind that may be slow.
        rates = tuple(int(_KEPT * 1e12 / self.beta(flow)) for flow in flows)
        probe = Probe(tuple(flows), trials, repeats, together=True, rates=rates, first=flows[0][clock])
        times = self._prober.run(probe)
        return float(typical(times[-1, 0, 1:])), float(times[:-1, 0, 1:].min()) if runs else 0.0


def _explained(known: Sequence[FoundPort], flows: Sequence[Flow], sizes: Sequence[int], time: float) -> float:
    """The slowdown that the busiest of the known ports causes; time: of each flow's transfer alone, in us."""
    worst = 1.0
    for port in known:
        crossing = set(port.links)
        load = sum(size for flow, size in zip(flows, sizes, strict=True) if flow in crossing)
        worst = max(worst, port.beta_us_per_mb * load / 1e6 / time)
    return worst


def port_beta(rates: Sequence[float], slowdown: float) -> float:
    """1 / rate of the port that makes flows of these rates, sized to take one time alone, take so many times as long.

    They share it max-min fairly: a flow that is slow for another reason leaves its part to the others, and when it is
    done those that are left may not fill the port.
    """
    low, high = sum(rates) / max(slowdown, 1.0), sum(rates)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _finish(rates, middle) > slowdown else (low, middle)
    return 1 / high


def _finish(rates: Sequence[float], capacity: float) -> float:
    """When flows through a port are done that would take one unit of time alone."""
    left = dict(enumerate(rates))
    now = 0.0
    while left:
        fair, spare = {}, capacity
        for number, flow in enumerate(sorted(left, key=lambda flow: rates[flow])):
            fair[flow] = min(rates[flow], spare / (len(left) - number))
            spare -= fair[flow]
        step = min(left[flow] / fair[flow] for flow in left)
        now += step
        left = {
            flow: size - fair[flow] * step
            for flow, size in left.items()
            if size - fair[flow] * step > 1e-9 * rates[flow]
        }
    return now
