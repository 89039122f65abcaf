"""Rows that two data sets share are counted by their places; equal rows at other places are not."""

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from doppler_hf.privacy.batching.shared_rows import shared_rows

SIZE = 40
TABLE = Dataset.from_dict(
    {
        "none": [None] * SIZE,
        "id": [*range(SIZE)],
        "tokens": [[n] * (n % 3) for n in range(SIZE)],
        "text": [*map(str, range(SIZE))],
    }
)
LIST = [{"x": n} for n in range(SIZE)]
TENSORS = torch.arange(3 * SIZE).reshape(SIZE, 3), torch.zeros(SIZE)
MASK, WEIGHTS = torch.ones(SIZE, 3, dtype=torch.int32), np.ones(SIZE)
SPLIT = TABLE.train_test_split(0.25, seed=0)

# A name → training set, evaluation set, the shared rows, and whether the number is a fact about the code.
CASES = {
    "the set itself": (TABLE, TABLE, 40, True),
    "another format": (TABLE, TABLE.with_format("torch"), 40, True),
    "a slice": (TABLE, TABLE.select(range(10)), 10, True),
    "slices that overlap": (TABLE.select(range(30)), TABLE.select(range(25, 40)), 5, True),
    "chosen rows": (TABLE, TABLE.select([3, 39, 7]), 3, False),
    "chosen rows of a shuffled set": (TABLE.shuffle(seed=1), TABLE.select([3, 39, 7]), 3, False),
    "a filter": (TABLE, TABLE.filter(lambda row: row["id"] % 4 == 0), 10, False),
    "the split of another set": (TABLE, SPLIT["test"], 10, False),
    "a split twice": (SPLIT["train"], SPLIT["train"].train_test_split(0.5)["test"], 15, False),
    "two splits of one set": (SPLIT["train"], TABLE.train_test_split(0.25, seed=1)["train"], None, False),
    "the whole set": (SPLIT["train"], TABLE, 30, False),
    "without the first columns": (TABLE, TABLE.remove_columns(["none", "id"]).select(range(10)), 10, True),
    "other names": (TABLE.remove_columns("id"), TABLE.rename_column("text", "sentence").remove_columns("tokens"), 40, True),
    "with new rows": (
        TABLE.select(range(20)), concatenate_datasets([TABLE.select(range(20, 30)), TABLE.select([0, 5])]), 2, False
    ),
    "a subset": (TABLE, Subset(TABLE, [0, -1]), 2, False),
    "a subset by a range": (TABLE, Subset(TABLE, range(5)), 5, True),
    "a split of torch's": (TABLE, random_split(TABLE, [30, 10])[1], 10, False),
    "several sets of torch's": (ConcatDataset([TABLE.select(range(20)), LIST]), Subset(LIST, [1]), 1, False),
    "columns in another order": (TABLE, TABLE.select_columns(["text", "tokens", "id"]).select(range(10)), 10, True),
    "a list": (LIST, LIST[5:10], 5, False),
    "tensors with new masks": (
        TensorDataset(*TENSORS), TensorDataset(TENSORS[0], torch.ones(SIZE, 3, dtype=torch.int32)), 40, True
    ),
    "tensors": (TensorDataset(*TENSORS), TensorDataset(TENSORS[0][30:], TENSORS[1][30:]), 10, True),
}  # fmt: skip


class WithoutLength(torch.utils.data.Dataset):
    def __len__(self):
        raise TypeError("unknown")


NONE = {
    "a length that is unknown": (TABLE, WithoutLength()),
    "sparse tensors": (TensorDataset(torch.eye(4).to_sparse()), TensorDataset(torch.eye(4).to_sparse())),
    "two parts of a split": (SPLIT["train"], SPLIT["test"]),
    "slices": (TABLE.select(range(30)), TABLE.select(range(30, 40))),
    "equal rows": (TABLE, Dataset.from_list(list(TABLE))),
    "new rows": (TABLE, TABLE.map(lambda row: {"id": row["id"] + 1})),
    "two subsets": (Subset(TABLE, [0, 1]), Subset(TABLE, [2, 3])),
    "parts of a list": (LIST[:5], LIST[5:]),
    "equal values in lists": ([1, 2, "a"], [1, "a"]),
    "slices of tensors": (TensorDataset(TENSORS[0][:30]), TensorDataset(TENSORS[0][30:])),
    "other tensors with the same mask": (TensorDataset(TENSORS[0], MASK), TensorDataset(TENSORS[0] + 1, MASK)),
    "other tables with the same weights": tuple(
        Dataset.from_list(list(TABLE)).add_column("weight", WEIGHTS) for _ in range(2)
    ),
    "nothing": (TABLE, TABLE.select([])),
    "no set": (TABLE, None),
    "a stream": (TABLE, TABLE.to_iterable_dataset()),
}


@pytest.mark.parametrize("name", CASES)
def test_shared_rows_are_counted(name):
    train, evaluated, shared, is_by_slices = CASES[name]
    if shared is None:  # the rows themselves tell
        shared = len({*train["id"]} & {*evaluated["id"]})
    assert shared_rows(train, evaluated) == (shared, len(evaluated), is_by_slices)


@pytest.mark.parametrize("name", NONE)
def test_rows_at_other_places_are_not_shared(name):
    assert shared_rows(*NONE[name]) is None


def test_files_that_are_loaded_twice_have_other_places(tmp_path):
    TABLE.save_to_disk(tmp_path)
    once, twice = Dataset.load_from_disk(tmp_path), Dataset.load_from_disk(tmp_path)
    assert shared_rows(once, once.select(range(10))) == (10, 10, True)
    assert shared_rows(once, twice.select(range(10))) is None, "preflight/records.py compares such rows by their content"
