"""Why an algorithm takes its time: critical path, busiest resources, the cut that bounds it, remedies.

Works on timed algorithms (their messages) and on programs (the simulator's activities). Remedies are changes
of the topology; each is judged by the lower bound there and by running the same algorithm on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from taccl.errors import UsageError
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm, Message
from taccl.synth.bounds import Bound, lower_bound
from taccl.synth.bounds.compose import counting_bound
from taccl.synth.candidates import exchanges_hold
from taccl.synth.collective import Collective, Groups
from taccl.synth.cost import Costs, costs, us
from taccl.synth.explain_changes import changes
from taccl.synth.gap import gap
from taccl.synth.program import Program
from taccl.synth.schedule import as_carried, as_transfers, completion_fs, completions, time_in_order
from taccl.synth.simulate import Activity, Simulation, simulate

MAX_LOADS = 8
# On so many ranks linear programs answer at once; beyond, changes are judged by counting if that is as close.
QUICK_RANKS = 16
CLOSE = 0.95

REASON_TEXT = {
    "start": "nothing to wait for",
    "data": "its data arrived",
    "threadblock": "its threadblock was busy with the step before",
    "dependency": "the step that it depends on was done",
    "slot": "the receiver freed a FIFO slot",
    "resource": "the link or port fell free",
    "engine": "the rank's reduction before it ended",
    "idle": "no visible reason: the schedule leaves a pause",
}


@dataclass(frozen=True, slots=True)
class Leg:
    """One message or reduction of the critical path."""

    kind: str  # "message" | "reduce"
    src: int
    dst: int
    link: int  # index into Topology.links, -1 for reductions
    chunks: int
    waited_us: float  # between its data being at hand and its start
    start_us: float
    end_us: float
    reason: str  # why it did not start earlier: a key of REASON_TEXT
    resource: str  # what it waited for, when reason is "resource"


@dataclass(frozen=True, slots=True)
class Load:
    """How long a resource is held, and the share of the whole time that this is."""

    resource: str
    busy_us: float
    utilisation: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """What a change of the topology would do."""

    change: str
    bound_us: float
    time_us: float  # the same algorithm, its order kept, on the changed topology


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `explain`; remedies stand in the order of their gain in the bound, then in the time."""

    name: str
    collective: str
    topology: str
    ranks: int
    size_bytes: int
    time_us: float
    bound: Bound
    path: tuple[Leg, ...]
    loads: tuple[Load, ...]
    remedies: tuple[Remedy, ...]
    without_effect: tuple[str, ...]  # changes that were tried, and lower neither the bound nor the time
    groups: Groups = ()  # of ranks, that each do the collective; (): all ranks are one

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return gap(self.time_us, self.bound.time_us)


def explain(
    subject: Program | Algorithm,
    topology: Topology,
    size_bytes: int,
    collective: Collective | None = None,
    bound: Bound | None = None,
) -> Explanation:
    """Explain a program or a timed algorithm on a topology at an nccl-tests size.

    An algorithm at another size than its own keeps the order of its messages and is timed again.
    collective: as for `simulate`, when a program does not name its own. bound: for any algorithm, where it is known.
    Raises UsageError when the ranks differ, CheckFailed for a program that cannot run, ValueError when some data
    cannot reach its destination.
    """
    if isinstance(subject, Algorithm):
        return _of_algorithm(subject, topology, size_bytes, bound)
    simulation = simulate(subject, topology, size_bytes, collective=collective)
    path = tuple(_activity_leg(topology, simulation, index) for index in simulation.critical_path)

    def again(changed: Topology) -> int:
        return simulate(subject, changed, size_bytes, collective=collective).time_fs

    return _explanation(
        subject.name, topology, simulation.collective, size_bytes, simulation.time_fs, path,
        simulation.busy_fs, again, bound,
    )  # fmt: skip


