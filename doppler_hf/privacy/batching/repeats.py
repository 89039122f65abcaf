"""Whether a row stands in a data set more than once, so that its record would contribute more than C.

By its place in the files, tables or data sets below, not by its content: equal rows may be of two people.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from doppler_hf.privacy.batching.columns import size_of_number

# Numbers of rows; those of all in their order are a range, which takes no memory.
Places = np.ndarray | range
# Of a list the objects that are rows, and of their own; numbers and words need not be.
_ROWS: Final = (Mapping, list, tuple, Tensor, np.ndarray)


def has_repeats(dataset: Any) -> bool:
    """Return whether a row stands in a data set more than once, as by `select`, `repeat`, `Subset` or `ConcatDataset`.

    Args:
        dataset: A `datasets.Dataset`, one of torch's, or a list. Another one is taken to be made, row by row, of such a one
            among its attributes, if one alone is as long.
    """
    others: defaultdict[Any, list[Places]] = defaultdict(list)
    columns: defaultdict[str, list[tuple[int, Places]]] = defaultdict(list)
    for source, rows in sources(dataset, range(len(dataset))):
        if (table := _table_of(source)) is not None:
            for path, places in _in_files(table, rows):
                others[path].append(places)
            for name in table.column_names:
                columns[name] += _in_memory(table.column(name), rows)
        else:
            others[id(source)].append(rows)
            for key, places in _in_tensors(source, rows):
                others[key].append(places)
            if isinstance(source, list | tuple | Mapping) or (isinstance(source, np.ndarray) and source.dtype == object):
                others["objects"].append(_objects(source, rows))
    # Sensitivity: rows of two data sets that lie in the same numbers of one column are one record, whatever else they hold.
    return any(map(_are_repeated, others.values())) or any(map(_overlap, columns.values()))


def sources(dataset: Any, rows: Places) -> Iterator[tuple[Any, Places]]:
    """Yield what rows of a data set are taken from, and which of its rows they are."""
    if isinstance(dataset, Subset):
        yield from sources(dataset.dataset, _picked(np.asarray(dataset.indices, dtype=int), rows))
    elif isinstance(dataset, ConcatDataset):
        rows = _from_start(rows, len(dataset))
        ends = np.asarray(dataset.cumulative_sizes)
        for part, end in zip(dataset.datasets, ends, strict=True):
            size = len(part)  # type: ignore[arg-type]
            yield from sources(part, _within(rows, end - size, end))
    elif isinstance(dataset, StackDataset):
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        # Two columns may be of the same rows of one data set, which are no other rows for that.
        known: list[tuple[Any, Places]] = []
        for source, places in itertools.chain.from_iterable(sources(part, rows) for part in parts):
            if not any(source is other and np.array_equal(places, others) for other, others in known):
                known.append((source, places))
                yield source, places
    else:
        rows = _from_start(rows, len(dataset))
        chosen = getattr(dataset, "_indices", None) if _table_of(dataset) is not None else None
        yield dataset, rows if chosen is None else _picked(chosen.column(0).to_numpy(), rows)
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
        first = value[0] if value else None
        return isinstance(first, Mapping) or (isinstance(first, tuple) and any(isinstance(each, _ROWS) for each in first))
    return _table_of(value) is not None or (isinstance(value, Dataset) and hasattr(value, "__len__"))


def _from_start(rows: Places, size: int) -> Places:
    """Return places of which −1 is the last as places that begin with 0."""
    return rows if isinstance(rows, range) else np.where(rows < 0, rows + size, rows)


def _picked(order: np.ndarray, rows: Places) -> np.ndarray:
    """Return those numbers of an order that stand at some places of it."""
    return order[rows.start : rows.stop] if isinstance(rows, range) else order[rows]


def _within(rows: Places, begin: int, end: int) -> Places:
    """Return the places of a part of the rows, counted from its beginning, of those rows that lie in it."""
    if isinstance(rows, range):
        return range(max(rows.start, begin) - begin, max(min(rows.stop, end), begin) - begin)
    return rows[(begin <= rows) & (rows < end)] - begin


def _parts(rows: Places, sizes: Iterable[int]) -> Iterator[Places]:
    """Yield for each of many parts, one after another, the places in it of those rows that lie there, in any order."""
    ordered, first = rows if isinstance(rows, range) else np.sort(rows, kind="stable"), 0
    for size in sizes:
        if isinstance(ordered, range):
            yield _within(ordered, first, first + size)
        else:
            begin, end = np.searchsorted(ordered, [first, first + size])
            yield ordered[begin:end] - first
        first += size


def _spread(rows: Places, by: int, offset: int) -> Places:
    """Return where rows lie that are some places apart, from an offset on."""
    if isinstance(rows, range):
        return range(rows.start * by + offset, rows.stop * by + offset, by)
    return rows * by + offset


def _table_of(dataset: Any) -> Any:
    """Return the table of a `datasets.Dataset`, of all of its rows, chosen or not; of other data sets None."""
    return getattr(dataset, "_data", None) if isinstance(getattr(dataset, "column_names", None), list) else None


def _in_files(table: Any, rows: Places) -> Iterator[tuple[str, Places]]:
    """Yield the files of which parts of a table are, and the places there of some of its rows.

    A file that is read twice, as for `split="train[:60%]+train[40%:]"`, has two places in memory.
    """
    blocks = getattr(table, "blocks", [[table]])  # from top to bottom, of columns beside each other
    for beside, here in zip(blocks, _parts(rows, [len(beside[0]) for beside in blocks]), strict=True):
        # Once for a file, of which some columns may stand beside others.
        for path, start in {(block.path, _start_in_file(block)) for block in beside if hasattr(block, "path")}:
            yield path, _spread(here, 1, start)


def _start_in_file(block: Any) -> int:
    """Return the row of its file with which a part of a table begins."""
    return sum(arguments[0] for name, arguments, _ in block.replays if name == "slice")


def _in_tensors(source: Any, rows: Places) -> Iterator[tuple[tuple[int, str], Places]]:
    """Yield the number and the device of the tensors of a data set of torch's, and the addresses there of its rows.

    An array that is cut first and made a tensor then (`from_numpy(x[40:])`) has a memory of its own that begins within.
    """
    for number, tensor in enumerate(source.tensors if isinstance(source, TensorDataset) else ()):
        # Where rows lie at one place they share numbers that are of none of them.
        if tensor.layout is torch.strided and tensor.numel() and tensor.stride(0):
            addresses = _spread(rows, tensor.stride(0) * tensor.element_size(), tensor.data_ptr())
            for _ in range(2 if _reach_into_each_other(tensor, rows) else 1):
                yield (number, str(tensor.device)), addresses


def _reach_into_each_other(tensor: Tensor, rows: Places) -> bool:
    """Return whether some of these rows of a tensor have numbers in common, as windows of `unfold` do."""
    apart = rows.step if isinstance(rows, range) else int(np.diff(np.sort(rows)).min(initial=len(tensor)))
    by = apart * tensor.stride(0)
    return len(rows) > 1 and any(
        stride > 0 and by % stride == 0 and by <= (size - 1) * stride
        for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    )


def _objects(source: Any, rows: Places) -> Places:
    """Return the addresses of those rows of a list, a mapping or an array that are objects of their own."""
    return np.array([id(source[row]) for row in rows if isinstance(source[row], _ROWS)], dtype=int)


def _in_memory(column: Any, rows: Places) -> Iterator[tuple[int, Places]]:
    """Yield the addresses of the numbers of a column, and the places there of some of its rows.

    Of numbers of one size 0, and the addresses of the rows: parts of one pandas table begin within its memory.
    """
    for chunk, within in zip(column.chunks, _parts(rows, map(len, column.chunks)), strict=True):
        here = _spread(within, 1, chunk.offset)
        # Of lists and structs those of their parts are among them; the last ones are the values.
        addresses = [buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size > 0]
        size = size_of_number(chunk)
        if addresses and len(here):
            yield (0, _spread(here, size, addresses[-1])) if size else (addresses[-1], here)


def _overlap(places: list[tuple[int, Places]]) -> bool:
    """Return whether a place at an address is among those of it more than once."""
    at_address: defaultdict[int, list[Places]] = defaultdict(list)
    for address, here in places:
        at_address[address].append(here)
    return any(map(_are_repeated, at_address.values()))


def _are_repeated(places: list[Places]) -> bool:
    ranges = sorted((each for each in places if isinstance(each, range) and each), key=lambda each: each.start)
    if len(ranges) == sum(1 for each in places if len(each)) and all(
        one.stop <= other.start for one, other in itertools.pairwise(ranges)
    ):
        return False
    together = np.sort(np.concatenate(places), kind="stable")
    return bool((together[1:] == together[:-1]).any())
