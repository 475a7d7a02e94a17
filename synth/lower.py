"""Lowering: from an algorithm's timed messages to a program of threadblocks that takes exactly its time.

Every connection gets a threadblock of its own at either end, with its steps in the order of the schedule: nothing
waits that does not wait in the schedule. What a threadblock cannot hold (64 steps) goes on in the next channel.
Where the simulator still finds the program slower, because messages of different threadblocks compete for a port
in another order than scheduled, dependencies between the sends of a rank enforce the order (see lower_exact).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from taccl.errors import CheckFailed
from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.collective import refined
from taccl.synth.cost import Costs, costs, us
from taccl.synth.lower_operations import MAX_COUNT, Operation, operations
from taccl.synth.program import Program, RankProgram, Step, Threadblock
from taccl.synth.schedule import Transfer, completion_fs, time_by_priority, time_in_order
from taccl.synth.simulate import Simulation, simulate

MAX_STEPS = 64
MAX_CHANNELS = 32
MAX_THREADBLOCKS = 80
RETIMINGS = 2
MAX_BYTES = 1 << 40  # a real bound: 0 means unlimited to one loader and never to another
OUT_OF_PLACE_ONLY = frozenset({"alltoall", "alltoallv", "sendrecv", "custom"})

Lane = tuple[str, int, int]  # (direction, peer, ordinal of the link among parallel ones)
TbKey = tuple[str, int, int]  # (direction, peer, channel)


@dataclass(frozen=True, slots=True)
class LoweringResult:
    """A program, and how its simulated time compares with the schedule's."""

    program: Program
    schedule: (
        Algorithm  # the messages as the program really times them; the algorithm itself when it is exact
    )
    simulated_time_fs: int
    slower_fs: int  # 0 when the program takes no longer than the schedule
    notes: tuple[str, ...]


def lower_exact(
    algorithm: Algorithm, topology: Topology, *, protocol: str = "Simple", instances: int = 1
) -> LoweringResult:
    """The quickest of the lowered variants, simulated.

    First without, then with enforced order of the sends that share a port. A program that is still slower shows
    in what order its messages really compete; the schedule in that order is lowered in turn.
    """
    best: LoweringResult | None = None
    failure: CheckFailed | None = None
    priced = costs(topology, refined(algorithm.collective, instances).chunk_bytes(algorithm.size_bytes))
    for ordered in (False, True):
        shape = _within_steps(split_chunks(algorithm, topology, instances), topology, priced)
        for attempt in range(RETIMINGS):
            try:
                program = lower(shape, topology, protocol=protocol, instances=instances, ordered=ordered)
            except CheckFailed as error:
                failure = error
                break
            simulation = simulate(program, topology, algorithm.size_bytes, collective=shape.collective)
            notes = ("order of sends enforced by dependencies",) if ordered else ()
            if attempt:
                notes = (*notes, "messages reordered as their threadblocks compete")
            slower_fs = max(0, simulation.time_fs - algorithm.time_fs)
            measured = _as_simulated(shape, priced, simulation)
            if best is None or simulation.time_fs < best.simulated_time_fs:
                exact = simulation.time_fs == shape.time_fs
                schedule = shape if exact else measured or shape
                best = LoweringResult(program, schedule, simulation.time_fs, slower_fs, notes)
            if best.slower_fs == 0 or measured is None:
                break
            shape = measured
        if best is not None and best.slower_fs == 0:
            break
    if best is None:
        assert failure is not None
        raise failure
    return best


def claim(schedule: Algorithm, certificate: Certificate) -> Algorithm:
    """A schedule that took another time than the one it was made from, with what is still proven of it."""
    gap_us = us(schedule.time_fs) - certificate.solver_bound_us
    if certificate.status == "optimal" and gap_us > 1e-6 * us(schedule.time_fs):
        certificate = replace(certificate, status="feasible", proved_by="")
    return replace(schedule, certificate=certificate)


def _within_steps(shape: Algorithm, topology: Topology, priced: Costs) -> Algorithm:
    """Messages of more chunks than a step can carry, cut into several and timed anew in the same order."""
    if all(len(m.chunks) <= MAX_COUNT for m in shape.messages):
        return shape
    pieces = [
        Transfer(m.link, m.chunks[begin : begin + MAX_COUNT], m.op)
        for m in shape.messages
        for begin in range(0, len(m.chunks), MAX_COUNT)
    ]
    messages = time_in_order(topology, shape.collective, priced, pieces)
    return replace(shape, messages=messages, time_fs=completion_fs(priced, messages))


