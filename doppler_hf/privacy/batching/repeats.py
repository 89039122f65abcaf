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
    if not isinstance(dataset, Subset | ConcatDataset) and getattr(dataset, "_indices", None) is None:
        # Rows in their order, each part of them in a memory of its own: nothing to count, however many there are.
        addresses = [address for address, *_ in _chunks(dataset)]
        if len({*addresses}) == len(addresses):
            return False
    keys = _keys(dataset, {})
    return len(np.unique(keys)) < len(keys)


def _keys(dataset: Any, sources: dict[int, int]) -> Int[np.ndarray, " rows"]:
    """Return for each row what it is taken from, by its number among the sources, and which row of it, as one number."""
    if isinstance(dataset, Subset):
        return _keys(dataset.dataset, sources)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_keys(part, sources) for part in dataset.datasets])
    keys = [np.zeros(0, dtype=np.int64)]
    for address, start, size in _chunks(dataset):
        source = sources.setdefault(address, len(sources))
        keys.append((source << _BITS_OF_ROWS) + np.arange(start, start + size, dtype=np.int64))
    rows = np.concatenate(keys)
    chosen = dataset._indices if hasattr(dataset, "_fingerprint") else None  # by `select` or `shuffle`
    return rows if chosen is None else rows[chosen.column(0).to_numpy().astype(np.int64)]


def _chunks(dataset: Any) -> list[tuple[int, int, int]]:
    """Return for each part of the table of a `datasets.Dataset` its memory, and its first row and number of rows there.

    Any other data set is one part, whose memory is that of the object.
    """
    if not hasattr(dataset, "_fingerprint"):  # which only those of `datasets` have; many a class has `_data` of its own
        return [(id(dataset), 0, len(dataset))]
    columns = dataset._data.columns  # of one without columns there are no rows
    found = []
    for chunk in columns[0].chunks if columns else ():
        # The last buffer has the values, the first may be missing. A part of a table shares it, at an offset of its own.
        addresses = [buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size > 0]
        found.append((addresses[-1] if addresses else id(chunk), chunk.offset, len(chunk)))
    return found
