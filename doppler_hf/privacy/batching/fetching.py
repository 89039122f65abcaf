"""Examples of the training set, each fetched by itself."""

import functools
from collections.abc import Callable, Sequence, Set
from typing import Any, Final

import numpy as np
from jaxtyping import Int
from torch.utils.data import Dataset

from doppler_hf.privacy.batching.columns import columns_of_numbers, is_stored
from doppler_hf.privacy.batching.sampling import OfStep

# The formats of `datasets` that convert number by number, without code of the user's.
_OF_NUMBERS: Final = ("numpy", "torch")


def fetch(examples: Any, indices: Sequence[int], *, fill: Callable[[], None], numbers: Set[str] = frozenset()) -> list[Any]:
    """Return some examples, each from random numbers of its own.

    Args:
        examples: The data set.
        indices: Which of them.
        fill: Fills the global generators; called before each example that is not just read from a table.
        numbers: The data set's `columns_of_numbers`. Of none, all that are converted to arrays are, one by one.

    Raises:
        ValueError: If the data set makes more or fewer rows than one of an example.
    """
    # Sensitivity: in Python's own format each value is converted by itself. Others convert a column at once: with a null in
    # an example's integers, those of all that are fetched with it become floats, and are rounded. Without nulls each is what
    # it is alone: whether there is one somewhere decides how rows are fetched, not what they are.
    if is_stored(examples):
        form = examples.format
        if form["type"] is None or (form["type"] in _OF_NUMBERS and numbers >= {*form["columns"]}):
            return list(examples.__getitems__(list(indices)))
    found = []
    for index in indices:
        fill()
        found.append(fetch_one(examples, index))
    return found


def fetch_one(examples: Any, index: int) -> Any:
    """Return one example, as torch's loaders fetch it: by the method for lists of them, if there is one.

    Raises:
        ValueError: If the data set makes more or fewer rows than one of it.
    """
    if getattr(examples, "__getitems__", None) is None:
        return examples[index]
    # Sensitivity: alone, since a transform of many could mix them, or make several rows of one, which would contribute more
    # than C, as would those behind it whose places they take.
    rows = list(examples.__getitems__([index]))
    if len(rows) != 1:
        # Not their number: it is about a private example, and messages end in logs.
        raise ValueError(
            "train_dataset must return one row for each example, got more or fewer from its transform. Make a row of each "
            "window or piece before training, as datasets.Dataset.map does, and name what they are pieces of with "
            "privacy_unit_column."
        )
    return rows[0]


class DrawnExamples(Dataset[Any]):
    """A data set whose examples come in views, with the sizes of their units, and in lists that know the step of their draw.

    Args:
        examples: The training set.
        counts: How many examples are drawn with the unit of each, shape (num_examples,); None if each is a unit.
        fill: Fills the global generators; see `fetch`.
        views: How often each example is fetched.
    """

    def __init__(
        self, examples: Any, counts: Int[np.ndarray, " num_examples"] | None, *, fill: Callable[[], None], views: int = 1
    ) -> None:
        self._examples, self._counts, self._views = examples, counts, views
        self._fetch = functools.partial(fetch, examples, fill=fill, numbers=columns_of_numbers(examples))

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._examples)

    def __getitems__(self, indices: OfStep) -> OfStep:
        """Return all views of several examples, with the sizes of their units."""
        # Sensitivity: here an example's views are made, all of them and side by side, and so they are averaged.
        rows = [index for index in indices for _ in range(self._views)]
        examples = self._fetch(rows)
        if self._counts is not None:
            examples = list(zip(examples, self._counts[rows].tolist(), strict=True))
        return OfStep(examples, step=indices.step)
