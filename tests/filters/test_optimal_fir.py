"""The best filter without feedback for a known autocorrelation."""

import numpy as np
import pytest

from doppler_hf.filters import LowPassFilter, optimal_fir


def test_optimal_fir_is_proportional():
    low_pass_filter = optimal_fir(np.array([2.0, 1.0, 0.0, 1.0]))
    assert low_pass_filter == LowPassFilter(b=(0.5, 0.25, 0.0, 0.25))


def test_an_autocorrelation_without_a_positive_sum_is_refused():
    for lags, found in (([0.5, -0.5], "0"), ([0.5, np.nan], "nan")):
        with pytest.raises(ValueError, match=f"must have a positive sum, by which b is divided, got {found}"):
            optimal_fir(np.array(lags))
