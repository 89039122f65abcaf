"""A piece of a batch is collated in its passes; what is clipped together is collated together."""

import functools

import numpy as np
import pytest
import torch
from datasets import Array2D, Dataset, Features, LargeList, List, Value

from doppler_hf.privacy.batching.columns import columns_of_numbers, lengths_of
from doppler_hf.privacy.batching.cutting import Cut
from doppler_hf.privacy.batching.micro_batches import PrivateLoader, check_token_budget, fetch
from doppler_hf.privacy.batching.sampling import AllocationSampler
from tests.support.refusals import refused
from tests.support.tiny import pad_numbered, text_data


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(100, None), (100, 24), (2, None), (6, 60)])
@pytest.mark.parametrize("units", [None, [0, 1, 1, *range(2, 9), 9, 9]], ids=["examples", "users"])
def test_all_views_of_an_example_stand_together_in_one_micro_batch(max_rows, max_tokens, units):
    data, views = text_data(12).add_column("number", list(range(12))), 3
    parts, drawn = [], {}
    for name, each in (("views", views), ("once", 1)):
        sampler = AllocationSampler(
            num_examples=12, expected_batch_size=8, pieces=2, lengths=lengths_of(data), units=units, seed=1
        )
        loader = PrivateLoader(data, sampler=sampler, collator=pad_numbered, cut=Cut(max_rows, max_tokens, each))
        drawn[name] = [batch for _, piece in zip(range(6), loader, strict=False) for batch in piece]
    for batch in drawn["views"]:
        numbers = batch.inputs["number"].view(-1, views)
        assert bool((numbers == numbers[:, :1]).all())
        assert batch.size == len(batch.inputs["number"])
        assert batch.size <= max(max_rows, views)
        assert max_tokens is None or batch.inputs["input_ids"].numel() <= max_tokens
        parts += numbers[:, 0].tolist()
    assert sorted(parts) == sorted(number for batch in drawn["once"] for number in batch.inputs["number"].tolist())
    assert len(parts) > 12


