"""Find positions of answers that the loss of question answering ignores, before any ε is spent.

It learns which token begins the answer and which ends it: `start_positions` and `end_positions`. Transformers takes a
negative position for the first token, and ignores a position behind the row's last token. Scripts rely on this where there
is no answer, with one negative number for all such rows, and where an answer was cut off: the position is behind the end of
a row that was cut, or it is one number for all such rows, such as the tokenizer's longest length. Other positions behind the
end of a row are almost always places of characters, such as SQuAD's `answer_start`. So if they are refused, next to nothing
is lost that would train.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from doppler_hf.errors import Refusal
from doppler_hf.privacy.batching.collators import tried
from doppler_hf.privacy.batching.columns import LENGTH_COLUMN, is_list, is_stored, numbers_in
from doppler_hf.privacy.batching.micro_batches import fetch_one
from doppler_hf.privacy.losses import ANSWER, TOKENS_OF_AN_ANSWER, is_inside

_MOST_SECONDS: Final = 10.0
_MOST_SECONDS_OF_ROWS: Final = 1.0
_ROWS_AT_ONCE: Final = 1 << 14
_MASK: Final = "attention_mask"


class _Rows(NamedTuple):
    """Some rows of a data set.

    Attributes:
        places: Their places in the data set.
        lengths: Their numbers of tokens.
        is_own: For all tokens, one row after the other, whether they are no padding.
        positions: The positions of each column.
    """

    places: np.ndarray
    lengths: np.ndarray
    is_own: np.ndarray
    positions: dict[str, np.ndarray]

    def owns(self, positions: np.ndarray) -> np.ndarray:
        """Return for each row whether a position is that of one of its own tokens."""
        starts = np.cumsum(self.lengths) - self.lengths
        is_in_row = (positions >= 0) & (positions < self.lengths)
        found = np.zeros(len(positions), bool)
        found[is_in_row] = self.is_own[(starts + positions)[is_in_row]]
        return found

    def outside(self, column: str) -> "_Outside":
        """Return the rows whose position is not that of an own token."""
        positions = self.positions[column]
        is_filled = self.owns(np.zeros_like(positions)) & self.owns(self.lengths - 1)  # a row with padding was not cut
        is_next = (positions > 0) & self.owns(positions - 1)
        columns = (self.places, positions, np.where(is_filled, self.lengths, 0), is_next)
        return _Outside(*(each[~self.owns(positions)] for each in columns))


class _Outside(NamedTuple):
    """Rows with a position outside: places, positions, lengths (0 with padding), and whether it is next to a token."""

    places: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    is_next: np.ndarray

    def fault(self, longest: int) -> int | None:
        """Return the place of a row with a position that cannot be meant, or None."""
        if len(np.unique(negative := self.positions[self.positions < 0])) > 1:
            return int(self.places[self.positions == negative[0]][0])
        is_odd = (self.positions >= 0) & (self.lengths != longest) & ~self.is_next
        return int(self.places[is_odd][0]) if len(np.unique(self.positions[is_odd])) > 1 else None


def refuse_positions_outside(examples: Any, *, collate: Callable[[list[Any]], Any], name: str, hint: str) -> None:
    """Refuse a data set, which has both columns, with negative positions, or with different ones behind ends of rows."""
    longest, found = 0, {column: list[_Outside]() for column in ANSWER}
    for rows in (_blocks_of_table if is_stored(examples) else _blocks_of_rows)(examples):
        longest = max(longest, int(rows.lengths.max(initial=0)))
        for column in ANSWER:
            found[column].append(rows.outside(column))
    for column, blocks in found.items():
        place = _Outside(*map(np.concatenate, zip(*blocks, strict=True))).fault(longest) if blocks else None
        if place is None or not _is_outside_in(tried(collate, [fetch_one(examples, place)]), column):
            continue
        raise Refusal(
            "values-out-of-range",
            f"Column {column!r} of {name}: expected numbers of tokens, from 0 to the last token of a row; got other numbers "
            f"in some rows. {TOKENS_OF_AN_ANSWER}." + hint,
        )


def _is_outside_in(batch: Any, column: str) -> bool:
    """Return whether a position is still outside in a batch of one row, since a collator may change it."""
    position = batch.get(column) if isinstance(batch, Mapping) else None
    own = None if position is None else batch.get(_MASK, batch.get(LENGTH_COLUMN))
    if not isinstance(position, Tensor) or not isinstance(own, Tensor) or own.ndim != 2:
        return False
    is_own = own != 0 if _MASK in batch else torch.ones_like(own, dtype=torch.bool)
    return bool(position.flatten()[0] < 0) or not bool(is_inside(position.reshape(-1, 1), is_own).any())


def _blocks_of_table(examples: Any) -> Iterator[_Rows]:
    """Yield the rows of a stored table with a list of tokens and whole numbers as positions, for at most ten seconds."""
    if not is_list(examples.data.schema.field(LENGTH_COLUMN).type):
        return
    has_mask = _MASK in examples.column_names and is_list(examples.data.schema.field(_MASK).type)
    read = [LENGTH_COLUMN, *ANSWER, *([_MASK] if has_mask else [])]
    # Scan in the order of storage, since in the order of a shuffled table each row would have to be looked up.
    stored = np.arange(len(examples)) if examples._indices is None else examples._indices.column(0).to_numpy()
    order = np.argsort(stored, kind="stable")
    end = time.monotonic() + _MOST_SECONDS
    for start in range(0, len(order), _ROWS_AT_ONCE):
        places = order[start : start + _ROWS_AT_ONCE]
        of_block = stored[places]
        first, number = int(of_block[0]), int(of_block[-1]) - int(of_block[0]) + 1
        table = {name: examples.data.column(name).slice(first, number) for name in read}
        if not np.array_equal(of_block, np.arange(first, first + number)):
            table = {name: each.take(of_block - first) for name, each in table.items()}
        lengths, positions = _lengths(table[LENGTH_COLUMN]), {column: _numbers(table[column]) for column in ANSWER}
        if any(len(each) != len(places) or each.dtype.kind not in "iu" for each in positions.values()):
            return  # other checks name missing values
        is_own = np.ones(lengths.sum(), bool)
        if has_mask and np.array_equal(_lengths(table[_MASK]), lengths):
            is_own = _numbers(table[_MASK]) != 0
        if len(is_own) == lengths.sum():  # a mask of pairs of tokens has more numbers
            positions = {column: each.astype(np.int64) for column, each in positions.items()}
            yield _Rows(places, lengths, is_own, positions)
        if time.monotonic() > end:
            return


def _lengths(values: Any) -> np.ndarray:
    from pyarrow import compute

    lengths: np.ndarray = compute.list_value_length(values).fill_null(0).to_numpy()
    return lengths.astype(np.int64)


def _numbers(values: Any) -> np.ndarray:
    return np.concatenate([numbers_in(chunk) for chunk in values.chunks])


def _blocks_of_rows(examples: Any) -> Iterator[_Rows]:
    """Yield random rows of a data set that computes its rows, for at most a second."""
    end, found = time.monotonic() + _MOST_SECONDS_OF_ROWS, []
    for place in np.random.default_rng(0).permutation(len(examples)).tolist():  # the same on every process
        row = fetch_one(examples, place)
        if not isinstance(row, Mapping) or not {LENGTH_COLUMN, *ANSWER} <= row.keys():
            break
        tokens, positions = np.asarray(row[LENGTH_COLUMN]), [np.asarray(row[column]) for column in ANSWER]
        mask = np.asarray(row.get(_MASK, np.ones(tokens.shape)))
        is_known = all(each.size == 1 and each.dtype.kind in "iu" for each in positions)
        if is_known and tokens.ndim == 1 and mask.shape == tokens.shape:
            found.append((place, len(tokens), mask != 0, *(each.item() for each in positions)))
        if time.monotonic() > end:
            break
    if found:
        places, lengths, masks, *of_answers = zip(*found, strict=True)
        positions_of = {column: np.array(each) for column, each in zip(ANSWER, of_answers, strict=True)}
        yield _Rows(np.array(places), np.array(lengths), np.concatenate(masks), positions_of)
