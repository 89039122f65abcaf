"""One run: the sampler that draws is the one that is accounted, and its parts begin and end together."""

import contextlib
import dataclasses
import inspect
import itertools
import warnings

import dp_accounting
import pytest
import torch
from datasets import Dataset
from dp_accounting.pld import PLDAccountant
from torch.nn import functional as F
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Trainer

from doppler_hf import DopplerTrainer
from doppler_hf.cli import main
from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import AllocationSampler, GaussianMechanism, PrivacyLedger
from doppler_hf.privacy.noise import PrivateLoss
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.processes import processes
from doppler_hf.run.resuming.earlier_ledgers import Previous
from doppler_hf.run.resuming.round_secrets import RoundSecret
from tests.support.ledgers import after, said
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import On, Recorder, arguments, interrupt, trained, trainer_of

pytestmark = pytest.mark.usefixtures("checked_arrays")


def test_the_sampler_that_draws_is_the_one_that_is_accounted(tmp_path):
    drawing = []

    class Keeps(DopplerTrainer):
        def get_train_dataloader(self):
            loader = super().get_train_dataloader()
            drawing.append(loader.batch_sampler)
            return loader

    trainer = trained(trainer_of(tmp_path, cls=Keeps))
    run = trainer.privacy
    assert drawing == [run.sampler]
    assert run.ledger is trainer.privacy.ledger
    assert run.ledger.history == [run.statement.releases(4)]


MECHANISM = dict(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8)


@pytest.mark.parametrize(
    "part",
    [
        dict(mechanism=GaussianMechanism(**MECHANISM | {"noise_multiplier": 0.9})),
        dict(mechanism=GaussianMechanism(**MECHANISM | {"max_grad_norm": 1.1})),
        dict(mechanism=GaussianMechanism(**MECHANISM, shape=NoiseShape.banded(2))),
        dict(mechanism=GaussianMechanism(**MECHANISM, seed=0)),
        dict(private_loss=PrivateLoss(GaussianMechanism(**MECHANISM), device=torch.device("cpu"))),
        dict(sampler=AllocationSampler(num_examples=24, expected_batch_size=7)),
        dict(sampler=AllocationSampler(num_examples=24, expected_batch_size=8, groups=2)),
        dict(sampler=AllocationSampler(num_examples=24, expected_batch_size=8, sampling="poisson")),
        {},
    ],
)
def test_what_is_accounted_is_what_sampler_and_mechanisms_do(part, tmp_path):
    run = PrivateRun(arguments(tmp_path), text_data(), num_trained=1)
    vars(run).update(part)
    with pytest.raises(AssertionError) if part else contextlib.nullcontext():
        run.begin(tiny_bert(), step=0)


@pytest.mark.parametrize(("clean", "allowed"), [(True, 7), (False, 8)])
def test_a_run_makes_no_more_steps_than_its_plan_has_left_whatever_its_target_would_allow(tmp_path, clean, allowed):
    """It is resumed at step 2 of 10, and 3 were made: the third one was lost by chance, or results may have led to it."""
    args = arguments(
        tmp_path, max_steps=10, noise_multiplier=None, target_epsilon=6.0, noise_shape="white", report_train_loss="none"
    )
    statement = PrivateRun(args, text_data(240), num_trained=1).statement
    noisier = dataclasses.replace(statement, noise_multiplier=2.0 * statement.noise_multiplier)
    ledger = after(PrivacyLedger.open(noisier), 3)
    RoundSecret(ledger.run_id, 0, 1, PrivateRun(args, text_data(240), num_trained=1)._rounds.digest_of_data).keep(
        bytes(32), output_dir=tmp_path
    )
    if clean:
        ledger.close()
    run = PrivateRun(args, text_data(240), num_trained=1, previous=Previous("checkpoint-2", 2, ledger))
    assert run.begin(tiny_bert(), step=2).runs[-1].continues_rounds
    assert run.affordable == allowed


