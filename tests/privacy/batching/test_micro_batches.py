"""A piece of a draw is one micro-batch, or as many as its budget needs; what is clipped together stands together."""

import itertools

import numpy as np
import pytest

from doppler_hf.privacy.batching.columns import lengths_of
from doppler_hf.privacy.batching.micro_batches import PrivateLoader, check_token_budget, cut_by_tokens
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


# --- a budget of tokens ---------------------------------------------------------------------------------------------------


def fewest_parts(lengths, max_tokens):
    """By trying every way to cut."""
    for cuts in range(len(lengths)):
        for inner in itertools.combinations(range(1, len(lengths)), cuts):
            bounds = [0, *inner, len(lengths)]
            parts = [lengths[start:stop] for start, stop in itertools.pairwise(bounds)]
            if all(len(part) * max(part) <= max_tokens for part in parts):
                return len(parts)
    return None


@pytest.mark.parametrize("max_tokens", [9, 10, 17, 36, 80, 81, 1000])
@pytest.mark.parametrize("ascending", [True, False])
def test_parts_hold_everything_once_and_fit(max_tokens, ascending):
    generator = np.random.default_rng(max_tokens)
    for _ in range(20):
        lengths = generator.integers(1, 10, size=9).tolist()
        lengths = sorted(lengths) if ascending else lengths
        parts = cut_by_tokens(lengths, max_tokens=max_tokens)
        assert [length for part in parts for length in lengths[part]] == lengths
        assert all((part.stop - part.start) * max(lengths[part]) <= max_tokens for part in parts)
        if ascending:
            assert len(parts) == fewest_parts(lengths, max_tokens)


def test_an_exact_fit_nothing_and_a_single_example():
    assert cut_by_tokens([5, 5, 5], max_tokens=15) == [slice(0, 3)]
    assert cut_by_tokens([5, 5, 5], max_tokens=14) == [slice(0, 2), slice(2, 3)]
    assert cut_by_tokens([], max_tokens=5) == []
    assert cut_by_tokens([5], max_tokens=5) == [slice(0, 1)]


def test_a_long_example_is_padded_with_nobody():
    assert cut_by_tokens([2, 9, 2, 2], max_tokens=8) == [slice(0, 1), slice(1, 2), slice(2, 4)]


def test_a_budget_that_cannot_be_kept_is_refused_without_a_word_about_the_example():
    check_token_budget([3, 8, 5], max_tokens=8)
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch=7 is less than the length of a single") as refusal:
        check_token_budget([3, 8, 5], max_tokens=7)
    assert "8" not in str(refusal.value)
    check_token_budget([3, 8, 5], max_tokens=32, views=4)
    with pytest.raises(ValueError, match=r"a single example times augmentation_multiplicity=4\. Truncate"):
        check_token_budget([3, 8, 5], max_tokens=31, views=4)
    counts = np.array([3, 1, 2])
    check_token_budget([3, 8, 5], max_tokens=10, counts=counts)
    with pytest.raises(
        ValueError, match=r"times the examples of its unit, with clip_unit_mean=True\. .*max_examples_per_unit"
    ):
        check_token_budget([3, 8, 5], max_tokens=9, counts=counts)
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch=7 needs a datasets\.Dataset"):
        check_token_budget(None, max_tokens=7)
