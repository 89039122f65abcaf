"""What the private data loader needs to know of a data set: how long its examples are, and how to collate a draw.

A draw comes sorted by length and in `gradient_accumulation_steps` pieces of equal count, one for each item of the host's
loop. A piece is collated as a whole, or, within a budget of tokens, as several micro-batches. The cut is made here rather
than in the sampler, because a loader's item must be a flat list of indices, and because nothing but memory depends on it.
"""

from collections.abc import Callable, Sequence
from typing import Any

LENGTH_COLUMN = "input_ids"


def lengths_of(dataset: Any) -> list[int] | None:
    """Return the number of tokens of every example, or None when examples are not tokenized text.

    Args:
        dataset: A `datasets.Dataset`; other data sets would have to be read whole, and give None.

    Returns:
        Lengths, shape (num_examples,), or None.
    """
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or LENGTH_COLUMN not in columns:
        return None
    return [len(tokens) for tokens in dataset[LENGTH_COLUMN]]


def check_token_budget(lengths: Sequence[int] | None, *, max_tokens: int) -> None:
    """Refuse a budget of tokens that cannot be kept, before the first step.

    Args:
        lengths: As `lengths_of` returns them.
        max_tokens: The budget.

    Raises:
        ValueError: No lengths to cut by, or an example longer than the budget.
    """
    if lengths is None:
        raise ValueError(
            f"max_tokens_per_micro_batch={max_tokens} needs a datasets.Dataset with a column {LENGTH_COLUMN!r}. Leave it "
            "out for other data; micro-batches then have per_device_train_batch_size examples on average."
        )
    if max(lengths) > max_tokens:
        # Neither which example nor how long it is: messages end in logs, and both are about one private example.
        raise ValueError(
            f"max_tokens_per_micro_batch={max_tokens} is less than the length of a single example. Truncate the examples "
            "to that length, for instance with max_seq_length in scripts/glue.py, or raise the budget."
        )


def cut_by_tokens(lengths: Sequence[int], *, max_tokens: int) -> list[slice]:
    """Cut consecutive examples so that each part, padded to its longest example, has at most `max_tokens` tokens.

    Each part takes as many examples as fit. In ascending order of length there are then as few parts as can be.

    Args:
        lengths: Lengths of the examples, in their order.
        max_tokens: The budget; an example longer than that makes a part of its own.

    Returns:
        The parts, in order, none of them empty.

    Example:
        >>> cut_by_tokens([2, 2, 3, 7], max_tokens=8)
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
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


def collate_piece(
    examples: Sequence[Any], *, collator: Callable[[Sequence[Any]], dict[str, Any]], max_tokens: int | None
) -> list[dict[str, Any]]:
    """Return the micro-batches of one piece of a draw, none for an empty piece: collators expect at least one example.

    Args:
        examples: The piece, in the order of the draw.
        collator: Makes a batch of a list of examples.
        max_tokens: The most padded tokens of a micro-batch, or None for a single micro-batch of any size.

    Returns:
        What the collator returns for each micro-batch.
    """
    if max_tokens is None:
        return [collator(examples)] if examples else []
    lengths = [len(example[LENGTH_COLUMN]) for example in examples]
    return [collator(examples[part]) for part in cut_by_tokens(lengths, max_tokens=max_tokens)]
