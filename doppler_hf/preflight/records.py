"""Notes on what counts as a record: copies of rows, groups of adjacent rows, and users in both training and evaluation set.

Privacy: the notes say that there is something, neither how often nor where. They are printed here, and not if a tracker
would upload what is printed.
"""

import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from doppler_hf.privacy.batching.columns import LABELS, is_table
from doppler_hf.privacy.batching.data_digest import bytes_of_row
from doppler_hf.run.logged_loss import copies_of_console
from doppler_hf.run.private_run import PrivateRun

_SECONDS: Final = 0.03
_ROWS_AT_ONCE: Final = 1 << 10
_ROWS_OF_RUNS: Final = 1 << 14
_FEWEST_VALUES: Final = 8
_SHARE_OF_VALUES: Final = 20  # a column that names texts or people has at least one value for every 20 rows
_MOST_USERS: Final = 1 << 17


def note_records(run: PrivateRun, trainer: Any, *, dataset: Any) -> None:
    """Note where a record may be more, or less, than the user believes."""
    if copies_of_console(trainer.callback_handler.callbacks):
        return
    unit = trainer.args.privacy_unit_column
    if unit is None and has_equal_rows(dataset):
        run.notes.append(
            "some rows are identical: ε holds for a single row, so a record with several copies (such as from oversampling) "
            "is protected less. If they are copies, remove them"
        )
    if unit is None:
        run.notes += [
            f"adjacent rows have the same {name!r}, but each row counts as a record of its own. If they are parts of one "
            f"text, or belong to one user, set privacy_unit_column={name!r}"
            for name in columns_in_runs(trainer.train_dataset)[:1]
        ]
    elif shares_users(trainer.train_dataset, trainer.eval_dataset, column=unit):
        run.notes.append(
            f"some users (column {unit!r}) are in both train_dataset and eval_dataset, so evaluations say little about new "
            "users"
        )


def has_equal_rows(dataset: Any) -> bool:
    """Return whether two of the first rows are equal, as far as they can be read in a moment."""
    seen: set[Any] = set()
    count, end = 0, time.monotonic() + _SECONDS
    for keys in _keys(dataset):
        seen.update(keys)
        count += len(keys)
        if len(seen) < count or time.monotonic() > end:
            break
    return len(seen) < count


def _keys(dataset: Any) -> Iterator[list[Any]]:
    """Yield a key for each row, many rows at a time, for stored rows only."""
    if is_table(dataset):
        random = np.random.default_rng(0)
        weights: dict[str, np.ndarray] = {}
        for table in dataset.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
            columns = [_of_column(table.column(name), weights, random) for name in sorted(table.column_names)]
            yield [*zip(*columns, strict=True)]
    elif type(dataset) in (list, tuple):
        for start in range(0, len(dataset), _ROWS_AT_ONCE):
            yield [bytes_of_row(row) for row in dataset[start : start + _ROWS_AT_ONCE]]


def _of_column(column: Any, weights: dict[str, np.ndarray], random: np.random.Generator) -> list[Any]:
    """Return for each row a key that differs for different values; for lists of integers it is a random weighted sum."""
    from pyarrow import compute, types

    values = column.combine_chunks()
    kind = values.type
    if not (types.is_list(kind) and types.is_integer(kind.value_type)) or values.null_count or values.flatten().null_count:
        return [repr(each) for each in values.to_pylist()]
    lengths = compute.list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    known = weights.get("", np.zeros(0, np.uint64))
    if (longest := int(lengths.max(initial=0))) > len(known):
        more = random.integers(0, 1 << 63, size=longest - len(known), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        known = weights[""] = np.concatenate([known, more])
    numbers = values.flatten().to_numpy(zero_copy_only=False).astype(np.int64).astype(np.uint64)
    mixed = (numbers + np.uint64(1)) * known[np.arange(len(numbers)) - np.repeat(starts, lengths)]
    mixed ^= mixed >> np.uint64(29)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    return [*zip(lengths.tolist(), (sums[starts + lengths] - sums[starts]).tolist(), strict=True)]


def columns_in_runs(dataset: Any) -> list[str]:
    """Return the text and integer columns of a table in which equal values are always in adjacent rows."""
    if not is_table(dataset):
        return []
    from pyarrow import types

    found = []
    for name in dataset.column_names:
        kind = dataset.data.schema.field(name).type
        if name in (*LABELS, "length") or not (
            types.is_string(kind) or types.is_integer(kind) or types.is_large_string(kind)
        ):
            continue
        values = np.asarray(dataset.with_format("arrow")[:_ROWS_OF_RUNS].column(name).to_pylist(), dtype=object)
        changes = int((values[1:] != values[:-1]).sum()) + 1
        distinct = len({*values.tolist()})
        is_of_many = distinct >= max(_FEWEST_VALUES, len(values) // _SHARE_OF_VALUES)
        if changes == distinct < len(values) and is_of_many:
            found.append(name)
    return sorted(found, key=lambda name: "id" not in name.lower())


def shares_users(train: Any, evaluated: Any, *, column: str) -> bool:
    """Return whether a user of the training set is also in an evaluation set."""
    sets = [*evaluated.values()] if isinstance(evaluated, dict) else [evaluated]
    known: set[Any] | None = None
    for each in sets:
        if not is_table(each) or column not in each.column_names or not is_table(train):
            continue
        if known is None:
            known = _users(train, column)
        if not known.isdisjoint(_users(each, column)):
            return True
    return False


def _users(dataset: Any, column: str) -> set[Any]:
    return {*dataset.with_format("arrow").select_columns([column])[:_MOST_USERS].column(column).unique().to_pylist()}
