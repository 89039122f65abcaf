"""Data sets in another order, or of other examples, have other digests; the same ones have the same."""

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from doppler_hf.privacy import PoissonSampler
from doppler_hf.privacy.batching.columns import lengths_of
from doppler_hf.privacy.batching.same_data import digest_of, refuse_different_data
from tests.support.tiny import text_data


def digest(data, **options):
    sampler = PoissonSampler(num_examples=len(data), expected_batch_size=2, lengths=lengths_of(data), **options)
    return digest_of(data, sampler)


def test_the_same_data_have_the_same_digest_whoever_made_them():
    # Hugging Face's fingerprints differ here.
    assert digest(text_data(200)) == digest(text_data(200)) == digest(text_data(200).select(range(200)))


@pytest.mark.parametrize(
    "other",
    [
        text_data(200).shuffle(seed=1),
        text_data(200, seed=1),
        text_data(201),
        text_data(200).map(lambda row: {"labels": 1 - row["labels"]}),
    ],
)
def test_other_data_have_another(other):
    assert digest(other) != digest(text_data(200))


@pytest.mark.parametrize("limit", [None, 1])
def test_units_count(limit):
    """Those of one size too, and those of which one example is drawn: of these all examples have the same share."""
    in_pairs, dealt = [index // 2 for index in range(200)], [index % 100 for index in range(200)]
    some = (in_pairs, [1, *in_pairs[1:]], dealt)
    assert len({digest(text_data(200), units=units, max_examples_per_unit=limit) for units in some}) == 3


def test_parts_of_a_torch_data_set():
    data = TensorDataset(torch.arange(50))
    assert digest(Subset(data, [1, 2, 3])) == digest(Subset(data, [1, 2, 3])) != digest(Subset(data, [3, 2, 1]))


class Noisy(torch.utils.data.Dataset):
    def __init__(self, order, generator=None):
        self.order, self.generator = list(order), generator

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        return {"x": self.order[index] + torch.rand(3, generator=self.generator)}


def test_examples_that_are_augmented_at_random_count_and_their_augmentation_does_not():
    assert digest(Noisy(range(10))) == digest(Noisy(range(10))) != digest(Noisy(reversed(range(10))))


def test_data_of_which_nothing_can_be_said_are_refused():
    with pytest.raises(ValueError, match="no example is the same at a second look"):
        digest(Noisy(range(10), torch.Generator().manual_seed(0)))


def test_different_digests_are_refused_by_rank():
    refuse_different_data(["a", "a", "a"])
    with pytest.raises(
        ValueError, match=r"same on all processes.* got different ones on processes 0 and 2: .* a fixed seed\."
    ):
        refuse_different_data(["a", "a", "b"])
