"""Lowering: from an algorithm's timed messages to a program of threadblocks that takes exactly its time.

`lower` makes a program that moves the messages in the schedule's order. What it leaves open is who goes first when
messages of different threadblocks compete for a port; `lower_exact` simulates the program and closes what matters
(synth/lower_hints.py). docs/lowering.md tells the whole story.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from taccl.errors import CheckFailed, Infeasible, TacclError, UsageError
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import refined
from taccl.synth.cost import Costs, costs, us
from taccl.synth.lower_hints import NO_HINTS, Hints, all_waits, levels, more_hints
from taccl.synth.lower_memory import MAX_COUNT
from taccl.synth.lower_operations import Operation, Operations, operations
from taccl.synth.lower_threadblocks import (
    MAX_THREADBLOCKS,
    Sender,
    channels_of,
    direct_needs,
    lanes_of,
    threadblocks_of,
)
from taccl.synth.program import FIFO_DEPTH, Program, RankProgram
from taccl.synth.program_collective import collective_of
from taccl.synth.schedule import Transfer, completion_fs, completions, time_by_priority, time_in_order
from taccl.synth.simulate import Simulation, simulate

MAX_CHANNELS = 32
MAX_BYTES = 1 << 40  # a real bound: 0 means unlimited to one loader and never to another
OUT_OF_PLACE_ONLY = frozenset({"alltoall", "alltoallv", "sendrecv", "custom"})
SELECTIVE = 3  # rounds in which only messages that jumped a queue wait; then all do
PATIENCE = 3  # rounds of adding hints without a quicker program before giving up
MOST_SPREAD = 16  # connections of a pair that a FIFO's slots alone ask for
MOST_WORK = 100_000  # messages lowered in all rounds together before the best so far must do


@dataclass(frozen=True, slots=True)
class LoweringResult:
    """A program, and how its simulated time compares with the schedule's."""

    program: Program
    # The messages at the times that the program gives them; if exact, the algorithm's own. Where a program's sums are
    # made in an order that no schedule has, what it was made from.
    schedule: Algorithm
    simulated_time_fs: int
    slower_fs: int  # 0 when the program takes no longer than the schedule


@dataclass(frozen=True, slots=True)
class _Lowered:
    program: Program
    message_at: dict[tuple[int, int, int], int]  # (rank, threadblock, step) -> message that is sent there
    sender_of: tuple[Sender, ...]  # per message


