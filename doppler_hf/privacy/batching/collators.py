"""Transformers' collators, but no example decides for the others."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from doppler_hf.errors import Refusal
from doppler_hf.privacy.batching.columns import LENGTH_COLUMN, choices_of

Collator = Callable[[Sequence[Any]], dict[str, Any]]


def of_the_same_columns(examples: Sequence[Any], *, collator: Collator) -> dict[str, Any]:
    """Collate examples that all have the same columns, and as many choices.

    Sensitivity. Transformers' collators read columns and number of choices off the first example. One without
    `token_type_ids` would remove that column from all others, and one of two choices would remove the third.
    """
    rows = [example for example in examples if isinstance(example, Mapping)]
    _refuse_other_columns(rows)
    if len({len(choices_of(row.get(LENGTH_COLUMN, ()))) for row in rows}) > 1:
        raise Refusal(
            "choices-differ",
            "Examples of train_dataset must all have the same number of choices, got different ones. Fill up examples with "
            "fewer, or give DopplerTrainer a data_collator of your own.",
        )
    try:
        return collator(examples)
    except (RuntimeError, ValueError) as error:
        if not re.match(r"stack expects each|each element in list|Unable to create tensor", str(error)):
            raise
        raise _unequal() from None


def made_apart(examples: Sequence[Any], *, collator: Collator) -> dict[str, Any]:
    """Collate each example by itself, and put the rows together.

    Sensitivity. Transformers' default collator also reads off the first example whether labels are whole numbers: a first
    label of 3 would have cut 2.5 to 2 for all others.
    """
    for example in examples:
        # Transformers also takes objects with attributes; those of a tensor are none of its values.
        if not isinstance(example, Mapping) and (isinstance(example, Tensor) or not hasattr(example, "__dict__")):
            raise Refusal(
                "not-a-mapping",
                "Examples of train_dataset must map names to values for the default collator, got one of type "
                f"{type(example).__name__}. Make a table, such as datasets.Dataset.from_dict({{'pixel_values': images, "
                "'labels': labels}), or give DopplerTrainer a data_collator.",
            )
    rows = [collator([example]) for example in examples]
    _refuse_other_columns(rows)
    return {name: _joined([row[name] for row in rows]) for name in rows[0]}


def _unequal() -> Refusal:
    # Neither which nor their sizes, which torch's own error names: messages end in logs.
    return Refusal(
        "not-padded",
        "Examples must be padded or resized to one size, got a collator that does neither. For texts set "
        "processing_class=tokenizer, or data_collator=DataCollatorWithPadding(tokenizer), for labels of tokens "
        "DataCollatorForTokenClassification(tokenizer). Remove columns of text.",
    )


def _refuse_other_columns(rows: Iterable[Mapping[str, Any]]) -> None:
    if len({frozenset(row) for row in rows}) > 1:
        raise Refusal(
            "columns-differ",
            "Examples of train_dataset must all have the same columns, got one without a value in some. Fill it in, or give "
            "DopplerTrainer a data_collator of your own.",
        )


def _joined(rows: Sequence[Tensor]) -> Tensor:
    if len({row.shape[1:] for row in rows}) > 1:
        raise _unequal()
    # Whole numbers beside others stay exactly what they are alone.
    is_mixed = len({row.is_floating_point() for row in rows}) > 1
    return torch.cat([row.double() for row in rows] if is_mixed else list(rows))
