"""Responses are the paper's recursion, SciPy's, and in hard cases those of arithmetic with 50 digits."""

import math

import mpmath
import numpy as np
import pytest
import scipy.signal
from hypothesis import given, reject
from hypothesis import strategies as st

from doppler_hf.filters import (
    PAPER_FILTERS,
    ClosedLoop,
    LowPassFilter,
    NoiseShape,
    auto_filter,
    auto_noise_shape,
    autocorrelation,
    butterworth,
    corrected_noise_gain,
    estimate_power,
    filter_figures,
    frequency_response,
    group_delay,
    impulse_response,
    momentum,
    moving_average,
    noise_gain,
    optimal_fir,
    step_response,
)
from tests.support.refusals import refused
from tests.support.tiers import further

mpmath.mp.dps = 50


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
    # SciPy divides two sums that are rounded in float64: near a pole or a zero it loses up to four digits. Ours is held to
    # 50 digits below.
    np.testing.assert_allclose(group_delay(low_pass_filter, kept), expected, rtol=1e-10, atol=1e-10)


def test_frequencies_that_are_removed_have_no_delay():
    average = LowPassFilter(b=(0.25,) * 4)
    np.testing.assert_array_equal(
        group_delay(average, np.array([0.0, 0.5, 0.75, 1.0])).round(12), [1.5, np.nan, 1.5, np.nan]
    )


@pytest.mark.parametrize("frequency", [-0.1, 1.1, np.nan])
def test_frequencies_outside_the_band_are_refused(frequency):
    with refused("out-of-range", match=str(frequency)):
        group_delay(PAPER_FILTERS["f1"], np.array([0.5, frequency]))


# --- in hard cases, against 50 digits ------------------------------------------------------------------------------------


def polynomial(coefficients, frequency, *, slope=False):
    """Σ c_n e^{-iωn}, or Σ n c_n e^{-iωn}."""
    turn = mpmath.expjpi(-mpmath.mpf(float(frequency)))
    terms = [mpmath.mpf(c) * (place if slope else 1) for place, c in enumerate(coefficients)]
    return mpmath.polyval(terms[::-1], turn)


def exact_response(low_pass_filter, frequency):
    return polynomial(low_pass_filter.b, frequency) / polynomial(low_pass_filter.a, frequency)


def exact_delay(low_pass_filter, frequency):
    parts = [
        polynomial(each, frequency, slope=True) / polynomial(each, frequency)
        for each in (low_pass_filter.b, low_pass_filter.a)
    ]
    return float(mpmath.re(parts[0] - parts[1]))


def exact_weights(low_pass_filter, steps):
    b, a = ([mpmath.mpf(c) for c in each] for each in (low_pass_filter.b, low_pass_filter.a))
    weights = []
    for step in range(steps):
        fed_back = sum(a[lag] * weights[step - lag] for lag in range(1, min(step + 1, len(a))))
        weights.append((b[step] if step < len(b) else mpmath.mpf(0)) - fed_back)
    return weights


# With a zero at some frequency, single and double; slow, of high order; with many taps.
HARD = {
    "two taps": (moving_average(2), 1.0),
    "four taps": (moving_average(4), 0.5),
    "ten taps": (moving_average(10), 0.2),
    "three hundred taps": (moving_average(300), 2 / 300 * 41),
    "second-order": (PAPER_FILTERS["second-order"], 1.0),
    "f3": (PAPER_FILTERS["f3"], 1.0),
    "notch": (LowPassFilter.parse("b=0.5,-0.3,0.5;a=1,-0.3"), math.acos(0.3) / math.pi),
    "double notch": (LowPassFilter(b=tuple(c / 2.56 for c in (1.0, -0.8, 2.16, -0.8, 1.0))), math.acos(0.2) / math.pi),
    **{f"butterworth {order} {cutoff:g}": (butterworth(order, cutoff), 1.0)
       for order, cutoff in [(1, 1e-5), (2, 1e-5), (3, 1e-4), (4, 1e-3), (6, 5e-3), (8, 0.02), (10, 0.1), (10, 0.5)]},
    "slowest momentum": (momentum(1 - 2e-6), 1.0),
}  # fmt: skip
BESIDE = [0.0, 1e-15, 1e-12, 1e-10, 1e-9, 2e-9, 1e-8, 1e-7, 1e-5, 1e-3]


@pytest.mark.parametrize("name", HARD)
def test_near_zeros_and_for_slow_filters_response_and_delay_are_right_or_not_given(name):
    low_pass_filter, zero = HARD[name]
    places = np.array([*(zero - off for off in BESIDE), *np.geomspace(1e-9, 0.99, 25), 0.0])
    found, delays = frequency_response(low_pass_filter, places), group_delay(low_pass_filter, places)
    for place, response, delay in zip(places, found, delays, strict=True):
        exact = exact_response(low_pass_filter, place)
        # A frequency is rounded to float64, as is the result.
        assert abs(mpmath.mpc(complex(response)) - exact) <= 1e-12 * abs(exact) + 1e-14
        if abs(exact) >= 1.01e-9:
            right = exact_delay(low_pass_filter, place)
            assert delay == pytest.approx(right, rel=1e-9, abs=1e-9)
        elif abs(exact) < 0.99e-9:
            assert math.isnan(delay)


