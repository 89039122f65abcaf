"""The trainer's ledger: ahead of every step on disk, never another run's, and open about what a run costs."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from datasets import Value
from transformers import BertForSequenceClassification, TrainerControl, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from doppler_hf import DopplerTrainer
from doppler_hf.cli import main
from doppler_hf.privacy import LEDGER_NAME, ClippedGradients, PrivacyLedger
from doppler_hf.run.callback import PrivacyCallback, end_run
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.processes import processes
from doppler_hf.run.reporting.evaluation import add_baselines
from doppler_hf.run.resuming.earlier_ledgers import continued_ledger, ledgers_of
from tests.support.ledgers import after, said, statement
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import On, arguments, at, interrupt, trained, trainer_of, weights


def events(folder):
    return [entry["event"] for entry in json.loads((folder / LEDGER_NAME).read_text())["entries"]]


def earlier(trainer, checkpoint=None):
    return continued_ledger(trainer.privacy.ledger, checkpoint, folder=trainer.args.output_dir, model=trainer.model)


# --- ahead of the steps ---------------------------------------------------------------------------------------------------


class Watchful(DopplerTrainer):
    """Reads the file while the gradients of a step are computed, and may then be killed."""

    killed_in_step = math.inf

    def set_initial_training_values(self, args, dataloader):
        values = super().set_initial_training_values(args, dataloader)
        self.on_disk = []
        return values

    def compute_per_sample_loss(self, model, inputs):
        losses = super().compute_per_sample_loss(model, inputs)
        if hasattr(self, "on_disk"):
            self.on_disk.append((self.state.global_step, PrivacyLedger.load(self.args.output_dir).steps_run))
            if self.state.global_step == self.killed_in_step:
                raise KeyboardInterrupt
        return losses


def test_steps_are_on_disk_before_they_are_computed(tmp_path):
    trainer = trained(trainer_of(tmp_path, cls=Watchful, max_steps=7, noise_multiplier=50.0))
    assert {step for step, _ in trainer.on_disk} == set(range(7))
    assert all(counted == step + 1 for step, counted in trainer.on_disk)


def test_a_kill_within_a_step_counts_it_and_says_what_is_spent(tmp_path, capsys):
    trainer = trainer_of(tmp_path, cls=Watchful, max_steps=300)
    trainer.killed_in_step = 4
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    counted = PrivacyLedger.load(tmp_path / "out")
    assert counted.steps_run == 6  # portions of 3
    assert events(tmp_path / "out") == ["opened", "steps", "steps", "checkpoint", "saved"]
    assert f"Privacy spent: ε = {counted.epsilon():.4g}, " in capsys.readouterr().out


def test_an_interrupted_run_of_the_same_trainer_counts_what_it_had_reserved(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=300, callbacks=[On(step_end=at(4, interrupt))])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.privacy.ledger.steps_run == earlier(trainer).steps_run == 6
    assert trainer.privacy.epsilon() == PrivacyLedger.load(tmp_path / "out").epsilon()
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.privacy.ledger.steps_run == 8
    assert PrivacyLedger.load(tmp_path / "out").runs[1].steps_before == 6


def test_only_process_0_writes(tmp_path):
    args, model = arguments(tmp_path), tiny_bert()
    run = PrivateRun(args, text_data(), num_trained=1)
    run.begin(model, step=0)
    trainer = trainer_of(tmp_path / "trainer")
    callback = PrivacyCallback(run, trainer=trainer, check_begun=lambda: None, check_callbacks=lambda: None)
    trainer.add_callback(callback)
    with ClippedGradients(model) as run._engine:
        run.is_released = True
        state, control = TrainerState(is_world_process_zero=False), TrainerControl()
        callback.on_step_begin(args, state, control)
        callback.on_pre_optimizer_step(args, state, control)
        callback.on_train_end(args, state, control, model=model)
        end_run(run, args, state, model=model)
    assert run.ledger.steps_run == 1
    assert not (tmp_path / "out").exists()


def test_every_process_goes_on_from_what_process_0_has_read(tmp_path, monkeypatch):
    mine, theirs = after(PrivacyLedger.open(statement()), 3), after(PrivacyLedger.open(statement()), 5)
    PartialState()
    monkeypatch.setattr(PartialState, "is_main_process", property(lambda self: False))
    monkeypatch.setattr(processes, "broadcast_object_list", lambda objects: [theirs])
    assert continued_ledger(mine, None, folder="", model=tiny_bert()) is theirs
    monkeypatch.setattr(processes, "broadcast_object_list", lambda objects: [ValueError("refused on process 0")])
    with pytest.raises(ValueError, match="refused on process 0"):
        continued_ledger(mine, None, folder="", model=tiny_bert())


# --- whose ledger it is ---------------------------------------------------------------------------------------------------


def test_a_fresh_run_sets_the_earlier_ledger_aside_and_says_that_both_add_up(tmp_path, capsys):
    options = dict(save_strategy="steps", save_steps=2)
    trainer_of(tmp_path, **options).train()
    old = PrivacyLedger.load(tmp_path / "out")
    assert "add up" not in said(capsys)
    trainer_of(tmp_path, max_steps=3, **options).train()
    new = PrivacyLedger.load(tmp_path / "out")
    aside = tmp_path / "out" / f"privacy_ledger.{old.head[:8]}.json"
    assert f"was renamed to {aside.name}. If that run used the same data, its ε and the ε of this run add up." in said(
        capsys
    )
    assert PrivacyLedger.load(aside).head == old.head
    assert (new.steps_run, new.restarts) == (3, [])
    # Checkpoint 2 is the new run's, checkpoint 4 still the old one's.
    assert PrivacyLedger.load(tmp_path / "out" / "checkpoint-2").is_prefix_of(new)
    assert PrivacyLedger.load(tmp_path / "out" / "checkpoint-4").is_prefix_of(old)
    assert main(["verify", str(tmp_path / "out")]) == 0


def of_file(name):
    return lambda trainer: BertForSequenceClassification.from_pretrained(Path(trainer.args.output_dir) / name)


@pytest.mark.parametrize(
    ("model", "options"),
    [(lambda trainer: trainer.model, dict(callbacks=[On(step_end=at(3, interrupt))])), (of_file("checkpoint-2"), {})],
)
def test_a_new_trainer_of_a_trained_model_continues_its_ledger(tmp_path, capsys, model, options):
    first = trainer_of(tmp_path, save_strategy="steps", save_steps=2, **options)
    try:
        first.train()
        first.save_model()
    except KeyboardInterrupt:
        pass
    before = PrivacyLedger.load(tmp_path / "out")
    capsys.readouterr()
    second = trained(trainer_of(tmp_path, model=model(first)))
    assert f"continues the ledger of the model's earlier run, so the {before.steps_run} steps of that run" in said(capsys)
    second.save_model()
    ledger = PrivacyLedger.load(tmp_path / "out")
    assert before.is_prefix_of(ledger)
    assert ledger.steps_run == before.steps_run + 4
    assert not list((tmp_path / "out").glob("privacy_ledger.*.json"))
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_a_ledger_that_was_set_aside_is_continued_with_its_model(tmp_path):
    first = trained(trainer_of(tmp_path))
    trainer_of(tmp_path, max_steps=3).train()
    again = trained(trainer_of(tmp_path, model=first.model))
    assert first.privacy.ledger.is_prefix_of(again.privacy.ledger)
    assert again.privacy.ledger.steps_run == 8
    # From the same weights once more: what has gone on from them counts too.
    assert earlier(first).steps_run == 4
    once_more = trainer_of(tmp_path, model=first.model)
    assert earlier(once_more).steps_run == 8


def test_a_model_whose_training_was_stopped_before_its_first_step_is_as_new(tmp_path):
    trainer = trainer_of(tmp_path, cls=Watchful)
    trainer.killed_in_step = 0
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert events(tmp_path / "out") == ["opened", "steps"]
    assert earlier(trainer_of(tmp_path, model=trainer.model)) is None


def test_the_ledger_of_a_finished_run_that_is_resumed_counts_no_step(tmp_path):
    """As by a job that is started again."""
    options = dict(max_steps=4, save_strategy="steps", save_steps=1)
    first = trained(trainer_of(tmp_path, **options))
    first.save_model()
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    ledger = PrivacyLedger.load(tmp_path / "out")
    assert first.privacy.ledger.is_prefix_of(ledger)
    assert ledger.steps_run == 4
    assert torch.equal(weights(resumed), weights(first))
    assert all(run.is_closed for run in ledger.runs)
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_a_finished_run_is_not_resumed_under_a_target_that_it_has_overrun(tmp_path, capsys):
    options = dict(noise_multiplier=None, save_strategy="steps", save_steps=4)
    trainer_of(tmp_path, target_epsilon=3.0, **options).train()
    before = (tmp_path / "out" / LEDGER_NAME).read_text()
    with refused("budget-spent", match=r"ε = 2\.99"):
        trainer_of(tmp_path, target_epsilon=2.0, **options).train(resume_from_checkpoint=True)
    assert (tmp_path / "out" / LEDGER_NAME).read_text() == before
    capsys.readouterr()
    trainer_of(tmp_path, target_epsilon=4.0, **options).train(resume_from_checkpoint=True)
    assert "All 4 steps of this run were already done, so nothing was trained. To continue, set a larger" in said(capsys)


def test_a_second_run_in_a_folder_is_refused_and_the_first_goes_on(tmp_path):
    options = dict(save_strategy="steps", save_steps=1)
    finished = trained(trainer_of(tmp_path, max_steps=1, **options))
    others = [
        trainer_of(tmp_path, max_steps=2).train,
        lambda: trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1")),
        finished.save_model,
        lambda: trainer_of(tmp_path, disable_dp=True, noise_multiplier=None, **options).train(),
    ]

    def refuse(**_):
        for other in others:
            before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
            with refused("folder-in-use", match="output_dir"):
                other()
            assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}

    first = trained(trainer_of(tmp_path, max_steps=5, callbacks=[On(step_end=at(2, refuse))], **options))
    assert PrivacyLedger.load(tmp_path / "out").head == first.privacy.ledger.head
    assert first.privacy.ledger.steps_run == 5
    first.save_model(str((tmp_path / "out").absolute()))
    assert main(["verify", str(tmp_path / "out")]) == 0
    others[0]()  # its turn now


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    options = dict(save_strategy="steps", save_steps=2)
    trainer_of(tmp_path, **options).train()
    trainer_of(tmp_path, max_steps=3, **options).train()
    before = (tmp_path / "out" / LEDGER_NAME).read_bytes()
    with refused("ledgers-disagree"):
        trainer_of(tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert (tmp_path / "out" / LEDGER_NAME).read_bytes() == before
    own, above, aside = ledgers_of(tmp_path / "out" / "checkpoint-4")
    assert own.is_prefix_of(aside)
    assert not own.is_prefix_of(above)


def test_more_than_the_budget_is_refused_and_loses_nothing(tmp_path):
    """Of the same trainer, of a notebook's cell run again, and of a run that is resumed for more steps."""
    options = dict(noise_multiplier=None, target_epsilon=3.0, save_strategy="steps", save_steps=4)
    trainer = trained(trainer_of(tmp_path, **options))
    ledger, before = trainer.privacy.ledger, (tmp_path / "out" / LEDGER_NAME).read_bytes()
    again, longer = trainer_of(tmp_path, model=trainer.model, **options), trainer_of(tmp_path, max_steps=6, **options)
    checkpoint = str(tmp_path / "out" / "checkpoint-4")
    for train, mend in (
        (trainer.train, "target_epsilon"),
        (again.train, "an untrained model and a new trainer"),
        (lambda: longer.train(resume_from_checkpoint=checkpoint), "ε = 2.*target_epsilon"),
    ):
        with refused("budget-spent", match=mend):
            train()
        assert (tmp_path / "out" / LEDGER_NAME).read_bytes() == before
    assert trainer.privacy.ledger is ledger
    trainer_of(tmp_path, **options).train()
    assert PrivacyLedger.load(tmp_path / "out").steps_run == 4


