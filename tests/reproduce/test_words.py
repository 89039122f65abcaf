"""Counts are those of each sentence of its own part."""

import numpy as np
import torch
from datasets import Dataset
from sklearn.feature_extraction.text import HashingVectorizer
from torch.utils.data import default_collate

from doppler_hf.reproduce.data import apart
from doppler_hf.reproduce.networks import HASHED_WORDS
from doppler_hf.reproduce.tasks import SMALL


def test_counts_are_those_of_the_sentences(sources, small):
    data = SMALL["sst2-words"].load(sources)
    read = {
        split: Dataset.from_parquet(f"{sources.data_dir}/glue/sst2/{split}.parquet") for split in ("train", "validation")
    }
    train, tuning = apart(60, 20)
    parts = {"train": ("train", train), "tuning": ("train", tuning), "report": ("validation", np.arange(12))}
    for part, (split, rows) in parts.items():
        found = default_collate([*getattr(data, part)])
        sentences = [read[split]["sentence"][int(row)] for row in rows]
        expected = HashingVectorizer(n_features=HASHED_WORDS).transform(sentences).toarray()
        torch.testing.assert_close(found["inputs"], torch.from_numpy(expected).float(), rtol=1e-6, atol=0)
        assert found["labels"].tolist() == [read[split]["label"][int(row)] for row in rows]
