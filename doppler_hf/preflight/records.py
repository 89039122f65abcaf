"""Notes on what counts as a record: copies, groups of adjacent rows, equal views, and rows or users in both data sets.

Privacy: the notes say that there is something, neither how often nor where. They are printed here, and not if a tracker
would upload what is printed.
"""

import contextlib
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from torch import Tensor
from transformers.trainer_utils import has_length

from doppler_hf.errors import Refusal
from doppler_hf.preflight.autograd_check.without_randomness import has_dropout
from doppler_hf.privacy.batching.columns import LABELS, is_table
from doppler_hf.privacy.batching.data_digest import bytes_of_row, spread
from doppler_hf.privacy.batching.micro_batches import fetch_one
from doppler_hf.privacy.batching.shared_rows import evaluation_sets, training_rows_in
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.reporting.logged_loss import copies_of_console

_SECONDS: Final = 0.1
_ROWS_AT_ONCE: Final = 1 << 10
_ROWS_OF_RUNS: Final = 1 << 14
_FEWEST_VALUES: Final = 8
_SHARE_OF_VALUES: Final = 20  # a column that names texts or people has at least one value for every 20 rows
_MOST_USERS: Final = 1 << 17
# The seconds of the processor, and of the clock, to read rows of the training set, or of an evaluation set.
_SECONDS_OF_A_SET: Final = 0.08
_MOST_SECONDS_OF_A_SET: Final = 0.3
_ROWS_OF_BLOCK: Final = 1 << 12
_EVALUATED_ROWS: Final = 1 << 10  # the most rows of an evaluation set that are looked for in the training set
_BLOCK_SECONDS: Final = 0.003
_SHORT: Final = 1 << 10  # a longer tensor is compared by a digest
_SHARE_OF_ROWS: Final = 0.1  # single rows may be equal by chance, such as texts of a few words
# Columns that say little about which row it is.
_OF_MANY_ROWS: Final = {*LABELS, "attention_mask", "token_type_ids", "special_tokens_mask", "length", "idx", "id"}
COPIES: Final = (
    "many rows of eval_dataset are equal to rows of train_dataset. If they are the same records, the metrics, and a best "
    "checkpoint chosen by them, are NOT PRIVATE"
)
_NAMES_OF_USERS: Final = re.compile(
    r"^(overflow_to_sample_mapping|(example|user|author|patient|speaker|subject|person|client|customer|participant)(_?id)?)$",
    re.IGNORECASE,
)
# A user with so many times the rows of the median user, and at least so many rows, makes steps slow.
_MANY_ROWS: Final = 10
_KNOWN: Final = (int, float, str, bool, list, Tensor, np.ndarray, np.generic)


def note_equal_views(run: PrivateRun, trainer: Any) -> None:
    """Note that all views of a record are the same, so that their mean gradient is that of one view."""
    views = run.statement.augmentation_multiplicity
    if views > 1 and not has_dropout(trainer.model) and run.probe.has_equal_views():
        run.notes.append(
            f"augmentation_multiplicity={views} only costs time: of the records that were tried, all views of a record are "
            "the same. Add a random transform to the data set or the collator, or leave augmentation_multiplicity out"
        )


