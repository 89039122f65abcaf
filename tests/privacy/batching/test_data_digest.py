"""The same data have the same digest in every launch, and other rows or another order have another one."""

import datetime
import decimal
import functools
import io
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import PurePath

import numpy as np
import pyarrow
import pytest
import torch
from datasets import Array2D, Dataset, Features, Image, concatenate_datasets, load_from_disk
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split
from transformers import BatchEncoding

from doppler_hf.privacy.batching import data_digest
from doppler_hf.privacy.batching.columns import lengths_of
from doppler_hf.privacy.batching.data_digest import DataDigest, bytes_of_row, digests_of_fields, spread
from doppler_hf.privacy.batching.sampling import AllocationSampler, digest_of_data
from tests.support.tiny import OwnGenerator, Rows, text_data


def digest(dataset):
    sampler = AllocationSampler(num_examples=len(dataset), expected_batch_size=2, lengths=lengths_of(dataset))
    return digest_of_data(dataset, sampler)


def same(first, second):
    there, here = digest(first), digest(second)
    assert there.is_of_same_rows(here) == here.is_of_same_rows(there)
    return there.is_of_same_rows(here)


def blocks(count=60, seed=0, *, label=None):
    """Rows of one length without an integer label, as blocks of a language model."""
    numbers = np.random.default_rng(seed)
    rows = [{"input_ids": numbers.integers(5, 60, size=16).tolist()} for _ in range(count)]
    return [row | ({} if label is None else {"labels": label(row)}) for row in rows]


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """A busy machine must not leave rows unread: what is read of them then is another test's."""
    monkeypatch.setattr(data_digest, "_SECONDS", 60.0)


# --- tables ---------------------------------------------------------------------------------------------------------------

TABLE = Dataset.from_list(blocks(300, label=lambda row: row["input_ids"][0] / 7))


def with_a_random_transform(dataset):
    dataset = dataset.with_format(None)
    dataset.set_transform(lambda batch: {"input_ids": [ids[: random.randint(1, 16)] for ids in batch["input_ids"]]})
    return dataset


@pytest.mark.parametrize(
    "change",
    [
        lambda data, _: Dataset.from_list(data.to_list()),
        lambda data, _: concatenate_datasets([data.select(range(7)), data.select(range(7, 300))]),
        lambda data, _: data.shuffle(seed=3).select(np.argsort(np.random.default_rng(3).permutation(300))),
        lambda data, _: data.shuffle(seed=3).select(np.argsort(np.random.default_rng(3).permutation(300))).flatten_indices(),
        lambda data, folder: data.save_to_disk(folder) or load_from_disk(folder),
        lambda data, _: data.with_format("torch", columns=["input_ids"]),
        lambda data, _: data.with_format("numpy"),
        lambda data, _: with_a_random_transform(data),
        lambda data, _: data.select_columns(["labels", "input_ids"]),
        lambda data, _: data.cast_column("input_ids", pyarrow_large(data.features["input_ids"])),
    ],
)
def test_a_table_is_the_same_however_it_is_stored_or_shown(tmp_path, change):
    changed = change(TABLE, tmp_path / "data")
    assert len(changed) == 300
    assert same(TABLE, changed)
    assert same(with_a_random_transform(TABLE), with_a_random_transform(changed))


def pyarrow_large(feature):
    from datasets import LargeList

    return LargeList(feature.feature)


def swapped(count=300):
    order = [*range(count)]
    order[120], order[250] = 250, 120
    return order


def edited(row, index):
    return {"input_ids": [*row["input_ids"][:-1], 61]} if index == 222 else row


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.shuffle(seed=1),
        lambda data: data.select(swapped()),
        lambda data: data.select([*range(1, 300), 0]),
        lambda data: data.map(edited, with_indices=True),
        lambda data: data.rename_column("labels", "others"),
        lambda data: with_a_random_transform(data.shuffle(seed=1)),
        lambda data: data.select(np.argsort(data["labels"])).with_format("torch"),
    ],
    ids=["shuffled", "two rows", "moved by one", "one value", "renamed", "behind a transform", "sorted"],
)
def test_other_rows_of_a_table_or_another_order_are_seen(change):
    assert not same(TABLE, change(TABLE))


