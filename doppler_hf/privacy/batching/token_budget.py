"""Micro-batches within a budget of rows, and of tokens with their padding."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from doppler_hf.privacy.batching.columns import LENGTH_COLUMN, length_of


def check_token_budget(
    lengths: Sequence[int] | np.ndarray | None,
    *,
    max_tokens: int,
    views: int = 1,
    counts: Int[np.ndarray, " num_examples"] | None = None,
) -> None:
    """Refuse a budget of tokens that cannot be met by all rows of a clipped gradient, before the first step."""
    if lengths is None:
        raise ValueError(
            f"max_tokens_per_micro_batch={max_tokens} needs a datasets.Dataset with a column {LENGTH_COLUMN!r}. For other "
            "data leave it out, and set the average size of a micro-batch with per_device_train_batch_size."
        )
    if np.max(np.asarray(lengths) * (1 if counts is None else counts)) * views > max_tokens:
        # Neither which example nor how long it is: messages end in logs, and both are about one private example.
        raise ValueError(
            f"max_tokens_per_micro_batch={max_tokens} is less than the length of a single example"
            + (f" times augmentation_multiplicity={views}" if views > 1 else "")
            + (" times the examples of its unit, with clip_unit_mean=True" if counts is not None else "")
            + ". Truncate the examples to that length when they are tokenized, "
            + ("lower max_examples_per_unit, " if counts is not None else "")
            + "or raise the budget."
        )


def cut_by_tokens(lengths: Sequence[int], *, max_tokens: int) -> list[slice]:
    """Cut consecutive examples so that each part, padded to its longest example, has at most `max_tokens` tokens.

    Each part takes as many examples as fit. In ascending order of length this makes the fewest parts possible.
    """
    parts, start, longest = [], 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > start and (index + 1 - start) * longest > max_tokens:
            parts.append(slice(start, index))
            start, longest = index, length
    if len(lengths) > start:
        parts.append(slice(start, len(lengths)))
    return parts


def parts_of(examples: Sequence[Any], *, max_rows: int, max_tokens: int | None, rows_each: int = 1) -> list[Sequence[Any]]:
    """Return consecutive parts of the examples within a budget of rows and of tokens; of no examples, none."""
    number = len(examples) // rows_each
    parts = -(-number // max(1, max_rows // rows_each))
    ends = [number * part // parts for part in range(parts + 1)]
    slices = [slice(start, end) for start, end in itertools.pairwise(ends)]
    if max_tokens is not None:
        lengths = [length_of(example[LENGTH_COLUMN]) for example in examples]
        longest = [rows_each * max(lengths[start : start + rows_each]) for start in range(0, len(lengths), rows_each)]
        within = [(part.start, cut_by_tokens(longest[part], max_tokens=max_tokens)) for part in slices]
        slices = [slice(start + cut.start, start + cut.stop) for start, cuts in within for cut in cuts]
    return [examples[part.start * rows_each : part.stop * rows_each] for part in slices]
