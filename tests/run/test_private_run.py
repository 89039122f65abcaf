"""One run: the sampler that draws is the one that is accounted, and its parts begin and end together."""

import inspect

import pytest
import torch
from transformers import Trainer, TrainerCallback

from doppler_hf import DopplerTrainer
from doppler_hf.privacy import GaussianMechanism
from doppler_hf.run.private_run import PrivateRun
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import Recorder, arguments, trainer_of


def test_the_sampler_that_draws_is_the_one_that_is_accounted(tmp_path):
    trainer = trainer_of(tmp_path)
    drawing = []

    class Loader(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
            drawing.append(train_dataloader.batch_sampler)

    trainer.add_callback(Loader)
    trainer.train()
    run = trainer.private_run
    assert drawing == [run.sampler]
    assert run.ledger is trainer.privacy.ledger
    assert run.ledger.history == [run.releases(4)]


def test_what_is_accounted_is_what_the_mechanism_does(tmp_path):
    run = PrivateRun(arguments(tmp_path), text_data(), expected_batch_size=8)
    run.mechanism = GaussianMechanism(noise_multiplier=0.9, max_grad_norm=1.0, expected_batch_size=8)
    with pytest.raises(AssertionError):
        run.begin(step=0)


class SteppedNoise:
    """A mechanism whose noise differs between steps: all that the trainer may rely on is the protocol."""

    expected_batch_size = 8

    def __init__(self, like):
        self._like, self.closed = like, False

    def noise_std(self, step):
        return 0.25 * (step + 1)

    def privatize(self, sums, *, step, subspaces):
        assert not subspaces
        return {name: torch.full_like(total, self.noise_std(step)) for name, total in sums.items()}

    def releases(self, steps, *, sample_rate):
        return self._like.releases(steps, sample_rate=sample_rate)

    def describe(self):
        return self._like.describe()

    def reproducible(self, seed):
        return self

    def close(self):
        self.closed = True


def test_another_mechanism_fits_in(tmp_path, monkeypatch):
    recorder, stds = Recorder(), []

    class Stds(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            stds.append(optimizer.optimizer.noise_std)

    trainer = trainer_of(tmp_path, callbacks=[recorder, Stds()], max_steps=3)
    make = trainer._new_run

    def stepped(**options):
        run = make(**options)
        run.mechanism = SteppedNoise(run.mechanism)
        return run

    monkeypatch.setattr(trainer, "_new_run", stepped)
    trainer.train()
    assert stds == [0.25, 0.5, 0.75]
    assert [gradient.unique().tolist() for gradient in recorder.gradients] == [[0.25], [0.5], [0.75]]
    assert trainer.private_run.mechanism.closed


def test_the_engine_leaves_the_model_and_the_thread_ends_whatever_happens(tmp_path):
    model = tiny_bert()
    before = {name: module.forward for name, module in model.named_modules()}

    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = trainer_of(tmp_path, model=model, callbacks=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert {name: module.forward for name, module in model.named_modules()} == before


def test_the_signature_is_the_hosts():
    ours, hosts = (inspect.signature(cls.__init__).parameters.values() for cls in (DopplerTrainer, Trainer))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in hosts]


def test_positional_arguments_arrive(tmp_path):
    trainer = DopplerTrainer(tiny_bert(), arguments(tmp_path), pad, text_data(), text_data(8, seed=1))
    assert (trainer.data_collator, len(trainer.train_dataset), len(trainer.eval_dataset)) == (pad, 24, 8)
