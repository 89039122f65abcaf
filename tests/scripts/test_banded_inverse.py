"""The figures on banded-inverse strategies, against matrices and the published σ of the Gaussian mechanism."""

import numpy as np
import pytest

from doppler_hf.filters import ClosedLoop, NoiseShape
from doppler_hf.privacy import default_delta
from doppler_hf.reports.planned_runs import PlannedRun, PlanRequest
from scripts.experiments.banded_inverse import FILTER, gaussian_sigma, inverse_of, noises, noises_of_bands, sensitivity

STEPS, EVERY = 12, 5


def test_sigma_is_the_published_one():
    assert gaussian_sigma(1.0, 1e-5) == pytest.approx(3.730632, rel=1e-6)


@pytest.mark.parametrize("terms", [1, 2, 5])
def test_sensitivity_and_sum_are_those_of_the_matrices(terms):
    inverse = inverse_of(terms)
    matrix = sum(value * np.eye(STEPS, k=-lag) for lag, value in enumerate(inverse))
    strategy = np.linalg.inv(matrix)
    worst = max(np.linalg.norm(strategy[:, first::EVERY].sum(axis=1)) for first in range(EVERY))
    assert sensitivity(inverse, steps=STEPS, every=EVERY) == pytest.approx(worst, rel=1e-12)
    run = PlannedRun(num_examples=50, expected_batch_size=10, steps=STEPS, noise_multiplier=0.8, max_grad_norm=1.0)
    of_sum, in_loop = noises(inverse, run, ClosedLoop.of_run(STEPS), epsilon=1.0, delta=1e-5)
    more = gaussian_sigma(1.0, 1e-5) * worst / 0.8
    assert of_sum == pytest.approx(more * np.linalg.norm(np.ones(STEPS) @ matrix) / STEPS**0.5, rel=1e-12)
    if terms == 1:
        assert in_loop == pytest.approx(of_sum, rel=1e-12)


def test_bands_cost_what_their_strategy_says():
    run = PlanRequest(num_examples=2000, batch_size=100, epochs=2, epsilon=3.0).solve()
    loop, shape = ClosedLoop.of_run(run.steps), NoiseShape.banded(4)
    of_sum, in_loop = noises_of_bands(4, run, loop, epsilon=3.0, delta=default_delta(2000))
    matrix = sum(value * np.eye(run.steps, k=-lag) for lag, value in enumerate(shape.c))
    of_sums = np.linalg.norm(np.ones(run.steps) @ np.linalg.inv(matrix)) * np.linalg.norm(shape.c) / run.steps**0.5
    more = of_sum / of_sums
    assert 1.0 < more < 2.0  # σ of groups in turn
    assert in_loop == pytest.approx(more * (loop.loss(FILTER, shape) / loop.loss(FILTER)) ** 0.5, rel=1e-9)
    assert noises_of_bands(1, run, loop, epsilon=3.0, delta=default_delta(2000)) == pytest.approx((1.0, 1.0), rel=0.01)
