"""The filter of a run is the one that was named, or follows from public numbers of the run alone."""

import pytest
import torch

from doppler_hf.filters import LowPassFilter, auto_filter
from doppler_hf.optim import OptimalFIR
from doppler_hf.privacy import PoissonSampler
from doppler_hf.run.optimizer import chosen_filter, filter_in_words, learning_rates_of
from doppler_hf.run.plan import planned_statement
from tests.support.trainers import Recorder, arguments, trainer_of


def noise_std(plan):
    return plan.noise_multiplier * plan.per_sample_max_grad_norm / plan.expected_batch_size


def choice(tmp_path, **overrides):
    args = arguments(tmp_path, **(dict(max_steps=400) | overrides))
    sampler = PoissonSampler(num_examples=1000, expected_batch_size=50)
    plan = planned_statement(args, sampler=sampler, noise_source="a coin")
    return args, plan, chosen_filter(args, steps=plan.steps_planned, noise_std=noise_std(plan), dimension=10_000)


@pytest.mark.parametrize("name", ["none", "momentum", "butterworth:order=2,cutoff=0.1", "b=0.1,0.1;a=1,-0.8"])
def test_a_named_filter_is_taken_as_it_is(tmp_path, name):
    args, _, filter_ = choice(tmp_path, low_pass_filter=name)
    assert filter_ == LowPassFilter.parse(name)
    assert "noise power ×" in filter_in_words(args, filter_)


def test_auto_follows_from_the_plan_and_the_schedule(tmp_path):
    args, plan, filter_ = choice(tmp_path, low_pass_filter="auto")
    common = dict(steps=400, noise_std=noise_std(plan), max_grad_norm=1.0, dimension=10_000)
    rates = [1 - step / 400 for step in range(400)]  # HF's default schedule is linear
    assert filter_ == auto_filter(**common, learning_rates=rates)
    assert filter_ != auto_filter(**common)
    assert filter_in_words(args, filter_).startswith(f"auto: {filter_}")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(lr_scheduler_type="constant"), [1.0] * 10),
        (dict(lr_scheduler_type="linear"), [1 - step / 10 for step in range(10)]),
        (dict(lr_scheduler_type="constant_with_warmup", warmup_steps=4), [0.0, 0.25, 0.5, 0.75, *[1.0] * 6]),
        (dict(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps"), None),
    ],
)
def test_learning_rates_are_the_hosts(tmp_path, options, expected):
    rates = learning_rates_of(arguments(tmp_path, max_steps=10, **options), steps=10)
    assert rates == expected or rates == pytest.approx(expected)


def test_learning_rates_are_those_that_training_has(tmp_path):
    class Rates(Recorder):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            self.gradients.append(optimizer.param_groups[0]["lr"])

    rates = Rates()
    trainer = trainer_of(tmp_path, callbacks=[rates], max_steps=6, lr_scheduler_type="cosine", warmup_steps=2)
    trainer.train()
    assert [0.01 * rate for rate in learning_rates_of(trainer.args, steps=6)] == pytest.approx(rates.gradients)


def test_the_taps_of_an_optimal_fir_are_the_optimizers(tmp_path, capsys):
    trainer = trainer_of(tmp_path, low_pass_filter="optimal-fir: update_gap=7, taps=4", max_steps=3)
    trainer.train()
    assert trainer.optimizer.optimizer.low_pass_filter == OptimalFIR(taps=4, update_gap=7)
    assert "optimal-fir:taps=4,update_gap=7" in capsys.readouterr().out
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_auto_stands_in_the_summary(tmp_path, capsys):
    trainer = trainer_of(tmp_path, low_pass_filter="auto", max_steps=3)
    trainer.train()
    assert "auto: none" in capsys.readouterr().out  # three steps are too few to be late


@pytest.mark.parametrize(
    "name", ["auto:order=2", "optimal-fir", "optimal-fir:taps=many", "optimal-fir:taps=1", "butterworth:order=2"]
)
def test_what_is_no_filter_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="taps must be" if name.endswith("taps=1") else name.partition(":")[0]):
        arguments(tmp_path, low_pass_filter=name)
