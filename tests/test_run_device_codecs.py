"""Coded programs in device memory, on a stand-in for CuPy that does nothing before it must (cupy_double)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runtime_programs as programs
from mpi_jobs import launch, messages, needs_mpi

pytestmark = needs_mpi

HERE = Path(__file__).parent
WORKER = str(HERE / "run_device_codec_worker.py")


@pytest.fixture
def on_double(host_kernels):
    def run(*arguments, **settings):
        path = os.pathsep.join([str(HERE / "cupy_double"), os.environ.get("PYTHONPATH", "")])
        ended = launch(4, *arguments, PYTHONPATH=path, CUPY_DOUBLE_KERNELS=str(host_kernels), **settings)
        assert ended.code or "cupy double:" not in ended.err
        return ended

    return run


def test_the_same_results_and_frames_as_on_the_host(on_double):
    """Every device transport, two nodes, frames of one length and others, sums, error feedback."""
    ended = on_double(WORKER, "shared,mixed,staged,direct,pinned,nccl", CUPY_DOUBLE_DEVICES="4")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out) == {"cases": 6 * 2 + 4 * 4, "wrong": []}


def test_streams_that_do_not_wait_are_found_out(on_double):
    """Frames that are not there yet are refused, or values differ."""
    ended = on_double(WORKER, "staged", "allgather", CUPY_DOUBLE_DROP="wait")
    assert ended.code == 1 or json.loads(ended.out)["wrong"]


def test_a_damaged_frame_ends_the_job_and_is_named(on_double):
    ended = on_double(WORKER, "staged", "damaged")
    assert ended.code == 1
    (said,) = messages(ended)
    assert "frame from rank 0, chunk 0, tile 0: the data are damaged, their checksum differs" in said


def test_run_reports_ratio_and_error(on_double, saved, tmp_path):
    values = tmp_path / "weights.npy"
    np.save(values, np.random.default_rng(0).standard_normal(50_000).astype(np.float32) * np.float32(0.05))
    line = (
        "-m",
        "taccl",
        "run",
        saved(programs.ring_allgather(4, 2)),
        "--device",
        "cuda",
        "--codec-links",
        "all",
    )
    size = ("-b", "64K", "-e", "64K", "-n", "1", "-w", "0", "--data", str(values), "--json", "-")
    ended = on_double(*line, *size, "--codec", "raw,xw,q8", "--no-reference")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["transport"] == "cuda-ipc"
    raw, xw, q8 = [row["out_of_place"] for row in document["results"]]
    assert all(row["nwrong"] == row["outside_bytes"] == 0 for row in (raw, xw, q8))
    assert raw["wire_ratio"] == 1 and xw["max_error"] == 0 < q8["max_error"] < 2e-3
    assert 1.1 < xw["wire_ratio"] < 1.3 and 3.7 < q8["wire_ratio"] < 3.95


@pytest.mark.parametrize(
    ("what", "words", "limits"),
    [
        ("arrays", "", {}),
        (
            "arrays",
            "",
            {"CUPY_DOUBLE_IPC": "no", "CUPY_DOUBLE_REGISTER": "no", "CUPY_DOUBLE_DEVICES": "4"},
        ),  # NCCL
        ("numpy", "rank 2: the arrays of other ranks are on a device, and those of this one are not", {}),
    ],
)
def test_a_collective_on_arrays_of_cupy(on_double, tmp_path, what, words, limits):
    """The same bits as on arrays of numpy, and the same owed."""
    path = tmp_path / "allreduce.xml"
    what_to_make = ("-t", "fat-tree:1x4", "-c", "allreduce", "--size", "10KB", "--engine", "direct")
    line = ("-m", "taccl", "synth", *what_to_make)
    subprocess.run([sys.executable, *line, "-o", str(path)], check=True, capture_output=True)
    ended = on_double(str(HERE / "run_device_collective_worker.py"), str(path), what, **limits)
    if not words:
        assert ended.code == 0, ended.err
        assert json.loads(ended.out) == {"wrong": 0}
    else:
        assert ended.code and words in ended.err
