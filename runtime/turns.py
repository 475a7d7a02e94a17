"""Turns on shared uplinks: when a message between nodes may begin, as the model has it.

A schedule says who uses a node's uplink and downlink when. Ranks know nothing of one another there: all that is ready
goes at once, TCP gives each the same share, messages that others wait for come late, and links stand idle later. So the
program is simulated on its cluster, and each message gets gates: it begins when the message before it, on each link
that the two share, has come so far that no more than WINDOW_BYTES of it are left. One that the model still has under
way (it goes to a slow node, and its uplink is free before it has arrived) is no gate, but what went before it may be.
A gate is seen by the sender of the earlier message, from confirmations, or by its receiver, who tell the sender of the
later one.

Order is kept, times are not: a link that is slower than its profile makes all that follows later, and nothing jumps a
queue. Several short messages of a window are on their way together, so that no link waits for an answer. To hand a turn
over takes a round trip and a look of each of two ranks, so only messages that take many times as long have turns.

Coded messages have the order of a simulation in which all chunks are as long as the longest frame. Of one that goes in
parts the first waits, and the last ones are waited for.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from taccl.errors import CheckFailed
from taccl.profiles.topology import Topology
from taccl.runtime.compile import Operation, Plan, held_for_ever
from taccl.runtime.frames import FrameSizes
from taccl.runtime.trace import Trace
from taccl.synth.collective import Collective
from taccl.synth.cost import FS_PER_US, costs
from taccl.synth.program import Program
from taccl.synth.simulate import Activity, simulate

Key = tuple[int, int, int]  # of a message: source, destination, tag

WINDOW_BYTES = 128 << 10
HANDOVER_FS = 400 * FS_PER_US  # of a turn, beside two latencies, where ranks share cores
WORTH_HANDOVERS = 20  # a message takes so many times as long as the handing over of its turn
MOST_MESSAGES = 20_000  # of more, a simulation takes seconds
MOST_TRIALS = 64  # of changing gates one by one
MOST_BEFORE = 64  # messages of a link that are looked through for one gate


@dataclass(frozen=True, slots=True)
class Gate:
    """What a message waits for."""

    seen_by: int  # rank; it tells the sender of the message that waits
    message: Key  # the earlier one
    part: float  # of it that must be confirmed at its sender, or have arrived at its receiver: above 0, at most 1


@dataclass(frozen=True, slots=True)
class Turns:
    """What messages wait for: of each that waits its gates. why_none: what a person can know where there are none."""

    gates: Mapping[Key, tuple[Gate, ...]]
    why_none: str = ""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A message of the plans. activity: of the message of the program that it is, or is a part of."""

    activity: Activity
    key: Key
    nbytes: int  # at most
    first: bool  # of the parts


def turns(
    program: Program,
    collective: Collective,
    order: Trace,
    plans: Mapping[int, Plan],
    topology: Topology,
    nodes: Sequence[int],
    chunk_bytes: int,
    least_bytes: int,
    sizes: FrameSizes | None = None,
) -> Turns:
    """The gates of the messages between nodes, of all ranks; every rank finds the same.

    plans: of all ranks. nodes: of each rank its node. chunk_bytes: of a chunk as it is sent uncoded. least_bytes:
    messages up to there are not paced and go when they are ready, as do those that are short beside the handing over of
    a turn. sizes: of the frames of coded plans.
    None, and why, where there are more than MOST_MESSAGES, where the model cannot run the program (it breaks a rule of
    the loaders that nothing here needs), and where the job could hang with gates: a receive may be waiting for what
    comes later. Raises UsageError where the topology has other ranks, or lacks a link of the program.
    """
    if len(plans) < program.ranks or len(order.send_tag) > MOST_MESSAGES:
        return Turns({}, f"the program has more than {MOST_MESSAGES} messages")
    model_bytes = chunk_bytes if sizes is None else sizes.most
    size_bytes = int(model_bytes / collective.chunk_bytes(1))
    try:
        simulated = simulate(program, topology, size_bytes, collective=collective)
    except CheckFailed:
        return Turns({}, "the model of the cluster cannot run the program")
    index = {(gpu.rank, tb.id): n for gpu in program.gpus for n, tb in enumerate(gpu.threadblocks)}
    price = costs(topology, collective.chunk_bytes(size_bytes))
    sent = _sends(order, program, plans, nodes, chunk_bytes, sizes)
    # A simulation's activities stand in the order of their starts.
    pieces: list[_Piece] = []
    for activity in simulated.activities:
        if activity.kind != "message" or nodes[activity.rank] == nodes[activity.dst]:
            continue
        tag = order.send_tag[activity.rank, index[activity.rank, activity.threadblock], activity.step]
        if _is_long(activity, price.alpha_fs[activity.link]):
            parts = sent[activity.rank, activity.dst, tag]
            pieces += [
                _Piece(activity, key, nbytes, key == parts[0][0])
                for key, nbytes in parts
                if nbytes > least_bytes
            ]
    users: defaultdict[int, list[_Piece]] = defaultdict(list)  # of each resource the messages so far
    found: dict[Key, tuple[Gate, ...]] = {}
    for piece in pieces:
        gates: dict[tuple[int, Key], float] = {}
        for resource, _ in price.holds[piece.activity.link]:
            before = reversed(users[resource][-MOST_BEFORE:])
            held_up = _held_up_by(piece.activity, before, price.alpha_fs) if piece.first else None
            if held_up is not None:
                earlier, part = held_up
                seen_by = _seer(earlier.activity, piece.activity, nodes)
                if seen_by is not None:
                    place = seen_by, earlier.key
                    gates[place] = max(part, gates.get(place, 0.0))
            users[resource].append(piece)
        if gates:
            found[piece.key] = tuple(Gate(*place, part) for place, part in sorted(gates.items()))
    everyone = [plans[rank] for rank in range(program.ranks)]
    if not _without_circles(everyone, found, pieces, nodes):
        return Turns({}, "the program hangs when a send waits for its receive")
    if not found:
        return Turns({}, "no long message between nodes has another before it on its links")
    return Turns(found)


