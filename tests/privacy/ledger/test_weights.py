"""Weight files are found by the names that the libraries give them, and known by the bytes in them."""

import hashlib
import os

import pytest

from doppler_hf.privacy.ledger.weights import hashes, stamps, unknown_files, weight_files

WEIGHTS = [
    "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "adapter_model.safetensors", "adapter_model.bin", "second/adapter_model.safetensors",
]  # fmt: skip
OTHERS = [
    "training_args.bin", "optimizer.pt", "config.json", "checkpoint-2/adapter_model.safetensors",
    "checkpoint-2/model.safetensors", "runs/model.safetensors", "privacy_ledger.json",
]  # fmt: skip


def put(folder, *names, text=""):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name + text)


def test_weight_files_are_those_of_the_libraries(tmp_path):
    assert weight_files(tmp_path / "nowhere") == {}
    put(tmp_path, *WEIGHTS, *OTHERS)
    assert weight_files(tmp_path) == {name: tmp_path / name for name in WEIGHTS}
    assert weight_files(tmp_path / "checkpoint-2").keys() == {"adapter_model.safetensors", "model.safetensors"}


def test_a_hash_is_sha256_of_the_bytes_whenever_they_were_written(tmp_path):
    put(tmp_path, "model.safetensors")
    expected = {"model.safetensors": hashlib.sha256(b"model.safetensors").hexdigest()}
    assert hashes(tmp_path) == expected
    os.utime(tmp_path / "model.safetensors", (0, 0))
    assert hashes(tmp_path) == expected


def test_only_what_was_written_since_is_hashed(tmp_path):
    put(tmp_path, "pytorch_model.bin", "model.safetensors")
    os.utime(tmp_path / "model.safetensors", (0, 0))  # as long ago as training takes
    before = stamps(tmp_path)
    put(tmp_path, "model.safetensors", "adapter_model.safetensors")
    assert hashes(tmp_path, unless_as=before).keys() == {"model.safetensors", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("found", "unknown"),
    [
        ({}, []),
        ({"a": "1"}, []),
        ({"a": "1", "b": "2"}, []),
        ({"a": "3"}, []),
        ({"a": "3", "b": "2"}, ["a"]),  # shards of two sets
        ({"a": "1", "b": "2", "c": "4"}, ["c"]),
        ({"b": "1"}, ["b"]),
    ],
)
def test_what_is_known_is_of_one_set(found, unknown):
    assert unknown_files(found, saved=[{"a": "1", "b": "2"}, {"a": "3"}]) == unknown
