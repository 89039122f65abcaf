"""Read columns of all examples before a run, as arrays: lengths, units of privacy and labels.

They are read from the table of a `datasets.Dataset`, many rows at once and without making an object for each row. For 10⁸
rows this takes seconds instead of half an hour.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Int

from doppler_hf.errors import Refusal

LENGTH_COLUMN: Final = "input_ids"
LABELS: Final = ("labels", "label", "label_ids")  # The names of labels in Transformers' collators.
_ROWS_AT_ONCE: Final = 1 << 16
_MOST_BYTES: Final = 1 << 26


def is_table(examples: Any) -> bool:
    """Return whether examples come from a table of `datasets`, with or without a transform."""
    is_plain = type(examples).__module__ == "datasets.arrow_dataset" and "__getitems__" not in vars(examples)
    return is_plain and isinstance(examples.format, Mapping)


def is_stored(examples: Any) -> bool:
    """Return whether examples are read unchanged from a table of `datasets`, that is, without a transform.

    A subclass, or a method of the object itself, does not count, because it may change examples or multiply them.
    """
    return is_table(examples) and examples.format["type"] != "custom"


def columns_of_text(table: Any) -> Iterator[str]:
    """Yield the columns of a table of `datasets` that hold texts, or lists of texts."""
    from pyarrow import types

    for field in table.data.schema:
        kind = field.type
        while is_list(kind):
            kind = kind.value_type
        if types.is_string(kind) or types.is_large_string(kind):
            yield field.name


def is_list(kind: Any) -> bool:
    """Return whether a type of pyarrow is that of lists."""
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def length_of(tokens: Sequence[Any] | None) -> int:
    """Return the number of tokens of an example; if it has several choices (texts), their number after padding."""
    choices = choices_of(tokens)
    return len(choices) * max(map(len, choices))


def choices_of(tokens: Sequence[Any] | None) -> Sequence[Any]:
    """Return the choices (texts) of an example; an example without choices has its text as the only choice.

    A missing text, which a collator may fill in, has no tokens here.
    """
    if tokens is None:
        return [()]
    return tokens if len(tokens) and np.ndim(tokens[0]) else [tokens]


def lengths_of(dataset: Any, *, column: str = LENGTH_COLUMN) -> Int[np.ndarray, " num_examples"] | None:
    """Return the number of tokens of every example (or the length of another column); None without the column."""
    if column not in _names(dataset):
        return None
    if not is_stored(dataset):  # A transform may change the lengths.
        return np.array([length_of(tokens) for tokens in dataset[column]], dtype=np.int32)
    from pyarrow import compute, types

    lengths, filled = np.empty(len(dataset), dtype=np.int32), 0
    for tokens in _parts(dataset, column):
        kind = tokens.type
        is_text = is_list(kind) and not types.is_nested(kind.value_type)
        of_each = compute.list_value_length(tokens).fill_null(0) if is_text else [*map(length_of, tokens.to_pylist())]
        lengths[filled : filled + len(tokens)] = of_each
        filled += len(tokens)
    return lengths


def other_lengths_of(dataset: Any) -> Int[np.ndarray, "num_examples columns"] | None:
    """Return the lengths of the stored columns of lists that are not as long as the tokens, such as labels of a summary."""
    if not is_stored(dataset) or (tokens := lengths_of(dataset)) is None:
        return None
    kinds = {name: dataset.data.schema.field(name).type for name in _names(dataset) if name != LENGTH_COLUMN}
    names = [name for name, kind in kinds.items() if is_list(kind)]
    found = [lengths for name in names if (lengths := lengths_of(dataset, column=name)) is not None]
    differing = [lengths for lengths in found if not np.array_equal(lengths, tokens)]
    return np.stack(differing, axis=1) if differing else None


def units_of(dataset: Any, *, column: str, name: str = "train_dataset") -> Int[np.ndarray, " num_examples"]:
    """Return the unit of privacy of every example, shape (num_examples,): equal values of a column make one unit.

    Raises:
        ValueError: If the column is missing, has gaps, or holds neither numbers nor strings.
    """
    names = _names(dataset)
    if column not in names:
        raise Refusal(
            "no-unit-column",
            f"{name} has no column {column!r}, which privacy_unit_column names; it "
            + (f"has the columns {', '.join(names)}." if names else f"is a {type(dataset).__name__}.")
            + " Give a datasets.Dataset with that column.",
        )
    import pyarrow
    from pyarrow import compute

    values = dataset.with_format("arrow")[column][:]
    is_float, is_text = pyarrow.types.is_floating(values.type), values.type in (pyarrow.string(), pyarrow.large_string())
    is_gap = (
        compute.is_nan(values) if is_float else compute.equal(compute.utf8_trim_whitespace(values), "") if is_text else None
    )
    if values.null_count or (is_gap is not None and compute.any(is_gap).as_py()):
        # The message does not say which records or how many, because messages end up in logs and records are private.
        raise Refusal(
            "missing-units",
            f"privacy_unit_column={column!r} has no value for some records of {name}, so it is unknown which user they "
            "belong to. Fill in the missing values. If the user of a record is unknown, give the record a unique value.",
        )
    try:
        # Sensitivity: -0.0 and 0.0 differ in their bits, but are one value, and so one unit.
        equal = compute.add(values, 0.0) if is_float else values
        return equal.dictionary_encode().combine_chunks().indices.to_numpy()
    except pyarrow.ArrowNotImplementedError as error:
        raise Refusal(
            "unit-type",
            f"privacy_unit_column={column!r} must hold numbers or strings; it holds other values ({error}). Convert them "
            "with datasets.Dataset.map.",
        ) from error


def labels_of(dataset: Any) -> np.ndarray | None:
    """Return the class of every example, shape (num_examples,); None if the data set has no column of classes."""
    features = getattr(dataset, "features", None) or {}
    # Features with a shape are arrays, such as labels for each pixel of an image.
    single = {name: features[name] for name in LABELS if name in features and not hasattr(features[name], "shape")}
    whole = [name for name, kind in single.items() if str(getattr(kind, "dtype", "")).startswith(("int", "uint", "bool"))]
    if not whole:
        return None
    labels = np.concatenate([part.to_numpy(zero_copy_only=False) for part in _parts(dataset, whole[0])])
    return labels if labels.dtype.kind in "iub" else None  # If a label is missing, pyarrow converts all to floats.


def numbers_in(chunk: Any, *, lengths: bool = False) -> np.ndarray:
    """Return all numbers of a pyarrow array at any depth of nesting, or the lengths of the innermost lists."""
    from pyarrow import compute, types

    while types.is_nested(chunk.type) and not (lengths and not types.is_nested(chunk.type.value_type)):
        chunk = chunk.flatten()
    if lengths:
        chunk = compute.list_value_length(chunk) if types.is_nested(chunk.type) else chunk[:0]
    return chunk.to_numpy(zero_copy_only=False)


def rows_with_gaps(dataset: Any, *, names: Sequence[str], may_be_empty: bool) -> Iterator[tuple[str, int]]:
    """Yield each column of a table in which stored rows have no value, with the first such row."""
    for name in names if is_table(dataset) else ():
        # The count of the whole column comes first, because looking up each row of a shuffled table takes seconds.
        has_gaps = name in _names(dataset) and dataset.data.column(name).null_count > 0
        parts = _parts(dataset, name) if has_gaps else ()
        has_none = np.concatenate([np.zeros(0, bool), *(part.is_null().to_numpy(zero_copy_only=False) for part in parts)])
        if has_none.any() and not (may_be_empty and has_none.all()):
            yield name, int(np.argmax(has_none))


def row_with_gap(dataset: Any, *, column: str) -> int | None:
    """Return the first row of a stored column with a missing value, in its lists too, or None."""
    # The whole column is checked first, because looking up each row of a shuffled table takes seconds.
    if not any(map(_has_gap, dataset.data.column(column).chunks)):
        return None
    start = 0
    for part in _parts(dataset, column):
        if _has_gap(part):
            return start + next(row for row in range(len(part)) if _has_gap(part.slice(row, 1)))
        start += len(part)
    return None


def _has_gap(values: Any) -> bool:
    while not values.null_count:
        if not is_list(values.type):
            return False
        values = values.flatten()
    return True


def has_not_finite(dataset: Any, *, column: str) -> bool:
    """Return whether a stored column of decimal numbers, or of lists of them, has one that is NaN or infinite."""
    from pyarrow import compute, types

    def has(values: Any) -> bool:
        while is_list(values.type):
            values = values.flatten()
        return types.is_floating(values.type) and compute.all(compute.is_finite(values)).as_py() is False

    return any(map(has, dataset.data.column(column).chunks)) and any(map(has, _parts(dataset, column)))


def rows_not_finite(dataset: Any, *, column: str) -> list[int]:
    """Return the first stored row of which some decimal numbers are NaN or infinite, and the first of which all are.

    Large columns, such as images, are not read.
    """
    from pyarrow import compute

    if dataset.data.column(column).nbytes > _MOST_BYTES or not has_not_finite(dataset, column=column):
        return []
    found, start = dict[bool, int](), 0
    for part in _parts(dataset, column):
        rows, values = np.arange(len(part)), part
        while is_list(values.type):
            rows = np.repeat(rows, compute.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False))
            values = values.flatten()
        is_wrong = ~np.isfinite(values.to_numpy(zero_copy_only=False))
        wrong, all_of = np.bincount(rows[is_wrong], minlength=len(part)), np.bincount(rows, minlength=len(part))
        for is_whole, of_kind in ((False, wrong < all_of), (True, wrong == all_of)):
            if len(places := np.flatnonzero((wrong > 0) & of_kind)):
                found.setdefault(is_whole, start + int(places[0]))
        start += len(part)
    return [*found.values()]


def first_empty(dataset: Any, *, column: str) -> int | None:
    """Return the first stored row of which a column of lists has an empty list, or None."""
    from pyarrow import compute

    # The whole column is checked first, because looking up each row of a shuffled table takes seconds.
    data = dataset.data.column(column)
    if not is_list(data.type) or compute.min(compute.list_value_length(data)).as_py() != 0:
        return None
    start = 0
    for part in _parts(dataset, column):
        lengths = compute.list_value_length(part).fill_null(1).to_numpy(zero_copy_only=False)
        if len(places := np.flatnonzero(lengths == 0)):
            return start + int(places[0])
        start += len(part)
    return None


def has_gaps_in_lists(dataset: Any, *, column: str) -> bool | None:
    """Return whether a list in a stored column has a missing value; None if the column does not hold lists."""
    if not is_list(dataset.data.schema.field(column).type):
        return None
    # The whole column is checked first, because looking up each row of a shuffled table takes seconds.
    has_gaps = any(chunk.flatten().null_count for chunk in dataset.data.column(column).chunks)
    return has_gaps and any(part.flatten().null_count for part in _parts(dataset, column))


def columns_of_numbers(examples: Any) -> frozenset[str] | None:
    """Return the columns in which every row has a number, or a list or array of numbers, and no number is missing.

    The result is None for examples that are not read unchanged from a table. `datasets` converts a whole column to tensors
    at once. It converts these columns number by number, so that a row does not depend on other rows.
    """
    if not is_stored(examples):
        return None
    return frozenset(name for name in examples.features if all(map(_is_of_numbers, examples.data[name].chunks)))


def _is_of_numbers(rows: Any) -> bool:
    from pyarrow import types

    shape, kind, values = getattr(rows.type, "shape", None), rows.type, rows
    if isinstance(shape, tuple):  # An array of `datasets` is stored as nested lists, one level for each dimension.
        kind, values = rows.storage.type, rows.storage
    has_nulls = rows.null_count > 0
    for _ in shape or [None]:
        if is_list(kind):
            kind, values = kind.value_type, values.values
            has_nulls |= values.null_count > 0
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return is_number and not has_nulls and None not in (shape or ())


def _names(dataset: Any) -> list[str]:
    names = getattr(dataset, "column_names", None)
    return names if isinstance(names, list) else []


def _parts(dataset: Any, column: str) -> Iterator[Any]:
    """Yield a column as it is stored, in pyarrow arrays of some rows, whatever the format or transform."""
    for table in dataset.with_format("arrow").select_columns([column]).iter(batch_size=_ROWS_AT_ONCE):
        yield from table[column].chunks
