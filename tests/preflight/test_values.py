"""What the model cannot take is refused before anything is spent, and what it can take is not: its own forward decides."""

import copy
import re

import datasets
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.nn import functional as F
from transformers import default_data_collator

from doppler_hf import DopplerTrainer
from doppler_hf.preflight import values
from doppler_hf.preflight.limits import limits_of
from doppler_hf.preflight.values import refuse_out_of_range, refuse_uncollated
from doppler_hf.privacy import LEDGER_NAME
from tests.support.models import CLASSES, MODELS, VOCABULARY, build
from tests.support.refusals import refused
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import trainer_of

COLUMNS = ("input_ids", "token_type_ids", "decoder_input_ids", "labels", "label")
TEXT = [name for name in MODELS if not name.startswith(("vit", "resnet", "bit"))]
ABSOLUTE = [name for name in TEXT if not name.startswith(("llama", "qwen", "t5"))]
BEYOND, ROW = 4321, 137


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
def test_numbers_and_lengths_below_the_end_are_taken_and_the_end_is_not(name):
    model = build(name).eval()
    numbers, lengths = ends(model), ends(model, kind="lengths")
    assert numbers["input_ids"] == VOCABULARY
    assert ("token_type_ids" in numbers) == ("bert" in name and not name.startswith("distil"))
    assert ("decoder_input_ids" in numbers) == name.startswith("t5")
    for column in numbers.keys() & {"input_ids", "token_type_ids", "decoder_input_ids"}:
        others = dict(input_ids=torch.full((1, 3), 2))
        forward(model, **others | {column: torch.full((1, 3), numbers[column] - 1)})
        with pytest.raises(IndexError):
            forward(model, **others | {column: torch.full((1, 3), numbers[column])})
    assert set(lengths) == ({"input_ids"} if name in ABSOLUTE else set())
    forward(model, input_ids=torch.full((1, lengths.get("input_ids", 100) - 1), 2))
    if name in ABSOLUTE:
        with pytest.raises((IndexError, RuntimeError)):
            forward(model, input_ids=torch.full((1, lengths["input_ids"]), 2))


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
    model = build("roberta")
    model.get_input_embeddings = lambda: nn.Parameter(torch.zeros(3, 2))  # as Perceiver's
    assert "input_ids" not in ends(model)


# --- what is refused, and its fix ----------------------------------------------------------------------------------------


def with_one(number, *, column="input_ids", rows=300):
    """Texts of which one has a number that others have not."""

    def put(row, index):
        if index != ROW:
            return row
        return row | {column: [*row[column][:-1], number] if isinstance(row[column], list) else number}

    data = text_data(rows).map(lambda row: row | {"token_type_ids": [0] * len(row["input_ids"])})
    return data.map(put, with_indices=True)


