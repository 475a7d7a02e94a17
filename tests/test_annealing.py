"""Local search over whole schedules: right, never slower, and able to find what batching alone does not."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taccl.profiles.topology import Link, Port, Topology
from taccl.sketches.restrictions import Restrictions
from taccl.sketches.symmetry import find_symmetry
from taccl.synth.annealing.search import anneal
from taccl.synth.annealing.sequence import Hops, Machine, decode
from taccl.synth.annealing.trees import needs_of, trees_of
from taccl.synth.bounds import lower_bound
from taccl.synth.candidates import best_timing
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.collective import build
from taccl.synth.engines.greedy import greedy, tastes
from taccl.synth.models.orbits import close, identity
from taccl.synth.problem import Problem, problem, with_symmetry
from taccl.synth.schedule import Transfer, as_transfers, completion_fs, time_in_order

US = 10**9
SIZE = 64_000


def link(src: int, dst: int, alpha: int, beta: int, *ports: int) -> Link:
    cost = Fraction(alpha)
    return Link(src, dst, alpha_us=cost, beta_us_per_mb=Fraction(beta), occupancy_us=cost, ports=ports)


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Connected, 3 to 6 ranks, uneven links, some of them through a shared port."""
    n = draw(st.integers(3, 6))
    numbers = st.tuples(st.integers(0, 4), st.integers(1, 40))
    pairs = {(r, (r + 1) % n) for r in range(n)} | {
        (u, v) for u in range(n) for v in range(n) if u != v and draw(st.integers(0, 2)) == 0
    }
    links = [link(u, v, *draw(numbers), *((0,) if draw(st.booleans()) else ())) for u, v in sorted(pairs)]
    return Topology("drawn", (tuple(range(n)),), tuple(links), (Port("hub", Fraction(7)),))


def stated(topology: Topology, name: str) -> Problem:
    p = problem(topology, build(name, topology.ranks, 1), SIZE, Restrictions())
    return with_symmetry(p, find_symmetry(topology))[0]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    machines(),
    st.sampled_from(["allgather", "alltoall", "reducescatter", "allreduce", "broadcast", "gather"]),
    st.booleans(),
    st.integers(0, 3),
)
def test_what_it_finds_is_right_and_quicker(topology: Topology, name: str, batching: bool, seed: int) -> None:
    p = stated(topology, name)
    grown = greedy(p, next(iter(tastes(1, seed))))
    assert grown is not None
    start = best_timing("greedy", topology, p.collective, p.costs, grown, batching)
    assert start is not None
    group = (close([identity(p), *p.symmetries], 64) or []) if p.symmetries else []
    found = anneal(p, start.messages, group or [identity(p)], 1_500, seed, batching, lambda _: False)
    if found is None:
        return
    messages = time_in_order(topology, p.collective, p.costs, found)
    better = best_timing("local-search", topology, p.collective, p.costs, found, batching)
    assert better is not None
    assert completion_fs(p.costs, messages) <= start.time_fs and better.time_fs <= start.time_fs
    assert not check_algorithm(better.algorithm(topology, SIZE), topology)
    assert lower_bound(topology, p.collective, SIZE).time_fs <= better.time_fs
    assert batching or all(len(m.chunks) == 1 for m in better.messages)


@settings(deadline=None, max_examples=60)
@given(machines(), st.sampled_from(["allgather", "alltoall", "broadcast"]))
def test_its_clock_is_that_of_the_schedulers(topology: Topology, name: str) -> None:
    p = stated(topology, name)
    grown = greedy(p, next(iter(tastes(1, 0))))
    assert grown is not None
    messages = time_in_order(topology, p.collective, p.costs, grown)
    ordered = as_transfers(messages)
    trees = trees_of(p, ordered)
    assert trees is not None
    hops = Hops()
    groups = [tuple(hops.of(0, c, t.link) for c in t.chunks) for t in ordered]
    needs: list[tuple[int, ...]] = [()] * len(hops.link)
    for chunk in range(len(p.collective.chunks)):
        for hop, before in needs_of(p, hops, trees, chunk):
            needs[hop] = before
    clock = decode(Machine.of(topology, p.costs), hops, [False], needs, groups, range(len(groups)))
    assert clock is not None
    again = time_in_order(topology, p.collective, p.costs, ordered)
    assert sorted(clock.starts_fs) == sorted(m.start_fs for m in again)
    assert clock.last_fs == completion_fs(p.costs, again)
    path = clock.critical()
    assert clock.starts_fs[path[-1]] == 0  # nothing waits without a reason


