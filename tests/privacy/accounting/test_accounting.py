"""ε against Google's dp-accounting."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from doppler_hf.privacy.accounting.accounting import (
    Releases,
    get_epsilon,
    get_total_epsilon,
    joint_noise_multiplier,
)
from tests.support.tiers import further

ACCOUNTANTS = ["prv", "rdp", "pld"]

CASES = [
    # noise multiplier, sample rate, steps, δ
    (0.8, 0.0184, 165, 6e-6),
    (1.0, 0.01, 1000, 1e-5),
    (2.0, 0.1, 300, 1e-5),
    (5.0, 0.5, 20, 1e-6),
    (0.6, 0.002, 3000, 1e-6),
]


def google(accountant, sigma, rate, steps):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), further(CASES, quick=CASES[:3]))
def test_prv_and_pld_agree_with_googles_privacy_loss_distributions(sigma, rate, steps, delta):
    mechanism = dict(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta)
    # Pessimistic, on a grid of its own: too large by less than one part in a thousand here.
    theirs = google(PLDAccountant(value_discretization_interval=1e-4), sigma, rate, steps).get_epsilon(delta)
    assert get_epsilon(**mechanism, accountant="pld") == pytest.approx(theirs, rel=1e-3)
    assert theirs * (1 - 1e-3) < get_epsilon(**mechanism) < theirs * 1.005


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), CASES)
def test_rdp_agrees_with_googles(sigma, rate, steps, delta):
    ours = get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant="rdp")
    theirs = google(RdpAccountant(), sigma, rate, steps).get_epsilon(delta)
    assert ours == pytest.approx(theirs, rel=0.01)
    assert ours > get_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant="prv")


def test_accountants_differ_in_their_slack():
    history = [Releases(1.0, 0.01, 300), Releases(2.0, 0.01, 300), Releases(1.0, 0.01, 20)]
    epsilons = {name: get_total_epsilon(iter(history), delta=1e-5, accountant=name) for name in ACCOUNTANTS}
    assert epsilons["pld"] < epsilons["prv"] < epsilons["rdp"]


def largest_gain(sigmas, rate, epsilon):
    """∫ (P − e^ε Q)₊ over the plane, P = (1 − q) N(0, I) + q N((1/σ₁, 1/σ₂), I), Q = N(0, I): δ of two joint releases."""
    step = 0.02
    axis = np.arange(-8, 14, step)
    base = norm.pdf(axis)[:, None] * norm.pdf(axis)
    shifted = norm.pdf(axis - 1 / sigmas[0])[:, None] * norm.pdf(axis - 1 / sigmas[1])
    return np.maximum((1 - rate) * base + rate * shifted - math.exp(epsilon) * base, 0).sum() * step**2


@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("sigmas", [(0.7, 3.0), (2.0, 0.5)])
def test_two_releases_of_one_draw_against_the_plane(sigmas, rate):
    joint = joint_noise_multiplier(*sigmas)
    epsilon = get_epsilon(noise_multiplier=joint, sample_rate=rate, steps=1, delta=1e-3, accountant="pld")
    assert largest_gain(sigmas, rate, epsilon) == pytest.approx(1e-3, rel=0.01)
    # Nothing less would do.
    smaller = get_epsilon(noise_multiplier=min(sigmas), sample_rate=rate, steps=1, delta=1e-3, accountant="pld")
    assert largest_gain(sigmas, rate, smaller) > 1.2e-3


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_joint_noise_multiplier(sigmas):
    joint = joint_noise_multiplier(*sigmas)
    assert joint == pytest.approx(np.linalg.norm([1 / sigma for sigma in sigmas]) ** -1, rel=1e-12)
    assert joint == pytest.approx(joint_noise_multiplier(*reversed(sigmas), math.inf), rel=1e-12)
    # In full batches the draw is the same in every step, so one joint release is as good as one after the other.
    apart = get_total_epsilon([Releases(sigma, 1.0, 1) for sigma in sigmas], delta=1e-5, accountant="rdp")
    together = get_epsilon(noise_multiplier=joint, sample_rate=1.0, steps=1, delta=1e-5, accountant="rdp")
    assert together == pytest.approx(apart, rel=1e-9)


def test_no_noise_costs_everything_and_no_step_nothing():
    assert get_epsilon(noise_multiplier=0.0, sample_rate=0.1, steps=1, delta=1e-5) == math.inf
    assert get_epsilon(noise_multiplier=0.0, sample_rate=0.1, steps=0, delta=1e-5) == 0.0


def test_splitting_a_run_changes_nothing_and_mechanisms_add_up():
    def total(*history):
        return get_total_epsilon(history, delta=1e-5, accountant="rdp")

    whole = total(Releases(1.0, 0.01, 300))
    assert total(Releases(1.0, 0.01, 100), Releases(1.0, 0.01, 200)) == whole
    assert total(Releases(1.0, 0.01, 300), Releases(2.0, 0.01, 300)) > whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(sample_rate=0.0), r"sample_rate must lie in \(0, 1\], got 0"),
        (dict(sample_rate=1.0), "Use accountant='pld' or 'rdp', or a smaller batch"),
        (dict(steps=-1), "steps must be at least 0, got -1"),
        (dict(noise_multiplier=-0.1), "got -0.1"),
        (dict(delta=1.0), r"delta must lie in \(0, 1\), got 1"),
        (dict(accountant="gdp"), "one of prv, rdp, pld, got 'gdp'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_epsilon(**(dict(noise_multiplier=1.0, sample_rate=0.1, steps=10, delta=1e-5) | arguments))
