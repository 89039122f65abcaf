"""Find out how many rows of a data set are also in another one, by their places."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from doppler_hf.privacy.batching.places import (
    begins_of,
    columns_of,
    in_common_order,
    is_of_datasets,
    parts_of,
    row_numbers,
)


class SharedRows(NamedTuple):
    """The number of rows of a data set that are also in another one, and the number of all of its rows."""

    shared: int
    size: int
    # Whether all rows were chosen by slices, such as `select(range(100))`. Only then the number is a fact about the user's
    # code. After `filter`, for example, it may follow from what the rows hold.
    is_by_slices: bool


def shared_rows(first: Any, second: Any) -> SharedRows | None:
    """Return how many rows of `second` are also in `first`, or None if no row is known to be in both.

    Example:
        >>> rows = [{"x": 1}, {"x": 2}, {"x": 3}]
        >>> shared_rows(rows[:2], rows[1:])
        SharedRows(shared=1, size=2, is_by_slices=False)
    """
    parts = [[*parts_of(first)], [*parts_of(second)]]
    columns = in_common_order({id(part): columns_of(part) for part in (*parts[0], *parts[1])})
    places = [{chunk[0] for part in each for column in columns[id(part)].values() for chunk in column} for each in parts]
    in_both = places[0] & places[1]
    if not in_both:
        return None
    # A part may lack a column of another part, so a column that both have is compared.
    compared = {
        part: next((column for column in own.values() if any(chunk[0] in in_both for chunk in column)), own[min(own)])
        for part, own in columns.items()
    }
    begins, size = begins_of(compared.values())
    numbers, others = (row_numbers(dataset, compared, begins) for dataset in (first, second))
    is_in_first = np.zeros(size, dtype=bool)
    is_in_first[numbers] = True
    shared = int(is_in_first[others].sum())
    return SharedRows(shared, len(others), _is_read_in_slices(first) and _is_read_in_slices(second)) if shared else None


def evaluation_sets(evaluated: Any) -> dict[str, Any]:
    """Return the evaluation sets by their names; a single set has the name ""."""
    if isinstance(evaluated, Mapping) and not isinstance(getattr(evaluated, "column_names", None), list):
        return {str(name): each for name, each in evaluated.items()}
    return {"": evaluated}


def is_same_data(train_dataset: Any, evaluated: Any) -> bool:
    """Return whether an evaluation set is the training set, or the same data loaded or prepared a second time."""
    own = getattr(train_dataset, "_fingerprint", None)  # `datasets` gives equal data the same fingerprint
    return evaluated is train_dataset or (own is not None and getattr(evaluated, "_fingerprint", None) == own)


def training_rows_in(train_dataset: Any, evaluated: Any) -> dict[str, SharedRows]:
    """Return the evaluation sets that have rows of the training set, by their names.

    # Privacy: objects, fingerprints and places of rows decide, which are chosen by the user's code. No row is read.
    """
    found = {}
    for name, each in evaluation_sets(evaluated).items():
        if train_dataset is None or each is None or isinstance(each, str):
            continue
        if is_same_data(train_dataset, each):
            found[name] = SharedRows(len(train_dataset), len(train_dataset), True)
        elif shared := shared_rows(train_dataset, each):
            found[name] = shared
    return found


def _is_read_in_slices(dataset: Any) -> bool:
    """Return whether the rows of a data set were chosen by ranges of their numbers alone."""
    if isinstance(dataset, Subset):
        return isinstance(dataset.indices, range) and _is_read_in_slices(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(_is_read_in_slices, dataset.datasets))
    return isinstance(dataset, TensorDataset) or (is_of_datasets(dataset) and dataset._indices is None)
