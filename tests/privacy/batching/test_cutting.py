"""A batch is cut into passes within a budget, and where rounding asks for it each row is padded to a length of its own."""

import functools
import itertools

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

from doppler_hf.privacy.batching.columns import lengths_of, other_lengths_of
from doppler_hf.privacy.batching.cutting import Cut, PaddedLengths, grid_for, neighbours_in, padding_to, tokens_for
from doppler_hf.privacy.batching.micro_batches import PrivateLoader
from doppler_hf.privacy.batching.sampling import AllocationSampler
from tests.support.chat import chat_tokenizer

GRID = PaddedLengths(16, 4)


def rows_of(passes):
    return [range(start, stop) for start, stop in itertools.pairwise([0, *(each.stop for each in passes)])]


def fewest_passes(lengths, max_tokens):
    """By trying every way to cut."""
    for cuts in range(len(lengths)):
        for inner in itertools.combinations(range(1, len(lengths)), cuts):
            bounds = [0, *inner, len(lengths)]
            parts = [lengths[start:stop] for start, stop in itertools.pairwise(bounds)]
            if all(len(part) * max(part) <= max_tokens for part in parts):
                return len(parts)
    return None


@pytest.mark.parametrize("max_tokens", [9, 10, 17, 36, 80, 81, 1000])
def test_passes_by_tokens_hold_every_row_once_and_are_as_few_as_can_be(max_tokens):
    generator = np.random.default_rng(max_tokens)
    for _ in range(20):
        lengths = np.sort(generator.integers(1, 10, size=9))
        parts = rows_of(Cut(None, max_tokens).passes(9, lengths=lengths))
        assert [row for part in parts for row in part] == list(range(9))
        assert all(len(part) * lengths[part].max() <= max_tokens for part in parts)
        assert len(parts) == fewest_passes(lengths.tolist(), max_tokens)


def test_no_row_and_a_row_above_the_budget():
    assert Cut(None, 5).passes(0) == []
    assert rows_of(Cut(None, 8).passes(4, lengths=np.array([2, 2, 2, 9]))) == [range(3), range(3, 4)]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(64, [64]), (70, [70]), (80, [80]), (81, [40, 41]), (150, [75, 75]), (3, [3]), (200, [66, 67, 67])],
)
def test_rows_without_lengths_come_in_equal_passes_of_up_to_a_quarter_more(rows, sizes):
    passes = Cut(64, may_exceed=True).passes(rows)
    assert sorted(map(len, rows_of(passes))) == sizes
    assert Cut(64, may_exceed=True).most_rows(None) == 80
    assert all(len(part) <= 64 for part in rows_of(Cut(64).passes(rows)))


