"""Data types and reductions, and test data whose reduction has one exact answer.

Names are numpy's; nccl-tests' spellings (float, half, double) are accepted and printed in its column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from taccl.errors import UsageError

Array = np.ndarray[Any, Any]

OPS = ("sum", "prod", "min", "max", "avg")
# A prime period, so that no chunk length puts equal data at equal places of two chunks.
PERIOD = 10007


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. All integers from -exact to exact are represented exactly."""

    name: str
    nccl_name: str
    numpy: np.dtype[Any]
    exact: int
    signed: bool
    integer: bool

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return int(self.numpy.itemsize)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("float32", "float", np.dtype(np.float32), 2**24, True, False),
        DType("float64", "double", np.dtype(np.float64), 2**53, True, False),
        DType("float16", "half", np.dtype(np.float16), 2**11, True, False),
        DType("bfloat16", "bfloat16", np.dtype(ml_dtypes.bfloat16), 2**8, True, False),
        DType("int32", "int32", np.dtype(np.int32), 2**31 - 1, True, True),
        DType("int64", "int64", np.dtype(np.int64), 2**53, True, True),
        DType("uint8", "uint8", np.dtype(np.uint8), 255, False, True),
    )
}
ALIASES = {dtype.nccl_name: dtype.name for dtype in DTYPES.values()}

# How two operands combine. avg adds, and divides once at the end (NCCL's order for integers).
UFUNCS = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum", "avg": "add"}


def select_dtypes(text: str) -> list[DType]:
    """The types of `-d`, each once: one name, several with commas, or all. Raises UsageError for an unknown one."""
    if text == "all":
        return list(DTYPES.values())
    names = [ALIASES.get(name, name) for name in text.split(",")]
    for name in names:
        if name not in DTYPES:
            raise UsageError(f"unknown data type {name!r}; known: {', '.join(DTYPES)}, all")
    return [DTYPES[name] for name in dict.fromkeys(names)]


def select_ops(text: str) -> list[str]:
    """The reductions of `-o`, each once: one name, several with commas, or all. Raises UsageError for an unknown."""
    names = list(OPS) if text == "all" else text.split(",")
    for name in names:
        if name not in OPS:
            raise UsageError(f"unknown reduction {name!r}; known: {', '.join(OPS)}, all")
    return list(dict.fromkeys(names))


def combiner(op: str, xp: Any = np) -> Callable[..., object]:
    """What reduces two arrays into a third, `out`, which may be one of them."""
    ufunc: Callable[..., object] = getattr(xp, UFUNCS[op])
    return ufunc


def inside_type(dtype: DType, op: str | None, accumulate: str) -> DType:
    """The type in which a program moves and reduces. accumulate: "type", or "float32" for 16-bit floats."""
    short = dtype.bytes == 2 and not dtype.integer
    return DTYPES["float32"] if op is not None and short and accumulate == "float32" else dtype


def inside_bytes(size_bytes: int, dtype: DType, op: str | None, accumulate: str) -> int:
    """What values of so many bytes take in the type in which a program moves them."""
    return size_bytes * inside_type(dtype, op, accumulate).bytes // dtype.bytes


def divide(array: Any, ranks: int) -> None:
    """Divide in place, as the last step of avg. Integers are truncated towards zero, as in C and NCCL."""
    if array.dtype.kind not in "iu":
        array /= array.dtype.type(ranks)
        return
    if ranks > np.iinfo(array.dtype).max:  # which no sum of that type is
        array[...] = 0
        return
    if array.dtype.kind == "i":
        # Towards zero, where // goes down; a negative sum plus that stays within the type.
        array[array < 0] += array.dtype.type(ranks - 1)
    array //= array.dtype.type(ranks)


def table(dtype: DType, op: str | None, rank: int, ranks: int) -> Array:
    """(PERIOD,) values of `dtype`: element x of a rank's input is table[x % PERIOD].

    op None: data that is only moved, spread over the exact range so that misplaced data shows. Otherwise
    small integers (sum, avg: at most exact/ranks in size, so every partial sum is exact; prod: signed ones,
    and twos on at most six ranks; min, max: any), so the result does not depend on the order of reduction.
    """
    x = np.arange(PERIOD, dtype=np.int64)
    if op is None:
        span = min(dtype.exact, 2**31 - 1)
        values = ((x * 2654435761 + rank * 40503 * 65537 + 12345) >> 7) % (span + 1)
        if dtype.signed:
            values = np.where((x + rank) % 2 == 0, values, -values)
    elif op in ("sum", "avg"):
        values = _sum_values(dtype, x, rank, ranks)
    elif op == "prod":
        spread = -(-ranks // 6)
        values = np.where((x + rank) % spread == 0, 2, 1) if spread > 1 else 1 + (x + rank) % 2
        if dtype.signed:
            values = np.where((x * 3 + rank) % 5 == 0, -values, values)
    else:
        values = (x * 31 + rank * 17) % 127 - (63 if dtype.signed else 0)
    typed: Array = values.astype(dtype.numpy)
    return typed


def _sum_values(dtype: DType, x: Array, rank: int, ranks: int) -> Array:
    per_rank = min(dtype.exact // ranks, 1000)
    if per_rank < 1:  # more ranks than the type can count: ones on some ranks, zeros on the others
        spread = -(-ranks // dtype.exact)
        ones: Array = ((x + rank) % spread == 0).astype(np.int64)
        return ones
    values = (x * 7 + rank * 13) % (per_rank + 1)
    signed: Array = np.where((x + rank) % 3 == 0, -values, values) if dtype.signed else values
    return signed


def reduce_exactly(dtype: DType, op: str, operands: Iterable[Array]) -> Array:
    """The reduction of equally long arrays in the type's own arithmetic, exact for `table`'s data."""
    ufunc = getattr(np, UFUNCS[op])
    total: Array | None = None
    count = 0
    for operand in operands:
        total = operand.copy() if total is None else ufunc(total, operand).astype(dtype.numpy)
        count += 1
    if total is None:
        raise ValueError("nothing to reduce")
    if op == "avg":
        divide(total, count)
    return total
