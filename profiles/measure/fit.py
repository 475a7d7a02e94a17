"""Alpha, beta and occupancy of one link from timed trials, robustly.

The method of TACCL (Shah et al., NSDI 2023, section 4: n chunks one after another against all at once),
extended by messages posted together, which show the part of alpha that blocks the next message:

    T_seq  = n (alpha + beta s)                       n chunks one after another
    T_pipe = alpha + n beta s + (n - 1) occupancy     n messages posted together
    T_all  = alpha + n beta s                         one message of n chunks

Each round trip also holds the tiny reply that ends it. Clocks of two hosts cannot tell the ways apart, so a
reply is taken to cost one alpha, like any tiny message, and is part of the model instead of being subtracted
beforehand: the noise of one ping-pong would go into every point. All times are linear in (alpha, beta,
occupancy), so regression takes all trials at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taccl.profiles.measure.probe import Trial

Array = NDArray[np.floating[Any]]

# From this size on a message may pay, or gain, a constant of its own: the handshake of a rendezvous
# protocol, the burst that a token bucket lets through. It is fitted beside alpha, never mixed into it.
LARGE_BYTES = 16384
_BEND = 1.5  # slopes that differ by more are a bend, not noise
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
    """Robust regression of the formulas above on the times of one link.

    With messages on both sides of LARGE_BYTES there are two blocks: small ones give alpha and occupancy,
    large ones beta and the offset, so that neither side's protocol bends the other's numbers. Otherwise one
    block gives all.

    points: trials of at least two message sizes. samples: how many timings the points stand for.
    Raises ValueError when the points cannot tell alpha from beta.
    """
    small = [point for point in points if point.trial.bytes < LARGE_BYTES]
    large = _above_burst([point for point in points if point.trial.bytes >= LARGE_BYTES])
    if small and len({point.trial.bytes for point in large}) >= 2:
        sizes = len({point.trial.bytes for point in small})
        first = _regress(small, ["alpha", *(["beta"] if sizes > 1 else []), "occupancy"], {})
        alpha = max(0.0, first.value["alpha"])
        occupancy = _between(first.value.get("occupancy", alpha), alpha)
        second = _regress(large, ["beta", "offset"], {"alpha": alpha, "occupancy": occupancy})
        if sizes == 1:  # now that beta is known, take the few bytes of the small messages out of alpha
            first = _regress(small, ["alpha", "occupancy"], {"beta": max(0.0, second.value["beta"])})
            alpha = max(0.0, first.value["alpha"])
            occupancy = _between(first.value.get("occupancy", alpha), alpha)
    else:
        first = second = _regress(points, ["alpha", "beta", "occupancy"], {})
        alpha = max(0.0, first.value["alpha"])
        occupancy = _between(first.value.get("occupancy", alpha), alpha)
    beta = second.value["beta"] * 1e6
    if beta <= 0:  # noise ate the slope: the largest message bounds it
        size, time = max((_moved(point.trial), point.time_us) for point in points)
        beta = max(time, 1e-3) / size * 1e6
    squares = first.squares + (second.squares if second is not first else 0)
    kept = first.kept + (second.kept if second is not first else 0)
    return LinkFit(
        alpha_us=alpha,
        beta_us_per_mb=beta,
        occupancy_us=occupancy,
        offset_us=second.value.get("offset", 0.0),
        samples=samples,
        residual=math.sqrt(squares / max(kept, 1e-12)),
        alpha_ci_us=first.half_width["alpha"],
        beta_ci_us_per_mb=second.half_width["beta"] * 1e6,
    )


def _above_burst(large: Sequence[Point]) -> list[Point]:
    """The points without the smallest sizes where a token bucket let most of a message through for nothing.

    The time bends there: flat while all fits into the bucket, or, where the bucket was only partly full, steeper
    up to the next size than above it. Half of the sizes, and two at least, stay.
    """
    single = {p.trial.bytes: p.time_us for p in large if p.trial.acks == p.trial.messages == 1}
    sizes = sorted(single)
    stay = max(2, (len(sizes) + 1) // 2)
    while len(sizes) > stay:
        step = (single[sizes[1]] - single[sizes[0]]) / (sizes[1] - sizes[0])
        above = _typical_slope(single, sizes[1:])
        if above / _BEND <= step <= _BEND * above:
            break
        sizes = sizes[1:]
    return [p for p in large if not sizes or p.trial.bytes >= sizes[0]]


def _typical_slope(time_us: Mapping[int, float], sizes: Sequence[int]) -> float:
    """Us per byte by repeated medians (Siegel, Biometrika 69, 1982): up to half of the times may be wild."""
    return float(
        np.median([
            np.median([(time_us[b] - time_us[a]) / (b - a) for b in sizes if b != a]) for a in sizes
        ])
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Regression:
    value: dict[str, float]  # us, and us per byte for beta
    half_width: dict[str, float]
    squares: float  # weighted sum of squared relative residuals
    kept: float  # sum of weights: how many points count


def _regress(points: Sequence[Point], names: Sequence[str], known: Mapping[str, float]) -> _Regression:
    """The regression of link trials.

    names: the unknowns; one that no point shows is left out. known: parts of the model with given values.
    """
    columns = {
        "alpha": [2.0 * p.trial.acks for p in points],  # the message's and the reply's
        "beta": [float(_moved(p.trial)) for p in points],
        "occupancy": [float(p.trial.acks * (p.trial.messages - 1)) for p in points],
        "offset": [float(p.trial.acks) for p in points],
    }
    names = [name for name in names if any(columns[name])]
    design = np.array([columns[name] for name in names]).T
    given = sum((value * np.array(columns[name]) for name, value in known.items()), np.zeros(len(points)))
    found = regress(design, np.array([point.time_us for point in points]), given)
    return _Regression(
        value=dict(zip(names, found.solution, strict=True)),
        half_width=dict(zip(names, found.half_width, strict=True)),
        squares=found.squares,
        kept=found.kept,
    )


@dataclass(frozen=True, slots=True)
class Regression:
    """What times say about unknowns in which they are linear."""

    solution: tuple[float, ...]
    half_width: tuple[float, ...]  # of the 95 % intervals
    squares: float  # weighted sum of squared relative residuals
    kept: float  # sum of weights: how many times count

    @property
    def residual(self) -> float:
        """Relative, root mean square over the times that the fit kept."""
        return math.sqrt(self.squares / max(self.kept, 1e-12))


def regress(design: Array, times_us: Array, given_us: Array | float = 0.0) -> Regression:
    """Weighted least squares on relative errors with Tukey's bisquare weights, iterated to rest.

    design: (times, unknowns). given_us: known parts of the times. Raises ValueError when the unknowns cannot be told
    apart.
    """
    times = np.maximum(times_us, 1e-3)
    # Relative errors, so that every size has an equal say; scaled columns, so that units do not matter.
    target = (times - given_us) / times
    relative = design / times[:, None]
    norms = np.linalg.norm(relative, axis=0)
    scaled = relative / norms
    unknowns = design.shape[1]
    if np.linalg.matrix_rank(scaled, tol=1e-6) < unknowns:
        raise ValueError("the trials of a link need at least two message sizes")
    weights = np.ones(len(times))
    solution = _least_absolute(scaled, target)
    for _ in range(50):
        residuals = np.abs(target - scaled @ solution)
        # As many points as unknowns can be met exactly; they say nothing about the noise.
        scale = _MAD * float(np.median(np.sort(residuals)[min(unknowns, len(times) - 1) :]))
        if scale < _EXACT:
            weights = (residuals < 1e3 * _EXACT).astype(float)
        else:
            weights = (1 - np.clip(residuals / (_TUKEY * scale), 0, 1) ** 2) ** 2
        if np.linalg.matrix_rank(scaled * weights[:, None], tol=1e-6) < unknowns:
            weights = np.ones(len(times))
        root = np.sqrt(weights)
        before = solution
        solution = np.linalg.lstsq(scaled * root[:, None], target * root, rcond=None)[0]
        if _settled(solution, before, 1e-7):
            break
    squares = float((weights * (target - scaled @ solution) ** 2).sum())
    kept = float(weights.sum())
    freedom = max(1.0, kept - unknowns)
    covariance = squares / freedom * np.linalg.pinv((scaled * weights[:, None]).T @ scaled)
    half = _student95(freedom) * np.sqrt(np.maximum(np.diag(covariance), 0)) / norms
    return Regression(
        solution=tuple(float(x) for x in solution / norms),
        half_width=tuple(float(x) for x in half),
        squares=squares,
        kept=kept,
    )


def _least_absolute(scaled: Array, target: Array) -> Array:
    """A start that outliers do not pull: least absolute deviations by iterated reweighting."""
    solution = np.linalg.lstsq(scaled, target, rcond=None)[0]
    for _ in range(30):
        before = solution
        root = 1 / np.sqrt(np.maximum(np.abs(target - scaled @ solution), 1e-7))
        solution = np.linalg.lstsq(scaled * root[:, None], target * root, rcond=None)[0]
        if _settled(solution, before, 1e-4):
            break
    return solution


def _settled(solution: Array, before: Array, tolerance: float) -> bool:
    return bool(np.abs(solution - before).max() <= tolerance * np.abs(solution).max())


def _moved(trial: Trial) -> int:
    """All bytes of a trial."""
    return trial.acks * trial.messages * trial.bytes


def _between(value: float, most: float) -> float:
    return min(most, max(0.0, value))


def rough_link(points: Sequence[Point]) -> tuple[float, float]:
    """(alpha us, beta us/MB) at a glance, from few points: to see how much measurements differ."""
    alpha = min(p.time_us / (2 * p.trial.acks) for p in points if p.trial.messages == 1)
    ordered = sorted(
        (p for p in points if p.trial.acks == p.trial.messages == 1), key=lambda p: p.trial.bytes
    )
    low, high = ordered[-2] if len(ordered) == 2 else ordered[-3], ordered[-1]
    slope = (high.time_us - low.time_us) / (high.trial.bytes - low.trial.bytes)
    return alpha, slope * 1e6


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
