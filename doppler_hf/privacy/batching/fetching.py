"""Examples of the training set, each fetched as it is by itself."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import numpy as np
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from doppler_hf.privacy.batching.sampling import OfStep

# The formats of `datasets` that convert number by number, without code of the user's.
_OF_NUMBERS: Final = ("numpy", "torch")


def fetch(examples: Any, indices: Sequence[int], *, numbers: Set[str] = frozenset()) -> list[Any]:
    """Return some examples, each as it is alone."""
    if is_read_together(examples, numbers):
        rows = examples.__getitems__(list(indices))
        return [{name: _of_its_own(value) for name, value in row.items()} for row in rows]
    return [fetch_one(examples, index) for index in indices]


def is_read_together(examples: Any, numbers: Set[str]) -> bool:
    """Return whether rows that are read together are what each is alone, without code of the user's; see `fetch`."""
    if not is_stored(examples):
        return False
    # Sensitivity: Python's own format converts each value by itself. Others convert a whole column: one missing value turns
    # the integers of all rows fetched with it into floats. Without missing values each row is what it is alone.
    form = examples.format
    if form["type"] is None:
        return is_of_datasets(examples.features)
    columns = examples.column_names if form["output_all_columns"] else form["columns"]
    return form["type"] in _OF_NUMBERS and not form["format_kwargs"] and numbers >= {*columns}


def is_of_datasets(feature: Any) -> bool:
    """Return whether a column's type, with all types in it, is of `datasets`: others may run code of their own."""
    if isinstance(feature, Mapping):
        return all(map(is_of_datasets, feature.values()))
    if isinstance(feature, list):
        return all(map(is_of_datasets, feature))
    return type(feature).__module__.startswith("datasets.") and is_of_datasets(getattr(feature, "feature", []))


def is_stored(examples: Any) -> bool:
    """Return whether examples are read from a table as they stand there, as by `datasets` without a transform.

    Not by a subclass or a method of the object's own, which may change them, or make several of one.
    """
    return is_table(examples) and examples.format["type"] != "custom"


def is_table(examples: Any) -> bool:
    """Return whether examples are those of a table of `datasets`, as they stand there or behind a transform."""
    is_plain = type(examples).__module__ == "datasets.arrow_dataset" and "__getitems__" not in vars(examples)
    return is_plain and isinstance(examples.format, Mapping)


def _of_its_own(value: Any) -> Any:
    # Sensitivity: rows that are read together share memory. A collator that writes into one must not reach another.
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def fetch_one(examples: Any, index: int) -> Any:
    """Return one example, as torch's loaders fetch it: by the method for lists of them, if there is one."""
    if getattr(examples, "__getitems__", None) is None:
        return examples[index]
    # Sensitivity: alone, since a transform of many could mix them, or make several rows of one.
    rows = list(examples.__getitems__([index]))
    if len(rows) != 1:
        # Not their number: it is about a private example, and messages end in logs.
        raise ValueError(
            "train_dataset must return one row for each example, got more or fewer from its transform. Make a row of each "
            "window or piece before training, as datasets.Dataset.map does, and set privacy_unit_column to the column of "
            "the original record."
        )
    return rows[0]


class DrawnExamples(Dataset[Any]):
    """A data set of an example's views, with the size of its unit, in lists that know the step of their draw."""

    def __init__(
        self, examples: Any, counts: Int[np.ndarray, " num_examples"] | None, *, numbers: Set[str], views: int = 1
    ) -> None:
        self._examples, self._counts, self._views, self._numbers = examples, counts, views, numbers

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._examples)

    def __getitems__(self, indices: OfStep) -> OfStep:
        """Return all views of several examples side by side, each with how many examples are drawn with its unit."""
        # Sensitivity: here an example's views are made, all of them and side by side, and so they are averaged.
        rows = [index for index in indices for _ in range(self._views)]
        examples = fetch(self._examples, rows, numbers=self._numbers)
        counts = [1] * len(rows) if self._counts is None else self._counts[rows].tolist()
        return OfStep(zip(examples, counts, strict=True), step=indices.step)
