"""Filter and shape of the noise are the ones that were named, or follow from public numbers of the run alone."""

import pytest

from doppler_hf.filters import LowPassFilter, NoiseShape, auto_filter, auto_noise_shape
from doppler_hf.filters.noise_shape import WHITE
from doppler_hf.privacy import AllocationSampler
from doppler_hf.privacy.accounting.calibration import noise_multiplier_if_any
from doppler_hf.run.planning.filter_and_noise import chosen_filter, chosen_noise_shape, learning_rates_of
from doppler_hf.run.planning.plan import planned_statement
from tests.support.ledgers import statement
from tests.support.tiers import thorough
from tests.support.trainers import On, arguments, trained, trainer_of

SAMPLER = AllocationSampler(num_examples=1000, expected_batch_size=50)
# A run in which shaping pays, and of whose target `noise_multiplier` is not asked.
SHAPED = dict(noise_multiplier=None, target_epsilon=8.0, max_steps=60, noise_shape="auto")
# HF's default schedule is linear.
RATES = [1 - step / 60 for step in range(60)]


def filter_of(tmp_path, *, shape=WHITE, **overrides):
    args = arguments(tmp_path, **(dict(max_steps=400) | overrides))
    plan = planned_statement(args, sampler=SAMPLER, noise_shape=shape)
    return chosen_filter(args, plan)


def test_a_named_filter_is_taken_as_it_is(tmp_path):
    assert filter_of(tmp_path, low_pass_filter="momentum") == LowPassFilter.parse("momentum")


@pytest.mark.parametrize("base", ["adam", "adam_bc"])
def test_behind_adam_white_noise_gets_no_filter(tmp_path, base):
    assert filter_of(tmp_path, low_pass_filter="auto", base_optimizer=base) == LowPassFilter.parse("none")


@pytest.mark.parametrize(("shape", "base"), [("white", "sgd"), ("banded:bands=4", "adam_bc")])
def test_an_auto_filter_follows_from_the_plan_the_schedule_and_the_shape(tmp_path, shape, base):
    shape = NoiseShape.parse(shape)
    chosen = filter_of(tmp_path, low_pass_filter="auto", noise_shape=str(shape), shape=shape, base_optimizer=base)
    rates = [1 - step / 400 for step in range(400)]
    assert chosen == auto_filter(400, learning_rates=rates, noise=shape)


def test_a_named_shape_is_taken_as_it_is(tmp_path):
    args = arguments(tmp_path, noise_shape="banded:bands=3")
    assert chosen_noise_shape(args, sampler=SAMPLER, num_trained=1000) == NoiseShape.banded(3)


@pytest.mark.parametrize("low_pass_filter", ["none", "auto"])
def test_an_auto_shape_compares_runs_of_equal_epsilon(tmp_path, low_pass_filter):
    def noise_multiplier_of(bands):
        terms = dict(target_epsilon=8.0, target_delta=1000**-1.1, sample_rate=0.05, steps=60)
        return noise_multiplier_if_any(NoiseShape.banded(bands).c, **terms)

    args = arguments(tmp_path, **SHAPED, low_pass_filter=low_pass_filter)
    chosen = chosen_noise_shape(args, sampler=SAMPLER, num_trained=1000)
    named = None if low_pass_filter == "auto" else LowPassFilter.parse(low_pass_filter)
    assert chosen == auto_noise_shape(noise_multiplier_of, 60, learning_rates=RATES, low_pass_filter=named)
    assert (chosen.bands > 2) is (low_pass_filter == "auto")


def test_learning_rates_are_those_that_training_has(tmp_path):
    rates = []
    note = On(pre_optimizer_step=lambda optimizer, **_: rates.append(optimizer.param_groups[0]["lr"]))
    trainer = trained(trainer_of(tmp_path, callbacks=[note], max_steps=6, lr_scheduler_type="cosine", warmup_steps=2))
    assert [0.01 * rate for rate in learning_rates_of(trainer.args, steps=6)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("resumed", "sampler", "expected"),
    [
        ("banded:bands=3", SAMPLER, "banded:bands=3"),
        # A third of all units in a draw can take turns in no more than three steps.
        *thorough(("banded:bands=4", AllocationSampler(num_examples=30, expected_batch_size=10), None)),
    ],
)
def test_auto_keeps_the_shape_of_the_run_that_is_resumed(tmp_path, resumed, sampler, expected):
    """Its filter is kept too, for which another shape may be worse than white noise."""
    args = arguments(tmp_path, **(SHAPED | dict(target_epsilon=30.0, max_steps=2000)), low_pass_filter="auto")
    assert chosen_noise_shape(args, sampler=SAMPLER, num_trained=1000).bands > 3
    found = chosen_noise_shape(args, sampler=sampler, num_trained=1000, resumed=statement(noise_shape=resumed))
    assert found.bands <= 3 if expected is None else found == NoiseShape.parse(expected)


@pytest.mark.parametrize(
    "overrides",
    [
        dict(noise_multiplier=1.5, target_epsilon=None),  # of no equal ε
        dict(optim_target_modules="all-linear"),  # which saves the memory that shaped noise takes
    ],
)
def test_what_shaped_noise_does_not_fit_gets_white_noise(tmp_path, overrides):
    args = arguments(tmp_path, **(SHAPED | dict(low_pass_filter="auto") | overrides))
    assert chosen_noise_shape(args, sampler=SAMPLER, num_trained=1000).is_white


@pytest.mark.parametrize(("num_trained", "expected"), [(2**27, 4), (2**29 + 1, 1)])
def test_a_chosen_shape_keeps_at_most_two_gibibytes(tmp_path, num_trained, expected):
    args = arguments(tmp_path, **(SHAPED | dict(max_steps=4000)), low_pass_filter="auto")
    sampler = AllocationSampler(num_examples=20_000, expected_batch_size=50)
    assert chosen_noise_shape(args, sampler=sampler, num_trained=num_trained).bands == expected
