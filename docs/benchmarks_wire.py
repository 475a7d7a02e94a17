"""`make bench-wire`: coded messages over an emulated cluster, beside uncoded ones, coding at every hop, and MPI's own.

    python docs/benchmarks_wire.py                         the table "Coded messages" of docs/benchmarks.md
    python docs/benchmarks_wire.py broadcast float32       some rows
    python docs/benchmarks_wire.py planned                 the table "Planned by synthesis" alone

4 nodes of 2 ranks, every uplink 200 Mbit/s, 16 MiB of normal values with the spread of weights. The links are measured
(`taccl profile`), each program is a baseline for them, and all that is coded goes between nodes. In each run MPI's own
collective, the uncoded program and the codecs take turns. Then the codecs are measured too (`taccl profile --codecs`)
and `taccl synth --codec` makes programs of its own. Needs root and what `python -m tests.cluster check` asks for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import numpy as np  # noqa: E402
from benchmarks_cluster import TACCL, on_ranks  # noqa: E402

from tests.cluster.layout import layout  # noqa: E402
from tests.cluster.namespaces import Cluster, cluster, why_not  # noqa: E402

CLUSTER = layout(4, 2, "200mbit")
SIZE = 16 << 20
TURNS = 3
# Sums of lossy codecs need one that sends no partial sum with coded parts: within nodes first, then directly.
ENGINES = {
    "broadcast": "chain",
    "allgather": "hierarchical",
    "alltoall": "direct",
    "allreduce": "hierarchical",
}
# A codec costs some hundred microseconds a frame here, so a chain must not be cut as finely as its messages alone want.
CHUNKS = {"broadcast": ("--partition", "64")}
CODECS = {"bfloat16": ("xw",), "float32": ("xw", "q8")}
HEAD = (
    "collective", "values", "codec", "ratio", "MPI (ms)", "uncoded (ms)", "hop by hop (ms)", "collective (ms)",
    "uncoded / collective", "MPI / collective", "largest error hop by hop", "collective",
)  # fmt: skip

PLANNED = "planned"
PLANNED_CODECS = {"q8": "float32", "xw": "bfloat16"}
PLANNED_HEAD = (
    "collective", "values", "codec", "coded messages", "MPI (ms)", "uncoded (ms)", "planned (ms)", "predicted (ms)",
    "uncoded / planned", "MPI / planned", "largest error",
)  # fmt: skip


def main() -> int:
    """Print the rows that are asked for."""
    words = set(sys.argv[1:])
    if unknown := words - {*ENGINES, *CODECS, PLANNED}:
        print(f"unknown: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if os.geteuid() != 0 or (reason := why_not(CLUSTER.shaper)):
        print(
            f"no cluster can be emulated here: {reason if os.geteuid() == 0 else 'root is needed'}",
            file=sys.stderr,
        )
        return 6
    if PLANNED not in words:
        print(f"| {' | '.join(HEAD)} |\n{'| --- ' * len(HEAD)}|", flush=True)
    with tempfile.TemporaryDirectory() as name, cluster(CLUSTER) as running:
        folder = Path(name)
        profile = folder / "profile.yaml"
        on_ranks(running, "profile", "-o", str(profile), "--quick")
        values = np.random.default_rng(0).standard_normal(SIZE // 4, np.float32) * np.float32(0.05)
        np.save(folder / "values.npy", values)
        for collective, engine in ENGINES.items() if PLANNED not in words else ():
            if not words & {*ENGINES} or collective in words:
                program = folder / f"{collective}.json"
                asked = ("-t", str(profile), "-c", collective, "--size", str(SIZE), "--engine", engine)
                made = (
                    *TACCL,
                    "synth",
                    *asked,
                    *CHUNKS.get(collective, ()),
                    "--time-limit",
                    "10",
                    "-o",
                    str(program),
                    "--json",
                )
                subprocess.run(made, check=True, capture_output=True, cwd=ROOT)
                for dtype in CODECS:
                    if not words & {*CODECS} or dtype in words:
                        rows(running, folder, collective, program, dtype)
        if not words or PLANNED in words:
            print(f"\n| {' | '.join(PLANNED_HEAD)} |\n{'| --- ' * len(PLANNED_HEAD)}|", flush=True)
            dtypes = ",".join(PLANNED_CODECS.values())
            on_ranks(
                running, "profile", "-t", str(profile), "-o", str(profile), "--codecs", ",".join(PLANNED_CODECS),
                "--dtype", dtypes, "--data", str(folder / "values.npy"), "--quick",
            )  # fmt: skip
            for collective in ENGINES:
                if not words & {*ENGINES} or collective in words:
                    planned_rows(running, folder, profile, collective)
    print(f"\nload {os.getloadavg()[0]:.1f}")
    return 0


def rows(running: Cluster, folder: Path, collective: str, program: Path, dtype: str) -> None:
    """Run and print one collective on one type of values."""
    raw, *once = measured(running, folder, program, dtype, ("raw", *CODECS[dtype]))
    hop = measured(running, folder, program, dtype, CODECS[dtype], "--codec-at", "hop", "--no-reference")
    for coded, apart in zip(once, hop, strict=True):
        time, its, beside = (row["out_of_place"]["median_time"] / 1e3 for row in (coded, apart, raw))
        mpi = coded["out_of_place"]["reference_median_time_us"] / 1e3
        cells = [
            collective, dtype, coded["codec"], f"{coded['out_of_place']['wire_ratio']:.2f}", f"{mpi:.0f}",
            f"{beside:.0f}", f"{its:.0f}", f"{time:.0f}", f"{beside / time:.2f}", f"{mpi / time:.2f}",
            f"{apart['out_of_place']['max_error']:.1e}", f"{coded['out_of_place']['max_error']:.1e}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


def planned_rows(running: Cluster, folder: Path, profile: Path, collective: str) -> None:
    """Make, run and print the best schedule of one collective without a codec, and those with each."""
    plain = folder / f"{collective}-plain.json"
    made(profile, collective, plain, "none", "float32")
    for codec, dtype in PLANNED_CODECS.items():
        planned = folder / f"{collective}-{codec}.json"
        coding = made(profile, collective, planned, codec, dtype)["coding"]
        (raw,) = measured(running, folder, plain, dtype, ("raw",))
        mpi = raw["out_of_place"]["reference_median_time_us"] / 1e3
        uncoded = raw["out_of_place"]["median_time"] / 1e3
        if coding is None:
            print(
                f"| {collective} | {dtype} | {codec} | none | {mpi:.0f} | {uncoded:.0f} |" + " |" * 5,
                flush=True,
            )
            continue
        (row,) = measured(running, folder, planned, dtype, (), "--no-reference")
        time = row["out_of_place"]["median_time"] / 1e3
        cells = [
            collective, dtype, codec, f"{coding['coded_messages']} of {coding['messages']}", f"{mpi:.0f}",
            f"{uncoded:.0f}", f"{time:.0f}", f"{coding['time_us'] / 1e3:.0f}", f"{uncoded / time:.2f}",
            f"{mpi / time:.2f}", f"{row['out_of_place']['max_error']:.1e}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


def made(profile: Path, collective: str, program: Path, codec: str, dtype: str) -> dict[str, Any]:
    """Synthesise; the command's JSON document."""
    command = (
        *TACCL, "synth", "-t", str(profile), "-c", collective, "--size", str(SIZE), "--codec", codec, "--dtype", dtype,
        "--time-limit", "10", "-o", str(program), "--json",
    )  # fmt: skip
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout
    )
    return found


def measured(
    running: Cluster, folder: Path, program: Path, dtype: str, codecs: tuple[str, ...], *more: str
) -> list[dict[str, Any]]:
    """The results with each codec; without any, as the program plans."""
    out = folder / "run.json"
    on_ranks(
        running, "run", str(program), "-b", str(SIZE), "-e", str(SIZE), "--out-of-place", "-n", str(TURNS), "-w", "1",
        "-d", dtype, "--data", str(folder / "values.npy"), *(("--codec", ",".join(codecs)) if codecs else ()), *more,
        "--deadline", "300", "--json", str(out),
    )  # fmt: skip
    results: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    assert all(row["out_of_place"]["nwrong"] == 0 for row in results)
    return results


if __name__ == "__main__":
    sys.exit(main())
