"""What a plan says of noise and filter is what a training takes."""

import pytest

from doppler_hf.filters import auto_noise_shape
from doppler_hf.privacy import AllocationSampler, default_delta
from doppler_hf.reports import planned_noise
from doppler_hf.reports.planned_noise import taken_by_training
from doppler_hf.reports.planned_runs import PlanRequest, Target
from doppler_hf.run.filter_and_noise import chosen_filter, chosen_noise_shape
from doppler_hf.run.plan import planned_statement
from tests.support.trainers import arguments


@pytest.mark.parametrize(("epsilon", "batch", "is_shaped"), [(8.0, 128, True), (1.0, 900, False)])
def test_what_is_said_of_auto_is_what_a_training_takes(tmp_path, epsilon, batch, is_shaped, monkeypatch):
    compared = []
    monkeypatch.setattr(
        planned_noise, "auto_noise_shape", lambda of, *a, **more: compared.append(of(1)) or auto_noise_shape(of, *a, **more)
    )
    auto = dict(noise_multiplier=None, target_epsilon=epsilon, low_pass_filter="auto", noise_shape="auto")
    args = arguments(tmp_path, **auto, num_train_epochs=2, max_steps=-1)
    sampler = AllocationSampler(num_examples=2000, expected_batch_size=batch)
    shape = chosen_noise_shape(args, sampler=sampler, num_trained=1000)
    sampler.take_turns(shape.bands)
    statement = planned_statement(args, sampler=sampler, noise_shape=shape)
    run = PlanRequest(num_examples=2000, batch_size=batch, epochs=2, epsilon=epsilon).solve()
    choice = taken_by_training(run, Target(epsilon, default_delta(2000)), None)
    assert compared == [pytest.approx(run.noise_multiplier, rel=0.01)]  # shapes are compared at the ε of the run
    assert choice[:2] == (shape, chosen_filter(args, statement))
    assert (choice[2].steps, choice[2].noise_multiplier) == (statement.steps_planned, statement.noise_multiplier)
    assert shape.is_white != is_shaped
