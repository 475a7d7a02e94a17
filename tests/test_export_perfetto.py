"""Perfetto traces: every message and reduction at its time, on its rank, with arrows that go forward."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from native_algorithms import timed, two_nodes

from taccl.synth.collective import build
from taccl.synth.cost import us
from taccl.synth.export.perfetto import TimeLine, write_trace
from taccl.synth.export.timeline import Span, of_algorithm

TWO = two_nodes()
REDUCE = timed(TWO, build("reducescatter", 4), "ring")
SPANS = of_algorithm(REDUCE, TWO)


def events(*lines: TimeLine) -> list[dict[str, Any]]:
    document = json.loads(write_trace(lines))
    assert document["displayTimeUnit"] == "ns"
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def test_every_message_and_reduction_is_there() -> None:
    found = [event for event in events(TimeLine("predicted", SPANS)) if event["ph"] == "X"]
    messages = [event for event in found if event["cat"] == "message"]
    assert len(messages) == len(REDUCE.messages)
    assert sorted((event["ts"], event["dur"]) for event in messages) == sorted(
        (m.start_fs / 10**9, (m.end_fs - m.start_fs) / 10**9) for m in REDUCE.messages
    )
    reductions = [event for event in found if event["cat"] == "reduce"]
    assert len(reductions) == sum(m.op == "reduce" for m in REDUCE.messages)
    assert abs(max(event["ts"] + event["dur"] for event in found) - us(REDUCE.time_fs)) < 1e-5


def test_ranks_are_processes_and_links_are_threads() -> None:
    found = events(TimeLine("predicted", SPANS))
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert sorted(names.values()) == [f"rank {rank} (predicted)" for rank in range(4)]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    for event in found:
        if event["ph"] == "X":
            name = threads[event["pid"], event["tid"]]
            assert name.startswith("to rank") if event["cat"] == "message" else name == "reductions"


def test_two_time_lines_stand_side_by_side() -> None:
    found = events(TimeLine("predicted", SPANS), TimeLine("measured", SPANS))
    names = sorted(e["args"]["name"] for e in found if e["name"] == "process_name")
    assert names == sorted(f"rank {r} ({label})" for r in range(4) for label in ("measured", "predicted"))
    pids = Counter(e["pid"] for e in found if e["ph"] == "X")
    assert len(pids) == 8


def test_arrows_lead_from_what_came_before() -> None:
    spans = (
        Span("message", 0, 1, 0, 0, 10, 1, (0,)),
        Span("message", 1, 2, 5, 10, 30, 1, (0,), after=0),
        Span("reduce", 2, -1, -1, 30, 40, 1, (0,), after=1),
    )
    found = events(TimeLine("predicted", spans))
    starts = {e["id"]: e for e in found if e["ph"] == "s"}
    ends = {e["id"]: e for e in found if e["ph"] == "f"}
    assert set(starts) == set(ends) and len(starts) == 2
    slices = {(e["pid"], e["tid"], e["ts"]) for e in found if e["ph"] == "X"}
    for name, begin in starts.items():
        assert begin["ts"] <= ends[name]["ts"]
        for event in (begin, ends[name]):
            assert (event["pid"], event["tid"], event["ts"]) in slices


def test_same_time_lines_same_bytes() -> None:
    assert write_trace([TimeLine("a", SPANS)]) == write_trace([TimeLine("a", SPANS)])


def test_nothing_sent_is_an_empty_trace() -> None:
    assert events(TimeLine("predicted", ())) == []
