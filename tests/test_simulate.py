"""Simulation: hand-computed times, and what must hold for any program on any topology."""

import json
import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_programs import GENERATED, allpairs_allreduce, along_trees, make, relay_allgather, ring_allreduce

from taccl.cli import cli
from taccl.errors import CheckFailed, UsageError
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.bounds import lower_bound
from taccl.synth.collective import bus_factor
from taccl.synth.cost import FS_PER_US, costs
from taccl.synth.msccl_xml import write_xml
from taccl.synth.simulate import resource_name, simulate

MB = 10**6


def topology(n, pairs=None, *, alpha=1, beta=10, occupancy=None, ports=(), reduce_alpha=0, reduce_beta=0):
    """pairs: (src, dst, *ports) of each link, default all; numbers are in us and us/MB."""
    if pairs is None:
        pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    return Topology(
        "test", (tuple(range(n)),),
        tuple(
            Link(
                src, dst, Fraction(alpha), Fraction(beta), Fraction(alpha if occupancy is None else occupancy),
                tuple(crossed),
            )
            for src, dst, *crossed in pairs
        ),
        tuple(Port(f"port{x}", Fraction(b)) for x, b in enumerate(ports)),
        reduce_alpha_us=Fraction(reduce_alpha), reduce_beta_us_per_mb=Fraction(reduce_beta),
    )  # fmt: skip


def time_us(program, cluster, size, **options):
    return simulate(program, cluster, size, **options).time_fs / FS_PER_US


def broadcast(n, tbs, chunks=1, **options):
    """In-place broadcast from rank 0; tbs: per rank the threadblocks."""
    return make("broadcast", chunks, [(chunks, 0, tbs.get(r, [])) for r in range(n)], inplace=True, **options)


def test_one_message():
    program = broadcast(2, {0: [(1, -1, 0, [("s", "i0", "i0")])], 1: [(-1, 0, 0, [("r", "i0", "i0")])]})
    result = simulate(program, topology(2), 2 * MB)
    assert result.time_fs == 21 * FS_PER_US
    assert result.algbw_gbps == pytest.approx(2e6 / 21e-6 / 1e9)
    assert result.busbw_gbps == pytest.approx(result.algbw_gbps * float(bus_factor("broadcast", 2)))
    [message] = result.activities
    assert (message.rank, message.dst, message.count, message.start_fs) == (0, 1, 1, 0)
    assert result.critical_path == (0,) and result.busy_fs[result.bottleneck] == 21 * FS_PER_US


def test_alpha_is_paid_once_for_chunks_sent_together():
    together = broadcast(
        2, {0: [(1, -1, 0, [("s", "i0", "i0", 4)])], 1: [(-1, 0, 0, [("r", "i0", "i0", 4)])]}, chunks=4
    )
    apart = broadcast(2, {
        0: [(1, -1, 0, [("s", f"i{c}", f"i{c}") for c in range(4)])],
        1: [(-1, 0, 0, [("r", f"i{c}", f"i{c}") for c in range(4)])],
    }, chunks=4)  # fmt: skip
    assert time_us(together, topology(2), 4 * MB) == 41
    assert time_us(apart, topology(2), 4 * MB) == 44
    # With occupancy 0 the messages follow each other without a gap, and alpha shows once at the end.
    assert time_us(apart, topology(2, occupancy=0), 4 * MB) == 41


def test_a_chain_forwards_chunk_by_chunk():
    program = broadcast(3, {
        0: [(1, -1, 0, [("s", f"i{c}", f"i{c}") for c in range(3)])],
        1: [(2, 0, 0, [("rcs", f"i{c}", f"i{c}") for c in range(3)])],
        2: [(-1, 1, 0, [("r", f"i{c}", f"i{c}") for c in range(3)])],
    }, chunks=3)  # fmt: skip
    assert time_us(program, topology(3), 3 * MB) == 4 * 11


