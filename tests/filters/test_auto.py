"""The rules minimize the error that they state, and keep their limits."""

import math

import numpy as np
import pytest
import scipy.optimize

from doppler_hf.filters import (
    PAPER_FILTERS,
    NoiseShape,
    Trajectory,
    auto_filter,
    auto_noise_shape,
    butterworth,
    group_delay,
    momentum,
    moving_average,
    noise_gain,
)

NONE = PAPER_FILTERS["none"]
# σ of 60,000 examples, B = 1000, T = 300, ε = 3, by the number of bands.
SIGMAS = {1: 0.8346, 2: 0.9837, 4: 1.2071, 8: 1.5438, 16: 2.0154}


def auto(**overrides):
    options = dict(steps=1000, noise_std=1e-3, max_grad_norm=1.0, dimension=100_000)
    return auto_filter(**(options | overrides))


def auto_shape(sigmas=SIGMAS, **overrides):
    options = dict(steps=300, max_grad_norm=1.0, dimension=269_322, low_pass_filter=NONE)
    return auto_noise_shape(lambda bands: sigmas.get(bands, math.inf) / 1000, **(options | overrides))


def delay(low_pass_filter):
    return float(group_delay(low_pass_filter, np.zeros(1))[0])


@pytest.mark.parametrize("noise", ["white", "banded:bands=4"])
@pytest.mark.parametrize("noise_std", [1e-3, 2e-3])
def test_the_stated_error_is_minimized(noise_std, noise):
    noise, trajectory = NoiseShape.parse(noise), Trajectory(1000)
    low_pass_filter = auto(noise_std=noise_std, noise=noise)

    def stated(log_delay):
        filtered = momentum(math.exp(log_delay) / (math.exp(log_delay) + 1))
        return trajectory.error(filtered, noise, noise_to_signal=1e7 * noise_std**2)

    # Momentum has the noise gain of the filter that is taken, and nearly its noise in the path.
    best = scipy.optimize.minimize_scalar(stated, bounds=(math.log(0.5), math.log(50)), method="bounded").x
    assert delay(low_pass_filter) == pytest.approx(math.exp(best), rel=0.15, abs=0.3)
    own = trajectory.error(low_pass_filter, noise, noise_to_signal=1e7 * noise_std**2)
    for factor in (0.5, 0.8, 1.25, 2.0):
        cutoff = factor * float(str(low_pass_filter).rpartition("=")[2])
        assert own < trajectory.error(butterworth(1, cutoff), noise, noise_to_signal=1e7 * noise_std**2)


@pytest.mark.parametrize("age", [1, 4, 20])
def test_filters_of_first_order_and_averages_have_the_noise_gain_that_the_rule_assumes(age):
    for low_pass_filter in (
        momentum(age / (age + 1)),
        moving_average(2 * age + 1),
        butterworth(1, 2 / math.pi * math.atan(1 / (2 * age))),
    ):
        np.testing.assert_allclose(delay(low_pass_filter), age, rtol=1e-9, atol=0)
        np.testing.assert_allclose(noise_gain(low_pass_filter), 1 / (2 * age + 1), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("order", "product"), [(2, 0.5), (3, 2 / 3)])
def test_higher_orders_do_not_improve_the_trade(order, product):
    low_pass_filter = butterworth(order, 0.01)
    np.testing.assert_allclose(delay(low_pass_filter) * noise_gain(low_pass_filter), product, rtol=1e-3, atol=0)


@pytest.mark.parametrize("noise_std", [0.0, 1e-9, 1e-5])
def test_without_much_noise_there_is_no_filter(noise_std):
    assert auto(noise_std=noise_std) == NONE


@pytest.mark.parametrize("steps", [1, 10, 24])
def test_short_runs_have_no_filter(steps):
    assert auto(steps=steps, noise_std=100.0) == NONE


