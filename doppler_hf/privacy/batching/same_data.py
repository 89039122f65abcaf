"""Whether all processes have the same data set in the same order: each draws from its own shard of the numbers 0 … N − 1."""

import hashlib
import io
import pickle
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from doppler_hf.privacy.batching.sampling import PoissonSampler
from doppler_hf.privacy.generators import filled_generators

_LOOKED_AT: Final = 64


def digest_of(dataset: Any, sampler: PoissonSampler) -> str:
    """Return a hash of the data set as a process sees it: number, lengths and units of all examples, and some examples.

    A shuffle moves nearly all examples, so that some are enough; they are evenly spaced. What is augmented at random is
    augmented in the same way on all processes.

    Raises:
        ValueError: If no example is the same at a second look.
    """
    digest = hashlib.sha256(f"{sampler.num_examples}".encode())
    # Sensitivity: of units that hold others on another process, an example may be in both, whatever the shares.
    for values in (sampler.lengths, sampler.units, sampler.counts, getattr(dataset, "indices", None)):
        if isinstance(values, np.ndarray | list | range):
            digest.update(np.ascontiguousarray(values).data)
    raw = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    looked_at = np.linspace(0, sampler.num_examples - 1, min(_LOOKED_AT, sampler.num_examples), dtype=int).tolist()
    examples = [example_of(raw, index) for index in looked_at]
    same = [example for index, example in zip(looked_at, examples, strict=True) if example == example_of(raw, index)]
    if not same:
        raise ValueError(
            "train_dataset must be the same on all processes, got one of which no example is the same at a second look, so "
            "that this cannot be seen. Draw random numbers from the global generators of torch, NumPy or Python."
        )
    digest.update(b"".join(same))
    return digest.hexdigest()


def example_of(dataset: Any, index: int) -> bytes:
    """Return an example, for the same random numbers each time."""
    written = io.BytesIO()
    with filled_generators(index):
        ByContent(written).dump(dataset[index])
    return written.getvalue()


class ByContent(pickle.Pickler):
    """Writes tensors by their numbers: torch writes where they lie in memory too, so that no two looks are the same."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is made of an array."""
        return (torch.as_tensor, (value.detach().cpu().double().numpy(),)) if isinstance(value, Tensor) else NotImplemented


def refuse_different_data(digests: Sequence[str]) -> None:
    """Refuse processes with different data, by the digests of all in the order of their ranks."""
    # Sensitivity: an example that stands at one number here and at another there is in two shards, and is drawn twice.
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise ValueError(
            f"train_dataset must be the same on all processes, in the same order, got different ones on processes 0 and "
            f"{other}: some examples would count twice, and some never. Shuffle and split with a fixed seed."
        )
