"""`make bench-gpu`: programs in device memory, several ranks on one GPU, beside a copy of the same bytes on the device.

    python docs/benchmarks_gpu.py                  2 and 4 ranks, 64 MB, float32
    python docs/benchmarks_gpu.py 4 allreduce      rows of some numbers of ranks and collectives

All ranks' traffic shares the memory of one device, so the measure is one copy there of all bytes that the program moves
(each counted once; `wire_bytes`): GB/s of a program are those bytes over its time, and the share is that of the copy's
GB/s in the same minute. The aim is 50 % with CUDA IPC. Times are the slowest rank's, median of 20 runs, checked before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from taccl.runtime import gpu, mpi

RANKS = (2, 4)
COLLECTIVES = ("allgather", "allreduce")
SIZE_BYTES = 2**26
AIM = 0.5
WAYS = (
    ("cuda-ipc", "shared", "CUDA IPC, exported buffers"),
    ("cuda-ipc", "private", "CUDA IPC, private buffers"),
    ("staged-mpi", "private", "pinned memory and MPI"),
)
COPIES = 20
ENVIRONMENT = {**mpi.launch_environment(), "CUDA_VISIBLE_DEVICES": "0"}


def copy_gbs(nbytes: int) -> float:
    """GB/s of a copy of so many bytes from device memory to device memory, median."""
    cuda = gpu.Cuda(gpu.load())
    source, target = (cuda.xp.zeros(nbytes, np.uint8) for _ in range(2))
    copy = cuda.copy(gpu.address(target), gpu.address(source), nbytes, cuda.xp.cuda.get_current_stream())
    taken = []
    for _ in range(COPIES):
        cuda.synchronize()
        begin = time.perf_counter()
        copy()
        cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return nbytes / float(np.median(taken)) / 1e9


def measured(file: Path, ranks: int, transport: str, buffers: str) -> dict:
    """The document of `taccl run`."""
    line = [
        mpi.mpiexec(), "-n", str(ranks), sys.executable, "-m", "taccl", "run", str(file), "--device", "cuda",
        "--transport", transport, "--buffers", buffers, "-b", str(SIZE_BYTES), "-e", str(SIZE_BYTES),
        "--out-of-place", "--no-reference", "--json", "-",
    ]  # fmt: skip
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\nbench-gpu: {' '.join(line[3:])} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def main(arguments: list[str]) -> None:
    """Print the table."""
    if gpu.load() is None:
        print(f"bench-gpu: nothing can be measured, there is no GPU to use: {gpu.why_not()}", file=sys.stderr)
        sys.exit(6)
    name = gpu.load().cuda.runtime.getDeviceProperties(0)["name"].decode()
    numbers = [int(word) for word in arguments if word.isdigit()] or RANKS
    wanted = [word for word in arguments if word in COLLECTIVES] or COLLECTIVES
    print(f"{name}, {SIZE_BYTES // 2**20} MiB, float32; all ranks on device 0\n")
    print(
        "| ranks | collective | way | us | GB/s | copy GB/s | share |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for ranks in numbers:
            for collective in wanted:
                file = Path(folder) / f"{collective}-{ranks}.xml"
                line = [sys.executable, "-m", "taccl", "synth", "-t", f"fat-tree:1x{ranks}", "-c", collective]
                line += ["--size", str(SIZE_BYTES), "--engine", "direct", "-o", str(file)]
                subprocess.run(line, check=True, capture_output=True)
                for transport, buffers, text in WAYS:
                    (row,) = measured(file, ranks, transport, buffers)["results"]
                    time_us = row["out_of_place"]["median_time"]
                    gbs, copy = row["wire_bytes"] / time_us / 1e3, copy_gbs(row["wire_bytes"])
                    missed |= transport == "cuda-ipc" and buffers == "shared" and gbs < AIM * copy
                    cells = f"{time_us:.0f} | {gbs:.1f} | {copy:.1f} | {100 * gbs / copy:.0f} %"
                    print(f"| {ranks} | {collective} | {text} | {cells} |", flush=True)
    print(f"\nThe aim of {100 * AIM:.0f} % with exported buffers is {'missed' if missed else 'met'}.")


if __name__ == "__main__":
    main(sys.argv[1:])
