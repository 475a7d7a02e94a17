"""The native file of a symmetric algorithm: read back equal, small, and refused with its place when it is wrong."""

from __future__ import annotations

import json
import random
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symmetric_algorithms import circulant, group_of, priced, ring_schedule, rotation

from taccl.errors import InvalidInput
from taccl.profiles.link_table import link_table
from taccl.profiles.load import load_topology
from taccl.profiles.topology import Topology
from taccl.synth import native, native_symmetric
from taccl.synth.check_algorithm import check_algorithm
from taccl.synth.check_table import check_table
from taccl.synth.message_table import messages_of
from taccl.synth.native import read_native, read_schedule, write_native
from taccl.synth.places import Places
from taccl.synth.symmetric.algorithm import SymmetricAlgorithm
from taccl.synth.symmetric.group import trivial_group

CIRCULANT = circulant(6, reducing=1)
RING = load_topology("ring:6")
GROUP = group_of(6, rotation(6, 3), rotation(6, 2))
MADE = ring_schedule(CIRCULANT, GROUP, "alltoall", 1, 10**6)
SMALL = write_native(MADE, CIRCULANT)
BUNDLED = write_native(ring_schedule(RING, group_of(6, rotation(6)), "allgather", 2, 10**6), RING)


def same(a: SymmetricAlgorithm, b: SymmetricAlgorithm) -> bool:
    plain = (
        "name",
        "collective",
        "ranks",
        "partition",
        "size_bytes",
        "topology_name",
        "time_fs",
        "certificate",
    )
    return (
        all(getattr(a, key) == getattr(b, key) for key in (*plain, "engine", "root", "provenance"))
        and a.group.generators == b.group.generators
        and np.array_equal(a.group.rank_at, b.group.rank_at)
        and messages_of(a.messages) == messages_of(b.messages)
    )


def read(text: str) -> tuple[SymmetricAlgorithm, Topology]:
    found, topology = read_schedule(text, "x.json")
    assert isinstance(found, SymmetricAlgorithm)
    return found, topology


@pytest.mark.parametrize("topology", [CIRCULANT, RING], ids=["listed", "bundled"])
@pytest.mark.parametrize("collective", ["allgather", "alltoall"])
@pytest.mark.parametrize("step", [1, 2, 6])
def test_reading_gives_back_what_was_written(topology: Topology, collective: str, step: int) -> None:
    group = trivial_group(6) if step == 6 else group_of(6, rotation(6, step))
    made = ring_schedule(topology, group, collective, 2, 10**6)
    text = write_native(made, topology)
    again, cluster = read(text)
    assert same(again, made) and cluster == topology
    assert write_native(again, cluster) == text
    explicit, _ = read_native(text)
    assert explicit == made.to_algorithm(topology)
    assert check_algorithm(explicit, topology) == []


def test_messages_of_several_chunks_and_reductions() -> None:
    rows = [(0, (0, 2), 0, "reduce"), (6, (1,), 0, "copy"), (2, (3, 4, 5), 10**10, "reduce")]
    places = Places("allreduce", 6, 1)
    made = replace(
        MADE, collective="allreduce", messages=priced(CIRCULANT, places.chunk_bytes(MADE.size_bytes), rows)
    )
    again, _ = read(write_native(made, CIRCULANT))
    assert same(again, made)


def test_rooted_collectives_have_no_symmetry() -> None:
    rows = [(r, (0,), r * 10**11, "copy") for r in range(5)]
    places = Places("broadcast", 6, 1, 0)
    table = priced(RING, places.chunk_bytes(MADE.size_bytes), rows)
    made = replace(
        MADE, collective="broadcast", topology_name="ring:6", messages=table, group=trivial_group(6)
    )
    text = write_native(made, RING)
    assert same(read(text)[0], made)
    document = json.loads(text)
    document["generators"] = [rotation(6)]
    assert "do not move" in refusal(json.dumps(document)).message


