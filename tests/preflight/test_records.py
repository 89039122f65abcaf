"""What the notes at the start say about copies of rows, windows, and users in both sets."""

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets, interleave_datasets, load_from_disk

from doppler_hf.errors import Refusal
from doppler_hf.preflight.records import columns_in_runs, has_equal_rows, shares_users
from tests.support.tiny import Rows, numbered, pad, text_data
from tests.support.trainers import trained, trainer_of

COPIES = "some rows are identical"


def oversampled(folder, how):
    mixed = interleave_datasets(
        [numbered(), numbered(6).map(lambda row: row | {"labels": 1})], stopping_strategy="all_exhausted"
    )
    if how == "map":
        return mixed.map(lambda row: {"attention_mask": [1] * len(row["input_ids"])})
    if how == "flatten_indices":
        return mixed.flatten_indices()
    if how == "a list":
        return list(mixed)
    mixed.save_to_disk(folder)
    return load_from_disk(folder)


@pytest.mark.parametrize("how", ["map", "flatten_indices", "save_to_disk", "a list"])
def test_stored_copies_of_a_row_are_told(tmp_path, how, capsys):
    data = oversampled(tmp_path / "data", how)
    assert has_equal_rows(data)
    trained(trainer_of(tmp_path, data=data, max_steps=1))
    note = next(line for line in capsys.readouterr().out.splitlines() if COPIES in line)
    assert not any(figure.isdigit() for figure in note.partition(COPIES)[2]), "the count of rows is private"


def test_rows_that_differ_in_one_value_are_no_copies(tmp_path, capsys):
    assert not has_equal_rows(numbered())
    swapped = Dataset.from_list(
        [{"input_ids": ids} for ids in ([1, 2, 3], [2, 1, 3], [1, 2], [3], [1, 2, 3, 0], [0, 1, 2, 3])]
    )
    assert not has_equal_rows(swapped)
    assert not has_equal_rows(Dataset.from_dict({"text": ["a", "b"], "labels": [0, 0]}))
    assert has_equal_rows(Dataset.from_dict({"text": ["a", "b", "a"], "labels": [0, 0, 0]}))
    trained(trainer_of(tmp_path, data=numbered(), max_steps=1))
    assert COPIES not in capsys.readouterr().out


def windows(column="example_id"):
    """Two windows of each of twelve texts."""
    return numbered().add_column(column, [f"q{row // 2}" for row in range(24)])


@pytest.mark.parametrize("column", ["example_id", "overflow_to", "doc"])
def test_windows_of_one_text_are_told(tmp_path, column, capsys):
    trained(trainer_of(tmp_path, data=windows(column), max_steps=1))
    assert f"set privacy_unit_column={column!r}" in capsys.readouterr().out
    trained(trainer_of(tmp_path / "mended", data=windows(column), max_steps=1, privacy_unit_column=column))
    assert "adjacent rows" not in capsys.readouterr().out


def test_labels_and_names_of_single_rows_are_no_windows():
    data = numbered().add_column("id", list(range(24))).add_column("kind", ["a"] * 12 + ["b"] * 12)
    data = data.add_column("group", [row % 8 for row in range(24)])
    assert columns_in_runs(data.select(np.argsort(data["labels"][:], kind="stable").tolist())) == []
    assert columns_in_runs(concatenate_datasets([data, data])) == []


def test_users_in_both_sets_are_told(tmp_path, capsys):
    data = windows("user")
    assert shares_users(data, {"a": None, "b": data.select(range(4))}, column="user")
    assert not shares_users(data.select(range(4, 24)), data.select(range(4)), column="user")
    trained(trainer_of(tmp_path, data=data, evaluated=data.select(range(4)), max_steps=1, privacy_unit_column="user"))
    assert "some users (column 'user') are in both train_dataset and eval_dataset" in capsys.readouterr().out


# --- rows that fail later -------------------------------------------------------------------------------------------------


def refused(trainer, code):
    with pytest.raises(Refusal) as refusal:
        trainer.train()
    assert refusal.value.code == code
    assert trainer.privacy.ledger is None


class Unreadable(Rows):
    def __init__(self, missing):
        super().__init__(text_data(60))
        self.missing = missing

    def __getitem__(self, index):
        return None if index in self.missing else super().__getitem__(index)


@pytest.mark.parametrize("missing", [{0}, {17, 40}])
def test_rows_that_are_none_are_refused(tmp_path, missing):
    left_out = lambda rows: pad([row for row in rows if row is not None])  # noqa: E731
    refused(trainer_of(tmp_path, data=Unreadable(missing), collator=left_out), "row-is-none")


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_a_missing_label_is_refused_in_every_format(tmp_path, form):
    data = Dataset.from_list([row | {"labels": None if place == 13 else 1} for place, row in enumerate(text_data())])
    trainer = trainer_of(tmp_path, data=data.with_format(form))
    with pytest.raises(ValueError, match="Some rows of train_dataset have no label"):
        trainer.train()
    assert trainer.privacy.ledger is None


def bart():
    from transformers import BartConfig, BartForSequenceClassification

    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    widths = dict(encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=32, num_labels=2)
    return BartForSequenceClassification(BartConfig(vocab_size=50, d_model=8, **sizes, **widths))


def t5():
    from transformers import T5Config, T5ForSequenceClassification

    sizes = dict(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, num_labels=2)
    return T5ForSequenceClassification(T5Config(eos_token_id=2, decoder_start_token_id=0, **sizes))


@pytest.mark.parametrize("make", [bart, t5])
def test_rows_that_a_models_own_forward_refuses_together_are_refused(tmp_path, make):
    rows = [row | {name: [*row[name], end] for name, end in (("input_ids", 2), ("attention_mask", 1))} for row in numbered()]
    rows[7]["input_ids"][1] = 2
    data = Dataset.from_list(rows)
    refused(trainer_of(tmp_path, model=make(), data=data), "ends-differ")
    mended = data.filter(lambda row: row["input_ids"].count(2) == 1)
    assert np.diff([len(mended), len(data)]) == 1
    trained(trainer_of(tmp_path, model=make(), data=mended, evaluated=mended.select(range(4)), max_steps=1))


def test_the_training_set_given_to_an_evaluation_warns(tmp_path):
    data = text_data()
    trainer = trainer_of(tmp_path, data=data)
    for given in (trainer.train_dataset, Dataset(data.data, fingerprint=data._fingerprint), {"a": trainer.train_dataset}):
        with pytest.warns(UserWarning, match="eval_dataset is train_dataset.*NOT PRIVATE"):
            trainer.evaluate(given)
