"""A loss of one's own that follows the step of the training is checked at later steps, too, before the first one."""

import functools
import types

import pytest
import torch
from transformers import TrainerCallback

from doppler_hf import DopplerTrainer
from doppler_hf.run.moments import moments_of
from tests.support.trainers import checked_trainer_of, trained, trainer_of


class Beside(DopplerTrainer):
    """From some step on each loss is multiplied by the mean of the batch."""

    begins = 3

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        return losses * losses.detach().mean() if self.state.global_step >= self.begins else losses


class BesideInEpoch(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        return losses * losses.detach().mean() if self.state.epoch > 1.0 else losses


class BesideInWindow(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        return losses * losses.detach().mean() if 1 <= self.state.global_step < 3 else losses


class BesideOnceLogged(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        return losses * losses.detach().mean() if self.state.log_history else losses


class MixedLater(DopplerTrainer):
    """From the last step on every example has its neighbour's tokens."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        if isinstance(inputs, dict) and self.state.global_step >= 3:
            inputs = {**inputs, "input_ids": inputs["input_ids"].roll(1, dims=0)}
        return inputs


class Hardest(DopplerTrainer):
    """From some step on half of the losses counts, but those of sixteen examples at least."""

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        if self.state.global_step < 2 or len(losses) <= 16:
            return losses
        return losses * (losses >= losses.median())


@pytest.mark.parametrize(
    ("cls", "more", "step"),
    [
        (Beside, {}, 3),
        (BesideInEpoch, {}, 3),
        (BesideInWindow, {}, 2),
        (BesideOnceLogged, {}, 2),
        (MixedLater, {}, 3),
        (Hardest, {"per_device_train_batch_size": 20, "gradient_accumulation_steps": 1}, 2),
    ],
)
def test_a_loss_that_looks_at_others_from_a_step_on_is_refused_before_the_first(tmp_path, cls, more, step):
    trainer = checked_trainer_of(tmp_path, cls=cls, **more)
    with pytest.raises(ValueError, match=rf"At step {step} of 4, though not at the first: .*beside it"):
        trainer.train()
    assert (trainer.state.global_step, trainer.state.max_steps) == (0, 0)


def test_one_that_does_so_at_once_is_not_said_to_do_so_later(tmp_path):
    with pytest.raises(ValueError, match="beside it") as error:
        checked_trainer_of(tmp_path, cls=functools.partial(made, begins=0)).train()
    assert "though not at the first" not in str(error.value)


def made(*args, begins, **options):
    return type("Other", (Beside,), {"begins": begins})(*args, **options)


class Growing(DopplerTrainer):
    """Each loss grows with the share of the training that is over, which is read off the state alone."""

    def compute_per_sample_loss(self, model, inputs):
        with open(self.args.run_name, "a") as file:  # what is in a file no check puts back
            print(self.state.global_step, self.state.epoch, file=file)
        share = self.state.global_step / self.state.max_steps + self.state.epoch / self.state.num_train_epochs
        return super().compute_per_sample_loss(model, inputs) * (1.0 + share)


def test_a_loss_that_follows_the_step_trains(tmp_path):
    trainer = trained(checked_trainer_of(tmp_path, cls=Growing, run_name=str(tmp_path / "seen")))
    assert trainer.state.global_step == 4
    # Three draws an epoch, and four steps: two epochs, as the host counts them. The check comes first.
    checked = [0, 2, 3]
    seen = [line.split() for line in dict.fromkeys((tmp_path / "seen").read_text().splitlines())]
    assert [int(step) for step, _ in seen[:3]] == checked
    torch.testing.assert_close([float(epoch) for _, epoch in seen[:3]], [0.0, 1.0, 1.5])


def test_a_loss_that_is_set_on_the_trainer_is_seen_later_too(tmp_path):
    trainer = checked_trainer_of(tmp_path)

    def beside(self, model, inputs):
        losses = DopplerTrainer.compute_per_sample_loss(self, model, inputs)
        return losses * losses.detach().mean() if self.state.global_step >= 3 else losses

    trainer.compute_per_sample_loss = types.MethodType(beside, trainer)
    with pytest.raises(ValueError, match="At step 3 of 4, though not at the first"):
        trainer.train()


class OfWhatComesLater(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        return losses * self.weights[self.state.global_step] if self.state.global_step > 0 else losses


class Weights(TrainerCallback):
    def __init__(self):
        self.weights = {}

    def on_step_begin(self, args, state, control, **kwargs):
        self.weights[state.global_step] = 0.5


def test_a_loss_that_reads_what_a_training_has_only_later_trains_and_is_told_of(tmp_path):
    callback = Weights()
    trainer = checked_trainer_of(tmp_path, cls=OfWhatComesLater, callbacks=[callback])
    trainer.weights = callback.weights
    with pytest.warns(UserWarning, match=r"cannot be looked at as at step [23] of 4, got a KeyError"):
        trainer.train()
    assert trainer.state.global_step == 4


def test_losses_of_the_library_are_compared_once(tmp_path):
    trainer = trainer_of(tmp_path)
    assert len(moments_of(trainer, steps=100, epochs=2)) == 1
    own = trainer_of(tmp_path, cls=Growing)
    assert len(moments_of(own, steps=100, epochs=2)) == 3
    assert [len(moments_of(own, steps=steps, epochs=1)) for steps in (1, 2, 3)] == [1, 2, 3]
