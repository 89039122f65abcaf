"""What the model cannot take is refused before anything is spent, and what it can take is not: its own forward decides."""

import re

import numpy as np
import pytest
import torch
from datasets import Dataset, Value
from peft import PromptTuningConfig, get_peft_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from doppler_hf.privacy import LEDGER_NAME
from doppler_hf.run import data_scan
from doppler_hf.run.data_scan import refuse_values_beyond
from doppler_hf.run.model_limits import limits_of
from tests.support.models import CLASSES, IGNORED, MODELS, VOCABULARY, build, gpt2_lm, roberta
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import trained, trainer_of

COLUMNS = ("input_ids", "token_type_ids", "position_ids", "decoder_input_ids", "labels", "label")
TEXT = [name for name in MODELS if not name.startswith(("vit", "resnet"))]
ABSOLUTE = [name for name in TEXT if not name.startswith(("llama", "qwen", "t5"))]
BEYOND, ROW = 4321, 137


@pytest.fixture(autouse=True)
def _nothing_scanned(monkeypatch):
    monkeypatch.setattr(data_scan, "_SCANNED", set())


def ends(model, columns=COLUMNS, *, kind="numbers", has_own_loss=False):
    limits = [limit for limit in limits_of(model, columns, has_own_loss=has_own_loss) if limit.kind == kind]
    return {limit.column: limit.end for limit in limits}


def forward(model, **inputs):
    if "choice" in type(model).__name__.lower():
        inputs = {name: value.unsqueeze(1) for name, value in inputs.items()}
    if model.config.is_encoder_decoder:
        inputs = {"decoder_input_ids": torch.ones(1, 1, dtype=torch.long)} | inputs
    return model(**inputs)


# --- the limits are those of the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("column", ["input_ids", "token_type_ids", "decoder_input_ids"])
def test_a_number_below_the_end_is_taken_and_the_end_is_not(name, column):
    model = build(name).eval()
    found = ends(model)
    assert found["input_ids"] == VOCABULARY
    assert ("token_type_ids" in found) == ("bert" in name and not name.startswith("distil"))
    assert ("decoder_input_ids" in found) == name.startswith("t5")
    if column in found:
        others = dict(input_ids=torch.full((1, 3), 2))
        forward(model, **others | {column: torch.full((1, 3), found[column] - 1)})
        for other in (found[column], -1):
            with pytest.raises(IndexError):
                forward(model, **others | {column: torch.full((1, 3), other)})


@pytest.mark.parametrize("name", TEXT)
def test_the_longest_text_is_taken_and_a_longer_one_is_not(name):
    model = build(name).eval()
    found = ends(model, kind="lengths")
    assert set(found) == ({"input_ids"} if name in ABSOLUTE else set())
    forward(model, input_ids=torch.full((1, found.get("input_ids", 100) - 1), 2))
    if name in ABSOLUTE:
        with pytest.raises((IndexError, RuntimeError)):
            forward(model, input_ids=torch.full((1, found["input_ids"]), 2))


def test_positions_with_an_offset_and_those_of_a_decoder():
    options = dict(vocab_size=VOCABULARY, d_model=16, max_position_embeddings=20, encoder_layers=1, decoder_layers=1)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16)
    bart = BartForConditionalGeneration(BartConfig(**options, **heads)).eval()
    assert ends(bart, kind="lengths") == dict.fromkeys(
        ("input_ids", "decoder_input_ids", "labels", "label", "label_ids"), 21
    )
    text, longer = torch.full((1, 20), 3), torch.full((1, 21), 3)
    bart(input_ids=text, labels=text)
    for inputs in (dict(input_ids=longer, labels=text), dict(input_ids=text, labels=longer)):
        with pytest.raises(IndexError):
            bart(**inputs)


def test_padding_takes_no_position_where_the_model_counts_tokens():
    (limit,) = [limit for limit in limits_of(roberta(), COLUMNS, has_own_loss=False) if limit.kind == "lengths"]
    row = [2] * 18 + [1] * 2  # 20 rows of positions, of which the first two are no token's
    forward(roberta().eval(), input_ids=torch.tensor([row]))
    assert not limit.is_exceeded_in({"input_ids": torch.tensor([row])})
    assert limit.is_exceeded_in({"input_ids": torch.tensor([[2] * 19])})


