"""An independent judge of timed algorithms: `check_algorithm`.

It shares the cost model with synthesis and nothing else: no scheduler, no solver, no data structure. Time is
walked once from event to event, and what every rank holds of every chunk is recomputed from the messages.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm, Message
from taccl.synth.cost import Costs, costs

MAX_PROBLEMS = 50


def check_algorithm(algorithm: Algorithm, topology: Topology) -> list[str]:
    """What is wrong with an algorithm on a topology, one sentence a problem; empty if it is right.

    Checked: messages follow their links and the cost model to the femtosecond; no link and no port carries
    two at once; a rank sends only what it has when the message starts; a rank's reductions run one after
    another in order of arrival (of equal arrivals: of start, then of link); at the end each destination holds
    each wanted contribution exactly once; `time_fs` is the end of the last arrival or reduction. O(m log m)
    for m messages, times chunks a message.
    """
    problems: list[str] = []
    for problem in _problems(algorithm, topology):
        problems.append(problem)
        if len(problems) == MAX_PROBLEMS:
            problems.append(f"stopped after {MAX_PROBLEMS} problems")
            break
    return problems


def _problems(algorithm: Algorithm, topology: Topology) -> Iterator[str]:
    collective = algorithm.collective
    if collective.ranks != topology.ranks:
        yield f"the algorithm is for {collective.ranks} ranks, {topology.name} has {topology.ranks}"
        return
    price = costs(topology, algorithm.chunk_bytes)
    malformed = False
    for number, message in enumerate(algorithm.messages):
        for problem in _form(algorithm, topology, price, message):
            malformed = True
            yield f"{_name(number, message)}: {problem}"
    if malformed:
        return
    yield from _overlaps(algorithm, topology, price)
    yield from _data(algorithm, price)


def _name(number: int, message: Message) -> str:
    chunks = ",".join(map(str, message.chunks[:6])) + (",..." if len(message.chunks) > 6 else "")
    route = f"{message.src}->{message.dst}, {message.start_fs} fs"
    return f"message {number} ({message.op} of chunks {chunks}, {route})"


def _form(algorithm: Algorithm, topology: Topology, price: Costs, message: Message) -> Iterator[str]:
    if not 0 <= message.link < len(topology.links):
        yield f"link {message.link} does not exist"
        return
    link = topology.links[message.link]
    if (link.src, link.dst) != (message.src, message.dst):
        yield f"link {message.link} joins {link.src}->{link.dst}"
    chunks = message.chunks
    known = len(algorithm.collective.chunks)
    if not chunks or list(chunks) != sorted(set(chunks)) or chunks[0] < 0 or chunks[-1] >= known:
        yield f"chunks must be ascending, without repeats, among 0..{known - 1}"
    if message.op not in ("copy", "reduce") or (
        message.op == "reduce" and not algorithm.collective.combining
    ):
        yield f"op {message.op!r} has no meaning in {algorithm.collective.title}"
    if (
        message.sum < 0
        or not message.into
        or list(message.into) != sorted(set(message.into))
        or message.into[0] < 0
    ):
        yield "sums must be 0 or more, those that it enters ascending, without repeats and at least one"
    if message.start_fs < 0:
        yield "starts before time 0"
    arrival = message.start_fs + price.transit(message.link, len(chunks))
    if message.end_fs != arrival:
        yield f"claims to arrive at {message.end_fs} fs, the cost model says {arrival} fs"


def _overlaps(algorithm: Algorithm, topology: Topology, price: Costs) -> Iterator[str]:
    # resource -> (start, end, message)
    holds: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for number, message in enumerate(algorithm.messages):
        for resource, per_chunk in price.holds[message.link]:
            until = message.start_fs + price.hold(message.link, per_chunk, len(message.chunks))
            holds[resource].append((message.start_fs, until, number))
    for resource, intervals in sorted(holds.items()):
        intervals.sort()
        latest, owner = -1, -1
        for start, until, number in intervals:
            if start < latest:
                links = len(topology.links)
                name = (
                    f"link {resource}"
                    if resource < links
                    else f"port {topology.ports[resource - links].name}"
                )
                yield (
                    f"{_name(number, algorithm.messages[number])}: {name} is still held by "
                    f"{_name(owner, algorithm.messages[owner])} until {latest} fs"
                )
            if until > latest:
                latest, owner = until, number


# What happens at one instant happens in this order: what arrives or is reduced then can be sent then.
_ARRIVAL, _REDUCED, _START = range(3)


def _data(algorithm: Algorithm, price: Costs) -> Iterator[str]:
    """Walk through time. A value is two bit sets: contributions, those that entered more than once."""
    collective, messages = algorithm.collective, algorithm.messages
    own: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, chunk): what each of its sums begins as
    value: dict[tuple[int, int, int], tuple[int, int]] = {}  # (rank, chunk, sum), where something has entered
    # Sums that the same has entered are one value, which is added to once: (rank, chunk, sum) -> what entered last.
    entered: dict[tuple[int, int, int], tuple[int, int]] = {}
    wanted: list[int] = []
    for number, chunk in enumerate(collective.chunks):
        contributions = dict.fromkeys(chunk.sources)
        for bit, (rank, _) in enumerate(contributions):
            mine, twice = own.get((rank, number), (0, 0))
            own[rank, number] = (mine | 1 << (bit if collective.combining else 0), twice)
        wanted.append((1 << len(contributions)) - 1 if collective.combining else 1)
    # Reductions that arrive at one instant run in the order of their starts, then of their links.
    turn = [0] * len(messages)
    by_start = sorted(range(len(messages)), key=lambda n: (messages[n].start_fs, messages[n].link, n))
    for place, number in enumerate(by_start):
        turn[number] = place
    events: list[tuple[int, int, int, int]] = [
        (m.start_fs, _START, turn[number], number) for number, m in enumerate(messages)
    ]
    heapq.heapify(events)
    carried: dict[int, list[tuple[int, int]]] = {}
    engine_free: defaultdict[int, int] = defaultdict(int)
    last = 0
    while events:
        now, kind, _, number = heapq.heappop(events)
        message = messages[number]
        if kind == _START:
            held = [
                value.get((message.src, c, message.sum), own.get((message.src, c))) for c in message.chunks
            ]
            if None in held:
                missing = message.chunks[held.index(None)]
                yield f"{_name(number, message)}: rank {message.src} does not have chunk {missing} yet"
            carried[number] = [known or (0, 0) for known in held]
            heapq.heappush(events, (message.end_fs, _ARRIVAL, turn[number], number))
            continue
        last = max(last, now)
        if kind == _ARRIVAL and message.op == "reduce":
            values = _enter(entered, number, message)
            done = max(engine_free[message.dst], now) + values * price.reduce(len(message.chunks))
            engine_free[message.dst] = done
            heapq.heappush(events, (done, _REDUCED, turn[number], number))
            continue
        if kind == _ARRIVAL:
            _enter(entered, number, message)
        for c, (sent, sent_twice) in zip(message.chunks, carried.pop(number), strict=True):
            for key in [(message.dst, c, entry) for entry in message.into]:
                if kind == _REDUCED:
                    mine, twice = value.get(key, own.get((message.dst, c), (0, 0)))
                    value[key] = (mine | sent, twice | sent_twice | (mine & sent))
                else:
                    value[key] = (sent, sent_twice)
    final = {place: value.get((*place, 0), own.get(place, (0, 0))) for place in _wanted_places(algorithm)}
    yield from _outcome(algorithm, final, wanted)
    if last != algorithm.time_fs:
        yield f"time_fs is {algorithm.time_fs}, but the last arrival or reduction ends at {last} fs"


def _enter(entered: dict[tuple[int, int, int], tuple[int, int]], number: int, message: Message) -> int:
    """Note that a message enters sums of its destination; returns how many different values these are."""
    alike: dict[tuple[tuple[int, int] | None, ...], int] = {}
    for entry in message.into:
        places = [(message.dst, c, entry) for c in message.chunks]
        before = tuple(entered.get(place) for place in places) if message.op == "reduce" else ()
        which = alike.setdefault(before, len(alike))
        entered.update(dict.fromkeys(places, (number, which)))
    return len(alike)


def _wanted_places(algorithm: Algorithm) -> Iterator[tuple[int, int]]:
    for number, chunk in enumerate(algorithm.collective.chunks):
        for rank, _ in chunk.destinations:
            yield rank, number


def _outcome(
    algorithm: Algorithm, value: dict[tuple[int, int], tuple[int, int]], wanted: list[int]
) -> Iterator[str]:
    for number, chunk in enumerate(algorithm.collective.chunks):
        for rank in dict.fromkeys(rank for rank, _ in chunk.destinations):
            have, twice = value.get((rank, number), (0, 0))
            lacking = wanted[number] & ~have
            if lacking and not have:
                yield f"rank {rank} never gets chunk {number}"
            elif lacking:
                sources = list(dict.fromkeys(chunk.sources))
                ranks = [sources[bit][0] for bit in range(len(sources)) if lacking >> bit & 1]
                yield f"rank {rank}, chunk {number}: the contributions of ranks {ranks} are missing"
            if twice:
                sources = list(dict.fromkeys(chunk.sources))
                ranks = [sources[bit][0] for bit in range(len(sources)) if twice >> bit & 1]
                yield f"rank {rank}, chunk {number}: the contributions of ranks {ranks} are in it twice"
