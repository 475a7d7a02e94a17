"""The native file of a symmetric algorithm: messages of representatives, and the generators of the group.

    {
    "schema": "taccl/symmetric-algorithm/v1",
    "name": ..., ... as in taccl/algorithm/v1 ..., "provenance": {...},
    "topology": {
    "library": "torus2d:32x32", "sha256": "..."
    },
    "generators": [
    [1,2,3,...],
    ...
    ],
    "messages": {
    "link": [...],
    "start_fs": [...],
    "reduces": [...],
    "count": [...],
    "chunks": [...]
    }}

The columns have one entry a message, in order of start, link, first chunk; `start_fs` is the time since the start of
the message before, `count` how many of the entries of `chunks` belong to it. src, dst and end follow from link and
cost model and are not written. docs/file-formats.md describes every field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from taccl.errors import UsageError
from taccl.profiles.link_table import LinkTable, link_table
from taccl.profiles.topology import Topology
from taccl.synth.json_reader import Place
from taccl.synth.message_table import MessageTable
from taccl.synth.native_bundled import compact_topology_lines, read_compact_topology
from taccl.synth.native_head import (
    HEAD,
    MAX_BYTES,
    MAX_FS,
    head_lines,
    read_certificate,
    read_provenance,
    separated,
)
from taccl.synth.places import NAMED, Places
from taccl.synth.symmetric.algorithm import SymmetricAlgorithm
from taccl.synth.symmetric.expand import SYMMETRIC, chunks_are_representatives, sorted_by_start
from taccl.synth.symmetric.group import Group, trivial_group, with_generator
from taccl.synth.symmetric.prices import Prices, prices

Ints = NDArray[np.int64]

SCHEMA = "taccl/symmetric-algorithm/v1"
COLUMNS = ("link", "start_fs", "reduces", "count", "chunks")
MAX_GENERATORS = 64
MAX_PARTITION = 1 << 25
MAX_CHUNKS = 1 << 28
MAX_HOPS = 1 << 30  # chunks in all messages together, whole schedule
MAX_HOPS_AT_ONCE = 1 << 25  # where messages gather chunks of several elements
LATEST_FS = 1 << 60  # 19 minutes
NUMBERS_A_LINE = 24


def write_symmetric(algorithm: SymmetricAlgorithm, topology: Topology) -> str:
    """The canonical text of a symmetric algorithm on its topology; `read_symmetric` gives back equal values.

    Raises ValueError when provenance is not plain JSON, the two do not belong together, or messages do not follow
    their links and the cost model.
    """
    if topology.ranks != algorithm.ranks:
        raise ValueError("the algorithm and the topology have different numbers of ranks")
    links = link_table(topology)
    table = sorted_by_start(algorithm.messages)
    count = np.diff(table.first)
    price = prices(topology, links, _places(algorithm).chunk_bytes(algorithm.size_bytes))
    if not (
        np.array_equal(table.src, links.src[table.link])
        and np.array_equal(table.dst, links.dst[table.link])
        and np.array_equal(table.end_fs, _ends(table.link, table.start_fs, count, price))
    ):
        raise ValueError("a message does not follow its link and the cost model")
    collective = {
        "name": algorithm.collective,
        "ranks": algorithm.ranks,
        "partition": algorithm.partition,
        "root": algorithm.root,
    }
    columns = (table.link, np.diff(table.start_fs, prepend=0), table.reduces, count, table.chunks)
    rows = [
        "\n".join([f'"{name}": [', *_numbers(column), "]"])
        for name, column in zip(COLUMNS, columns, strict=True)
    ]
    generators = [
        "\n".join(["[", *_numbers(np.asarray(generator)), "]"]) for generator in algorithm.group.generators
    ]
    lines = ["{", *head_lines(SCHEMA, algorithm, collective)]
    lines += ['"topology": {', *compact_topology_lines(topology, links), "},"]
    lines += ['"generators": [', *separated(generators), "],"]
    lines += ['"messages": {', *separated(rows), "}}"]
    return "\n".join(lines) + "\n"


def read_symmetric(root: Place) -> tuple[SymmetricAlgorithm, Topology]:
    """The algorithm in a parsed document and the topology that its times are for.

    Types, ranges and references are checked, and that the generators are symmetries of the links; whether the schedule
    is right is for `check_table` to say. Raises InvalidInput with the path of what is wrong.
    """
    root.at("schema").text((SCHEMA,))
    root.only(*HEAD, "topology", "generators", "messages")
    size_bytes = root.at("size_bytes").integer(1, MAX_BYTES)
    topology = read_compact_topology(root.at("topology"))
    places = _read_places(root.at("collective"), topology.ranks)
    links = link_table(topology)
    group = _read_group(root.at("generators"), topology.ranks, places.name, links)
    try:
        price = prices(topology, links, places.chunk_bytes(size_bytes))
    except UsageError as error:
        root.at("size_bytes").fail(str(error))
    messages = _read_messages(root.at("messages"), links, price, places, group)
    algorithm = SymmetricAlgorithm(
        name=root.at("name").text(),
        collective=places.name,
        ranks=places.ranks,
        partition=places.partition,
        size_bytes=size_bytes,
        topology_name=root.at("topology_name").text(),
        group=group,
        messages=messages,
        time_fs=root.at("time_fs").integer(0, MAX_FS),
        certificate=read_certificate(root.at("certificate")),
        engine=root.at("engine").text(),
        root=places.root,
        provenance=read_provenance(root.at("provenance")),
    )
    return algorithm, topology


def _places(algorithm: SymmetricAlgorithm) -> Places:
    return Places(algorithm.collective, algorithm.ranks, algorithm.partition, algorithm.root)


def _ends(link: Ints, start_fs: Ints, count: Ints, price: Prices) -> Ints:
    ends: Ints = start_fs + price.alpha_fs[link] + count * price.chunk_fs[link]
    return ends


def _numbers(column: NDArray[np.generic]) -> Iterator[str]:
    values = [str(int(value)) for value in column.tolist()]
    rows = [",".join(values[at : at + NUMBERS_A_LINE]) for at in range(0, len(values), NUMBERS_A_LINE)]
    return separated(rows)


def _read_places(place: Place, ranks: int) -> Places:
    place.only("name", "ranks", "partition", "root")
    name = place.at("name").text(NAMED)
    if place.at("ranks").integer(1, ranks) != ranks:
        place.at("ranks").fail(f"the topology has {ranks} ranks")
    places = Places(
        name,
        ranks,
        place.at("partition").integer(1, MAX_PARTITION),
        place.at("root").integer(0, ranks - 1),
    )
    if places.chunks > MAX_CHUNKS:
        place.fail(f"more than {MAX_CHUNKS} chunks")
    return places


def _read_group(place: Place, ranks: int, collective: str, links: LinkTable) -> Group:
    group = trivial_group(ranks)
    pairs = np.sort(links.src * ranks + links.dst)
    for entry in place.items(0, MAX_GENERATORS):
        if collective not in SYMMETRIC:
            place.fail(f"the chunks of {collective} do not move with ranks, so nothing can stand for others")
        permutation = _integers(entry, ranks - 1, ranks)
        if not np.array_equal(np.sort(permutation), np.arange(ranks)):
            entry.fail("expected every rank once")
        if not np.array_equal(np.sort(permutation[links.src] * ranks + permutation[links.dst]), pairs):
            entry.fail("there are links that it takes to no link")
        larger = with_generator(group, permutation.tolist())
        if larger is None:
            entry.fail("with it the group would not be commutative, free and a direct product")
        group = larger
    return group


def _read_messages(
    place: Place, links: LinkTable, price: Prices, places: Places, group: Group
) -> MessageTable:
    place.only(*COLUMNS)
    link = _integers(place.at("link"), len(links) - 1)
    rows = len(link)
    since = _integers(place.at("start_fs"), LATEST_FS, rows)
    if sum(since.tolist()) > LATEST_FS:
        place.at("start_fs").fail(f"the last message starts later than {LATEST_FS} fs")
    reduces = _integers(place.at("reduces"), 1, rows)
    count = _integers(place.at("count"), places.chunks, rows, least=1)
    chunks = _integers(place.at("chunks"), places.chunks - 1)
    if len(chunks) * group.order > MAX_HOPS:
        place.fail(f"the messages carry more than {MAX_HOPS} chunks together")
    if sum(count.tolist()) != len(chunks):
        place.at("count").fail(f"the sum must be the number of chunks, {len(chunks)}")
    first = np.zeros(rows + 1, np.int64)
    np.cumsum(count, out=first[1:])
    fresh = np.zeros(len(chunks), bool)
    fresh[first[:-1]] = True
    descends = np.flatnonzero(np.diff(chunks, prepend=-1) <= 0)
    descends = descends[~fresh[descends]]
    if len(descends):
        at = int(descends[0])
        Place(place.file, f"{place.path}.chunks[{at}]", None).fail(
            "the chunk ids of a message must ascend without repeats"
        )
    longest = int(price.alpha_fs.max(initial=0)) + int(count.max(initial=0)) * int(
        price.chunk_fs.max(initial=0)
    )
    if longest > LATEST_FS:
        place.at("count").fail(f"a message takes longer than {LATEST_FS} fs")
    start = np.cumsum(since)
    table = MessageTable(
        link,
        links.src[link],
        links.dst[link],
        start,
        _ends(link, start, count, price),
        reduces.astype(bool),
        first,
        chunks,
    )
    if len(chunks) * group.order > MAX_HOPS_AT_ONCE and not chunks_are_representatives(
        table, group, places.name, places.ranks, places.partition
    ):
        place.fail(
            f"messages that gather chunks of several elements carry more than {MAX_HOPS_AT_ONCE} chunks together"
        )
    return sorted_by_start(table)


def _integers(place: Place, most: int, length: int | None = None, least: int = 0) -> Ints:
    """An array of whole numbers as a column."""
    values: Sequence[object] = place.array(0 if length is None else length, length)
    if not all(type(value) is int and least <= value <= most for value in values):
        for entry in place.items():
            entry.integer(least, most)
    return np.array(values, np.int64)
