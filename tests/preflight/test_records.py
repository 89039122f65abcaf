"""What the start says about copies of rows, windows, and rows or users in both sets."""

import functools
import time
import warnings

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets, interleave_datasets, load_from_disk
from torch.utils.data import ConcatDataset

from doppler_hf import DopplerTrainer
from doppler_hf.errors import Refusal
from doppler_hf.preflight import records
from doppler_hf.preflight.records import COPIES as EQUAL
from doppler_hf.preflight.records import columns_in_runs, columns_of_users, has_copies_in, has_equal_rows, shares_users
from doppler_hf.run.reporting.published_results import published_results
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
    sets = dict(data=data.select(range(1, 24)), evaluated=data.select([0]))
    trained(trainer_of(tmp_path, **sets, max_steps=1, privacy_unit_column="user"))
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
    trained(trainer_of(tmp_path, model=make(), data=mended, max_steps=1))


# --- evaluation sets with training rows -----------------------------------------------------------------------------------


def warned_of(make):
    """Return what warnings say about evaluation sets."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [said for each in caught if "NOT PRIVATE" in (said := str(each.message))]


def test_the_training_set_given_to_an_evaluation_warns(tmp_path):
    data = text_data()
    trainer = trainer_of(tmp_path, data=data)
    for given in (trainer.train_dataset, Dataset(data.data, fingerprint=data._fingerprint), {"a": trainer.train_dataset}):
        (said,) = warned_of(functools.partial(trainer.evaluate, given))
        assert said.startswith("eval_dataset is train_dataset")
    (said,) = warned_of(functools.partial(trainer.predict, trainer.train_dataset))
    assert said.startswith("test_dataset is train_dataset")
    assert warned_of(functools.partial(trainer.evaluate, text_data(8, seed=1))) == []


WHOLE = numbered(40)
SPLIT = WHOLE.train_test_split(0.25, seed=0)
PARTS = {
    "some rows": (WHOLE, WHOLE.select([7, 3]), "All rows of eval_dataset are"),
    "one of several": (WHOLE, {"a": text_data(8, seed=1), "b": WHOLE.select([7, 3])}, "All rows of eval_dataset['b'] are"),
    "the split of another set": (WHOLE, SPLIT["test"], "All rows of eval_dataset are"),
    "the set before its split": (SPLIT["train"], WHOLE, "Some rows of eval_dataset are"),
    "a slice": (WHOLE, WHOLE.select(range(10)), "All rows of eval_dataset are"),
    "slices that overlap": (WHOLE.select(range(30)), WHOLE.select(range(25, 40)), "5 of the 15 rows of eval_dataset are"),
    "a filter": (SPLIT["train"], WHOLE.filter(lambda row: row["labels"] == 0), "Some rows of eval_dataset are"),
    "a subset": (WHOLE, torch.utils.data.Subset(WHOLE, [4, 2]), "All rows of eval_dataset are"),
    "a list": (LIST := [*WHOLE], LIST[5:9], "All rows of eval_dataset are"),
    "a wrapped set": (Rows(WHOLE), torch.utils.data.Subset(Rows(WHOLE), [1]), None),
}


@pytest.mark.parametrize("name", PARTS)
def test_an_evaluation_set_with_training_rows_warns_once(tmp_path, name):
    train, evaluated, said = PARTS[name]
    found = warned_of(lambda: trained(trainer_of(tmp_path, data=train, evaluated=evaluated, max_steps=1)))
    assert len(found) == (said is not None)
    assert said is None or found[0].startswith(f"{said} also in train_dataset")
    # The number of rows that a filter leaves may say something about the rows.
    assert name == "slices that overlap" or not any(figure.isdigit() for each in found for figure in each)


def test_the_mend_of_a_wrong_split_warns_no_more(tmp_path, capsys):
    sets = dict(data=SPLIT["train"], evaluated=SPLIT["test"])
    assert warned_of(lambda: trained(trainer_of(tmp_path, **sets, max_steps=1))) == []
    assert "NOT PRIVATE" not in capsys.readouterr().out.replace("noise_multiplier", "")


def test_a_data_set_that_is_replaced_is_looked_at_again(tmp_path):
    trainer = trainer_of(tmp_path, data=WHOLE, max_steps=1)
    trainer.eval_dataset = WHOLE.select([1, 2])
    assert len(warned_of(trainer.train)) == 1


def test_results_of_training_rows_are_not_published(tmp_path):
    for number, (evaluated, is_shown) in enumerate([(WHOLE.select([1, 2]), False), (text_data(8, seed=1), True)]):
        options = dict(data=WHOLE, evaluated=evaluated, max_steps=1, eval_strategy="steps", eval_steps=1)
        with warnings.catch_warnings(action="ignore"):
            trainer = trained(trainer_of(tmp_path / str(number), **options))
        assert bool(published_results(trainer).evaluations) is is_shown
    with warnings.catch_warnings(action="ignore"):
        trainer.evaluate(WHOLE.select([1, 2]))
    assert len(trainer.evaluations_of_training_data) == 1


def test_of_several_sets_only_those_with_training_rows_are_left_out(tmp_path):
    sets = {"own": WHOLE.select([1, 2]), "others": text_data(8, seed=1)}
    trainer = trained(trainer_of(tmp_path, data=WHOLE, max_steps=1))
    with warnings.catch_warnings(action="ignore"):
        trainer.evaluate(sets)
    assert [next(iter(each)) for each in trainer.evaluations_of_training_data] == ["eval_own_loss"]


def test_training_rows_are_evaluated_though_a_log_of_ones_own_keeps_nothing(tmp_path):
    class Silent(DopplerTrainer):
        def log(self, logs, *args):
            pass

    trainer = trainer_of(tmp_path, cls=Silent, data=WHOLE, max_steps=1)
    with warnings.catch_warnings(action="ignore"):
        assert "eval_loss" in trainer.evaluate(WHOLE.select([1, 2]))
    assert trainer.evaluations_of_training_data == []


EQUAL_ROWS = {
    "from a list": lambda data: Dataset.from_list([*data]),
    "mapped": lambda data: data.map(lambda row: {"more": 1}),
    "a part, mapped": lambda data: data.select(range(3)).map(lambda row: {"more": 1}),
    "a list": lambda data: [*data.select(range(5))],
    "a list of tensors": lambda data: [*data.select(range(5)).with_format("torch")],
    "a wrapped set": Rows,
    "one of two": lambda data: {"a": text_data(8, seed=1), "b": Dataset.from_list([*data])},
    "a half": lambda data: concatenate_datasets([text_data(8, seed=1), Dataset.from_list([*data.select(range(8))])]),
}


def plain(row):
    """Return a row of tensors as a row of lists and numbers."""
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}


@pytest.mark.parametrize("how", EQUAL_ROWS)
def test_equal_rows_in_both_sets_are_told_without_their_number(tmp_path, how, capsys):
    evaluated, collate = EQUAL_ROWS[how](numbered()), lambda rows: pad([*map(plain, rows)])
    assert (
        warned_of(lambda: trained(trainer_of(tmp_path, data=numbered(), evaluated=evaluated, max_steps=1, collator=collate)))
        == []
    )
    note = next(line for line in capsys.readouterr().out.splitlines() if EQUAL in line)
    assert not any(figure.isdigit() for figure in note)
    trainer = trainer_of(tmp_path, data=numbered(), collator=collate)
    assert len(warned_of(lambda: trainer.evaluate(evaluated))) == 1
    if not isinstance(evaluated, dict):
        assert warned_of(lambda: trainer.predict(evaluated)) == []  # An attack predicts training rows on purpose.


def test_rows_of_a_wrapped_training_set_are_found_in_another_one(tmp_path, capsys):
    trained(trainer_of(tmp_path, data=Rows(numbered()), evaluated=Rows(numbered().select(range(4))), max_steps=1))
    assert EQUAL in capsys.readouterr().out


def test_a_few_equal_rows_among_many_are_no_copies():
    data = numbered(100)
    assert not has_copies_in(data.select(range(60)), data.select(range(60, 100)))
    few = concatenate_datasets([data.select(range(2)), data.select(range(60, 100))]).map(lambda row: row)
    assert not has_copies_in(data.select(range(60)), few)
    same = Dataset.from_dict({"x": [0, 1] * 50, "labels": [0, 1] * 50})
    assert not has_copies_in(same, Dataset.from_list([*same]))
    labels = Dataset.from_dict({"labels": [*range(30)], "a": [*range(30)]})
    assert not has_copies_in(labels, Dataset.from_dict({"labels": [*range(30)], "b": [*range(30)]}))


def test_copies_are_found_in_large_sets_in_a_moment():
    rows = np.arange(200_000)
    data = Dataset.from_dict({"text": [f"text {row}" for row in rows], "labels": rows % 2})
    part = data.select(range(1000, 3000)).map(lambda row: row)
    begin = time.process_time()
    assert has_copies_in(data, part)
    assert time.process_time() - begin < 1.0, "at most a tenth of a second for each set, on any machine"
    assert not has_copies_in(data.select(range(3000, 200_000)), part)


# --- data sets that make their rows, other columns, and large users -------------------------------------------------------


class Opaque:
    """A value whose content nobody knows."""


def test_copies_in_a_torch_data_set_are_told_if_its_rows_can_be_compared(tmp_path, capsys):
    rows = [dict(row) for row in numbered()]
    assert has_equal_rows(Rows([*rows, rows[3]]))
    assert has_equal_rows(ConcatDataset([Rows(rows), Rows(rows[:5])]))
    assert has_equal_rows(Rows([{"x": torch.tensor([value])} for value in (1.0, 2.0, 1.0)]))
    assert not has_equal_rows(Rows(rows))
    assert not has_equal_rows(Rows([{"x": torch.tensor([value])} for value in (1.0, 2.0, 3.0)]))
    assert not has_equal_rows(Rows([{"x": Opaque()}, {"x": Opaque()}]))
    trained(trainer_of(tmp_path, data=Rows([*rows, rows[3]]), max_steps=1))
    assert COPIES in capsys.readouterr().out


def test_copies_at_the_end_of_a_large_table_are_found_in_the_moment_that_there_is(monkeypatch):
    table = Dataset.from_dict(
        {"input_ids": np.random.default_rng(0).integers(0, 99, (20_000, 12)).tolist(), "labels": [0] * 20_000}
    )
    whole = concatenate_datasets([table, Dataset.from_list(table.select([19_999]).to_list())])
    monkeypatch.setattr(records, "_SECONDS", 10.0)
    assert not has_equal_rows(table)
    assert has_equal_rows(whole)


@pytest.mark.parametrize("column", ["user_id", "overflow_to_sample_mapping", "Patient"])
def test_several_rows_of_a_user_that_are_not_adjacent_are_told(tmp_path, column, capsys):
    data = numbered().add_column(column, [row % 12 for row in range(24)])
    trained(trainer_of(tmp_path, data=data, max_steps=1))
    assert f"several rows have the same {column!r}" in capsys.readouterr().out
    trained(trainer_of(tmp_path / "mended", data=data, max_steps=1, privacy_unit_column=column))
    assert "several rows" not in capsys.readouterr().out
    assert columns_of_users(numbered().add_column(column, range(24))) == []
    assert columns_of_users(numbered().add_column("kind", [row % 12 for row in range(24)])) == []


def test_users_with_many_more_rows_than_most_are_told(tmp_path, capsys):
    data = numbered().add_column("user", [0] * 12 + [*range(1, 13)])
    trained(trainer_of(tmp_path, data=data, max_steps=1, privacy_unit_column="user", per_device_train_batch_size=2))
    note = next(line for line in capsys.readouterr().out.splitlines() if "rows of most users" in line)
    assert not any(figure.isdigit() for figure in note.partition("some users")[2])
    terms = dict(max_steps=1, privacy_unit_column="user", per_device_train_batch_size=2, max_examples_per_unit=2)
    trained(trainer_of(tmp_path / "mended", data=data, **terms))
    assert "rows of most users" not in capsys.readouterr().out


def test_a_list_that_is_repeated_trains_with_the_mend_of_its_message(tmp_path):
    rows = [row | {"user": number} for number, row in enumerate(text_data(24))] * 2
    with pytest.raises(
        Refusal, match=r"make a datasets\.Dataset of it and set privacy_unit_column to a column that they share"
    ):
        trainer_of(tmp_path, data=rows, max_steps=1).train()
    mended = dict(data=Dataset.from_list(rows), privacy_unit_column="user", per_device_train_batch_size=2)
    trained(trainer_of(tmp_path / "mended", max_steps=1, **mended))
