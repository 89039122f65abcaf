"""The trainer keeps its promises: private `p.grad`, honest accounting, and the stock behaviour of everything else."""

import json
import math
import pickle
import re
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    BertForPreTraining,
    BertForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli import main
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import LEDGER_NAME, PoissonSampler, PrivacyLedger
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.refusals import refuse_of_trainer
from tests.support.pairwise import pairwise
from tests.support.tiers import thorough
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.tolerances import RAISED
from tests.support.trainers import NoSignal, Recorder, StopAt, arguments, checked_trainer_of, trained, trainer_of, weights

# --- what reaches p.grad --------------------------------------------------------------------------------------------------


def test_noise_in_grad_has_the_promised_deviation_and_no_memory(tmp_path):
    recorder = Recorder()
    trainer = trainer_of(
        tmp_path, cls=NoSignal, callbacks=[recorder], noise_multiplier=1.7, per_sample_max_grad_norm=0.3, max_steps=6
    )
    trainer.train()
    std = 1.7 * 0.3 / 8  # σC/B with B = 4 × 2 × 1
    noise = torch.stack(recorder.gradients).numpy()
    assert trainer.optimizer.optimizer.noise_std == pytest.approx(std)
    # χ² over all coordinates and steps, two-sided at 1e-6; 15 correlations beyond 5.5 standard deviations: 6e-7.
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], noise.size)
    assert low < np.sum((noise / std) ** 2) < high
    correlations = np.corrcoef(noise)[np.triu_indices(len(noise), 1)]
    assert np.all(np.abs(correlations) < 5.5 / math.sqrt(noise.shape[1]))


def test_noise_is_drawn_ahead_for_accelerators_alone_and_the_thread_ends_with_the_run(tmp_path, monkeypatch):
    def threads():
        return [thread.name for thread in threading.enumerate()].count("noise-ahead")

    before, args = threads(), arguments(tmp_path)
    for device, expected in (("cpu", before), ("cuda", before + 1)):
        monkeypatch.setattr(DopplerTrainingArguments, "device", torch.device(device))
        with PrivateRun(args, text_data(), expected_batch_size=8, num_trained=1) as run:
            run.mechanism.privatize({"w": torch.zeros(3)}, step=0)
            assert threads() == expected
        assert threads() == before


def test_the_same_seed_gives_other_noise_and_other_batches(tmp_path):
    runs, drawn = [], []
    for run in range(2):
        recorder = Recorder()
        trainer = trained(trainer_of(tmp_path / str(run), cls=NoSignal, callbacks=[recorder], seed=42, max_steps=2))
        runs.append(torch.stack(recorder.gradients))
        drawn.append([tuple(batch) for batch in trainer.get_train_dataloader().batch_sampler])
    assert not torch.any(runs[0] == runs[1])
    assert drawn[0] != drawn[1]  # equal with a probability below 1e-12


def test_without_noise_grad_is_the_clipped_sum_over_the_expected_batch(tmp_path):
    recorder = Recorder()
    trainer = trainer_of(
        tmp_path, callbacks=[recorder], noise_multiplier=0.0, clipping="vanilla", per_sample_max_grad_norm=1e-3,
        max_steps=1, noise_seed=5,
    )  # fmt: skip
    drawn = PoissonSampler(num_examples=24, expected_batch_size=8, seed=5).draw(0)
    model, expected = tiny_bert().train(), 0.0
    for index in drawn:
        inputs = pad([trainer.train_dataset[int(index)]])
        gradients = torch.autograd.grad(model(**inputs).loss, list(model.parameters()))
        flat = torch.cat([g.flatten() for g in gradients]).double()
        expected = expected + flat * min(1.0, 1e-3 / (flat.norm() * RAISED))
    trainer.train()
    torch.testing.assert_close(recorder.gradients[0], expected / 8, atol=1e-10, rtol=1e-4)
    assert not trainer.privacy.ledger.private


