"""The measurement of long texts runs from its command line, for each work and beside each way of the stock trainers."""

import json

import pytest

from scripts.bench import long_texts
from tests.support.chat import chat_tokenizer


@pytest.mark.thorough
def test_each_work_is_timed_beside_each_stock_way(tmp_path, capsys):
    pytest.importorskip("trl")
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    long_texts.main(
        [
            *(f"--tokenizer={tmp_path / 'tokenizer'}", f"--output={tmp_path / 'b.jsonl'}", "--longest=96", "--pairs=1"),
            *("--layers=1", "--hidden=16", "--batch_size=2", "--accumulation=2", "--steps=2", "--threads=1"),
        ]
    )
    found = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [(each["work"], each["beside"]) for each in found] == [
        *(("causal", "plain"), ("causal", "sorted"), ("causal-lora", "plain"), ("causal-lora", "sorted")),
        ("dpo-lora", "plain"),
    ]
    printed = capsys.readouterr().out
    for each in found:
        assert each["ratio"] == pytest.approx(each["private_s"] / each["stock_s"])
        assert f"{each['work']}, beside {each['beside']}: time ×{each['ratio']:.2f}" in printed
