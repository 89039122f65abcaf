"""Find values in the data that the model cannot take, before any ε is spent.

The columns of a stored table are scanned, many rows at a time, for ten seconds at most. If a data set computes its rows, as
torch's data sets and transforms do, random rows are read for one second. A row beyond the model's range is collated alone
and checked again, since a collator may cut or change it. So no data that would train are refused, unless a collator of the
user's own makes up missing labels.
"""

import contextlib
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_utils import has_length

from doppler_hf.errors import Refusal
from doppler_hf.preflight.answers import refuse_positions_outside
from doppler_hf.preflight.limits import Limit, limits_of, limits_of_text
from doppler_hf.preflight.rows_without_numbers import missing_labels, oddity_of
from doppler_hf.preflight.text_labels import refuse_text_as_label
from doppler_hf.privacy.batching.collators import is_dense, tried
from doppler_hf.privacy.batching.columns import (
    LABELS,
    LENGTH_COLUMN,
    choices_of,
    columns_of_text,
    has_gaps_in_lists,
    has_not_finite,
    is_stored,
    is_table,
    lengths_of,
    numbers_in,
    row_with_gap,
    rows_with_gaps,
)
from doppler_hf.privacy.batching.micro_batches import fetch_one
from doppler_hf.privacy.losses import ANSWER, NUMBER_OF_THE_CHOICE, places_of_prompt, task_of, without_adapters
from doppler_hf.privacy.token_losses import IGNORED_LABEL

MOST_SECONDS: Final = 10.0  # enough for a billion stored numbers
MOST_SECONDS_OF_ROWS: Final = 1.0
MOST_SECONDS_OF_COLLATING: Final = 0.2
_COLLATED_AT_ONCE: Final = 8
_ROWS_AT_ONCE: Final = 1 << 14


def refuse_out_of_range(
    model: nn.Module,
    examples: Any,
    *,
    collate: Callable[[list[Any]], Any],
    has_own_loss: bool,
    name: str = "train_dataset",
    label_names: Collection[str] = (),
) -> None:
    """Refuse a data set with missing labels, or with ids, types, lengths or labels that the model cannot take.

    `name` is the name of the data set's argument, for messages, and `label_names` are further columns of labels.
    """
    if not has_length(examples) or len(examples) == 0:
        return
    hint = " Change rows before with_transform, or in it." if is_table(examples) else " Or change what its rows return."
    hint = "" if is_stored(examples) or isinstance(examples, list) else hint
    _refuse_missing_labels(examples, name, hint, is_read_by_model=not has_own_loss)
    if task_of(without_adapters(model)) in ("token_classification", "causal_lm", "masked_lm") and is_stored(examples):
        _refuse_labels_beside_tokens(examples, collate, name)
    _refuse_gaps(examples, collate, name)

    def limits_in(columns: Collection[str]) -> frozenset[Limit]:
        found = [*limits_of(model, [*columns], has_own_loss=has_own_loss)]
        is_choice = task_of(without_adapters(model)) == "multiple_choice" and not has_own_loss
        row = fetch_one(examples, 0) if is_choice else None
        if isinstance(row, Mapping) and LENGTH_COLUMN in row:
            choices = choices_of(row[LENGTH_COLUMN])  # other rows have as many, or are refused
            found += [Limit(each, "numbers", len(choices), NUMBER_OF_THE_CHOICE, is_ignoring=True) for each in LABELS]
        return frozenset(limit for limit in found if limit.column in columns)

    def text_in(columns: Collection[str]) -> frozenset[Limit]:
        return frozenset(limits_of_text(columns, label_names=label_names))

    beyond, names = [], [*examples.column_names] if is_stored(examples) else []
    if is_table(examples):
        beyond += [(0, limit) for limit in text_in([*columns_of_text(examples)])]
        beyond += _beyond_in_table(examples, limits_in(examples.column_names))
    if not is_stored(examples):
        first = fetch_one(examples, 0)
        if first is None:
            raise _none_row(name)
        if isinstance(first, Mapping):
            names = [*first.keys()]
            own = None if has_own_loss else without_adapters(model)
            among = limits_in(first.keys()) | text_in(first.keys())
            beyond += _beyond_in_rows(examples, among, name=name, model=own, hint=hint)
    _refuse_other_counts_of_ends(model, examples, name)
    # Positions count the tokens of a trained prompt, too.
    if {LENGTH_COLUMN, *ANSWER} <= {*names} and not has_own_loss and not places_of_prompt(model):
        refuse_positions_outside(examples, collate=collate, name=name, hint=hint)
    for index, limit in beyond:
        if limit.kind == "not empty" and name != "train_dataset":  # an evaluation pads empty texts next to other rows
            continue
        example = fetch_one(examples, index)
        if limit.kind == "no text":
            refuse_text_as_label(
                model, examples, example, limit=limit, collate=collate, has_own_loss=has_own_loss, name=name
            )
            continue
        try:
            collated = tried(collate, [example])
        except Exception as error:
            if limit.kind == "not empty":
                raise limit.refusal(name, hint) from error
            raise
        if limit.is_exceeded_in(collated):
            raise limit.refusal(name, hint)