@pytest.mark.parametrize("steps", [25, 99, 1000, 12_345])
@pytest.mark.parametrize("noise_std", [1e-3, 1e3])
def test_the_delay_is_at_most_a_fiftieth_of_the_run(steps, noise_std):
    low_pass_filter = auto(steps=steps, noise_std=noise_std)
    assert delay(low_pass_filter) <= steps / 50 * (1 + 1e-9)
    if noise_std > 1:
        # Rounding the cutoff costs less than 1 %.
        assert delay(low_pass_filter) > 0.99 * steps / 50


@pytest.mark.parametrize(("name", "factor"), [("noise_std", 2.0), ("dimension", 4), ("max_grad_norm", 0.5)])
def test_more_noise_for_the_signal_filters_more(name, factor):
    options = dict(noise_std=1e-3, dimension=100_000, max_grad_norm=1.0)
    more = auto(**{name: type(options[name])(options[name] * factor)})
    assert delay(more) > 1.3 * delay(auto())
    assert more == auto(noise_std=2e-3)


def test_the_unit_of_the_learning_rate_does_not_matter():
    assert auto() == auto(learning_rates=[3e-4] * 1000)


def test_the_name_is_short_and_reads_back():
    assert str(auto()) == f"butterworth:order=1,cutoff={float(str(auto()).rpartition('=')[2])}"
    assert len(str(auto())) <= len("butterworth:order=1,cutoff=0.0123")


def test_the_shape_has_the_least_error_of_all_numbers_of_bands():
    trajectory = Trajectory(300)
    errors = {}
    for bands, sigma in SIGMAS.items():
        shape = trajectory.best_shape(bands, NONE)
        errors[bands] = sigma**2 * trajectory.noise(NONE, shape), shape
    assert auto_shape() == min(errors.values(), key=lambda each: each[0])[1]
    assert auto_shape().bands == 4


def test_where_shaping_costs_more_than_it_gains_noise_is_white():
    # Every unit in nearly every step: σ grows like the root of the bands.
    assert auto_shape({1: 1.0, 2: 1.42, 4: 2.0}).is_white
    assert auto_shape({1: 1.0}).is_white
    assert auto_shape({1: 1.0, 2: 0.1}, steps=1).is_white


def test_a_large_model_gets_a_filter_and_with_it_more_bands():
    alone = auto_shape(dimension=10**9)
    together = auto_shape(dimension=10**9, low_pass_filter=None)
    assert together.bands > alone.bands
    assert auto_shape(dimension=1000, low_pass_filter=None) == alone


def test_the_schedule_counts():
    decay = auto_shape(learning_rates=[1 - step / 300 for step in range(300)])
    # Less time to add up noise, so that taking it back is worth less.
    assert 1 < decay.bands < auto_shape().bands


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(steps=0), "steps must be an integer of at least 1, got 0"),
        (dict(steps=10.0), "steps must be an integer of at least 1, got 10.0"),
        (dict(dimension=0), "dimension must be an integer of at least 1, got 0"),
        (dict(noise_std=-1.0), "noise_std must be finite and at least 0, got -1.0"),
        (dict(noise_std=math.nan), "noise_std must be finite and at least 0, got nan"),
        (dict(max_grad_norm=0.0), "max_grad_norm must be positive and finite, got 0.0"),
        (dict(learning_rates=[1.0] * 999), "one rate for each of the 1000 steps, got 999"),
        (dict(learning_rates=[1.0, -1.0] * 500), "got -1.0 at step 1"),
        (dict(learning_rates=[1.0, math.nan] * 500), "got nan at step 1"),
        (dict(learning_rates=[0.0] * 1000), "learning_rates must not all be 0"),
    ],
)
def test_bad_input_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        auto(**overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(steps=0), "steps must be an integer of at least 1, got 0"),
        (dict(dimension=0), "dimension must be an integer of at least 1, got 0"),
        (dict(max_grad_norm=-1.0), "max_grad_norm must be positive and finite, got -1.0"),
        (dict(sigmas={1: -1.0}), "noise_std must be finite and at least 0, got -0.001"),
    ],
)
def test_a_shape_of_bad_input_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        auto_shape(**overrides)
