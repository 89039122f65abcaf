"""The private gradient is the mean of the clipped sum plus noise of σC/B, once, on the expected batch size."""

import numpy as np
import pytest
import scipy.stats
import torch

from doppler_hf.privacy import GaussianMechanism

SIGMA, C, B, D = 1.3, 0.7, 50, 100_000


def released(mechanism, steps=1):
    return [mechanism.privatize({"w": torch.zeros(D)}, step=step)["w"].double().numpy() for step in range(steps)]


def test_noise_has_standard_deviation_sigma_c_over_b():
    mechanism = GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B)
    (noise,) = released(mechanism)
    assert mechanism.noise_std == pytest.approx(SIGMA * C / B)
    # Σz² of d standard normals is χ² with d degrees of freedom; two-sided at 1e-6 per run.
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], D)
    assert low < np.sum((noise / mechanism.noise_std) ** 2) < high
    assert abs(noise.mean()) < 5 * mechanism.noise_std / np.sqrt(D)  # 6e-7


def test_noise_is_not_correlated_between_steps():
    first, second, third = released(
        GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B), steps=3
    )
    for left, right in ((first, second), (second, third), (first, third)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5.5 / np.sqrt(D)  # 4e-8 each


def test_mean_is_over_the_expected_batch_size():
    mechanism = GaussianMechanism(noise_multiplier=0.0, max_grad_norm=C, expected_batch_size=B)
    sums = {"w": torch.full((2, 3), 10.0), "b": torch.ones(3)}
    gradient = mechanism.privatize(sums, step=0)
    torch.testing.assert_close(gradient["w"], torch.full((2, 3), 10.0 / B))
    torch.testing.assert_close(gradient["b"], torch.full((3,), 1.0 / B))


def test_sums_become_the_gradient_in_their_own_memory():
    mechanism = GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B)
    sums = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
    gradient = mechanism.privatize(sums, step=0)
    assert all(gradient[name] is total for name, total in sums.items())  # no second copy of a large model's gradient


@pytest.mark.parametrize("seed", [None, 0])
def test_parameters_of_a_step_never_share_their_noise(seed):
    mechanism = GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B, seed=seed)
    noise = mechanism.privatize({"a": torch.zeros(9), "b": torch.zeros(9)}, step=0)
    assert not torch.any(noise["a"] == noise["b"])


def test_an_empty_draw_is_released_as_pure_noise():
    mechanism = GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B)
    assert np.all(released(mechanism)[0] != 0.0)


def test_same_step_twice_gets_fresh_noise():
    mechanism = GaussianMechanism(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=B)
    first, second = (mechanism.privatize({"w": torch.zeros(9)}, step=0)["w"] for _ in range(2))
    assert not torch.any(first == second)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(noise_multiplier=-1.0), "noise_multiplier must be a finite number ≥ 0, got -1"),
        (dict(noise_multiplier=float("nan")), "got nan"),
        (dict(max_grad_norm=0.0), "max_grad_norm must be a finite number > 0, got 0"),
        (dict(expected_batch_size=0), "expected_batch_size must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GaussianMechanism(**(dict(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1) | arguments))
