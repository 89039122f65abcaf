"""The rule minimizes the bound that it states, and keeps its limits."""

import math

import numpy as np
import pytest
import scipy.optimize

from doppler_hf.filters import PAPER_FILTERS, auto_filter, butterworth, group_delay, momentum, moving_average, noise_gain


def auto(**overrides):
    options = dict(steps=1000, noise_std=1e-3, max_grad_norm=1.0, dimension=100_000)
    return auto_filter(**(options | overrides))


def delay(low_pass_filter):
    return float(group_delay(low_pass_filter, np.zeros(1))[0])


@pytest.mark.parametrize("noise_std", [1e-4, 3e-4, 1e-3, 2e-3])
@pytest.mark.parametrize("steps", [1000, 30_000])
def test_the_stated_bound_is_minimized(noise_std, steps):
    low_pass_filter = auto(noise_std=noise_std, steps=steps)

    def stated(log_delay):
        lateness = math.exp(log_delay) / (0.1 * steps)
        return lateness**2 + 100_000 * noise_std**2 / (2 * math.exp(log_delay) + 1)

    best = scipy.optimize.minimize_scalar(stated, bounds=(math.log(0.01), math.log(steps)), method="bounded").x
    # The cutoff is rounded to three digits, and the minimum is flat.
    np.testing.assert_allclose(delay(low_pass_filter), math.exp(best), rtol=0.01, atol=0)
    assert low_pass_filter.order == 1


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


def test_the_signal_is_followed_within_the_stated_error():
    """On a path that turns at the greatest rate assumed: a bias of at most D/τ_s."""
    angle = 0.02
    low_pass_filter = momentum(0.9)
    time = np.arange(2000)
    signal = np.exp(1j * angle * time)
    kappa = low_pass_filter.b[0] * 0.9**time
    filtered = np.convolve(kappa, signal)[:2000]
    assert 0.9 * 9 * angle < abs(filtered[-1] - signal[-1]) <= 9 * 2 * math.sin(angle / 2)


def test_without_noise_there_is_no_filter():
    assert auto(noise_std=0.0) == PAPER_FILTERS["none"]
    assert auto(noise_std=1e-9) == PAPER_FILTERS["none"]


@pytest.mark.parametrize("steps", [1, 10, 24])
def test_short_runs_have_no_filter(steps):
    assert auto(steps=steps, noise_std=100.0) == PAPER_FILTERS["none"]


@pytest.mark.parametrize("steps", [25, 99, 1000, 123_456])
@pytest.mark.parametrize("noise_std", [1e-3, 1e3])
def test_the_delay_is_at_most_a_fiftieth_of_the_run(steps, noise_std):
    low_pass_filter = auto(steps=steps, noise_std=noise_std)
    assert delay(low_pass_filter) <= steps / 50 * (1 + 1e-9)
    if noise_std > 1:
        # Rounding the cutoff costs less than 1 %.
        assert delay(low_pass_filter) > 0.99 * steps / 50


def test_endless_runs_filter_more_in_steps_and_less_in_their_share():
    delays = [delay(auto(steps=steps)) for steps in (10**3, 10**4, 10**5, 10**6)]
    shares = np.array(delays) / 10.0 ** np.arange(3, 7)
    assert np.all(np.diff(delays) > 0)
    assert np.all(np.diff(shares) < 0)
    np.testing.assert_allclose(delays[3] / delays[2], 10 ** (2 / 3), rtol=0.02, atol=0)


@pytest.mark.parametrize(("name", "factor"), [("noise_std", 2.0), ("dimension", 4), ("max_grad_norm", 0.5)])
def test_more_noise_for_the_signal_filters_more(name, factor):
    options = dict(noise_std=1e-3, dimension=100_000, max_grad_norm=1.0)
    more = auto(**{name: type(options[name])(options[name] * factor)})
    assert delay(more) > 1.3 * delay(auto())
    assert more == auto(noise_std=2e-3)


def test_a_rate_that_decays_makes_the_filter_wider():
    constant, halved = auto(), auto(learning_rates=np.linspace(1, 0, 1000, endpoint=False))
    assert constant == auto(learning_rates=[3e-4] * 1000)
    # τ_s is halved, so D falls by about 2^(2/3).
    assert delay(constant) / delay(halved) == pytest.approx(2 ** (2 / 3), rel=0.06)


def test_the_name_is_short_and_reads_back():
    assert str(auto()) == f"butterworth:order=1,cutoff={float(str(auto()).rpartition('=')[2])}"
    assert len(str(auto())) <= len("butterworth:order=1,cutoff=0.0123")


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