def critical_path(topology: Topology, messages: Sequence[Message], prices: Costs) -> tuple[Leg, ...]:
    """The chain of messages and reductions that ends last, each held up by the one before it."""
    usable = completions(prices, messages)
    if not messages:
        return ()
    releases = [
        {r: m.start_fs + prices.hold(m.link, hold, len(m.chunks)) for r, hold in prices.holds[m.link]}
        for m in messages
    ]
    arrivals: dict[tuple[int, int, int], list[int]] = {}  # (rank, chunk, sum) -> messages into it
    holders: dict[int, list[int]] = {}  # resource -> messages that hold it
    for index, m in enumerate(messages):
        for chunk in m.chunks:
            for place in m.into:
                arrivals.setdefault((m.dst, chunk, place), []).append(index)
        for resource in releases[index]:
            holders.setdefault(resource, []).append(index)

    def fed(index: int) -> tuple[int, int]:
        """(when the message's data was at hand, the message that brought the last of it or -1)."""
        m = messages[index]
        carried = [(m.src, chunk, m.sum) for chunk in m.chunks]
        feeding = {i for place in carried for i in arrivals.get(place, ()) if usable[i] <= m.start_fs}
        return max(((usable[i], i) for i in feeding), default=(0, -1))

    legs: list[Leg] = []
    index = max(range(len(messages)), key=lambda i: (usable[i], -i))
    while index >= 0:
        m = messages[index]
        ready, feeder = fed(index)
        freed = max(
            (
                (releases[i][r], i, r)
                for r in releases[index]
                for i in holders[r]
                if i != index and releases[i][r] <= m.start_fs and messages[i].start_fs < m.start_fs
            ),
            default=(0, -1, -1),
        )
        if m.start_fs == 0:
            reason, before, held = "start", -1, ""
        elif feeder >= 0 and ready == m.start_fs:
            reason, before, held = "data", feeder, ""
        elif freed[1] >= 0 and freed[0] == m.start_fs:
            reason, before, held = "resource", freed[1], resource_text(topology, freed[2])
        else:
            reason, before, held = "idle", feeder if ready >= freed[0] else freed[1], ""
        if usable[index] > m.end_fs:
            legs.append(
                Leg(
                    "reduce",
                    m.dst,
                    m.dst,
                    -1,
                    len(m.chunks),
                    0.0,
                    us(m.end_fs),
                    us(usable[index]),
                    "data",
                    "",
                )
            )
        legs.append(
            Leg(
                "message",
                m.src,
                m.dst,
                m.link,
                len(m.chunks),
                us(m.start_fs - ready),
                us(m.start_fs),
                us(m.end_fs),
                reason,
                held,
            )
        )
        index = before
    return tuple(reversed(legs))


def resource_text(topology: Topology, resource: int) -> str:
    """A resource id of synth.cost as it is called in bounds and explanations."""
    if resource < len(topology.links):
        link = topology.links[resource]
        return f"link {link.src}->{link.dst}"
    return topology.ports[resource - len(topology.links)].name


def _of_algorithm(
    algorithm: Algorithm, topology: Topology, size_bytes: int, bound: Bound | None
) -> Explanation:
    collective = algorithm.collective
    if collective.ranks != topology.ranks:
        raise UsageError(
            f"the algorithm has {collective.ranks} ranks, the topology {topology.name} {topology.ranks}"
        )
    joined = {(link.src, link.dst) for link in topology.links}
    for m in algorithm.messages:
        if not m.link < len(topology.links) or (
            (topology.links[m.link].src, topology.links[m.link].dst) != (m.src, m.dst)
        ):
            missing = "no link" if (m.src, m.dst) not in joined else "other link numbers"
            raise UsageError(
                f"the algorithm sends from rank {m.src} to rank {m.dst} over link {m.link}, but the topology "
                f"{topology.name} has {missing} there; give the topology that it was made for"
            )

    own = costs(topology, algorithm.chunk_bytes)
    transfers = as_carried(algorithm.messages, completions(own, algorithm.messages))

    def timed(on: Topology) -> tuple[tuple[Message, ...], Costs]:
        on = replace(on, links=tuple(on.links))  # to be looked at one by one
        prices = costs(on, collective.chunk_bytes(size_bytes))
        found = time_in_order(on, collective, prices, transfers)
        if transfers and transfers[0].after is not None and not exchanges_hold(prices, transfers, found):
            found = time_in_order(on, collective, prices, as_transfers(algorithm.messages))
        return found, prices

    prices = costs(topology, collective.chunk_bytes(size_bytes))
    messages: tuple[Message, ...] = algorithm.messages
    if any(m.end_fs != m.start_fs + prices.transit(m.link, len(m.chunks)) for m in messages):
        messages, prices = timed(topology)
    busy = [0] * prices.resources
    for m in messages:
        for resource, hold in prices.holds[m.link]:
            busy[resource] += prices.hold(m.link, hold, len(m.chunks))

    def again(changed: Topology) -> int:
        moved, changed_prices = timed(changed)
        # A change for the better does not make an algorithm slower that may start its messages as before.
        return min(completion_fs(changed_prices, moved), completion_fs(prices, messages))

    return _explanation(
        algorithm.name, topology, collective, size_bytes, completion_fs(prices, messages),
        critical_path(topology, messages, prices), busy, again, bound,
    )  # fmt: skip