def note_records(run: PrivateRun, trainer: Any, *, dataset: Any) -> None:
    """Note where a record may be more, or less, than the user believes."""
    if copies_of_console(trainer.callback_handler.callbacks):
        return
    unit = trainer.args.privacy_unit_column
    if unit is None and has_equal_rows(dataset):
        run.notes.append(
            "some rows are identical. If they are copies of one record (such as from oversampling), remove them: ε "
            "protects one row, so a record with several copies is protected less"
        )
    if unit is None:
        run.notes += [
            f"adjacent rows have the same {name!r}, but each row counts as a record of its own. If they are parts of one "
            f"text, or belong to one user, set privacy_unit_column={name!r}"
            for name in columns_in_runs(trainer.train_dataset)[:1]
        ] or [
            f"several rows have the same {name!r}, but each row counts as a record of its own. If one user has several "
            f"rows, or one text several parts, set privacy_unit_column={name!r}"
            for name in columns_of_users(trainer.train_dataset)[:1]
        ]
    if has_copies_in(trainer.train_dataset, trainer.eval_dataset, known=trainer.sets_with_training_rows):
        run.notes.append(f"{COPIES}: Evaluate on other records")
    if unit is not None and not trainer.args.metrics_per_user and trainer.compute_metrics is not None:
        sets = evaluation_sets(trainer.eval_dataset).values()
        has_column = all(is_table(each) and unit in each.column_names for each in sets)
        how = "" if has_column else f", if eval_dataset has the column {unit!r}"
        run.notes.append(
            "compute_metrics counts rows, while training counts users, so users with many rows count more in metrics. "
            f"metrics_per_user=True adds each metric's mean over users{how}"
        )
    sizes = run.sampler.unit_sizes
    if sizes is not None and trainer.args.max_examples_per_unit is None and sizes.max() >= _MANY_ROWS * np.median(sizes):
        run.notes.append(
            "some users have many times the rows of most users, and all rows of a user are in one step, which takes time "
            "and memory. Set max_examples_per_unit to limit them. This does not change ε"
        )
    if unit is not None and shares_users(trainer.train_dataset, trainer.eval_dataset, column=unit):
        run.notes.append(
            f"some users (column {unit!r}) are in both train_dataset and eval_dataset, so evaluations say little about new "
            "users"
        )


def refuse_metrics_of_no_users(trainer: Any) -> None:
    """Refuse metrics per user of evaluations that have no metrics, or of data sets without the column of users."""
    column = trainer.args.privacy_unit_column
    if not trainer.args.metrics_per_user:
        return
    args = trainer.args
    others = {
        "batch_eval_metrics": args.batch_eval_metrics, "eval_do_concat_batches": not args.eval_do_concat_batches,
        "include_for_metrics": args.include_for_metrics,
    }  # fmt: skip
    given = [name for name, is_set in others.items() if is_set]
    if trainer.compute_metrics is None or given:
        found = f"{given[0]}={getattr(args, given[0])!r} passes something else" if given else "there is none"
        mend = f"Leave {given[0]} out" if given else "Pass compute_metrics"
        raise Refusal(
            "no-metrics-of-users",
            "metrics_per_user=True needs a compute_metrics that gets predictions and labels of all rows, and nothing else; "
            f"{found}. {mend}, or leave metrics_per_user out.",
        )
    for name, each in evaluation_sets(trainer.eval_dataset).items():
        if each is not None and not (is_table(each) and column in each.column_names):
            which = f"eval_dataset[{name!r}]" if name else "eval_dataset"
            raise Refusal(
                "no-metrics-of-users",
                f"metrics_per_user=True needs the column {column!r} in {which}, a datasets.Dataset, to know the user of "
                "each row. Keep the column, as in train_dataset, or leave metrics_per_user out.",
            )


def has_equal_rows(dataset: Any) -> bool:
    """Return whether two of the first rows are equal, as far as they can be read in a moment."""
    keys, end = [np.zeros(0, np.uint64)], time.monotonic() + _SECONDS
    for of_part in _keys(dataset):
        keys.append(of_part)
        if time.monotonic() > end:
            break
    all_keys = np.concatenate(keys)
    return len(np.unique(all_keys)) < len(all_keys)


