"""What happened when, on which link, port or rank: the common ground of the Perfetto trace and the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taccl.profiles.topology import Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.coding.clock import DECODE, ENCODE, MESSAGE, REDUCE
from taccl.synth.cost import Costs, costs
from taccl.synth.schedule import completions
from taccl.synth.simulate import Simulation

if TYPE_CHECKING:
    from taccl.synth.coding.choose import Choice


# Work on a rank, and what its time line is called.
WORK = {"reduce": "reductions", "encode": "codec", "decode": "codec"}
_KINDS = {MESSAGE: "message", REDUCE: "reduce", ENCODE: "encode", DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class Span:
    """A message on its way, or work on a rank. Times in fs."""

    kind: str  # "message" | one of WORK
    src: int  # rank that sends or works
    dst: int  # rank that receives, -1 for work
    link: int  # index into Topology.links, -1 for work
    start_fs: int
    end_fs: int  # arrival, or the sum is there
    count: int  # chunks
    chunks: tuple[int, ...] = ()  # their ids, where they are known
    place: str = ""  # threadblock and step, where they are known
    after: int = -1  # index of the span whose end let this one start, -1: none or not known
    coded: bool = False  # of a message: it is frames of a codec


def of_algorithm(algorithm: Algorithm, topology: Topology) -> tuple[Span, ...]:
    """The messages of a schedule and the reductions that follow them, by start."""
    price = costs(topology, algorithm.chunk_bytes)
    spans = [
        Span("message", m.src, m.dst, m.link, m.start_fs, m.end_fs, len(m.chunks), m.chunks)
        for m in algorithm.messages
    ]
    engine: dict[int, int] = {}
    done = completions(price, algorithm.messages)
    for m, end in sorted(zip(algorithm.messages, done, strict=True), key=lambda p: (p[0].end_fs, p[1])):
        begin = max(engine.get(m.dst, 0), m.end_fs)
        if m.op == "reduce" and end > begin:
            engine[m.dst] = end
            spans.append(Span("reduce", m.dst, -1, -1, begin, end, len(m.chunks), m.chunks))
    return tuple(sorted(spans, key=lambda s: (s.start_fs, s.link, s.src, s.chunks)))


def of_plan(choice: Choice) -> tuple[Span, ...]:
    """The messages of a schedule of which some are coded, coding, decoding and reductions, by start."""
    coded, messages = set(choice.coded), choice.algorithm.messages
    spans = []
    for a in choice.activities:
        m = messages[a.message]
        # Chunks are coded one by one, and an activity does not say which one of its message it is.
        chunks = m.chunks if a.kind != ENCODE or len(m.chunks) == 1 else ()
        count = len(m.chunks) if a.kind != ENCODE else 1
        if a.end_fs == a.start_fs and a.kind != MESSAGE:
            continue
        message = a.kind == MESSAGE
        spans.append(
            Span(
                _KINDS[a.kind], a.rank, m.dst if message else -1, m.link if message else -1, a.start_fs, a.end_fs,
                count, chunks, coded=message and a.message in coded,
            )
        )  # fmt: skip
    return tuple(sorted(spans, key=lambda s: (s.start_fs, s.link, s.src, s.kind, s.chunks)))


def of_simulation(simulation: Simulation) -> tuple[Span, ...]:
    """The activities of a simulated program, in its order, so that `after` keeps its meaning."""
    return tuple(
        Span(
            a.kind, a.rank, a.dst, a.link, a.start_fs, a.end_fs, a.count,
            place=f"threadblock {a.threadblock} step {a.step}", after=a.after,
        )
        for a in simulation.activities
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A resource and what held it: (index of the span, end of the hold in fs), by start."""

    name: str
    held: tuple[tuple[int, int], ...]
    busy_fs: int


def rows(spans: Iterable[Span], topology: Topology, price: Costs, framed: Costs | None = None) -> list[Row]:
    """One row for each link that carries messages, each port that several such links share, each rank that reduces, or
    codes. framed: prices of coded messages."""
    by_link: dict[int, list[tuple[int, int]]] = {}
    by_port: dict[int, list[tuple[int, int]]] = {}
    by_rank: dict[tuple[str, int], list[tuple[int, int]]] = {}
    busy: dict[int, int] = {}
    all_spans = list(spans)
    for index, span in enumerate(all_spans):
        if span.kind in WORK:
            by_rank.setdefault((WORK[span.kind], span.src), []).append((index, span.end_fs))
            continue
        own = framed if span.coded and framed is not None else price
        for resource, per_chunk in own.holds[span.link]:
            hold = own.hold(span.link, per_chunk, span.count)
            busy[resource] = busy.get(resource, 0) + hold
            place = by_link if resource == span.link else by_port
            place.setdefault(resource, []).append((index, span.start_fs + hold))
    found = []
    for number, held in sorted(by_link.items()):
        link = topology.links[number]
        found.append(Row(f"{link.src}→{link.dst} {link.kind}", _by_start(held, all_spans), busy[number]))
    for resource, held in sorted(by_port.items()):
        if len({all_spans[index].link for index, _ in held}) > 1:
            name = topology.ports[resource - len(topology.links)].name
            found.append(Row(name, _by_start(held, all_spans), busy[resource]))
    for (work, rank), held in sorted(by_rank.items(), key=lambda item: (item[0][0] != "reductions", item[0])):
        total = sum(all_spans[index].end_fs - all_spans[index].start_fs for index, _ in held)
        found.append(Row(f"{work} on {rank}", _by_start(held, all_spans), total))
    return found


def _by_start(held: list[tuple[int, int]], spans: list[Span]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(held, key=lambda entry: (spans[entry[0]].start_fs, entry[0])))
