"""The data sets of the tasks, and the names of their columns.

There are three sources: the Hugging Face hub, a local folder of parquet files, and scikit-learn's built-in `digits`. The
folder has the hub's column names, and each split in one file or in shards named as on the hub
(`train-00000-of-00001.parquet`). Every loader returns a `DatasetDict` of the training split and the splits to evaluate on,
or raises a `ValueError` that says what is missing.
GLUE's test splits are left out, because they have no labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from doppler_hf.errors import Refusal
from doppler_hf.extras import require
from scripts.training.hub import hub_or_folder

if TYPE_CHECKING:
    from datasets import DatasetDict


@dataclass(frozen=True)
class GlueTask:
    """The columns, scores (Wang et al., *GLUE*, ICLR 2019, Table 1) and splits of one GLUE task."""

    text_columns: tuple[str, ...]  # one or two, in the order in which the model reads them
    num_labels: int = 2  # classes; 1 for a regression
    metrics: tuple[str, ...] = ("accuracy",)
    validation_splits: tuple[str, ...] = ("validation",)  # with labels

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number and not a class."""
        return self.num_labels == 1


GLUE_HUB_NAME = "nyu-mll/glue"
_SENTENCES, _OF_MNLI = ("sentence1", "sentence2"), ("validation_matched", "validation_mismatched")
GLUE_TASKS: dict[str, GlueTask] = {
    "cola": GlueTask(("sentence",), metrics=("matthews_correlation",)),
    "mnli": GlueTask(("premise", "hypothesis"), num_labels=3, validation_splits=_OF_MNLI),
    "mrpc": GlueTask(_SENTENCES, metrics=("accuracy", "f1")),
    "qnli": GlueTask(("question", "sentence")),
    "qqp": GlueTask(("question1", "question2"), metrics=("accuracy", "f1")),
    "rte": GlueTask(_SENTENCES),
    "sst2": GlueTask(("sentence",)),
    "stsb": GlueTask(_SENTENCES, num_labels=1, metrics=("pearson", "spearmanr")),
    "wnli": GlueTask(_SENTENCES),
}

IMAGE_HUB_NAMES: dict[str, str] = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100", "mnist": "ylecun/mnist"}
# Other names on the hub: CIFAR-10's, and CIFAR-100's, whose other labels are groups of classes.
_IMAGE_COLUMNS = {"img": "image", "fine_label": "label"}


def glue_task(task_name: str) -> GlueTask:
    """Look up a GLUE task, or refuse its name."""
    if task_name not in GLUE_TASKS:
        raise Refusal("unknown-value", f"task_name must be one of {', '.join(GLUE_TASKS)}, got {task_name!r}.")
    return GLUE_TASKS[task_name]


def load_glue(task_name: str, dataset_dir: str | None = None, *, flag: str = "--dataset_dir") -> "DatasetDict":
    """Load the labelled splits of a GLUE task, from the hub or a folder, which the argument `flag` takes.

    It has `train.parquet` and `validation.parquet`, of MNLI `validation_matched.parquet` or the mismatched one.
    """
    task = glue_task(task_name)
    names = {split: split for split in ("train", *task.validation_splits)}
    splits = load_splits(GLUE_HUB_NAME, task_name, splits=names, dataset_dir=dataset_dir, flag=flag)
    from datasets import Value

    _require_columns(splits, (*task.text_columns, "label"))
    # The loss of a regression needs floating targets, whichever numbers a file holds.
    return splits.cast_column("label", Value("float32")) if task.is_regression else splits


def load_images(
    dataset_name: str, dataset_dir: str | None = None, *, unit_column: str | None = None, flag: str = "--dataset_dir"
) -> "DatasetDict":
    """Load `train` and `test` of labelled images: `image` (decoded to PIL images), `label` (with names) and that of units.

    They come from the hub, from scikit-learn (`digits`), or from a folder, which the argument `flag` takes.
    """
    if dataset_dir is None and dataset_name == "digits":
        return _as_images(_load_digits(), unit_column)
    if dataset_dir is None and dataset_name not in IMAGE_HUB_NAMES:
        raise Refusal(
            "unknown-value",
            f"dataset_name must be one of {', '.join(IMAGE_HUB_NAMES)}, digits, got {dataset_name!r}. For other images give "
            f"a local folder with {flag}.",
        )
    hub_name = IMAGE_HUB_NAMES.get(dataset_name, dataset_name)
    names = {"train": "train", "test": "test"}
    return _as_images(load_splits(hub_name, None, splits=names, dataset_dir=dataset_dir, flag=flag), unit_column)


