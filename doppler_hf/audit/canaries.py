"""Training sets with canaries: rows that carry their canary's number in a further column."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Int

from doppler_hf.errors import Refusal

CANARY_COLUMN: Final = "canary"
ORDINARY: Final = -1  # the number of a row that is no canary


def numbered_rows(
    dataset: Any, *, rows: Int[np.ndarray, " rows"], canaries: Int[np.ndarray, " rows"], unit_column: str | None
) -> Any:
    """Return chosen rows of a data set, each with the number of its canary, which becomes a user of its own.

    The data set may be one that is transformed when it is read, and a row may be chosen several times.
    """
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise Refusal(
            "not-a-dataset",
            f"The training set must be a datasets.Dataset, got {kind}. The audit marks canaries in a column.",
        )
    if CANARY_COLUMN in dataset.column_names:
        raise Refusal(
            "column-is-taken",
            f"The training set has a column {CANARY_COLUMN!r}, which the audit needs for itself. Rename it.",
        )
    chosen = dataset.select(rows)
    if unit_column is not None:
        owners = [
            f"unit {owner}" if canary == ORDINARY else f"canary {canary}"
            for owner, canary in zip(chosen.with_format(None)[unit_column], canaries.tolist(), strict=True)
        ]
        chosen = chosen.remove_columns(unit_column).add_column(unit_column, owners)
    chosen = chosen.add_column(CANARY_COLUMN, canaries)
    if chosen.format["type"] != "custom":
        return chosen
    transform = chosen.format["format_kwargs"]["transform"]
    return chosen.with_transform(lambda rows: {**transform(rows), CANARY_COLUMN: rows[CANARY_COLUMN]})


def collate_with_canaries(
    examples: Sequence[dict[str, Any]], *, collator: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
) -> dict[str, Any]:
    """Collate examples with a collator that knows nothing of canaries, and add their numbers, shape (batch,)."""
    others = [{name: value for name, value in example.items() if name != CANARY_COLUMN} for example in examples]
    return {**collator(others), CANARY_COLUMN: torch.tensor([int(example[CANARY_COLUMN]) for example in examples])}
