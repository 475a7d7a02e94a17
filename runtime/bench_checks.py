"""What runs are compared with: exact test data, the promise of a codec, the same run without codec."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from taccl.runtime import check, check_values
from taccl.runtime.bench_settings import Settings
from taccl.runtime.bind import Bound, Buffers, Compiled
from taccl.runtime.codecs import Codec
from taccl.runtime.codecs.codec import EXACT
from taccl.runtime.dtypes import DType
from taccl.runtime.job import Job
from taccl.runtime.layout import Layout

Compare = Callable[[], check.Finding]


@dataclass(frozen=True, slots=True)
class Judged:
    """fill: puts data into the buffers. compare: judges a run; uncoded: one without codec on the same data."""

    fill: Callable[[], object]
    compare: Compare
    uncoded: Compare


def judge(
    job: Job,
    guarded: check.Guarded,
    compiled: Compiled,
    shape: Layout,
    dtype: DType,
    inside: DType,
    op: str | None,
    settings: Settings,
    codec: Codec | None,
    source: check_values.Source | None,
) -> Judged:
    """How a mode's runs are filled and judged. source: real values; None: test data, whose sums are exact."""
    collective, rank, inplace = compiled.collective, job.rank, compiled.inplace
    fill = functools.partial(check.fill, guarded.buffers, dtype, op, rank, job.ranks)
    exactly = functools.partial(check.inspect, guarded, collective, shape, rank, dtype, op, inplace)
    if source is None and (codec is None or codec.lossless):
        return Judged(fill, exactly, exactly)
    values = source or check_values.table_values(dtype, op, job.ranks)
    once = settings.codec_at == "collective" and not settings.recode
    lossy = codec is not None and not codec.lossless

    def within(promised: bool) -> Compare:
        promise = codec.promise if codec is not None and promised else EXACT
        codings = compiled.plans[rank].codings if promised else 0
        return functools.partial(
            check_values.inspect_values, guarded, collective, shape, rank, dtype, op, inplace, values,
            check_values.Tolerance(promise, codings, once, inside),
        )  # fmt: skip

    if source is None:
        return Judged(fill, within(lossy), exactly)
    fill_values = functools.partial(check_values.fill_values, guarded.buffers, source, rank)
    return Judged(fill_values, within(lossy), within(False))


def differs_uncoded(
    job: Job, bound: Bound, plain: Bound, host: Buffers, cuda: Any, fill: Callable[[], object]
) -> int:
    """Elements of all ranks' outputs whose bits differ from those of a run without codec: sums are rounded alike."""
    coded: Any = None
    for one in (bound, plain):
        fill()
        _to_device(cuda, host, one)
        job.barrier()
        job.run(one)
        _to_host(cuda, host, one)
        coded = host.output.copy() if coded is None else coded
    with job.waiting("it waits for the other ranks to free what the run without codec needed"):
        plain.close()
        plain.transport.close()
    differ = check_values.bits_differ(host.output, coded)
    return int(job.reduce(np.array([differ], np.int64), "sum")[0])


def check_results(
    job: Job,
    bound: Bound,
    host: Buffers,
    cuda: Any,
    fill: Callable[[], object],
    compare: Callable[[], check.Finding],
    checks: int,
) -> tuple[int | None, int, float, float]:
    """(wrong elements, bytes written outside, largest error, largest exact value) over all ranks and checks."""
    sums, largest = np.zeros(2, np.int64), np.array([0.0, -1.0])
    for _ in range(max(checks, 1)):  # without checks too, because timed runs want defined data
        filled(host, cuda, bound, fill)
        if not checks:
            return None, 0, 0.0, -1.0
        job.barrier()
        job.run(bound)
        _to_host(cuda, host, bound)
        finding = compare()
        sums += (finding.wrong, finding.outside)
        largest = np.maximum(largest, (finding.max_error, finding.largest))
    total = job.reduce(sums, "sum")
    error, value = job.reduce(largest, "max").tolist()
    return int(total[0]), int(total[1]), error, value


def filled(host: Buffers, cuda: Any, bound: Bound, fill: Callable[[], object]) -> None:
    """Put data where a run finds them."""
    fill()
    _to_device(cuda, host, bound)


def _to_device(cuda: Any, host: Buffers, bound: Bound) -> None:
    if cuda is not None:
        cuda.upload(bound.user.output, host.output)
        cuda.upload(bound.user.input, host.input)


def _to_host(cuda: Any, host: Buffers, bound: Bound) -> None:
    if cuda is not None:
        cuda.download(host.input, bound.user.input)
        cuda.download(host.output, bound.user.output)
