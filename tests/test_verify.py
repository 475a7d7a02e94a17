"""Verification: correct programs are accepted, damaged ones refused with reason and place."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import always_right
from verify_programs import (
    GENERATED,
    allpairs_allreduce,
    along_trees,
    damages,
    double_step,
    drop_step,
    every_place,
    flagged,
    labelled,
    make,
    ring_allreduce,
    split_allgather,
    with_step,
    with_steps,
    with_threadblock,
)  # fmt: skip

from taccl.cli import cli
from taccl.synth.collective import build
from taccl.synth.fifo_slots import whole_up_to, within_slots
from taccl.synth.msccl_xml import read_xml, write_xml
from taccl.synth.program_collective import collective_of
from taccl.synth.verify import is_correct, verify

PRODUCTION = Path(__file__).resolve().parents[2] / "shared" / "msccl-xml"
PRODUCTION_FILES = sorted(PRODUCTION.glob("*/*.xml"))
needs_production = pytest.mark.skipif(
    not PRODUCTION_FILES, reason="the production files are not part of the repository"
)


def codes(program, **options):
    return {f.code for f in verify(program, **options) if f.severity == "error"}


def collective(program):
    return collective_of(program.collective, program.ranks, program.chunks_per_loop, program.root)


@needs_production
@pytest.mark.parametrize("path", PRODUCTION_FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_production_files_are_correct(path):
    program = read_xml(path.read_bytes(), str(path))
    findings = verify(program, strict=True)
    assert {f.code for f in findings} <= {"V302", "V303"}, findings
    assert is_correct(findings)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_programs_are_correct(name):
    program = GENERATED[name]
    assert codes(program, strict=True) == set()
    assert always_right(program, collective(program), program.inplace, 20) is None


def judge_damage(what, damaged, inplace, seeds):
    """A damaged program is refused with reason and place, or ends right in every order we try."""
    findings = verify(damaged)
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        assert all(f.message for f in errors)
        assert any(f.rank >= 0 for f in errors), errors
        return False
    wrong = always_right(damaged, collective(damaged), inplace, seeds)
    assert wrong is None, f"{what}: accepted, but {wrong}"
    return True


@pytest.mark.parametrize("name", GENERATED)
def test_every_damage_of_generated_programs_is_refused_or_harmless(name):
    program = GENERATED[name]
    harmless = refused = 0
    for place in every_place(program):
        for damage, damaged in damages(program, *place):
            # With the labels made to fit, only what the program does can give the damage away.
            for version in {damaged, labelled(damaged)}:
                if judge_damage(f"{name} {place} {damage}", version, program.inplace, 6):
                    harmless += 1
                else:
                    refused += 1
    assert refused > 3 * harmless


@needs_production
@pytest.mark.parametrize("path", PRODUCTION_FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_damaged_production_files_are_refused_or_harmless(path):
    program = read_xml(path.read_bytes(), str(path))
    rng = random.Random(path.name)
    places = list(every_place(program))
    refused = 0
    for place in rng.sample(places, 3 if len(places) < 5000 else 2):
        for damage, damaged in damages(program, *place):
            refused += not judge_damage(f"{path.name} {place} {damage}", damaged, program.inplace, 1)
    assert refused >= 8


HARMFUL = {
    "lose a dependency": (allpairs_allreduce(3), lambda p: flagged(_lose(p, 0, 1, 2)), "V501"),
    "drop a reduction": (allpairs_allreduce(3), lambda p: drop_step(p, 1, 0, 2), "V405"),
    "add a contribution twice": (allpairs_allreduce(3), lambda p: double_step(p, 1, 0, 2), "V408"),
    "drop a send": (ring_allreduce(4), lambda p: drop_step(p, 2, 0, 0), "V201"),
    "drop a receive": (split_allgather(4), lambda p: drop_step(p, 2, 1, 2), "V201"),
    "receive twice": (split_allgather(4), lambda p: double_step(p, 2, 1, 2), "V201"),
    "wrong count": (
        GENERATED["fan_in_reduce"],
        lambda p: with_step(p, 1, 0, 0, replace(_step(p, 1, 0, 0), count=1)),
        "V202",
    ),
    "wrong peer": (split_allgather(4), lambda p: with_threadblock(p, 0, 0, send=2), "V127"),
    "lost hasdep": (
        split_allgather(4),
        lambda p: with_step(p, 0, 1, 0, replace(_step(p, 0, 1, 0), has_dependents=False)),
        "V115",
    ),
    "write over what is still to be sent": (
        GENERATED["relayed_alltoall"], lambda p: flagged(_lose(p, 1, 2, 2)), "V501",
    ),
    "read before it is written": (GENERATED["relayed_alltoall"], lambda p: flagged(_lose(p, 1, 3, 0)), "V501"),
}  # fmt: skip


def _step(program, rank, tb, number):
    return program.gpus[rank].threadblocks[tb].steps[number]


def _lose(program, rank, tb, number):
    step = _step(program, rank, tb, number)
    assert step.depends is not None
    return with_step(program, rank, tb, number, replace(step, depends=None))


@pytest.mark.parametrize("what", HARMFUL)
def test_damage_is_called_by_its_name(what):
    program, damage, code = HARMFUL[what]
    assert codes(program) == set()
    assert code in codes(labelled(damage(program)))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(2, 5), st.booleans())
def test_random_trees_are_correct_and_their_damage_is_refused_or_harmless(seed, n, combining):
    rng = random.Random(seed)
    program = along_trees(rng, n, combining)
    assert codes(program, strict=True) == set()
    assert always_right(program, collective(program), True, 3) is None
    place = rng.choice(list(every_place(program)))
    for damage, damaged in damages(program, *place):
        judge_damage(f"{place} {damage}", labelled(damaged), True, 5)


def test_order_through_other_ranks_counts():
    # Rank 0's partial sum is sent before its total comes back: only the messages order the two.
    program = along_trees(random.Random(3), 5, True)
    together = [s for tb in program.gpus[0].threadblocks for s in tb.steps if s.kind == "r"]
    assert together and all(s.depends is None for s in together)
    assert codes(program) == set()


def crossing(count, protocol):
    """Two ranks that send `count` messages each before they receive any."""
    gpus = []
    for r in (0, 1):
        other = 1 - r
        sends = [("s", f"i{other * count + c}", f"o{r * count + c}") for c in range(count)]
        receives = [("r", f"i{r * count + c}", f"o{other * count + c}") for c in range(count)]
        own = [("cpy", f"i{r * count}", f"o{r * count}", count)]
        gpus.append((2 * count, 2 * count, [(other, other, 0, [*sends, *receives]), (-1, -1, 0, own)]))
    return make("alltoall", 2 * count, gpus, protocol=protocol)


@pytest.mark.parametrize(("protocol", "depth"), [("Simple", 2), ("LL", 8), ("LL128", 8)])
def test_deadlock_depends_on_the_depth_of_the_fifo(protocol, depth):
    fits = verify(crossing(depth, protocol))
    assert [(f.code, f.severity) for f in fits] == [("V302", "note")]
    [stuck] = verify(crossing(depth + 1, protocol))
    assert stuck.code == "V301"
    assert "FIFO slot" in stuck.message and f"step {depth}" in stuck.message
    assert (stuck.rank, stuck.threadblock, stuck.step) == (0, 0, depth)


def test_messages_too_large_for_a_slot_are_warned_about():
    # Both ranks send 3 chunks before they receive: one message each, but three pieces when chunks are large.
    gpus = []
    for r in (0, 1):
        gpus.append((6, 6, [
            (1 - r, 1 - r, 0, [
                ("s", f"i{3 * (1 - r)}", f"o{3 * r}", 3), ("r", f"i{3 * r}", f"o{3 * (1 - r)}", 3),
            ]),
            (-1, -1, 0, [("cpy", f"i{3 * r}", f"o{3 * r}", 3)]),
        ]))  # fmt: skip
    simple = make("alltoall", 6, gpus)
    found = verify(simple)
    assert [(f.code, f.severity, f.rank, f.step) for f in found] == [
        ("V302", "note", 0, 0), ("V303", "warning", 0, 0),
    ]  # fmt: skip
    assert [f.code for f in verify(replace(simple, protocol="LL"))] == ["V302"]
    # 3 chunks of a sixth fill a slot of 2 MiB at 4 MiB.
    limit = 4 << 20
    assert whole_up_to(simple) == limit and f"at most {limit}" in found[1].message
    small, warned = within_slots(simple, found, limit)
    assert (small.max_bytes, warned) == (limit, ()) and [f.code for f in verify(small)] == ["V302"]
    large, warned = within_slots(simple, found, limit + 1)
    assert large.max_bytes == limit and f"beyond {limit} bytes" in warned[0]
    only_large = replace(simple, min_bytes=limit + 1)
    assert within_slots(only_large, found, limit + 1)[0] == only_large
    assert within_slots(simple, found[:1], 1 << 40) == (simple, ())


def test_a_circle_of_dependencies_is_a_deadlock_that_names_both_ends():
    program = make("allgather", 1, [(1, 1, [
        (-1, -1, 0, [("nop", (1, 0)), ("cpy", "i0", "o0", (1, 0))]),
        (-1, -1, 0, [("cpy", "i0", "o0", (0, 1))]),
    ])])  # fmt: skip
    [finding] = [f for f in verify(program) if f.severity == "error"]
    assert finding.code == "V301"
    assert "threadblock 0, step 0" in finding.message and "threadblock 1, step 0" in finding.message


def test_sends_that_wait_for_their_receives_are_only_warned_about():
    assert verify(split_allgather(4)) == []
    found = verify(ring_allreduce(3, "LL"))
    assert [(f.code, f.severity) for f in found] == [("V302", "note")]


def test_each_claimed_mode_is_judged():
    program = ring_allreduce(3)
    both = replace(program, outofplace=True)
    found = [f for f in verify(both) if f.severity == "error"]
    assert {f.mode for f in found} == {"out of place"}
    assert codes(both) >= {"V403", "V406"}
    assert codes(both, mode="in place") == set()


def test_in_place_aliasing_is_honoured():
    # Out of place the input stays and the outputs are written one by one; in place they overwrite inputs.
    gpus = []
    for r in (0, 1):
        gpus.append((2, 2, [
            (1 - r, 1 - r, 0, [("s", f"i{1 - r}", f"o{r}"), ("r", f"i{r}", f"o{1 - r}")]),
            (-1, -1, 0, [("cpy", f"i{r}", f"o{r}")]),
        ]))  # fmt: skip
    program = make("alltoall", 2, gpus)
    assert codes(program) == set()
    assert codes(replace(program, inplace=True)) == set()  # each chunk is read before it is overwritten
    late = with_steps(program, 0, 0, lambda steps: steps[::-1])
    late = labelled(late)
    assert codes(late) == set()
    assert "V405" in codes(replace(late, inplace=True))


def test_contributions_are_counted_not_evaluated():
    # Adding one contribution twice would be invisible to max; it is still refused.
    doubled = replace(double_step(allpairs_allreduce(3), 0, 0, 2), reduce_op="max")
    [first, *_] = [f for f in verify(doubled) if f.code == "V408"]
    assert "2 times" in first.message and "second time" in first.message
    assert (first.rank, first.threadblock, first.step) == (0, 0, 3)


def test_sums_that_explode_are_cut():
    steps = [("re", "i0", "i0")] * 60
    program = make("allreduce", 1, [(1, 0, [(-1, -1, 0, steps)])], inplace=True)
    assert "V408" in codes(program)


def test_unordered_accesses_of_one_chunk():
    cpy = ("cpy", "i0", "o0")
    apart = make("allgather", 1, [(1, 1, [(-1, -1, 0, [cpy]), (-1, -1, 0, [cpy])])])
    assert codes(apart) == {"V502"}
    tied = make("allgather", 1, [(1, 1, [(-1, -1, 0, [cpy]), (-1, -1, 0, [(*cpy, (0, 0))])])])
    assert codes(tied) == set()
    reading = make("allgather", 1, [
        (1, 1, [(-1, -1, 0, [("cpy", "i0", "s0"), ("cpy", "i0", "o0")]), (-1, -1, 0, [("cpy", "s0", "s1")])])
    ], scratch=2)  # fmt: skip
    assert "V501" in codes(reading)


def tweak(program, **changes):
    return replace(program, **changes)


def _step_tweak(**changes):
    return lambda p: with_step(p, 0, 0, 0, replace(_step(p, 0, 0, 0), **changes))


RING = split_allgather(4)
LOADER_RULES = {
    "V101": lambda p: tweak(p, ranks=5),
    "V102": lambda p: tweak(p, protocol="simple"),
    "V103": lambda p: tweak(p, channels=33),
    "V104": lambda p: tweak(p, inplace=False, outofplace=False),
    "V105": lambda p: tweak(p, reduce_op="xor"),
    "V106": lambda p: with_threadblock(p, 0, 1, id=2),
    "V107": lambda p: with_threadblock(p, 0, 1, channel=1),
    "V108": lambda p: with_threadblock(p, 0, 1, recv=4),
    "V109": _step_tweak(kind="x"),
    "V110": lambda p: with_threadblock(p, 0, 0, send=-1),
    "V111": _step_tweak(count=72),
    "V112": _step_tweak(depends=(1, 9)),
    "V113": _step_tweak(depends=(0, 0)),
    "V114": lambda p: flagged(with_step(
        with_steps(p, 0, 1, lambda s: [*s, replace(s[0], kind="nop", depends=(0, 0))]),
        0, 0, 1, replace(_step(p, 0, 0, 1), depends=(1, 3)),
    )),
    "V115": lambda p: with_step(p, 0, 1, 0, replace(_step(p, 0, 1, 0), has_dependents=False)),
    "V125": lambda p: with_threadblock(p, 0, 0, recv=3),
    "V127": lambda p: with_threadblock(p, 0, 1, send=2),
    "V133": lambda p: with_step(double_step(p, 0, 1, 0), 0, 1, 1, replace(_step(p, 0, 1, 0), kind="nop")),
    "V134": lambda p: flagged(with_steps(p, 0, 0, lambda s: [replace(s[0], kind="nop", depends=(1, 0)), *s])),
    "V401": _step_tweak(src_offset=4),
    "V601": lambda p: tweak(p, collective="alltoallv"),
    "V603": lambda p: tweak(p, chunks_per_loop=3),
}  # fmt: skip


@pytest.mark.parametrize("code", LOADER_RULES)
def test_each_rule_has_its_code(code):
    given_collective = build("sendrecv", 4, 4) if code == "V603" else None
    assert code in codes(LOADER_RULES[code](RING), collective=given_collective)


SOFT_RULES = {
    "V121": lambda p: tweak(p, max_bytes=0),
    "V122": lambda p: tweak(p, name="x" * 256),
    "V123": lambda p: _many_threadblocks(p, 133),
    "V130": lambda p: _many_steps(65),
    "V407": lambda p: tweak(p, gpus=(replace(p.gpus[0], input_chunks=2), *p.gpus[1:])),
}


def _many_threadblocks(program, count):
    gpu = program.gpus[0]
    last = gpu.threadblocks[-1]
    more = tuple(replace(last, id=x, recv=-1, steps=()) for x in range(len(gpu.threadblocks), count))
    return replace(program, gpus=(replace(gpu, threadblocks=(*gpu.threadblocks, *more)), *program.gpus[1:]))


def _many_steps(count):
    return make("allgather", 1, [(1, 1, [(-1, -1, 0, [("cpy", "i0", "o0")] * count)])])


@pytest.mark.parametrize("code", SOFT_RULES)
def test_limits_of_some_loaders_are_warnings_unless_strict(code):
    program = SOFT_RULES[code](RING)
    found = {f.code: f.severity for f in verify(program)}
    assert found[code] == "warning"
    assert code in codes(program, strict=True)


def test_more_steps_than_any_loader_takes_is_an_error():
    assert codes(_many_steps(256)) == set()
    assert codes(_many_steps(257)) == {"V130"}


def test_reductions_that_loaders_fuse_must_agree_in_count():
    program = make("reduce", 2, [(2, 0, [(-1, -1, 0, [
        ("re", "s0", "i0", 2), ("re", "s2", "i0", 1),
    ])])], inplace=True, scratch=4)  # fmt: skip
    assert "V135" in codes(program)


def test_overlapping_operands_are_refused():
    program = make("allgather", 1, [(1, 1, [
        (-1, -1, 0, [("cpy", "s0", "s1", 2), ("cpy", "i0", "o0")]),
    ])], scratch=4)  # fmt: skip
    assert codes(program) == {"V404"}


def test_a_collective_may_be_given():
    demand = [[0, 2], [1, 0]]
    program = make("alltoallv", 2, [
        (2, 1, [(1, 1, 0, [("s", "i0", "o0", 2), ("r", "i0", "o0")])]),
        (1, 2, [(0, 0, 0, [("s", "i0", "o0"), ("r", "i0", "o0", 2)])]),
    ])  # fmt: skip
    assert codes(program) == {"V601"}
    assert codes(program, collective=build("alltoallv", 2, demand=demand)) == set()
    wrong = build("alltoallv", 2, demand=[[0, 1], [1, 0]])
    assert codes(program, collective=wrong)


def test_allreduce_needs_no_chunk_for_each_rank():
    program = make("allreduce", 1, [
        (1, 0, [(1, -1, 0, [("s", "i0", "i0")]), (-1, 1, 0, [("r", "i0", "i0")])]),
        (1, 0, [(0, 0, 0, [("rrcs", "i0", "i0")])]),
    ], inplace=True)  # fmt: skip
    assert codes(program) == set()


def test_findings_are_cut_short_and_counted():
    n = 40
    gpus = [(1, n, [(-1, -1, 0, [("cpy", "i0", f"o{r}")])]) for r in range(n)]
    found = verify(make("allgather", n, gpus))
    missing = [f for f in found if f.code == "V406"]
    assert len(missing) == 21
    assert missing[-1].message == f"and {n * (n - 1) - 20} more of V406"


def test_ten_thousand_steps_take_seconds():
    program = allpairs_allreduce(40)
    steps = sum(len(tb.steps) for gpu in program.gpus for tb in gpu.threadblocks)
    assert steps > 8000
    start = time.process_time()
    assert codes(program) == set()
    assert time.process_time() - start < 10


def test_command_says_what_is_wrong_and_where(tmp_path):
    good, bad = tmp_path / "good.xml", tmp_path / "bad.xml"
    program = split_allgather(4)
    good.write_text(write_xml(program))
    bad.write_text(write_xml(flagged(_lose(program, 2, 0, 1))))
    runner = CliRunner()
    result = runner.invoke(cli, ["verify", str(good)])
    assert result.exit_code == 0 and "correct: allgather, 4 ranks" in result.stdout
    result = runner.invoke(cli, ["verify", str(bad), "--json"])
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["schema"] == "taccl/verify/v1" and document["ok"] is False
    [error] = [e for e in document["errors"] if e["code"] == "V501"]
    line = bad.read_text().splitlines()[error["line"] - 1]
    assert line.strip().startswith('<step s="0" type="r"') or line.strip().startswith('<step s="1" type="s"')
    assert error["rank"] == 2 and {"code", "message", "rank", "threadblock", "step", "line"} <= set(error)
    text = runner.invoke(cli, ["verify", str(bad)])
    assert f"{bad}:{error['line']}: error[V501]: rank 2" in text.stdout
    assert runner.invoke(cli, ["verify", str(tmp_path / "none.xml")]).exit_code == 3
    result = runner.invoke(cli, ["verify", str(good), "--topology", "ring:4"])
    assert result.exit_code == 2 and "a program says nothing of links" in result.stderr


def test_command_takes_the_collective_from_options(tmp_path):
    path = tmp_path / "v.xml"
    program = make("alltoallv", 2, [
        (2, 1, [(1, 1, 0, [("s", "i0", "o0", 2), ("r", "i0", "o0")])]),
        (1, 2, [(0, 0, 0, [("s", "i0", "o0"), ("r", "i0", "o0", 2)])]),
    ])  # fmt: skip
    path.write_text(write_xml(program))
    runner = CliRunner()
    assert runner.invoke(cli, ["verify", str(path)]).exit_code == 1
    assert runner.invoke(cli, ["verify", str(path), "--demand", "0 2; 1 0"]).exit_code == 0
    assert runner.invoke(cli, ["verify", str(path), "--demand", "0 3; 1 0"]).exit_code == 2
    assert runner.invoke(cli, ["verify", str(path), "--collective", "nonsense"]).exit_code == 2


def test_a_program_whose_goal_is_not_known_is_not_called_wrong(tmp_path):
    program = make("sendrecv", 1, [
        (1, 1, [(1, -1, 0, [("s", "i0", "o0")])]),
        (1, 1, [(-1, 0, 0, [("r", "i0", "o0")])]),
    ])  # fmt: skip
    path = tmp_path / "pairs.xml"
    path.write_text(write_xml(program))
    asked = CliRunner().invoke(cli, ["verify", str(path)])
    assert asked.exit_code == 1 and "give --pairs as for taccl synth" in asked.output
    assert "pairs.xml: not judged: " in asked.output
    right = CliRunner().invoke(cli, ["verify", str(path), "--pairs", "0-1"])
    assert right.exit_code == 0, right.output
    wrong = CliRunner().invoke(cli, ["verify", str(path), "--pairs", "1-0"])
    assert wrong.exit_code == 1 and "pairs.xml: wrong, " in wrong.output


@pytest.mark.parametrize(("fused", "found"), [(15, set()), (16, {"V136"})])
def test_loaders_add_up_so_many_operands_at_once(fused, found):
    """Their kernels leave out the sixteenth and, beside it, the target's own value."""
    steps = [("re", f"s{k}", "i0") for k in range(fused)]
    program = make("reduce", 1, [(1, 0, [(-1, -1, 0, steps)])], inplace=True, scratch=fused)
    assert codes(program, strict=True) & {"V135", "V136"} == found
    assert not codes(program) & {"V136"}  # not all loaders do it
