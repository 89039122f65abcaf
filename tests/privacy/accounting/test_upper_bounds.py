"""The three bounds against closed forms (one step, full batches), quadrature, and one another."""

import math

import numpy as np
import pytest
from opacus.accountants import PRVAccountant
from scipy.special import logsumexp
from scipy.stats import norm

from doppler_hf.privacy.accounting import upper_bounds as bounds
from doppler_hf.privacy.accounting.upper_bounds import pld_epsilon, prv_epsilon, prv_estimate, rdp_epsilon
from tests.support.tiers import thorough


def gaussian_delta(sigma, epsilon):
    """δ(ε) of the Gaussian mechanism without sampling (Balle & Wang 2018, Theorem 8)."""
    shift = 1 / sigma
    return norm.cdf(shift / 2 - epsilon / shift) - np.exp(epsilon + norm.logcdf(-shift / 2 - epsilon / shift))


def sampled_delta(sigma, rate, epsilon):
    """δ(ε) of one sampled step when an example is removed: P(L > ε) − e^ε Q(L > ε), and {L > ε} is a half line."""
    threshold = 0.5 + sigma**2 * math.log(1 + math.expm1(epsilon) / rate)
    base, shifted = norm.sf(threshold, scale=sigma), norm.sf(threshold, loc=1, scale=sigma)
    return (1 - rate) * base + rate * shifted - math.exp(epsilon) * base


def is_bound(epsilon, delta_at, delta, *, within):
    """Whether ε is no less than the exact one, and more by less than a share of it."""
    return delta_at(epsilon) <= delta * (1 + 1e-9) and delta_at(epsilon * (1 - within)) > delta


@pytest.mark.parametrize("order", [1.1, 2.0, 11.9, 63.0, 1024.0])
@pytest.mark.parametrize(("sigma", "rate"), [(0.4, 0.5), (1.0, 0.01), (300.0, 0.1), (2.0, 0.9)])
def test_renyi_divergence_against_quadrature_is_never_less(sigma, rate, order):
    # E over N(0, σ²) of ((1 − q) + q e^{(2x − 1)/2σ²})^α: the trapezoidal rule is exact here to rounding.
    z = np.arange(-40, 40 + order / sigma, 0.01)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z * sigma - 1) / (2 * sigma**2))
    exact = logsumexp(order * log_ratio - z**2 / 2 + math.log(0.01) - math.log(2 * math.pi) / 2) / (order - 1)
    if order == int(order):
        (ours,) = bounds._rdp_of_step(sigma, rate, (order,))
    else:
        ours = bounds._rdp_at_fractional_order(sigma, rate, order)
    # Opacus is exact to about 1e-13/(α − 1), and 1e-12/(α − 1) is added; the rest is the quadrature's rounding.
    assert exact * (1 - 1e-13) < ours <= exact * (1 + 1e-12) + 3e-12 / (order - 1)


