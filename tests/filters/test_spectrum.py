"""Spectra equal SciPy's and the sums that define them, and the estimates of signal and noise have the stated errors."""

import math

import numpy as np
import pytest
import scipy.signal

from doppler_hf.filters import (
    PAPER_FILTERS,
    PowerEstimate,
    autocorrelation,
    corrected_noise_gain,
    corrected_output,
    estimate_power,
    measure_noise_gain,
    noise_gain,
    power_spectral_density,
)

SERIES = np.random.default_rng(0).normal(size=(45, 3)) + 1.5
FIRST_ORDER = PAPER_FILTERS["first-order-v1"]


# --- autocorrelation and spectrum -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lag", [0, 7, 44])
def test_autocorrelation_is_its_double_sum(max_lag):
    expected = [
        sum(SERIES[t, i] * SERIES[t - lag, i] for t in range(lag, 45) for i in range(3)) / (45 * 3)
        for lag in range(max_lag + 1)
    ]
    np.testing.assert_allclose(autocorrelation(SERIES, max_lag), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("segment", [None, 2, 8, 9, 45])
def test_welch_is_scipys_with_the_ends_doubled(segment):
    length = segment or 10  # 2/9 of 45
    frequencies, density = power_spectral_density(SERIES, segment=segment)
    # With a sampling rate of 2, Nyquist is 1. One-sided, SciPy doubles all but the frequencies that have no twin.
    expected_frequencies, expected = scipy.signal.welch(SERIES.T, fs=2, nperseg=length, detrend=False)
    expected[:, 0] *= 2
    if length % 2 == 0:
        expected[:, -1] *= 2
    np.testing.assert_allclose(frequencies, expected_frequencies, rtol=1e-12, atol=0)
    np.testing.assert_allclose(density, expected.mean(axis=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 44, 45])
def test_the_papers_spectrum_is_the_transform_of_the_autocorrelation(steps):
    series = SERIES[:steps]
    frequencies, density = power_spectral_density(series, "autocorrelation")
    np.testing.assert_allclose(frequencies, np.linspace(0, 1, steps + 1), rtol=1e-12, atol=0)
    # Wiener and Khinchin: it is also the squared transform of the series, padded to twice its length.
    padded = np.abs(np.fft.rfft(series, n=2 * steps, axis=0)) ** 2 / steps
    np.testing.assert_allclose(density, padded.mean(axis=1), rtol=1e-10, atol=1e-12)
    # Parseval, over the whole circle.
    circle = np.concatenate([density, density[1:-1]])
    np.testing.assert_allclose(circle.mean(), np.mean(series**2), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "music"}, "method must be one of welch, autocorrelation, got 'music'"),
        ({"segment": 1}, "segment must be an integer from 2 to the 45 steps, got 1"),
        ({"method": "autocorrelation", "segment": 9}, "segment must be left out for the autocorrelation, .* got 9"),
    ],
)
def test_spectra_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        power_spectral_density(SERIES, **options)


@pytest.mark.usefixtures("unchecked_arrays")
def test_what_is_no_series_is_refused():
    with pytest.raises(ValueError, match=r"series must have shape .* got \(45,\)"):
        autocorrelation(SERIES[:, 0])
    with pytest.raises(ValueError, match=r"series must have shape .* got \(45, 0\)"):
        power_spectral_density(SERIES[:, :0])
    broken = SERIES.copy()
    broken[7, 1] = np.nan
    with pytest.raises(ValueError, match="got NaN or infinity at step 7"):
        corrected_output(FIRST_ORDER, broken)


# --- after the filter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "first-order-v1", "second-order", "f6"])
def test_output_and_noise_gain_are_corrected_for_the_start(name):
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
    np.testing.assert_allclose(
        corrected_output(low_pass_filter, SERIES[:steps]), matrix @ SERIES[:steps], rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(corrected_noise_gain(low_pass_filter, steps), (matrix**2).sum(axis=1), rtol=1e-9, atol=1e-12)
    assert corrected_noise_gain(low_pass_filter, 2000)[-1] == pytest.approx(noise_gain(low_pass_filter), rel=1e-9)


# --- signal and noise -----------------------------------------------------------------------------------------------------


def square_norms(series):
    return np.sum(series**2, axis=1)


def test_without_noise_all_is_signal():
    assert estimate_power(np.array([4.0, 6.0]), noise_std=0.0, dimension=3) == PowerEstimate(5.0, 0.0, 0.0)
    assert estimate_power(np.array([4.0]), noise_std=0.0, dimension=3).snr == math.inf


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"square_norms": np.zeros(0)}, r"shape \(0,\)"),
        ({"square_norms": np.array([np.nan])}, "square_norms must be finite and at least 0, got nan"),
        ({"noise_std": -0.1}, "noise_std must be finite and at least 0, got -0.1"),
        ({"first_step": -1}, "first_step at least 0, got 2 and -1"),
    ],
)
def test_what_has_no_power_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        estimate_power(**({"square_norms": np.ones(3), "noise_std": 1.0, "dimension": 2} | changed))


def test_measured_noise_gain_is_the_filters_within_its_error():
    generator = np.random.default_rng(4)
    deviations = []
    for _ in range(60):
        noise = generator.normal(size=(400, 200))
        gain, error = measure_noise_gain(noise[100:], corrected_output(FIRST_ORDER, noise)[100:])
        deviations.append((gain - noise_gain(FIRST_ORDER)) / error)
    # Five and a half errors of the mean of 60: 4e-8 of false alarm.
    assert abs(np.mean(deviations)) < 5.5 / math.sqrt(60)
    # χ² of 60 degrees over 60: 1e-7 at 0.26 and at 2.3.
    assert 0.26 < np.mean(np.square(deviations)) < 2.3
    assert measure_noise_gain(noise, 0.5 * noise) == pytest.approx((0.25, 0.0), abs=1e-12)


def test_a_noise_gain_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"shape \(5, 1\)"):
        measure_noise_gain(np.ones((5, 1)), np.ones((5, 1)))
    with pytest.raises(ValueError, match=r"power 0.0"):
        measure_noise_gain(np.zeros((5, 2)), np.zeros((5, 2)))
