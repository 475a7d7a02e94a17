"""Alpha, beta and occupancy of one link from timed trials, robustly.

The method of TACCL (Shah et al., NSDI 2023, section 4: n chunks one after another against all at once),
extended by messages posted together, which show the part of alpha that blocks the next message:

    T_seq  = n (alpha + beta s)                       n chunks one after another
    T_pipe = alpha + n beta s + (n - 1) occupancy     n messages posted together
    T_all  = alpha + n beta s                         one message of n chunks

Each round trip also holds the tiny reply that ends it. Clocks of two hosts cannot tell the ways apart, so a
reply is taken to cost one alpha, like any tiny message, and is part of the model instead of being subtracted
beforehand: the noise of one ping-pong would go into every point. All times are linear in (alpha, beta,
occupancy), so one regression takes every trial at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from taccl.profiles.measure.probe import Trial

# From this size on a message may pay, or gain, a constant of its own: the handshake of a rendezvous
# protocol, the burst that a token bucket lets through. It is fitted beside alpha, never mixed into it.
LARGE_BYTES = 16384
_TUKEY = 4.685  # bisquare constant: 95 % efficient under normal noise
_MAD = 1.4826  # median absolute deviation to standard deviation
_EXACT = 1e-9  # relative residuals below this are rounding


@dataclass(frozen=True, slots=True)
class Point:
    """One trial and its time, replies included."""

    trial: Trial
    time_us: float


@dataclass(frozen=True, slots=True)
class LinkFit:
    """What the trials of a link say. Intervals are half widths at 95 %."""

    alpha_us: float
    beta_us_per_mb: float
    occupancy_us: float
    offset_us: float  # constant of messages of LARGE_BYTES and more, beyond alpha; below 0 for a token bucket
    samples: int
    residual: float  # relative, root mean square over the trials that the fit kept
    alpha_ci_us: float
    beta_ci_us_per_mb: float


def fit_link(points: Sequence[Point], samples: int) -> LinkFit:
    """Weighted least squares on relative errors with Tukey's bisquare weights (iterated to rest).

    points: trials of at least two message sizes. samples: how many timings the points stand for.
    Raises ValueError when the points cannot tell alpha from beta.
    """
    times = np.array([max(point.time_us, 1e-3) for point in points])
    design, names = _design(points)
    relative = design / times[:, None]  # minimise relative errors: every size has an equal say
    if np.linalg.matrix_rank(relative) < len(names):
        raise ValueError("the trials of a link need at least two message sizes")
    # Scale the columns, so that us and us/MB do not upset the solver.
    norms = np.linalg.norm(relative, axis=0)
    scaled = relative / norms
    weights = np.ones(len(points))
    solution: NDArray[np.floating[Any]] = _start(scaled)
    for _ in range(50):
        residuals = 1 - scaled @ solution
        scale = _MAD * float(np.median(np.abs(residuals)))
        if scale < _EXACT:
            weights = (np.abs(residuals) < 1e3 * _EXACT).astype(float)
        else:
            inside = np.clip(np.abs(residuals) / (_TUKEY * scale), 0, 1)
            weights = (1 - inside**2) ** 2
        root = np.sqrt(weights)
        if np.linalg.matrix_rank(scaled * root[:, None]) < len(names):
            weights, root = np.ones(len(points)), np.ones(len(points))
        updated = np.linalg.lstsq(scaled * root[:, None], root, rcond=None)[0]
        if np.allclose(updated, solution, rtol=1e-9, atol=0):
            solution = updated
            break
        solution = updated
    residuals = 1 - scaled @ solution
    kept = float(weights.sum())
    freedom = max(1.0, kept - len(names))
    variance = float((weights * residuals**2).sum()) / freedom
    covariance = variance * np.linalg.pinv((scaled * weights[:, None]).T @ scaled)
    half = _student95(freedom) * np.sqrt(np.maximum(np.diag(covariance), 0)) / norms
    value = dict(zip(names, solution / norms, strict=True))
    width = dict(zip(names, half, strict=True))
    alpha = max(0.0, float(value["alpha"]))
    beta = float(value["beta"]) * 1e6
    if beta <= 0:  # noise ate the slope: the largest message bounds it
        size, time = max((p.trial.acks * p.trial.messages * p.trial.bytes, p.time_us) for p in points)
        beta = max(time, 1e-3) / size * 1e6
    return LinkFit(
        alpha_us=alpha,
        beta_us_per_mb=beta,
        occupancy_us=min(alpha, max(0.0, float(value.get("occupancy", alpha)))),
        offset_us=float(value.get("offset", 0.0)),
        samples=samples,
        residual=float(np.sqrt((weights * residuals**2).sum() / max(kept, 1e-12))),
        alpha_ci_us=float(width["alpha"]),
        beta_ci_us_per_mb=float(width["beta"]) * 1e6,
    )


def _design(points: Sequence[Point]) -> tuple[NDArray[np.float64], list[str]]:
    """The rows of the formulas above, replies included; a column that no trial shows is left out."""
    rows = []
    for point in points:
        trial = point.trial
        large = trial.bytes >= LARGE_BYTES
        moved = trial.acks * trial.messages * trial.bytes
        rows.append([2 * trial.acks, moved, trial.acks * (trial.messages - 1), trial.acks if large else 0])
    design = np.array(rows, dtype=float)
    names = ["alpha", "beta", "occupancy", "offset"]
    large_sizes = {p.trial.bytes for p in points if p.trial.bytes >= LARGE_BYTES}
    small = any(p.trial.bytes < LARGE_BYTES for p in points)
    keep = [0, 1]
    if design[:, 2].any():
        keep.append(2)
    if len(large_sizes) >= 2 and small:
        keep.append(3)
    return design[:, keep], [names[k] for k in keep]


def _start(scaled: NDArray[np.float64]) -> NDArray[np.floating[Any]]:
    """A start that outliers do not pull: least absolute deviations by iterated reweighting."""
    ones = np.ones(len(scaled))
    solution: NDArray[np.floating[Any]] = np.linalg.lstsq(scaled, ones, rcond=None)[0]
    for _ in range(100):
        root = 1 / np.sqrt(np.maximum(np.abs(ones - scaled @ solution), 1e-7))
        solution = np.linalg.lstsq(scaled * root[:, None], root, rcond=None)[0]
    return solution


def interval95(values: Sequence[float]) -> float:
    """Half width of the 95 % interval of the mean of independent values."""
    count = len(values)
    if count < 2:
        return 0.0
    return _student95(count - 1) * float(np.std(values, ddof=1)) / float(np.sqrt(count))


def _student95(freedom: float) -> float:
    """The 97.5 % quantile of Student's t (Cornish-Fisher; exact table for one and two)."""
    if freedom < 2:
        return 12.71
    if freedom < 3:
        return 4.303
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
