"""Profiles to topologies and back: the three ways to write one, and what is refused at which place."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.errors import InvalidInput
from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.profile_file import read_topology, write_topology
from taccl.profiles.schema import DTYPE_NAMES
from taccl.profiles.topology import Link, Measurement, Nic, Port, Switch, Topology

HOMOGENEOUS = """\
schema: taccl/profile/v1
name: odd
source: made up
nodes: 2
node:
  ranks: 4
  ports:
    bridge: {beta: 16GB/s, kind: pcie}
  links:
    - {class: nv, from: 0-1, to: 2-3, both_ways: true}
    - [0, 1, pcie, [bridge]]
  nics:
    - {name: ib0, ranks: 0-1}
    - {name: ib1, ranks: [2, 3], beta: 50Gbit/s}
network: {class: ib, pairs: rails}
classes:
  nv: {alpha: 0.7us, beta: 25GB/s, occupancy: 0.2us, kind: nvlink}
  pcie: {alpha: 2us, beta: 12GB/s, measured: {samples: 40, residual: 3%, alpha_ci: 0.1us}}
  ib: {alpha: 2.6us, beta: 100Gbit/s}
reduce: {alpha: 1us, beta: 3us/MB}
"""

LISTED = """\
schema: taccl/profile/v1
name: two
nodes: [0-1, 2]
classes:
  fast: {alpha: 1, beta: 10}
  slow: {alpha: 5, beta: 100}
ports:
  uplink: {beta: 50}
  downlink: {beta: 50, kind: nic}
switches:
  - {name: leaf, ranks: all}
nics:
  - {name: eth0, node: 0, ranks: 0-1, out: uplink, in: downlink}
links:
  - [0, 1, fast]
  - [1, 0, fast]
  - [0, 2, slow, [uplink]]
  - {class: slow, from: 2, to: [0, 1], ports: [downlink]}
"""

HEAD = "schema: taccl/profile/v1\nname: x\nclasses: {c: {alpha: 1, beta: 1}}\n"


def codes(text: str) -> list[tuple[str, int, int]]:
    with pytest.raises(InvalidInput) as caught:
        read_topology(text, "p.yaml")
    return [(found.code, found.line, found.column) for found in caught.value.diagnostics]


def links_of(topology: Topology) -> dict[tuple[int, int], Link]:
    return {(link.src, link.dst): link for link in topology.links}


def test_a_homogeneous_cluster() -> None:
    topology = read_topology(HOMOGENEOUS, "p.yaml")
    assert topology.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.source == "made up"
    assert (topology.reduce_alpha_us, topology.reduce_beta_us_per_mb) == (1, 3)
    links = links_of(topology)
    inner = {(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (3, 0), (2, 1), (3, 1), (0, 1)}
    rails = {(rank, rank + 4) for rank in range(4)}
    expected = inner | {(s + 4, d + 4) for s, d in inner} | rails | {(d, s) for s, d in rails}
    assert set(links) == expected
    assert len(topology.links) == len(expected)
    assert links[4, 6] == Link(4, 6, Fraction(7, 10), Fraction(40), Fraction(1, 5), (), "nvlink")
    names = [port.name for port in topology.ports]
    assert [names[port] for port in links[4, 5].ports] == ["node1.bridge"]
    assert links[4, 5].measured == Measurement(40, 0.03, 0.1)
    assert [names[port] for port in links[6, 2].ports] == ["node1.ib1.out", "node0.ib1.in"]
    assert topology.nics[3] == Nic(
        "node1.ib1", 1, (6, 7), names.index("node1.ib1.out"), names.index("node1.ib1.in")
    )
    rates = {port.name: port.beta_us_per_mb for port in topology.ports}
    assert rates["node0.ib0.out"] == 80  # from the network's class
    assert rates["node0.ib1.out"] == 160


def test_all_pairs_between_nodes_share_the_near_nics() -> None:
    text = HOMOGENEOUS.replace(", pairs: rails", "")
    topology = read_topology(text, "p.yaml")
    between = [link for link in topology.links if link.kind == "ib"]
    assert len(between) == 2 * 4 * 4
    out = next(i for i, port in enumerate(topology.ports) if port.name == "node0.ib0.out")
    assert {link.src for link in topology.links if out in link.ports} == {0, 1}


def test_a_rank_near_two_nics_has_a_link_through_each() -> None:
    text = HOMOGENEOUS.replace("{name: ib1, ranks: [2, 3]", "{name: ib1, ranks: 0-1")
    topology = read_topology(text, "p.yaml")
    parallel = [link for link in topology.links if (link.src, link.dst) == (0, 4)]
    names = [port.name for port in topology.ports]
    assert [[names[port] for port in link.ports] for link in parallel] == [
        ["node0.ib0.out", "node1.ib0.in"],
        ["node0.ib1.out", "node1.ib1.in"],
    ]
    assert not [link for link in topology.links if (link.src, link.dst) == (2, 6)]  # 2 is near no NIC


def test_a_switch_gives_each_rank_a_port_each_way() -> None:
    text = """\
