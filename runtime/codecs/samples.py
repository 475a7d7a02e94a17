"""Tensors out of files: .npy, .safetensors, or raw bytes of one type. Memory-mapped, nothing is executed."""

from __future__ import annotations

import json
import math
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from taccl.errors import Diagnostic, InvalidInput, UsageError
from taccl.runtime.codecs.codec import TILE, Array
from taccl.runtime.dtypes import DTYPES, DType

SAFETENSORS = {
    "F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "I64": "int64",
    "U8": "uint8",
}  # fmt: skip
FIELDS = "dtype, shape and data_offsets"
# More would be no header of a file of tensors.
MOST_HEADER_BYTES = 100 << 20
MOST_DIMENSIONS = 64
MAGIC = b"\x93NUMPY"
# What numpy raises for a damaged header, with what Python's own parser does, which reads it.
UNREADABLE = (ValueError, EOFError, TypeError, OverflowError, IndexError, SyntaxError, tokenize.TokenError)


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one type out of one file: (n,), whole tiles spread evenly where the file has more."""

    name: str
    dtype: DType
    values: Array
    file_bytes: int  # of all values of this type in the file


def read_samples(path: str, dtype: DType | None, limit_bytes: int) -> tuple[list[Sample], list[str]]:
    """(one sample per type, of at most `limit_bytes` each; names of tensors of other types).

    dtype: of a file that does not say. Raises InvalidInput for what is no such file, UsageError for raw ones with bytes
    left over, OSError.
    """
    if Path(path).is_fifo():  # it may never have a writer, and what comes cannot be mapped
        raise invalid(path, "C007", "a pipe; values are read from files", "write them to a file first")
    Path(path).open("rb").close()  # a wrong name is told as such
    if path.endswith(".npy"):
        arrays = {path: _npy(path)}
    elif path.endswith(".safetensors"):
        arrays = read_safetensors(path)
    elif dtype is None:
        raise invalid(
            path, "C001", "a file that is no .npy or .safetensors needs --dtype", "e.g. --dtype bfloat16"
        )
    else:
        arrays = {path: _raw(path, dtype)}
    known: dict[str, list[Array]] = {}
    others = []
    for name, array in arrays.items():
        found = DTYPES.get(array.dtype.name)
        if found is None or found.numpy != array.dtype:
            others.append(f"{name} ({array.dtype})")
        elif array.size:
            known.setdefault(found.name, []).append(array)
    return [_spread(path, DTYPES[name], found, limit_bytes) for name, found in known.items()], others


def synthetic(dtype: DType, limit_bytes: int) -> Sample:
    """Normal values, which real weights and gradients resemble; for speeds when there is no file."""
    count = max(TILE, min(limit_bytes, 16 << 20) // dtype.bytes)
    values = np.random.default_rng(0).standard_normal(count, np.float32) * np.float32(0.05)
    return Sample("normal values", dtype, values.astype(dtype.numpy), count * dtype.bytes)


def _spread(path: str, dtype: DType, arrays: list[Array], limit_bytes: int) -> Sample:
    """Up to `limit_bytes` of the arrays laid end to end, in runs of TILE values at even distances."""
    flat = [array.reshape(-1) for array in arrays]
    ends = np.cumsum([len(array) for array in flat])
    total = int(ends[-1])
    runs = max(1, limit_bytes // (TILE * dtype.bytes))
    if total <= runs * TILE:
        return Sample(Path(path).name, dtype, np.concatenate(flat), total * dtype.bytes)
    values = np.empty(runs * TILE, dtype.numpy)
    for run in range(runs):
        first = run * (total - TILE) // max(1, runs - 1)
        done = 0
        while done < TILE:
            index = int(np.searchsorted(ends, first + done, side="right"))
            inside = first + done - int(ends[index]) + len(flat[index])
            part = flat[index][inside : inside + TILE - done]
            values[run * TILE + done : run * TILE + done + len(part)] = part
            done += len(part)
    return Sample(Path(path).name, dtype, values, total * dtype.bytes)


def _npy(path: str) -> Array:
    # numpy's own words speak of pickles, which are never loaded here; of archives only the name may say that they are
    # arrays.
    refused = invalid(
        path, "C002", "this is no array of numbers in numpy's format (np.save), or its end is missing"
    )
    with Path(path).open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise refused
    try:
        # Mapped read-only; a pickle, which could run code, is refused.
        loaded: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except UNREADABLE as error:
        raise refused from error
    # In the byte order of this machine, whatever the file's is.
    return np.ascontiguousarray(loaded, loaded.dtype.newbyteorder("="))


def _raw(path: str, dtype: DType) -> Array:
    size = Path(path).stat().st_size
    if size < dtype.bytes:
        raise invalid(path, "C003", f"{size} bytes hold no value of {dtype.name}")
    if rest := size % dtype.bytes:
        raise UsageError(
            f"{path}: {size} bytes are no whole number of {dtype.name} values of {dtype.bytes} bytes, {rest} would be "
            "left over; a file that is no .npy or .safetensors holds values of the type that is asked for and nothing "
            "else"
        )
    data = np.memmap(path, np.uint8, mode="r")
    return data.view(np.ndarray).view(dtype.numpy)


def read_safetensors(path: str) -> dict[str, Array]:
    """Tensors by name. The format: u64 length, JSON {name: {dtype, shape, data_offsets}}, data."""
    size = Path(path).stat().st_size
    if size < 8:
        raise invalid(path, "C004", f"{size} bytes are no safetensors file")
    data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(size - 8, MOST_HEADER_BYTES):
        raise invalid(path, "C004", f"a safetensors header of {length} bytes in a file of {size}")
    places: dict[str, tuple[str, int, int, int]] = {}
    try:
        for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
            if name != "__metadata__":
                start, end = _whole(entry["data_offsets"])
                places[name] = str(entry["dtype"]), start, end, math.prod(_whole(entry["shape"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # The first have words for a reader, of JSON's parser or of `_whole`.
        why = error if isinstance(error, ValueError) else f"it is no object of tensors, each with {FIELDS}"
        raise invalid(path, "C004", f"the header of this safetensors file cannot be read: {why}") from error
    body = data[8 + length :]
    found = {}
    for name, (kind, start, end, values) in places.items():
        dtype = DTYPES[SAFETENSORS[kind]].numpy if kind in SAFETENSORS else np.dtype("V1")
        if not 0 <= start <= end <= len(body) or (end - start) % dtype.itemsize:
            raise invalid(path, "C004", f"tensor {name!r} lies outside of the file: bytes {start} to {end}")
        if kind in SAFETENSORS and values * dtype.itemsize != end - start:
            raise invalid(
                path, "C004", f"tensor {name!r} has {values} values of {kind} in {end - start} bytes"
            )
        # Headers have any length, so tensors may be misaligned; `_spread` copies what it takes.
        found[name] = body[start:end].view(dtype)
    return found


def _whole(numbers: Any) -> list[int]:
    """Offsets or sizes in a header. Raises ValueError for anything but whole numbers that a file may have."""
    if not isinstance(numbers, list) or len(numbers) > MOST_DIMENSIONS:
        raise ValueError("no list of offsets or sizes")
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("offsets and sizes are whole numbers from 0 to 2^63")
    return numbers


def invalid(path: str, code: str, message: str, help: str = "") -> InvalidInput:
    """The error for a file of values, to be raised."""
    return InvalidInput([Diagnostic(path, 0, 0, code, message, help)])