def test_a_prompt_that_is_trained_takes_positions():
    model = get_peft_model(gpt2_lm(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=7))
    assert ends(model, kind="lengths") == {"input_ids": 14}
    model(input_ids=torch.full((1, 13), 2), attention_mask=torch.ones(1, 13))
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 14), 2), attention_mask=torch.ones(1, 14))


@pytest.mark.parametrize("name", MODELS)
def test_labels_are_those_that_the_loss_takes(name):
    names = ("labels", "label")
    of_labels = {column: end for column, end in ends(build(name), names).items() if column in names}
    if name == "bert-choice":
        assert not of_labels
    else:
        assert of_labels == dict.fromkeys(names, VOCABULARY if "lm" in name or "llama" in name else CLASSES)
    assert not {*names} & {*ends(build(name), names, has_own_loss=True)}
    for no_classes in (dict(num_labels=1), dict(problem_type="multi_label_classification"), dict(problem_type="regression")):
        assert not {*names} & {*ends(tiny_bert(**no_classes))}


def test_of_a_model_of_ones_own_nothing_is_known():
    assert not ends(nn.Embedding(3, 2))


# --- what is refused, and its mend ----------------------------------------------------------------------------------------


def with_one(number, *, column="input_ids", rows=300):
    """Texts of which one has a number that others have not."""

    def put(row, index):
        if index != ROW:
            return row
        return row | {column: [*row[column][:-1], number] if isinstance(row[column], list) else number}

    data = text_data(rows).map(lambda row: row | {"token_type_ids": [0] * len(row["input_ids"])})
    return data.map(put, with_indices=True)


def too_long(rows=300):
    return text_data(rows).map(
        lambda row, index: {"input_ids": [7] * 40, "attention_mask": [1] * 40} if index == ROW else row, with_indices=True
    )


def truncated(row):
    return row | {name: row[name][:16] for name in ("input_ids", "attention_mask")}


def pad_all(examples):
    batch = pad(examples)
    if "token_type_ids" in examples[0]:
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        for row, example in zip(batch["token_type_ids"], examples, strict=True):
            row[: len(example["token_type_ids"])] = torch.tensor(example["token_type_ids"])
    return batch


def resized(model, data):
    model.resize_token_embeddings(BEYOND + 1)
    return model, data