def test_an_order_that_waits_in_a_circle_has_no_clock() -> None:
    """Two messages of two chunks each, both of which need the other's."""
    topology = Topology("pair", ((0, 1),), (link(0, 1, 1, 1), link(1, 0, 1, 1)))
    p = stated(topology, "allgather")
    hops = Hops()
    a, b, c, d = hops.of(0, 0, 0), hops.of(0, 1, 0), hops.of(0, 0, 1), hops.of(0, 1, 1)
    needs = [(), (d,), (a,), ()]
    machine = Machine.of(topology, p.costs)
    assert decode(machine, hops, [False], needs, [(a, b), (c, d)], [0, 1]) is None
    apart = decode(machine, hops, [False], needs, [(a,), (b,), (c,), (d,)], [3, 1, 0, 2])
    # The second chunk's way back is first in time, then the hop that needs it, then the other chunk over that link.
    assert apart is not None
    assert sorted(range(4), key=lambda g: apart.starts_fs[g]) == [3, 1, 0, 2]
    assert apart.critical() == [2, 0, 1, 3] and apart.last_fs == sum(p.costs.chunk_fs) * 2 + 4 * US


def test_a_message_is_cut_where_its_end_makes_others_wait() -> None:
    """Over a relay: all in one message is late, a message for each chunk pays alpha too often."""
    topology = Topology("relay", ((0, 1, 2),), (link(0, 1, 10, 100), link(1, 2, 1, 100)))
    collective = build("sendrecv", 3, 8, pairs=((0, 2),))
    p = problem(topology, collective, 800_000, Restrictions())
    chunks = tuple(range(8))
    together = [Transfer(0, chunks), Transfer(1, chunks)]
    start = best_timing("x", topology, collective, p.costs, together)
    assert start is not None and start.time_fs == (10 + 80 + 1 + 80) * US
    found = anneal(p, start.messages, [identity(p)], 20_000, 0, True, lambda _: False)
    assert found is not None
    better = best_timing("local-search", topology, collective, p.costs, found)
    best_fs = _quickest_relay(8, 10, 1, 10) * US
    assert better is not None and best_fs <= better.time_fs <= 1.01 * best_fs


def _quickest_relay(chunks: int, first_alpha: int, second_alpha: int, transit: int) -> int:
    """Two links in a row, by trying every way to cut the chunks into messages on each."""

    def cuts(left: int) -> list[tuple[int, ...]]:
        return [(k, *rest) for k in range(1, left + 1) for rest in cuts(left - k)] if left else [()]

    best = 10**9
    for sizes in cuts(chunks):
        there: list[int] = []  # by chunk, when it is at the relay
        now = 0
        for size in sizes:
            now += first_alpha + size * transit
            there += [now] * size
        for onward in cuts(chunks):
            now = sent = 0
            for size in onward:
                sent += size
                now = max(now, there[sent - 1]) + second_alpha + size * transit
            best = min(best, now)
    return best


def test_equal_seeds_give_equal_schedules() -> None:
    topology = Topology(
        "square",
        (tuple(range(4)),),
        tuple(link(u, v, 1 + (u + v) % 2, 30) for u in range(4) for v in range(4) if u != v),
    )
    p = stated(topology, "alltoall")
    grown = greedy(p, next(iter(tastes(1, 0))))
    assert grown is not None
    start = best_timing("greedy", topology, p.collective, p.costs, grown)
    assert start is not None
    results = [anneal(p, start.messages, [identity(p)], 5_000, 7, True, lambda _: False) for _ in range(2)]
    assert results[0] == results[1]
