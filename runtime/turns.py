"""Turns on shared uplinks: when a message between nodes may begin, as the model has it.

A schedule says who uses a node's uplink and downlink, and the trunk of its rack, when. Ranks know nothing of one
another there: all that is ready goes at once, TCP gives each the same share, messages that others wait for come late,
and links stand idle later. So the program is simulated on its cluster, and each message gets gates: it begins when the
message before it, on each link that the two share, has come so far that no more than WINDOW_BYTES of it are left. One
that the model still has under way (it goes to a slow node, and its uplink is free before it has arrived) is no gate,
but what went before it may be. A gate is seen by the sender of the earlier message, from confirmations, or by its
receiver, who tell the sender of the later one.

Order is kept, times are not: a link that is slower than its profile makes all that follows later, and nothing jumps a
queue. Messages that fit into the window have no turns: several of them are on their way together, so that no link waits
for an answer. To hand a turn over takes a round trip and a look of each of two ranks, so only messages that take many
times as long have turns. And where ranks share cores, only messages on links so slow that the wire sets the pace: on
quicker ones it is the cores, which give each flow its time when they like, and in turns all wait for the slowest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from taccl.errors import CheckFailed
from taccl.profiles.topology import Topology
from taccl.runtime.plan import Plan
from taccl.runtime.rendezvous import held_for_ever
from taccl.runtime.trace import Trace
from taccl.synth.collective import Collective
from taccl.synth.cost import FS_PER_US, costs
from taccl.synth.program import Program
from taccl.synth.simulate import Activity, simulate

Key = tuple[int, int, int]  # of a message: source, destination, tag

WINDOW_BYTES = 128 << 10
HANDOVER_FS = 400 * FS_PER_US  # of a turn, beside two latencies, where ranks share cores
WORTH_HANDOVERS = 8  # a message takes so many times as long as the handing over of its turn
# The window takes so long at least where ranks share cores: a time slice, for which a rank may be without a core.
SLICE_FS = 3000 * FS_PER_US
MOST_MESSAGES = 20_000  # of more, a simulation takes seconds
MOST_TRIALS = 64  # of changing gates one by one
TRIED_OPERATIONS = 500_000  # in all trials together
MOST_BEFORE = 64  # messages of a link that are looked through for one gate


@dataclass(frozen=True, slots=True)
class Gate:
    """What a message waits for."""

    seen_by: int  # rank; it tells the sender of the message that waits
    message: Key  # the earlier one
    part: float  # of it that must be confirmed at its sender, or have arrived at its receiver: above 0, at most 1


@dataclass(frozen=True, slots=True)
class Turns:
    """What messages wait for: of each that waits its gates. why_none: what a person can know where there are none.
    begins: the messages between nodes in the order in which they begin in the model; empty where it is not known."""

    gates: Mapping[Key, tuple[Gate, ...]]
    why_none: str = ""
    begins: tuple[Key, ...] = ()


def turns(
    program: Program,
    collective: Collective,
    order: Trace,
    plans: Mapping[int, Plan],
    topology: Topology,
    nodes: Sequence[int],
    chunk_bytes: int,
    wanted: bool = True,
) -> Turns:
    """The gates of the messages between nodes, of all ranks, and their order; every rank finds the same.

    plans: of all ranks. nodes: of each rank its node. chunk_bytes: of a chunk as it is sent. wanted: False for the
    order alone. No gates, and why, where there are more than MOST_MESSAGES, where the model cannot run the program (it
    breaks a rule of the loaders that nothing here needs), and where the job could hang with gates, however some are
    changed. Raises UsageError where the topology has other ranks, or lacks a link of the program.
    """
    if len(plans) < program.ranks or len(order.send_tag) > MOST_MESSAGES:
        return Turns({}, f"the program has more than {MOST_MESSAGES} messages")
    size_bytes = int(chunk_bytes / collective.chunk_bytes(1))
    try:
        simulated = simulate(program, topology, size_bytes, collective=collective)
    except CheckFailed:
        return Turns({}, "the model of the cluster cannot run the program")
    index = {(gpu.rank, tb.id): n for gpu in program.gpus for n, tb in enumerate(gpu.threadblocks)}
    price = costs(topology, collective.chunk_bytes(size_bytes))
    # A simulation's activities stand in the order of their starts.
    between = [a for a in simulated.activities if a.kind == "message" and nodes[a.rank] != nodes[a.dst]]

    def key(a: Activity) -> Key:
        return a.rank, a.dst, order.send_tag[a.rank, index[a.rank, a.threadblock], a.step]

    begins = tuple(map(key, between))
    if not wanted:
        return Turns({}, "", begins)
    long = [
        activity
        for activity in between
        if activity.count * chunk_bytes > WINDOW_BYTES and _is_long(activity, price.alpha_fs[activity.link])
    ]
    messages = [
        message
        for message in long
        if not topology.load_us or _is_slow(message, chunk_bytes, price.alpha_fs[message.link])
    ]
    if long and not messages:
        return Turns({}, "the ranks share cores, and their links are too quick for turns", begins)
    keys = list(map(key, messages))
    users: defaultdict[int, list[int]] = defaultdict(list)  # of each resource the messages so far
    found: dict[Key, tuple[Gate, ...]] = {}
    for number, message in enumerate(messages):
        gates: dict[tuple[int, Key], float] = {}
        for resource, _ in price.holds[message.link]:
            before = reversed(users[resource][-MOST_BEFORE:])
            held_up = _held_up_by(message, messages, before, chunk_bytes, price.alpha_fs)
            if held_up is not None:
                earlier, part = held_up
                seen_by = _seer(keys[earlier], keys[number], nodes)
                if seen_by is not None:
                    place = seen_by, keys[earlier]
                    gates[place] = max(part, gates.get(place, 0.0))
            users[resource].append(number)
        if gates:
            found[keys[number]] = _gates(gates)
    everyone = [plans[rank] for rank in range(program.ranks)]
    if not _without_circles(everyone, found, nodes):
        return Turns({}, "some messages would wait for each other in a circle", begins)
    if not found:
        return Turns({}, "no long message between nodes has another before it on its links", begins)
    return Turns(found, "", begins)


def _gates(parts: Mapping[tuple[int, Key], float]) -> tuple[Gate, ...]:
    """In an order that is the same on all ranks. parts: by who sees it and the earlier message."""
    return tuple(Gate(*place, part) for place, part in sorted(parts.items()))


def _without_circles(plans: Sequence[Plan], found: dict[Key, tuple[Gate, ...]], nodes: Sequence[int]) -> bool:
    """Change gates until nothing hangs; whether that was possible in the trials that there are.

    The model has slots for what has arrived, where a receive of the plans may have to wait for memory, be it for what
    comes later. A message that cannot wait for another one then waits for what that one waits for: both go together.
    """
    operations = sum(len(plan.operations) for plan in plans)
    for _ in range(min(MOST_TRIALS, 1 + TRIED_OPERATIONS // operations)):
        waits = {key: tuple(gate.message for gate in gates) for key, gates in found.items()}
        stuck = held_for_ever(plans, plans[0].direct, waits)
        if stuck is None:
            return True
        if not stuck:
            return False
        key = stuck[0]
        instead: dict[tuple[int, Key], float] = {}
        for before in (before for gate in found[key] for before in found.get(gate.message, ())):
            seen_by = _seer(before.message, key, nodes)
            if seen_by is not None:
                place = seen_by, before.message
                instead[place] = max(before.part, instead.get(place, 0.0))
        if instead:
            found[key] = _gates(instead)
        else:
            del found[key]
    return False


def _is_long(message: Activity, alpha_fs: int) -> bool:
    """Whether handing turns over is short beside it."""
    return _lasts_fs(message, alpha_fs) >= WORTH_HANDOVERS * (2 * alpha_fs + HANDOVER_FS)


def _is_slow(message: Activity, chunk_bytes: int, alpha_fs: int) -> bool:
    """Whether the window takes a time slice on its link."""
    return _lasts_fs(message, alpha_fs) * WINDOW_BYTES >= SLICE_FS * message.count * chunk_bytes


def _lasts_fs(message: Activity, alpha_fs: int) -> int:
    """How long it has its link."""
    return message.end_fs - message.start_fs - alpha_fs


def _held_up_by(
    message: Activity,
    messages: Sequence[Activity],
    before: Iterable[int],
    chunk_bytes: int,
    alpha_fs: Sequence[int],
) -> tuple[int, float] | None:
    """The earlier message of a link that this one waits for, and how much of it: all but the last WINDOW_BYTES."""
    for number in before:
        earlier = messages[number]
        if earlier.end_fs - alpha_fs[earlier.link] <= message.start_fs:
            nbytes = earlier.count * chunk_bytes
            return number, (nbytes - WINDOW_BYTES) / nbytes
    return None


def _seer(earlier: Key, later: Key, nodes: Sequence[int]) -> int | None:
    """Who sees how far the earlier message is: at the node that both leave, or else where it comes, be it the node that
    both go to or another one beyond what they share. None where it goes to the node that the later one leaves."""
    if nodes[earlier[0]] == nodes[later[0]]:
        return earlier[0]
    return earlier[1] if nodes[earlier[1]] != nodes[later[0]] else None
