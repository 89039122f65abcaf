"""The SNR is the paper's double sum, and its statements about it hold or are off by what is said."""

import math

import numpy as np
import pytest

from doppler_hf.filters import (
    PAPER_FILTERS,
    impulse_response,
    optimal_fir,
    signal_to_noise_ratio,
)

SLOW = 0.5 * 0.95 ** np.arange(200)


@pytest.mark.parametrize("name", ["none", "momentum", "second-order", "f6"])
@pytest.mark.parametrize("steps", [1, 7, 60])
def test_snr_is_the_double_sum_of_the_paper(name, steps):
    c = 0.5 * np.cos(0.1 * np.arange(40)) * 0.97 ** np.arange(40)
    kappa = impulse_response(PAPER_FILTERS[name], steps)
    numerator = denominator = 0.0
    for t in range(steps):
        for lag in range(t + 1):
            numerator += (c[lag] if lag < 40 else 0.0) * kappa[lag]
            denominator += kappa[lag] ** 2
    np.testing.assert_allclose(
        signal_to_noise_ratio(PAPER_FILTERS[name], c, steps), numerator / denominator, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("taps", [2, 8, 50])
def test_proportional_taps_are_best_for_the_bound_and_not_for_the_snr(taps):
    """Against random filters, and against the values that the module's docstring derives."""
    c = SLOW[:taps]
    root_mean_square = math.sqrt(np.mean(c**2))
    proportional, affine = optimal_fir(c), optimal_fir(c, objective="snr")
    np.testing.assert_allclose(signal_to_noise_ratio(proportional, c), c.sum(), rtol=1e-12, atol=0)
    best = taps * (c.mean() + root_mean_square) / 2
    np.testing.assert_allclose(signal_to_noise_ratio(affine, c), best, rtol=1e-12, atol=0)
    assert best > c.sum()
    generator = np.random.default_rng(0)
    for _ in range(200):
        kappa = np.array(generator.choice([proportional.b, affine.b])) + generator.normal(
            scale=generator.choice([0.1, 0.001]), size=taps
        )
        kappa /= kappa.sum()
        assert c @ kappa / (kappa @ kappa) <= best * (1 + 1e-12)
        assert (c @ kappa) ** 2 / (kappa @ kappa) <= c @ c * (1 + 1e-12)


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize(
    ("autocorrelation", "message"),
    [
        (np.array([]), r"must be c_0, c_1, ... in one row, got shape \(0,\)"),
        (np.array([0.5, np.nan]), "got nan at lag 1"),
        (np.array([0.5, 0.1j]), "must be finite and real, got 0.1j at lag 1"),
    ],
)
def test_bad_autocorrelations_are_refused(autocorrelation, message):
    with pytest.raises(ValueError, match=message):
        signal_to_noise_ratio(PAPER_FILTERS["f1"], autocorrelation, 10)