# --- what the user is told ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        (dict(report_train_loss="raw"), {}),
        (
            dict(noise_multiplier=None, target_epsilon=8.0, noise_shape="banded:bands=2", low_pass_filter="auto"),
            {"noise": "noise multiplier {sigma}; shape: banded, 2 steps; filter: none (auto)", "watch": ""},
        ),
        (
            dict(report_train_loss="none", learning_rate=None),
            {"rate": " (auto: from noise, steps and model size)", "watch": ""},
        ),
        # What is accounted, and what `plan` says, is σ of gradient and loss together.
        (dict(), {"watch": ""}),
    ],
    ids=str,
)
def test_the_start_is_six_lines_and_the_end_names_the_ledger(tmp_path, capsys, options, changed):
    trainer = trained(trainer_of(tmp_path, data=text_data(400), per_device_train_batch_size=64, **options))
    ledger, (begin, end) = trainer.privacy.ledger, re.split("^{.*}$", capsys.readouterr().out, flags=re.M | re.S)
    statement, rate = ledger.statement, trainer.optimizer.optimizer.defaults["lr"]
    sigma = f"{statement.effective_noise_multiplier:.4g}"
    spent = f"ε = {ledger.epsilon():.4g}, δ = {400**-1.1:.3g} for one record"
    noise = changed.get("noise", "noise multiplier {sigma}; shape: white (auto); filter: none (auto)")
    watch = (
        "the training loss shown here is NOT PRIVATE, so it is not saved: report_train_loss='private' adds noise, and "
        "'none' hides it"
    )
    lines = {
        "privacy": spent,
        "data": "400 records; 4 random batches of 128 on average",
        "noise": noise.format(sigma=sigma),
        "learning rate": f"{rate:.3g}{changed.get('rate', ' (as given)')}; optimizer: adam_bc",
        "trained": "{0:,} of {0:,} parameters".format(trainer.model.num_parameters()),
        "warning": changed.get("watch", watch),
    }
    assert begin.strip().splitlines() == [f"{name:<14} {words}" for name, words in lines.items() if words]
    assert end.strip().splitlines()[0] == f"Privacy spent: {spent} in 4 steps."
    assert f"The ledger is {tmp_path / 'out' / LEDGER_NAME}. Check it with `doppler-hf verify" in end
    assert "docs/" not in end  # which people do not have who installed the package