def test_an_empty_draw_is_a_noisy_step_that_never_reaches_the_model(tmp_path, monkeypatch):
    recorder = Recorder()
    trainer = trainer_of(tmp_path, callbacks=[recorder], max_steps=3)
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.zeros(0, dtype=int))
    calls = []

    class Calls(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            model.register_forward_pre_hook(lambda *args: calls.append(args))

    trainer.add_callback(Calls)
    trainer.train()
    assert trainer.state.global_step == trainer.privacy.ledger.steps_run == 3
    assert all(torch.all(gradient != 0) for gradient in recorder.gradients)
    assert calls == []


@pytest.mark.parametrize("granularity", ["flat", *thorough("per_layer")])
def test_cutting_into_micro_batches_changes_nothing(tmp_path, granularity):
    ends = []
    for per_device, accumulation in ((12, 1), (4, 3), (1, 12)):
        trainer = trained(trainer_of(
            tmp_path / str(per_device), per_device_train_batch_size=per_device, noise_seed=1,
            gradient_accumulation_steps=accumulation, clipping_granularity=granularity, base_optimizer="sgd",
            low_pass_filter="first-order-v1", max_steps=2,
        ))  # fmt: skip
        ends.append(weights(trainer))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ends[2], ends[0], atol=1e-6, rtol=1e-5)


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


@pytest.mark.thorough
def test_cutting_by_tokens_changes_nothing_but_the_micro_batches(tmp_path):
    runs, checks = [], []
    for number, (accumulation, budget) in enumerate([(1, None), (1, 8), (1, 20), (2, 8), (2, 33), (4, 10), (4, 1000)]):
        recorder = Recorder()
        trainer = trained(trainer_of(
            tmp_path / str(number), model=tiny_bert().double(), cls=MicroBatches, callbacks=[recorder], noise_seed=1,
            noise_multiplier=0.0, per_device_train_batch_size=12 // accumulation, max_tokens_per_micro_batch=budget,
            gradient_accumulation_steps=accumulation, low_pass_filter="first-order-v1", max_steps=2,
        ))  # fmt: skip
        # A layer is refused or not whatever the budget. Draws that are cut are first looked at for numbers that rows share.
        checks.append(trainer.checked[1 if number == 0 else 2 :])
        assert all(rows * length <= (budget or math.inf) for rows, length in trainer.shapes)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((accumulation, trainer.shapes, losses, torch.stack(recorder.gradients), weights(trainer)))
    assert all(checked == checks[0] for checked in checks)
    examples = sum(rows for rows, _ in runs[0][1])
    whole_loss = {accumulation: losses for accumulation, _, losses, _, _ in reversed(runs)}
    for accumulation, shapes, losses, gradients, ends in runs[1:]:
        assert sum(rows for rows, _ in shapes) == examples
        torch.testing.assert_close(gradients, runs[0][3], atol=1e-13, rtol=1e-10)
        torch.testing.assert_close(ends, runs[0][4], atol=1e-12, rtol=1e-10)
        assert losses == pytest.approx(whole_loss[accumulation], abs=1e-6, rel=1e-6)
    passes = [len(shapes) for _, shapes, *_ in runs]
    assert passes[0] == 2  # one a step
    assert passes[1] > passes[2] > passes[0]
    assert passes[6] == 8


def test_pieces_of_a_draw_may_be_empty_within_a_budget_of_tokens(tmp_path, monkeypatch):
    recorder = Recorder()
    trainer = trainer_of(
        tmp_path, callbacks=[recorder], cls=MicroBatches, gradient_accumulation_steps=4, per_device_train_batch_size=1,
        max_tokens_per_micro_batch=8, max_steps=3,
    )  # fmt: skip
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.arange(step))  # 0, 1 and 2 examples
    trainer.train()
    assert [rows for rows, _ in trainer.shapes] == [1, 1, 1]
    assert all(torch.all(gradient != 0) for gradient in recorder.gradients)


@pytest.mark.thorough
def test_worker_processes_cut_by_tokens_too(tmp_path):
    trainer = trainer_of(tmp_path, cls=MicroBatches, dataloader_num_workers=1, max_steps=2, max_tokens_per_micro_batch=8)
    with warnings.catch_warnings():  # of fork in a process with threads, which is torch's own affair
        warnings.simplefilter("ignore", DeprecationWarning)
        trainer.train()
    assert max(rows * length for rows, length in trainer.shapes) <= 8


def test_the_order_inside_a_draw_does_not_matter(tmp_path, monkeypatch):
    ends = []
    for run in range(2):
        if run:
            monkeypatch.setattr("doppler_hf.run.private_run.lengths_of", lambda dataset: None)
        trainer = trained(trainer_of(tmp_path / str(run), noise_seed=1, base_optimizer="sgd"))
        ends.append(weights(trainer))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-6, rtol=1e-5)


