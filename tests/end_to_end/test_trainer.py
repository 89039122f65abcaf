"""The trainer keeps its promises: private `p.grad`, honest accounting, and the stock behaviour of everything else."""

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments, set_seed

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli import main
from doppler_hf.preflight.trainer import refuse_model_in_parts
from doppler_hf.privacy import LEDGER_NAME, AllocationSampler, PrivacyLedger
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import NoSignal, On, Recorder, assert_trained_alike, changing, trained, trainer_of, weights

# --- what reaches p.grad --------------------------------------------------------------------------------------------------


def test_noise_in_grad_has_the_promised_deviation_and_no_memory(tmp_path):
    recorder = Recorder()
    options = dict(cls=NoSignal, noise_multiplier=1.7, per_sample_max_grad_norm=0.3, max_steps=6)
    trainer = trained(trainer_of(tmp_path, callbacks=[recorder], **options))
    std = 1.7 * 0.3 / 8  # σC/B with B = 4 × 2 × 1
    noise = torch.stack(recorder.gradients).numpy()
    assert trainer.optimizer.optimizer.noise_std == pytest.approx(std)
    # χ² over all coordinates and steps, two-sided at 1e-6; 15 correlations beyond 5.5 standard deviations: 6e-7.
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], noise.size)
    assert low < np.sum((noise / std) ** 2) < high
    correlations = np.corrcoef(noise)[np.triu_indices(len(noise), 1)]
    assert np.all(np.abs(correlations) < 5.5 / math.sqrt(noise.shape[1]))


def test_an_empty_draw_is_a_noisy_step_that_never_reaches_the_model(tmp_path, monkeypatch):
    recorder = Recorder()
    trainer = trainer_of(tmp_path, callbacks=[recorder], max_steps=3)
    monkeypatch.setattr(AllocationSampler, "draw", lambda self, step: np.zeros(0, dtype=int))
    calls = []
    trainer.add_callback(On(train_begin=lambda model, **_: model.register_forward_pre_hook(lambda *_: calls.append(1))))
    trainer.train()
    assert trainer.state.global_step == trainer.privacy.ledger.steps_run == 3
    assert all(torch.all(gradient != 0) for gradient in recorder.gradients)
    assert calls == []


def test_cutting_into_micro_batches_changes_nothing(tmp_path):
    ends = []
    for number, (per_device, accumulation, tokens) in enumerate([(12, 1, None), (4, 3, None), (1, 12, None), (6, 2, 10)]):
        trainer = trained(trainer_of(
            tmp_path / str(number), per_device_train_batch_size=per_device, noise_seed=1, max_tokens_per_micro_batch=tokens,
            gradient_accumulation_steps=accumulation, base_optimizer="sgd", low_pass_filter="first-order-v1", max_steps=2,
        ))  # fmt: skip
        ends.append(weights(trainer))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], atol=1e-6, rtol=1e-5)


class MicroBatches(DopplerTrainer):
    """Keeps the shape of every micro-batch, those of the check before the first step apart."""

    def set_initial_training_values(self, args, dataloader):
        self.shapes = []
        values = super().set_initial_training_values(args, dataloader)
        self.checked, self.shapes = self.shapes, []
        return values

    def compute_per_sample_loss(self, model, inputs):
        self.shapes.append(tuple(inputs["input_ids"].shape))
        return super().compute_per_sample_loss(model, inputs)


def test_pieces_of_a_draw_may_be_empty_within_a_budget_of_tokens(tmp_path, monkeypatch):
    recorder = Recorder()
    trainer = trainer_of(
        tmp_path, callbacks=[recorder], cls=MicroBatches, gradient_accumulation_steps=4, per_device_train_batch_size=1,
        max_tokens_per_micro_batch=8, max_steps=3,
    )  # fmt: skip
    monkeypatch.setattr(AllocationSampler, "draw", lambda self, step: np.arange(step))  # 0, 1 and 2 examples
    trainer.train()
    assert [rows for rows, _ in trainer.shapes] == [1, 1, 1]
    assert all(torch.all(gradient != 0) for gradient in recorder.gradients)


# --- accounting -----------------------------------------------------------------------------------------------------------


