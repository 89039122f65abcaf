"""A model's own loss, which Transformers would train: the same as that of a private run, or refused."""

import re

import datasets
import pytest
import torch
from datasets import ClassLabel, Dataset
from torch.nn import functional as F
from transformers import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    default_data_collator,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from doppler_hf import DopplerTrainer
from doppler_hf.errors import Refusal
from doppler_hf.preflight import loss as loss_checks
from doppler_hf.privacy.losses import losses_of_class
from tests.support.refusals import refused
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import checked_trainer_of as trainer_of
from tests.support.trainers import trained
from tests.support.unspent import refusal_unspent

WEIGHTS = [1.0, 10.0]


def bert(cls, **overrides):
    torch.manual_seed(0)
    return cls(tiny_bert(**overrides).config)


class ClassWeights(BertForSequenceClassification):
    """Weighs one class more than the other. Of a single example the weights cancel out."""

    place = None

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        logits = super().forward(input_ids, attention_mask).logits
        weight = torch.tensor(WEIGHTS, device=self.place or logits.device)
        loss = None if labels is None else F.cross_entropy(logits, labels, weight=weight)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Penalty(BertForMaskedLM):
    """Adds a penalty to Transformers' loss."""

    def forward(self, **kwargs):
        outputs = super().forward(**kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + outputs.logits.square().mean()
        return outputs


class WithoutLabels(BertForSequenceClassification):
    """Has no loss."""

    def forward(self, input_ids=None, attention_mask=None):
        return super().forward(input_ids, attention_mask)


class Weighted(DopplerTrainer):
    """Trains the loss of `ClassWeights`."""

    place = None

    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        weight = torch.tensor(WEIGHTS, device=self.place or labels.device)
        return F.cross_entropy(model(**inputs).logits, labels, weight=weight, reduction="none")


def pad_for_tokens(examples):
    inputs = pad(examples)
    return inputs | {"labels": torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], -100)}


@pytest.mark.parametrize(("cls", "is_checked"), [(ClassWeights, True), (Penalty, False)])
def test_another_loss_than_that_of_the_rule_is_refused(tmp_path, cls, is_checked):
    options = dict(remove_unused_columns=False, grad_sample_self_check=is_checked)
    collator = pad_for_tokens if cls is Penalty else pad
    trainer = trainer_of(tmp_path, model=bert(cls), collator=collator, max_steps=1, **options)
    with refused("another-loss", match=cls.__name__):
        trainer.train()


def test_a_loss_of_each_example_may_stand_for_it(tmp_path):
    assert trained(trainer_of(tmp_path, cls=Weighted, model=bert(ClassWeights), max_steps=1)).state.global_step == 1


@pytest.mark.parametrize("cls", [DopplerTrainer, Weighted], ids=["the model's", "the trainer's"])
def test_a_tensor_that_was_left_on_another_device_is_named_by_torch(tmp_path, monkeypatch, cls):
    trainer = trainer_of(tmp_path, cls=cls, model=bert(ClassWeights), max_steps=1)
    monkeypatch.setattr(ClassWeights if cls is DopplerTrainer else cls, "place", "meta")  # far from wherever the model is
    with pytest.raises(RuntimeError, match="meta"):
        trainer.train()


@pytest.mark.parametrize(("cls", "options"), [(BertForMaskedLM, dict(hidden_dropout_prob=0.5)), (WithoutLabels, {})])
def test_the_loss_of_the_rule_trains_and_so_does_a_model_without_one(tmp_path, cls, options):
    options = dict(model=bert(cls, **options), max_steps=1, remove_unused_columns=False)
    collator = pad_for_tokens if cls is BertForMaskedLM else pad
    assert trained(trainer_of(tmp_path, collator=collator, **options)).state.global_step == 1


def of_truth(rows):
    batch = pad(rows)
    return batch | {"labels": batch["labels"] == 1}


