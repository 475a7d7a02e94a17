"""The bundled profiles: wiring, rates, sizes; names that do not exist; the JSON Schema beside the reader."""

from __future__ import annotations

import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.cli import load_command
from taccl.errors import InvalidInput, TacclError, UsageError
from taccl.profiles.load import library_names, library_profile, library_text, load_topology
from taccl.profiles.profile_file import read_topology, write_topology
from taccl.profiles.schema import MAX_LISTED_LINKS, PROFILE, profile_schema
from taccl.profiles.topology import Link, Topology
from taccl.profiles.yaml_reader import parse, plain_value

SPECS = [
    *library_names(), "ndv2:1", "ndv2:2", "ndv2-1mb:2", "dgx1v:2", "dgx2:2", "dgx-a100:2", "dgx-h100:2",
    "mi300x:2", "ring:2", "ring:8", "mesh2d:3x3", "torus2d:4x4", "torus2d:2x3", "torus3d:2x3x4",
    "hypercube:4", "fat-tree:4x8", "fat-tree:1x4", "fat-tree:4x1",
]  # fmt: skip


def links_of(topology: Topology) -> dict[tuple[int, int], Link]:
    links = {(link.src, link.dst): link for link in topology.links}
    assert len(links) == len(topology.links)
    return links


@pytest.mark.parametrize("spec", SPECS)
def test_every_bundled_topology_is_sound(spec: str) -> None:
    topology = load_topology(spec)
    topology.check()
    assert topology.name == spec
    assert topology.source
    reached = {0}
    links = links_of(topology)
    for _ in range(topology.ranks):
        reached |= {dst for src, dst in links if src in reached}
    assert reached == set(range(topology.ranks))
    assert {(dst, src) for src, dst in links} == set(links), "each link has one back"
    assert read_topology(write_topology(topology), "written") == topology


@pytest.mark.parametrize("name", library_names())
def test_every_number_has_a_source(name: str) -> None:
    profile = library_profile(name)
    assert 10 < len(profile.description) <= 110
    assert profile.class_sources and all(source for _, source in profile.class_sources)
    assert load_topology(profile.example).name == profile.example


def test_ndv2_is_taccls() -> None:
    """microsoft/taccl, taccl/topologies/generic.py (ndv2): the matrix of NVLink betas."""
    one, two = 23, 46  # us/MB of a double and of a single NVLink
    betas = [
        [0, one, two, two, one, 0, 0, 0],
        [one, 0, two, one, 0, two, 0, 0],
        [two, two, 0, one, 0, 0, one, 0],
        [two, one, one, 0, 0, 0, 0, two],
        [one, 0, 0, 0, 0, one, two, two],
        [0, two, 0, 0, one, 0, two, one],
        [0, 0, one, 0, two, two, 0, one],
        [0, 0, 0, two, two, one, one, 0],
    ]
    links = links_of(load_topology("ndv2:1"))
    assert {pair: link.beta_us_per_mb for pair, link in links.items()} == {
        (s, d): Fraction(betas[s][d]) for s in range(8) for d in range(8) if betas[s][d]
    }
    assert {link.alpha_us for link in links.values()} == {Fraction(3, 10)}


def test_a_dgx1v_is_wired_as_nvidia_smi_prints_it() -> None:
    matrix = [
        " X   NV1 NV1 NV2 NV2 SYS SYS SYS",
        "NV1  X   NV2 NV1 SYS NV2 SYS SYS",
        "NV1 NV2  X   NV2 SYS SYS NV1 SYS",
        "NV2 NV1 NV2  X   SYS SYS SYS NV1",
        "NV2 SYS SYS SYS  X   NV1 NV1 NV2",
        "SYS NV2 SYS SYS NV1  X   NV2 NV1",
        "SYS SYS NV1 SYS NV1 NV2  X   NV2",
        "SYS SYS SYS NV1 NV2 NV1 NV2  X ",
    ]
    rates = {"NV1": Fraction(46), "NV2": Fraction(23)}
    expected = {
        (src, dst): rates[cell]
        for src, row in enumerate(matrix)
        for dst, cell in enumerate(row.split())
        if cell in rates
    }
    links = links_of(load_topology("dgx1v:1"))
    assert {pair: link.beta_us_per_mb for pair, link in links.items()} == expected


