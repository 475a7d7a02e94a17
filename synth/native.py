"""The native algorithm file: one JSON document with everything that an algorithm is, and its topology.

    {
    "schema": "taccl/algorithm/v1",
    "name": ..., "engine": ..., "size_bytes": ..., "time_fs": ...,
    "certificate": {...}, "provenance": {...},
    "collective": {...}, "topology": {...},
    "coding": {...},                      (only with a codec)
    "columns": ["link", "src", "dst", "start_fs", "end_fs", "op", "chunks"],
    "messages": [
    [0, 0, 1, 0, 23000000000, "copy", [0, [4, 9]]],
    ...
    ]}

One line a message; a run of chunks first..last is written [first, last]. The text is canonical: equal algorithms
give equal bytes. docs/file-formats.md describes every field. Symmetric algorithms have a form of their own
(native_symmetric).
"""

from __future__ import annotations

from collections.abc import Iterator

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm, Message
from taccl.synth.json_reader import Place, parse
from taccl.synth.native_coding import coding_text, read_coding
from taccl.synth.native_collective import collective_value, read_collective_value
from taccl.synth.native_head import (
    HEAD,
    MAX_BYTES,
    MAX_FS,
    head_lines,
    plain_json,
    read_certificate,
    read_provenance,
    separated,
)
from taccl.synth.native_runs import read_runs, runs_text
from taccl.synth.native_symmetric import SCHEMA as SYMMETRIC_SCHEMA
from taccl.synth.native_symmetric import read_symmetric, write_symmetric
from taccl.synth.native_topology import read_topology_value, topology_lines
from taccl.synth.places import Places
from taccl.synth.symmetric.algorithm import SymmetricAlgorithm

SCHEMA = "taccl/algorithm/v1"
COLUMNS = ("link", "src", "dst", "start_fs", "end_fs", "op", "chunks")
SUMS = ("sum", "into")  # further columns where ranks hold several sums of a chunk
MAX_SUMS = 1 << 16  # of a chunk on a rank
MAX_ENTRIES = (
    1 << 19
)  # of chunks into sums beside the first; each is a place of its own to whoever checks them
OPS = ("copy", "reduce")
MAX_TEXT = 256 << 20  # characters
MAX_HOPS = 1 << 25  # chunks in all messages together
MAX_EXPANDED = 1 << 22  # of a symmetric algorithm when it is read message by message


def write_native(algorithm: Algorithm | SymmetricAlgorithm, topology: Topology) -> str:
    """The canonical text of an algorithm on its topology; `read_schedule` gives back equal values.

    Raises ValueError when provenance is not plain JSON or the two do not belong together.
    """
    if isinstance(algorithm, SymmetricAlgorithm):
        return write_symmetric(algorithm, topology)
    if topology.ranks != algorithm.collective.ranks:
        raise ValueError("the algorithm and the topology have different numbers of ranks")
    lines = ["{", *head_lines(SCHEMA, algorithm, collective_value(algorithm.collective))]
    lines += ['"topology": {', *topology_lines(topology), "},"]
    ordered = sorted(algorithm.messages, key=_order)
    if algorithm.coding is not None:
        if tuple(ordered) != algorithm.messages:
            raise ValueError("a coding plan is for messages in their order")
        lines.append(f'"coding": {coding_text(algorithm.coding)},')
    several = any(m.sum or m.into != (0,) for m in algorithm.messages)
    lines.append(f'"columns": {plain_json(COLUMNS + SUMS if several else COLUMNS)},')
    rows = [
        f'[{m.link},{m.src},{m.dst},{m.start_fs},{m.end_fs},"{m.op}",{runs_text(m.chunks)}'
        + (f",{m.sum},{runs_text(m.into)}]" if several else "]")
        for m in ordered
    ]
    lines += ['"messages": [', *separated(rows), "]}"]
    return "\n".join(lines) + "\n"


def read_native(text: str, file: str = "<input>") -> tuple[Algorithm, Topology]:
    """The algorithm in a native file, message by message, and the topology that its times are for.

    A symmetric one is expanded, up to MAX_EXPANDED chunks in all messages. Raises InvalidInput as `read_schedule`.
    """
    algorithm, topology = read_schedule(text, file)
    if isinstance(algorithm, Algorithm):
        return algorithm, topology
    hops = len(algorithm.messages.chunks) * algorithm.group.order
    places = Places(algorithm.collective, algorithm.ranks, algorithm.partition).chunks * algorithm.ranks
    if max(hops, places) > MAX_EXPANDED:
        Place(file, "", None).fail(
            f"the schedule has {hops} chunk transfers, too many to be looked at one by one (most: {MAX_EXPANDED})"
        )
    return algorithm.to_algorithm(topology), topology


