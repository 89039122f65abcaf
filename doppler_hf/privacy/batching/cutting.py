"""How a random batch is cut into micro-batches: the passes of the model, whose clipped gradients add up to one sum.

The sum does not depend on the cut, since records share no random numbers (`preflight/model.py`), so the cut may follow the
machine. Rows whose lengths are known are cut by tokens (rows × padded length): a CPU is fastest with what fits its cache, a
GPU with as many tokens as its memory takes. Other rows, such as images, are cut into equal parts.

In bfloat16 a row's gradient also depends, by its rounding, on how far the row is padded. There every row is padded to a
length that follows from the row alone: micro-batches hold rows of one padded length.
"""

import copy
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Int

from doppler_hf.privacy.batching.collators import Collator

# Measured on a CPU: 512 tokens were fastest for layers of width 768 and 384, and 1,024 for width 128. More tokens do not fit
# the cache, and fewer make many small products. See recipes/results/micro-batches.md.
_WIDTHS_IN_CACHE: Final = 131_072
_FEWEST_TOKENS, _MOST_TOKENS = 512, 4_096
# Rows without lengths, and tokens on a CPU, may exceed the asked-for number by a quarter where that saves a pass: a batch
# has its expected size only on average, and would otherwise need a second pass for a few rows in every other step.
_MORE_ROWS: Final = 1.25
_LOOKED_AT: Final = 1 << 14  # rows among which pairs are sought

Lengths = Int[np.ndarray, " rows"]


