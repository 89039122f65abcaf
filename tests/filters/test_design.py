"""Designs have the shape that was asked for and unit gain; what has not is refused."""

import numpy as np
import pytest
import scipy.signal

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, butterworth, momentum, moving_average
from doppler_hf.filters.design import hann
from tests.support.refusals import refused

# The rows of the paper's two tables, copied in the paper's own form: (b, a without the leading one, denominator).
PAPER_ROWS = {
    "none": ([1], [], 1),
    "momentum": ([0.1], [-0.9], 1),
    "first-order-v1": ([1, 1], [-9], 11),
    "first-order-v2": ([3, -1], [-9], 11),
    "second-order": ([1, 2, 1], [-92, 38], 58),
    "f1": ([0.075, 0.025], [-0.9], 1),
    "f2": ([0.025, 0.075], [-0.9], 1),
    "f3": ([0.1, 0.1], [-0.8], 1),
    "f4": ([0.2, 0.2], [-0.6], 1),
    "f5": ([0.025, 0.05, 0.025], [-0.9], 1),
    "f6": ([0.025, 0.025], [-1.8, 0.85], 1),
}


def test_presets_are_the_rows_of_the_paper():
    assert list(PAPER_FILTERS) == list(PAPER_ROWS)
    for name, (b, a, denominator) in PAPER_ROWS.items():
        assert PAPER_FILTERS[name].b == tuple(value / denominator for value in b)
        assert PAPER_FILTERS[name].a == (1.0, *(value / denominator for value in a))


def test_coefficients_that_lost_the_shape_of_their_design_are_refused():
    b, a = scipy.signal.butter(10, 0.02)
    gain = abs(scipy.signal.freqz(b, a, worN=[0.02], fs=2)[1][0] / scipy.signal.freqz(b, a, worN=[0.0], fs=2)[1][0])
    assert abs(gain - 0.5**0.5) > 1e-3
    with refused("unstable-filter", match=r"0\.\d+"):
        butterworth(10, 0.02)


def test_a_cutoff_too_low_for_its_order_is_refused():
    with refused("unstable-filter", match="cutoff"):
        butterworth(10, 0.005)


@pytest.mark.parametrize(
    ("design", "value"),
    [
        (lambda: butterworth(0, 0.5), "order .*0"),
        (lambda: butterworth(1.5, 0.5), "order .*1.5"),
        (lambda: butterworth(2, 1.0), "cutoff .*1.0"),
        (lambda: butterworth(2, 0.5j), "cutoff .*0.5j"),
        (lambda: moving_average(0), "taps .*0"),
        (lambda: hann(0), "length .*0"),
        (lambda: momentum(1.0), "beta .*1.0"),
    ],
)
def test_bad_designs_are_refused_with_the_value(design, value):
    with refused("out-of-range", match=value):
        design()


@pytest.mark.parametrize("length", [1, 2, 7, 8, 300])
def test_a_hann_window_is_scipys_without_its_zeros(length):
    window = scipy.signal.windows.hann(length + 2)[1:-1]
    designed = LowPassFilter.parse(f"hann:length={length}")
    assert designed == hann(length)
    assert designed.a == (1.0,)
    np.testing.assert_allclose(designed.b, window / window.sum(), atol=1e-16, rtol=1e-12)
    assert str(designed) == (f"hann:length={length}" if length > 1 else "none")