def test_labels_that_are_true_or_false_are_refused_unless_a_loss_takes_them(tmp_path):
    assert "labels.long()" in refusal_unspent(trainer_of(tmp_path, collator=of_truth), "labels-of-truth-values")
    amounts = trained(trainer_of(tmp_path / "amounts", model=tiny_bert(num_labels=1), collator=of_truth, max_steps=1))
    assert amounts.privacy.ledger.steps_run == 1

    class Own(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            labels = inputs.pop("labels").long()
            return F.cross_entropy(model(**inputs).logits, labels, reduction="none")

    own = trained(trainer_of(tmp_path / "own", cls=Own, collator=of_truth, max_steps=1))
    assert own.privacy.ledger.steps_run == 1


class InTuples(BertForSequenceClassification):
    """Returns a tuple whatever its config says, as older models do: a loss if there are labels, and the logits."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        logits = super().forward(input_ids, attention_mask, return_dict=True).logits
        return (logits,) if labels is None else (F.cross_entropy(logits, labels), logits)


class PenaltyInTuples(InTuples):
    """Has another loss than the rule, in a tuple."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        *loss, logits = super().forward(input_ids, attention_mask, labels)
        return (*(each + 1.0 for each in loss), logits)


def of_tuples(cls, **overrides):
    return bert(cls, return_dict=False, **overrides)


@pytest.mark.parametrize("cls", [BertForSequenceClassification, BertForMaskedLM, BertForQuestionAnswering, InTuples])
def test_a_model_that_returns_tuples_has_the_losses_that_it_has_with_names(cls):
    model, rows = of_tuples(cls), [*text_data().select(range(4))]
    inputs = (pad_for_tokens if cls is BertForMaskedLM else pad)(rows)
    if cls is BertForQuestionAnswering:
        inputs |= {name: torch.ones(4, dtype=torch.long) for name in ("start_positions", "end_positions")}
        del inputs["labels"]
    own = model(**inputs)[0]  # Transformers' mean
    losses = losses_of_class(model, dict(inputs), base_model=model).values
    assert losses.shape == (4,)
    assert not model.config.return_dict
    model.config.return_dict = True
    torch.testing.assert_close(losses, losses_of_class(model, dict(inputs), base_model=model).values)
    if cls is not BertForMaskedLM and cls is not BertForQuestionAnswering:  # whose means are over tokens, or with padding
        torch.testing.assert_close(losses.mean(), own)


@pytest.mark.parametrize("cls", [BertForSequenceClassification, BertForMaskedLM, InTuples])
def test_a_model_that_returns_tuples_trains_and_is_evaluated(tmp_path, cls):
    collator = pad_for_tokens if cls is BertForMaskedLM else pad
    options = dict(collator=collator, evaluated=text_data(8, seed=1), max_steps=1, remove_unused_columns=False)
    trainer = trained(trainer_of(tmp_path, model=of_tuples(cls), **options))
    assert trainer.state.global_step == 1
    assert trainer.evaluate()["eval_loss"] > 0.0


def test_another_loss_in_a_tuple_is_refused(tmp_path):
    with refused("another-loss", match="PenaltyInTuples"):
        trainer_of(tmp_path, model=of_tuples(PenaltyInTuples), max_steps=1).train()


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (
            1,
            "has 3 classes, but the model has num_labels=1, so it trains the numbers of the classes as amounts: load it "
            "with num_labels=3, unless their order is what it should learn",
        ),
        (10, "has 3 classes, but the model has num_labels=10: load it with num_labels=3"),
        (3, None),
    ],
)
def test_a_model_with_another_number_of_outputs_than_the_data_have_classes_is_told_of(tmp_path, capsys, outputs, words):
    data = text_data(24).cast_column("labels", ClassLabel(names=["bad", "fair", "good"]))
    trained(trainer_of(tmp_path, model=tiny_bert(num_labels=outputs), data=data, max_steps=1))
    said = " ".join(capsys.readouterr().out.split())
    assert "classes, but the model has" not in said if words is None else f"the column 'labels' {words}" in said


@pytest.mark.parametrize("outputs", [1, 2])
def test_scores_that_were_numbered_as_classes_become_the_scores_again(tmp_path, capsys, outputs):
    scores = [0.5 + row % 3 for row in range(24)]
    data = text_data(24).remove_columns("labels").add_column("labels", [str(score) for score in scores])
    data = data.class_encode_column("labels")
    trained(trainer_of(tmp_path / "1", model=tiny_bert(num_labels=3), data=data, max_steps=1))
    assert "If their names are scores" not in capsys.readouterr().out
    few = data if outputs == 1 else data.filter(lambda row: row["labels"] < 2)
    trained(trainer_of(tmp_path / "2", model=tiny_bert(num_labels=outputs), data=few, max_steps=1))
    said = " ".join(capsys.readouterr().out.split())
    assert "load it with num_labels=3 if they are classes. If their names are scores, load it with num_labels=1," in said
    names, line = re.search(r"with names = (train_dataset\S+), take (train_dataset.*?\}\))", said).groups()
    names = eval(names, {"train_dataset": few})
    mended = eval(line, {"train_dataset": few, "datasets": datasets, "names": names})
    assert mended["labels"][:] == [score for score in scores if outputs == 1 or score < 2]
    trained(trainer_of(tmp_path / "3", model=tiny_bert(num_labels=1), data=mended, max_steps=1))
    assert "classes, but the model has" not in capsys.readouterr().out


def test_digits_are_classes_and_no_scores():
    assert not loss_checks.are_scores([*"0123456789"])
    assert loss_checks.are_scores(["1", "2", "3"])
    assert not loss_checks.are_scores(["1", "nan"])


class Own(torch.nn.Module):
    """Two layers for two numbers, with a score for each class."""

    def __init__(self, classes=3):
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 4), torch.nn.Linear(4, classes)

    def forward(self, x):
        return self.last(self.first(x).tanh())


