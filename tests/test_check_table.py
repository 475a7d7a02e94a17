"""The judge of columns agrees with the judge of objects: on right schedules, on damaged ones, on random ones."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from native_algorithms import timed, two_nodes

from taccl.profiles.link_table import link_table
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth import check_holds
from taccl.synth.algorithm import Algorithm, Certificate, Message
from taccl.synth.check_algorithm import MAX_PROBLEMS, check_algorithm
from taccl.synth.check_table import LATEST_FS, check_table
from taccl.synth.collective import Collective, build
from taccl.synth.cost import costs
from taccl.synth.engines import BASELINES, Inapplicable
from taccl.synth.message_table import MessageTable, joined, message_table, messages_of
from taccl.synth.places import NAMED, Places
from taccl.synth.schedule import Transfer, completion_fs, time_batched, time_in_order

SIZE = 4 * 10**6
OUTCOME = re.compile("never gets|contributions|time_fs")


def places(collective: Collective) -> Places:
    return Places(collective.name, collective.ranks, collective.partition, collective.root)


def judged(algorithm: Algorithm, topology: Topology, batches: list[MessageTable] | None = None) -> list[str]:
    return check_table(
        topology,
        link_table(topology),
        places(algorithm.collective),
        algorithm.size_bytes,
        [message_table(algorithm.messages)] if batches is None else batches,
        algorithm.time_fs,
    )


def chunk_by_chunk(algorithm: Algorithm) -> list[MessageTable]:
    """Batches of whole chunks; chunks that share a message stay together."""
    batch_of = list(range(len(algorithm.collective.chunks)))
    for message in algorithm.messages:
        joint = {batch_of[c] for c in message.chunks}
        batch_of = [min(joint) if b in joint else b for b in batch_of]
    return [
        message_table(m for m in algorithm.messages if batch_of[m.chunks[0]] == batch)
        for batch in sorted(set(batch_of), reverse=True)
    ]


def agree(algorithm: Algorithm, topology: Topology) -> bool:
    """Whether both judges call it right, which they must agree on."""
    expected = check_algorithm(algorithm, topology)
    found = judged(algorithm, topology)
    assert bool(found) == bool(expected), (expected, found)
    outcomes = [[p for p in problems if OUTCOME.search(p)] for problems in (found, expected)]
    # What is sent without being there counts as nothing for one judge, as an arrival for the other.
    if max(len(found), len(expected)) <= MAX_PROBLEMS and not any("does not have" in p for p in expected):
        assert sorted(outcomes[0]) == sorted(outcomes[1])
    known = range(len(algorithm.collective.chunks))
    if all(m.chunks and set(m.chunks) <= set(known) for m in algorithm.messages):
        assert bool(judged(algorithm, topology, chunk_by_chunk(algorithm))) == bool(expected)
    return not expected


def machine(rng: random.Random) -> Topology:
    """A small connected machine: parallel links, shared ports, occupancy below alpha, reductions that take time."""
    kind = rng.randrange(4)
    if kind == 0:
        return two_nodes()
    if kind == 1:
        return load_topology(rng.choice(["ring:3", "torus2d:2x2", "ndv2:1"]))
    n = rng.randint(2, 4)
    ports = tuple(Port(f"p{i}", Fraction(rng.choice([1, 10, 30]))) for i in range(rng.randint(0, 3)))
    pairs = [(r, (r + 1) % n) for r in range(n)] + [
        (u, v) for u in range(n) for v in range(n) if u != v and rng.random() < 0.6
    ]
    links = tuple(
        Link(u, v, Fraction(alpha), Fraction(rng.choice([5, 10])), Fraction(rng.randint(0, alpha)),
             tuple(rng.sample(range(len(ports)), rng.randint(0, min(2, len(ports))))))
        for u, v in pairs
        for alpha in [rng.randint(0, 2)]
    )  # fmt: skip
    reducing = (Fraction(rng.choice([0, 3])), Fraction(rng.choice([0, 0, 10, 40])))
    return Topology("random", (tuple(range(n)),), links, ports, (), (), *reducing)


def baselines(rng: random.Random, topology: Topology) -> Algorithm | None:
    name = rng.choice(NAMED)
    n = topology.ranks
    collective = build(name, n, rng.randint(1, 2), root=rng.randrange(n))
    # Columns know one sum of a chunk on a rank, and along a tree to every rank there are several.
    engine = rng.choice(sorted(BASELINES.keys() - {"one-shot-trees"}))
    try:
        return timed(topology, collective, engine, SIZE)
    except Inapplicable:
        return None


def priced(topology: Topology, collective: Collective, messages: list[Message]) -> Algorithm:
    price = costs(topology, collective.chunk_bytes(SIZE))
    return Algorithm(
        "x", collective, topology.name, SIZE, tuple(messages), completion_fs(price, messages),
        Certificate(0.0, "", 0.0, "feasible"), "x",
    )  # fmt: skip


def scattered(rng: random.Random, topology: Topology) -> Algorithm:
    """Messages at times that often coincide; seldom right."""
    n = topology.ranks
    collective = build(rng.choice(NAMED), n, 1, root=rng.randrange(n))
    price = costs(topology, collective.chunk_bytes(SIZE))
    unit = price.transit(0, 1)
    messages = []
    for _ in range(rng.randint(1, 6)):
        link = rng.randrange(len(topology.links))
        joined_by = topology.links[link]
        chunks = rng.sample(range(len(collective.chunks)), rng.randint(1, min(2, len(collective.chunks))))
        start = unit * rng.randint(0, 4)
        end = start + price.transit(link, len(chunks))
        op = "reduce" if collective.combining and rng.random() < 0.7 else "copy"
        messages.append(Message(link, joined_by.src, joined_by.dst, tuple(sorted(chunks)), start, end, op))
    return priced(topology, collective, messages)


def moved(message: Message, by: int) -> Message:
    return replace(message, start_fs=message.start_fs + by, end_fs=message.end_fs + by)


def damaged(rng: random.Random, algorithm: Algorithm, topology: Topology) -> Algorithm:
    """One thing changed; some changes do no harm."""
    messages = list(algorithm.messages)
    if not messages:
        return replace(algorithm, time_fs=rng.choice([0, 1]))
    at = rng.randrange(len(messages))
    message = messages[at]
    step = rng.choice([1, 10**6, max(1, algorithm.time_fs)]) * rng.choice([-1, 1])
    unknown = len(algorithm.collective.chunks)
    other = rng.randrange(len(topology.links))
    kind = rng.randrange(14)
    if kind == 0:
        messages[at] = moved(message, step)
    elif kind == 1:
        del messages[at]
    elif kind == 2:
        messages.append(moved(message, algorithm.time_fs))
    elif kind == 3:
        messages.insert(at, message)
    elif kind == 4:
        messages[at] = replace(message, end_fs=message.end_fs + step)
    elif kind == 5:
        messages[at] = replace(message, link=rng.choice([-1, other, len(topology.links)]))
    elif kind == 6:
        messages[at] = replace(message, src=message.dst)
    elif kind == 7:
        messages[at] = replace(message, chunks=rng.choice([(-1,), (unknown,), (0, 0), (1, 0), (0, unknown)]))
    elif kind == 8:
        messages[at] = replace(message, chunks=(rng.randrange(unknown),) * 1)
    elif kind == 9:
        messages[at] = replace(message, op="copy" if message.op == "reduce" else "reduce")
    elif kind == 10:
        return replace(algorithm, time_fs=algorithm.time_fs + step)
    elif kind == 11:
        messages = [moved(m, abs(step) if m.start_fs >= message.start_fs else 0) for m in messages]
    elif kind == 12:
        twin = rng.randrange(len(messages))
        messages[at], messages[twin] = (
            replace(message, start_fs=messages[twin].start_fs),
            replace(messages[twin], start_fs=message.start_fs),
        )
        price = costs(topology, algorithm.chunk_bytes)
        for i in {at, twin}:
            m = messages[i]
            messages[i] = replace(m, end_fs=m.start_fs + price.transit(m.link, len(m.chunks)))
    else:
        rng.shuffle(messages)  # the order of the list means nothing
    made = replace(algorithm, messages=tuple(messages))
    if kind not in (4, 5, 6, 7):
        price = costs(topology, algorithm.chunk_bytes)
        made = replace(made, time_fs=completion_fs(price, made.messages))
    return made


def cases(seed: int, count: int) -> Iterator[tuple[Algorithm, Topology]]:
    rng = random.Random(seed)
    for _ in range(count):
        topology = machine(rng)
        made = baselines(rng, topology)
        if made is not None:
            yield made, topology
            for _ in range(4):
                yield damaged(rng, made, topology), topology
            yield damaged(rng, damaged(rng, made, topology), topology), topology
        yield scattered(rng, topology), topology


@pytest.mark.parametrize("seed", range(6))
def test_both_judges_agree(seed: int) -> None:
    verdicts = [agree(algorithm, topology) for algorithm, topology in cases(seed, 60)]
    assert min(verdicts.count(True), verdicts.count(False)) > 30


@pytest.mark.parametrize("most", [1, 3])
def test_resources_are_judged_alike_in_small_blocks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_holds, "MOST_AT_ONCE", most)
    assert {agree(algorithm, topology) for algorithm, topology in cases(100 + most, 15)} == {True, False}


def test_resources_are_judged_alike_where_times_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes in femtoseconds and some resources exceed 63 bits: times are renumbered."""
    monkeypatch.setattr(check_holds, "MOST_NARROW", 0)
    topology = load_topology("ring:300")
    made = timed(topology, build("broadcast", 300), "ring", 10**11)
    assert made.time_fs > 1 << 57
    assert judged(made, topology) == []
    second = moved(made.messages[0], 1)
    assert any("still held by" in p for p in judged(with_messages(made, [*made.messages, second]), topology))


