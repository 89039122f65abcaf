"""Shaped noise has the covariance σ²C²‖c‖²(CᵀC)⁻¹, and what it needs of sampling and accounting is asked for."""

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import GaussianMechanism
from tests.support.refusals import refused

SIGMA, C, B, D, T = 1.3, 0.7, 50, 50_000, 7


def mechanism_of(shape, **options):
    return GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B, shape=shape, **options)


def noise_of(mechanism, steps=T, first=0):
    """Noise of a run over two parameters, in units of σC/B, shape (steps, D)."""
    rows = []
    for step in range(first, first + steps):
        released = mechanism.privatize({"w": torch.zeros(D - 100), "v": torch.zeros(10, 10)}, step=step)
        rows.append(torch.cat([released["w"], released["v"].flatten()]).double().numpy())
    return np.array(rows) * B / (SIGMA * C)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (NoiseShape.banded(2), {"seed": 3}),
        (NoiseShape.banded(4), {"floating_point_safe": True}),
        (NoiseShape((1.0, 0.6, -0.2)), {}),
    ],
    ids=str,
)
def test_the_noise_has_the_covariance_of_the_inverse_strategy(shape, options):
    mechanism = mechanism_of(shape, **options)
    noise = noise_of(mechanism)
    stds = [mechanism.noise_std(step) * B / (SIGMA * C) for step in range(T)]
    strategy = scipy.linalg.toeplitz(np.pad(shape.c, (0, T - shape.bands)), np.zeros(T))
    white = strategy @ noise / shape.norm
    # Two-sided at 1e-6 over all entries of the T × T matrix: n times a sample variance is χ², a correlation nearly normal.
    level = 1e-6 / T**2
    low, high = scipy.stats.chi2.ppf([level / 2, 1 - level / 2], D)
    assert all(low < row @ row < high for row in white)
    correlations = (white @ white.T / D)[np.triu_indices(T, 1)]
    assert np.abs(correlations).max() < scipy.stats.norm.isf(level / 2) / np.sqrt(D)
    inverse = np.linalg.inv(strategy)
    np.testing.assert_allclose(stds, shape.norm * np.sqrt(np.diag(inverse @ inverse.T)), rtol=1e-12)
    np.testing.assert_allclose(noise.std(axis=1), stds, rtol=5 / np.sqrt(D))


def test_each_sum_is_released_with_its_noise_and_no_other_sum():
    shape = NoiseShape.banded(3)
    with_sums, without = mechanism_of(shape, seed=1), mechanism_of(shape, seed=1)
    for step in range(5):
        total = torch.full((D,), float(step))
        found = with_sums.privatize({"w": total.clone()}, step=step)["w"]
        noise = without.privatize({"w": torch.zeros(D)}, step=step)["w"]
        torch.testing.assert_close(found - noise, total / B, rtol=0, atol=1e-5)


def test_a_run_that_begins_later_begins_its_recursion_there():
    shape = NoiseShape.banded(4)
    resumed = mechanism_of(shape, first_step=100)
    assert resumed.noise_std(100) == mechanism_of(shape).noise_std(0) < resumed.noise_std(103)
    noise = noise_of(resumed, first=100)
    np.testing.assert_allclose(noise[0].std(), shape.norm, rtol=5 / np.sqrt(D))


@pytest.mark.parametrize("step", [0, 2])
def test_a_step_that_is_repeated_or_left_out_is_refused_before_noise_is_drawn(step):
    mechanism = mechanism_of(NoiseShape.banded(2))
    mechanism.privatize({"w": torch.zeros(3)}, step=0)
    total = torch.ones(3)
    with refused("steps-out-of-order"):
        mechanism.privatize({"w": total}, step=step)
    assert torch.equal(total, torch.ones(3))