def test_poisson_sampling_is_what_others_account_for(tmp_path, monkeypatch, capsys):
    """From its draws to `verify`, and over a restart, which keeps no secret of its rounds."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    options = dict(sampling="poisson", noise_multiplier=None, target_epsilon=6.0, noise_shape="auto", low_pass_filter="auto")
    kept = []
    look = On(step_end=lambda **_: kept.extend(tmp_path.glob("state/**/*-of-*")))
    saving = dict(save_strategy="steps", save_steps=6, callbacks=[look])
    first = trained(trainer_of(tmp_path, max_steps=12, **saving, **options))
    statement = first.privacy.statement
    event = dp_accounting.PoissonSampledDpEvent(1 / 3, dp_accounting.GaussianDpEvent(statement.effective_noise_multiplier))

    def theirs(steps):
        accountant = PLDAccountant(value_discretization_interval=1e-4)
        return accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps)).get_epsilon(24**-1.1)

    assert (statement.sampling, statement.noise_shape, first.privacy.sampler.turns_of_round) == ("poisson", "white", 1)
    assert first.privacy.epsilon() == pytest.approx(theirs(12), rel=1e-3) == pytest.approx(6.0, rel=2e-3)
    assert not kept
    # Steps after the checkpoint are made again, and count again.
    of_noise = dict(target_epsilon=None, noise_multiplier=statement.noise_multiplier)
    resumed = trainer_of(tmp_path, max_steps=12, **options | of_noise)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
    history = resumed.privacy.ledger.history
    assert [(each.steps, each.sampling) for each in history] == [(12, "poisson"), (6, "poisson")]
    assert resumed.privacy.ledger.epsilon_of_fixed_length() == pytest.approx(theirs(18), rel=1e-3)
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert "mechanism Gaussian mechanism with Poisson sampling" in said(capsys)


def test_the_engine_leaves_the_model_whatever_happens(tmp_path):
    model = tiny_bert()
    before = {name: module.forward for name, module in model.named_modules()}
    trainer = trainer_of(tmp_path, model=model, callbacks=[On(step_end=interrupt)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert {name: module.forward for name, module in model.named_modules()} == before


class OfText(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        assert outputs.past_key_values is None
        return F.cross_entropy(outputs.logits[:, 0, :2], labels, reduction="none")


def test_a_model_of_images_and_texts_keeps_no_past_in_training(tmp_path):
    """The switch is in the configuration of its text model: the outer one has none that the layers read."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = sizes | dict(vocab_size=50, num_key_value_heads=1, head_dim=8, pad_token_id=0, use_cache=True)
    vision = sizes | dict(image_size=8, patch_size=4)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=49)
    model = Gemma3ForConditionalGeneration(config)
    assert model.config.text_config.use_cache
    seen = []
    trainer = trainer_of(
        tmp_path, model=model, cls=OfText, max_steps=1, train_unreached_parameters=True,
        callbacks=[On(step_begin=lambda model, **_: seen.append(model.config.text_config.use_cache))],
    )  # fmt: skip
    trained(trainer)
    assert seen == [False]


def test_the_signature_is_that_of_trainer():
    ours, theirs = (inspect.signature(cls.__init__).parameters.values() for cls in (DopplerTrainer, Trainer))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize(
    ("overrides", "data", "code"),
    [
        ({}, None, "no-training-set"),
        ({}, text_data().filter(lambda _: False), "no-examples"),
        ({}, text_data().add_column("seq_lengths", [[1, 2]] * 24), "packed-rows"),
    ],
)
def test_a_run_that_cannot_be_private_is_refused(tmp_path, overrides, data, code):
    trainer = DopplerTrainer(tiny_bert(), arguments(tmp_path, **overrides), pad, data)
    with refused(code):
        _ = trainer.privacy


def test_a_trainer_without_privacy_has_no_run(tmp_path):
    trainer = trainer_of(tmp_path, disable_dp=True, noise_multiplier=None)
    assert not hasattr(trainer, "privacy")


# --- one draw, whole and alone --------------------------------------------------------------------------------------------


def full_batch(tmp_path, *, callback, **overrides):
    """Every example in every draw, no noise and no movement: each release is the same sum, or not one draw's."""
    recorder = Recorder()
    options = (
        dict(
            noise_multiplier=0.0,
            per_device_train_batch_size=12,
            learning_rate=0.0,
            allow_any_learning_rate=True,
            max_steps=3,
        )
        | overrides
    )
    trainer = trainer_of(tmp_path, callbacks=[recorder, callback], **options)
    return trainer, recorder


def test_a_draw_that_transformers_leaves_half_done_never_reaches_the_next_one(tmp_path):
    left = []

    def leave_the_first(state, control, **_):
        left.append(1)
        control.should_epoch_stop |= len(left) == 1 and state.global_step == 0 and state.epoch < 1

    trainer, recorder = full_batch(tmp_path, callback=On(substep_end=leave_the_first), report_train_loss="private")
    trainer.train()
    assert len(recorder.gradients) == trainer.state.global_step >= 2
    for gradient in recorder.gradients[1:]:
        torch.testing.assert_close(gradient, recorder.gradients[0], rtol=1e-5, atol=1e-7)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == len(recorder.gradients)
    assert losses[1:] == pytest.approx(losses[:1] * (len(losses) - 1), abs=1e-4)


class Skipping(DopplerTrainer):
    """Leaves the draw of the second step out, and takes that of the third in its place."""

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self.state.global_step == 1:
            list(itertools.islice(epoch_iterator, num_batches))
        return super().get_batch_samples(epoch_iterator, num_batches, device)