class PaddedLengths(NamedTuple):
    """A grid of lengths: 2ᵏ⁻¹ < n ≤ 2ᵏ is rounded up to a multiple of 2ᵏ/parts, but of at least `least`."""

    parts: int
    least: int

    def multiple(self, lengths: Lengths) -> Lengths:
        """Return the multiple to which each length is rounded up."""
        powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        return np.maximum(self.least, (1 << powers) // self.parts)

    def rounded(self, lengths: Lengths) -> Lengths:
        """Return each length rounded up."""
        multiple = self.multiple(lengths)
        return -(-lengths // multiple) * multiple


class Pass(NamedTuple):
    """Rows of one pass: where they end in their piece, and the multiple up to which a collator pads them, if one is set."""

    stop: int
    multiple: int | None = None


@dataclass(frozen=True)
class Cut:
    """How a batch is cut into passes.

    Attributes:
        max_rows: The most rows of a pass, or None for no limit. A pass has at least the rows that are clipped together.
        max_tokens: The most tokens of a pass, rows × padded length, or None for no limit.
        views: The rows of each example.
        clip_unit_mean: Whether all rows of a unit are clipped as one, and so stay in one pass.
        padded: The grid of padded lengths, if rows of a pass must have one. None pads to the longest row of a pass.
        texts: The texts of each row (choices, or two answers), which are padded alike. A row's length is that of all.
        least: The length to which the collator pads even the shortest row.
        padding_multiple: The multiple to which the collator pads by itself.
        may_exceed: Whether a pass may have a quarter more rows where that saves one.
    """

    max_rows: int | None
    max_tokens: int | None = None
    views: int = 1
    clip_unit_mean: bool = False
    padded: PaddedLengths | None = None
    texts: int = 1
    least: int = 0
    padding_multiple: int = 1
    may_exceed: bool = False

    def order(self, lengths: Lengths, counts: Lengths | None, others: Int[np.ndarray, "rows columns"] | None) -> np.ndarray:
        """Return an order of rows in which those that fit into one pass are neighbours.

        Args:
            lengths: The length of each row.
            counts: How many rows of its unit each row comes with, or None.
            others: Lengths of further columns, which count where rows of a pass must have one padded length.
        """
        keys = [lengths, *self._classes(lengths, others)[::-1]]
        return np.lexsort(keys if counts is None else [*keys, counts])

    def _classes(self, lengths: Lengths, others: Int[np.ndarray, "rows columns"] | None) -> list[Lengths]:
        """Return what the rows of a pass must have in common: their padded lengths, one array for each column."""
        if self.padded is None:
            return []
        multiple = self.padded.multiple(lengths // self.texts)
        return [
            self.padded.rounded(lengths // self.texts),
            *(() if others is None else (-(-column // multiple) for column in others.T)),
        ]

    def passes(
        self,
        number: int,
        *,
        lengths: Lengths | None = None,
        counts: Lengths | None = None,
        others: Int[np.ndarray, "rows columns"] | None = None,
    ) -> list[Pass]:
        """Return the passes of so many rows, in their `order`."""
        if number == 0:
            return []
        classes = [] if lengths is None else self._classes(lengths, others)
        if counts is not None:
            classes.append(counts)
        borders = functools.reduce(np.logical_or, (np.diff(values) != 0 for values in classes), np.zeros(number - 1, bool))
        starts = [0, *(np.flatnonzero(borders) + 1).tolist()]
        found: list[Pass] = []
        for start, stop in itertools.pairwise([*starts, number]):
            # Rows of a unit, if it is clipped as one, stay together.
            each = int(counts[start]) if counts is not None and self.clip_unit_mean else 1
            of_group = None if lengths is None else lengths[start:stop].reshape(-1, each).max(axis=1)
            multiple = None
            if lengths is not None and self.padded is not None:
                multiple = int(self.padded.multiple(lengths[start:stop] // self.texts).max())
            ends = self._ends((stop - start) // each, rows=each * self.views, lengths=of_group)
            found += [Pass(start + end * each, multiple) for end in ends]
        return found

    def _ends(self, number: int, *, rows: int, lengths: Lengths | None) -> Iterator[int]:
        """Yield the ends of passes of groups with so many rows each, whose longest rows are so long."""
        most = number if self.max_rows is None else max(1, self.max_rows // rows)
        if self.max_tokens is None or lengths is None:
            parts = -(-number // most)
            if self.may_exceed and self.max_rows is not None:
                parts = min(parts, -(-number // max(1, math.floor(_MORE_ROWS * self.max_rows) // rows)))
            # The passes are as equal as possible, because a single row that is left over would take a pass of its own.
            yield from (number * part // parts for part in range(1, parts + 1))
            return
        if self.padded is not None:
            padded = int(self._as_collated(self.texts * self.padded.rounded(lengths // self.texts)).max())
            fit = max(1, min(most, self.max_tokens // (rows * padded)))
            parts = -(-number // fit)
            yield from (number * part // parts for part in range(1, parts + 1))
            return
        start, longest = 0, 0
        for index, length in enumerate(self._as_collated(lengths).tolist()):
            longest = max(longest, length)
            if index > start and ((index + 1 - start) * rows * longest > self.max_tokens or index - start == most):
                yield index
                start, longest = index, length
        yield number

    def _as_collated(self, lengths: Lengths) -> Lengths:
        """Return the lengths to which the collator pads rows at least."""
        multiple = self.texts * self.padding_multiple
        return np.maximum(-(-lengths // multiple) * multiple, self.least)

    def most_rows(self, lengths: Lengths | None) -> int | None:
        """Return the most rows that a pass can have, or None if there is no limit."""
        limits = [] if self.max_rows is None else [math.floor((_MORE_ROWS if self.may_exceed else 1.0) * self.max_rows)]
        if self.max_tokens is not None and lengths is not None:
            limits.append(max(1, self.max_tokens // max(1, self.least, int(lengths.min()))))
        return min(limits, default=None)


def neighbours_in(
    cut: Cut, lengths: Lengths, others: Int[np.ndarray, "rows columns"] | None
) -> list[tuple[tuple[int, int], int]]:
    """Return three pairs of rows of different lengths that may share a pass, and the multiple to which each is padded.

    Args:
        cut: A cut by padded lengths.
        lengths: Lengths of all rows of a data set.
        others: Lengths of further columns.
    """
    assert cut.padded is not None
    looked_at = np.unique(np.linspace(0, len(lengths) - 1, min(len(lengths), _LOOKED_AT), dtype=np.int64))
    lengths, others = lengths[looked_at], None if others is None else others[looked_at]
    order = cut.order(lengths, None, others)
    first, second = order[:-1], order[1:]
    ends = [each.stop for each in replace(cut, max_rows=None, max_tokens=None, views=1).passes(
        len(order), lengths=lengths[order], others=None if others is None else others[order]
    )]  # fmt: skip
    differ = lengths[first] != lengths[second]
    if others is not None:
        differ |= (others[first] != others[second]).any(axis=1)
    differ[np.array(ends[:-1], dtype=np.int64) - 1] = False  # These two neighbours are in two passes.
    places = np.flatnonzero(differ)
    chosen = places[np.unique(np.linspace(0, len(places) - 1, min(3, len(places)), dtype=np.int64))]
    multiples = cut.padded.multiple(lengths[first[chosen]] // cut.texts)
    pairs = zip(looked_at[first[chosen]].tolist(), looked_at[second[chosen]].tolist(), strict=True)
    return list(zip(pairs, multiples.tolist(), strict=True))


def extremes_in(cut: Cut, lengths: Lengths, others: Int[np.ndarray, "rows columns"]) -> list[tuple[tuple[int, int], int]]:
    """Return pairs of rows that may share a pass and differ most in another column, and the multiple of their padding.

    Args:
        cut: A cut by padded lengths.
        lengths: Lengths of all rows of a data set.
        others: Lengths of further columns.
    """
    assert cut.padded is not None
    found = []
    padded = cut.padded.rounded(lengths // cut.texts)
    for column in others.T:
        order = np.lexsort([column, padded])
        starts = np.flatnonzero(np.diff(padded[order], prepend=-1))
        first, last = order[starts], order[np.append(starts[1:], len(order)) - 1]
        spreads = column[last] - column[first]
        for place in np.argsort(-spreads, kind="stable")[:3]:
            if spreads[place] > 0:
                multiple = cut.padded.multiple(lengths[first[place : place + 1]] // cut.texts)
                found.append(((int(first[place]), int(last[place])), int(multiple[0])))
    return found


def tokens_for(*, on_cpu: bool, rows: int, longest: int, width: int | None) -> int:
    """Return the most tokens of a pass, where the user has set none.

    Args:
        on_cpu: Whether the model is on a CPU.
        rows: per_device_train_batch_size.
        longest: The length of the longest row.
        width: The width of the model's layers, or None if it is not known.
    """
    ordinary = rows * longest  # The memory of an ordinary step holds so many tokens.
    if not on_cpu:
        return ordinary
    in_cache = _MOST_TOKENS if width is None else _WIDTHS_IN_CACHE // width
    return max(longest, min(math.floor(_MORE_ROWS * ordinary), max(_FEWEST_TOKENS, min(in_cache, _MOST_TOKENS))))


def grid_for(*, on_cpu: bool, pieces: int) -> PaddedLengths:
    """Return the grid of padded lengths: fine on a CPU, where a small pass costs little, coarse on a GPU.

    Sensitivity: it follows from the device and from arguments, so that no record changes how others are padded.
    """
    if on_cpu:
        return PaddedLengths(16, 4)
    # Each padded length takes a pass of its own. A small batch should not need many more than it has pieces: up to 512
    # tokens there are 20, 12, 7 and 7 lengths.
    return PaddedLengths(next(parts for parts in (8, 4, 2, 1) if pieces >= 2 * parts or parts == 1), 8)


def padding_to(collator: Collator, multiple: int) -> Collator | None:
    """Return a collator that pads to a multiple, and to its own if it has one; None if it has no such setting."""
    if isinstance(collator, functools.partial):
        if "collator" not in collator.keywords:
            return None
        inner = padding_to(collator.keywords["collator"], multiple)
        keywords = {**collator.keywords, "collator": inner}
        return None if inner is None else functools.partial(collator.func, *collator.args, **keywords)
    if (own := padding_multiple(collator)) is None:
        return None
    padding: Any = copy.copy(collator)
    try:
        padding.pad_to_multiple_of = math.lcm(multiple, own)
    except (AttributeError, TypeError):  # a frozen data class, or a property
        return None
    return padding


def padding_multiple(collator: Any) -> int | None:
    """Return the multiple to which a collator pads by itself, 1 if it is not set, or None if it has no such setting."""
    while isinstance(collator, functools.partial) and "collator" in collator.keywords:
        collator = collator.keywords["collator"]
    own = getattr(collator, "pad_to_multiple_of", 0)
    return 1 if own is None else own if isinstance(own, int) and own > 0 else None
