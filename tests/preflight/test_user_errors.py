"""Errors of the user's own code, told with their reason; those of a `training_step` are in test_from_trainer."""

import pytest
from datasets import Dataset
from torch.nn import functional as F
from transformers import default_data_collator

from doppler_hf import DopplerTrainer
from tests.support.refusals import refused
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
    with refused("label-not-named", match=r"label_names=\['text'\]\. .* set remove_unused_columns=False"):
        trainer_of(tmp_path, data=rows, max_steps=1).train()


def test_who_evaluates_the_training_set_is_warned(tmp_path):
    data = Dataset.from_list([{"input_ids": [index + 1] * 4, "labels": index % 2} for index in range(12)])
    for given, name in ((data, "eval_dataset"), ({"train": data}, r"eval_dataset\['train'\]")):
        with pytest.warns(UserWarning, match=f"{name} is train_dataset, .* NOT PRIVATE. Evaluate on other"):
            trainer_of(tmp_path, data=data, evaluated=given)
