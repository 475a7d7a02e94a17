"""What a program costs on a topology: simulation by discrete events with the one cost model (`synth.cost`).

A threadblock runs its steps in order. A send is ready when its threadblock has reached it, its dependency is
complete, its receive half (if any) is complete and its connection has a free FIFO slot; it starts when its
link and all ports of the link are free, and holds each from its start. Among messages that wait for a common
resource the one that was ready first goes first (ties: lower threadblock id, step number, rank). The
threadblock moves on when the link is released, the message arrives alpha + count * chunk after its start. A
receive completes when the message has arrived and its threadblock stands there with its dependency complete;
that frees the FIFO slot. Reductions take `Costs.reduce` on their rank's one engine: of those that wait for it the one
whose message arrived first goes first (ties: started first, lower link). Copies cost nothing.
One loop over nchunksperloop chunks is priced; docs/programs.md lists the assumptions.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass

from taccl.errors import CheckFailed, UsageError
from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective, bus_factor
from taccl.synth.cost import FS_PER_US, Costs, costs
from taccl.synth.program import RECEIVES, SENDS, Program
from taccl.synth.program_collective import collective_of
from taccl.synth.program_graph import ProgramGraph, graph_of
from taccl.synth.verify_execution import deadlock, execute, unmatched_messages
from taccl.synth.verify_loader_rules import structure

REASONS = (
    "start", "data", "threadblock", "dependency", "slot", "resource", "engine",
)  # fmt: skip
REDUCING = frozenset({"rrs", "rrc", "rrcs", "re"})


@dataclass(frozen=True, slots=True)
class Activity:
    """Something that takes time: a message on its way, or a reduction on a rank's engine."""

    kind: str  # "message" | "reduce"
    rank: int  # that sends, or reduces
    threadblock: int
    step: int
    line: int
    count: int  # chunks
    ready_fs: int  # when only link and ports, or the engine, were missing
    start_fs: int
    end_fs: int  # arrival, or the sum is there
    after: int  # index of the activity whose progress let this one start, -1: none, it started at 0
    reason: str  # what came last: one of REASONS
    dst: int = -1  # messages: receiving rank
    channel: int = -1
    link: int = -1  # index into Topology.links
    release_fs: int = 0  # messages: the sending threadblock moves on


@dataclass(frozen=True, slots=True)
class Simulation:
    """The price of a program at one size. Activities stand in the order of their starts."""

    collective: Collective
    size_bytes: int
    time_fs: int  # completion of the last step
    activities: tuple[Activity, ...]
    busy_fs: tuple[int, ...]  # per resource id of synth.cost: links, then ports
    bottleneck: int  # the resource that is busy longest, -1 without messages
    critical_path: tuple[
        int, ...
    ]  # activities that lead to the end, first to last, each after the one before

    @property
    def algbw_gbps(self) -> float:
        """Size over time in GB/s (10^9 bytes), as nccl-tests prints it; 0 if nothing takes time."""
        return 0.0 if not self.time_fs else self.size_bytes * 10**6 / self.time_fs

    @property
    def busbw_gbps(self) -> float:
        """algbw times the collective's factor of nccl-tests."""
        return self.algbw_gbps * float(bus_factor(self.collective.name, self.collective.group_ranks))


def resource_name(topology: Topology, resource: int) -> str:
    """A resource id of synth.cost in words."""
    if resource < 0:
        return "none"
    if resource < len(topology.links):
        link = topology.links[resource]
        return f"link {resource} ({link.src}->{link.dst}, {link.kind})"
    return f"port {topology.ports[resource - len(topology.links)].name}"


def simulate(
    program: Program, topology: Topology, size_bytes: int, *, collective: Collective | None = None
) -> Simulation:
    """Price one run of a program on a topology.

    size_bytes: nccl-tests size of the collective. collective: needed when the program's attributes do not
    name one (alltoallv, custom). O(m log m) for m messages.
    Raises CheckFailed for a program that cannot run (unmatched messages, deadlock), UsageError when the
    topology has other ranks or lacks a link that the program uses.
    """
    broken = [finding for finding in structure(program) if finding.severity == "error"]
    if broken:
        raise CheckFailed(broken[0].message)
    if collective is None:
        collective = collective_of(program.collective, program.ranks, program.chunks_per_loop, program.root)
    if not topology.ranks == program.ranks == collective.ranks:
        raise UsageError(
            f"the program has {program.ranks} ranks, its collective {collective.ranks}, the topology "
            f"{topology.name} {topology.ranks}: all three must agree"
        )
    if size_bytes < 0:
        raise UsageError(f"the size must not be negative, it is {size_bytes}")
    graph = graph_of(program)
    unmatched = unmatched_messages(graph)
    if unmatched:
        raise CheckFailed(unmatched[0].message)
    order, stuck = execute(graph)
    if stuck:
        raise CheckFailed(deadlock(graph, order, stuck).message)
    link_of = _links(graph, topology)
    price = costs(topology, collective.chunk_bytes(size_bytes))
    run = _Run(graph, price, link_of)
    run.to_the_end()
    return _summary(collective, size_bytes, run)