def _as_simulated(shape: Algorithm, priced: Costs, simulation: Simulation) -> Algorithm | None:
    """The schedule at the times at which the program started its messages; None when some were split."""
    started: dict[int, list[int]] = {}  # link -> starts, in the order of its messages
    for activity in simulation.activities:
        if activity.kind == "message":
            started.setdefault(activity.link, []).append(activity.start_fs)
    if sum(len(starts) for starts in started.values()) != len(shape.messages):
        return None
    messages = []
    for message in sorted(shape.messages, key=lambda m: m.start_fs):
        start = started[message.link].pop(0)
        end = start + priced.transit(message.link, len(message.chunks))
        messages.append(replace(message, start_fs=start, end_fs=end))
    messages.sort(key=lambda m: (m.start_fs, m.link, m.chunks))
    return replace(shape, messages=tuple(messages), time_fs=simulation.time_fs)


def lower(
    algorithm: Algorithm,
    topology: Topology,
    *,
    protocol: str = "Simple",
    instances: int = 1,
    ordered: bool = False,
) -> Program:
    """A program that moves the algorithm's messages in the algorithm's order.

    instances: the algorithm's chunks come in so many parts (split_chunks), each with channels of its own.
    ordered: sends of a rank that share a port wait for one another. Raises CheckFailed when MSCCL's limits cannot
    be met.
    """
    collective = algorithm.collective
    inplace = collective.name not in OUT_OF_PLACE_ONLY
    priced = costs(topology, algorithm.chunk_bytes)
    ordinal, parallel = _parallel_links(topology)
    # Stream s of a pair uses parallel link s % (number of parallel links), as the simulator's channels do.
    stream = [
        ordinal[m.link] + parallel[m.src, m.dst] * (m.chunks[0] % instances) for m in algorithm.messages
    ]
    made = operations(algorithm, priced, stream, inplace)
    ops = made.all
    if ordered:
        _order_sends(ops, algorithm, topology)
    lanes = _lanes(ops)
    needs = _direct_needs(ops, lanes)
    channel_of = _segments(ops, algorithm, needs, stream, parallel, instances)
    # Rank among all first sends: threadblock ids follow it, because the lower id goes first among messages
    # that are ready at the same moment.
    firsts = sorted({members_key(ops, members) for by_lane in lanes for members in by_lane.values()})
    level = {start: i for i, start in enumerate(firsts)}
    gpus = []
    for rank in range(collective.ranks):
        gpus.append(
            RankProgram(
                rank,
                collective.input_chunks[rank],
                collective.output_chunks[rank],
                made.scratch[rank],
                _threadblocks(ops, lanes[rank], needs, channel_of, rank, level),
            )
        )
    channels = 1 + max((tb.channel for gpu in gpus for tb in gpu.threadblocks), default=0)
    if channels > MAX_CHANNELS:
        raise CheckFailed(
            f"the program needs {channels} channels and MSCCL has {MAX_CHANNELS}: "
            "cut the data into fewer chunks (--partition)"
        )
    return Program(
        name=algorithm.name,
        collective=collective.name,
        protocol=protocol,
        channels=channels,
        chunks_per_loop=collective.size_chunks,
        ranks=collective.ranks,
        inplace=inplace,
        outofplace=True,
        min_bytes=0,
        max_bytes=MAX_BYTES,
        gpus=tuple(gpus),
        root=collective.root,
    )


def _parallel_links(topology: Topology) -> tuple[list[int], dict[tuple[int, int], int]]:
    """Per link its ordinal among the links of its pair; per pair how many there are."""
    count: dict[tuple[int, int], int] = {}
    ordinal = []
    for link in topology.links:
        ordinal.append(count.get((link.src, link.dst), 0))
        count[link.src, link.dst] = ordinal[-1] + 1
    return ordinal, count


def _order_sends(ops: list[Operation], algorithm: Algorithm, topology: Topology) -> None:
    """Each send waits for the send of its rank that held one of its ports before it."""
    last: dict[tuple[int, int], int] = {}
    sends = sorted((op.key, i) for i, op in enumerate(ops) if op.kind == "s")
    for _, i in sends:
        link = topology.links[algorithm.messages[ops[i].message].link]
        for port in link.ports:
            before = last.get((ops[i].rank, port))
            if before is not None:
                ops[i].needs.add(before)
            last[ops[i].rank, port] = i


def _lanes(ops: Sequence[Operation]) -> list[dict[Lane, list[int]]]:
    """Per rank the operations of each lane, in the order in which they will run."""
    ranks = 1 + max((op.rank for op in ops), default=0)
    lanes: list[dict[Lane, list[int]]] = [{} for _ in range(ranks)]
    for i, op in enumerate(ops):
        lanes[op.rank].setdefault(op.lane, []).append(i)
    for by_lane in lanes:
        for members in by_lane.values():
            members.sort(key=lambda i: ops[i].key)
    return lanes


