"""Shaped noise through the real trainer: turns are kept, the ledger counts them, and what else must follow, follows."""

import numpy as np
import pytest
import torch

from doppler_hf import DopplerTrainer
from doppler_hf.privacy.accounting import Releases
from tests.support.tiny import pad_numbered, text_data
from tests.support.trainers import NoSignal, On, Recorder, trainer_of

SHAPE = "banded:bands=3"


class Numbered(DopplerTrainer):
    """Every example carries its number through the collator; its loss does not read it."""

    def compute_per_sample_loss(self, model, inputs):
        return super().compute_per_sample_loss(model, {name: value for name, value in inputs.items() if name != "number"})


def shaped_trainer(tmp_path, **options):
    """Return a trainer, who takes part in which of its steps, and what its optimizer is told about the noise."""
    options = dict(noise_shape=SHAPE, remove_unused_columns=False, per_device_train_batch_size=2, max_steps=11) | options
    data = text_data(24).add_column("number", list(range(24)))
    trainer = trainer_of(tmp_path, cls=Numbered, data=data, collator=pad_numbered, **options)
    taken, stds, begin = [], [], trainer.get_batch_samples

    def watched(*args):
        pieces, count = begin(*args)
        if trainer.privacy.is_running:  # the checks before the first step try this method, too
            taken.append([x for piece in pieces for micro_batch in piece for x in micro_batch.inputs["number"].tolist()])
        return pieces, count

    trainer.get_batch_samples = watched
    trainer.add_callback(On(pre_optimizer_step=lambda optimizer, **_: stds.append(optimizer.optimizer.noise_std)))
    return trainer, taken, stds


def apart(taken):
    """The least number of steps from one part that a unit takes to its next."""
    steps = {unit: [step for step, units in enumerate(taken) if unit in units] for unit in range(24)}
    return min((int(np.diff(s).min()) for s in steps.values() if len(s) > 1), default=None)


def test_no_unit_comes_back_before_its_turn(tmp_path):
    trainer, taken, stds = shaped_trainer(tmp_path)
    trainer.train()
    assert len(taken) >= 11
    assert apart(taken) == 3
    run = trainer.privacy
    sigma, rate = run.statement.effective_noise_multiplier, run.sampler.sample_rate
    assert run.ledger.history == [Releases(sigma, rate, 11, run.mechanism.shape.c)]
    assert stds == [run.mechanism.noise_std(step) for step in range(11)]
    assert stds[0] < stds[2]


def test_a_length_in_epochs_ends_where_every_group_has_had_its_turns(tmp_path, capsys):
    said = "max_steps=6 would need less noise, because only some records take part in the last 2 steps"
    trainer, *_ = shaped_trainer(tmp_path / "epochs", max_steps=-1, num_train_epochs=4 / 3)  # six steps each
    trainer.train()
    ledger = trainer.privacy.ledger
    assert trainer.state.global_step == trainer.state.max_steps == ledger.steps_run == ledger.statement.steps_planned == 6
    assert said not in capsys.readouterr().out
    trainer, *_ = shaped_trainer(tmp_path / "steps", max_steps=8)
    trainer.train()
    assert trainer.state.global_step == 8
    assert said in capsys.readouterr().out


def test_a_resumed_run_begins_new_turns_which_add_up(tmp_path):
    trainer, *_ = shaped_trainer(tmp_path, max_steps=5, save_strategy="steps", save_steps=5)
    trainer.train()
    resumed, taken, stds = shaped_trainer(tmp_path, max_steps=11)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    run = resumed.privacy
    sigma, rate = run.statement.effective_noise_multiplier, run.sampler.sample_rate
    assert run.ledger.history == [Releases(sigma, rate, steps, run.mechanism.shape.c) for steps in (5, 6)]
    assert stds == [run.mechanism.noise_std(step) for step in range(5, 11)]
    assert stds[0] == pytest.approx(run.mechanism.noise_multiplier / 4 * run.mechanism.shape.norm)
    assert apart(taken[-6:]) in (None, 3)


def test_noise_after_a_restart_owes_nothing_to_that_before(tmp_path):
    recorders = [Recorder(), Recorder()]
    options = dict(cls=NoSignal, noise_shape=SHAPE, per_device_train_batch_size=2)
    trainer_of(tmp_path, callbacks=[recorders[0]], max_steps=5, save_strategy="steps", save_steps=5, **options).train()
    resumed = trainer_of(tmp_path, callbacks=[recorders[1]], max_steps=8, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    before, after = (torch.stack(recorder.gradients).numpy() for recorder in recorders)
    correlations = np.corrcoef(np.concatenate([before, after]))
    bound = 5.5 / np.sqrt(before.shape[1])  # 4e-8 each
    assert np.abs(correlations[:5, 5:]).max() < bound < -correlations[4, 3]
    # Nor is a step of the first run repeated, and the recursion begins anew: a less noisy step.
    assert after[0].std() < 0.95 * before[-1].std()


def test_the_budget_guard_counts_turns(tmp_path):
    trainer, *_ = shaped_trainer(tmp_path, max_steps=8, target_epsilon=3.0, noise_multiplier=None)
    trainer.train()
    ledger = trainer.privacy.ledger
    # The ninth step is the third turn of the third group, which had two.
    assert ledger.affordable_steps(5) == 0
