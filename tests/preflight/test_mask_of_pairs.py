"""Attention masks for each pair of tokens train as a mask for each token does, or are refused with what trains."""

import pytest
import torch
from transformers import BertForQuestionAnswering

from doppler_hf.privacy.losses import per_sample_losses
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import checked_trainer_of, refused_training, trained

FORBIDDEN = torch.finfo(torch.float32).min


def of_pairs(kind, heads=1, *, is_left=False):
    def collator(examples):
        batch = pad(examples)
        if is_left:
            lengths = batch["attention_mask"].sum(dim=1)
            for name in ("input_ids", "attention_mask"):
                rows = zip(batch[name], lengths.tolist(), strict=True)
                batch[name] = torch.stack([row.roll(len(row) - length) for row, length in rows])
        mask = batch["attention_mask"][:, None, None, :].bool()
        mask = mask.expand(len(examples), heads, mask.shape[3], mask.shape[3]).contiguous()
        added = torch.where(mask, 0.0, FORBIDDEN)
        return batch | {
            "attention_mask": {"added": added, "bool": mask, "numbers": mask.float(), "whole": mask.long()}[kind]
        }

    return collator


def with_attention(kind):
    model = tiny_bert()
    model.set_attn_implementation(kind)
    return model


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("kind", "attention"), [("added", "sdpa"), ("added", "eager"), ("bool", "sdpa")])
def test_a_mask_of_pairs_trains_as_one_of_tokens(tmp_path, kind, attention, heads):
    found = []
    for collator in (of_pairs(kind, heads), pad):
        torch.manual_seed(0)
        trainer = checked_trainer_of(tmp_path, model=with_attention(attention), collator=collator, max_steps=1)
        batch = collator([dict(row) for row in text_data(8)])
        found.append(per_sample_losses(trainer.model, dict(batch), base_model=trainer.model))
        assert trained(trainer).state.global_step == 1
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("kind", "attention"), [("bool", "eager"), ("numbers", "sdpa"), ("numbers", "eager"), ("whole", "eager")]
)
def test_a_mask_that_hides_nothing_is_refused_and_its_mend_trains(tmp_path, kind, attention):
    said = refused_training(
        tmp_path,
        "mask-without-effect",
        model=with_attention(attention),
        collator=of_pairs(kind),
        match=r"torch\.where\(mask\.bool",
    )

    def mended(examples):
        batch = of_pairs(kind)(examples)
        mask = batch["attention_mask"]
        return batch | {"attention_mask": torch.where(mask.bool(), 0.0, torch.finfo(torch.float32).min)}

    trained(checked_trainer_of(tmp_path, model=with_attention(attention), collator=mended))
    assert ("attn_implementation='sdpa'" in said) == (kind == "bool")
    if kind == "bool":
        trained(checked_trainer_of(tmp_path / "other", model=with_attention("sdpa"), collator=of_pairs(kind)))


def test_a_mask_of_pairs_that_mixes_rows_is_refused(tmp_path):
    def mixing(examples):
        batch = of_pairs("added")(examples)
        return batch | {"input_ids": batch["input_ids"].sort(dim=0).values}

    refused_training(tmp_path, "rows-mixed", collator=mixing)


def test_padding_on_the_left_is_recognised_in_a_mask_of_pairs(tmp_path):
    """BERT's positions then depend on the other records, which is refused with that reason and not as rows that mix."""
    refused_training(tmp_path, "depends-on-others", collator=of_pairs("added", is_left=True))


@pytest.mark.parametrize("kind", ["added", "bool"])
def test_answers_are_looked_for_in_the_text_alone(kind):
    torch.manual_seed(0)
    model = BertForQuestionAnswering(tiny_bert().config).eval()
    examples = [dict(row) for row in text_data(6)]
    ends = {"start_positions": torch.tensor([0, 1, 2, 0, 1, 2]), "end_positions": torch.tensor([1, 2, 2, 1, 2, 2])}
    found = []
    for collator in (pad, of_pairs(kind)):
        batch = collator(examples)
        batch.pop("labels")
        found.append(per_sample_losses(model, {**batch, **ends}, base_model=model))
    torch.testing.assert_close(*found)
