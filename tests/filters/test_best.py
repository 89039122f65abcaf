"""The search finds what closed forms and brute force find, and nothing better is among other filters."""

import functools

import numpy as np
import pytest

from doppler_hf.filters import (
    best_filter,
    impulse_response,
    optimal_fir,
    signal_to_noise_ratio,
)
from tests.support.tiers import combined

LAGS = np.arange(60)
LARGEST_POLE = 0.01 ** (1 / 60)
SIGNALS = {
    "decay": 0.5 * 0.8**LAGS,
    "two decays": 0.25 * 0.9**LAGS + 0.25 * 0.3**LAGS,
    "smooth": 0.5 * np.exp(-0.5 * (LAGS / 6) ** 2),
    "oscillation": 0.5 * 0.9**LAGS * np.cos(0.6 * LAGS),
}


@functools.cache
def best_of(name, order, objective="snr"):
    return best_filter(SIGNALS[name], order, objective=objective)


def bound(low_pass_filter, c):
    """SNR · S_T per step as T → ∞."""
    return signal_to_noise_ratio(low_pass_filter, c) * float(impulse_response(low_pass_filter, len(c)) @ c)


@pytest.mark.parametrize("decay", [0.3, 0.8, 0.95])
def test_momentum_is_best_for_the_bound_of_an_exponential_decay(decay):
    low_pass_filter = best_filter(0.5 * decay ** np.arange(200), 1, objective="bound")
    np.testing.assert_allclose(
        impulse_response(low_pass_filter, 50), (1 - decay) * decay ** np.arange(50), rtol=0, atol=1e-4
    )


@functools.cache
def responses_of_first_order():
    """Return the impulse responses of a dense grid of the filters that are allowed, one per row."""
    poles, shares = np.meshgrid(np.linspace(-LARGEST_POLE, LARGEST_POLE, 81), np.linspace(-0.98, 5, 240))
    poles, b_0, b_1 = poles.ravel(), ((1 - poles) * shares).ravel(), ((1 - poles) * (1 - shares)).ravel()
    kappa = np.stack([b_0, *((b_0 * poles + b_1) * poles**lag for lag in range(200))], axis=1)
    kappa = kappa[np.cumsum(kappa, axis=1).min(axis=1) > 0]
    assert len(kappa) > 5000
    return kappa, np.sum(kappa**2, axis=1)


@pytest.mark.parametrize(("name", "objective"), combined(SIGNALS, ["snr", "bound"], strength=1))
def test_the_search_loses_to_no_grid_of_first_order_filters(name, objective):
    c = SIGNALS[name]
    value = signal_to_noise_ratio if objective == "snr" else bound
    best = value(best_of(name, 1, objective), c)
    kappa, noise = responses_of_first_order()
    signal = kappa[:, :60] @ c
    values = (signal if objective == "snr" else signal**2) / noise
    # The grid has the largest pole itself, the search comes within 2e-7 of it.
    assert best >= values.max() * (1 - 1e-5)
    # The grid is dense enough to come close, so the search does not win by leaving what is allowed.
    assert best <= values.max() * 1.02


@pytest.mark.parametrize("objective", ["snr", "bound"])
def test_as_many_taps_as_lags_do_at_least_as_well_as_the_closed_form(objective):
    c = np.array([0.5, 0.4, 0.1, 0.05])
    value = signal_to_noise_ratio if objective == "snr" else bound
    best, closed = value(best_filter(c, 3, objective=objective), c), value(optimal_fir(c, objective=objective), c)
    assert best >= closed * (1 - 1e-9)
    if objective == "bound":
        np.testing.assert_allclose(best, c @ c, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("c", "order", "message"),
    [
        (np.array([0.5, 0.4]), 2, "order must be an integer from 0 to 1, one less than the lags known, got 2"),
        (np.array([0.0, 0.4]), 1, "must be positive at lag 0, the power of the signal, got 0.0"),
    ],
)
def test_bad_input_is_refused(c, order, message):
    with pytest.raises(ValueError, match=message):
        best_filter(c, order)
