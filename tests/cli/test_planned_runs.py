"""A plan has the steps of the sampler's own arithmetic, the ε of the accountant, and alternatives of the same ε."""

import math
from types import SimpleNamespace

import pytest
from datasets import Dataset

from doppler_hf.cli import planned_runs as planning
from doppler_hf.cli.planned_runs import PlanRequest, alternatives, planned_terms
from doppler_hf.errors import Refusal
from doppler_hf.filters import NoiseShape, auto_noise_shape
from doppler_hf.privacy import AllocationSampler
from doppler_hf.privacy.accounting.accounting import Releases, get_epsilon, get_total_epsilon
from doppler_hf.run.planning import auto_noise
from doppler_hf.run.planning.filter_and_noise import chosen_filter, chosen_noise_shape, learning_rates_of
from doppler_hf.run.planning.plan import planned_statement
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.search.search import trial_of
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.trainers import arguments

RUN = {"num_examples": 1000, "epsilon": 3.0, "epochs": 2.0, "batch_size": 100}


@pytest.mark.parametrize(("num_examples", "batch_size"), [(1000, 100), (1001, 100), (999, 100), (67349, 1000), (7, 7)])
@pytest.mark.parametrize("epochs", [0.1, 1, 2.5, 3])
def test_steps_are_those_of_transformers(num_examples, batch_size, epochs):
    request = PlanRequest(num_examples=num_examples, batch_size=batch_size, epochs=epochs, noise_multiplier=1.0)
    run = request.solve()
    sampler = AllocationSampler(num_examples=num_examples, expected_batch_size=batch_size)
    # Trainer.set_initial_training_values
    assert run.steps == math.ceil(epochs * sampler.steps_per_epoch)
    assert run.sample_rate == sampler.sample_rate


def test_epsilon_and_noise_multiplier_follow_from_each_other():
    run = PlanRequest(**RUN).solve()
    assert PlanRequest(**RUN | {"epsilon": None, "noise_multiplier": run.noise_multiplier}).solve() == run
    spent = get_epsilon(noise_multiplier=run.noise_multiplier, sample_rate=0.1, steps=20, delta=1000**-1.1)
    assert 0.999 * 3.0 <= spent <= 3.0


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        ({"epsilon": None}, "one-of-two", "--epsilon and --noise-multiplier are both missing"),
        ({"noise_multiplier": 1.0}, "one-of-two", "--epsilon and --noise-multiplier .*both"),
        ({"max_steps": 10}, "one-of-two", "--epochs and --max-steps .*both"),
        ({"batch_size": None}, "no-batch-size", "--batch-size 40"),
        ({"num_examples": 1}, "out-of-range", "--num-examples .*1"),
        ({"num_examples": 10**14}, "out-of-range", r"--num-examples must be .* below 1e\+10; got 1"),
        ({"epochs": 1e300}, "out-of-range", "more than 10,000,000 steps"),
        ({"epochs": 1e308}, "out-of-range", "more than 10,000,000 steps"),
        ({"epochs": None, "max_steps": 10**14}, "out-of-range", "more than 10,000,000 steps"),
        ({"epsilon": 1e-300}, "out-of-range", "--epsilon must be from 1e-06 to 1e.12; got 1e-300"),
        ({"epsilon": 9e-4}, "epsilon-too-small", "--epsilon must be at least 1/N = 0.001; got 0.0009.* Start with 8"),
        ({"epsilon": 1e300}, "out-of-range", "--epsilon must be from 1e-06 to 1e.12; got 1e.300"),
        ({"batch_size": 1001}, "batch-too-large", "1000.* 1001"),
        ({"epochs": math.nan}, "out-of-range", "--epochs .*nan"),
        ({"epsilon": math.inf}, "out-of-range", "--epsilon .*inf"),
        ({"delta": 1e-3}, "delta-too-large", r"--delta .*0\.001"),
        ({"delta": math.nan}, "delta-too-large", "--delta .*nan"),
    ],
)
def test_requests_without_a_meaning_are_refused(change, code, value):
    with refused(code, match=value):
        PlanRequest(**RUN | change)


@pytest.mark.parametrize(("target", "num_examples", "epochs"), [(3.0, 67_349, 3.0), *thorough((0.1, 1000, 20.0))])
def test_alternatives_cost_the_same(target, num_examples, epochs, monkeypatch):
    delta, batch_size = num_examples**-1.1, round(num_examples / 67)
    request = PlanRequest(num_examples=num_examples, batch_size=batch_size, epochs=epochs, noise_multiplier=0.7)
    for more_epochs, larger_batch in ((1 / 2, 1 / 4), (2, 1 / 2), (4, 4)):
        monkeypatch.setattr(planning, "EPOCH_FACTORS", (more_epochs,))
        monkeypatch.setattr(planning, "BATCH_SIZE_FACTORS", (larger_batch,))
        ((other,),) = alternatives(request, request.solve(), target).values()
        spent = get_total_epsilon([Releases(other.noise_multiplier, other.sample_rate, other.steps)], delta=delta)
        assert target * (1 - 4e-3) <= spent <= target  # on a rough grid


