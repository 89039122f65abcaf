"""Lengths, units and labels that are read off the table are those of a loop over the examples."""

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets, interleave_datasets
from torch.utils.data import ConcatDataset, Subset

from doppler_hf.privacy.batching import columns
from doppler_hf.privacy.batching.columns import has_repeats, labels_of, length_of, lengths_of, units_of
from tests.support.tiny import text_data

NESTED = [[[1, 2], [3]], [[4]], [], [[1, 2, 3], [1], [2]]]


@pytest.mark.parametrize(
    "data",
    [
        text_data(),
        text_data().with_format("torch"),
        text_data().shuffle(seed=1),
        text_data().select([5, 5, 2]),
        Dataset.from_dict({"input_ids": NESTED}),
        Dataset.from_dict({"input_ids": [[], [1]]}),
        text_data().with_transform(lambda rows: {"input_ids": [tokens[:4] for tokens in rows["input_ids"]]}),
    ],
    ids=["as stored", "formatted", "shuffled", "selected", "choices", "empty", "cut by a transform"],
)
def test_lengths_are_those_of_the_tokens(data, monkeypatch):
    monkeypatch.setattr(columns, "_ROWS_AT_ONCE", 2)
    rows = data if data.format["type"] == "custom" else data.with_format(None)
    assert lengths_of(data).tolist() == [length_of(row["input_ids"]) for row in rows]


def test_data_without_tokens_have_no_lengths():
    assert lengths_of(Dataset.from_dict({"pixel_values": [[0.0]]})) is None
    assert lengths_of(list(text_data())) is None


ONCE = {
    "as they stand": lambda data: data,
    "some": lambda data: data.select(range(2, 6)),
    "in another order": lambda data: data.shuffle(seed=0),
    "two parts": lambda data: concatenate_datasets([data.select(range(3)), data.select(range(3, 8))]).shuffle(seed=0),
    "with a column": lambda data: data.add_column("more", [None] * len(data)),
    "equal rows": lambda data: data.map(lambda row: {name: row[name] * 0 for name in row}),
    "a subset": lambda data: Subset(data, [1, 2]),
    "two sets": lambda data: ConcatDataset([data.select(range(3)), data.select(range(3, 8))]),
    "a list": lambda data: [*data],
    "none": lambda data: data.select([]),
}
MORE = {
    "repeat": lambda data: data.repeat(2),
    "repeat, shuffled": lambda data: data.repeat(2).shuffle(seed=0),
    "repeat, with a column": lambda data: data.repeat(2).add_column("more", [*range(2 * len(data))]),
    "select": lambda data: data.select([1, 2, 1]),
    "interleave": lambda data: interleave_datasets([data, data.select([0])], stopping_strategy="all_exhausted"),
    "two parts": lambda data: concatenate_datasets([data, data.select(range(3))]),
    "a subset": lambda data: Subset(data, [1, 2, 1]),
    "a subset of a subset": lambda data: Subset(Subset(data, [1, 2, 1]), [0, 1]),
    "two sets": lambda data: ConcatDataset([data, data]),
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


def test_units_are_equal_values_across_parts_of_a_table():
    values = np.random.default_rng(0).integers(0, 9, 50).tolist()
    data = Dataset.from_dict({"user": [f"user {value}" for value in values]}).shuffle(seed=0)
    units, users = units_of(data, column="user"), data["user"][:]
    assert all((units[i] == units[j]) == (users[i] == users[j]) for i in range(50) for j in range(50))
    assert sorted(set(units.tolist())) == list(range(len(set(values))))


def test_zeros_of_both_signs_are_one_unit():
    assert units_of(Dataset.from_dict({"user": [0.0, -0.0, 1.0]}), column="user").tolist() == [0, 0, 1]


@pytest.mark.parametrize("values", [[[0], [1]], np.zeros(2, dtype=np.float16)], ids=["lists", "float16"])
def test_units_of_another_kind_are_refused(values):
    with pytest.raises(ValueError, match="privacy_unit_column='user' must hold numbers or strings, got others"):
        units_of(Dataset.from_dict({"user": values}), column="user")


@pytest.mark.parametrize(("values", "found"), [([2, 0, 1], [2, 0, 1]), ([True, False], [True, False]), ([0.5], None)])
def test_labels_are_those_of_the_column(values, found):
    labels = labels_of(Dataset.from_dict({"label": values}).with_format("torch"))
    assert labels is None if found is None else labels.tolist() == found