def _links(graph: ProgramGraph, topology: Topology) -> dict[int, int]:
    """The link of each send: among parallel ones, channel modulo their number, by id."""
    parallel: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, link in enumerate(topology.links):
        parallel[link.src, link.dst].append(index)
    link_of = {}
    for (source, destination, channel), (sends, _) in graph.connections.items():
        links = parallel.get((source, destination))
        if not links:
            raise UsageError(
                f"{graph.where(sends[0])}: sends from rank {source} to rank {destination}, between which "
                f"{topology.name} has no link"
            )
        for send in sends:
            link_of[send] = links[channel % len(links)]
    return link_of


# Events of one instant: everything that happens is taken in before any message or reduction starts.
_RELEASED, _ARRIVED, _FREE, _REDUCED = range(4)
# Where a threadblock stands in its current step.
_ARRIVING, _STANDING, _RECEIVED, _QUEUED = range(4)

# A ready message: (since, threadblock, step number, rank, index of the step, resource it waited for or -1)
_Ready = tuple[int, int, int, int, int, int]
# What waits for its rank's engine: (its message's arrival, start and link, step number, threadblock, index of the
# step, since). Of `re`, which has no message, the arrival is when its threadblock came to it.
_Reduction = tuple[int, int, int, int, int, int, int]


