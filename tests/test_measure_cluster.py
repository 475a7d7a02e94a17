"""Profiles of machines made uneven on purpose, against the numbers they were given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.layout import Layout, layout
from cluster.loopback import LoopbackProber
from cluster_jobs import on_cluster

from taccl.profiles.measure.survey import QUICK, survey
from taccl.profiles.profile_file import read_topology

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parent.parent
TRIES = 5  # a busy machine may spoil some
WITHIN = 0.15


def in_cluster(
    of: Layout, program: list[str], timeout_s: float = 170, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in an emulated cluster, which ends with this code; skip where none can be had."""
    words = [f"--nodes={of.nodes}", f"--ranks={of.ranks_per_node}", f"--latency-us={of.latency_us}"]
    words += [f"--slow={node}={bits // 1000}kbit" for node, bits in enumerate(of.rate_bits)]
    if of.rack_of:
        words += [f"--racks={','.join(map(str, of.rack_of))}"]
        words += [f"--trunk={bits // 1000}kbit" for bits in of.trunk_bits]
    return on_cluster(program, *words, code=code, timeout_s=timeout_s, **environment)


def repeatedly(attempt: Callable[[], list[str]]) -> None:
    """The attempt gives its complaints; one try without any is enough."""
    complaints = []
    for _ in range(TRIES):
        complaints.append(attempt())
        if not complaints[-1]:
            return
    pytest.fail("\n".join(f"try {k + 1}: {text}" for k, text in enumerate(complaints)))


def differ(what: str, found: float, configured: float) -> list[str]:
    if abs(found - configured) <= WITHIN * configured:
        return []
    return [f"{what}: found {found:g}, configured {configured:g}"]


def complaints_about(found: dict[str, Any], profile: Path, of: Layout) -> list[str]:
    """What a measured profile says differently from the layout."""
    topology = read_topology(profile.read_text(), str(profile))
    nodes = [list(range(k * of.ranks_per_node, (k + 1) * of.ranks_per_node)) for k in range(of.nodes)]
    if found["nodes"] != nodes:
        return [f"nodes: found {found['nodes']}"]
    wrong = []
    node_of = topology.node_of()
    uplinks: dict[tuple[int, str], float] = {}
    trunks: dict[str, float] = {}
    for link in topology.links:
        src, dst = node_of[link.src], node_of[link.dst]
        if src == dst:
            continue
        slowest = max(of.beta_us_per_mb(src), of.beta_us_per_mb(dst), of.trunk_us_per_mb(src, dst))
        wrong += differ(f"beta of {link.src}->{link.dst}", float(link.beta_us_per_mb), slowest)
        if of.latency_us:
            wrong += differ(f"alpha of {link.src}->{link.dst}", float(link.alpha_us), of.latency_us)
        for port in link.ports:
            name, way = topology.ports[port].name.rsplit(".", 1)
            if topology.ports[port].kind == "trunk":
                trunks[f"{name}.{way}"] = float(topology.ports[port].beta_us_per_mb)
                if not of.trunk_us_per_mb(src, dst):
                    wrong.append(f"{src}->{dst} crosses a trunk")
            node = src if way == "out" else dst
            if name == (f"node{node}.uplink" if of.ranks_per_node > 1 else f"rank{node}.nic"):
                uplinks[node, way] = float(topology.ports[port].beta_us_per_mb)
    if of.rack_of:  # two, of which both trunks are one
        expected_of = {
            f"rack0.trunk.{way}": max(8e12 / bits for bits in of.trunk_bits) for way in ("in", "out")
        }
        if trunks.keys() != expected_of.keys():
            wrong.append(f"trunks: found {trunks}")
        wrong += [text for name in trunks for text in differ(name, trunks[name], expected_of.get(name, 0.0))]
    for node in range(of.nodes):
        # Flows to one other node show no more than the slower of the two uplinks.
        others = [of.beta_us_per_mb(k) for k in range(of.nodes) if k != node]
        expected = max(of.beta_us_per_mb(node), min(others) if len(others) == 1 else 0.0)
        for way in ("out", "in"):
            if (node, way) not in uplinks:
                wrong.append(f"the uplink of node {node} {way} was not found: {found['ports']}")
            else:
                wrong += differ(f"uplink of node {node} {way}", uplinks[node, way], expected)
    return wrong


@pytest.mark.cluster
@pytest.mark.mpi
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "of",
    [
        pytest.param(layout(3, 2, "200mbit", {2: "50mbit"}, latency_us=1000), id="3x2-one-slow-latency"),
        pytest.param(
            layout(4, 1, "200mbit", {1: "100mbit"}, rack_of=(0, 1, 0, 1), trunks=("200mbit", "300mbit")),
            id="4x1-one-slow-in-two-racks-shaped-by-the-kernel",
        ),
        pytest.param(
            layout(3, 1, "100mbit", {2: "150mbit"}, latency_us=500), id="3x1-one-that-no-other-fills"
        ),
    ],
)
def test_an_uneven_machine_is_found_as_it_was_made(of: Layout, tmp_path: Path) -> None:
    def attempt() -> list[str]:
        profile = tmp_path / "profile.yaml"
        done = in_cluster(of, ["taccl", "profile", "-o", str(profile), "--quick", "--json"])
        return complaints_about(json.loads(done.stdout), profile, of)

    repeatedly(attempt)


