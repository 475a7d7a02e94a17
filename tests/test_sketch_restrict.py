"""A sketch on a topology: the links that its rules leave, and what it gets wrong there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.errors import InvalidInput
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Topology
from taccl.sketches import check_sketch, load_sketch, restrict
from taccl.sketches.restrictions import Restrictions, Rule
from taccl.sketches.sketch_file import read_sketch
from taccl.sketches.symmetry import is_automorphism

HEAD = "schema: taccl/sketch/v1\nname: s\n"


def on(topology: Topology, text: str) -> Restrictions:
    return restrict(read_sketch(HEAD + text, "s.yaml"), topology)


def ends(topology: Topology, links: frozenset[int]) -> set[tuple[int, int]]:
    return {(topology.links[index].src, topology.links[index].dst) for index in links}


def left(topology: Topology, restrictions: Restrictions) -> set[tuple[int, int]]:
    """The (src, dst) that may still be used."""
    forbidden = [rule.links for rule in restrictions.rules if rule.kind == "forbid-links"]
    return ends(topology, frozenset(range(len(topology.links))) - frozenset[int]().union(*forbidden))


def between(topology: Topology, pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    node_of = topology.node_of()
    return {(a, b) for a, b in pairs if node_of[a] != node_of[b]}


def only(restrictions: Restrictions, kind: str) -> Rule:
    (rule,) = [rule for rule in restrictions.rules if rule.kind == kind]
    return rule


def test_ndv2_sk_1_leaves_one_link_from_each_node_to_each() -> None:
    for nodes in (1, 2, 3):
        topology = load_topology(f"ndv2:{nodes}")
        restrictions = restrict(load_sketch("ndv2-sk-1"), topology)
        pairs = left(topology, restrictions)
        assert between(topology, pairs) == {
            (8 * a, 8 * b + 1) for a in range(nodes) for b in range(nodes) if a != b
        }
        everything = ends(topology, frozenset(range(len(topology.links))))
        assert pairs - between(topology, pairs) == everything - between(topology, everything)
        turned = tuple((rank + 8) % (8 * nodes) for rank in range(8 * nodes))
        assert restrictions.symmetry == (() if nodes == 1 else (turned,))
        assert (restrictions.partition, restrictions.sketch_name) == (1, "ndv2-sk-1")


def test_ndv2_sk_2_forbids_nothing() -> None:
    topology = load_topology("ndv2:2")
    assert restrict(load_sketch("ndv2-sk-2"), topology).rules == ()


def test_dgx2_sk_1_sends_from_odd_to_even_and_relays_for_the_pair() -> None:
    topology = load_topology("dgx2:2")
    restrictions = restrict(load_sketch("dgx2-sk-1"), topology)
    expected = {(a + odd, b + odd - 1) for a, b in ((0, 16), (16, 0)) for odd in range(1, 16, 2)}
    assert between(topology, left(topology, restrictions)) == expected
    assert len(only(restrictions, "uc-min").links) == 2 * 16 * 15
    assert ends(topology, only(restrictions, "own-first").links) == expected
    routes = {route for rule in restrictions.rules for route in rule.routes}
    for rank, link in routes:
        sender = topology.links[link].src
        assert rank // 16 == sender // 16 and rank not in (sender, sender - 1)
    assert len(routes) == 16 * 14
    assert restrictions.symmetry is not None and len(restrictions.symmetry) == 2
    assert all(is_automorphism(topology, permutation) for permutation in restrictions.symmetry)


def test_dgx2_sk_2_maps_directly_and_each_sender_takes_its_own() -> None:
    topology = load_topology("dgx2:2")
    restrictions = restrict(load_sketch("dgx2-sk-2"), topology)
    assert between(topology, left(topology, restrictions)) == {(r, (r + 16) % 32) for r in range(32)}
    allowed = {(r, link) for rule in restrictions.rules for r, link in rule.routes}
    assert all(topology.links[link].src != r for r, link in allowed) and len(allowed) == 32 * 15


def test_rules_carry_the_place_of_their_line() -> None:
    topology = load_topology("ndv2:2")
    restrictions = on(
        topology,
        "avoid:\n  - {pairs: [[0, 1]], both_ways: true}\n"
        "caps:\n  - {limit: 2, kind: ib, from: 0-7}\n"
        "internode:\n  connect:\n    0: [1]\n  own_first: true\n",
    )
    assert [(rule.kind, rule.where, rule.text) for rule in restrictions.rules] == [
        ("forbid-links", "s.yaml:4:5", "links 0 <-> 1 may not be used"),
        ("cap", "s.yaml:6:5", "links of kind ib from 0-7 carry at most 2 chunk(s) each"),
        ("forbid-links", "s.yaml:9:5", "links between nodes run only between the local ranks 0 -> 1"),
        ("own-first", "s.yaml:10:14", "a sender's own chunks leave the node before those that it relays"),
    ]
    assert ends(topology, restrictions.rules[0].links) == {(0, 1), (1, 0)}
    cap = restrictions.rules[1]
    assert cap.limit == 2
    assert ends(topology, cap.links) == {(a, b) for a in range(8) for b in range(8, 16)}


def test_bare_numbers_are_bytes_seconds_and_a_fraction() -> None:
    found = on(load_topology("ring:4"), "size: 1000\ntime_limit: 60\ntarget_gap: 0.05\n")
    assert (found.size_bytes, found.time_limit_s, found.target_gap) == (1000, 60.0, 0.05)


def test_a_line_without_a_selection_means_all_links() -> None:
    text = "avoid: [{from: all, to: all}]\ncaps: [{from: all, to: all, limit: 3}]\n"
    rules = on(load_topology("ring:4"), text).rules
    assert [rule.text for rule in rules] == [
        "all links may not be used", "all links carry at most 3 chunk(s) each"
    ]  # fmt: skip


def test_use_leaves_only_what_one_of_its_lines_selects() -> None:
    topology = load_topology("ndv2:2")
    restrictions = on(
        topology, "use:\n  - {scope: intra, kind: nvlink}\n  - {pairs: [[0, 9]], both_ways: true}\n"
    )
    assert between(topology, left(topology, restrictions)) == {(0, 9), (9, 0)}


def test_strategies_and_named_switches() -> None:
    topology = load_topology("dgx2:2")
    by_name = only(on(topology, "intranode: {switches: [{name: nvswitch, policy: uc-max}]}"), "uc-max")
    by_rank = only(on(topology, "intranode: {switches: [{ranks: all, policy: uc-max}]}"), "uc-max")
    spread = only(on(topology, "intranode: {strategy: minmax}"), "uc-max")
    assert by_name.links == by_rank.links == spread.links
    assert on(topology, "intranode: {switches: [{ranks: all, policy: free}]}").rules == ()


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{pattern: round-robin, size: 2}", {(0, 1), (2, 3), (0, 2), (1, 3)}),
        ("{pattern: relay, size: 2}", {(0, 1), (2, 3), (0, 2)}),
        ("{pattern: relay, nodes: [[3, 1], [2, 0]]}", {(1, 3), (0, 2), (2, 3)}),
    ],
)
def test_node_groups(groups: str, expected: set[tuple[int, int]]) -> None:
    topology = load_topology("ndv2:4")
    pairs = left(topology, on(topology, f"internode: {{groups: {groups}}}"))
    nodes = {(min(a // 8, b // 8), max(a // 8, b // 8)) for a, b in between(topology, pairs)}
    assert nodes == expected


def test_symmetry_written_out_auto_and_none() -> None:
    topology = load_topology("dgx2:1")
    shift = [(rank + 1) % 16 for rank in range(16)]
    assert on(topology, f"symmetry: {{permutations: [{shift}]}}").symmetry is not None
    assert on(topology, "symmetry: auto").symmetry is None
    assert on(topology, "symmetry: none").symmetry == ()


def test_plain_values_are_handed_on() -> None:
    text = "size: 1MB\nextra_hops: 0\ntime_limit: 9s\ntarget_gap: 0.1\nhyperparameters: {seed: 3}\n"
    found = on(load_topology("ndv2:1"), text)
    assert (found.size_bytes, found.extra_hops, found.time_limit_s, found.target_gap) == (10**6, 0, 9.0, 0.1)
    assert found.options == {"seed": 3}


ERRORS = {
    "nodes: 3": (3, "S201", "the sketch is for 3 node(s), ndv2:2 has 2"),
    "avoid: [{from: 16}]": (3, "S202", "rank 16 does not exist: ndv2:2 has ranks 0 to 15"),
    "avoid: [{pairs: [[0, 5]]}]": (3, "S203", "no such link from rank 0 to rank 5"),
    "use: [{kind: nvlnk}]": (3, "S204", "did you mean 'nvlink'?"),
    "intranode: {switches: [{ranks: 0-8, policy: uc-min}]}": (3, "S202", "local rank 8 does not exist"),
    "intranode: {switches: [{ranks: 0-7, policy: uc-min}]}": (3, "S205", "no link joins 0 to 5"),
    "intranode: {switches: [{name: nvswitch, policy: uc-min}]}": (
        3,
        "S205",
        "name the switch by its `ranks`",
    ),
    "internode: {connect: {8: [0]}}": (3, "S202", "local rank 8 does not exist"),
    "internode: {groups: {pattern: relay, size: 3}}": (3, "S206", "2 nodes do not make groups of 3"),
    "internode: {groups: {pattern: relay, nodes: [[0], [2]]}}": (3, "S206", "node 2 does not exist"),
    "internode: {groups: {pattern: relay, nodes: [[1]]}}": (3, "S206", "node 0 is in no group"),
    "internode: {relays: {0: [9]}}": (3, "S202", "local rank 9 does not exist"),
    "symmetry: [[1, 16]]": (3, "S209", "the link 0 -> 1 differs from its image 1 -> 2"),
    "symmetry: [[2, 5]]": (3, "S209", "groups of 5 ranks do not divide the 16 ranks"),
    "symmetry: {permutations: [[1, 0]]}": (3, "S209", "the permutation has 2 ranks, ndv2:2 has 16"),
}
WARNINGS = {
    "avoid: [{scope: inter}]": (3, "S208", "rank 8-15 is out of reach of rank 0"),
    "avoid: [{kind: ib, scope: intra}]": (3, "S203", "selects no link"),
    "internode: {connect: {0: [1]}, relays: {0: [0]}}": (3, "S207", "the chunks of local rank 1-7"),
    "avoid: [{pairs: [[0, 9]]}]\nsymmetry: [[8, all]]": (4, "S209", "it will not be used"),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text: str) -> None:
    line, code, words = ERRORS[text]
    topology = load_topology("ndv2:2")
    with pytest.raises(InvalidInput) as caught:
        on(topology, text)
    (found,) = caught.value.diagnostics
    assert (found.line, found.code) == (line, code) and words in found.render()
    assert found in check_sketch(read_sketch(HEAD + text, "s.yaml"), topology)


@pytest.mark.parametrize("text", WARNINGS)
def test_warnings_do_not_stop(text: str) -> None:
    line, code, words = WARNINGS[text]
    topology = load_topology("ndv2:2")
    found = check_sketch(read_sketch(HEAD + text, "s.yaml"), topology)
    assert [d.severity for d in found] == ["warning"] * len(found)
    assert any((d.line, d.code) == (line, code) and words in d.render() for d in found), found
    on(topology, text)


def test_an_error_shows_the_line_of_the_author() -> None:
    sketch = read_sketch(HEAD + "internode:\n  connect:\n    0: [1]\n    9: [0]\n", "s.yaml")
    assert [d.render() for d in check_sketch(sketch, load_topology("ndv2:2"))] == [
        "s.yaml:6:5: error[S202]: local rank 9 does not exist: a node of ndv2:2 has ranks 0 to 7\n"
        "      9: [0]\n"
        "      ^"
    ]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_an_explicit_connection_leaves_exactly_its_links(data: st.DataObject) -> None:
    topology = load_topology("ndv2:2")
    local = st.integers(0, 7)
    senders = data.draw(st.dictionaries(local, st.lists(local, min_size=1, unique=True), min_size=1))
    lines = "".join(f"    {sender}: {receivers}\n" for sender, receivers in senders.items())
    restrictions = on(topology, f"internode:\n  connect:\n{lines}")
    expected = {
        (a + sender, 8 - a + receiver) for a in (0, 8) for sender, to in senders.items() for receiver in to
    }
    assert between(topology, left(topology, restrictions)) == expected


def test_what_groups_keep_apart_is_not_blamed_on_the_connection() -> None:
    topology = load_topology("dgx-a100:4")
    restrictions = on(topology, "internode: {connect: direct-map, groups: {pattern: relay, size: 2}}\n")
    groups, connection = (rule for rule in restrictions.rules if rule.kind == "forbid-links")
    assert not any(b % 8 == a % 8 for a, b in ends(topology, connection.links))
    assert (8, 16) in ends(topology, groups.links)
    assert between(topology, left(topology, restrictions)) == {
        (8 * a + k, 8 * b + k) for a, b in [(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0)] for k in range(8)
    }


@pytest.mark.parametrize("first", ["ranks: all", "name: nvswitch"])
@pytest.mark.parametrize("ranks", ["0-15", "0-3"])
def test_switches_of_the_same_links_have_one_policy(first: str, ranks: str) -> None:
    """However they are named."""
    topology = load_topology("dgx2:1")
    second = f"    - {{ranks: {ranks}, policy: uc-max}}\n"
    text = f"intranode:\n  switches:\n    - {{{first}, policy: uc-min}}\n"
    found = check_sketch(read_sketch(HEAD + text + second, "s.yaml"), topology)
    assert [(one.code, one.line, one.severity) for one in found] == [("S105", 6, "error")]
    assert check_sketch(read_sketch(HEAD + text + second.replace("uc-max", "free"), "s.yaml"), topology) != []
    assert check_sketch(read_sketch(HEAD + text, "s.yaml"), topology) == []


def test_values_that_aliases_nest_are_refused_as_others_are() -> None:
    nested = "\n".join(["x:", "  - &a0 [0]", *(f"  - &a{i} [*a{i - 1}]" for i in range(1, 1200))])
    with pytest.raises(InvalidInput) as refused:
        read_sketch(f"{HEAD}{nested}\nsymmetry: *a1199\n", "s.yaml")
    assert {found.code for found in refused.value.diagnostics} >= {"Y102"}
