"""Rows of NaN or without tokens are refused where a loss of one's own has no value for them; what the mend leaves trains."""

import math
import re

import numpy
import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from doppler_hf import DopplerTrainer
from doppler_hf.privacy.batching.columns import first_empty, rows_not_finite
from tests.support.tiers import thorough
from tests.support.tiny import Rows, tiny_bert
from tests.support.trainers import checked_trainer_of, refused_training, trained

NAN, ROW = math.nan, 17


class Scores(nn.Module):
    """Three scores of a row of four numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels=None):
        return self.layer(x)


def of_loss(function):
    class Mine(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            return function(model(inputs["x"]), inputs["labels"])

    return Mine


@of_loss
def squares(scores, labels):
    return (scores[:, 0] - labels) ** 2


@of_loss
def plain(scores, labels):
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none").mean(dim=1)


@of_loss
def masked(scores, labels):
    is_known = ~labels.isnan()
    found = F.binary_cross_entropy_with_logits(scores, labels.nan_to_num(nan=0.0), reduction="none")
    return (found * is_known).sum(dim=1) / is_known.sum(dim=1)


@of_loss
def masked_if_any(scores, labels):
    is_known = ~labels.isnan()
    found = F.binary_cross_entropy_with_logits(scores, labels.nan_to_num(nan=0.0), reduction="none")
    return (found * is_known).sum(dim=1) / is_known.sum(dim=1).clamp(min=1)


def numbers(*, of_labels, **changed):
    """Return rows with numbers as inputs; one row in the middle is changed."""
    drawn = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [dict(x=x, labels=of_labels(place)) for place, x in enumerate(drawn)]
    rows[ROW] |= changed
    return rows


def score(place):
    return place / 24


def several(place):
    return [float(place % 2), 1.0, 0.0]


def collated(rows):
    return {name: torch.tensor(numpy.stack([row[name] for row in rows]), dtype=torch.float32) for name in ("x", "labels")}


def of_tuples(rows):
    return dict(zip(("x", "labels"), map(torch.stack, zip(*rows, strict=True)), strict=True))


def tensors(rows):
    return TensorDataset(*[torch.tensor([row[name] for row in rows]) for name in ("x", "labels")])


SCORES = numbers(of_labels=score, labels=NAN)
IN_ALL = numbers(of_labels=several, labels=[NAN] * 3)
# What is refused → loss, data, code, and the rows that the mend keeps.
CASES = {
    "a score": (squares, lambda: Dataset.from_list(SCORES), "missing-labels", r"isfinite\(row\['labels'\]\)\.all"),
    "a score of many": (squares, lambda: Dataset.from_list(SCORES * 2), "missing-labels", "all"),
    "a shuffled table": (squares, lambda: Dataset.from_list(SCORES).shuffle(seed=3), "missing-labels", "all"),
    "in torch's format": (squares, lambda: Dataset.from_list(SCORES).with_format("torch"), "missing-labels", "all"),
    "a list": (squares, lambda: [*SCORES], "missing-labels", r"Subset\("),
    "a transform": (squares, lambda: Dataset.from_list(SCORES).with_transform(lambda rows: rows), "missing-labels", "Sub"),
    "a data set of torch's": (squares, lambda: Rows(SCORES), "missing-labels", r"Subset\("),
    "tensors": (squares, lambda: tensors(SCORES), "numbers-not-finite", r"row\[1\]"),
    "one of several": (
        plain, lambda: Dataset.from_list(numbers(of_labels=several, labels=[NAN, 1.0, 0.0])), "missing-labels", r"\.all\(\)",
    ),
    "each of several": (masked, lambda: Dataset.from_list(IN_ALL), "missing-labels", r"\.any\(\)"),
    "each of several, and one of several": (
        masked,
        lambda: Dataset.from_list([*IN_ALL, *numbers(of_labels=several, labels=[NAN, 1.0, 0.0])]),
        "missing-labels",
        r"\.any\(\)",
    ),
    "an input": (
        squares, lambda: Dataset.from_list(numbers(of_labels=score, x=[1.0, math.inf, 0.0, 0.0])), "numbers-not-finite",
        "'x'",
    ),
    "all": (
        squares, lambda: Dataset.from_list(numbers(of_labels=lambda place: score(place) if place > 10 else NAN)),
        "missing-labels", "all",
    ),
}  # fmt: skip
FEW = ["a score", "a list", "one of several", "each of several, and one of several", "an input"]


def mended(message, data):
    """Return the data set as the message makes it."""
    line = re.search(r"(?:Remove them|fill in a value|Leave them out): (.*)\.\n", message + "\n")[1]
    return eval(line, {"train_dataset": data, "numpy": numpy, "torch": torch})


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")  # NumPy's, of torch's tensors
@pytest.mark.parametrize("case", [*FEW, *thorough(*[case for case in CASES if case not in FEW])])
def test_rows_of_nan_are_refused_and_train_without_them(tmp_path, case):
    cls, make, code, words = CASES[case]
    data = make()
    options = dict(cls=cls, collator=of_tuples if case == "tensors" else collated)
    message = refused_training(tmp_path, code, data=data, model=Scores(), match=words, **options)
    assert not {"17", "24"} & {*re.findall(r"\d+", message)}  # neither which rows nor how many: messages end in logs
    kept = mended(message, data)
    assert 8 < len(kept) < len(data)
    trained(checked_trainer_of(tmp_path / "mended", data=kept, model=Scores(), max_steps=1, **options))


@pytest.mark.parametrize(
    ("cls", "labels"), [(masked, [NAN, 1.0, 0.0]), (masked_if_any, [NAN] * 3)], ids=["some", "all of a row"]
)
def test_a_loss_that_leaves_out_what_is_nan_trains(tmp_path, cls, labels):
    for wrap in (Dataset.from_list, Rows):
        data = wrap(numbers(of_labels=several, labels=labels))
        options = dict(data=data, model=Scores(), cls=cls, collator=collated, max_steps=1)
        trained(checked_trainer_of(tmp_path / wrap.__name__, **options))


def test_an_unused_column_may_have_what_it_likes(tmp_path):
    rows = [row | {"note": NAN, "tags": []} for row in numbers(of_labels=score)]
    options = dict(model=Scores(), cls=squares, collator=collated, remove_unused_columns=False, max_steps=1)
    trained(checked_trainer_of(tmp_path, data=Dataset.from_list(rows), **options))


def test_a_label_that_is_nan_is_refused_in_rows_without_a_table_too(tmp_path):
    """A model of Transformers, which computes its own loss."""
    rows = [dict(input_ids=[5, 6, 7], labels=score(place)) for place in range(24)]
    rows[ROW] |= dict(labels=NAN)
    options = dict(collator=None, max_steps=1)
    message = refused_training(tmp_path, "missing-labels", data=Rows(rows), model=tiny_bert(num_labels=1), **options)
    kept = mended(message.replace(". Or change what its rows return", ""), Rows(rows))
    assert len(kept) == 23
    trained(checked_trainer_of(tmp_path / "mended", data=kept, model=tiny_bert(num_labels=1), **options))


# --- rows without tokens ---


class Pairs(nn.Module):
    """The mean of a text and the first token of another, which a text without tokens does not have."""

    def __init__(self, of_other=lambda found: found[:, 0]):
        super().__init__()
        self.table, self.head, self.of_other = nn.Embedding(50, 4), nn.Linear(8, 2), of_other

    def forward(self, input_ids, input_ids_b, labels=None):
        return self.head(torch.cat([self.table(input_ids).mean(dim=1), self.of_other(self.table(input_ids_b))], dim=1))


class OfPairs(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs), labels, reduction="none")


def pairs(*, at=ROW):
    generator = numpy.random.default_rng(0)
    rows = [
        {name: generator.integers(5, 50, 4).tolist() for name in ("input_ids", "input_ids_b")} | {"labels": place % 2}
        for place in range(24)
    ]
    rows[at]["input_ids_b"] = []
    return rows


def padded(rows):
    """Pad with the token 0 to four tokens at most, and a row that is alone to what it has."""
    batch = {"labels": torch.tensor([row["labels"] for row in rows])}
    for name in ("input_ids", "input_ids_b"):
        texts = [torch.tensor(row[name], dtype=torch.long) for row in rows]
        batch[name] = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return batch


FAILS_OR_IS_NAN = {"fails": lambda found: found[:, 0], "NaN": lambda found: found.mean(dim=1)}


@pytest.mark.parametrize("at", [0, *thorough(ROW, 23)])
@pytest.mark.parametrize("name", FAILS_OR_IS_NAN)
@pytest.mark.parametrize("wrap", [Dataset.from_list, *thorough(Rows)])
def test_a_row_without_tokens_is_the_reason_and_not_a_squeeze(tmp_path, at, name, wrap):
    def model():
        return Pairs(FAILS_OR_IS_NAN[name])

    data = wrap(pairs(at=at))
    options = dict(cls=OfPairs, collator=padded)
    match = "Column 'input_ids_b' .* at least one token"
    message = refused_training(tmp_path, "values-out-of-range", data=data, model=model(), match=match, **options)
    assert "squeeze" not in message
    kept = mended(message, data)
    assert len(kept) == 23
    trained(checked_trainer_of(tmp_path / "mended", data=kept, model=model(), max_steps=1, **options))


def test_a_model_that_takes_a_row_without_tokens_trains(tmp_path):
    model = Pairs(lambda found: found.sum(dim=1))
    options = dict(cls=OfPairs, collator=padded, max_steps=1)
    trained(checked_trainer_of(tmp_path, data=Dataset.from_list(pairs()), model=model, **options))


def test_the_places_are_those_of_the_rows():
    data = Dataset.from_list(pairs())
    assert first_empty(data, column="input_ids_b") == ROW
    assert first_empty(data.select([*range(23, -1, -1)]), column="input_ids_b") == 23 - ROW
    assert first_empty(data.select(range(ROW)), column="input_ids_b") is None
    assert first_empty(data, column="labels") is None
    rows = [*numbers(of_labels=several, labels=[NAN, 1.0, 0.0]), *IN_ALL]
    assert rows_not_finite(Dataset.from_list(rows), column="labels") == [ROW, 24 + ROW]
    assert rows_not_finite(Dataset.from_list(rows[::-1]), column="labels") == [47 - ROW, 23 - ROW]
    assert rows_not_finite(Dataset.from_list(rows), column="x") == []
    assert rows_not_finite(Dataset.from_list(SCORES), column="labels") == [ROW]