def _without_circles(
    plans: Sequence[Plan],
    found: dict[Key, tuple[Gate, ...]],
    pieces: Sequence[_Piece],
    nodes: Sequence[int],
) -> bool:
    """Change gates until nothing hangs; whether that is possible.

    The model has slots for what has arrived, where a receive of the plans may have to wait for memory, be it for what
    comes later. A message that cannot wait for another one then waits for what that one waits for: both go together.
    """
    activity = {piece.key: piece.activity for piece in pieces}
    first = {id(piece.activity): piece.key for piece in reversed(pieces)}
    for trial in itertools.count():
        waits = {key: tuple(gate.message for gate in gates) for key, gates in found.items()}
        stuck = held_for_ever(plans, plans[0].direct, waits)
        if stuck is None:
            return True
        if not stuck:
            return False
        if trial >= MOST_TRIALS:
            for key in stuck:
                del found[key]
            continue
        key = stuck[0]
        instead = {
            Gate(seen_by, before.message, before.part)
            for gate in found[key]
            for before in found.get(first[id(activity[gate.message])], ())
            if (seen_by := _seer(activity[before.message], activity[key], nodes)) is not None
        }
        if instead:
            found[key] = tuple(sorted(instead, key=lambda gate: (gate.seen_by, gate.message)))
        else:
            del found[key]
    return False


def _sends(
    order: Trace,
    program: Program,
    plans: Mapping[int, Plan],
    nodes: Sequence[int],
    chunk_bytes: int,
    sizes: FrameSizes | None,
) -> dict[Key, list[tuple[Key, int]]]:
    """Of each message of the program to another node those of the plans, in order, and their bytes at most."""
    messages = Counter((rank, program.gpus[rank].threadblocks[tb].send) for rank, tb, _ in order.send_tag)

    def nbytes(op: Operation) -> int:
        assert op.src is not None
        if sizes is not None and op.frames:
            return sizes.stride + (op.src[2] - 1) * sizes.most
        return op.src[2] * chunk_bytes

    found: defaultdict[Key, list[tuple[Key, int]]] = defaultdict(list)
    for rank, plan in plans.items():
        for op in plan.operations:
            if op.kind == "send" and nodes[op.peer] != nodes[rank]:
                key = (
                    rank,
                    op.peer,
                    op.tag % messages[rank, op.peer],
                )  # of parts as runtime/parts.py numbers them
                found[key].append(((rank, op.peer, op.tag), nbytes(op)))
    return found


def _is_long(message: Activity, alpha_fs: int) -> bool:
    """Whether handing turns over is short beside it."""
    lasts = message.end_fs - message.start_fs - alpha_fs
    return lasts >= WORTH_HANDOVERS * (2 * alpha_fs + HANDOVER_FS)


def _held_up_by(
    message: Activity, before: Iterable[_Piece], alpha_fs: Sequence[int]
) -> tuple[_Piece, float] | None:
    """The earlier message of a link that this one waits for, and how much of it: all that went there before, but for
    the last WINDOW_BYTES."""
    window = WINDOW_BYTES
    for earlier in before:
        if earlier.activity.end_fs - alpha_fs[earlier.activity.link] > message.start_fs:
            continue
        if earlier.nbytes > window:
            return earlier, (earlier.nbytes - window) / earlier.nbytes
        window -= earlier.nbytes
    return None


def _seer(earlier: Activity, later: Activity, nodes: Sequence[int]) -> int | None:
    """Who sees how far the earlier message is: at the node that both leave, or else at the one that both go to."""
    if nodes[earlier.rank] == nodes[later.rank]:
        return earlier.rank
    return earlier.dst if nodes[earlier.dst] == nodes[later.dst] else None
