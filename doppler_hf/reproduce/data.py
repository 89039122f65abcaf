"""Data in three parts: to train on, to choose learning rates by, and to report."""

import functools
import hashlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from doppler_hf.reproduce.networks import HASHED_WORDS, Classifier
from doppler_hf.workloads.data_sources import glue_task, load_glue, load_images
from doppler_hf.workloads.scattering import Scattering

# How many images are scattered together.
TOGETHER: Final = 100


@dataclass(frozen=True)
class Sources:
    """Where data and pretrained models come from.

    Attributes:
        data_dir: A folder with mnist/, cifar10/, cifar100/ and glue/TASK/, each with its splits as parquet files; None for
            the hub.
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
        folder: Where they lie, in a local folder of all data; None for data that come with a package.
        read: Reads them from a folder, or from the hub for None.
    """

    folder: str | None
    read: Callable[[str | None, Sources], Data]

    def __call__(self, sources: Sources) -> Data:
        """Return the data, from a local folder of all data if there is one."""
        is_local = sources.data_dir is not None and self.folder is not None
        return self.read(f"{sources.data_dir}/{self.folder}" if is_local else None, sources)


class Rows(Dataset[dict[str, Any]]):
    """Inputs and labels of some rows.

    Args:
        inputs_of: Rows, shape (batch,) → inputs, shape (batch, *features).
        labels: Of all rows.
        rows: Which of them these are.
    """

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
    """Return a `datasets.Dataset` of rows, of which the private loader reads many at once."""
    import datasets

    batch = default_collate(rows.__getitems__(range(len(rows))))
    kinds = {"inputs": datasets.Array3D(tuple(batch["inputs"].shape[1:]), "float32"), "labels": datasets.Value("int64")}
    columns = {name: values.numpy() for name, values in batch.items()}
    return datasets.Dataset.from_dict(columns, datasets.Features(kinds)).with_format("torch")


def of_users(rows: Rows, users: np.ndarray) -> Any:
    """Return a `datasets.Dataset` of rows with the column `user`, each of which is made when it is fetched."""
    import datasets

    table = datasets.Dataset.from_dict({"row": np.arange(len(rows)), "user": users})

    def made(batch: dict[str, Any]) -> dict[str, list[Any]]:
        examples = rows.__getitems__(batch["row"])
        return {name: [example[name] for example in examples] for name in examples[0]}

    return table.with_transform(made)


def images(
    name: str,
    network: Callable[[], nn.Module],
    *,
    held_out: int,
    is_scattered: bool = False,
    per_user: int | None = None,
) -> Loader:
    """Return what loads a data set of images, as numbers from -1 to 1.

    Args:
        name: The data set.
        network: Makes a network of images, shape (batch, channels, height, width), or of their coefficients.
        held_out: How many training examples to choose by.
        is_scattered: Whether the examples are scattering coefficients of the images, which are computed once.
        per_user: How many training images a user has, if they are those of users; see `shared_out`.
    """

    def read(folder: str | None, sources: Sources) -> Data:
        splits = load_images(name, folder, flag="--data-dir")
        pixels, labels = (
            {split: torch.from_numpy(np.stack([np.asarray(each) for each in splits[split][column]])) for split in splits}
            for column in ("image", "label")
        )

        def inputs_of(rows: np.ndarray, *, split: str) -> Tensor:
            values = pixels[split][rows].float() / 127.5 - 1.0
            return values[:, None] if values.ndim == 3 else values.permute(0, 3, 1, 2)

        contents = (each[split].numpy().tobytes() for split in splits for each in (pixels, labels))
        if not is_scattered:
            data = _parts(digest_of(name, held_out, *contents), inputs_of, labels, network, held_out=held_out)
            if per_user is None:
                return data._replace(train=in_table(data.train))
            users = shared_out(labels["train"][apart(len(labels["train"]), held_out)[0]].numpy(), per_user=per_user)
            return data._replace(digest=digest_of(data.digest, "of users", per_user), train=of_users(data.train, users))
        digest = digest_of(name, held_out, *contents, "scattered")
        counts = {split: len(labels[split]) for split in splits}
        path = sources.cache_dir / f"{name}-scattered-{digest}.pt"
        coefficients = kept(path, lambda: scattered(inputs_of, counts, side=pixels["train"].shape[1]))
        return _parts(digest, lambda rows, *, split: coefficients[split][rows].float(), labels, network, held_out=held_out)

    return Loader(None if name == "digits" else name, read)


def scattered(inputs_of: Callable[..., Tensor], counts: Mapping[str, int], *, side: int) -> dict[str, Tensor]:
    """Return the scattering coefficients of images in half precision, by split.

    Args:
        inputs_of: Rows and split → images, shape (batch, channels, side, side).
        counts: How many images a split has.
        side: Of the images in pixels.
    """
    transform, found = Scattering(side), {}
    with torch.no_grad():
        for split, count in counts.items():
            together = np.array_split(np.arange(count), math.ceil(count / TOGETHER))
            found[split] = torch.cat([transform(inputs_of(rows, split=split)).half() for rows in together])
    return found


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
        return _parts(digest, inputs_of, labels, network, held_out=held_out)

    return Loader(f"glue/{task_name}", read)


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


def _parts(
    digest: str,
    inputs_of: Callable[..., Tensor],
    labels: dict[str, Tensor],
    network: Callable[[], nn.Module],
    *,
    held_out: int,
) -> Data:
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
