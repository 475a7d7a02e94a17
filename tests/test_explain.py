"""Explanations: critical path, loads, bottleneck and remedies of small algorithms and programs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner

from taccl.cli import cli
from taccl.commands.explain import command, document, text
from taccl.errors import UsageError
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Port, Topology
from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.bounds import lower_bound
from taccl.synth.collective import Collective, build
from taccl.synth.cost import costs
from taccl.synth.explain import Explanation, explain
from taccl.synth.explain_changes import faster, one_more, quicker
from taccl.synth.msccl_xml import write_xml
from taccl.synth.native import write_native
from taccl.synth.program import Program, RankProgram, Step, Threadblock
from taccl.synth.request import Request
from taccl.synth.schedule import Transfer, completion_fs, time_in_order
from taccl.synth.synthesise import synthesise

MB = 10**6


def joined(ranks: int, slow: int = 10) -> Topology:
    """A line in both directions; every link into the last rank crosses one slow port."""
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if abs(a - b) == 1]
    ports = (Port("last.in", Fraction(slow), "nic"),)
    links = tuple(
        Link(a, b, Fraction(1), Fraction(10), Fraction(1), (0,) if b == ranks - 1 else ()) for a, b in pairs
    )
    return Topology("line", (tuple(range(ranks)),), links, ports)


def timed(topology: Topology, collective: Collective, transfers: list[Transfer], size: int) -> Algorithm:
    prices = costs(topology, collective.chunk_bytes(size))
    messages = time_in_order(topology, collective, prices, transfers)
    certificate = Certificate(0.0, "", 0.0, "feasible")
    return Algorithm(
        "by hand", collective, topology.name, size, messages, completion_fs(prices, messages), certificate, "hand"
    )  # fmt: skip


def link_between(topology: Topology, a: int, b: int) -> int:
    return next(e for e, link in enumerate(topology.links) if (link.src, link.dst) == (a, b))


def broadcast_on_a_line() -> tuple[Topology, Algorithm]:
    topology = joined(3, slow=30)
    steps = [(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1)]
    transfers = [Transfer(link_between(topology, a, b), (c,)) for a, b, c in steps]
    return topology, timed(topology, build("broadcast", 3, 2), transfers, 2 * MB)


def test_the_critical_path_tells_why_each_message_waited() -> None:
    topology, algorithm = broadcast_on_a_line()
    told = explain(algorithm, topology, 2 * MB)
    assert told.time_us == 1 + 10 + (1 + 30) + (1 + 30)
    assert [(leg.src, leg.dst, leg.reason) for leg in told.path] == [
        (0, 1, "start"), (1, 2, "data"), (1, 2, "resource"),
    ]  # fmt: skip
    last = told.path[-1]
    assert last.resource == "last.in"
    assert last.waited_us == (1 + 10 + 1 + 30) - 2 * (1 + 10)
    assert all(a.end_us <= b.end_us for a, b in zip(told.path, told.path[1:], strict=False))


def test_loads_and_bottleneck_name_the_slow_port() -> None:
    topology, algorithm = broadcast_on_a_line()
    told = explain(algorithm, topology, 2 * MB)
    assert told.loads[0].resource == "last.in"
    assert told.loads[0].busy_us == 2 * (1 + 30)
    assert told.loads[0].utilisation == pytest.approx(62 / 73)
    cut = told.bound.bottleneck
    assert cut is not None
    assert (cut.ranks, cut.leaving, cut.bytes) == ((2,), False, 2 * MB)
    assert [c.resource for c in cut.crossing] == ["last.in"]
    assert told.bound.time_fs == lower_bound(topology, algorithm.collective, 2 * MB).time_fs


def test_remedies_are_ranked_and_true() -> None:
    topology, algorithm = broadcast_on_a_line()
    told = explain(algorithm, topology, 2 * MB)
    best = next(r for r in told.remedies if r.change.startswith("twice"))
    assert best.change in ("twice the rate of last.in", "twice the rate of every nic port")
    assert best.bound_us < told.bound.time_us
    doubled = faster(topology, [len(topology.links)])
    assert best.bound_us == lower_bound(doubled, algorithm.collective, 2 * MB).time_us
    assert best.time_us == 1 + 10 + 2 * (1 + 15)
    assert [r.bound_us for r in told.remedies] == sorted(r.bound_us for r in told.remedies)
    assert all(r.bound_us < told.bound.time_us or r.time_us < told.time_us for r in told.remedies)


def test_reductions_stand_on_the_path() -> None:
    line = joined(2)
    topology = Topology("reducing", line.nodes, line.links, line.ports, reduce_alpha_us=Fraction(5))
    algorithm = timed(
        topology, build("reduce", 2), [Transfer(link_between(topology, 1, 0), (0,), "reduce")], MB
    )  # fmt: skip
    told = explain(algorithm, topology, MB)
    assert [leg.kind for leg in told.path] == ["message", "reduce"]
    assert told.time_us == 1 + 10 + 5


def test_another_size_is_timed_again() -> None:
    topology, algorithm = broadcast_on_a_line()
    assert explain(algorithm, topology, 4 * MB).time_us == 1 + 20 + 2 * (1 + 60)


def test_a_foreign_topology_is_refused() -> None:
    _, algorithm = broadcast_on_a_line()
    with pytest.raises(UsageError, match="3 ranks"):
        explain(algorithm, joined(4), MB)
    other = joined(3)
    turned = Topology("other", other.nodes, tuple(reversed(other.links)), other.ports)
    with pytest.raises(UsageError, match="give the topology that it was made for"):
        explain(algorithm, turned, MB)


def test_changes_touch_what_they_name() -> None:
    topology = joined(3)
    doubled = faster(topology, [len(topology.links)])
    into_last = link_between(topology, 1, 2)
    assert doubled.ports[0].beta_us_per_mb == 5
    # The link's own beta only repeated the port's.
    assert doubled.links[into_last].beta_us_per_mb == 5
    assert doubled.links[link_between(topology, 0, 1)].beta_us_per_mb == 10
    assert {link.alpha_us for link in quicker(topology, "link").links} == {Fraction(1, 2)}
    assert quicker(topology, "nvlink") == topology


def test_one_more_link_is_a_cable_of_its_own_there_and_back() -> None:
    topology = joined(3)
    change = one_more(topology, link_between(topology, 1, 2))
    assert change.text == "one more link between ranks 1 and 2, with ports of its own"
    added = change.topology.links[len(topology.links) :]
    assert [(x.src, x.dst, x.ports, x.beta_us_per_mb) for x in added] == [(1, 2, (), 10), (2, 1, (), 10)]
    assert tuple(change.topology.links[: len(topology.links)]) == topology.links


def shown(spec: str, collective: str, size: int, engine: str = "direct") -> Explanation:
    topology = load_topology(spec)
    made = synthesise(Request(topology, collective, size, engine=engine, partition=1, time_limit_s=5))
    return explain(made, topology, size)


def test_ports_that_bind_are_told_though_the_bound_names_no_cut() -> None:
    told = shown("dgx2:1", "alltoall", 64 * MB)
    best = told.remedies[0]
    assert best.change == "twice the rate of every switch port"
    assert best.bound_us < 0.6 * told.bound.time_us and best.time_us < 0.6 * told.time_us


def test_a_double_nic_and_one_more_link_are_always_answered() -> None:
    told = shown("ndv2:2", "allgather", 64 * MB, "hierarchical")
    bound = {remedy.change: remedy.bound_us for remedy in told.remedies}
    nic = bound["twice the rate of every nic port"]
    assert nic == pytest.approx(told.bound.time_us / 2, rel=0.01)
    (more,) = (text for text in bound if text.startswith("one more ib link between ranks"))
    # The NIC (105 us/MB) and as good a cable beside it.
    assert bound[more] == pytest.approx(told.bound.time_us / 2, rel=0.01)
    # On three nodes one pair of them gains nothing while the third waits; that is said as well.
    told = shown("ndv2:3", "allgather", 64 * MB, "hierarchical")
    assert any(text.startswith("one more ib link") for text in told.without_effect)
    assert not {r.change for r in told.remedies} & set(told.without_effect)
    assert "neither bound nor time is lowered by" in text(told)


def test_many_ranks_are_explained_within_seconds(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    made = ["synth", "-t", "dgx-a100:8", "-c", "alltoall", "--size", "1MB", "--engine", "greedy", "--json"]
    answer = json.loads(CliRunner().invoke(cli, [*made, "-o", str(file)]).stdout)
    began = time.monotonic()
    told = json.loads(CliRunner().invoke(cli, ["explain", str(file), "--json"]).stdout)
    priced = json.loads(CliRunner().invoke(cli, ["simulate", str(file), "--json"]).stdout)
    assert time.monotonic() - began < 60  # 4 s; linear programs at every change took minutes
    proved = json.loads(CliRunner().invoke(cli, ["verify", str(file), "--json"]).stdout)["certificate"]
    for found in (told, priced, proved):
        assert (found["lower_bound_us"], found["bound_by"]) == (answer["lower_bound_us"], answer["bound_by"])
    # What the eight ranks of a node want from the 56 others, 1 MB / 64 from each.
    assert told["bottleneck"]["bytes"] == 8 * 56 * MB / 64
    assert told["bottleneck"]["ranks"] == list(range(8)) and told["bottleneck"]["direction"] == "in"
    assert {r["resource"] for r in told["bottleneck"]["resources"]} == {f"node0.ib{i}.in" for i in range(8)}


@pytest.mark.parametrize("spec", ["ndv2:2", "dgx-a100:2", "fat-tree:4x4", "ring:5"])
def test_changed_columns_are_links_changed_one_by_one(spec: str) -> None:
    topology = load_topology(spec)
    links, ports = tuple(topology.links), topology.ports
    count = len(links)
    for chosen in ({0, 1, 5}, set(range(count, count + len(ports), 3)), {0, count + len(ports) - 1}):
        own = {e for e, link in enumerate(links) if e in chosen or any(
            count + p in chosen and ports[p].beta_us_per_mb == link.beta_us_per_mb for p in link.ports
        )}  # fmt: skip
        assert tuple(faster(topology, chosen).links) == tuple(
            replace(x, beta_us_per_mb=x.beta_us_per_mb / 2) if e in own else x for e, x in enumerate(links)
        )
    for kind in sorted({link.kind for link in links}):
        assert tuple(quicker(topology, kind).links) == tuple(
            replace(x, alpha_us=x.alpha_us / 2, occupancy_us=x.occupancy_us / 2) if x.kind == kind else x
            for x in links
        )


def test_a_schedule_is_explained_without_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology, algorithm = broadcast_on_a_line()
    file = tmp_path / "x.json"
    file.write_text(write_native(algorithm, topology), "utf-8")

    def lowered(*_: object) -> None:
        raise AssertionError("lowered")

    monkeypatch.setattr("taccl.synth.lower.lower_exact", lowered)
    told = CliRunner().invoke(cli, ["explain", str(file)])
    assert told.exit_code == 0 and "Certificate of the file" in told.stdout


def exchange() -> Program:
    """Two ranks that send each other their block, in place and out of place."""
    gpus = []
    for rank in (0, 1):
        peer = 1 - rank
        blocks = (
            Threadblock(0, peer, -1, 0, (Step("s", "i", 0, "o", rank, 1),)),
            Threadblock(1, -1, peer, 0, (Step("r", "i", 0, "o", peer, 1),)),
            Threadblock(2, -1, -1, 0, (Step("cpy", "i", 0, "o", rank, 1),)),
        )
        gpus.append(RankProgram(rank, 1, 2, 0, blocks))
    return Program("exchange", "allgather", "Simple", 1, 2, 2, False, True, 0, 1 << 30, tuple(gpus))


def test_programs_are_explained_through_the_simulator(tmp_path: Path) -> None:
    pairs = ((0, 1), (1, 0))
    links = tuple(Link(a, b, Fraction(1), Fraction(10), Fraction(1)) for a, b in pairs)
    topology = Topology("pair", ((0, 1),), links)
    told = explain(exchange(), topology, 2 * MB)
    assert told.time_us == told.bound.time_us == 11
    assert told.gap == 0
    assert [leg.kind for leg in told.path] == ["message"]
    found = document(told)
    assert found["schema"] == "taccl/explain/v1"
    assert found["lower_bound_us"] == 11
    assert "What would help" in text(told)


def test_the_command_prints_text_and_json(tmp_path: Path) -> None:
    file = tmp_path / "exchange.xml"
    file.write_text(write_xml(exchange()))
    shown = CliRunner().invoke(command, [str(file), "--topology", "ring:2", "--size", "2MB"])
    assert shown.exit_code == 0, shown.output
    assert "Critical path" in shown.output
    parsed = json.loads(
        CliRunner().invoke(command, [str(file), "--topology", "ring:2", "--size", "1MB", "--json"]).output
    )  # fmt: skip
    assert parsed["size_bytes"] == MB
    assert parsed["time_us"] >= parsed["lower_bound_us"] > 0
    assert parsed["critical_path"]
    # As for simulate: a size that nobody named would be explained as if it were the one meant.
    unsized = CliRunner().invoke(cli, ["explain", str(file), "--topology", "ring:2"])
    assert unsized.exit_code == 2 and "--size is needed" in unsized.stderr


@pytest.mark.parametrize("spec", ["ring:2", "hypercube:3", "fat-tree:3x4"])
def test_exchanges_of_partial_sums_are_timed_as_such(tmp_path: Path, spec: str) -> None:
    """Both halves of an exchange leave before the other's arrives: neither the file nor a remedy makes one wait."""
    file = str(tmp_path / "x.json")
    made = [
        "synth",
        "-t",
        spec,
        "-c",
        "allreduce",
        "--size",
        "1KB",
        "--engine",
        "one-shot-doubling",
        "-o",
        file,
    ]
    assert CliRunner().invoke(cli, made).exit_code == 0
    assert CliRunner().invoke(cli, ["verify", file]).exit_code == 0
    told = json.loads(CliRunner().invoke(cli, ["explain", file, "--json"]).stdout)
    assert told["remedies"]
    assert all(remedy["time_us"] <= told["time_us"] for remedy in told["remedies"])