def _direct_needs(ops: Sequence[Operation], lanes: list[dict[Lane, list[int]]]) -> list[list[int]]:
    """The needs of every operation that do not follow from its lane's order or from other needs.

    `below` maps a lane to the latest of its operations that is known to be complete.
    """
    place: dict[int, tuple[Lane, int]] = {}
    for by_lane in lanes:
        for lane, members in by_lane.items():
            for position, i in enumerate(members):
                place[i] = (lane, position)
    needs: list[list[int]] = [[] for _ in ops]
    below: list[dict[Lane, int]] = [{} for _ in ops]
    for i in _causal_order(ops, lanes, place):
        lane, position = place[i]
        known: dict[Lane, int] = {}
        if position:
            before = lanes[ops[i].rank][lane][position - 1]
            known = dict(below[before])
        candidates = sorted(
            (n for n in ops[i].needs if place[n][0] != lane), key=lambda n: ops[n].key, reverse=True
        )
        for n in candidates:
            other, at = place[n]
            if known.get(other, -1) >= at:
                continue
            needs[i].append(n)
            for reached, upto in below[n].items():
                known[reached] = max(known.get(reached, -1), upto)
        # A need that a later accepted one implies is dropped.
        needs[i] = [
            n for n in needs[i]
            if not any(m != n and below[m].get(place[n][0], -1) >= place[n][1] for m in needs[i])
        ]  # fmt: skip
        known[lane] = position
        below[i] = known
    return needs


def _causal_order(
    ops: Sequence[Operation], lanes: list[dict[Lane, list[int]]], place: dict[int, tuple[Lane, int]]
) -> Iterable[int]:
    """All operations, each after those before it in its lane and those it needs."""
    waiting = [0] * len(ops)
    followers: list[list[int]] = [[] for _ in ops]
    for i, op in enumerate(ops):
        lane, position = place[i]
        before = set(op.needs)
        if position:
            before.add(lanes[op.rank][lane][position - 1])
        waiting[i] = len(before)
        for n in before:
            followers[n].append(i)
    ready = [i for i, count in enumerate(waiting) if not count]
    done = 0
    while ready:
        i = ready.pop()
        done += 1
        yield i
        for follower in followers[i]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    if done != len(ops):
        raise CheckFailed("the schedule's steps wait for one another in a circle; this is a fault of taccl")


def _segments(
    ops: Sequence[Operation],
    algorithm: Algorithm,
    needs: Sequence[Sequence[int]],
    stream: Sequence[int],
    parallel: dict[tuple[int, int], int],
    instances: int,
) -> dict[int, int]:
    """The channel of each message: further channels where either end's threadblock is full."""
    steps: dict[tuple[int, int], int] = {}  # (message, rank) -> steps there
    for i, op in enumerate(ops):
        if op.message >= 0:
            key = (op.message, op.rank)
            steps[key] = steps.get(key, 0) + max(1, len(needs[i]))
    channel_of: dict[int, int] = {}
    # (source, destination, stream) -> (segment, steps at source, at destination)
    filled: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    for number in sorted(range(len(algorithm.messages)), key=lambda n: (algorithm.messages[n].start_fs, n)):
        message = algorithm.messages[number]
        here, there = steps[number, message.src], steps[number, message.dst]
        connection = (message.src, message.dst, stream[number])
        segment, at_source, at_destination = filled.get(connection, (0, 0, 0))
        # One step more for the dependency that ties a segment to the one before it.
        if max(at_source + here, at_destination + there) > MAX_STEPS - 2 and at_source:
            segment, at_source, at_destination = segment + 1, 0, 0
        filled[connection] = (segment, at_source + here, at_destination + there)
        streams = parallel[message.src, message.dst] * instances
        channel_of[number] = stream[number] + segment * streams
    return channel_of