@pytest.mark.cluster
@pytest.mark.mpi
@pytest.mark.timeout(500)
def test_the_node_boundary_is_measured_when_host_names_say_nothing(tmp_path: Path) -> None:
    of = layout(2, 2, "200mbit", latency_us=1000)

    def attempt() -> list[str]:
        profile = tmp_path / "profile.yaml"
        program = ["python", str(ROOT / "tests/cluster/blind_profile.py")]
        done = in_cluster(of, [*program, "-o", str(profile), "--quick", "--json"])
        return complaints_about(json.loads(done.stdout), profile, of)

    repeatedly(attempt)


@pytest.mark.cluster
@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_messages_between_nodes_take_what_programs_will(transport: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    program = ["taccl", "profile", "-o", str(profile), "--quick", "--transport", transport]
    done = in_cluster(layout(2, 1, "400mbit"), program)
    source = read_topology(profile.read_text(), str(profile)).source
    for said in (done.stderr, source):
        assert ("between nodes over TCP" in said) == (transport == "auto")
    assert "messages between nodes go over MPI" not in done.stderr


@pytest.mark.cluster
@pytest.mark.mpi
def test_interfaces_that_no_node_has_are_said_once(tmp_path: Path) -> None:
    program = ["taccl", "profile", "-o", str(tmp_path / "p.yaml"), "--quick"]
    done = in_cluster(layout(2, 1, "400mbit"), program, code=2, TACCL_INTERFACES="nowhere0")
    assert done.stderr.count("TACCL_INTERFACES") == 1 and "Traceback" not in done.stderr


@pytest.mark.cluster
@pytest.mark.mpi
@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault", ["stall:2", "die:1"])
def test_a_rank_of_another_node_that_stops_is_named(fault: str, tmp_path: Path) -> None:
    profile = tmp_path / "p.yaml"
    program = ["python", str(ROOT / "tests/cluster/fault_profile.py"), "--quick", "--deadline", "2"]
    done = in_cluster(layout(3, 1, "400mbit"), [*program, "-o", str(profile)], code=86, TACCL_FAULT=fault)
    assert f"rank {fault[-1]}" in done.stderr
    assert not profile.exists()


@pytest.mark.cluster
def test_nothing_is_left_of_a_cluster_whose_owner_is_killed() -> None:
    words = ["run", "--nodes=2", "--ranks=1", "--", "sleep", "4711.5"]
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )

    def sleepers() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "cmdline").read_bytes() == b"sleep\x004711.5\x00":
                    found.append(entry.name)
            except OSError:
                continue  # it ended while we looked
        return found

    try:
        assert wait_for(lambda: len(sleepers()) == 2 or owner.poll() is not None)
        if owner.poll() == 77:
            assert owner.stderr is not None
            pytest.skip(owner.stderr.read().strip())
        owner.kill()
        assert wait_for(lambda: not sleepers())
    finally:
        owner.kill()
        owner.communicate()


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> bool:
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def test_real_concurrency_with_injected_delays() -> None:
    """The same measurement on threads, where no cluster can be emulated: 2 nodes x 2, 40 and 80 us/kB."""
    node = [0, 0, 1, 1]
    out = [frozenset((s, d) for s in range(4) for d in range(4) if node[s] == k != node[d]) for k in (0, 1)]

    def attempt() -> list[str]:
        prober = LoopbackProber(
            hosts=["one"] * 4,
            alpha_us=lambda s, d: 100.0 if node[s] == node[d] else 2000.0,
            beta=lambda s, d: 1000.0 if node[s] == node[d] else 30_000.0,
            ports=[(80_000.0, out[0]), (160_000.0, out[1])],
        )
        found = survey(prober, QUICK)
        if found.nodes != ((0, 1), (2, 3)):
            return [f"nodes: {found.nodes}"]
        wrong = []
        for (src, dst), fit in found.fits.items():
            if node[src] != node[dst]:
                wrong += differ("alpha", fit.alpha_us, 2000)
                wrong += differ("beta", fit.beta_us_per_mb, 160_000 if node[src] else 80_000)
        ports = {port.name: port.beta_us_per_mb for port in found.ports}
        for name, beta in (("node0.uplink.out", 80_000), ("node1.uplink.out", 160_000)):
            wrong += differ(name, ports[name], beta) if name in ports else [f"no {name}: {ports}"]
        return wrong

    repeatedly(attempt)


def test_words_that_make_no_layout_are_refused() -> None:
    for bad in (
        lambda: layout(2, 4, "200"),
        lambda: layout(2, 4, "200mbit", {5: "50mbit"}),
        lambda: layout(0, 4, "200mbit"),
        lambda: layout(2, 4, "200mbit", latency_us=5, shaper="tbf"),
    ):
        with pytest.raises(ValueError):
            bad()
    assert layout(2, 1, "1.5gbit").rate_bits == (1_500_000_000,) * 2
    assert layout(2, 1, "200mbit").beta_us_per_mb(0) == 40_000


def test_the_tool_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster", "run", "--rate", "fast", "--", "true"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ},
    )
    assert done.returncode in (1, 2)  # 1 where not even a user namespace can be had
    assert "Traceback" not in done.stderr
