"""The independent judge of timed algorithms: right ones pass, each kind of wrong one is named."""

import json
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.cli import cli
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.algorithm import Algorithm, Certificate, Message
from taccl.synth.check_algorithm import MAX_PROBLEMS, check_algorithm
from taccl.synth.collective import Chunk, Collective, build
from taccl.synth.cost import costs
from taccl.synth.native import write_native
from taccl.synth.schedule import Transfer, completion_fs, time_in_order

SIZE = 4 * 10**6


def ring(n, *, reduce_alpha=0, port=None, occupancy=1):
    """Links r -> r+1 (id r) and back (id n + r), 10 us/MB, alpha 1 us; all cross one port if it has a beta."""
    ports = () if port is None else (Port("shared", Fraction(port)),)
    crossed = () if port is None else (0,)
    pairs = [(r, (r + 1) % n) for r in range(n)] + [((r + 1) % n, r) for r in range(n)]
    links = tuple(Link(a, b, Fraction(1), Fraction(10), Fraction(occupancy), crossed) for a, b in pairs)
    return Topology(f"ring{n}", (tuple(range(n)),), links, ports, reduce_alpha_us=Fraction(reduce_alpha))


def algorithm(collective, topology, messages, time_fs=None):
    price = costs(topology, collective.chunk_bytes(SIZE))
    messages = tuple(sorted(messages, key=lambda m: (m.start_fs, m.link, m.chunks)))
    if time_fs is None:
        time_fs = completion_fs(price, messages)
    return Algorithm(
        "test",
        collective,
        topology.name,
        SIZE,
        messages,
        time_fs,
        Certificate(0.0, "", 0.0, "feasible"),
        "test",
    )


def timed(collective, topology, transfers):
    price = costs(topology, collective.chunk_bytes(SIZE))
    return algorithm(collective, topology, time_in_order(topology, collective, price, transfers))


def ring_allgather(n, topology):
    hops = [((c + hop) % n, c) for hop in range(n - 1) for c in range(n)]
    return timed(build("allgather", n), topology, [Transfer(link, (c,)) for link, c in hops])


def ring_allreduce(n, topology):
    down = [Transfer((c + 1 + hop) % n, (c,), "reduce") for hop in range(n - 1) for c in range(n)]
    up = [Transfer((c + hop) % n, (c,)) for hop in range(n - 1) for c in range(n)]
    return timed(build("allreduce", n), topology, down + up)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("options", [{}, {"port": 3}, {"reduce_alpha": 2}, {"occupancy": 0}])
def test_rings_are_right(n, options):
    topology = ring(n, **options)
    for made in (ring_allgather(n, topology), ring_allreduce(n, topology)):
        assert check_algorithm(made, topology) == []
        assert made.time_fs > 0


def first(made, **changes):
    return replace(made, messages=(replace(made.messages[0], **changes), *made.messages[1:]))


