"""The tasks: images in memory, of which a draw is one look-up, and the networks that are trained on them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from scripts.studies.data import apart, kept
from scripts.studies.images import Images
from scripts.studies.networks import Classifier, cifar_cnn, mnist_cnn, perceptron

HELD_OUT: Final = 5000


@dataclass(frozen=True)
class Task:
    """What is trained on what.

    Attributes:
        source: The data set's name.
        network: Makes a network with new weights.
        micro_batch: How many images are computed together: as many as fit into a core's caches.
        pooled: By how much each side of the images is divided; their pixels are means.
        weight: The share of the time that is spent on this task, in relation to the others.
        later: After how many seconds of the others, for one of weight 1, its turn comes first.
        is_left_out: Whether it is trained only where it is asked for.
        flips: Whether an image and its mirror image show the same.
        seeds: With how many seeds the best rates are reported: more where the test accuracies scatter more.
    """

    source: str
    network: Callable[[], nn.Module]
    micro_batch: int
    pooled: int = 1
    weight: float = 1.0
    later: float = 0.0
    is_left_out: bool = False
    flips: bool = False
    seeds: int = 3


class MeanOfFour(nn.Module):
    """The mean of every two by two pixels: `nn.AvgPool2d(2)` in a third of its time on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Return images of half the side."""
        rows = x[:, :, ::2] + x[:, :, 1::2]
        return (rows[..., ::2] + rows[..., 1::2]) / 4


def five_layers(*, width: int = 64, side: int = 32) -> nn.Module:
    """Return the five-layer CNN; with a quarter of its width it has 103,050 weights instead of 1,573,386."""
    network = cifar_cnn(10, width=width, side=side)
    return nn.Sequential(*(MeanOfFour() if isinstance(layer, nn.AvgPool2d) else layer for layer in network))


def cnn_of_mnist() -> nn.Module:
    """Return the CNN for MNIST, with channels last in memory, which takes two thirds of the time on a CPU."""
    return mnist_cnn().to(memory_format=torch.channels_last)


TASKS: Final[Mapping[str, Task]] = {
    "mnist-perceptron": Task("mnist", perceptron, 500),
    "cifar10-half": Task(
        "cifar10", partial(five_layers, width=16, side=16), 250, pooled=2, weight=2.0, later=2500.0, flips=True, seeds=5
    ),
    "cifar10": Task("cifar10", partial(five_layers, width=16), 125, weight=2.0, later=5000.0, flips=True),
    "mnist": Task("mnist", cnn_of_mnist, 250, later=5000.0),
    "cifar10-full": Task("cifar10", five_layers, 50, is_left_out=True, flips=True),
}
"""Name → task. `cifar10` is the five-layer CNN with a quarter of its channels, `cifar10-half` the same on 16 x 16 pixels."""


class RowNumbers(Dataset[int]):
    """Numbers of rows in the place of examples, which the collator then takes from memory all together."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = [*rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> int:
        return self._rows[index]

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        """Return the numbers of some rows."""
        return [self._rows[index] for index in indices]


@dataclass(frozen=True)
class Loaded:
    """A task's images in memory: training rows, rows held out of them to choose by, and the test set."""

    inputs: Mapping[str, Tensor]  # split → pixels of one byte, shape (images, channels, height, width)
    labels: Mapping[str, Tensor]
    train: RowNumbers
    held_out: Sequence[int]

    @property
    def test(self) -> str:
        """The name of the other split."""
        (name,) = self.labels.keys() - {"train"}
        return name

    def batch(self, rows: Sequence[int], *, split: str = "train") -> dict[str, Tensor]:
        """Return a batch of some rows, with pixels from -1 to 1."""
        index = torch.as_tensor(rows)
        return {"inputs": self.inputs[split][index].float() / 127.5 - 1.0, "labels": self.labels[split][index]}

    def moved_batch(self, rows: Sequence[int], *, flips: bool) -> dict[str, Tensor]:
        """Return a batch of some rows, each moved at random by up to an eighth of its side, and mirrored if it may be."""
        batch = self.batch(rows)
        images = batch["inputs"]
        number, _, height, width = images.shape
        most = height // 8
        around = F.pad(images, (most,) * 4, mode="reflect")
        down, right = torch.randint(2 * most + 1, (2, number))
        columns = torch.arange(width).expand(number, -1)
        if flips:
            columns = torch.where(torch.rand(number, 1) < 0.5, columns.flip(1), columns)
        vertical, horizontal = down[:, None] + torch.arange(height), right[:, None] + columns
        of_row = torch.arange(number)[:, None, None]
        # Indices on both sides of a slice bring their own dimensions to the front.
        batch["inputs"] = around[of_row, :, vertical[:, :, None], horizontal[:, None, :]].permute(0, 3, 1, 2).contiguous()
        return batch


def load(task: Task, *, data_dir: str | None, cache_dir: Path) -> Loaded:
    """Read the images of a task from a local folder, or from the hub for None."""

    def read() -> dict[str, dict[str, Tensor]]:
        images = Images(task.source, None if data_dir is None else f"{data_dir}/{task.source}")
        found: dict[str, Any] = {"inputs": {}, "labels": images.labels}
        for split, labels in images.labels.items():
            values = (images.inputs_of(torch.arange(len(labels)).numpy(), split=split) + 1.0) * 127.5
            found["inputs"][split] = F.avg_pool2d(values, task.pooled).round().to(torch.uint8)
        return found

    found = kept(cache_dir / f"regime-{task.source}-{task.pooled}.pt", read)
    # With the channels last, as files have them, normalizations of groups take ten times as long on a CPU.
    found["inputs"] = {split: values.contiguous() for split, values in found["inputs"].items()}
    train, held_out = apart(len(found["labels"]["train"]), HELD_OUT)
    return Loaded(found["inputs"], found["labels"], RowNumbers(train.tolist()), held_out.tolist())


def network_of(task: Task) -> nn.Module:
    """Return a new network, whose initialization follows the global generator."""
    return Classifier(task.network())