CASES = {
    "id": (lambda: with_one(BEYOND), "'input_ids'.* from 0 to 49, got others .*resize_token_embeddings", resized),
    "negative id": (
        lambda: with_one(-BEYOND), "'input_ids' .* from 0 to 49, got others .*or tokenize with",
        lambda model, data: (model, text_data(300)),
    ),
    "type": (
        lambda: with_one(BEYOND, column="token_type_ids"), "'token_type_ids' .* from 0 to 1, .*remove_columns",
        lambda model, data: (model, data.remove_columns("token_type_ids")),
    ),
    "length": (
        too_long, "'input_ids' .* at most 16 tokens in a row, as many as .*truncation=True and max_length=16",
        lambda model, data: (model, data.map(truncated)),
    ),
    "class": (
        lambda: with_one(7, column="labels"), "'labels' .* from 0 to 1, or -100, .*Set num_labels to the number of classes",
        lambda model, data: (tiny_bert(num_labels=8), data),
    ),
    "negative class": (
        lambda: with_one(-1, column="labels"), "'labels' .* from 0 to 1, or -100, .*let them begin at 0",
        lambda model, data: (tiny_bert(num_labels=3), data.map(lambda row: {"labels": row["labels"] + 1})),
    ),
    "boolean": (
        lambda: text_data(300).cast_column("labels", Value("bool")),
        r"'labels' .* numbers of classes, got True .*cast_column\('labels', datasets.Value\('int64'\)\)",
        lambda model, data: (model, data.cast_column("labels", Value("int64"))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_anything_is_spent_and_trains_with_its_mend(tmp_path, case):
    made, message, mend = CASES[case]
    trainer = trainer_of(tmp_path, data=made())
    trainer.data_collator = pad_all
    with pytest.raises(ValueError, match=message) as refused:
        trainer.train()
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    # Neither the number nor its place: messages end in logs.
    assert not re.search(rf"{BEYOND}|{BEYOND:,}|\b{ROW}\b|\b40\b|\b7\b", str(refused.value))
    model, data = mend(tiny_bert(), made())
    mended = trainer_of(tmp_path, model=model, data=data, max_steps=1)
    mended.data_collator = pad_all
    mended.train()


def of_tokens(rows=200, *, label=1):
    data = text_data(rows).map(lambda row: {"labels": [0] * len(row["input_ids"])})
    return data.map(lambda row, index: {"labels": [*row["labels"][:-1], label]} if index == ROW else row, with_indices=True)


@pytest.mark.parametrize(("label", "is_refused"), [(1, False), (IGNORED, False), (2, True), (-1, True), (-101, True)])
def test_classes_of_tokens(label, is_refused):
    model, data = BertForTokenClassification(tiny_bert().config), of_tokens(label=label)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="0")
    collate = DataCollatorForTokenClassification(tokenizer)
    assert is_beyond(model, data, collate=collate) == is_refused
    assert not is_beyond(model, data, collate=collate, has_own_loss=True)


def words():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({str(number): number for number in range(50)}, unk_token="1"))


@pytest.mark.parametrize("name", ["gpt2-lm", "llama-lora", "t5-lm"])
@pytest.mark.parametrize(
    ("label", "is_refused"), [(VOCABULARY - 1, False), (IGNORED, False), (VOCABULARY, True), (-1, True)]
)
def test_labels_of_language_models(name, label, is_refused):
    data = Dataset.from_list([{"input_ids": [2, 3], "labels": [2, 3]}] * 3 + [{"input_ids": [2, 3], "labels": [2, label]}])
    assert is_beyond(build(name), data) == is_refused


def is_beyond(model, data, *, collate=default_data_collator, has_own_loss=False):
    try:
        refuse_values_beyond(model, data, collate=collate, has_own_loss=has_own_loss)
    except ValueError:
        return True
    return False


# --- what is not refused --------------------------------------------------------------------------------------------------


def test_what_the_collator_mends_trains(tmp_path):
    """Of some thousands of rows one is too long, or numbers begin at 1, and the collator of the user's knows that."""
    data = too_long().map(lambda row: {"labels": row["labels"] + 1})

    def collate(examples):
        cut = [{name: row[name][:16] for name in ("input_ids", "attention_mask")} for row in examples]
        return pad([row | {"labels": given["labels"] - 1} for row, given in zip(cut, examples, strict=True)])

    trainer = trainer_of(tmp_path, data=data, max_steps=1)
    trainer.data_collator = collate
    trainer.train()


def test_booleans_that_the_hosts_collator_makes_numbers_of_train(tmp_path):
    texts = text_data(30).map(lambda row: {name: row[name][:3] for name in ("input_ids", "attention_mask")})
    trainer = trainer_of(
        tmp_path, data=texts.cast_column("labels", Value("bool")).rename_column("labels", "label"), max_steps=1
    )
    trainer.data_collator = default_data_collator
    trainer.train()


@pytest.mark.parametrize("labels", [0.5, [1.0, 0.0], -3])
def test_targets_that_are_no_classes_are_not_looked_at(labels):
    kinds = {float: dict(num_labels=1), list: dict(problem_type="multi_label_classification"), int: dict(num_labels=1)}
    assert not is_beyond(tiny_bert(**kinds[type(labels)]), Dataset.from_list([{"input_ids": [2], "labels": labels}] * 3))


def padded_choices(rows):
    return {
        "input_ids": pad_sequence([torch.tensor(choice) for row in rows for choice in row["input_ids"]], batch_first=True)
    }


def test_choices_of_unequal_lengths_are_scanned():
    model = build("bert-choice")
    for ids, is_refused in (([[2, 3], [2]], False), ([[2, 3], [VOCABULARY]], True), ([[2], [3] * 21], True)):
        for rows in (data := [{"input_ids": [[2, 3], [2]]}, {"input_ids": ids}]), Dataset.from_list(data):
            assert is_beyond(model, rows, collate=padded_choices) == is_refused


# --- which rows are scanned -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "is_there"),
    [
        (lambda data: data.shuffle(seed=1), True),
        (lambda data: data.select(range(100, 200)), True),
        (lambda data: data.select(range(200, 300)), False),
        (lambda data: data.shuffle(seed=1).filter(lambda row: row["input_ids"][-1] == BEYOND), True),
        (lambda data: data.shuffle(seed=1).filter(lambda row: row["input_ids"][-1] != BEYOND), False),
        (lambda data: data.select([ROW + 1, 3, ROW, ROW - 1]), True),
        (lambda data: data.select([ROW + 1, 3, ROW - 1]), False),
        (lambda data: data.select([ROW + 1, ROW - 1, ROW - 1]), False),
        (lambda data: data.select([ROW, ROW - 1, ROW]), True),
        (lambda data: data.with_format("torch"), True),
        (lambda data: list(data), True),
        (lambda data: data.with_transform(lambda rows: rows), False),  # not read: it may make others of them
        (lambda data: Rows(data), False),
    ],
)
def test_the_rows_of_the_data_set_are_scanned_and_no_others(monkeypatch, chosen, is_there):
    monkeypatch.setattr(data_scan, "_ROWS_AT_ONCE", 64)
    assert is_beyond(tiny_bert(), chosen(with_one(BEYOND))) == is_there