schema: taccl/profile/v1
name: s
node:
  ranks: 4
  switches:
    - {name: sw, ranks: 0-2, class: nv, port: 5}
classes: {nv: {alpha: 1, beta: 10}}
"""
    topology = read_topology(text, "p.yaml")
    assert topology.switches == (Switch("node0.sw", (0, 1, 2)),)
    assert len(topology.links) == 6
    names = [port.name for port in topology.ports]
    link = links_of(topology)[2, 0]
    assert [names[port] for port in link.ports] == ["node0.sw.rank2.out", "node0.sw.rank0.in"]
    assert {port.beta_us_per_mb for port in topology.ports} == {Fraction(5)}


def test_link_by_link() -> None:
    topology = read_topology(LISTED, "p.yaml")
    assert topology.nodes == ((0, 1), (2,))
    assert topology.switches == (Switch("leaf", (0, 1, 2)),)
    assert topology.nics == (Nic("eth0", 0, (0, 1), 0, 1),)
    assert [(link.src, link.dst, link.kind, link.ports) for link in topology.links] == [
        (0, 1, "fast", ()),
        (1, 0, "fast", ()),
        (0, 2, "slow", (0,)),
        (2, 0, "slow", (1,)),
        (2, 1, "slow", (1,)),
    ]


def test_changes_make_a_cluster_irregular() -> None:
    text = HOMOGENEOUS + (
        "changes:\n"
        "  - {from: 0, to: 2, both_ways: true, remove: true}\n"
        "  - {from: 1, to: 2, beta: 10GB/s}\n"
        "  - {from: 4-5, to: 6-7, alpha: 0.1}\n"
        "  - {from: 2, to: 1, class: ib}\n"
        "  - {nic: node1.ib0, beta: 200}\n"
        "  - {port: node0.bridge, beta: 1}\n"
    )
    before, after = read_topology(HOMOGENEOUS, "p"), read_topology(text, "p")
    assert set(links_of(before)) - set(links_of(after)) == {(0, 2), (2, 0)}
    links = links_of(after)
    assert links[1, 2] == replace(links_of(before)[1, 2], beta_us_per_mb=Fraction(100))
    assert (links[5, 7].alpha_us, links[5, 7].occupancy_us) == (Fraction(1, 10), Fraction(1, 10))
    assert (links[2, 1].kind, links[2, 1].alpha_us) == ("ib", Fraction(13, 5))
    rates = {port.name: port.beta_us_per_mb for port in after.ports}
    assert (rates["node1.ib0.in"], rates["node1.ib0.out"], rates["node0.bridge"]) == (200, 200, 1)
    assert rates["node0.ib0.in"] == 80


def test_changed_numbers_are_no_longer_measured() -> None:
    text = HOMOGENEOUS + "changes:\n  - {from: 0, to: 1, beta: 7}\n"
    links = links_of(read_topology(text, "p"))
    assert links[0, 1].measured is None
    assert links[4, 5].measured is not None


def test_the_loader_may_replace_count_size_and_name() -> None:
    assert read_topology(HOMOGENEOUS, "p", nodes=3, name="odd:3").ranks == 12
    shape = HEAD + "shape: {kind: ring, size: [4], class: c}\n"
    assert read_topology(shape, "p", size=[5]).ranks == 5


def damaged(old: str, new: str, text: str = HOMOGENEOUS) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        (damaged("ranks: 4", "ranks: 0"), "Y104", (6, 10)),
        (damaged("nodes: 2", "nodes: 2000"), "P106", (4, 8)),
        (damaged("nodes: 2", "nodes: [0-3]"), "P101", (4, 8)),
        (damaged("nodes: 2", "nodes: -1"), "Y104", (4, 8)),
        (damaged("to: 2-3", "to: 2-9"), "P102", (10, 34)),
        (damaged("to: 2-3", "to: 3-2"), "P102", (10, 34)),
        (damaged("to: 2-3", "to: [2, 2]"), "P102", (10, 34)),
        (damaged("to: 2-3", "to: 0-999999"), "P102", (10, 34)),
        (damaged("to: 2-3", "too: 2-3"), "Y102", (10, 30)),
        (damaged("to: 2-3, ", ""), "P101", (10, 7)),
        (damaged("class: nv", "class: nvv"), "P103", (10, 15)),
        (damaged("[0, 1, pcie", "[0, 0, pcie"), "P105", (11, 11)),
        (damaged("[0, 1, pcie", "[0, 4, pcie"), "P102", (11, 11)),
        (damaged("[0, 1, pcie", "[0, -1, pcie"), "Y104", (11, 11)),
        (damaged("[bridge]", "[brigde]"), "P104", (11, 21)),
        (damaged("[bridge]", "[bridge, bridge]"), "P104", (11, 20)),
        (damaged("ranks: 0-1}", "ranks: 0-7}"), "P102", (13, 26)),
        (damaged("name: ib1", "name: ib0"), "P104", (14, 7)),
        (damaged("50Gbit/s", "0Gbit/s"), "Y103", (14, 40)),
        (damaged("pairs: rails", "pairs: rail"), "Y106", (15, 29)),
        (damaged("class: ib", "class: ibb"), "P103", (15, 18)),
        (damaged("beta: 25GB/s", "beta: -1"), "Y104", (17, 28)),
        (damaged("beta: 25GB/s", "beta: 0"), "Y104", (17, 28)),
        (damaged("beta: 25GB/s", "beta: 1e-100"), "Y104", (17, 28)),
        (damaged("beta: 25GB/s", "beta: 1e12"), "Y104", (17, 28)),
        (damaged("alpha: 0.7us", "alpha: 1e-320"), "Y104", (17, 15)),
        (damaged("occupancy: 0.2us", "occupancy: 0.8us"), "P105", (17, 47)),
        (damaged("residual: 3%", "residual: x"), "Y103", (18, 70)),
        (damaged("samples: 40, ", ""), "Y109", (18, 46)),
        (damaged("schema: taccl/profile/v1", "schema: taccl/profile/v2"), "Y106", (1, 9)),
        (HOMOGENEOUS + "shape: {kind: ring, size: [4], class: nv}\n", "P101", (21, 8)),
        (HOMOGENEOUS + "changes: [{from: 0}]\n", "P107", (21, 11)),
        (HOMOGENEOUS + "changes: [{from: 0, to: 0, remove: true}]\n", "P107", (21, 11)),
        (HOMOGENEOUS + "changes: [{from: 0, to: 2}]\n", "P107", (21, 11)),
        (HOMOGENEOUS + "changes: [{from: 0, to: 2, remove: true, beta: 1}]\n", "P107", (21, 11)),
        (HOMOGENEOUS + "changes: [{from: 0, to: 2, occupancy: 9}]\n", "P105", (21, 11)),
        (HOMOGENEOUS + "changes: [{nic: node0.ib, beta: 1}]\n", "P104", (21, 17)),
        (HOMOGENEOUS + "changes: [{nic: node0.ib0}]\n", "P107", (21, 11)),
        (HOMOGENEOUS + "changes: [{port: node9.bridge, beta: 1}]\n", "P104", (21, 18)),
        (HOMOGENEOUS + "ports: {p: {beta: 1}}\n", "P101", (21, 8)),
        (damaged("nodes: [0-1, 2]", "nodes: [0-1, 3]", LISTED), "P102", (3, 8)),
        (damaged("nodes: [0-1, 2]", "nodes: [0-1, 1]", LISTED), "P102", (3, 14)),
        (damaged("nodes: [0-1, 2]", "nodes: [0-1, all]", LISTED), "P102", (3, 14)),
        (damaged("nodes: [0-1, 2]", "nodes: 3", LISTED), "P101", (3, 8)),
        (damaged("nodes: [0-1, 2]\n", "", LISTED), "P101", (1, 1)),
        (damaged("node: 0", "node: 2", LISTED), "P102", (13, 24)),
        (damaged("out: uplink", "out: uplnk", LISTED), "P104", (13, 44)),
        (damaged("uplink: {beta: 50}", "uplink: {beta: 0}", LISTED), "Y104", (8, 18)),
        (damaged("ranks: all", "ranks: 0-9", LISTED), "P102", (11, 25)),
    ],
)  # fmt: skip
def test_what_is_refused_and_where(text: str, code: str, place: tuple[int, int]) -> None:
    assert (code, *place) in codes(text)


def test_what_is_allowed_is_said() -> None:
    with pytest.raises(InvalidInput) as caught:
        read_topology(
            damaged("alpha: 0.7us", "alpha: 1e-320").replace("beta: 25GB/s", "beta: 1e12"), "x.yaml"
        )
    low, high = (found.message for found in caught.value.diagnostics)
    assert low.endswith("0 or from 1e-9 to 1e9, found 1e-320")
    assert high.endswith("from 1e-6 to 1e9, found 1e12")
    text = damaged("alpha: 2.6us", "alpha: 1e-9").replace("beta: 100Gbit/s", "beta: 1e9")
    assert "alpha: 1e-9" in text and "beta: 1e9" in text
    assert read_topology(text, "x.yaml")


def test_one_mistake_is_one_finding() -> None:
    """What follows from a mistake is not reported as another."""
    for text in (
        damaged("class: nv", "class: nvv") + "changes: [{from: 0, to: 2, remove: true}]\n",
        damaged("name: ib0, ranks: 0-1", "name: ib0, ranks: 0-9") + "changes: [{nic: node0.ib0, beta: 1}]\n",
        damaged("ranks: 4", "ranks: x"),
        damaged("nodes: 2", "nodes: x"),
        damaged("uplink: {beta: 50}", "uplink: {beta: 0}", LISTED),
        damaged("beta: 100Gbit/s", "beta: -1"),
    ):
        assert len(codes(text)) == 1, codes(text)


def test_independent_mistakes_come_together() -> None:
    text = (
        damaged("to: 2-3", "to: 2-9").replace("[bridge]", "[brigde]").replace("pairs: rails", "pairs: rail")
    )
    assert [found[0] for found in codes(text)] == ["P102", "Y106"]


@pytest.mark.parametrize(
    "text",
    [
        "nodes: 64\nnetwork: {class: c}\n"
        "node: {ranks: 64, nics: [{name: a, ranks: all}, {name: b, ranks: all}]}\n",
        "nodes: 2\nnetwork: {class: c}\n"
        "node: {ranks: 300, nics: [" + "{name: n, ranks: all}, " * 120 + "]}\n",
        "shape: {kind: fat-tree, size: [64, 65], class: c}\n",
        "nodes: 4\nnetwork: {class: c}\nnode: {ranks: 1024, nics: [{name: a, ranks: all}, {name: b, ranks: all}]}\n",
        "nodes: [0-4095]\nlinks: [{class: c, from: all, to: all}]\n",
    ],
)  # fmt: skip
def test_huge_clusters_are_refused_before_they_are_built(text: str) -> None:
    assert [found[0] for found in codes(HEAD + text)] == ["P106"]


def test_a_network_of_one_node_has_no_links() -> None:
    """Its 4 * 10^6 pairs of ranks are not even counted one by one."""
    topology = read_topology(HEAD + "network: {class: c}\nnode: {ranks: 2000}\n", "p.yaml")
    assert topology.ranks == 2000 and not topology.links


@pytest.mark.parametrize("pairs", ["all", "rails"])
def test_links_of_a_network_are_counted_as_they_are_made(pairs: str) -> None:
    """Rank 0 is near two NICs, rank 1 near three, rank 2 near one, rank 3 near none."""
    near = ("0-1", "0-2", "[1]")
    nics = ", ".join(f"{{name: n{k}, ranks: {ranks}}}" for k, ranks in enumerate(near))
    text = f"nodes: 3\nnetwork: {{class: c, pairs: {pairs}}}\nnode: {{ranks: 4, nics: [{nics}]}}\n"
    made = len(read_topology(HEAD + text, "p.yaml").links)
    each = [2, 3, 1] if pairs == "rails" else [min(a, b) for a in (2, 3, 1) for b in (2, 3, 1)]
    assert made == 6 * sum(each)


def test_writing_is_canonical() -> None:
    topology = read_topology(LISTED, "p.yaml")
    assert write_topology(topology) == (
        "schema: taccl/profile/v1\n"
        "name: two\n"
        "nodes:\n"
        "  - 0-1\n"
        "  - [2]\n"
        "classes:  # alpha and occupancy in us, beta in us/MB\n"
        "  fast: {alpha: 1, beta: 10}\n"
        "  slow: {alpha: 5, beta: 100}\n"
        "ports:\n"
        "  uplink: {beta: 50}\n"
        "  downlink: {beta: 50, kind: nic}\n"
        "switches:\n"
        "  - {name: leaf, ranks: 0-2}\n"
        "nics:\n"
        "  - {name: eth0, node: 0, ranks: 0-1, out: uplink, in: downlink}\n"
        "links:  # [src, dst, class, [ports]]\n"
        "  - [0, 1, fast]\n"
        "  - [1, 0, fast]\n"
        "  - [0, 2, slow, [uplink]]\n"
        "  - [2, 0, slow, [downlink]]\n"
        "  - [2, 1, slow, [downlink]]\n"
    )


def test_writing_refuses_a_topology_that_breaks_its_rules() -> None:
    topology = read_topology(LISTED, "p.yaml")
    with pytest.raises(ValueError, match="two different ranks"):
        write_topology(replace(topology, links=(replace(topology.links[0], dst=0),)))


NAMES = st.text(st.characters(blacklist_categories=("Cc", "Cs")), min_size=1, max_size=12)
RATES = st.one_of(
    st.integers(1, 10**6).map(Fraction),
    st.fractions(min_value=Fraction(1, 10**6), max_value=10**9, max_denominator=10**12),
    st.floats(2e-6, 1e9).map(Fraction),
)
WIDTHS = st.floats(0, 1e6)


@st.composite
def topologies(draw: Any) -> Topology:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(sum(sizes))))
    nodes, first = [], 0
    for size in sizes:
        nodes.append(tuple(order[first : first + size]))
        first += size
    ranks = sum(sizes)
    ports = tuple(
        Port(name, draw(RATES), draw(st.one_of(st.sampled_from(["port", "nic"]), NAMES)))
        for name in draw(st.lists(NAMES, unique=True, max_size=4))
    )
    links = []
    for _ in range(draw(st.integers(0, 8)) if ranks > 1 else 0):
        src, dst = draw(st.permutations(range(ranks)))[:2]
        alpha = draw(st.one_of(st.just(Fraction(0)), RATES))
        occupancy = draw(st.sampled_from([alpha, alpha / 3, Fraction(0)]))
        crossed = tuple(draw(st.permutations(range(len(ports))))[: draw(st.integers(0, 2))])
        measured = draw(
            st.none() | st.builds(Measurement, st.integers(1, 10**9), st.floats(0, 10), WIDTHS, WIDTHS)
        )
        kind = draw(st.one_of(st.sampled_from(["nvlink", "ib", "no", "class-1"]), NAMES))
        links.append(Link(src, dst, alpha, draw(RATES), occupancy, crossed, kind, measured))
    members = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    switches = tuple(Switch(name, draw(members)) for name in draw(st.lists(NAMES, unique=True, max_size=2)))
    nics = tuple(
        Nic(name, draw(st.integers(0, len(nodes) - 1)), draw(st.one_of(st.just(()), members)),
            draw(st.integers(0, len(ports) - 1)), draw(st.integers(0, len(ports) - 1)))
        for name in draw(st.lists(NAMES, unique=True, max_size=2 if ports else 0))
    )  # fmt: skip
    reduce = draw(st.tuples(RATES, RATES) | st.just((Fraction(0), Fraction(0))))
    source = st.text(st.characters(blacklist_categories=("Cs",)), max_size=40)
    kinds = st.tuples(st.sampled_from(["q8", "bf16-xw", "no"]), st.sampled_from(DTYPE_NAMES))
    times = st.lists(st.one_of(st.just(Fraction(0)), RATES), min_size=4, max_size=4)
    codecs = tuple(
        CodecCost(
            *kind, draw(st.booleans()), draw(RATES), draw(st.integers(0, 10**9)), *draw(times), draw(source)
        )
        for kind in draw(st.lists(kinds, unique=True, max_size=3))
    )
    return Topology(
        draw(NAMES),
        tuple(nodes),
        tuple(links),
        ports,
        switches,
        nics,
        *reduce,
        draw(source),
        codecs,
        draw(st.one_of(st.just(Fraction(0)), RATES)),
    )


@given(topologies())
@settings(deadline=None, max_examples=150)
def test_what_is_written_reads_back_equal(topology: Topology) -> None:
    text = write_topology(topology)
    again = read_topology(text, "written.yaml")
    assert again == topology
    assert write_topology(again) == text