@pytest.mark.parametrize("max_tokens", [None, 60])
@pytest.mark.parametrize(("pieces", "size"), [(1, 4), (3, 4), (4, 1), (2, 100)])
def test_a_batch_comes_whole_in_as_many_pieces_as_were_asked_for_and_in_passes_within_their_bounds(pieces, size, max_tokens):
    data = text_data(60).add_column("number", list(range(60)))
    options = dict(num_examples=60, expected_batch_size=pieces * size if size < 20 else 30, lengths=lengths_of(data))
    sampler = AllocationSampler(**options, pieces=pieces, seed=0)
    loader = PrivateLoader(data, sampler=sampler, collator=pad_numbered, cut=Cut(size, max_tokens))
    found = list(loader)
    assert len(found) == pieces * sampler.steps_per_epoch
    for step in range(sampler.steps_per_epoch):
        batches = [batch for piece in found[pieces * step : pieces * (step + 1)] for batch in piece]
        drawn = sorted(sampler.draw(step).tolist())
        assert sorted(number for batch in batches for number in batch.inputs["number"].tolist()) == drawn
        assert max((batch.size for batch in batches), default=0) <= size
        assert all(batch.inputs["input_ids"].numel() <= (max_tokens or 10**9) for batch in batches)
        assert max_tokens is not None or len(batches) <= -(-len(drawn) // size)


def test_a_budget_that_cannot_be_kept_is_refused_without_a_word_about_the_example():
    check_token_budget([3, 8, 5], max_tokens=8)
    with refused("micro-batch-too-small", match="=7 ") as refusal:
        check_token_budget([3, 8, 5], max_tokens=7)
    assert "8" not in str(refusal.value)
    check_token_budget([3, 8, 5], max_tokens=32, views=4)
    with refused("micro-batch-too-small", match="augmentation_multiplicity=4"):
        check_token_budget([3, 8, 5], max_tokens=31, views=4)
    counts = np.array([3, 1, 2])
    check_token_budget([3, 8, 5], max_tokens=10, counts=counts)
    with refused("micro-batch-too-small", match="clip_unit_mean=True.*max_examples_per_unit"):
        check_token_budget([3, 8, 5], max_tokens=9, counts=counts)
    with refused("no-lengths"):
        check_token_budget(None, max_tokens=7)


# Three rows of each kind: type, rows, and whether a whole column is converted number by number.
COLUMNS = {
    "integer": (Value("int8"), [1, 2, 3], True),
    "large": (Value("uint64"), [2**63 - 1, 2**53 + 1, 3], True),
    "float": (Value("float64"), [1e30, float("nan"), 1 / 3], True),
    "half": (Value("float16"), [1.5, 2.5, 3.5], True),
    "truth": (Value("bool"), [True, False, True], True),
    "lists": (List(Value("int32")), [[1, 2], [3], []], True),
    "large_lists": (LargeList(Value("float32")), [[1.0, 2.0], [3.0], []], True),
    "equal_lists": (List(Value("int64")), [[1, 2], [3, 4], [5, 6]], True),
    "fixed_lists": (List(Value("int64"), length=2), [[1, 2], [3, 4], [5, 6]], True),
    "nested": (List(List(Value("int64"))), [[[1], [2, 3]], [[4, 5]], [[6], [7]]], False),
    "array": (Array2D((2, 2), "float32"), [[[1, 2], [3, 4]]] * 3, True),
    "growing": (Array2D((None, 2), "float32"), [[[1, 2]], [[3, 4]] * 2, [[5, 6]]], False),
    "text": (Value("string"), ["a", "bc", ""], False),
    "structures": ({"of": Value("int64")}, [{"of": 1}, {"of": 2}, {"of": 3}], False),
    "missing": (Value("int64"), [2**24 + 1, None, 5], False),
    "missing_inside": (List(Value("int64")), [[2**24 + 1, 1], [None, 2], [5, 6]], False),
    "missing_list": (List(Value("int64")), [[2**24 + 1], None, [5]], False),
    "missing_array": (Array2D((2, 2), "int64"), [[[2**60 + 1, 2], [3, 4]], None, [[1, 2], [3, 4]]], False),
}


def of_column(name):
    kind, rows, _ = COLUMNS[name]
    return Dataset.from_dict({name: rows}, features=Features({name: kind}))


def is_same(one, other):
    if isinstance(one, (list, dict)) or getattr(one, "dtype", None) == np.dtype(object):
        ones, others = (each.values() if isinstance(each, dict) else each for each in (one, other))
        return type(one) is type(other) and len(one) == len(other) and all(map(is_same, ones, others))
    of_one, of_other = np.asarray(one), np.asarray(other)
    is_equal = np.array_equal(of_one, of_other, equal_nan=of_one.dtype.kind == "f")
    return type(one) is type(other) and of_one.dtype == of_other.dtype and is_equal


@pytest.mark.parametrize("form", [None, "torch", "numpy", "pandas"])
def test_a_null_of_one_example_does_not_round_the_numbers_of_others(form):
    """`datasets` makes floats of all integers that it converts at once, if one of them is missing."""
    data = Dataset.from_dict({"seen": [[2**24 + 1, 1], [None, 2], [5, 6]], "at": [2**24 + 1, None, 5]}).with_format(form)
    numbers = columns_of_numbers(data)
    alone, beside = (fetch(data, indices, numbers=numbers)[0] for indices in ([0], [0, 1, 2]))
    for name in ("seen", "at"):
        assert np.asarray(beside[name]).dtype == np.asarray(alone[name]).dtype
        assert np.array_equal(beside[name], alone[name])


@pytest.mark.parametrize("form", ["torch", "numpy"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_row_is_what_it_is_alone_and_numbers_are_read_together(name, form, monkeypatch):
    data, together = of_column(name).with_format(form), COLUMNS[name][2]
    assert columns_of_numbers(data) == ({name} if together else set())
    calls, read = [], Dataset.__getitems__
    monkeypatch.setattr(Dataset, "__getitems__", lambda self, keys: calls.append(keys) or read(self, keys))
    found = fetch(data, [2, 0, 1, 0], numbers=columns_of_numbers(data))
    assert calls == ([[2, 0, 1, 0]] if together else [[2], [0], [1], [0]])
    for index, row in zip([2, 0, 1, 0], found, strict=True):
        assert is_same(row, fetch(data, [index], numbers=set())[0])


@pytest.mark.parametrize("form", ["torch", "numpy"])
@pytest.mark.parametrize(
    "rows", [[[1.0] * 4, [2.0] * 4, [3.0] * 5], [[1.0] * 4, [2.0] * 4, [3.0] * 4]], ids=["ragged", "equal"]
)
def test_whoever_writes_into_a_row_reaches_neither_others_nor_the_table(form, rows):
    """Beside a row of another length, NumPy's are the table's memory; torch's are parts of one tensor."""
    data = Dataset.from_dict({"x": rows}, features=Features({"x": List(Value("float32"))})).with_format(form)
    for _ in range(2):
        found = fetch(data, [0, 1, 0, 2], numbers=columns_of_numbers(data))
        first = torch.as_tensor(found[0]["x"])
        assert first.tolist() == [1.0] * 4
        first.sub_(50.0)
        assert first.untyped_storage().nbytes() == 16
        assert [row["x"].tolist() for row in found[1:]] == [rows[1], rows[0], rows[2]]


class Doubled(Value):
    """A type whose code runs when a row is read."""

    def decode_example(self, value, token_per_repo_id=None):
        return 2 * value


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_rows_that_are_made_by_code_of_the_users_are_fetched_alone(form):
    data = Dataset.from_dict({"x": [1, 2, 3]}).with_format(form)
    data.info.features["x"] = Doubled("int64")
    fetched = functools.partial(fetch, numbers=columns_of_numbers(data))
    found = fetched(data, [2, 0, 1])
    assert found == [fetched(data, [index])[0] for index in (2, 0, 1)]
    plain = Dataset.from_dict({"x": [1, 2, 3]}).with_format(form)
    plain.__getitems__ = lambda keys: [{"x": sum(keys)}] * len(keys)
    assert [row["x"] for row in fetched(plain, [2, 0, 1])] == [2, 0, 1]
    assert columns_of_numbers(plain) is None


def test_columns_that_come_along_are_looked_at_too():
    data = Dataset.from_dict({"x": [1, 2], "text": ["a", "b"]}).with_format("torch", columns=["x"], output_all_columns=True)
    found = fetch(data, [1, 0], numbers=columns_of_numbers(data))
    assert [row["text"] for row in found] == ["b", "a"]


def test_a_format_that_is_set_later_is_seen():
    """A transform would mix what it is given together, and other columns may have nulls."""
    data = Dataset.from_dict({"number": [1, 2, 3], "at": [2**24 + 1, None, 5]}).with_format("torch", columns=["number"])
    fetched = functools.partial(fetch, data, numbers=columns_of_numbers(data))
    fetched([0, 1])
    data.set_format("torch")
    assert fetched([0, 1])[0]["at"].dtype == torch.int64
    data.set_transform(lambda rows: {"sum": [sum(rows["number"])] * len(rows["number"])})
    assert fetched([0, 1, 2]) == [{"sum": 1}, {"sum": 2}, {"sum": 3}]
