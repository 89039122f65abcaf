"""What the private data loader needs to know of a data set: how long its examples are, and how to collate nothing."""

from collections.abc import Callable, Sequence
from typing import Any


def lengths_of(dataset: Any) -> list[int] | None:
    """Return the number of tokens of every example, or None when examples are not tokenized text.

    Args:
        dataset: A `datasets.Dataset`; other data sets would have to be read whole, and give None.

    Returns:
        Lengths, shape (num_examples,), or None.
    """
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or "input_ids" not in columns:
        return None
    return [len(tokens) for tokens in dataset["input_ids"]]


def collate_or_skip(examples: Sequence[Any], *, collator: Callable[[Sequence[Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return the collated batch, or an empty dictionary for none: collators expect at least one example."""
    return collator(examples) if examples else {}
