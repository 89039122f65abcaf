"""No example is trained on and chosen by, and what is computed once is kept whole."""

import torch
from torch import nn
from torch.utils.data import default_collate

from scripts.studies.data import apart, in_parts


def test_no_example_is_trained_on_and_chosen_by():
    train, tuning_rows = apart(100, 30)
    assert len(tuning_rows) == 30
    assert sorted([*train, *tuning_rows]) == list(range(100))


def test_parts_are_rows_apart():
    """Inputs are the number of the row, labels its square, both negative in the split that is reported."""
    labels = {"train": torch.arange(40) ** 2, "test": -(torch.arange(9) ** 2)}

    def inputs_of(rows, *, split):
        return torch.from_numpy(rows) * (1 if split == "train" else -1)

    data = in_parts("digest", inputs_of, labels, nn.Identity, held_out=15)
    parts = [default_collate([*part]) for part in (data.train, data.tuning, data.report)]
    train, tuning, report = (part["inputs"].tolist() for part in parts)
    assert (len(train), len(tuning)) == (25, 15)
    assert sorted([*train, *tuning]) == list(range(40))
    assert report == [-row for row in range(9)]
    assert all(part["labels"].tolist() == [row * abs(row) for row in part["inputs"].tolist()] for part in parts)
