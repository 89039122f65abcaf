"""What is no autocorrelation has no SNR; test_noise_shape.py has the SNR of white and of shaped noise."""

import numpy as np
import pytest

from doppler_hf.filters import PAPER_FILTERS, signal_to_noise_ratio


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
