"""Rows are copied before a collator is tried with them, and of a view the row alone."""

import copy
import threading
from types import SimpleNamespace

import torch
from torch.utils.data import Dataset
from transformers import BatchEncoding

from doppler_hf.privacy.batching.collators import copied
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import checked_trainer_of, trained


def memory_of(tensor):
    return tensor.untyped_storage().nbytes()


def test_a_copy_of_a_view_has_the_memory_of_the_view_alone():
    everything = torch.arange(3000.0).reshape(1000, 3)
    row = {"inputs": everything[7], "nested": [everything[8], (everything[9][1],)]}
    row["other"] = SimpleNamespace(x=everything[3:5].T)
    rows = [row, BatchEncoding({"inputs": everything[1]}), SimpleNamespace(inputs=everything[2])]
    mine = copied(rows)
    found = [
        mine[0]["inputs"], *mine[0]["nested"][:1], mine[0]["nested"][1][0], mine[0]["other"].x, mine[1]["inputs"],
        mine[2].inputs,
    ]  # fmt: skip
    expected = [everything[7], everything[8], everything[9, 1], everything[3:5].T, everything[1], everything[2]]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert memory_of(one) == one.numel() * 4
    for one in found:
        one.fill_(-1.0)
    assert torch.equal(everything, torch.arange(3000.0).reshape(1000, 3))


def test_what_is_no_plain_view_is_copied_as_by_copy():
    trained_ones = torch.ones(3, requires_grad=True)
    sparse = torch.eye(3).to_sparse()
    row = {"weights": trained_ones, "sparse": sparse, "text": "b", "kind": dict}
    row["itself"] = row
    (mine,) = copied([row])
    assert mine["weights"].requires_grad
    assert mine["weights"] is not trained_ones
    assert torch.equal(mine["sparse"].to_dense(), torch.eye(3))
    assert mine["itself"] is mine
    assert (mine["text"], mine["kind"]) == ("b", dict)


def test_what_cannot_be_copied_is_shared_and_what_is_beside_it_is_copied(tmp_path):
    (tmp_path / "clip").write_text("abc")
    with (tmp_path / "clip").open() as clip:
        everything = torch.arange(6.0).reshape(2, 3)
        row = {"clip": clip, "inputs": everything[1], "labels": [0], "frames": (number for number in range(3))}
        rows = [row, BatchEncoding({"clip": [clip, [1]]})]
        mine = copied(rows)
        assert mine[0]["clip"] is mine[1]["clip"][0] is clip
        mine[0].pop("labels")
        mine[0]["inputs"].fill_(-1.0)
        mine[1]["clip"][1].append(2)
        assert (row["labels"], rows[1]["clip"][1], [*row["frames"]]) == ([0], [1], [0, 1, 2])
        assert torch.equal(everything, torch.arange(6.0).reshape(2, 3))


class Decoder:
    """What reads a clip where the collator needs it."""

    def __init__(self):
        self.lock = threading.Lock()

    def frames(self):
        with self.lock:
            return [0, 1, 2]


class RowsWithDecoders(Dataset):
    """Rows with an object that cannot be copied."""

    def __init__(self):
        self.rows = [*text_data(24)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] | {"clip": Decoder()}


def test_rows_with_decoders_are_trained_on(tmp_path):
    def collate(rows):
        assert all(row.pop("clip").frames() == [0, 1, 2] for row in rows)
        return pad(rows)

    options = dict(max_steps=1, remove_unused_columns=False)
    trained(checked_trainer_of(tmp_path, model=tiny_bert(), data=RowsWithDecoders(), collator=collate, **options))


class RowsOfOneTensor(Dataset):
    """The usual data set of one's own."""

    def __init__(self):
        self.ids = torch.randint(3, 20, (2000, 12), generator=torch.Generator().manual_seed(0))
        self.labels = self.ids[:, 0] % 2

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def test_no_check_before_the_first_step_copies_all_rows_with_one(tmp_path):
    data, copies = RowsOfOneTensor(), []

    def collate(rows):
        for row in rows:
            ids = row["input_ids"]
            if ids.data_ptr() // 8 * 8 not in range(data.ids.data_ptr(), data.ids.data_ptr() + memory_of(data.ids)):
                copies.append(memory_of(ids))
        return {name: torch.stack([copy.copy(row[name]) for row in rows]) for name in rows[0]}

    trained(checked_trainer_of(tmp_path, model=tiny_bert(), data=data, collator=collate, max_steps=1))
    assert set(copies) == {12 * 8}
