"""A digest of the rows of a data set in their order, by which a resumed run recognises the data of the run before.

Units are drawn by the numbers of their rows. If a round continues with different rows, or with the same rows in a different
order, a unit that has had its turn may get another turn. So the digest must differ for different data. For the same data it
must be the same in every process and launch, because a round that begins again costs ε.

- Tables of `datasets` are read as they are stored, whatever format or transform is set. How their columns are cut into
  chunks, and whether rows are reached through indices, makes no difference. Images and sounds are not decoded.
- Lists and tuples of rows, and `TensorDataset`, are read as they are.
- Other data sets make their rows on demand, perhaps with random numbers. Some rows are made twice, and fields that differ
  are left out. So the order of rows goes unnoticed if all their fields are random.

Reading stops after half a second. The order of reading spreads the first rows over the whole data set, however many are
read, and the digest is noted after 1, 2, 4, 8, … parts. Two digests are compared at the last number of parts that both have,
so that a slow disk raises no false alarm. Of a large data set only a sample is read: it reveals every shuffle, but perhaps
not two rows that changed places.

Privacy: a digest is as private as the data. It is kept with the secret of a round, and compared between processes.
"""

import dataclasses
import datetime
import decimal
import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, Self

import numpy as np
import torch
from torch.utils.data import TensorDataset

from doppler_hf.privacy.batching.columns import is_list, is_table

_SECONDS: Final = 0.5
_ROWS_OF_PART: Final = 128  # The number of stored rows in a part.
# The number of rows that are made on demand: enough to notice random numbers. With more rows, a rare augmentation that went
# unnoticed would be in some of them.
_MOST_ROWS_MADE: Final = 64
_IMAGE_OR_SOUND: Final = {"bytes", "path"}  # The columns in which `datasets` stores a file.

Noted = dict[int, str]  # Number of parts → the digest of the first so many parts.


@dataclass(frozen=True)
class DataDigest:
    """Digests of a data set: one of size, units and labels, and for each field of its rows one after so many parts."""

    whole: str
    fields: Mapping[str, Noted]

    def is_of_same_rows(self, other: "DataDigest") -> bool:
        """Return whether no difference between the data sets is known."""
        if self.whole != other.whole:
            return False
        both = self.fields.keys() & other.fields.keys()
        if self.fields and other.fields and not both:
            return False
        return all(_agree(self.fields[name], other.fields[name]) for name in both)

    def to_json(self) -> dict[str, Any]:
        """Return plain values from which `from_json` restores the digest."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the digest from the values of `to_json`, as they are read from a file."""
        return cls(
            values["whole"], {name: {int(n): x for n, x in noted.items()} for name, noted in values["fields"].items()}
        )


def _agree(first: Noted, second: Noted) -> bool:
    in_both = first.keys() & second.keys()
    return not in_both or first[max(in_both)] == second[max(in_both)]


