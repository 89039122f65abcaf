"""Whether a row stands in a data set more than once, so that its record would contribute more than C."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset


def has_repeats(dataset: Any) -> bool:
    """Return whether a row stands in a data set more than once, as by `select`, `repeat`, `Subset` or `ConcatDataset`.

    By its place in the table or data set below, not by its content: equal rows may be of two people.

    Args:
        dataset: A `datasets.Dataset`, or one of torch's. Of others the answer is no.
    """
    if isinstance(dataset, Subset):
        places = np.asarray(dataset.indices)
        # Sensitivity: -1 is the last row, whatever it is called beside it.
        from_start = np.where(places < 0, places + len(dataset.dataset), places)  # type: ignore[arg-type]
        return _are_repeated(from_start) or has_repeats(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return len({id(part) for part in dataset.datasets}) < len(dataset.datasets) or any(
            map(has_repeats, dataset.datasets)
        )
    if (table := getattr(dataset, "_data", None)) is None or not isinstance(getattr(dataset, "column_names", None), list):
        return False
    chosen = getattr(dataset, "_indices", None)
    if chosen is not None and _are_repeated(chosen.column(0).to_numpy()):
        return True
    return any(_overlap(column.chunks) for column in table.itercolumns())


def _overlap(chunks: Sequence[Any]) -> bool:
    """Return whether two arrays are, in part, the same numbers in memory."""
    places = []
    for chunk in chunks:
        # Of lists and structs those of their parts are among them; the last ones are the values.
        addresses = [buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size > 0]
        places += [(addresses[-1], chunk.offset, chunk.offset + len(chunk))] if addresses and len(chunk) else []
    pairs = itertools.pairwise(sorted(places))
    return any(first[0] == second[0] and second[1] < first[2] for first, second in pairs)


def _are_repeated(places: np.ndarray) -> bool:
    if not len(places):
        return False
    found = np.zeros(int(places.max()) + 1, dtype=bool)
    found[places] = True
    return bool(np.count_nonzero(found) < len(places))
