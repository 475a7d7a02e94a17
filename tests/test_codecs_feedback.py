"""Error feedback: what is taken away once is paid later."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.runtime.codecs import CODECS, ErrorFeedback, Scratch, decode_into, most_bytes
from taccl.runtime.dtypes import DTYPES

FLOAT32 = DTYPES["float32"]


def steps_of(codec, steps):
    """(decoded values of each step, the feedback) of float32 arrays of one length."""
    feedback, scratch = ErrorFeedback(len(steps[0])), Scratch()
    wire = np.zeros(most_bytes(codec, FLOAT32, len(steps[0])), np.uint8)
    decoded = []
    for values in steps:
        used = feedback.encode_into(codec, values, wire, scratch)
        decoded.append(np.empty_like(values))
        decode_into(codec, wire[:used], decoded[-1], scratch)
    return decoded, feedback


@settings(max_examples=40, deadline=None)
@given(
    codec=st.sampled_from(["bf16", "bf16-xw", "q8", "fp8", "xw"]),
    elements=st.integers(1, 700),
    count=st.integers(1, 12),
    exponent=st.integers(-30, 30),
    spread=st.integers(0, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_arrives_is_what_was_sent_less_the_last_residual(codec, elements, count, exponent, spread, seed):
    random = np.random.default_rng(seed)
    steps = [
        (
            random.standard_normal(elements) * 2.0 ** (exponent - random.integers(0, spread + 1, elements))
        ).astype(np.float32)
        for _ in range(count)
    ]
    decoded, feedback = steps_of(CODECS[codec], steps)
    sent, came = np.sum(steps, axis=0, dtype=np.float64), np.sum(decoded, axis=0, dtype=np.float64)
    largest = np.max([np.abs(values) for values in (*steps, *decoded)], axis=0)
    # Each step rounds values + residual once, and the new residual at most once.
    np.testing.assert_array_less(
        np.abs(came - (sent - feedback.residual)), 2 * count * 2.0**-24 * largest + 2.0**-140
    )


@pytest.mark.parametrize("codec", ["bf16", "q8", "fp8"])
def test_the_error_of_a_running_sum_does_not_grow(codec):
    """Without feedback a value below half a level is lost in every step."""
    random = np.random.default_rng(0)
    steady = (random.standard_normal(2560) * 2.0 ** -random.integers(0, 12, 2560)).astype(np.float32)
    steps = [steady] * 30
    decoded, _ = steps_of(CODECS[codec], steps)
    once = [steps_of(CODECS[codec], [values])[0][0] for values in steps]
    exact = np.sum(steps, axis=0, dtype=np.float64)
    errors = [np.abs(np.sum(arrays, axis=0, dtype=np.float64) - exact).max() for arrays in (decoded, once)]
    assert errors[0] < errors[1] / 4


def test_infinities_are_passed_on_and_forgotten():
    steps = [np.full(4, value, np.float32) for value in (1.0, np.inf, 0.3, 0.3)]
    decoded, feedback = steps_of(CODECS["q8"], steps)
    assert np.isinf(decoded[1]).all()
    assert np.isfinite(feedback.residual).all() and np.allclose(decoded[3], 0.3, atol=0.01)


def test_values_of_another_length_are_refused():
    with pytest.raises(ValueError, match="this feedback is for"):
        ErrorFeedback(3).owed(np.zeros(4, np.float32))


@pytest.mark.parametrize("short", [True, False])
def test_what_is_refused_owes_nothing(short):
    """A wire that is too short, and one at an odd address."""
    values = np.linspace(-1, 1, 300, dtype=np.float32)
    _, feedback = steps_of(CODECS["q8"], [values])
    before = feedback.residual.copy()
    assert before.any()
    wire = np.zeros(8, np.uint8) if short else np.zeros(1 << 16, np.uint8)[1:]
    with pytest.raises(ValueError, match="wire"):
        feedback.encode_into(CODECS["q8"], values, wire, Scratch())
    assert (feedback.residual == before).all()
