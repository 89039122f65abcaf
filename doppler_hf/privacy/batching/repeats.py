"""Find out whether a data set contains a row more than once, so that its record would contribute more than C.

Rows are compared by their place in the underlying tables and data sets. Their content does not matter, because equal rows
may belong to two people.
"""

from typing import Any, Final

import numpy as np
from jaxtyping import Int
from torch.utils.data import ConcatDataset, Subset

_BITS_OF_ROWS: Final = 40


def has_repeats(dataset: Any) -> bool:
    """Return whether a data set contains a row more than once, for example after `select`, `repeat` or concatenation."""
    if not isinstance(dataset, Subset | ConcatDataset) and getattr(dataset, "_indices", None) is None:
        # The rows are in their original order. If each part has its own memory, no row can repeat.
        addresses = [address for address, *_ in _chunks(dataset)]
        if len({*addresses}) == len(addresses):
            return False
    keys = _keys(dataset, {})
    return len(np.unique(keys)) < len(keys)


def _keys(dataset: Any, sources: dict[int, int]) -> Int[np.ndarray, " rows"]:
    """Return a number for each row that combines the number of its source and its place in that source."""
    if isinstance(dataset, Subset):
        return _keys(dataset.dataset, sources)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_keys(part, sources) for part in dataset.datasets])
    keys = [np.zeros(0, dtype=np.int64)]
    for address, start, size in _chunks(dataset):
        source = sources.setdefault(address, len(sources))
        keys.append((source << _BITS_OF_ROWS) + np.arange(start, start + size, dtype=np.int64))
    rows = np.concatenate(keys)
    chosen = dataset._indices if hasattr(dataset, "_fingerprint") else None  # `select` or `shuffle` has chosen the rows.
    return rows if chosen is None else rows[chosen.column(0).to_numpy().astype(np.int64)]


def _chunks(dataset: Any) -> list[tuple[int, int, int]]:
    """Return for each part of the table of a `datasets.Dataset`: its memory address, its first row there, and its size.

    Any other data set is one part, with the identity of the object as its address.
    """
    if not hasattr(dataset, "_fingerprint"):  # Only data sets of `datasets` have this; other classes may have `_data` too.
        return [(id(dataset), 0, len(dataset))]
    columns = dataset._data.columns  # A data set without columns has no rows.
    found = []
    for chunk in columns[0].chunks if columns else ():
        # The last buffer has the values; earlier ones may be missing. Parts of one table share it, with different offsets.
        addresses = [buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size > 0]
        found.append((addresses[-1] if addresses else id(chunk), chunk.offset, len(chunk)))
    return found
