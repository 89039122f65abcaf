"""The measurement of GaLore's basis runs from its command line, and its shares of energy are shares."""

import json

import pytest

from scripts.experiments import subspaces as measure_subspaces
from tests.support.folders import write_mnist


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """A command line with random images and runs of five steps, two of which renew the basis."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_mnist(tmp_path / "mnist", train=60, test=20)
    return [
        *(f"--data_dir={tmp_path}", f"--output={tmp_path / 's.jsonl'}", "--steps=5", "--update_proj_gap=2"),
        *("--expected_batch_size=30", "--epsilons", "4", "--seeds", "0", "1"),
    ]


@pytest.mark.thorough
def test_shares_are_of_the_energy_of_the_gradient(flags, tmp_path, capsys):
    measure_subspaces.main(flags)
    results = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [(result["source"], result["seed"]) for result in results] == [
        ("gradient", 0), ("gradient", 1), ("filtered", 0), ("filtered", 1),
    ]  # fmt: skip
    for result in results:
        assert len(result["captured"]) == len(result["best"]) == 2  # at steps 2 and 4
        assert all(0 < share < best <= 1 + 1e-5 for share, best in zip(result["captured"], result["best"], strict=True))
    assert capsys.readouterr().out.count("accuracy") == 2
