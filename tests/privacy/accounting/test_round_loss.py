"""A round's likelihood ratio against what can be computed in other ways: closed forms, quadrature, and simulation."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from doppler_hf.privacy.accounting.round_loss import round_ratio
from tests.support.tiers import thorough

ROUNDS = [
    # σ, q, n
    (1.0, 0.01, 1),
    (0.7, 0.9, 1),
    (0.6, 0.5, 2),
    (0.6, 0.45, 2),  # a share of 0.9 of the units takes part
    (1.1, 0.25, 4),
    (0.5, 1 / 67.3, 67),
    (4.0, 1 / 25, 25),
    (0.4, 1 / 120, 120),
    (2.0, 1 / 200, 200),
]


def deltas(ratio, spacing, epsilon):
    """δ of removal and of addition at ε."""
    losses = spacing * (ratio.first + np.arange(len(ratio.without)))
    removal = ratio.at_infinity + ratio.with_unit @ np.maximum(-np.expm1(np.minimum(epsilon - losses, 0.0)), 0.0)
    addition = ratio.at_zero + ratio.without @ np.maximum(-np.expm1(np.minimum(epsilon + losses, 0.0)), 0.0)
    return np.array([removal, addition])


def simulated(sigma, rate, turns, *, size=400_000):
    """Draw rounds with and without the unit, and return what gives the same at any ε, with standard errors."""
    generator = np.random.default_rng(0)
    losses = []
    for _ in range(8):
        z = generator.normal(size=(size // 8, turns))
        # Without the unit the ratio's mean is 1, so that both are means over rounds without it. Rare large values are
        # drawn more often with the unit, by which removal is weighted.
        without = -log_ratio(z, sigma, rate)
        takes_part = generator.random(len(z)) < rate * turns
        z[takes_part, generator.integers(turns, size=takes_part.sum())] += 1 / sigma
        losses.append((log_ratio(z, sigma, rate), without))

    def at(epsilon):
        values = np.maximum(-np.expm1(np.minimum(epsilon - np.concatenate(losses, axis=1), 0.0)), 0.0)
        return values.mean(axis=1), values.std(axis=1) / math.sqrt(size)

    return at


def log_ratio(z, sigma, rate):
    return np.log(1 - z.shape[1] * rate + rate * np.exp(z / sigma - 1 / (2 * sigma**2)).sum(axis=1))


@pytest.mark.parametrize(("sigma", "rate", "turns"), ROUNDS)
@pytest.mark.parametrize("spacing", [2e-3, 2e-2])
def test_masses_are_whole_and_belong_together(sigma, rate, turns, spacing):
    ratio = round_ratio(sigma, rate, turns, spacing=spacing, lost=1e-11)
    assert ratio.without.sum() + ratio.at_zero == pytest.approx(1, abs=1e-10)
    assert ratio.with_unit.sum() + ratio.at_infinity == pytest.approx(1, abs=1e-10)
    assert 0 <= ratio.at_infinity < 1e-10
    values = np.exp(spacing * (ratio.first + np.arange(len(ratio.without))))
    # With the unit each value has as much mass as without it, times the value, but for the rounding of the transforms.
    if sigma > 0.6:  # with less noise the masses without it are those of smaller values
        assert np.abs(values * ratio.without - ratio.with_unit)[values < 10].sum() < 1e-8


@pytest.mark.parametrize(("sigma", "rate", "turns"), [*ROUNDS[:-1], *thorough(ROUNDS[-1])])
def test_deltas_against_simulation(sigma, rate, turns):
    ratio, simulated_at = round_ratio(sigma, rate, turns, spacing=2e-3, lost=1e-11), simulated(sigma, rate, turns)
    for epsilon in (0.0, 0.3, 1.0):
        found, (expected, error) = deltas(ratio, 2e-3, epsilon), simulated_at(epsilon)
        assert np.all(found > expected - 5 * error)
        # With little noise a term's size varies so much that the grid of the sum is coarse beside most of them.
        assert np.all(found < expected * (1.05 if sigma < 0.7 else 1.0) + 5 * error + (6e-3 if sigma == 0.4 else 2e-5))


@pytest.mark.parametrize(("sigma", "epsilon"), [(0.5, 6.0), (1.0, 1.0), (0.8, 3.0)])
@pytest.mark.parametrize("spacing", [1e-3, 1e-2, 5e-2])
def test_two_turns_against_the_plane_and_never_below(sigma, epsilon, spacing):
    """δ = ∫ (p − e^ε q)₊ and ∫ (q − e^ε p)₊ over the two turns' outputs, on a fine grid of points."""
    step = 0.01
    axis = np.arange(-9, 10 + 1 / sigma, step)
    base, shifted = norm.pdf(axis), norm.pdf(axis - 1 / sigma)
    without = np.outer(base, base)
    with_unit = 0.1 * without + 0.45 * (np.outer(shifted, base) + np.outer(base, shifted))
    exact = [
        np.maximum(first - math.exp(epsilon) * second, 0).sum() * step**2
        for first, second in ((with_unit, without), (without, with_unit))
    ]
    found = deltas(round_ratio(sigma, 0.45, 2, spacing=spacing, lost=1e-13), spacing, epsilon)
    assert np.all(found > np.array(exact) * (1 - 1e-4))
    assert found == pytest.approx(exact, rel=0.01 + 20 * spacing**2, abs=1e-11)


@pytest.mark.parametrize(("sigma", "turns", "epsilon"), [(0.5193, 68, 8.0), (1.1118, 68, 0.5), (4.24, 25, 0.1)])
def test_a_coarser_grid_is_above_a_finer_one(sigma, turns, epsilon):
    fine, coarse = (
        deltas(round_ratio(sigma, 1 / turns, turns, spacing=spacing, lost=1e-13), spacing, epsilon)
        for spacing in (1e-3, 8e-3)
    )
    assert np.all(fine <= coarse * (1 + 1e-6) + 1e-12)
    assert coarse[0] < fine[0] * 1.05


def test_fewer_turns_at_the_same_rate_are_the_beginning_of_a_round():
    """After two of four turns, what is released tells less than at the end."""
    whole, half = (round_ratio(0.8, 0.25, turns, spacing=2e-3, lost=1e-12) for turns in (4, 2))
    for epsilon in (0.1, 1.0, 2.0):
        assert np.all(deltas(half, 2e-3, epsilon) < deltas(whole, 2e-3, epsilon))


@pytest.mark.parametrize("spacing", [2e-3, 1e-2])
def test_addition_with_little_noise_keeps_its_digits(spacing):
    """By quadrature over the plane of two turns: most terms are far smaller than the largest."""
    removal, addition = deltas(round_ratio(0.5, 0.5, 2, spacing=spacing, lost=1e-11), spacing, 6.0)
    assert 3.07e-4 < addition < 3.08e-4
    assert 3.90e-3 < removal < 3.92e-3