class _Run:
    """The state of one simulation."""

    def __init__(self, graph: ProgramGraph, price: Costs, link_of: dict[int, int]) -> None:
        self.graph, self.price, self.link_of = graph, price, link_of
        self.now = 0
        self.end = 0
        self.last = -1  # activity that was the last to end
        self.position = [first for first, _ in graph.threadblocks]
        self.phase = [_ARRIVING] * len(graph.threadblocks)
        self.done = bytearray(len(graph.steps))
        self.received = bytearray(len(graph.steps))
        self.arrived = bytearray(len(graph.steps))  # of a send: its message is there
        self.waiting: defaultdict[tuple[str, int], list[int]] = defaultdict(list)  # (for what, step)
        # Threadblocks that may go on, with the activity and the reason that let them.
        self.work: deque[tuple[int, int, str]] = deque()
        self.events: list[tuple[int, int, int]] = []
        self.free_at = [0] * price.resources
        self.busy = [0] * price.resources
        self.holder = [-1] * price.resources  # activity that held it last
        self.ready: list[_Ready] = []
        self.blocked: defaultdict[int, list[_Ready]] = defaultdict(list)  # heaps
        self.freed: list[int] = []  # resources freed at this instant
        self.reductions: defaultdict[int, list[_Reduction]] = defaultdict(list)  # per rank: heaps
        self.engine_free_at: defaultdict[int, int] = defaultdict(int)
        self.engine_holder: dict[int, int] = {}
        self.activities: list[Activity] = []
        self.message_of: dict[int, int] = {}  # step -> activity
        self.reduction_of: dict[int, int] = {}
        self.cause: dict[int, tuple[int, str]] = {}  # of a queued step

    def to_the_end(self) -> None:
        """Process all events; a program that `execute` brings to its end reaches it here too."""
        self.work.extend((block, -1, "start") for block in range(len(self.position)))
        self.settle()
        while self.events:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, kind, payload = heapq.heappop(self.events)
                self.happen(kind, payload)
            self.settle()

    def settle(self) -> None:
        """Let threadblocks run as far as they can at this instant, then start what is free to start."""
        while self.work:
            self.advance(*self.work.popleft())
        for rank, queue in self.reductions.items():
            if queue and self.engine_free_at[rank] <= self.now:
                self.start_reduction(rank)
        for resource in self.freed:
            self.offer(resource)
        self.freed.clear()
        while self.ready:
            entry = heapq.heappop(self.ready)
            link = self.link_of[entry[4]]
            busy = next((r for r, _ in self.price.holds[link] if self.free_at[r] > self.now), None)
            if busy is not None:
                heapq.heappush(self.blocked[busy], (*entry[:5], busy))
            else:
                self.start_message(entry, link)
            if entry[5] >= 0:
                self.offer(entry[5])

    def offer(self, resource: int) -> None:
        """Let the first of those that wait for a resource compete, if it is still free."""
        if self.free_at[resource] <= self.now and self.blocked[resource]:
            heapq.heappush(self.ready, heapq.heappop(self.blocked[resource]))

    def happen(self, kind: int, payload: int) -> None:
        """An event: a release, an arrival or a reduction's end (payload: step), a freed resource."""
        if kind == _FREE:
            self.freed.append(payload)
            return
        self.end = self.now
        block = self.graph.threadblock_of[payload]
        if kind == _ARRIVED:
            self.last = self.message_of[payload]
            self.arrived[payload] = 1
            self.wake("message", payload, self.last, "data")
        elif kind == _RELEASED:
            self.last = self.message_of[payload]
            self.complete(payload, self.last)
            self.work.append((block, self.last, "threadblock"))
        else:
            self.last = self.reduction_of[payload]
            if self.graph.steps[payload].kind == "re":
                self.complete(payload, self.last)
            else:
                self.receive(payload, self.last)
            self.work.append((block, self.last, "data"))

    def wake(self, what: str, step: int, activity: int, reason: str) -> None:
        """Let the threadblocks go on that wait for this."""
        self.work.extend((block, activity, reason) for block in self.waiting.pop((what, step), ()))

    def complete(self, step: int, activity: int) -> None:
        """A step is done: its threadblock stands at the next, its dependents may start."""
        block = self.graph.threadblock_of[step]
        self.done[step] = 1
        self.position[block] += 1
        self.phase[block] = _ARRIVING
        self.wake("step", step, activity, "dependency")

    def receive(self, step: int, activity: int) -> None:
        """The receive half of a step is done: its FIFO slot is free."""
        self.received[step] = 1
        self.phase[self.graph.threadblock_of[step]] = _RECEIVED
        self.wake("slot", step, activity, "slot")

    def advance(self, block: int, activity: int, reason: str) -> None:
        """Run a threadblock until it waits."""
        graph = self.graph
        while self.position[block] < graph.threadblocks[block][1]:
            step = self.position[block]
            kind, count = graph.steps[step].kind, graph.steps[step].count
            rank, threadblock, number = graph.places[step]
            if self.phase[block] == _ARRIVING:
                need = graph.needs[step]
                if need >= 0 and not self.done[need]:
                    self.waiting["step", need].append(block)
                    return
                self.phase[block] = _STANDING
            if self.phase[block] == _STANDING:
                if kind in RECEIVES and not self.arrived[graph.source[step]]:
                    self.waiting["message", graph.source[step]].append(block)
                    return
                if kind in REDUCING and self.price.reduce(count):
                    came = (self.now, self.now, -1)
                    if kind in RECEIVES:
                        message = self.activities[self.message_of[graph.source[step]]]
                        came = (message.end_fs, message.start_fs, message.link)
                    heapq.heappush(self.reductions[rank], (*came, number, threadblock, step, self.now))
                    self.cause[step] = (activity, reason)
                    self.phase[block] = _QUEUED
                    return
                if kind in RECEIVES:
                    self.receive(step, activity)
                self.phase[block] = _RECEIVED
            if kind in SENDS:
                slot = graph.slot[step]
                if slot >= 0 and not self.received[slot]:
                    self.waiting["slot", slot].append(block)
                    return
                heapq.heappush(self.ready, (self.now, threadblock, number, rank, step, -1))
                self.cause[step] = (activity, reason)
                self.phase[block] = _QUEUED
                return
            self.complete(step, activity)

    def start_reduction(self, rank: int) -> None:
        *_, number, threadblock, step, since = heapq.heappop(self.reductions[rank])
        count = self.graph.steps[step].count
        end = self.now + self.price.reduce(count)
        after, reason = self.cause.pop(step)
        if since < self.now:
            after, reason = self.engine_holder[rank], "engine"
        self.reduction_of[step] = self.engine_holder[rank] = len(self.activities)
        self.activities.append(Activity(
            "reduce", rank, threadblock, number, self.graph.steps[step].line, count, since, self.now, end,
            after, reason,
        ))  # fmt: skip
        self.engine_free_at[rank] = end
        heapq.heappush(self.events, (end, _REDUCED, step))

    def start_message(self, entry: _Ready, link: int) -> None:
        since, threadblock, number, rank, step, _ = entry
        price, sent = self.price, self.graph.steps[step]
        end = self.now + price.transit(link, sent.count)
        after, reason = self.cause.pop(step)
        if since < self.now:
            last = max(price.holds[link], key=lambda hold: self.free_at[hold[0]])[0]
            after, reason = self.holder[last], "resource"
        index = self.message_of[step] = len(self.activities)
        for resource, per_chunk in price.holds[link]:
            hold = price.hold(link, per_chunk, sent.count)
            self.free_at[resource] = self.now + hold
            self.busy[resource] += hold
            self.holder[resource] = index
            heapq.heappush(self.events, (self.now + hold, _FREE, resource))
        receiver = self.graph.places[self.graph.target[step]][0]
        channel = self.graph.channel_of(step)
        self.activities.append(Activity(
            "message", rank, threadblock, number, sent.line, sent.count, since, self.now, end, after, reason,
            receiver, channel, link, self.free_at[link],
        ))  # fmt: skip
        heapq.heappush(self.events, (self.free_at[link], _RELEASED, step))
        heapq.heappush(self.events, (end, _ARRIVED, step))


def _summary(collective: Collective, size_bytes: int, run: _Run) -> Simulation:
    path = []
    index = run.last
    while index >= 0:
        path.append(index)
        index = run.activities[index].after
    busiest = max(range(len(run.busy)), key=lambda r: (run.busy[r], -r), default=-1)
    if busiest >= 0 and not run.busy[busiest]:
        busiest = -1
    return Simulation(
        collective,
        size_bytes,
        run.end,
        tuple(run.activities),
        tuple(run.busy),
        busiest,
        tuple(reversed(path)),
    )


def time_us(simulation: Simulation) -> float:
    """The simulated time in us."""
    return simulation.time_fs / FS_PER_US
