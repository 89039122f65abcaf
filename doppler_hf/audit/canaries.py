"""Training sets with canaries: further rows, and a column that holds the number of each row's canary."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Int

from doppler_hf.errors import Refusal

CANARY_COLUMN: Final = "canary"
ORDINARY: Final = -1  # The number for a row that is no canary.


def chosen_rows(
    dataset: Any, *, rows: Int[np.ndarray, " rows"], canaries: Int[np.ndarray, " rows"], unit_column: str | None
) -> Any:
    """Return the chosen rows of a data set, in which each canary is a user of its own. A row may be chosen several times."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise Refusal(
            "not-a-dataset",
            f"Expected a datasets.Dataset as the training set; got {kind}. The audit adds canaries, which are rows that it "
            "later tries to recognise.",
        )
    chosen = dataset.select(rows)
    if unit_column is None:
        return chosen
    owners = [
        f"unit {owner}" if canary == ORDINARY else f"canary {canary}"
        for owner, canary in zip(chosen.with_format(None)[unit_column], canaries.tolist(), strict=True)
    ]
    return chosen.remove_columns(unit_column).add_column(unit_column, owners)


def numbered_rows(
    dataset: Any, *, rows: Int[np.ndarray, " rows"], canaries: Int[np.ndarray, " rows"], unit_column: str | None
) -> Any:
    """Return the chosen rows of a data set, each with the number of its canary.

    The data set may have a transform that runs when a row is read.
    """
    chosen = chosen_rows(dataset, rows=rows, canaries=canaries, unit_column=unit_column)
    if CANARY_COLUMN in chosen.column_names:
        raise Refusal(
            "column-is-taken",
            f"The training set already has a column named {CANARY_COLUMN!r}, a name that the audit uses. Rename the column.",
        )
    chosen = chosen.add_column(CANARY_COLUMN, canaries)
    if chosen.format["type"] != "custom":
        return chosen
    transform = chosen.format["format_kwargs"]["transform"]
    return chosen.with_transform(lambda rows: {**transform(rows), CANARY_COLUMN: rows[CANARY_COLUMN]})


def collate_with_canaries(
    examples: Sequence[dict[str, Any]], *, collator: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
) -> dict[str, Any]:
    """Collate examples without the canary column, then add the canaries' numbers to the batch, shape (batch,)."""
    others = [{name: value for name, value in example.items() if name != CANARY_COLUMN} for example in examples]
    return {**collator(others), CANARY_COLUMN: torch.tensor([int(example[CANARY_COLUMN]) for example in examples])}
