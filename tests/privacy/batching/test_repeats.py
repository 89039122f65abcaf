"""Rows that a data set has more than once are found by their places, and equal rows of others are not."""

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, concatenate_datasets, interleave_datasets, load_dataset, load_from_disk
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from doppler_hf.privacy.batching.repeats import has_repeats


def in_array(rows):
    found = np.empty(len(rows), dtype=object)
    found[:] = rows
    return found


ONCE = {
    "as they stand": lambda data: data,
    "some": lambda data: data.select(range(2, 6)),
    "in another order": lambda data: data.shuffle(seed=0),
    "two parts": lambda data: concatenate_datasets([data.select(range(3)), data.select(range(3, 8))]).shuffle(seed=0),
    "with a column": lambda data: data.add_column("more", [None] * len(data)),
    "equal rows": lambda data: data.map(lambda row: {name: row[name] * 0 for name in row}),
    "a subset": lambda data: Subset(data, [1, 2]),
    "a subset from the end": lambda data: Subset(data, [-1, -2, 1]),
    "a subset of rows that are there once": lambda data: Subset(Subset(data, [1, 2, 1]), [0, 1]),
    "two sets": lambda data: ConcatDataset([data.select(range(3)), data.select(range(3, 8))]),
    "two sets of one table": lambda data: ConcatDataset([data.select([0, 2]), data.select([1, 3])]),
    "one set of two of one table": lambda data: concatenate_datasets([data.select([0, 2]), data.select([1, 3])]),
    "two subsets": lambda data: ConcatDataset([Subset(data, [0, 2]), Subset(data, [1, -1])]),
    "a list": lambda data: [*data],
    "a list of words": lambda data: ["a", "b", "a", None, None],
    "a list of equal rows": lambda data: [{"a": 1}, {"a": 1}],
    "none": lambda data: data.select([]),
    "columns of some rows": lambda data: StackDataset(first=Subset(data, [2, 1]), second=Subset(data, [2, 1])),
    "columns of two sets": lambda data: StackDataset(data, [*range(len(data))]),
    "a mapping": lambda data: dict(enumerate(data)),
    "an array": lambda data: in_array([*data]),
    "a list of tensors": lambda data: [torch.tensor(1), torch.tensor(1)],
}
MORE = {
    "repeat": lambda data: data.repeat(2),
    "repeat, shuffled": lambda data: data.repeat(2).shuffle(seed=0),
    "repeat, with a column": lambda data: data.repeat(2).add_column("more", [*range(2 * len(data))]),
    "select": lambda data: data.select([1, 2, 1]),
    "interleave": lambda data: interleave_datasets([data, data.select([0])], stopping_strategy="all_exhausted"),
    "two parts": lambda data: concatenate_datasets([data, data.select(range(3))]),
    "a subset": lambda data: Subset(data, [1, 2, 1]),
    "a subset, counted from both ends": lambda data: Subset(data, [4, 4 - len(data)]),
    "a subset of a subset": lambda data: Subset(Subset(data, [1, 2, 1]), [0, -1]),
    "two sets": lambda data: ConcatDataset([data, data]),
    "two sets of one table": lambda data: ConcatDataset([data.select([0, 2]), data.select(range(2, 5))]),
    "one set of two of one table": lambda data: concatenate_datasets([data.select([0, 2]), data.select([2, 3])]),
    "two subsets": lambda data: ConcatDataset([Subset(data, [0, 2]), Subset(data, [1, 2])]),
    "a list": lambda data: (rows := [*data]) + rows[:1] * 2,
    "columns of repeated rows": lambda data: StackDataset(first=Subset(data, [1, 2, 1]), second=[0, 1, 0]),
    "columns that are a row apart": lambda data: StackDataset(Subset(data, [0, 1]), Subset(data, [1, 2])),
    "a mapping": lambda data: dict(enumerate((rows := [*data]) + rows[:1])),
    "an array": lambda data: in_array((rows := [*data]) + rows[:1]),
    "a list of tensors": lambda data: 3 * [torch.tensor(1)],
    "two lists": lambda data: ConcatDataset([rows := [*data], rows[2:3]]),
    "two subsets of a list": lambda data: ConcatDataset([Subset(rows := [*data], [0, 2]), Subset(rows, [1, 2 - len(data)])]),
}


@pytest.mark.parametrize("column", ["tokens", "number", "word", "flag", "record"])
@pytest.mark.parametrize(("makes", "is_repeated"), [(ONCE, False), (MORE, True)], ids=["once", "more"])
def test_rows_that_stand_in_a_data_set_more_than_once_are_found(column, makes, is_repeated):
    values = {"tokens": [[n] * (n % 3) for n in range(8)], "number": [*range(8)], "word": [str(n) for n in range(8)]}
    values |= {"flag": [n % 2 > 0 for n in range(8)], "record": [{"a": n, "b": None} for n in range(8)]}
    data = Dataset.from_dict({column: values[column]})
    of_records = ("equal rows",) if column == "record" else ()
    assert {name: has_repeats(make(data)) for name, make in makes.items() if name not in of_records} == {
        name: is_repeated for name in makes if name not in of_records
    }