def with_messages(algorithm: Algorithm, messages: list[Message]) -> Algorithm:
    return replace(algorithm, messages=tuple(messages))


def test_reductions_that_are_no_trees() -> None:
    """Recursive doubling sends sums on that are still growing: right, and told so by the walk through time."""
    topology = load_topology("dgx1v:1")
    made = timed(topology, build("allreduce", 8), "recursive-doubling")
    assert len(made.messages) > 14 * 8 // 8
    assert agree(made, topology)
    assert not agree(with_messages(made, list(made.messages[:-1])), topology)


@pytest.mark.parametrize("name", NAMED)
def test_places_are_those_of_the_collective(name: str) -> None:
    for ranks, partition, root in ((1, 1, 0), (3, 2, 1), (4, 3, 3)):
        built = build(name, ranks, partition, root=root)
        mine = Places(name, ranks, partition, built.root)
        ids = np.arange(mine.chunks)
        assert mine.chunks == len(built.chunks) and mine.combining == built.combining
        assert mine.chunk_bytes(12345) == built.chunk_bytes(12345)
        for side, attribute in ((mine.source(ids), "sources"), (mine.destination(ids), "destinations")):
            for chunk, there in zip(ids.tolist(), built.chunks, strict=True):
                holders = [rank for rank, _ in getattr(there, attribute)]
                assert holders == (list(range(ranks)) if side is None else [side[chunk]])