def read_schedule(text: str, file: str = "<input>") -> tuple[Algorithm | SymmetricAlgorithm, Topology]:
    """The algorithm in a native file as it is written there, and the topology that its times are for.

    Types, ranges and references are checked, sizes before anything of their size is made; whether the schedule
    is right is for `check_algorithm` or `check_table` to say. Raises InvalidInput, with line and column for broken
    JSON and the path of the value otherwise; codes N001..N199.
    """
    if len(text) > MAX_TEXT:
        Place(file, "", None).fail(f"the file is longer than {MAX_TEXT} characters")
    root = parse(text, file)
    if root.at("schema").text((SCHEMA, SYMMETRIC_SCHEMA)) == SYMMETRIC_SCHEMA:
        return read_symmetric(root)
    root.only(*HEAD, "topology", "coding", "columns", "messages")
    topology = read_topology_value(root.at("topology"))
    collective = read_collective_value(root.at("collective"), topology.ranks)
    columns = root.at("columns")
    several = columns.value == list(COLUMNS + SUMS)
    if not several and columns.value != list(COLUMNS):
        columns.fail(
            f"the columns of this schema are {', '.join(COLUMNS)}, and {' and '.join(SUMS)} or neither"
        )
    messages = sorted(_messages(root.at("messages"), topology, len(collective.chunks), several), key=_order)
    algorithm = Algorithm(
        name=root.at("name").text(),
        collective=collective,
        topology_name=root.at("topology_name").text(),
        size_bytes=root.at("size_bytes").integer(1, MAX_BYTES),
        messages=tuple(messages),
        time_fs=root.at("time_fs").integer(0, MAX_FS),
        certificate=read_certificate(root.at("certificate")),
        engine=root.at("engine").text(),
        provenance=read_provenance(root.at("provenance")),
        coding=read_coding(root.at("coding"), topology, len(messages))
        if "coding" in root.mapping()
        else None,
    )
    return algorithm, topology


def _order(message: Message) -> tuple[int, int, tuple[int, ...], int, tuple[int, ...]]:
    return (message.start_fs, message.link, message.chunks, message.sum, message.into)


def _messages(place: Place, topology: Topology, chunks: int, several: bool) -> Iterator[Message]:
    hops = entries = 0
    width = len(COLUMNS) + (len(SUMS) if several else 0)
    for number, row in enumerate(place.array()):
        try:
            link, src, dst, start, end, op, _, *rest = row
            well_typed = all(type(cell) is int for cell in (link, src, dst, start, end)) and type(op) is str
            well_typed = well_typed and len(row) == width
        except (TypeError, ValueError):
            well_typed = False
        here = Place(place.file, f"{place.path}[{number}]", row)
        if not well_typed:
            _explain_row(here, width)
        if not 0 <= link < len(topology.links):
            _cell(here, 0).fail(f"expected a link from 0 to {len(topology.links) - 1}, found {link}")
        found = topology.links[link]
        if (src, dst) != (found.src, found.dst):
            here.fail(f"link {link} joins {found.src}->{found.dst}, not {src}->{dst}")
        if not 0 <= start <= end <= MAX_FS:
            _cell(here, 3).fail(f"start and end must ascend from 0 to {MAX_FS}, found {start} and {end}")
        if op not in OPS:
            _cell(here, 5).fail(f"expected one of {', '.join(OPS)}, found {op!r}")
        ids = read_runs(_cell(here, 6), chunks)
        carried = 0
        into: tuple[int, ...] = (0,)
        if rest:
            carried = _cell(here, 7).integer(0, MAX_SUMS - 1)
            into = read_runs(_cell(here, 8), MAX_SUMS)
        hops += len(ids)
        if hops > MAX_HOPS:
            here.fail(f"the messages carry more than {MAX_HOPS} chunks together")
        entries += len(ids) * (len(into) - (into == (0,)))
        if entries > MAX_ENTRIES:
            here.fail(f"chunks enter further sums more than {MAX_ENTRIES} times together")
        yield Message(link, src, dst, ids, start, end, op, carried, into)


def _cell(row: Place, column: int) -> Place:
    return Place(row.file, f"{row.path}.{(COLUMNS + SUMS)[column]}", row.value[column])


def _explain_row(row: Place, width: int) -> None:
    """Raise InvalidInput for the first cell of a row that has the wrong type."""
    row.array(width, width)
    for column in range(5):
        _cell(row, column).integer(0, MAX_FS)
    _cell(row, 5).text(OPS)
    raise AssertionError("a row was refused whose cells are all right")
