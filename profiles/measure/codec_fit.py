"""Alpha and beta of coding and decoding, and the length of frames, from trials of several chunk sizes.

Times are linear in the bytes of a chunk's values, and so are the bytes on the wire: frame + bytes / ratio. Other work
on the machine only ever adds time, while what the ranks take from each other is in every run: so the faster half of
the runs of each size counts, as with links, and goes into their robust regression.

Every rank gets a fit. The profile takes the slowest node's median rank, by the time of a chunk of 1 MB: a collective
ends with its slowest rank, so a slow host must count; but which of the ranks of one host was slow in one measurement is
luck, and the slowest of many would be the unluckiest. For decode it takes that of decoding and adding where this is the
slower of the two: the profile has one number for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.measure.fit import regress
from taccl.profiles.measure.rounding import or_none, rounded
from taccl.profiles.schema import MIN_BETA_US_PER_MB, MIN_TIME_US

Array = NDArray[np.floating[Any]]

STEPS = ("encode", "decode", "accumulate")
_COMPARED_BYTES = 10**6  # ranks are compared by the time of such a chunk


@dataclass(frozen=True, slots=True)
class CodecTimes:
    """The trials of one codec on one type. nodes: of each rank; times_us: (ranks, sizes, repeats, steps); wire_bytes:
    (ranks, sizes), of a chunk; chunk_bytes: of the sizes, at least two different ones."""

    codec: str
    dtype: str
    lossless: bool
    source: str
    nodes: tuple[int, ...]
    chunk_bytes: tuple[int, ...]
    times_us: Array
    wire_bytes: Array


@dataclass(frozen=True, slots=True)
class StepFit:
    """One step of one rank. Intervals are half widths at 95 %."""

    rank: int
    alpha_us: float
    beta_us_per_mb: float
    alpha_ci_us: float
    beta_ci_us_per_mb: float
    residual: float  # relative, root mean square over the runs that the fit kept
    samples: int


@dataclass(frozen=True, slots=True)
class CodecFit:
    """What the trials of one codec on one type say."""

    cost: CodecCost
    chunk_bytes: tuple[int, ...]
    wire_bytes: tuple[float, ...]  # of a chunk of each size, mean over the ranks
    encode: StepFit  # what the cost has
    decode: StepFit
    steps: tuple[tuple[StepFit, ...], ...]  # of each of STEPS the fits of all ranks


def fit_codec(times: CodecTimes) -> CodecFit:
    """The costs of a codec. Raises ValueError with chunks of one size only."""
    ranks, _, repeats, _ = times.times_us.shape
    half = (repeats + 1) // 2
    calm = np.sort(times.times_us, axis=2)[:, :, :half]
    sizes = np.repeat(np.array(times.chunk_bytes, float), half)
    steps = tuple(
        tuple(_fit_step(rank, sizes, calm[rank, :, :, step].reshape(-1)) for rank in range(ranks))
        for step in range(len(STEPS))
    )
    encode, *others = (_of_slowest_node(fits, times.nodes) for fits in steps)
    decode = max(others, key=_compared_us)
    wire = times.wire_bytes.mean(axis=0)
    frame, per_byte = fit_wire(times.chunk_bytes, wire)
    cost = CodecCost(
        times.codec, times.dtype, times.lossless, rounded(1 / per_byte), frame,
        or_none(encode.alpha_us, MIN_TIME_US), or_none(encode.beta_us_per_mb, MIN_BETA_US_PER_MB),
        or_none(decode.alpha_us, MIN_TIME_US), or_none(decode.beta_us_per_mb, MIN_BETA_US_PER_MB),
        times.source,
    )  # fmt: skip
    return CodecFit(cost, times.chunk_bytes, tuple(float(x) for x in wire), encode, decode, steps)


def _compared_us(fit: StepFit) -> float:
    return fit.alpha_us + fit.beta_us_per_mb * _COMPARED_BYTES / 1e6


def _of_slowest_node(fits: Sequence[StepFit], nodes: Sequence[int]) -> StepFit:
    """The slowest of the nodes' median ranks (of two the slower one)."""
    members: dict[int, list[StepFit]] = {}
    for fit in sorted(fits, key=_compared_us):
        members.setdefault(nodes[fit.rank], []).append(fit)
    return max((own[len(own) // 2] for own in members.values()), key=_compared_us)


def fit_wire(chunk_bytes: Sequence[int], wire_bytes: Array) -> tuple[int, float]:
    """(frame, bytes on the wire of a byte of values): frame + bytes * the latter, frame not below 0."""
    sizes = np.array(chunk_bytes, float)
    # Lengths are no times: none of them was disturbed, so all of them count.
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / wire_bytes[:, None]
    frame, per_byte = np.linalg.lstsq(design, np.ones_like(sizes), rcond=None)[0].tolist()
    if round(frame) > 0 and per_byte > 0:
        return round(frame), per_byte
    return 0, float(wire_bytes.sum() / sizes.sum())


def _fit_step(rank: int, sizes: Array, times_us: Array) -> StepFit:
    """Neither part below 0: what noise makes so is left out, and the other fitted alone."""
    columns = [np.ones_like(sizes), sizes / 1e6]
    fit = regress(np.stack(columns, axis=1), times_us)
    kept = [0, 1]
    if min(fit.solution) < 0:
        kept = [1] if fit.solution[0] < 0 else [0]
        fit = regress(np.stack([columns[column] for column in kept], axis=1), times_us)
    value, half = dict.fromkeys((0, 1), 0.0), dict.fromkeys((0, 1), 0.0)
    value.update(zip(kept, fit.solution, strict=True))
    half.update(zip(kept, fit.half_width, strict=True))
    return StepFit(rank, value[0], value[1], half[0], half[1], fit.residual, len(times_us))


def codec_document(fit: CodecFit) -> dict[str, Any]:
    """What `taccl profile --json` says of a codec; `decode` is what the profile has, of decoding or of adding too."""
    cost = fit.cost
    return {
        "codec": cost.codec,
        "dtype": cost.dtype,
        "lossless": cost.lossless,
        "ratio": float(cost.ratio),
        "frame_bytes": cost.frame_bytes,
        "source": cost.source,
        "encode": _step_document(fit.encode),
        "decode": _step_document(fit.decode),
        "wire_bytes": {str(size): wire for size, wire in zip(fit.chunk_bytes, fit.wire_bytes, strict=True)},
        "ranks": [
            {
                "rank": alike[0].rank,
                **{step: _step_document(one) for step, one in zip(STEPS, alike, strict=True)},
            }
            for alike in zip(*fit.steps, strict=True)
        ],
    }


def _step_document(fit: StepFit) -> dict[str, Any]:
    return {
        "rank": fit.rank,
        "alpha_us": float(rounded(fit.alpha_us)),
        "alpha_ci_us": float(rounded(fit.alpha_ci_us)),
        "beta_us_per_mb": float(rounded(fit.beta_us_per_mb)),
        "beta_ci_us_per_mb": float(rounded(fit.beta_ci_us_per_mb)),
        "residual": float(rounded(fit.residual)),
        "samples": fit.samples,
    }
