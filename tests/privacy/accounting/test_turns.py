"""ε of groups that take turns: against Google's accountant, and against small mechanisms worked out by enumeration."""

import functools
import itertools
import math

import dp_accounting
import numpy as np
import pytest
import scipy.linalg
from dp_accounting import pld

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy.accounting import Releases, get_total_epsilon
from tests.support.ledgers import statement
from tests.support.pairwise import pairwise


@functools.cache
def googles_epsilon(*, sigma, rate, steps, delta):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    return pld.PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(event, steps)).get_epsilon(delta)


@pytest.mark.parametrize("accountant", ["prv", "rdp", "pld"])
@pytest.mark.parametrize(("groups", "steps"), [(1, 12), (4, 13), (5, 3)])
def test_epsilon_is_that_of_the_composed_turns(groups, steps, accountant):
    sigma, rate, delta = 1.1, 0.02, 1e-5
    expected = googles_epsilon(sigma=sigma, rate=groups * rate, steps=math.ceil(steps / groups), delta=delta)
    found = get_total_epsilon([Releases.in_turns(sigma, rate, steps, groups=groups)], delta=delta, accountant=accountant)
    assert expected * (1 - 1e-3) <= found <= expected * (2.0 if accountant == "rdp" else 1.01) + 0.02


def test_a_statement_counts_turns():
    shaped = statement(noise_shape="banded:bands=4")
    assert (shaped.groups, shaped.releases(10)) == (4, Releases(1.0, 4 * 0.05, 3))
    assert statement().releases(10) == Releases(1.0, 0.05, 10)


def log_densities(points, gradients, *, rate, shape, sigma, steps, groups_known):
    """Log density of what is released, C·sums + noise, at points of shape (points, steps), over all patterns of coins."""
    strategy = scipy.linalg.toeplitz(np.pad(shape.c, (0, steps - shape.bands)), np.zeros(steps))
    of_each = []
    for gradient in gradients:
        patterns = []
        for group in [0] if groups_known else range(shape.bands):
            turns = range(group, steps, shape.bands)
            for coins in itertools.product([0, 1], repeat=len(turns)):
                sums = np.zeros(steps)
                sums[list(turns)] = np.array(coins) * gradient
                chance = np.prod([rate if coin else 1 - rate for coin in coins]) / (1 if groups_known else shape.bands)
                patterns.append((math.log(chance), strategy @ sums))
        of_each.append(patterns)
    std, total = sigma * shape.norm, np.full(len(points), -np.inf)
    for pattern in itertools.product(*of_each):
        mean = sum((shift for _, shift in pattern), np.zeros(steps))
        log_chance = sum(chance for chance, _ in pattern)
        total = np.logaddexp(total, log_chance - np.square((points - mean) / std).sum(axis=1) / 2)
    return total


def sampled(gradients, *, rate, shape, sigma, steps, groups_known, size, generator):
    strategy = scipy.linalg.toeplitz(np.pad(shape.c, (0, steps - shape.bands)), np.zeros(steps))
    sums = np.zeros((size, steps))
    for gradient in gradients:
        group = np.zeros(size, dtype=int) if groups_known else generator.integers(shape.bands, size=size)
        is_turn = np.arange(steps) % shape.bands == group[:, None]
        sums += gradient * (is_turn & (generator.random((size, steps)) < rate))
    return sums @ strategy.T + sigma * shape.norm * generator.normal(size=(size, steps))


def true_delta(first, second, epsilon, **mechanism):
    """δ at ε by the densities of every pattern, over points drawn from the first data set, and its standard error."""
    size = 20_000
    points = sampled(first, size=size, generator=np.random.default_rng(0), **mechanism)
    ratio = log_densities(points, second, **mechanism) - log_densities(points, first, **mechanism)
    values = np.maximum(-np.expm1(epsilon + ratio), 0.0)
    return values.mean(), values.std() / math.sqrt(size)


NOISE = [(0.4, 0.8), (0.9, 1.5)]
# Which the bound is about, so that it is met.
MET = [((), True, True, noise) for noise in NOISE]


@pytest.mark.parametrize(
    ("others", "removed", "groups_known", "noise"),
    dict.fromkeys([*MET, *pairwise([(), (1.0, -1.0), (0.5, 1.0)], [True, False], [True, False], NOISE)]),
)
def test_no_small_mechanism_is_worse_than_accounted(others, removed, groups_known, noise):
    rate, sigma = noise
    # T = 4, b = 2, three examples: at most 8³ patterns of groups and coins.
    shape, steps, delta = NoiseShape.banded(2), 4, 0.02
    mechanism = dict(rate=rate, shape=shape, sigma=sigma, steps=steps, groups_known=groups_known)
    data = [(*others, 1.0), others] if removed else [others, (*others, 1.0)]
    release = Releases.in_turns(sigma, rate / 2, steps, groups=2)
    claimed = get_total_epsilon([release], delta=delta, accountant="pld")
    found, error = true_delta(*data, claimed, **mechanism)
    assert found - 5 * error < delta
    if (others, removed, groups_known, noise) in MET:
        assert found == pytest.approx(delta, abs=5 * error + 2e-4)