# --- accounting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        *thorough((dict(max_steps=5), 5), (dict(max_steps=-1, num_train_epochs=2), 6)),  # ⌈24/8⌉ = 3 an epoch
        (dict(max_steps=-1, num_train_epochs=1.5), 5),
        (dict(max_steps=-1, num_train_epochs=1, per_device_train_batch_size=5), 3),  # ⌈24/10⌉
    ],
)
def test_steps_planned_run_and_accounted_are_one_number(tmp_path, overrides, steps):
    trainer = trained(trainer_of(tmp_path, noise_multiplier=None, target_epsilon=3.0, **overrides))
    ledger = trainer.privacy.ledger
    assert trainer.state.global_step == ledger.steps_run == ledger.statement.steps_planned == steps
    assert 3.0 * 0.999 <= ledger.epsilon() <= 3.0


def test_ledger_lies_beside_the_model_and_in_every_checkpoint(tmp_path):
    trainer_of(tmp_path, save_strategy="steps", save_steps=2).train()
    for step in (2, 4):
        assert PrivacyLedger.load(tmp_path / "out" / f"checkpoint-{step}").steps_run == step
    written = json.loads((tmp_path / "out" / LEDGER_NAME).read_text())["entries"]
    events = ["opened", *2 * ["steps", "steps", "checkpoint", "saved"], "closed"]
    assert [entry["event"] for entry in written] == events
    assert written[-1]["steps_run"] == 4
    assert [(entry["step"], entry["steps_run"]) for entry in written if entry["event"] == "checkpoint"] == [(2, 2), (4, 4)]
    statement = written[0]["statement"]
    assert statement["private"]
    assert statement["num_units"] == 24
    assert statement["expected_batch_size"] == 8
    assert statement["target_delta"] == pytest.approx(24**-1.1)
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_model_card_names_the_guarantee_and_the_optimizer_that_there_was(tmp_path):
    trainer = trained(trainer_of(tmp_path, weight_filter="momentum:beta=0.9", low_pass_filter="first-order-v1"))
    for _ in range(2):
        trainer.create_model_card(model_name="a model")
        card = (tmp_path / "out" / "README.md").read_text()
        assert card.count("## Differential privacy") == 1
        assert f"    {trainer.privacy.ledger.head}\n" in card
        assert "- optimizer: adam_bc, of doppler_hf; filter: first-order-v1, noise power × 0.0909" in card
        assert "; on the weights: momentum:beta=0.9\n" in card
        assert "ADAMW" not in card


def test_every_column_of_the_model_card_has_a_heading(tmp_path):
    trainer = trained(trainer_of(tmp_path, eval_strategy="steps", eval_steps=2))
    for _ in range(2):
        trainer.create_model_card()
        (header,) = [line for line in (tmp_path / "out" / "README.md").read_text().splitlines() if "| Step |" in line]
        headings = [heading.strip() for heading in header.strip("|").split("|")]
        assert headings == ["Training Loss", "Epoch", "Step", "Validation Loss", "ε"]


def test_summary_and_model_card_name_galore(tmp_path, capsys):
    galore = dict(optim_target_modules=["query", "key"], optim_args="rank=2")
    trained(trainer_of(tmp_path, base_optimizer="adam", **galore)).create_model_card(model_name="a model")
    words = "adam, GaLore of rank 2 on query, key"
    assert re.search(rf"│ optimizer +│ {words} +│", capsys.readouterr().out)
    assert f"- optimizer: {words}, of doppler_hf; filter: auto: none" in (tmp_path / "out" / "README.md").read_text()


def test_the_ledger_goes_wherever_the_model_is_saved(tmp_path):
    folder, other = tmp_path / "release", trainer_of(tmp_path / "other")
    other.save_model(str(folder))
    assert not (folder / LEDGER_NAME).exists()  # nothing was trained
    other.train()
    other.save_model(str(folder))
    trainer = trained(trainer_of(tmp_path))
    for _ in range(2):
        trainer.save_model(str(folder))
    assert PrivacyLedger.load(folder).head == trainer.privacy.ledger.head
    aside = folder / f"privacy_ledger.{other.privacy.ledger.head[:8]}.json"
    assert {path.name for path in folder.glob("privacy*")} == {LEDGER_NAME, aside.name}
    assert PrivacyLedger.load(aside).head == other.privacy.ledger.head
    assert main(["verify", str(folder)]) == 0


def test_a_checkpoint_is_complete_when_it_is_pushed(tmp_path):
    pushed = []

    class Pushing(DopplerTrainer):
        def _push_from_checkpoint(self, checkpoint_folder):
            pushed.append({path.name for path in Path(checkpoint_folder).iterdir()})

    trainer = trainer_of(tmp_path, cls=Pushing, save_strategy="steps", save_steps=4, weight_filter="momentum:beta=0.9")
    trainer.args.push_to_hub = True
    trainer.train()
    assert len(pushed) == 1
    assert pushed[0] >= {LEDGER_NAME, "weight_filter.pt", "model.safetensors", "optimizer.pt"}


