"""`make bench-gpu`: programs in device memory, several ranks on one GPU, beside a copy of the same bytes on the device.

    python docs/benchmarks_gpu.py                  2 and 4 ranks, 64 MB, float32
    python docs/benchmarks_gpu.py 4 allreduce      rows of some numbers of ranks and collectives
    python docs/benchmarks_gpu.py codecs           only what codecs take there

All ranks' traffic shares the memory of one device, so the measure is one copy there of all bytes that the program's
messages have (`wire_bytes`): GB/s of a program are those bytes over its time, and the share is that of the copy's GB/s
in the same minute. The aim is 50 % with CUDA IPC. Times are the slowest rank's, median of 20 runs, in place, checked
before.

Processes take turns on a GPU, about 0.15 ms each on an H100, unless CUDA's MPS lets them work at once. Where its
daemon is installed and none runs, one is started, and tables of programs are printed without it and with it.

Codecs: GB/s of values for frames of one chunk, closed and checked as in a collective, beside a copy of the values, and
nvCOMP's ANS where it is installed (in frames too, but with calls that wait for the device); and an allreduce of 64 MB
whose messages are all coded, beside the same program uncoded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime import gpu, mpi
from taccl.runtime.codecs import CODECS, most_bytes, nvcomp
from taccl.runtime.codecs.device import make_scratch
from taccl.runtime.device_frames import DeviceFrames
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.frames import frame_sizes
from taccl.runtime.plan import Frame, Operation, Plan

RANKS = (2, 4)
COLLECTIVES = ("allgather", "allreduce")
SIZE_BYTES = 2**26
AIM = 0.5
WAYS = (
    ("cuda-ipc", "shared", "CUDA IPC, exported buffers"),
    ("cuda-ipc", "private", "CUDA IPC, private buffers"),
    ("staged-shm", "private", "pinned shared memory"),
    ("staged-mpi", "private", "pinned memory and MPI"),
)
COPIES = 20
CODED = ("q8", "fp8", "bf16", "xw", "bf16-xw")
CHUNK_BYTES = (2**20, 2**24, 2**26)
IN_COLLECTIVES = ("raw", "q8", "bf16", "xw")
MPS = "nvidia-cuda-mps-control"
MPS_PLACES = ("/usr/bin", "/usr/local/nvidia/bin")


def copy_gbs(nbytes: int) -> float:
    """GB/s of a copy of so many bytes from device memory to device memory, median."""
    cuda = gpu.Cuda(gpu.load())
    source, target = (cuda.xp.zeros(nbytes, np.uint8) for _ in range(2))
    copy = cuda.copy(gpu.address(target), gpu.address(source), nbytes, cuda.xp.cuda.get_current_stream())
    return gbs(cuda, nbytes, copy)


def gbs(cuda: gpu.Cuda, nbytes: int, work: Callable[[], object]) -> float:
    """GB/s of work on so many bytes on the current stream, median."""
    taken = []
    for turn in range(-1, COPIES):
        cuda.synchronize()
        begin = time.perf_counter()
        work()
        cuda.synchronize()
        if turn >= 0:
            taken.append(time.perf_counter() - begin)
    return nbytes / float(np.median(taken)) / 1e9


def codec_gbs(name: str, nbytes: int) -> tuple[float, float, float, float]:
    """Of a chunk of so many bytes of normal float32: its ratio, GB/s of coding, decoding and adding."""
    cuda, codec, dtype, count = gpu.Cuda(gpu.load()), CODECS[name], DTYPES["float32"], nbytes // 4
    frames, area, chunk = (Frame(0, 0, 0, 0),), ("f", 0, 1), ("i", 0, 1)

    def operation(kind: str, dst: tuple[str, int, int], src: tuple[str, int, int] | None) -> Operation:
        return Operation(kind, dst, src, None, -1, 0, -1, 0, 0, (), (), frames, None, (0,))

    plan = Plan(
        0,
        (
            operation("encode", area, chunk),
            operation("decode", chunk, None),
            operation("accumulate", chunk, chunk),
        ),
        0,
        slots=1,
    )
    sizes = frame_sizes(codec, dtype, count)
    values = cuda.xp.empty(count, np.float32)
    cuda.upload(values, (0.05 * np.random.default_rng(0).standard_normal(count)).astype(np.float32))
    memory = DeviceFrames(cuda, plan, sizes, dtype, count, cuda.xp.empty(sizes.stride, np.uint8))
    found = [
        gbs(cuda, nbytes, memory.work(number, op, lambda _: values, cuda.xp.add))
        for number, op in enumerate(plan.operations)
    ]
    memory.check()
    return nbytes / memory.used(area), found[0], found[1], found[2]


def nvcomp_gbs(nbytes: int) -> tuple[float, float, float] | None:
    """Of the same chunk by nvCOMP's ANS: its ratio, GB/s of coding and decoding; None without nvCOMP."""
    try:
        library = nvcomp.load()
    except EnvironmentProblem:
        return None
    cuda, dtype, count = gpu.Cuda(gpu.load()), DTYPES["float32"], nbytes // 4
    values = cuda.xp.empty(nbytes, np.uint8)
    cuda.upload(
        values, (0.05 * np.random.default_rng(0).standard_normal(count)).astype(np.float32).view(np.uint8)
    )
    wire = cuda.xp.empty(most_bytes(nvcomp.CODEC, dtype, count), np.uint8)
    scratch = make_scratch(cuda.xp, count)

    def code() -> int:
        return nvcomp.encode_with_nvcomp(library, dtype, values, wire, scratch)

    used = code()
    speeds = (
        gbs(cuda, nbytes, code),
        gbs(
            cuda,
            nbytes,
            lambda: nvcomp.decode_with_nvcomp(library, dtype, wire[:used], values, scratch),
        ),
    )
    return nbytes / used, *speeds