def with_tokens(tokens, rows=300):
    """Texts of which one has these tokens."""
    mask = [1] * len(tokens)
    return text_data(rows).map(
        lambda row, index: {"input_ids": tokens, "attention_mask": mask} if index == ROW else row, with_indices=True
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
    "id": (lambda: with_one(BEYOND), "'input_ids'.* 49; .*resize_token_embeddings", resized),
    "negative id": (
        lambda: with_one(-BEYOND), "'input_ids' .* 49; ",
        lambda model, data: (model, text_data(300)),
    ),
    "type": (
        lambda: with_one(BEYOND, column="token_type_ids"), "'token_type_ids' .*remove_columns",
        lambda model, data: (model, data.remove_columns("token_type_ids")),
    ),
    "length": (
        lambda: with_tokens([7] * 40),
        "'input_ids' .* 16 .*truncation=True and max_length=16",
        lambda model, data: (model, data.map(truncated)),
    ),
    "class": (
        lambda: with_one(7, column="labels"), "'labels' .*-100; .*num_labels",
        lambda model, data: (tiny_bert(num_labels=8), data),
    ),
    "negative class": (
        lambda: with_one(-1, column="labels"),
        r"'labels' .*train_dataset\.filter\(lambda row: row\['labels'\] >= 0\)\.",
        lambda model, data: (model, data.filter(lambda row: row["labels"] >= 0)),
    ),
    "boolean": (
        lambda: text_data(300).cast_column("labels", datasets.Value("bool")),
        r"'labels' .*True .*cast_column\('labels', datasets.Value\('int64'\)\)",
        lambda model, data: (model, data.cast_column("labels", datasets.Value("int64"))),
    ),
    "booleans in lists": (
        lambda: text_data(300).map(lambda row: {"labels": [row["labels"] == 1, True]}),
        r"'labels' .*True .*datasets.Sequence\(datasets.Value\('float32'\)\)",
        lambda model, data: (model, data.cast_column("labels", datasets.Sequence(datasets.Value("float32")))),
    ),
    "empty text": (
        lambda: with_tokens([]),
        r"'input_ids' .*filter\(lambda row: len\(row\['input_ids'\]\) > 0\)",
        lambda model, data: (model, data.filter(lambda row: len(row["input_ids"]) > 0)),
    ),
    "words": (
        lambda: text_data(300).cast_column("labels", datasets.Value("string")),
        r"'labels' .*train_dataset\.cast_column\('labels', Value\('int64'\)\)",
        lambda model, data: (model, data.cast_column("labels", datasets.Value("int64"))),
    ),
    "an id of torch's data set": (
        lambda: Rows(with_one(BEYOND)), "'input_ids' .* 49; ",
        resized,
    ),
    "amounts": (
        lambda: text_data(300).map(lambda row: {"labels": 1.5 + row["labels"]}), "'labels' .*num_labels",
        lambda model, data: (tiny_bert(num_labels=1), data),
    ),
    "ids of classes": (
        lambda: text_data(300).map(lambda row: {"labels": 100 * (1 + row["labels"])}), "Number the classes from 0",
        lambda model, data: (model, data.map(lambda row: {"labels": [100, 200].index(row["labels"])})),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_anything_is_spent_and_trains_with_its_mend(tmp_path, case):
    made, mend, fix = CASES[case]
    trainer = trainer_of(tmp_path, data=made(), collator=pad_all)
    with refused("values-out-of-range", match=mend) as refusal:
        trainer.train()
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    # Neither the number nor its place: messages end in logs.
    assert not re.search(rf"{BEYOND}|{BEYOND:,}|\b{ROW}\b|\b40\b|\b7\b", str(refusal.value))
    model, data = fix(tiny_bert(), made())
    trainer_of(tmp_path, model=model, data=data, collator=pad_all, max_steps=1).train()


def test_so_it_is_in_a_data_set_to_evaluate(tmp_path):
    evaluated = {"one": text_data(24, seed=1), "two": with_one(-1, column="labels")}
    trainer = trainer_of(tmp_path, evaluated=evaluated, eval_strategy="steps", eval_steps=1, max_steps=1)
    with refused("values-out-of-range", match=r"eval_dataset\.filter\(lambda row: row\['labels'\]"):
        trainer.train()
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    evaluated["two"] = evaluated["two"].map(lambda row: {"labels": None if row["labels"] < 0 else row["labels"]})
    with refused("missing-labels", match=r"eval_dataset\.filter\(lambda row: .* not None"):
        trainer.train()
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    evaluated["two"] = evaluated["two"].filter(lambda row: row["labels"] is not None)
    trainer.train()


def test_a_label_that_is_missing_behind_a_transform_is_refused_unless_the_transform_has_one(tmp_path):
    data = text_data(300).map(lambda row, index: {"labels": None if index == ROW else row["labels"]}, with_indices=True)
    for lacking in (data, data.map(lambda row: {"labels": None})):  # one label, and all
        with refused("missing-labels", match="with_transform"):
            trainer_of(tmp_path, data=lacking.with_transform(lambda rows: rows), max_steps=1).train()
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    mended = data.filter(lambda row: row["labels"] is not None).with_transform(lambda rows: rows)
    trainer_of(tmp_path, data=mended, max_steps=1).train()
    filled = data.with_transform(lambda rows: rows | {"labels": [label or 0 for label in rows["labels"]]})
    trainer_of(tmp_path, data=filled, max_steps=1).train()


def test_whole_numbers_of_several_classes_are_refused_and_train_as_the_floats_that_the_mend_makes(tmp_path):
    ints = text_data().map(lambda row: {"labels": [row["labels"], 1]}, remove_columns="labels")
    floats = ints.cast_column("labels", datasets.Sequence(datasets.Value("float32")))
    options = dict(eval_strategy="steps", eval_steps=1, max_steps=1)
    for train, evaluated, name in ((ints, floats, "train_dataset"), (floats, ints, "eval_dataset")):
        model = tiny_bert(problem_type="multi_label_classification")
        trainer = trainer_of(tmp_path, data=train, evaluated=evaluated, collator=labelled, model=model, **options)
        mend = re.escape(f"{name}.cast_column('labels', datasets.Sequence(datasets.Value('float32')))")
        with refused("values-out-of-range", match=mend):
            trainer.train()
        assert not (tmp_path / "out" / LEDGER_NAME).exists()
        trainer.train_dataset, trainer.eval_dataset = floats, datasets.Dataset.from_list([*floats], features=floats.features)
        trainer.train()
        (tmp_path / "out" / LEDGER_NAME).unlink()


@pytest.mark.parametrize("length", [-1, 2])
def test_unknown_labels_of_several_classes_are_refused_and_are_left_out_by_a_loss_of_ones_own(tmp_path, length):
    feature = datasets.Sequence(datasets.Value("float32"), length=length)
    data = text_data().map(lambda row: {"labels": [row["labels"], 0.5]}, remove_columns="labels")
    data = data.cast_column("labels", feature)
    unknown = data.map(lambda row: {"labels": [row["labels"][0], -1.0]}).cast_column("labels", feature)
    options = dict(model=tiny_bert(problem_type="multi_label_classification"), collator=labelled, max_steps=1)
    trainer = trainer_of(tmp_path, data=unknown, **options)
    with refused("values-out-of-range", match="expected numbers from 0.0 to 1.0 for each class"):
        trainer.train()
    trainer_of(tmp_path, data=data, **options).train()
    trainer_of(tmp_path, data=unknown, cls=OfWhatIsKnown, **options).train()


class OfWhatIsKnown(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        of_each = F.binary_cross_entropy_with_logits(model(**inputs).logits, labels, reduction="none")
        return (of_each * (labels >= 0)).mean(dim=1)


def labelled(examples):
    return pad(examples) | {"labels": torch.tensor([row["labels"] for row in examples])}


def is_beyond(model, data, *, collate=default_data_collator, has_own_loss=False):
    try:
        refuse_out_of_range(model, data, collate=collate, has_own_loss=has_own_loss)
    except ValueError:
        return True
    return False


# --- which rows are scanned -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "is_there"),
    [
        (lambda data: data.select(range(100, 200)), True),
        (lambda data: data.select(range(200, 300)), False),
        (lambda data: data.shuffle(seed=1).filter(lambda row: row["input_ids"][-1] == BEYOND), True),
        (lambda data: data.shuffle(seed=1).filter(lambda row: row["input_ids"][-1] != BEYOND), False),
        (lambda data: data.select([ROW + 1, 3, ROW, ROW - 1]), True),
        (lambda data: data.select([ROW + 1, 3, ROW - 1]), False),
        (lambda data: list(data), True),
        (lambda data: data.with_transform(lambda rows: rows), True),
        (lambda data: data.with_transform(lambda rows: rows | {"input_ids": [[1, 2]] * len(rows["input_ids"])}), False),
        (lambda data: text_data(300).with_transform(lambda rows: data[:]), True),
        (lambda data: Rows(data), True),
        (lambda data: Rows(data.select(range(200, 300))), False),
    ],
)
def test_the_rows_of_the_data_set_are_scanned_and_no_others(monkeypatch, chosen, is_there):
    monkeypatch.setattr(values, "_ROWS_AT_ONCE", 64)
    assert is_beyond(tiny_bert(), chosen(with_one(BEYOND))) == is_there


class Counting(Rows):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("seconds", "reads"), [(10.0, 301), (-1.0, 1)])
def test_rows_that_a_data_set_makes_are_read_by_chance_as_long_as_there_is_time(monkeypatch, seconds, reads):
    monkeypatch.setattr(values, "MOST_SECONDS_OF_ROWS", seconds)
    data = Counting(text_data(300))
    assert not is_beyond(tiny_bert(), data)
    assert data.reads == reads  # the first tells the columns


def test_labels_in_words_are_taken_where_the_collator_makes_numbers_of_them():
    words = text_data(10).cast_column("labels", datasets.Value("string"))
    assert is_beyond(tiny_bert(), words, collate=pad_all)
    assert not is_beyond(
        tiny_bert(), words, collate=lambda rows: {"labels": torch.tensor([int(row["labels"]) for row in rows])}
    )
    # The default collator leaves them out, or fails.
    for named in (words, words.rename_column("labels", "label")):
        with refused("values-out-of-range", match=r"cast_column\('label"):
            refuse_out_of_range(tiny_bert(), named, collate=default_data_collator, has_own_loss=False)
    assert not is_beyond(tiny_bert(), words.class_encode_column("labels"))


def test_an_empty_text_is_taken_where_the_collator_adds_a_token_and_among_others_of_an_evaluation():
    empty = with_tokens([])
    assert not is_beyond(tiny_bert(), empty, collate=lambda rows: {"input_ids": torch.ones(len(rows), 3)})
    assert not is_beyond(tiny_bert(), empty, collate=lambda rows: {"inputs_embeds": torch.ones(len(rows), 3, 16)})
    refuse_out_of_range(tiny_bert(), empty, collate=default_data_collator, has_own_loss=False, name="eval_dataset")


TOKENIZER = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0}, "[PAD]")), pad_token="[PAD]")


