"""The SNR is the paper's double sum, and its statements about it hold or are off by what is said."""

import numpy as np
import pytest

from doppler_hf.filters import (
    PAPER_FILTERS,
    impulse_response,
    signal_to_noise_ratio,
)


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
