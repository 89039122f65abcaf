"""Rows are those of tensors that are as long as a batch, and nothing else is cut."""

import torch

from doppler_hf.privacy.rows import has_rows, some_rows

BATCH = {
    "ids": torch.arange(6).reshape(3, 2),
    "shared": torch.arange(2),
    "scale": torch.tensor(3.0),
    "names": ["a", "b", "c"],
}


def test_rows_are_those_of_tensors_as_long_as_the_batch():
    assert [name for name, value in BATCH.items() if has_rows(value, 3)] == ["ids"]
    assert not any(has_rows(value, None) for value in BATCH.values())


def test_some_rows_in_any_order_and_all_else_as_it_was():
    for rows, ids in ((slice(1, 3), [[2, 3], [4, 5]]), ([2, 0, 2], [[4, 5], [0, 1], [4, 5]])):
        found = some_rows(BATCH, rows, number=3)
        assert found["ids"].tolist() == ids
        assert all(found[name] is BATCH[name] for name in ("shared", "scale", "names"))
