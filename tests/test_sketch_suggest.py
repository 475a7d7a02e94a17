"""Suggested sketches: accepted on their topology, true of it, the same every time."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.profiles.load import library_names, library_profile, load_topology
from taccl.profiles.topology import Link, Nic, Port, Switch, Topology
from taccl.sketches import check_sketch, restrict
from taccl.sketches.sketch import Sketch
from taccl.sketches.sketch_file import read_sketch
from taccl.sketches.suggest import suggest_sketch
from taccl.sketches.symmetry import closure
from taccl.synth.collective import NAMES
from taccl.synth.request import Request
from taccl.synth.synthesise import synthesise

GOLDEN = Path(__file__).parent / "golden"
SIZES = [None, 1, 1000, 10**6 + 1, 2**30]


def suggested(topology: Topology, collective: str = "allgather", size: int | None = None) -> Sketch:
    """The suggestion as a sketch, after checking that it fits its topology without any finding."""
    text = suggest_sketch(topology, collective, size)
    assert text == suggest_sketch(topology, collective, size)
    sketch = read_sketch(text, "suggested.yaml")
    assert check_sketch(sketch, topology) == [], text
    assert sketch.size_bytes == size
    return sketch


@pytest.mark.parametrize("name", library_names())
def test_every_bundled_topology_accepts_its_suggestion(name: str) -> None:
    topology = load_topology(library_profile(name).example)
    if topology.ranks > 16:  # symmetry takes its time, and is no other for other collectives
        suggested(topology, "allgather", 2**20)
        return
    for collective in NAMES:
        for size in SIZES:
            suggested(topology, collective, size)


@pytest.mark.parametrize(("spec", "size"), [("ndv2:2", 10**6), ("dgx2:2", 64 * 10**6)])
def test_golden_suggestions(spec: str, size: int) -> None:
    """To accept a change: write what `taccl sketch suggest` prints over the file, and read the difference."""
    golden = GOLDEN / f"sketch-suggest-{spec.replace(':', '-')}.yaml"
    assert suggest_sketch(load_topology(spec), "allgather", size) == golden.read_text()


@pytest.mark.parametrize("spec", ["ndv2:2", "dgx2:2", "dgx-a100:2", "ring:8"])
def test_every_choice_has_a_reason(spec: str) -> None:
    reason_above = False
    for line in suggest_sketch(load_topology(spec), "allgather", 10**6).splitlines():
        choice = not line.startswith(("schema:", "name:")) and re.search(r": \S", line.partition("#")[0])
        listed = re.match(r"    \d+: ", line)  # lines of `relays`, which says why itself
        assert not choice or listed or "#" in line or reason_above, line
        reason_above = line.lstrip().startswith("#")


def test_a_nic_for_each_rank_is_mapped_directly() -> None:
    sketch = suggested(load_topology("dgx-a100:2"))
    assert sketch.internode is not None and sketch.internode.connection == "direct-map"


def test_a_shared_nic_has_one_sender_and_takes_every_chunk_once() -> None:
    topology = load_topology("dgx2:2")
    internode = suggested(topology).internode
    assert internode is not None and internode.own_first
    assert [{line.sender, *line.receivers} for line in internode.senders] == [
        {r, r + 1} for r in range(0, 16, 2)
    ]
    taken = sorted(rank for relay in internode.relays for rank in relay.sources)
    assert taken == list(range(16))


def test_alltoall_is_not_relayed() -> None:
    internode = suggested(load_topology("dgx2:2"), "alltoall").internode
    assert internode is not None and internode.connection == "fully-connected" and not internode.relays


def test_the_policy_follows_the_size() -> None:
    topology = load_topology("dgx2:2")
    policies = {}
    for size in (None, 1024, 2**30):
        intranode = suggested(topology, size=size).intranode
        assert intranode is not None
        policies[size] = {switch.policy for switch in intranode.switches}
    assert policies == {None: {"free"}, 1024: {"uc-max"}, 2**30: {"uc-min"}}


@pytest.mark.parametrize(
    ("spec", "collective", "images"),
    [
        ("ndv2:1", "allgather", 4), ("dgx2:1", "allgather", 16), ("dgx-a100:2", "allgather", 16),
        ("torus2d:4x4", "allreduce", 16), ("ring:8", "alltoall", 8), ("ring:8", "broadcast", 1),
        ("mesh2d:3x3", "allgather", 1),
    ],
)  # fmt: skip
def test_symmetry_is_written_out(spec: str, collective: str, images: int) -> None:
    topology = load_topology(spec)
    symmetry = restrict(suggested(topology, collective), topology).symmetry
    assert symmetry is not None
    assert len(closure(symmetry, topology.ranks)) == images


@pytest.mark.parametrize(
    ("spec", "collective"),
    [
        ("ndv2:2", "allgather"),
        ("dgx-a100:2", "allgather"),
        ("mesh2d:3x3", "alltoall"),
        ("ring:5", "allreduce"),
    ],
)
def test_synthesis_accepts_suggestions(spec: str, collective: str) -> None:
    topology = load_topology(spec)
    size = 90 * topology.ranks
    restrictions = restrict(suggested(topology, collective, size), topology)
    request = Request(topology, collective, size, restrictions, target_gap=1.0, time_limit_s=10)
    algorithm = synthesise(request)
    used = {message.link for message in algorithm.messages if message.op == "copy"}
    forbidden = [rule.links for rule in restrictions.rules if rule.kind == "forbid-links"]
    assert used and not any(used & links for links in forbidden)


@st.composite
def clusters(draw: st.DrawFn) -> Topology:
    """One to three unequal nodes with any links, NICs and switches, strongly connected by a ring."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda found: sum(found) > 1))
    ranks = sum(sizes)
    nodes = tuple(tuple(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes)))
    node_of = {rank: index for index, node in enumerate(nodes) for rank in node}
    ports: list[Port] = []
    nics: list[Nic] = []
    for index, node in enumerate(nodes):
        for number in range(draw(st.integers(0, 2))):
            near = draw(st.sets(st.sampled_from(node)))
            beta = Fraction(draw(st.integers(1, 100)))
            nics.append(Nic(f"n{index}.{number}", index, tuple(sorted(near)), len(ports), len(ports) + 1))
            ports += [Port(f"n{index}.{number}.{way}", beta, "nic") for way in ("out", "in")]
    extra = draw(st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1)), max_size=12))
    links = []
    for src, dst in [
        *((r, (r + 1) % ranks) for r in range(ranks)),
        *(pair for pair in extra if pair[0] != pair[1]),
    ]:
        out = [n.out_port for n in nics if src in n.ranks and node_of[src] != node_of[dst]][:1]
        into = [n.in_port for n in nics if dst in n.ranks and node_of[src] != node_of[dst]][:1]
        alpha = Fraction(draw(st.integers(0, 5)))
        links.append(Link(src, dst, alpha, Fraction(draw(st.integers(1, 50))), alpha, (*out, *into)))
    switches = [
        Switch(draw(st.sampled_from(["sw", "s: #", "äöü", "x" * 200])), tuple(sorted(members)))
        for members in draw(st.lists(st.sets(st.integers(0, ranks - 1), min_size=1), max_size=2))
    ]
    name = draw(st.sampled_from(["t", "a: b # c", "\n- x", "'", "é\u2028", "y" * 300]))
    topology = Topology(name, nodes, tuple(links), tuple(ports), tuple(switches), tuple(nics))
    topology.check()
    return topology


@settings(deadline=None, max_examples=80)
@given(clusters(), st.sampled_from(NAMES), st.none() | st.integers(1, 2**40))
def test_any_topology_accepts_its_suggestion(topology: Topology, collective: str, size: int | None) -> None:
    suggested(topology, collective, size)
