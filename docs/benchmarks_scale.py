"""Print the table of docs/benchmarks.md, "At scale": whole commands, timed from outside. `make bench-scale`.

Arguments, all optional: names of groups, e.g. `python docs/benchmarks_scale.py 80 1024`. Every row is `taccl synth` in
a process of its own: loading the topology, search, certificate, the check of the whole schedule, and up to 128 ranks
lowering to MSCCL XML and its strict verification. Medians of RUNS runs; memory is the most of any.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RUNS = 3
# Rows whose wall time is the limit that they were given are run once.
ONCE = ("1GB", "1KB", "irregular-32")
REFERENCE_STEPS = 5_000_000  # additions of the loop that the last column is relative to

# (topology, collective, nccl-tests size in bytes, further options)
SINGLE = ("--partition", "1", "--no-batching")
BUNDLED = (
    "ndv2:1", "ndv2:2", "dgx1v:1", "dgx2:1", "dgx2:2", "dgx-a100:1", "dgx-a100:2", "dgx-h100:1", "dgx-h100:2",
    "mi300x:1", "gb200-nvl72:1", "ring:8", "torus2d:4x4", "torus3d:3x3x3", "mesh2d:3x3", "hypercube:3", "fat-tree:4x4",
)  # fmt: skip
MAIN = ("allgather", "reducescatter", "allreduce", "alltoall", "broadcast")
Row = tuple[str, str, int, tuple[str, ...]]
GROUPS: dict[str, list[Row]] = {
    "80": [
        (topology, collective, 80 * chunk, SINGLE)
        for topology in ("dgx2:5", "ndv2:10")
        for collective in ("allgather", "alltoall")
        for chunk in (1000, 10**6)
    ],
    "1024": [
        (topology, collective, 1024 * 10**6, SINGLE)
        for topology in ("dgx-a100:128", "dgx2:64", "torus2d:32x32")
        for collective in ("allgather", "alltoall")
    ],
    "4096": [
        ("torus2d:64x64", "allgather", 4096 * 10**6, SINGLE),
        ("dgx-a100:512", "allgather", 4096 * 10**6, SINGLE),
    ],
    "1GB": [(t, c, 10**9, ("--time-limit", "10")) for t in BUNDLED for c in MAIN],
    "1KB": [(t, c, 1000, ("--time-limit", "10")) for t in BUNDLED for c in MAIN],
    # The files have 16 nodes; `@` and a number of nodes stand for the same with so many.
    "irregular": [
        (f"docs/topologies/irregular/{name}.yaml@{nodes}", collective, 8 * nodes * 10**6, SINGLE)
        for name in ("slow-nic", "missing-link", "mixed-nodes")
        for nodes in (8, 16, 32, 64, 128)
        for collective in ("allgather", "alltoall")
    ] + [
        (f"docs/topologies/irregular/slow-nic.yaml@{nodes}", "allreduce", 8 * nodes * 10**6, SINGLE)
        for nodes in (16, 128)
    ],
    "irregular-32": [
        (f"docs/topologies/irregular/{file}", collective, ranks * 10**6, ("--time-limit", "60"))
        for file, ranks in [
            ("slow-nic.yaml@2", 16), ("slow-nic.yaml@4", 32), ("missing-link.yaml@2", 16), ("missing-link.yaml@4", 32),
            ("random-16.yaml", 16), ("random-32.yaml", 32), ("torus-failed.yaml", 32),
        ]
        for collective in ("allgather", "alltoall")
    ],
    "growth": [
        (f"{name}:{size}", "allgather", ranks * 10**6, SINGLE)
        for name, size, ranks in [
            # From 33 ranks on the search ends by itself; below, it goes on until its limit.
            ("dgx-a100", "5", 40), ("dgx-a100", "8", 64), ("dgx-a100", "16", 128),
            ("dgx-a100", "32", 256), ("dgx-a100", "64", 512), ("dgx-a100", "128", 1024),
            ("torus2d", "8x8", 64), ("torus2d", "16x16", 256), ("torus2d", "32x32", 1024), ("torus2d", "64x64", 4096),
        ]
    ],
}  # fmt: skip
HEAD = """\
| topology | ranks | collective | size (bytes) | time (us) | bound here (us) | gap | bound for any algorithm (us) \
| program | wall (s) | memory (MB) | wall / reference loop |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def reference_s() -> float:
    """A loop of plain Python on this machine."""
    began = time.perf_counter()
    total = 0
    for number in range(REFERENCE_STEPS):
        total += number
    assert total == REFERENCE_STEPS * (REFERENCE_STEPS - 1) // 2
    return time.perf_counter() - began


def resized(topology: str, folder: str) -> str:
    """The file of a profile of equal nodes with another number of them, FILE@NODES."""
    path, nodes = topology.split("@")
    text = re.sub(r"(?m)^nodes: .*$", f"nodes: {nodes}", Path(path).read_text())
    made = Path(folder) / Path(path).name
    made.write_text(text)
    return str(made)


def run(row: Row) -> tuple[dict[str, object], float, float]:
    """(the JSON document, wall seconds, peak memory in MB) of one command."""
    topology, collective, size, options = row
    with tempfile.TemporaryDirectory() as folder:
        if "@" in topology:
            topology = resized(topology, folder)
        command = [
            sys.executable, "-m", "taccl", "synth", "-t", topology, "-c", collective, "--size", f"{size}B", *options,
            "--json", "-o", str(Path(folder) / "out.json"),
        ]  # fmt: skip
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
    if status:
        raise SystemExit(f"{' '.join(command)} failed with status {status}")
    return json.loads(text), wall, usage.ru_maxrss / 1024


def lines(rows: list[Row], runs: int) -> Iterator[str]:
    """One line of Markdown a row."""
    for row in rows:
        reference = statistics.median(reference_s() for _ in range(RUNS))
        results = [run(row) for _ in range(runs)]
        found = results[0][0]
        assert all(other["time_us"] == found["time_us"] for other, _, _ in results), "not deterministic"
        wall = statistics.median(wall for _, wall, _ in results)
        time_us, within = float(str(found["time_us"])), float(str(found["solver_bound_us"]))
        yield (
            f"| {row[0]} | {found['ranks']} | {row[1]} | {row[2]} | {time_us:.3f} | {within:.3f} "
            f"| {100 * (1 - within / time_us):.2f} % | {float(str(found['lower_bound_us'])):.3f} "
            f"| {'none' if found['no_program'] else 'verified'} | {wall:.1f} | {max(mb for _, _, mb in results):.0f} "
            f"| {wall / reference:.0f} |"
        )


if __name__ == "__main__":
    print(HEAD)
    for group in sys.argv[1:] or list(GROUPS):
        for line in lines(GROUPS[group], 1 if group in ONCE else RUNS):
            print(line, flush=True)