RING = load_topology("ring:4")


def allgather() -> Algorithm:
    price = costs(RING, Fraction(SIZE, 4))
    link = {(x.src, x.dst): i for i, x in enumerate(RING.links)}
    hops = [(link[(c + hop) % 4, (c + hop + 1) % 4], c) for hop in range(3) for c in range(4)]
    collective = build("allgather", 4)
    messages = time_in_order(RING, collective, price, [Transfer(x, (c,)) for x, c in hops])
    return priced(RING, collective, list(messages))


def test_problems_are_sentences_with_rank_link_and_time() -> None:
    made = allgather()
    price = costs(RING, made.chunk_bytes)
    unit = price.transit(0, 1)
    assert judged(made, RING) == []
    late = made.messages[-1]
    assert judged(with_messages(made, list(made.messages[:-1])), RING) == [
        f"rank {late.dst} never gets chunk {late.chunks[0]}"
    ]
    relay = next(i for i, m in enumerate(made.messages) if m.start_fs)
    messages = list(made.messages)
    messages[relay] = moved(messages[relay], -1)
    m = messages[relay]
    found = judged(with_messages(made, messages), RING)
    assert (
        f"message {relay} (copy of chunk {m.chunks[0]}, {m.src}->{m.dst}, {m.start_fs} fs): "
        f"rank {m.src} does not have chunk {m.chunks[0]} yet"
    ) in found
    before = next(i for i, x in enumerate(messages) if x.link == m.link and x.start_fs == 0)
    assert (
        f"message {relay} (link {m.link}, {m.src}->{m.dst}, {unit - 1} fs): link {m.link} is still held by "
        f"message {before} (link {m.link}, {m.src}->{m.dst}, 0 fs) until {unit} fs"
    ) in found
    assert judged(replace(made, time_fs=5), RING) == [
        f"time_fs is 5, but the last arrival or reduction ends at {made.time_fs} fs"
    ]
    assert "has 4" in judged(replace(made, collective=build("allgather", 5)), RING)[0]


