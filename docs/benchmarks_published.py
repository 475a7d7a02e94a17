"""Print the table "Published figures" of docs/benchmarks.md: other tools' cases, each in its own cost model.

`make bench-published`; arguments, all optional: names of tools, e.g. `python docs/benchmarks_published.py tacos`. Every
row is a whole `taccl synth` command in a process of its own, timed from outside, which writes what it made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "topologies" / "published"
MB, GB, GIB = 10**6, 10**9, 2**30
SINGLE = ("--partition", "1", "--no-batching")
FOUR = ("--partition", "4", "--no-batching")


@dataclass(frozen=True, slots=True)
class Case:
    """One published figure."""

    tool: str
    topology: str
    collective: str
    size_bytes: int
    options: tuple[str, ...]
    published: str  # time in us, or rate
    took: str  # how long the tool took, as published


def _own(name: str) -> str:
    return str(FOLDER / f"{name}.yaml")


CASES = (
    Case(
        "TACCL",
        "ndv2-1mb:2",
        "alltoall",
        16 * MB,
        ("-s", "ndv2-sk-1", "--partition", "1"),
        "6779.8 us",
        "258 s",
    ),
    Case("TACCL", "ndv2-1mb:4", "allgather", 32 * MB, ("--partition", "1"), "2703.6 us", "95 s"),
    Case("TACCL", "ndv2-1mb:4", "alltoall", 32 * MB, ("--partition", "1"), "none in 200 s", "-"),
    Case(
        "TACCL",
        "dgx2-1mb:2",
        "allgather",
        64 * MB,
        ("-s", "dgx2-sk-1", "--partition", "2"),
        "563.8 us",
        "18 s",
    ),
    Case("TACCL", "dgx2:2", "allgather", 32 * 1000, ("-s", "dgx2-sk-2"), "17.7 us", "-"),
    Case("TE-CCL", _own("teccl-dgx2"), "alltoall", GB, (), "80500 us", "1590 s"),
    Case("TE-CCL", _own("teccl-ndv2"), "allgather", GB, (), "65000 us", "222 s"),
    Case("TACOS", _own("tacos-torus-8x8"), "allgather", GIB, SINGLE, "5321 us", "-"),
    Case("TACOS", _own("tacos-torus-8x8"), "allgather", GIB, FOUR, "5032 us", "-"),
    Case("TACOS", _own("tacos-torus-32x32"), "allgather", GIB, SINGLE, "5168 us", "106 s"),
    Case("ForestColl", _own("forestcoll-a100"), "allgather", GB, (), "346.67 GB/s", "-"),
    Case("ForestColl", _own("forestcoll-ndv2"), "allgather", GB, (), "171.43 GB/s", "-"),
)
HEAD = """\
| tool | topology | collective | published | in | here (us) | algbw (GB/s) | bound for any algorithm (us) | gap \
| engine | program | wall (s) |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
TIME_LIMIT_S = 30


def row(case: Case) -> str:
    """Run one case."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "taccl", "synth", "-t", case.topology, "-c", case.collective,
            "--size", f"{case.size_bytes}B", "--time-limit", f"{TIME_LIMIT_S}s", *case.options,
            "--json", "-o", str(Path(folder) / "out.json"),
        ]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}\n{done.stderr}")
    found = json.loads(done.stdout)
    name = Path(case.topology).stem if case.topology.endswith(".yaml") else case.topology
    options = " ".join(case.options)
    return (
        f"| {case.tool} | {name} {options} | {case.collective} | {case.published} | {case.took} "
        f"| {found['time_us']:.1f} | {case.size_bytes / found['time_us'] / 1000:.2f} | {found['lower_bound_us']:.1f} "
        f"| {100 * found['gap']:.2f} % | {found['engine']} | {'none' if found['no_program'] else 'verified'} "
        f"| {wall:.1f} |"
    )


def rows(tools: list[str]) -> Iterator[str]:
    """The lines of the table for the tools named, for all when none is."""
    for case in CASES:
        if not tools or case.tool.lower() in tools:
            yield row(case)


if __name__ == "__main__":
    print(HEAD)
    for line in rows([tool.lower() for tool in sys.argv[1:]]):
        print(line, flush=True)