def labelled_tokens(labels):
    """Return rows of five tokens with a label for each, and one with these labels."""
    row = {"input_ids": [2, 3, 4, 5, 6], "labels": ["O", "A", "B", "A", "O"] if "A" in labels else [-100, 0, 1, 0, -100]}
    return datasets.Dataset.from_list([*[row] * 9, row | {"labels": labels}])


def of_tokens(tmp_path, data, collator=None, *, classes=2):
    model = hf.BertForTokenClassification(tiny_bert(num_labels=classes).config)
    collator = collator or hf.DataCollatorForTokenClassification(TOKENIZER)
    return trainer_of(tmp_path, model=model, data=data, collator=collator, max_steps=1)


@pytest.mark.parametrize(
    ("labels", "code"),
    [
        ([0, 1], "labels-of-other-length"),
        ([], "labels-of-other-length"),
        ([0] * 7, "labels-of-other-length"),
        ([0, 1, None, 0, 1], "missing-token-labels"),
        ([-1, 0, 1, 0, 1], "values-out-of-range"),
    ],
    ids=str,
)
def test_labels_of_tokens_are_one_number_for_each(tmp_path, labels, code):
    for data, name in ((labelled_tokens(labels), "train"), (labelled_tokens([0] * 5), "eval")):
        trainer = of_tokens(tmp_path, data)
        if name == "eval":
            trainer.args.eval_strategy, trainer.eval_dataset = hf.IntervalStrategy.EPOCH, labelled_tokens(labels)
        with refused(code, match=f"'labels' of {name}"):
            trainer.train()
    assert not (tmp_path / "out" / LEDGER_NAME).exists()
    of_tokens(tmp_path, labelled_tokens([-100, 0, 1, -100, -100])).train()  # the fix


