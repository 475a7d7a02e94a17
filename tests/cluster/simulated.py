"""A cluster in arithmetic: the time that a given topology takes for a probe, with noise on demand.

Concurrent flows share ports max-min fairly, as a fluid. It has the interface of a prober, so the measuring
code can be put before machines whose truth is known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from taccl.profiles.measure.devices import Devices
from taccl.profiles.measure.probe import Probe, Times, Trial

Flow = tuple[int, int]


@dataclass
class SimulatedProber:
    """alpha_us, beta (us/MB), occupancy_us of each directed pair; ports: (name, beta, links that cross).

    noise is the relative spread of one-sided disturbances; every `outlier`-th timing or so takes five times
    as long.
    """

    hosts: Sequence[str]
    alpha_us: Callable[[int, int], float]
    beta: Callable[[int, int], float]
    ports: Sequence[tuple[str, float, frozenset[Flow]]] = ()
    occupancy_share: float = 1.0  # of alpha
    noise: float = 0.0
    outliers: float = 0.0
    load_us: float = 0.0  # what each message adds where several flows run side by side
    gate_us: float = 0.0  # what each rank adds to a start in common
    host_cores: int = 64
    receivers_work: bool = False
    devices: Devices | None = None
    seed: int = 0
    probes: list[Probe] = field(default_factory=list)  # all that was asked
    signs: int = 0  # of life
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def cores(self) -> Sequence[int]:
        return [self.host_cores] * len(self.hosts)

    def run(self, probe: Probe) -> Times:
        self.probes.append(probe)
        times = np.empty((len(probe.trials), len(probe.flows), probe.repeats))
        for t, row in enumerate(probe.trials):
            for repeat in range(probe.repeats):
                if probe.together:
                    sizes = {flow: float(trial.bytes) for flow, trial in zip(probe.flows, row, strict=True)}
                    # The slowest flow and its reply, and two latencies for the common start and end.
                    start_us = 4 * max(self.alpha_us(*flow) for flow in probe.flows)
                    start_us += self.gate_us * len(probe.members)
                    times[t, :, repeat] = self._disturbed(self._fluid(sizes) + start_us)
                else:
                    for f, (flow, trial) in enumerate(zip(probe.flows, row, strict=True)):
                        crowd = sum(one.acks * one.messages for one in row) if len(row) > 1 else 0
                        shared_us = self.load_us * crowd
                        time = self._time(flow, trial, probe.flows)
                        times[t, f, repeat] = self._disturbed(time + shared_us)
        return times

    def alive(self) -> None:
        self.signs += 1

    def reduce_times(self, sizes: Sequence[int]) -> Sequence[float]:
        return [1.0 + 40.0 * size / 1e6 for size in sizes]

    def _time(self, flow: Flow, trial: Trial, beside: Sequence[Flow]) -> float:
        alpha, bulk = self.alpha_us(*flow), self._slowest(flow, beside) * trial.bytes / 1e6
        once = alpha + trial.messages * bulk + (trial.messages - 1) * self.occupancy_share * alpha
        return trial.acks * (once + alpha)

    def _slowest(self, flow: Flow, beside: Sequence[Flow]) -> float:
        """Beta of a flow, each port shared by all that cross it."""
        shared = (beta * len(links & set(beside)) for _, beta, links in self.ports if flow in links)
        return max([self.beta(*flow), *shared])

    def _disturbed(self, time: float) -> float:
        if self._random.random() < self.outliers:
            return 5 * time
        return time * (1 + self.noise * abs(self._random.gauss(0, 1)))

    def _fluid(self, left: dict[Flow, float]) -> float:
        """When the last of the flows is done, without latencies, in us."""
        now = 0.0
        while left:
            rates = self._fair(list(left))
            step = min(left[flow] / rates[flow] for flow in left)
            now += step
            left = {f: size - rates[f] * step for f, size in left.items() if size - rates[f] * step > 1e-6}
        return now

    def _fair(self, flows: Sequence[Flow]) -> Mapping[Flow, float]:
        """Max-min fair rates in bytes/us: raise all alike; whoever meets a full resource stays there."""
        limits = [(1e6 / self.beta(*flow), frozenset([flow])) for flow in flows]
        limits += [(1e6 / beta, links & frozenset(flows)) for _, beta, links in self.ports]
        rates: dict[Flow, float] = {}
        while len(rates) < len(flows):
            shares = [
                ((capacity - sum(rates[f] for f in links if f in rates)) / len(links - rates.keys()), index)
                for index, (capacity, links) in enumerate(limits)
                if links - rates.keys()
            ]
            share, index = min(shares)
            rates.update(dict.fromkeys(limits[index][1] - rates.keys(), share))
        return rates