def test_steps_planned_run_and_accounted_are_one_number(tmp_path):
    options = dict(noise_multiplier=None, target_epsilon=3.0, max_steps=-1, num_train_epochs=1.5)
    trainer = trained(trainer_of(tmp_path, callbacks=[recorder := Recorder()], **options))
    ledger = trainer.privacy.ledger
    assert ledger.steps_run == ledger.statement.steps_planned == 5  # ⌈24/8⌉ = 3 an epoch
    assert len(recorder.gradients) == trainer.state.global_step == PrivacyLedger.load(tmp_path / "out").steps_run == 5
    assert 3.0 * 0.999 <= ledger.epsilon() <= 3.0


def test_ledger_lies_beside_the_model_and_in_every_checkpoint(tmp_path):
    trainer_of(tmp_path, save_strategy="steps", save_steps=2).train()
    for step in (2, 4):
        assert PrivacyLedger.load(tmp_path / "out" / f"checkpoint-{step}").steps_run == step
    ledger = PrivacyLedger.load(tmp_path / "out")
    events = ["opened", *2 * ["steps", "steps", "checkpoint", "saved"], "closed"]
    assert [entry["event"] for entry in ledger.entries] == events
    assert ledger.statement.private
    assert (ledger.statement.num_units, ledger.statement.expected_batch_size, ledger.steps_run) == (24, 8, 4)
    assert ledger.statement.target_delta == pytest.approx(24**-1.1)
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_a_checkpoint_is_complete_when_it_is_pushed(tmp_path):
    pushed = []

    class Pushing(DopplerTrainer):
        def _push_from_checkpoint(self, checkpoint_folder):
            pushed.append({path.name for path in Path(checkpoint_folder).iterdir()})

    trainer = trainer_of(tmp_path, cls=Pushing, save_strategy="steps", save_steps=4)
    trainer.args.push_to_hub = True
    trainer.train()
    assert len(pushed) == 1
    assert pushed[0] >= {LEDGER_NAME, "model.safetensors", "optimizer.pt"}


def test_an_evaluation_reports_the_loss_that_is_trained(tmp_path):
    ten_times = changing(lambda losses, inputs: 10 * losses)
    found = [trainer_of(tmp_path, cls=cls, evaluated=text_data(8, seed=1)).evaluate() for cls in (DopplerTrainer, ten_times)]
    assert found[1]["eval_loss"] == pytest.approx(10 * found[0]["eval_loss"], rel=1e-5)


# --- resuming -------------------------------------------------------------------------------------------------------------


def test_resumed_equals_uninterrupted(tmp_path):
    options = dict(
        noise_seed=1, max_steps=7, low_pass_filter="second-order", save_strategy="steps", save_steps=2,
        lr_scheduler_type="cosine",
    )  # fmt: skip
    whole = trained(trainer_of(tmp_path, **options))
    for step in (2, 4):  # of three in an epoch
        resumed = trainer_of(tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{step}"))
        assert_trained_alike(resumed, whole)
        assert resumed.state.global_step == 7


def test_a_checkpoint_may_be_resumed_into_another_folder(tmp_path):
    trainer_of(tmp_path / "a", save_strategy="steps", save_steps=2).train()
    resumed = trainer_of(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "out" / "checkpoint-2"))
    # The first run went on to step 4: its steps 3 and 4 are counted beside the new ones.
    assert PrivacyLedger.load(tmp_path / "b" / "out").steps_run == 6


def test_disable_dp_is_the_plain_trainer_to_the_last_bit(tmp_path):
    options = dict(
        per_device_train_batch_size=8, max_steps=6, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=7,
    )  # fmt: skip
    data = dict(train_dataset=text_data(), eval_dataset=text_data(8, seed=1), data_collator=pad)
    stock = Trainer(model=tiny_bert(hidden_dropout_prob=0.1), args=TrainingArguments(str(tmp_path / "a"), **options), **data)
    ours = DopplerTrainer(
        model=tiny_bert(hidden_dropout_prob=0.1),
        args=DopplerTrainingArguments(str(tmp_path / "b"), disable_dp=True, **options),
        **data,
    )
    assert [type(each) for each in ours.callback_handler.callbacks] == [
        type(each) for each in stock.callback_handler.callbacks
    ]
    for trainer in (stock, ours):
        set_seed(7)
        trainer.train()
    assert torch.equal(weights(ours), weights(stock))
    kept = ("loss", "grad_norm", "learning_rate")
    assert [{k: e[k] for k in kept if k in e} for e in ours.state.log_history] == [
        {k: e[k] for k in kept if k in e} for e in stock.state.log_history
    ]
    assert type(ours.optimizer.optimizer) is type(stock.optimizer.optimizer)
    assert not (tmp_path / "b" / LEDGER_NAME).exists()


