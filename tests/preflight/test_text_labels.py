"""Labels that are texts are refused for that reason before a step, and the line that the message gives trains."""

import re

import pytest
import torch
from datasets import Dataset, Value
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from doppler_hf import DopplerTrainer
from tests.support.refusals import refused
from tests.support.tiers import thorough
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import OfLogits, refused_training, trained, trainer_of

names = ["negative", "positive"]
WORDS = Tokenizer(WordLevel({"[PAD]": 0}, "[PAD]"))
PADDING = DataCollatorWithPadding(PreTrainedTokenizerFast(tokenizer_object=WORDS, pad_token="[PAD]"))


def texts(column="labels", label=lambda number: names[number]):
    """Rows whose label is a text."""
    rows = [{name: value for name, value in row.items() if name != "labels"} for row in text_data()]
    return Dataset.from_list([row | {column: label(each)} for row, each in zip(rows, text_data()["labels"], strict=True)])


def of_one_length(data):
    def filled(row):
        return {name: (row[name] + [0] * 8)[:8] for name in ("input_ids", "attention_mask")}

    return data.map(filled)


def with_names(**options):
    return tiny_bert(
        id2label=dict(enumerate(names)), label2id={name: number for number, name in enumerate(names)}, **options
    )


class OwnLoss(DopplerTrainer):
    """Its loss asks for the label by a name of its own."""

    name = "labels"

    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop(self.name)
        return F.cross_entropy(model(**inputs).logits, labels, reduction="none")


class Sentiment(OwnLoss):
    name = "sentiment"


class OwnModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        return self.head(self.table(input_ids).mean(dim=1))


def labelled(examples):
    return pad([row | {"labels": 0} for row in examples]) | {"labels": torch.tensor([row["labels"] for row in examples])}


# What is trained → data, options, and words of the mend.
CASES = {
    "a tokenizer's collator": (texts, dict(collator=PADDING), r"class_encode_column\('labels'\)"),
    "label, not labels": (lambda: texts("label"), dict(collator=PADDING), r"class_encode_column\('label'\)"),
    "the default collator": (lambda: of_one_length(texts("label")), dict(collator=default_data_collator), "class_enc"),
    "which leaves it out": (lambda: of_one_length(texts()), dict(collator=default_data_collator), "class_encode_column"),
    "a collator of one's own": (texts, dict(collator=pad), r"class_encode_column\('labels'\)"),
    "a loss of one's own": (texts, dict(collator=PADDING, cls=OwnLoss), r"class_encode_column\('labels'\)"),
    "both": (texts, dict(collator=pad, cls=OwnLoss), r"class_encode_column\('labels'\)"),
    "a name of one's own": (
        lambda: texts("sentiment"), dict(collator=PADDING, cls=Sentiment, label_names=["sentiment"]), r"Column 'sentiment'",
    ),
    "a module of one's own": (
        texts, dict(collator=PADDING, cls=OfLogits, model=OwnModel, label_names=["labels"]), "class_encode_column",
    ),
    "large texts": (lambda: texts().cast_column("labels", Value("large_string")), dict(collator=PADDING), "class_encode"),
    "numbers as texts": (lambda: texts(label=str), dict(collator=PADDING), r"cast_column\('labels', Value\('int64'\)\)"),
    "whole numbers for a regression": (
        lambda: texts(label=str), dict(collator=PADDING, model=lambda: tiny_bert(num_labels=1)), r"Value\('float32'\)",
    ),
    "a list of numbers as texts": (
        lambda: [*texts(label=lambda number: f"{number / 2}")],
        dict(collator=PADDING, model=lambda: tiny_bert(num_labels=1)),
        r"float\(row\['labels'\]\)",
    ),
    "a model that names its classes": (
        texts, dict(collator=PADDING, model=with_names), r"map\(lambda row: \{'labels': model\.config\.label2id\[row\['lab",
    ),
    "a list": (lambda: [*texts()], dict(collator=PADDING), r"train_dataset = \[row \| "),
    "a list, with names": (lambda: [*texts()], dict(collator=PADDING, model=with_names), r"label2id\[row\['labels'\]\]"),
    "a data set of torch's": (lambda: Rows(texts()), dict(collator=PADDING), r"__getitem__"),
    "several for a row": (
        lambda: texts(label=lambda number: names[: number + 1]), dict(collator=labelled),
        r"problem_type='multi_label_classification'",
    ),
    "one for each token": (
        lambda: texts().map(lambda row: {"labels": [row["labels"]] * len(row["input_ids"])}),
        dict(collator=pad, model=lambda: BertForTokenClassification(with_names().config)),
        r"\{'labels': \[model\.config\.label2id\[each\] for each in row\['labels'\]\]\}",
    ),
}  # fmt: skip
FEW = [
    "a tokenizer's collator",
    "numbers as texts",
    "whole numbers for a regression",
    "a loss of one's own",
    "a name of one's own",
    "a list",
    "several for a row",
]


def mended(message, data, model):
    """Return the data set as the message makes it."""
    line = re.search(r"Convert the texts to numbers: (.*?)(?:\. Do that before|, where names is|, with Value|\.$)", message)[
        1
    ]
    if line.startswith("return row"):
        change = eval(
            "lambda row: " + line.removeprefix("return ").removesuffix(" from its __getitem__"), globals() | {"model": model}
        )
        return Rows([change(row) for row in data.rows])
    return eval(line.removeprefix("train_dataset = "), globals() | {"train_dataset": data, "model": model})


def with_numbers(examples):
    """Collate token labels, which the collators above do not pad."""
    longest = max(len(row["labels"]) for row in examples)
    labels = [row["labels"] + [-100] * (longest - len(row["labels"])) for row in examples]
    return pad([row | {"labels": 0} for row in examples]) | {"labels": torch.tensor(labels)}


