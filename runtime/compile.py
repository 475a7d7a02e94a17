"""From a program to one rank's flat graph of operations.

An operation is a send, a receive, a copy or a reduction over ranges of chunks. It starts when its
predecessors are done; the predecessors are the operations whose data it reads (RAW), whose data it
overwrites (WAW), and which still read what it overwrites (WAR: among them sends that are not finished), taken
along the trace. Nothing else orders operations, so the steps of all threadblocks interleave freely.

A receive must never wait for a send, or a program that relies on buffered sends would hang. A receive whose
destination is free from the start goes there directly; a reducing one goes to staging memory, as many slots
for each connection as the protocol's FIFO has. Then the whole job is tried symbolically with sends that wait
for their receive; if that hangs, every receive that has to wait for anything gets a staging slot of its own
instead, after which nothing can hang that the trace did not.

Between nodes the word that a slot is free may stand in the queue of a slow link, behind the data of many messages.
Where messages leave in the order of the model, connections from other nodes have more slots, and words go ahead. (In
the trace's order they would let ranks send first what is wanted last.)

Between nodes messages compete for the uplinks, and there the program's order of sends is kept too: a send waits for
the one before it on its connection, and for the steps that it depends on, be it for data or only for order. All of
these come before it in the trace, so with receives that wait for nothing this cannot hang either.

A step that a send waits for only for order may be a receive that completes at the right time in the schedule, or a send
that this receive allows. Where nothing keeps to the schedule's times (coded messages), ranks would wait for each other
so while links stand idle. There the send waits instead for the last one before it, of any connection, that needs no
message which it does not need itself, so that it never waits for one that cannot go. Nor does it wait for any where the
transport itself sends what the program has first, of what may go: one that stands before a full port would hold up all
that are behind it, to nodes whose ports are free.

Where a transport lets a rank read what another one sends, staging memory is not needed: the operation that would
read it reads the sender's memory. The send is then done only after that operation, so this too is tried first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice

from taccl.runtime.hazards import Hazards
from taccl.runtime.plan import Message, Operation, Plan, Range
from taccl.runtime.rendezvous import finishes
from taccl.runtime.trace import Trace
from taccl.synth.program import FIFO_DEPTH, Program, Step, Threadblock

# Above this many steps the symbolic trial of all ranks costs more than the extra staging it may save.
TRIAL_STEPS = 200_000


def compile_ranks(
    program: Program,
    order: Trace,
    inplace: Mapping[int, tuple[int, int]],
    wanted: Sequence[int],
    nodes: Sequence[int] | None = None,
    rewrite: Callable[[list[Plan]], list[Plan]] | None = None,
    timed: bool = True,
    ahead: bool = False,
    sorts: bool = False,
) -> list[Plan]:
    """The plans of the wanted ranks, or of all where they had to be made.

    inplace: for each rank whose input and output are views of one memory, their first chunks in it. nodes: of each
    rank its node; sends from one to another keep the program's order. None: no send does. rewrite: what is done to the
    plans of all ranks together before they are tried. timed: messages take the times of the schedule, so that any step
    may stand for order. ahead: connections between nodes have more slots than the protocol's, which all
    together hold no more than the longer of a rank's buffers. sorts: of the messages that may go to other nodes the
    transport sends the first one first, without a word of it in the plans; where they are not timed.
    """
    if nodes is not None and len(set(nodes)) == 1:
        nodes = None
    steps: list[list[tuple[int, int]]] = [[] for _ in program.gpus]
    for rank, tb, number in order.order:
        steps[rank].append((tb, number))

    def plan(rank: int, patient: bool) -> Plan:
        compiler = _Compiler(program, order, rank, inplace.get(rank), patient, nodes, timed, ahead, sorts)
        return compiler.plan(steps[rank])

    if len(order.order) <= TRIAL_STEPS:
        for patient in (True, False):
            plans = [plan(rank, patient) for rank in range(program.ranks)]
            if rewrite is not None:
                plans = rewrite(plans)
            # Where plans say nothing of it a transport may give way to the first message of a channel
            # (`runtime/paced.py`).
            waits = None if timed or sorts or nodes is None else _one_by_one(plans, nodes)
            for direct in (True, False):
                if finishes(plans, direct, waits):
                    return [replace(plan, direct=direct) for plan in plans]
    if rewrite is None:
        return [plan(rank, False) for rank in wanted]
    return rewrite([plan(rank, False) for rank in range(program.ranks)])


def _one_by_one(plans: Sequence[Plan], nodes: Sequence[int]) -> dict[Message, tuple[Message]]:
    """Of each message to another node the one before it on its channel, if there is one."""
    found: dict[Message, tuple[Message]] = {}
    last: dict[tuple[int, int, int], Message] = {}
    for plan in plans:
        for op in plan.operations:
            if op.kind == "send" and nodes[op.peer] != nodes[plan.rank]:
                line, message = (plan.rank, op.peer, op.channel), (plan.rank, op.peer, op.tag)
                if line in last:
                    found[message] = (last[line],)
                last[line] = message
    return found


class _Compiler:
    """Builds one rank's operations; `patient` receives may wait for local operations, others may not."""

    def __init__(
        self,
        program: Program,
        order: Trace,
        rank: int,
        inplace: tuple[int, int] | None,
        patient: bool,
        nodes: Sequence[int] | None,
        timed: bool,
        ahead: bool,
        sorts: bool,
    ) -> None:
        self.program, self.order, self.rank, self.patient = program, order, rank, patient
        self.hazards = Hazards(inplace)
        self.depth = FIFO_DEPTH.get(program.protocol, 2)
        self.operations: list[Operation] = []
        self.staging = 0
        self.nodes, self.timed, self.sorts = nodes, timed, sorts and not timed
        self.part_ahead = self._part_ahead() if ahead and nodes is not None else Fraction(0)
        self.slots: dict[int, list[Range]] = {}  # threadblock index -> staging slots of its connection
        self.uses: defaultdict[int, int] = defaultdict(int)
        self.index = {tb.id: index for index, tb in enumerate(program.gpus[rank].threadblocks)}
        # What a send of another node waits for beside its data: the operations that complete the steps which its
        # threadblock has waited for since the last send, and that send.
        self.awaited: defaultdict[int, set[int]] = defaultdict(set)
        self.through: dict[tuple[int, int], set[int]] = {}
        # Where the schedule's times do not hold: the sends to other nodes, and for each operation how many messages of
        # each connection (peer, channel) it cannot do without.
        self.going: dict[int, None] = {}  # in their order
        self.needs: list[dict[tuple[int, int], int]] = []

    def plan(self, steps: Sequence[tuple[int, int]]) -> Plan:
        for tb, number in steps:
            self._step(tb, number)
        return Plan(self.rank, tuple(self.operations), self.staging)

    def _step(self, tb_index: int, number: int) -> None:
        tb = self.program.gpus[self.rank].threadblocks[tb_index]
        step = tb.steps[number]
        src: Range = (step.src_buffer, step.src_offset, step.count)
        dst: Range = (step.dst_buffer, step.dst_offset, step.count)
        place = (self.rank, tb_index, number)
        if step.depends is not None:
            self.awaited[tb_index] |= self.through[self.index[step.depends[0]], step.depends[1]]
        first = len(self.operations)

        def add(
            kind: str, dst: Range | None, src: Range | None = None, received: Range | None = None
        ) -> None:
            peer, tag = -1, -1
            if kind == "send":
                peer, tag = tb.send, self.order.send_tag[place]
            elif kind == "recv":
                peer, tag = tb.recv, self.order.recv_tag[place]
            before = self.hazards.before(dst, src, received)
            index = len(self.operations)
            order: set[int] = set()
            if self.nodes is not None and not self.timed and not self.sorts:
                self.needs.append(
                    self._needs(before, {(peer, tb.channel): tag + 1} if kind == "recv" else {})
                )
            far = kind == "send" and self.nodes is not None and self.nodes[peer] != self.nodes[self.rank]
            if far and not self.sorts:
                order = self.awaited[tb_index] if self.timed else self._sends(self.awaited[tb_index], before)
                before |= order
                self.awaited[tb_index] = {index}
                self.going[index] = None
            self.operations.append(
                Operation(
                    kind, dst, src, received, peer, tb.channel, tag, tb.id, number, tuple(sorted(before)),
                    tuple(sorted(order)),
                )
            )  # fmt: skip
            self.hazards.record(index, dst, src, received)

        if step.kind == "s":
            add("send", None, src)
        elif step.kind in ("r", "rcs"):
            if self._direct(dst):
                add("recv", dst)
            else:
                slot = self._slot(tb_index, step)
                add("recv", slot)
                add("copy", dst, slot)
            if step.kind == "rcs":
                add("send", None, dst)
        elif step.kind in ("rrs", "rrc", "rrcs"):
            slot = self._slot(tb_index, step)
            add("recv", slot)
            result = slot if step.kind == "rrs" else dst
            add("reduce", result, src, slot)
            if step.kind != "rrc":
                add("send", None, result)
        elif step.kind == "cpy":
            if self.hazards.cells(dst) != self.hazards.cells(src):  # in place one may be the other
                add("copy", dst, src)
        elif step.kind == "re":
            add("reduce", dst, dst, src)
        made = len(self.operations) - 1
        wrote = self.hazards.before(None, src) if step.kind == "cpy" else set()
        self.through[tb_index, number] = {made} if made >= first else self.awaited[tb_index] | wrote

    def _needs(self, before: set[int], first: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        """What operations need together, and the first beside it."""
        for number in before:
            for connection, messages in self.needs[number].items():
                first[connection] = max(messages, first.get(connection, 0))
        return first

    def _sends(self, awaited: set[int], before: set[int]) -> set[int]:
        """The sends that stand for what a send, the next operation, waits for beside its data (`before`)."""
        mine = self.needs[-1]

        def goes_before(number: int) -> bool:
            return all(mine.get(connection, 0) >= count for connection, count in self.needs[number].items())

        order = {number for number in awaited if number in self.going and goes_before(number)}
        if awaited - order - before:
            return order | set(islice(filter(goes_before, reversed(self.going)), 1))
        return order

    def _direct(self, dst: Range) -> bool:
        return self.patient or not self.hazards.before(dst)

    def _far(self, tb: Threadblock) -> bool:
        """Whether its messages come from another node."""
        return self.nodes is not None and tb.recv >= 0 and self.nodes[tb.recv] != self.nodes[self.rank]

    def _part_ahead(self) -> Fraction:
        """The part of the chunks that connections from other nodes stage which have a slot of their own."""
        gpu = self.program.gpus[self.rank]
        staged = sum(sum(_reduced(tb)) for tb in gpu.threadblocks if self._far(tb))
        return min(Fraction(1), Fraction(max(gpu.input_chunks, gpu.output_chunks), max(staged, 1)))

    def _slot(self, tb_index: int, step: Step) -> Range:
        """Staging memory for a message; a connection's slots are used in turn."""
        if not self.patient:
            self.staging += step.count
            return ("t", self.staging - step.count, step.count)
        if tb_index not in self.slots:
            tb = self.program.gpus[self.rank].threadblocks[tb_index]
            staged = _reduced(tb)
            size, depth = max(staged), self.depth
            if self._far(tb):
                depth = max(depth, int(self.part_ahead * sum(staged) / size))
            number = min(depth, len(staged))
            self.slots[tb_index] = [("t", self.staging + i * size, size) for i in range(number)]
            self.staging += number * size
        slots = self.slots[tb_index]
        buffer, first, _ = slots[self.uses[tb_index] % len(slots)]
        self.uses[tb_index] += 1
        return (buffer, first, step.count)


def _reduced(tb: Threadblock) -> list[int]:
    """The chunks of each of its reducing receives."""
    return [step.count for step in tb.steps if step.kind in ("rrs", "rrc", "rrcs")]