def test_names_of_labels_of_tokens_are_made_numbers_as_the_message_says(tmp_path):
    data = labelled_tokens(["O", "A", "B", "A", "O"])
    trainer = of_tokens(tmp_path, data)
    with refused("values-out-of-range", match=r"train_dataset\.map\(lambda row: .*") as refusal:
        trainer.train()
    fix = re.search(r"train_dataset(\.map\(.*\)), where names is the list", str(refusal.value))[1]
    of_tokens(tmp_path, eval(f"data{fix}", {"data": data, "names": ["O", "A", "B"]}), classes=3).train()
    trainer = of_tokens(tmp_path, data)
    trainer.model.config.label2id = {"O": 0, "A": 1, "B": 1}
    with refused("values-out-of-range", match=r"model\.config\.label2id") as refusal:
        trainer.train()
    fix = re.search(r"train_dataset(\.map\(.*\))\.", str(refusal.value))[1]
    of_tokens(tmp_path, eval(f"data{fix}", {"data": data, "model": trainer.model})).train()


def test_rows_are_as_before_the_checks_if_a_collator_changes_them(tmp_path):
    """Such as one that takes a column out of each row, or fills up a list in place."""

    def collate(rows):
        torch.rand(1)
        for row in rows:
            row["labels"] += [-100] * (len(row["input_ids"]) - len(row["labels"]))
        return {name: torch.tensor([row.pop(name) for row in rows]) for name in ("input_ids", "labels")}

    rows = [{"input_ids": [*range(5)], "labels": [99, 1]} for _ in range(4)]
    before, numbers = copy.deepcopy(rows), torch.get_rng_state()
    with refused("values-out-of-range"):
        refuse_out_of_range(of_tokens(tmp_path, labelled_tokens([0] * 5)).model, rows, collate=collate, has_own_loss=False)
    assert rows == before
    assert torch.equal(torch.get_rng_state(), numbers)


def test_a_collator_may_make_labels_of_tokens_out_of_labels_of_words(tmp_path):
    def collate(rows):
        spread = [[-100, row["labels"][0], row["labels"][-1], -100, -100] for row in rows]
        return {"input_ids": torch.tensor([row["input_ids"] for row in rows]), "labels": torch.tensor(spread)}

    of_tokens(tmp_path, labelled_tokens([0, 1]), collate).train()


def test_rows_that_are_joined_to_one_are_not_said_to_be_left_out():
    def joined(rows):
        return {"input_ids": torch.cat([torch.tensor(row["input_ids"]) for row in rows])[None]}

    refuse_uncollated([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}] * 20, collate=joined)
    with refused("rows-left-out"):
        refuse_uncollated(
            [{"input_ids": [1, 2]}, {"input_ids": [0, 5]}] * 20,
            collate=lambda rows: {"input_ids": torch.tensor([row["input_ids"] for row in rows if row["input_ids"][0]])},
        )