def _threadblocks(
    ops: Sequence[Operation],
    lanes: dict[Lane, list[int]],
    needs: Sequence[Sequence[int]],
    channel_of: dict[int, int],
    rank: int,
    level: dict[int, int],
) -> tuple[Threadblock, ...]:
    """The threadblocks of a rank; those that send are numbered by when they start."""
    blocks: dict[TbKey, list[int]] = {}
    tied: dict[int, int] = {}  # first operation of a segment -> last of the segment before
    local_blocks = 0
    for (direction, peer, _), members in sorted(lanes.items()):
        previous: int | None = None
        if direction == "local":
            for begin in range(0, len(members), MAX_STEPS // 2):
                blocks["local", -1, local_blocks] = members[begin : begin + MAX_STEPS // 2]
                local_blocks += 1
            continue
        for i in members:
            key = (direction, peer, channel_of[ops[i].message])
            if key not in blocks and previous is not None:
                tied[i] = previous
            blocks.setdefault(key, []).append(i)
            previous = i
    merged = _merge(ops, blocks)
    order = _numbering(ops, blocks, merged, level)
    where: dict[int, tuple[int, int]] = {}
    waits: dict[int, list[int]] = {}
    members_of: list[list[int]] = []
    for number, keys in enumerate(order):
        members = sorted((i for key in keys for i in blocks[key]), key=lambda i: (ops[i].key, i))
        members_of.append(members)
        inside = set(members)
        position = 0
        for i in members:
            waits[i] = [n for n in needs[i] if n not in inside]
            if i in tied:
                waits[i].append(tied[i])
            position += max(1, len(waits[i]))
            where[i] = (number, position - 1)
    depended = {where[n] for i in waits for n in waits[i]}
    result = []
    for number, (keys, members) in enumerate(zip(order, members_of, strict=True)):
        steps: list[Step] = []
        for i in members:
            op = ops[i]
            awaited = sorted(where[n] for n in waits[i])
            for extra in awaited[:-1]:
                steps.append(Step("nop", "i", -1, "o", -1, 0, extra))
            steps.append(
                Step(
                    op.kind,
                    *op.src,
                    *op.dst,
                    op.count,
                    awaited[-1] if awaited else None,
                    where[i] in depended,
                )
            )
        send = next((peer for direction, peer, _ in keys if direction == "send"), -1)
        recv = next((peer for direction, peer, _ in keys if direction == "recv"), -1)
        channel = next((c for direction, _, c in keys if direction != "local"), 0)
        if len(steps) > MAX_STEPS:
            raise CheckFailed(
                f"rank {rank} needs {len(steps)} steps in one threadblock; MSCCL allows {MAX_STEPS}"
            )
        result.append(Threadblock(number, send, recv, channel, tuple(steps)))
    if len(result) > MAX_THREADBLOCKS:
        raise CheckFailed(
            f"rank {rank} needs {len(result)} threadblocks and the smallest GPUs hold {MAX_THREADBLOCKS} at "
            "once: use fewer links or cut the data into fewer chunks (--partition)"
        )
    return tuple(result)


def members_key(ops: Sequence[Operation], members: Sequence[int]) -> int:
    """When the first of some operations happens."""
    return min(ops[i].key[0] for i in members)


def _numbering(
    ops: Sequence[Operation],
    blocks: dict[TbKey, list[int]],
    merged: Sequence[tuple[TbKey, ...]],
    level: dict[int, int],
) -> list[tuple[TbKey, ...]]:
    """Senders by first start, as near to their place among all ranks' senders as others can fill the gaps."""

    def first(keys: tuple[TbKey, ...]) -> int:
        return min(members_key(ops, blocks[key]) for key in keys)

    senders = sorted((k for k in merged if any(key[0] == "send" for key in k)), key=lambda k: (first(k), k))
    others = sorted((k for k in merged if k not in senders), key=lambda k: (first(k), k))
    order: list[tuple[TbKey, ...]] = []
    for sender in senders:
        wanted = level.get(first(sender), 0)
        while others and len(order) < wanted:
            order.append(others.pop(0))
        order.append(sender)
    return [*order, *others]


def _merge(ops: Sequence[Operation], blocks: dict[TbKey, list[int]]) -> list[tuple[TbKey, ...]]:
    """Pair sending with receiving threadblocks of a channel, only when there are too many for a GPU."""
    excess = len(blocks) - MAX_THREADBLOCKS
    alone = sorted(blocks)
    pairs: list[tuple[TbKey, ...]] = []
    if excess > 0:
        receivers = [key for key in alone if key[0] == "recv"]
        for sender in [key for key in alone if key[0] == "send"]:
            if excess <= 0:
                break
            partner = next(
                (
                    r
                    for r in receivers
                    if r[2] == sender[2] and len(blocks[r]) + len(blocks[sender]) <= MAX_STEPS // 2
                ),
                None,
            )
            if partner is not None:
                receivers.remove(partner)
                pairs.append((sender, partner))
                excess -= 1
    taken = {key for pair in pairs for key in pair}
    return [*pairs, *((key,) for key in alone if key not in taken)]


def split_chunks(algorithm: Algorithm, topology: Topology, instances: int) -> Algorithm:
    """Every chunk cut into `instances` parts, each with messages of its own, timed anew in the same order."""
    if instances == 1:
        return algorithm
    if instances < 1:
        raise CheckFailed("instances must be at least 1")
    collective = refined(algorithm.collective, instances)
    transfers = [
        Transfer(m.link, tuple(c * instances + part for c in m.chunks), m.op)
        for m in algorithm.messages
        for part in range(instances)
    ]
    priced = costs(topology, collective.chunk_bytes(algorithm.size_bytes))
    messages = time_by_priority(topology, collective, priced, transfers)
    return replace(
        algorithm, collective=collective, messages=messages, time_fs=completion_fs(priced, messages)
    )
