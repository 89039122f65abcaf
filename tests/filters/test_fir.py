"""The estimate finds a known autocorrelation within its standard error, and its filter is the best of all."""

import numpy as np
import pytest
import scipy.signal

from doppler_hf.filters import (
    LowPassFilter,
    autocorrelation_from_products,
    estimate_autocorrelation,
    optimal_fir,
)

STEPS, DIMENSION, TAPS = 400, 300, 12
POLES = {"ar1": [0.95], "ar2": [0.95 * np.exp(0.1j), 0.95 * np.exp(-0.1j)], "fast": [0.5]}


def make_signal(kind, generator, steps=STEPS):
    """A signal of mean power 1, and its autocorrelation over these steps, from its definition; 0 where negative."""
    if kind == "constant":
        signal = np.tile(generator.normal(size=DIMENSION), (steps, 1))
    else:
        noise = generator.normal(size=(steps + 300, DIMENSION))
        signal = scipy.signal.lfilter([1], np.poly(POLES[kind]).real, noise, axis=0)[300:]
    signal /= np.sqrt(np.mean(np.sum(signal**2, axis=1)))
    products = [np.mean([signal[t] @ signal[t - lag] for t in range(lag, steps)]) for lag in range(TAPS)]
    return signal, 0.5 * np.clip(products, 0, 1)


def standard_error(autocorrelation: np.ndarray, *, noise_std: float) -> np.ndarray:
    """An upper bound for each c_τ, for a signal of power 1 and white noise.

    For τ ≥ 1 the products of noise with noise in C_τ have variance d σ⁴ / (T-τ), those of noise with signal at most
    4 σ² / (T-τ); C_0 has (2 d σ⁴ + 4 σ²) / T, and Cov(C_τ, C_0) = 4 σ² ρ_τ / T. To first order,

        4 Var(c_τ) ≤ d σ⁴ (1/(T-τ) + 2 ρ_τ²/T) + 4 σ² (1/(T-τ) - ρ_τ²/T).
    """
    squares, pairs = (2 * autocorrelation) ** 2, STEPS - np.arange(len(autocorrelation))
    of_noise = DIMENSION * noise_std**4 * (1 / pairs + 2 * squares / STEPS)
    of_both = 4 * noise_std**2 * (1 / pairs - squares / STEPS)
    error = np.sqrt(of_noise + of_both) / 2
    error[0] = 0.0
    return error


@pytest.mark.parametrize("noise_to_signal", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("kind", ["constant", *POLES])
def test_known_autocorrelations_are_found_within_their_standard_error(kind, noise_to_signal):
    """Six standard errors in each of 11 lags: 2e-8 for one draw, and clipping to [0, 1/2] only helps."""
    generator = np.random.default_rng(7)
    signal, true = make_signal(kind, generator)
    noise_std = np.sqrt(noise_to_signal / DIMENSION)
    gradients = signal + noise_std * generator.normal(size=signal.shape)
    estimate = estimate_autocorrelation(gradients, noise_std, taps=TAPS)
    error = standard_error(true, noise_std=noise_std)
    assert estimate[0] == 0.5
    assert np.all(np.abs(estimate - true) <= 6 * error + 1e-12)
    assert error.max() <= {0.0: 0.0, 1.0: 0.0035, 10.0: 0.035}[noise_to_signal]


def test_products_gathered_along_the_way_give_the_same_estimate():
    generator = np.random.default_rng(4)
    gradients = generator.normal(size=(50, 20)) + 1
    products = np.array([np.mean([gradients[t] @ gradients[t - lag] for t in range(lag, 50)]) for lag in range(5)])
    np.testing.assert_allclose(
        autocorrelation_from_products(products, 1.0, dimension=20, steps=50),
        estimate_autocorrelation(gradients, 1.0, taps=5),
        rtol=1e-12,
        atol=0,
    )


def test_optimal_fir_is_proportional():
    low_pass_filter = optimal_fir(np.array([2.0, 1.0, 0.0, 1.0]))
    assert low_pass_filter == LowPassFilter(b=(0.5, 0.25, 0.0, 0.25))


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_fir(np.array([0.5, -0.5])), "must have a positive sum, by which b is divided, got 0"),
        (lambda: estimate_autocorrelation(np.zeros((0, 3)), 0.0), r"gradients must have shape .* got \(0, 3\)"),
        (lambda: estimate_autocorrelation(np.ones((3, 2)), -1.0), "noise_std must be finite and at least 0, got -1.0"),
        (
            lambda: estimate_autocorrelation(np.ones((3, 2)), 1.0, taps=4),
            "taps must be an integer from 1 to the 3 gradients, got 4",
        ),
        (
            lambda: autocorrelation_from_products(np.ones(2), 1.0, dimension=0, steps=3),
            "dimension and steps must be at least 1, got 0 and 3",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
