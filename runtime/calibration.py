"""Where the model is off: each message of a run beside the same message in the simulation.

Every rank notes when it hands a message over and when one has arrived. Clocks of different hosts are brought together
by the quickest of a few exchanges with rank 0, so a time is wrong by less than half a round trip. The simulator says of
the same message when it is ready and when it arrives (`synth/simulate.py`), queueing for links and ports included.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from taccl.profiles.topology import Topology
from taccl.runtime.job import Job
from taccl.runtime.plan import Plan
from taccl.runtime.trace import Trace
from taccl.synth.collective import Collective
from taccl.synth.cost import FS_PER_US
from taccl.synth.program import Program
from taccl.synth.simulate import simulate

EXCHANGES = 5  # of clocks, with each rank

Mark = tuple[int, float]  # operation of a plan, seconds: a send is handed over, a receive has arrived
Message = tuple[int, int, int]  # source, destination, tag
Span = tuple[float, float]  # us since the start of the run


@dataclass(frozen=True, slots=True)
class Part:
    """The messages of one class of links, or all that cross one port."""

    name: str
    messages: int
    bytes: int
    predicted: (
        Span  # of a class the medians of (ready, arrival - ready); of a port (first ready, last arrival)
    )
    measured: Span


@dataclass(frozen=True, slots=True)
class Calibration:
    """One run, out of place or in place as the last timed one was."""

    size_bytes: int
    classes: tuple[Part, ...]
    ports: tuple[Part, ...]


def spans(job: Job, plan: Plan, marks: Sequence[Mark]) -> dict[Message, Span]:
    """When each message of the last run was handed over and arrived, in us on one clock (collective)."""
    offset = _offset_s(job)
    mine = np.full((len(marks), 5), -1.0)
    for row, (number, seconds) in enumerate(marks):
        op = plan.operations[number]
        ends = (job.rank, op.peer) if op.kind == "send" else (op.peer, job.rank)
        mine[row] = (op.kind == "recv", *ends, op.tag, (seconds - offset) * 1e6)
    most = int(job.reduce(np.array([len(marks)]), "max")[0])
    padded = np.full((most, 5), -1.0)
    padded[: len(mine)] = mine
    everyone = job.gather_bytes(padded.reshape(-1).view(np.uint8), "the comparison with the model")
    table = everyone.view(np.float64).reshape(-1, 5)
    times: list[dict[Message, float]] = [{}, {}]
    for arrived, source, destination, tag, us in table[table[:, 0] >= 0].tolist():
        times[int(arrived)][int(source), int(destination), int(tag)] = us
    first = min(times[0].values(), default=0.0)
    return {key: (times[0][key] - first, times[1][key] - first) for key in times[0] if key in times[1]}


def _offset_s(job: Job) -> float:
    """How far this rank's clock is ahead of rank 0's (collective)."""
    token, offset = np.zeros(1), 0.0
    job.watchdog.doing("it waits for the other ranks in the comparison of clocks")
    for rank in range(1, job.ranks):
        best = float("inf")
        for _ in range(EXCHANGES):
            began = time.perf_counter()
            if job.rank == 0:
                job.control.Recv(token, rank)
                token[0] = time.perf_counter()
                job.control.Send(token, rank)
            elif job.rank == rank:
                job.control.Send(token, 0)
                job.control.Recv(token, 0)
                ended = time.perf_counter()
                if ended - began < best:
                    best, offset = ended - began, (began + ended) / 2 - float(token[0])
    job.watchdog.doing(None)
    return offset


def calibration(
    program: Program,
    collective: Collective,
    order: Trace,
    topology: Topology,
    size_bytes: int,
    measured: Mapping[Message, Span],
) -> Calibration:
    """The messages of a run beside those of its simulation, by class of links and by port."""
    simulated = simulate(program, topology, size_bytes, collective=collective)
    index = {(gpu.rank, tb.id): n for gpu in program.gpus for n, tb in enumerate(gpu.threadblocks)}
    chunk = float(collective.chunk_bytes(size_bytes))
    by_class: defaultdict[str, list[tuple[int, Span, Span]]] = defaultdict(list)
    by_port: defaultdict[str, list[tuple[int, Span, Span]]] = defaultdict(list)
    for activity in simulated.activities:
        if activity.kind != "message":
            continue
        tag = order.send_tag[activity.rank, index[activity.rank, activity.threadblock], activity.step]
        found = measured.get((activity.rank, activity.dst, tag))
        if found is None:
            continue
        said = activity.ready_fs / FS_PER_US, activity.end_fs / FS_PER_US
        entry = round(activity.count * chunk), said, found
        link = topology.links[activity.link]
        by_class[link.kind].append(entry)
        for port in link.ports:
            by_port[topology.ports[port].name].append(entry)

    def part(name: str, entries: list[tuple[int, Span, Span]], of_port: bool) -> Part:
        def both(spans: Iterable[Span]) -> Span:
            listed = list(spans)
            if of_port:
                return min(first for first, _ in listed), max(last for _, last in listed)
            return median(first for first, _ in listed), median(last - first for first, last in listed)

        total = sum(length for length, _, _ in entries)
        return Part(name, len(entries), total, both(e[1] for e in entries), both(e[2] for e in entries))

    return Calibration(
        size_bytes,
        tuple(part(name, by_class[name], False) for name in sorted(by_class)),
        tuple(part(name, by_port[name], True) for name in sorted(by_port)),
    )


def lines(found: Calibration) -> list[str]:
    """The report below the table, as comments."""
    width = max([12, *(len(p.name) for p in (*found.classes, *found.ports))])
    head = f"# {'':<{width}}  {'messages':>8}  {'MB':>9}"
    text = [
        f"# the model beside a run of {found.size_bytes} bytes (us)",
        f"{head}  {'ready':>22}  {'on their way':>22}  {'ratio':>6}",
        f"# {'class':<{width}}  {'':>8}  {'':>9}" + f"  {'predicted':>10}  {'measured':>10}" * 2,
    ]
    for p in found.classes:
        ratio = p.measured[1] / p.predicted[1] if p.predicted[1] else float("inf")
        text.append(
            f"# {p.name:<{width}}  {p.messages:>8}  {p.bytes / 1e6:>9.3f}  {p.predicted[0]:>10.1f}  "
            f"{p.measured[0]:>10.1f}  {p.predicted[1]:>10.1f}  {p.measured[1]:>10.1f}  {ratio:>6.2f}"
        )
    if found.ports:
        text.append(f"# {'port':<{width}}  {'':>8}  {'':>9}  {'first ready':>22}  {'last arrival':>22}")
    for p in found.ports:
        ratio = p.measured[1] / p.predicted[1] if p.predicted[1] else float("inf")
        text.append(
            f"# {p.name:<{width}}  {p.messages:>8}  {p.bytes / 1e6:>9.3f}  {p.predicted[0]:>10.1f}  "
            f"{p.measured[0]:>10.1f}  {p.predicted[1]:>10.1f}  {p.measured[1]:>10.1f}  {ratio:>6.2f}"
        )
    return text


def document(found: Calibration) -> dict[str, Any]:
    """The report in the JSON of `taccl run`."""

    def parts(of: tuple[Part, ...], first: str, second: str) -> list[dict[str, Any]]:
        return [
            {
                "name": p.name, "messages": p.messages, "bytes": p.bytes,
                f"predicted_{first}_us": round(p.predicted[0], 3),
                f"predicted_{second}_us": round(p.predicted[1], 3),
                f"measured_{first}_us": round(p.measured[0], 3),
                f"measured_{second}_us": round(p.measured[1], 3),
            }
            for p in of
        ]  # fmt: skip

    return {
        "classes": parts(found.classes, "ready", "transit"),
        "ports": parts(found.ports, "first_ready", "last_arrival"),
    }