def _refuse_missing_labels(examples: Any, name: str, hint: str, *, is_read_by_model: bool) -> None:
    for column in LABELS if is_stored(examples) and is_read_by_model and name == "train_dataset" else ():
        # pandas writes NaN for a missing number, and the loss of the row would be NaN. A user's own loss may leave it out.
        if column in examples.column_names and has_not_finite(examples, column=column):
            is_there = f"numpy.isfinite(row[{column!r}]).all()"
            raise missing_labels(examples, name, column, is_there, hint, but=" that is a finite number")
    for column, row in rows_with_gaps(examples, names=LABELS, may_be_empty=name != "train_dataset"):
        # A transform may add the label. Rows of a stored table are not fetched, since a number format would replace None.
        example = {column: None} if is_stored(examples) else fetch_one(examples, row)
        if any(example[key] is None for key in LABELS if key in example):
            # The loss of such rows would end the run after ε was spent.
            raise missing_labels(examples, name, column, f"row[{column!r}] is not None", hint)


def _refuse_gaps(examples: Any, collate: Callable[[list[Any]], Any], name: str) -> None:
    """Refuse a table with missing values, in lists too, with which the collator fails."""
    for column in examples.column_names if is_stored(examples) else ():
        if (row := row_with_gap(examples, column=column)) is None:
            continue
        # A collator may leave out the column, or fill in a value. It may also go by the first row of a batch.
        with_gap, other = fetch_one(examples, row), fetch_one(examples, 0 if row else len(examples) - 1)
        for rows in ([with_gap], [with_gap, other], [other, with_gap]):
            if error := _batch_or_error(collate, rows)[1]:
                # The refusal leaves out the error's words, which may hold a part of a row.
                raise Refusal(
                    "missing-values",
                    f"Some rows of {name} have no value (None) in the column {column!r}, or in its lists, and data_collator "
                    f"fails on them with a {type(error).__name__}. Remove them, for example {name}.filter(lambda row: "
                    f"row[{column!r}] is not None), fill in a value, or make a collator that takes them.",
                ) from error


def refuse_uncollated(
    examples: Any, *, collate: Callable[[list[Any]], Any], most_rows: int = 8, name: str = "train_dataset"
) -> list[int]:
    """Refuse a data set if some rows cannot be collated together, such as images of other sizes; look for a moment.

    At most `most_rows` rows are in a batch. If that is one row, rows need not fit together.

    Returns:
        The first rows found that do not fit together although each is collated alone, if a batch has one row.
    """
    if not has_length(examples) or len(examples) == 0:
        return []
    end, places = time.monotonic() + MOST_SECONDS_OF_COLLATING, np.random.default_rng(1).permutation(len(examples))
    number = min(most_rows, _COLLATED_AT_ONCE) if most_rows > 1 else _COLLATED_AT_ONCE
    for start in range(0, len(places), number):
        if time.monotonic() > end:
            return []
        of_batch = places[start : start + number].tolist()
        rows = [fetch_one(examples, place) for place in of_batch]
        batch, error = _batch_or_error(collate, rows)
        if error is None:
            if name == "train_dataset":
                _refuse_left_out(batch, collate, rows)
            continue
        alone = [_batch_or_error(collate, [row])[1] for row in rows]
        if most_rows == 1 and not any(alone):
            return of_batch
        if isinstance(error, Refusal):  # the collator has explained it
            raise error
        if all(alone):  # other checks explain a collator that always fails
            continue
        raise Refusal(
            "rows-not-collated",
            f"data_collator fails with a {type(error).__name__} on some rows of {name}, so the run would end when they are "
            "sampled. Look for rows whose values have another shape or type, such as images with another size or number of "
            "channels, and change or remove them.",
        ) from error
    return []


