"""Positions of answers outside of the rows, which Transformers ignores silently, are refused unless scripts mean them."""

import datasets
import numpy as np
import pytest
import torch
import transformers as hf
from transformers import default_data_collator

from doppler_hf.preflight import answers
from doppler_hf.preflight.values import refuse_out_of_range
from doppler_hf.privacy import LEDGER_NAME
from tests.support import sentences
from tests.support.refusals import refused
from tests.support.tiny import Rows, tiny_bert
from tests.support.trainers import checked_trainer_of, refused_training, trained

TOKENIZER, LONGEST = sentences.tokenizer(), 12
QUESTION = "w1 w2"


def answering():
    torch.manual_seed(0)
    return hf.BertForQuestionAnswering(tiny_bert().config)


def squad(number=40):
    """Contexts of 6 to 12 words whose answer is one word, given by its characters."""
    random = np.random.default_rng(0)
    contexts = [[*random.choice(sentences.WORDS, size=random.integers(6, 13))] for _ in range(number)]
    chosen = [int(random.integers(len(words))) for words in contexts]
    starts = [len(" ".join([*words[:place], ""])) for words, place in zip(contexts, chosen, strict=True)]
    texts = [words[place] for words, place in zip(contexts, chosen, strict=True)]
    rows = {"context": [" ".join(words) for words in contexts], "start": starts, "text": texts}
    return datasets.Dataset.from_dict(rows)


def tokenized(row, *, cut=LONGEST, padding=False):
    return TOKENIZER([QUESTION], [row["context"]], truncation="only_second", max_length=cut, padding=padding)


def by_tokens(row, *, none=0, **options):
    """Return a row as the message says."""
    encoding = tokenized(row, **options)
    first, last = row["start"], row["start"] + len(row["text"]) - 1
    found = [encoding.char_to_token(0, character, sequence_index=1) for character in (first, last)]
    positions = dict(
        zip(("start_positions", "end_positions"), (none if each is None else each for each in found), strict=True)
    )
    return {name: each[0] for name, each in encoding.items()} | positions


def by_characters(row, **options):
    first = {"start_positions": row["start"], "end_positions": row["start"] + len(row["text"]) - 1}
    return by_tokens(row, **options) | first


def rows_of(make, **options):
    data = squad()
    return data.map(lambda row: make(row, **options), remove_columns=data.column_names)


@pytest.mark.parametrize("padding", [False, "max_length"])
def test_characters_are_refused_and_tokens_train(tmp_path, padding):
    options = dict(model=answering(), collator=hf.DataCollatorWithPadding(TOKENIZER), max_steps=1)
    said = refused_training(
        tmp_path, "values-out-of-range", match="'start_positions' of train_dataset", **options,
        data=rows_of(by_characters, padding=padding),
    )  # fmt: skip
    assert "encoding.char_to_token(character, sequence_index=1) or 0" in said
    trained(checked_trainer_of(tmp_path / "mended", data=rows_of(by_tokens, padding=padding), **options))


def test_so_they_are_in_an_evaluation_and_where_rows_are_computed(tmp_path):
    options = dict(model=answering(), collator=hf.DataCollatorWithPadding(TOKENIZER), max_steps=1, eval_strategy="epoch")
    good, bad = rows_of(by_tokens), rows_of(by_characters)
    refused_training(tmp_path, "values-out-of-range", match="of eval_dataset", data=good, evaluated=bad, **options)
    for computed in (list, Rows, lambda data: data.with_transform(lambda rows: rows)):
        refused_training(tmp_path, "values-out-of-range", data=computed(bad), **options)
    assert not (tmp_path / "out" / LEDGER_NAME).exists()


def with_positions(data, change):
    return data.map(lambda row, index: {"start_positions": change(row, index)}, with_indices=True)


def refuse(data, **options):
    options = dict(collate=hf.DataCollatorWithPadding(TOKENIZER), has_own_loss=False) | options
    refuse_out_of_range(answering(), data, **options)


@pytest.mark.parametrize("padding", [False, "max_length"])
def test_positions_that_scripts_set_for_answers_that_were_cut_off_are_taken(padding):
    for none in (0, 512, LONGEST):  # the first token, the tokenizer's longest length, and that of the rows
        refuse(rows_of(by_tokens, cut=9, none=none, padding=padding))
    rows = rows_of(by_tokens, padding=padding)
    refuse(with_positions(rows, lambda row, index: sum(row["attention_mask"])))  # behind the last token
    is_cut = [len(row["input_ids"]) == LONGEST == sum(row["attention_mask"]) for row in rows]
    assert sum(is_cut) > 1
    refuse(with_positions(rows, lambda row, index: 20 + index if is_cut[index] else row["start_positions"]))


def test_one_negative_position_may_stand_for_no_answer_and_several_are_refused():
    rows = rows_of(by_tokens)
    refuse(with_positions(rows, lambda row, index: -1 if index in (5, 7) else row["start_positions"]))
    odd = with_positions(rows, lambda row, index: -index if index in (5, 7) else row["start_positions"])
    with refused("values-out-of-range", match="from 0 to the last token") as refusal:
        refuse(odd)
    assert "7" not in str(refusal.value)
    refuse(odd, has_own_loss=True)
    padded = rows_of(by_tokens, padding="max_length")
    odd = with_positions(padded, lambda row, index: -index if index in (5, 7) else row["start_positions"])
    clamped = lambda each: {name: value.clamp(min=0) for name, value in default_data_collator(each).items()}  # noqa: E731
    refuse(odd, collate=clamped)


def test_a_table_is_read_in_blocks_whatever_its_order(monkeypatch):
    monkeypatch.setattr(answers, "_ROWS_AT_ONCE", 3)
    rows = rows_of(by_tokens)
    refuse(rows.select(range(5, 40)))
    short = [index for index, row in enumerate(rows) if len(row["input_ids"]) < LONGEST]
    long = next(index for index in range(40) if index not in short)
    odd = with_positions(rows, lambda row, index: 20 + index if index in (short[0], short[-1]) else row["start_positions"])
    for order in (odd, odd.shuffle(seed=1), odd.select([short[-1], long, short[0]])):
        with refused("values-out-of-range"):
            refuse(order)
    refuse(odd.select([short[0], long, short[0]]))  # one position alone
    refuse(odd.select([index for index in range(40) if index not in (short[0], short[-1])]))


def test_positions_that_the_loss_ignores_in_all_rows_are_refused_unless_one_row_has_another(tmp_path):
    options = dict(model=answering(), collator=hf.DataCollatorWithPadding(TOKENIZER), max_steps=1)
    rows = rows_of(by_tokens)
    none = rows.map(lambda row: {"start_positions": 170, "end_positions": 180})
    for data in (none, none.with_transform(lambda each: each)):
        refused_training(tmp_path, "no-labels-count", match="char_to_token", data=data, **options)
    one = none.map(lambda row, index: {"end_positions": 3} if index == 29 else row, with_indices=True)
    trained(checked_trainer_of(tmp_path / "one", data=one, **options))
