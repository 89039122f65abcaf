"""The study of synthetic texts at a tiny size: a table, canaries that a model without privacy repeats, and nothing twice."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import synthesize
from scripts.experiments import synthetic_texts
from tests.support.folders import WORDS, write_glue, write_gpt2

pytestmark = pytest.mark.usefixtures("own_caches")
SIZES = ["--vocabulary=300", "--rows=80", "--epochs=12", "--samples=10", "--steps=2"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_a_canary_is_found_without_privacy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(synthetic_texts, "BATCH", 64)
    monkeypatch.setattr(synthetic_texts, "ALTERNATIVES", 50)
    monkeypatch.setattr(synthetic_texts, "CANARIES", 1)
    data = tmp_path / "glue"
    data.mkdir()
    for task, train in (("sst2", 240), ("mnli", 100), ("qqp", 100), ("qnli", 100)):
        write_glue(data / task, task, train=train)
    flags = [f"--data-dir={data}", f"--out={tmp_path / 'out'}", "--seeds", "1", *SIZES]
    synthetic_texts.main(flags)
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "seed-1.json").read_text())
    assert all(0 <= value <= 1 for value in found["accuracy"].values())
    canaries = synthetic_texts.canaries_of(1)
    ranks = {
        (title, number): [found[title]["ranks"][canary.start] for canary in canaries if canary.insertions == number]
        for title in ("ε = 8", "no privacy")
        for number in synthetic_texts.INSERTIONS
    }
    assert all(1 <= rank <= 51 for each in ranks.values() for rank in each)
    assert max(ranks["no privacy", 100]) <= 3
    assert "| no privacy | 100 × | " in printed
    # What was done is not done again.
    monkeypatch.setattr(synthesize, "main", None)
    synthetic_texts.main(flags)
    assert capsys.readouterr().out == printed


def test_private_texts_have_each_canary_as_often_as_it_says(tmp_path):
    write_glue(tmp_path / "sst2", "sst2", train=240)
    splits, others = synthetic_texts.write_private_texts(tmp_path / "texts", tmp_path, rows=100, seed=3)
    texts = Dataset.from_parquet(str(tmp_path / "texts" / "train.parquet"))["text"]
    canaries = synthetic_texts.canaries_of(3)
    assert {texts.count(canary.text) for canary in canaries} == {1, 10, 100}
    assert [texts.count(canary.text) for canary in canaries] == [canary.insertions for canary in canaries]
    assert len({canary.start for canary in canaries}) == len({canary.code for canary in canaries}) == 12
    assert len(texts) == 100 + sum(canary.insertions for canary in canaries)
    assert (len(splits["train"]), len(others)) == (100, 100)


def test_the_likeliest_code_has_the_first_place(monkeypatch):
    monkeypatch.setattr(
        synthetic_texts.AutoModelForCausalLM, "from_pretrained", lambda folder: type("M", (), {"eval": int})()
    )
    monkeypatch.setattr(synthetic_texts.AutoTokenizer, "from_pretrained", lambda folder: None)
    canaries = synthetic_texts.canaries_of(1)
    for losses, place in (([1.0, 2.0, 3.0], 1), ([2.0, 1.0, 3.0], 2), ([3.0, 2.0, 1.0], 3)):
        monkeypatch.setattr(synthetic_texts, "losses_of", lambda *words, losses=losses: losses)
        assert synthetic_texts.ranks(None, canaries[:1], seed=1) == [place]


def test_losses_are_those_of_the_model_for_each_code_alone(tmp_path):
    write_gpt2(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    codes = ["a b c", "d e f g", "b b b"]
    before = tokenizer("label: positive\ntext: code of")["input_ids"]
    expected = []
    for code in codes:
        ids = torch.tensor([[*before, *tokenizer(f" {code}")["input_ids"]]])
        labels = ids.clone()
        labels[:, : len(before)] = -100
        with torch.no_grad():
            expected.append(float(model(ids, labels=labels).loss) * (ids.shape[1] - len(before)))
    found = synthetic_texts.losses_of(model, tokenizer, "code of", codes)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=0)


def test_words_in_a_text():
    mean, spread = synthetic_texts.words_of([" ".join(WORDS), "one two"])
    assert (mean, spread) == (5.0, float(np.std([8, 2])))