def load_splits(
    hub_name: str, config: str | None, *, splits: Mapping[str, str], dataset_dir: str | None, flag: str = "--dataset_dir"
) -> "DatasetDict":
    """Load splits from the hub, our name → the hub's, or those that a folder has: `train`, and one of the others or more."""
    require("recipes")
    from datasets import DatasetDict, load_dataset

    if dataset_dir is not None:
        others = [name for name in splits if name != "train"]
        return load_dataset("parquet", data_files=_files_of(Path(dataset_dir), others, flag=flag))
    with hub_or_folder(hub_name, flag):
        # Not all that the hub has: GLUE's test splits have no labels.
        return DatasetDict(load_dataset(hub_name, config, split=dict(splits)))


def _files_of(folder: Path, evaluation_splits: Sequence[str], *, flag: str) -> dict[str, list[str]]:
    from pyarrow import parquet

    if not folder.is_dir():
        raise Refusal("no-such-folder", f"{flag} must be a folder, got {folder}. Give one with train.parquet.")
    files = {}
    for split in ("train", *evaluation_splits):
        # A split in one file, or in the shards of a download from the hub.
        whole, shards = [*folder.glob(f"{split}.parquet")], sorted(folder.glob(f"{split}-*-of-*.parquet"))
        # Sensitivity: of both, every record would stand in two rows.
        if whole and shards:
            both = f"{whole[0].name} and {shards[0].name}"
            raise Refusal("split-twice", f"{flag} {folder} must have each split once, got {both}. Remove one of them.")
        if whole or shards:
            files[split] = [str(path) for path in whole or shards]
    for wanted in (("train",), evaluation_splits):
        if not files.keys() & set(wanted):
            names = " or ".join(f"{split}.parquet" for split in wanted)
            raise Refusal("split-missing", f"{flag} {folder} has no {names}. Add the file.")
    for split, paths in files.items():
        if not any(parquet.read_metadata(path).num_rows for path in paths):
            raise Refusal(
                "split-without-rows",
                f"The split {split!r} in {flag} {folder} has no rows. Check whether a filter removed them all.",
            )
    return files


def _require_columns(splits: Mapping[str, Any], columns: Sequence[str]) -> None:
    for name, split in splits.items():
        for column in columns:
            if column not in split.column_names:
                found = ", ".join(split.column_names)
                raise Refusal(
                    "column-missing", f"The split {name!r} must have a column {column!r}, got {found}. Rename a column."
                )


def selected(splits: "DatasetDict", columns: Sequence[str], unit_column: str | None) -> "DatasetDict":
    """Return some columns of all splits, and of the training split that of units too."""
    _require_columns(splits, columns)
    selected = splits.select_columns([*columns])
    if unit_column is not None and unit_column not in columns:
        _require_columns({"train": splits["train"]}, (unit_column,))
        selected["train"] = splits["train"].select_columns([*columns, unit_column])
    return selected


def _as_images(splits: "DatasetDict", unit_column: str | None) -> "DatasetDict":
    """Give the columns of every source one name and one type."""
    from datasets import ClassLabel, Image

    renamed = {name: ours for name, ours in _IMAGE_COLUMNS.items() if name in splits["train"].column_names}
    splits = splits.rename_columns(renamed)
    _require_columns(splits, ("image", "label"))
    if not isinstance(splits["train"].features["label"], ClassLabel):
        # The number of classes must be public. Counted in the training labels it would be a function of private records.
        raise Refusal(
            "no-class-names",
            f"The column 'label' must have class names, got {splits['train'].features['label']}. Save the data after "
            "dataset.cast_column('label', datasets.ClassLabel(names=[...])).",
        )
    return selected(splits, ("image", "label"), unit_column).cast_column("image", Image())


def _load_digits() -> "DatasetDict":
    """Return scikit-learn's 1,797 images of handwritten digits, 8×8 pixels.

    Of each digit every fifth image, in the order of scikit-learn, is a test image: 1,442 for training and 355 for
    evaluation, the same on every machine.
    """
    require("recipes")
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    of_digit = bunch.target[:, None] == np.arange(10)
    is_test = (of_digit.cumsum(axis=0)[of_digit] - 1) % 5 == 4
    features = Features({"image": Image(), "label": ClassLabel(names=[str(digit) for digit in range(10)])})
    rows = {"train": ~is_test, "test": is_test}
    columns = {name: {"image": list(pixels[own]), "label": bunch.target[own].tolist()} for name, own in rows.items()}
    return DatasetDict({name: Dataset.from_dict(columns[name], features) for name in rows})
