import numpy as np
import pytest
import scipy.signal
from hypothesis import given, reject
from hypothesis import strategies as st

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, frequency_response, group_delay, impulse_response, step_response


@st.composite
def random_filters(draw):
    """Stable filters of order 0 to 5: real poles and conjugate pairs, feed-forward of either sign."""
    real = draw(st.lists(st.floats(-0.6, 0.95), max_size=3))
    pairs = draw(st.lists(st.tuples(st.floats(0, 0.9), st.floats(0.1, 1.5)), max_size=1))
    conjugates = [radius * np.exp(sign * 1j * angle) for radius, angle in pairs for sign in (1, -1)]
    b = np.array(draw(st.lists(st.floats(-0.2, 1), min_size=1, max_size=5)))
    a = np.poly([*real, *conjugates]).real if real or conjugates else np.ones(1)
    try:
        with np.errstate(all="ignore"):  # a sum of b that is 0, or so small that its inverse is infinite
            return LowPassFilter(b=tuple(b / b.sum() * a.sum()), a=tuple(a))
    except ValueError:
        reject()


@given(low_pass_filter=random_filters())
def test_random_filters_are_the_recursion_of_the_paper(low_pass_filter):
    """Algorithm 2, line 6, one step after another."""
    gradients = np.random.default_rng(0).normal(size=60)
    outputs = []
    for step in range(60):
        fed_back = sum(a * outputs[step - lag] for lag, a in enumerate(low_pass_filter.a) if 0 < lag <= step)
        fed_forward = sum(b * gradients[step - lag] for lag, b in enumerate(low_pass_filter.b) if lag <= step)
        outputs.append(fed_forward - fed_back)
    kappa = impulse_response(low_pass_filter, 60)
    np.testing.assert_allclose(np.convolve(kappa, gradients)[:60], outputs, rtol=1e-12, atol=1e-12)
    filtered = scipy.signal.lfilter(low_pass_filter.b, low_pass_filter.a, gradients)
    np.testing.assert_allclose(np.convolve(kappa, gradients)[:60], filtered, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(step_response(low_pass_filter, 60), np.cumsum(kappa), rtol=1e-12, atol=1e-12)


@given(low_pass_filter=random_filters())
def test_random_filters_have_scipys_frequency_response_and_delay(low_pass_filter):
    frequencies = np.linspace(0, 1, 41)
    b, a = low_pass_filter.b, low_pass_filter.a
    _, expected = scipy.signal.freqz(b, a, worN=np.pi * frequencies)
    np.testing.assert_allclose(frequency_response(low_pass_filter, frequencies), expected, rtol=1e-12, atol=1e-12)
    kept = frequencies[np.abs(expected) > 1e-2]  # nearer to a zero both divide by rounding errors
    _, expected = scipy.signal.group_delay((b, a), w=np.pi * kept)
    np.testing.assert_allclose(group_delay(low_pass_filter, kept), expected, rtol=1e-12, atol=1e-12)


def test_frequencies_that_are_removed_have_no_delay():
    average = LowPassFilter(b=(0.25,) * 4)
    np.testing.assert_array_equal(
        group_delay(average, np.array([0.0, 0.5, 0.75, 1.0])).round(12), [1.5, np.nan, 1.5, np.nan]
    )


@pytest.mark.parametrize("frequency", [-0.1, 1.1, np.nan])
def test_frequencies_outside_the_band_are_refused(frequency):
    with pytest.raises(ValueError, match=rf"frequencies must be fractions of Nyquist .* in \[0, 1\], got {frequency}\."):
        group_delay(PAPER_FILTERS["f1"], np.array([0.5, frequency]))