class TenTimes(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return 10 * super().compute_per_sample_loss(model, inputs)


def test_an_evaluation_reports_the_loss_that_is_trained(tmp_path):
    found = [trainer_of(tmp_path, cls=cls).evaluate() for cls in (DopplerTrainer, TenTimes)]
    assert found[1]["eval_loss"] == pytest.approx(10 * found[0]["eval_loss"], rel=1e-5)


class TenTimesOfHost(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = 10 * outputs.loss / (self.current_gradient_accumulation_steps if model.training else 1)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("pieces", [1, 2])
def test_without_privacy_the_mean_of_the_own_losses_is_trained(tmp_path, pieces):
    without = dict(disable_dp=True, noise_multiplier=None, gradient_accumulation_steps=pieces, max_grad_norm=1e6)
    ours = trained(trainer_of(tmp_path, cls=TenTimes, **without))
    host = TenTimesOfHost(
        model=tiny_bert(), args=ours.args, train_dataset=text_data(), eval_dataset=text_data(8, seed=1), data_collator=pad
    )
    host.train()
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, host.model.state_dict()[name], msg=name)
    assert ours.state.log_history[0]["loss"] == pytest.approx(host.state.log_history[0]["loss"], rel=1e-5)
    assert ours.evaluate()["eval_loss"] == pytest.approx(host.evaluate()["eval_loss"], rel=1e-5)


class Pairs(DopplerTrainer):
    """Calls the model once for each of two texts."""

    def compute_per_sample_loss(self, model, inputs):
        first, second = (model(**inputs).logits for _ in range(2))
        return (first - second).square().sum(dim=1)


def test_an_evaluation_whose_loss_calls_the_model_twice_has_no_predictions_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="Evaluations have no predictions: compute_per_sample_loss calls the model 2 times"):
        found = trainer_of(tmp_path, cls=Pairs).predict(text_data(6))
    assert found.predictions in (None, ())
    assert found.metrics["test_loss"] == pytest.approx(0.0, abs=1e-6)


class ToTarget(DopplerTrainer):
    """Of a module that knows nothing of its target."""

    def compute_per_sample_loss(self, model, inputs):
        return (model(inputs["x"]).squeeze(1) - inputs["target"]) ** 2


def test_a_module_without_its_target_is_evaluated(tmp_path):
    rows = [{"x": torch.full((2,), float(i)), "target": torch.tensor(float(i))} for i in range(12)]
    model, seen = torch.nn.Linear(2, 1), []
    trainer = ToTarget(
        model=model,
        args=arguments(tmp_path, label_names=["target"], remove_unused_columns=False, grad_sample_self_check=True),
        train_dataset=rows, eval_dataset=rows[:5],
        compute_metrics=lambda found: seen.append(found) or {},
    )  # fmt: skip
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        outputs = model(torch.stack([row["x"] for row in rows[:5]]))
    np.testing.assert_allclose(seen[0].predictions, outputs, rtol=1e-6)
    assert loss == pytest.approx(((outputs.squeeze(1) - torch.arange(5.0)) ** 2).mean().item(), rel=1e-5)


class Epochs(list):
    """Rows that are told which epoch begins."""

    def __init__(self, rows):
        super().__init__(rows)
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)


def test_a_data_set_is_told_its_epoch_as_by_the_host(tmp_path):
    told = []
    for options in ({}, dict(disable_dp=True, noise_multiplier=None)):
        data = Epochs(text_data(24))
        trainer_of(tmp_path / str(len(told)), data=data, max_steps=-1, num_train_epochs=2, **options).train()
        told.append([*dict.fromkeys(data.told)])
    assert told == [[0, 1], [0, 1]]


def test_a_run_that_a_callback_stops_has_one_epsilon(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=100, logging_steps=3, callbacks=[StopAt(7)], accountant="rdp")
    metrics = trainer.train().metrics
    logged = [logs["epsilon"] for logs in trainer.state.log_history if "epsilon" in logs]
    exact = [trainer.privacy.ledger.epsilon(further_steps=steps - 7) for steps in (3, 6)]
    assert all(above <= shown for above, shown in zip(exact, logged, strict=False))
    assert metrics["epsilon"] == logged[-1] == trainer.privacy.epsilon() == trainer.evaluate()["epsilon"]


