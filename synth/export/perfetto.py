"""Traces for ui.perfetto.dev and chrome://tracing (the Trace Event Format), predicted or measured.

A process for each rank and time line, a thread for each peer; arrows lead from what had to end first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from taccl.synth.export.timeline import WORK, Span

FS_PER_US = 10**9


@dataclass(frozen=True, slots=True)
class TimeLine:
    """One telling of what happened: "predicted" by the cost model, or "measured" on real ranks."""

    label: str
    spans: tuple[Span, ...]


def write_trace(time_lines: Sequence[TimeLine]) -> str:
    """The JSON text; time lines stand side by side, two of them give every rank two processes.

    Times are in us with fs resolution, rounded to what a float of the viewer can hold.
    """
    events: list[dict[str, Any]] = []
    for number, line in enumerate(time_lines):
        ranks = sorted({s.src for s in line.spans} | {s.dst for s in line.spans if s.dst >= 0})
        pid_of = {rank: number + len(time_lines) * rank for rank in ranks}
        for rank in ranks:
            events.append(_named("process_name", pid_of[rank], 0, f"rank {rank} ({line.label})"))
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid_of[rank], "tid": 0,
                           "args": {"sort_index": pid_of[rank]}})  # fmt: skip
        for pid, tid, name in sorted({(pid_of[s.src], _thread(s), _thread_name(s)) for s in line.spans}):
            events.append(_named("thread_name", pid, tid, name))
        for index, span in enumerate(line.spans):
            events.append(_span(span, pid_of[span.src]))
            if 0 <= span.after < len(line.spans):
                events += _arrow(f"{number}.{index}", line.spans[span.after], span, pid_of)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, separators=(",", ":")) + "\n"


def _thread(span: Span) -> int:
    """Links of one rank get threads by link id; its reductions and its codec come first. Thread 0 is the process
    itself."""
    return {"reductions": 1, "codec": 2}[WORK[span.kind]] if span.kind in WORK else 3 + span.link


def _thread_name(span: Span) -> str:
    return WORK.get(span.kind, f"to rank {span.dst} (link {span.link})")


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(fs: int) -> float:
    return fs / FS_PER_US


def _span(span: Span, pid: int) -> dict[str, Any]:
    chunks = (
        f"chunk {span.chunks[0]}" if len(span.chunks) == 1 else f"{span.count} chunk{'s' * (span.count > 1)}"
    )
    args: dict[str, Any] = {"chunks": list(span.chunks) or span.count}
    if span.place:
        args["place"] = span.place
    if span.coded:
        args["coded"] = True
    return {
        "ph": "X",
        "name": chunks if span.kind == "message" else f"{span.kind} {chunks}",
        "cat": span.kind,
        "pid": pid,
        "tid": _thread(span),
        "ts": _us(span.start_fs),
        "dur": _us(span.end_fs - span.start_fs),
        "args": args,
    }


def _arrow(name: str, before: Span, span: Span, pid_of: dict[int, int]) -> list[dict[str, Any]]:
    flow = {"cat": "after", "name": "after", "id": name}
    begin = {"pid": pid_of[before.src], "tid": _thread(before), "ts": _us(before.start_fs)}
    end = {"pid": pid_of[span.src], "tid": _thread(span), "ts": _us(span.start_fs), "bp": "e"}
    return [{"ph": "s", **flow, **begin}, {"ph": "f", **flow, **end}]
