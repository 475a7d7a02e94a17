"""Flows as threads on one machine, with latency and bandwidth injected: a cluster without any rights.

A sender reserves time on everything its bytes cross, piece by piece, and sleeps until it has passed; the
receiver's reply comes after the latencies. Concurrency, its delays and its noise are real; only the wire is
not. It has the interface of a prober.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from taccl.profiles.measure.probe import Probe, Times, Trial

Flow = tuple[int, int]

_PIECE = 16384  # flows that share something take turns at this grain


class LoopbackProber:
    """alpha_us and beta (us/MB) of each directed pair; ports: (beta, links that cross it)."""

    def __init__(
        self,
        hosts: Sequence[str],
        alpha_us: Callable[[int, int], float],
        beta: Callable[[int, int], float],
        ports: Sequence[tuple[float, frozenset[Flow]]],
    ) -> None:
        self.hosts = hosts
        self.cores = [64] * len(hosts)
        self.receivers_work = False
        self.devices = None
        self._alpha_us = alpha_us
        self._beta = beta
        self._ports = ports
        self._lock = threading.Lock()
        self._free: dict[object, float] = {}  # when each link and port is free again

    def run(self, probe: Probe) -> Times:
        times = np.empty((len(probe.trials), len(probe.flows), probe.repeats))
        for t, row in enumerate(probe.trials):
            for repeat in range(probe.repeats):
                times[t, :, repeat] = self._side_by_side(probe, row)
        return times

    def alive(self) -> None:
        return

    def reduce_times(self, sizes: Sequence[int]) -> Sequence[float]:
        return [1.0 + 40.0 * size / 1e6 for size in sizes]

    def _side_by_side(self, probe: Probe, row: Sequence[Trial]) -> list[float]:
        elapsed = [0.0] * len(row)
        gate = threading.Barrier(len(row) + 1)

        def work(slot: int) -> None:
            gate.wait()
            start = time.perf_counter()
            self._do(probe.flows[slot], row[slot])
            elapsed[slot] = (time.perf_counter() - start) * 1e6

        threads = [threading.Thread(target=work, args=(slot,)) for slot in range(len(row))]
        for thread in threads:
            thread.start()
        start = time.perf_counter()
        gate.wait()
        for thread in threads:
            thread.join()
        if not probe.together:
            return elapsed
        # The common start and end would cost two latencies on a real network.
        handshake = 2 * max(self._alpha_us(*flow) for flow in probe.flows)
        return [(time.perf_counter() - start) * 1e6 + handshake] * len(row)

    def _do(self, flow: Flow, trial: Trial) -> None:
        alpha_s = self._alpha_us(*flow) / 1e6
        for _ in range(trial.acks):
            last = 0.0
            for _ in range(trial.messages):
                left = trial.bytes
                while left > 0:
                    last = self._reserve(flow, min(left, _PIECE))
                    left -= _PIECE
                    _sleep_until(last)
            _sleep_until(last + 2 * alpha_s)  # the way there and the reply

    def _reserve(self, flow: Flow, size: int) -> float:
        """When these bytes have passed everything that the flow crosses."""
        needs: list[tuple[object, float]] = [(flow, self._beta(*flow))]
        needs += [(id(links), beta) for beta, links in self._ports if flow in links]
        with self._lock:
            start = max([time.perf_counter(), *(self._free.get(thing, 0.0) for thing, _ in needs)])
            for thing, beta in needs:
                self._free[thing] = start + beta * size / 1e12
        return start + max(beta for _, beta in needs) * size / 1e12


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