def _refuse_left_out(batch: Any, collate: Callable[[list[Any]], Any], rows: list[Any]) -> None:
    """Refuse a collator that leaves out some rows, which an evaluation may do and a private run may not."""
    sizes = _sizes(batch)
    # An entry with as many rows as there are records shows that none is left out.
    if len(rows) in sizes.values():
        return
    # A collator may fail where no row is left.
    each_alone = [of_row for row in rows if (of_row := _batch_or_error(collate, [row])[0]) is not None]
    for name, value in _tensors(batch).items():
        numbers = [_numel(each, name) for each in each_alone]
        if len(numbers) == len(rows) and 0 not in numbers and value.numel() >= sum(numbers):
            return  # rows that are joined to one are not left out, and other checks explain that
    alone = [_sizes(each) for each in each_alone]
    of_one = [name for name in sizes if alone and all(each.get(name, 1) <= 1 for each in alone if each)]
    if of_one and all(sizes[name] < len(rows) for name in of_one):
        # Sensitivity: a row that is left out moves all others to other places.
        raise Refusal(
            "rows-left-out",
            "data_collator leaves out some rows of train_dataset, so batches have fewer rows than were sampled, and a batch "
            "may be empty. Remove these rows beforehand, for example with train_dataset.filter(...) or "
            "torch.utils.data.Subset(train_dataset, kept).",
        )


def _tensors(batch: Any) -> dict[str, Tensor]:
    """Return the dense tensors of a batch that have rows."""
    found = batch.items() if isinstance(batch, Mapping) else ()
    return {name: each for name, each in found if isinstance(each, Tensor) and is_dense(each) and each.ndim}


def _sizes(batch: Any) -> dict[str, int]:
    return {name: len(each) for name, each in _tensors(batch).items()}


def _numel(batch: Any, name: str) -> int:
    value = _tensors(batch).get(name)
    return 0 if value is None else value.numel()


def _batch_or_error(collate: Callable[[list[Any]], Any], rows: list[Any]) -> tuple[Any, Exception | None]:
    """Return the batch of a collator, or else its error; neither the rows nor the user's random numbers change."""
    try:
        return tried(collate, rows), None
    except Exception as error:
        return None, error


def _refuse_labels_beside_tokens(examples: Any, collate: Callable[[list[Any]], Any], name: str) -> None:
    """Refuse a table in which a row has more or fewer labels than tokens, or misses some."""
    fix = "Make the labels from the tokenizer's word_ids(), with -100 for a token without a label."
    for column in LABELS if LENGTH_COLUMN in examples.column_names else ():
        has_gaps = has_gaps_in_lists(examples, column=column) if column in examples.column_names else None
        if has_gaps is None or examples.data.column(column).null_count:
            continue
        if has_gaps:
            raise Refusal(
                "missing-token-labels",
                f"Expected a number per token in column {column!r} of {name}; got None for some tokens. {fix}",
            )
        other = np.flatnonzero(lengths_of(examples, column=column) != lengths_of(examples))
        if not len(other):
            continue
        example = fetch_one(examples, int(other[0]))
        own, ids, collated = list(example[column]), [], []
        with contextlib.suppress(Exception):  # the collator may not take such a row
            batch = tried(collate, [example])
            ids, collated = batch[LENGTH_COLUMN].flatten().tolist(), batch["labels"].flatten().tolist()
        # A user's collator may turn labels of words into labels of tokens; other collators only pad them.
        padding = [IGNORED_LABEL] * (len(collated) - len(own))
        if not collated or len(collated) != len(ids) or (padding and collated in (own + padding, padding + own)):
            raise Refusal(
                "labels-of-other-length",
                f"Expected one label per token in column {column!r} of {name}; got more or fewer in some rows. {fix}",
            )


def _none_row(name: str) -> Refusal:
    return Refusal(
        "row-is-none",
        f"{name} returns None for some rows. If the collator skips them, batches have fewer rows than were sampled. Remove "
        f"them beforehand: torch.utils.data.Subset({name}, [i for i, row in enumerate({name}) if row is not None]).",
    )


def _refuse_other_counts_of_ends(model: nn.Module, examples: Any, name: str) -> None:
    """Refuse rows with different numbers of end tokens, if the model's own forward refuses them in one batch.

    The classifiers of BART, T5 and other models do.
    """
    base = without_adapters(model)
    if not isinstance(base, PreTrainedModel) or not is_stored(examples) or LENGTH_COLUMN not in examples.column_names:
        return
    from pyarrow import types

    kind = examples.data.schema.field(LENGTH_COLUMN).type
    if not types.is_list(kind) or types.is_nested(kind.value_type) or not _compares_ends(type(base)):
        return
    found: set[int] = set()
    end = time.monotonic() + MOST_SECONDS
    for table in examples.with_format("arrow").select_columns([LENGTH_COLUMN]).iter(batch_size=_ROWS_AT_ONCE):
        for chunk in table.column(0).chunks:
            lengths = compute_lengths(chunk)
            ends = np.concatenate(
                [[0], np.cumsum(chunk.flatten().to_numpy(zero_copy_only=False) == base.config.eos_token_id)]
            )
            stops = np.cumsum(lengths)
            found |= {*np.unique(ends[stops] - ends[stops - lengths]).tolist()}
        if len(found) > 1:
            raise _ends_differ(base, name, base.config.eos_token_id)
        if time.monotonic() > end:
            return