def test_every_evaluation_logs_epsilon_so_far(tmp_path):
    trainer = trained(trainer_of(tmp_path, eval_strategy="steps", eval_steps=2))
    logged = [entry["epsilon"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(logged) == 2
    assert 0.0 < logged[0] < logged[1] == trainer.privacy.ledger.epsilon()


def test_training_loss_can_be_left_out_of_the_logs(tmp_path):
    with_loss, without = (trainer_of(tmp_path / choice, report_train_loss=choice, max_steps=2) for choice in ("raw", "none"))
    for trainer in (with_loss, without):
        trainer.train()
    assert any("loss" in entry for entry in with_loss.state.log_history)
    assert not any("loss" in entry or "train_loss" in entry for entry in without.state.log_history)
    for trainer, covered in ((with_loss, False), (without, True)):
        assert any("training loss" in line for line in trainer.privacy.ledger.not_covered) != covered


# --- resuming -------------------------------------------------------------------------------------------------------------


# 3 steps an epoch: within, at the end of, and after the first
@pytest.mark.parametrize(("saved_at", "filter_name"), [(2, "second-order"), *thorough((3, "none"), (4, "second-order"))])
def test_resumed_equals_uninterrupted(tmp_path, filter_name, saved_at):
    options = dict(
        noise_seed=1, max_steps=7, low_pass_filter=filter_name, save_strategy="steps", save_steps=saved_at,
        lr_scheduler_type="cosine",
    )  # fmt: skip
    whole = trained(trainer_of(tmp_path, **options))
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{saved_at}"))
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.state.global_step == 7


def test_steps_undone_by_a_crash_count_and_the_run_stops_within_its_budget(tmp_path):
    options = dict(noise_multiplier=None, target_epsilon=3.0, max_steps=8, save_strategy="steps", save_steps=2)

    class Crash(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, callbacks=[Crash()], **options).train()
    crashed = PrivacyLedger.load(tmp_path / "out").steps_run
    assert crashed == 5
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    ledger = resumed.privacy.ledger
    assert ledger.restarts == [2]
    assert ledger.steps_run == crashed + resumed.state.global_step - 2
    assert ledger.epsilon() <= 3.0
    assert resumed.state.global_step < 8


@pytest.mark.parametrize(("max_steps", "steps_again"), [*thorough((3, 3), (4, 4)), (4, 2)])
def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path, max_steps, steps_again):
    """As by a job that is started again: at the end of an epoch, of three steps, inside one, and with fewer steps."""
    options = dict(save_strategy="steps", save_steps=1, logging_strategy="epoch", noise_multiplier=None, target_epsilon=3.0)
    finished = trained(trainer_of(tmp_path, max_steps=max_steps, **options))
    again = trainer_of(tmp_path, max_steps=steps_again, **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == max_steps
    assert again.privacy.epsilon() == finished.privacy.epsilon()
    torch.testing.assert_close(weights(again), weights(finished), rtol=0, atol=0)


def test_a_spent_budget_refuses_to_go_on(tmp_path):
    options = dict(noise_multiplier=None, target_epsilon=3.0, max_steps=4, save_strategy="steps", save_steps=2)
    trainer_of(tmp_path, **options).train()
    with pytest.raises(ValueError, match="budget is spent"):
        trainer_of(tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_training_again_goes_on_spending(tmp_path):
    trainer = trained(trainer_of(tmp_path))
    once = trainer.privacy.epsilon()
    trainer.train()  # on the same data, from the weights of the first run
    assert trainer.privacy.ledger.steps_run == 8
    assert trainer.privacy.epsilon() > once
    within_target = trained(trainer_of(tmp_path, noise_multiplier=None, target_epsilon=3.0))
    with pytest.raises(ValueError, match="budget is spent"):
        within_target.train()


def test_a_refused_second_run_does_not_forget_the_first(tmp_path):
    trainer = trained(trainer_of(tmp_path))
    trainer.args.target_delta = 1e-3  # another δ than the first run's: the two cannot be added up
    with pytest.raises(ValueError, match="target_delta"):
        trainer.train()
    assert trainer.privacy.ledger.steps_run == 4


def test_a_checkpoint_may_be_resumed_into_another_folder(tmp_path):
    trainer_of(tmp_path / "a", save_strategy="steps", save_steps=2).train()
    resumed = trainer_of(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "out" / "checkpoint-2"))
    # The first run went on to step 4: its steps 3 and 4 are counted beside the new ones.
    assert PrivacyLedger.load(tmp_path / "b" / "out").steps_run == 6


def test_resuming_without_a_ledger_is_refused(tmp_path):
    trainer_of(tmp_path, save_strategy="steps", save_steps=2).train()
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        (folder / LEDGER_NAME).unlink()
    with pytest.raises(ValueError, match="unknown what was spent"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


# --- the host's behaviour -------------------------------------------------------------------------------------------------


def test_disable_dp_is_the_stock_trainer_to_the_last_bit(tmp_path):
    options = dict(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, learning_rate=1e-2, logging_steps=1,
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


class FitsTwo(BertForSequenceClassification):
    """Has memory for two examples."""

    def forward(self, input_ids=None, **kwargs):
        if self.training and len(input_ids) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(input_ids, **kwargs)


def test_without_privacy_the_host_finds_a_batch_size(tmp_path):
    without_privacy = dict(disable_dp=True, noise_multiplier=None, auto_find_batch_size=True, remove_unused_columns=False)
    trainer = trained(trainer_of(tmp_path, model=FitsTwo(tiny_bert().config), **without_privacy))
    assert trainer._train_batch_size == 2
    assert trainer.state.global_step == 4


def test_learning_rate_schedule_and_weight_decay_reach_the_optimizer(tmp_path):
    trainer = trained(trainer_of(tmp_path, weight_decay=0.1, lr_scheduler_type="linear", max_steps=4))
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert isinstance(trainer.optimizer.optimizer, DopplerOptimizer)
    assert sorted(group["weight_decay"] for group in trainer.optimizer.param_groups) == [0.0, 0.1]


def test_a_scheduler_of_the_users_own_reaches_the_optimizer(tmp_path):
    class Stairs(DopplerTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
            return self.lr_scheduler

    trainer = trained(trainer_of(tmp_path, cls=Stairs, max_steps=4))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([2.5e-3, 2.5e-3])


@pytest.mark.thorough
def test_it_learns_when_there_is_little_noise(tmp_path):
    trainer = trainer_of(
        tmp_path, data=text_data(200), noise_multiplier=0.1, per_device_train_batch_size=50, max_steps=40,
        low_pass_filter="momentum", logging_steps=40,
    )  # fmt: skip
    trainer.compute_metrics = lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}
    before = trainer.evaluate(text_data(100, seed=2))["eval_accuracy"]
    trainer.train()
    assert trainer.evaluate(text_data(100, seed=2))["eval_accuracy"] > max(before, 0.9)


def test_saved_model_loads_into_the_plain_class(tmp_path):
    trainer = trained(trainer_of(tmp_path))
    trainer.save_model()
    loaded = type(trainer.model).from_pretrained(trainer.args.output_dir)
    assert loaded.state_dict().keys() == tiny_bert().state_dict().keys()
    assert torch.equal(torch.cat([p.detach().flatten() for p in loaded.parameters()]), weights(trainer))


def test_nothing_stays_on_the_model_after_training(tmp_path):
    trainer = trained(trainer_of(tmp_path))
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in trainer.model.modules())


def test_bf16_autocast_and_gradient_checkpointing_train(tmp_path):
    trainer = trained(checked_trainer_of(tmp_path, bf16=True, gradient_checkpointing=True, max_steps=2))
    assert weights(trainer).isfinite().all()
    assert weights(trainer).dtype == torch.float32


def test_lora_trains_its_adapters_and_saves_them(tmp_path):
    adapted = get_peft_model(tiny_bert(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    checked_trainer_of(tmp_path, model=adapted, save_strategy="steps", save_steps=4).train()
    for name, parameter in adapted.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    assert (tmp_path / "out" / "checkpoint-4" / "adapter_model.safetensors").exists()


def test_worker_processes_and_plain_lists_of_examples_work(tmp_path):
    trainer = checked_trainer_of(tmp_path, data=list(text_data()), dataloader_num_workers=1, max_steps=2)
    with warnings.catch_warnings():  # of fork in a process with threads, which is torch's own affair
        warnings.simplefilter("ignore", DeprecationWarning)
        trainer.train()
    assert trainer.state.global_step == 2


def test_worker_processes_are_started_as_asked_for(tmp_path):
    trainer = trainer_of(tmp_path, dataloader_num_workers=1, dataloader_multiprocessing_context="spawn")
    loader = trainer.get_train_dataloader()
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    # What such a process is given.
    pickle.dumps((loader.dataset, loader.collate_fn))


def test_no_state_of_the_secret_streams_is_saved(tmp_path):
    trainer_of(tmp_path, save_strategy="steps", save_steps=4).train()
    names = {path.name for path in (tmp_path / "out" / "checkpoint-4").iterdir()}
    assert names == {
        "config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin",
        LEDGER_NAME,
    }  # fmt: skip


# --- refused --------------------------------------------------------------------------------------------------------------


def test_a_task_without_a_rule_is_refused_by_name_before_the_first_step(tmp_path):
    model = BertForPreTraining(tiny_bert().config)
    trainer = checked_trainer_of(tmp_path, model=model)
    with pytest.raises(ValueError, match=r"no per-example loss for BertForPreTraining.*compute_per_sample_loss"):
        trainer.train()
    assert trainer.state.global_step == 0


class TokensFirst(type(tiny_bert())):
    """A layer sees (length, batch, features), which looks right for a batch of `length` examples."""

    def __init__(self, config):
        super().__init__(config)
        self.mixer = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden = self.mixer(self.bert.embeddings(input_ids).transpose(0, 1)).tanh().transpose(0, 1)
        return {"logits": self.classifier(hidden.mean(dim=1))}


@pytest.mark.parametrize(("length", "engine", "self_check"), pairwise([2, 3, 4], ["book_keeping", "opacus"], [True, False]))
def test_a_layer_without_a_batch_dimension_is_refused_whatever_the_length(tmp_path, length, engine, self_check):
    rows = [{"input_ids": [9] * (length - 1) + [7], "attention_mask": [1] * length, "labels": 0}] * 24
    options = dict(grad_sample_engine=engine, grad_sample_self_check=self_check)
    trainer = trainer_of(tmp_path, model=TokensFirst(tiny_bert().config), data=Dataset.from_list(rows), **options)
    with pytest.raises(ValueError, match="mixer"):
        trainer.train()


@pytest.mark.thorough
def test_the_relative_bias_of_t5_trains(tmp_path):
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, num_labels=2,
                      decoder_start_token_id=0, dropout_rate=0.1)  # fmt: skip
    rows = [{"input_ids": [9] * length + [1], "attention_mask": [1] * (length + 1), "labels": 0} for length in range(1, 25)]
    options = dict(model=T5ForSequenceClassification(config), data=Dataset.from_list(rows), max_steps=3)
    assert trained(checked_trainer_of(tmp_path, **options)).state.global_step == 3


def test_the_summary_names_what_has_no_rule(tmp_path, capsys):
    class Scaled(type(tiny_bert())):
        def __init__(self, config):
            super().__init__(config)
            self.scales = torch.nn.ModuleList([Scale(config.num_labels), Scale(config.num_labels)])

        def forward(self, input_ids=None, attention_mask=None, labels=None):
            logits = super().forward(input_ids=input_ids, attention_mask=attention_mask).logits
            return {"logits": self.scales[1](self.scales[0](logits))}

    class Scale(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.eye(size))

        def forward(self, x):
            return x @ torch.linalg.matrix_exp(self.matrix)

    checked_trainer_of(tmp_path, model=Scaled(tiny_bert().config), max_steps=1).train()
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "2, such as" in printed
    assert "scales.0 (Scale: functorch" in printed
    assert "1.53e-05 MiB for each example" in printed


def test_a_buffer_that_remembers_the_data_is_refused(tmp_path):
    class Remembering(type(tiny_bert())):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, input_ids=None, attention_mask=None, labels=None):
            self.seen += input_ids.sum()
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    trainer = checked_trainer_of(tmp_path, model=Remembering(tiny_bert().config))
    with pytest.raises(ValueError, match="writes 'seen', which would keep statistics"):
        trainer.train()


def test_the_size_of_the_draws_is_not_saved(tmp_path):
    assert trained(trainer_of(tmp_path)).state.total_flos == 0


def test_a_model_in_parts_on_several_processes_is_refused(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(type(trainer.model), "tp_size", 2)  # which the host's accelerator would not have on a CPU
    with pytest.raises(ValueError, match=r"whole on each process, got one in parts on 2 \(tensor parallelism\)"):
        refuse_of_trainer(trainer)


def test_what_could_bypass_privacy_is_refused(tmp_path):
    options = dict(model=tiny_bert(), args=arguments(tmp_path), train_dataset=text_data(), data_collator=pad)
    with pytest.raises(ValueError, match="compute_loss_func sees the whole batch"):
        DopplerTrainer(**options, compute_loss_func=lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match="would bypass low_pass_filter"):
        DopplerTrainer(**options, optimizers=(torch.optim.SGD(options["model"].parameters(), lr=0.1), None))
    # Its learning rate would be logged, and another one used.
    of_another = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(options["model"].parameters(), lr=0.1), step_size=1)
    with pytest.raises(ValueError, match="scheduler in `optimizers` must be None, got StepLR"):
        DopplerTrainer(**options, optimizers=(None, of_another))
    with pytest.raises(ValueError, match="cannot be Poisson-sampled"):
        DopplerTrainer(**(options | {"train_dataset": text_data().to_iterable_dataset()}))
    with pytest.raises(ValueError, match="args must be DopplerTrainingArguments, got TrainingArguments"):
        DopplerTrainer(**(options | {"args": TrainingArguments(str(tmp_path))}))
    with pytest.raises(ValueError, match="every trial would cost its own ε"):
        DopplerTrainer(**options).hyperparameter_search(n_trials=2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, r"max_tokens_per_micro_batch=7 is less than the length of a single example\. Truncate"),
        (list(text_data()), "max_tokens_per_micro_batch=7 needs a datasets.Dataset with a column 'input_ids'"),
    ],
)
def test_a_budget_of_tokens_that_cannot_be_kept_is_refused_before_the_first_step(tmp_path, data, message):
    trainer = trainer_of(tmp_path, cls=MicroBatches, data=data, max_tokens_per_micro_batch=7)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert not hasattr(trainer, "shapes")


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="between 1 and the number of training examples, 24, got 64"):
        trainer_of(tmp_path, per_device_train_batch_size=32).train()


