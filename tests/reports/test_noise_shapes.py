"""What shapes of the noise buy at equal ε, against figures that were computed on their own."""

import numpy as np
import pytest

from doppler_hf.filters import PAPER_FILTERS, ClosedLoop, NoiseShape, auto_noise_shape
from doppler_hf.privacy import AllocationSampler, default_delta
from doppler_hf.privacy.accounting import Releases, get_total_epsilon
from doppler_hf.reports import noise_shapes
from doppler_hf.reports.noise_shapes import shapes_of_equal_epsilon, taken_by_training
from doppler_hf.reports.planned_runs import PlanRequest, Target
from doppler_hf.run.choices import chosen_filter, chosen_noise_shape
from doppler_hf.run.plan import planned_statement
from tests.support.trainers import arguments

# Noise at the end, of a step, and of a step after first-order-v1, for 2, 4, 8 and 16 bands, relative to white noise, if
# groups were known.
FIGURES = {
    # N, B, epochs, ε
    (67_349, 1000, 3, 1.0): [(0.93, 1.61, 0.96), (0.92, 2.31, 1.12), (0.96, 3.36, 1.56), (1.02, 4.89, 2.30)],
    (67_349, 1000, 3, 3.0): [(0.84, 1.45, 0.87), (0.73, 1.84, 0.89), (0.67, 2.36, 1.09), (0.65, 3.12, 1.47)],
    (67_349, 1000, 3, 8.0): [(0.81, 1.40, 0.84), (0.67, 1.69, 0.82), (0.58, 2.02, 0.94), (0.51, 2.44, 1.15)],
}


@pytest.mark.parametrize("key", FIGURES, ids=str)
def test_figures_of_equal_epsilon(key):
    number, batch, epochs, epsilon = key
    delta = default_delta(number)
    run = PlanRequest(num_examples=number, batch_size=batch, epochs=epochs, epsilon=epsilon).solve()
    target = Target(epsilon, delta)
    white, *others = shapes_of_equal_epsilon(run, target, low_pass_filter=PAPER_FILTERS["first-order-v1"])
    assert white == (NoiseShape(), run.noise_multiplier, 1.0, 1.0, 1.0, 1.0)
    saved = np.array([each[2:5] for each in others]) / FIGURES[key]
    # Secret groups save the more the more there are, and the same in each column.
    np.testing.assert_allclose(saved, np.repeat(saved[:, :1], 3, axis=1), atol=0.015)
    assert (saved < 1.0).all()
    assert 0.75 < saved[-1, 0] < 0.93
    rates = [1 - step / run.steps for step in range(run.steps)]
    loop, filtered = ClosedLoop.of_run(run.steps, rates), PAPER_FILTERS["first-order-v1"]
    for each in others:
        cost = each.noise_multiplier**2 * loop.loss(filtered, each.shape)
        np.testing.assert_allclose(each.loop**2, cost / (run.noise_multiplier**2 * loop.loss(filtered)), rtol=1e-9)
    last = others[-1]
    releases = Releases(last.noise_multiplier, run.sample_rate, run.steps, NoiseShape.banded(16).c)
    assert epsilon * 0.97 < get_total_epsilon([releases], delta=delta) <= epsilon * 1.03


def test_bands_end_where_every_unit_would_be_drawn():
    run = PlanRequest(num_examples=1000, batch_size=200, epochs=3, epsilon=3.0).solve()
    shapes = shapes_of_equal_epsilon(run, Target(3.0, 1e-4), low_pass_filter=PAPER_FILTERS["none"])
    assert [str(each.shape) for each in shapes] == ["white", "banded:bands=2", "banded:bands=4"]


@pytest.mark.parametrize(("epsilon", "batch", "is_shaped"), [(8.0, 128, True), (1.0, 900, False)])
def test_what_is_said_of_auto_is_what_a_training_takes(tmp_path, epsilon, batch, is_shaped, monkeypatch):
    compared = []
    monkeypatch.setattr(
        noise_shapes, "auto_noise_shape", lambda of, *a, **more: compared.append(of(1)) or auto_noise_shape(of, *a, **more)
    )
    auto = dict(noise_multiplier=None, target_epsilon=epsilon, low_pass_filter="auto", noise_shape="auto")
    args = arguments(tmp_path, **auto, num_train_epochs=2, max_steps=-1)
    sampler = AllocationSampler(num_examples=2000, expected_batch_size=batch)
    shape = chosen_noise_shape(args, sampler=sampler, num_trained=1000)
    sampler.take_turns(shape.bands)
    statement = planned_statement(args, sampler=sampler, noise_shape=shape, noise_source="a coin")
    run = PlanRequest(num_examples=2000, batch_size=batch, epochs=2, epsilon=epsilon).solve()
    choice = taken_by_training(run, Target(epsilon, default_delta(2000)), None)
    assert compared == [pytest.approx(run.noise_multiplier, rel=0.01)]  # shapes are compared at the ε of the run
    assert choice == (shape, chosen_filter(args, statement), statement.noise_multiplier)
    assert shape.is_white != is_shaped
