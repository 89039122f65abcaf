"""What secret groups are worth, against enumeration, quadrature and known groups."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy.accounting import Releases, get_noise_multiplier, get_total_epsilon
from doppler_hf.privacy.accounting.composition import Rounds, epsilons_of
from doppler_hf.privacy.accounting.importance_sampling import ORDERS, Addition, Removal
from doppler_hf.privacy.accounting.secret_groups import Run, epsilon_of_runs
from tests.support.simulated_delta import simulated_delta
from tests.support.tiers import thorough

FOUR = NoiseShape.banded(4).c


def bound(rounds, strategy, *, delta, runs=1, is_removal=True, **options):
    known = epsilons_of([each._replace(number=runs * each.number) for each in rounds], delta=delta)
    terms = dict(is_removal=is_removal, delta=delta, known=known[0 if is_removal else 1])
    return epsilon_of_runs([(rounds, strategy)] * runs, **terms, **options), terms["known"]


BOTH = pytest.mark.parametrize("is_removal", [True, False])
EITHER = pytest.mark.parametrize("is_removal", [True, *thorough(False)])


@EITHER
def test_one_group_is_no_secret(is_removal):
    """The bound is then of the same ratio as the exact distribution."""
    rounds = [Rounds(1.2, 1 / 20, 20, 4), Rounds(1.2, 1 / 20, 7, 1)]
    found, exact = bound(rounds, (1.0,), delta=1e-5, is_removal=is_removal)
    assert found == exact  # The margin is cut off at what is known.
    estimate, _ = bound(rounds, (1.0,), delta=1e-5, is_removal=is_removal, is_rough=True)
    assert estimate == pytest.approx(exact, rel=0.04)


@BOTH
@pytest.mark.parametrize("sigma", [0.8, 2.0])
def test_two_groups_against_quadrature(sigma, is_removal):
    """One step of each of two groups, with noise of its own: R = (Y₁ + Y₂)/2 with independent lognormal Y."""
    rounds, delta = [Rounds(sigma, 1.0, 1, 1)], 1e-4
    found, _ = bound(rounds, (1.0, 0.0), delta=delta, is_removal=is_removal)
    grid = np.linspace(-9.0, 12.0, 3001)
    weights = norm.pdf(grid) * (grid[1] - grid[0])
    ratios = np.exp(grid / sigma - 1 / (2 * sigma**2))
    mean = np.add.outer(ratios, ratios) / 2

    def delta_at(epsilon):
        values = mean - math.exp(epsilon) if is_removal else 1.0 - math.exp(epsilon) * mean
        return weights @ np.maximum(values, 0.0) @ weights

    assert delta_at(found) < delta < delta_at(0.94 * found)


@pytest.mark.parametrize(
    ("sigma", "rate", "bands", "steps"),
    # After one round, two of eight groups have one turn more; three of four groups have seven turns, and one has six.
    [(0.8404, 0.02, 8, 50), (0.7, 0.01, 4, 27)],
)
def test_a_round_that_is_cut_between_its_groups_against_a_simulation_apart(sigma, rate, bands, steps):
    c, delta = NoiseShape.banded(bands).c, 60_000**-1.1
    claimed = get_total_epsilon([Releases(sigma, rate, steps, c)], delta=delta)
    (less, found), errors = simulated_delta(
        np.array([0.88, 1.0]) * claimed, c, sigma=sigma, sample_rate=rate, steps=steps, samples=40_000, seed=2
    )
    assert found < delta + 5 * errors[1]
    # And by its margin alone it is above the truth.
    assert less > delta + 5 * errors[0]
    assert errors[0] < 0.1 * less


@BOTH
def test_more_overlap_costs_more(is_removal):
    """Kahane's comparison, of which the bound is made: ε grows with the overlap of the groups' columns."""
    rounds = [Rounds(1.2, 1 / 10, 10, 2)]
    terms = dict(delta=1e-5, is_rough=True, is_removal=is_removal)
    costs = [bound(rounds, (1.0, overlap, 0.0), **terms)[0] for overlap in (0.0, 0.5, 1.0)]
    assert all(first < second * 1.02 for first, second in itertools.pairwise(costs))
    assert costs[0] < costs[-1]


@EITHER
def test_runs_with_groups_of_their_own_cost_more_than_one(is_removal):
    rounds, terms = [Rounds(1.5, 1 / 10, 10, 2)], dict(delta=1e-5, is_removal=is_removal)
    (one, _), (two, known) = (bound(rounds, FOUR, runs=runs, **terms) for runs in (1, 2))
    longer, _ = bound([rounds[0]._replace(number=4)], FOUR, **terms)
    assert one < longer
    assert one < two < known
    # New groups are a new secret.
    assert two < longer * 1.03


@pytest.mark.parametrize("sigma", [0.6, 1.0, 3.0])
def test_the_moments_are_those_of_the_ratio(sigma):
    """E ρ^p by simulation, ρ = 1 − nq + q·ΣY."""
    rounds, noise = Rounds(sigma, 0.09, 10, 1), np.random.default_rng(1).standard_normal((400_000, 10))
    ratio = 0.1 + 0.09 * np.exp(noise / sigma - 1 / (2 * sigma**2)).sum(axis=1)
    assert math.exp(Removal(rounds).log_moments[0]) == pytest.approx(float((ratio**2).mean()), rel=0.05)
    for order in (1, 2, 5):
        found = math.exp(Addition(rounds).log_moments[order - 1])
        assert found == pytest.approx(float((ratio**-order).mean()), rel=0.05)


@pytest.mark.parametrize(
    ("tilt", "order", "power"), [(Removal, 1, 2), (Removal, 4, 5), (Addition, 1, -1), (Addition, 4, -4)]
)
def test_samples_come_from_the_stated_density(tilt, order, power):
    """Under it E 1/weight is 1, and E R/weight too."""
    run = Run([Rounds(1.5, 0.08, 10, 2), Rounds(1.5, 0.08, 3, 1)], FOUR, tilt)
    assert run.is_cheap[order - 1]
    log_ratio, log_weight = run.sample(40_000, order, power, np.random.default_rng(3))
    inverse = np.exp(run.log_moments[order - 1] - log_weight)
    for values in (inverse, np.exp(log_ratio) * inverse):
        assert abs(values.mean() - 1.0) < 5 * values.std() / 200 < 0.25


def test_what_rejection_would_take_long_for_is_left_at_what_is_known():
    rounds = Rounds(0.2, 0.09, 10, 1)
    assert not Addition(rounds).is_cheap[len(ORDERS) - 1]
    found, known = bound([rounds], FOUR, delta=1e-5, is_removal=False)
    assert found == known


@pytest.mark.parametrize(("epsilon", "saved"), [(3.0, 0.2), *thorough((1.0, 0.13))])
def test_a_secret_group_saves_noise(epsilon, saved):
    terms = dict(target_epsilon=epsilon, target_delta=6e-6, sample_rate=1 / 110, steps=200)
    releases = Releases(get_noise_multiplier(**terms, strategy=FOUR), 1 / 110, 200, FOUR)
    assert get_total_epsilon([releases], delta=6e-6) <= epsilon
    assert max(epsilons_of([*releases.rounds()], delta=6e-6)) > epsilon * (1 + saved)


@pytest.mark.parametrize("releases", [Releases(0.25, 0.25, 400, (1.0, 0.5)), Releases(20.0, 1 / 2000, 2000, (1.0, 0.5))])
def test_very_little_and_very_much_noise(releases):
    found = get_total_epsilon([releases], delta=1e-5)
    assert 0.0 < found <= max(epsilons_of([*releases.rounds()], delta=1e-5))


def test_the_same_history_has_the_same_epsilon():
    rounds = [Rounds(1.0, 1 / 20, 20, 2)]
    assert bound(rounds, FOUR, delta=1e-5) == bound(rounds, FOUR, delta=1e-5)
