"""Rows that the collator or the model cannot take are found before the first step, wherever they are in the data set."""

import copy
import math

import datasets
import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.data import Subset
from transformers import BartConfig, BartForSequenceClassification, default_data_collator

from doppler_hf.preflight.values import refuse_uncollated
from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.privacy.batching.columns import has_gaps_in_lists, has_not_finite, lengths_of, row_with_gap
from tests.support.refusals import refused
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import OfLogits, trained, trainer_of

ROW = 17


def rows_with(**changed):
    """Return rows of which one is changed."""
    rows = [dict(row) for row in text_data(24)]
    rows[ROW] |= changed
    return rows


def refused_and_mended(tmp_path, code, data, mend, **options):
    """See that a run is refused without a ledger, and that it trains once its data set is mended."""
    with refused(code) as refusal:
        trained(trainer_of(tmp_path / "1", data=data, max_steps=1, **options))
    assert not (tmp_path / "1" / "out" / LEDGER_NAME).exists()
    assert str(ROW) not in str(refusal.value)
    trainer = trained(trainer_of(tmp_path / "2", data=mend, max_steps=1, **options))
    assert trainer.privacy.ledger.steps_run == 1
    return str(refusal.value)


GAPS = {
    "a list": dict(input_ids=None),
    "a number in a list": dict(input_ids=[3, None, 4]),
}


@pytest.mark.parametrize("name", GAPS)
def test_missing_values_with_which_the_collator_fails_are_refused(tmp_path, name):
    data = datasets.Dataset.from_list(rows_with(**GAPS[name]))
    mend = data.filter(lambda row: row["input_ids"] is not None and None not in row["input_ids"])
    said = refused_and_mended(tmp_path, "missing-values", data, mend)
    assert "train_dataset have no value (None) in the column 'input_ids'" in said


def test_missing_values_that_the_collator_takes_are_trained(tmp_path):
    def filled(rows):
        return pad([row | {"input_ids": row["input_ids"] or [1]} for row in rows])

    data = datasets.Dataset.from_list(rows_with(input_ids=None, attention_mask=[1]))
    trainer = trained(trainer_of(tmp_path, data=data, max_steps=1, collator=filled))
    assert trainer.privacy.ledger.steps_run == 1


def test_a_gap_is_found_in_any_row_of_a_shuffled_table():
    data = datasets.Dataset.from_list(rows_with(input_ids=None))
    assert row_with_gap(data, column="input_ids") == ROW
    order = [*range(23, -1, -1)]
    assert row_with_gap(data.select(order), column="input_ids") == order.index(ROW)
    assert row_with_gap(data.select(range(ROW)), column="input_ids") is None
    assert row_with_gap(data, column="labels") is None
    assert lengths_of(data)[ROW] == 0


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("places", [None, [*range(23, -1, -1)]])
def test_a_label_that_is_no_finite_number_is_refused(tmp_path, places, value):
    """As pandas leaves it where a number is missing, or where it was divided by 0."""
    rows = [row | {"labels": float(row["labels"])} for row in rows_with()]
    rows[ROW]["labels"] = value
    data = datasets.Dataset.from_list(rows)
    data = data if places is None else data.select(places)
    model = tiny_bert(num_labels=1, problem_type="regression")
    assert has_not_finite(data, column="labels")
    assert not has_not_finite(datasets.Dataset.from_list(rows[:ROW]), column="labels")
    mend = data.filter(lambda row: np.isfinite(row["labels"]).all())
    said = refused_and_mended(tmp_path, "missing-labels", data, mend, model=model)
    assert "train_dataset.filter(lambda row: numpy.isfinite(row['labels']).all())" in said


@pytest.mark.parametrize("length", [2, -1], ids=["fixed", "any"])
def test_what_is_missing_in_lists_of_a_fixed_length_is_found_too(length):
    feature = datasets.Sequence(datasets.Value("float32"), length=length)
    data = datasets.Dataset.from_dict({"labels": [[1.0, 0.0], [None, 1.0]]}, datasets.Features({"labels": feature}))
    assert row_with_gap(data, column="labels") == 1
    assert has_gaps_in_lists(data, column="labels") is True
    data = datasets.Dataset.from_dict({"labels": [[1.0, math.nan]]}, datasets.Features({"labels": feature}))
    assert has_not_finite(data, column="labels")
    assert lengths_of(data, column="labels").tolist() == [2]


@pytest.mark.parametrize("wrap", [Rows, lambda rows: Subset(Rows(rows), range(len(rows)))])
def test_a_missing_label_of_a_data_set_that_makes_its_rows_is_refused(tmp_path, wrap):
    rows = rows_with(labels=None)
    refused_and_mended(tmp_path, "missing-labels", wrap(rows), wrap([row for row in rows if row["labels"] is not None]))