def _ends_differ(model: Any, name: str, token: int) -> Refusal:
    # The message says neither which rows nor how many, since messages end up in logs.
    return Refusal(
        "ends-differ",
        f"{type(model).__name__} needs the same number of end-of-text tokens (eos_token_id={token}) in every row, but the "
        f"rows of {name} have different numbers, for example because a text contains '</s>' or was truncated. Keep only the "
        f"rows with n end-of-text tokens (usually n = 1): {name}.filter(lambda row: row['input_ids'].count({token}) == n).",
    )


def compute_lengths(chunk: Any) -> np.ndarray:
    """Return the lengths of the lists of a pyarrow array."""
    from pyarrow import compute

    lengths: np.ndarray = compute.list_value_length(chunk).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)


def _compares_ends(kind: type) -> bool:
    """Return whether a model's forward refuses a batch whose rows have different numbers of end tokens."""
    with contextlib.suppress(OSError, TypeError):
        return "number of <eos> tokens" in inspect.getsource(kind.forward)  # type: ignore[attr-defined]
    return False


def _beyond_in_rows(
    examples: Any, limits: frozenset[Limit], *, name: str, model: nn.Module | None, hint: str
) -> Iterator[tuple[int, Limit]]:
    """Yield for each limit the first random row that exceeds it, for at most a second.

    `model` is given if it computes the loss, and so refuses missing labels, and some models other counts of end tokens.
    """
    left, end = {*limits}, time.monotonic() + MOST_SECONDS_OF_ROWS
    counts: set[int] = set()
    token = model.config.eos_token_id if isinstance(model, PreTrainedModel) and _compares_ends(type(model)) else None
    for index in np.random.default_rng(0).permutation(len(examples)).tolist():  # the same on every process
        if time.monotonic() > end:
            return
        row = fetch_one(examples, index)
        if row is None:
            raise _none_row(name)
        for column in LABELS if model is not None and name == "train_dataset" else ():
            if column in row and row[column] is None:
                raise missing_labels(examples, name, column, f"row[{column!r}] is not None", hint)
            if column in row and oddity_of(row[column]) in ("some", "all"):
                is_there = f"numpy.isfinite(row[{column!r}]).all()"
                raise missing_labels(examples, name, column, is_there, hint, but=" that is a finite number")
        if token is not None and LENGTH_COLUMN in row:
            counts.add(int((np.asarray(row[LENGTH_COLUMN]) == token).sum()))
            if len(counts) > 1:
                raise _ends_differ(model, name, token)
        for limit in [limit for limit in left if limit.is_exceeded_in(row)]:
            left.remove(limit)
            yield index, limit


def _beyond_in_table(examples: Any, limits: frozenset[Limit]) -> Iterator[tuple[int, Limit]]:
    """Yield for each limit the first scanned row that exceeds it, for at most ten seconds."""
    # Scan in the order of storage, since in the order of a shuffled table each row would have to be looked up.
    places = None if examples._indices is None else examples._indices.column(0).to_numpy()
    rows: Any = range(len(examples)) if places is None else np.unique(places)
    end = time.monotonic() + MOST_SECONDS
    for column in {limit.column for limit in limits}:
        left = {limit for limit in limits if limit.column == column}
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            if time.monotonic() > end:
                return
            of_block = rows[start : start + _ROWS_AT_ONCE]
            block = examples.data.column(column).slice(int(of_block[0]), int(of_block[-1]) - int(of_block[0]) + 1)
            for chunk in (block if places is None else block.take(of_block - of_block[0])).chunks:
                for limit in [limit for limit in left if limit.is_exceeded(_found(chunk, limit))]:
                    row = next(row for row in range(len(chunk)) if limit.is_exceeded(_found(chunk.slice(row, 1), limit)))
                    left.remove(limit)
                    index = int(of_block[row])
                    yield index if places is None else int(np.flatnonzero(places == index)[0]), limit
                of_block = of_block[len(chunk) :]


def _found(chunk: Any, limit: Limit) -> np.ndarray:
    return numbers_in(chunk, lengths=limit.kind in ("lengths", "not empty"))