def test_a_draw_is_used_at_its_own_step_alone(tmp_path):
    trainer = trainer_of(tmp_path, cls=Skipping)
    with refused("steps-out-of-order"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_pieces_are_not_cut_anew_while_training(tmp_path):
    cut_anew = On(train_begin=lambda args, **_: setattr(args, "gradient_accumulation_steps", 3))
    trainer, recorder = full_batch(tmp_path, callback=cut_anew, per_device_train_batch_size=4)
    with refused("arguments-changed"):
        trainer.train()
    assert recorder.gradients == []


def test_the_loader_of_another_run_is_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    loader = trainer.get_train_dataloader()
    trainer.get_train_dataloader = lambda: loader
    with refused("another-loader"):
        trainer.train()


class Oversampling(DopplerTrainer):
    def get_train_dataloader(self):
        self.train_dataset = self.train_dataset.select([0] * 8 + list(range(len(self.train_dataset) - 8)))
        return super().get_train_dataloader()


def test_another_data_set_does_not_take_the_place_of_the_runs(tmp_path):
    with refused("another-training-set"):
        trainer_of(tmp_path, cls=Oversampling).train()


def test_privacy_is_not_switched_off_in_the_life_of_a_trainer(tmp_path):
    trainer = trained(trainer_of(tmp_path))
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.args.disable_dp = True
    with refused("disable-dp-changed"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_gradient_that_the_mechanism_did_not_make_is_no_private_step(tmp_path):
    class Raw(DopplerTrainer):
        is_tried = False

        def training_step(self, model, inputs, num_items_in_batch=None):
            if not self.is_tried:  # before the first step, where it would be refused
                self.is_tried = True
                return super().training_step(model, inputs, num_items_in_batch)
            loss = self.compute_per_sample_loss(model, self._prepare_inputs(inputs[0].inputs)).mean()
            loss.backward()
            return loss.detach()

    args = arguments(tmp_path, gradient_accumulation_steps=1, per_device_train_batch_size=12)  # no draw is empty
    trainer = Raw(model=tiny_bert(), args=args, train_dataset=text_data(), data_collator=pad)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with refused("gradient-without-noise"):
        trainer.train()
    assert all(map(torch.equal, trainer.model.parameters(), before))


@pytest.mark.parametrize(
    ("name", "other", "is_refused"),
    [
        ("noise_multiplier", 1 + 1e-12, False),
        ("noise_multiplier", 1 + 1e-3, True),
        ("per_sample_max_grad_norm", 1 + 1e-12, True),  # which nobody solves for
    ],
)
def test_processes_train_by_the_same_terms_but_for_how_sigma_is_rounded(name, other, is_refused):
    terms = [{name: 1.0, "noise_shape": "white"}, {name: other, "noise_shape": "white"}]
    if not is_refused:
        processes.refuse_different_terms(terms)
        return
    with refused("processes-differ", match=name):
        processes.refuse_different_terms(terms)


class _TwoProcesses:
    """What torch says of a process group of two."""

    is_available = is_initialized = staticmethod(lambda: True)
    get_world_size = staticmethod(lambda: 2)


def test_processes_that_would_each_draw_from_all_examples_are_refused(tmp_path, monkeypatch):
    """Their sums are added up under the noise of one: who was drawn by both counts twice."""
    recorder = Recorder()
    trainer = trainer_of(tmp_path, callbacks=[recorder])
    monkeypatch.setattr(processes, "dist", _TwoProcesses)
    with refused("processes-sample-alone", match="`accelerate launch`"):
        trainer.train()
    assert recorder.gradients == []


def not_finite(rows=24):
    """Rows of which the last third have values that are missing."""
    values = [[float(index), 1.0 if index < 2 * rows // 3 else None] for index in range(rows)]
    return Dataset.from_dict({"x": values, "labels": [index % 2 for index in range(rows)]}).with_format("torch")


class OfNumbers(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return F.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")


@pytest.mark.parametrize("reported", ["raw", "private"])
def test_examples_without_a_finite_gradient_are_warned_of_where_the_raw_loss_is_shown(tmp_path, reported):
    args = arguments(tmp_path, report_train_loss=reported, remove_unused_columns=False, noise_multiplier=1.0, max_steps=3)
    collator = torch.utils.data.default_collate
    trainer = OfNumbers(torch.nn.Linear(2, 2), args, collator, train_dataset=not_finite())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    told = [str(warning.message) for warning in told if "not finite" in str(warning.message)]
    assert len(told) == (reported == "raw")
    assert all("Look for missing values" in each for each in told)


def test_a_run_is_taken_up_with_its_own_plan_alone(tmp_path):
    ended = trained(trainer_of(tmp_path / "1", max_steps=1))
    ledger, options = ended.privacy.ledger, dict(words={}, chosen_step=None)
    with refused("other-plan", match="Continue the run with the version that began it"):
        trainer_of(tmp_path / "2", max_steps=1, noise_multiplier=3.0).privacy.take_up(ledger, tiny_bert(), **options)
    same = trainer_of(tmp_path / "3", max_steps=1).privacy
    same.take_up(ledger, tiny_bert(), **options)
    assert same.ledger is ledger
