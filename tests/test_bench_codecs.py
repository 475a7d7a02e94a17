"""`taccl bench codecs`: real files in, ratios that are those of the frames, refusals with a place."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from taccl.cli import load_command
from taccl.errors import InvalidInput, UsageError
from taccl.runtime.codecs import CODECS
from taccl.runtime.codecs.measure import Measurement, errors, measure
from taccl.runtime.codecs.samples import read_samples, synthetic
from taccl.runtime.dtypes import DTYPES


def archive() -> bytes:
    """Two arrays as numpy.savez makes them, a zip."""
    whole = io.BytesIO()
    np.savez(whole, a=np.zeros(4, np.float32), b=np.ones(4, np.float32))
    return whole.getvalue()


ARCHIVE = archive()


def bench(*arguments: str, fails: type[Exception] | None = None) -> Result:
    result = CliRunner().invoke(
        load_command("bench"), ["codecs", "--repeats", "1", *arguments], catch_exceptions=fails is not None
    )
    assert (result.exception is None) == (fails is None) and isinstance(result.exception, fails or type(None))
    return result


def tensor(count: int) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(count) * 0.05).astype(np.float32)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]], padding: int = 0) -> None:
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, (kind, values) in tensors.items():
        header[name] = {
            "dtype": kind, "shape": list(values.shape), "data_offsets": [len(body), len(body) + values.nbytes]
        }  # fmt: skip
        body += values.tobytes()
    text = json.dumps(header).encode() + b" " * padding
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_table_and_document_of_a_npy(tmp_path):
    values = tensor(200_000).reshape(400, 500)
    np.save(tmp_path / "w.npy", values)
    text = bench(str(tmp_path / "w.npy"), "--limit", "1GiB").output
    assert "w.npy: 0.8 MB of float32" in text and "A copy in memory" in text
    for name in ("raw", "xw", "bf16", "q8", "fp8"):
        assert f"\n  {name} " in text
    document = json.loads(bench(str(tmp_path / "w.npy"), "--json", "--codec", "xw,q8").output)
    assert document["schema"] == "taccl/bench-codecs/v1"
    by_codec = {row["codec"]: row for row in document["results"]}
    assert set(by_codec) == {"xw", "q8"}
    expected = measure(CODECS["xw"], values.reshape(-1), 4 << 20, 1)
    assert by_codec["xw"]["wire_bytes"] == expected.wire_bytes and by_codec["xw"]["relative_error"] == 0
    assert by_codec["q8"]["ratio"] == pytest.approx(3.93, abs=0.02)
    assert 1e-3 < by_codec["q8"]["relative_error"] < 2e-2


def test_tensors_of_a_safetensors_by_type(tmp_path):
    """Misaligned data, two tensors of one type, one of a type that is left out."""
    first, second = tensor(3000).astype(ml_dtypes.bfloat16), tensor(100).astype(ml_dtypes.bfloat16)
    tensors = {
        "a": ("BF16", first), "ids": ("I64", np.arange(50)), "b": ("BF16", second), "c": ("BOOL", np.ones(3, bool)),
    }  # fmt: skip
    for padding in (0, 1, 3):
        path = tmp_path / "model.safetensors"
        write_safetensors(path, tensors, padding)
        samples, others = read_samples(str(path), None, 1 << 30)
        assert [sample.dtype.name for sample in samples] == ["bfloat16", "int64"]
        assert samples[0].values.tobytes() == first.tobytes() + second.tobytes()
        assert samples[1].values.tolist() == list(range(50)) and len(others) == 1
    assert "left out" in bench(str(path)).stderr


def test_a_limit_takes_runs_spread_over_the_file(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(1_000_000))
    (sample,), _ = read_samples(str(tmp_path / "ids.npy"), None, 4 * 65536 * 8)
    runs = sample.values.reshape(4, 65536)
    assert sample.file_bytes == 8_000_000 and (np.diff(runs, axis=1) == 1).all()
    assert runs[0, 0] == 0 and runs[-1, -1] == 999_999 and (np.diff(runs[:, 0]) > 300_000).all()
    pieces = {f"t{i}": ("F32", tensor(9_999)) for i in range(60)}
    write_safetensors(tmp_path / "x.safetensors", pieces)
    (sample,), _ = read_samples(str(tmp_path / "x.safetensors"), None, 2 * 65536 * 4)
    whole = np.concatenate([values for _, values in pieces.values()])
    assert sample.values.tobytes() == whole[:65536].tobytes() + whole[-65536:].tobytes()


def test_raw_files_and_rounding(tmp_path):
    tensor(70_000).tofile(tmp_path / "g.bin")
    document = json.loads(
        bench(
            str(tmp_path / "g.bin"), "--dtype", "float32", "--as", "bfloat16", "--codec", "xw", "--json"
        ).output
    )
    (row,) = document["results"]
    assert row["dtype"] == "bfloat16" and row["values_bytes"] == 140_000 and row["ratio"] > 1.35


def test_raw_files_of_another_type_are_refused(tmp_path):
    (tmp_path / "g.bin").write_bytes(bytes(4 * 1000 + 1))
    with pytest.raises(
        UsageError, match="4001 bytes are no whole number of float32 values of 4 bytes, 1 would be left"
    ):
        read_samples(str(tmp_path / "g.bin"), DTYPES["float32"], 1 << 20)
    (sample,), _ = read_samples(str(tmp_path / "g.bin"), DTYPES["uint8"], 1 << 20)
    assert sample.values.size == 4001


def test_without_a_file_speeds_of_normal_values():
    text = bench("--limit", "1MiB", "--codec", "xw,bf16").output
    assert "MB of bfloat16" in text and "MB of float32" in text
    assert synthetic(DTYPES["bfloat16"], 1).values.size == 65536


@pytest.mark.parametrize("name,content,message", [
    ("x.npy", b"\x93NUMPY\x01\x00", "C002"), ("x.npy", b"junk", "C002"), ("x.bin", b"abc", "C003"),
    ("x.safetensors", b"abc", "C004"), ("x.safetensors", struct.pack("<Q", 2**60) + b"{}", "C004"),
    ("x.safetensors", struct.pack("<Q", 2) + b"[]", "C004.*no object of tensors, each with dtype, shape"),
    ("x.safetensors", struct.pack("<Q", 2) + b"{,", "C004"),
    ("x.safetensors", struct.pack("<Q", 7) + b'{"a":1}', "C004.*no object of tensors, each with dtype, shape"),
    ("x.safetensors", struct.pack("<Q", 99_998) + b"[" * 99_998, "C004.*no object of tensors"),
    ("x.safetensors", struct.pack("<Q", 55) + b'{"a":{"dtype":"F32","data_offsets":[0,8],"shape":[5]}} ' + bytes(8),
     "C004.*5 values of F32 in 8 bytes"),
    ("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", 58)
     + b"{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}" + bytes(4), "C002"),
    ("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", 58)
     + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)    " + bytes(4), "C002"),
    ("x.npy", b"PK\x03\x04" + bytes(40), "C002"), ("x.npy", ARCHIVE, "C002"),
    *(("x.safetensors", struct.pack("<Q", len(header)) + header + bytes(16), "C004") for header in (
        b'{"a":{"dtype":"F32","data_offsets":[0,16],"shape":[' + b"9" * 4000 + b"," + b"9" * 4000 + b"]}}",
        b'{"a":{"dtype":"F32","data_offsets":[0,16],"shape":[-2,-2]}}',
        b'{"a":{"dtype":"F32","data_offsets":[0,16.9],"shape":[4]}}',
        b'{"a":{"dtype":"F32","data_offsets":["0","16"],"shape":[4]}}',
        b'{"a":{"dtype":"F32","data_offsets":[0,16],"shape":"4"}}',
        b'{"a":{"dtype":"F32","data_offsets":[1e400,4],"shape":[1]}}',
        b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":[Infinity]}}',
    )),
    ("x.safetensors", struct.pack("<Q", 43) + b'{"a":{"dtype":"F32","data_offsets":[0,99]}}', "C004"),
    ("x.safetensors", struct.pack("<Q", 43) + b'{"a":{"dtype":"F32","data_offsets":[-4,0]}}', "C004"),
])  # fmt: skip
def test_files_that_are_not_what_they_say_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        read_samples(str(tmp_path / name), DTYPES["float32"], 1 << 20)


@pytest.mark.parametrize("name", ["values", "values.npy", "values.safetensors"])
def test_pipes_are_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InvalidInput, match="a pipe"):
        read_samples(str(tmp_path / name), DTYPES["float32"], 1 << 20)


def test_pickles_are_not_loaded(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInput, match="C002"):
        read_samples(str(tmp_path / "x.npy"), None, 1 << 20)


def test_wrong_options_are_refused(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(10))
    np.save(tmp_path / "flags.npy", np.ones(3, bool))
    (tmp_path / "x.bin").write_bytes(b"12345678")
    assert "C001" in str(bench(str(tmp_path / "x.bin"), fails=InvalidInput).exception)
    assert "takes int64" in str(bench(str(tmp_path / "ids.npy"), "--codec", "q8", fails=UsageError).exception)
    said = str(bench(str(tmp_path / "flags.npy"), fails=InvalidInput).exception)
    assert "C005" in said and "flags.npy (bool)" in said and "float32" in said
    np.save(tmp_path / "empty.npy", np.ones(0, np.float32))
    assert "nothing is in there" in str(bench(str(tmp_path / "empty.npy"), fails=InvalidInput).exception)
    assert "unknown codec" in str(bench("--codec", "gzip", fails=UsageError).exception)
    bench(str(tmp_path / "none.npy"), fails=FileNotFoundError)


def test_the_byte_order_of_a_file_does_not_matter(tmp_path):
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    np.save(tmp_path / "big.npy", values.astype(">f4"))
    ((sample,), others) = read_samples(str(tmp_path / "big.npy"), None, 1 << 20)
    assert not others and sample.dtype.name == "float32" and np.array_equal(sample.values[:1000], values)


def test_errors_leave_out_what_is_not_finite():
    x = np.array([1.0, np.nan, 3.0, np.inf], np.float32)
    assert errors(x, np.array([1.0, 0.0, 4.0, np.inf], np.float32)) == (pytest.approx(1 / 10**0.5), 1.0)
    assert errors(x[:0], x[:0]) == (0.0, 0.0)


def test_when_coding_pays():
    row = Measurement("q8", "float32", 400, 100, 4.0, 12.0, 0.0, 0.0)
    assert row.ratio == 4 and row.pays_below_gbps(True) == 32
    assert row.pays_below_gbps(False) == pytest.approx(8 * 0.75 / (1 / 4 + 1 / 12))
    assert Measurement("raw", "float32", 400, 480, 4.0, 12.0, 0.0, 0.0).pays_below_gbps(True) == 0