def lower_exact(
    algorithm: Algorithm, topology: Topology, *, protocol: str = "Simple", instances: int = 1
) -> LoweringResult:
    """The quickest of the lowered variants, simulated; most often the first takes no longer than the schedule.

    Each further round adds hints where the last program let a message go before one that is scheduled earlier. When
    that leads no further, the order in which the messages really competed is tried as the schedule, and at last
    programs that do not reuse scratch. Raises Infeasible when MSCCL's limits cannot be met, CheckFailed when the
    algorithm sends what a rank does not have.
    """
    shape = _within_steps(split_chunks(algorithm, topology, instances), topology)
    _check_peers(shape)
    best: LoweringResult | None = None
    rounds = max(2, MOST_WORK // max(1, len(shape.messages)))
    failure: TacclError | None = None
    spread = _spread(shape, topology, protocol)
    spreads = sorted({max(1, spread // share) for share in (1, 2, 4, MOST_SPREAD)}, reverse=True)
    for reuse, spread in product((True, False), spreads):
        for again in (False, True):
            schedule = best.schedule if again and best is not None else shape
            if again and schedule is shape:
                continue  # the same once more
            try:
                per_link = instances * spread
                for found in _variants(schedule, topology, protocol, per_link, reuse, rounds > SELECTIVE):
                    rounds -= 1
                    if best is None or found.simulated_time_fs < best.simulated_time_fs:
                        best = _right(found, schedule, topology)
                    if best.simulated_time_fs <= algorithm.time_fs:
                        return best
                    if rounds <= 0:
                        return _slower(best, algorithm)
            except (CheckFailed, Infeasible) as error:  # a deadlock of shared scratch, a limit of MSCCL
                failure = failure or error
        if spread == 1 and best is not None and not any(gpu.scratch_chunks for gpu in best.program.gpus):
            break
    if best is None:
        assert failure is not None
        raise failure
    return _slower(best, algorithm)


def _spread(shape: Algorithm, topology: Topology, protocol: str) -> int:
    """Connections over which each pair must spread its messages, so that slots of FIFOs do not hold them up.

    A link that takes its next message long before the last one has arrived has more of them under way than one
    connection's FIFO has slots.
    """
    priced = costs(topology, shape.chunk_bytes)
    depth = FIFO_DEPTH[protocol]
    carried: dict[int, int] = {}
    wanted = 1
    for message in shape.messages:
        link, count = message.link, len(message.chunks)
        carried[link] = carried.get(link, 0) + 1
        if carried[link] > depth:
            hold = max(priced.hold(link, per_chunk, count) for _, per_chunk in priced.holds[link])
            wanted = max(wanted, -(-priced.transit(link, count) // max(1, depth * hold)))
    return min(wanted, MOST_SPREAD)


def _check_peers(shape: Algorithm) -> None:
    """Every peer that a rank sends to takes a threadblock, so too many are seen before any work."""
    peers: dict[tuple[int, str], set[int]] = {}
    for message in shape.messages:
        peers.setdefault((message.src, "sends to"), set()).add(message.dst)
        peers.setdefault((message.dst, "receives from"), set()).add(message.src)
    for (rank, way), others in sorted(peers.items()):
        if len(others) > MAX_THREADBLOCKS:
            raise Infeasible(
                f"rank {rank} {way} {len(others)} others, each takes a threadblock, and the smallest GPUs hold "
                f"{MAX_THREADBLOCKS} at once"
            )


def _right(found: LoweringResult, source: Algorithm, topology: Topology) -> LoweringResult:
    """What was found, with its source as the schedule where the program's own times are those of none: a send may leave
    its buffer later than a sum is made in another, and a sum be made when its threadblock comes to it."""
    right = found.schedule is source or not (
        source.collective.combining and check_algorithm(found.schedule, topology)
    )
    return found if right else replace(found, schedule=source)


def _slower(best: LoweringResult, algorithm: Algorithm) -> LoweringResult:
    return replace(best, slower_fs=best.simulated_time_fs - algorithm.time_fs)


def claim(schedule: Algorithm, certificate: Certificate) -> Algorithm:
    """A schedule that took another time than the one it was made from, with what is still proven of it.

    certificate: of the source, whose chunks may have been coarser: what was proven of those alone no longer counts.
    """
    if certificate.solver_bound_us > us(schedule.time_fs) * (1 + 1e-9):
        certificate = certificate.of_any_schedule()
    gap_us = us(schedule.time_fs) - certificate.solver_bound_us
    if certificate.status == "optimal" and gap_us > 1e-6 * us(schedule.time_fs):
        certificate = replace(certificate, status="feasible", proved_by="")
    return replace(schedule, certificate=certificate)


def _variants(
    shape: Algorithm, topology: Topology, protocol: str, per_link: int, reuse: bool, selective: bool
) -> Iterator[LoweringResult]:
    """Programs for a schedule with more and more hints, until one is exact or no hint is left.

    per_link: connections over which the messages of a link are spread. selective: at first only messages that jumped a
    queue wait.
    """
    priced = costs(topology, shape.chunk_bytes)
    moves = _moves(shape, topology, per_link, reuse)
    hints, quickest, stale, rounds, everywhere = NO_HINTS, -1, 0, 0, False
    while stale < PATIENCE:
        lowered = _lower(shape, moves, protocol, per_link, hints)
        simulation = simulate(lowered.program, topology, shape.size_bytes, collective=shape.collective)
        exact = simulation.time_fs == shape.time_fs
        schedule = shape if exact else _as_simulated(shape, priced, simulation, lowered)
        yield LoweringResult(lowered.program, schedule, simulation.time_fs, 0)
        stale = stale + 1 if 0 <= quickest <= simulation.time_fs else 0
        quickest = simulation.time_fs if quickest < 0 else min(quickest, simulation.time_fs)
        more = more_hints(shape, priced, simulation, lowered.message_at, lowered.sender_of, hints)
        if exact:
            return
        rounds += 1
        if not everywhere and (more == hints or stale or rounds >= SELECTIVE or not selective):
            everywhere, more = True, all_waits(shape, priced, lowered.sender_of)
        if more == hints:
            return
        hints = more


def lower(
    algorithm: Algorithm,
    topology: Topology,
    *,
    protocol: str = "Simple",
    instances: int = 1,
    reuse_scratch: bool = True,
) -> Program:
    """A program that moves the algorithm's messages in the algorithm's order.

    instances: every chunk is cut into so many parts, each with channels of its own. Raises Infeasible when MSCCL's
    limits cannot be met, CheckFailed when the algorithm sends what a rank does not have.
    """
    shape = _within_steps(split_chunks(algorithm, topology, instances), topology)
    moves = _moves(shape, topology, instances, reuse_scratch)
    return _lower(shape, moves, protocol, instances, NO_HINTS).program


@dataclass(frozen=True, slots=True)
class _Moves:
    """What all programs of one schedule have in common."""

    made: Operations
    stream: list[int]  # per message
    parallel: dict[tuple[int, int], int]  # links of each pair


def _moves(shape: Algorithm, topology: Topology, per_link: int, reuse: bool) -> _Moves:
    inplace = shape.collective.name not in OUT_OF_PLACE_ONLY
    ordinal, parallel = _parallel_links(topology)
    # Stream s of a pair uses parallel link s % (number of parallel links), as the simulator's channels do.
    stream = [ordinal[m.link] + parallel[m.src, m.dst] * (m.chunks[0] % per_link) for m in shape.messages]
    made = operations(shape, costs(topology, shape.chunk_bytes), stream, inplace, reuse)
    return _Moves(made, stream, parallel)


def _lower(shape: Algorithm, moves: _Moves, protocol: str, per_link: int, hints: Hints) -> _Lowered:
    collective = shape.collective
    made, stream = moves.made, moves.stream
    ops = _with_waits(made.all, shape, hints)
    lanes = lanes_of(ops, collective.ranks)
    needs = direct_needs(ops, lanes)
    channel_of = channels_of(ops, shape, needs, stream, moves.parallel, per_link)
    level = levels(hints.before)
    gpus = []
    message_at: dict[tuple[int, int, int], int] = {}
    for rank in range(collective.ranks):
        plan = threadblocks_of(ops, lanes[rank], needs, channel_of, rank, level)
        for (threadblock, step), operation in plan.sends.items():
            message_at[rank, threadblock, step] = ops[operation].message
        gpus.append(RankProgram(
            rank, collective.input_chunks[rank], collective.output_chunks[rank], made.scratch[rank],
            plan.threadblocks,
        ))  # fmt: skip
    channels = 1 + max((tb.channel for gpu in gpus for tb in gpu.threadblocks), default=0)
    if channels > MAX_CHANNELS:
        raise Infeasible(
            f"the program needs {channels} channels and MSCCL has {MAX_CHANNELS}: "
            "cut the data into fewer chunks (--partition)"
        )
    program = Program(
        name=shape.name,
        # What groups do is no collective of all ranks: a loader must not choose it for one.
        collective="custom" if collective.groups else collective.name,
        protocol=protocol,
        channels=channels,
        chunks_per_loop=collective.size_chunks,
        ranks=collective.ranks,
        inplace=collective.name not in OUT_OF_PLACE_ONLY,
        outofplace=True,
        min_bytes=0,
        max_bytes=MAX_BYTES,
        gpus=tuple(gpus),
        root=0 if collective.groups else collective.root,
    )
    senders = tuple((m.src, ("send", m.dst, channel_of[number])) for number, m in enumerate(shape.messages))
    return _Lowered(program, message_at, senders)


def _parallel_links(topology: Topology) -> tuple[list[int], dict[tuple[int, int], int]]:
    """Per link its ordinal among the links of its pair; per pair how many there are."""
    count: dict[tuple[int, int], int] = {}
    ordinal = []
    for link in topology.links:
        ordinal.append(count.get((link.src, link.dst), 0))
        count[link.src, link.dst] = ordinal[-1] + 1
    return ordinal, count


def _with_waits(made: Sequence[Operation], shape: Algorithm, hints: Hints) -> Sequence[Operation]:
    """The operations, where sends also wait for the last operation of the messages that the hints name."""
    if not hints.waits:
        return made
    last: dict[tuple[int, int], int] = {}  # (message, rank)
    send: dict[int, int] = {}
    for i, op in enumerate(made):
        if op.message >= 0:
            place = (op.message, op.rank)
            if place not in last or made[last[place]].key <= op.key:
                last[place] = i
            if op.kind == "s":
                send[op.message] = i
    ops = list(made)
    for number, awaited in sorted(hints.waits):
        i = send[number]
        ops[i] = replace(ops[i], needs=ops[i].needs | {last[awaited, shape.messages[number].src]})
    return ops


def _as_simulated(shape: Algorithm, priced: Costs, simulation: Simulation, lowered: _Lowered) -> Algorithm:
    """The schedule at the times at which the program started its messages."""
    messages = []
    for activity in simulation.activities:
        if activity.kind == "message":
            number = lowered.message_at[activity.rank, activity.threadblock, activity.step]
            message = shape.messages[number]
            end = activity.start_fs + priced.transit(message.link, len(message.chunks))
            messages.append(replace(message, start_fs=activity.start_fs, end_fs=end))
    messages.sort(key=lambda m: (m.start_fs, m.link, m.chunks))
    return replace(shape, messages=tuple(messages), time_fs=completion_fs(priced, messages), coding=None)


def _within_steps(shape: Algorithm, topology: Topology) -> Algorithm:
    """Messages of more chunks than a step can carry, cut into several and timed anew in the same order."""
    if all(len(m.chunks) <= MAX_COUNT for m in shape.messages):
        return shape
    coarse = _coarser(shape)
    if coarse is not None:
        return coarse
    priced = costs(topology, shape.chunk_bytes)
    cuts = [
        [m.chunks[begin : begin + MAX_COUNT] for begin in range(0, len(m.chunks), MAX_COUNT)]
        for m in shape.messages
    ]
    messages = time_in_order(topology, shape.collective, priced, _pieces(shape, priced, cuts))
    return replace(shape, messages=messages, time_fs=completion_fs(priced, messages), coding=None)


def _coarser(shape: Algorithm) -> Algorithm | None:
    """The same messages in fewer, longer chunks that a step can carry: of allreduces, whose buffers need no block for
    each rank, where neighbours always travel together. None where they do not."""
    collective = shape.collective
    if collective.name != "allreduce" or collective.groups:
        return None
    total = collective.size_chunks
    most = max(len(m.chunks) for m in shape.messages)
    for width in range(2, total + 1):
        if total % width or most > width * MAX_COUNT:
            continue
        messages = []
        for message in shape.messages:
            chunks = sorted(message.chunks)
            firsts = chunks[::width]
            if chunks != [c for first in firsts for c in range(first, first + width)] or any(
                first % width for first in firsts
            ):
                break
            messages.append(replace(message, chunks=tuple(first // width for first in firsts)))
        else:
            fewer = collective_of("allreduce", collective.ranks, total // width)
            return replace(shape, collective=fewer, messages=tuple(messages), coding=None)
    return None


def split_chunks(algorithm: Algorithm, topology: Topology, instances: int) -> Algorithm:
    """Every chunk cut into `instances` parts, each with messages of its own, timed anew in the same order.

    Raises Infeasible where partial sums cross on links of so different speeds that a part of one would leave only
    after the other's has been added to it.
    """
    if instances == 1:
        return algorithm
    if instances < 1:
        raise UsageError("instances must be at least 1")
    collective = refined(algorithm.collective, instances)
    priced = costs(topology, collective.chunk_bytes(algorithm.size_bytes))
    cuts = [
        [tuple(c * instances + part for c in m.chunks) for part in range(instances)]
        for m in algorithm.messages
    ]
    pieces = _pieces(algorithm, costs(topology, algorithm.chunk_bytes), cuts)
    for scheduler in (time_by_priority, time_in_order):
        messages = scheduler(topology, collective, priced, pieces)
        cut = replace(
            algorithm,
            collective=collective,
            messages=messages,
            time_fs=completion_fs(priced, messages),
            coding=None,
        )
        if not collective.combining or not check_algorithm(cut, topology):
            return cut
    raise Infeasible(
        f"partial sums cross in {algorithm.name}, and in {instances} parts some would be added twice: "
        "use --instances 1, or an engine whose sums do not cross (--engine ring)"
    )


def _pieces(shape: Algorithm, priced: Costs, cuts: list[list[tuple[int, ...]]]) -> list[Transfer]:
    """Transfers for the pieces of each message; each waits for the pieces that its message has waited for.

    Two messages that cross, as in an exchange, wait for nothing that was still on its way when they started.
    """
    done = completions(priced, shape.messages)
    into: defaultdict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)  # (rank, chunk, sum)
    pieces: list[Transfer] = []
    for number in sorted(range(len(cuts)), key=lambda n: (shape.messages[n].start_fs, n)):
        message = shape.messages[number]
        for chunks in cuts[number]:
            carried = [(message.src, c, message.sum) for c in chunks]
            after = {i for place in carried for time, i in into[place] if time <= message.start_fs}
            for c in chunks:
                for place in message.into:
                    into[message.dst, c, place].append((done[number], len(pieces)))
            waits = tuple(sorted(after))
            pieces.append(Transfer(message.link, chunks, message.op, waits, message.sum, message.into))
    return pieces
