"""Find out how many rows of a data set are also in another one, by their places.

Rows have the same place in the underlying tables after `select`, `filter`, `shuffle`, `train_test_split` and
`concatenate_datasets`, and after changes of the format or of other columns. The same holds for `Subset`, `ConcatDataset` and
slices of the tensors in a `TensorDataset`. Rows of lists are compared as objects. After `map`, rows have new places.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch.utils.data import ConcatDataset, Subset, TensorDataset

# A run of rows: its place in memory, the first row there, and the number of rows.
_Chunk = tuple[Any, int, int]
# Two records may have the same object as their value if it is of one of these types.
_VALUES = (str, bytes, int, float, type(None))


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
    parts = [[*_parts(first)], [*_parts(second)]]
    columns = {id(part): _columns(part) for part in (*parts[0], *parts[1])}
    places = [{chunk[0] for part in each for column in columns[id(part)] for chunk in column} for each in parts]
    in_both = places[0] & places[1]
    if not in_both:
        return None
    # A part may lack a column of another part, so a column that both have is compared.
    compared = {
        part: next((column for column in own if any(chunk[0] in in_both for chunk in column)), own[0])
        for part, own in columns.items()
    }
    # The rows of all places are numbered one after another, so that a table has all numbers.
    ends: dict[Any, int] = {}
    for place, start, size in (chunk for column in compared.values() for chunk in column):
        ends[place] = max(ends.get(place, 0), start + size)
    begins = dict(zip(ends, np.cumsum([0, *ends.values()]).tolist(), strict=False))
    numbers, others = (_numbers(dataset, compared, begins) for dataset in (first, second))
    is_in_first = np.zeros(sum(ends.values()), dtype=bool)
    is_in_first[numbers] = True
    shared = int(is_in_first[others].sum())
    return SharedRows(shared, len(others), _is_read_in_slices(first) and _is_read_in_slices(second)) if shared else None


def _parts(dataset: Any) -> Iterator[Any]:
    """Yield the data sets that torch's `Subset` and `ConcatDataset` wrap."""
    if isinstance(dataset, Subset):
        yield from _parts(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _parts(part)
    elif hasattr(dataset, "__len__"):
        with contextlib.suppress(TypeError, NotImplementedError):  # the length of a stream may be unknown
            len(dataset)
            yield dataset


def _columns(part: Any) -> list[list[_Chunk]]:
    """Return where the rows of each column are; the whole part has one place if nothing is known about its columns."""
    found: list[list[_Chunk]] = []
    if isinstance(part, list | tuple):
        found = [[(id(part) if isinstance(row, _VALUES) else id(row), 0, 1) for row in part]]
    elif isinstance(part, TensorDataset):
        for tensor in (each for each in part.tensors if each.layout is torch.strided):
            step = tensor.stride(0)
            if step > 0 and tensor.storage_offset() % step == 0:
                place = (tensor.untyped_storage().data_ptr(), tensor.dtype, step)
                found.append([(place, tensor.storage_offset() // step, len(tensor))])
    elif _is_table(part):
        found = [column for each in part._data.columns if (column := _chunks(each)) is not None]
    return found or [[(id(part), 0, len(part))]]


def _chunks(column: Any) -> list[_Chunk] | None:
    """Return where the chunks of a column of pyarrow are; None for a chunk without values."""
    chunks = []
    for chunk in column.chunks:
        # The last buffer has the values; earlier ones may be missing. Slices of a table share it, and have their offsets.
        places = [buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size > 0]
        if not places:
            return None
        chunks.append((places[-1], chunk.offset, len(chunk)))
    return chunks


def _numbers(dataset: Any, compared: dict[int, list[_Chunk]], begins: dict[Any, int]) -> Int[np.ndarray, " rows"]:
    """Return a number for each row that is the same for rows at the same place."""
    if isinstance(dataset, Subset):
        return _numbers(dataset.dataset, compared, begins)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_numbers(part, compared, begins) for part in dataset.datasets])
    chunks = compared[id(dataset)]
    sizes = np.asarray([size for *_, size in chunks], dtype=np.int64)
    first = np.asarray([begins[place] + start for place, start, _ in chunks], dtype=np.int64)
    rows = np.repeat(first - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
    chosen = dataset._indices if _is_table(dataset) else None  # by `select`, `filter` or `shuffle`
    return rows if chosen is None else rows[chosen.column(0).to_numpy().astype(np.int64)]


def _is_table(part: Any) -> bool:
    """Return whether a data set is one of `datasets`; others may have an attribute `_data`, too."""
    return hasattr(part, "_fingerprint") and hasattr(part, "_data")


def _is_read_in_slices(dataset: Any) -> bool:
    """Return whether the rows of a data set were chosen by ranges of their numbers alone."""
    if isinstance(dataset, Subset):
        return isinstance(dataset.indices, range) and _is_read_in_slices(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(_is_read_in_slices, dataset.datasets))
    return isinstance(dataset, TensorDataset) or (_is_table(dataset) and dataset._indices is None)
