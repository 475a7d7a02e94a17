"""Damaged profiles: whatever is done to a good file, reading it gives a topology or InvalidInput, soon."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.errors import InvalidInput, TacclError
from taccl.profiles.load import library_text, load_topology
from taccl.profiles.profile_file import read_topology, write_topology

IRREGULAR = """\
schema: taccl/profile/v1
name: irregular
nodes: 2
node:
  ranks: 3
  ports: {bridge: {beta: 16GB/s, kind: pcie}}
  links:
    - {class: nv, from: 0, to: [1, 2], both_ways: true}
    - [1, 2, nv, [bridge]]
  switches: [{name: sw, ranks: all, class: nv, port: 5us/MB}]
  nics: [{name: ib0, ranks: 0-2}]
network: {class: ib, pairs: all}
classes:
  nv: {alpha: 0.7us, beta: 25GB/s, measured: {samples: 9, residual: 1%}}
  ib: {alpha: 2.6us, beta: 100Gbit/s}
links: [[0, 5, nv], {class: ib, pairs: [[5, 0]]}]
changes:
  - {from: 0, to: 1, remove: true}
  - {nic: node1.ib0, beta: 200}
"""
SEEDS = [
    IRREGULAR,
    write_topology(read_topology(IRREGULAR, "seed")),
    *(library_text(name) for name in ("dgx2", "fat-tree", "ring", "torus3d")),
]
WORDS = [
    "", "0", "-1", "99999999", "1e400", "-1e-400", "nan", "x", "all", "0-2", "2-0", "0-9999999", "true", "no", "~",
    "[]", "{}", "[", "}", ":", "- ", "&a ", "*a", "!!int ", "'", '"', "\n", "\t", "#", "\x00", "é", "46us/MB", "0GB/s",
    "1/0", "nodes: 4096\n", "node: {ranks: 4096}\n", "shape: {kind: torus, size: [4096, 4096], class: nv}\n",
]  # fmt: skip


def read_or_refuse(text: str) -> None:
    start = time.perf_counter()
    try:
        topology = read_topology(text, "fuzz.yaml")
    except InvalidInput as error:
        assert error.exit_code == 3
        for found in error.diagnostics:
            assert found.file == "fuzz.yaml" and found.message and found.code[0] in "YP"
            assert 0 <= found.line <= len(text.splitlines()) + 2
    else:
        topology.check()
        assert read_topology(write_topology(topology), "again") == topology
    assert time.perf_counter() - start < 30


@given(st.sampled_from(SEEDS), st.data())
@settings(deadline=None, max_examples=150)
def test_a_piece_replaced(seed: str, data: Any) -> None:
    start = data.draw(st.integers(0, len(seed)))
    end = min(len(seed), start + data.draw(st.integers(0, 12)))
    read_or_refuse(seed[:start] + data.draw(st.sampled_from(WORDS)) + seed[end:])


@given(st.sampled_from(SEEDS), st.data())
@settings(deadline=None, max_examples=100)
def test_lines_dropped_doubled_and_swapped(seed: str, data: Any) -> None:
    lines = seed.splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 4))):
        at, to = (data.draw(st.integers(0, max(0, len(lines) - 1))) for _ in range(2))
        how = data.draw(st.sampled_from(["drop", "double", "swap"]))
        if how == "drop" and len(lines) > 1:
            del lines[at]
        elif how == "double":
            lines.insert(to, lines[at])
        else:
            lines[at], lines[to] = lines[to], lines[at]
    read_or_refuse("".join(lines))


@given(st.text(max_size=60), st.sampled_from(SEEDS))
@settings(deadline=None, max_examples=100)
def test_any_text_after_a_good_one(text: str, seed: str) -> None:
    read_or_refuse(text)
    read_or_refuse(seed + text)


@given(st.text(max_size=20))
@settings(deadline=None, max_examples=100)
def test_any_name_is_a_topology_or_one_message(name: str) -> None:
    try:
        topology = load_topology(name)
    except TacclError as error:
        assert str(error)
        assert error.exit_code in (2, 3)
    else:
        topology.check()


@pytest.mark.parametrize("name", ["ring", "mesh2d", "hypercube"])
@given(st.from_regex(r"[0-9]{1,4}(x[0-9]{1,3}){0,3}", fullmatch=True))
@settings(deadline=None, max_examples=25)
def test_any_size_of_a_bundled_profile(name: str, size: str) -> None:
    try:
        topology = load_topology(f"{name}:{size}")
    except TacclError as error:
        assert error.exit_code == 2
    else:
        assert topology.ranks <= 4096