@pytest.mark.parametrize("name", ["ndv2", "dgx1v"])
def test_each_v100_has_six_nvlinks(name: str) -> None:
    links = links_of(load_topology(f"{name}:1"))
    nvlinks = Counter[int]()
    for (src, _), link in links.items():
        nvlinks[src] += {Fraction(23): 2, Fraction(46): 1}[link.beta_us_per_mb]
    assert set(nvlinks.values()) == {6}


def test_all_traffic_between_ndv2_nodes_shares_one_nic() -> None:
    topology = load_topology("ndv2:2")
    between = [link for link in topology.links if link.src // 8 != link.dst // 8]
    assert len(between) == 2 * 64
    assert {(link.alpha_us, link.beta_us_per_mb) for link in between} == {(Fraction(13, 5), Fraction(105))}
    names = [port.name for port in topology.ports]
    assert {tuple(names[port] for port in link.ports) for link in between} == {
        ("node0.ib0.out", "node1.ib0.in"),
        ("node1.ib0.out", "node0.ib0.in"),
    }


@pytest.mark.parametrize(
    ("spec", "ranks_per_nic", "port_beta", "nic_beta"),
    [
        ("dgx2:2", 2, Fraction(8), Fraction(105)),
        ("dgx-a100:2", 1, Fraction(10, 3), Fraction(40)),
        ("dgx-h100:2", 1, Fraction(20, 9), Fraction(20)),
        ("gb200-nvl72:2", 1, Fraction(10, 9), Fraction(20)),
    ],
)
def test_switched_machines(spec: str, ranks_per_nic: int, port_beta: Fraction, nic_beta: Fraction) -> None:
    topology = load_topology(spec)
    half = topology.ranks // 2
    assert len(topology.links) == topology.ranks * (topology.ranks - 1)
    assert [switch.ranks for switch in topology.switches] == [
        tuple(range(half)),
        tuple(range(half, 2 * half)),
    ]
    assert {len(nic.ranks) for nic in topology.nics} == {ranks_per_nic}
    assert sorted(rank for nic in topology.nics for rank in nic.ranks) == list(range(2 * half))
    near = {rank: nic for nic in topology.nics for rank in nic.ranks}
    for link in topology.links:
        betas = [topology.ports[port].beta_us_per_mb for port in link.ports]
        if link.src // half == link.dst // half:
            assert betas == [port_beta, port_beta]
        else:
            assert betas == [nic_beta, nic_beta]
            assert link.ports == (near[link.src].out_port, near[link.dst].in_port)


@pytest.mark.parametrize(("name", "original"), [("ndv2-1mb", "ndv2"), ("dgx2-1mb", "dgx2")])
def test_the_1mb_variants_differ_only_in_the_alpha_within_a_node(name: str, original: str) -> None:
    variant, plain = load_topology(f"{name}:2"), load_topology(f"{original}:2")
    assert variant.ports == plain.ports
    for ours, theirs in zip(variant.links, plain.links, strict=True):
        assert (ours.src, ours.dst, ours.beta_us_per_mb) == (theirs.src, theirs.dst, theirs.beta_us_per_mb)
        assert ours.alpha_us == (0 if ours.kind == "nvlink" else theirs.alpha_us)


@pytest.mark.parametrize(
    ("spec", "degrees"),
    [
        ("ring:8", {2: 8}),
        ("ring:2", {1: 2}),
        ("mesh2d:3x3", {2: 4, 3: 4, 4: 1}),
        ("torus2d:4x4", {4: 16}),
        ("torus2d:2x4", {3: 8}),
        ("torus3d:4x4x4", {6: 64}),
        ("hypercube:4", {4: 16}),
    ],
)
def test_shapes_have_their_degrees(spec: str, degrees: dict[int, int]) -> None:
    topology = load_topology(spec)
    found = Counter(link.src for link in topology.links)
    assert Counter(found.values()) == degrees


def test_torus_neighbours() -> None:
    assert {dst for src, dst in links_of(load_topology("torus2d:3x4")) if src == 0} == {1, 3, 4, 8}


def test_a_fat_tree_shares_its_uplinks() -> None:
    topology = load_topology("fat-tree:4x8")
    names = [port.name for port in topology.ports]
    links = links_of(topology)
    assert [names[port] for port in links[0, 7].ports] == ["rank0.out", "rank7.in"]
    assert [names[port] for port in links[0, 8].ports] == ["rank0.out", "leaf0.up", "leaf1.down", "rank8.in"]
    rates = {port.name: port.beta_us_per_mb for port in topology.ports}
    assert rates["leaf0.up"] == rates["rank0.out"] * 2 / 8, "8 ranks, oversubscribed 2:1"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ndv3:2", "did you mean 'ndv2'"),
        ("frontier", "bundled profiles: dgx-a100"),
        ("ndv2:0", "from 1 to 4096"),
        ("ndv2:", "such as ndv2:2"),
        ("ndv2:two", "found 'two'"),
        ("ndv2:2x2", "found '2x2'"),
        ("ndv2:9999999999999999999999", "such as ndv2:2"),
        ("ndv2:600", "more than 4096 ranks"),
        ("torus2d:8", "such as torus2d:4x4"),
        ("torus2d:100x100", "10000 ranks"),
        ("hypercube:40", "from 2 to 4096"),
        ("ring:1", "from 2 to 4096"),
    ],
)
def test_names_that_make_no_topology(spec: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_topology(spec)
    assert words in str(caught.value)


def test_a_path_is_read_as_a_file(tmp_path: Any) -> None:
    path = tmp_path / "my cluster.yaml"
    path.write_text(library_text("dgx1v"))
    assert load_topology(str(path)).ranks == 8
    with pytest.raises(InvalidInput, match="No such file"):
        load_topology(str(tmp_path / "none.yaml"))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(load_command(arguments[0]), list(arguments[1:]))
    if isinstance(result.exception, TacclError):
        raise result.exception
    return result.exit_code, result.output


def test_the_library_command() -> None:
    code, text = run("library")
    assert code == 0
    assert [line.split(":")[0] for line in text.splitlines()] == list(library_names())
    code, text = run("library", "ndv2", "--json")
    document = json.loads(text)
    assert document["schema"] == "taccl/library/v1"
    assert document["profiles"][0]["class_sources"]["ib"].startswith("TACCL")
    assert "both_ways: true" in run("library", "dgx1v")[1]
    with pytest.raises(UsageError, match="did you mean 'ndv2'"):
        run("library", "ndv")


# --- the JSON Schema ----------------------------------------------------------------------------------

SCHEMA = profile_schema()


def fits_schema(data: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(data))


def fits_reader(text: str) -> bool:
    """Whether the tables, without the meaning behind them, accept a text."""
    root = parse(text, "f")
    PROFILE.read(root)
    return not root.findings.errors


def test_the_schema_command_prints_a_valid_schema() -> None:
    schema = json.loads(run("schema", "profile")[1])
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema == json.loads(json.dumps(SCHEMA))
    assert schema["properties"]["network"]["properties"]["pairs"]["enum"] == ["all", "rails"]
    assert schema["properties"]["network"]["description"]


@pytest.mark.parametrize("name", library_names())
def test_the_schema_accepts_the_library(name: str) -> None:
    assert fits_schema(plain_value(parse(library_text(name), name)))


@pytest.mark.parametrize("spec", ["ndv2:2", "fat-tree:2x2", "torus2d:2x3"])
def test_the_schema_accepts_what_is_written(spec: str) -> None:
    assert fits_schema(plain_value(parse(write_topology(load_topology(spec)), spec)))


def paths_of(data: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    if isinstance(data, dict):
        found += [(key, *rest) for key in data for rest in paths_of(data[key])]
    elif isinstance(data, list):
        found += [(i, *rest) for i in range(len(data)) for rest in paths_of(data[i])]
    return found


def damage(data: Any, path: tuple[Any, ...], how: Any) -> Any:
    """A copy of `data` with the value at `path` replaced; "remove" and "add key" change its container."""
    if not path:
        if how == "add key":
            return data | {"surplus": 1} if isinstance(data, dict) else [data]
        return how
    key, *rest = path
    copy = dict(data) if isinstance(data, dict) else list(data)
    if how == "remove" and not rest:
        del copy[key]
    else:
        copy[key] = damage(copy[key], tuple(rest), how)
    return copy


EXAMPLES = [plain_value(parse(library_text(name), name)) for name in ("ndv2", "dgx2", "fat-tree")]
EXAMPLES.append(plain_value(parse(write_topology(load_topology("ndv2:2")), "flat")))
EXAMPLES[-1]["links"] = EXAMPLES[-1]["links"][:3] + EXAMPLES[-1]["links"][-3:]
EXAMPLES[-1]["codecs"] = [
    {"codec": "q8", "dtype": "float32", "lossless": False, "ratio": 3.94, "frame": "112B",
     "encode": {"alpha": "30us", "beta": 250}, "decode": {"alpha": 0, "beta": "10GB/s"}},
]  # fmt: skip
DAMAGES = [
    "remove", "add key", None, True, -1, 0, 1.5, 2, 10**7, "", "x", "0-7", "7-", "5us", "5furlong", "10/3",
    "46us/MB", "no", [], [0], ["x"], [0, 1, "ib"], {}, {"alpha": 1}, "a\tb", "x" * 5000,
]  # fmt: skip


@given(
    st.sampled_from(EXAMPLES).flatmap(lambda e: st.tuples(st.just(e), st.sampled_from(paths_of(e)))),
    st.data(),
)
@settings(deadline=None, max_examples=250)
def test_schema_and_reader_agree_on_damaged_profiles(place: Any, data: Any) -> None:
    example, path = place
    broken = damage(example, path, data.draw(st.sampled_from(DAMAGES)))
    assert fits_reader(json.dumps(broken)) == fits_schema(broken)


# --- the documentation --------------------------------------------------------------------------------

DOCUMENT = (Path(__file__).resolve().parents[1] / "docs" / "profiles.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL))
def test_the_examples_of_the_documentation_are_profiles(text: str) -> None:
    topology = read_topology(text, "docs/profiles.md")
    assert topology.links
    assert fits_schema(plain_value(parse(text, "docs/profiles.md")))


def test_the_documentation_names_every_bundled_profile() -> None:
    table = [line for line in DOCUMENT.splitlines() if line.startswith("| `")]
    assert {name for line in table for name in re.findall(r"`([a-z0-9-]+)`", line.split("|")[1])} == set(
        library_names()
    )


def test_names_are_taken_as_the_list_prints_them() -> None:
    for name in library_names():
        example = library_profile(name).example
        result = CliRunner().invoke(load_command("library"), [example])
        assert result.exit_code == 0, result.output
        assert result.output == CliRunner().invoke(load_command("library"), [name]).output


def test_a_parameter_is_for_bundled_profiles(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(library_text("ring"))
    with pytest.raises(UsageError, match="only a bundled profile takes a parameter"):
        load_topology(f"{path}:2")
    for spec, wanted in (
        ("torus2d:4", "stands ROWSxCOLUMNS, numbers from 1 to 4096, such as torus2d:4x4"),
        ("torus3d:2x2", "stands XxYxZ"), ("fat-tree:4", "stands LEAVESxRANKS"), ("ring:x", "stands RANKS, a number"),
        ("hypercube:0", "stands DIMENSION"), ("ndv2:2x2", "stands NODES, a number"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=wanted):
            load_topology(spec)


def test_equal_nodes_may_have_more_links_than_a_file_may_list() -> None:
    topology = load_topology("dgx-a100:180")
    assert topology.ranks == 1440
    assert len(topology.links) == 1440 * 1439 > MAX_LISTED_LINKS
