"""What secret groups are worth, against enumeration, quadrature and known groups."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy.accounting import Releases, get_noise_multiplier, get_total_epsilon
from doppler_hf.privacy.accounting.composition import Rounds, epsilons_of
from doppler_hf.privacy.accounting.secret_groups import Run, epsilon_of_removal

FOUR = NoiseShape.banded(4).c


def bound(rounds, strategy, *, delta, runs=1, **options):
    known = epsilons_of([each._replace(number=runs * each.number) for each in rounds], delta=delta).removal
    return epsilon_of_removal([Run(rounds, strategy)] * runs, delta=delta, known=known, **options), known


def test_one_group_is_no_secret():
    """The bound is then of the same ratio as the exact distribution."""
    rounds = [Rounds(0.8, 1 / 20, 20, 3), Rounds(0.8, 1 / 20, 7, 1)]
    found, exact = bound(rounds, (1.0,), delta=1e-5)
    assert found == exact  # The margin is cut off at what is known.
    estimate, _ = bound(rounds, (1.0,), delta=1e-5, is_rough=True)
    assert estimate == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("sigma", [0.6, 1.0])
def test_two_groups_against_quadrature(sigma):
    """One step of each of two groups, with noise of its own: R = (Y₁ + Y₂)/2 with independent lognormal Y."""
    rounds, delta = [Rounds(sigma, 1.0, 1, 1)], 1e-4
    found, _ = bound(rounds, (1.0, 0.0), delta=delta)
    grid = np.linspace(-9.0, 12.0, 3001)
    weights = norm.pdf(grid) * (grid[1] - grid[0])
    ratios = np.exp(grid / sigma - 1 / (2 * sigma**2))
    mean = np.add.outer(ratios, ratios) / 2

    def delta_at(epsilon):
        return weights @ np.maximum(mean - math.exp(epsilon), 0.0) @ weights

    assert delta_at(found) < delta < delta_at(0.95 * found)


def test_more_overlap_costs_more():
    """Kahane's comparison, of which the bound is made: ε grows with the overlap of the groups' columns."""
    rounds = [Rounds(0.8, 1 / 10, 10, 2)]
    costs = [bound(rounds, (1.0, overlap, 0.0), delta=1e-5, is_rough=True)[0] for overlap in (0.0, 0.5, 1.0)]
    assert all(first < second * 1.02 for first, second in itertools.pairwise(costs)) and costs[0] < costs[-1]


def test_runs_with_groups_of_their_own_cost_more_than_one():
    rounds = [Rounds(1.2, 1 / 10, 10, 2)]
    (one, _), (two, known) = (bound(rounds, FOUR, delta=1e-5, runs=runs) for runs in (1, 2))
    (longer, _) = bound([rounds[0]._replace(number=4)], FOUR, delta=1e-5)
    assert one < longer and one < two < known
    # New groups are a new secret.
    assert two < longer * 1.03


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_the_moments_are_those_of_the_ratio(sigma):
    """E ρ^K by simulation, ρ = 1 − nq + q·ΣY."""
    run = Run([Rounds(sigma, 0.09, 10, 1)], (1.0,))
    noise = np.random.default_rng(1).standard_normal((400_000, 10))
    ratio = 0.1 + 0.09 * np.exp(noise / sigma - 1 / (2 * sigma**2)).sum(axis=1)
    assert np.exp(run.log_moments[0:2]) == pytest.approx(1.0)
    assert np.exp(run.log_moments[2]) == pytest.approx(float((ratio**2).mean()), rel=0.05)


def test_samples_come_from_the_stated_density():
    """Under it E 1/weight is 1, and E R/weight too."""
    rounds = [Rounds(0.9, 0.08, 10, 2), Rounds(0.9, 0.08, 3, 1)]
    run = Run(rounds, FOUR)
    for power in (2, 5):
        log_ratio, log_weight = run.sample(40_000, power, np.random.default_rng(3))
        inverse = np.exp(run.log_moments[power] - log_weight)
        for values in (inverse, np.exp(log_ratio) * inverse):
            # E R/weight has far less spread than 1/weight, in which rare samples count much.
            assert abs(values.mean() - 1.0) < 5 * values.std() / 200


def test_a_secret_group_saves_noise():
    terms = dict(target_epsilon=3.0, target_delta=6e-6, sample_rate=1 / 110, steps=200)
    sigma = get_noise_multiplier(**terms, strategy=FOUR)
    releases = Releases(sigma, 1 / 110, 200, FOUR)
    assert get_total_epsilon([releases], delta=6e-6) <= 3.0
    assert max(epsilons_of([*releases.rounds()], delta=6e-6)) > 3.6


def test_the_same_history_has_the_same_epsilon():
    rounds = [Rounds(1.0, 1 / 20, 20, 2)]
    assert bound(rounds, FOUR, delta=1e-5) == bound(rounds, FOUR, delta=1e-5)


def test_a_beginning_costs_no_more_than_the_plan():
    whole = Releases(0.8, 1 / 80, 160, FOUR)
    total = get_total_epsilon([whole], delta=1e-5)
    costs = [get_total_epsilon([whole._replace(steps=steps, planned=160)], delta=1e-5) for steps in (4, 156, 160)]
    assert costs[0] < costs[1] == costs[2] == total
    assert costs[0] == max(epsilons_of([*whole._replace(steps=4).rounds()], delta=1e-5))
