"""Data sets in another order, or of other examples, have other digests, and rows that move while a run lasts are seen."""

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from doppler_hf.privacy import PoissonSampler
from doppler_hf.privacy.batching.columns import lengths_of
from doppler_hf.privacy.batching.same_data import KnownRows, refuse_different_data
from tests.support.tiny import text_data


def digest(data, **options):
    sampler = PoissonSampler(num_examples=len(data), expected_batch_size=2, lengths=lengths_of(data), **options)
    return KnownRows(data, places=range(0, len(data), 3)).digest(sampler)


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


def moved(data):
    """Two rows change places, which are none of those that are looked at."""
    order = list(range(len(data)))
    order[100], order[101] = 101, 100
    return order


@pytest.mark.parametrize(
    "swapped",
    [
        lambda data: data.select(moved(data)),
        lambda data: Subset(data, moved(data)),
        lambda data: concatenate_datasets([data.select(range(99)), data.select(moved(data)).select(range(99, 200))]),
        lambda data: ConcatDataset([Subset(data, range(99)), Subset(data, moved(data)[99:])]),
    ],
)
def test_an_order_that_can_be_read_counts_as_a_whole(swapped):
    """Rows of one length, since lengths count as a whole too."""
    data = Dataset.from_dict({"input_ids": [[number] for number in range(200)]})
    assert digest(data) != digest(swapped(data))


def test_all_of_few_rows_are_looked_at_and_64_of_many(monkeypatch):
    assert sorted(KnownRows(range(1000)).places) == [*range(1000)]
    monkeypatch.setattr("doppler_hf.privacy.batching.same_data._SECONDS", 0.0)
    assert len(KnownRows(range(1000)).places) == 64
    assert KnownRows(range(1000), places=[*range(500)]).places == [*range(500)]  # another process has chosen them


class Ordered(torch.utils.data.Dataset):
    """Rows in an order of their own, that change with the epoch."""

    def __init__(self, rows):
        self.rows, self.epoch = list(rows), 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": self.rows[index], "view": (self.rows[index] % 7, self.epoch)}


def test_rows_that_have_moved_are_refused(monkeypatch):
    monkeypatch.setattr("doppler_hf.privacy.batching.same_data._SECONDS", 0.05)
    data = Ordered(range(2000))
    known = KnownRows(data)
    known.refuse_moved()
    data.rows = data.rows[1:] + data.rows[:1]
    with pytest.raises(ValueError, match=r"must keep its order during train\(\), got .* numbers of others: .* shuffle out"):
        known.refuse_moved()


def test_rows_that_change_where_they_are_are_not():
    """As by augmentation that follows the epoch, and equal rows that change places."""
    data = Ordered([*range(100), *[5] * 100])
    known = KnownRows(data)
    data.epoch = 1
    known.refuse_moved()
    data.epoch, data.rows[100:] = 0, data.rows[:99:-1]
    known.refuse_moved()


def test_looking_leaves_the_random_numbers_of_others_alone():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    first = torch.rand(1)
    KnownRows(Noisy(range(10))).refuse_moved()
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def test_what_cannot_be_written_down_is_left_alone():
    data = [{"file": (value for value in ())} for _ in range(3)]
    known = KnownRows(data)
    known.refuse_moved()
    with pytest.raises(ValueError, match="this cannot be seen"):
        known.digest(PoissonSampler(num_examples=3, expected_batch_size=1))
