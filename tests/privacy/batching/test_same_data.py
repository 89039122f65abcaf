"""Data sets in another order, or of other examples, have other digests, and rows that move while a run lasts are seen."""

import ctypes
import math

import pytest
import torch
from datasets import Dataset as Table
from datasets import concatenate_datasets
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from doppler_hf.privacy import PoissonSampler
from doppler_hf.privacy.batching import same_data
from doppler_hf.privacy.batching.columns import lengths_of
from doppler_hf.privacy.batching.same_data import KnownExamples, refuse_different_data
from tests.support.tiny import text_data


def seen(data, **options):
    sampler = PoissonSampler(num_examples=len(data), expected_batch_size=2, lengths=lengths_of(data), **options)
    return KnownExamples(data, numbers=range(0, len(data), 3)).seen(sampler)


def test_the_same_data_have_the_same_digest_whoever_made_them():
    # Hugging Face's fingerprints differ here.
    assert seen(text_data(200)) == seen(text_data(200)) == seen(text_data(200).select(range(200)))


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
    assert seen(other) != seen(text_data(200))


@pytest.mark.parametrize("limit", [None, 1])
def test_units_count(limit):
    """Those of one size too, and those of which one example is drawn: of these all examples have the same share."""
    in_pairs, dealt = [index // 2 for index in range(200)], [index % 100 for index in range(200)]
    some = (in_pairs, [1, *in_pairs[1:]], dealt)
    assert len({seen(text_data(200), units=units, max_examples_per_unit=limit)[0] for units in some}) == 3


def test_parts_of_a_torch_data_set():
    data = TensorDataset(torch.arange(50))
    assert seen(Subset(data, [1, 2, 3])) == seen(Subset(data, [1, 2, 3])) != seen(Subset(data, [3, 2, 1]))


class Noisy(Dataset):
    def __init__(self, order, generator=None):
        self.order, self.generator = list(order), generator

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        return {"x": self.order[index] + torch.rand(3, generator=self.generator)}


def test_examples_that_are_augmented_at_random_count_and_their_augmentation_does_not():
    assert seen(Noisy(range(10))) == seen(Noisy(range(10))) != seen(Noisy(reversed(range(10))))


def test_different_data_are_refused_by_rank():
    one, other = seen(text_data(20)), seen(text_data(20, seed=1))
    refuse_different_data([one, one, one])
    match = r"same on all processes.* got different ones on processes 0 and 2: .* a fixed seed\."
    with pytest.raises(ValueError, match=match):
        refuse_different_data([one, one, other])
    order, found = one
    with pytest.raises(ValueError, match=match):
        refuse_different_data([one, one, ("another order", found)])
    with pytest.raises(ValueError, match=match):
        refuse_different_data([one, one, (order, found | {3: b"another example"})])


def test_examples_that_one_process_cannot_see_twice_are_left_to_the_others():
    order, found = seen(text_data(20))
    some = {number: each for number, each in found.items() if number != 3}
    refuse_different_data([(order, found), (order, some)])
    refuse_different_data([(order, some), (order, found)])


def test_data_of_which_nothing_can_be_said_are_refused():
    noisy = seen(Noisy(range(10), torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match="no example is the same at a second look"):
        refuse_different_data([noisy, noisy])


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
    data = Table.from_dict({"input_ids": [[number] for number in range(200)]})
    assert seen(data) != seen(swapped(data))


def test_all_of_few_examples_are_looked_at_64_of_many_and_8_of_slow_ones(monkeypatch):
    monkeypatch.setattr(same_data, "_SECONDS", math.inf)
    assert sorted(KnownExamples(range(1000)).numbers) == [*range(1000)]
    monkeypatch.setattr(same_data, "_SECONDS", 0.0)
    assert len(KnownExamples(range(1000)).numbers) == 64
    assert KnownExamples(range(1000), numbers=[*range(500)]).numbers == [*range(500)]  # another process has chosen them
    monkeypatch.setattr(same_data, "_SECONDS_SLOW", 0.0)
    assert len(KnownExamples(range(1000)).numbers) == 8


class Ordered(Dataset):
    """Rows in an order of their own, that change with the epoch."""

    def __init__(self, rows):
        self.rows, self.epoch = list(rows), 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": self.rows[index], "view": (self.rows[index] % 7, self.epoch)}


@pytest.mark.parametrize("rows", [50, 200, 5000])
def test_examples_that_have_moved_are_refused(monkeypatch, rows):
    monkeypatch.setattr(same_data, "_MANY", 1000)
    monkeypatch.setattr(same_data, "_SECONDS", math.inf)
    data = Ordered(range(rows))
    known = KnownExamples(data)
    known.refuse_moved()
    data.rows = data.rows[1:] + data.rows[:1]
    with pytest.raises(ValueError, match=r"must keep its order during train\(\), got .* numbers of others: .* shuffle out"):
        known.refuse_moved()


def test_an_order_that_can_be_read_is_compared_as_a_whole():
    data = Subset(TensorDataset(torch.zeros(3000)), [*range(3000)])  # of which each is like all others
    known = KnownExamples(data, numbers=[0, 1])
    known.refuse_moved()
    data.indices[2000], data.indices[2001] = 2001, 2000
    with pytest.raises(ValueError, match="must keep its order"):
        known.refuse_moved()


def test_examples_that_change_where_they_are_are_not_refused():
    """As by augmentation that follows the epoch, and equal ones that change places."""
    data = Ordered([*range(100), *[5] * 100])
    known = KnownExamples(data)
    data.epoch = 1
    known.refuse_moved()
    known.refuse_moved()  # they are known as they are now
    data.epoch, data.rows[100:] = 0, data.rows[:99:-1]
    known.refuse_moved()


def test_a_cache_that_fills_up_is_no_other_order():
    class Cached(Ordered):
        def __init__(self):
            super().__init__(range(20))
            self.chosen, self.cache = Subset(TensorDataset(torch.zeros(30)), [*range(20)][::-1]), []

    data = Cached()
    known = KnownExamples(data)
    data.cache += [{"x": row} for row in data.rows]
    known.refuse_moved()


def test_pairs_of_equal_examples_whose_content_follows_the_epoch_are_not_refused(monkeypatch):
    monkeypatch.setattr(same_data, "_MANY", 1000)
    monkeypatch.setattr(same_data, "_SECONDS", math.inf)

    class Following(Ordered):
        def __getitem__(self, index):
            return {"x": hash((self.rows[index], self.epoch if self.rows[index] % 3 else 0))}

    data = Following([*range(1000), *range(1000), *range(1000, 4000)])
    known = KnownExamples(data)
    for data.epoch in range(1, 6):
        known.refuse_moved()


def test_looking_leaves_the_random_numbers_of_others_alone():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    first = torch.rand(1)
    KnownExamples(Noisy(range(10))).refuse_moved()
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


@pytest.mark.parametrize("value", [(each for each in ()), ctypes.pointer(ctypes.c_int(1)), torch.empty(2, device="meta")])
def test_what_cannot_be_written_down_is_left_alone(value):
    known = KnownExamples([{"file": value} for _ in range(3)])
    known.refuse_moved()
    assert known.seen(PoissonSampler(num_examples=3, expected_batch_size=1))[1] == {}


class InLists(Dataset):
    """Examples that are fetched as torch's loaders do, by the method for lists of them."""

    def __len__(self):
        return 10

    def __getitems__(self, indices):
        return [{"x": index} for index in indices]


def test_examples_are_fetched_as_in_training():
    KnownExamples(InLists()).refuse_moved()
