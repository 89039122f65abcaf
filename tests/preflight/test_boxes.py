"""Boxes that LayoutLM's own forward refuses are found before the first step, and the line of the message puts them right."""

import re

import pytest
import torch
import transformers as hf
from datasets import Dataset

from doppler_hf.preflight.limits import limits_of
from tests.support.tiny import pad, text_data
from tests.support.trainers import checked_trainer_of, refused_training, trained

SIZES = dict(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=20, max_2d_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
GOOD = [3, 4, 30, 40]


def layoutlm():
    torch.manual_seed(0)
    return hf.LayoutLMForSequenceClassification(hf.LayoutLMConfig(**SIZES))


def with_boxes(bad):
    rows = [dict(row) for row in text_data(24)]
    rows = [row | {"bbox": [list(GOOD) for _ in row["input_ids"]]} for row in rows]
    rows[17]["bbox"][1] = list(bad)
    return Dataset.from_list(rows)


def pad_boxes(examples):
    batch = pad(examples)
    length = batch["input_ids"].shape[1]
    boxes = [[*row["bbox"], *[[0, 0, 0, 0]] * (length - len(row["bbox"]))] for row in examples]
    return batch | {"bbox": torch.tensor(boxes)}


@pytest.mark.parametrize("bad", [(-3, 4, 5, 6), (3, 4, 5, 70), (20, 4, 5, 6), (3, 20, 5, 6)])
@pytest.mark.parametrize("kind", [Dataset, list])
def test_a_box_that_the_forward_refuses_is_found_and_put_right(tmp_path, bad, kind):
    data = with_boxes(bad)
    with pytest.raises(IndexError):
        layoutlm()(**pad_boxes([data[17]]))
    given = data if kind is Dataset else list(data)
    said = refused_training(tmp_path, "values-out-of-range", model=layoutlm(), data=given, collator=pad_boxes)
    assert "17" not in said.replace("'", " ").split()
    mended = eval(re.search(r"train_dataset\.map\(.*\}\)", said)[0], {"train_dataset": data})
    assert mended[0]["bbox"][0] == GOOD
    trainer = trained(checked_trainer_of(tmp_path, model=layoutlm(), data=mended, collator=pad_boxes))
    assert trainer.state.global_step == 4


def test_a_model_that_cuts_widths_takes_corners_in_any_order():
    model = hf.LayoutLMv3ForTokenClassification(
        hf.LayoutLMv3Config(**SIZES, coordinate_size=2, shape_size=4, visual_embed=False, pad_token_id=0)
    )
    (limit,) = (each for each in limits_of(model, ["bbox"], has_own_loss=False) if each.column == "bbox")
    assert (limit.kind, limit.end) == ("boxes", 64)
