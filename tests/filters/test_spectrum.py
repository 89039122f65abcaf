"""Spectra equal SciPy's and the sums that define them, and the estimates of signal and noise have the stated errors."""

import math

import numpy as np
import pytest

from doppler_hf.filters import (
    PAPER_FILTERS,
    LowPassFilter,
    PowerEstimate,
    autocorrelation,
    corrected_noise_gain,
    estimate_power,
    noise_gain,
    optimal_fir,
)
from tests.support.refusals import refused

SERIES = np.random.default_rng(0).normal(size=(45, 3)) + 1.5


def test_autocorrelation_is_its_double_sum():
    expected = [
        sum(SERIES[t, i] * SERIES[t - lag, i] for t in range(lag, 45) for i in range(3)) / (45 * 3) for lag in range(45)
    ]
    np.testing.assert_allclose(autocorrelation(SERIES), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("unchecked_arrays")
def test_what_is_no_series_is_refused():
    with refused("wrong-shape", match=r"\(45,\)"):
        autocorrelation(SERIES[:, 0])
    with refused("wrong-shape", match=r"\(45, 0\)"):
        autocorrelation(SERIES[:, :0])
    broken = SERIES.copy()
    broken[7, 1] = np.nan
    with refused("not-finite", match="step 7"):
        autocorrelation(broken)


@pytest.mark.parametrize("name", ["none", "first-order-v1", "second-order", "f6"])
def test_the_noise_gain_is_corrected_for_the_start(name):
    low_pass_filter = PAPER_FILTERS[name]
    steps = 30
    # The map from inputs to corrected outputs, column by column, by the recursion of the paper.
    impulses = np.eye(steps)
    columns = np.zeros((steps, steps))
    correction = np.zeros(steps)
    for driven, target in ((impulses, columns), (np.ones((steps, 1)), correction[:, None])):
        for t in range(steps):
            target[t] = sum(b * driven[t - i] for i, b in enumerate(low_pass_filter.b) if t >= i)
            target[t] -= sum(a * target[t - i] for i, a in enumerate(low_pass_filter.a) if 0 < i <= t)
    matrix = columns / correction[:, None]
    np.testing.assert_allclose(corrected_noise_gain(low_pass_filter, steps), (matrix**2).sum(axis=1), rtol=1e-9, atol=1e-12)
    assert corrected_noise_gain(low_pass_filter, 2000)[-1] == pytest.approx(noise_gain(low_pass_filter), rel=1e-9)


def test_without_noise_all_is_signal():
    assert estimate_power(np.array([[0.0, 2.0], [1.0, 1.0]]), noise_std=0.0) == PowerEstimate(3.0, 0.0, 0.0)
    assert estimate_power(np.array([[2.0]]), noise_std=0.0).snr == math.inf
    with refused("out-of-range", match="noise_std"):
        estimate_power(np.ones((3, 2)), noise_std=-0.1)


def test_the_signal_is_found_within_its_error():
    generator, deviations = np.random.default_rng(4), []
    signal = np.sin(np.arange(200))[:, None] * np.ones(20)
    for _ in range(60):
        found = estimate_power(signal + generator.normal(scale=2.0, size=signal.shape), noise_std=2.0)
        deviations.append((found.signal - np.sum(signal**2) / 200) / found.error)
        assert found.noise == pytest.approx(80.0, rel=1e-12)
    # Five and a half errors of the mean of 60: 4e-8 of false alarm; χ² of 60 degrees over 60: 1e-7 at 0.26 and at 2.3.
    assert abs(np.mean(deviations)) < 5.5 / math.sqrt(60)
    assert 0.26 < np.mean(np.square(deviations)) < 2.3


def test_optimal_fir_is_proportional():
    low_pass_filter = optimal_fir(np.array([2.0, 1.0, 0.0, 1.0]))
    assert low_pass_filter == LowPassFilter(b=(0.5, 0.25, 0.0, 0.25))


def test_an_autocorrelation_without_a_positive_sum_is_refused():
    for lags, found in (([0.5, -0.5], "0"), ([0.5, np.nan], "nan")):
        with refused("sum-not-positive", match=found):
            optimal_fir(np.array(lags))
