"""Programs on real device memory, several ranks on one device or on several."""

import json

import pytest
import runtime_programs as programs
from mpi_jobs import needs_mpi, taccl

from taccl.runtime import gpu
from taccl.runtime.nccl_ranks import why_no_library
from taccl.synth.msccl_xml import write_xml

pytestmark = [
    *needs_mpi,
    pytest.mark.gpu,
    pytest.mark.skipif(gpu.load() is None, reason=f"needs a GPU: {gpu.why_not()}"),
]


def run(tmp_path, name, *options, ranks=4):
    """A program: its JSON, which holds no wrong element."""
    path = tmp_path / "program.xml"
    path.write_text(write_xml(programs.ALL[name](ranks, 2)))
    line = ("run", str(path), "--device", "cuda", "-n", "2", "-w", "1", "--json", "-")
    ended = taccl(ranks, *line, *options)
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    wrong = [row["out_of_place"]["nwrong"] for row in document["results"]]
    assert wrong and not any(wrong)
    return document


@pytest.mark.parametrize(
    ("transport", "buffers"),
    [("cuda-ipc", "private"), ("cuda-ipc", "shared"), ("staged-shm", "private"), ("staged-mpi", "private")],
)
@pytest.mark.parametrize("name", ["allgather", "allreduce"])
def test_every_type_and_reduction(tmp_path, name, transport, buffers):
    """bfloat16 among them, which CuPy adds by itself."""
    sizes = ("-b", "1000", "-e", "1000000", "-f", "1000", "-d", "all")
    ops = ("-o", "all") if name == "allreduce" else ()
    document = run(tmp_path, name, "--transport", transport, "--buffers", buffers, *sizes, *ops)
    assert document["transport"] == transport


@pytest.mark.parametrize("transport", ["cuda-ipc", "staged-shm", "staged-mpi"])
def test_long_messages(tmp_path, transport):
    """Of many segments, where they are staged."""
    run(tmp_path, "allreduce", "--transport", transport, "-b", "64M", "-e", "64M", "-n", "10", "-c", "3")


@pytest.mark.parametrize("name", [name for name in programs.ALL if name not in ("allgather", "allreduce")])
def test_other_collectives(tmp_path, name):
    """Scratch memory and several threadblocks."""
    run(tmp_path, name, "-b", "4000000", "-e", "4000000", "-c", "3")


def test_auto_takes_cuda_ipc(tmp_path):
    assert run(tmp_path, "alltoall", "-b", "1M", "-e", "1M")["transport"] == "cuda-ipc"


@pytest.mark.parametrize("transport", ["cuda-ipc", "staged-mpi"])
@pytest.mark.parametrize("name", ["allgather", "alltoall", "broadcast", "allreduce"])
def test_coded_messages(tmp_path, name, transport):
    """Of one length and of others; lossless ones give the bits of a run without, lossy ones keep their promise."""
    codecs = "xw" if name == "allreduce" else "raw,xw,q8,bf16,bf16-xw,fp8"  # a ring adds up on its way
    document = run(
        tmp_path,
        name,
        "--transport",
        transport,
        "-b",
        "4M",
        "-e",
        "16M",
        "--codec",
        codecs,
        "--codec-links",
        "all",
    )
    coded = [row["out_of_place"] for row in document["results"] if row["codec"] != "raw"]
    assert all(row["coded_wire_bytes"] for row in coded)


def test_coded_sums(tmp_path):
    """Contributions and results are coded once each, lossy codecs too."""
    path = tmp_path / "direct.xml"
    line = (
        "synth",
        "-t",
        "fat-tree:1x4",
        "-c",
        "allreduce",
        "--size",
        "16MB",
        "--engine",
        "direct",
        "-o",
        str(path),
    )
    assert taccl(1, *line).code == 0
    options = (
        "--device",
        "cuda",
        "-b",
        "16M",
        "-e",
        "16M",
        "--codec-links",
        "all",
        "--codec",
        "q8,fp8,bf16,xw",
    )
    ended = taccl(4, "run", str(path), *options, "--json", "-")
    assert ended.code == 0, ended.err
    rows = [row["out_of_place"] for row in json.loads(ended.out)["results"]]
    assert not any(row["nwrong"] for row in rows) and all(row["wire_ratio"] > 1.1 for row in rows)


DEVICES = 0 if gpu.load() is None else gpu.load().cuda.runtime.getDeviceCount()
NO_NCCL = "" if gpu.load() is None else why_no_library(gpu.Cuda(gpu.load()))


@pytest.mark.skipif(DEVICES < 2, reason=f"NCCL wants a GPU for each rank, and there are {DEVICES}")
@pytest.mark.parametrize("name", sorted(programs.ALL))
def test_nccl(tmp_path, name):
    sizes = ("-b", "1000", "-e", "64M", "-f", "64000", "-n", "10", "-c", "3")
    assert run(tmp_path, name, "--transport", "nccl", *sizes, ranks=min(DEVICES, 4))["transport"] == "nccl"


@pytest.mark.skipif(DEVICES != 1, reason=f"needs ranks that share a GPU, and there are {DEVICES}")
@pytest.mark.skipif(bool(NO_NCCL), reason=f"needs NCCL: {NO_NCCL}")
def test_nccl_refuses_two_ranks_on_one_gpu(tmp_path):
    path = tmp_path / "program.xml"
    path.write_text(write_xml(programs.ALL["allgather"](2, 2)))
    ended = taccl(2, "run", str(path), "--device", "cuda", "--transport", "nccl")
    assert ended.code == 6 and "ranks 0 and 1 are on one GPU" in ended.err
