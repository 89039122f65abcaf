"""Whether a row stands in a data set more than once, so that its record would contribute more than C.

By its place in the files, tables or data sets below, not by its content: equal rows may be of two people.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

# Of a list the objects that are rows, and of their own; numbers and words need not be.
_ROWS: Final = (Mapping, list, tuple)


def has_repeats(dataset: Any) -> bool:
    """Return whether a row stands in a data set more than once, as by `select`, `repeat`, `Subset` or `ConcatDataset`.

    Args:
        dataset: A `datasets.Dataset`, one of torch's, or a list. Another one is taken to be made, row by row, of such a one
            among its attributes, if one alone is as long.
    """
    others: defaultdict[Any, list[np.ndarray]] = defaultdict(list)
    columns: defaultdict[str, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for source, rows in sources(dataset, np.arange(len(dataset))):
        if (table := _table_of(source)) is not None:
            for path, places in _in_files(table, rows):
                others[path].append(places)
            for name in table.column_names:
                columns[name] += _in_memory(table.column(name), rows)
        else:
            others[id(source)].append(rows)
            for key, places in _in_tensors(source, rows):
                others[key].append(places)
            if isinstance(source, list | tuple):
                others["objects"].append(_objects(source, rows))
    # Sensitivity: rows of two data sets that lie in the same numbers of one column are one record, whatever else they hold.
    return any(map(_are_repeated, others.values())) or any(map(_overlap, columns.values()))


def sources(dataset: Any, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield what rows of a data set are taken from, and which of its rows they are."""
    if isinstance(dataset, Subset):
        yield from sources(dataset.dataset, np.asarray(dataset.indices, dtype=int)[rows])
    elif isinstance(dataset, ConcatDataset):
        rows = _from_start(rows, len(dataset))
        ends = np.asarray(dataset.cumulative_sizes)
        for part, end in zip(dataset.datasets, ends, strict=True):
            size = len(part)  # type: ignore[arg-type]
            yield from sources(part, rows[(end - size <= rows) & (rows < end)] - (end - size))
    else:
        rows = _from_start(rows, len(dataset))
        chosen = getattr(dataset, "_indices", None) if _table_of(dataset) is not None else None
        yield dataset, rows if chosen is None else chosen.column(0).to_numpy()[rows]
        if (held := _held(dataset)) is not None:
            yield from sources(held, rows)


def _held(dataset: Any) -> Any:
    """Return the only attribute of a data set that holds as many rows, as of one that tokenizes another's; None if none."""
    if _table_of(dataset) is not None or isinstance(dataset, TensorDataset) or not hasattr(dataset, "__dict__"):
        return None
    attributes: Iterator[Any] = filter(_holds_rows, vars(dataset).values())
    found = {id(value): value for value in attributes if len(value) == len(dataset)}
    return next(iter(found.values())) if len(found) == 1 else None


def _holds_rows(value: Any) -> bool:
    if isinstance(value, list):  # of rows, not of labels, which many rows may have as one object
        return bool(value) and isinstance(value[0], Mapping)
    return _table_of(value) is not None or (isinstance(value, Dataset) and hasattr(value, "__len__"))


def _from_start(rows: np.ndarray, size: int) -> np.ndarray:
    """Return places of which −1 is the last as places that begin with 0."""
    return np.where(rows < 0, rows + size, rows)


def _table_of(dataset: Any) -> Any:
    """Return the table of a `datasets.Dataset`, of all of its rows, chosen or not; of other data sets None."""
    return getattr(dataset, "_data", None) if isinstance(getattr(dataset, "column_names", None), list) else None


def _in_files(table: Any, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the files of which parts of a table are, and the places there of some of its rows.

    A file that is read twice, as for `split="train[:60%]+train[40%:]"`, has two places in memory.
    """
    rows = np.sort(rows, kind="stable")
    first = 0
    for beside in getattr(table, "blocks", [[table]]):  # parts of the table from top to bottom, of columns beside each other
        begin, end = np.searchsorted(rows, [first, first + len(beside[0])])
        here = rows[begin:end] - first
        first += len(beside[0])
        # Once for a file, of which some columns may stand beside others.
        for path, start in {(block.path, _start_in_file(block)) for block in beside if hasattr(block, "path")}:
            yield path, here + start


def _start_in_file(block: Any) -> int:
    """Return the row of its file with which a part of a table begins."""
    return sum(arguments[0] for name, arguments, _ in block.replays if name == "slice")


def _in_tensors(source: Any, rows: np.ndarray) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Yield the memory of the tensors of a data set of torch's, by number and address, and the places there of its rows."""
    for number, tensor in enumerate(source.tensors if isinstance(source, TensorDataset) else ()):
        # Where rows lie at one place they share numbers that are of none of them.
        if tensor.layout is torch.strided and tensor.numel() and tensor.stride(0):
            yield (number, tensor.untyped_storage().data_ptr()), rows * tensor.stride(0) + int(tensor.storage_offset())


def _objects(source: Sequence[Any], rows: np.ndarray) -> np.ndarray:
    """Return the addresses of those rows of a list that are objects of their own."""
    return np.array([id(source[row]) for row in rows if isinstance(source[row], _ROWS)], dtype=int)


def _in_memory(column: Any, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the addresses of the numbers of a column, and the places there of some of its rows."""
    rows = np.sort(rows, kind="stable")
    first = 0
    for chunk in column.chunks:
        begin, end = np.searchsorted(rows, [first, first + len(chunk)])
        here = rows[begin:end] - first + chunk.offset
        first += len(chunk)
        # Of lists and structs those of their parts are among them; the last ones are the values.
        addresses = [buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size > 0]
        if addresses and len(here):
            yield addresses[-1], here


def _overlap(places: list[tuple[int, np.ndarray]]) -> bool:
    """Return whether a place at an address is among those of it more than once."""
    at_address: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    for address, here in places:
        at_address[address].append(here)
    return any(map(_are_repeated, at_address.values()))


def _are_repeated(places: list[np.ndarray]) -> bool:
    together = np.sort(np.concatenate(places), kind="stable")
    return bool((together[1:] == together[:-1]).any())