def test_of_a_large_column_an_even_sample_is_scanned_and_said_to_be(monkeypatch, capsys):
    data = Dataset.from_dict({"input_ids": [[2] * 8] * 4096})
    monkeypatch.setattr(data_scan, "_ROWS_AT_ONCE", 16)
    assert not is_beyond(tiny_bert(), data)
    assert not capsys.readouterr().out
    seen, numbers = [], data_scan._found
    monkeypatch.setattr(data_scan, "_SCANNED", set())
    monkeypatch.setattr(data_scan, "MOST_NUMBERS", 4096 * 2)
    monkeypatch.setattr(data_scan, "_found", lambda *args: seen.append(found := numbers(*args)) or found)
    assert not is_beyond(tiny_bert(), data)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "The column 'input_ids' is large: one row in 4 was scanned for what the model cannot take."
    assert sum(len(each) for each in seen if len(each) == 128) == 4096 * 2
    blocks = [rows[0] for _, rows in data_scan._chunks(data.data.column("input_ids"), range(4096), name="")]
    assert blocks == list(range(0, 4096, 64))


def test_a_second_training_does_not_scan_again_unless_something_else_is_trained(tmp_path, monkeypatch):
    scans, beyond = [], data_scan._beyond_in_table
    monkeypatch.setattr(data_scan, "_beyond_in_table", lambda *args: scans.append(1) or beyond(*args))
    trainer = trained(trainer_of(tmp_path, max_steps=1))
    trainer.train()
    assert len(scans) == 1
    trainer_of(tmp_path / "larger", model=tiny_bert(vocab_size=60), max_steps=1).train()
    assert len(scans) == 2
    trainer_of(tmp_path / "fewer", data=text_data().select(range(20)), max_steps=1).train()
    assert len(scans) == 3
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        trainer_of(tmp_path / "smaller", model=tiny_bert(vocab_size=10), max_steps=1).train()


@pytest.mark.slow
def test_a_million_rows_take_no_more_than_two_seconds():
    import time

    import pyarrow

    ids = np.random.default_rng(0).integers(0, 50, size=64 * 10**6)
    column = pyarrow.ListArray.from_arrays(pyarrow.array(np.arange(0, len(ids) + 1, 64, dtype=np.int32)), pyarrow.array(ids))
    data = Dataset(pyarrow.table({"input_ids": column, "labels": ids[: 10**6] % 2}))
    model = tiny_bert(max_position_embeddings=64)
    for each in (data, data.shuffle(seed=0), data.shuffle(seed=0).select(range(8 * 10**5))):
        start = time.perf_counter()
        refuse_values_beyond(model, each, collate=default_data_collator, has_own_loss=False)
        assert time.perf_counter() - start < 2.0
