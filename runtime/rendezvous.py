"""Whether the plans of all ranks run to the end together, tried symbolically.

A send is done only once its receive is posted, for messages of every length: the strictest behaviour that an MPI
library may show (rendezvous).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from taccl.runtime.plan import Message, Plan, followers, staged


def finishes(
    plans: Sequence[Plan], direct: bool = False, waits: Mapping[Message, Sequence[Message]] | None = None
) -> bool:
    """Whether all the plans together run to the end when a send is done only once its receive is posted.

    This is the strictest behaviour that an MPI library may show (rendezvous for every length). direct: stricter,
    the send of a staged message is done only once the operation that uses it is. waits: messages that begin only once
    others, of any ranks, are sent.
    """
    return in_rounds(plans, direct, lambda source, target: False, waits) is not None


def held_for_ever(
    plans: Sequence[Plan], direct: bool, waits: Mapping[Message, Sequence[Message]]
) -> list[Message] | None:
    """None where the plans run to the end, as `finishes` has it; else the messages that then wait for others alone."""
    stuck: list[Message] = []
    rounds = in_rounds(plans, direct, lambda source, target: False, waits, stuck)
    return stuck if rounds is None else None


def in_rounds(
    plans: Sequence[Plan],
    direct: bool,
    held: Callable[[int, int], bool],
    waits: Mapping[Message, Sequence[Message]] | None = None,
    stuck: list[Message] | None = None,
) -> dict[tuple[int, int, int], int] | None:
    """An order in which the plans run to the end, as `finishes` has it; None when they do not.

    Messages of the pairs of ranks that are held go in rounds: a round has of each connection the first one that both
    ends have started, once nothing but such messages is left to do. So what a message of a round needs is done with the
    rounds before. Gives the round of each held message: (source, target, tag). waits: as in `finishes`. stuck: gets the
    messages that wait for nothing but those, when they do not.
    """
    index = {}  # (is receive, source, destination, tag) -> operation
    for plan in plans:
        for number, op in enumerate(plan.operations):
            if op.kind == "recv":
                index[True, op.peer, plan.rank, op.tag] = (plan.rank, number)
            elif op.kind == "send":
                index[False, plan.rank, op.peer, op.tag] = (plan.rank, number)
    missing = [[len(op.predecessors) for op in plan.operations] for plan in plans]
    successors = [followers([op.predecessors for op in plan.operations]) for plan in plans]
    started: set[tuple[int, int]] = set()
    after: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(
        list
    )  # sends that wait for a send
    gates: Counter[tuple[int, int]] = Counter()  # of sends that wait for sends, those that are not done
    for (source, target, tag), earlier in (waits or {}).items():
        rank, number = index[False, source, target, tag]
        missing[rank][number] += len(earlier)
        gates[rank, number] = len(earlier)
        for source, target, tag in earlier:
            after[index[False, source, target, tag]].append((rank, number))
    users: dict[tuple[int, int], tuple[int, int]] = {}  # operation that reads a sender's memory -> the send
    work = deque((plan.rank, n) for plan in plans for n, count in enumerate(missing[plan.rank]) if not count)
    left = sum(len(plan.operations) for plan in plans)
    rounds: dict[tuple[int, int, int], int] = {}
    waiting: defaultdict[tuple[int, int, int], list[int]] = defaultdict(
        list
    )  # connection -> tags of its messages
    turn = 0

    def complete(rank: int, number: int) -> None:
        nonlocal left
        left -= 1
        held_up = after.get((rank, number), ())
        for send in held_up:
            gates[send] -= 1
        for whose, later in (*((rank, n) for n in successors[rank][number]), *held_up):
            missing[whose][later] -= 1
            if not missing[whose][later]:
                work.append((whose, later))

    def match(source: int, target: int, tag: int) -> None:
        send, receive = index[False, source, target, tag], index[True, source, target, tag]
        complete(*receive)
        if direct and staged(plans[receive[0]].operations[receive[1]]):
            users[receive[0], receive[1] + 1] = send
        else:
            complete(*send)

    while True:
        while work:
            rank, number = work.popleft()
            op = plans[rank].operations[number]
            if op.kind not in ("send", "recv"):
                complete(rank, number)
                if (rank, number) in users:
                    complete(*users[rank, number])
                continue
            started.add((rank, number))
            ends = (op.peer, rank, op.tag) if op.kind == "recv" else (rank, op.peer, op.tag)
            key = (op.kind != "recv", *ends)
            if index[key] not in started:
                continue
            source, target, tag = ends
            if held(source, target):
                heapq.heappush(waiting[source, target, op.channel], tag)
            else:
                match(source, target, tag)
        if not waiting:
            if left and stuck is not None:
                for source, target, tag in waits or {}:
                    rank, number = index[False, source, target, tag]
                    if 0 < missing[rank][number] == gates[rank, number]:
                        stuck.append((source, target, tag))
            return rounds if left == 0 else None
        for (source, target, _), tags in list(waiting.items()):
            tag = heapq.heappop(tags)
            rounds[source, target, tag] = turn
            match(source, target, tag)
        turn += 1
        waiting = defaultdict(list, {line: tags for line, tags in waiting.items() if tags})
