"""Transformers' collators, changed so that no example decides about the columns or types of the others."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from doppler_hf.errors import Refusal, page
from doppler_hf.privacy.batching.columns import LABELS, LENGTH_COLUMN, choices_of
from doppler_hf.privacy.randomness import filled_generators

Collator = Callable[[Sequence[Any]], dict[str, Any]]
# What the `pad` of Transformers' tokenizers makes equally long. It leaves all other columns as they are.
_PADDED_BY_TOKENIZERS: Final = (LENGTH_COLUMN, "token_type_ids", "attention_mask", "special_tokens_mask")


def tried(collate: Callable[[list[Any]], Any], rows: Sequence[Any], *, seed: int = 0) -> Any:
    """Collate copies of rows before training; neither the rows nor the user's random numbers change.

    The collator's own random numbers depend on the seed only.
    """
    with filled_generators(seed):
        return collate(copied(list(rows)))


def copied(rows: list[Any]) -> list[Any]:
    """Return a deep copy of rows for a collator that is tried, since it may modify its input.

    A row is often a view of a tensor of all rows. `copy.deepcopy` would copy the whole of that tensor for each row. What
    cannot be copied, such as an open file, is in both.
    """
    memo = {id(value): value.clone() for value in _tensors_in(rows, set()) if _is_part(value)}
    try:
        return copy.deepcopy(rows, dict(memo))
    except TypeError:
        return [_copied_as_far_as_possible(row, memo) for row in rows]


def _copied_as_far_as_possible(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, MutableMapping):
        mine = copy.copy(value)
        for name, each in value.items():
            mine[name] = _copied_as_far_as_possible(each, memo)
        return mine
    if type(value) in (list, tuple):
        return type(value)(_copied_as_far_as_possible(each, memo) for each in value)
    try:
        return copy.deepcopy(value, dict(memo))
    except TypeError:
        return value


def is_dense(value: Tensor) -> bool:
    """Return whether a tensor is neither sparse nor made of tensors of other lengths."""
    return value.layout is torch.strided and not value.is_nested


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in containers and attributes of objects, each object once."""
    if isinstance(value, Tensor):
        yield value
        return
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    if inner is None and hasattr(value, "__dict__") and not isinstance(value, type):
        inner = vars(value).values()
    if inner is not None and id(value) not in seen:
        seen.add(id(value))
        for each in inner:
            yield from _tensors_in(each, seen)


def _is_part(value: Tensor) -> bool:
    """Return whether a tensor is a plain one that has a part of its memory only."""
    is_plain = type(value) is Tensor and not value.requires_grad and not vars(value)
    if not is_plain or value.layout is not torch.strided or value.is_quantized:
        return False
    return value.untyped_storage().nbytes() > value.numel() * value.element_size()


def collate_uniform_columns(examples: Sequence[Any], *, collator: Collator) -> dict[str, Any]:
    """Collate examples, and refuse those that differ in their columns or their number of choices.

    Sensitivity. Transformers' collators read columns and number of choices from the first example. A first example without
    `token_type_ids` would remove that column from all others, and one with two choices would remove the third choice.
    """
    rows = [example for example in examples if isinstance(example, Mapping)]
    _refuse_other_columns(rows)
    if len({len(choices_of(row.get(LENGTH_COLUMN, ()))) for row in rows}) > 1:
        raise Refusal(
            "choices-differ",
            "The records of train_dataset have different numbers of choices, so they cannot be collated into one tensor. "
            "Fill up records that have fewer, or give DopplerTrainer your own data_collator.",
        )
    try:
        return collator(examples)
    except (RuntimeError, ValueError) as error:
        # A tokenizer's pad also fails if no column is called input_ids.
        is_other = re.match("You should supply an encoding", str(error)) and _not_padded_by_tokenizers(rows)
        if not is_other and not re.match(r"stack expects each|each element in list|Unable to create tensor", str(error)):
            raise
        raise _text_columns(rows) or _unequal(rows) from None


def collate_without(examples: Sequence[Any], *, collator: Collator, column: str) -> dict[str, Any]:
    """Collate examples without a column, where they have it."""
    is_named = [isinstance(example, Mapping) and column in example for example in examples]
    if any(is_named):
        rows = zip(examples, is_named, strict=True)
        examples = [{name: row[name] for name in row if name != column} if named else row for row, named in rows]
    return collator(examples)