def test_problems_of_form() -> None:
    made = allgather()
    table = message_table(made.messages)
    wrong = {
        "link does not exist": replace(table, link=table.link + 8),
        "joins other ranks": replace(table, src=table.dst),
        "among 0..3": replace(table, chunks=table.chunks + 2),
        "no meaning in allgather": replace(table, reduces=~table.reduces),
        "before time 0": replace(table, start_fs=table.start_fs - 1),
        "cost model says": replace(table, end_fs=table.end_fs + 1),
        "19 minutes": replace(table, start_fs=table.start_fs + LATEST_FS),
        "different lengths": replace(table, src=table.src[1:]),
        "must have chunks": replace(table, first=np.zeros_like(table.first)),
    }
    for words, damaged_table in wrong.items():
        found = judged(made, RING, [damaged_table])
        assert found and all(words in p for p in found[:1]), found
        assert len(found) <= MAX_PROBLEMS + 1


def test_a_long_list_of_problems_is_cut() -> None:
    topology = load_topology("ring:60")
    empty = priced(topology, build("allgather", 60), [])
    found = judged(empty, topology, [])
    assert len(found) == MAX_PROBLEMS + 1 and found[-1] == f"stopped after {MAX_PROBLEMS} problems"


def test_half_a_chunk_in_a_batch_is_refused() -> None:
    made = allgather()
    half = [message_table(made.messages[:6]), message_table(made.messages[6:])]
    with pytest.raises(ValueError, match="appears in two batches"):
        judged(made, RING, half)


def test_messages_of_several_chunks() -> None:
    topology = two_nodes()
    collective = build("alltoall", 4, 2)
    price = costs(topology, collective.chunk_bytes(SIZE))
    link = {(x.src, x.dst): i for i, x in enumerate(topology.links)}
    across = [
        Transfer(link[s, d], ((s * 4 + d) * 2 + j,))
        for s in range(4)
        for d in range(4)
        if (s, d) in link
        for j in range(2)
    ]
    messages = list(time_batched(topology, collective, price, across))
    assert max(len(m.chunks) for m in messages) > 1
    made = priced(topology, collective, messages)
    assert agree(made, topology)
    assert not agree(with_messages(made, messages[1:]), topology)


def test_tables_are_joined_in_order() -> None:
    made = allgather()
    table = message_table(made.messages)
    parts = [message_table(made.messages[:5]), message_table(made.messages[5:])]
    assert messages_of(joined(parts)) == messages_of(table) == made.messages
    assert len(joined([])) == 0
