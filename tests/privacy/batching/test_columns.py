"""Lengths, units and labels that are read off the table are those of a loop over the examples."""

import math

import numpy as np
import pytest
from datasets import Array2D, Dataset, Features

from doppler_hf.privacy.batching import columns
from doppler_hf.privacy.batching.columns import labels_of, length_of, lengths_of, units_of
from tests.support.refusals import refused
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


def test_units_are_equal_values_across_parts_of_a_table():
    values = np.random.default_rng(0).integers(0, 9, 50).tolist()
    data = Dataset.from_dict({"user": [f"user {value}" for value in values]}).shuffle(seed=0)
    units, users = units_of(data, column="user"), data["user"][:]
    assert all((units[i] == units[j]) == (users[i] == users[j]) for i in range(50) for j in range(50))
    assert sorted(set(units.tolist())) == list(range(len(set(values))))
    hidden = data.with_transform(lambda rows: {"size": [len(user) for user in rows["user"]]})
    assert units_of(hidden, column="user").tolist() == units.tolist()


def test_zeros_of_both_signs_are_one_unit():
    assert units_of(Dataset.from_dict({"user": [0.0, -0.0, 1.0]}), column="user").tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("values", "column", "code"),
    [
        (["a", None], "user", "missing-units"),
        ([1.0, math.nan], "user", "missing-units"),
        (["a", " "], "user", "missing-units"),  # as in a table that was read from text
        (["a", "b"], "owner", "no-unit-column"),
        ([["a"], ["b"]], "user", "unit-type"),
        (np.zeros(2, dtype=np.float16), "user", "unit-type"),
    ],
)
def test_a_column_that_names_no_units_is_refused(values, column, code):
    with refused(code, match=f"'{column}'"):
        units_of(Dataset.from_dict({"user": values}), column=column)


@pytest.mark.parametrize(("values", "found"), [([2, 0, 1], [2, 0, 1]), ([True, False], [True, False]), ([0.5], None)])
def test_labels_are_those_of_the_column(values, found):
    labels = labels_of(Dataset.from_dict({"label": values}).with_format("torch"))
    assert labels is None if found is None else labels.tolist() == found


@pytest.mark.parametrize(
    "data",
    [
        Dataset.from_dict({"label": [[[0, 1], [2, 3]]] * 2}, features=Features({"label": Array2D((2, 2), "int64")})),
        Dataset.from_dict({"label": [0, None, 1]}),
    ],
    ids=["of each pixel", "not of all"],
)
def test_what_is_no_class_of_each_example_is_no_label(data):
    assert labels_of(data) is None


def test_rows_without_a_value_are_found_where_they_are_chosen_and_only_looked_for_where_there_are_any(monkeypatch):
    dataset = Dataset.from_dict({"label": [1, None, 2, 3], "labels": [1, 2, 3, 4]})

    def found(rows):
        return [*columns.rows_with_gaps(rows, names=("label", "labels"), may_be_empty=False)]

    assert found(dataset) == [("label", 1)]
    assert found(dataset.select([3, 2, 1])) == [("label", 2)]
    assert found(dataset.select([2, 0])) == []
    monkeypatch.delattr(columns, "_parts")  # which looks up each row of a shuffled table
    assert found(dataset.select_columns("labels").shuffle(seed=0)) == []