def _keys(dataset: Any) -> Iterator[np.ndarray]:
    """Yield a key for each row, many rows at a time. Different rows have different keys, but for one case in 2**60."""
    if is_table(dataset):
        random = np.random.default_rng(0)
        weights: dict[str, np.ndarray] = {}
        for table in dataset.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
            keys = np.zeros(len(table), np.uint64)
            for name in sorted(table.column_names):
                of_column = weights.setdefault(f"{name} as a column", _odd(random, 1))
                keys = _mixed(keys + of_column * _column_keys(table.column(name), weights, random))
            yield keys
    elif type(dataset) in (list, tuple):
        for start in range(0, len(dataset), _ROWS_AT_ONCE):
            yield _hashed(map(bytes_of_row, dataset[start : start + _ROWS_AT_ONCE]))
    else:  # a data set that makes its rows
        with contextlib.suppress(Exception):  # other checks explain rows that cannot be read
            for index in range(len(dataset)):
                row = fetch_one(dataset, index)
                # The content of other values is not known.
                if not isinstance(row, Mapping) or not all(isinstance(each, _KNOWN) for each in row.values()):
                    return
                yield _hashed([bytes_of_row(row)])


def _hashed(values: Iterable[Any]) -> np.ndarray:
    return np.array([hash(each) & 0xFFFF_FFFF_FFFF_FFFF for each in values], np.uint64)