@pytest.mark.parametrize("steps", [1, 20_000])
@pytest.mark.parametrize("mu", [0.02, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_full_batches_against_the_exact_gaussian(mu, steps, delta):
    # T steps of noise σ are one of noise σ/√T.
    sigma = math.sqrt(steps) / mu

    def exact(epsilon):
        return gaussian_delta(1 / mu, epsilon)

    if exact(0.0) <= delta:
        assert pld_epsilon([(sigma, 1.0, steps)], delta=delta) < 1e-3
        return
    assert is_bound(pld_epsilon([(sigma, 1.0, steps)], delta=delta), exact, delta, within=1e-3)
    assert is_bound(rdp_epsilon([(sigma, 1.0, steps)], delta=delta), exact, delta, within=0.4)


@pytest.mark.parametrize(("mu", "steps", "delta"), [(0.2, 50, 1e-6), (1.0, 20_000, 1e-5), (3.0, 1, 1e-9), (3.0, 1000, 1e-9)])
def test_nearly_full_batches_against_the_exact_gaussian(mu, steps, delta):
    # PRV has no q = 1; one in 10⁹ examples left out changes the Gaussian's ε by less than 1e-6 of it.
    bound = prv_epsilon([(math.sqrt(steps) / mu, 1 - 1e-9, steps)], delta=delta)
    assert gaussian_delta(1 / mu, bound * (1 + 1e-6)) <= delta < gaussian_delta(1 / mu, bound * 0.99)


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize(("sigma", "rate"), [(0.7, 0.01), (2.0, 0.5), (0.15, 1e-4)])
def test_one_sampled_step_against_the_closed_form(sigma, rate, delta):
    def exact(epsilon):
        return sampled_delta(sigma, rate, epsilon)

    mechanism = [(sigma, rate, 1)]
    assert exact(0.0) > delta
    assert is_bound(pld_epsilon(mechanism, delta=delta), exact, delta, within=1e-3)
    assert is_bound(prv_epsilon(mechanism, delta=delta), exact, delta, within=0.02)
    assert is_bound(rdp_epsilon(mechanism, delta=delta), exact, delta, within=0.99)
    # An upper bound, not the estimate: PRV's error bound, at least 6/65536 √(ln(12/δ_error)/2), lies between the two.
    assert exact(prv_epsilon(mechanism, delta=delta) - 3e-4) < delta


MECHANISMS = [
    # σ, q, T
    (0.8, 0.0184, 165),
    (1.0, 0.01, 1000),
    *thorough((2.0, 0.1, 300), (0.6, 0.002, 3000), (100.0, 0.5, 20_000)),
    (0.5, 1e-4, 20_000),
]


# Opacus's own accountant, which is called here, sizes its grid by orders up to 63 and says so.
@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
@pytest.mark.parametrize(("sigma", "rate", "steps"), MECHANISMS)
def test_the_bounds_agree(sigma, rate, steps):
    mechanism = sigma, rate, steps
    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    lower, estimate, _ = accountant._get_dprv(eps_error=0.01, delta_error=1e-8).compute_epsilon(1e-5, 1e-8, 0.01)
    prv, rdp, pld = (bound([mechanism], delta=1e-5) for bound in (prv_epsilon, rdp_epsilon, pld_epsilon))
    # PLD takes the worse of adding and removing, PRV removal only: that PRV is not below shows which one is worse.
    assert lower < estimate * (1 - 1e-4) < pld < prv < rdp
    assert prv < pld * 1.01
    # The coarse grid's rounding, h²T/12 in the variance of the loss, with the spacing h of the fine one times 8.
    assert prv_estimate([mechanism], delta=1e-5) == pytest.approx(prv, rel=2e-4)


@pytest.mark.parametrize("sigma", [0.5, 20.0])
def test_rdp_is_converted_at_the_best_order(sigma):
    # Balle et al. 2020, for ρ(α) = α/2σ², at orders 50 times as dense.
    orders, delta = 1 + np.geomspace(1e-3, 1e3, 5000), 1e-5
    epsilons = orders / (2 * sigma**2) + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    assert epsilons.min() <= rdp_epsilon([(sigma, 1.0, 1)], delta=delta) < epsilons.min() * 1.005


def test_rdp_takes_over_where_it_is_smaller_than_the_error_of_prv():
    mechanism = [(2000.0, 1e-5, 20_000)]
    assert prv_epsilon(mechanism, delta=1e-4) == rdp_epsilon(mechanism, delta=1e-4) < 0.002


@pytest.mark.parametrize("bound", [prv_epsilon, pld_epsilon])
def test_rdp_takes_over_where_fourier_transforms_lose_delta(bound):
    mechanism = [(1.0, 0.1, 100)]
    assert bound(mechanism, delta=0.9e-10) == rdp_epsilon(mechanism, delta=0.9e-10)
    assert bound(mechanism, delta=1.1e-10) < rdp_epsilon(mechanism, delta=1.1e-10)


def test_pld_takes_over_where_prv_overflows():
    mechanism = (0.4, 0.5, 1000)
    assert prv_epsilon([mechanism], delta=1e-5) == pld_epsilon([mechanism], delta=1e-5)
    assert pld_epsilon([mechanism], delta=1e-5) < rdp_epsilon([mechanism], delta=1e-5) < math.inf