@pytest.mark.parametrize("case", [*FEW, *thorough(*[case for case in CASES if case not in FEW])])
def test_text_is_named_as_the_reason_and_the_mend_trains(tmp_path, case):
    made, options, words = CASES[case]
    make, data = options.get("model", tiny_bert), made()
    model = make()
    message = refused_training(
        tmp_path, "values-out-of-range", data=data, match="got text in some rows", **options | {"model": model}
    )
    assert re.search(words, message)
    assert not set(re.findall(r"\w+", message)) & {*names, "0", "1"}  # messages end up in logs
    options = dict(options)
    if "problem_type" in message:
        options["model"] = model = tiny_bert(problem_type="multi_label_classification")
    if case == "one for each token":
        options["collator"] = with_numbers
    numbers = mended(message, data, model)
    if case == "which leaves it out":
        numbers = numbers.rename_column("labels", "label")
    trained(trainer_of(tmp_path / "mended", data=numbers, **options | {"model": model}, max_steps=1))


def test_scores_that_are_texts_stay_the_scores_that_they_are(tmp_path):
    scores = texts(label=lambda number: f"{0.25 + number / 2}")
    options = dict(collator=PADDING, model=tiny_bert(num_labels=1))
    message = refused_training(tmp_path, "values-out-of-range", data=scores, match="got text in some rows", **options)
    assert {*mended(message, scores, None)["labels"]} == {0.25, 0.75}


WRITTEN = {
    "nan": ["0.5", "nan", "1.5"],
    "empty": ["0.5", "", "1.5"],
    "whole": ["2", "NaN", "1"],
    "with blanks": [" 0.5", " ", "1.5"],
    "all of the first rows": ["", "0.5"],
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("kind", ["table", "list"])
def test_rows_without_a_number_among_scores_that_are_texts_are_left_out(tmp_path, written, kind):
    scores = texts(label=lambda number: None)
    values = [WRITTEN[written][row % len(WRITTEN[written])] for row in range(len(scores))]
    scores = scores.remove_columns("labels").add_column("labels", values)
    options = dict(collator=PADDING, model=tiny_bert(num_labels=1))
    made = scores if kind == "table" else [*scores]
    message = refused_training(tmp_path, "values-out-of-range", data=made, match="got text in some rows", **options)
    data = mended(message, made, None)
    found = data["labels"][:] if kind == "table" else [row["labels"] for row in data]
    assert found == [float(each) for each in values if each.strip().lower() not in ("", "nan")]
    trained(trainer_of(tmp_path / "mended", data=data, **options, max_steps=1))


@pytest.mark.parametrize("kind", ["table", "list"])
def test_classes_that_are_written_as_floats_become_whole_numbers(tmp_path, kind):
    made = texts(label=lambda number: f"{number}.0")
    made = made if kind == "table" else [*made]
    message = refused_training(tmp_path, "values-out-of-range", data=made, collator=PADDING)
    data = mended(message, made, None)
    assert {*(data["labels"] if kind == "table" else [row["labels"] for row in data])} == {0, 1}
    trained(trainer_of(tmp_path / "mended", data=data, collator=PADDING, max_steps=1))


def test_a_data_set_of_ones_own_is_told_to_leave_out_rows_without_a_number(tmp_path):
    options = dict(collator=PADDING, model=tiny_bert(num_labels=1))
    message = refused_training(
        tmp_path,
        "values-out-of-range",
        data=Rows(texts(label=lambda number: "nan")),
        match="got text in some rows",
        **options,
    )
    assert "float(row['labels'])} from its __getitem__. Leave out the rows without a number." in message


def test_behind_a_transform_it_says_where_to_change_it(tmp_path):
    data = text_data().with_transform(lambda rows: rows | {"labels": [names[each] for each in rows["labels"]]})
    message = refused_training(tmp_path, "values-out-of-range", data=data, collator=PADDING)
    assert "from its transform" in message
    # The transform may also be what makes numbers of the texts.
    data = texts().with_transform(lambda rows: rows | {"labels": [names.index(each) for each in rows["labels"]]})
    trained(trainer_of(tmp_path / "mended", data=data, collator=PADDING, max_steps=1))


def test_texts_that_do_no_harm_train(tmp_path):
    """The collator makes numbers of them, or the loss is the user's own and needs none."""

    def from_texts(examples):
        return pad([row | {"labels": names.index(row["labels"])} for row in examples])

    trained(trainer_of(tmp_path / "numbers", data=texts(), collator=from_texts, max_steps=1))

    class Length(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            return F.cross_entropy(logits, inputs["input_ids"][:, 0] % 2, reduction="none")

    data = of_one_length(texts())
    trained(trainer_of(tmp_path / "own", data=data, collator=default_data_collator, cls=Length, max_steps=1))


def test_text_in_other_columns_is_named_too(tmp_path):
    data = text_data().map(lambda row: {"title": "some words", "author": "me"})
    options = dict(collator=PADDING, remove_unused_columns=False)
    message = refused_training(tmp_path, "text-columns", data=data, **options)
    line = re.search(r"train_dataset\.(remove_columns\(\[.*?\]\))", message)[1]
    trained(trainer_of(tmp_path / "mended", data=eval(f"data.{line}"), max_steps=1, **options))


def test_evaluation_sets_too(tmp_path):
    options = dict(collator=PADDING, eval_strategy="steps", eval_steps=1, max_steps=1)
    with refused("values-out-of-range", match=r"eval_dataset\.class_encode_column"):
        trainer_of(tmp_path, evaluated=texts(), **options).train()
    trained(trainer_of(tmp_path / "mended", evaluated=texts().class_encode_column("labels"), **options))