def _odd(random: np.random.Generator, number: int) -> np.ndarray:
    return random.integers(0, 1 << 63, size=number, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def _mixed(values: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = (values ^ (values >> np.uint64(29))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    return mixed ^ (mixed >> np.uint64(32))


def _column_keys(column: Any, weights: dict[str, np.ndarray], random: np.random.Generator) -> np.ndarray:
    """Return for each row a key that differs for different values; for lists of integers it is a random weighted sum."""
    from pyarrow import compute, types

    values = column.combine_chunks()
    kind = values.type
    if types.is_integer(kind) and not values.null_count:
        return _mixed(values.to_numpy(zero_copy_only=False).astype(np.int64).astype(np.uint64) + np.uint64(1))
    if not (types.is_list(kind) and types.is_integer(kind.value_type)) or values.null_count or values.flatten().null_count:
        return _hashed(map(repr, values.to_pylist()))
    lengths = compute.list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    known = weights.get("", np.zeros(0, np.uint64))
    if (longest := int(lengths.max(initial=0))) > len(known):
        known = weights[""] = np.concatenate([known, _odd(random, longest - len(known))])
    numbers = values.flatten().to_numpy(zero_copy_only=False).astype(np.int64).astype(np.uint64)
    mixed = _mixed((numbers + np.uint64(1)) * known[np.arange(len(numbers)) - np.repeat(starts, lengths)])
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    return _mixed(sums[starts + lengths] - sums[starts] + lengths.astype(np.uint64))


def warn_of_copies(trainer: Any, evaluated: Any) -> None:
    """Warn if a data set that is given to `evaluate` seems to have copies of training rows."""
    if not copies_of_console(trainer.callback_handler.callbacks) and has_copies_in(trainer.train_dataset, evaluated):
        warnings.warn(f"{COPIES}. Evaluate on other records.", stacklevel=4)


def has_copies_in(train: Any, evaluated: Any, *, known: frozenset[str] = frozenset()) -> bool:
    """Return whether an evaluation set has many rows equal to training rows, at other places than `training_rows_in` finds.

    Some rows of both sets are read for a moment. The share of the evaluation set that is also in the training set follows
    from how many of the rows were found, and from how many of the training rows were read.
    """
    known = known.union(training_rows_in(train, evaluated))
    return any(_are_copies(train, each) for name, each in evaluation_sets(evaluated).items() if name not in known)


def _are_copies(train: Any, evaluated: Any) -> bool:
    if not (has_length(train) and has_length(evaluated) and len(train) and len(evaluated)):
        return False
    if (reader := _reader_of_keys(train, evaluated)) is None:
        return False
    looked_for = [key for keys in _blocks(reader(evaluated), len(evaluated), most=_EVALUATED_ROWS) for key in keys]
    if len({*looked_for}) * 2 < len(looked_for):  # the rows say too little about a record
        return False
    rows, found, read = {*looked_for}, set[Any](), 0
    for keys in _blocks(reader(train), len(train), most=len(train)):
        found |= rows.intersection(keys)
        read += len(keys)
    count = sum(key in found for key in looked_for)
    # If only a part of the training set was read, a few rows that are equal by chance count little.
    fewest = min(2, len(looked_for)) if read == len(train) else 3
    return count >= max(1, fewest, _SHARE_OF_ROWS * len(looked_for) * read / len(train))


_KeysOf = Callable[[range], list[Any]]


def _reader_of_keys(train: Any, evaluated: Any) -> Callable[[Any], _KeysOf] | None:
    """Return a function that makes a reader of a data set, whose keys are equal for equal rows; None without common fields.

    Only the fields that both data sets have are compared.
    """
    if is_table(train) and is_table(evaluated):
        names = sorted({*train.column_names} & {*evaluated.column_names})
        if not {*names} - _OF_MANY_ROWS:
            return None
        random, weights = np.random.default_rng(0), dict[str, np.ndarray]()

        def table_keys(dataset: Any) -> _KeysOf:
            stored = dataset.with_format("arrow").select_columns(names)

            def keys(rows: range) -> list[Any]:
                table = stored[rows.start : rows.stop]
                return [*zip(*(_column_keys(table.column(name), weights, random) for name in names), strict=True)]

            return keys

        return table_keys
    try:
        fields = [{*_fields(_without_format(each)[0])} for each in (train, evaluated)]
    except Exception:  # another check reports a row that cannot be read
        return None
    both = fields[0] & fields[1]
    if not both - _OF_MANY_ROWS:
        return None

    def of_rows(dataset: Any) -> _KeysOf:
        plain = _without_format(dataset)
        return lambda rows: [
            bytes_of_row({name: value for name, value in _fields(plain[row]).items() if name in both}) for row in rows
        ]

    return of_rows


def _without_format(dataset: Any) -> Any:
    """Return a table whose values are numbers, texts and lists; any other data set as it is."""
    return dataset.with_format(None) if is_table(dataset) else dataset


def _fields(row: Any) -> dict[str, Any]:
    """Return the fields of a row by their names or places, short tensors and arrays as lists."""
    named = row.items() if isinstance(row, Mapping) else enumerate(row) if isinstance(row, list | tuple) else [("", row)]
    return {
        str(name): value.tolist() if hasattr(value, "tolist") and math.prod(value.shape) <= _SHORT else value
        for name, value in named
    }


def _blocks(keys_of: _KeysOf, size: int, *, most: int) -> Iterator[list[Any]]:
    """Yield the keys of blocks of rows, spread over a data set, until a number of rows is read or a moment has passed."""
    count, read = 1, 0
    try:
        keys_of(range(1))  # imports what it needs
        # Other programs on the machine change the time of the clock, but hardly that of the processor.
        begin, until, now = time.monotonic(), time.thread_time() + _SECONDS_OF_A_SET, time.thread_time()
        while 4 * count <= min(_ROWS_OF_BLOCK, size, max(1, most // 8)):  # find out how many rows can be read at once
            keys_of(range(4 * count))
            before, now = now, time.thread_time()
            if now - before > _BLOCK_SECONDS:
                break
            count *= 4
        for block in spread(-(-size // count)):
            keys = keys_of(range(block * count, min(size, (block + 1) * count)))
            yield keys
            read += len(keys)
            if read >= most or time.thread_time() > until or time.monotonic() > begin + _MOST_SECONDS_OF_A_SET:
                return
    except Exception:  # another check reports a row that cannot be read
        return


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


def columns_of_users(dataset: Any) -> list[str]:
    """Return the columns of a table whose name says that they hold texts or people, and in which a value is repeated."""
    if not is_table(dataset):
        return []
    found = []
    for name in dataset.column_names:
        if _NAMES_OF_USERS.search(name):
            values = dataset.with_format("arrow")[:_ROWS_OF_RUNS].column(name)
            if not hasattr(values.type, "value_type") and len(values.unique()) < len(values) - values.null_count:
                found.append(name)
    return found


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
