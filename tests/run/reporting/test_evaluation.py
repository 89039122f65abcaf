"""Evaluations of batches without labels report the loss, and what they will not report is told before the first step."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, default_data_collator

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import On, trained, trainer_of


def pairs(rows=24, *, token=7):
    return Dataset.from_list([{"input_ids": [[5 + row, 6, token], [8, 9, 5 + row]]} for row in range(rows)])


class OfRewards(DopplerTrainer):
    """The reward of the first answer of a pair is to be the larger one."""

    rows_per_loss = 2

    def compute_per_sample_loss(self, model, inputs):
        rewards = model(inputs["input_ids"].flatten(0, 1)).logits.view(-1, 2)
        return -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1])


def rewarding(tmp_path, **options):
    options = dict(model=tiny_bert(num_labels=1), data=pairs(), evaluated=pairs(11, token=9), max_steps=2) | options
    return trainer_of(tmp_path, cls=OfRewards, collator=default_data_collator, **options)


def expected(trainer, data):
    """Return the rewards of each pair, shape (pairs, 2), and the mean loss."""
    trainer.model.eval()
    rewards = torch.cat([trainer.model(torch.tensor(row["input_ids"])).logits.T for row in data]).detach()
    return rewards.numpy(), float(-torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean())


@pytest.mark.parametrize(
    "options", [{}, {"disable_dp": True, "noise_multiplier": None}, {"label_names": []}, {"prediction_loss_only": True}]
)
def test_a_loss_of_pairs_without_labels_is_evaluated(tmp_path, options):
    trainer = trained(rewarding(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, **options))
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert len(losses) == 2
    _, loss = expected(trainer, trainer.eval_dataset)
    assert losses[-1] == pytest.approx(loss, rel=1e-4)
    predicted = trainer.predict(pairs(3, token=10))
    assert "test_loss" in predicted.metrics


def test_metrics_of_pairs_get_one_entry_for_each_pair_of_the_last_batch_too(tmp_path, capsys):
    seen = []

    def metrics(predicted):
        seen.append(predicted)
        rewards = predicted.predictions.reshape(-1, 2)
        return {"accuracy": (rewards[:, 0] > rewards[:, 1]).mean()}

    options = dict(compute_metrics=metrics, per_device_eval_batch_size=4)
    trainer = trained(rewarding(tmp_path / "without", **options))
    assert "compute_metrics is not called" in (said := capsys.readouterr().out)
    assert "label_names=[]" in said
    assert seen == []
    assert "eval_loss" in trainer.evaluate()
    trainer = trained(rewarding(tmp_path / "with", label_names=[], **options))  # the mend
    assert "compute_metrics is not called" not in capsys.readouterr().out
    found = trainer.evaluate()
    rewards, _ = expected(trainer, trainer.eval_dataset)
    np.testing.assert_allclose(seen[-1].predictions, rewards[:, :, None], rtol=1e-4, atol=1e-5)
    assert found["eval_accuracy"] == pytest.approx((rewards[:, 0] > rewards[:, 1]).mean())


BEST = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True)
NEEDING = {
    "the best model": BEST,
    "early stopping": BEST | dict(callbacks=[EarlyStoppingCallback(1)], metric_for_best_model="loss"),
    "a schedule": dict(eval_strategy="steps", eval_steps=1, lr_scheduler_type="reduce_lr_on_plateau"),
}


@pytest.mark.parametrize("name", NEEDING)
def test_what_needs_the_loss_of_pairs_gets_it(tmp_path, name):
    assert trained(rewarding(tmp_path, **NEEDING[name])).state.global_step == 2


def test_unlabelled_rows_are_predicted_as_before_if_the_loss_needs_labels(tmp_path):
    class Own(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            labels = inputs.pop("labels")
            return torch.nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="none")

    trainer = trained(trainer_of(tmp_path, cls=Own, evaluated=text_data(8, seed=1), max_steps=1))
    assert "eval_loss" in trainer.evaluate()
    trainer.data_collator = default_data_collator
    predicted = trainer.predict(Dataset.from_dict({"input_ids": [[5, 6, 7]] * 3}))
    assert predicted.predictions.shape == (3, 2)
    assert "test_loss" not in predicted.metrics


def test_label_names_that_no_batch_has_are_told_with_the_mend(tmp_path, capsys):
    seen = []
    options = dict(compute_metrics=lambda predicted: seen.append(predicted) or {}, eval_strategy="epoch", max_steps=1)
    trained(trainer_of(tmp_path / "1", label_names=["foo"], **options))
    said = " ".join(capsys.readouterr().out.split())
    assert "it looks for the columns foo. Set label_names to the names that the labels have in your batches, or" in said
    assert seen == []
    trained(trainer_of(tmp_path / "2", **options))
    assert seen
    assert "found no labels" not in capsys.readouterr().out


# --- a loss that no evaluation reports ------------------------------------------------------------------------------------


class WithoutLoss(DopplerTrainer):
    def prediction_step(self, *args, **options):
        return (None, *super().prediction_step(*args, **options)[1:])


class OwnEvaluation(DopplerTrainer):
    def evaluate(self, *args, **options):
        super().evaluate(*args, **options)
        return {"eval_own": 1.0}


SILENT = {
    "prediction_step": (dict(cls=WithoutLoss), "no eval_loss, because WithoutLoss.prediction_step returns none"),
    "evaluate": (dict(cls=OwnEvaluation), "no eval_loss, because OwnEvaluation.evaluate returns none"),
    "one of two": (
        dict(cls=WithoutLoss, evaluated={"a": text_data(8, seed=1), "b": text_data(8, seed=2)}),
        "no eval_a_loss, because WithoutLoss.prediction_step returns none",
    ),
    "no labels": (
        dict(evaluated=text_data(8, seed=1).remove_columns("labels"), collator=default_data_collator,
             data=Dataset.from_list([row | {"input_ids": [5, 6], "attention_mask": [1, 1]} for row in text_data()]),
             per_device_eval_batch_size=1),
        "no eval_loss, because Transformers found no labels in eval_dataset: it looks for the columns labels",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_a_loss_that_evaluations_do_not_report_is_told_at_the_start(tmp_path, name, capsys):
    options, said = SILENT[name]
    started = []
    before = On(train_begin=lambda **_: started.append(capsys.readouterr().out))
    trainer = trained(trainer_of(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, callbacks=[before], **options))
    assert said in "".join(started) + capsys.readouterr().out
    assert not any("eval_loss" in log and name != "evaluate" for log in trainer.state.log_history)


@pytest.mark.parametrize("needing", NEEDING)
@pytest.mark.parametrize("name", SILENT)
def test_what_needs_a_loss_that_is_missing_is_refused_before_the_first_step(tmp_path, name, needing):
    trainer = trainer_of(tmp_path, max_steps=2, **NEEDING[needing], **SILENT[name][0])
    with refused("no-such-metric"):
        trainer.train()
    assert trainer.privacy.ledger is None


def test_metrics_that_are_left_out_by_an_argument_are_told(tmp_path, capsys):
    options = dict(compute_metrics=lambda predicted: {"one": 1.0}, max_steps=1)
    trained(trainer_of(tmp_path / "1", prediction_loss_only=True, eval_strategy="epoch", **options))
    assert "compute_metrics is not called, because prediction_loss_only=True" in capsys.readouterr().out
    trained(trainer_of(tmp_path / "2", eval_strategy="epoch", **options))
    assert "compute_metrics is not called" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [{}, {"disable_dp": True, "noise_multiplier": None}], ids=["private", "open"])
def test_the_loss_of_a_language_model_is_the_mean_over_the_tokens_that_it_predicts(tmp_path, options):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=8, n_layer=1, n_head=1, n_positions=8)).eval()
    rows = Dataset.from_list([{"input_ids": [5 + row, 6, 7, 8], "labels": [5 + row, 6, 7, 8]} for row in range(8)])
    data = rows.map(lambda row: {"input_ids": row["input_ids"][::-1]})
    trainer = trainer_of(tmp_path, model=model, data=data, evaluated=rows, collator=default_data_collator, **options)
    tokens = torch.tensor(rows["input_ids"][:])
    logits = model(tokens).logits.detach()[:, :-1].flatten(0, 1)
    expected = float(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_who_only_evaluates_needs_no_budget(tmp_path):
    """As the message says that asks for one."""
    with refused("one-of-two", match="or to evaluate only, set disable_dp=True"):
        DopplerTrainingArguments(str(tmp_path))
    args = DopplerTrainingArguments(str(tmp_path), disable_dp=True, report_to="none", use_cpu=True)
    trainer = DopplerTrainer(model=tiny_bert(), args=args, data_collator=pad, eval_dataset=text_data(8))
    assert trainer.evaluate()["eval_loss"] > 0
