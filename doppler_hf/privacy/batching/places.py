"""Where the rows of a data set lie: in which memory or object, and at which number there.

Rows have the same place in the underlying tables after `select`, `filter`, `shuffle`, `train_test_split` and
`concatenate_datasets`, and after changes of the format or of other columns. The same holds for `Subset`, `ConcatDataset` and
slices of the tensors in a `TensorDataset`. Rows of lists are compared as objects. After `map`, rows have new places.

Labels, masks and weights may be one array that belongs to the rows of several people. So of tensors the one with the largest
rows counts, and of a table no column of numbers if it has others, such as texts or lists.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

Chunk = tuple[Any, int, int]
"""A run of rows: its place in memory, the number of its first row there, and how many rows it has."""
_VALUES = (str, bytes, int, float, type(None))


def parts_of(dataset: Any) -> Iterator[Any]:
    """Yield the data sets that torch's `Subset` and `ConcatDataset` wrap, without those of unknown length."""
    if isinstance(dataset, Subset):
        yield from parts_of(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from parts_of(part)
    elif hasattr(dataset, "__len__"):
        with contextlib.suppress(TypeError, NotImplementedError):  # the length of a stream may be unknown
            len(dataset)
            yield dataset


def columns_of(part: Any) -> list[list[Chunk]]:
    """Return where the rows of each column are; the whole part has one place if nothing is known about its columns.

    Columns in which all chunks have a place are the first ones.
    """
    found: list[list[Chunk]] = []
    if isinstance(part, list | tuple):
        found = [[(id(part), place, 1) if is_value(row) else (id(row), 0, 1) for place, row in enumerate(part)]]
    elif isinstance(part, TensorDataset):
        placed = [each for each in part.tensors if _has_a_place(each)]
        wide = [each for each in placed if each.ndim > 1]
        if any(each.ndim > 1 for each in part.tensors):
            placed = [max(wide, key=_bytes_of_row)] if wide else []
        for tensor in placed:
            step = tensor.stride(0)
            place = (tensor.untyped_storage().data_ptr(), tensor.dtype, step)
            found.append([(place, tensor.storage_offset() // step, len(tensor))])
    elif is_of_datasets(part):
        from pyarrow import types  # such data sets have imported it

        # Primitive types are numbers, truth values and times.
        others = [column for column in part._data.columns if not types.is_primitive(column.type)]
        columns = ([_chunk_of(each) for each in column.chunks if len(each)] for column in others or part._data.columns)
        known = [column for column in columns if any(place is not None for place, _, _ in column)]
        known.sort(key=lambda column: any(place is None for place, _, _ in column))
        found = [[(object() if place is None else place, start, size) for place, start, size in column] for column in known]
    return found or [[(id(part), 0, len(part))]]


def in_common_order(columns: Mapping[int, list[list[Chunk]]]) -> dict[int, dict[int, list[Chunk]]]:
    """Return the identity of each part → its columns by numbers; columns that share places have the same number.

    A part may have the columns of another one in another order, or a few of them.
    """
    numbers: dict[Any, int] = {}
    found: dict[int, dict[int, list[Chunk]]] = {}
    for part, own in columns.items():
        numbered: dict[int, list[Chunk]] = {}
        others = []
        for column in own:
            known = (numbers[place] for place, _, _ in column if place in numbers)
            number = next((each for each in known if each not in numbered), None)
            if number is None:
                others.append(column)
            else:
                numbered[number] = column
        free = (number for number in itertools.count() if number not in numbered)
        numbered |= dict(zip(free, others, strict=False))
        for number, column in numbered.items():
            for place, _, _ in column:
                numbers.setdefault(place, number)
        found[part] = dict(sorted(numbered.items()))
    return found


def begins_of(columns: Iterable[list[Chunk]]) -> tuple[dict[Any, int], int]:
    """Return the first number of each place if the rows of all are numbered one after another, and how many there are.

    A place has numbers for all rows up to the last one of its chunks, so that a table has all its numbers.
    """
    ends: dict[Any, int] = {}
    for place, start, size in (chunk for column in columns for chunk in column):
        ends[place] = max(ends.get(place, 0), start + size)
    begins = np.cumsum([0, *ends.values()]).tolist()
    return dict(zip(ends, begins, strict=False)), begins[-1]


def row_numbers(dataset: Any, column: Mapping[int, list[Chunk]], begins: Mapping[Any, int]) -> Int[np.ndarray, " rows"]:
    """Return a number for each row of a data set that is the same for rows at the same place.

    Args:
        dataset: The data set.
        column: The identity of each of its parts → the column by which its rows are compared.
        begins: The first number of each place.
    """
    if isinstance(dataset, Subset):
        return row_numbers(dataset.dataset, column, begins)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([row_numbers(part, column, begins) for part in dataset.datasets])
    chunks = column[id(dataset)]
    sizes = np.asarray([size for *_, size in chunks], dtype=np.int64)
    first = np.asarray([begins[place] + start for place, start, _ in chunks], dtype=np.int64)
    rows = np.repeat(first - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
    chosen = dataset._indices if is_of_datasets(dataset) else None  # by `select`, `filter` or `shuffle`
    return rows if chosen is None else rows[chosen.column(0).to_numpy().astype(np.int64)]


def is_of_datasets(part: Any) -> bool:
    """Return whether a data set is one of `datasets`; others may have an attribute `_data`, too."""
    return hasattr(part, "_fingerprint") and hasattr(part, "_data")


def is_value(row: Any) -> bool:
    """Return whether two records may have the same object as their value."""
    return isinstance(row, _VALUES) or (isinstance(row, tuple) and all(map(is_value, row)))


def _has_a_place(tensor: Tensor) -> bool:
    """Return whether a tensor's rows follow one another in memory, from a place that is a whole number of rows."""
    step = tensor.stride(0) if tensor.layout is torch.strided and tensor.ndim else 0
    return step > 0 and tensor.storage_offset() % step == 0


def _bytes_of_row(tensor: Tensor) -> int:
    return tensor[:1].numel() * tensor.element_size()


def _chunk_of(chunk: Any) -> Chunk:
    """Return where a chunk of a column of pyarrow is; its place is None if it has no values."""
    # The last buffer has the values; earlier ones may be missing. Slices of a table share it, and have their offsets.
    places = [buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size > 0]
    return places[-1] if places else None, chunk.offset, len(chunk)
