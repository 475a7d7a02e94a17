"""`make bench-host`: what README's quick start finds on one host, beside baselines.

    python docs/benchmarks_host.py            four ranks
    python docs/benchmarks_host.py 2 8        two, then eight

The links are measured twice (`taccl profile`): as programs' messages go, and as MPI's do (`--transport mpi`). From each
profile a program is made for each row (`taccl synth`), and from the first the baselines `direct` and `ring`. All four
are timed in turns (`taccl choose`) and checked: medians of five rounds. Predicted is the simulator's time of the first.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from taccl.runtime import mpi

COLLECTIVES = ("allgather", "allreduce", "alltoall", "broadcast", "reducescatter")
SIZES = ("1MB", "16MB")
WAYS = {"auto": (), "mpi": ("--transport", "mpi")}
BASELINES = ("direct", "ring")
SYNTH_S = "10"
PREDICTED, BY_MPI = "measured / predicted", "the same by MPI's links"
TACCL = (sys.executable, "-m", "taccl")


def main() -> int:
    """Print the rows for each number of ranks that is asked for."""
    for ranks in [int(word) for word in sys.argv[1:]] or [4]:
        with tempfile.TemporaryDirectory() as folder:
            _rows(ranks, Path(folder))
    return 0


def _rows(ranks: int, folder: Path) -> None:
    for way, options in WAYS.items():
        _on(ranks, "profile", "--device", "host", "-o", str(folder / f"{way}.yaml"), *options)
    said = [
        line for line in (folder / "auto.yaml").read_text().splitlines() if "intra" in line or "bus" in line
    ]
    print(f"\n{ranks} ranks; {' '.join(line.strip() for line in said[:2])}\n")
    print(
        "| collective | size | taccl (us) | predicted | measured / predicted | by MPI's links | direct | ring |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    ratios: dict[str, list[float]] = {name: [] for name in (PREDICTED, BY_MPI, "mpi", *BASELINES)}
    for collective in COLLECTIVES:
        for size in SIZES:
            files = {way: folder / f"{collective}-{size}-{way}.json" for way in (*WAYS, *BASELINES)}
            for way, file in files.items():
                profile = folder / f"{way if way in WAYS else 'auto'}.yaml"
                engine = () if way in WAYS else ("--engine", way)
                _run("synth", "-t", str(profile), "-c", collective, "--size", size, "-o", str(file),
                     "--time-limit", SYNTH_S, *engine)  # fmt: skip
            chosen = _on(ranks, "choose", *map(str, files.values()), "--size", size, "-n", "20", "--json")
            found = dict(zip(files, json.loads(chosen)["programs"], strict=True))
            times = {way: one["median_time_us"] for way, one in found.items()}
            mine, predicted = times["auto"], found["auto"]["predicted_time_us"]
            for name in ("mpi", *BASELINES):
                ratios[name].append(mine / times[name])
            ratios[PREDICTED].append(mine / predicted)
            ratios[BY_MPI].append(times["mpi"] / found["mpi"]["predicted_time_us"])
            others = " | ".join(f"{times[way]:.0f} ({mine / times[way]:.2f})" for way in ("mpi", *BASELINES))
            print(
                f"| {collective} | {size} | {mine:.0f} | {predicted:.0f} | {mine / predicted:.2f} | {others} |",
                flush=True,
            )
    means = {name: math.exp(sum(map(math.log, found)) / len(found)) for name, found in ratios.items()}
    print("\ngeometric means: " + ", ".join(f"{name} {mean:.2f}" for name, mean in means.items()))


def _on(ranks: int, *arguments: str) -> str:
    return _call(mpi.mpiexec(), "-n", str(ranks), *TACCL, *arguments)


def _run(*arguments: str) -> str:
    return _call(*TACCL, *arguments)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
