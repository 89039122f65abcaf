"""The private training loss: clipped, noised, and paid for out of the same budget. False-alarm rates are stated."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from doppler_hf import DopplerTrainer
from doppler_hf.privacy import AllocationSampler, GaussianMechanism, PrivacyLedger
from doppler_hf.privacy.noise import PrivateLoss
from tests.support.tiny import head_alone, numbered
from tests.support.trainers import trained, trainer_of

# Whole trainings, which pass the same arrays again and again; the tests of the modules check shapes.
pytestmark = pytest.mark.usefixtures("unchecked_arrays")

PRIVATE = dict(report_train_loss="private")


class Fixed(DopplerTrainer):
    """Each example's loss is a number of its own, with no gradient to speak of."""

    losses: dict[int, float] = {}

    def compute_per_sample_loss(self, model, inputs):
        real = super().compute_per_sample_loss(model, inputs)
        return 1e-12 * real + torch.tensor([self.losses.get(int(row[0]), 1.0) for row in inputs["input_ids"]])


def losses_of(trainer):
    return np.array([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def train(tmp_path, *, losses=None, cls=Fixed, **overrides):
    Fixed.losses = losses or {}
    return trained(trainer_of(tmp_path, cls=cls, **(PRIVATE | overrides)))


def test_a_release_leaves_nothing_for_the_next_one():
    mechanism = GaussianMechanism(noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=2, seed=0)
    private = PrivateLoss(mechanism, device=torch.device("cpu"))
    private.add(torch.tensor([0.5, 1.5]))
    assert [float(private.release(step=step)) for step in range(2)] == [0.75, 0.0]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_without_noise_it_is_the_clipped_sum_over_the_expected_batch(tmp_path, accumulation):
    values = {5 + index: 0.3 * index - 1.0 for index in range(24)}  # from -1 to 5.9
    trainer = train(
        tmp_path, losses=values, data=numbered(), noise_multiplier=0.0, noise_seed=3, per_sample_max_loss=2.0, max_steps=3,
        per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    sampler = AllocationSampler(num_examples=24, expected_batch_size=8, seed=3)
    expected = [sum(np.clip(0.3 * sampler.draw(step) - 1.0, -2, 2)) / 8 for step in range(3)]
    assert losses_of(trainer) == pytest.approx(expected, abs=1e-4)  # Transformers' log has four digits
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(np.mean(expected), abs=1e-6)


def test_a_loss_that_is_no_number_counts_as_the_bound(tmp_path):
    trainer = train(
        tmp_path, losses={5: math.nan, 6: math.inf, 7: -math.inf, 8: 1e30}, data=numbered(8), noise_multiplier=0.0,
        noise_seed=0, per_sample_max_loss=2.0, max_steps=1,
    )  # fmt: skip
    drawn = set(AllocationSampler(num_examples=8, expected_batch_size=8, seed=0).draw(0).tolist())
    assert drawn == set(range(8))
    assert losses_of(trainer) == pytest.approx([(2.0 + 2.0 - 2.0 + 2.0 + 4 * 1.0) / 8], abs=1e-4)


def test_its_noise_has_the_promised_deviation(tmp_path):
    steps = 80
    trainer = train(
        tmp_path, model=head_alone(), losses=dict.fromkeys(range(60), 0.0), noise_multiplier=2.0, per_sample_max_loss=50.0,
        max_steps=steps, train_loss_budget=0.2, grad_sample_self_check=False, gradient_accumulation_steps=1,
        per_device_train_batch_size=8,
    )  # fmt: skip
    std = trainer.privacy.statement.loss_noise_multiplier * 50.0 / 8
    assert std == pytest.approx(2.0 * math.sqrt(0.8 / 0.2) * 50.0 / 8)
    values = losses_of(trainer)
    assert len(values) == steps
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], steps)  # one false alarm in a million runs
    assert low < np.sum((values / std) ** 2) < high
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5.5 / math.sqrt(steps)  # and as few here


def test_the_ledger_says_how_the_loss_was_reported(tmp_path):
    train(tmp_path / "private", per_sample_max_loss=7.0)
    trainer_of(tmp_path / "raw", report_train_loss="raw").train()
    private, raw = (PrivacyLedger.load(tmp_path / name / "out") for name in ("private", "raw"))
    assert (private.statement.train_loss, private.statement.per_sample_max_loss) == ("private", 7.0)
    assert private.statement.loss_noise_multiplier == pytest.approx(math.sqrt(0.99 / 0.01))
    assert not any("training loss" in line for line in private.statement.not_covered)
    assert any("training loss" in line for line in raw.statement.not_covered)


def test_the_optimizer_knows_the_noise_of_the_gradient_alone(tmp_path):
    trainer = train(tmp_path, noise_multiplier=None, target_epsilon=3.0, train_loss_budget=0.5)
    run = trainer.privacy
    assert trainer.optimizer.optimizer.noise_std == run.mechanism.noise_std(0) == run.statement.noise_multiplier / 8


@pytest.mark.parametrize("clip_unit_mean", [True, False])
def test_users_contribute_their_mean(tmp_path, clip_unit_mean):
    """Of which it bounds the mean of their losses, or each of these; one of thirteen has half of all examples."""
    data = numbered().add_column("user", [min(index, 12) for index in range(24)])
    trainer = train(
        tmp_path, losses={5 + index: 3.0 * (index % 2) for index in range(24)}, data=data, noise_multiplier=0.0,
        noise_seed=0, privacy_unit_column="user", per_device_train_batch_size=13, gradient_accumulation_steps=1,
        max_steps=1, clip_unit_mean=clip_unit_mean, per_sample_max_loss=2.0,
    )  # fmt: skip
    assert losses_of(trainer) == pytest.approx([(6 * 2.0 + (1.5 if clip_unit_mean else 1.0)) / 13], abs=1e-4)


def test_an_empty_draw_reports_noise(tmp_path, monkeypatch):
    monkeypatch.setattr(AllocationSampler, "draw", lambda self, step: np.array([], dtype=int))
    trainer = train(tmp_path, max_steps=3)
    assert np.all(losses_of(trainer) != 0.0)
