"""Programs in device memory, on a stand-in for CuPy that does nothing before it must (cupy_double)."""

import json
import os
from pathlib import Path

import runtime_programs as programs
from mpi_jobs import launch, messages, needs_mpi

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
    assert json.loads(ended.out) == {"cases": 5 * 15, "wrong": {}}


def test_streams_that_do_not_wait_give_wrong_data():
    """The stand-in would find a dependency that is forgotten."""
    ended = on_double(3, WORKER, "shared,staged", "handed on", CUPY_DOUBLE_DROP="wait")
    assert ended.code == 0, ended.err
    wrong = json.loads(ended.out)["wrong"]
    assert wrong["shared: handed on"] > 100 and wrong["staged: handed on"] > 100


def test_auto_takes_cuda_ipc_where_devices_reach_each_other(tmp_path):
    """Two devices of two ranks each, that do not: the ranks of one share memory, and nothing else does."""
    limits = {"CUPY_DOUBLE_DEVICES": "2", "CUPY_DOUBLE_PEERS": "no"}
    ended, document = run(tmp_path, 4, "alltoall", "--buffers", "shared", **limits)
    assert ended.code == 0, ended.err
    assert document["transport"] == "cuda-ipc+mpi-cuda"  # memory of the stand-in is host memory to MPI
    assert [row["out_of_place"]["nwrong"] for row in document["results"]] == [0, 0]
    assert [device["bus_id"] for device in document["devices"]] == ["0000:10:00.0", "0000:11:00.0"] * 2
    said = messages(ended)
    assert said[0].startswith(
        "taccl: rank 0: shared cuda buffers on 0000:10:00.0, transport cuda-ipc to rank 2, mpi-cuda to the others "
        "(rank 1: device memory of another process cannot be opened: cudaError217)"
    )


def test_without_cuda_ipc_auto_says_why_and_takes_the_next(tmp_path):
    ended, document = run(tmp_path, 2, "allreduce", CUPY_DOUBLE_IPC="no")
    assert ended.code == 0, ended.err
    assert document["transport"] == "mpi-cuda"
    assert [row["out_of_place"]["nwrong"] for row in document["results"]] == [0, 0]
    assert "transport mpi-cuda to every peer (device memory cannot be shared: cudaError801)" in ended.err
    ended, _ = run(tmp_path, 2, "allreduce", "--transport", "cuda-ipc", CUPY_DOUBLE_IPC="no")
    assert ended.code == 6
    assert messages(ended) == ["taccl: memory cannot be shared: device memory cannot be shared: cudaError801"]


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


def test_a_rank_that_dies_takes_the_job_with_it():
    ended = on_double(3, WORKER, "killed", "allgather")
    assert ended.code == 86
    (said,) = messages(ended)
    assert said.startswith("taccl: rank 2 has died (killed or crashed); ")