@pytest.mark.gpu
def test_one_gpu_trains_in_bf16_with_the_promised_noise(tmp_path):
    recorder = Recorder()
    trainer_of(tmp_path, cls=NoSignal, callbacks=[recorder], use_cpu=False, bf16=True, max_steps=3).train()
    noise = torch.stack(recorder.gradients)
    assert noise.is_cuda
    assert noise.std().item() == pytest.approx(1.0 / 8, rel=6 / (2 * noise.numel()) ** 0.5)


class UnitLoss(DopplerTrainer):
    """Every example's loss is 1."""

    def compute_per_sample_loss(self, model, inputs):
        return 1e-12 * super().compute_per_sample_loss(model, inputs) + 1.0


def test_the_loss_of_a_step_is_a_mean_however_it_is_cut(tmp_path):
    trainer = trainer_of(
        tmp_path,
        cls=UnitLoss,
        noise_multiplier=0.0,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=4,
        max_steps=1,
    )
    trainer.train()
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == [1.0]


class Unfit(DopplerTrainer):
    """Examples of three tokens have a loss of zero times `factor`."""

    factor: float

    def compute_per_sample_loss(self, model, inputs):
        shortest = inputs["attention_mask"].sum(dim=1) == 3
        return super().compute_per_sample_loss(model, inputs) * torch.where(shortest, 0.0 * self.factor, 1.0)


