"""Programs in device memory, on a stand-in for CuPy that does nothing before it must (cupy_double)."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import runtime_programs as programs
from mpi_jobs import launch, messages, needs_mpi

from taccl.runtime import doctor, gpu, nccl_ranks
from taccl.synth.msccl_xml import write_xml

pytestmark = needs_mpi

HERE = Path(__file__).parent
WORKER = str(HERE / "run_device_worker.py")


def on_double(ranks, *arguments, **settings):
    path = os.pathsep.join([str(HERE / "cupy_double"), os.environ.get("PYTHONPATH", "")])
    ended = launch(ranks, *arguments, PYTHONPATH=path, **settings)
    assert "cupy double:" not in ended.err  # what was exported is freed, what was opened is closed
    return ended


def run(tmp_path, ranks, name, *options, **settings):
    """taccl run on devices: how it ended, and its JSON."""
    path = tmp_path / "program.xml"
    path.write_text(write_xml(programs.ALL[name](ranks, 2)))
    sizes = ("-b", "1000", "-e", "100000", "-f", "100", "-n", "1", "-w", "1")
    line = ("-m", "taccl", "run", str(path), "--device", "cuda", "-v", "--json", "-", *sizes)
    ended = on_double(ranks, *line, *options, **settings)
    return ended, json.loads(ended.out) if ended.out else None


def test_right_data():
    """Exported buffers and private ones, two nodes, pinned memory, an MPI that takes device memory."""
    ended = on_double(3, WORKER, "shared,private,mixed,staged,direct")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out) == {"cases": 5 * 16, "wrong": {}}


def test_right_data_over_pinned_shared_memory_and_nccl():
    """Each alone, NCCL beside CUDA IPC, and all three."""
    ended = on_double(3, WORKER, "pinned,nccl,near-nccl,three", CUPY_DOUBLE_DEVICES="3")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out) == {"cases": 4 * 16, "wrong": {}}


@pytest.mark.parametrize(("devices", "mps", "said"), [("1", "0", True), ("1", "1", False), ("2", "0", False)])
def test_ranks_that_take_turns_on_a_device_are_told(tmp_path, devices, mps, said):
    ended, document = run(tmp_path, 2, "allgather", CUPY_DOUBLE_DEVICES=devices, CUPY_DOUBLE_MPS=mps)
    assert ended.code == 0 and document["transport"] == "cuda-ipc"
    assert ("ranks that share a GPU take turns on it" in ended.err) is said


def test_streams_that_do_not_wait_give_wrong_data():
    """The stand-in would find a dependency that is forgotten."""
    ended = on_double(3, WORKER, "shared,staged,pinned", "handed on", CUPY_DOUBLE_DROP="wait")
    assert ended.code == 0, ended.err
    wrong = json.loads(ended.out)["wrong"]
    assert all(wrong[f"{how}: handed on"] > 100 for how in ("shared", "staged", "pinned"))


def test_nccl_in_another_order_on_each_rank_hangs():
    """As the library would: each rank sends before it receives."""
    limits = {"CUPY_DOUBLE_DEVICES": "3", "DEADLINE": "1"}
    ended = on_double(3, WORKER, "nccl-unordered", "allgather", **limits)
    assert ended.code == 86
    (said,) = messages(ended)
    assert "made no progress for 1 s" in said and "waits for a message from rank" in said


def test_auto_takes_cuda_ipc_where_devices_reach_each_other(tmp_path):
    """Two devices of two ranks each, that do not: the ranks of one share memory, and nothing else does."""
    limits = {"CUPY_DOUBLE_DEVICES": "2", "CUPY_DOUBLE_PEERS": "no"}
    ended, document = run(tmp_path, 4, "alltoall", "--buffers", "shared", **limits)
    assert ended.code == 0, ended.err
    assert document["transport"] == "cuda-ipc+staged-shm"
    assert [row["out_of_place"]["nwrong"] for row in document["results"]] == [0, 0]
    assert [device["bus_id"] for device in document["devices"]] == ["0000:10:00.0", "0000:11:00.0"] * 2
    said = messages(ended)
    assert said[0].startswith(
        "taccl: rank 0: shared cuda buffers on 0000:10:00.0, transport cuda-ipc to rank 2, staged-shm to the others "
        "(rank 1: device memory of another process cannot be opened: cudaError217)"
    )


def test_without_cuda_ipc_auto_says_why_and_takes_the_next(tmp_path):
    """Pinned shared memory, then NCCL, then an MPI that takes device memory."""
    limits = {"CUPY_DOUBLE_IPC": "no"}
    for more, transport, why in (
        ({}, "staged-shm", "device memory cannot be shared: cudaError801"),
        (
            {"CUPY_DOUBLE_REGISTER": "no", "CUPY_DOUBLE_DEVICES": "2"},
            "nccl",
            "device memory cannot be shared: cudaError801; 4096 bytes of shared memory cannot be pinned: cudaError801",
        ),
        (
            {"CUPY_DOUBLE_REGISTER": "no", "CUPY_DOUBLE_DEVICES": "2", "CUPY_DOUBLE_NCCL": "hang"},
            "mpi-cuda",  # memory of the stand-in is host memory to MPI
            "device memory cannot be shared: cudaError801; 4096 bytes of shared memory cannot be pinned: "
            "cudaError801; no nccl: NCCL gave no answer within 4 s",
        ),
    ):
        # Half of it is what NCCL has to answer in, which takes a busy machine a while.
        deadline = "8" if transport == "mpi-cuda" else "20"
        ended, document = run(tmp_path, 2, "allreduce", "--deadline", deadline, **limits, **more)
        assert ended.code == 0, ended.err
        assert document["transport"] == transport
        assert document["nccl_version"] == (22703 if transport == "nccl" else None)
        assert [row["out_of_place"]["nwrong"] for row in document["results"]] == [0, 0]
        assert f"transport {transport} to every peer ({why})" in ended.err


@pytest.mark.parametrize(
    ("transport", "limits", "why"),
    [
        (
            "cuda-ipc",
            {"CUPY_DOUBLE_IPC": "no"},
            "memory cannot be shared: device memory cannot be shared: cudaError801",
        ),
        (
            "staged-shm",
            {"CUPY_DOUBLE_REGISTER": "no"},
            "memory cannot be shared: 4096 bytes of shared memory cannot be pinned: cudaError801",
        ),
        (
            "nccl",
            {},
            "--transport nccl cannot be used: ranks 0 and 1 are on one GPU, and NCCL wants one for each rank",
        ),
    ],
)
def test_what_is_asked_for_and_does_not_work_is_an_error(tmp_path, transport, limits, why):
    ended, _ = run(tmp_path, 2, "allreduce", "--transport", transport, **limits)
    assert ended.code == 6
    assert messages(ended) == [f"taccl: {why}"]


def test_doctor_tries_pinned_memory_and_nccl(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE / "cupy_double"))
    monkeypatch.setenv("CUPY_DOUBLE_DEVICES", "2")
    pinned = doctor._pinned()
    assert (pinned.ok, pinned.detail) == (True, "two ranks exchanged device memory through it (staged-shm)")
    nccl = doctor._nccl()
    assert (nccl.ok, nccl.detail) == (True, "NCCL 2.27.3 moved device memory between two ranks")


@pytest.mark.parametrize(
    ("nccl", "why"),
    [
        (
            {"available": False},
            "CuPy finds no NCCL library (pip install nvidia-nccl-cu13, or -cu12 for CUDA 12)",
        ),
        (
            {"available": True, "get_version": lambda: 2604},
            "NCCL 2604 has no point-to-point calls; use 2.7 or later",
        ),
        ({"available": True, "get_version": lambda: 22703}, ""),
    ],
)
def test_a_library_without_what_is_needed_is_refused(nccl, why, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy_of_the_test.cuda.nccl", SimpleNamespace(**nccl))
    cupy = SimpleNamespace(__name__="cupy_of_the_test")
    assert nccl_ranks.why_no_library(gpu.Cuda(cupy)) == why
    absent = SimpleNamespace(__name__="cupy_that_is_not_there")
    assert nccl_ranks.why_no_library(gpu.Cuda(absent)).startswith("CuPy finds no NCCL library")


def test_too_little_device_memory_is_said_before_it_is_taken(tmp_path):
    ended, _ = run(tmp_path, 2, "allgather", "--transport", "cuda-ipc", CUPY_DOUBLE_BYTES=str(2**26))
    assert ended.code == 6
    said = messages(ended)[-1]
    assert "from each of 2 ranks on the device, and 67108864 are free; use a smaller -e" in said


def test_a_type_that_cupy_does_not_reduce_is_refused(tmp_path):
    ended, _ = run(tmp_path, 2, "allreduce", "-d", "bfloat16", CUPY_DOUBLE_TYPES="efd")
    assert ended.code == 6
    (said,) = messages(ended)
    assert "does not reduce bfloat16; give --accumulate float32" in said


@pytest.mark.parametrize("how", ["killed", "three-killed"])
def test_a_rank_that_dies_takes_the_job_with_it(how):
    ended = on_double(3, WORKER, how, "allgather", CUPY_DOUBLE_DEVICES="3")
    assert ended.code == 86
    (said,) = messages(ended)
    assert said.startswith("taccl: rank 2 has died (killed or crashed); ")
