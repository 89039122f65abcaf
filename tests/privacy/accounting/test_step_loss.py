"""The loss of one step is Opacus's, to the last bit where that is not lost, and its mean is that of a fine quadrature."""

import numpy as np
import pytest
from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV, TruncatedPrivacyRandomVariable

from doppler_hf.privacy.accounting.step_loss import StepLoss

MECHANISMS = [(0.2, 0.3), (0.4, 1e-3), (3.0, 0.999), (300.0, 1e-5)]


@pytest.mark.parametrize(("sigma", "rate"), MECHANISMS)
def test_the_distribution_is_opacuss(sigma, rate):
    edges = StepLoss(rate, sigma, t_min=-1.0, t_max=1.0)._largest + np.linspace(-1, 1, 2001)
    t = np.concatenate([np.linspace(-80, 80, 40_001), np.log1p(-rate) + np.linspace(-1e-3, 1e-3, 2001), edges])
    ours = StepLoss(rate, sigma, t_min=-70.0, t_max=70.0)
    opacus = TruncatedPrivacyRandomVariable(PoissonSubsampledGaussianPRV(rate, sigma), -70.0, 70.0)
    with np.errstate(divide="ignore"):  # a logarithm of 0 in Opacus's formula
        np.testing.assert_array_equal(ours.cdf(t), opacus.cdf(t))


@pytest.mark.parametrize(("sigma", "rate"), MECHANISMS)
def test_the_mean_is_that_of_a_fine_quadrature_and_of_opacus(sigma, rate):
    loss = StepLoss(rate, sigma, t_min=-70.0, t_max=70.0)
    # ∫ L dP by midpoints, of which there are many.
    x = (np.arange(2**18) + 0.5) / 2**18 * (1 + 24 * sigma) - 12 * sigma
    density = (1 - rate) * np.exp(-(x**2) / (2 * sigma**2)) + rate * np.exp(-((x - 1) ** 2) / (2 * sigma**2))
    exact = np.sum(density * loss._loss(x)) / np.sum(density)
    assert loss.mean() == pytest.approx(exact, rel=1e-11, abs=1e-16)
    opacus = TruncatedPrivacyRandomVariable(PoissonSubsampledGaussianPRV(rate, sigma), -70.0, 70.0)
    # The tolerance of its quadrature is 1.5e-8 for each of 22 pieces.
    assert loss.mean() == pytest.approx(opacus.mean(), abs=22 * 1.5e-8)
