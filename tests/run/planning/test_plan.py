"""The plan meets its target whatever was spent before."""

import math

import pytest

from doppler_hf.filters import NoiseShape
from doppler_hf.filters.noise_shape import WHITE
from doppler_hf.privacy import AllocationSampler, PrivacyLedger
from doppler_hf.privacy.accounting import calibration
from doppler_hf.privacy.accounting.accounting import get_total_epsilon
from doppler_hf.run.planning import plan
from doppler_hf.run.planning.plan import planned_statement
from doppler_hf.run.resuming.earlier_ledgers import Previous
from tests.support.ledgers import after
from tests.support.refusals import refused
from tests.support.tiny import text_data
from tests.support.trainers import arguments, trainer_of

SAMPLER = AllocationSampler(num_examples=1000, expected_batch_size=50)
DELTA = 1000**-1.1


def plan_of(tmp_path, *, earlier=None, first_step=0, **overrides):
    options = dict(noise_multiplier=None, target_epsilon=3.0, max_steps=100) | overrides
    args = arguments(tmp_path, **options)
    shape = WHITE if args.noise_shape == "auto" else NoiseShape.parse(args.noise_shape)
    terms = dict(sampler=SAMPLER, noise_shape=shape)
    return planned_statement(args, **terms, previous=Previous(None, first_step, earlier))


def ledger_after(steps, plan, *, continues=None, from_step=0):
    ledger = PrivacyLedger.open(plan) if continues is None else continues.resume(plan, from_step=from_step)
    return after(ledger, steps)


def total(plan, earlier, steps):
    """ε of what both plan, each at its share of δ."""
    plans = [*([] if earlier is None else earlier.plans), [plan.releases(steps)]]
    return sum(get_total_epsilon(each, delta=DELTA / len(plans)) for each in plans)


def test_a_new_run_is_calibrated_to_its_target(tmp_path):
    plan = plan_of(tmp_path)
    assert (plan.steps_planned, plan.sample_rate, plan.num_units, plan.target_delta) == (100, 0.05, 1000, DELTA)
    assert 0.999 * 3.0 <= total(plan, None, 100) <= 3.0


@pytest.mark.parametrize("noise_shape", ["white", "banded:bands=4"])
def test_a_calibration_with_slightly_too_little_noise_plans_no_more_than_the_target(tmp_path, monkeypatch, noise_shape):
    """As the last bit of a multiplier may do where ε is simulated. Such a run would end before its last step."""
    exact = plan.get_noise_multiplier
    monkeypatch.setattr(plan, "get_noise_multiplier", lambda **options: 0.998 * exact(**options))
    planned = plan_of(tmp_path, noise_shape=noise_shape)
    assert 0.98 * 3.0 <= total(planned, None, 100) <= 3.0


def test_a_run_without_a_step_is_refused_by_the_name_of_its_argument(tmp_path):
    with refused("out-of-range", match="num_train_epochs"):
        plan_of(tmp_path, max_steps=-1, num_train_epochs=0)


def test_a_run_that_is_resumed_keeps_its_noise(tmp_path):
    plan = plan_of(tmp_path)
    earlier = ledger_after(40, plan)
    assert plan_of(tmp_path, earlier=earlier, first_step=40) == plan
    # Also after a crash that cost steps: the guard stops it earlier, rather than at another noise.
    assert plan_of(tmp_path, earlier=earlier, first_step=20) == plan


@pytest.mark.parametrize(("target", "steps"), [(4.0, 150), (6.0, 400), (4.0, 100)])
def test_another_plan_has_what_the_first_one_leaves_of_the_target_wherever_it_ended(tmp_path, target, steps):
    for made in (60, 100):
        earlier = ledger_after(made, plan_of(tmp_path))
        if made < steps:
            plan = plan_of(tmp_path, earlier=earlier, first_step=made, target_epsilon=target, max_steps=steps)
            assert plan.steps_planned == steps
            assert 0.998 * target <= total(plan, earlier, steps - made) <= target


@pytest.mark.parametrize("made", [50, 100])
def test_other_terms_for_the_same_target_are_refused(tmp_path, made):
    earlier = ledger_after(made, plan_of(tmp_path))
    with refused("budget-spent", match=r"of target_epsilon = 3.0\. .*steps_planned changed from 100 to 150.* has ε = 2\.99"):
        plan_of(tmp_path, earlier=earlier, first_step=made, max_steps=150)


@pytest.mark.parametrize("delta", [1e-3, 0.1])
def test_a_delta_that_permits_publishing_an_example_is_refused(tmp_path, delta):
    with refused("delta-too-large", match=f"{delta:g}"):
        plan_of(tmp_path, target_delta=delta)
    for less in (0.999e-3, 1e-10, None):
        assert plan_of(tmp_path, target_delta=less).why_not_private is None
    assert plan_of(tmp_path, target_delta=delta, allow_large_delta=True).why_not_private.startswith("δ ≥ 1/N")


def test_a_target_with_which_nothing_can_be_learnt_is_refused_before_its_long_calibration(tmp_path, monkeypatch):
    below = dict(noise_multiplier=None, target_epsilon=0.99 / 24)
    with monkeypatch.context() as patched:
        patched.setattr(calibration, "bound", lambda *args, **options: pytest.fail("it is calibrated"))
        with refused("epsilon-too-small", match="N = 24 records; got 0.04125. .* a usual value is 8"):
            trainer_of(tmp_path, **below).train()
    # The mends, and the smallest target.
    for mend in (dict(target_epsilon=8.0), dict(target_epsilon=None, noise_multiplier=100.0), dict(target_epsilon=1 / 24)):
        assert trainer_of(tmp_path, **below | mend).privacy.statement.private


def test_one_example_is_refused_by_what_it_is(tmp_path):
    for options in (dict(), dict(target_delta=0.5), dict(target_delta=0.999, allow_large_delta=True)):
        one = dict(per_device_train_batch_size=1, gradient_accumulation_steps=1, **options)
        with refused("too-few-records"):
            trainer_of(tmp_path, data=text_data(1), **one).train()
    trainer_of(tmp_path, data=text_data(2), **one | {"target_delta": None}).train()


def test_a_private_loss_pays_out_of_the_same_budget(tmp_path):
    plain = plan_of(tmp_path, report_train_loss="none")
    loss = dict(train_loss_budget=0.04)  # the loss is private by default
    with_loss = plan_of(tmp_path, **loss)
    assert with_loss.noise_multiplier == pytest.approx(plain.noise_multiplier / math.sqrt(0.96))
    assert with_loss.loss_noise_multiplier == pytest.approx(plain.noise_multiplier / 0.2)
    earlier = ledger_after(5, with_loss)
    assert plan_of(tmp_path, earlier=earlier, first_step=5, **loss) == with_loss
    # With another share it is another mechanism, for which nothing is left.
    with refused("budget-spent"):
        plan_of(tmp_path, earlier=earlier, first_step=5, **loss | {"train_loss_budget": 0.1})
