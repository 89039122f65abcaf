"""Data in three parts: to train on, to choose learning rates by, and to report."""

import functools
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from scripts.studies.networks import Classifier


@dataclass(frozen=True)
class Sources:
    """Where data and pretrained models come from.

    Attributes:
        data_dir: A folder with mnist/, cifar10/, cifar100/ and glue/TASK/ as parquet files; None for the hub.
        encoder: Hub name or folder of a BERT-like encoder.
        cache_dir: Where what is computed once is kept: outputs of frozen layers, and scattering coefficients.
    """

    data_dir: str | None
    encoder: str
    cache_dir: Path


class Data(NamedTuple):
    """Three parts of a data set, and what they need.

    Attributes:
        digest: Of all examples, of their parts, and of what was pretrained: by it a run knows what it was trained on.
        train: To train on.
        tuning: Cut from the training data, to choose learning rates by.
        report: What the data set is evaluated on.
        network: Makes a network for them, with new weights where it is not pretrained.
        collator: Makes a batch of examples.
    """

    digest: str
    train: Any
    tuning: Any
    report: Any
    network: Callable[[], nn.Module]
    collator: Callable[[list[Any]], Any] = default_collate


@dataclass(frozen=True)
class Loader:
    """Loads the data of a task.

    Attributes:
        folder: Where they lie in a local folder of all data; None for data that come with a package.
        read: Reads them from there, or from the hub for None.
    """

    folder: str | None
    read: Callable[[str | None, Sources], Data]

    def __call__(self, sources: Sources) -> Data:
        """Return the data, from a local folder of all data if there is one."""
        is_local = sources.data_dir is not None and self.folder is not None
        return self.read(f"{sources.data_dir}/{self.folder}" if is_local else None, sources)


class Rows(Dataset[dict[str, Any]]):
    """Inputs and labels of some rows: `inputs_of` takes their numbers, shape (batch,)."""

    def __init__(self, inputs_of: Callable[[np.ndarray], Tensor], labels: Tensor, rows: np.ndarray) -> None:
        self._inputs_of, self._labels, self._rows = inputs_of, labels, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return some examples, read together."""
        rows = self._rows[list(indices)]
        pairs = zip(self._inputs_of(rows), self._labels[rows], strict=True)
        return [{"inputs": values, "labels": label} for values, label in pairs]

    def select(self, indices: Sequence[int]) -> "Rows":
        """Return some of them, as a `datasets.Dataset` does."""
        return Rows(self._inputs_of, self._labels, self._rows[list(indices)])


def apart(num_examples: int, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to train on and those to choose by, the same on every machine."""
    order = np.random.default_rng(0).permutation(num_examples)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def in_parts(
    digest: str,
    inputs_of: Callable[..., Tensor],
    labels: dict[str, Tensor],
    network: Callable[[], nn.Module],
    *,
    held_out: int,
) -> Data:
    """Return the three parts of data that are read in rows.

    Args:
        digest: Of them.
        inputs_of: Rows, shape (batch,), and split → inputs, shape (batch, *features).
        labels: Of every split, which are two: "train" and the one that is reported.
        network: Makes a network of inputs.
        held_out: How many training examples to choose by.
    """
    (report,) = labels.keys() - {"train"}
    of_train, of_report = (functools.partial(inputs_of, split=split) for split in ("train", report))
    train, tuning = apart(len(labels["train"]), held_out)
    return Data(
        digest=digest,
        train=Rows(of_train, labels["train"], train),
        tuning=Rows(of_train, labels["train"], tuning),
        report=Rows(of_report, labels[report], np.arange(len(labels[report]))),
        network=lambda: Classifier(network()),
    )


def kept(path: Path, compute: Callable[[], Any]) -> Any:
    """Return what a file holds, or compute it and write it there: tensors, in tuples and dictionaries."""
    if path.exists():
        return torch.load(path)
    found = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{secrets.token_hex(4)}")  # a random name, because two studies may write it at once
    torch.save(found, unfinished)
    unfinished.replace(path)
    return found


def digest_of(*parts: Any) -> str:
    """Return 16 hexadecimal digits for bytes, texts, numbers, and lists of them."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
