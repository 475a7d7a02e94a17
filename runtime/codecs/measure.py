"""What a codec does to given values: bytes, speed on one core, error."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from taccl.runtime.codecs.codec import Array, Codec, Scratch, dtype_of
from taccl.runtime.codecs.coding import decode_into, encode_into
from taccl.runtime.codecs.frame import most_bytes


@dataclass(frozen=True, slots=True)
class Measurement:
    """One codec on one sample, in whole frames, checksums included.

    Speeds: GB/s of uncompressed bytes, CPU time of one core, best of the repeats. relative_error: the L2 norm of
    the error divided by that of the values, largest_error: absolute; over finite values, 0 when lossless.
    """

    codec: str
    dtype: str
    values_bytes: int
    wire_bytes: int
    encode_gbps: float
    decode_gbps: float
    relative_error: float
    largest_error: float

    @property
    def ratio(self) -> float:
        """Uncompressed bytes for one byte on the wire."""
        return self.values_bytes / self.wire_bytes

    def pays_below_gbps(self, overlapped: bool) -> float:
        """The link rate (Gb/s) below which coding is quicker than not: of one message, which is coded, sent and
        decoded in turn; or of many, with a core of its own for each side. 0 when nothing is saved."""
        saved = 1 - 1 / self.ratio
        if saved <= 0:
            return 0.0
        if overlapped:
            return 8 * min(self.encode_gbps, self.decode_gbps)
        return 8 * saved / (1 / self.encode_gbps + 1 / self.decode_gbps)


def measure(codec: Codec, values: Array, chunk_bytes: int, repeats: int) -> Measurement:
    """Code and decode (n,) values in chunks, `repeats` times."""
    dtype = dtype_of(values)
    scratch = Scratch()
    step = max(1, chunk_bytes // dtype.bytes)
    chunks = [values[first : first + step] for first in range(0, len(values), step)]
    wires = [np.zeros(most_bytes(codec, dtype, len(chunk)), np.uint8) for chunk in chunks]
    decoded = np.zeros(len(values), values.dtype)
    parts = [decoded[first : first + step] for first in range(0, len(values), step)]
    sizes = [encode_into(codec, *pair, scratch) for pair in zip(chunks, wires, strict=True)]

    def encode() -> None:
        for chunk, wire in zip(chunks, wires, strict=True):
            encode_into(codec, chunk, wire, scratch)

    def decode() -> None:
        for wire, part in zip(wires, parts, strict=True):
            decode_into(codec, wire, part, scratch)

    encode_s, decode_s = best_s(encode, repeats), best_s(decode, repeats)
    relative, largest = (0.0, 0.0) if codec.lossless else errors(values, decoded)
    return Measurement(
        codec.name, dtype.name, values.nbytes, sum(sizes), values.nbytes / encode_s / 1e9,
        values.nbytes / decode_s / 1e9, relative, largest,
    )  # fmt: skip


def copy_gbps(nbytes: int, repeats: int) -> float:
    """GB/s at which numpy copies `nbytes` in memory on one core: what to compare speeds with."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return nbytes / best_s(lambda: np.copyto(target, source), repeats) / 1e9


def errors(values: Array, decoded: Array) -> tuple[float, float]:
    """(relative L2, largest absolute) error over the values that are finite in both."""
    # In slices: doubles of everything at once would be eight bytes a value, several times.
    squares, norms, largest = 0.0, 0.0, 0.0
    for first in range(0, len(values), 1 << 20):
        x = values[first : first + (1 << 20)].astype(np.float64)
        error = decoded[first : first + (1 << 20)].astype(np.float64)
        finite = np.isfinite(x) & np.isfinite(error)
        x, error = x[finite], error[finite]
        error -= x
        squares += float(error @ error)
        norms += float(x @ x)
        largest = max(largest, float(np.abs(error).max(initial=0.0)))
    return (float(np.sqrt(squares / norms)) if norms else 0.0), largest


def best_s(work: Callable[[], object], repeats: int) -> float:
    """The least CPU seconds of this thread for `work`."""
    best = float("inf")
    for _ in range(repeats):
        before = time.thread_time_ns()
        work()
        best = min(best, time.thread_time_ns() - before)
    return max(best, 1) / 1e9
