"""The plan meets its target whatever was spent before."""

import math

import pytest

from doppler_hf.privacy import PoissonSampler, get_noise_multiplier
from doppler_hf.privacy.accounting.accounting import Releases, get_total_epsilon
from doppler_hf.run.plan import planned_statement
from tests.support.trainers import arguments

SAMPLER = PoissonSampler(num_examples=1000, expected_batch_size=50)
DELTA = 1000**-1.1


def plan_of(tmp_path, *, spent=(), first_step=0, **overrides):
    # RDP takes the least time, and is not what is taken by default.
    options = dict(noise_multiplier=None, target_epsilon=3.0, max_steps=100, accountant="rdp") | overrides
    return planned_statement(
        arguments(tmp_path, **options), sampler=SAMPLER, noise_source="a coin", spent=spent, first_step=first_step
    )


def total(plan, spent, steps):
    history = [*spent, Releases(plan.noise_multiplier, plan.sample_rate, steps)]
    return get_total_epsilon(history, delta=DELTA, accountant="rdp")


def test_a_new_run_is_calibrated_to_its_target(tmp_path):
    plan = plan_of(tmp_path)
    assert (plan.steps_planned, plan.sample_rate, plan.num_units, plan.target_delta) == (100, 0.05, 1000, DELTA)
    assert 0.999 * 3.0 <= total(plan, (), 100) <= 3.0


def test_a_run_that_is_resumed_keeps_its_noise(tmp_path):
    plan = plan_of(tmp_path)
    spent = [Releases(plan.noise_multiplier, 0.05, 40)]
    assert plan_of(tmp_path, spent=spent, first_step=40).noise_multiplier == plan.noise_multiplier
    # Also after a crash that cost steps: the guard stops it earlier, rather than at another noise.
    assert plan_of(tmp_path, spent=spent, first_step=20).noise_multiplier == plan.noise_multiplier


@pytest.mark.parametrize(("target", "steps"), [(4.0, 150), (3.5, 400), (4.0, 100)])
def test_an_extended_run_meets_its_new_target_with_what_is_left(tmp_path, target, steps):
    spent = [Releases(plan_of(tmp_path).noise_multiplier, 0.05, 60)]
    plan = plan_of(tmp_path, spent=spent, first_step=60, target_epsilon=target, max_steps=steps)
    assert plan.steps_planned == steps
    assert 0.998 * target <= total(plan, spent, steps - 60) <= target


def test_more_steps_for_the_same_target_are_refused_once_it_is_spent(tmp_path):
    spent = [Releases(plan_of(tmp_path).noise_multiplier, 0.05, 100)]
    with pytest.raises(ValueError, match=r"budget is spent: ε = 2\.99\d* of target_epsilon = 3.0. Raise target_epsilon"):
        plan_of(tmp_path, spent=spent, first_step=100, max_steps=150)


def test_more_steps_before_it_is_spent_share_what_is_left(tmp_path):
    first = plan_of(tmp_path)
    spent = [Releases(first.noise_multiplier, 0.05, 50)]
    longer = plan_of(tmp_path, spent=spent, first_step=50, max_steps=300)
    assert longer.noise_multiplier > first.noise_multiplier
    assert 0.998 * 3.0 <= total(longer, spent, 250) <= 3.0


def test_another_batch_size_is_another_mechanism(tmp_path):
    spent = [Releases(plan_of(tmp_path).noise_multiplier, 0.1, 10)]
    plan = plan_of(tmp_path, spent=spent, first_step=10)
    assert 0.998 * 3.0 <= total(plan, spent, 90) <= 3.0


def test_a_given_noise_multiplier_is_taken_as_it_is(tmp_path):
    plan = plan_of(tmp_path, noise_multiplier=0.7, target_epsilon=None, spent=[Releases(2.0, 0.05, 10)], first_step=10)
    assert plan.noise_multiplier == 0.7


def test_a_private_loss_pays_out_of_the_same_budget(tmp_path):
    plain = plan_of(tmp_path)
    with_loss = plan_of(tmp_path, report_train_loss="private", train_loss_budget=0.04)
    assert with_loss.noise_multiplier == pytest.approx(plain.noise_multiplier / math.sqrt(0.96))
    assert with_loss.loss_noise_multiplier == pytest.approx(plain.noise_multiplier / 0.2)
    resumed = plan_of(
        tmp_path, report_train_loss="private", train_loss_budget=0.04, first_step=5,
        spent=[Releases(plain.noise_multiplier * (1 + 1e-12), 0.05, 5)],
    )  # fmt: skip
    assert resumed.noise_multiplier == with_loss.noise_multiplier


def test_the_statement_says_what_the_plan_does(tmp_path):
    args = arguments(tmp_path, noise_multiplier=None, target_epsilon=3.0, max_steps=100, noise_generator="philox")
    statement = planned_statement(args, sampler=SAMPLER, noise_source="philox")
    sigma = get_noise_multiplier(target_epsilon=3.0, target_delta=DELTA, sample_rate=0.05, steps=100)
    assert (statement.noise_multiplier, statement.steps_planned, statement.private) == (sigma, 100, True)
    assert statement.noise_source == "philox"
    assert statement.unit_of_privacy == "one example"
    seeded = arguments(tmp_path, noise_seed=1)
    sampler = PoissonSampler(num_examples=1000, expected_batch_size=50, seed=1)
    assert not planned_statement(seeded, sampler=sampler, noise_source="").private
