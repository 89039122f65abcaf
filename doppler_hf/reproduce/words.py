"""GLUE tasks of single sentences as counts of hashed words."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from doppler_hf.reproduce.data import Data, Loader, Sources, digest_of, in_parts
from doppler_hf.reproduce.networks import HASHED_WORDS
from doppler_hf.workloads.data_sources import glue_task, load_glue


def words(task_name: str, network: Callable[[], nn.Module], *, held_out: int) -> Loader:
    """Return what loads a GLUE task of single sentences as counts of hashed words, each sentence of norm 1.

    The weights of the words are public: idf would be learnt from private data.

    Args:
        task_name: The task.
        network: Makes a network of counts, shape (batch, HASHED_WORDS).
        held_out: How many training examples to choose by.
    """

    def read(folder: str | None, sources: Sources) -> Data:
        from sklearn.feature_extraction.text import HashingVectorizer

        splits = load_glue(task_name, folder, flag="--data-dir")
        (column,) = glue_task(task_name).text_columns
        counts = {name: HashingVectorizer(n_features=HASHED_WORDS).transform(splits[name][column]) for name in splits}
        labels = {name: torch.tensor(splits[name]["label"]) for name in splits}

        def inputs_of(rows: np.ndarray, *, split: str) -> Tensor:
            return torch.from_numpy(counts[split][rows].toarray()).float()

        digest = digest_of(task_name, held_out, *(list(splits[name][each]) for name in splits for each in (column, "label")))
        return in_parts(digest, inputs_of, labels, network, held_out=held_out)

    return Loader(f"glue/{task_name}", read)
