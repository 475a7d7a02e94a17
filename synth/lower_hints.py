"""What makes a program keep its schedule's order where messages compete for a link or a port.

A resource goes to the message that was ready first, and among equals to the one of the lower threadblock id. A
message that is scheduled later but ready earlier would jump the queue. Two remedies cost no time: it may wait for the
last thing that, in the schedule, completes on its own rank before it starts; or, among equals, ids may be chosen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from taccl.synth.algorithm import Algorithm
from taccl.synth.cost import Costs
from taccl.synth.lower_memory import released
from taccl.synth.lower_threadblocks import Sender
from taccl.synth.schedule import completions
from taccl.synth.simulate import Simulation


@dataclass(frozen=True, slots=True)
class Hints:
    """waits: (m, n): the send of message m waits until message n is through on m's source rank (it was received
    there, or sent from there). before: (a, b): threadblock a has a lower id than b."""

    waits: frozenset[tuple[int, int]] = frozenset()
    before: frozenset[tuple[Sender, Sender]] = frozenset()


NO_HINTS = Hints()


def more_hints(
    shape: Algorithm,
    priced: Costs,
    simulation: Simulation,
    message_at: dict[tuple[int, int, int], int],
    sender_of: Sequence[Sender],
    hints: Hints,
) -> Hints:
    """The hints and one more for each message that jumped a queue; the same hints when there is no remedy left.

    message_at: (rank, threadblock, step) -> message. sender_of: the threadblock that sends each message.
    """
    ready, started = [0] * len(shape.messages), [0] * len(shape.messages)
    for activity in simulation.activities:
        if activity.kind == "message":
            number = message_at[activity.rank, activity.threadblock, activity.step]
            ready[number], started[number] = activity.ready_fs, activity.start_fs
    last = _last_before(shape, priced)
    waits, before = set(hints.waits), set(hints.before)
    waiting = {number for number, _ in waits}
    served: set[int] = set()
    for late, early in _jumps(shape, priced, ready, started):
        if early in served:
            continue
        served.add(early)
        pair = (sender_of[late], sender_of[early])
        if early not in waiting and last[early][1] >= 0:
            waits.add((early, last[early][1]))
        elif ready[early] == ready[late] and pair[0] != pair[1]:
            before.add(pair)
    return Hints(frozenset(waits), frozenset(before))


def all_waits(shape: Algorithm, priced: Costs, sender_of: Sequence[Sender]) -> Hints:
    """Every message waits for the last thing that completes on its rank before it starts.

    While a program keeps to its schedule this delays nothing, and messages become ready in an order that is as near to
    the schedule's as waiting can make it. Of those that are ready at the same time on several ranks (some may have had
    nothing to wait for) and then compete, ids decide.
    """
    last = _last_before(shape, priced)
    waits = frozenset((number, other) for number, (_, other) in enumerate(last) if other >= 0)
    before = set()
    for users in _users(shape, priced).values():
        users.sort(key=lambda number: shape.messages[number].start_fs)
        for place, late in enumerate(users):
            ready = last[late][0]
            for early in reversed(users[:place]):
                if shape.messages[early].start_fs < ready:
                    break
                if last[early][0] == ready and sender_of[early] != sender_of[late]:
                    before.add((sender_of[early], sender_of[late]))
    return Hints(waits, frozenset(before))


def levels(before: frozenset[tuple[Sender, Sender]]) -> dict[Sender, int]:
    """The lowest id that each threadblock can have, by longest paths; constraints in a circle are dropped."""
    after: defaultdict[Sender, list[Sender]] = defaultdict(list)
    level: dict[Sender, int] = {}
    for first, second in sorted(before):
        if not _reaches(after, second, first):
            after[first].append(second)
    waiting = {sender: 0 for pair in before for sender in pair}
    for followers in after.values():
        for follower in followers:
            waiting[follower] += 1
    free = sorted(sender for sender, count in waiting.items() if not count)
    while free:
        sender = free.pop()
        level.setdefault(sender, 0)
        for follower in after[sender]:
            level[follower] = max(level.get(follower, 0), level[sender] + 1)
            waiting[follower] -= 1
            if not waiting[follower]:
                free.append(follower)
    return level


def _reaches(after: defaultdict[Sender, list[Sender]], start: Sender, goal: Sender) -> bool:
    seen, stack = {start}, [start]
    while stack:
        sender = stack.pop()
        if sender == goal:
            return True
        fresh = [follower for follower in after.get(sender, ()) if follower not in seen]
        seen.update(fresh)
        stack += fresh
    return False


def _jumps(
    shape: Algorithm, priced: Costs, ready: Sequence[int], started: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(late, early): a message that was ready in time and started late, and one that took its resource instead."""
    users = _users(shape, priced)
    for number, message in enumerate(shape.messages):
        if not ready[number] <= message.start_fs < started[number]:
            continue
        for resource, _ in priced.holds[message.link]:
            for other in users[resource]:
                theirs = shape.messages[other]
                if started[other] >= started[number] or theirs.start_fs <= message.start_fs:
                    continue
                hold = next(h for r, h in priced.holds[theirs.link] if r == resource)
                if started[other] + priced.hold(theirs.link, hold, len(theirs.chunks)) > message.start_fs:
                    yield number, other


def _users(shape: Algorithm, priced: Costs) -> dict[int, list[int]]:
    """The messages that hold each resource."""
    users: defaultdict[int, list[int]] = defaultdict(list)
    for number, message in enumerate(shape.messages):
        for resource, _ in priced.holds[message.link]:
            users[resource].append(number)
    return users


def _through(shape: Algorithm, priced: Costs) -> list[list[tuple[int, int]]]:
    """Per rank when which message is through there, by time."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(shape.collective.ranks)]
    for number, done in enumerate(completions(priced, shape.messages)):
        message = shape.messages[number]
        found[message.dst].append((done, number))
        found[message.src].append((released(priced, message), number))
    for events in found:
        events.sort()
    return found


def _last_before(shape: Algorithm, priced: Costs) -> list[tuple[int, int]]:
    """Per message when the last other one is through on its source rank before it starts, and which; (0, -1): none."""
    through = _through(shape, priced)
    found = []
    for number, message in enumerate(shape.messages):
        events = through[message.src]
        place = bisect_right(events, (message.start_fs, len(shape.messages)))
        found.append(events[place - 1] if place and events[place - 1][1] != number else (0, -1))
    return found
