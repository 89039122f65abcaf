"""Errors of the user's own code, told with their reason; those of a `training_step` are in test_from_trainer."""

import pytest
from datasets import Dataset
from torch.nn import functional as F
from transformers import default_data_collator

from doppler_hf import DopplerTrainer
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data
from tests.support.trainers import trained, trainer_of


class OfTopics(DopplerTrainer):
    """Trains labels of another name, and asks for what is nowhere if told so."""

    asks_for = "topic"

    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop(self.asks_for)
        return F.cross_entropy(model(**inputs).logits, labels, reduction="none")


@pytest.mark.parametrize("rows", [list, Dataset.from_list])
def test_labels_that_transformers_removes_are_named(tmp_path, rows):
    data = rows([{"input_ids": [index + 1] * 4, "topic": index % 2} for index in range(12)])

    options = dict(cls=OfTopics, data=data, collator=default_data_collator, max_steps=1)
    with refused("label-not-named", match=r"label_names=\['topic'\]"):
        trainer_of(tmp_path, **options).train()
    trained(trainer_of(tmp_path, label_names=["topic"], **options))
    wrong = trainer_of(tmp_path, label_names=["topic"], **options)
    wrong.asks_for = "labels"
    with refused("no-labels-column", match="input_ids, topic"):
        wrong.train()
    wrong.asks_for = "nowhere"
    with pytest.raises(KeyError, match="nowhere"):
        wrong.train()


def test_labels_that_transformers_collator_renames_are_named(tmp_path):
    data = Dataset.from_list([{"input_ids": [index + 1] * 4, "label": index % 2} for index in range(12)])
    made = trainer_of(tmp_path, cls=OfTopics, data=data, collator=default_data_collator, label_names=["label"])
    made.asks_for = "label"
    with refused("labels-renamed"):
        made.train()


def test_what_a_transform_asks_for_is_named(tmp_path):
    rows = Dataset.from_list([{"text": [index + 1] * 4, "labels": index % 2} for index in range(12)])
    rows = rows.with_transform(lambda batch: {"input_ids": batch["text"], "labels": batch["labels"]})
    with refused("no-inputs", match=r"\(text, labels\) as an input\. If a transform .* set remove_unused_columns=False"):
        trainer_of(tmp_path, data=rows, max_steps=1).train()
    trained(trainer_of(tmp_path, data=rows, collator=default_data_collator, max_steps=1, remove_unused_columns=False))
    rows = Dataset.from_list([{"input_ids": [index + 1] * 4, "extra": 0, "labels": index % 2} for index in range(12)])
    rows = rows.with_transform(lambda batch: {"input_ids": batch["input_ids"], "labels": batch["extra"]})
    with refused("label-not-named", match=r"label_names=\['extra'\]\. .* set remove_unused_columns=False"):
        trainer_of(tmp_path, data=rows, max_steps=1).train()


def test_texts_that_were_not_tokenized_are_named(tmp_path):
    rows = Dataset.from_list([{"sentence": "a b c", "labels": index % 2} for index in range(12)])
    tokenized = text_data(12)
    with refused("no-inputs", match=r"the training set \(sentence, labels\) as an input\. .*rows\['sentence'\]"):
        trainer_of(tmp_path, data=rows, max_steps=1).train()
    with refused("no-inputs", match="the evaluation set"):
        trainer_of(tmp_path, data=tokenized, evaluated=rows, eval_strategy="steps", eval_steps=1, max_steps=1).train()


def test_data_without_texts_are_not_told_to_be_tokenized(tmp_path):
    rows = Dataset.from_list([{"image": [index + 1] * 4, "labels": index % 2} for index in range(12)])
    with refused("no-inputs", match=r"rename_column\(NAME, 'input_ids'\)\.") as refusal:
        trainer_of(tmp_path, data=rows, max_steps=1).train()
    assert "tokenizer" not in str(refusal.value)
    options = dict(data=rows.rename_column("image", "input_ids"), collator=default_data_collator)
    trained(trainer_of(tmp_path, max_steps=1, **options))


def of_patients(number):
    return text_data(number).add_column("patient", [f"p{index // 2}" for index in range(number)])


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("is_table", [True, False])
def test_the_column_of_users_reaches_no_model_in_any_evaluation_set(tmp_path, kept, is_table):
    seen = []

    def collate(rows):
        seen.extend(set(row) for row in rows)
        return pad(rows)

    options = dict(remove_unused_columns=not kept, metrics_per_user=is_table, max_steps=1)
    options |= dict(eval_strategy="steps", eval_steps=1)
    evaluated, tested = (of_patients(number) if is_table else [*of_patients(number)] for number in (8, 6))
    trainer = trainer_of(
        tmp_path, data=of_patients(24), evaluated=evaluated, collator=collate, privacy_unit_column="patient",
        compute_metrics=lambda predicted: {"one": 1.0}, **options,
    )  # fmt: skip
    trained(trainer)
    trainer.predict(tested)
    assert seen
    assert not any("patient" in row for row in seen)


def test_a_transform_that_reads_the_column_of_users_is_told_to_leave_it_out(tmp_path):
    rows = of_patients(24)
    options = dict(privacy_unit_column="patient", remove_unused_columns=False, max_steps=1)
    with refused("unit-column-is-removed", match="'patient'"):
        reading = rows.with_transform(lambda batch: {**batch, "patient": batch["patient"]})
        trainer_of(tmp_path, data=reading, **options).train()
    trained(trainer_of(tmp_path, data=rows.with_transform(lambda batch: {**batch}), **options))


def test_who_evaluates_the_training_set_is_warned(tmp_path):
    data = Dataset.from_list([{"input_ids": [index + 1] * 4, "labels": index % 2} for index in range(12)])
    for given, name in ((data, "eval_dataset"), ({"train": data}, r"eval_dataset\['train'\]")):
        with pytest.warns(UserWarning, match=f"{name} is train_dataset, .* NOT PRIVATE. Evaluate on other"):
            trainer_of(tmp_path, data=data, evaluated=given)
