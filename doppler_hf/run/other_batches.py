"""Batches for callbacks to look at, which have nothing to do with the random batches of the run."""

import secrets
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, RandomSampler

from doppler_hf.privacy.batching.micro_batches import PrivateLoader


class OtherBatches(DataLoader[Any]):
    """The `train_dataloader` that callbacks get: collated batches of random rows on the device, as with Transformers.

    Privacy: which records are in the batch of a step is secret, and each batch may be used in its own step only. So this
    loader draws its rows from a generator of its own, and touches neither the sampler nor the global generators, from which
    masks and dropout are drawn. What a callback computes from the rows is as raw as what it computes from the data set.

    Args:
        loader: The loader of the run. This loader has the same rows and collator, and as many batches.
        rows: The number of rows in a batch.
        device: Where the batches are put.
    """

    def __init__(self, loader: PrivateLoader, *, rows: int, device: torch.device) -> None:
        generator = torch.Generator()
        generator.manual_seed(secrets.randbits(63))
        number = range(len(loader.examples))
        sampler = RandomSampler(number, num_samples=rows * len(loader), generator=generator)
        super().__init__(
            loader.examples,
            batch_size=rows,
            sampler=sampler,
            collate_fn=lambda examples: send_to_device(loader.collator(examples), device),
            generator=generator,
        )
