"""Frozen layers computed once and trained ones above are the encoder, and counts of words those of each sentence."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from sklearn.feature_extraction.text import HashingVectorizer
from torch.nn import functional as F
from torch.utils.data import default_collate
from transformers import AutoModel

from scripts.studies import texts
from scripts.studies.data import apart
from scripts.studies.networks import HASHED_WORDS
from scripts.studies.runs import Run
from scripts.studies.studies import STUDIES
from scripts.studies.tasks import SMALL
from tests.support.folders import write_bert, write_glue, write_gpt2


def test_frozen_and_trained_layers_together_are_the_encoder(sources):
    data = texts.sentences("qnli", layers=2, held_out=20)(sources)
    encoder = AutoModel.from_pretrained(sources.encoder).eval()
    network = data.network().eval()
    examples = [data.train[row] for row in range(8)]
    batch = data.collator(examples)
    length = max(len(example["input_ids"]) for example in examples)
    ids = torch.tensor([example["input_ids"] + [0] * (length - len(example["input_ids"])) for example in examples])
    mask = batch["attention_mask"]
    types = torch.tensor(
        [example["token_type_ids"] + [0] * (length - len(example["token_type_ids"])) for example in examples]
    )
    with torch.no_grad():
        hidden = encoder(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state
        means = torch.stack([row[: int(own.sum())].mean(0) for row, own in zip(hidden, mask)])
        expected = network.classifier(F.layer_norm(means, means.shape[-1:]))
        logits = network(**{name: value for name, value in batch.items() if name != "labels"}).logits
    # The outputs are kept in 16 bits.
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-3)
    assert batch["labels"].tolist() == [example["label"] for example in examples]
    again = texts.sentences("qnli", layers=2, held_out=20)(sources)
    torch.testing.assert_close(again.collator(examples), batch, rtol=0, atol=0)


def test_runs_on_other_data_or_another_encoder_are_other_runs(sources, small, tmp_path):
    def run_of(sources):
        task = SMALL["sst2"]
        return Run.of("sst2", task, task.load(sources), STUDIES["noise-shaping"].methods["white, none"], 4.0, 0.01, 0)

    first = run_of(sources)
    assert run_of(sources) == first
    write_bert(Path(sources.encoder), num_hidden_layers=3)  # other weights at the same place
    second = run_of(sources)
    shutil.rmtree(tmp_path / "glue" / "sst2")
    write_glue(tmp_path / "glue" / "sst2", "sst2", train=59)
    assert len({first, second, run_of(sources)}) == 3


def test_an_encoder_without_a_list_of_layers_is_refused(sources, tmp_path):
    other = dataclasses.replace(sources, encoder=str(write_gpt2(tmp_path / "gpt2")))
    with pytest.raises(ValueError, match="--encoder must be a BERT-like model with a list of layers, got a GPT2Model"):
        SMALL["sst2"].load(other)


def test_parts_do_not_overlap(sources):
    data = texts.sentences("sst2", layers=2, held_out=20)(sources)
    rows = [set(part["text"]) for part in (data.train, data.tuning, data.report)]
    assert [*map(len, rows)] == [40, 20, 12]
    assert len(set.union(*rows)) == 72


def test_counts_are_those_of_the_sentences(sources, small):
    data = SMALL["sst2-words"].load(sources)
    read = {
        split: Dataset.from_parquet(f"{sources.data_dir}/glue/sst2/{split}.parquet") for split in ("train", "validation")
    }
    train, tuning = apart(60, 20)
    parts = {"train": ("train", train), "tuning": ("train", tuning), "report": ("validation", np.arange(12))}
    for part, (split, rows) in parts.items():
        found = default_collate([*getattr(data, part)])
        own = [read[split]["sentence"][int(row)] for row in rows]
        expected = HashingVectorizer(n_features=HASHED_WORDS).transform(own).toarray()
        torch.testing.assert_close(found["inputs"], torch.from_numpy(expected).float(), rtol=1e-6, atol=0)
        assert found["labels"].tolist() == [read[split]["label"][int(row)] for row in rows]