TOPOLOGY = ring(4)
GATHER = ring_allgather(4, TOPOLOGY)
REDUCE = ring_allreduce(4, TOPOLOGY)
WRONG = {
    "a link that is not there": (first(GATHER, link=99), "link 99 does not exist"),
    "a link elsewhere": (first(GATHER, link=1), "link 1 joins 1->2"),
    "an earlier arrival": (first(GATHER, end_fs=GATHER.messages[0].end_fs - 1), "the cost model says"),
    "a negative start": (
        first(GATHER, start_fs=-1, end_fs=GATHER.messages[0].end_fs - 1), "before time 0",
    ),
    "no chunks": (first(GATHER, chunks=()), "ascending"),
    "a chunk twice": (first(GATHER, chunks=(0, 0)), "ascending"),
    "an unknown chunk": (first(GATHER, chunks=(4,)), "among 0..3"),
    "an unknown op": (first(GATHER, op="add"), "no meaning in allgather"),
    "a reduction of copies": (first(GATHER, op="reduce"), "no meaning in allgather"),
    "a chunk that the source lacks": (first(GATHER, chunks=(1,)), "rank 0 does not have chunk 1 yet"),
    "a message left out": (replace(GATHER, messages=GATHER.messages[:-1]), "never gets chunk"),
    "a wrong time": (replace(GATHER, time_fs=GATHER.time_fs + 1), "the last arrival or reduction ends"),
    "a reduction left out": (replace(REDUCE, messages=REDUCE.messages[1:]), "are missing"),
    "a reduction twice": (
        algorithm(REDUCE.collective, TOPOLOGY, [
            *REDUCE.messages,
            replace(REDUCE.messages[-1], op="reduce", start_fs=REDUCE.time_fs,
                    end_fs=2 * REDUCE.time_fs - REDUCE.messages[-1].start_fs),
        ]),
        "in it twice",
    ),
    "a partial sum handed out": (
        replace(REDUCE, messages=tuple(replace(m, op="copy") for m in REDUCE.messages)), "are missing",
    ),
    "another topology": (GATHER, None),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_algorithms_are_named(what):
    made, reason = WRONG[what]
    if reason is None:
        assert check_algorithm(made, ring(5)) == ["the algorithm is for 4 ranks, ring5 has 5"]
        return
    problems = check_algorithm(made, TOPOLOGY)
    assert any(reason in problem for problem in problems), problems


def test_links_and_ports_carry_one_message_at_once():
    topology = ring(3, port=2)
    made = ring_allgather(3, topology)
    assert check_algorithm(made, topology) == []
    # Without the port the same ring is faster: on the topology that has one its messages collide there.
    free = ring_allgather(3, ring(3))
    assert any("port shared is still held by" in problem for problem in check_algorithm(free, topology))
    twice = algorithm(free.collective, ring(3), [*free.messages, free.messages[0]])
    assert any("link 0 is still held by" in problem for problem in check_algorithm(twice, ring(3)))


def message(topology, collective, link, chunk, start_us, op="copy"):
    price = costs(topology, collective.chunk_bytes(SIZE))
    start = start_us * 10**9
    return Message(
        link,
        topology.links[link].src,
        topology.links[link].dst,
        (chunk,),
        start,
        start + price.transit(link, 1),
        op,
    )


def test_reductions_of_a_rank_are_serial_and_must_end_before_the_sum_leaves():
    # Ranks 0 and 2 send to 1 at once; each message takes 1 + 40 us, each sum 5 us; then 1 -> 0 is told.
    topology = ring(3, reduce_alpha=5)
    one = Collective(
        "custom",
        3,
        (Chunk(((0, 0), (1, 0), (2, 0)), ((0, 0),)),),
        True,
        (1,) * 3,
        (1, 0, 0),
        (None,) * 3,
        1,
        1,
    )

    def total(leaves_us):
        return algorithm(one, topology, [
            message(topology, one, 0, 0, 0, "reduce"),
            message(topology, one, 4, 0, 0, "reduce"),
            message(topology, one, 3, 0, leaves_us),
        ])  # fmt: skip

    assert check_algorithm(total(51), topology) == []
    # At 46 only the first of the two sums is there: that of rank 0, whose link has the lower id.
    assert check_algorithm(total(46), topology) == [
        "rank 0, chunk 0: the contributions of ranks [2] are missing"
    ]
    assert "ranks [0, 2] are missing" in check_algorithm(total(45), topology)[0]


def test_a_copy_takes_the_place_of_what_was_there():
    topology = ring(2)
    reduce = build("allreduce", 2, 1)
    good = [
        message(topology, reduce, 0, 0, 0, "reduce"), message(topology, reduce, 1, 0, 30),
        message(topology, reduce, 1, 1, 0, "reduce"), message(topology, reduce, 0, 1, 30),
    ]  # fmt: skip
    assert check_algorithm(algorithm(reduce, topology, good), topology) == []
    again = [*good, message(topology, reduce, 0, 0, 90)]  # the total once more: harmless
    assert check_algorithm(algorithm(reduce, topology, again), topology) == []
    added = [*good, message(topology, reduce, 0, 0, 90, "reduce")]
    assert any("in it twice" in p for p in check_algorithm(algorithm(reduce, topology, added), topology))


def test_problems_are_cut_short():
    made = replace(GATHER, messages=tuple(replace(m, link=99) for m in GATHER.messages * 20))
    problems = check_algorithm(made, TOPOLOGY)
    assert len(problems) == MAX_PROBLEMS + 1


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0, 0, 3]))
def test_damage_is_found(seed, combining, reduce_alpha):
    rng = random.Random(seed)
    topology = ring(4, reduce_alpha=reduce_alpha)
    made = ring_allreduce(4, topology) if combining else ring_allgather(4, topology)
    at = rng.randrange(len(made.messages))
    victim = made.messages[at]
    rest = [m for n, m in enumerate(made.messages) if n != at]
    # Every message of a ring is needed, at its time or a free later one.
    dropped = algorithm(made.collective, topology, rest, made.time_fs)
    assert check_algorithm(dropped, topology)
    by = -rng.randint(1, max(1, victim.start_fs))
    early = replace(victim, start_fs=victim.start_fs + by, end_fs=victim.end_fs + by)
    assert check_algorithm(algorithm(made.collective, topology, [*rest, early], made.time_fs), topology)
    other = rng.choice([c for c in range(4) if c not in victim.chunks])
    swapped = replace(victim, chunks=(other,))
    assert check_algorithm(algorithm(made.collective, topology, [*rest, swapped]), topology)


def test_the_command_judges_native_files(tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(write_native(REDUCE, TOPOLOGY))
    bad.write_text(write_native(replace(REDUCE, messages=REDUCE.messages[1:]), TOPOLOGY))
    runner = CliRunner()
    result = runner.invoke(cli, ["verify", str(good), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"] is True
    result = runner.invoke(cli, ["verify", str(bad), "--json"])
    assert result.exit_code == 1
    errors = json.loads(result.stdout)["errors"]
    assert errors and all(error["code"] == "A100" for error in errors)
    elsewhere = runner.invoke(cli, ["verify", str(good), "--topology", "ring:4"])
    assert elsewhere.exit_code == 1 and "error[A100]" in elsewhere.stdout
    priced = runner.invoke(cli, ["simulate", str(good), "--json"])
    assert json.loads(priced.stdout)["time_us"] == REDUCE.time_fs / 10**9
