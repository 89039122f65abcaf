"""Data sets of images: their pixels, their scattering coefficients, or the images of users.

A loader takes the name of the data set, what makes a network of its images, shape (batch, channels, height, width), and how
many training examples are held out to choose by.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from scripts.studies.data import Data, Loader, Rows, Sources, apart, digest_of, in_parts, kept
from scripts.studies.scattering import Scattering
from scripts.training.data_sources import load_images

# How many images are scattered together.
TOGETHER: Final = 100


class Images:
    """A data set of images, as numbers from -1 to 1, from a folder or, for None, the hub.

    Attributes:
        labels: Split → labels, shape (images,).
        contents: The bytes of all that there is.
    """

    def __init__(self, name: str, folder: str | None) -> None:
        splits = load_images(name, folder, flag="--data-dir")
        self._pixels, self.labels = (
            {split: torch.from_numpy(np.stack([np.asarray(each) for each in splits[split][column]])) for split in splits}
            for column in ("image", "label")
        )
        self.contents = [each[split].numpy().tobytes() for split in splits for each in (self._pixels, self.labels)]

    @property
    def side(self) -> int:
        """Their side in pixels."""
        return self.inputs_of(np.arange(1), split="train").shape[-1]

    def inputs_of(self, rows: np.ndarray, *, split: str) -> Tensor:
        """Return some images, shape (batch, channels, height, width)."""
        values = self._pixels[split][rows].float() / 127.5 - 1.0
        return values[:, None] if values.ndim == 3 else values.permute(0, 3, 1, 2)

    def parts(self, name: str, network: Callable[[], nn.Module], *, held_out: int) -> Data:
        """Return the three parts."""
        return in_parts(digest_of(name, held_out, *self.contents), self.inputs_of, self.labels, network, held_out=held_out)


def images(name: str, network: Callable[[], nn.Module], *, held_out: int) -> Loader:
    """Return what loads a data set of images."""

    def read(folder: str | None, sources: Sources) -> Data:
        data = Images(name, folder).parts(name, network, held_out=held_out)
        shape = data.train[0]["inputs"].shape
        return data._replace(train=in_table(data.train), collator=functools.partial(collated, shape=shape))

    return _loader(name, read)


def images_of_users(name: str, network: Callable[[], nn.Module], *, held_out: int, per_user: int) -> Loader:
    """Return what loads training images of users, who are in the column `user` and have `per_user` each."""

    def read(folder: str | None, sources: Sources) -> Data:
        all_images = Images(name, folder)
        data = all_images.parts(name, network, held_out=held_out)
        labels = all_images.labels["train"]
        users = shared_out(labels[apart(len(labels), held_out)[0]].numpy(), per_user=per_user)
        return data._replace(digest=digest_of(data.digest, "of users", per_user), train=of_users(data.train, users))

    return _loader(name, read)


def scattered_images(name: str, network: Callable[[], nn.Module], *, held_out: int) -> Loader:
    """Return what loads the scattering coefficients of images, which are computed once."""

    def read(folder: str | None, sources: Sources) -> Data:
        all_images = Images(name, folder)
        transform = [each.numpy().tobytes() for each in Scattering(all_images.side).buffers()]
        digest = digest_of(name, held_out, *all_images.contents, *transform)
        coefficients = kept(sources.cache_dir / f"{name}-scattered-{digest}.pt", lambda: scattered(all_images))
        labels = all_images.labels
        return in_parts(digest, lambda rows, *, split: coefficients[split][rows].float(), labels, network, held_out=held_out)

    return _loader(name, read)


def _loader(name: str, read: Callable[[str | None, Sources], Data]) -> Loader:
    return Loader(None if name == "digits" else name, read)


def scattered(all_images: Images) -> dict[str, Tensor]:
    """Return the scattering coefficients of images in half precision, by split."""
    transform, found = Scattering(all_images.side), {}
    with torch.no_grad():
        for split, labels in all_images.labels.items():
            together = np.array_split(np.arange(len(labels)), math.ceil(len(labels) / TOGETHER))
            found[split] = torch.cat([transform(all_images.inputs_of(rows, split=split)).half() for rows in together])
    return found


def shared_out(labels: np.ndarray, *, per_user: int) -> np.ndarray:
    """Return the user of every example, shape (num_examples,): each has that many, of two classes as a rule.

    As in McMahan et al. 2017 (https://arxiv.org/abs/1602.05629): sorted by class, they are cut into two shards a user.
    """
    by_class, shard = np.argsort(labels, kind="stable"), per_user // 2
    shards = np.random.default_rng(0).permutation(math.ceil(len(labels) / shard))
    users = np.empty(len(labels), dtype=np.int64)
    users[by_class] = shards[np.arange(len(labels)) // shard] // 2
    return users


def in_table(rows: Rows) -> Any:
    """Return a `datasets.Dataset` of rows, of which the private loader reads many at once.

    Inputs are flat lists of one length in it, which are read five times as fast as arrays of more dimensions.
    """
    import datasets

    batch = default_collate(rows.__getitems__(range(len(rows))))
    inputs, labels = batch["inputs"].flatten(1).numpy(), batch["labels"].numpy()
    kinds = {"inputs": datasets.List(datasets.Value("float32"), length=inputs.shape[1]), "labels": datasets.Value("int64")}
    return datasets.Dataset.from_dict({"inputs": inputs, "labels": labels}, datasets.Features(kinds)).with_format("torch")


def collated(examples: list[Any], *, shape: tuple[int, ...]) -> Any:
    """Return a batch of examples, whose inputs have a shape again."""
    batch = default_collate(examples)
    return batch | {"inputs": batch["inputs"].view(-1, *shape)}


def of_users(rows: Rows, users: np.ndarray) -> Any:
    """Return a `datasets.Dataset` of rows with the column `user`, each of which is made when it is fetched."""
    import datasets

    table = datasets.Dataset.from_dict({"row": np.arange(len(rows)), "user": users})

    def made(batch: dict[str, Any]) -> dict[str, list[Any]]:
        examples = rows.__getitems__(batch["row"])
        return {name: [example[name] for example in examples] for name in examples[0]}

    return table.with_transform(made)
