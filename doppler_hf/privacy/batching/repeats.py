"""Whether a row stands in a data set more than once, so that its record would contribute more than C.

By its place in the tables and data sets below, not by its content: equal rows may be of two people.
"""

from typing import Any, Final

import numpy as np
from jaxtyping import Int
from torch.utils.data import ConcatDataset, Subset

_BITS_OF_ROWS: Final = 40


def has_repeats(dataset: Any) -> bool:
    """Return whether a row stands in a data set more than once, as by `select`, `repeat`, `Subset` or concatenation."""
    if not isinstance(dataset, Subset | ConcatDataset):
        if not hasattr(dataset, "_data"):
            return False
        chunks = _chunks(dataset)
        if len({address for address, *_ in chunks}) == len(chunks):  # each a memory of its own, however large
            chosen = _chosen(dataset)
            return chosen is not None and len(chosen) > 0 and int(np.bincount(chosen).max()) > 1
    keys = _keys(dataset, {})
    return len(np.unique(keys)) < len(keys)


def _keys(dataset: Any, sources: dict[int, int]) -> Int[np.ndarray, " rows"]:
    """Return for each row what it is taken from, by its number among the sources, and which row of it, as one number."""
    if isinstance(dataset, Subset):
        return _keys(dataset.dataset, sources)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_keys(part, sources) for part in dataset.datasets])
    chunks = _chunks(dataset) if hasattr(dataset, "_data") else [(id(dataset), 0, len(dataset))]
    keys = [np.zeros(0, dtype=np.int64)]
    for address, start, size in chunks:
        source = sources.setdefault(address, len(sources))
        keys.append((source << _BITS_OF_ROWS) + np.arange(start, start + size, dtype=np.int64))
    rows = np.concatenate(keys)
    chosen = _chosen(dataset) if hasattr(dataset, "_data") else None
    return rows if chosen is None else rows[chosen]


def _chunks(dataset: Any) -> list[tuple[int, int, int]]:
    """Return for each part of the table of a `datasets.Dataset` its memory, and its first row and number of rows there."""
    columns = dataset._data.columns  # of one without columns there are no rows
    found = []
    for chunk in columns[0].chunks if columns else ():
        addresses = [buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size > 0]
        found.append((addresses[-1] if addresses else id(chunk), chunk.offset, len(chunk)))
    return found


def _chosen(dataset: Any) -> Int[np.ndarray, " rows"] | None:
    """Return which rows of its table a `datasets.Dataset` has, by `select` or `shuffle`; None for all in their order."""
    return None if dataset._indices is None else dataset._indices.column(0).to_numpy().astype(np.int64)