@given(
    angles=st.lists(st.floats(0.5, 1.0), min_size=1, max_size=3),
    radius=st.sampled_from([1.0, 1 - 1e-12, 1 + 1e-9, 1 - 1e-6, 0.999, 1.01]),
    beside=st.sampled_from([0.0, *(sign * off for off in BESIDE for sign in (1, -1))]),
    pole=st.floats(0.0, 0.999),
)
def test_a_delay_near_zeros_of_any_kind_is_right_or_not_given(angles, radius, beside, pole):
    """Zeros on the circle and beside it, several in one place, and a slow pole."""
    b = np.poly([radius * np.exp(sign * 1j * math.pi * angle) for angle in angles for sign in (1, -1)]).real
    try:
        low_pass_filter = LowPassFilter(b=tuple(b / math.fsum(b) * (1 - pole)), a=(1.0, -pole))
    except ValueError:
        reject()
    place = min(max(angles[0] + beside, 0.0), 1.0)
    (delay,) = group_delay(low_pass_filter, np.array([place]))
    if math.isnan(delay):
        assert abs(exact_response(low_pass_filter, place)) < 1e-7
    else:
        # Where a zero is beside the circle, the delay changes with the frequency faster than that has digits.
        around = [exact_delay(low_pass_filter, min(max(place + off, 0.0), 1.0)) for off in (-4e-16, 0.0, 4e-16)]
        most = 1e-9 * max(1.0, abs(around[1]))
        assert min(around) - most <= delay <= max(around) + most


@pytest.mark.parametrize("name", further([*HARD], quick=["ten taps", "second-order", "butterworth 6 0.005"]))
def test_weights_are_rounded_by_no_more_than_is_said(name):
    low_pass_filter, _ = HARD[name]
    most = 1e-16 * sum(map(abs, low_pass_filter.a)) / abs(math.fsum(low_pass_filter.a))
    exact = exact_weights(low_pass_filter, 1500)
    largest = max(map(abs, exact))
    assert max(map(abs, np.array(exact) - impulse_response(low_pass_filter, 1500))) <= max(most, 1e-15) * largest
    sums = np.array([*map(float, np.cumsum(exact))])
    np.testing.assert_allclose(
        step_response(low_pass_filter, 1500), sums, rtol=0, atol=max(1500 * most * float(largest), 1e-13)
    )


@pytest.mark.parametrize("beta", [0.5, 0.99999, 1 - 2e-6])
def test_figures_of_slow_filters_have_all_their_digits(beta):
    figures = filter_figures(momentum(beta))
    cosine = (1 + mpmath.mpf(beta) ** 2 - 2 * (1 - mpmath.mpf(beta)) ** 2) / (2 * mpmath.mpf(beta))
    assert figures.cutoff == pytest.approx(float(mpmath.acos(cosine) / mpmath.pi) if abs(cosine) < 1 else 1.0, rel=1e-11)
    assert figures.delay == pytest.approx(beta / (1 - beta), rel=1e-9)
    assert figures.noise_gain == pytest.approx((1 - beta) / (1 + beta), rel=1e-12)


@pytest.mark.thorough
def test_a_response_that_grows_where_its_poles_do_not_show_it_is_refused():
    """Three pairs of poles in one place, of which NumPy finds the modulus 1 - 2.6e-6 and 50 digits 1 + 1.2e-5."""
    c = (1.0, -5.826480982258142, 14.31585167334368, -18.9783433617081, 14.315333731262537, -5.826059390142843)
    c = (*c, 0.9998914650652495)
    assert max(abs(np.roots(c))) < 1 - 1e-6
    assert max(map(abs, mpmath.polyroots([*map(mpmath.mpf, c)], maxsteps=500, extraprec=300))) > 1
    with refused("unstable-filter"):
        noise_gain(PAPER_FILTERS["none"], NoiseShape(c))


# --- of nothing -----------------------------------------------------------------------------------------------------------

FILTERS = [*PAPER_FILTERS.values(), moving_average(7), butterworth(3, 0.1)]
SHAPES = [NoiseShape(), NoiseShape.banded(4), NoiseShape((1.0, -0.5))]


@pytest.mark.parametrize("low_pass_filter", FILTERS, ids=str)
def test_a_response_of_no_steps_is_empty_for_every_filter(low_pass_filter):
    for response in (impulse_response, step_response, corrected_noise_gain):
        found = response(low_pass_filter, 0)
        assert (found.shape, found.dtype) == ((0,), np.float64)
        for steps in (-1, 1.5):
            with refused("out-of-range", match="steps"):
                response(low_pass_filter, steps)
    assert frequency_response(low_pass_filter, np.zeros(0)).shape == (0,)
    assert group_delay(low_pass_filter, np.zeros(0)).shape == (0,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sum_of_noise_over_no_steps_is_0_for_every_shape(shape):
    assert shape.std_of_sum([]) == shape.std_of_average(0) == 0.0
    assert shape.response(0).shape == (0,)
    for ask in (shape.response, shape.std, shape.std_of_average):
        with refused("out-of-range", match="steps"):
            ask(-1)


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(("code", "refuse"), [
    ("wrong-shape", lambda: autocorrelation(np.zeros((0, 3)))),
    ("out-of-range", lambda: moving_average(0)),
    ("out-of-range", lambda: NoiseShape.banded(0)),
    ("not-normalized", lambda: NoiseShape(())),
    ("no-coefficients", lambda: LowPassFilter(b=())),
    ("out-of-range", lambda: ClosedLoop(np.zeros(0))),
    ("out-of-range", lambda: ClosedLoop.of_run(0)),
    ("out-of-range", lambda: auto_filter(0)),
    ("sum-not-positive", lambda: optimal_fir(np.zeros(0))),
    ("wrong-shape", lambda: estimate_power(np.zeros((0, 2)), noise_std=1.0)),
    ("out-of-range", lambda: auto_noise_shape(lambda bands: 1.0, 0)),
])  # fmt: skip
def test_means_designs_and_choices_of_nothing_are_refused(code, refuse):
    with refused(code):
        refuse()
