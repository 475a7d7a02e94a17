"""Print the table "Determinism" of docs/benchmarks.md: are files byte for byte the same? `make bench-determinism`.

Every case is synthesised RUNS times with one worker and RUNS times with two, in turns, each in a process of its own
with another PYTHONHASHSEED. A search that its time limit ends depends on the clock; "ended" says what ended it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 5
LIMIT = "10"
CASES = (
    ("ndv2:1", "allgather", "1MB"),
    ("ndv2:2", "alltoall", "1KB"),
    ("dgx-a100:2", "allreduce", "64MB"),
    ("torus2d:4x4", "broadcast", "1MB"),
    ("mesh2d:3x3", "reducescatter", "64MB"),
    ("docs/topologies/unequal-nics.yaml", "allgather", "1MB"),
    ("dgx2:5", "alltoall", "80MB"),
)


def made(case: tuple[str, str, str], workers: int, run: int) -> tuple[str, str]:
    """(digest of the program and of the algorithm, why the search ended)."""
    topology, collective, size = case
    digest = hashlib.sha256()
    ended = ""
    environment = {**os.environ, "PYTHONHASHSEED": str(run + 1)}
    with tempfile.TemporaryDirectory() as folder:
        algorithm, program = Path(folder) / "made.json", Path(folder) / "made.xml"
        synth = [
            "synth", "-t", topology, "-c", collective, "--size", size, "--time-limit", LIMIT, "--workers", str(workers),
            "--json", "-o", str(algorithm),
        ]  # fmt: skip
        for arguments in (synth, ["convert", str(algorithm), "--to", "msccl-xml", "-o", str(program)]):
            command = [sys.executable, "-m", "taccl", *arguments]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            if arguments is synth:
                ended = json.loads(done.stdout)["ended"]
        digest.update(algorithm.read_bytes() + program.read_bytes())
    return digest.hexdigest(), ended


if __name__ == "__main__":
    print("| topology | collective | size | workers | runs | different files | ended |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        results: dict[int, list[tuple[str, str]]] = {1: [], 2: []}
        for run in range(RUNS):
            for workers, found in results.items():
                found.append(made(case, workers, run))
        for workers, found in results.items():
            distinct = len({digest for digest, _ in found})
            ends = ", ".join(sorted({ended for _, ended in found}))
            print(f"| {' | '.join(case)} | {workers} | {RUNS} | {distinct - 1} | {ends} |", flush=True)