def test_a_bundled_topology_is_named() -> None:
    document = json.loads(BUNDLED)
    assert document["topology"]["library"] == "ring:6" and len(BUNDLED) < 1500
    document["topology"]["sha256"] = "0" * 64
    assert refusal(json.dumps(document)).path == "topology.sha256"
    for name in ("/etc/passwd", "nothing:4", "../ring:6", "ring:6x6", "ring:999999999"):
        document["topology"]["library"] = name
        assert refusal(json.dumps(document)).path == "topology.library"


def test_a_topology_that_only_bears_a_bundled_name_is_written_out() -> None:
    slower = replace(RING, reduce_alpha_us=RING.reduce_alpha_us + 1)
    made = ring_schedule(slower, group_of(6, rotation(6)), "allgather", 1, 10**6)
    text = write_native(made, slower)
    assert "library" not in json.loads(text)["topology"]
    assert read(text)[1] == slower


def test_a_thousand_ranks_stay_small() -> None:
    topology = load_topology("torus2d:32x32")
    east = [r // 32 * 32 + (r + 1) % 32 for r in range(1024)]
    group = group_of(1024, [(r + 32) % 1024 for r in range(1024)], east)
    links = link_table(topology)
    rng = np.random.default_rng(1)
    rows = [(int(rng.integers(len(links))), (int(c),), int(c) * 10**9, "copy") for c in range(16384)]
    places = Places("alltoall", 1024, 1)
    size = 1024 * 10**6
    made = SymmetricAlgorithm(
        "big", "alltoall", 1024, 1, size, topology.name, group,
        priced(topology, places.chunk_bytes(size), rows), 0, MADE.certificate, "x", 0, {},
    )  # fmt: skip
    text = write_native(made, topology)
    assert len(text) < 500_000
    assert same(read(text)[0], made)
    assert "too many to be looked at one by one" in refusal(text, read_native).message


def test_the_documented_file_is_one() -> None:
    page = Path(__file__).parents[1] / "docs" / "file-formats.md"
    blocks = re.findall(r"```json\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    text = next(block for block in blocks if native_symmetric.SCHEMA in block)
    made, topology = read(text)
    places = Places(made.collective, made.ranks, made.partition, made.root)
    links = link_table(topology)
    assert check_table(topology, links, places, made.size_bytes, made.batches(links), made.time_fs) == []
    assert write_native(made, topology) == text


def test_what_does_not_fit_together_is_not_written() -> None:
    with pytest.raises(ValueError, match="different numbers of ranks"):
        write_native(MADE, circulant(5))
    with pytest.raises(ValueError, match="does not follow its link"):
        write_native(
            replace(MADE, messages=replace(MADE.messages, end_fs=MADE.messages.end_fs + 1)), CIRCULANT
        )
    with pytest.raises(ValueError, match="does not follow its link"):
        write_native(MADE, replace(CIRCULANT, links=CIRCULANT.links[::-1]))


def refusal(text: str, reader: Any = read_schedule) -> Any:
    """The first finding about a text that must be refused."""
    with pytest.raises(InvalidInput) as caught:
        reader(text, "x.json")
    return caught.value.diagnostics[0]


REMOVED = object()
WRONG = [
    ("schema", "taccl/symmetric-algorithm/v2", "schema"),
    ("generators", REMOVED, ""),
    ("surplus", 1, ""),
    ("size_bytes", 0, "size_bytes"),
    ("size_bytes", 2**60, "size_bytes"),
    ("time_fs", -1, "time_fs"),
    ("certificate.status", "perfect", "certificate.status"),
    ("collective.name", "sendrecv", "collective.name"),
    ("collective.ranks", 5, "collective.ranks"),
    ("collective.partition", 2**25, "collective"),
    ("collective.root", 6, "collective.root"),
    ("collective.demand", [], "collective"),
    ("generators", 3, "generators"),
    ("generators.0", [0, 1, 2], "generators[0]"),
    ("generators.0", [0, 1, 2, 3, 4, 6], "generators[0][5]"),
    ("generators.0", [0, 1, 2, 3, 4, 4], "generators[0]"),
    ("generators.0", [0, 1, 2, 3, 4, 5], "generators[0]"),
    ("generators.0", [1, 0, 4, 5, 2, 3], "generators[0]"),
    ("generators.1", rotation(6, 3), "generators[1]"),
    ("messages", [], "messages"),
    ("messages.surplus", [], "messages"),
    ("messages.link", [0], "messages.start_fs"),
    ("messages.link.0", 99, "messages.link[0]"),
    ("messages.link.0", -1, "messages.link[0]"),
    ("messages.link.0", True, "messages.link[0]"),
    ("messages.link.0", 0.0, "messages.link[0]"),
    ("messages.link.0", 10**25, "messages.link[0]"),
    ("messages.start_fs.0", -1, "messages.start_fs[0]"),
    ("messages.start_fs.0", 2**60, "messages.start_fs"),
    ("messages.reduces.0", 2, "messages.reduces[0]"),
    ("messages.count.0", 0, "messages.count[0]"),
    ("messages.count.0", 2, "messages.count"),
    ("messages.chunks.0", 36, "messages.chunks[0]"),
    ("topology.nodes", [], "topology.nodes"),
    ("topology.library", "ring:6", "topology"),
]  # fmt: skip


def changed(path: str, value: Any) -> str:
    document = json.loads(SMALL)
    *way, last = (int(part) if part.isdigit() else part for part in path.split("."))
    place = document
    for part in way:
        place = place[part]
    if value is REMOVED:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(("path", "value", "blamed"), WRONG)
def test_what_is_wrong_is_named_by_its_path(path: str, value: Any, blamed: str) -> None:
    found = refusal(changed(path, value))
    assert found.path == blamed
    assert found.message.startswith(f"{blamed or 'the document'}: ")


def test_chunks_of_a_message_ascend() -> None:
    document = json.loads(SMALL)
    document["messages"]["count"][:2] = [2]
    for column in ("link", "start_fs", "reduces"):
        del document["messages"][column][1]
    document["messages"]["chunks"][:2] = [4, 4]
    assert refusal(json.dumps(document)).path == "messages.chunks[1]"


def test_schedules_that_would_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hops = len(MADE.messages.chunks) * 6
    monkeypatch.setattr(native_symmetric, "MAX_HOPS", hops - 1)
    assert refusal(SMALL).path == "messages"
    monkeypatch.setattr(native_symmetric, "MAX_HOPS", hops)
    monkeypatch.setattr(native_symmetric, "MAX_HOPS_AT_ONCE", hops - 1)
    assert same(read(SMALL)[0], MADE)  # it can be expanded element by element
    document = json.loads(SMALL)
    document["messages"]["chunks"][-1] = 3 * 6 + 1  # the image of a chunk that stands there too
    assert "several elements" in refusal(json.dumps(document)).message
    monkeypatch.setattr(native, "MAX_EXPANDED", 71)
    assert "has 60 chunk transfers" in refusal(BUNDLED, read_native).message


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**62,
    1.5,
    "",
    "x",
    [],
    [0],
    [[0, 3]],
    {},
    [0, 1, 2, 3, 4, 5],
    [5, 4, 3, 2, 1, 0],
]


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32))
def test_damaged_values_are_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    document = json.loads(rng.choice([SMALL, BUNDLED]))
    for _ in range(rng.randint(1, 3)):
        place: Any = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and rng.random() < 0.85:
                place = place[key]
                continue
            if rng.random() < 0.2:
                del place[key]
            else:
                place[key] = deepcopy(rng.choice(VALUES))
            break
    try:
        made, topology = read(json.dumps(document))
    except InvalidInput as refused:
        assert all(found.code.startswith("N") and found.message for found in refused.diagnostics)
        return
    text = write_native(made, topology)
    assert same(read(text)[0], made)
    links = link_table(topology)
    places = Places(made.collective, made.ranks, made.partition, made.root)
    wrong = check_table(topology, links, places, made.size_bytes, made.batches(links), made.time_fs)
    assert bool(wrong) == bool(check_algorithm(read_native(text)[0], topology))
