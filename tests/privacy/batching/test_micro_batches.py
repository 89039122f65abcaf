"""A piece of a draw is one micro-batch, or as many as its budget needs; what is clipped together stands together."""

import pytest
import torch

from doppler_hf.privacy.batching.columns import lengths_of
from doppler_hf.privacy.batching.fetching import DrawnExamples
from doppler_hf.privacy.batching.micro_batches import PrivateLoader, collate_piece
from doppler_hf.privacy.batching.sampling import OfStep, PoissonSampler
from tests.support.tiny import pad, text_data


def test_a_piece_is_one_micro_batch_or_as_many_as_the_budget_needs():
    examples = sorted(text_data(10), key=lambda example: len(example["input_ids"]))
    drawn = DrawnExamples(examples, None, fill=lambda: None, numbers=set()).__getitems__(OfStep(range(10), step=3))
    (piece,) = collate_piece(drawn, collator=pad, max_tokens=None)
    whole = piece.inputs
    assert piece.weight == 1.0
    assert torch.equal(whole["input_ids"], pad(examples)["input_ids"])
    batches = [batch.inputs for batch in collate_piece(drawn, collator=pad, max_tokens=16)]
    assert len(batches) > 1
    assert all(batch["input_ids"].numel() <= 16 for batch in batches)
    assert torch.equal(torch.cat([batch["labels"] for batch in batches]), whole["labels"])


@pytest.mark.parametrize("max_tokens", [None, 24, 60])
@pytest.mark.parametrize("units", [None, [0, 1, 1, *range(2, 9), 9, 9]], ids=["examples", "users"])
def test_all_views_of_an_example_stand_together_in_one_micro_batch(max_tokens, units):
    data, views = text_data(12).add_column("number", list(range(12))), 3
    sampler = PoissonSampler(
        num_examples=12, expected_batch_size=8, micro_batches=2, lengths=lengths_of(data), units=units, seed=0
    )
    fills = []
    options = dict(collator=numbered, max_tokens=max_tokens, fill=lambda: fills.append(None), views=views)
    loader, once = (PrivateLoader(data, sampler=sampler, **(options | more)) for more in ({}, {"views": 1}))
    parts, drawn = [], {}
    for name, each in (("views", loader), ("once", once)):
        sampler.begin_at(0)
        drawn[name] = [batch for _, piece in zip(range(6), each, strict=False) for batch in piece]
    for batch in drawn["views"]:
        numbers = batch.inputs["number"].view(-1, views)
        assert bool((numbers == numbers[:, :1]).all())
        assert batch.size == len(batch.inputs["number"])
        assert max_tokens is None or batch.inputs["input_ids"].numel() <= max_tokens
        parts += numbers[:, 0].tolist()
    assert sorted(parts) == sorted(number for batch in drawn["once"] for number in batch.inputs["number"].tolist())
    assert len(parts) > 12


def numbered(examples):
    return pad(examples) | {"number": torch.tensor([example["number"] for example in examples])}


@pytest.mark.parametrize("max_tokens", [None, 8])
def test_an_empty_piece_never_reaches_the_collator(max_tokens):
    assert collate_piece(OfStep([], step=0), collator=pad, max_tokens=max_tokens) == []