class OfScores(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        return F.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")


def one_of_a_label(label, number=400):
    """Rows of which a single one, that no other check looks at, has this label."""
    return [dict(x=[row / number, 1.0], labels=label if row == 151 else row % 3) for row in range(number)]


@pytest.mark.parametrize("kind", [Dataset.from_list, Rows])
def test_rows_on_which_the_users_loss_fails_are_refused_and_it_trains_without_them(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(loss_checks, "_SECONDS", 60.0)
    options = dict(cls=OfScores, collator=default_data_collator, max_steps=1, remove_unused_columns=False)
    rows = one_of_a_label(3)
    trainer = trainer_of(tmp_path / "1", model=Own(), data=kind(rows), **options)
    said = refusal_unspent(trainer, "rows-without-loss")
    assert "IndexError" in said
    assert "151" not in said
    assert "out of bounds" not in said
    trained(trainer_of(tmp_path / "2", model=Own(), data=kind([row for row in rows if row["labels"] < 3]), **options))
    trained(trainer_of(tmp_path / "3", model=Own(classes=4), data=kind(rows), **options))


@pytest.mark.parametrize("kind", [Dataset.from_list, Rows, lambda rows: {"odd": Dataset.from_list(rows)}])
def test_rows_for_evaluation_on_which_the_users_loss_fails_are_refused_and_it_trains_without_them(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(loss_checks, "_SECONDS", 60.0)
    options = dict(cls=OfScores, collator=default_data_collator, max_steps=1, remove_unused_columns=False)
    options |= dict(eval_strategy="steps", eval_steps=1, data=Dataset.from_list(one_of_a_label(0)))
    rows = one_of_a_label(3)
    trainer = trainer_of(tmp_path / "1", model=Own(), evaluated=kind(rows), **options)
    said = refusal_unspent(trainer, "rows-without-loss")
    assert "IndexError on some rows of eval_dataset" in said
    assert "151" not in said
    rows = [row for row in rows if row["labels"] < 3]
    rows = [row | {"x": [row["x"][0], 2.0]} for row in rows]  # no rows of the training set
    assert trained(trainer_of(tmp_path / "2", model=Own(), evaluated=kind(rows), **options)).state.log_history


def test_the_longest_row_for_evaluation_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_checks, "_SECONDS", 0.0)

    class OfShortRows(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            if inputs["input_ids"].shape[1] > 8:
                raise IndexError("too long")
            return super().compute_per_sample_loss(model, inputs)

    rows = [{"input_ids": [3] * (9 if number == 31 else 4), "labels": number % 2} for number in range(400)]
    rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    options = dict(cls=OfShortRows, eval_strategy="steps", eval_steps=1, max_steps=1)
    trainer = trainer_of(tmp_path / "1", evaluated=Dataset.from_list(rows), **options)
    refusal_unspent(trainer, "rows-without-loss")
    trained(trainer_of(tmp_path / "2", evaluated=Dataset.from_list(rows[:31]), **options))


class OfLongRows(DopplerTrainer):
    """Has memory for so many tokens, and notes the most tokens of a batch."""

    most, memory = 0, 1000

    def compute_per_sample_loss(self, model, inputs):
        type(self).most = max(self.most, inputs["input_ids"].numel())
        if inputs["input_ids"].numel() > self.memory:
            raise torch.OutOfMemoryError("out of memory")
        return super().compute_per_sample_loss(model, inputs)


def test_rows_are_tried_in_no_more_memory_than_the_training_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_checks, "_SECONDS", 60.0)
    rows = [{"input_ids": [3] * (1 if number % 2 else 8), "labels": number % 2} for number in range(40)]
    data = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    options = dict(cls=OfLongRows, data=Dataset.from_list(data), max_tokens_per_micro_batch=16, max_steps=1)
    trainer = trainer_of(tmp_path, grad_sample_self_check=True, **options)
    failing = loss_checks.refuse_failing_rows

    def noted(run, private_trainer):
        OfLongRows.most = 0
        failing(run, private_trainer)
        assert 8 <= OfLongRows.most <= 16

    monkeypatch.setattr(loss_checks, "refuse_failing_rows", noted)
    trained(trainer)


def test_an_error_that_is_explained_is_passed_on_and_so_is_a_lack_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_checks, "_SECONDS", 60.0)

    class Plain(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            return super().compute_per_sample_loss(model, inputs)

    rows = [row | {"labels": 7 if number == 300 else number % 2} for number, row in enumerate(text_data(600))]
    trainer = trainer_of(tmp_path / "1", cls=Plain, data=Rows(rows), max_steps=1)
    with pytest.raises(Refusal, match="Set num_labels"):
        trainer.train()
    failing = loss_checks.refuse_failing_rows

    def without_memory(run, private_trainer):
        monkeypatch.setattr(OfLongRows, "memory", 0)
        failing(run, private_trainer)

    monkeypatch.setattr(loss_checks, "refuse_failing_rows", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        trainer_of(tmp_path / "2", cls=OfLongRows, max_steps=1).train()
