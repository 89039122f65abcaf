"""Whether all processes have the same data set in the same order: each draws from its own shard of the numbers 0 … N − 1."""

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from doppler_hf.privacy.batching.sampling import PoissonSampler

_LOOKED_AT: Final = 64


def digest_of(dataset: Any, sampler: PoissonSampler) -> str:
    """Return a hash of the data set as a process sees it: number, lengths and units of all examples, and some examples.

    A shuffle moves nearly all examples, so that some are enough; they are evenly spaced. Examples that differ from one look
    to the next, by augmentation at random, do not count.
    """
    digest = hashlib.sha256(f"{sampler.num_examples}".encode())
    for values in (sampler.lengths, sampler.weights, getattr(dataset, "indices", None)):
        if isinstance(values, np.ndarray | list | range):
            digest.update(np.ascontiguousarray(values).tobytes())
    raw = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    for index in np.linspace(0, sampler.num_examples - 1, min(_LOOKED_AT, sampler.num_examples), dtype=int).tolist():
        example = pickle.dumps(raw[index])
        if example == pickle.dumps(raw[index]):
            digest.update(example)
    return digest.hexdigest()


def refuse_different_data(digests: Sequence[str]) -> None:
    """Refuse processes with different data, by the digests of all in the order of their ranks."""
    # Sensitivity: an example that stands at one number here and at another there is in two shards, and is drawn twice.
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise ValueError(
            f"train_dataset must be the same on all processes, in the same order, got different ones on processes 0 and "
            f"{other}: some examples would count twice, and some never. Shuffle and split with a fixed seed."
        )