def test_other_numbers_of_eos_tokens_are_refused_in_a_data_set_that_makes_its_rows(tmp_path):
    sizes = dict(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
    sizes |= dict(decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32)
    config = BartConfig(**sizes, eos_token_id=2, pad_token_id=1, bos_token_id=0, forced_eos_token_id=2, num_labels=2)
    rows = [dict(input_ids=[0, 5 + row, 6, 2], labels=row % 2) for row in range(24)]
    rows[ROW]["input_ids"] = [0, 2, 6, 2]
    good = [row for row in rows if row["input_ids"].count(2) == 1]
    options = dict(model=BartForSequenceClassification(config), collator=default_data_collator)
    refused_and_mended(tmp_path, "ends-differ", Rows(rows), Rows(good), **options)


# --- rows that do not fit beside one another ---


def images(of_one):
    values = np.random.default_rng(0).normal(size=(24, 3, 16, 16)).astype(np.float32)
    rows = [dict(pixel_values=each, labels=number % 2) for number, each in enumerate(values)]
    rows[ROW]["pixel_values"] = of_one
    return rows


def vit():
    sizes = dict(image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, intermediate_size=16, num_labels=2))


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 16, 20), (16, 16)])
@pytest.mark.parametrize("kind", [Rows, list])
def test_an_image_of_another_size_is_refused(tmp_path, shape, kind):
    rows = images(np.zeros(shape, np.float32))
    same = [row for row in rows if row["pixel_values"].shape == (3, 16, 16)]
    options = dict(model=vit(), collator=default_data_collator)
    # The default collator knows why: rows of a batch have different sizes.
    assert "different sizes" in refused_and_mended(tmp_path, "not-padded", kind(rows), kind(same), **options)


def test_rows_with_which_a_users_collator_fails_are_refused(tmp_path):
    rows = images(np.zeros((3, 16, 20), np.float32))
    same = [row for row in rows if row["pixel_values"].shape == (3, 16, 16)]
    stacked = lambda rows: {name: torch.tensor(np.stack([row[name] for row in rows])) for name in rows[0]}  # noqa: E731
    said = refused_and_mended(tmp_path, "rows-not-collated", Rows(rows), Rows(same), model=vit(), collator=stacked)
    assert "images with another size or number of channels" in said


def test_so_it_is_in_a_data_set_to_evaluate(tmp_path):
    good = images(np.ones((3, 16, 16), np.float32))
    options = dict(model=vit(), collator=default_data_collator, max_steps=1, eval_strategy="steps", eval_steps=1)
    options |= dict(per_device_eval_batch_size=8)
    evaluated = images(np.zeros((1, 16, 16), np.float32))
    with refused("rows-not-collated", match="rows of eval_dataset"):
        trained(trainer_of(tmp_path / "1", data=Rows(good), evaluated=Rows(evaluated), **options))
    trained(trainer_of(tmp_path / "2", data=Rows(good), evaluated=Rows(evaluated[:ROW]), **options))


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 24, 24)])
def test_a_row_that_the_model_cannot_evaluate_is_refused_if_each_is_a_batch(tmp_path, shape):
    good = images(np.ones((3, 16, 16), np.float32))
    options = dict(model=vit(), collator=default_data_collator, max_steps=1, eval_strategy="steps", eval_steps=1)
    options |= dict(per_device_eval_batch_size=1)
    evaluated = images(np.zeros(shape, np.float32))
    with refused("rows-not-evaluated", match="rows of eval_dataset") as refusal:
        trained(trainer_of(tmp_path / "1", data=Rows(good), evaluated=Rows(evaluated), **options))
    assert str(ROW) not in str(refusal.value)
    assert not (tmp_path / "1" / "out" / LEDGER_NAME).exists()
    trained(trainer_of(tmp_path / "2", data=Rows(good), evaluated=Rows(evaluated[:ROW]), **options))


def test_a_row_that_only_the_collator_cannot_take_is_refused_if_each_is_a_batch(tmp_path):
    rows = [dict(row) for row in text_data(24)]
    bad = [row | {"input_ids": "three"} if number == ROW else row for number, row in enumerate(rows)]
    options = dict(max_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=1)
    with refused("rows-not-collated", match="rows of eval_dataset"):
        trained(trainer_of(tmp_path / "1", evaluated=Rows(bad), **options))
    trained(trainer_of(tmp_path / "2", evaluated=Rows(rows), **options))


class OfAnySize(nn.Module):
    """A convolution and a mean over the image, whatever its size."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, pixel_values):
        return self.last(self.first(pixel_values).mean(dim=(2, 3)))


def test_images_of_several_sizes_are_evaluated_one_by_one(tmp_path):
    good = images(np.ones((3, 16, 16), np.float32))
    evaluated = images(np.ones((3, 20, 12), np.float32))
    options = dict(model=OfAnySize(), cls=OfLogits, collator=default_data_collator, remove_unused_columns=False)
    options |= dict(max_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=1)
    trainer = trained(trainer_of(tmp_path, data=Rows(good), evaluated=Rows(evaluated), **options))
    assert [log for log in trainer.state.log_history if "eval_loss" in log]


def test_the_look_at_rows_changes_neither_rows_nor_random_numbers(tmp_path):
    """A collator that takes values out of its rows, and one that draws random numbers, work as before."""

    def popping(rows):
        torch.rand(1)
        labels = [row.pop("labels") for row in rows]
        return {**pad([row | {"labels": 0} for row in rows]), "labels": torch.tensor(labels)}

    rows = rows_with()
    before, state = copy.deepcopy(rows), torch.get_rng_state()
    refuse_uncollated(rows, collate=popping)
    assert rows == before
    assert torch.equal(torch.get_rng_state(), state)
    trainer = trained(trainer_of(tmp_path, data=rows, max_steps=1, collator=popping))
    assert trainer.privacy.ledger.steps_run == 1
