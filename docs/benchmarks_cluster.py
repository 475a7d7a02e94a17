"""`make bench-cluster`: synthesised programs beside MPI's own collectives over emulated clusters with uneven links.

    python docs/benchmarks_cluster.py                       the table "Emulated clusters" of docs/benchmarks.md
    python docs/benchmarks_cluster.py headline              the case without latency, 8 MB only
    python docs/benchmarks_cluster.py 4x2 allreduce 8MB     some rows
    python docs/benchmarks_cluster.py flat 16MB turns       a column more: the same program without turns
    python docs/benchmarks_cluster.py 5x1 one 8MB           another cluster
    python docs/benchmarks_cluster.py 4x2 one               the program that the model likes best, and no other
    python docs/benchmarks_cluster.py 4x2 keep=DIR links    only measure the links, and keep the profile in DIR
    python docs/benchmarks_cluster.py 4x2 keep=DIR programs   the same, and make and keep the programs

For each case the links are measured (`taccl profile`), then for each row a few programs are made from that profile
(`taccl synth --alternatives`), the quickest of them is found (`taccl choose`) and, in another run, timed in turns with
the MPI library that this environment has (`taccl run`). What lies in DIR already is used as it is, so what takes the
cores and what takes the links can be done at different times. Needs root and what `python -m tests.cluster check` asks
for.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cluster.layout import Layout, layout  # noqa: E402
from tests.cluster.namespaces import Cluster, cluster, why_not  # noqa: E402

CASES = {
    "headline": layout(4, 2, "200mbit", {3: "50mbit"}),
    "2x4": layout(2, 4, "200mbit", {1: "50mbit"}, latency_us=1000),
    "4x2": layout(4, 2, "200mbit", {3: "50mbit"}, latency_us=1000),
    "even": layout(4, 2, "200mbit", latency_us=1000),
    "flat": layout(4, 2, "200mbit"),
    "2x2": layout(2, 2, "100mbit", {1: "20mbit"}, latency_us=500),
    "2x3": layout(2, 3, "1gbit", {0: "300mbit"}, latency_us=50),
    "3x2": layout(3, 2, "100mbit", {1: "400mbit"}, latency_us=200),
    "3x3": layout(3, 3, "500mbit", {2: "100mbit"}, latency_us=500),
    "5x1": layout(5, 1, "100mbit", {0: "20mbit", 2: "300mbit"}, latency_us=2000),
    "6x1": layout(6, 1, "200mbit", {2: "40mbit", 5: "100mbit"}, latency_us=1000),
    "6x1-wide": layout(6, 1, "100mbit", {0: "300mbit"}, latency_us=500),
    "4x2-racks": layout(4, 2, "200mbit", rack_of=(0, 0, 1, 1), trunks=("200mbit", "200mbit")),
    "6x1-racks": layout(
        6, 1, "200mbit", latency_us=300, rack_of=(0, 1, 2, 0, 1, 2), trunks=("200mbit", "100mbit", "300mbit")
    ),
    "4x2-each": layout(4, 2, "100mbit", {1: "60mbit", 2: "300mbit", 3: "200mbit"}, latency_us=200),
}
USUAL_CASES = ("headline", "2x4", "4x2", "even")
COLLECTIVES = ("allgather", "allreduce", "broadcast", "alltoall", "reducescatter")
USUAL = COLLECTIVES[:3]
SIZES = {
    "64KB": 2**16, "256KB": 2**18, "1MB": 2**20, "4MB": 2**22, "8MB": 2**23, "16MB": 2**24, "64MB": 2**26,
}  # fmt: skip
USUAL_SIZES = ("64KB", "1MB", "8MB", "64MB")
TURNS = {"64KB": 11, "256KB": 7, "1MB": 5, "4MB": 3, "8MB": 3, "16MB": 3, "64MB": 1}
# In which programs are chosen, and runs of each in one.
ROUNDS = {
    "64KB": (5, 11), "256KB": (5, 5), "1MB": (4, 3), "4MB": (3, 1), "8MB": (2, 1), "16MB": (2, 1), "64MB": (1, 1),
}  # fmt: skip
ALTERNATIVES = 5
SYNTH_S = 20
STAGES = ("links", "programs")  # to stop after
TURNS_WORD, TURNS_HEAD = "turns", " | without turns (ms)"
ONE_WORD, CHOSEN_HEAD = "one", " | chosen | the model's best (ms)"
HEAD = "collective | size | MPI (ms) | here (ms) | ratio | predicted (ms) | here / predicted | bound (ms) | engine"
TACCL = (sys.executable, "-m", "taccl")


def main() -> int:
    """Print the rows that are asked for."""
    words = {word for word in sys.argv[1:] if not word.startswith("keep=")}
    kept = next((word.partition("=")[2] for word in sys.argv[1:] if word.startswith("keep=")), "")
    unknown = words - {*CASES, *COLLECTIVES, *SIZES, *STAGES, TURNS_WORD, ONE_WORD}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    cases = [name for name in CASES if name in (words & {*CASES} or USUAL_CASES)]
    reason = next((why for name in cases if (why := why_not(CASES[name].shaper))), "")
    if os.geteuid() != 0 or reason:
        print(f"no cluster can be emulated here: {reason or 'root is needed'}", file=sys.stderr)
        return 6
    collectives = [name for name in COLLECTIVES if name in (words & {*COLLECTIVES} or USUAL)]
    sizes = [name for name in SIZES if name in (words & {*SIZES} or USUAL_SIZES)]
    stage = next((one for one in STAGES if one in words), "")
    for name in cases:
        rows = [
            (collective, size)
            for collective in collectives
            for size in sizes
            if name != "headline" or size == "8MB"
        ]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(kept).absolute() / name if kept else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            case(name, CASES[name], rows, folder, stage, TURNS_WORD in words, ONE_WORD not in words)
    return 0


def case(
    name: str,
    wanted: Layout,
    rows: list[tuple[str, str]],
    folder: Path,
    stage: str,
    compared: bool,
    chosen: bool,
) -> None:
    """Profile a cluster, then make and run a program for each row; stop after a stage. compared: also without turns.
    chosen: among alternatives."""
    profile = folder / "profile.yaml"
    if not profile.exists():
        with cluster(wanted) as running:
            on_ranks(running, "profile", "-o", str(profile), "--quick")
    if stage == "links":
        return
    for collective, size in rows:
        synthesise(profile, collective, size, folder, ALTERNATIVES * chosen)
    if stage == "programs":
        return
    ratios = []
    head = HEAD + CHOSEN_HEAD * chosen + TURNS_HEAD * compared
    with cluster(wanted) as running:
        for collective, size in rows:
            usual = folder / f"{collective}-{size}.json"
            program, which, first_us, engine = usual, "", 0.0, ""
            if chosen:
                program, which, first_us, engine = choose(running, usual, size)
            found, made, library = row(running, collective, size, folder, program)
            if not ratios:
                mbit = ", ".join(f"{rate / 1e6:g}" for rate in wanted.rate_bits)
                print(
                    f"\n{name}: {wanted.nodes} nodes x {wanted.ranks_per_node} ranks, uplinks {mbit} Mbit/s",
                    end="",
                )
                if wanted.rack_of:
                    racks, trunks = (
                        ", ".join(map(str, wanted.rack_of)),
                        [bits / 1e6 for bits in wanted.trunk_bits],
                    )
                    print(
                        f" in racks {racks} with trunks {', '.join(f'{rate:g}' for rate in trunks)}", end=""
                    )
                print(f", {wanted.latency_us:g} us; {library}; load {os.getloadavg()[0]:.1f}\n\n| {head} |")
                print("| --- " * (head.count("|") + 1) + "|")
            here, its, said = (
                found["median_time"],
                found["reference_median_time_us"],
                found["predicted_time_us"],
            )
            ratios.append(here / its)
            cells = [
                collective, size, f"{its / 1e3:.1f}", f"{here / 1e3:.1f}", f"{here / its:.2f}",
                f"{said / 1e3:.1f}", f"{here / said:.2f}", f"{made['lower_bound_us'] / 1e3:.1f}",
                engine or str(made["engine"]),
            ]  # fmt: skip
            if chosen:
                cells += [which, f"{first_us / 1e3:.1f}"]
            if compared:
                without, *_ = row(running, collective, size, folder, program, "--no-turns", "--no-reference")
                cells.append(f"{without['median_time'] / 1e3:.1f}")
            print(f"| {' | '.join(cells)} |", flush=True)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(
        f"\ngeometric mean of the ratios {mean:.2f}, largest {max(ratios):.2f}; load {os.getloadavg()[0]:.1f}"
    )


def synthesise(profile: Path, collective: str, size: str, folder: Path, alternatives: int) -> None:
    """Make the programs of a row, and note what synthesis says of them, unless they are there."""
    program, said = folder / f"{collective}-{size}.json", folder / f"{collective}-{size}.said.json"
    if said.exists():
        return
    asked = (
        *(*TACCL, "synth", "-t", str(profile), "-c", collective, "--size", str(SIZES[size])),
        *("--time-limit", str(SYNTH_S), "-o", str(program), "--json", "--codec", "none"),
        *(("--alternatives", str(alternatives)) if alternatives else ()),
    )
    said.write_text(subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout)


def choose(running: Cluster, usual: Path, size: str) -> tuple[Path, str, float, str]:
    """(the quickest program of a row, which of how many it is, us of the one that the model likes best, its engine)."""
    said = json.loads(usual.with_suffix(".said.json").read_text())
    programs = [usual, *(Path(other["path"]) for other in said.get("alternatives", ()))]
    best = usual.with_suffix(".best.json")
    rounds, runs = map(str, ROUNDS[size])
    done = on_ranks(
        running, "choose", *map(str, programs), "--rounds", rounds, "-n", runs, "-w", str(int(runs != "1")),
        "--deadline", "300", "-o", str(best), "--json",
    )  # fmt: skip
    found = json.loads(done)
    place = [Path(one["file"]) for one in found["programs"]].index(Path(found["chosen"]))
    without = ", no turns" * (found["turns"] is False)
    return (
        best,
        f"{place + 1} of {len(programs)}{without}",
        float(found["programs"][0]["median_time_us"]),
        engine_of(said, programs[place]),
    )


def engine_of(said: dict[str, Any], program: Path) -> str:
    """What found a program of a row."""
    others = {Path(other["path"]): str(other["engine"]) for other in said.get("alternatives", ())}
    return others.get(program, str(said["engine"]))


def row(
    running: Cluster, collective: str, size: str, folder: Path, program: Path, *more: str
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(what was measured, what synthesis says, the MPI library)."""
    out = folder / "run.json"
    made = json.loads((folder / f"{collective}-{size}.said.json").read_text())
    on_ranks(
        running, "run", str(program), "-b", str(SIZES[size]), "-e", str(SIZES[size]), "--out-of-place",
        "-n", str(TURNS[size]), "-w", "1", "--deadline", "300", *more, "--json", str(out),
    )  # fmt: skip
    document = json.loads(out.read_text())
    measured = document["results"][0]
    assert measured["out_of_place"]["nwrong"] == 0
    mpi = document["mpi"]
    found = {**measured["out_of_place"], "predicted_time_us": measured["predicted_time_us"]}
    return found, made, f"{mpi['name']} {mpi['version']}"


def on_ranks(running: Cluster, *words: str) -> str:
    """What a command of taccl on all ranks prints; on failure show what it said and leave."""
    done = running.run((*TACCL, *words), 900, capture_output=True, cwd=ROOT)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        sys.exit(1)
    return str(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
