"""The measurement of whole runs counts every example once, and runs from its command line."""

import json

import pytest

from scripts.bench import training as bench_training
from tests.support.folders import write_bert, write_glue


@pytest.fixture
def flags(tmp_path, own_caches):
    """A command line with random sentences, a tokenizer of eight words, and a model of one layer."""
    data, tokenizer = write_glue(tmp_path / "sst2", "sst2", train=100, validation=4), write_bert(tmp_path / "tokenizer")
    return [
        *(f"--dataset_dir={data}", f"--tokenizer={tokenizer}", f"--output={tmp_path / 'b.jsonl'}"),
        *("--layers=1", "--hidden=16", "--batch_size=4", "--accumulation=2", "--steps=2", "--pairs=2", "--threads=1"),
    ]


MORE = ["--lora_r=2", "--train_sampling_strategy=group_by_length", "--max_tokens_per_micro_batch=40"]


@pytest.mark.parametrize(
    ("more", "fresh"),
    [([], False), *(pytest.param(more, True, marks=pytest.mark.slow) for more in ([], ["--engine=opacus"], MORE))],
)
@pytest.mark.thorough
def test_both_trainers_are_timed_in_turn(flags, tmp_path, capsys, monkeypatch, more, fresh):
    """Memory is measured in processes of their own; that takes its time, so that it is seldom done here."""
    if not fresh:
        monkeypatch.setattr(bench_training, "in_fresh_process", lambda function, *arguments: 1.0 + abs(function(*arguments)))
    bench_training.main([*flags, *more])
    result = json.loads((tmp_path / "b.jsonl").read_text())
    assert result["ratio_quartiles"][0] <= result["ratio"] <= result["ratio_quartiles"][1]
    assert min(result["plain_s"], result["private_s"], result["plain_mib"], result["private_mib"]) > 0
    assert 0 < result["noise_s"] < result["private_s"]
    # A sentence has 2 to 11 words and two special tokens; a draw sorted by length needs less padding, but for chance.
    assert 4 <= result["private_tokens"] < result["plain_tokens"] + 1 <= 14
    assert f"×{result['ratio']:.3f}" in capsys.readouterr().out
