"""The figures against what is known of momentum, averages and Butterworth filters."""

import math

import numpy as np
import pytest

from doppler_hf.filters import PAPER_FILTERS, butterworth, filter_figures, impulse_response, momentum, moving_average


def test_momentum_is_known_in_closed_form():
    figures = filter_figures(momentum(0.9))
    assert figures.order == 1
    np.testing.assert_allclose(
        (figures.noise_gain, figures.delay, figures.largest_pole), (0.1 / 1.9, 9, 0.9), rtol=1e-9, atol=0
    )
    # |H|² = 0.01 / (1 + 0.81 - 1.8 cos ω) = 1/2
    np.testing.assert_allclose(figures.cutoff, math.acos((1.81 - 0.02) / 1.8) / math.pi, rtol=1e-9, atol=0)
    # 1 - 0.9^n ≥ 0.98, and (1 + 0.9^n) / (1 - 0.9^n) ≤ 1.1, for n steps.
    assert figures.settling_steps == math.ceil(math.log(0.02, 0.9))
    assert figures.startup_steps == math.ceil(math.log(0.1 / 2.1, 0.9))


@pytest.mark.parametrize("taps", [2, 10])
def test_averages_settle_when_they_are_full(taps):
    figures = filter_figures(moving_average(taps))
    assert (figures.order, figures.settling_steps, figures.largest_pole) == (taps - 1, taps, 0.0)
    # The noise of a mean of n is 1/n: within a tenth of 1/taps from n = taps / 1.1 on.
    assert figures.startup_steps == math.ceil(taps / 1.1)
    np.testing.assert_allclose((figures.delay, figures.noise_gain), ((taps - 1) / 2, 1 / taps), rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("cutoff", [0.001, 0.3, 0.97])
def test_cutoff_of_butterworth_is_what_it_was_designed_for(order, cutoff):
    figures = filter_figures(butterworth(order, cutoff))
    assert figures.order == order
    np.testing.assert_allclose(figures.cutoff, cutoff, rtol=1e-4, atol=0)


def test_a_response_that_leaves_its_band_again_has_not_settled():
    """f6 rings: it passes through 1 several times."""
    response = np.cumsum(impulse_response(PAPER_FILTERS["f6"], 300))
    outside = np.flatnonzero(np.abs(response - 1) > 0.02)
    figures = filter_figures(PAPER_FILTERS["f6"])
    assert np.argmin(np.abs(response[:20] - 1)) + 1 < figures.settling_steps == outside[-1] + 2
    np.testing.assert_allclose(figures.largest_pole, math.sqrt(0.85), rtol=1e-12, atol=0)