def collate_one_by_one(examples: Sequence[Any], *, collator: Collator) -> dict[str, Any]:
    """Collate each example by itself, then join the rows.

    Sensitivity. Transformers' default collator also reads from the first example whether labels are whole numbers: a first
    label of 3 would truncate 2.5 to 2 for all others.
    """
    for example in examples:
        # Transformers also accepts objects with attributes, but the attributes of a tensor are not its values.
        if not isinstance(example, Mapping) and (isinstance(example, Tensor) or not hasattr(example, "__dict__")):
            raise Refusal(
                "not-a-mapping",
                "The default collator needs records that map names to values; train_dataset has a record of type "
                f"{type(example).__name__}. Make a table, such as datasets.Dataset.from_dict({{'pixel_values': images, "
                "'labels': labels}), or give DopplerTrainer a data_collator.",
            )
    given = [example for example in examples if isinstance(example, Mapping)]
    try:
        rows = [collator([example]) for example in examples]
    except ValueError as error:
        if not str(error).startswith("expected sequence of length"):  # the texts of one record differ, as choices do
            raise
        raise _unequal(given) from None
    _refuse_other_columns(rows)
    if any(len({each[name].shape[1:] for each in rows}) > 1 for name in rows[0]):
        raise _unequal(given)
    return {name: _joined([row[name] for row in rows]) for name in rows[0]}


def _text_columns(rows: Sequence[Mapping[str, Any]]) -> Refusal | None:
    """Return the error for rows with columns of text, which cannot become tensors; None if there are no such columns."""
    names = [str(name) for name, value in (rows[0].items() if rows else ()) if isinstance(value, str)]
    if not names:
        return None
    return Refusal(
        "text-columns",
        f"The data_collator cannot make tensors of text, which is in the column{'s' * (len(names) > 1)} {', '.join(names)}. "
        f"Remove what the model does not need: train_dataset.remove_columns({names!r}). If it is a label, make numbers of "
        "it.",
    )


def _lengths_differ(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return len({_length(row.get(name)) for row in rows}) > 1


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:  # a number, also as a tensor or an array
        return None


def _not_padded_by_tokenizers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of lists of different lengths that are neither labels nor made by a tokenizer."""
    return [
        repr(name)
        for name, value in (rows[0].items() if rows else ())
        if name not in (*_PADDED_BY_TOKENIZERS, *LABELS) and np.ndim(value) == 1 and _lengths_differ(rows, name)
    ]


def _unequal(rows: Sequence[Mapping[str, Any]]) -> Refusal:
    first: Mapping[str, Any] = rows[0] if rows else {}
    tokens = first.get(LENGTH_COLUMN)
    if tokens is not None and choices_of(tokens) is tokens:
        mend = "For multiple choice pass data_collator=DataCollatorForMultipleChoice(tokenizer)"
    elif tokens is not None and any(_lengths_differ(rows, name) for name in LABELS):
        mend = (
            "Pass data_collator=DataCollatorForSeq2Seq(tokenizer, model=model) if the labels are tokens, or "
            "DataCollatorForTokenClassification(tokenizer) if they are classes of tokens"
        )
    else:
        mend = (
            "Give images one size in a transform or by an image_processor. For texts set processing_class=tokenizer, or "
            "data_collator=DataCollatorWithPadding(tokenizer)"
        )
    if others := _not_padded_by_tokenizers(rows):
        mend = (
            f"A tokenizer does not pad the column{'s' * (len(others) > 1)} {', '.join(others)}. Pass a data_collator of "
            f"your own that does, such as the one in {page('guides/own-loss', 'rows-with-two-texts')}"
        )
    # The message names no record and no size, as torch's own error does, because messages end up in logs.
    return Refusal(
        "not-padded",
        f"The records of a batch have different sizes, and the data_collator neither pads nor resizes them. {mend}.",
    )


def _refuse_other_columns(rows: Iterable[Mapping[str, Any]]) -> None:
    if len({frozenset(row) for row in rows}) > 1:
        raise Refusal(
            "columns-differ",
            "All records of train_dataset must have the same columns, but in some a value is missing. Fill it in, or give "
            "DopplerTrainer your own data_collator.",
        )


def _joined(rows: Sequence[Tensor]) -> Tensor:
    # As float64, whole numbers stay exact if other records have fractions.
    is_mixed = len({row.is_floating_point() for row in rows}) > 1
    return torch.cat([row.double() for row in rows] if is_mixed else list(rows))
