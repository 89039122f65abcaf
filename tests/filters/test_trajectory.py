"""The error of the path is what adding it up step by step gives, and the best strategy is the best."""

import math

import numpy as np
import pytest
import scipy.signal

from doppler_hf.filters import LowPassFilter, NoiseShape, Trajectory, butterworth, group_delay

NONE = LowPassFilter.parse("none")
SCHEDULES = {
    "constant": np.ones(120),
    "linear": 1 - np.arange(120) / 120,
    "warm-up": np.concatenate([np.arange(30) / 30, 0.5 * (1 + np.cos(np.pi * np.arange(90) / 90))]),
}


def added_up(rates, turn_steps, response):
    """Return Σ_t E e_t² from the weight of every white number in every e_t, those before the first step included."""
    before = 2000
    response = np.pad(response, (0, before + len(rates)))[: before + len(rates)]
    weights, total = np.zeros(before + len(rates)), 0.0
    for step, rate in enumerate(rates):
        weights *= 1 - rate / turn_steps
        weights[: before + step + 1] -= rate * response[: before + step + 1][::-1]
        total += weights @ weights
    return total


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", ["white", "banded:bands=4", "banded:c=1,-0.5"])
@pytest.mark.parametrize("low_pass_filter", ["none", "butterworth:order=1,cutoff=0.1", "second-order"])
def test_the_noise_of_the_path_is_what_adding_up_gives(schedule, shape, low_pass_filter):
    rates, shape, low_pass_filter = SCHEDULES[schedule], NoiseShape.parse(shape), LowPassFilter.parse(low_pass_filter)
    trajectory = Trajectory(120, rates.tolist())
    assert trajectory.turn_steps == pytest.approx(0.1 * rates.sum() / rates.max(), rel=1e-12)
    response = shape.norm * scipy.signal.lfilter(low_pass_filter.b, low_pass_filter.a, shape.response(2000))
    expected = added_up(rates / rates.max(), trajectory.turn_steps, response)
    np.testing.assert_allclose(trajectory.noise(low_pass_filter, shape), expected, rtol=1e-9, atol=0)


def test_the_error_adds_the_delay_and_the_noise():
    low_pass_filter, rates = butterworth(1, 0.2), SCHEDULES["linear"]
    trajectory = Trajectory(120, rates.tolist())
    (delay,) = group_delay(low_pass_filter, np.zeros(1))
    expected = delay**2 * np.sum(rates**2) + 3.0 * trajectory.noise(low_pass_filter)
    np.testing.assert_allclose(trajectory.error(low_pass_filter, noise_to_signal=3.0), expected, rtol=1e-12, atol=0)


def test_the_unit_of_the_rates_does_not_matter():
    rates = SCHEDULES["warm-up"]
    scaled = Trajectory(120, (3e-4 * rates).tolist())
    np.testing.assert_allclose(scaled.noise(NONE), Trajectory(120, rates.tolist()).noise(NONE), rtol=1e-12, atol=0)
    assert Trajectory(120).noise(NONE) == pytest.approx(Trajectory(120, [7.0] * 120).noise(NONE), rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 5, 19])
def test_short_runs_have_a_path_too(steps):
    trajectory = Trajectory(steps)
    assert trajectory.turn_steps == 2.0
    assert 0 < trajectory.noise(NONE) <= steps * steps


@pytest.mark.parametrize("low_pass_filter", ["none", "momentum:beta=0.6"])
@pytest.mark.parametrize("bands", [2, 3, 6])
@pytest.mark.parametrize("steps", [60, 2000])
def test_no_strategy_beats_the_best(low_pass_filter, bands, steps):
    trajectory, rng = Trajectory(steps, np.linspace(1, 0, steps, endpoint=False).tolist()), np.random.default_rng(0)
    low_pass_filter = LowPassFilter.parse(low_pass_filter)
    best = trajectory.best_shape(bands, low_pass_filter)
    assert best.bands == bands
    least = trajectory.noise(low_pass_filter, best)
    assert least < trajectory.noise(low_pass_filter, NoiseShape.banded(bands))
    for scale in (1e-3, 1e-2, 0.1):
        for _ in range(50):
            tried = np.array(best.c) + scale * np.pad(rng.normal(size=bands - 1), (1, 0))
            if max(abs(np.roots(tried))) < 0.999:
                # Its coefficients are rounded to four decimals.
                assert trajectory.noise(low_pass_filter, NoiseShape(tuple(tried))) > least * (1 - 1e-6)


def test_strategies_of_more_bands_tend_to_the_root_of_what_the_path_remembers():
    """By Cauchy and Schwarz no |c|² does better than the root of the spectrum, for which V = (mean of the root)²."""
    steps = 300
    trajectory = Trajectory(steps)
    impulse = np.eye(1, 8 * steps)[0]
    # Of a constant rate, once settled: the memory ρ^t, of spectrum 1 / |1 - ρ e^{-iω}|².
    rho = 1 - 1 / trajectory.turn_steps
    spectrum = np.abs(np.fft.fft(scipy.signal.lfilter([1.0], [1.0, -rho], impulse))) ** 2
    limit = math.sqrt(np.mean(np.sqrt(spectrum)) ** 2 / np.mean(spectrum))
    white = trajectory.noise(NONE)
    ratios = [math.sqrt(trajectory.noise(NONE, trajectory.best_shape(bands, NONE)) / white) for bands in (2, 8, 64)]
    assert ratios[0] > ratios[1] > ratios[2]
    assert ratios[2] == pytest.approx(limit, rel=0.1)


def test_one_band_is_white():
    assert Trajectory(10).best_shape(1, NONE).is_white


@pytest.mark.parametrize("bands", [4, 16])
@pytest.mark.parametrize("low_pass_filter", ["none", "butterworth:order=1,cutoff=0.02", "second-order"])
def test_the_noise_of_a_step_stays_bounded(bands, low_pass_filter):
    shape = Trajectory(1000).best_shape(bands, LowPassFilter.parse(low_pass_filter))
    assert max(abs(np.roots(shape.c))) < 0.98
    assert shape.std(1000) < 5
