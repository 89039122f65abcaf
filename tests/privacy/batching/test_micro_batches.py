"""A piece of a draw is one micro-batch, or as many as its budget needs; what is clipped together stands together."""

import pytest

from doppler_hf.privacy.batching.columns import lengths_of
from doppler_hf.privacy.batching.micro_batches import PrivateLoader
from doppler_hf.privacy.batching.sampling import AllocationSampler
from tests.support.tiny import pad_numbered, text_data


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(100, None), (100, 24), (2, None), (6, 60)])
@pytest.mark.parametrize("units", [None, [0, 1, 1, *range(2, 9), 9, 9]], ids=["examples", "users"])
def test_all_views_of_an_example_stand_together_in_one_micro_batch(max_rows, max_tokens, units):
    data, views = text_data(12).add_column("number", list(range(12))), 3
    sampler = AllocationSampler(
        num_examples=12, expected_batch_size=8, micro_batches=2, lengths=lengths_of(data), units=units, seed=1
    )
    options = dict(collator=pad_numbered, max_rows=max_rows, max_tokens=max_tokens, views=views)
    loader, once = (PrivateLoader(data, sampler=sampler, **(options | more)) for more in ({}, {"views": 1}))
    parts, drawn = [], {}
    for name, each in (("views", loader), ("once", once)):
        sampler.begin_at(0)
        drawn[name] = [batch for _, piece in zip(range(6), each, strict=False) for batch in piece]
    for batch in drawn["views"]:
        numbers = batch.inputs["number"].view(-1, views)
        assert bool((numbers == numbers[:, :1]).all())
        assert batch.size == len(batch.inputs["number"])
        assert batch.size <= max(max_rows, views)
        assert max_tokens is None or batch.inputs["input_ids"].numel() <= max_tokens
        parts += numbers[:, 0].tolist()
    assert sorted(parts) == sorted(number for batch in drawn["once"] for number in batch.inputs["number"].tolist())
    assert len(parts) > 12


@pytest.mark.parametrize(("pieces", "size"), [(1, 4), (3, 4), (4, 1), (2, 100)])
def test_a_draw_comes_in_micro_batches_of_at_most_so_many_rows_and_in_as_few_as_that_allows(pieces, size):
    data = text_data(60).add_column("number", list(range(60)))
    options = dict(num_examples=60, expected_batch_size=pieces * size if size < 20 else 30, lengths=lengths_of(data))
    sampler = AllocationSampler(**options, micro_batches=pieces, micro_batch_size=size, seed=0)
    loader = PrivateLoader(data, sampler=sampler, collator=pad_numbered, max_rows=size, max_tokens=None)
    found = list(loader)
    assert len(found) == pieces * sampler.steps_per_epoch
    for step in range(sampler.steps_per_epoch):
        batches = [batch for piece in found[pieces * step : pieces * (step + 1)] for batch in piece]
        drawn = sorted(sampler.draw(step).tolist())
        assert sorted(number for batch in batches for number in batch.inputs["number"].tolist()) == drawn
        assert max((batch.size for batch in batches), default=0) <= size
        assert len(batches) <= max(pieces, -(-len(drawn) // size))
