"""`make bench-training`: data-parallel training with compressed gradients, beside uncompressed ones and MPI's own.

    python docs/benchmarks_training.py                 both tables of "Training" in docs/benchmarks.md
    python docs/benchmarks_training.py time            how long iterations take on emulated clusters; needs root
    python docs/benchmarks_training.py loss            what loss is reached; needs the programs that `time` has made
    python docs/benchmarks_training.py time 200mbit    one rate of the uplinks

A small language model (benchmarks_training_rank.py) is trained by 8 ranks with one allreduce of all gradients a step.
`time`: 4 nodes of 2 ranks; links and codecs are measured (`taccl profile`, codecs on a gradient of this model), an
allreduce is synthesised without a codec and with each (`taccl synth --codec`), and the modes take turns in one job.
`loss`: the same programs and coding plans on 8 ranks of this machine without shaped links, where the arithmetic is the
same; whether it is, is told by the parameters after as many steps as were timed. Programs and figures stay in
build/training. Needs what `python -m tests.cluster check` asks for, and PyTorch in the environment, which the project
itself does not need: pip install torch
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from benchmarks_cluster import TACCL, on_ranks  # noqa: E402

from taccl.runtime import mpi  # noqa: E402
from tests.cluster.layout import layout  # noqa: E402
from tests.cluster.namespaces import Cluster, cluster, why_not  # noqa: E402

OUT = ROOT / "build" / "training"
RATES = {"200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
NODES, EACH = 4, 2
PLAIN = "uncompressed"
CODECS = ("xw", "bf16", "q8")
MODES = ("mpi", PLAIN, "xw", "bf16", "q8", "q8+feedback")
# Lossless messages change no bit: `xw` differs from uncompressed as MPI does, by the order of its schedule's sums.
LOSS_MODES = ("mpi", PLAIN, "bf16", "q8", "q8+feedback")
SEEDS = (0, 1, 2)
STEPS = 120  # of training
TURNS, WARMUP = 17, 2  # that are timed, and of those not counted
GRADIENT_STEPS = 10  # before the gradient on which codecs are measured
SYNTH_S = 10
TIME_HEAD = (
    "uplinks", "mode", "iteration (ms)", "communication (ms)", "gradient (ms)", "frames", "coded",
    "iteration / uncompressed", "communication / uncompressed", "iteration / MPI",
)  # fmt: skip
LOSS_HEAD = (
    "mode", *(f"{kind}, seed {seed}" for kind in ("training", "held out") for seed in SEEDS), "held out, mean",
    "standard deviation", "mean difference", "largest difference",
)  # fmt: skip


def main() -> int:
    """Print the tables that are asked for."""
    words = set(sys.argv[1:])
    if unknown := words - {"time", "loss", *RATES}:
        print(f"unknown: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is needed: pip install torch (for this benchmark alone)", file=sys.stderr)
        return 6
    OUT.mkdir(parents=True, exist_ok=True)
    if words != {"loss"} and (
        status := print_times([rate for rate in RATES if rate in words or not words & {*RATES}])
    ):
        return status
    return print_losses() if not words or "loss" in words else 0


def print_times(rates: list[str]) -> int:
    """The table of iteration times."""
    reason = "root is needed" if os.geteuid() != 0 else why_not("tbf")
    if reason:
        print(f"no cluster can be emulated here: {reason}", file=sys.stderr)
        return 6
    from benchmarks_training_rank import save_gradient

    elements = save_gradient(OUT / "gradient.npy", GRADIENT_STEPS)
    print(f"{elements} parameters, {4 * elements / 1e6:.1f} MB of gradients", flush=True)
    print(f"\n| {' | '.join(TIME_HEAD)} |\n{'| --- ' * len(TIME_HEAD)}|", flush=True)
    for rate in rates:
        with cluster(layout(NODES, EACH, rate)) as running:
            programs, plans = synthesise(running, rate, 4 * elements)
            asked = question("time", programs, [mode for mode in MODES if known(mode, programs)], rate)
            on_all(running, asked, OUT / f"time-{rate}.json")
        print_rows(rate, json.loads((OUT / f"time-{rate}.json").read_text()), asked["modes"], plans)
    print(f"\nload {os.getloadavg()[0]:.1f}")
    return 0


def synthesise(running: Cluster, rate: str, size_bytes: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Programs and coding plans by codec; codecs that would not pay have none."""
    profile, gradient = OUT / f"profile-{rate}.yaml", OUT / "gradient.npy"
    on_ranks(running, "profile", "-o", str(profile), "--quick")
    on_ranks(
        running, "profile", "-t", str(profile), "-o", str(profile), "--codecs", ",".join(CODECS), "--dtype", "float32",
        "--data", str(gradient), "--quick",
    )  # fmt: skip
    programs, plans = {}, {}
    for codec in (PLAIN, *CODECS):
        program = OUT / f"{codec}-{rate}.json"
        command = (
            *TACCL, "synth", "-t", str(profile), "-c", "allreduce", "--size", str(size_bytes), "--dtype", "float32",
            "--codec", "none" if codec == PLAIN else codec, "--time-limit", str(SYNTH_S), "-o", str(program), "--json",
        )  # fmt: skip
        made = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)
        if codec == PLAIN or made["coding"] is not None:
            programs[codec], plans[codec] = str(program), made["coding"]
    return programs, plans


