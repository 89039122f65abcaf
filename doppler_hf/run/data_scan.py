"""Find numbers of the training set that the model cannot take before any ε is spent.

The columns of a stored table are scanned once, many rows at a time. A row beyond the model's range is collated alone and
checked again, since a collator may cut or change it. So nothing that would train is refused,
unless a collator of your own makes up missing labels.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from accelerate import PartialState
from torch import nn

from doppler_hf.privacy.batching.columns import LABELS, is_stored, is_table, numbers_in, rows_with_gaps
from doppler_hf.privacy.batching.fetching import fetch_one
from doppler_hf.run.model_limits import Limit, limits_of

MOST_NUMBERS: Final = 10**8  # of a column; a second
MOST_ROWS_OF_A_LIST: Final = 10**5
_ROWS_AT_ONCE: Final = 1 << 14
_SCANNED: Final[set[tuple[str, frozenset[Limit]]]] = set()  # fingerprints of data sets, and what they are within


def refuse_values_beyond(
    model: nn.Module,
    examples: Any,
    *,
    collate: Callable[[list[Any]], Any],
    has_own_loss: bool,
    name: str = "train_dataset",
) -> None:
    """Refuse a data set with token ids, types, positions, lengths or labels that the model has no place for, or no label.

    A column of more than `MOST_NUMBERS` is sampled. A data set that makes its rows, as torch's do, is not scanned; `name` is
    its argument's, for messages.
    """
    is_list = isinstance(examples, list) and 0 < len(examples) <= MOST_ROWS_OF_A_LIST and isinstance(examples[0], Mapping)
    if not is_list and not is_table(examples):
        return
    hint = "" if is_list or is_stored(examples) else " Change rows ahead of with_transform."
    _refuse_missing_labels(examples, name, hint)
    columns = list(examples[0]) if is_list else examples.column_names
    limits = frozenset(limit for limit in limits_of(model, columns, has_own_loss=has_own_loss) if limit.column in columns)
    if not is_list and (examples._fingerprint, limits) in _SCANNED:
        return
    beyond = [*(_beyond_in_list if is_list else _beyond_in_table)(examples, limits)]
    for index, limit in beyond:
        if limit.kind == "not empty" and name != "train_dataset":  # of evaluations they stand beside others
            continue
        try:
            collated = collate([fetch_one(examples, index)])
        except Exception as error:
            if limit.kind in ("no text", "not empty"):
                raise limit.refusal(name, hint) from error
            raise
        # Transformers' default collator leaves out text.
        is_left_out = limit.kind == "no text" and isinstance(collated, Mapping) and {*LABELS}.isdisjoint(collated)
        if is_left_out or limit.is_exceeded_in(collated):
            raise limit.refusal(name, hint)
    if not is_list and not beyond:  # of which another collator may make something else
        _SCANNED.add((examples._fingerprint, limits))


def _refuse_missing_labels(examples: Any, name: str, hint: str) -> None:
    for column, row in rows_with_gaps(examples, names=LABELS, may_be_empty=name != "train_dataset"):
        example = fetch_one(examples, row)  # behind a transform it may have one
        if any(example[key] is None for key in LABELS if key in example):
            # Their loss would end the run with ε spent. Neither which nor how many: messages end in logs.
            raise ValueError(
                f"The column {column!r} of {name} must have a label for each example, got none for some. Leave them out: "
                f"{name}.filter(lambda row: row[{column!r}] is not None)." + hint
            )


def _beyond_in_list(rows: list[Any], limits: frozenset[Limit]) -> Iterator[tuple[int, Limit]]:
    """Yield for each limit the first row that exceeds it."""
    for limit in limits:
        yield from [(index, limit) for index, row in enumerate(rows) if limit.is_exceeded_in(row)][:1]


def _beyond_in_table(examples: Any, limits: frozenset[Limit]) -> Iterator[tuple[int, Limit]]:
    """Yield for each limit the first scanned row that exceeds it."""
    # In the order in which they lie: of a shuffled table each row would have to be looked up.
    places = None if examples._indices is None else examples._indices.column(0).to_numpy()
    rows: Any = range(len(examples)) if places is None else np.unique(places)
    for column in {limit.column for limit in limits}:
        left = {limit for limit in limits if limit.column == column}
        for chunk, of_chunk in _chunks(examples.data.column(column), rows, name=column):
            for limit in [limit for limit in left if limit.is_exceeded(_found(chunk, limit))]:
                row = next(row for row in range(len(chunk)) if limit.is_exceeded(_found(chunk.slice(row, 1), limit)))
                left.remove(limit)
                yield of_chunk[row] if places is None else int(np.flatnonzero(places == of_chunk[row])[0]), limit


def _chunks(stored: Any, rows: Any, *, name: str) -> Iterator[tuple[Any, Any]]:
    """Yield the values of ascending rows of a column in arrays of pyarrow, each with its rows; of too many a sample."""
    first = _block(stored, rows[:_ROWS_AT_ONCE])
    numbers = sum(len(numbers_in(chunk)) for chunk in first.chunks) * len(rows) / max(1, len(first))
    every = max(1, math.ceil(numbers / MOST_NUMBERS))
    if every > 1 and PartialState().is_main_process:
        print(f"The column {name!r} is large: one row in {every} was scanned for what the model cannot take.")
    for start in range(0, len(rows), _ROWS_AT_ONCE * every):
        for chunk in _block(stored, rows[start : start + _ROWS_AT_ONCE]).chunks:
            yield chunk, rows[start : start + len(chunk)]
            start += len(chunk)


def _block(stored: Any, rows: Any) -> Any:
    """Return ascending rows of a column."""
    block = stored.slice(int(rows[0]), int(rows[-1]) - int(rows[0]) + 1)
    return block if len(block) == len(rows) else block.take(rows - rows[0])


def _found(chunk: Any, limit: Limit) -> np.ndarray:
    return numbers_in(chunk, lengths=limit.kind in ("lengths", "not empty"))