class TokensFirst(type(tiny_bert())):
    """A layer sees (length, batch, features), which looks right for a batch of `length` examples."""

    def __init__(self, config):
        super().__init__(config)
        self.mixer = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden = self.mixer(self.bert.embeddings(input_ids).transpose(0, 1)).tanh().transpose(0, 1)
        return {"logits": self.classifier(hidden.mean(dim=1))}


@pytest.mark.parametrize(
    ("length", "engine", "self_check"), [(2, "book_keeping", True), (4, "book_keeping", False), (3, "opacus", False)]
)
def test_a_layer_without_a_batch_dimension_is_refused_whatever_the_length(tmp_path, length, engine, self_check):
    rows = [{"input_ids": [9] * (length - 1) + [7], "attention_mask": [1] * length, "labels": 0}] * 24
    # With draws of 6 and 9 examples alone, which chance makes now and then, all passes have three rows.
    options = dict(grad_sample_engine=engine, grad_sample_self_check=self_check, noise_seed=0)
    trainer = trainer_of(tmp_path, model=TokensFirst(tiny_bert().config), data=Dataset.from_list(rows), **options)
    with refused("no-per-sample-gradient", match="mixer"):
        trainer.train()


def test_a_model_in_parts_on_several_processes_is_refused(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(type(trainer.model), "tp_size", 2)  # which Transformers' accelerator would not have on a CPU
    with refused("model-in-parts"):
        refuse_model_in_parts(trainer)


def test_arguments_of_transformers_are_refused(tmp_path):
    with refused("not-our-arguments", match="TrainingArguments"):
        DopplerTrainer(model=tiny_bert(), args=TrainingArguments(str(tmp_path)), train_dataset=text_data())


@pytest.mark.gpu
def test_one_gpu_trains_in_bf16_with_the_promised_noise(tmp_path):
    recorder = Recorder()
    trainer = trainer_of(tmp_path, cls=NoSignal, callbacks=[recorder], use_cpu=False, bf16=True, max_steps=3)
    assert trained(trainer).model.device.type == "cuda"
    noise = torch.stack(recorder.gradients)
    assert noise.std().item() == pytest.approx(1.0 / 8, rel=6 / (2 * noise.numel()) ** 0.5)


def test_the_loss_of_a_step_is_a_mean_however_it_is_cut(tmp_path):
    sizes = dict(per_device_train_batch_size=6, gradient_accumulation_steps=4)
    ones = changing(lambda losses, inputs: 1e-12 * losses + 1.0)
    trainer = trained(trainer_of(tmp_path, cls=ones, noise_multiplier=0.0, max_steps=1, **sizes))
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == [1.0]


@pytest.mark.parametrize(("report", "bf16", "granularity"), [("private", False, "flat"), ("none", True, "per_layer")])
def test_examples_whose_loss_is_no_number_contribute_nothing_and_show_nowhere(tmp_path, report, bf16, granularity):
    data, gradients = text_data(), []
    assert sum(len(ids) == 3 for ids in data["input_ids"]) > 24 * 0.1  # the small one of the checks before the first step
    for factor in (0.0, math.nan):

        def unfit(losses, inputs, factor=factor):
            return losses * torch.where(inputs["attention_mask"].sum(dim=1) == 3, factor, 1.0)

        recorder = Recorder()
        trainer = trained(trainer_of(
            tmp_path / str(factor), cls=changing(unfit), data=data, noise_seed=0, report_train_loss=report, bf16=bf16,
            clipping_granularity=granularity, callbacks=[recorder],
        ))  # fmt: skip
        # ε is infinite under a seed.
        logs = [(name, value) for logs in trainer.state.log_history for name, value in logs.items() if "epsilon" not in name]
        assert np.isfinite([value for _, value in logs if isinstance(value, float)]).all()
        gradients.append(torch.stack(recorder.gradients))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
