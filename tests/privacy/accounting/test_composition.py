"""Composed rounds against closed forms, against Google's accountant, and one against the other."""

import functools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from doppler_hf.privacy.accounting import Releases, get_epsilon, get_noise_multiplier
from doppler_hf.privacy.accounting.composition import Rounds, delta_curve, epsilons_of, gaussian_epsilon
from tests.support.tiers import thorough


def epsilon_of(rounds, **terms):
    return max(epsilons_of(rounds, **terms))


def gaussian_delta(mu, epsilon):
    """δ(ε) of the Gaussian mechanism without sampling (Balle & Wang 2018, Theorem 8)."""
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))


def sampled_delta(sigma, rate, epsilon):
    """δ(ε) of one sampled step when an example is removed: P(L > ε) − e^ε Q(L > ε), and {L > ε} is a half line."""
    threshold = 0.5 + sigma**2 * math.log(1 + math.expm1(epsilon) / rate)
    base, shifted = norm.sf(threshold, scale=sigma), norm.sf(threshold, loc=1, scale=sigma)
    return (1 - rate) * base + rate * shifted - math.exp(epsilon) * base


def is_bound(epsilon, delta_at, delta, *, within):
    """Whether ε is no less than the exact one, and more by less than a share of it."""
    return delta_at(epsilon) <= delta * (1 + 1e-9) and delta_at(epsilon * (1 - within)) > delta


@functools.cache
def googles(sigma, rate, steps, delta):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps)).get_epsilon(delta)


POISSON = [
    # σ, q, T, δ
    (0.8, 0.0184, 165, 6e-6),
    (5.0, 0.5, 20, 1e-6),
    *thorough((0.6, 0.002, 3000, 1e-6), (1.0, 0.01, 1000, 1e-5), (2.0, 0.1, 300, 1e-5), (0.5, 1e-4, 20_000, 1e-5)),
]


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), POISSON)
def test_rounds_of_one_turn_are_poisson_sampling(sigma, rate, steps, delta):
    theirs = googles(sigma, rate, steps, delta)
    terms = dict(sample_rate=rate, steps=steps, sampling="poisson")
    assert get_epsilon(noise_multiplier=sigma, delta=delta, **terms) == pytest.approx(theirs, rel=1e-3)
    of_target = get_noise_multiplier(target_epsilon=theirs, target_delta=delta, **terms)
    assert of_target == pytest.approx(sigma, rel=1e-3)
    assert epsilon_of([Rounds(sigma, rate, 1, steps)], delta=delta, coarsening=4) == pytest.approx(theirs, rel=5e-3)


@pytest.mark.parametrize("number", [1, 20_000])
@pytest.mark.parametrize("mu", [0.02, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_full_batches_against_the_exact_gaussian(mu, number, delta):
    def exact(epsilon):
        return gaussian_delta(mu, epsilon)

    found = epsilon_of([Rounds(math.sqrt(number) / mu, 1.0, 1, number)], delta=delta)
    assert found == 0.0 if exact(0.0) <= delta else is_bound(found, exact, delta, within=1e-3)


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize(("sigma", "rate"), [(0.7, 0.01), (2.0, 0.5), (0.15, 1e-4)])
def test_one_sampled_step_against_the_closed_form(sigma, rate, delta):
    found = epsilon_of([Rounds(sigma, rate, 1, 1)], delta=delta)
    assert is_bound(found, functools.partial(sampled_delta, sigma, rate), delta, within=1e-3)


def test_of_a_round_that_is_cut_in_its_first_turn_only_some_groups_pay():
    found = epsilon_of([Rounds(0.8, 0.2, 0, 1, 0.25)], delta=1e-5)
    assert is_bound(found, lambda epsilon: 0.25 * sampled_delta(0.8, 0.2, epsilon), 1e-5, within=1e-3)


@pytest.mark.parametrize(
    ("turns", "number", "epsilon", "delta", "noise"),
    [
        # ε = 1, 3 and 8 of runs of practice; importance-sampled estimates with another program, to some parts in a thousand
        (68, 3, 1.0, 67349**-1.1, 1.1168),
        (68, 3, 3.0, 67349**-1.1, 0.7438),
        (68, 3, 8.0, 67349**-1.1, 0.5194),
        (25, 30, 1.0, 50000**-1.1, 4.240),
        (25, 30, 8.0, 50000**-1.1, 0.9277),
        (40, 10, 3.0, 5000**-1.1, 0.9085),
        (120, 2, 8.0, 60000**-1.1, 0.4648),
    ],
)
def test_random_allocation_against_estimates(turns, number, epsilon, delta, noise):
    found = epsilon_of([Rounds(noise, 1 / turns, turns, number)], delta=delta)
    assert found == pytest.approx(epsilon, rel=0.015)
    # Poisson sampling at the same rate costs more.
    assert found < epsilon_of([Rounds(noise, 1 / turns, 1, number * turns)], delta=delta)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(0.5, 0.1, 100), (0.4, 0.05, 20), (0.3, 1 / 68, 204), (0.5, 0.5, 40), (3.0, 0.3, 257)]
)
def test_poisson_sampling_costs_more_with_little_noise_too(sigma, rate, steps):
    allocated = epsilon_of([*Releases(sigma, rate, steps).rounds()], delta=1e-5)
    assert allocated < epsilon_of([Rounds(sigma, rate, 1, steps)], delta=1e-5)


def test_different_rounds_add_up():
    kinds = [Rounds(1.0, 0.01, 100, 2), Rounds(1.5, 0.1, 1, 30)]
    alone = [epsilon_of([kind], delta=1e-5) for kind in kinds]
    assert max(alone) < epsilon_of(kinds, delta=1e-5) < sum(alone)
    assert epsilon_of([kinds[0]._replace(number=1)] * 2, delta=1e-5) == pytest.approx(alone[0], rel=1e-3)


@pytest.mark.parametrize(("sigma", "turns", "number"), [(0.02, 1, 100), (0.02, 68, 3), (0.2, 20, 3)])
def test_without_amplification_where_the_noise_is_too_small_for_a_grid(sigma, turns, number):
    found = epsilon_of([Rounds(sigma, 1 / 100, turns, number)], delta=1e-5)
    assert found <= gaussian_epsilon(math.sqrt(number) / sigma, delta=1e-5) < math.inf
    assert gaussian_delta(math.sqrt(number) / sigma, found) < 1e-5 * (1 + 1e-6) or sigma == 0.2


@pytest.mark.parametrize("kind", [Rounds(0.7438, 1 / 68, 68, 3), Rounds(1.0, 0.01, 1, 1000), Rounds(0.02, 0.1, 1, 5)])
def test_a_curve_holds_the_epsilon_of_every_delta(kind):
    epsilons, deltas = delta_curve([kind])
    assert np.all(np.diff(deltas) <= 1e-15)
    for delta in (1e-2, 1e-4, 1e-6):
        exact = epsilon_of([kind], delta=delta)
        if exact < epsilons[-1]:
            assert np.interp(exact, epsilons, deltas) == pytest.approx(delta, rel=0.05, abs=3e-8)
