"""What is asked of the machine and what it answers: the one door between measuring and transports.

A `Prober` moves bytes between ranks and takes times; it decides nothing. All decisions (what to measure
next, what the times mean) are taken on one place from these answers, so that the same code measures real
ranks over MPI, threads with injected delays, and simulated clusters in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.measure.devices import Devices

TINY_BYTES = 8  # a message whose size costs nothing: what the latency is taken from

_LONG_US = 8_000.0

Times = NDArray[np.float64]  # us, shape (trials, flows, repeats)


@dataclass(frozen=True, slots=True)
class Trial:
    """`acks` times in a row: `messages` messages of `bytes` posted together, answered by one tiny reply.

    The three formulas of the method are three shapes of it: one after another = (n acks, 1 message),
    posted together = (1 ack, n messages), one message of n chunks = (1 ack, 1 message of n times the bytes).
    """

    acks: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Flows that run at the same time, and what each of them does.

    `trials[t][f]` is trial t of flow f. With `together` all flows of a trial start at once, and each is one
    message; ranks may then take part in several flows, and the time is that from the common start until all
    are known to be done, the same for every flow. `rates` are then those in bytes/s that each flow's sender
    keeps to, where its wire can, and `first` the rank with the clock, from which others hear of the start.
    Otherwise the flows are disjoint pairs of ranks that go through their trials side by side, each at its own
    pace.
    """

    flows: tuple[tuple[int, int], ...]  # (src, dst)
    trials: tuple[tuple[Trial, ...], ...]
    repeats: int
    together: bool = False
    rates: tuple[int, ...] = ()
    first: int = -1  # the lowest

    @property
    def members(self) -> list[int]:
        """The ranks of its flows, the first one in front."""
        return sorted(
            {rank for flow in self.flows for rank in flow}, key=lambda rank: (rank != self.first, rank)
        )


class Prober(Protocol):
    """Ranks that can be asked to move bytes."""

    @property
    def hosts(self) -> Sequence[str]:
        """Of each rank; equal names only suggest one node."""
        ...

    @property
    def cores(self) -> Sequence[int]:
        """Processor cores of each rank's host."""
        ...

    @property
    def receivers_work(self) -> bool:
        """Whether within a host a long message is the work of its receiver alone."""
        ...

    @property
    def devices(self) -> Devices | None:
        """The ranks' devices, where messages within a host go from one's memory to another's."""
        ...

    def run(self, probe: Probe) -> Times:
        """Do the probe and give the time of each trial, flow and repeat, replies included."""
        ...

    def alive(self) -> None:
        """Called now and then while nothing is asked, so that ranks which wait for more know that there will be."""
        ...

    def reduce_times(self, sizes: Sequence[int]) -> Sequence[float]:
        """Times in us of adding one array of each size (bytes) to another on a rank."""
        ...


def in_sequence(messages: int, size: int) -> Trial:
    """n chunks one after another: T_seq = n (alpha + beta s)."""
    return Trial(messages, 1, size)


def posted_together(messages: int, size: int) -> Trial:
    """n messages posted together: T_pipe = alpha + n beta s + (n-1) occupancy."""
    return Trial(1, messages, size)


def one_message(chunks: int, size: int) -> Trial:
    """n chunks as one message: T_all = alpha + n beta s."""
    return Trial(1, 1, chunks * size)


def solo(src: int, dst: int, trials: Sequence[Trial], repeats: int) -> Probe:
    """One flow alone on the machine."""
    return Probe(((src, dst),), tuple((trial,) for trial in trials), repeats)


def typical(times: Times) -> Times:
    """One time for the repeats (last axis): the median of the faster half; of all, for long times.

    Disturbances by other work only ever add time, so the slower half says more about them than about the
    link. For a time longer than a few slices of the kernel's scheduler a disturbance is a small part, and luck
    (a pause that filled a token bucket) becomes the greater danger.
    """
    ordered = np.sort(times, axis=-1)
    half = (times.shape[-1] + 1) // 2
    middle = np.median(ordered, axis=-1)
    return np.asarray(np.where(middle > _LONG_US, middle, np.median(ordered[..., :half], axis=-1)))


def undisturbed(times: Times) -> Times:
    """One time for several sweeps (last axis): the fastest, or the median of long times."""
    middle = np.median(times, axis=-1)
    return np.asarray(np.where(middle > _LONG_US, middle, times.min(axis=-1)))