@pytest.mark.parametrize(("batch_size", "batch_sizes"), [(1, [1, 2, 4]), (4, [1, 2, 4]), (6, [2, 3, 6]), (8, [2, 4, 8])])
def test_alternatives_stay_within_the_data_set(batch_size, batch_sizes, monkeypatch):
    monkeypatch.setattr(planning, "get_noise_multiplier", lambda **_: 1.0)
    request = PlanRequest(num_examples=8, batch_size=batch_size, max_steps=9, noise_multiplier=2.0)
    run = request.solve()
    table = alternatives(request, run, 1.0)
    (own,) = [runs for runs in table.values() if any(other is run for other in runs)]
    assert [other.expected_batch_size for other in own] == batch_sizes


@pytest.mark.parametrize(
    ("epsilon", "batch", "schedule", "is_shaped"),
    [(8.0, 128, "linear", True), (1.0, 900, "linear", False), (8.0, 128, "constant", True), (8.0, 128, "cosine", True)],
)
def test_what_is_said_of_auto_is_what_a_training_takes(tmp_path, epsilon, batch, schedule, is_shaped, monkeypatch):
    compared = []
    monkeypatch.setattr(
        auto_noise, "auto_noise_shape", lambda of, *a, **more: compared.append(of(1)) or auto_noise_shape(of, *a, **more)
    )
    auto = dict(noise_multiplier=None, target_epsilon=epsilon, low_pass_filter="auto", noise_shape="auto")
    args = arguments(tmp_path, **auto, num_train_epochs=2, max_steps=-1, lr_scheduler_type=schedule)
    sampler = AllocationSampler(num_examples=2000, expected_batch_size=batch)
    shape = chosen_noise_shape(args, sampler=sampler, num_trained=1000)
    sampler.take_turns(shape.bands)
    statement = planned_statement(args, sampler=sampler, noise_shape=shape)
    request = PlanRequest(num_examples=2000, batch_size=batch, epochs=2, epsilon=epsilon, lr_scheduler_type=schedule)
    assert request.rates(16) == pytest.approx(learning_rates_of(args, steps=16), abs=1e-12)
    del compared[:]  # of the training
    choice = planned_terms(request, None)
    assert compared == [pytest.approx(request.solve().noise_multiplier, rel=0.01)]  # shapes are compared at the ε of the run
    assert choice[:2] == (shape, chosen_filter(args, statement))
    assert choice[2].steps == statement.steps_planned
    # The noise multiplier of a plan is that of all that a step releases, gradient and loss.
    assert choice[2].noise_multiplier == pytest.approx(statement.effective_noise_multiplier, rel=1e-12)
    assert shape.is_white != is_shaped


@pytest.mark.parametrize(
    ("num_examples", "batch", "epochs", "epsilon", "trials", "bands"),
    [
        (200, 50, 1, 3.0, 10, (1, 1)),
        (2000, 100, 1, 4.0, 100, (2, 1)),  # a few steps, for which only the whole ε is worth shaped noise
        *thorough((2000, 100, 3, 4.0, 30, (4, 2))),
    ],
)
def test_what_is_said_of_a_search_is_what_a_trial_takes(tmp_path, num_examples, batch, epochs, epsilon, trials, bands):
    auto = dict(noise_multiplier=None, target_epsilon=epsilon, low_pass_filter="auto", noise_shape="auto")
    sizes = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=1, num_train_epochs=epochs, max_steps=-1)
    args, rows = arguments(tmp_path, **auto | sizes), Dataset.from_dict({"x": range(num_examples)})
    single_run = PrivateRun(args, rows, num_trained=1000).statement
    trial = trial_of(SimpleNamespace(args=args), single_run, n_trials=trials)
    statement = PrivateRun(args, rows, num_trained=1000, trial=trial).statement
    plan = planned_terms(
        PlanRequest(num_examples=num_examples, batch_size=batch, epochs=epochs, epsilon=epsilon, trials=trials), None
    )
    assert (NoiseShape.parse(single_run.noise_shape).bands, NoiseShape.parse(statement.noise_shape).bands) == bands
    assert (plan.single_run.shape.bands, plan.shape.bands) == bands
    assert plan.selection == trial.selection
    assert plan.shape == NoiseShape.parse(statement.noise_shape)
    assert plan.low_pass_filter == chosen_filter(args, statement)
    assert plan.run.steps == statement.steps_planned
    # The noise multiplier of a plan is that of all that a step releases, gradient and loss.
    assert plan.run.noise_multiplier == pytest.approx(statement.effective_noise_multiplier, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "--batch-size 80 --epochs 3 --epsilon 8."),
        ({"batch_size": 50}, "--epochs 3 --epsilon 8."),
        ({"batch_size": 50, "epochs": 2.0}, "--epsilon 8."),
        ({"batch_size": 50, "noise_multiplier": 1.0}, "--epochs 3."),
        ({"num_examples": 1000, "epsilon": 1.0}, "--batch-size 40 --epochs 20."),
    ],
)
def test_what_is_missing_is_proposed_at_once_and_makes_a_plan(given, said):
    with pytest.raises(Refusal) as refusal:
        PlanRequest(**{"num_examples": 2000} | given)
    assert str(refusal.value).lower().endswith(f"start with {said}")
    words = said.removesuffix(".").split()
    proposed = {name[2:].replace("-", "_"): float(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    if "batch_size" in proposed:
        proposed["batch_size"] = int(proposed["batch_size"])
    assert PlanRequest(**{"num_examples": 2000} | given | proposed).solve().steps > 0