def digests_of_fields(dataset: Any) -> dict[str, Noted]:
    """Return digests of the rows of a data set: of whole rows if they are stored, else of each field that is not random."""
    read = _reader_of_stored(dataset)
    if read is not None:
        parts = -(-len(dataset) // _ROWS_OF_PART)
        return {"": _noted(parts, lambda part: read(slice(part * _ROWS_OF_PART, (part + 1) * _ROWS_OF_PART)))}
    return _digests_of_made_rows(dataset)


# --- rows that are stored -------------------------------------------------------------------------------------------------


def _reader_of_stored(dataset: Any) -> Callable[[slice], Iterator[Any]] | None:
    """Return a function that reads the bytes of some rows; None for a data set that makes its rows on demand."""
    if is_table(dataset):
        stored = dataset.with_format("arrow")
        return lambda rows: _bytes_of_table(stored[rows])
    if type(dataset) in (list, tuple):
        return lambda rows: map(bytes_of_row, dataset[rows])
    if type(dataset) is TensorDataset:
        return lambda rows: (bytes_of_row(tensor[rows]) for tensor in dataset.tensors)
    return None


def _noted(parts: int, read: Callable[[int], Iterable[Any]]) -> Noted:
    """Return the digests of the first parts in the order of `spread`, until half a second has passed."""
    whole, noted, until = hashlib.sha256(), {}, time.monotonic() + _SECONDS
    for number, part in enumerate(spread(parts), start=1):
        try:
            for piece in read(part):
                whole.update(piece)
        except Exception:  # Pyarrow does not fully support the type of a column; the parts read before count.
            break
        if number & (number - 1) == 0 or number == parts:
            noted[number] = whole.hexdigest()[:16]
        if time.monotonic() > until:
            break
    return noted


def spread(count: int) -> Iterator[int]:
    """Yield the numbers below `count`, each once, in the order of their reversed bits."""
    bits = max(1, (count - 1).bit_length())
    backwards = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return (number for number in backwards if number < count)


def _bytes_of_table(table: Any) -> Iterator[Any]:
    for name in sorted(table.column_names):
        yield f"\0{name}\0".encode()
        yield from _bytes_of_array(table.column(name).combine_chunks())


def _bytes_of_array(array: Any) -> Iterator[Any]:
    """Yield the content of a pyarrow array: the same for equal values, whatever the layout of their buffers."""
    import pyarrow
    from pyarrow import compute, types

    if isinstance(array, pyarrow.ExtensionArray):
        array = array.storage
    yield f"{len(array)} ".encode()
    if array.null_count:
        yield array.is_valid().to_numpy(zero_copy_only=False).tobytes()
        array = array.drop_null()  # The bytes of a missing value are arbitrary.
    kind = array.type
    if types.is_dictionary(kind):
        yield from _bytes_of_array(array.dictionary_decode())
    elif is_list(kind):
        yield compute.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64).tobytes()
        yield from _bytes_of_array(array.flatten())
    elif types.is_struct(kind):
        names = [kind.field(place).name for place in range(kind.num_fields)]
        for name, values in zip(names, array.flatten(), strict=True):
            if name == "path" and {*names} == _IMAGE_OR_SOUND:
                # The cache may be in a different folder in the next launch, so only file names count.
                values = pyarrow.array([path and os.path.basename(path) for path in values.to_pylist()], pyarrow.string())
            yield name.encode()
            yield from _bytes_of_array(values)
    elif types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        large = array.cast(pyarrow.large_binary())
        _, of_starts, content = large.buffers()
        starts = (
            np.frombuffer(of_starts, dtype=np.int64)[large.offset : large.offset + len(large) + 1] if len(large) else [0]
        )
        yield np.diff(starts).tobytes()
        yield memoryview(content)[starts[0] : starts[-1]] if starts[0] < starts[-1] else b""
    elif types.is_boolean(kind):
        yield array.to_numpy(zero_copy_only=False).tobytes()
    elif types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind):
        size = kind.bit_width // 8
        yield memoryview(array.buffers()[1])[array.offset * size : (array.offset + len(array)) * size] if len(array) else b""
    else:
        yield repr(array.to_pylist()).encode()


# --- rows that are made ---------------------------------------------------------------------------------------------------


def _digests_of_made_rows(dataset: Any) -> dict[str, Noted]:
    fields: dict[str, Any] = defaultdict(hashlib.sha256)
    found: dict[str, Noted] = defaultdict(dict)
    random: set[str] = set()
    rows, until = min(len(dataset), _MOST_ROWS_MADE), time.monotonic() + _SECONDS
    for number, place in enumerate(spread(rows), start=1):
        index = place * len(dataset) // rows
        try:
            first, second = ({name: bytes_of_row(x) for name, x in _fields_of(dataset[index])} for _ in range(2))
        except Exception:  # The checks, or training itself, report the error in this row.
            break
        for name in first.keys() | second.keys():
            if first.get(name) != second.get(name):
                random.add(name)
            fields[name].update(f"{index} ".encode() + first.get(name, b"") + b"\0")
        if number & (number - 1) == 0 or number == rows:
            for name, digest in fields.items():
                found[name][number] = digest.hexdigest()[:16]
        if time.monotonic() > until:
            break
    return {name: noted for name, noted in found.items() if name not in random}


def _fields_of(row: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(row, Mapping):
        return ((str(name), value) for name, value in row.items())
    if isinstance(row, list | tuple):
        return ((str(place), value) for place, value in enumerate(row))
    return iter([("", row)])


def bytes_of_row(row: Any) -> bytes:
    """Return the content of a row: the same for equal values. For objects of unknown classes, only the class counts."""
    try:
        return json.dumps(row, sort_keys=True, default=_plain).encode()
    except Exception:  # Keys of several types, a list that contains itself, or a sparse tensor raise errors.
        return type(row).__qualname__.encode()


def _plain(value: Any) -> Any:
    """Return a JSON value for a value that JSON does not support."""
    match value:
        case torch.Tensor():
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return [str(value.dtype), list(value.shape), _sha(raw)]
        case np.generic() if value.dtype != object:
            return [str(value.dtype), value.tobytes().hex()]
        case np.ndarray() if value.dtype != object:
            return [str(value.dtype), list(value.shape), _sha(np.ascontiguousarray(value))]
        case np.ndarray():
            return value.tolist()
        case Mapping():
            return dict(value)
        case bytes() | bytearray() | memoryview():
            return _sha(value)
        case set() | frozenset():
            return sorted(bytes_of_row(each).decode() for each in value)
        case datetime.date() | datetime.time() | datetime.timedelta() | decimal.Decimal() | PurePath() | complex():
            return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "mode") and hasattr(value, "size") and hasattr(value, "tobytes"):  # an image of Pillow
        return [value.mode, list(value.size), _sha(value.tobytes())]
    return type(value).__qualname__


def _sha(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()
