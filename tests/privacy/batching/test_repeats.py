"""Rows that a data set has more than once are found by their places, and equal rows of others are not."""

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets, interleave_datasets
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from doppler_hf.privacy.batching.repeats import has_repeats

ONCE = {
    "as they stand": lambda data: data,
    "some": lambda data: data.select(range(2, 6)),
    "in another order": lambda data: data.shuffle(seed=0),
    "two parts": lambda data: concatenate_datasets([data.select(range(3)), data.select(range(3, 8))]).shuffle(seed=0),
    "with a column": lambda data: data.add_column("more", [None] * len(data)),
    "equal rows": lambda data: data.map(lambda row: {name: row[name] * 0 for name in row}),
    "a subset": lambda data: Subset(data, [1, 2]),
    "a subset from the end": lambda data: Subset(data, [-1, -2, 1]),
    "a list": lambda data: [*data],
    "a set of torch's": lambda data: ConcatDataset([Computed(3), Computed(3)]),
    "a subset of rows that are there once": lambda data: Subset(Subset(data, [1, 2, 1]), [0, 1]),
    "two sets": lambda data: ConcatDataset([data.select(range(3)), data.select(range(3, 8))]),
    "two sets of one table": lambda data: ConcatDataset([data.select([0, 2]), data.select([1, 3])]),
    "one set of two of one table": lambda data: concatenate_datasets([data.select([0, 2]), data.select([1, 3])]),
    "two subsets": lambda data: ConcatDataset([Subset(data, [0, 2]), Subset(data, [1, 7])]),
    "tensors with the same labels": lambda data: ConcatDataset(
        [TensorDataset(each, LABELS) for each in (TENSOR, TENSOR + 1)]
    ),
    "tensors with the same mask": lambda data: ConcatDataset(
        [TensorDataset(MASK, each, LABELS) for each in (TENSOR, TENSOR + 1)]
    ),
    "tensors at odd places with the same labels": lambda data: ConcatDataset(
        [TensorDataset(torch.arange(25)[1:].view(8, 3), LABELS) for _ in range(2)]
    ),
    "two sets with the same weights": lambda data: concatenate_datasets(
        [data.add_column("weight", WEIGHTS), Dataset.from_list([*data], data.features).add_column("weight", WEIGHTS)]
    ),
    "a list of numbers": lambda data: [0, 0, 1, (1, 2), (1, 2)],
    "tensors": lambda data: ConcatDataset([TensorDataset(TENSOR[:3]), TensorDataset(TENSOR[3:])]),
    "a tensor twice in a row": lambda data: TensorDataset(TENSOR, TENSOR),
    "one number for all rows": lambda data: TensorDataset(torch.zeros(1).expand(8), TENSOR),
    "none": lambda data: data.select([]),
}
MORE = {
    "repeat": lambda data: data.repeat(2),
    "repeat, shuffled": lambda data: data.repeat(2).shuffle(seed=0),
    "repeat, with a column": lambda data: data.repeat(2).add_column("more", [*range(2 * len(data))]),
    "select": lambda data: data.select([1, 2, 1]),
    "interleave": lambda data: interleave_datasets([data, data.select([0])], stopping_strategy="all_exhausted"),
    "two parts": lambda data: concatenate_datasets([data, data.select(range(3))]),
    "repeat, behind a new column": lambda data: _behind_a_new_column(data.repeat(2)),
    "repeat, behind a new column, shuffled": lambda data: _behind_a_new_column(data.repeat(2)).shuffle(seed=0),
    "repeat, after a part without values": lambda data: concatenate_datasets([_empty(data), data, data]),
    "a list": lambda data: [*data] * 2,
    "tensors": lambda data: ConcatDataset([TensorDataset(TENSOR), TensorDataset(TENSOR)]),
    "tensors with other labels": lambda data: ConcatDataset([TensorDataset(torch.zeros(8), TENSOR) for _ in range(2)]),
    "slices of tensors": lambda data: ConcatDataset([TensorDataset(TENSOR[:5]), TensorDataset(TENSOR[4:])]),
    "a subset": lambda data: Subset(data, [1, 2, 1]),
    "a subset, counted from both ends": lambda data: Subset(data, [4, 4 - len(data)]),
    "a subset of a subset": lambda data: Subset(Subset(data, [1, 2, 1]), [0, -1]),
    "two sets": lambda data: ConcatDataset([data, data]),
    "two sets of one table": lambda data: ConcatDataset([data.select([0, 2]), data.select(range(2, 5))]),
    "one set of two of one table": lambda data: concatenate_datasets([data.select([0, 2]), data.select([2, 3])]),
    "two subsets": lambda data: ConcatDataset([Subset(data, [0, 2]), Subset(data, [1, 2])]),
    "two sets with columns in another order": lambda data: ConcatDataset(
        [_with_a_text(data), _with_a_text(data).select_columns(["text", *data.column_names])]
    ),
}
TENSOR, LABELS, MASK = torch.arange(24).view(8, 3), torch.zeros(8), torch.ones(8, 3, dtype=torch.int32)
WEIGHTS, TEXTS = np.ones(8), {}


def _behind_a_new_column(data):
    (name,) = data.column_names
    return data.add_column("new", [*range(len(data))]).select_columns(["new", name])


def _with_a_text(data):
    return TEXTS.setdefault(data._fingerprint, data.add_column("text", [*"abcdefgh"]))


def _empty(data):
    return data.map(lambda row: dict.fromkeys(row), features=data.features)


@pytest.mark.parametrize("column", ["tokens", "number", "word", "flag", "record"])
@pytest.mark.parametrize(("makes", "is_repeated"), [(ONCE, False), (MORE, True)], ids=["once", "more"])
def test_rows_that_stand_in_a_data_set_more_than_once_are_found(column, makes, is_repeated):
    values = {"tokens": [[n] * (n % 3) for n in range(8)], "number": [*range(8)], "word": [str(n) for n in range(8)]}
    values |= {"flag": [n % 2 > 0 for n in range(8)], "record": [{"a": n, "b": None} for n in range(8)]}
    data = Dataset.from_dict({column: values[column]})
    # A record is not multiplied by 0. In a table of numbers alone, the same weights may be the same rows.
    of_records = ("equal rows",) if column == "record" else ()
    of_records += ("two sets with the same weights",) if column in ("number", "flag") else ()
    assert {name: has_repeats(make(data)) for name, make in makes.items() if name not in of_records} == {
        name: is_repeated for name in makes if name not in of_records
    }


class Computed(torch.utils.data.Dataset):
    """As many rows as one likes, which lie nowhere, with an attribute that tables of `datasets` have too."""

    def __init__(self, rows):
        self.rows, self._data = rows, []

    def __len__(self):
        return self.rows


def test_rows_in_their_order_take_no_memory():
    """Numbers of 10¹² rows would need terabytes."""
    data = Computed(10**12)
    assert not has_repeats(data)
