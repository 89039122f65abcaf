"""Parts within a budget of tokens: everything once, in order, padded to no more than it allows."""

import itertools

import numpy as np
import pytest

from doppler_hf.privacy.batching.token_budget import check_token_budget, cut_by_tokens


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
