"""Fits of one link, and grouping of links, on synthetic times whose truth is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from taccl.profiles.measure.classes import classify
from taccl.profiles.measure.fit import LinkFit, Point, fit_link, interval95
from taccl.profiles.measure.probe import Trial, in_sequence, one_message, posted_together


def trials(alpha: float, beta: float) -> list[Trial]:
    """Small messages, and large ones whose bytes cost more than their latency: else no beta can be seen."""
    chunk = max(32768, int(2e6 * alpha / beta))
    return [
        *(in_sequence(n, 8) for n in (1, 2, 4, 8, 16)),
        *(posted_together(n, 8) for n in (2, 4, 8, 16, 32)),
        *(one_message(n, chunk) for n in (1, 2, 3, 4, 5, 6, 7, 8)),
        *(in_sequence(n, 4 * chunk) for n in (2, 3, 4, 5)),
    ]


def time_us(trial: Trial, alpha: float, beta: float, occupancy: float, offset: float = 0.0) -> float:
    """The model of the method: message, reply, and the constant of large messages."""
    large = offset if trial.bytes >= 16384 else 0.0
    bulk = beta * trial.messages * trial.bytes / 1e6
    return trial.acks * (2 * alpha + bulk + (trial.messages - 1) * occupancy + large)


def points(
    alpha: float,
    beta: float,
    occupancy: float,
    offset: float = 0.0,
    noise: float = 0.0,
    outliers: float = 0.0,
    seed: int = 0,
) -> list[Point]:
    rng = random.Random(seed)
    made = []
    for trial in trials(alpha, beta):
        time = time_us(trial, alpha, beta, occupancy, offset) * (1 + noise * rng.uniform(-1, 1))
        made.append(Point(trial, time * (rng.uniform(2, 20) if rng.random() < outliers else 1)))
    return made


# alpha us, beta us/MB, occupancy as a share of alpha. Eight bytes cost at most a few percent of alpha: a link on
# which they cost more has no latency to speak of.
links = st.builds(
    lambda alpha, ratio, share: (alpha, alpha * ratio, share),
    st.floats(0.3, 5000),
    st.floats(2, 5000),
    st.floats(0, 1),
)


@settings(deadline=None, max_examples=60)
@given(links, st.floats(-0.5, 3))
def test_exact_times_give_the_exact_link(link: tuple[float, float, float], offset_in_alphas: float) -> None:
    alpha, beta, share = link
    offset = offset_in_alphas * alpha
    fit = fit_link(points(alpha, beta, share * alpha, offset), samples=22)
    assert fit.beta_us_per_mb == pytest.approx(beta, rel=1e-3)
    assert fit.alpha_us == pytest.approx(alpha, rel=1e-2)
    assert fit.occupancy_us == pytest.approx(share * alpha, rel=1e-2, abs=1e-2 * alpha)
    assert fit.residual < 1e-3


@settings(deadline=None, max_examples=60)
@given(links, st.integers(0, 10_000))
@example((1.0, 2.0, 0.0), 118)  # the two largest messages are wild, and look like a bend
def test_noise_and_outliers_move_the_link_by_a_few_percent(
    link: tuple[float, float, float], seed: int
) -> None:
    alpha, beta, share = link
    noisy = points(alpha, beta, share * alpha, noise=0.02, outliers=0.06, seed=seed)
    wild = [p.time_us > 1.5 * time_us(p.trial, alpha, beta, share * alpha) for p in noisy]
    # With a third of the small, or of the large trials spoilt nothing can be promised.
    assume(sum(wild[:10]) <= 2 and sum(wild[10:]) <= 2)
    fit = fit_link(noisy, samples=22)
    assert fit.alpha_us == pytest.approx(alpha, rel=0.06)
    assert fit.occupancy_us == pytest.approx(share * alpha, abs=0.1 * alpha)
    assert fit.beta_us_per_mb == pytest.approx(beta, rel=0.05)


@settings(deadline=None, max_examples=6)
@given(st.integers(0, 10_000))
def test_intervals_hold_the_truth_about_as_often_as_they_say(seed: int) -> None:
    held = 0
    for k in range(20):
        fit = fit_link(points(100, 1000, 40, noise=0.03, seed=20 * seed + k), samples=22)
        held += abs(fit.beta_us_per_mb - 1000) <= fit.beta_ci_us_per_mb
    assert held >= 13  # 95 % of 20 is 19; fewer than 14 has a chance of one in 10^5


def test_a_token_bucket_or_a_rendezvous_does_not_bend_alpha_and_beta() -> None:
    # A burst of 32 kB at 200 Mbit/s; a handshake of two latencies.
    for offset in (-1280.0, 2000.0):
        fit = fit_link(points(1000, 40_000, 5, offset), samples=22)
        assert fit.alpha_us == pytest.approx(1000, rel=1e-3)
        assert fit.beta_us_per_mb == pytest.approx(40_000, rel=1e-3)
        assert fit.offset_us == pytest.approx(offset, rel=1e-2)


def test_small_messages_alone_give_all_in_one_block() -> None:
    trials = [in_sequence(n, s) for n in (1, 4) for s in (8, 1024, 8192)] + [posted_together(8, 8)]
    fit = fit_link([Point(t, time_us(t, 5, 1000, 2)) for t in trials], samples=7)
    assert (fit.alpha_us, fit.beta_us_per_mb, fit.occupancy_us) == pytest.approx((5, 1000, 2), rel=1e-3)


def test_one_size_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="two message sizes"):
        fit_link([Point(in_sequence(n, 8), 10.0 * n) for n in (1, 2, 3)], samples=3)


def test_interval_of_a_mean() -> None:
    assert interval95([7.0]) == 0
    assert interval95([1.0, 1.0, 1.0]) == 0
    # Student's t for 2 degrees of freedom is 4.303.
    assert interval95([9.0, 10.0, 11.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def fit(alpha: float, beta: float, alpha_ci: float = 0.0, beta_ci: float = 0.0) -> LinkFit:
    return LinkFit(alpha, beta, alpha / 2, 0.0, 10, 0.01, alpha_ci, beta_ci)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.lists(st.sampled_from([10, 23, 46, 105, 400]), min_size=2, max_size=30))
def test_noisy_copies_of_a_few_links_fall_into_their_classes(seed: int, betas: list[int]) -> None:
    rng = random.Random(seed)
    truth = {(0, k + 1): float(beta) for k, beta in enumerate(betas)}
    fits = {x: fit(5 * rng.uniform(0.97, 1.03), beta * rng.uniform(0.97, 1.03)) for x, beta in truth.items()}
    found = classify(fits, dict.fromkeys(fits, "intra"))
    assert len(found) == len(set(betas))
    assert sorted(x for cls in found for x in cls.links) == sorted(fits)
    for cls in found:
        assert len({truth[x] for x in cls.links}) == 1
        assert cls.fit.beta_us_per_mb == pytest.approx(truth[cls.links[0]], rel=0.03)


def test_a_class_does_not_creep_along_a_slope() -> None:
    fits = {(0, k): fit(5, 100 * 1.1**k) for k in range(1, 21)}
    found = classify(fits, dict.fromkeys(fits, "intra"))
    for cls in found:
        values = [fits[x].beta_us_per_mb for x in cls.links]
        assert max(values) <= 1.5 * min(values) + 1e-9
    assert len(found) < 20


def test_links_of_different_labels_never_share_a_class() -> None:
    fits = {(0, 1): fit(5, 100), (1, 2): fit(5, 100)}
    assert [cls.name for cls in classify(fits, {(0, 1): "intra", (1, 2): "inter"})] == ["inter", "intra"]


def test_sizes_that_a_token_bucket_swallows_are_left_out() -> None:
    # 30 Mbit/s behind a bucket of 128 KiB: what fits into it costs nothing, later bytes 266.7 us/kB.
    def bucket(trial: Trial) -> float:
        return 20.0 + max(0, trial.bytes - 131072) * 0.2667

    small = [in_sequence(1, 8), in_sequence(2, 8), posted_together(8, 8), posted_together(16, 8)]
    made = [Point(t, time_us(t, 10, 1, 5)) for t in small]
    made += [Point(t, bucket(t)) for t in (one_message(n, 65536) for n in (1, 3, 5, 8))]
    assert fit_link(made, samples=8).beta_us_per_mb == pytest.approx(266_700, rel=0.01)