COLUMNS = {
    "text": (["ab", "c", "", None], ["a", "bc", "", None]),
    "bytes": ([b"ab", b"c"], [b"a", b"bc"]),
    "lists": ([[1, 2], [3]], [[1], [2, 3]]),
    "lists of lists": ([[[1], [2, 3]], []], [[[1, 2], [3]], []]),
    "gaps": ([0, None, 1], [None, 0, 1]),
    "an empty list": ([[], None], [None, []]),
    "gaps in lists": ([[0, None], [1]], [[None, 0], [1]]),
    "truths": ([True, False], [False, True]),
    "floats": ([0.5, 1.5], [1.5, 0.5]),
    "days": ([datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)], [datetime.date(2020, 1, 2), datetime.date(2020, 1, 1)]),
    "decimals": ([decimal.Decimal("1.5"), decimal.Decimal("2.5")], [decimal.Decimal("2.5"), decimal.Decimal("1.5")]),
    "structures": ([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}], [{"a": 1, "b": "y"}, {"a": 2, "b": "x"}]),
    "a structure that is missing": ([{"a": None}, None], [None, {"a": None}]),
    "chats": ([[{"role": "u", "text": "a"}], []], [[], [{"role": "u", "text": "a"}]]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_every_kind_of_column_is_read(name):
    first, second = (Dataset.from_dict({"x": values}) for values in COLUMNS[name])
    assert same(first, Dataset.from_dict({"x": COLUMNS[name][0]}))
    assert not same(first, second)
    # A row that is reached through indices, and a part of a larger buffer.
    longer = Dataset.from_dict({"x": COLUMNS[name][1][:1] + 2 * COLUMNS[name][0]}).select(range(1, 1 + 2 * len(first)))
    assert same(first, longer.select(range(len(first), 2 * len(first))))
    assert same(
        first, longer.select([index + len(first) for index in range(len(first))][::-1]).select([*range(len(first))][::-1])
    )


def test_arrays_and_dictionaries_of_arrow_are_read():
    features = Features({"x": Array2D((2, 2), "float32")})
    first, second = (
        Dataset.from_dict({"x": values}, features=features) for values in ([[[1, 2], [3, 4]]] * 2, [[[1, 2], [4, 3]]] * 2)
    )
    assert not same(first, second)
    words = pyarrow.table({"x": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    others = pyarrow.table({"x": pyarrow.array(["b", "a", "b"]).dictionary_encode()})
    read = [b"".join(map(bytes, data_digest._bytes_of_table(table))) for table in (words, others, words.slice(0, 3))]
    assert read[0] == read[2] != read[1]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_part_of_a_longer_array_is_read_as_an_array_of_its_own(name):
    first, second = COLUMNS[name]
    values = pyarrow.array([*second, *first, *second])
    parts = values.slice(len(second), len(first)), pyarrow.array(first, type=values.type)
    read = [b"".join(map(bytes, data_digest._bytes_of_array(part))) for part in parts]
    assert read[0] == read[1]


def png(color):
    from PIL import Image as Pillow

    Pillow.new("RGB", (2, 2), color).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def test_images_are_told_apart_by_their_files_which_are_not_opened():
    def images(*values):
        return Dataset.from_dict({"image": list(values)}).cast_column("image", Image())

    red, blue = ({"bytes": png(color), "path": None} for color in ("red", "blue"))
    assert same(images(red, blue), images(red, blue))
    assert not same(images(red, blue), images(blue, red))
    here, there = ([{"bytes": None, "path": f"{folder}/{name}.png"} for name in "ab"] for folder in ("/cache/1", "/cache/2"))
    assert same(images(*here), images(*there))
    assert not same(images(*here), images(*here[::-1]))


# --- lists, and rows that are made ----------------------------------------------------------------------------------------


class Made(Rows):
    """Adds random numbers of a source to each row."""

    def __init__(self, source, rows=None):
        super().__init__(blocks(label=lambda row: row["input_ids"][0] / 7) if rows is None else rows)
        self.source = source

    def __getitem__(self, index):
        return super().__getitem__(index) | {"input_ids": self.source(self.rows[index]["input_ids"])}


def flipped(ids, *, coin=random.random):
    return ids[::-1] if coin() < 0.5 else ids


def tensors(order):
    numbers = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)[order]
    return TensorDataset(torch.from_numpy(numbers), torch.from_numpy(numbers[:, 0] > 0))


IN_ORDER, IN_ANOTHER = [*range(60)], np.random.default_rng(1).permutation(60).tolist()
FLOATS = blocks(label=lambda row: row["input_ids"][0] / 7)
SOURCES = {
    "a list": lambda order: [FLOATS[index] for index in order],
    "a tuple": lambda order: tuple(FLOATS[index] for index in order),
    "a list of tensors": lambda order: [
        {"x": torch.tensor(FLOATS[index]["input_ids"], dtype=torch.bfloat16)} for index in order
    ],
    "a list of arrays": lambda order: [(np.array(FLOATS[index]["input_ids"]), np.float32(1)) for index in order],
    "a list of BatchEncoding": lambda order: [BatchEncoding(FLOATS[index]) for index in order],
    "tensors": tensors,
    "a torch data set": lambda order: Rows([FLOATS[index] for index in order]),
    "a subset": lambda order: Subset(Rows(FLOATS), order),
    "a subset of a table": lambda order: Subset(Dataset.from_list(FLOATS), order),
    "joined": lambda order: ConcatDataset([Rows([FLOATS[index] for index in half]) for half in (order[:30], order[30:])]),
    "pictures that are flipped": lambda order: Made(flipped, [FLOATS[index] for index in order]),
    "tensors that are flipped": lambda order: Made(
        lambda x: flipped(x, coin=lambda: torch.rand(())), [FLOATS[i] for i in order]
    ),
    "a generator of its own": lambda order: Made(
        functools.partial(flipped, coin=np.random.default_rng().random), [FLOATS[index] for index in order]
    ),
    "a rare cut": lambda order: Made(
        lambda ids: ids[:3] if random.SystemRandom().random() < 0.3 else ids, [FLOATS[index] for index in order]
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_other_data_sets_are_known_again_and_another_order_is_seen(name):
    """Also if their tokens or pictures are random: the labels, floats here, are not."""
    make = SOURCES[name]
    for _ in range(3):
        assert same(make(IN_ORDER), make(IN_ORDER))
        assert not same(make(IN_ORDER), make(IN_ANOTHER))


def test_splits_without_a_seed_are_seen():
    rows = Rows(FLOATS)
    assert not same(*(random_split(rows, [50, 10], generator=torch.Generator().manual_seed(seed))[0] for seed in (1, 2)))


def test_rows_that_are_random_in_all_their_fields_go_unseen():
    first, second = (
        Made(lambda ids: [random.random() for _ in ids], [{"input_ids": row["input_ids"]} for row in rows])
        for rows in (FLOATS, FLOATS[::-1])
    )
    assert digest(first).fields == {}
    assert same(first, second)
    assert same(OwnGenerator(), OwnGenerator())


def test_a_field_that_turned_out_random_in_one_launch_alone_raises_no_alarm():
    known = digest(Made(lambda ids: ids))
    assert known.fields.keys() == {"input_ids", "labels"}
    noticed = digest(Made(flipped))
    assert noticed.fields.keys() == {"labels"}
    assert known.is_of_same_rows(noticed)
    assert noticed.is_of_same_rows(known)
    assert not DataDigest(known.whole, {"x": {1: "a"}}).is_of_same_rows(known)


def test_rows_that_fail_end_the_reading_and_raise_nothing():
    class Failing(Rows):
        def __getitem__(self, index):
            if index > 0:
                raise OSError("a file is missing")
            return super().__getitem__(index)

    failing = Failing(FLOATS)
    assert {max(noted) for noted in digest(failing).fields.values()} == {1}
    assert same(failing, Rows(FLOATS))
    endless = []
    endless.append(endless)
    assert bytes_of_row(endless) == b"list"
    assert digest([endless] * 4)


def test_values_are_told_apart_and_objects_are_not():
    values = [
        1, 1.0, "1", None, [1], (1, 2), {"a": 1}, {"a": 2}, b"1", {1, 2}, {1, 3}, np.float32(1), np.float16(1), np.arange(2),
        np.arange(2.0), np.arange(2).reshape(1, 2), torch.arange(2), torch.tensor(1.0, dtype=torch.bfloat16), PurePath("a"),
        datetime.date(2020, 1, 1), np.array([{"a": 1}, None], dtype=object), 1j,
    ]  # fmt: skip
    read = [bytes_of_row(value) for value in values]
    assert len({*read}) == len(read)
    assert bytes_of_row({"b": 1, "a": (1, 2)}) == bytes_of_row({"a": [1, 2], "b": 1})
    assert bytes_of_row([object()]) == bytes_of_row([object()])  # whose address would be another one in each launch


# --- in every launch ------------------------------------------------------------------------------------------------------

IN_A_PROCESS = """
import json
from datasets import Dataset
from tests.privacy.batching.test_data_digest import FLOATS, digest, with_sets
print(json.dumps([digest(each).to_json() for each in (Dataset.from_list(FLOATS), with_sets(FLOATS))]))
"""


def with_sets(rows):
    return [row | {"words": {"a", "b", str(row["labels"])}} for row in rows]


@pytest.mark.thorough  # the numbers of the other tests come from one process, but from objects that were made twice
def test_digests_are_those_of_every_process_whatever_its_hashes_and_cache(tmp_path):
    own = {"PYTHONHASHSEED": "1", "HF_DATASETS_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", IN_A_PROCESS]
    printed = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True).stdout
    there = json.loads(printed.splitlines()[-1])
    for values, dataset in zip(there, (Dataset.from_list(FLOATS), with_sets(FLOATS)), strict=True):
        assert DataDigest.from_json(values).is_of_same_rows(digest(dataset))


def test_reading_ends_after_some_time_and_what_both_have_read_is_compared(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(data_digest.time, "monotonic", lambda: next(clock))
    many = [*range(5000)]  # 40 parts

    def after(seconds, rows):
        monkeypatch.setattr(data_digest, "_SECONDS", seconds)
        return digest(rows)

    brief, long, whole = after(5, many), after(20, many), after(100, many)
    assert [max(each.fields[""]) for each in (brief, long, whole)] == [4, 16, 40]
    for first, second in itertools.permutations([brief, long, whole], 2):
        assert first.is_of_same_rows(second)
        assert not first.is_of_same_rows(after(20, many[::-1]))
    assert brief.is_of_same_rows(DataDigest.from_json(json.loads(json.dumps(whole.to_json()))))


def test_a_slow_data_set_is_read_for_about_half_a_second(monkeypatch):
    monkeypatch.undo()

    class Slow(Rows):
        def __getitem__(self, index):
            time.sleep(0.05)
            return super().__getitem__(index)

    begun = time.monotonic()
    found = digests_of_fields(Slow(FLOATS))
    assert time.monotonic() - begun < 5.0  # half a second, on a busy machine too
    assert max(found["labels"]) <= 8


@pytest.mark.parametrize("count", [*range(1, 20), 127, 128, 129])
def test_any_first_parts_are_spread_over_all(count):
    order = [*spread(count)]
    assert sorted(order) == [*range(count)]
    gaps = np.diff(sorted(order[: (count + 1) // 2]), append=count)
    assert gaps.max() <= 4


def test_other_units_and_numbers_have_another_digest():
    data = text_data()
    units = np.arange(24) // 2
    found = [
        digest_of_data(data, AllocationSampler(num_examples=24, expected_batch_size=2, units=each))
        for each in (None, units, units[::-1].copy())
    ]
    assert [found[0].is_of_same_rows(each) for each in found] == [True, False, False]
    assert not found[1].is_of_same_rows(found[2])
