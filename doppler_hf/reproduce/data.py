"""Data in three parts: to train on, to choose learning rates by, and to report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from doppler_hf.reproduce.networks import Classifier
from doppler_hf.workloads.data_sources import load_images


@dataclass(frozen=True)
class Sources:
    """Where data and pretrained models come from.

    Attributes:
        data_dir: A folder with mnist/, cifar10/ and glue/TASK/, each with its splits as parquet files; None for the hub.
        encoder: Hub name or folder of a BERT-like encoder.
        cache_dir: Where the outputs of frozen layers are kept.
    """

    data_dir: str | None
    encoder: str
    cache_dir: Path

    def folder(self, name: str) -> str | None:
        """Return the folder of a data set, or None for the hub."""
        return None if self.data_dir is None else f"{self.data_dir}/{name}"


class Data(NamedTuple):
    """Three parts of a data set, and what they need.

    Attributes:
        train: To train on.
        tuning: Cut from the training data, to choose learning rates by.
        report: What the data set is evaluated on.
        network: Makes a network for them, with new weights where it is not pretrained.
        collator: Makes a batch of examples.
    """

    train: Any
    tuning: Any
    report: Any
    network: Callable[[], nn.Module]
    collator: Callable[[list[Any]], Any] = default_collate


class Images(Dataset[dict[str, Any]]):
    """Images as numbers from -1 to 1, and their labels.

    Args:
        pixels: Shape (images, height, width) or (images, height, width, channels), 8 bits each.
        labels: Shape (images,).
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self._pixels, self._labels = pixels, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return some images, read together."""
        rows = torch.as_tensor(indices)
        values = self._pixels[rows].float() / 127.5 - 1.0
        values = values[:, None] if values.ndim == 3 else values.permute(0, 3, 1, 2)
        return [{"inputs": image, "labels": label} for image, label in zip(values, self._labels[rows], strict=True)]


def apart(num_examples: int, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to train on and those to choose by, the same on every machine."""
    order = np.random.default_rng(0).permutation(num_examples)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def images(name: str, network: Callable[[], nn.Module], *, held_out: int) -> Callable[[Sources], Data]:
    """Return what loads a data set of images.

    Args:
        name: The data set.
        network: Makes a network of images, shape (batch, channels, height, width).
        held_out: How many training examples to choose by.
    """

    def load(sources: Sources) -> Data:
        splits = load_images(name, None if name == "digits" else sources.folder(name))
        pixels, labels = (
            {split: torch.from_numpy(np.stack([np.asarray(each) for each in splits[split][column]])) for split in splits}
            for column in ("image", "label")
        )
        train, tuning = apart(len(labels["train"]), held_out)
        return Data(
            train=Images(pixels["train"][train], labels["train"][train]),
            tuning=Images(pixels["train"][tuning], labels["train"][tuning]),
            report=Images(pixels["test"], labels["test"]),
            network=lambda: Classifier(network()),
        )

    return load
