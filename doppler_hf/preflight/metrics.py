"""Try `compute_metrics` on the labels of the whole evaluation set, before any ε is spent.

A metric may fail only on the whole set: for a class that few rows have, a group that is incomplete, or a single class that
leaves it undefined. The labels are read without the model, and the predictions for a few rows are repeated for all rows.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from transformers import EvalPrediction
from transformers.trainer_utils import has_length

from doppler_hf.privacy.batching.columns import LABELS, is_stored
from doppler_hf.privacy.batching.micro_batches import fetch_one
from doppler_hf.privacy.token_losses import IGNORED_LABEL

_MOST_NUMBERS: Final = 1 << 24  # the largest size of the repeated predictions
_MOST_SECONDS: Final = 0.3  # the time for reading labels from data sets that compute their rows
_FIRST_ROWS: Final = 16

Metrics = dict[str, Any]


class Watched:
    """A `compute_metrics` that records its arguments and its errors, and never raises."""

    def __init__(self, function: Callable[[EvalPrediction], Metrics]) -> None:
        self.function = function
        self.seen: list[EvalPrediction] = []
        self.errors: list[Exception] = []

    def __call__(self, prediction: EvalPrediction) -> Metrics:
        """Return the metrics, or none if they fail."""
        self.seen.append(prediction)
        try:
            found = self.function(prediction)
            return dict(found)
        except Exception as error:
            self.errors.append(error)
            return {}


def metrics_on_all_labels(
    function: Callable[[EvalPrediction], Metrics],
    few: EvalPrediction,
    dataset: Any,
    *,
    rows: Sequence[int],
    names: list[str],
) -> Metrics | None:
    """Return the metrics of a whole set for repeated predictions, or None if its labels cannot be read without the model.

    Args:
        function: The user's `compute_metrics`.
        few: The argument with which it was called for a few rows.
        dataset: The whole evaluation set.
        rows: The numbers of the few rows in it.
        names: The names of the labels, as Transformers knows them.
    """
    if few.inputs is not None or few.label_ids is None or not has_length(dataset):
        return None
    of_few = few.label_ids if isinstance(few.label_ids, tuple) else (few.label_ids,)
    if not of_few:
        return None
    columns = [all_labels(dataset, name) for name in names]
    if len(of_few) != len(columns):
        return None
    found = []
    for column, own in zip(columns, of_few, strict=True):
        # A collator may change the stored labels. Then the labels of the whole set are unknown.
        if column is None or not isinstance(own, np.ndarray) or len(own) != len(rows) or not _same(column[rows], own):
            return None
        found.append(column.astype(own.dtype))
    longest = found[0].shape[1] if found[0].ndim > 1 else None
    made = _repeated(few.predictions, len(dataset), own=of_few[0].shape[1:2], length=longest)
    if made is None:
        return None
    losses = None if few.losses is None else np.resize(few.losses, len(dataset))
    labels: Any = tuple(found) if isinstance(few.label_ids, tuple) else found[0]
    return dict(function(EvalPrediction(made, labels, losses=losses)))


def all_labels(dataset: Any, name: str) -> np.ndarray | None:
    """Return one kind of label of all rows, padded to one length; None if it takes too long or labels are not numbers."""
    aliases = LABELS if name in LABELS else (name,)
    if is_stored(dataset):
        column = next((each for each in aliases if each in dataset.column_names), None)
        return None if column is None else _filled(dataset.with_format("numpy")[column][:])
    values, begin = [], time.monotonic()
    for row in range(len(dataset)):
        example = fetch_one(dataset, row)
        found = next((example[each] for each in aliases if isinstance(example, dict) and each in example), None)
        if found is None:
            return None
        values.append(np.asarray(found))
        is_slow = row + 1 >= _FIRST_ROWS and (time.monotonic() - begin) / (row + 1) * len(dataset) > _MOST_SECONDS
        if is_slow:
            return None
    return _filled(values)


def _filled(values: Any) -> np.ndarray | None:
    """Return an array of numbers, or of lists of numbers padded as Transformers does."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values if values.dtype.kind in "iufb" else None
    rows = [np.asarray(each) for each in values]
    if not rows or any(row.dtype.kind not in "iufb" or row.ndim > 1 for row in rows) or len({row.ndim for row in rows}) > 1:
        return None
    if rows[0].ndim == 0:
        return np.asarray(rows)
    filled = np.full((len(rows), max(map(len, rows))), IGNORED_LABEL, dtype=np.result_type(*{row.dtype for row in rows}))
    for place, row in enumerate(rows):
        filled[place, : len(row)] = row
    return filled


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether labels are the same, up to their padding."""
    if first.ndim != second.ndim:
        return False
    if first.ndim == 1:
        return np.array_equal(first, second.astype(first.dtype))
    shared = min(first.shape[1], second.shape[1])
    rest = [first[:, shared:], second[:, shared:]]
    return np.array_equal(first[:, :shared], second[:, :shared]) and all((each == IGNORED_LABEL).all() for each in rest)


def _repeated(values: Any, size: int, *, own: tuple[int, ...], length: int | None) -> Any:
    """Return the predictions for a few rows, repeated for all rows and as long as the labels; None if too large."""
    if isinstance(values, tuple | list):
        parts = [_repeated(each, size, own=own, length=length) for each in values]
        return None if any(part is None for part in parts) else type(values)(parts)
    if not isinstance(values, np.ndarray) or not len(values):
        return None
    is_of_tokens = bool(own) and length is not None and values.ndim > 1 and values.shape[1:2] == own
    places = np.arange(length if is_of_tokens and length is not None else 0)
    if size * values[0].size * (len(places) / own[0] if is_of_tokens else 1) > _MOST_NUMBERS:
        return None
    rows = values[np.arange(size) % len(values)]
    return np.take(rows, places % own[0], axis=1) if is_of_tokens else rows