def known(mode: str, programs: dict[str, str]) -> bool:
    """Whether there is a program for a mode; MPI's own needs none."""
    return mode == "mpi" or mode.removesuffix("+feedback") in programs


def question(what: str, programs: dict[str, str], modes: list[str], name: str) -> dict[str, Any]:
    """What the ranks are to do."""
    return {
        "what": what, "programs": programs, "modes": modes, "seeds": SEEDS, "steps": STEPS, "turns": TURNS,
        "warmup": WARMUP, "out": str(OUT / f"{what}-{name}.json"),
    }  # fmt: skip


def program_of(asked: dict[str, Any], out: Path) -> list[str]:
    """The command of a rank; what it is asked stands in a file."""
    file = out.with_suffix(".asked")
    file.write_text(json.dumps(asked))
    return [sys.executable, str(ROOT / "docs" / "benchmarks_training_rank.py"), str(file)]


def on_all(running: Cluster, asked: dict[str, Any], out: Path) -> None:
    """Run on all ranks of a cluster; on failure show what was said and leave."""
    done = running.run(program_of(asked, out), 900, capture_output=True, cwd=ROOT)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        sys.exit(1)


def print_rows(rate: str, found: dict[str, Any], modes: list[str], plans: dict[str, Any]) -> None:
    """One row a mode: medians over the turns."""
    columns = {
        mode: [statistics.median(turn[index][part] for turn in found["seconds"]) * 1e3 for part in range(3)]
        for index, mode in enumerate(modes)
    }
    for mode in modes:
        values, frames = found["coded_bytes"][mode]
        plan = plans.get(mode.removesuffix("+feedback"))
        iteration, communication, gradient = columns[mode]
        cells = [
            RATES[rate], mode, f"{iteration:.0f}", f"{communication:.0f}", f"{gradient:.0f}",
            f"{values / frames:.2f}" if frames else "",
            f"{plan['coded_messages']} of {plan['messages']}" if plan else "",
            f"{iteration / columns[PLAIN][0]:.2f}", f"{communication / columns[PLAIN][1]:.2f}",
            f"{iteration / columns['mpi'][0]:.2f}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
    same = {mode for mode in modes if found["digests"][mode] == found["digests"][PLAIN]}
    print(
        f"<!-- parameters after {TURNS} steps with the bits of {PLAIN}: {', '.join(sorted(same))} -->",
        flush=True,
    )


def print_losses() -> int:
    """The table of losses."""
    rate = next((rate for rate in RATES if (OUT / f"time-{rate}.json").exists()), None)
    if rate is None:
        print("there are no programs yet: python docs/benchmarks_training.py time", file=sys.stderr)
        return 2
    timed = json.loads((OUT / f"time-{rate}.json").read_text())
    programs = {codec: str(OUT / f"{codec}-{rate}.json") for codec in (PLAIN, *CODECS)}
    modes = [mode for mode in LOSS_MODES if mode in timed["digests"]]
    asked = question("loss", programs, modes, rate)
    launcher = mpi.mpiexec()
    assert launcher is not None, "benchmarks need MPI: pip install 'taccl[mpi]'"
    command = [launcher, "-n", str(NODES * EACH), *program_of(asked, Path(asked["out"]))]
    subprocess.run(command, check=True, cwd=ROOT, env=mpi.launch_environment())
    found = json.loads(Path(asked["out"]).read_text())
    print(f"\n| {' | '.join(LOSS_HEAD)} |\n{'| --- ' * len(LOSS_HEAD)}|")
    plain = [run["held_out"] for run in found["losses"][PLAIN]]
    for mode in modes:
        losses = {kind: [run[kind] for run in found["losses"][mode]] for kind in ("training", "held_out")}
        apart = [its - mine for its, mine in zip(losses["held_out"], plain, strict=True)]
        cells = [
            mode, *(f"{loss:.4f}" for kind in losses for loss in losses[kind]),
            f"{statistics.mean(losses['held_out']):.4f}", f"{statistics.stdev(losses['held_out']):.4f}",
            f"{statistics.mean(apart):+.4f}", f"{max(apart, key=abs):+.4f}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")
    same = [mode for mode in modes if found["digests"][mode] == timed["digests"][mode]]
    print(
        f"\nafter {TURNS} steps the parameters have the bits of those on the shaped links: {', '.join(same)}"
    )
    print(f"load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