def codecs() -> None:
    """Print what codecs take by themselves, and in an allreduce of 4 ranks."""
    print("\n| codec | chunk | ratio | code GB/s | decode GB/s | add GB/s | copy GB/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for nbytes in CHUNK_BYTES:
        copy = copy_gbs(nbytes)
        for name in CODED:
            ratio, *speeds = codec_gbs(name, nbytes)
            cells = " | ".join(f"{speed:.1f}" for speed in (*speeds, copy))
            print(f"| {name} | {nbytes // 2**20} MiB | {ratio:.2f} | {cells} |", flush=True)
        if found := nvcomp_gbs(nbytes):
            cells = f"{found[0]:.2f} | {found[1]:.1f} | {found[2]:.1f} | - | {copy:.1f}"
            print(f"| nvcomp-ans | {nbytes // 2**20} MiB | {cells} |", flush=True)
    print("\n| 4 ranks, allreduce | way | ratio | us | uncoded us |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        file = made(Path(folder), "allreduce", 4)
        options = ("--codec", ",".join(IN_COLLECTIVES), "--codec-links", "all")
        for transport, buffers, text in WAYS:
            rows = measured(file, 4, transport, buffers, *options)["results"]
            times = [row["in_place"]["median_time"] for row in rows]
            for row, time_us in zip(rows[1:], times[1:], strict=True):
                ratio = row["in_place"]["wire_ratio"]
                print(
                    f"| {row['codec']} | {text} | {ratio:.2f} | {time_us:.0f} | {times[0]:.0f} |", flush=True
                )


def made(folder: Path, collective: str, ranks: int) -> Path:
    """The file of a program whose ranks send each other what they need."""
    file = folder / f"{collective}-{ranks}.xml"
    line = [sys.executable, "-m", "taccl", "synth", "-t", f"fat-tree:1x{ranks}", "-c", collective]
    line += ["--size", str(SIZE_BYTES), "--engine", "direct", "-o", str(file)]
    subprocess.run(line, check=True, capture_output=True)
    return file


def measured(file: Path, ranks: int, transport: str, buffers: str, *options: str) -> dict:
    """The document of `taccl run`."""
    line = [
        mpi.mpiexec(), "-n", str(ranks), sys.executable, "-m", "taccl", "run", str(file), "--device", "cuda",
        "--transport", transport, "--buffers", buffers, "-b", str(SIZE_BYTES), "-e", str(SIZE_BYTES),
        "--in-place", "--no-reference", "--json", "-", *options,
    ]  # fmt: skip
    environment = {**mpi.launch_environment(), "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\nbench-gpu: {' '.join(line[3:])} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


@contextlib.contextmanager
def mps(daemon: str) -> Iterator[None]:
    """Ranks that are started within work on the GPU at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        places = {f"CUDA_MPS_{name}_DIRECTORY": folder for name in ("PIPE", "LOG")}
        os.environ.update(places)
        subprocess.run([daemon, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([daemon], input="quit\n", text=True, check=False)
            for name in places:
                del os.environ[name]


def programs(numbers: list[int], wanted: list[str]) -> None:
    """Print the table of programs."""
    print(
        "| ranks | collective | way | us | GB/s | copy GB/s | share |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for ranks in numbers:
            for collective in wanted:
                file = made(Path(folder), collective, ranks)
                for transport, buffers, text in WAYS:
                    (row,) = measured(file, ranks, transport, buffers)["results"]
                    time_us = row["in_place"]["median_time"]
                    gbs, copy = row["wire_bytes"] / time_us / 1e3, copy_gbs(row["wire_bytes"])
                    missed |= transport == "cuda-ipc" and buffers == "shared" and gbs < AIM * copy
                    cells = f"{time_us:.0f} | {gbs:.1f} | {copy:.1f} | {100 * gbs / copy:.0f} %"
                    print(f"| {ranks} | {collective} | {text} | {cells} |", flush=True)
    print(f"\nThe aim of {100 * AIM:.0f} % with exported buffers is {'missed' if missed else 'met'}.")


def main(arguments: list[str]) -> None:
    """Print the tables."""
    if gpu.load() is None:
        print(f"bench-gpu: nothing can be measured, there is no GPU to use: {gpu.why_not()}", file=sys.stderr)
        sys.exit(6)
    name = gpu.load().cuda.runtime.getDeviceProperties(0)["name"].decode()
    numbers = [int(word) for word in arguments if word.isdigit()] or list(RANKS)
    wanted = [word for word in arguments if word in COLLECTIVES] or list(COLLECTIVES)
    alternates = gpu.Cuda(gpu.load()).alternates()
    shared = "take turns on it" if alternates else "share it by MPS"
    print(f"{name}, {SIZE_BYTES // 2**20} MiB, float32; all ranks on device 0 {shared}\n")
    daemon = shutil.which(MPS, path=os.pathsep.join([os.environ.get("PATH", ""), *MPS_PLACES]))
    if arguments != ["codecs"]:
        programs(numbers, wanted)
    if alternates and daemon is not None and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        with mps(daemon):
            subprocess.run([sys.executable, __file__, *arguments], check=True)
    elif not arguments or arguments == ["codecs"]:
        codecs()


if __name__ == "__main__":
    main(sys.argv[1:])
