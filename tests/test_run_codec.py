"""Coded messages on real ranks: every transport, a damaged frame, `taccl run --codec`."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runtime_programs as programs
from mpi_jobs import launch, messages, taccl

from taccl.commands.run_data import read_data
from taccl.commands.run_prepare import _codecs
from taccl.errors import InvalidInput, UsageError
from taccl.runtime.dtypes import DTYPES

mpi = pytest.mark.usefixtures("needs_a_launcher")
WORKER = str(Path(__file__).with_name("run_codec_worker.py"))
FAST = ("-n", "2", "-w", "1", "--deadline", "20")


@pytest.mark.mpi
@mpi
def test_every_transport_carries_frames():
    ended = launch(3, WORKER, "all")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["wrong"], found["cases"]) == (0, 3 * 5 * 5 * 2 * 2)
    assert 0 < found["wire"] < found["values"]


@pytest.mark.mpi
@mpi
def test_a_damaged_frame_ends_the_job_on_all_ranks():
    ended = launch(3, WORKER, "damage", "xw")
    assert ended.code == 1
    (said,) = messages(ended)
    assert "frame from rank 0, chunk 0, tile 0: the data are damaged" in said
    assert said.startswith("taccl: rank ") and said.endswith("; the job is ended")
    assert "Traceback" not in ended.err


@pytest.mark.mpi
@mpi
def test_run_reports_ratio_and_error(saved, tmp_path):
    values = tmp_path / "weights.npy"
    np.save(values, np.random.default_rng(0).standard_normal(100_000).astype(np.float32) * np.float32(0.05))
    ended = taccl(
        3, "run", saved(programs.ring_allgather(3, 2)), "-b", "1200K", "-e", "1200K", *FAST, "--codec-links", "all",
        "--codec", "raw,xw,bf16,q8", "--data", str(values), "--json", "-",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["codec"] == "raw,xw,bf16,q8" and document["config"]["codec_at"] == "collective"
    raw, xw, bf16, q8 = [row["out_of_place"] for row in document["results"]]
    assert [row["codec"] for row in document["results"]] == ["raw", "xw", "bf16", "q8"]
    assert all(row["nwrong"] == row["outside_bytes"] == 0 for row in (raw, xw, bf16, q8))
    assert raw["coded_wire_bytes"] == 0 and raw["wire_ratio"] == 1 and raw["max_error"] == 0
    assert xw["coded_value_bytes"] == 2 * 3 * 1228800 // 3 and xw["max_error"] == 0
    assert 1.1 < xw["wire_ratio"] < 1.3 and 1.99 < bf16["wire_ratio"] <= 2 and 3.9 < q8["wire_ratio"] < 3.95
    assert 0 < bf16["max_error"] < 2e-3 and 0 < q8["max_error"] < 2e-3
    (header,) = [line.split() for line in ended.err.splitlines() if line.startswith("#       size")]
    assert header[-8:] == ["codec", "wire", "ratio", "maxerr", "time", "speedup", "time", "speedup"]


@pytest.mark.mpi
@mpi
def test_run_sums_real_values(saved, tmp_path):
    """Lossless as without codec, bit for bit; lossy within the promise; floats are rounded to the type."""
    values = tmp_path / "weights.npy"
    np.save(values, np.random.default_rng(0).standard_normal(50_000).astype(np.float32))
    path = saved(programs.ring_allreduce(3, 2))
    common = ("-b", "60000", "-e", "60000", *FAST, "--codec-links", "all", "--data", str(values))
    ended = taccl(3, "run", path, *common, "--codec", "raw,xw", "-d", "float32,bfloat16", "-o", "sum,max")
    assert ended.code == 0, ended.err
    assert "# Out of bounds values : 0 OK" in ended.out
    refused = taccl(3, "run", path, *common, "--codec", "q8", "--device", "cuda")
    assert refused.code == 2 and "leave out --device cuda" in refused.err
    refused = taccl(3, "run", path, *common, "--codec", "q8")
    assert refused.code == 2
    (said,) = messages(refused)
    assert "--engine direct" in said and "--recode" in said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"codecs": "lz77"}, "--codec 'lz77': unknown; known: raw, xw"),
        ({"dtypes": ("float32", "bfloat16")}, "--codec q8 takes float32; not bfloat16"),
        ({"ops": ("sum", "prod")}, "products of rounded values"),
        ({"calibrate": True}, "leave out --codec"),
    ],
)
def test_what_cannot_be_coded_is_refused(more, words):
    asked = {
        "codecs": "raw,q8",
        "dtypes": ("float32",),
        "ops": (),
        "calibrate": False,
        "accumulate": "type",
    } | more
    with pytest.raises(UsageError, match=words):
        _codecs(asked, tuple(DTYPES[name] for name in asked["dtypes"]), asked["ops"])


def test_16_bit_floats_that_are_summed_in_float32_may_be_coded_as_such():
    asked = {"codecs": "q8", "calibrate": False, "accumulate": "float32"}
    assert _codecs(asked, (DTYPES["bfloat16"],), ("sum",)) == ("q8",)


def test_a_file_without_values_of_the_type_is_refused(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(10))
    settings = SimpleNamespace(dtypes=(DTYPES["int64"],))
    found = read_data({"data": str(tmp_path / "ids.npy")}, settings)
    assert found.values["int64"].tolist() == list(range(10))
    with pytest.raises(UsageError, match="nothing that can be run as float32"):
        read_data({"data": str(tmp_path / "ids.npy")}, SimpleNamespace(dtypes=(DTYPES["float32"],)))
    with pytest.raises(InvalidInput, match="No such file"):
        read_data({"data": str(tmp_path / "none.npy")}, settings)