class Wrapped(torch.utils.data.Dataset):
    """Makes each item of the row of another data set."""

    def __init__(self, rows, labels=None, **others):
        self.rows, self.labels = rows, labels
        vars(self).update(others)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_repeats_are_found_in_the_only_data_set_that_another_one_holds():
    data = Dataset.from_dict({"number": [*range(8)]})
    rows = [*data]
    once = [Wrapped(data, labels=[0] * 8), Wrapped(Wrapped(rows, alias=rows)), Wrapped(data, other=data.select([0, 0]))]
    once += [Subset(Wrapped(rows + rows[:2]), range(8)), Wrapped(data, texts=data.select_columns("number"))]
    once += [Wrapped(TensorDataset(torch.arange(2), torch.arange(2))), Wrapped([*"four"], labels=[[0, 1]] * 4)]
    more = [Wrapped(data.select([1, 1])), Wrapped(rows + rows[:2], labels=[0] * 10), Wrapped(Wrapped(Subset(data, [0, 0])))]
    more += [Subset(Wrapped(rows + rows[:2]), [0, 1, 8]), ConcatDataset([Wrapped(data), Wrapped(data)])]
    pairs = [(torch.ones(2), label) for label in (0, 1, 1)]
    once += [Wrapped(pairs), Wrapped([(0, 1)] * 3)]
    more += [Wrapped(pairs + pairs[:1]), Wrapped(pairs + pairs[:1], labels=[0] * 4)]
    assert [*map(has_repeats, once)] == [False] * len(once)
    assert [*map(has_repeats, more)] == [True] * len(more)


def test_rows_of_a_file_that_is_read_twice_are_found(tmp_path):
    Dataset.from_dict({"number": [*range(10)], "word": [*"abcdefghij"]}).to_parquet(tmp_path / "train.parquet")

    def read(split):
        return load_dataset(
            "parquet", data_files=str(tmp_path / "train.parquet"), split=split, cache_dir=str(tmp_path / "cache")
        )

    read("train").save_to_disk(tmp_path / "saved")
    saved, again = (load_from_disk(str(tmp_path / "saved")) for _ in range(2))
    beside = concatenate_datasets([saved.select_columns("number"), again.select_columns("word")], axis=1)
    first, last = read("train[:5]"), read("train[5:]")
    once = [read("train[:50%]+train[50%:]"), ConcatDataset([first, last]), beside, beside.shuffle(seed=0)]
    once += [
        concatenate_datasets([first.shuffle(seed=0), last]),
        concatenate_datasets([saved.select([0, 9]), again.select([1])]),
    ]
    more = [read("train[:60%]+train[40%:]"), ConcatDataset([saved, again]), concatenate_datasets([first, read("train[4:]")])]
    more += [beside.repeat(2), concatenate_datasets([saved.select([0, 9]).rename_column("word", "text"), again.select([9])])]
    assert [*map(has_repeats, once)] == [False] * len(once)
    assert [*map(has_repeats, more)] == [True] * len(more)


def test_rows_of_tensors_that_two_data_sets_share_are_found():
    numbers, labels = torch.arange(20.0).view(10, 2), torch.arange(10)
    weight = torch.ones(1).expand(10)
    once = [
        TensorDataset(numbers, labels, weight),
        TensorDataset(labels, labels),
        TensorDataset(numbers.to_sparse(), labels),
    ]
    once += [ConcatDataset([TensorDataset(numbers[:5]), TensorDataset(numbers[5:])])]
    once += [ConcatDataset([TensorDataset(numbers), TensorDataset(numbers.clone())])]
    array = np.arange(20.0).reshape(10, 2)
    once += [ConcatDataset([TensorDataset(torch.from_numpy(part)) for part in (array[:5], array[5:])])]
    once += [ConcatDataset([TensorDataset(numbers[:, :1]), TensorDataset(numbers[:, 1:])])]
    more = [ConcatDataset([TensorDataset(numbers[:6], labels[:6]), TensorDataset(numbers[4:], labels[4:])])]
    more += [ConcatDataset([TensorDataset(torch.from_numpy(part)) for part in (array[:6], array[4:])])]
    more += [ConcatDataset([TensorDataset(numbers, labels), TensorDataset(numbers.clone(), labels)])]
    assert [*map(has_repeats, once)] == [False] * len(once)
    assert [*map(has_repeats, more)] == [True] * len(more)


def test_rows_of_parts_of_a_pandas_table_are_found():
    table = pd.DataFrame({"number": np.arange(10.0)})

    def parts(*ends):
        return concatenate_datasets([Dataset.from_pandas(table.iloc[slice(*each)], preserve_index=False) for each in ends])

    assert not has_repeats(parts((0, 5), (5, 10)))
    assert has_repeats(parts((0, 6), (4, 10)))


def test_windows_of_a_series_that_overlap_are_found():
    series = torch.arange(24.0)
    apart = [series.unfold(0, 3, 3), series.unfold(0, 3, 4), series.view(4, 6).T, series.view(2, 3, 4).permute(2, 0, 1)]
    once = [*map(TensorDataset, apart)]
    once += [Subset(TensorDataset(series.unfold(0, 3, 1)), rows) for rows in ([0, 3, 9], [6], [])]
    more = [TensorDataset(series.unfold(0, 3, step)) for step in (1, 2)]
    more += [Subset(more[0], [9, 0, 2]), TensorDataset(series.view(4, 6).unfold(0, 2, 1))]
    assert [*map(has_repeats, once)] == [False] * len(once)
    assert [*map(has_repeats, more)] == [True] * len(more)


class Computed(torch.utils.data.Dataset):
    """As many rows as one likes, which lie nowhere."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows


def test_rows_in_their_order_take_no_memory():
    """Numbers of 10¹² rows would need terabytes."""
    data = Computed(10**12)
    assert not has_repeats(data)
    assert not has_repeats(ConcatDataset([data, Computed(10**12)]))