def test_ports_are_shared_and_the_slowest_beta_counts():
    # Rank 0 sends to both others through one port of 30 us/MB; links alone would take 10.
    program = broadcast(3, {
        0: [(1, -1, 0, [("s", "i0", "i0")]), (2, -1, 0, [("s", "i0", "i0")])],
        1: [(-1, 0, 0, [("r", "i0", "i0")])], 2: [(-1, 0, 0, [("r", "i0", "i0")])],
    })  # fmt: skip
    shared = topology(3, [(0, 1, 0), (0, 2, 0)], ports=[30])
    result = simulate(program, shared, MB)
    assert result.time_fs == 62 * FS_PER_US
    assert resource_name(shared, result.bottleneck) == "port port0"
    assert [a.reason for a in result.activities] == ["start", "resource"]
    # A fast port holds shorter than the transit over a slow link: the second message starts when it is free.
    fast = topology(3, [(0, 1, 0), (0, 2, 0)], ports=[4])
    assert [a.start_fs // FS_PER_US for a in simulate(program, fast, MB).activities] == [0, 5]


def test_parallel_links_are_chosen_by_channel():
    program = broadcast(2, {
        0: [(1, -1, c, [("s", f"i{c}", f"i{c}")]) for c in range(3)],
        1: [(-1, 0, c, [("r", f"i{c}", f"i{c}")]) for c in range(3)],
    }, chunks=3)  # fmt: skip
    result = simulate(program, topology(2, [(0, 1), (1, 0), (0, 1)]), 3 * MB)
    assert [a.link for a in sorted(result.activities, key=lambda a: a.channel)] == [0, 2, 0]
    assert result.time_fs == 22 * FS_PER_US


def test_the_first_ready_goes_first_then_step_threadblock_rank():
    # Three threadblocks want link 0->1; threadblock 0 only after it received from rank 2.
    program = make("alltoall", 3, [
        (3, 3, [(1, 2, 0, [("r", "i0", "o2"), ("s", "i1", "o0")]), (1, -1, 1, [("s", "i1", "s0")]),
                (1, -1, 2, [("nop",), ("s", "i1", "s1")])]),
        (3, 3, [(-1, 0, c, [("r", "i1", d)]) for c, d in ((0, "o0"), (1, "s0"), (2, "s1"))]),
        (3, 3, [(0, -1, 0, [("s", "i0", "o2")])]),
    ], scratch=2)  # fmt: skip
    result = simulate(program, topology(3), 3 * MB)
    on_link = [a.threadblock for a in result.activities if (a.rank, a.dst) == (0, 1)]
    assert on_link == [1, 2, 0]  # 1 and 2 are ready at once: the lower step first
    same = make("alltoall", 2, [
        (2, 2, [(1, -1, c, [("s", "i1", f"s{c}")]) for c in range(3)]),
        (2, 2, [(-1, 0, c, [("r", "i1", f"s{c}")]) for c in range(3)]),
    ], scratch=3)  # fmt: skip
    assert [a.threadblock for a in simulate(same, topology(2), MB).activities] == [0, 1, 2]


def test_a_full_fifo_holds_the_sender_back():
    # Rank 1 first waits for rank 2's slow message; the third send to it needs a slot.
    program = make("alltoall", 12, [
        (12, 12, [(1, -1, 0, [("s", f"i{4 + c}", f"o{c}") for c in range(4)])]),
        (12, 12, [(-1, 2, 0, [("r", "i4", "o8")]),
                  (-1, 0, 0, [("r", "i4", "o0", (0, 0)), *[("r", f"i{4 + c}", f"o{c}") for c in range(1, 4)]])]),
        (12, 12, [(1, -1, 0, [("s", "i4", "o8")])]),
    ])  # fmt: skip
    slow = topology(3, [(0, 1), (2, 1, 0)], ports=[100])
    result = simulate(program, slow, 12 * MB)
    starts = [a.start_fs // FS_PER_US for a in result.activities if a.rank == 0]
    # The first two go at 0 and 11; at 101 rank 1 takes both, which frees two slots.
    assert starts == [0, 11, 101, 112]
    assert [a.reason for a in result.activities if a.rank == 0] == [
        "start",
        "threadblock",
        "slot",
        "threadblock",
    ]
    assert result.time_fs == 123 * FS_PER_US
    deep = make("alltoall", 12, [(12, 12, [(tb.send, tb.recv, tb.channel, [
        (s.kind, f"{s.src_buffer}{s.src_offset}", f"{s.dst_buffer}{s.dst_offset}",
         *([s.depends] if s.depends else [])) for s in tb.steps
    ]) for tb in gpu.threadblocks]) for gpu in program.gpus], protocol="LL")  # fmt: skip
    assert time_us(deep, slow, 12 * MB) == 101


def test_a_receive_waits_for_its_dependency():
    program = broadcast(2, {
        0: [(1, -1, 0, [("s", "i0", "i0")]), (1, -1, 1, [("s", "i1", "i1")])],
        1: [(-1, 0, 0, [("r", "i0", "i0", (1, 0))]), (-1, 0, 1, [("r", "i1", "i1")])],
    }, chunks=2)  # fmt: skip
    assert time_us(program, topology(2), 2 * MB) == 22


def test_reductions_of_a_rank_run_one_after_another():
    program = make("reduce", 2, [
        (2, 0, [(-1, 1, 0, [("rrc", "i0", "i0")]), (-1, 2, 0, [("rrc", "i1", "i1")])]),
        (2, 0, [(0, -1, 0, [("s", "i0", "i0")])]),
        (2, 0, [(0, -1, 0, [("s", "i1", "i1")])]),
    ], inplace=True)  # fmt: skip
    free = simulate(program, topology(3), 2 * MB)
    assert free.time_fs == 11 * FS_PER_US
    assert all(a.kind == "message" for a in free.activities)
    busy = simulate(program, topology(3, reduce_alpha=2, reduce_beta=5), 2 * MB)
    assert busy.time_fs == (11 + 7 + 7) * FS_PER_US
    sums = [a for a in busy.activities if a.kind == "reduce"]
    assert [(a.threadblock, a.start_fs // FS_PER_US, a.reason) for a in sums] == [
        (0, 11, "data"),
        (1, 18, "engine"),
    ]
    # A local reduction uses the same engine.
    local = make("reduce", 1, [(1, 0, [(-1, -1, 0, [("re", "s0", "i0"), ("re", "s1", "i0")])])], inplace=True,
                 scratch=2)  # fmt: skip
    assert time_us(local, topology(1, reduce_alpha=2, reduce_beta=5), MB) == 14


def test_reductions_take_turns_as_their_messages_arrived():
    at_once = make("reduce", 2, [
        (2, 0, [(-1, 1, 0, [("rrc", "i0", "i0")]), (-1, 2, 0, [("rrc", "i1", "i1")])]),
        (2, 0, [(0, -1, 0, [("s", "i0", "i0")])]),
        (2, 0, [(0, -1, 0, [("s", "i1", "i1")])]),
    ], inplace=True)  # fmt: skip
    for pairs, order in (([(1, 0), (2, 0)], [0, 1]), ([(2, 0), (1, 0)], [1, 0])):
        found = simulate(at_once, topology(3, pairs, reduce_alpha=2), 2 * MB)
        assert [
            a.threadblock for a in found.activities if a.kind == "reduce"
        ] == order  # the lower link first
    # The second message of rank 1 arrives at 21 and stands behind the first until 23; that of rank 2 arrives at 22.
    behind = make("reduce", 4, [
        (4, 0, [(-1, 1, 0, [("rrc", "i0", "i0"), ("rrc", "i1", "i1")]), (-1, 2, 0, [("rrc", "i2", "i2", 2)])]),
        (4, 0, [(0, -1, 0, [("s", "i0", "i0"), ("s", "i1", "i1")])]),
        (4, 0, [(0, -1, 0, [("s", "i2", "i2", 2)])]),
    ], inplace=True)  # fmt: skip
    cluster = topology(3, [(1, 0), (2, 0)], occupancy=0, reduce_alpha=12)
    later = replace(cluster.links[1], alpha_us=Fraction(2))
    found = simulate(behind, replace(cluster, links=(cluster.links[0], later)), 4 * MB)
    sums = [(a.threadblock, a.step, a.start_fs // FS_PER_US) for a in found.activities if a.kind == "reduce"]
    assert sums == [(0, 0, 11), (0, 1, 23), (1, 0, 35)]


def test_ring_times():
    n, size = 4, 4 * MB
    assert time_us(relay_allgather(n), topology(n), size) == (n - 1) * 11
    assert time_us(ring_allreduce(n), topology(n), size) == 2 * (n - 1) * 11
    assert time_us(ring_allreduce(n), topology(n, reduce_alpha=1), size) == 2 * (n - 1) * 11 + n - 1


def test_no_bytes_take_no_time_but_alpha():
    assert time_us(ring_allreduce(3), topology(3), 0) == 4


def test_what_cannot_run_is_refused():
    program = relay_allgather(3)
    with pytest.raises(UsageError, match=r"rank 1, threadblock 1, step 0.*rank 1 to rank 2"):
        simulate(program, topology(3, [(0, 1), (2, 0)]), MB)
    with pytest.raises(UsageError, match="3 ranks"):
        simulate(program, topology(4), MB)
    with pytest.raises(CheckFailed, match="deadlock"):
        simulate(make("allgather", 1, [(1, 1, [
            (-1, -1, 0, [("cpy", "i0", "o0", (1, 0))]), (-1, -1, 0, [("cpy", "i0", "o0", (0, 0))]),
        ])]), topology(1), MB)  # fmt: skip
    unmatched = broadcast(2, {0: [(1, -1, 0, [("s", "i0", "i0")])], 1: []})
    with pytest.raises(CheckFailed, match="never received"):
        simulate(unmatched, topology(2), MB)
    with pytest.raises(UsageError, match="negative"):
        simulate(program, topology(3), -1)


def random_topology(rng, n):
    ports = [rng.randint(1, 20) for _ in range(n)]
    pairs = [
        (i, j, *rng.sample(range(n), rng.randint(0, 2)))
        for i in range(n) for j in range(n) if i != j for _ in range(rng.randint(1, 2))
    ]  # fmt: skip
    alpha = Fraction(rng.randint(0, 8), 4)
    return topology(
        n, pairs, alpha=alpha, beta=Fraction(rng.randint(1, 30), 3), occupancy=alpha * Fraction(rng.randint(0, 2), 2),
        ports=ports, reduce_alpha=rng.choice([0, 0, 1]), reduce_beta=rng.choice([0, 0, 2]),
    )  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 5), st.booleans())
def test_every_run_keeps_the_rules(seed, n, combining):
    rng = random.Random(seed)
    program = along_trees(rng, n, combining)
    cluster = random_topology(rng, n)
    size = rng.choice([1, 1000, MB])
    result = simulate(program, cluster, size)
    price = costs(cluster, result.collective.chunk_bytes(size))
    messages = [a for a in result.activities if a.kind == "message"]
    held = {}
    for a in messages:
        assert a.end_fs == a.start_fs + price.transit(a.link, a.count)
        assert (cluster.links[a.link].src, cluster.links[a.link].dst) == (a.rank, a.dst)
        for resource, per_chunk in price.holds[a.link]:
            until = a.start_fs + price.hold(a.link, per_chunk, a.count)
            held.setdefault(resource, []).append((a.start_fs, until, a.ready_fs))
    for resource, intervals in held.items():
        intervals.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(intervals))
        assert result.busy_fs[resource] == sum(until - start for start, until, _ in intervals)
    for a in messages:  # nothing waits while all it needs is free
        covered = a.ready_fs
        for start, until in sorted((s, u) for r, _ in price.holds[a.link] for s, u, _ in held[r]):
            if start <= covered < until:
                covered = until
        assert covered >= a.start_fs
    engines = {}
    for a in result.activities:
        if a.kind == "reduce":
            assert a.start_fs >= engines.get(a.rank, 0) and a.end_fs == a.start_fs + price.reduce(a.count)
            engines[a.rank] = a.end_fs
    path = [result.activities[i] for i in result.critical_path]
    assert path[0].ready_fs == 0 and max(path[-1].end_fs, path[-1].release_fs) == result.time_fs
    assert all(result.activities[b].after == a for a, b in pairwise(result.critical_path))
    assert all(a.start_fs <= b.start_fs <= result.time_fs for a, b in pairwise(path))
    assert lower_bound(cluster, result.collective, size).time_fs <= result.time_fs
    assert simulate(program, cluster, size) == result


@pytest.mark.parametrize("name", GENERATED)
def test_generated_programs_are_priced_above_the_bound(name):
    program = GENERATED[name]
    cluster = topology(program.ranks, reduce_alpha=1)
    result = simulate(program, cluster, 12 * MB)
    assert lower_bound(cluster, result.collective, 12 * MB).time_fs <= result.time_fs


def test_command(tmp_path):
    path = tmp_path / "allreduce.xml"
    path.write_text(write_xml(allpairs_allreduce(8)))
    runner = CliRunner()
    result = runner.invoke(
        cli, ["simulate", str(path), "--topology", "dgx-a100:1", "--size", "1MB", "--json"]
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["schema"] == "taccl/simulate/v1" and document["size_bytes"] == MB
    assert document["time_us"] >= document["lower_bound_us"] > 0
    assert document["busbw_gbps"] == pytest.approx(document["algbw_gbps"] * 14 / 8, rel=1e-5)
    assert document["algbw_gbps"] == pytest.approx(MB / document["time_us"] / 1e3, rel=1e-4)
    assert document["bottleneck"] and document["critical_path"]
    text = runner.invoke(cli, ["simulate", str(path), "--topology", "dgx-a100:1", "--size", "1MB"])
    assert f"time         {document['time_us']:.3f} us" in text.stdout and "critical path" in text.stdout
    assert runner.invoke(cli, ["simulate", str(path), "--topology", "dgx-a100:1"]).exit_code == 2
    assert runner.invoke(cli, ["simulate", str(path), "--topology", "ring:8", "--size", "1MB"]).exit_code == 2