@pytest.mark.parametrize("grid", [GRID, PaddedLengths(8, 8), PaddedLengths(1, 8)])
def test_a_padded_length_follows_from_the_row_alone_and_grows_with_it(grid):
    lengths = np.arange(1, 3000)
    rounded, multiple = grid.rounded(lengths), grid.multiple(lengths)
    assert np.all(rounded >= lengths)
    assert np.all(np.diff(rounded) >= 0)
    # A collator that is told the multiple pads each of the rows of one length to that length.
    assert np.all(-(-lengths // multiple) * multiple == rounded)
    for padded in np.unique(rounded):
        assert len(np.unique(multiple[rounded == padded])) == 1
    if grid is GRID:
        assert np.all(rounded - lengths <= np.maximum(3, lengths // 8))


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_rows_of_a_pass_have_one_padded_length_and_one_size_of_unit(views, whole):
    generator = np.random.default_rng(0)
    lengths, counts = generator.integers(1, 80, size=120), generator.permutation(np.repeat([1, 2, 3], 40))
    if whole:  # rows of a unit are neighbours, and have the length of the longest
        lengths = np.concatenate(
            [np.repeat(generator.integers(1, 80, size=40 * 6 // each // 2), each) for each in (1, 2, 3)]
        )
        counts = np.repeat([1, 2, 3], 120)
        lengths = lengths[: len(counts)]
    others = generator.integers(1, 20, size=(len(lengths), 1)) if not whole else None
    cut = Cut(None, 400, views, clip_unit_mean=whole, padded=GRID)
    order = cut.order(lengths, counts, others)
    lengths, counts = lengths[order], counts[order]
    passes = cut.passes(len(lengths), lengths=lengths, counts=counts, others=None if others is None else others[order])
    for part, each in zip(rows_of(passes), passes, strict=True):
        padded = np.unique(GRID.rounded(lengths[part]))
        assert len(padded) == 1
        assert len(np.unique(counts[part])) == 1
        assert each.multiple == GRID.multiple(lengths[part]).max()
        least = views * (counts[part][0] if whole else 1)
        assert len(part) * views * padded[0] <= max(400, least * padded[0])
        assert not whole or len(part) % counts[part][0] == 0
        if others is not None:
            assert len(np.unique(-(-others[order][part] // each.multiple))) == 1


def test_the_budget_without_a_users_own_is_what_an_ordinary_step_holds_and_on_a_cpu_what_its_cache_holds():
    assert tokens_for(on_cpu=False, rows=32, longest=54, width=768) == 32 * 54
    assert tokens_for(on_cpu=True, rows=32, longest=54, width=384) == 512
    assert tokens_for(on_cpu=True, rows=32, longest=54, width=768) == 512
    assert tokens_for(on_cpu=True, rows=32, longest=54, width=128) == 1024
    assert tokens_for(on_cpu=True, rows=4, longest=54, width=384) == 270
    assert tokens_for(on_cpu=True, rows=1, longest=600, width=384) == 600
    assert tokens_for(on_cpu=True, rows=10**6, longest=54, width=None) == 4096


@pytest.mark.parametrize(("pieces", "lengths"), [(1, 7), (4, 7), (8, 12), (16, 20), (64, 20)])
def test_a_grid_for_a_gpu_has_few_lengths_for_a_batch_of_few_pieces(pieces, lengths):
    grid = grid_for(on_cpu=False, pieces=pieces)
    assert len(np.unique(grid.rounded(np.arange(1, 513)))) == lengths


def test_a_batch_of_sst2_texts_needs_few_passes_on_a_gpu():
    # Mean 13.5, longest 54, as SST-2's.
    lengths = np.clip(np.random.default_rng(0).gamma(2.0, 6.75, size=1024).astype(int), 3, 54)
    for padded in (None, grid_for(on_cpu=False, pieces=32)):
        cut = Cut(None, tokens_for(on_cpu=False, rows=32, longest=54, width=768), padded=padded)
        order = cut.order(lengths, None, None)
        passes = cut.passes(1024, lengths=lengths[order])
        assert all(len(part) * lengths[order][part].max() <= 32 * 54 for part in rows_of(passes))
        assert len(passes) <= 14


# --- with collators -------------------------------------------------------------------------------------------------------


def texts(number=60, *, labels=False):
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 50, size=number)
    columns = {"input_ids": [generator.integers(5, 30, size=length).tolist() for length in lengths]}
    columns["attention_mask"] = [[1] * length for length in lengths]
    columns["labels"] = [generator.integers(5, 30, size=generator.integers(1, 9)).tolist() for _ in lengths]
    return Dataset.from_dict(columns if labels else columns | {"labels": [0] * number})


def own_padding(rows):
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {"input_ids": pad_sequence(ids, batch_first=True), "labels": torch.tensor([0 for _ in rows])}


def one_length(rows):
    ids = [torch.tensor(row["input_ids"] + [0] * (64 - len(row["input_ids"]))) for row in rows]
    return {"input_ids": torch.stack(ids), "labels": torch.tensor([0 for _ in rows])}


COLLATORS = {
    "padding": (DataCollatorWithPadding, False, True),
    "a multiple of its own": (functools.partial(DataCollatorWithPadding, pad_to_multiple_of=6), False, True),
    "labels of other lengths": (DataCollatorForSeq2Seq, True, True),
    "the user's own": (lambda _: own_padding, False, False),
    "to one length": (lambda _: one_length, False, True),
}


@pytest.mark.parametrize("kind", COLLATORS)
def test_every_row_is_padded_beside_others_as_it_is_alone(kind):
    make, has_labels, is_followed = COLLATORS[kind]
    data, collator = texts(labels=has_labels), make(chat_tokenizer())
    sampler = AllocationSampler(num_examples=60, expected_batch_size=40, pieces=2, lengths=lengths_of(data), seed=3)
    loader = PrivateLoader(data, sampler=sampler, collator=collator, cut=Cut(None, 300))
    loader.learn_padding()
    assert loader.pad_each_row_alone(GRID) == is_followed
    seen = 0
    for piece in loader:
        for batch in piece:
            for row, mask in zip(batch.inputs["input_ids"], batch.inputs.get("attention_mask", []), strict=False):
                length = int(mask.sum())
                alone = padding_to(collator, int(GRID.multiple(np.array([length]))[0]))
                first = {"input_ids": row[:length].tolist(), "attention_mask": [1] * length, "labels": [1]}
                assert alone([first])["input_ids"].shape[1] == len(row)
            assert batch.inputs["input_ids"].numel() <= 300
            seen += batch.size
    assert seen > 20
    if has_labels:
        assert other_lengths_of(data) is not None
        for piece in loader:
            for batch in piece:
                labels = (batch.inputs["labels"] != -100).sum(dim=1)
                multiple = int(GRID.multiple(batch.inputs["attention_mask"].sum(dim=1).numpy()).max())
                assert len({-(-int(number) // multiple) for number in labels}) == 1


def test_pairs_that_are_looked_at_share_a_padded_length_and_differ_in_length():
    lengths = np.random.default_rng(2).integers(1, 60, size=500)
    found = neighbours_in(Cut(None, padded=GRID), lengths, None)
    assert len(found) == 3
    for (first, second), multiple in found:
        assert lengths[first] != lengths[second]
        assert GRID.rounded(lengths[[first]]) == GRID.rounded(lengths[[second]])
        assert GRID.multiple(lengths[[first]]) == multiple
    assert neighbours_in(Cut(None, padded=GRID), np.full(9, 7), None) == []


def loader_of(data, collator, *, max_tokens=2048):
    number = len(data)
    sampler = AllocationSampler(num_examples=number, expected_batch_size=number // 3, lengths=lengths_of(data), seed=3)
    loader = PrivateLoader(data, sampler=sampler, collator=collator, cut=Cut(None, max_tokens))
    loader.learn_padding()
    return loader


def summaries(lengths, labels):
    ids = [[5] * length for length in lengths]
    return Dataset.from_dict(
        {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids], "labels": [[5] * length for length in labels]}
    )


@pytest.mark.parametrize(
    "data",
    [
        summaries([32] * 200, [1 + row % 60 for row in range(200)]),
        summaries([4 + 4 * (row % 8) for row in range(200)], [1 + row % 50 for row in range(200)]),
        summaries(range(1, 201), [30 if row % 20 == 0 else 1 + row % 4 for row in range(200)]),
    ],
    ids=["inputs of one length", "inputs of whole multiples", "a few long labels"],
)
def test_labels_are_padded_beside_others_as_they_are_alone(data):
    collator = DataCollatorForSeq2Seq(chat_tokenizer())
    loader = loader_of(data, collator)
    assert loader.pad_each_row_alone(GRID)
    seen = set()
    for piece in loader:
        for batch in piece:
            lengths = batch.inputs["attention_mask"].sum(dim=1).tolist()
            widths = (batch.inputs["labels"] != -100).sum(dim=1).tolist()
            for length, width in zip(lengths, widths, strict=True):
                row = {"input_ids": [5] * length, "attention_mask": [1] * length, "labels": [5] * width}
                alone = padding_to(collator, int(GRID.multiple(np.array([length]))[0]))([row])
                assert alone["labels"].shape[1] == batch.inputs["labels"].shape[1]
                assert alone["input_ids"].shape[1] == batch.inputs["input_ids"].shape[1]
                seen.add(width)
    assert len(seen) > 4


class ReadOnly:
    pad_to_multiple_of = property(lambda self: 8)

    def __call__(self, rows):
        return own_padding(rows)


class Ignoring:
    pad_to_multiple_of = None

    def __call__(self, rows):
        return own_padding(rows)


class Text:
    pad_to_multiple_of = "8"

    def __call__(self, rows):
        return own_padding(rows)


@pytest.mark.parametrize("collator", [ReadOnly(), Ignoring(), Text()], ids=lambda each: type(each).__name__)
def test_a_collator_that_cannot_be_told_or_does_not_listen_is_not_trusted(collator):
    assert not loader_of(texts(), collator).pad_each_row_alone(GRID)


@pytest.mark.parametrize("own", [None, 8, 24, 64])
@pytest.mark.parametrize("grid", [None, GRID])
def test_a_budget_of_tokens_holds_with_a_collators_own_multiple(own, grid):
    data, budget = texts(300), 512
    loader = loader_of(data, DataCollatorWithPadding(chat_tokenizer(), pad_to_multiple_of=own), max_tokens=budget)
    assert grid is None or loader.pad_each_row_alone(grid)
    sizes = [batch.inputs["input_ids"].shape for piece in loader for batch in piece]
    assert all(rows * length <= max(budget, length) for rows, length in sizes)
    assert max(rows for rows, _ in sizes) > 1