def _activity_leg(topology: Topology, simulation: Simulation, index: int) -> Leg:
    activity = simulation.activities[index]
    resource = ""
    if activity.reason == "resource" and activity.after >= 0:
        resource = _shared(topology, activity, simulation.activities[activity.after])
    dst = activity.dst if activity.kind == "message" else activity.rank
    return Leg(
        activity.kind, activity.rank, dst, activity.link, activity.count,
        us(activity.start_fs - activity.ready_fs), us(activity.start_fs), us(activity.end_fs),
        activity.reason, resource,
    )  # fmt: skip


def _shared(topology: Topology, one: Activity, other: Activity) -> str:
    if one.link < 0 or other.link < 0:
        return ""
    if one.link == other.link:
        return resource_text(topology, one.link)
    common = sorted(set(topology.links[one.link].ports) & set(topology.links[other.link].ports))
    return topology.ports[common[0]].name if common else ""


def _explanation(
    name: str,
    topology: Topology,
    collective: Collective,
    size_bytes: int,
    time_fs: int,
    path: tuple[Leg, ...],
    busy: Sequence[int],
    again: Callable[[Topology], int],
    known: Bound | None,
) -> Explanation:
    bound = known or lower_bound(topology, collective, size_bytes)
    loads = sorted((-held, r) for r, held in enumerate(busy) if held)[:MAX_LOADS]
    on_path = list(dict.fromkeys(leg.link for leg in path if leg.link >= 0))
    there, judge = _judge(topology, collective, size_bytes, bound)
    tried: list[Remedy] = []
    for one_of in changes(topology, bound, on_path):
        judged = [(judge(change.topology), change) for change in one_of]
        bound_fs, best = min(judged, key=lambda found: found[0])
        bound_us = us(bound_fs) if bound_fs < there else bound.time_us
        tried.append(Remedy(best.text, min(bound_us, bound.time_us), us(again(best.topology))))
    helpful = [r for r in tried if r.bound_us < bound.time_us or r.time_us < us(time_fs)]
    return Explanation(
        name, collective.name, topology.name, topology.ranks, size_bytes, us(time_fs), bound, path,
        tuple(Load(resource_text(topology, r), us(-held), -held / max(1, time_fs)) for held, r in loads),
        tuple(sorted(helpful, key=lambda r: (r.bound_us, r.time_us, r.change))),
        tuple(r.change for r in tried if r not in helpful), collective.groups,
    )  # fmt: skip


def _judge(
    topology: Topology, collective: Collective, size_bytes: int, bound: Bound
) -> tuple[int, Callable[[Topology], int]]:
    """The bound to compare with, and a function from a changed topology to the bound there, both in fs.

    Linear programs take seconds on a few nodes, so for more than QUICK_RANKS ranks counting over cuts speaks where it
    comes close to them here; like is compared with like.
    """
    if topology.ranks > QUICK_RANKS:
        counted = counting_bound(topology, collective, size_bytes, "fluid")
        if counted is not None and counted.time_fs >= CLOSE * bound.time_fs:

            def count(changed: Topology) -> int:
                found = counting_bound(changed, collective, size_bytes, "fluid")
                return counted.time_fs if found is None else found.time_fs

            return counted.time_fs, count
    return bound.time_fs, lambda changed: lower_bound(changed, collective, size_bytes).time_fs
