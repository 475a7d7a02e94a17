"""MSCCL++ execution plans: a program as the JSON that MSCCL++'s executor runs.

Written for the reader of MSCCL++ (src/core/executor/execution_plan.cc and execution_kernel.hpp, 2026). MSCCL sends
through FIFOs; MSCCL++ writes straight into the receiver's buffers. So a message is a rendezvous: the receiver signals
that the place is free, the sender puts the data there and signals, the receiver waits. What is to be reduced on
arrival is put into scratch of the receiving threadblock. A program that would wait for itself that way gets the FIFO
back: messages are put into slots in scratch, copied out, and acknowledged. Ports work in the background: what is sent
through one and overwritten later must have arrived before, which the receiver confirms; with slots it is copied aside
first, so that nobody waits for more than MSCCL's kernels do. A dependency between threadblocks is a
counting semaphore of the two. `nop` is a barrier of the threads of one block; it stands between a wait and the data it
guards, and between data and the signal that tells of it. Ranks of one node use memory channels, others port channels.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from taccl.errors import CheckFailed, Infeasible, UsageError
from taccl.profiles.topology import Topology
from taccl.synth.collective import Collective
from taccl.synth.export.mscclpp_waits import Op, waits_forever
from taccl.synth.program import FIFO_DEPTH, RECEIVES, SENDS, Program, RankProgram, Step, Threadblock
from taccl.synth.program_collective import collective_of
from taccl.synth.program_graph import Connection, ProgramGraph, graph_of
from taccl.synth.verify_execution import deadlock, execute, unmatched_messages
from taccl.synth.verify_loader_rules import structure

MAX_OPS = 64  # of a threadblock
MAX_THREADBLOCKS = 80  # that the smallest GPUs hold at once
MAX_OFFSET_BYTES = 2**32 - 1  # offsets are 32 bits wide
SLOTS = FIFO_DEPTH["Simple"]
REDUCING = frozenset({"rrc", "rrs", "rrcs"})
OTHER_WAYS = "Synthesise another program (--engine, --no-batching), or convert --to msccl-xml."

Area = tuple[str, int, int]  # (buffer, offset, chunks)


def write_plan(
    program: Program, topology: Topology | None = None, collective: Collective | None = None
) -> str:
    """The JSON text of a program's plan; equal programs give equal bytes.

    topology: says which ranks share a node; None: all do. collective: needed when the program's attributes do not
    name one. A plan is either in place or out of place: in place when the program claims that. Whether the program
    is right is for `verify` to say. Raises UsageError for a topology or a collective that does not fit, CheckFailed
    for a program that cannot run, Infeasible for what plans cannot express.
    """
    if collective is None:
        try:
            collective = collective_of(
                program.collective, program.ranks, program.chunks_per_loop, program.root
            )
        except CheckFailed as error:
            raise UsageError(str(error)) from error
    # Loaders of MSCCL take 0 for the length of a buffer that the program does not touch; MSCCL++ divides by it.
    program = replace(program, gpus=tuple(
        replace(gpu, input_chunks=collective.input_chunks[gpu.rank], output_chunks=collective.output_chunks[gpu.rank])
        for gpu in sorted(program.gpus, key=lambda gpu: gpu.rank)
    ))  # fmt: skip
    broken = [finding for finding in structure(program) if finding.severity == "error"]
    if broken:
        raise CheckFailed(f"the program cannot run: {broken[0].message}")
    _refuse_what_plans_lack(program)
    if topology is not None and topology.ranks != program.ranks:
        raise UsageError(
            f"the program has {program.ranks} ranks and {topology.name} has {topology.ranks}: both must agree"
        )
    node_of = (0,) * program.ranks if topology is None else topology.node_of()
    graph = graph_of(program)
    unmatched = unmatched_messages(graph)
    if unmatched:
        raise CheckFailed(f"the program cannot run: {unmatched[0].message}")
    order, stopped = execute(graph)
    if stopped:
        raise CheckFailed(f"the program cannot run: {deadlock(graph, order, stopped).message}")
    views = collective.inplace if program.inplace else (None,) * program.ranks
    for buffered in (False, True):
        wiring = _Wiring(graph, order, views, node_of, buffered)
        gpus = [_gpu(gpu, wiring) for gpu in program.gpus]
        stuck = waits_forever(gpus)
        if stuck is None:
            break
    else:
        raise Infeasible(
            f"rank {stuck} would wait forever: the program's order of steps needs connections that hold more than "
            f"{SLOTS} messages. {OTHER_WAYS}"
        )
    chunks = max(max(gpu[key] for key in ("input_chunks", "output_chunks", "scratch_chunks")) for gpu in gpus)
    most = MAX_OFFSET_BYTES // chunks * program.chunks_per_loop
    head = {
        "name": program.name,
        "collective": program.collective,
        "protocol": "Simple",
        "inplace": program.inplace,
        "reuse_resources": False,
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": program.min_bytes,
        "max_message_size": min(program.max_bytes or most, most),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body = ",\n".join(json.dumps(gpu, separators=(",", ":")) for gpu in gpus)
    return "\n".join(["{", *lines, '"gpus": [', body, "]}"]) + "\n"


def _refuse_what_plans_lack(program: Program) -> None:
    if program.protocol != "Simple":
        raise Infeasible(
            f"protocol {program.protocol} has no counterpart here: plans are written for Simple; "
            "synthesise with --protocol Simple"
        )
    if any(step.kind in (*REDUCING, "re") for _, _, step in _steps(program)) and program.reduce_op != "sum":
        raise Infeasible(
            f"MSCCL++ plans reduce by sum only, the program by {program.reduce_op}; --to msccl-xml can say it"
        )
    for gpu in program.gpus:
        if not gpu.input_chunks or not gpu.output_chunks:
            raise Infeasible(
                f"rank {gpu.rank} has no {'output' if gpu.input_chunks else 'input'}: MSCCL++ divides both buffers "
                "of every rank into chunks, so a plan cannot express it; --to msccl-xml can"
            )


def _steps(program: Program) -> list[tuple[RankProgram, Threadblock, Step]]:
    return [(gpu, tb, step) for gpu in program.gpus for tb in gpu.threadblocks for step in tb.steps]


class _Wiring:
    """What both ends of a connection must agree on: channels, where messages land, which of them are confirmed."""

    def __init__(
        self,
        graph: ProgramGraph,
        order: list[int],
        views: tuple[tuple[int, int] | None, ...],
        node_of: tuple[int, ...],
        buffered: bool,
    ) -> None:
        """order: in which all steps can be done. views: places of input and output in the memory they share."""
        self.graph = graph
        self.views = views
        self.buffered = buffered
        # The place of each step's message among those of its connection.
        ends = graph.connections.values()
        self.sending = {index: k for sends, _ in ends for k, index in enumerate(sends)}
        self.receiving = {index: k for _, receives in ends for k, index in enumerate(receives)}
        self.kind: dict[Connection, str] = {}
        # Per rank and channel type the connections in order; the k-th of a pair of ranks meets the other's k-th.
        self.channels: dict[tuple[int, str], list[Connection]] = defaultdict(list)
        for connection in sorted(graph.connections):
            src, dst, _ = connection
            kind = self.kind[connection] = "memory" if node_of[src] == node_of[dst] else "port"
            self.channels[src, kind].append(connection)
            self.channels[dst, kind].append(connection)
        self.landing: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # (rank, threadblock) -> (offset, size) in scratch
        self.scratch: dict[int, int] = {}
        for gpu in graph.program.gpus:
            used = gpu.scratch_chunks
            for tb in gpu.threadblocks:
                landing = RECEIVES if buffered else REDUCING
                counts = [step.count for step in tb.steps if step.kind in landing]
                if counts:
                    self.landing[gpu.rank, tb.id] = (used, max(counts))
                    used += max(counts) * (SLOTS if buffered else 1)
            self.scratch[gpu.rank] = used
        ports = [sends for c, (sends, _) in graph.connections.items() if self.kind[c] == "port"]
        overwritten = self._overwritten(order, {index for sends in ports for index in sends})
        # A kernel must not end before its puts have left; slots are empty by then.
        self.confirmed = set() if buffered else overwritten | {sends[-1] for sends in ports}
        self.aside: dict[int, tuple[int, int]] = {}  # step -> (offset, chunks) in scratch of its own rank
        for sends in ports if buffered else []:
            size = max((graph.steps[index].count for index in sends if index in overwritten), default=0)
            for index in sends if size else ():
                rank = graph.places[index][0]
                if index in overwritten:
                    slot = self.sending[index] % SLOTS
                    self.aside[index] = (self.scratch[rank] + slot * size, graph.steps[index].count)
            if size:
                self.scratch[graph.places[sends[0]][0]] += SLOTS * size

    def received(self, index: int) -> Area:
        """Where the message of a receiving step is put."""
        step = self.graph.steps[index]
        rank, tb, _ = self.graph.places[index]
        if self.buffered or step.kind in REDUCING:
            offset, size = self.landing[rank, tb]
            slot = self.receiving[index] % SLOTS if self.buffered else 0
            return ("s", offset + slot * size, step.count)
        return (step.dst_buffer, step.dst_offset, step.count)

    def sent(self, index: int) -> Area:
        """Where a sending step has its message."""
        step = self.graph.steps[index]
        if step.kind == "s":
            return (step.src_buffer, step.src_offset, step.count)
        return self.received(index) if step.kind == "rrs" else (step.dst_buffer, step.dst_offset, step.count)

    def _overwritten(self, order: list[int], sends: set[int]) -> set[int]:
        """Sends whose data are overwritten later. Right programs have no races: any one order tells what is later."""
        writes: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        found = set()
        for index in reversed(order):
            rank = self.graph.places[index][0]
            if index in sends:
                buffer, first, count = self._shared(rank, self.sent(index))
                if any(a < first + count and first < b for a, b in writes[rank, buffer]):
                    found.add(index)
            for area in self._written(index):
                buffer, first, count = self._shared(rank, area)
                writes[rank, buffer].append((first, first + count))
        return found

    def _shared(self, rank: int, area: Area) -> Area:
        """The area in the memory that input and output share in place."""
        view, (buffer, offset, count) = self.views[rank], area
        return area if view is None or buffer == "s" else ("io", view["io".index(buffer)] + offset, count)

    def _written(self, index: int) -> list[Area]:
        step = self.graph.steps[index]
        areas = [self.received(index)] if step.kind in RECEIVES else []
        if step.kind in ("r", "rcs", "cpy", "re", "rrc", "rrcs"):
            areas.append((step.dst_buffer, step.dst_offset, step.count))
        return areas


def _gpu(gpu: RankProgram, wiring: _Wiring) -> dict[str, Any]:
    graph = wiring.graph
    first = {graph.places[begin][1]: begin for begin, end in graph.threadblocks
             if begin < end and graph.places[begin][0] == gpu.rank}  # fmt: skip
    # (waited-for threadblock, waiting threadblock) -> the steps waited for, in order, and the semaphore
    awaited: dict[tuple[int, int], list[int]] = defaultdict(list)
    for tb in gpu.threadblocks:
        for step in tb.steps:
            if step.depends is not None and step.depends[0] != tb.id:
                awaited[step.depends[0], tb.id].append(step.depends[1])
    pairs = {pair: sorted(set(numbers)) for pair, numbers in sorted(awaited.items())}
    semaphore = {pair: number for number, pair in enumerate(pairs)}
    handovers = len(semaphore)
    remote: dict[tuple[int, str, str], int] = {}  # (rank, buffer, channel type) -> id
    blocks: list[dict[str, Any]] = []
    for tb in gpu.threadblocks:
        writer = _Writer(gpu.rank, tb, wiring, remote)
        taken: dict[int, int] = defaultdict(int)
        for number, step in enumerate(tb.steps):
            if step.depends is not None and step.depends[0] != tb.id:
                pair = (step.depends[0], tb.id)
                wanted = pairs[pair].index(step.depends[1]) + 1
                for _ in range(wanted - taken[pair[0]]):
                    writer.guard("sem_acquire", semaphore[pair])
                taken[pair[0]] = max(taken[pair[0]], wanted)
            writer.step(first[tb.id] + number, step)
            for pair, numbers in pairs.items():
                if pair[0] == tb.id and number in numbers:
                    writer.tell("sem_release", semaphore[pair])
            writer.close()
        writer.drain()
        for part, ops in enumerate(writer.parts):
            if part:
                # A threadblock that is full goes on in another one.
                blocks[-1]["ops"] += [{"name": "nop"}, _semaphore_op("sem_release", handovers)]
                ops[:0] = [_semaphore_op("sem_acquire", handovers), {"name": "nop"}]
                handovers += 1
            blocks.append({"id": len(blocks), "ops": ops, **writer.resources()})
    if len(blocks) > MAX_THREADBLOCKS:
        raise Infeasible(
            f"rank {gpu.rank} needs {len(blocks)} threadblocks of at most {MAX_OPS} operations each, and the smallest "
            f"GPUs hold {MAX_THREADBLOCKS} at once: cut the data into fewer chunks (--partition). {OTHER_WAYS}"
        )
    return {
        "id": gpu.rank,
        "input_chunks": gpu.input_chunks,
        "output_chunks": gpu.output_chunks,
        "scratch_chunks": wiring.scratch[gpu.rank],
        "threadblocks": blocks,
        "channels": [
            {"channel_type": kind, "connected_to": [_peer(gpu.rank, c) for c in wiring.channels[gpu.rank, kind]]}
            for kind in ("memory", "port")
            if wiring.channels[gpu.rank, kind]
        ],
        "remote_buffers": [
            {"rank": rank, "type": buffer, "access_channel_types": [kind]} for rank, buffer, kind in remote
        ],
        "semaphores": [{"init_value": 0}] * handovers,
    }  # fmt: skip


def _peer(rank: int, connection: Connection) -> int:
    return connection[1] if connection[0] == rank else connection[0]


def _semaphore_op(name: str, semaphore: int) -> Op:
    return {"name": name, "semaphore_ids": [semaphore]}


def _local(area: Area) -> Op:
    return {"type": area[0], "index": area[1], "size": area[2]}


@dataclass(slots=True)
class _Writer:
    """Writes the operations of one threadblock, with barriers where its threads must meet."""

    rank: int
    tb: Threadblock
    wiring: _Wiring
    remote: dict[tuple[int, str, str], int]
    parts: list[list[Op]] = field(default_factory=lambda: [[]])
    ops: list[Op] = field(default_factory=list)  # of the step at hand
    apart: bool = False  # some threads may be ahead of others
    acks: int = 0  # messages of the sending connection that are known to be out of their slots
    own_channels: list[tuple[str, Connection]] = field(default_factory=list)
    own_remote: list[tuple[str, int]] = field(default_factory=list)

    def meet(self) -> None:
        if self.apart:
            self.ops.append({"name": "nop"})
            self.apart = False

    def guard(self, name: str, semaphore: int) -> None:
        """Wait: what follows may only be done once this is through."""
        self.ops.append(_semaphore_op(name, semaphore))
        self.apart = True

    def tell(self, name: str, semaphore: int) -> None:
        """Tell others that everything so far is done."""
        self.meet()
        self.ops.append(_semaphore_op(name, semaphore))

    def signal(self, connection: Connection) -> None:
        self.meet()
        self.ops.append({"name": "signal", **self.channel(connection)})

    def wait(self, connection: Connection) -> None:
        self.ops.append({"name": "wait", **self.channel(connection)})
        self.apart = True

    def data(self, name: str, sources: list[Area], target: Area) -> None:
        self.meet()
        operands = {"src_buff": [_local(area) for area in sources], "dst_buff": [_local(target)]}
        self.ops.append({"name": name, **operands})
        self.apart = True

    def step(self, index: int, step: Step) -> None:
        """The operations of one step of the program."""
        graph = self.wiring.graph
        if step.kind in RECEIVES:
            connection = (self.tb.recv, self.rank, self.tb.channel)
            if not self.wiring.buffered:
                self.signal(connection)
            self.wait(connection)
            if graph.source[index] in self.wiring.confirmed:
                self.signal(connection)
        source: Area = (step.src_buffer, step.src_offset, step.count)
        target: Area = (step.dst_buffer, step.dst_offset, step.count)
        if step.kind in REDUCING:
            arrived = self.wiring.received(index)
            self.data("re", [source, arrived], arrived if step.kind == "rrs" else target)
        elif step.kind in RECEIVES and self.wiring.buffered:
            self.data("copy", [self.wiring.received(index)], target)
        elif step.kind == "cpy":
            self.data("copy", [source], target)
        elif step.kind == "re":
            self.data("re", [target, source], target)
        if step.kind in SENDS:
            self.put(index)
        if step.kind in RECEIVES and self.wiring.buffered:
            self.signal(connection)  # the slot is free

    def put(self, index: int) -> None:
        """Send a step's message, when its place is free."""
        connection = (self.rank, self.tb.send, self.tb.channel)
        kind = self.wiring.kind[connection]
        if self.wiring.buffered:
            self.acknowledged(self.wiring.sending[index] + 1 - SLOTS)
        else:
            self.wait(connection)
        source = self.wiring.sent(index)
        if index in self.wiring.aside:
            aside: Area = ("s", *self.wiring.aside[index])
            self.data("copy", [source], aside)
            source = aside
        self.meet()
        buffer, offset, count = self.wiring.received(self.wiring.graph.target[index])
        op = {
            "name": "put" if kind == "memory" else "pws",
            "src_buff": [_local(source)],
            "dst_buff": [{"buffer_id": self.reference(connection[1], buffer, kind), "index": offset, "size": count}],
        }  # fmt: skip
        if kind == "memory":
            self.ops.append({**op, "channel_type": kind})
            self.apart = True
            self.signal(connection)
            return
        self.ops.append({**op, **self.channel(connection)})
        if index in self.wiring.confirmed:
            self.wait(connection)

    def acknowledged(self, messages: int) -> None:
        """Wait until so many messages have been taken out of their slots."""
        while self.acks < messages:
            self.wait((self.rank, self.tb.send, self.tb.channel))
            self.acks += 1

    def drain(self) -> None:
        """At the end all slots must be empty, or the next launch would find them full."""
        if self.wiring.buffered:
            connection = (self.rank, self.tb.send, self.tb.channel)
            sends, _ = self.wiring.graph.connections.get(connection, ((), ()))
            self.acknowledged(len(sends))
            self.close()

    def channel(self, connection: Connection) -> Op:
        """How operations name a channel: by its place among those of its type in this threadblock."""
        kind = self.wiring.kind[connection]
        if (kind, connection) not in self.own_channels:
            self.own_channels.append((kind, connection))
        same = [found for found in self.own_channels if found[0] == kind]
        return {"channel_ids": [same.index((kind, connection))], "channel_type": kind}

    def reference(self, rank: int, buffer: str, kind: str) -> int:
        """How operations name a remote buffer: by its place among this threadblock's references of a type."""
        number = self.remote.setdefault((rank, buffer, kind), len(self.remote))
        if (kind, number) not in self.own_remote:
            self.own_remote.append((kind, number))
        same = [found for found in self.own_remote if found[0] == kind]
        return same.index((kind, number))

    def close(self) -> None:
        """End a step; it goes into another part when this one is full (two places are for the handover)."""
        room = MAX_OPS - 4
        if self.parts[-1] and len(self.parts[-1]) + len(self.ops) > room:
            self.parts.append([])
        if len(self.ops) > room:
            raise Infeasible(
                f"a step of rank {self.rank} needs {len(self.ops)} operations, more than the {room} of a threadblock. "
                f"{OTHER_WAYS}"
            )
        self.parts[-1] += self.ops
        self.ops = []

    def resources(self) -> dict[str, Any]:
        """The channels and remote buffers of the threadblock."""
        kinds = ("memory", "port")
        lists = self.wiring.channels
        return {
            "channels": [
                {"channel_type": kind, "channel_ids": [lists[self.rank, kind].index(c) for k, c in self.own_channels
                                                       if k == kind]}
                for kind in kinds if any(k == kind for k, _ in self.own_channels)
            ],
            "remote_buffer_refs": [
                {"access_channel_type": kind, "remote_buffer_ids": [n for k, n in self.own_remote if k == kind]}
                for kind in kinds if any(k == kind for k, _ in self.own_remote)
            ],
        }  # fmt: skip