@pytest.mark.parametrize(
    ("launcher", "said"),
    [({}, ""), ({"ACCELERATE_USE_CPU": "True"}, "; 1 process"), ({"WORLD_SIZE": "1"}, "; 1 process")],
)
def test_the_start_says_how_many_processes_a_launcher_has_started(tmp_path, capsys, monkeypatch, launcher, said):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    trained(trainer_of(tmp_path, max_steps=1))
    assert re.search(r"^data .*", capsys.readouterr().out, flags=re.M)[0].endswith(f"of 8 on average{said}")


@pytest.mark.parametrize("column", ["patient_id", "overflow_to_sample_mapping"])  # of windows of a long text
def test_a_column_that_may_say_whose_a_row_is_is_told_of(tmp_path, capsys, column):
    data = text_data().add_column(column, [*range(24)])
    told = f"ε protects one row. If the column {column!r} says"
    trained(trainer_of(tmp_path / "rows", data=data, max_steps=1))
    assert f"{told} to whom a row belongs, set privacy_unit_column={column!r}" in capsys.readouterr().out
    units = dict(privacy_unit_column=column, per_device_train_batch_size=1)
    trained(trainer_of(tmp_path / "patients", data=data, max_steps=1, **units))
    assert told not in capsys.readouterr().out
    # Of values that repeat, another note says more.
    data = text_data().add_column(column, [row // 4 for row in range(24)])
    trained(trainer_of(tmp_path / "repeated", data=data, max_steps=1))
    assert capsys.readouterr().out.count(f"privacy_unit_column={column!r}") == 1


def test_all_terms_are_shown_with_log_level_info(tmp_path, capsys):
    ledger = trained(trainer_of(tmp_path, log_level="info")).privacy.ledger
    table = said(capsys)
    for row in (
        f"noise source: {ledger.statement.noise_source}",
        "clip norm C: 1",
        "noise per coordinate of the average gradient: 0.062 C",
    ):
        assert row in table, row


@pytest.mark.parametrize(("accuracy", "is_told"), [(0.5, True), (0.75, True), (0.77, True), (0.875, False)])
def test_an_accuracy_that_is_hardly_the_majoritys_is_told_of(tmp_path, capsys, accuracy, is_told):
    metrics = lambda predicted: {"accuracy": accuracy, "majority_class_accuracy": share}  # noqa: E731
    trainer = trainer_of(tmp_path, eval_strategy="epoch", compute_metrics=metrics)
    share = np.bincount(trainer.eval_dataset["labels"]).max() / 8
    assert share == 0.75
    words = f"its accuracy ({accuracy:.3g}) is not clearly above the share of the majority class (0.75)"
    assert "epsilon" not in trainer.evaluate()  # of a model that no training has left
    assert words not in capsys.readouterr().out
    for evaluated, is_new in ((trainer.train, True), (trainer.evaluate, False)):  # It is said once a run.
        evaluated()
        assert trainer.state.log_history[-1]["epsilon"] > 0.0
        assert capsys.readouterr().out.count(words) == (is_told and is_new)


def test_the_majority_is_of_the_labels_of_tokens_too():
    output = EvalLoopOutput(None, np.array([[-100, 0, 0], [1, 0, -100]]), {"eval_accuracy": 0.7}, 2)
    add_baselines(output, prefix="eval", is_own_loss=False)
    assert output.metrics["eval_majority_class_accuracy"] == 0.75


def test_the_majority_is_of_the_labels_among_other_things_that_are_named():
    several = (np.array([0, 1, 1, 1]), np.arange(4))
    output = EvalLoopOutput(np.zeros((4, 2)), several, {"eval_accuracy": 0.7}, 4)
    add_baselines(output, prefix="eval", is_own_loss=True, label_names=["labels", "number"])
    assert output.metrics["eval_majority_class_accuracy"] == 0.75


@pytest.mark.parametrize("knows", [False, True])
def test_a_regression_that_is_hardly_better_than_the_mean_label_is_told_of(tmp_path, capsys, knows):
    """As of STS-B, whose scores lie around 2.7, by a model that begins at 0; one that knows the labels has learnt them."""
    model = tiny_bert(num_labels=1)
    rows = [dict(row) for row in text_data(8, seed=1)]
    with torch.no_grad():
        known = model.eval()(**pad(rows) | {"labels": None}).logits.flatten().tolist()
    scores = known if knows else [4.0, 1.0, 3.0, 5.0, 2.0, 4.0, 0.0, 1.0]
    data = text_data().cast_column("labels", Value("float32"))
    trainer = trained(trainer_of(
        tmp_path, model=model, data=data, eval_strategy="epoch", max_steps=3, learning_rate=0.0,
        allow_any_learning_rate=True,
        evaluated=[row | {"labels": score} for row, score in zip(rows, scores, strict=True)],
        compute_metrics=lambda predicted: {"sum": float(predicted.predictions.sum())},  # or labels are not kept
    ))  # fmt: skip
    found = next(log for log in trainer.state.log_history if "eval_loss" in log)
    assert found["eval_mean_label_loss"] == pytest.approx(np.var(scores))
    words = f"its loss ({found['eval_loss']:.3g}) is not clearly below the loss of always predicting the mean label"
    assert (words in capsys.readouterr().out) is not knows


def test_without_privacy_both_say_so(tmp_path, capsys):
    trainer_of(tmp_path, noise_seed=1).train()
    output = said(capsys)
    assert "privacy ε = ∞ (NOT PRIVATE: its noise and random batches can be reproduced" in output
    assert "Privacy spent: ε = ∞ (NOT PRIVATE: its noise" in output
    assert main(["verify", str(tmp_path / "out")]) == 1