@pytest.mark.parametrize(
    ("report", "bf16", "granularity"),
    [
        ("private", False, "flat"),
        *thorough(("private", False, "per_layer"), ("none", True, "flat")),
        ("none", True, "per_layer"),
    ],
)
def test_examples_whose_loss_is_no_number_contribute_nothing_and_show_nowhere(tmp_path, report, bf16, granularity):
    data, gradients = text_data(), []
    assert sum(len(ids) == 3 for ids in data["input_ids"]) > 24 * 0.1  # the small one of the checks before the first step
    for factor in (1.0, math.inf):
        Unfit.factor, recorder = factor, Recorder()
        trainer = trained(trainer_of(
            tmp_path / str(factor), cls=Unfit, data=data, noise_seed=0, report_train_loss=report, bf16=bf16,
            clipping_granularity=granularity, callbacks=[recorder],
        ))  # fmt: skip
        # ε is infinite under a seed.
        logs = [(name, value) for logs in trainer.state.log_history for name, value in logs.items() if name != "epsilon"]
        assert np.isfinite([value for _, value in logs if isinstance(value, float)]).all()
        gradients.append(torch.stack(recorder.gradients))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_weight_decay_is_for_matrices_alone(tmp_path):
    trainer = trainer_of(tmp_path, weight_decay=0.1)
    decays = {id(p): group["weight_decay"] for group in trainer.create_optimizer().param_groups for p in group["params"]}
    for name, p in trainer.model.named_parameters():
        assert decays[id(p)] == (0.0 if name.endswith("bias") or "LayerNorm" in name else 0.1), name
