"""Small data for the experiments."""

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value

from scripts.experiments import small_tasks


@pytest.fixture
def small_data(tmp_path, monkeypatch):
    """A folder with random images and random sentences."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    small_tasks.load.cache_clear()
    generator = np.random.default_rng(0)
    images = Features({"image": Image(), "label": ClassLabel(names=list("0123456789"))})
    sentences = Features({"sentence": Value("string"), "label": ClassLabel(names=["bad", "good"])})
    for folder in ("mnist", "glue/sst2"):
        (tmp_path / folder).mkdir(parents=True)
    for name, rows in (("train", 40), ("test", 100)):
        pixels, labels = generator.integers(0, 256, (rows, 28, 28), dtype=np.uint8), generator.integers(0, 10, rows)
        data = Dataset.from_dict({"image": list(pixels), "label": labels}, features=images)
        data.to_parquet(tmp_path / "mnist" / f"{name}.parquet")
    for name, rows in (("train", 40), ("validation", 100)):
        labels = generator.integers(0, 2, rows)
        words = [" ".join(generator.choice([["dull", "film"], ["fine", "film"]][label], 5)) for label in labels]
        Dataset.from_dict({"sentence": words, "label": labels}, features=sentences).to_parquet(
            tmp_path / "glue" / "sst2" / f"{name}.parquet"
        )
    return tmp_path
